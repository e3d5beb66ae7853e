"""The limits of one export as applied outside the sandbox: the part that is sent to the program, the checks of what
arrives, the room in the store, and the warnings when a limit is nearly reached."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sidecar.errors import BadAnswer, LimitExceeded
from sidecar.format import protocol
from sidecar.format.index import FILE, Entry
from sidecar.format.patterns import compile_patterns
from sidecar.format.protocol import ExportAnswer, LimitTable
from sidecar.format.roots import get_root
from sidecar.host.values import dataclass
from sidecar.layouts import Layout
from sidecar.policy.limits import CODES, OF_FILES, Limits
from sidecar.store.manifest import Manifest

if TYPE_CHECKING:  # ``core`` and the export need this module to be loaded
    from sidecar.engine.core import Engine
    from sidecar.engine.exports.run import ExportRun
    from sidecar.policy.retention import SnapshotFacts
    from sidecar.store.retention import RoomPlan

Entries = Mapping[str, Entry]

RELAXED = 4
"""A tarball that is trimmed after it was unpacked here may exceed the limits by this factor, and may always be as large
as the default limits allow. It is spooled to disk; this limit only stops a tarball that is made to fill the disk."""
FORGOTTEN = "To make room in the store for this one, {count:,} of the oldest snapshots of {memory} {were} forgotten."


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on what may arrive to be unpacked here: ``limits`` as configured, ``most`` as enforced on arrival.
    ``most`` is higher if files are trimmed afterwards."""

    limits: Limits
    most: Limits

    def check(self, key: str, have: int, what: str) -> None:
        """Raise ``LimitExceeded`` if ``have`` is above the enforced limit. The message names the configured limit and,
        if it differs, the enforced one."""
        most, own = getattr(self.most, key), getattr(self.limits, key)
        if have > most:
            trimmed = f" No more than {most:,} is taken here to be trimmed to it." if most > own else ""
            raise LimitExceeded(f"{what}; limits.{key} allows {own:,}.{trimmed}", code=CODES[key])


def encode_limits(limits: Limits, layouts: Collection[str], room: int | None) -> protocol.Limits:
    """Build the limits for a question to the in-sandbox program. ``room`` is how many bytes the pack may add to the
    store."""

    def told(table: Limits) -> dict[str, Any]:
        return {key: getattr(table, key) for key in OF_FILES}

    parts = {
        name: LimitTable(**told(table), trim=table.list_trimming(OF_FILES))
        for name in limits.layouts
        if name in layouts
        for table in [limits.narrow_to_layout(name)]
    }
    trim = limits.list_trimming((*OF_FILES, "packed_bytes"))
    return protocol.Limits(**told(limits), trim=trim, packed_bytes=limits.packed_bytes, room=room, layouts=parts)


def loosen_limits(limits: Limits) -> Limits:
    """Return limits that are no stricter than those of any layout, for checks that do not know a file's layout."""
    parts = [limits, *(limits.narrow_to_layout(name) for name in limits.layouts)]
    return replace(limits, file_bytes=max(part.file_bytes for part in parts), depth=max(part.depth for part in parts))


def build_bounds(limits: Limits) -> Bounds:
    """Build the limits for a tarball that is unpacked here before the in-sandbox program applies the real limits to it."""
    most, default = loosen_limits(limits), Limits()
    if _has_trimming(limits):
        most = replace(
            most,
            **{key: max(getattr(most, key) * RELAXED, getattr(default, key)) for key in (*OF_FILES, "packed_bytes")},
        )
    return Bounds(loosen_limits(limits), most)


def _has_trimming(limits: Limits) -> bool:
    return bool(limits.list_trimming()) or any(limits.narrow_to_layout(name).list_trimming() for name in limits.layouts)


def check_layouts(entries: Entries, layout_of: Mapping[str, str], limits: Limits) -> None:
    """Check the received entries against the limits of each layout. Raise ``LimitExceeded``."""
    if not limits.layouts:
        return
    own = {name: limits.narrow_to_layout(name) for name in limits.layouts}
    sums = {name: [0, 0] for name in own}
    for path, entry in entries.items():
        layout = layout_of.get(get_root(path), "")
        mine = own.get(layout, limits)
        if entry.size > mine.file_bytes:
            raise _build_exceeded_error("file_bytes", layout, f"{path!r} has {entry.size:,} bytes", mine)
        if path.count("/") > mine.depth:
            raise _build_exceeded_error("depth", layout, f"{path[:200]!r} is {path.count('/')} parts deep", mine)
        if layout in sums:
            sums[layout][0] += entry.size
            sums[layout][1] += 1
    for layout, (size, files) in sums.items():
        if size > own[layout].bytes:
            raise _build_exceeded_error(
                "bytes", layout, f"The files of layout {layout} have {size:,} bytes", own[layout]
            )
        if files > own[layout].files:
            raise _build_exceeded_error(
                "files", layout, f"Layout {layout} has {files:,} files, folders and links", own[layout]
            )


def _build_exceeded_error(key: str, layout: str, what: str, limits: Limits) -> LimitExceeded:
    name = f"limits.layouts.{layout}.{key}" if layout else f"limits.{key}"
    return LimitExceeded(f"{what}; {name} allows {getattr(limits, key):,}.", code=CODES[key])


def check_dropped(answer: ExportAnswer, limits: Limits) -> None:
    """Raise ``BadAnswer`` if the sandbox claims to have left files out although no limit is set to trim. The numbers
    themselves are the sandbox's claim and cannot be checked."""
    if not _has_trimming(limits) and (answer.dropped or answer.dropped_files or answer.dropped_more):
        raise BadAnswer("The sandbox left files out for want of room, which it was not told to.")


def list_hot_files(entries: Entries, layout_of: Mapping[str, str], layouts: Mapping[str, Layout]) -> list[Entry]:
    """List the files that no size limit may drop: the hot tier of each layout, and what its layout requires."""
    hot = compile_patterns(
        f"{root}/{pattern}"
        for root, name in layout_of.items()
        if name in layouts
        for pattern in (*layouts[name].tiers.hot, *layouts[name].required)
    ).match
    return [entry for path, entry in entries.items() if entry.type == FILE and hot(path)]


def describe_near_limits(
    limits: Limits, manifest: Manifest, entries: Entries, packed: int, in_store: Mapping[str, int]
) -> list[str]:
    """Return a warning for each limit that is nearly reached. Without ``entries``, the limits on single files are not
    checked."""
    return [
        f"{have * 100 // most} % of {name} is used: {have:,} of {most:,}{about}."
        for name, have, most, about in _measure_use(limits, manifest, entries, packed, in_store)
        if most and have >= most * limits.warn_at
    ]


def _measure_use(
    limits: Limits, manifest: Manifest, entries: Entries, packed: int, in_store: Mapping[str, int]
) -> Iterator[tuple[str, int, int, str]]:
    """Yield the name of each limit, how much of it is used, its value, and words for the message."""
    layout_of = {root.name: root.layout for root in manifest.roots}
    yield "limits.bytes", manifest.bytes, limits.bytes, " bytes"
    yield "limits.files", len(entries) or manifest.files, limits.files, " files, folders and links"
    yield "limits.packed_bytes", packed, limits.packed_bytes, " bytes"
    for key, have in in_store.items():
        yield f"limits.{key}", have, getattr(limits, key), " bytes"
    for layout in {"", *limits.layouts}:
        mine = limits.narrow_to_layout(layout)
        own = [
            entry
            for path, entry in entries.items()
            if not limits.layouts
            or layout == (name if (name := layout_of.get(get_root(path), "")) in limits.layouts else "")
        ]
        prefix = f"limits.layouts.{layout}" if layout else "limits"
        if own:
            largest, deepest = max(own, key=lambda row: row.size), max(own, key=lambda row: row.path.count("/"))
            yield f"{prefix}.file_bytes", largest.size, mine.file_bytes, f" bytes, by {largest.path}"
            yield f"{prefix}.depth", deepest.path.count("/"), mine.depth, f" parts, by {deepest.path}"
        if layout:
            yield f"{prefix}.bytes", sum(row.size for row in own), mine.bytes, " bytes"
            yield f"{prefix}.files", len(own), mine.files, " files, folders and links"


@dataclass(frozen=True, slots=True)
class RoomFound:
    """The result of ``check_room``: how much of each limit will be used, and the plan for snapshots to remove, if one
    is needed."""

    used: Mapping[str, int]
    room: RoomPlan | None = None

    @property
    def going(self) -> Collection[str]:
        """The snapshots that are to be removed."""
        return self.room.going if self.room is not None else ()

    async def make(self, engine: Engine) -> list[str]:
        """Remove the planned snapshots, once the new one is stored. Return warnings about it."""
        gone = await self.room.make(engine.repository) if self.room is not None and self.room.going else 0
        if not gone or self.room is None:
            return []
        if engine.forgot is not None:
            engine.forgot(self.room.memory, gone)
        return [FORGOTTEN.format(count=gone, memory=self.room.memory, were="was" if gone == 1 else "were")]


def compute_room_left(engine: Engine, sizes: Mapping[str, int]) -> int | None:
    """Return how many bytes a memory may still add to the store, by a listing of it. ``None`` if there is no limit, or
    if old snapshots may be removed to make room."""
    limits = engine.limits
    if not limits.memory_bytes or limits.trims("memory_bytes"):
        return None
    return max(0, limits.memory_bytes - sum(sizes.values()))


async def check_room(
    run: ExportRun, coming: SnapshotFacts, added: int, growth: int, keep: Collection[str]
) -> RoomFound:
    """Check that the snapshot ``coming`` may add ``added`` bytes to those of its memory; ``growth`` of them is the
    growth of the head.

    If the exceeded limits are set to trim, plan which old snapshots to remove, except those to ``keep``. Packs that
    only those snapshots need no longer count, although they are deleted only after the grace period. Nothing is removed
    yet. Raise ``LimitExceeded`` if that would not be enough.
    """
    engine, memory, held = run.engine, run.request.memory, sum(run.survey.sizes.values())
    limits, used = engine.limits, {}
    if engine.charge is not None:
        await engine.charge(memory, added)
    if limits.memory_bytes:
        used["memory_bytes"] = held + added
    if limits.store_bytes:
        store = engine.repository.store
        used["store_bytes"] = await engine.use.bytes(store) + added
        if used["store_bytes"] > limits.store_bytes:
            used["store_bytes"] = await engine.use.bytes(store, fresh=True) + added
    over = _find_excess(engine, used)
    if not over:
        return RoomFound(_leave_out_hidden(engine, used))
    room = None
    if all(map(limits.trims, over)):
        from sidecar.store.retention import plan_room  # late: few exports have to make room

        labelled = engine.retention.build_policy_for(memory).labelled
        # How many bytes the memory's snapshots may have together so that the limit that is exceeded most is met. The
        # growth of the head is left out, because it is not part of any snapshot.
        most = held + added - growth - max(over.values())
        room = await plan_room(engine.repository, memory, coming, most, keep, labelled)
        used = {key: have - (held + added) + room.bytes + growth for key, have in used.items()}
        over = _find_excess(engine, used)
    if over:
        raise _build_full_error(engine, memory, used, next(iter(over)))
    return RoomFound(_leave_out_hidden(engine, used), room)


def _leave_out_hidden(engine: Engine, used: Mapping[str, int]) -> dict[str, int]:
    """Return what a caller may be told: not how much others have in the store, if it may not see all memories."""
    return {key: have for key, have in used.items() if key != "store_bytes" or engine.view is None}


def _find_excess(engine: Engine, used: Mapping[str, int]) -> dict[str, int]:
    """Return by how much each exceeded limit is exceeded."""
    most = {key: getattr(engine.limits, key) for key in used}
    return {key: have - most[key] for key, have in used.items() if have > most[key]}


def _build_full_error(engine: Engine, memory: str, used: Mapping[str, int], key: str) -> LimitExceeded:
    which = (
        f"{memory} would have {{:,}} bytes in the store" if key == "memory_bytes" else "The store would hold {:,} bytes"
    )
    also = "Nothing was added; forget snapshots of it, or raise the limit."
    if engine.limits.trims(key):
        also = "Nothing was added, and nothing forgotten: without the snapshots that may be forgotten it is still too much."
    if key == "store_bytes" and engine.view is not None:
        return LimitExceeded(f"The store has no room for more. {also}", code=CODES[key])
    most = getattr(engine.limits, key)
    return LimitExceeded(f"{which.format(used[key])}; limits.{key} allows {most:,}. {also}", code=CODES[key])
