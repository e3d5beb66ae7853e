"""Rebuild a head from the manifests, for when the head itself is damaged or missing.

A head remembers what was head before it. If it cannot be read, the manifests still say what each was made for: one that
was to become the head has the ``generation`` of that head, one that was refused says so, and the first of all has
neither a parent nor a generation. A snapshot that was first stored beside the head and made the head later cannot be
told from one that never was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from sidecar.store.manifest import Head, Manifest


def rebuild_head(manifests: Iterable[Manifest]) -> Head | None:
    """Return a head with the history that the manifests tell; ``None`` if none of them was made to become the head.

    Its snapshot is the latest of those. Whether that was still the head at the end is not known: there may have been a
    rollback.
    """
    line = _list_heads([manifest for manifest in manifests if not manifest.rejected])
    head: Head | None = None
    for manifest in line:
        generation = manifest.generation or (head.generation if head else 0)
        head = replace(Head.at(manifest, manifest.time, head), generation=generation)
    return head


def _list_heads(good: Collection[Manifest]) -> list[Manifest]:
    """Return the manifests that were the head, the first one first."""
    made = sorted((one for one in good if one.generation), key=lambda one: (one.generation, one.snapshot))
    parents = {one.parent for one in made}
    # Of two that were made for the same generation one lost the race: not the one that others grew out of.
    by_place: dict[int, list[Manifest]] = {}
    for one in made:
        by_place.setdefault(one.generation, []).append(one)
    made = [next((one for one in rivals if one.snapshot in parents), rivals[0]) for rivals in by_place.values()]
    return [*_list_first_heads(good, parents), *made]


def _list_first_heads(good: Collection[Manifest], parents: Collection[str]) -> list[Manifest]:
    """Return those that became the head when there was none: others grew out of them; else the oldest without a parent."""
    without = sorted((one for one in good if not one.generation), key=lambda one: one.snapshot)
    grown = [one for one in without if one.snapshot in parents]
    oldest = min(good, key=lambda one: one.snapshot, default=None)
    if not grown and oldest is not None and not oldest.generation and not oldest.parent:
        return [oldest]
    return grown
