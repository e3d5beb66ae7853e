"""What a person may have meant: another store, another memory, another user's home. The warnings that say so.

Memories with an id similar to a missing one are found with a bounded number of requests, however large the store is.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence

from sidecar.engine.core import CountedSandbox, Engine, View
from sidecar.engine.sandbox.dialogue import redact
from sidecar.errors import MemoryNotFound
from sidecar.format.protocol import Answer
from sidecar.ids import ROOT, MemoryKeys, build_memory_key
from sidecar.ports import Store
from sidecar.store.folders import read_id
from sidecar.store.manifest import Manifest
from sidecar.store.repository import HeadState, Repository

BEGUN = "A new store was begun at {store}: nothing was in it. "
HELD_NOTHING = "{store} held no memory before this one. "
NOTHING = "{store} holds no memory at all. "
SHOULD_IT = "If there should be memories, the store was moved away, is not mounted, or is not the one that was meant."
ABSENT = "There is no memory {memory!r} in {store}: a first start, or another store?"
NEVER_HEAD = "None of the snapshots of {memory!r} in {store} ever became its head: {snapshots}."
OTHER_HOME = (
    "The memory {memory!r} came from the home {was}, and commands in this sandbox run in {now}. If that is not meant, say as"
    " whom with --user NAME."
)
MOST_NAMED = 5


def describe_other_home(sandbox: CountedSandbox, answer: Answer, manifest: Manifest | None) -> list[str]:
    """Return a warning if commands in a sandbox run in another home than the one that a snapshot came from, at the same
    provider.

    A daemon that was restarted may run as another user, who has none of the memory. Folders of this machine are left
    out, because their user named them, and so are imports, which come from no sandbox.
    """
    if manifest is None or not manifest.home or not answer.home or sandbox.ground(None) is not None:
        return []
    home, user = redact(answer.home), redact(answer.user)
    # The same user's home may be on another disk; then it has the same name.
    same = posixpath.basename(home) == posixpath.basename(manifest.home) and user == manifest.user
    if same or home == manifest.home or manifest.sandbox.partition(":")[0] != sandbox.ref.partition(":")[0]:
        return []
    was, now = (f"{at} (user {whose or 'unknown'})" for at, whose in ((manifest.home, manifest.user), (home, user)))
    return [OTHER_HOME.format(memory=manifest.memory, was=was, now=now)]


async def describe_new_store(engine: Engine, memory: str, state: HeadState) -> list[str]:
    """Return a warning if the first export of a memory, which has no snapshots, is also the first one of the store. A
    caller that may not see all memories is not told."""
    repository = engine.repository
    if engine.view is not None or await has_other_memories(repository, memory):
        return []
    return [(HELD_NOTHING if state.store_id else BEGUN).format(store=repository.store.url) + SHOULD_IT]


async def describe_absence(engine: Engine, memory: str, beside: Sequence[str]) -> list[str]:
    """Return warnings for a memory that has nothing to restore. ``beside`` are the snapshots that it has beside a
    missing head."""
    repository = engine.repository
    words = (NEVER_HEAD if beside else ABSENT).format(
        memory=memory, store=repository.store.url, snapshots=join_some(beside)
    )
    if alike := await find_look_alikes(repository.store, memory, engine.view):
        return [words, f"Is it {' or '.join(map(repr, alike))}?"]
    if beside or engine.view is not None or await has_other_memories(repository, memory):
        return [words]
    return [words, NOTHING.format(store=repository.store.url) + SHOULD_IT]


async def build_absence_error(engine: Engine, memory: str, beside: Sequence[str]) -> MemoryNotFound:
    """Build the error for a memory that must exist and has nothing to restore, with the same information as
    ``describe_absence``."""
    _, *more = words = await describe_absence(engine, memory, beside)
    if beside:
        hint = f"`memory-sidecar log {memory}` tells why; `rollback` makes one of them the head."
        return MemoryNotFound(" ".join(words), hint=hint)
    return MemoryNotFound(" ".join([f"There is no memory {memory!r} in {engine.repository.store.url}.", *more]))


def join_some(names: Sequence[str]) -> str:
    """Join the first few names for a message."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


MOST_FOLDERS = 5_000
"""How many memories are compared at most. A store lists a thousand per request."""
MOST_READ = 6
MOST_SHOWN = 3
MOST_TRIED = 20
ALIKE = 0.8
"""The least similarity of two ids, as a ratio of ``difflib``."""


async def find_look_alikes(store: Store, memory: str, view: View | None = None) -> list[str]:
    """Return the ids of at most ``MOST_SHOWN`` memories with a head whose ids are similar to ``memory``, the most
    similar first. With ``view``, no other memory makes a difference."""
    own, names = build_memory_key(memory), await store.folders(ROOT, most=MOST_FOLDERS)
    if view is not None:
        names = [*filter(view.may_see_folder, names)]
    # The key of an id that is not a plain name has only a part of the id, so the ids in the heads are compared
    # afterwards.
    folders = _find_closest(own.partition("~")[0], {name: name.partition("~")[0] for name in names if name != own})
    heads = [(name, MemoryKeys(f"{ROOT}{name}/").head) for name in folders]
    ids = [(await read_id(store, name, [head]))[0] for name, head in heads]
    return _find_closest(memory, {id: id for id in ids if id and (view is None or view.sees(id))})[:MOST_SHOWN]


async def has_other_memories(repository: Repository, but: str) -> bool:
    """Whether a store has any other memory than this one. Only folders with snapshots count: others only have records
    of calls."""
    names = [name for name in await repository.store.folders(ROOT, most=MOST_TRIED) if name != build_memory_key(but)]
    for name in names:
        if "snapshots" in await repository.store.folders(f"{ROOT}{name}/", most=MOST_TRIED):
            return True
    # Many folders without snapshots are rare; in that case only a full listing gives the answer.
    return len(names) >= MOST_TRIED - 1 and bool({*await repository.memories()} - {but})


def _find_closest(wanted: str, texts: Mapping[str, str]) -> list[str]:
    """Return the keys whose texts are most similar to the wanted one; those that differ only in case and separators
    come first.

    In a numbered family (``agent-1`` to ``agent-50``) every id is similar to all others; such ids are left out unless
    they are few.
    """
    folded, keys = _fold_text(wanted), dict[str, list[str]]()
    for key, text in texts.items():
        keys.setdefault(_fold_text(text), []).append(key)
    siblings = [text for text in keys if text != folded and _strip_digits(text) == _strip_digits(folded)]
    if len(siblings) > MOST_SHOWN:
        keys = {text: found for text, found in keys.items() if text not in set(siblings)}
    import difflib  # late: only to find what was meant

    close = difflib.get_close_matches(folded, keys, MOST_READ, ALIKE) if folded else []
    return [key for text in close for key in keys[text]][:MOST_READ]


def _fold_text(text: str) -> str:
    return "".join(character for character in text.casefold() if character.isalnum())


def _strip_digits(text: str) -> str:
    return re.sub(r"[0-9]", "", text)
