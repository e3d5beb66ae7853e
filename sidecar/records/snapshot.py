"""Read the records of a snapshot: fetch it from the store, unpack it on this machine, and read it as a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from sidecar.errors import SnapshotDamaged
from sidecar.format.index import FILE, Entry
from sidecar.format.roots import get_root, strip_below
from sidecar.host.files import Spool, SpoolFull
from sidecar.host.work import run_in_thread
from sidecar.ports import Store
from sidecar.records import claude_mem, codymaster, markdown
from sidecar.records.record import Record, clean_text, escape_path
from sidecar.records.tables import Unreadable, open_tables
from sidecar.store.fetch import fetch
from sidecar.store.fold import unpack_files
from sidecar.store.manifest import Manifest

BATCH_RECORDS = 500
BATCH_BYTES = 4 << 20
MOST_RECORDS = 1_000_000
"""Records beyond this number are left out; the digests of all records have to fit into memory."""
TWINS = ("learning", "decision")
MOST_PROBLEMS = 20

Source = Callable[[], Iterator[Record]]


async def fetch_records(store: Store, manifest: Manifest, scratch: Spool) -> SnapshotRecords:
    """Return the records of a snapshot, valid as long as ``scratch`` exists. Raise ``SnapshotDamaged`` or
    ``SpoolFull``."""
    fetched = await fetch(store, manifest, scratch)
    wanted = {path: entry for path, entry in fetched.entries.items() if entry.type == FILE and _holds_records(path)}
    try:
        staged = await run_in_thread(unpack_files, fetched.list_pack_files(), wanted, scratch.new())
    except SnapshotDamaged as damage:
        raise SnapshotDamaged(f"Snapshot {manifest.snapshot} cannot be read: {damage.message}") from None
    except OSError as problem:
        raise SpoolFull(f"Snapshot {manifest.snapshot} could not be unpacked in {scratch.folder}: {problem}.") from None
    hints = {root.name: root.hint for root in manifest.roots}
    sources: list[tuple[str, Source]] = []
    # Databases first: if a JSON file has the same record as a row, the row counts.
    for path in sorted(wanted, key=lambda path: (not path.endswith(".db"), path)):
        project = strip_below(hints.get(get_root(path), ""), ".cm")
        sources += [(path, source) for source in _list_sources(staged[path].place, path, project, wanted[path])]
    return SnapshotRecords(sources)


def _holds_records(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    in_memory = folder.rpartition("/")[2] == "memory"
    return (
        name in (claude_mem.NAME, codymaster.NAME)
        or (name in codymaster.FILES and in_memory)
        or name.lower().endswith(".md")
    )


def _list_sources(place: str, path: str, project: str, entry: Entry) -> list[Source]:
    """Return the readers for a file: one per table, so that an unreadable table does not hide the others."""
    name = path.rpartition("/")[2]
    if name == claude_mem.NAME:
        return [partial(_read_claude_mem, place, path, table) for table in claude_mem.TABLES]
    if name == codymaster.NAME:
        return [partial(_read_codymaster, place, path, project, table) for table in codymaster.TABLES]
    if name in codymaster.FILES:
        return [partial(codymaster.read_file, place, path, project)]
    return [partial(markdown.read_sections, place, path, project, entry.mtime)]


def _read_claude_mem(place: str, path: str, table: str) -> Iterator[Record]:
    with open_tables(place) as found:
        yield from claude_mem.read_table(found, table, path)


def _read_codymaster(place: str, path: str, project: str, table: str) -> Iterator[Record]:
    with open_tables(place) as found:
        yield from codymaster.read_table(found, table, path, project)


@dataclass(slots=True)
class SnapshotRecords:
    """The ``RecordSource`` of a snapshot. What cannot be read is left out and described in ``problems``."""

    sources: Sequence[tuple[str, Source]]
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
        """Yield the records of all sources, each twin once, up to ``MOST_RECORDS``."""
        left = MOST_RECORDS
        twins: set[tuple[str, str]] = set()
        for path, source in self.sources:
            try:
                for record in source():
                    if record.kind in TWINS:  # may be in a database and in a file beside it
                        if (record.kind, record.key) in twins:
                            continue
                        twins.add((record.kind, record.key))
                    left -= 1
                    if left < 0:
                        self.problems.append(f"There are more than {MOST_RECORDS:,} records; the rest is left out.")
                        return
                    yield record
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
