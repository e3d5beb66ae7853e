"""The classes of ``sidecar.host.values`` are those of the standard library in all that is used of them."""

from __future__ import annotations

import copy
import dataclasses

import msgspec
import pytest
from pydantic import TypeAdapter

from sidecar.host.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place."""

    name: str
    size: int = 0
    notes: list[str] = dataclasses.field(default_factory=list, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Town(Place):
    """A place with people."""

    people: int = 1


@dataclass(slots=True)
class Count:
    """It may change."""

    number: int = 0


@dataclass(frozen=True, slots=True)
class Nothing:
    """No fields."""


@dataclass(frozen=True, slots=True)
class Word:
    """It says itself what it equals."""

    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Word) and self.text.lower() == other.text.lower()

    def __hash__(self) -> int:
        return hash(self.text.lower())

    def __repr__(self) -> str:
        return self.text


def test_equal_if_the_fields_are_and_the_class_is() -> None:
    assert Place(name="a", notes=["x"]) == Place(name="a", notes=["y"])
    assert Place(name="a") != Place(name="b")
    assert Place(name="a") != Town(name="a")
    assert Nothing() == Nothing() and hash(Nothing()) == hash(Nothing())
    assert len({Place(name="a"), Place(name="a"), Town(name="a")}) == 2
    assert Count(1) == Count(1) != Count(2)


def test_one_that_may_change_has_no_hash() -> None:
    with pytest.raises(TypeError):
        hash(Count(1))


def test_prints_its_fields() -> None:
    assert repr(Town(name="a", notes=["x"])) == "Town(name='a', size=0, people=1)"
    assert repr(Nothing()) == "Nothing()"


def test_keeps_the_methods_that_a_class_has() -> None:
    assert Word("A") == Word("a") and len({Word("A"), Word("a")}) == 1 and repr(Word("A")) == "A"


def test_takes_keywords_alone() -> None:
    with pytest.raises(TypeError):
        Place("a")  # type: ignore[call-arg]


def test_works_with_what_reads_and_copies_dataclasses() -> None:
    town = Town(name="a", notes=["x"])
    assert dataclasses.replace(town, size=3) == Town(name="a", size=3)
    assert dataclasses.asdict(town) == {"name": "a", "size": 0, "notes": ["x"], "people": 1}
    assert copy.deepcopy(town) == town
    assert msgspec.convert({"name": "a"}, Town) == town
    assert TypeAdapter(Town).validate_python({"name": "a", "notes": ["x"]}) == town
    assert TypeAdapter(Town).dump_python(town)["people"] == 1
