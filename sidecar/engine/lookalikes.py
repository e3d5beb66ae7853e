"""Memories whose ids look like one that is not there: found with a bounded number of requests, however large the store is."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from sidecar.ids import ROOT, MemoryKeys, build_memory_key
from sidecar.ports import Store
from sidecar.repository import Repository
from sidecar.snapshots.folders import read_id

MOST_FOLDERS = 5_000
"""So many memories are compared; a store lists a thousand at a time."""
MOST_READ = 6
MOST_SHOWN = 3
MOST_TRIED = 20
ALIKE = 0.8
"""How much of two ids has to be the same, as ``difflib`` counts."""


async def find_look_alikes(store: Store, memory: str) -> list[str]:
    """The ids of at most three memories with a head that look like ``memory``, the most similar first."""
    own, names = build_memory_key(memory), await store.folders(ROOT, most=MOST_FOLDERS)
    # Folders have only a part of an id that is no plain name: what the head says is compared once more.
    folders = _find_closest(own.partition("~")[0], {name: name.partition("~")[0] for name in names if name != own})
    heads = [(name, MemoryKeys(f"{ROOT}{name}/").head) for name in folders]
    ids = [(await read_id(store, name, [head]))[0] for name, head in heads]
    return _find_closest(memory, {id: id for id in ids if id})[:MOST_SHOWN]


async def has_other_memories(repository: Repository, but: str) -> bool:
    """Whether a store has any memory but this one: a folder with snapshots in it. Others only remember calls."""
    names = [name for name in await repository.store.folders(ROOT, most=MOST_TRIED) if name != build_memory_key(but)]
    for name in names:
        if "snapshots" in await repository.store.folders(f"{ROOT}{name}/", most=MOST_TRIED):
            return True
    # Many that hold none, one after the other: rare, and then it takes a listing to be sure.
    return len(names) >= MOST_TRIED - 1 and bool({*await repository.memories()} - {but})


def _find_closest(wanted: str, texts: Mapping[str, str]) -> list[str]:
    """The keys whose texts are most like the one wanted, those that differ only in capitals and separators first.

    In a numbered family (``agent-1`` to ``agent-50``) each is like all the others: those are left out, unless they are few.
    """
    folded, keys = _fold_text(wanted), dict[str, list[str]]()
    for key, text in texts.items():
        keys.setdefault(_fold_text(text), []).append(key)
    siblings = [text for text in keys if text != folded and _strip_digits(text) == _strip_digits(folded)]
    if len(siblings) > MOST_SHOWN:
        keys = {text: found for text, found in keys.items() if text not in set(siblings)}
    close = difflib.get_close_matches(folded, keys, MOST_READ, ALIKE) if folded else []
    return [key for text in close for key in keys[text]][:MOST_READ]


def _fold_text(text: str) -> str:
    return "".join(character for character in text.casefold() if character.isalnum())


def _strip_digits(text: str) -> str:
    return re.sub(r"[0-9]", "", text)
