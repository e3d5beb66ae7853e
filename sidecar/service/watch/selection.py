"""Which memory a sandbox names, and whether it may: what it says in its metadata is a caller's input, and hostile."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.errors import BadMemoryId, MemoryNotWatched
from sidecar.host.values import dataclass
from sidecar.ids import LONGEST_ID, check_new_memory_id
from sidecar.ports import ListedSandbox
from sidecar.service.access.grants import compile_memories
from sidecar.service.settings import Watch


@dataclass(frozen=True, slots=True)
class Named:
    """A sandbox that names a memory, and the table that allows it."""

    sandbox: ListedSandbox
    memory: str
    table: Watch


def find_memory(tables: Sequence[Watch], sandbox: ListedSandbox) -> Named | None:
    """Return which memory a sandbox is to have; ``None`` if it names none. Raise ``MemoryNotWatched``.

    The first table that allows it counts. An id counts as it is written: it is never taken for another one that it is
    like.
    """
    if sandbox.plan:
        return None  # created here, by a call or a table that says which memory it has
    problem: MemoryNotWatched | None = None
    for table in tables:
        name = sandbox.metadata.get(table.key)
        if not isinstance(name, str) or not name:
            continue
        try:
            check_new_memory_id(name)
        except BadMemoryId as refused:
            problem = MemoryNotWatched(f"{sandbox.ref} names what is no id of a memory: {refused.message}")
            continue
        if compile_memories(tuple(table.memories))(name):
            return Named(sandbox, name, table)
        problem = MemoryNotWatched(f"{sandbox.ref} names {name[:LONGEST_ID]!r}, which no [[watch]] allows.")
    if problem is not None:
        raise problem
    return None
