"""Which rules a snapshot was made by, and what a later one has because its layouts have learned since."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from sidecar.inside.index import FILE, Entry
from sidecar.inside.roots import numbered
from sidecar.inside.rules import Rules
from sidecar.layouts import Covered, Layout
from sidecar.layouts.earlier import EARLIER, PROJECTS
from sidecar.receipts import Learned
from sidecar.snapshots.manifest import Manifest, Root

MOST_SHOWN = 5


def covered_by(asked: Iterable[Layout], roots: Collection[Root], base: Manifest | None) -> dict[str, Covered]:
    """The rules for each root of these layouts, those of roots that are not in the snapshot by name only. What was not asked
    for stays as the base has it, by the rules of that."""
    used = {spec for root in roots for spec in (root.name, numbered(root.name)[0])}
    rules = {
        spec.name: layout.covered(spec) if spec.name in used else Covered() for layout in asked for spec in layout.roots
    }
    return {**(rules_of(base) if base else {}), **rules}


def rules_of(manifest: Manifest) -> dict[str, Covered]:
    """The rules that a snapshot was made by; of one that keeps none, those of the last version that kept none."""
    return manifest.covered or dict(EARLIER)


def learned(base: Manifest | None, before: Mapping[str, Entry], entries: Mapping[str, Entry]) -> Learned | None:
    """What is new in a snapshot because the rules of its base did not cover it."""
    if base is None:
        return None
    rules = {
        name: Rules({"keep": list(covered.keep), "databases": [], "never": list(covered.left), "secrets": []})
        for name, covered in rules_of(base).items()
    }
    found = {root.name for root in base.roots}
    new = []
    for path, entry in entries.items():
        if entry.type != FILE or path in before:
            continue
        root, _, relative = path.partition("/")
        stem = root if root in rules else numbered(root)[0]
        searched = bool(base.covered) or root in found or stem not in PROJECTS
        if stem not in rules or not searched or (rules[stem].patterns and not rules[stem].allows(relative, False)):
            new.append(entry)
    if not new:
        return None
    paths = sorted(entry.path for entry in new)[:MOST_SHOWN]
    return Learned(files=len(new), bytes=sum(entry.size for entry in new), paths=paths)
