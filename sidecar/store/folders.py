"""List the memories of a store. Their ids come from the objects in their folders, because a folder's name does not
always tell the id."""

from __future__ import annotations

from collections.abc import Callable

from sidecar.errors import ObjectRefused
from sidecar.format.checksums import decode_checksummed
from sidecar.host.work import gather_few
from sidecar.ids import ROOT, MemoryKeys, is_plain_id
from sidecar.ports import Store

AT_ONCE = 16
"""How many memories are looked at at a time."""


async def list_memories(store: Store, in_folder: Callable[[str], bool] | None = None) -> tuple[list[str], list[str]]:
    """Return the id of every memory, from its head or else from any of its manifests; and problems with folders in
    which no object is valid. ``in_folder``: other folders are not looked into."""
    folders: dict[str, list[str]] = {}
    async for info in store.list(ROOT):
        folder, _, rest = info.key[len(ROOT) :].partition("/")
        if (rest == "head.json" or rest.startswith("snapshots/")) and (in_folder is None or in_folder(folder)):
            folders.setdefault(folder, []).append(info.key)
    found = await gather_few(lambda one: read_id(store, *one), folders.items(), AT_ONCE)
    return sorted(filter(None, (memory for memory, _ in found))), [problem for _, problem in found if problem]


async def find_memory(store: Store, folder: str) -> str:
    """Return the id of the memory in one folder; "" if no valid object in it tells."""
    keys = [info.key async for info in store.list(f"{ROOT}{folder}/")]
    told = [key for key in keys if key.endswith("/head.json") or "/snapshots/" in key]
    return (await read_id(store, folder, told))[0]


async def read_id(store: Store, folder: str, keys: list[str]) -> tuple[str, str]:
    """Return the id from the first valid object of a folder, and the problem if none is valid."""
    refused = why = ""
    for key in sorted(keys):  # head.json sorts before snapshots/
        try:
            stored = await store.get(key)
            memory = decode_checksummed(stored.data).get("memory") if stored else None
        except ObjectRefused as problem:
            refused = problem.message
            continue
        except ValueError as problem:
            why = f"{key} is damaged: {problem}."
            continue
        if isinstance(memory, str) and key.startswith(MemoryKeys.of(memory).prefix):
            return memory, ""
        why = f"{key} belongs elsewhere." if stored else why
    if not refused and not why:
        return "", ""  # removed since it was listed
    # A memory whose objects are all refused still exists.
    memory = folder if refused and is_plain_id(folder) else ""
    return memory, f"Nothing in {ROOT}{folder}/ is believed: {refused or why}"
