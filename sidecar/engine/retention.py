"""After an export: apply the retention rules to its memory and, periodically, collect garbage."""

from __future__ import annotations

from sidecar.engine.core import Engine
from sidecar.engine.quota import RoomFound
from sidecar.errors import SidecarError
from sidecar.store.garbage import collect
from sidecar.store.repository import HeadState
from sidecar.store.retention import forget_lightly

COLLECT_EVERY = 20
OVER = (
    "This memory needs {over:,} bytes more in the store than retention.memory_bytes allows ({most:,}): its head alone, and"
    " what is pinned or labelled to stay, are too much."
)


async def tidy_store(engine: Engine, memory: str, state: HeadState, room: RoomFound) -> list[str]:
    """Remove the snapshots that the quota or the retention rules no longer keep; every ``COLLECT_EVERY`` generations,
    also collect garbage. Return warnings.

    The sandbox is not involved. The export is already stored, so any problem here is only a warning.
    """
    retention, warnings = engine.retention, []
    policy = retention.build_policy_for(memory)
    try:
        warnings += await room.make(engine)
        if policy.rules or policy.most_bytes:
            forgotten, over = await forget_lightly(engine.repository, memory, policy)
            if forgotten and engine.forgot is not None:
                engine.forgot(memory, forgotten)
            warnings += [OVER.format(over=over, most=policy.most_bytes)] if over else []
        if state.head is not None and state.head.generation % COLLECT_EVERY == 0:
            await collect(engine.repository, memory, grace=retention.grace_seconds, calls=retention.calls_seconds)
    except SidecarError as problem:
        warnings.append(f"Old snapshots or left-overs could not be removed: {problem.message}")
    return warnings
