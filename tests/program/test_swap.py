"""A swap carries out all of its plan or nothing, whatever happens to the files while it does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sidecar.format.refusal import Refusal
from sidecar.program import notes
from sidecar.program.places import Containment
from sidecar.program.restore.swap import PendingNotes, Swap, settle

ANYWHERE = Containment(None, frozenset())
SNAPSHOT = "20261116T142916734Z-6122b165"


class Plan:
    """A swap of one file, with an old one in its place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.memory = self.folder / "cache/m"
        self.memory.mkdir(parents=True)
        self.place = self.folder / "note.md"
        self.place.write_bytes(b"old")
        self.journal = self.memory / "journal"
        self.stage = self.folder / f".memory-sidecar-{'0' * 12}"
        self.swap = Swap(str(self.journal), [str(self.stage)], (os.getuid(), os.getgid()), ANYWHERE)
        self.swap.begin()
        (self.stage / "new/0").write_bytes(b"new")

    def replace(self, aside: Path | None = None) -> None:
        self.swap.remove(str(self.place), str(aside or self.stage / "old/1"), self.place.stat())
        self.swap.put(str(self.stage / "new/0"), str(self.place))

    def set_aside(self) -> Path:
        folder = self.memory.parent / "set-aside/20261116T142916Z-x"
        folder.mkdir(parents=True)
        self.swap.use_aside_folder(str(folder))
        return folder / "note.md"


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(tmp_path)


def test_a_file_takes_the_place_of_another(plan: Plan) -> None:
    plan.replace()
    plan.swap.commit()
    plan.swap.end()
    assert plan.place.read_bytes() == b"new" and not plan.stage.exists() and not plan.journal.exists()


def test_what_is_set_aside_stays_there(plan: Plan) -> None:
    plan.replace(aside := plan.set_aside())
    plan.swap.commit()
    plan.swap.end()
    assert (plan.place.read_bytes(), aside.read_bytes()) == (b"new", b"old")


@pytest.mark.parametrize("aside", [False, True])
def test_a_file_that_was_written_to_since_it_was_looked_at_is_put_back(plan: Plan, aside: bool) -> None:
    plan.replace(plan.set_aside() if aside else None)
    plan.place.write_bytes(b"written since")
    with pytest.raises(Refusal) as refused:
        plan.swap.commit()
    assert (refused.value.code, refused.value.retryable) == ("memory-changed", True)
    plan.swap.end()
    assert plan.place.read_bytes() == b"written since"
    assert not plan.stage.exists() and not list(plan.memory.parent.glob("set-aside/*"))


def test_a_file_that_somebody_made_meanwhile_is_not_overwritten(plan: Plan) -> None:
    plan.replace()
    (plan.stage / "new/1").write_bytes(b"new")
    plan.swap.put(str(plan.stage / "new/1"), str(plan.folder / "other.md"))
    (plan.folder / "other.md").write_bytes(b"made meanwhile")
    with pytest.raises(Refusal, match="was made while"):
        plan.swap.commit()
    plan.swap.end()
    assert (plan.place.read_bytes(), (plan.folder / "other.md").read_bytes()) == (b"old", b"made meanwhile")


@pytest.mark.parametrize("moves", [0, 1, 2])
@pytest.mark.parametrize("aside", [False, True])
def test_one_that_was_killed_is_undone_wherever_it_was(plan: Plan, moves: int, aside: bool) -> None:
    target = plan.set_aside() if aside else plan.stage / "old/1"
    plan.replace(target)
    plan.swap._write_journal("swapping")
    if moves > 0:
        plan.place.rename(target)
    if moves > 1:
        (plan.stage / "new/0").rename(plan.place)
    assert settle(str(plan.journal), ANYWHERE) is True
    assert plan.place.read_bytes() == b"old" and not plan.stage.exists() and not plan.journal.exists()
    assert not list(plan.memory.parent.glob("set-aside/*"))


def test_what_took_the_place_of_an_old_file_is_set_aside_when_that_comes_back(plan: Plan) -> None:
    plan.replace()
    plan.swap._write_journal("swapping")
    plan.place.rename(plan.stage / "old/1")
    plan.place.write_bytes(b"made by somebody who found nothing")
    assert settle(str(plan.journal), ANYWHERE) is True
    assert plan.place.read_bytes() == b"old"
    (kept,) = plan.memory.parent.glob("set-aside/*-undone-*/note.md")
    assert kept.read_bytes() == b"made by somebody who found nothing"


@pytest.mark.parametrize("reader", [False, True])
def test_one_that_was_killed_when_all_was_in_place_is_noted(plan: Plan, reader: bool) -> None:
    other = plan.memory.with_name("other")
    other.mkdir()
    notes.write_lineage(str(other), ["s0"], False)
    notes.write_lineage(str(plan.memory), ["s1", "s2"], False)
    plan.replace(aside := plan.set_aside())
    plan.swap.noted = PendingNotes(SNAPSHOT, reader, ("other",))
    plan.swap.commit()
    assert json.loads(plan.journal.read_text())["state"] == "done"
    assert settle(str(plan.journal), ANYWHERE) is False
    assert (plan.place.read_bytes(), aside.read_bytes()) == (b"new", b"old")
    assert notes.read_lineage(str(plan.memory)) == [SNAPSHOT] and notes.is_reader(str(plan.memory)) is reader
    assert notes.read_lineage(str(other)) == [], "what it had in these folders is not there any more"
