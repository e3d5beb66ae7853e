"""What an agent should read first of a snapshot. What there is to read is kept in a cache on this machine, so that only the
first brief of a snapshot fetches its packs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from bisect import bisect_left
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from sidecar.engine.comparison import read_manifest
from sidecar.engine.core import Engine
from sidecar.errors import SnapshotDamaged, SnapshotError, UsageError
from sidecar.format.checksums import decode_checksummed, encode_checksummed
from sidecar.host.files import open_spool, write_whole
from sidecar.host.work import gather_few, run_in_thread
from sidecar.models.records import Brief
from sidecar.ports import Store
from sidecar.records.briefs.items import Plan, Readings, plan_files, read_parts
from sidecar.records.briefs.page import LEAST_TOKENS, MARKDOWN, MOST_TOKENS, FindOrigin, Subject, build_brief
from sidecar.records.files import make_files
from sidecar.records.record import READER
from sidecar.records.units import Files
from sidecar.records.workspace import Workspace
from sidecar.store.fetch import FetchedSnapshot
from sidecar.store.fold import unpack_files
from sidecar.store.manifest import Manifest
from sidecar.store.repository import PARALLEL_READS, Repository

VERSION = 2
"""It is raised when the same files give other parts than before."""
LINE = 16
"""How many snapshots back it is looked which one something came with."""
MOST_KEPT = 64
"""The cache has so many snapshots at most, each for ``KEPT_SECONDS``."""
KEPT_SECONDS = 7 * 86400.0
LARGEST_KEPT = 16 << 20


async def make_brief(engine: Engine, memory: str, wanted: str, tokens: int, *, style: str = MARKDOWN) -> Brief:
    """Return what to read first of a snapshot, within a budget of tokens. It depends on the snapshot alone: on no clock,
    and not on how the snapshot is packed.

    Raise ``UsageError`` for a budget that is too small or too large, ``MemoryNotFound``, ``SnapshotNotFound`` or
    ``SnapshotDamaged``.
    """
    check_budget(tokens)
    manifest = await read_manifest(engine.repository, memory, wanted)
    return await describe_snapshot(engine, manifest, tokens, style=style)


async def describe_snapshot(
    engine: Engine, manifest: Manifest, tokens: int, *, fetched: FetchedSnapshot | None = None, style: str = MARKDOWN
) -> Brief:
    """Return the brief of a snapshot whose manifest was read, and whose packs may be here already."""
    found = await _find_readings(engine, manifest, fetched)
    created = _read_created(manifest)
    find_origin = await _read_origins(engine.repository, manifest)
    subject = Subject(memory=manifest.memory, snapshot=manifest.snapshot, created=created, find_origin=find_origin)
    brief = await run_in_thread(build_brief, subject, found, tokens, style)
    return replace(brief, problems=found.problems)


def check_budget(tokens: int) -> int:
    """Return the budget. Raise ``UsageError`` unless a brief can have so many tokens."""
    if not LEAST_TOKENS <= tokens <= MOST_TOKENS:
        raise UsageError(f"A brief has {LEAST_TOKENS:,} to {MOST_TOKENS:,} tokens, not {tokens:,}.")
    return tokens


def _read_created(manifest: Manifest) -> datetime:
    try:
        created = datetime.fromisoformat(manifest.created)
    except ValueError:
        raise SnapshotDamaged(f"Snapshot {manifest.snapshot} does not say when it was made.") from None
    return created if created.tzinfo else created.replace(tzinfo=UTC)


async def _read_origins(repository: Repository, manifest: Manifest) -> FindOrigin:
    """Return what tells the first snapshot that was made after a time, and its conversation: of the newest ones that this
    one grew out of. No pack is read for that."""
    ids = [one for one in await repository.list_snapshot_ids(manifest.memory) if one < manifest.snapshot]
    recent = sorted(ids, reverse=True)[:LINE]

    async def read(snapshot: str) -> Manifest | None:
        try:
            return await repository.manifest(manifest.memory, snapshot)
        except SnapshotError:
            return None

    found = {one.snapshot: one for one in await gather_few(read, recent, PARALLEL_READS) if one is not None}
    line, oldest = [manifest], manifest
    while (older := found.get(oldest.parent)) is not None and len(line) < LINE:
        line.append(older)
        oldest = older
    line.reverse()
    times = [_read_created(one).timestamp() for one in line]
    # Of what is older than all of them it is known which one it came with only if there was none before.
    complete = not oldest.parent and oldest.origin in ("export", "import")

    def find_origin(at: float) -> tuple[str, str]:
        place = min(bisect_left(times, at), len(line) - 1)
        if not at or (place == 0 and not complete):
            return "", ""
        return line[place].snapshot, line[place].conversation

    return find_origin


async def _find_readings(engine: Engine, manifest: Manifest, fetched: FetchedSnapshot | None) -> Readings:
    """Return what there is to read of a snapshot, from the cache if it has it."""
    cache = None if _is_sealed(engine.repository.store, manifest) else _find_cache()
    place = cache / _name_entry(engine, manifest) if cache is not None else None
    if place is not None and (kept := await run_in_thread(_read_kept, place)) is not None:
        return kept
    read = await _read_snapshot(engine, manifest, fetched)
    if place is not None:
        await run_in_thread(_keep, place, read)
    return read


async def _read_snapshot(engine: Engine, manifest: Manifest, fetched: FetchedSnapshot | None) -> Readings:
    """Read from a snapshot's packs what a brief can be made of. Raise ``SnapshotDamaged`` or ``SpoolFull``."""
    roots = {root.name: root.layout for root in manifest.roots}
    created = _read_created(manifest)
    async with open_spool() as scratch:
        if fetched is not None:
            plan = plan_files(fetched.entries, roots, engine.layouts, created)
            wanted = {path: fetched.entries[path] for path in plan.paths}
            staged = await run_in_thread(unpack_files, fetched.list_pack_files(), wanted, scratch.new())
            hints = {root.name: root.hint for root in manifest.roots}
            files = make_files({path: one.place for path, one in staged.items()}, fetched.entries, hints)
            return await run_in_thread(_read_planned, plan, files)
        needed: set[str] = set()
        # Packs are compared with their hashes; to hash every file once more would take longer than all the rest.
        space = Workspace(engine.repository.store, manifest.memory, scratch, needed.__contains__, check=False)
        plan = plan_files(await space.read_entries(manifest), roots, engine.layouts, created)
        needed |= plan.paths
        files = await space.advance(manifest) if needed else {}
        return await run_in_thread(_read_planned, plan, files)


def _read_planned(plan: Plan, files: Files) -> Readings:
    parts, problems = read_parts(plan, files)
    return Readings(parts=parts, problems=problems, unread=plan.unread)


# The cache: one file for each snapshot, readable by its owner only. Never of an encrypted store.


def _is_sealed(store: Store, manifest: Manifest) -> bool:
    return bool(store.seal) or any(pack.sealed for pack in manifest.packs)


def _find_cache() -> Path | None:
    """Return the folder of the cache; ``None`` if this user has no place for one."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored: https://specifications.freedesktop.org/basedir-spec/latest/
    if not os.path.isabs(base):
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:
            return None
    return Path(base) / "memory-sidecar" / ".briefs"


def _name_memory(memory: str) -> str:
    return hashlib.sha256(memory.encode()).hexdigest()[:16]


def _name_entry(engine: Engine, manifest: Manifest) -> str:
    layouts = {root.layout: engine.layouts.get(root.layout) for root in manifest.roots}
    told = {name: asdict(layout) if layout else None for name, layout in sorted(layouts.items())}
    about = [VERSION, READER, manifest.memory, manifest.snapshot, manifest.created, manifest.tree, told]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return f"{_name_memory(manifest.memory)}-{digest[:32]}.json"


def _read_kept(place: Path) -> Readings | None:
    """Return what is kept; ``None`` if there is nothing, or nothing of use."""
    try:
        status = place.lstat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077 or status.st_size > LARGEST_KEPT:
            return None
        return Readings.decode(decode_checksummed(place.read_bytes()))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _keep(place: Path, readings: Readings) -> None:
    """Keep what was read for the next brief. A cache that cannot be written only makes that one slower."""
    data = encode_checksummed(readings.encode())
    if len(data) > LARGEST_KEPT:
        return
    with contextlib.suppress(OSError, UsageError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if place.parent.is_symlink() or place.parent.lstat().st_uid != os.geteuid():
            return
        with write_whole(place) as file:
            file.write(data)
        _tidy(place.parent)


def _tidy(folder: Path) -> None:
    """Remove what is old, and the oldest of what is too much."""
    now, found = time.time(), []
    for one in folder.iterdir():
        with contextlib.suppress(OSError):
            found.append((one.lstat().st_mtime, one))
    for number, (at, one) in enumerate(sorted(found, reverse=True)):
        if number >= MOST_KEPT or now - at > KEPT_SECONDS:
            one.unlink(missing_ok=True)


def forget_briefs(memory: str) -> None:
    """Remove what is kept of a memory on this machine."""
    cache = _find_cache()
    with contextlib.suppress(OSError):
        for one in cache.glob(f"{_name_memory(memory)}-*") if cache is not None else ():
            one.unlink(missing_ok=True)
