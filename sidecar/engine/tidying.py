"""After an export: apply the rules to its memory and, now and then, collect."""

from __future__ import annotations

from sidecar.engine.parts import Engine
from sidecar.errors import SidecarError
from sidecar.repository import HeadState
from sidecar.retention.forgetting import forget_lightly
from sidecar.snapshots.collect import collect

COLLECT_EVERY = 20


async def tidy_store(engine: Engine, memory: str, state: HeadState) -> list[str]:
    """Let go what the rules no longer keep; every twentieth generation, collect. The sandbox is not asked for anything.

    What is stored is stored: trouble here is only a warning.
    """
    retention = engine.retention
    policy = retention.policy_for(memory)
    try:
        if policy.rules or policy.most_bytes:
            forgotten = await forget_lightly(engine.repository, memory, policy)
            if forgotten and engine.forgot is not None:
                engine.forgot(memory, forgotten)
        if state.head is not None and state.head.generation % COLLECT_EVERY == 0:
            await collect(engine.repository, memory, grace=retention.grace_seconds, calls=retention.calls_seconds)
    except SidecarError as problem:
        return [f"Old snapshots or left-overs could not be removed: {problem.message}"]
    return []
