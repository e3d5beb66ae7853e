"""The state of one restore: the request, what the sandbox has to know about the store, and the receipt at its end."""

from __future__ import annotations

import secrets
import time
from dataclasses import field, replace

from sidecar.engine.restores.choice import LATEST
from sidecar.engine.sandbox.dialogue import redact, report_aside, report_databases, report_skipped, report_withheld
from sidecar.engine.sandbox.identity import describe_other_home
from sidecar.engine.sandbox.presence import SandboxRun
from sidecar.format.protocol import RestoreAnswer
from sidecar.host.values import dataclass
from sidecar.ids import build_memory_key
from sidecar.ports import Sandbox
from sidecar.receipts import Reason, RestoreBrief, RestoreOutcome, RestoreReceipt, Scrubbed
from sidecar.store.manifest import Head, Manifest, count_scrubbed, describe_trimmed
from sidecar.store.repository import Survey

MOST_KNOWN = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What to restore, and how. The sandbox is passed separately."""

    memory: str
    snapshot: str = LATEST
    mode: str = "replace"
    projects: tuple[str, ...] | None = None
    force: bool = False
    must_exist: bool = False
    """Treat a missing memory as an error, not as a first start."""
    conversation: str = ""
    discard: bool = False
    """Replace files that no snapshot has, and files that came with the sandbox, without keeping them."""
    read_only: bool = False
    """Later exports of this sandbox are stored beside the head."""
    only: tuple[str, ...] = ()
    """Restore only this part: patterns of paths, ``layout:NAME`` or ``tier:NAME``. It is always read only."""
    label: str = ""
    """Of a reader: the label of what it exports. Empty: its sandbox's reference."""
    withhold_projects: bool | None = None
    """Leave out projects that were not named and whose folders do not exist yet; ``None``: as the settings say."""
    in_use: bool = False
    """The sandbox was in use before: ask what it has before much is uploaded to it."""
    brief: int = 0
    """How many tokens of what to read first the receipt has, at most; 0: none."""
    brief_path: str = ""
    """Where in the sandbox's home that is put too."""
    announce: bool = False
    """Somebody waits in the sandbox: say there also of a memory without snapshots that it is in place. That costs a
    command."""


@dataclass(slots=True)
class StoreFacts:
    """What the sandbox has to know about the store to report which files are in no snapshot. Sent with the restore
    request."""

    stored: dict[str, list[str]] = field(default_factory=dict)
    """The snapshots of each memory, by its key, as far as the store was read."""
    unusable: list[str] = field(default_factory=list)
    """Snapshots known to be damaged: files that only they have must be saved again."""
    heads: list[str] = field(default_factory=list)
    """The snapshots of this memory that are or were its head; and those that were declined, as nothing that grew out of
    them is ahead of it."""
    keep: list[str] = field(default_factory=list)
    """A sandbox whose newest one of ``heads`` is among these is left as it is, whatever it changed since."""
    saved: bool = False
    """Everything that can be saved is saved: the rest is set aside in the sandbox."""
    store: str = ""
    """The store's id, if it has one."""


@dataclass(frozen=True, slots=True)
class SavedFirst:
    """A snapshot that was made before the restore."""

    memory: str
    snapshot: str
    packed_bytes: int
    words: str


@dataclass(slots=True, kw_only=True)
class RestoreRun(SandboxRun):
    """The state of one restore, from the request to the receipt."""

    request: RestoreRequest
    target: Sandbox
    """The sandbox itself, whose traffic is not counted: what is exported first counts its own."""
    operation: str = field(default_factory=lambda: secrets.token_hex(8))
    part: list[str] = field(default_factory=list)
    """The patterns of the part that is restored; empty: all of it."""
    manifest: Manifest | None = None
    wanted: str = ""
    standing: StoreFacts = field(default_factory=StoreFacts)
    declined: frozenset[str] = frozenset()
    """The snapshots of this memory that a person declined."""
    saved: list[SavedFirst] = field(default_factory=list)
    brief: RestoreBrief | None = None

    @property
    def chosen(self) -> Manifest:
        """The manifest of the snapshot that is restored. Only valid once it was chosen."""
        assert self.manifest is not None
        return self.manifest

    def begin(self, manifest: Manifest, survey: Survey, keep: tuple[str, ...], head: Head | None, store: str) -> None:
        """Record what is to be restored, and what the sandbox has to know about the store."""
        self.manifest, self.snapshot = manifest, manifest.snapshot
        self.engine.progress.about(manifest.snapshot)
        known = list(dict.fromkeys([*keep, manifest.snapshot, *survey.snapshots[:MOST_KNOWN]]))
        self.standing.stored.setdefault(build_memory_key(manifest.memory), known)
        # A sandbox that goes on from a declined snapshot is not ahead of the head: it is set back.
        ends = {*keep, *self.declined}
        self.standing.heads = [one for one in known if one in ends or (head is not None and head.was_head(one))]
        self.standing.unusable = sorted(survey.damaged)
        self.standing.keep = [] if self.request.discard or self.request.mode == "seed" else list(keep)
        self.standing.store = store

    def receipt(
        self, outcome: RestoreOutcome, answer: RestoreAnswer | None = None, reason: Reason | None = None
    ) -> RestoreReceipt:
        """Build the receipt. Texts that come from the sandbox are redacted."""
        kept = answer is not None and answer.status == "kept"
        withheld = report_withheld(answer.withheld) if answer else []
        scrubbed = count_scrubbed(self.manifest) if self.manifest and not kept else Scrubbed()
        missing = [describe_trimmed(self.manifest), scrubbed.words] if self.manifest and not kept else []
        snapshot = self.manifest.snapshot if self.manifest else None
        first = next((saved for saved in self.saved if saved.memory == self.request.memory), None)
        first = first or next(iter(self.saved), None)
        return RestoreReceipt(
            outcome=outcome,
            memory=self.request.memory,
            snapshot=answer.holds if answer and kept else snapshot,
            parent=(self.manifest.parent or None) if self.manifest and not (answer and answer.holds) else None,
            sandbox=self.sandbox.ref,
            home=redact(answer.home) if answer else "",
            user=redact(answer.user) if answer else "",
            mode=self.request.mode,
            wanted=self.wanted,
            files=answer.files if answer else 0,
            bytes=answer.bytes if answer else 0,
            packed_bytes=sum(saved.packed_bytes for saved in self.saved),
            transferred_bytes=self.sandbox.transferred_bytes,
            round_trips=sum(self.sandbox.trips.values()),
            trips=self.sandbox.trips,
            duration_ms=round((time.monotonic() - self.started) * 1000),
            databases=report_databases(answer.databases) if answer else [],
            skipped=report_skipped(answer.skipped) if answer else [],
            warnings=[
                *(describe_other_home(self.sandbox, answer, self.manifest) if answer else []),
                *self.warnings,
                *(saved.words for saved in self.saved),
                *(row.words for row in withheld),
                *(map(redact, answer.warnings) if answer else []),
                *filter(None, missing),
            ],
            reason=reason,
            scrubbed=scrubbed,
            kept=kept,
            saved_first=first.snapshot if first else None,
            saved_first_memory=first.memory if first and first.memory != self.request.memory else "",
            set_aside=report_aside(answer.set_aside) if answer and answer.set_aside else None,
            read_only=self.request.read_only and outcome is RestoreOutcome.COMPLETE,
            only=list(self.request.only) if outcome is RestoreOutcome.COMPLETE else [],
            withheld=withheld,
            brief=self._report_brief(answer) if answer else None,
        )

    def _report_brief(self, answer: RestoreAnswer) -> RestoreBrief | None:
        """Return the brief for the receipt, and where it was put."""
        if self.brief is None:
            return None
        return replace(self.brief, path=self.request.brief_path if answer.brief else "")
