"""Check at the start of a service that no size limit is below what the hot tier of a memory needs: every export of that
memory would be refused.

Only the heads in the store are considered. Which session is the active one is known only inside a sandbox.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sidecar.engine.core import Engine
from sidecar.engine.limits import list_hot_files
from sidecar.errors import BadConfig, ObjectRefused, SnapshotDamaged, SnapshotNotFound
from sidecar.format.checksums import decode_checksummed
from sidecar.format.index import Entry
from sidecar.format.patterns import compile_patterns
from sidecar.format.roots import get_root
from sidecar.host.files import open_spool
from sidecar.host.sections import format_setting
from sidecar.host.values import dataclass
from sidecar.host.work import gather_few
from sidecar.ids import ROOT
from sidecar.policy.limits import OF_FILES, Limits
from sidecar.store.fetch import fetch_entries
from sidecar.store.repository import PARALLEL_READS

MOST_HEADS = 2000
"""How many heads are read at most, so that a start does not take minutes. A limit that is too low for any other memory
shows at its next export."""


@dataclass(frozen=True, slots=True)
class _Need:
    """The least value of one limit that the hot tier of a memory, or of one layout's files, needs."""

    key: str
    least: int
    what: str
    layout: str = ""


async def check_hot_limits(engine: Engine) -> None:
    """Compare the limits of each memory with the hot files of its head. Raise ``BadConfig``, naming the setting, if a
    limit is too low."""
    limits = engine.limits
    if not any(map(_has_lowered, [limits, *(replace(limits, **table) for table in limits.memories.values())])):
        return
    keys: list[str] = []
    async for info in engine.repository.store.list(ROOT):
        if info.key.endswith("/head.json") and len(keys) < MOST_HEADS:
            keys.append(info.key)
    for memory, found in await gather_few(lambda key: _measure_needs(engine, key), keys, PARALLEL_READS):
        own = limits.of(memory)
        for need in found:
            allowed = getattr(own.narrow_to_layout(need.layout) if need.layout else own, need.key)
            if need.least > allowed:
                at = _find_setting(limits, memory, need)
                raise BadConfig(
                    f"{format_setting(at)} is {allowed:,}, below the hot tier of {memory!r}, which has {need.what} and is"
                    " never left out: every export of it would be refused.",
                    hint=f"Set it to {need.least} or more, or set another limit in [limits.memories] for this memory.",
                    at=at,
                )


def _has_lowered(limits: Limits) -> bool:
    """Whether any limit is below its default."""
    default, parts = Limits(), [limits, *map(limits.narrow_to_layout, limits.layouts)]
    return any(getattr(part, key) < getattr(default, key) for part in parts for key in OF_FILES)


async def _measure_needs(engine: Engine, key: str) -> tuple[str, list[_Need]]:
    """Return the memory of a head and what its hot tier needs. Return no needs if the head cannot be read; other checks
    report that."""
    repository, memory = engine.repository, ""
    try:
        stored = await repository.store.get(key)
        head = decode_checksummed(stored.data) if stored else {}
        memory = str(head.get("memory", ""))
        if not _has_lowered(engine.limits.of(memory)):
            return memory, []
        manifest = await repository.manifest(memory, str(head.get("snapshot", "")))
        async with open_spool() as scratch:
            entries, _, _ = await fetch_entries(repository.store, manifest, scratch)
    except (ObjectRefused, SnapshotDamaged, SnapshotNotFound, ValueError):
        return memory, []
    layout_of = {root.name: root.layout for root in manifest.roots}
    hot = list_hot_files(entries, layout_of, engine.layouts)
    by_layout: dict[str, list[Entry]] = {"": [], **{layout: [] for layout in engine.limits.of(memory).layouts}}
    for entry in hot:
        layout = layout_of.get(get_root(entry.path), "")
        by_layout[layout if layout in by_layout else ""].append(entry)
    found = [*_sum_needs(hot, entries)]
    for layout, own in by_layout.items():
        found += [*(_sum_needs(own, entries, layout) if layout else ()), *_find_single_needs(own, layout)]
    return memory, found


def _sum_needs(hot: list[Entry], entries: dict[str, Entry], layout: str = "") -> Iterator[_Need]:
    size = sum(entry.size for entry in hot)
    yield _Need("bytes", size, f"{size:,} bytes", layout)
    folders = {folder for entry in hot for folder in _list_parents(entry.path) if folder in entries}
    count = len(hot) + len(folders)
    yield _Need("files", count, f"{count:,} files and folders", layout)


def _find_single_needs(hot: list[Entry], layout: str = "") -> Iterator[_Need]:
    """Yield what the largest and the deepest file need: of one layout, or of the files whose layout has no limits of
    its own."""
    if hot:
        largest = max(hot, key=lambda entry: entry.size)
        yield _Need("file_bytes", largest.size, f"{largest.path} with {largest.size:,} bytes", layout)
        deepest = max(hot, key=lambda entry: entry.path.count("/"))
        depth = deepest.path.count("/")
        yield _Need("depth", depth, f"{deepest.path}, {depth} parts deep,", layout)


def _list_parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _find_setting(limits: Limits, memory: str, need: _Need) -> tuple[str, ...]:
    """Return the location in the config of the limit that applies to a memory, or to one layout's files."""
    if need.key in limits.layouts.get(need.layout, {}):
        return ("limits", "layouts", need.layout, need.key)
    for pattern, table in limits.memories.items():
        if compile_patterns([pattern]).match(memory):
            return ("limits", "memories", pattern, need.key) if need.key in table else ("limits", need.key)
    return ("limits", need.key)
