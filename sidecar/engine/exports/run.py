"""The state of one export: the request, what was known when it began, and the receipt at its end."""

from __future__ import annotations

import asyncio
import posixpath
import time
from collections.abc import Iterator, Mapping
from dataclasses import field, replace

from sidecar.engine.archives.notes import TarballNotes
from sidecar.engine.sandbox.dialogue import redact, report_databases, report_dropped, report_findings, report_skipped
from sidecar.engine.sandbox.identity import describe_other_home
from sidecar.engine.sandbox.presence import SandboxRun
from sidecar.format.index import Entry, Index
from sidecar.format.protocol import ExportAnswer, Identity
from sidecar.format.roots import get_root, get_stem
from sidecar.host.text import format_count
from sidecar.host.values import dataclass
from sidecar.layouts import Layout
from sidecar.policy.limits import CREDENTIALS
from sidecar.policy.privacy import Privacy
from sidecar.ports import SandboxStatus
from sidecar.program.notes import OTHER_MEMORY, UNKNOWN_LINEAGE
from sidecar.receipts import Accepted, ExportOutcome, ExportReceipt, Reason, Scrubbed, Skip
from sidecar.store.manifest import Manifest, count_scrubbed
from sidecar.store.recall import Recalled
from sidecar.store.repository import HeadState, Survey

Base = tuple[Manifest, dict[str, Entry], list[Index]]
"""The base of an export: its manifest, its entries, and the indexes of its packs, from which the entries are put
together."""
LONGEST_LABEL = 1000
MIX_UPS = (UNKNOWN_LINEAGE, OTHER_MEMORY)
"""Repetition never makes these guards give way: only a person knows which store and which memory is meant."""
CREDENTIALS_LEFT = "Credentials found: {count:,}. They are part of this memory; `findings` says where they are."
LEFT_OUT = "Left out: {files} with {bytes}, as there is more than the limits allow."
NOT_TAKEN = (
    "Databases that the layouts do not know were seen and not taken: {paths}. `databases` in the config's [layouts.…] adds"
    " one."
)


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
    trial: bool = False
    """Only look: nothing is stored, and the sandbox's notes stay as they are."""


@dataclass(slots=True, kw_only=True)
class ExportRun(SandboxRun):
    """The state of one export, from the first request to the receipt."""

    request: ExportRequest
    state: HeadState
    """The head as it was read; after it was moved, the new one."""
    survey: Survey
    known: list[str]
    gone: list[str]
    """Declined snapshots that are not in the store any more. A sandbox may still have their contents."""
    presence: SandboxStatus
    answer: ExportAnswer | None = None
    """What the sandbox answered, once all that it brought was checked."""
    ahead: asyncio.Task[Base] | None = None
    """The task that reads the head while the sandbox works."""
    unused: set[str] = field(default_factory=set)
    """Keys of objects that are already in the store and that no manifest names yet. They are deleted at the end."""
    replaces: Manifest | None = None
    """The manifest of the head, if it can be read."""
    pinned: bool = False
    """The head was pinned because this export is to replace it although guards objected."""

    @property
    def recalled(self) -> Recalled:
        """What this process knows of the memory's packs."""
        return self.engine.repository.recall_by(self.survey)

    @property
    def allowed(self) -> set[str]:
        """The guards that the request or the settings allow to be ignored."""
        return {*self.request.allow, *self.engine.guards.allow}

    @property
    def privacy(self) -> Privacy:
        """The privacy policy. If the guard for credentials is allowed, credentials are only warned about."""
        return self.engine.privacy.soften() if CREDENTIALS in self.allowed else self.engine.privacy

    @property
    def identity(self) -> Identity:
        """What the sandbox is to record in its notes about this memory."""
        free, allowed = self.request.force or self.request.adopt, self.allowed
        # The sandbox would record that its files are this memory now, whoever they belonged to.
        unseen = {OTHER_MEMORY} if self.engine.view is not None else set()
        return replace(
            self.build_identity(self.state.store_id),
            heads=[snapshot for snapshot in self.known if self.state.head and self.state.head.was_head(snapshot)],
            allow=[code for code in MIX_UPS if (free or code in allowed) and code not in unseen],
        )

    def label(self, answer: ExportAnswer) -> str:
        """Return the label of the snapshot: the one asked for, else that of the reader whose sandbox it is."""
        noted = answer.notes
        theirs = noted.label if answer.reader and noted is not None and noted.memory == self.request.memory else ""
        return self.request.label or redact(theirs)[:LONGEST_LABEL]

    def parent(self, answer: ExportAnswer) -> str:
        """Return the id of the snapshot that the sandbox's memory is based on; empty if there is none."""
        return self.state.snapshot if self.request.adopt else (answer.lineage or [""])[0]

    def receipt(
        self,
        outcome: ExportOutcome,
        manifest: Manifest | None = None,
        reason: Reason | None = None,
        added: int = 0,
        accepted: Accepted | None = None,
    ) -> ExportReceipt:
        """Build the receipt. Texts that come from the sandbox are redacted."""
        answer = self.answer
        skipped = report_skipped(answer.skipped) if answer else []
        if answer and answer.skipped_more:
            skipped.append(Skip(path="…", reason=f"{answer.skipped_more} more"))
        warnings = [*self.warnings, *(self._describe_answer(answer, outcome) if answer else [])]
        if accepted is not None:
            warnings.insert(0, accepted.words)
        return ExportReceipt(
            outcome=outcome,
            memory=self.request.memory,
            snapshot=manifest.snapshot if manifest else None,
            parent=(manifest.parent or None) if manifest else None,
            head=self.state.snapshot or None,
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
            label=self.label(answer) if answer else self.request.label,
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

    def _describe_answer(self, answer: ExportAnswer, outcome: ExportOutcome) -> Iterator[str]:
        """Yield the warnings in the sandbox's answer, and those that follow from it."""
        yield from map(redact, answer.warnings)
        if answer.dropped_files:
            files, size = format_count(answer.dropped_files, "file"), format_count(answer.dropped_bytes, "byte")
            yield LEFT_OUT.format(files=files, bytes=size)
        if answer.found.get("warned"):
            yield CREDENTIALS_LEFT.format(count=answer.found["warned"])
        if answer.databases_not_taken:
            yield from _describe_databases_not_taken(answer, self.engine.layouts)
        if outcome in (ExportOutcome.REJECTED, ExportOutcome.DIVERGED):
            yield from describe_other_home(self.sandbox, answer, self.replaces)


def _describe_databases_not_taken(answer: ExportAnswer, layouts: Mapping[str, Layout]) -> list[str]:
    """Return a warning about databases in agents' folders that no layout covers. Databases in a project's own folder
    belong to the project and are not mentioned."""
    projects = {root.name for layout in layouts.values() for root in layout.roots if root.project}
    paths = [redact(path) for path in answer.databases_not_taken if get_stem(get_root(path), projects) not in projects]
    return [NOT_TAKEN.format(paths=", ".join(paths))] if paths else []


def describe_moved_projects(run: ExportRun, new: Manifest, head: Manifest | None) -> list[str]:
    """Return a warning for each project whose path differs from its path in the head, since it may be a different
    project. A project that was named in the request and has kept its folder name is taken as moved, without a warning.
    """
    named = run.request.projects is not None
    projects = {name for name, layout in run.engine.layouts.items() if any(root.project for root in layout.roots)}
    places = {root.name: root.hint for root in head.roots if root.layout in projects} if head else {}
    return [
        f"{root.name} is {root.hint} now and was {places[root.name]} in the head; if these are two projects, name both."
        for root in new.roots
        if places.get(root.name, root.hint) != root.hint
        and not (named and posixpath.basename(places[root.name]) == posixpath.basename(root.hint))
    ]
