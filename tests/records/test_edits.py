"""Random edits of Markdown and JSON: what was left alone is never reported, and what is reported makes one version of the
other."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from sidecar.layouts.sources import RecordSpec
from sidecar.records.documents import read_list, read_rest
from sidecar.records.files import MemoryFile
from sidecar.records.matches import Match, match_rows, sketch_rows
from sidecar.records.record import Item
from sidecar.records.sections import read_ending, read_sections

HEADINGS = ("# A", "## B", "### C", "## B", "# A #", "Title\n=====", "Sub\n-----", "#", "###### Six", "# Zürich")
BODIES = (
    "",
    "x",
    "- [ ] do it",
    "- [x] did it\n  and more",
    "```\n# no\n```",
    "text\n\nmore",
    "a\n---\nb",
    "~~~\n## no\n~~~",
)
FRONTS = ("", "", "---\nname: x\n---\n", "---\nname: y\n---\n", "an introduction\n\n", "\ufeff", "\n\n")


def read(place: Path, data: bytes) -> tuple[list[Item], bytes]:
    place.write_bytes(data)
    return list(read_sections(MemoryFile(str(place), "project/MEMORY.md"))), read_ending(str(place))


def compare(old: list[Item], new: list[Item]) -> Match:
    rows = [sketch_rows(("", item) for item in items) for items in (old, new)]
    return match_rows(rows[0], rows[1], ordered=True)


def apply(old: list[Item], new: list[Item], match: Match) -> list[bytes]:
    """The new version, made of the old one and of what is reported alone."""
    told = {j: new[j].source for j in [*match.added, *(j for _, j in match.changed)]}
    gaps = {j: new[j].gap for _, j in match.respaced}
    moved = {j: i for i, j in match.moved if j not in told}
    gone = {*match.removed, *(i for i, _ in match.changed), *moved.values()}
    stayed = iter([i for i in range(len(old)) if i not in gone])
    made = []
    for j in range(len(new)):
        if j in told:
            made.append(told[j])
            continue
        item = old[moved[j]] if j in moved else old[next(stayed)]
        made.append(gaps.get(j, item.gap) + item.source[len(item.gap) :])
    assert next(stayed, None) is None
    return made


def section(chance: random.Random) -> str:
    more = chance.choice(["", f"\nword {chance.randrange(99)}"])
    return f"{chance.choice(HEADINGS)}\n{chance.choice(BODIES)}{more}"


def edit_markdown(seed: int, place: Path) -> None:
    chance = random.Random(seed)
    parts = [section(chance) for _ in range(chance.randrange(7))]
    front, later, edited = chance.choice(FRONTS), list(parts), ""
    between, end = chance.choice(["\n", "\n\n", "\n\n\n"]), chance.choice(["", "\n", "\n\n"])
    newline = chance.choice(["\n", "\n", "\r\n"])
    act = chance.choice(["append", "insert", "remove", "edit", "shuffle", "front", "byte", "end"])
    changed_front, changed_end = front, end
    if act == "append":
        later.append(edited := section(chance))
    elif act == "insert":
        later.insert(chance.randrange(len(later) + 1), edited := section(chance))
    elif act == "remove" and later:
        edited = later.pop(chance.randrange(len(later)))
    elif act == "edit" and later:
        later[chance.randrange(len(later))] += "\nedited"
    elif act == "shuffle":
        chance.shuffle(later)
    elif act == "front":
        changed_front = chance.choice(FRONTS)
    elif act == "end":
        changed_end = chance.choice(["", "\n", "\n\n\n"])
    old = (front + between.join(parts) + end).replace("\n", newline).encode()
    new = (changed_front + between.join(later) + changed_end).replace("\n", newline).encode()
    if act == "byte" and old:
        raw = bytearray(old)
        raw[chance.randrange(len(raw))] = chance.choice(b"#\n x-`=\r\xff\0")
        new = bytes(raw)
    before, _ = read(place, old)
    after, ending = read(place, new)
    match = compare(before, after)
    assert b"".join(apply(before, after, match)) + ending == new
    # What has the same contents in both is the same, whatever is around it.
    left = {item.digest for item in before} & {item.digest for item in after}
    reported = [after[j] for j in match.added] + [before[i] for i in match.removed]
    for item in reported:
        copies = [sum(one.digest == item.digest for one in side) for side in (before, after)]
        assert item.digest not in left or copies[0] != copies[1]
    if act in ("append", "insert", "remove") and edited.count("\n") < 2 and edited.startswith("# "):
        changes = (len(match.added), len(match.removed), len(match.changed))
        assert sum(changes) <= 3, (old, new, changes)


def edit_json(seed: int, place: Path) -> None:
    chance = random.Random(seed)
    spec = RecordSpec(files=("x.json",), reader="list", kind="learning", list=("items",), key=(("id",),), text=("t",))
    items = [{"id": chance.choice([n, n, None]), "t": chance.choice("abc")} for n in range(chance.randrange(8))]
    later = [dict(item) for item in items]
    act = chance.choice(["add", "remove", "edit", "shuffle", "rewrite"])
    if act == "add":
        later.insert(chance.randrange(len(later) + 1), {"id": 99, "t": "new"})
    elif act == "remove" and later:
        later.pop(chance.randrange(len(later)))
    elif act == "edit" and later:
        chance.choice(later)["t"] = "edited"
    elif act == "shuffle":
        chance.shuffle(later)
    wrapped = chance.random() < 0.5
    sides, rests = [], []
    for side in (items, later):
        indent = 2 if side is later and act == "rewrite" else None
        place.write_text(json.dumps({"version": 1, "items": side} if wrapped else side, indent=indent))
        sides.append(list(read_list(MemoryFile(str(place), "x.json"), spec)))
        rests.append(read_rest(MemoryFile(str(place), "x.json"), spec))
    match = compare(sides[0], sides[1])
    assert [json.loads(source) for source in apply(sides[0], sides[1], match)] == later
    assert rests[0] == rests[1]
    told = (len(match.added), len(match.removed), len(match.changed))
    allowed = {"add": (1, 0, 0), "remove": (0, 1, 0), "shuffle": (0, 0, 0), "rewrite": (0, 0, 0)}
    if act in allowed and items:
        assert told == allowed[act]
    assert sum(told) <= 2


@pytest.mark.parametrize("edit", [edit_markdown, edit_json])
def test_a_few_hundred_edits_are_reported_exactly(edit: object, tmp_path: Path) -> None:
    assert callable(edit)
    for seed in range(300):
        edit(seed, tmp_path / "file")


@pytest.mark.slow
@pytest.mark.parametrize("edit", [edit_markdown, edit_json])
def test_thousands_of_edits_are_reported_exactly(edit: object, tmp_path: Path) -> None:
    assert callable(edit)
    for seed in range(5000):
        edit(seed, tmp_path / "file")


def test_how_a_file_without_headings_begins_is_changed_and_not_another(tmp_path: Path) -> None:
    old, _ = read(tmp_path / "old", b"one\ntwo\n- [ ] a task\nthree\n")
    new, _ = read(tmp_path / "new", b"one\ntwo, and more\n- [ ] a task\nthree\n")
    match = compare(old, new)
    assert (match.changed, match.added, match.removed) == ([(0, 0)], [], [])


def test_appending_changes_one_section_of_a_large_file(tmp_path: Path) -> None:
    chance = random.Random(7)
    text = "\n\n".join(f"## Day {n}\n{'words ' * 900}{chance.random()}" for n in range(1900))
    assert len(text) > 10_000_000
    old, _ = read(tmp_path / "file", text.encode())
    new, _ = read(tmp_path / "file", f"{text}\n\n## Today\nsaid\n".encode())
    match = compare(old, new)
    assert (match.added, match.changed, match.removed, match.moved) == ([1900], [], [], [])
