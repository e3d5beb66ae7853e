"""The state of one export: the request, what was known when it began, and the receipt at its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sidecar.engine.archives.notes import TarballNotes
from sidecar.engine.core import CountedSandbox, Engine
from sidecar.engine.privacy import redact, report_databases, report_dropped, report_findings, report_skipped
from sidecar.engine.sandbox.identity import MIX_UPS, build_identity, describe_other_home, find_mix_up
from sidecar.format.index import Entry, Index
from sidecar.format.protocol import ExportAnswer, Identity
from sidecar.host.sizes import format_count
from sidecar.layouts import Layout
from sidecar.ports import SandboxStatus
from sidecar.program.capture.roots import split_number
from sidecar.receipts import Accepted, ExportOutcome, ExportReceipt, Reason, Scrubbed, Skip
from sidecar.store.manifest import Manifest, count_scrubbed
from sidecar.store.repository import HeadState, Survey

Base = tuple[Manifest, dict[str, Entry], list[Index]]
"""The base of an export: its manifest, its entries, and the indexes of its packs, from which the entries are put
together."""
CREDENTIALS_LEFT = "Credentials found: {count:,}. They are part of this memory; `findings` says where they are."
LEFT_OUT = "Left out: {files} with {bytes}, as there is more than the limits allow."


NOT_TAKEN = (
    "Databases that the layouts do not know were seen and not taken: {paths}. `databases` in the config's [layouts.…] adds"
    " one."
)


def describe_databases_not_taken(answer: ExportAnswer, layouts: Mapping[str, Layout]) -> list[str]:
    """Return a warning about databases in agents' folders that no layout covers. Databases in a project's own folder
    belong to the project and are not mentioned."""
    projects = {root.name for layout in layouts.values() for root in layout.roots if root.project}
    paths = [
        redact(path)
        for path in answer.databases_not_taken
        if (root := path.split("/")[0]) not in projects and split_number(root)[0] not in projects
    ]
    return [NOT_TAKEN.format(paths=", ".join(paths))] if paths else []


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What to export, and how. The sandbox is passed separately."""

    memory: str
    layouts: tuple[str, ...] = ()
    projects: tuple[str, ...] | None = None
    conversation: str = ""
    label: str = ""
    force: bool = False
    """Move the head regardless of the guards and of what the sandbox is based on."""
    allow: tuple[str, ...] = ()
    """Guards to ignore, by the code of their reason."""
    origin: str = "export"
    beside: bool = False
    """Store the snapshot beside the head, whatever the sandbox is based on."""
    adopt: bool = False
    """The sandbox is a folder of the sidecar's own (an import), not an agent's: it counts as based on the head."""
    noted: TarballNotes | None = None
    """What the comments in an imported tarball say, besides its files."""
    snapshot: str = ""
    """The id for the new snapshot, if the caller has to know it beforehand."""


@dataclass(slots=True)
class ExportRun:
    """The state of one export, from the first request to the receipt."""

    engine: Engine
    sandbox: CountedSandbox
    request: ExportRequest
    started: float
    state: HeadState
    survey: Survey
    known: list[str]
    snapshot: str
    presence: SandboxStatus
    warnings: list[str] = field(default_factory=list)
    ahead: asyncio.Task[Base] | None = None
    """The task that reads the head while the sandbox works."""
    unclaimed: set[str] = field(default_factory=set)
    """Keys of objects that are already in the store and that no manifest names yet. They are deleted at the end."""
    replaces: Manifest | None = None
    """The manifest of the head, if it can be read."""
    pinned: bool = False
    """The head was pinned because this export is to replace it although guards objected."""

    def parent(self, answer: ExportAnswer) -> str:
        """Return the id of the snapshot that the sandbox's memory is based on; empty if there is none."""
        return self.state.snapshot if self.request.adopt else (answer.lineage or [""])[0]

    async def continues_head(self, answer: ExportAnswer) -> bool:
        """Whether the sandbox's memory is based on the present head, or counts as such.

        It is if the sandbox was last restored from the head or exported to it. It also is if its last export never
        became the head but the one before did: that last export was cut short, or lost a race against another export of
        the same sandbox.
        """
        if self.request.beside:
            return False
        if self.request.force or self.request.adopt:
            return True
        if answer.reader:
            return False
        origin, head = self.parent(answer), self.state.snapshot
        if self.state.head is None and not self.state.problem:
            return bool(origin) or not await self.engine.repository.has_eligible(
                self.request.memory, self.survey.snapshots
            )
        if self.state.head is None:
            return False
        if origin == head or (head in answer.lineage and not self.state.head.was_head(origin)):
            return True
        # A damaged head cannot be restored, so no sandbox can be based on it: one that is based on an earlier head may
        # replace it.
        return head in self.survey.damaged and self.state.head.was_head(origin)

    @property
    def identity(self) -> Identity:
        """What the sandbox is to record in its notes about this memory."""
        allowed = {*self.request.allow, *self.engine.guards.allow}
        free = self.request.force or self.request.adopt
        return replace(
            build_identity(self.sandbox, self.request, self.state.store_id),
            heads=[snapshot for snapshot in self.known if self.state.head and self.state.head.was_head(snapshot)],
            allow=[code for code in MIX_UPS if free or code in allowed],
        )

    def find_mix_up(self, answer: ExportAnswer) -> Reason | None:
        """Return the reason why this export would continue a memory of another store, or another memory; ``None`` if it
        would not or that is allowed."""
        reason = find_mix_up(self.identity, answer, self.engine.repository.store.url)
        return None if reason is None or reason.code in self.identity.allow else reason

    def receipt(
        self,
        outcome: ExportOutcome,
        state: HeadState,
        answer: ExportAnswer | None = None,
        manifest: Manifest | None = None,
        reason: Reason | None = None,
        added: int = 0,
        accepted: Accepted | None = None,
    ) -> ExportReceipt:
        """Build the receipt. Texts that come from the sandbox are redacted."""
        skipped = report_skipped(answer.skipped) if answer else []
        if answer and answer.skipped_more:
            skipped.append(Skip(path="…", reason=f"{answer.skipped_more} more"))
        warnings = [*self.warnings, *(map(redact, answer.warnings) if answer else [])]
        if answer and answer.dropped_files:
            files, size = format_count(answer.dropped_files, "file"), format_count(answer.dropped_bytes, "byte")
            warnings.append(LEFT_OUT.format(files=files, bytes=size))
        if answer and answer.found.get("warned"):
            warnings.append(CREDENTIALS_LEFT.format(count=answer.found["warned"]))
        if answer and answer.databases_not_taken:
            warnings += describe_databases_not_taken(answer, self.engine.layouts)
        if answer and outcome in (ExportOutcome.REJECTED, ExportOutcome.DIVERGED):
            warnings += describe_other_home(self.sandbox, answer, self.replaces)
        if accepted is not None:
            warnings.insert(0, accepted.words)
        return ExportReceipt(
            outcome=outcome,
            memory=self.request.memory,
            snapshot=manifest.snapshot if manifest else None,
            parent=(manifest.parent or None) if manifest else None,
            head=state.snapshot or None,
            sandbox=self.sandbox.ref,
            home=redact(answer.home) if answer else "",
            user=redact(answer.user) if answer else "",
            kind=answer.kind if answer and added else "",
            files=manifest.files if manifest else 0,
            bytes=manifest.bytes if manifest else 0,
            packed_bytes=added,
            transferred_bytes=self.sandbox.transferred_bytes,
            round_trips=sum(self.sandbox.trips.values()),
            trips=self.sandbox.trips,
            duration_ms=round((time.monotonic() - self.started) * 1000),
            databases=report_databases(answer.databases) if answer else [],
            skipped=skipped,
            warnings=warnings,
            reason=reason,
            conversation=self.request.conversation,
            label=self.request.label,
            dropped=report_dropped(answer.dropped) if answer else [],
            dropped_more=answer.dropped_more if answer else 0,
            dropped_files=answer.dropped_files if answer else 0,
            dropped_bytes=answer.dropped_bytes if answer else 0,
            findings=report_findings(answer.findings) if answer else [],
            findings_more=answer.findings_more if answer else 0,
            found=dict(answer.found) if answer else {},
            scrubbed=count_scrubbed(manifest) if manifest else Scrubbed(),
            accepted=accepted,
            not_taken=dict(answer.not_taken) if answer else {},
            databases_not_taken=[redact(path) for path in answer.databases_not_taken] if answer else [],
        )
