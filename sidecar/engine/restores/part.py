"""A part of a snapshot (``only``): which paths it has, and a snapshot of one pack that holds these alone.

A part is named by patterns of paths as ``show`` writes them, by layout (``layout:claude-mem``) or by tier (``tier:hot``).
What the sandbox gets is patterns of paths in any case. Paths that are of no use without each other (a layout's coupled
sets, a file and the folder that it points at) are in the part together.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sidecar.errors import LimitExceeded, UnknownLayout, UsageError
from sidecar.format import index
from sidecar.format.index import DIR, FILE, Entry
from sidecar.format.patterns import WILD, PathSet, expand_braces
from sidecar.format.roots import get_root
from sidecar.host.files import Spool, SpooledFile
from sidecar.host.text import suggest
from sidecar.host.values import dataclass
from sidecar.layouts import Layout, find_spec
from sidecar.program.limits.tiers import HOT, TIERS, TierRules
from sidecar.program.notes import MOST_PATTERNS
from sidecar.store.fetch import FetchedSnapshot
from sidecar.store.fold import fold_to_full, unpack_files
from sidecar.store.manifest import Manifest, Pack

LAYOUT, TIER = "layout:", "tier:"
LONGEST_POINTER = 1 << 20
MOST_BRACES = 2
"""In one pattern: each may multiply the number of patterns."""


def check_only(only: Sequence[str], mode: str, layouts: Mapping[str, Layout]) -> None:
    """Raise ``UsageError`` or ``UnknownLayout`` for a part that cannot be named like this."""
    if only and mode != "replace":
        raise UsageError("A part of a memory cannot be restored as a seed.")
    for item in only:
        if item.startswith(LAYOUT) and item.removeprefix(LAYOUT) not in layouts:
            name = item.removeprefix(LAYOUT)
            raise UnknownLayout(f"There is no layout {name!r}.", hint=suggest(name, layouts, listed=True))
        if item.startswith(TIER) and item.removeprefix(TIER) not in TIERS:
            name = item.removeprefix(TIER)
            raise UsageError(f"There is no tier {name!r}.", hint=suggest(name, TIERS, listed=True))
        if item.count("{") > MOST_BRACES:
            raise UsageError(f"{item!r} has more braces than {MOST_BRACES}.", hint="Write several patterns.")
        if not item.strip("/") or item.startswith("/") or any(part in (".", "..") for part in item.split("/")):
            raise UsageError(f"{item!r} is no path of a memory.", hint="Write it as `show` does: project/memory/**")


def cut_part(
    fetched: FetchedSnapshot, only: Sequence[str], layouts: Mapping[str, Layout], spool: Spool
) -> tuple[FetchedSnapshot, list[str]]:
    """Return a part of a snapshot, as if that were all of it, with the patterns of its paths.

    Raise ``UsageError`` if there is nothing in it, ``LimitExceeded`` if it takes too many patterns to name it.
    """
    patterns = PartFinder(fetched, layouts, spool).find(only)
    if len(patterns) > MOST_PATTERNS:
        words = f"This part is {len(patterns):,} patterns long; at most {MOST_PATTERNS:,} are possible."
        raise LimitExceeded(words, code="limit-files", hint="Name folders instead: project/memory/**")
    named = PathSet(patterns)
    entries = {path: entry for path, entry in fetched.entries.items() if named.has(path)}
    if not any(entry.type != DIR for entry in entries.values()):
        raise UsageError(
            f"Nothing in {fetched.manifest.snapshot} is in the part {', '.join(only)}.",
            hint=f"`memory-sidecar show {fetched.manifest.memory} {fetched.manifest.snapshot}` lists its paths.",
        )
    for path in list(entries):  # the folders above have their modes
        while "/" in path:
            path = path.rpartition("/")[0]
            if path in fetched.entries:
                entries[path] = fetched.entries[path]
    return _pack(fetched, entries, spool), patterns


def _pack(fetched: FetchedSnapshot, entries: dict[str, Entry], spool: Spool) -> FetchedSnapshot:
    """Return a snapshot of one full pack with these entries of another."""
    pack = fold_to_full(fetched.list_pack_files(), spool.new(), spool.new(), entries)
    index_file = spool.new()
    with index_file.open("wb") as stream:
        index.write(stream, pack.index)
    packs, indexes = _measure(pack.path), _measure(index_file)
    manifest, roots = fetched.manifest, {get_root(path) for path in entries}
    sizes = [entry.size for entry in entries.values() if entry.type == FILE]
    part = replace(
        manifest,
        packs=[
            Pack(
                id=manifest.packs[0].id,
                kind="full",
                codec=pack.codec,
                bytes=packs.size,
                sha256=packs.sha256,
                index_bytes=indexes.size,
                index_sha256=indexes.sha256,
            )
        ],
        roots=[root for root in manifest.roots if root.name in roots],
        files=len(sizes),
        bytes=sum(sizes),
        databases=[row for row in manifest.databases if row.path in entries],
        keyed={folder: hint for folder, hint in manifest.keyed.items() if _has_folder(entries, folder)},
    )
    return FetchedSnapshot(part, entries, [pack.index], [packs], [indexes])


def _has_folder(entries: dict[str, Entry], folder: str) -> bool:
    return any(path.startswith(f"{folder}/") for path in entries)


def _measure(path: Path) -> SpooledFile:
    with path.open("rb") as file:
        return SpooledFile(path, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


@dataclass(frozen=True, slots=True)
class PartFinder:
    """Finds out which paths of a snapshot are in a part."""

    fetched: FetchedSnapshot
    layouts: Mapping[str, Layout]
    spool: Spool

    @property
    def manifest(self) -> Manifest:
        return self.fetched.manifest

    def find(self, only: Sequence[str]) -> list[str]:
        """Return the patterns of the part."""
        named = (pattern for item in only for pattern in self._expand(item))
        patterns = list(dict.fromkeys(full for pattern in named for full in expand_braces(pattern)))
        chosen = PathSet(patterns)
        coupled = [path for group in self._list_sets() if any(map(chosen.has, group)) for path in group]
        patterns += [_escape(path) for path in coupled if not chosen.has(path)]
        return list(dict.fromkeys(patterns))

    def _expand(self, item: str) -> Iterator[str]:
        """Yield the patterns of what a caller named."""
        if item.startswith(LAYOUT):
            yield from (f"{root.name}/**" for root in self.manifest.roots if root.layout == item.removeprefix(LAYOUT))
        elif item.startswith(TIER):
            yield from self._list_tier(item.removeprefix(TIER))
        elif WILD.search(item) or "{" in item:
            yield f"{item}**" if item.endswith("/") else item
        else:
            path = item.rstrip("/")
            yield path
            if path not in self.fetched.entries or self.fetched.entries[path].type == DIR:
                yield f"{path}/**"

    def _list_tier(self, tier: str) -> Iterator[str]:
        """Yield the paths of a tier; of the hot one also its patterns, so that new files count."""
        for root, rules in self._list_rules():
            if tier == HOT:
                yield from (f"{root}/{pattern}" for pattern in self._find_layout(root)["tiers"].get(HOT, ()))
            for path in self._list_paths(root):
                if self.fetched.entries[f"{root}/{path}"].type != DIR and rules.of(path) == tier:
                    yield _escape(f"{root}/{path}")

    def _list_sets(self) -> Iterator[list[str]]:
        """Yield the sets of paths that stay together."""
        for root, rules in self._list_rules():
            yield from ([f"{root}/{path}" for path in group.paths] for group in rules.sets(self._list_paths(root)))

    def _list_paths(self, root: str) -> list[str]:
        return [path[len(root) + 1 :] for path in self.fetched.entries if path.startswith(f"{root}/")]

    def _find_layout(self, root: str) -> dict[str, Any]:
        """Return the layout of a root, as the program has it."""
        name = next(one.layout for one in self.manifest.roots if one.name == root)
        return self.layouts[name].for_sandbox()

    def _list_rules(self) -> Iterator[tuple[str, TierRules]]:
        """Yield each root with the tiers of its files. Files that point at folders are read."""
        for root in self.manifest.roots:
            if root.layout not in self.layouts:
                continue
            layout = self._find_layout(root.name)
            spec, _ = find_spec(root.name, self.layouts[root.layout])
            owned = spec is not None and spec.owned
            yield root.name, TierRules(layout, self._unpack_pointers(root.name, layout), owned)

    def _unpack_pointers(self, root: str, layout: dict[str, Any]) -> str:
        """Unpack the files of a root that point at folders. Return the folder that they are in; empty if there are none."""
        files = PathSet(f"{root}/{pointer['file']}" for pointer in layout.get("pointers", []))
        entries = {
            path: entry
            for path, entry in self.fetched.entries.items()
            if entry.type == FILE and entry.size <= LONGEST_POINTER and files.has(path)
        }
        if not entries:
            return ""
        staged, folder = unpack_files(self.fetched.list_pack_files(), entries, self.spool.new()), self.spool.new()
        for path in entries:
            target = folder / path[len(root) + 1 :]
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staged[path].place, target)
        return str(folder)


def _escape(path: str) -> str:
    """Return a pattern for one path. A brace, which would name several, is any character."""
    return path.replace("{", "?").replace("}", "?")
