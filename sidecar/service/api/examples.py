"""An example of every request and answer for the OpenAPI document, built from the real types."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sidecar import __version__
from sidecar.models import requests
from sidecar.models.answers import (
    Acceptance,
    Attached,
    Attachment,
    Change,
    Collected,
    Counts,
    Declined,
    Deleted,
    Entry,
    Event,
    ExportOperation,
    Fate,
    Forgotten,
    Forked,
    Found,
    Head,
    Health,
    Hit,
    HookAnswer,
    Memories,
    Memory,
    Moved,
    Overview,
    Pinned,
    Problem,
    RestoreOperation,
    Restores,
    SandboxRestore,
    SandboxStanding,
    Size,
    Snapshot,
    SnapshotContents,
    Snapshots,
)
from sidecar.models.records import (
    Blame,
    BlamedRecord,
    Brief,
    BriefItem,
    Comparison,
    FileChange,
    History,
    HistoryEntry,
    Origin,
    RecordChange,
    RecordRow,
    Records,
    SkippedItem,
)
from sidecar.receipts import (
    DatabaseReport,
    ExportOutcome,
    ExportReceipt,
    Finding,
    Reason,
    RestoreOutcome,
    RestoreReceipt,
    Scrubbed,
    SetAside,
    Skip,
)

MEMORY, SANDBOX, CONVERSATION = "acme/agent-7", "e2b:i3x9k2", "conversation-42"
OLD, NEW = "20261116T083030845Z-318faecc", "20261116T101502117Z-5d0c1a77"
MADE = "2026-11-16T10:15:02.117+00:00"
INSTANCE = "conductor-1f0c2a9b7d3e"
DATABASE = "claude-mem/claude-mem.db"

SNAPSHOT = Snapshot(
    snapshot=NEW,
    standing="head",
    created=MADE,
    parent=OLD,
    conversation=CONVERSATION,
    sandbox=SANDBOX,
    origin="export",
    files=12,
    bytes=55_312_384,
    packs=2,
    changes={"observation": Counts(added=7), "section": Counts(changed=2)},
)
RECORD = RecordRow(
    id="3f2a91bc04d7e856",
    kind="observation",
    key=f"{DATABASE}#s-1,9c1e,1790000000000",
    title="The flaky test waits for a port",
    text="It takes any free one now.",
    project="app",
    session="s-1",
    at="2026-09-21T14:13:20+00:00",
    path=DATABASE,
)
ORIGIN = Origin(snapshot=NEW, created=MADE, conversation=CONVERSATION, sandbox=SANDBOX)
EXPORTED = ExportReceipt(
    outcome=ExportOutcome.COMMITTED,
    memory=MEMORY,
    snapshot=NEW,
    parent=OLD,
    head=NEW,
    sandbox=SANDBOX,
    kind="delta",
    files=12,
    bytes=55_312_384,
    packed_bytes=391_204,
    transferred_bytes=412_877,
    round_trips=1,
    trips={"command": 1},
    duration_ms=640,
    databases=[DatabaseReport(path=DATABASE, method="online-backup", check="ok")],
    skipped=[Skip(path="claude-mem/worker.pid", reason="never leaves a sandbox")],
    findings=[Finding(path="project/MEMORY.md", name="private", action="removed", line=12)],
    found={"removed": 1},
    scrubbed=Scrubbed(private=3),
    conversation=CONVERSATION,
)
RESTORED = RestoreReceipt(
    outcome=RestoreOutcome.COMPLETE,
    memory=MEMORY,
    snapshot=NEW,
    parent=OLD,
    sandbox=SANDBOX,
    files=12,
    bytes=55_312_384,
    transferred_bytes=17_204_113,
    round_trips=2,
    trips={"upload": 1, "command": 1},
    duration_ms=1_180,
    databases=[DatabaseReport(path=DATABASE, method="staged", check="ok")],
    set_aside=SetAside(
        path="/home/user/.cache/memory-sidecar/set-aside/20261116T101530.204118Z-20261116T101502117Z-5d0c1a77",
        files=2,
        bytes=41_216,
    ),
)
ATTACHMENT = Attachment(
    memory=MEMORY,
    sandbox=SANDBOX,
    conversation=CONVERSATION,
    lasting=False,
    attached=MADE,
    changed=MADE,
    owner=INSTANCE,
    saved=MADE,
    snapshot=NEW,
)
OPERATION = ExportOperation(
    id="5b1c7e0d9a3f4e2b8c6d1f0a",
    memory=MEMORY,
    sandbox=SANDBOX,
    state="running",
    doing="storing",
    done_bytes=131_072,
    total_bytes=391_204,
    created=1_794_824_102.1,
)
ENDED = RestoreOperation(
    id="0c9d8e7f6a5b4c3d2e1f0a9b",
    memory=MEMORY,
    sandbox=SANDBOX,
    state="done",
    created=1_794_824_130.2,
    finished=1_794_824_131.4,
    receipt=RESTORED,
)
ENTRY = Entry(
    path=DATABASE,
    type="file",
    mode=0o644,
    size=52_428_800,
    mtime=1_794_824_101_849_275_201,
    digest="735f0a51" * 8,
    block=4096,
    target="",
    database=True,
)
FATES = [
    Fate(snapshot=NEW, keep=True, reason="head", created=MADE, label="", pinned=False, bytes=391_204),
    Fate(snapshot=OLD, keep=False, reason="no rule keeps it", created=MADE, label="", pinned=False, bytes=0),
]
HIT = Hit(
    memory=MEMORY,
    kind="observation",
    key="claude-mem/117",
    title="The user prefers short answers",
    snippet="asked twice for more **brevity** in summaries",
    project="app",
    session="0b5a3c1e-77aa-4d52-9f3e-1c2d3e4f5a6b",
    at=MADE,
    path=DATABASE,
    snapshot=NEW,
    indexed=MADE,
    score=0.06079,
)
PROBLEM = Problem(
    status=410,
    title="Sandbox gone",
    detail="The sandbox e2b:i3x9k2 is gone.",
    code="sandbox-gone",
    hint="Nothing was exported; the head is as it was. Restore into a new sandbox.",
)
EVENT = Event(
    number=7,
    type="sandbox.lost",
    at=MADE,
    memory=MEMORY,
    sandbox=SANDBOX,
    details={
        "conversation": CONVERSATION,
        "last_saved": MADE,
        "snapshot": NEW,
        "unsaved_seconds": 212.0,
        "error": {
            "code": PROBLEM.code,
            "message": PROBLEM.detail,
            "hint": PROBLEM.hint,
            "retryable": PROBLEM.retryable,
        },
    },
)

GONE = Problem(
    status=410,
    title="Sandbox gone",
    detail="The sandbox e2b:i9x4c2v7b1n8m3q6w5e0r is gone.",
    code="sandbox-gone",
    hint="Start a new sandbox.",
)

BRIEF_TEXT = """<!-- memory-sidecar brief -->
# What to read first: `acme/agent-7`

From snapshot `20261116T083030845Z-318faecc`, made 2026-11-16 08:30 UTC. Each part says where it is from, …

## `project/SESSION-STATE.md` · hot · 18 minutes old (2026-11-16 08:12) · conversation `c7`
```text
# Current Task
Release 1.4 waits for the payment tests.
```
"""
EXAMPLES: dict[str, Any] = {
    type(example).__name__: example
    for example in (
        requests.ExportBody(sandbox=SANDBOX, conversation=CONVERSATION),
        requests.RestoreBody(sandbox=SANDBOX, conversation=CONVERSATION),
        requests.ForkBody(memory="acme/agent-8"),
        requests.RollbackBody(snapshot=OLD),
        requests.AcceptBody(snapshot=NEW),
        requests.AttachBody(sandbox=SANDBOX, checkpoint_every=300, restore=True),
        requests.MoveBody(to="daytona:my-snapshot"),
        requests.StartBody(on="e2b:base", metadata={"team": "docs"}, timeout=3600),
        EXPORTED,
        RESTORED,
        Restores(
            memory=MEMORY,
            complete=False,
            sandboxes=[
                SandboxRestore(sandbox=SANDBOX, receipt=RESTORED),
                SandboxRestore(sandbox="e2b:i9x4c2v7b1n8m3q6w5e0r", problem=GONE),
            ],
        ),
        SandboxRestore(sandbox=SANDBOX, receipt=RESTORED),
        OPERATION,
        ENDED,
        Attached(attachment=ATTACHMENT, restored=RESTORED),
        Moved(
            attachment=ATTACHMENT,
            restored=RESTORED,
            exported=EXPORTED,
            former="e2b:i9x4c2v7b1n8m3q6w5e0r",
            former_state="ended",
        ),
        Overview(attachments=[ATTACHMENT], store="s3://memories", service=INSTANCE),
        HookAnswer(accepted=True),
        SandboxStanding(sandbox=SANDBOX, in_place=True, memory="conductor", state="open", snapshot=NEW),
        Memories(
            store="s3://memories",
            memories=[
                Memory(memory=MEMORY, head=NEW, snapshots=2, created=MADE, files=12, bytes=55_312_384),
            ],
        ),
        Memory(memory=MEMORY, head=NEW, snapshots=2, created=MADE, files=12, bytes=55_312_384),
        Snapshots(memory=MEMORY, head=NEW, snapshots=[SNAPSHOT]),
        SnapshotContents(**asdict(SNAPSHOT), memory=MEMORY, entries=[ENTRY]),
        Comparison(
            memory=MEMORY,
            from_=OLD,
            to=NEW,
            added=[Size(path="project/memory/2026-11-16.md", size=2_113)],
            removed=[],
            changed=[Change(path=DATABASE, old_size=52_166_656, new_size=52_428_800)],
            counts={"observation": Counts(added=1)},
            records=[RecordChange(**asdict(RECORD), change="added")],
            files=[FileChange(change="changed", path="claude-mem/settings.json", old_size=120, new_size=131)],
        ),
        Records(memory=MEMORY, snapshot=NEW, records=[RECORD]),
        History(
            memory=MEMORY,
            what="project/MEMORY.md",
            versions=[HistoryEntry(origin=ORIGIN, change="changed", size=2_113)],
        ),
        Blame(memory=MEMORY, snapshot=NEW, records=[BlamedRecord(**asdict(RECORD), origin=ORIGIN, first=ORIGIN)]),
        Brief(
            memory=MEMORY,
            snapshot=NEW,
            created="2026-11-16T08:30:30.845000+00:00",
            tokens=251,
            budget=2000,
            text=BRIEF_TEXT,
            items=[
                BriefItem(
                    path="project/SESSION-STATE.md",
                    kind="section",
                    title="Current Task",
                    text="# Current Task\nRelease 1.4 waits for the payment tests.",
                    tier="hot",
                    layout="three-tier",
                    at="2026-11-16T08:12:00+00:00",
                    age=1110,
                    snapshot=NEW,
                    conversation="c7",
                    tokens=63,
                )
            ],
            skipped=[SkippedItem(path="project/MEMORY.md", title="Everything", tokens=9_400)],
        ),
        Forked(memory="acme/agent-8", snapshot=NEW, origin=f"fork of {MEMORY} at {NEW}"),
        Head(memory=MEMORY, head=OLD, previous=NEW),
        Acceptance(
            memory=MEMORY,
            head=NEW,
            previous=OLD,
            standing="rejected",
            reason=Reason(code="shrunk", message="It has 1,204,224 bytes; the head has 52,166,656."),
            pinned=True,
            by="kim",
            because="The transcripts were cleared on purpose.",
        ),
        Declined(memory=MEMORY, snapshot=NEW, head=OLD, by="kim", because="It contradicts the handbook."),
        requests.DeclineBody(snapshot=NEW, because="It contradicts the handbook."),
        Pinned(memory=MEMORY, snapshot=OLD, pinned=True),
        requests.ForgetBody(dry_run=True),
        Forgotten(
            memory=MEMORY,
            dry_run=True,
            kept=1,
            forgotten=1,
            snapshots=FATES,
            collected=Collected(objects=2, bytes=391_204),
        ),
        Deleted(memory=MEMORY, removed=9),
        Found(query="brevity", hits=[HIT]),
        Health(status="ok", version=__version__, checks={"store": "ok", "scheduler": "ok", "intake": "ok"}),
        PROBLEM,
        EVENT,
    )
}
"""By the name of the schema."""


def add_examples(schemas: dict[str, Any]) -> None:
    """Add each example to its schema."""
    for name, example in EXAMPLES.items():
        schemas[name]["examples"] = [example.as_dict() if hasattr(example, "as_dict") else asdict(example)]
