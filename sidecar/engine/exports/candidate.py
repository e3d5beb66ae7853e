"""The snapshot that an export would make, as files on this machine, beside the one that it would replace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sidecar.engine.comparison import describe
from sidecar.engine.exports.arrival import CheckedExport
from sidecar.engine.exports.checks import run_checks
from sidecar.engine.exports.run import ExportRun
from sidecar.errors import SnapshotError, StoreError, UntrustedSandbox
from sidecar.format.index import FILE, Entry
from sidecar.host.files import SpoolFull
from sidecar.host.text import make_printable
from sidecar.host.values import dataclass
from sidecar.host.work import run_in_thread
from sidecar.models.counts import describe_counts
from sidecar.models.records import Comparison
from sidecar.policy.review import ExportCheck
from sidecar.receipts import Reason
from sidecar.records.comparison import Side, Version, list_needed, make_side
from sidecar.records.workspace import Workspace
from sidecar.store.manifest import Manifest

MOST_READ = 256 << 20
"""If more bytes have to be read to tell what changed, a review is asked for without it."""
MOST_LINES = 20
LONGEST_TITLE = 120
SIGNS = {"added": "+", "changed": "~", "removed": "-"}
WAITS = "It waits for a review"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A snapshot that may become the head, and the one before. Files are read only once ``stage`` is called."""

    run: ExportRun
    checked: CheckedExport
    manifest: Manifest
    earlier: Manifest | None
    """The snapshot that it is compared with; ``None``: with nothing."""
    spaces: tuple[Workspace, Workspace]
    old: Side
    new: Side
    wanted: set[str]
    """The paths that are read; filled by ``stage``."""

    @property
    def names(self) -> tuple[str, str]:
        """The ids of both snapshots; "" for none."""
        return self.earlier.snapshot if self.earlier else "", self.manifest.snapshot

    def list_compared(self) -> set[str]:
        """Return the paths that have to be read to tell what differs."""
        return list_needed(self.old, self.new)

    def list_files(self) -> set[str]:
        """Return the paths of all its files."""
        return {path for path, entry in self.new.entries.items() if entry.type == FILE}

    def measure(self, paths: set[str]) -> int:
        """Return how many bytes these files have in both snapshots."""
        return sum(side.entries[path].size for side in (self.old, self.new) for path in paths & side.entries.keys())

    async def stage(self, paths: set[str]) -> tuple[Version, Version]:
        """Put these files of both snapshots on this machine. Raise a ``SnapshotError`` or ``StoreError``."""
        self.wanted.update(paths)
        (first, second), checked, base = self.spaces, self.checked, self.checked.base
        old_files = await first.advance(self.earlier) if self.earlier is not None else {}
        if checked.arrived is None:
            new_files = await second.advance(self.manifest)
        else:
            if checked.received_pack.pack.index.kind == "full":
                base = None
            same = base is not None and self.earlier is not None and base.snapshot == self.earlier.snapshot
            space = first if same else second
            if base is not None and not same:
                await space.advance(base)
            new_files = await space.apply_pack(self.manifest, checked.entries, checked.received_pack.pack)
        return Version(self.old.entries, self.old.units, old_files), Version(
            self.new.entries, self.new.units, new_files
        )


async def read_candidate(
    run: ExportRun, checked: CheckedExport, manifest: Manifest, earlier: Manifest | None
) -> Candidate:
    """Return what arrived, or if nothing did the stored snapshot ``manifest``, beside an earlier one."""
    wanted: set[str] = set()
    store, layouts = run.engine.repository.store, run.engine.layouts
    first, second = (Workspace(store, manifest.memory, run.scratch, wanted.__contains__) for _ in range(2))
    before: Mapping[str, Entry] = await first.read_entries(earlier) if earlier is not None else {}
    after = checked.entries if checked.arrived is not None else await second.read_entries(manifest)
    old, new = make_side(earlier or manifest, before, layouts), make_side(manifest, after, layouts)
    return Candidate(run, checked, manifest, earlier, (first, second), old, new, wanted)


async def examine_candidate(
    run: ExportRun, checked: CheckedExport, sides: tuple[Manifest, Manifest | None], checks: Sequence[ExportCheck]
) -> tuple[Reason | None, str]:
    """Run the checks on a snapshot (the first of ``sides``), beside the head that it would replace. Return why one failed,
    if one did; and what the snapshot changes, for the person who reviews it.

    Raise a ``SnapshotError`` or ``StoreError`` if there are checks and it cannot be read.
    """
    if not checks:
        return None, await _describe(run, checked, sides)
    run.engine.progress.step("checking")
    candidate = await read_candidate(run, checked, *sides)
    before, after = await candidate.stage(candidate.list_compared() | candidate.list_files())
    changes = await run_in_thread(describe, candidate.manifest.memory, candidate.names, before, after, False)
    return await run_checks(checks, after, changes), _tell(changes)


async def _describe(run: ExportRun, checked: CheckedExport, sides: tuple[Manifest, Manifest | None]) -> str:
    """Return what a snapshot changes. It never fails an export."""
    try:
        candidate = await read_candidate(run, checked, *sides)
        paths = candidate.list_compared()
        if candidate.measure(paths) > MOST_READ:
            return f"{WAITS}. It is too large to say here what it changes: `diff` does."
        before, after = await candidate.stage(paths)
        return _tell(await run_in_thread(describe, sides[0].memory, candidate.names, before, after, False))
    except (SnapshotError, StoreError, UntrustedSandbox, SpoolFull) as problem:
        return f"{WAITS}. What it changes could not be read: {make_printable(problem.message)}"


def _tell(changes: Comparison) -> str:
    """Return what a snapshot changes: a sentence with counts, then a few lines, escaped."""
    lines = [f"{SIGNS[row.change]} {row.kind}: {_shorten(row.title)}" for row in changes.records]
    lines += [f"{SIGNS[file.change]} file: {_shorten(file.path)}" for file in changes.files]
    more = changes.more + len(lines) - MOST_LINES
    rest = [f"and {more:,} more"] if more > 0 else []
    counts = describe_counts(changes.counts) if changes.counts else f"files alone ({len(changes.files):,})"
    return "\n".join([f"{WAITS}: {counts}.", *lines[:MOST_LINES], *rest])


def _shorten(text: str) -> str:
    text = make_printable(text)
    return text if len(text) <= LONGEST_TITLE else f"{text[: LONGEST_TITLE - 1]}…"
