"""Which rules a snapshot was made by, and what a later one has because its layouts have learned since."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from sidecar.engine.sandbox.dialogue import ExportAnswer
from sidecar.format.index import DIR, FILE, Entry
from sidecar.format.patterns import Rules
from sidecar.layouts import CoveredRules, Layout, load_built_in
from sidecar.layouts.earlier import EARLIER, PROJECTS
from sidecar.program.capture.roots import split_number
from sidecar.receipts import Learned
from sidecar.store.manifest import FORMAT, RAISED, Manifest, SnapshotRoot

MOST_SHOWN = 5


def collect_rules(
    asked: Iterable[Layout], roots: Collection[SnapshotRoot], base: Manifest | None
) -> dict[str, CoveredRules]:
    """The rules for each root of these layouts, those of roots that are not in the snapshot by name only. What was not asked
    for stays as the base has it, by the rules of that."""
    used = {spec for root in roots for spec in (root.name, split_number(root.name)[0])}
    rules = {
        spec.name: layout.covered(spec) if spec.name in used else CoveredRules()
        for layout in asked
        for spec in layout.roots
    }
    return {**(get_rules(base) if base else {}), **rules}


def get_rules(manifest: Manifest) -> dict[str, CoveredRules]:
    """The rules that a snapshot was made by; of one that keeps none, those of the last version that kept none."""
    return manifest.covered or dict(EARLIER)


def format_of(
    roots: Collection[SnapshotRoot],
    entries: Iterable[Entry],
    named: Collection[str] | None,
    answer: ExportAnswer,
    base: Manifest | None,
) -> int:
    """The format of a snapshot: a raised one where the version before layouts learned would drop something of it.

    That one knew other rules, and of projects only those that were ``named``, or else the home and the working folder.
    Layouts of a config file are the same for both.
    """
    ours = {root.name: root for root in roots if root.layout in load_built_in()}
    rules = {
        name: _Known(EARLIER[_stem(name)])
        for name, root in ours.items()
        if _stem(name) in EARLIER and _was_looked_for(root, named, answer, base)
    }
    for path, kind, *_ in entries:
        root, _, relative = path.partition("/")
        if kind != DIR and root in ours and (root not in rules or not rules[root].has(relative)):
            return RAISED
    return FORMAT


def _stem(name: str) -> str:
    return name if name in EARLIER else split_number(name)[0]


def _was_looked_for(
    root: SnapshotRoot, named: Collection[str] | None, answer: ExportAnswer, base: Manifest | None
) -> bool:
    if _stem(root.name) not in PROJECTS:
        return True
    if named is not None:
        # What the base has of layouts that were not asked for stays as it was found.
        return base is None or base.format == FORMAT or any(found.name == root.name for found in answer.roots)
    folder = root.hint.removesuffix("/.cm") if _stem(root.name) == "cm" else root.hint
    return folder in {"~", *answer.projects}


class _Known:
    """Whether rules cover a file; what they say of folders is asked once for each."""

    def __init__(self, covered: CoveredRules) -> None:
        self._rules = Rules({"keep": list(covered.keep), "databases": [], "never": list(covered.left), "secrets": []})
        self._folders = {"": True}

    def has(self, relative: str) -> bool:
        return self._rules.takes(relative) and self._is_open(relative.rpartition("/")[0])

    def _is_open(self, folder: str) -> bool:
        if folder not in self._folders:
            self._folders[folder] = not self._rules.leaves_out(folder) and self._is_open(folder.rpartition("/")[0])
        return self._folders[folder]


def find_learned(base: Manifest | None, before: Mapping[str, Entry], entries: Mapping[str, Entry]) -> Learned | None:
    """What is new in a snapshot because the rules of its base did not cover it."""
    if base is None:
        return None
    rules = {
        name: Rules({"keep": list(covered.keep), "databases": [], "never": list(covered.left), "secrets": []})
        for name, covered in get_rules(base).items()
    }
    found = {root.name for root in base.roots}
    new = []
    for path, entry in entries.items():
        if entry.type != FILE or path in before:
            continue
        root, _, relative = path.partition("/")
        stem = root if root in rules else split_number(root)[0]
        searched = bool(base.covered) or root in found or stem not in PROJECTS
        if stem not in rules or not searched or (rules[stem].patterns and not rules[stem].allows(relative, False)):
            new.append(entry)
    if not new:
        return None
    paths = sorted(entry.path for entry in new)[:MOST_SHOWN]
    return Learned(files=len(new), bytes=sum(entry.size for entry in new), paths=paths)
