"""What a snapshot says, and how it came to say it: its records and files, their versions, and which conversation taught
them.

The line of a snapshot is what it grew out of, as far as retention has left it. Going along it reads each pack once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from sidecar.engine.comparison import read_manifest
from sidecar.engine.core import Engine
from sidecar.errors import RecordNotFound, SnapshotDamaged, SnapshotNotFound
from sidecar.format.index import FILE, Entry
from sidecar.host.files import open_spool
from sidecar.host.work import run_in_thread
from sidecar.layouts.sources import MESSAGE
from sidecar.models.records import Blame, BlamedRecord, HistoryEntry, Origin, RecordRow, Records
from sidecar.records.comparison import make_side
from sidecar.records.files import Unreadable
from sidecar.records.matches import MOST_COMPARED
from sidecar.records.origins import Contents, TrackedUnit, follow_unit
from sidecar.records.record import Item, Record, escape_path, name_record
from sidecar.records.rows import list_fields, make_row
from sidecar.records.units import Files, Unit
from sidecar.records.workspace import Workspace
from sidecar.store.manifest import Manifest
from sidecar.store.repository import Repository

MOST_IN_LINE = 1000
"""A line is followed so many snapshots back."""
SHORTEST_ID = 6
MOST_BLAMED = 100_000
MOST_TEXT = 32 << 20
"""A page has records whose texts have about so many characters at most."""


class PageWanted(NamedTuple):
    """Which records are listed: so many after the first ``start``, with or without their texts."""

    limit: int = 1000
    start: int = 0
    text: bool = True


async def list_records(
    engine: Engine, memory: str, wanted: str, *, kinds: Collection[str] = (), page: PageWanted | None = None
) -> Records:
    """Return a page of the records of a snapshot, with or without their texts. It ends early when the texts are more than
    ``MOST_TEXT``. Messages are left out unless their kind is named."""
    manifest = await read_manifest(engine.repository, memory, wanted)
    page = page or PageWanted()

    def is_wanted(kind: str) -> bool:
        return kind in kinds if kinds else kind != MESSAGE

    async with _open_snapshot(engine, manifest, lambda unit: any(map(is_wanted, unit.kinds))) as found:
        units, files = found
        problems: list[str] = []
        read = _read_all(units, files, problems, is_wanted)
        rows, more = await run_in_thread(_take_page, read, page)
    return Records(
        memory=memory,
        snapshot=manifest.snapshot,
        records=rows,
        next=str(page.start + len(rows)) if more else None,
        problems=problems,
    )


def _take_page(items: Iterator[tuple[str, Item]], wanted: PageWanted) -> tuple[list[RecordRow], bool]:
    """Return the rows of a page, as far as there is room for their texts, and whether there are more."""
    page: list[RecordRow] = []
    room = MOST_TEXT
    for number, (key, item) in enumerate(items):
        if number >= wanted.start + wanted.limit or room < 0:
            return page, True
        if number >= wanted.start:
            page.append(RecordRow(**list_fields(item.build(key), text=wanted.text)))
            room -= len(page[-1].text)
    return page, False


def _read_all(
    units: Collection[Unit], files: Files, problems: list[str], is_wanted: Callable[[str], bool]
) -> Iterator[tuple[str, Item]]:
    """Yield the wanted items of these units with their keys. What cannot be read is described in ``problems``."""
    for unit in units:
        try:
            for number, (key, item) in enumerate(unit.read_named(files)):
                if number >= MOST_COMPARED:
                    raise Unreadable(f"it holds more than {MOST_COMPARED:,} records")
                if is_wanted(item.kind):
                    yield key, item
        except (Unreadable, OSError) as problem:
            problems.append(f"{escape_path(unit.paths[0])} cannot be read: {problem}.")


@asynccontextmanager
async def _open_snapshot(
    engine: Engine, manifest: Manifest, choose: Callable[[Unit], bool]
) -> AsyncIterator[tuple[list[Unit], Files]]:
    """Yield the chosen units of a snapshot with their files."""
    async with open_spool() as scratch:
        needed: set[str] = set()
        space = Workspace(engine.repository.store, manifest.memory, scratch, needed.__contains__)
        side = make_side(manifest, await space.read_entries(manifest), engine.layouts)
        units = [unit for _, unit in sorted(side.units.items()) if choose(unit)]
        needed.update(path for unit in units for path in unit.paths)
        yield units, await space.advance(manifest)


@asynccontextmanager
async def open_file(repository: Repository, memory: str, wanted: str, path: str) -> AsyncIterator[tuple[Entry, Path]]:
    """Yield the entry of a file of a snapshot, and where its contents are meanwhile. Raise ``RecordNotFound``."""
    manifest = await read_manifest(repository, memory, wanted)
    async with open_spool() as scratch:
        space = Workspace(repository.store, manifest.memory, scratch, path.__eq__)
        entries = await space.read_entries(manifest)
        if path not in entries or entries[path].type != FILE:
            raise RecordNotFound(f"Snapshot {manifest.snapshot} has no file {path!r}.")
        files = await space.advance(manifest)
        yield entries[path], Path(files[path].place)


async def read_line(repository: Repository, memory: str, wanted: str) -> list[tuple[Manifest, Origin]]:
    """Return what a snapshot grew out of, the oldest first, and itself. Where retention has forgotten a snapshot, the
    next older one that was the head is taken, and the origin after it says so."""
    newest = await read_manifest(repository, memory, wanted)
    ids = await repository.list_snapshot_ids(memory)
    head = (await repository.head(memory)).head
    past = {snapshot for snapshot, _ in head.history} if head else set()
    line: list[tuple[Manifest, Origin]] = []
    manifest: Manifest | None = newest
    while manifest is not None and len(line) < MOST_IN_LINE:
        parent, older = manifest.parent, None
        forgotten = bool(parent) and parent not in ids
        name = parent if not forgotten else next((one for one in ids if one < manifest.snapshot and one in past), "")
        if name:
            try:
                older = await repository.manifest(memory, name)
            except (SnapshotNotFound, SnapshotDamaged):
                forgotten = True
        if older is None and _is_copy(manifest):
            forgotten = True
        line.append((manifest, _make_origin(manifest, before=forgotten)))
        manifest = older
    return line[::-1]


def _is_copy(manifest: Manifest) -> bool:
    """Whether a snapshot was not taught here: a fork has the records of another memory."""
    return manifest.origin not in ("export", "import") and not manifest.parent


def _make_origin(manifest: Manifest, *, before: bool) -> Origin:
    return Origin(
        snapshot=manifest.snapshot,
        created=manifest.created,
        conversation=manifest.conversation,
        label=manifest.label,
        sandbox=manifest.sandbox,
        before=before,
    )


async def trace_file(repository: Repository, memory: str, wanted: str, path: str) -> list[HistoryEntry]:
    """Return every version of a file, the oldest first. No pack is read. Raise ``RecordNotFound``."""
    line = await read_line(repository, memory, wanted)
    versions: list[HistoryEntry] = []
    async with open_spool() as scratch:
        space = Workspace(repository.store, memory, scratch, lambda _: False)
        before: Entry | None = None
        for manifest, origin in line:
            entry = (await space.read_entries(manifest)).get(path)
            if change := _compare_entries(before, entry):
                versions.append(HistoryEntry(origin=origin, change=change, size=entry.size if entry else 0))
            before = entry
    if not versions:
        raise RecordNotFound(f"{memory} never had a file {path!r}.")
    return versions


def _compare_entries(old: Entry | None, new: Entry | None) -> str:
    if old is None or new is None:
        return "added" if new else "removed" if old else ""
    return "changed" if (old.digest, old.size, old.target) != (new.digest, new.size, new.target) else ""


async def trace_record(engine: Engine, memory: str, wanted: str, name: str) -> list[HistoryEntry]:
    """Return every version of a record, the oldest first. It is named by its id, the beginning of it, or its key. Raise
    ``RecordNotFound``."""
    line = await read_line(engine.repository, memory, wanted)
    versions: list[HistoryEntry] = []
    last: Record | None = None
    async with open_spool() as scratch:
        needed: set[str] = set()
        space = Workspace(engine.repository.store, memory, scratch, needed.__contains__)
        known: dict[str, FoundRecords] = {}
        names: set[str] = set()
        for manifest, origin in line:
            side = make_side(manifest, await space.read_entries(manifest), engine.layouts)
            needed.update(path for unit in side.units.values() if unit.kinds != {MESSAGE} for path in unit.paths)
            files = await space.advance(manifest)
            units = {one: unit for one, unit in sorted(side.units.items()) if unit.kinds != {MESSAGE}}
            known = await run_in_thread(_find_records, units, Contents(files, side.entries), name, known)
            found = [record for one in known.values() for record in one.records]
            names |= {one.id for one in found}
            if len(names) > 1 and name not in names:
                raise RecordNotFound(
                    f"{len(names)} records match {name!r}.", hint="Name it by more of its id, or its key."
                )
            record = found[0] if found else None
            told = record or last
            if told is not None and (change := _compare_records(last, record)):
                versions.append(HistoryEntry(origin=origin, change=change, record=make_row(told)))
            last = record
    if not versions:
        raise RecordNotFound(f"{memory} never had a record {name!r}.")
    return versions


class FoundRecords(NamedTuple):
    """What a unit with these files has of the records that a name means."""

    digests: dict[str, str]
    records: list[Record]


def _find_records(
    units: Mapping[str, Unit], contents: Contents, name: str, known: Mapping[str, FoundRecords]
) -> dict[str, FoundRecords]:
    """Return the records that a name means, by unit. Only units whose files changed are read."""
    found: dict[str, FoundRecords] = {}
    for where, unit in units.items():
        digests = {path: contents.entries[path].digest for path in unit.paths}
        before = known.get(where)
        if before is not None and before.digests == digests:
            found[where] = before
            continue
        items = _read_all([unit], contents.files, [], lambda kind: kind != MESSAGE)
        records = [item.build(key) for key, item in items if _is_named(item.kind, key, name)]
        found[where] = FoundRecords(digests, records)
    return found


def _is_named(kind: str, key: str, name: str) -> bool:
    """Return whether a name means the record with this kind and key."""
    if name in (key, f"{kind}:{key}"):
        return True
    return len(name) >= SHORTEST_ID and name_record(kind, key).startswith(name)


def _compare_records(old: Record | None, new: Record | None) -> str:
    if old is None or new is None:
        return "added" if new else "removed" if old else ""
    return "changed" if (old.title, old.text, old.project) != (new.title, new.text, new.project) else ""


async def blame(engine: Engine, memory: str, wanted: str, *, path: str = "", kinds: Collection[str] = ()) -> Blame:
    """Return every record of a snapshot, or of one of its files, with what taught it. Each pack is read once.

    Raise ``RecordNotFound`` if there is no such file.
    """
    line = await read_line(engine.repository, memory, wanted)
    async with open_spool() as scratch:
        needed: set[str] = set()
        space = Workspace(engine.repository.store, memory, scratch, needed.__contains__)
        last = make_side(line[-1][0], await space.read_entries(line[-1][0]), engine.layouts)
        if path and path not in last.entries:
            raise RecordNotFound(f"Snapshot {last.manifest.snapshot} has no file {path!r}.")

        def is_wanted(kind: str) -> bool:
            return kind in kinds if kinds else kind != MESSAGE

        names = {
            name
            for name, unit in last.units.items()
            if (not path or path in unit.paths) and any(map(is_wanted, unit.kinds))
        }
        tracked: dict[str, TrackedUnit] = {}
        problems: dict[str, str] = {}
        files: Files = {}
        for number, (manifest, _) in enumerate(line):
            entries = await space.read_entries(manifest)
            side = make_side(manifest, _pick_units(entries, names), engine.layouts)
            needed.update(one for unit in side.units.values() for one in unit.paths)
            files = await space.advance(manifest)
            for name in names - side.units.keys():
                tracked.pop(name, None)
            units = {name: side.units[name] for name in names & side.units.keys()}
            await run_in_thread(_track, units, Contents(files, entries), number, tracked, problems)
        blamed = _attribute({name: last.units[name] for name in names}, files, tracked, line)
        wanted_rows = (row for row in blamed if is_wanted(row.kind) and (not path or row.path == escape_path(path)))
        rows, count = await run_in_thread(_take_most, wanted_rows)
    told = list(problems.values())
    if count > MOST_BLAMED:
        told.append(f"There are {count:,} records: choose some by their kind or their file.")
    return Blame(memory=memory, snapshot=last.manifest.snapshot, records=rows, problems=told)


def _take_most(blamed: Iterator[BlamedRecord]) -> tuple[list[BlamedRecord], int]:
    """Return the first ``MOST_BLAMED`` rows, and how many there are."""
    rows = list(islice(blamed, MOST_BLAMED))
    return rows, len(rows) + sum(1 for _ in blamed)


def _pick_units(entries: dict[str, Entry], names: Collection[str]) -> dict[str, Entry]:
    """Return the files that can belong to units of these names: a path, or all of a root."""
    return {path: entry for path, entry in entries.items() if path in names or f"{path.partition('/')[0]}#" in names}


def _track(
    units: dict[str, Unit], contents: Contents, number: int, tracked: dict[str, TrackedUnit], problems: dict[str, str]
) -> None:
    """Note which records of these units are new or changed in snapshot ``number``."""
    for name, unit in units.items():
        old = tracked.get(name)
        if old is not None and old.is_same(unit, contents):
            continue
        problems.pop(name, None)
        try:
            tracked[name] = follow_unit(old, unit, contents, number)
        except (Unreadable, OSError) as problem:
            tracked.pop(name, None)
            problems[name] = f"{escape_path(unit.paths[0])} cannot be read: {problem}."


def _attribute(
    units: dict[str, Unit], files: Files, tracked: dict[str, TrackedUnit], line: list[tuple[Manifest, Origin]]
) -> Iterator[BlamedRecord]:
    """Yield the records of the last snapshot with their origins."""
    for name, unit in sorted(units.items()):
        rows = tracked.get(name)
        if rows is None:
            continue
        for mark, (key, item) in zip(rows.list_marks(), unit.read_named(files), strict=False):
            origin, first = line[mark.origin][1], line[mark.first][1]
            fields = list_fields(item.build(key), text=False)
            yield BlamedRecord(**fields, origin=origin, first=first)
