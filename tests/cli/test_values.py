"""The classes of ``sidecar.host.values`` are those of the standard library in all that is used of them."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import pytest
from pydantic import TypeAdapter

from sidecar.format import values
from sidecar.host.values import dataclass
from tests.parts.homes import PROJECT


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


# Each class twice: with the standard ``dataclass``, and with ours. It must make no difference which instance it is either:
# after many, a class gets an ``__init__`` of its own.


def _declare(decorator: Callable[..., Any], field: Callable[..., Any]) -> tuple[type[Any], type[Any]]:
    @decorator()
    class Base:
        word: ClassVar[str] = "no field"
        a: int
        b: str = "b"
        c: list[int] = field(default_factory=list)

        def __post_init__(self) -> None:
            self.seen = (self.a, self.b, list(self.c))

    @decorator(kw_only=True)
    class Below(Base):
        b: str = "other"
        d: int
        e: int = field(default=5)

    return Base, Below


STANDARD = _declare(dataclasses.dataclass, dataclasses.field)
CALLS: list[tuple[tuple[object, ...], dict[str, object]]] = [
    ((1,), {}),
    ((1, "x", [3]), {}),
    ((), {"a": 1, "c": [2]}),
    ((1,), {"b": "y", "d": 4}),
    ((), {"a": 1, "d": 4, "e": 6, "b": "z"}),
    ((), {}),
    ((1, "x", [3], 4), {}),
    ((1,), {"a": 2}),
    ((1,), {"unknown": 2, "d": 1}),
]


def _make(kind: type[Any], args: tuple[object, ...], named: dict[str, object]) -> object:
    try:
        return list(vars(kind(*args, **named)).items())
    except TypeError as problem:
        return str(problem).replace(f"{kind.__qualname__}.", "")


@pytest.mark.parametrize("field", [dataclasses.field, values.field], ids=["standard field", "our field"])
@pytest.mark.parametrize("instances", [1, values.MANY, values.MANY + 1, 3 * values.MANY])
@pytest.mark.parametrize("listed", [False, True], ids=["not listed", "listed"])
def test_instances_are_made_as_the_standard_library_makes_them(
    field: Callable[..., Any], instances: int, listed: bool
) -> None:
    for number, (args, named) in enumerate(CALLS):
        for standard, ours in zip(STANDARD, _declare(dataclass, field), strict=True):
            if listed:
                assert [one.name for one in dataclasses.fields(ours)] == [
                    one.name for one in dataclasses.fields(standard)
                ]
            good = {"a": 0} if "d" not in standard.__annotations__ else {"a": 0, "d": 0}
            for _ in range(instances - 1):
                ours(**good)
            assert _make(ours, args, dict(named)) == _make(standard, args, dict(named)), number
            assert ours(**good).c is not ours(**good).c


def test_the_program_does_not_load_what_only_lists_fields() -> None:
    program = (
        "import sys\nsys.path.append(sys.argv[1])\nfrom sidecar.program import main\n"
        "from sidecar.program.capture import builder, export\nprint('dataclasses' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(PROJECT)], capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.split() == ["False"], ran.stderr
