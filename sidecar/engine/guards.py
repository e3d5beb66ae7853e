"""The guards: reasons why a new snapshot must not replace the head, so that a good memory is never overwritten by a
worse one."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from sidecar.errors import UnknownReason
from sidecar.format.index import FILE, Entry
from sidecar.format.patterns import compile_patterns
from sidecar.host.text import format_count, suggest
from sidecar.layouts import Layout
from sidecar.policy.limits import DAMAGED, DOWNGRADE, EMPTY, GONE, MISSING, REASONS, SHRUNK, Guards
from sidecar.receipts import Reason
from sidecar.store.manifest import Manifest

Entries = Mapping[str, Entry]
Layouts = Mapping[str, Layout]
_DATE = "{date}"
_DAY = r"\d{4}-\d\d-\d\d"


def check_reasons(reasons: Iterable[str]) -> None:
    """Raise ``UnknownReason`` for a reason that no guard has; the hint names the nearest known one."""
    for reason in reasons:
        if reason not in REASONS:
            raise UnknownReason(f"There is no guard {reason!r} to allow.", hint=suggest(reason, REASONS, listed=True))


NOTHING = (
    "The sandbox holds no memory: nothing of any layout was found in it. If it is in a project's folder, name that:"
    " --project PATH (projects, over HTTP)."
)


def list_objections(
    new: Manifest,
    entries: Entries,
    head: Manifest | None,
    head_entries: Entries,
    layouts: Layouts,
    guards: Guards,
    allow: Collection[str] = (),
    trimmed: Collection[str] = (),
) -> list[Reason]:
    """List every guard's reason against making this snapshot the head. ``head`` is the snapshot that it would replace.

    Each reason can be allowed on its own. Files that a size limit left out on purpose do not count as lost; ``trimmed``
    are the roots that lost files to a limit.
    """
    allowed = {*allow, *guards.allow}
    found = _find_objections(new, entries, head, head_entries, layouts, guards, trimmed)
    return [reason for reason in found if reason.code not in allowed]


def _find_objections(
    new: Manifest,
    entries: Entries,
    head: Manifest | None,
    head_entries: Entries,
    layouts: Layouts,
    guards: Guards,
    trimmed: Collection[str],
) -> Iterator[Reason]:
    """Yield every guard's reason, whether it is allowed or not."""
    if new.files == 0:
        yield Reason(code=EMPTY, message=NOTHING)
        return  # everything else follows from it
    for database in new.databases:
        if database.check != "ok":
            yield Reason(code=DAMAGED, message=f"SQLite says of {database.path}: {database.check}")
    if head is None:
        return
    whole, head_entries = head_entries, _leave_out_rotated(entries, head, head_entries, layouts, trimmed)
    beside = " beside what rotates" if len(head_entries) < len(whole) else ""
    if missing := _find_missing_path(entries, head, head_entries, layouts):
        yield Reason(code=MISSING, message=f"{missing} is gone; the head has it.")
    yield from _find_missing_roots(entries, head, head_entries, trimmed)
    yield from _find_downgrades(new, head, layouts)
    now, then = (new.files + new.dropped, new.bytes + new.dropped_bytes), _count_files(head_entries)
    yield from _find_shrinkage("It", now, then, guards, beside)
    for layout in guards.layouts:
        now, then = _count_layout(layout, new, entries), _count_layout(layout, head, head_entries)
        if not new.dropped:  # dropped files are not counted by layout
            yield from _find_shrinkage(f"Its {layout} part", now, then, guards.narrow_to_layout(layout), beside)


def _find_missing_path(entries: Entries, head: Manifest, head_entries: Entries, layouts: Layouts) -> str:
    """Return a path that its layout requires and the head has, but the new snapshot has not; empty if there is none."""
    for root in head.roots:
        required = layouts[root.layout].required if root.layout in layouts else ()
        wanted = compile_patterns(f"{root.name}/{pattern}" for pattern in required)
        for path, entry in head_entries.items():
            if entry.type == FILE and path not in entries and wanted.match(path):
                return path
    return ""


def _find_missing_roots(
    entries: Entries, head: Manifest, head_entries: Entries, trimmed: Collection[str]
) -> Iterator[Reason]:
    """Yield a reason for each root of which the head has files and the new snapshot has none, as when a sandbox started
    empty."""
    for root in head.roots:
        if root.name in trimmed or any(_mark_files(root.name, entries)):
            continue
        if lost := sum(_mark_files(root.name, head_entries)):
            there = f"the head has {format_count(lost, 'file')} there"
            message = f"Nothing was found of {root.name} ({root.layout} in {root.hint}); {there}."
            yield Reason(code=GONE, message=message)


def _leave_out_rotated(
    entries: Entries, head: Manifest, head_entries: Entries, layouts: Layouts, trimmed: Collection[str]
) -> Entries:
    """Return the head's entries without rotating files that their owner has deleted since, so that they count neither
    before nor after. Roots that a size limit trimmed are left as they are: there, a missing file counts as still
    present."""
    rotating = {
        root.name: _compile_rotating(layouts[root.layout])
        for root in head.roots
        if root.layout in layouts and layouts[root.layout].rotating and root.name not in trimmed
    }

    def rotated(path: str) -> bool:
        root, _, relative = path.partition("/")
        return root in rotating and rotating[root].match(relative) is not None

    gone = {path for path in head_entries if path not in entries and rotated(path)}
    return {path: entry for path, entry in head_entries.items() if path not in gone} if gone else head_entries


def _compile_rotating(layout: Layout) -> re.Pattern[str]:
    text = compile_patterns(pattern.replace(_DATE, "\0") for pattern in layout.rotating).pattern
    return re.compile(text.replace(re.escape("\0"), _DAY), re.DOTALL)


def _mark_files(root: str, entries: Entries) -> Iterator[bool]:
    """Yield, for each entry, whether it is a file below ``root``."""
    return (entry.type == FILE and path.startswith(f"{root}/") for path, entry in entries.items())


def describe_moved_projects(new: Manifest, head: Manifest, layouts: Layouts, *, named: bool) -> list[str]:
    """Return a warning for each project whose path differs from its path in the head, since it may be a different
    project. A project that was named in the request and has kept its folder name is taken as moved, without a warning.
    """
    projects = {name for name, layout in layouts.items() if any(root.project for root in layout.roots)}
    places = {root.name: root.hint for root in head.roots if root.layout in projects}
    return [
        f"{root.name} is {root.hint} now and was {places[root.name]} in the head; if these are two projects, name both."
        for root in new.roots
        if places.get(root.name, root.hint) != root.hint
        and not (named and posixpath.basename(places[root.name]) == posixpath.basename(root.hint))
    ]


def _find_downgrades(new: Manifest, head: Manifest, layouts: Layouts) -> Iterator[Reason]:
    """Yield a reason for each database whose schema version, if its layout tells it, is older than the head's."""
    layout_of = {root.name: root.layout for root in new.roots}
    before = {database.path: database.schema for database in head.databases}
    for database in new.databases:
        root, _, relative = database.path.partition("/")
        layout = layouts.get(layout_of.get(root, ""))
        if layout is None or relative not in layout.schemas or database.check != "ok":
            continue
        if database.schema < before.get(database.path, 0):
            message = f"{database.path} has schema {database.schema or 'none'}; the head has {before[database.path]}."
            yield Reason(code=DOWNGRADE, message=message)


def _find_shrinkage(
    what: str, now: tuple[int, int], then: tuple[int, int], guards: Guards, beside: str = ""
) -> Iterator[Reason]:
    (files, size), (files_then, size_then) = now, then
    if size_then >= guards.shrink_from_bytes and size < size_then * guards.shrink_to:
        yield Reason(code=SHRUNK, message=f"{what} has {size:,} bytes; the head has {size_then:,}{beside}.")
    if files_then >= guards.shrink_from_files and files < files_then * guards.shrink_to:
        yield Reason(
            code=SHRUNK, message=f"{what} has {format_count(files, 'file')}; the head has {files_then:,}{beside}."
        )


def _count_layout(layout: str, manifest: Manifest, entries: Entries) -> tuple[int, int]:
    """Return the number and the total size of the files of one layout."""
    roots = {root.name for root in manifest.roots if root.layout == layout}
    return _count_files({path: entry for path, entry in entries.items() if path.split("/")[0] in roots})


def _count_files(entries: Entries) -> tuple[int, int]:
    """Return the number and the total size of the files among ``entries``."""
    files = [entry.size for entry in entries.values() if entry.type == FILE]
    return len(files), sum(files)
