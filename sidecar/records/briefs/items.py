"""What there is to read in a snapshot, in the order of its layouts: the parts that a brief can be made of.

Nothing is read as a whole that may be large: the rows that were written last to a database, the beginning of a Markdown
file, the end of JSON lines. What is private is taken out before anything else is done with a text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from itertools import islice
from pathlib import Path
from re import Pattern
from typing import Any, Self

from sidecar.format.index import FILE, Entry
from sidecar.format.patterns import compile_patterns
from sidecar.format.roots import split_number
from sidecar.host.values import dataclass
from sidecar.layouts import Layout, Pointer, find_spec
from sidecar.layouts.briefs import DATE, BriefStep
from sidecar.layouts.sources import MESSAGE, RecordSpec
from sidecar.program.limits.tiers import COLD, HOT, TIERS, WARM, TierRules
from sidecar.program.privacy.passages import PrivateFilter, is_json
from sidecar.records.documents import read_lines, read_list
from sidecar.records.files import MemoryFile, Unreadable
from sidecar.records.record import Item, Record, escape_path
from sidecar.records.sections import BETWEEN, split_sections
from sidecar.records.tables import list_newest, read_table
from sidecar.records.units import Files, choose_specs

MOST_FILES = 500
"""A step reads so many files at most, the newest."""
MOST_PARTS = 1000
"""A step has so many parts at most."""
MOST_READ = 20_000
"""The newest parts of a file are looked for among so many."""
LARGEST_TEXT = 1 << 20
"""Of a text so much is read, of JSON lines so much at the end."""
LARGEST_SOURCE = 32 << 20
"""Beyond this, nothing of a text is read, also if private passages were all that came before."""
LARGEST_PART = 48 << 10
"""A larger part is only named."""
MOST_SOURCES = 64 << 20
"""A step ends after so many bytes of parts, also of such as are only named."""
MOST_BYTES = 1 << 20
"""So much text is in all parts together."""
WINDOW = 1000
"""Among so many rows that were written last, the newest by their time are looked for."""
NEWEST_ROWS = 20
LONGEST_POINTER = 1 << 20
PIECE = 1 << 20
MOST_PROBLEMS = 20
MOST_UNREAD = 100
LATEST = datetime(9999, 1, 1, tzinfo=UTC).timestamp()

_DAY = re.compile(r"\d{4}-\d\d-\d\d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that can be read on its own. ``text`` is as it stands in the memory; empty if it is too large."""

    root: str
    layout: str
    tier: str
    step: int
    path: str
    kind: str
    title: str
    text: str
    size: int
    """How many bytes it has."""
    at: float = 0.0
    """When it was written; 0 if that is not known."""
    project: str = ""
    session: str = ""
    most: int = 0
    """All parts of its step together have at most so many tokens; 0: as many as there are."""
    whole: bool = False
    """It has a title of its own, which is not part of its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A file that a step of its layout reads."""

    root: str
    layout: Layout
    number: int
    step: BriefStep
    relative: str
    path: str
    tier: str
    mtime: int
    specs: tuple[RecordSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The files to read of a snapshot, in order, and those that point at others."""

    files: list[PlannedFile]
    pointers: list[tuple[str, Pointer]]
    unread: list[str]
    """Hot and warm Markdown that no step of its layout names; the first ``MOST_UNREAD``."""

    @property
    def paths(self) -> set[str]:
        return {one.path for one in self.files} | {path for path, _ in self.pointers}


def plan_files(
    entries: Mapping[str, Entry], roots: Mapping[str, str], layouts: Mapping[str, Layout], created: datetime
) -> Plan:
    """Return what is to be read of a snapshot that was made at a time. ``roots`` maps each root to its layout."""
    paths: dict[str, list[str]] = {}
    for path, entry in entries.items():
        if entry.type == FILE and entry.size:
            paths.setdefault(path.partition("/")[0], []).append(path)
    files: list[PlannedFile] = []
    pointers: list[tuple[str, Pointer]] = []
    unread: list[str] = []
    for root in sorted(roots, key=lambda name: (roots[name], split_number(name)[0], split_number(name)[1] or 0, name)):
        layout = layouts.get(roots[root])
        if layout is None:
            continue
        own = sorted(paths.get(root, ()))
        for pointer in layout.pointers:
            names = _compile((pointer.file,)).match
            pointers += [(path, pointer) for path in own if names(path.partition("/")[2])][:MOST_FILES]
        files += _plan_root(root, layout, own, entries, created)
        unread += _list_unread(root, layout, own)
    return Plan(files=files, pointers=pointers, unread=unread[:MOST_UNREAD])


def _plan_root(
    root: str, layout: Layout, paths: list[str], entries: Mapping[str, Entry], created: datetime
) -> Iterator[PlannedFile]:
    tiers = _find_tiers(root, layout)
    for number, step in enumerate(layout.brief or (BriefStep(files=("**",)),)):
        found = []
        for path in paths:
            relative = path.partition("/")[2]
            place = _find_place(step, relative)
            if place is None:
                continue
            tier = WARM if _is_dated(step) else tiers.of(relative)
            if not layout.brief and tier not in (HOT, WARM):
                continue
            specs = _choose_sources(relative, layout, step)
            if specs:
                found.append(
                    (
                        place,
                        PlannedFile(
                            root=root,
                            layout=layout,
                            number=number,
                            step=step,
                            relative=relative,
                            path=path,
                            tier=tier,
                            mtime=entries[path].mtime,
                            specs=specs,
                        ),
                    )
                )
        if _is_dated(step):
            found = _pick_days(found, step.days or 1, created)
        elif step.newest:
            found.sort(key=lambda one: (-one[1].mtime, one[1].path))
        if len(found) > MOST_FILES:
            found = sorted(found, key=lambda one: (-one[1].mtime, one[1].path))[:MOST_FILES]
        if not step.newest and not _is_dated(step):
            found.sort(key=lambda one: (TIERS.index(one[1].tier), one[0], one[1].path))
        yield from (one for _, one in found)


def _find_tiers(root: str, layout: Layout) -> TierRules:
    """Return the tiers of a root's files, without its daily files, whose tier depends on the clock."""
    spec, _ = find_spec(root, layout)
    rules = layout.for_sandbox()
    rules["tiers"] = {name: patterns for name, patterns in rules["tiers"].items() if name != "dated"}
    return TierRules(rules, owned=bool(spec and spec.owned))


def _list_unread(root: str, layout: Layout, paths: list[str]) -> list[str]:
    """Return the hot and warm Markdown that no step names, the hot first. Where a step takes the newest days, other days
    do not count: they are left out on purpose."""
    if not layout.brief:
        return []
    tiers, days = _find_tiers(root, layout), any(map(_is_dated, layout.brief))
    found: list[tuple[int, str]] = []
    for path in paths:
        relative = path.partition("/")[2]
        if any(_find_place(step, relative) is not None for step in layout.brief) or (days and _DAY.search(relative)):
            continue
        tier = tiers.of(relative)
        if tier in (HOT, WARM) and any(spec.reader == "sections" for spec in choose_specs(relative, layout.records)):
            found.append((TIERS.index(tier), path))
    return [path for _, path in sorted(found)]


def _is_dated(step: BriefStep) -> bool:
    return any(DATE in pattern for pattern in step.files)


def _find_place(step: BriefStep, relative: str) -> int | None:
    """Return which of its step's patterns names a file."""
    for number, pattern in enumerate(step.files):
        if _compile((pattern.replace(DATE, "????-??-??"),)).match(relative):
            return number
    return None


@lru_cache(maxsize=512)
def _compile(patterns: tuple[str, ...]) -> Pattern[str]:
    return compile_patterns(patterns)


def _pick_days(found: list[tuple[int, PlannedFile]], days: int, created: datetime) -> list[tuple[int, PlannedFile]]:
    """Return the files of the newest days, the newest first. A day of which the snapshot could not know is none, save
    the next one, which it may have been already where the sandbox was."""
    latest = created.date() + timedelta(days=1)
    by_day: dict[date, list[tuple[int, PlannedFile]]] = {}
    for one in found:
        for text in reversed(_DAY.findall(one[1].relative)):
            try:
                day = date.fromisoformat(text)
            except ValueError:
                continue
            if day <= latest:
                by_day.setdefault(day, []).append(one)
            break
    newest = sorted(by_day, reverse=True)[:days]
    return [one for day in newest for one in sorted(by_day[day], key=lambda each: (each[0], each[1].path))]


def _choose_sources(relative: str, layout: Layout, step: BriefStep) -> tuple[RecordSpec, ...]:
    """Return how a file is read: by its sources, but for messages; if there is none, as it is."""
    known = choose_specs(relative, layout.records)
    if not known:
        known = [RecordSpec(files=(relative,), reader="whole", kind="file")]
    return tuple(spec for spec in known if spec.kind != MESSAGE and (not step.kinds or _may_have(spec, step.kinds)))


def _may_have(spec: RecordSpec, kinds: tuple[str, ...]) -> bool:
    return spec.kind in kinds or (spec.reader == "sections" and "task" in kinds)


def read_parts(plan: Plan, files: Files) -> tuple[list[Part], list[str]]:
    """Return the parts of a snapshot whose planned files are here, in the order of the plan, and what could not be
    read."""
    reading = _Reading(files, _read_pointers(plan.pointers, files))
    steps: dict[tuple[str, int], list[PlannedFile]] = {}
    for one in plan.files:
        steps.setdefault((one.root, one.number), []).append(one)
    for planned in steps.values():
        reading.take_step(planned)
    return reading.parts, reading.problems


def _read_pointers(pointers: Iterable[tuple[str, Pointer]], files: Files) -> dict[str, set[str]]:
    """Return the folders that pointer files name, by root."""
    import msgspec

    found: dict[str, set[str]] = {}
    for path, pointer in pointers:
        if path not in files:
            continue
        try:
            with Path(files[path].place).open("rb") as stream:
                value = msgspec.json.decode(stream.read(LONGEST_POINTER))
        except (OSError, msgspec.DecodeError, RecursionError):
            continue
        named = next(filter(None, (value.get(key) for key in pointer.keys)), "") if isinstance(value, dict) else ""
        if isinstance(named, str) and named and named not in (".", "..") and "/" not in named:
            found.setdefault(path.partition("/")[0], set()).add(pointer.folder.replace("{}", named))
    return found


class _Reading:
    """Reads steps one after another, within bounds."""

    def __init__(self, files: Files, pointed: Mapping[str, set[str]]) -> None:
        self._files = files
        self._pointed = pointed
        self._seen: set[tuple[str, str, str]] = set()
        self._projects: dict[str, str] = {}
        self._room = MOST_BYTES
        self.parts: list[Part] = []
        self.problems: list[str] = []

    def take_step(self, planned: list[PlannedFile]) -> None:
        """Read the files of one step of one root."""
        step = planned[0].step
        if step.pointed:
            folders = self._pointed.get(planned[0].root, set())
            planned = [one for one in planned if any(one.relative.startswith(f"{folder}/") for folder in folders)]
            planned = [replace(one, tier=HOT) for one in planned]
        found = self._choose(step, self._read_all(planned))
        for part in islice(found, MOST_PARTS):
            text = part.text if len(part.text) <= self._room else ""
            self._room -= len(text)
            self.parts.append(replace(part, text=text))
            if part.project:
                self._projects.setdefault(part.root, part.project)

    def _choose(self, step: BriefStep, parts: Iterator[Part]) -> Iterable[Part]:
        if step.same_project:
            parts = (one for one in parts if one.project == self._projects.get(one.root, one.project))
        if step.sections:
            wanted = [name.casefold() for name in step.sections]
            by_name: list[list[Part]] = [[] for _ in wanted]
            for part in islice(parts, MOST_READ):
                heads = part.title.casefold().split(BETWEEN)
                place = next((n for n, name in enumerate(wanted) if any(h.startswith(name) for h in heads)), None)
                if place is not None:
                    by_name[place].append(part)
            chosen: Iterable[Part] = (part for group in by_name for part in group)
        else:
            chosen = parts
        if not step.newest:
            return self._drop_seen(chosen)
        read = list(islice(chosen, MOST_READ))
        # What has no time is as old as its place in the file says: later is newer.
        order = sorted(range(len(read)), key=lambda number: (read[number].at, number), reverse=True)
        return islice(self._drop_seen(read[number] for number in order), step.newest)

    def _drop_seen(self, parts: Iterable[Part]) -> Iterator[Part]:
        """Leave out what an earlier step had."""
        for part in parts:
            key = (part.path, part.kind, f"{part.title}\0{part.text or part.size}")
            if key not in self._seen:
                self._seen.add(key)
                yield part

    def _read_all(self, planned: list[PlannedFile]) -> Iterator[Part]:
        shared: set[tuple[str, str]] = set()
        read = 0
        for one in planned:
            file = self._files.get(one.path)
            for spec in one.specs if file is not None else ():
                assert file is not None
                try:
                    for item, part in _read_source(one, spec, file):
                        if spec.shared and item is not None and item.identity:
                            if (item.kind, item.identity) in shared:
                                continue
                            shared.add((item.kind, item.identity))
                        read += part.size
                        if read > MOST_SOURCES:
                            return
                        yield part
                except (Unreadable, OSError) as problem:
                    if len(self.problems) < MOST_PROBLEMS:
                        self.problems.append(f"{escape_path(one.path)} cannot be read: {problem}.")


def _read_source(one: PlannedFile, spec: RecordSpec, file: MemoryFile) -> Iterator[tuple[Item | None, Part]]:
    """Yield the parts of one source of a file, with their items. Raise ``Unreadable``, possibly after some."""
    if spec.reader == "whole":
        text = _read_public(file, is_json(file.path)).decode("utf-8", "replace").strip("\r\n")
        if "\0" in text:
            raise Unreadable("it is not text")
        if text.strip():
            yield None, _make_part(one, _describe_file(file, spec), text, Path(file.place).stat().st_size)
        return
    for item in _read_items(one, spec, file):
        if one.step.kinds and item.kind not in one.step.kinds:
            continue
        record = item.build("")
        if spec.reader == "sections":
            text = item.source[len(item.gap) :].decode("utf-8", "replace").removeprefix("\ufeff")
            if text.strip():
                yield item, _make_part(one, record, "\n".join(text.splitlines()), len(item.source))
            continue
        clean = replace(record, title=_strip_private(record.title), text=_strip_private(record.text))
        if clean.title or clean.text:
            yield item, _make_part(one, clean, clean.text, max(len(item.source), len(record.text)), whole=True)


def _read_items(one: PlannedFile, spec: RecordSpec, file: MemoryFile) -> Iterator[Item]:
    if spec.reader == "table":
        wanted = list_newest(file, spec, WINDOW)
        if not one.step.same_project:
            wanted = wanted[: one.step.newest or NEWEST_ROWS]
        return read_table(file, spec, wanted[::-1])  # as in any file: the newest last
    if spec.reader == "list":
        return islice(read_list(file, spec), MOST_READ)
    if spec.reader == "lines":
        return islice(read_lines(file, spec, LARGEST_TEXT if one.step.newest else 0), MOST_READ)
    return islice(split_sections(file, _read_public(file, False)), MOST_READ)


def _read_public(file: MemoryFile, in_json: bool) -> bytes:
    """Return the beginning of a text without its private passages."""
    screen = PrivateFilter(in_json, lambda *_: None)
    out, read = b"", 0
    with Path(file.place).open("rb") as stream:
        while len(out) < LARGEST_TEXT and read < LARGEST_SOURCE:
            data = stream.read(PIECE)
            read += len(data)
            out += screen.feed(data, not data)
            if not data:
                break
    return out[:LARGEST_TEXT]


def _strip_private(text: str) -> str:
    if "<" not in text and "\\" not in text:
        return text
    return PrivateFilter(False, lambda *_: None).feed(text.encode("utf-8", "replace"), True).decode("utf-8", "replace")


def _describe_file(file: MemoryFile, spec: RecordSpec) -> Record:
    return Record(kind=spec.kind, key="", title=file.name, project=file.project, at=file.at, path=file.path)


def _make_part(one: PlannedFile, record: Record, text: str, size: int, *, whole: bool = False) -> Part:
    return Part(
        root=one.root,
        layout=one.layout.name,
        tier=one.tier if one.tier in (HOT, WARM) else COLD,
        step=one.number,
        path=escape_path(one.path),
        kind=record.kind,
        title=record.title,
        text=text if len(text) <= LARGEST_PART else "",
        size=size,
        at=_read_time(record.at) if whole else _bound_time(one.mtime / 1e9),
        project=record.project,
        session=record.session,
        most=one.step.tokens,
        whole=whole,
    )


def _read_time(at: datetime | None) -> float:
    try:
        return _bound_time(at.timestamp()) if at else 0.0
    except (OverflowError, ValueError):
        return 0.0


def _bound_time(at: float) -> float:
    """Return a time that can be shown; 0 for any other."""
    return at if 0 < at < LATEST else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """What a brief of a snapshot can be made of."""

    parts: list[Part]
    problems: list[str]
    """What could not be read."""
    unread: list[str]
    """As ``Plan`` has it."""

    def encode(self) -> Any:
        """Return it as plain data, to keep it."""
        import msgspec  # late: a brief begins with what it reads from the store

        return msgspec.to_builtins(self)

    @classmethod
    def decode(cls, value: Any) -> Self:
        """Parse what was kept. Raise ``ValueError``."""
        import msgspec

        try:
            return msgspec.convert(value, cls)
        except msgspec.ValidationError as problem:
            raise ValueError(str(problem)) from None
