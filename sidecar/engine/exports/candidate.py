"""The snapshot that an export would make, as files on this machine, beside the one that it would replace."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from sidecar.engine.comparison import Side, list_needed, make_side
from sidecar.engine.exports.arrival import CheckedExport
from sidecar.engine.exports.run import ExportRun
from sidecar.format.index import DIR, FILE, Entry
from sidecar.host.files import PRIVATE
from sidecar.host.values import dataclass
from sidecar.records.comparison import Version
from sidecar.records.workspace import Workspace
from sidecar.store.manifest import Manifest

PRIVATE_FOLDER = 0o700
EXECUTABLE = 0o100


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


def build_tree(folder: Path, version: Version) -> None:
    """Write the files of a snapshot below a folder, under the paths that `show` lists. Links are left out: what reads the
    folder must not be led out of it."""
    for path, entry in sorted(version.entries.items()):
        place = folder / path
        if entry.type == DIR:
            place.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        elif entry.type == FILE and path in version.files:
            place.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            shutil.copyfile(version.files[path].place, place)
            place.chmod(PRIVATE | (entry.mode & EXECUTABLE))
