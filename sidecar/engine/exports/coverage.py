"""The capture rules that a snapshot was made by, and the files that a later snapshot has only because its layouts cover
more."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from sidecar.format.index import DIR, FILE, Entry
from sidecar.format.patterns import Rules
from sidecar.format.protocol import ExportAnswer
from sidecar.layouts import CoveredRules, Layout, load_built_in
from sidecar.layouts.earlier import EARLIER, PROJECTS
from sidecar.program.capture.roots import split_number
from sidecar.receipts import Learned
from sidecar.store.manifest import FORMAT, RAISED, Manifest, SnapshotRoot

MOST_SHOWN = 5


def collect_rules(
    asked: Iterable[Layout], roots: Collection[SnapshotRoot], base: Manifest | None
) -> dict[str, CoveredRules]:
    """Return the rules for each root of the layouts of an export. Roots that are not in the snapshot have empty rules.
    Roots of layouts that were not exported keep the base's rules, as they keep its files."""
    used = {spec for root in roots for spec in (root.name, split_number(root.name)[0])}
    rules = {
        spec.name: layout.covered(spec) if spec.name in used else CoveredRules()
        for layout in asked
        for spec in layout.roots
    }
    return {**(get_rules(base) if base else {}), **rules}


def get_rules(manifest: Manifest) -> dict[str, CoveredRules]:
    """Return the rules that a snapshot was made by. A manifest without rules was written by a version that did not
    record them: return the rules of the last such version."""
    return manifest.covered or dict(EARLIER)


def format_of(
    roots: Collection[SnapshotRoot],
    entries: Iterable[Entry],
    named: Collection[str] | None,
    answer: ExportAnswer,
    base: Manifest | None,
) -> int:
    """Return the format number of a snapshot: the raised one if the version before layouts could learn would drop files
    of it.

    That version had other rules. Of projects it looked only at those that were ``named``, or else at the home and the
    working folder. Layouts of a config file are the same for both versions.
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
    """Whether the earlier version would have looked at this root at all."""
    if _stem(root.name) not in PROJECTS:
        return True
    if named is not None:
        # Roots of layouts that were not exported stay as the base has them, so the base's format decides.
        return base is None or base.format == FORMAT or any(found.name == root.name for found in answer.roots)
    folder = root.hint.removesuffix("/.cm") if _stem(root.name) == "cm" else root.hint
    return folder in {"~", *answer.projects}


class _Known:
    """Tells whether rules cover a file. The decision about each folder is cached."""

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
    """Return the files that are new in a snapshot only because the rules of its base did not cover them; ``None`` if
    there are none."""
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
