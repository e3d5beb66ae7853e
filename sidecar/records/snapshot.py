"""The records of a snapshot as a search database gets them: fetched, unpacked on this machine, read as a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from dataclasses import field

from sidecar.errors import SnapshotDamaged
from sidecar.format.index import FILE, Entry
from sidecar.host.files import Spool, SpoolFull
from sidecar.host.values import dataclass
from sidecar.host.work import run_in_thread
from sidecar.layouts import Layout
from sidecar.layouts.sources import MESSAGE
from sidecar.ports import Store
from sidecar.records.files import Unreadable, make_files
from sidecar.records.record import Item, Record, clean_text, escape_path
from sidecar.records.units import Files, Unit, name_item, plan_units, read_source
from sidecar.records.workspace import Workspace
from sidecar.store.fetch import fetch
from sidecar.store.fold import unpack_files
from sidecar.store.manifest import Manifest

BATCH_RECORDS = 500
BATCH_BYTES = 4 << 20
MOST_RECORDS = 1_000_000
"""Records beyond this number are left out; the digests of all records have to fit into memory."""
MOST_PROBLEMS = 20


async def fetch_records(
    store: Store, manifest: Manifest, scratch: Spool, layouts: Mapping[str, Layout] | None = None
) -> SnapshotRecords:
    """Return the records of a snapshot but for messages, valid as long as ``scratch`` exists. Raise ``SnapshotDamaged``
    or ``SpoolFull``."""
    fetched = await fetch(store, manifest, scratch)
    units = _plan(manifest, fetched.entries, layouts)
    wanted = {path: fetched.entries[path] for unit in units for path in unit.paths}
    try:
        staged = await run_in_thread(unpack_files, fetched.list_pack_files(), wanted, scratch.new())
    except SnapshotDamaged as damage:
        raise SnapshotDamaged(f"Snapshot {manifest.snapshot} cannot be read: {damage.message}") from None
    except OSError as problem:
        raise SpoolFull(f"Snapshot {manifest.snapshot} could not be unpacked in {scratch.folder}: {problem}.") from None
    hints = {root.name: root.hint for root in manifest.roots}
    places = {path: one.place for path, one in staged.items()}
    return SnapshotRecords(units, make_files(places, fetched.entries, hints))


def _plan(manifest: Manifest, entries: Mapping[str, Entry], layouts: Mapping[str, Layout] | None) -> list[Unit]:
    """Return what of a snapshot holds records other than messages."""
    units = plan_units(
        (path for path, entry in entries.items() if entry.type == FILE),
        {root.name: root.layout for root in manifest.roots},
        layouts,
    )
    return [unit for unit in units.values() if unit.kinds != {MESSAGE}]


class SnapshotLine:
    """The records of one snapshot of a memory after another, the oldest first; each pack is fetched once."""

    def __init__(self, store: Store, memory: str, scratch: Spool, layouts: Mapping[str, Layout] | None = None) -> None:
        self._needed: set[str] = set()
        self._space = Workspace(store, memory, scratch, self._needed.__contains__)
        self._layouts = layouts

    async def read(self, manifest: Manifest) -> SnapshotRecords:
        """Return the records of a snapshot, valid until the next is read. Raise ``SnapshotDamaged`` or ``SpoolFull``."""
        units = _plan(manifest, await self._space.read_entries(manifest), self._layouts)
        self._needed.update(path for unit in units for path in unit.paths)
        return SnapshotRecords(units, await self._space.advance(manifest))


@dataclass(slots=True)
class SnapshotRecords:
    """The ``RecordSource`` of a snapshot. What cannot be read is left out and described in ``problems``."""

    units: Sequence[Unit]
    files: Files
    problems: list[str] = field(default_factory=list)

    async def batches(self) -> AsyncGenerator[Sequence[Record]]:
        """Yield records in batches of limited size, read in a thread."""
        self.problems = []
        records = self._read_all()
        try:
            while batch := await asyncio.to_thread(_take_batch, records):
                yield batch
        finally:
            with contextlib.suppress(ValueError):  # interrupted while a thread still reads, which then closes it
                records.close()

    def _read_all(self) -> Generator[Record]:
        """Yield the records of all units, up to ``MOST_RECORDS``."""
        left = MOST_RECORDS
        for unit in self.units:
            used: Counter[str] = Counter()
            for item in self._read_unit(unit):
                if item.kind == MESSAGE:
                    continue
                left -= 1
                if left < 0:
                    self.problems.append(f"There are more than {MOST_RECORDS:,} records; the rest is left out.")
                    return
                yield item.build(name_item(unit.where, item, used))

    def _read_unit(self, unit: Unit) -> Iterator[Item]:
        """Yield the items of a unit, source by source: one that cannot be read does not hide the others."""
        seen: set[tuple[str, str]] = set()
        for path, spec in unit.sources:
            try:
                for item in read_source(self.files[path], spec):
                    if unit.shared and item.identity and (item.kind, item.identity) in seen:
                        continue
                    seen.add((item.kind, item.identity))
                    yield item
            except (Unreadable, OSError) as problem:
                if len(self.problems) < MOST_PROBLEMS:
                    self.problems.append(clean_text(f"{escape_path(path)} cannot be read: {problem}."))


def _take_batch(records: Iterator[Record]) -> list[Record]:
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.text)
        if len(batch) >= BATCH_RECORDS or size >= BATCH_BYTES:
            break
    return batch
