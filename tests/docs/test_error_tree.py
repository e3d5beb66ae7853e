"""The error tree: every class has a place in it, a code, a hint and a line in the reference."""

from __future__ import annotations

import ast
import re
from collections import Counter
from typing import Any

import pytest

from docs.generate import error_classes, has_own_code, told, trees
from sidecar import errors
from sidecar.client import SidecarProblem
from sidecar.errors import SidecarError
from sidecar.service.api.problems import status_of
from tests.parts.homes import PROJECT

TREE = error_classes()
WITHIN = {
    *(
        "Abandoned",
        "Altered",
        "BadSignature",
        "AlreadyBegun",
        "NotDirect",
        "SourceFailed",
        "NotDecrypted",
        "Unreadable",
    ),
    # In the program inside the sandbox, which knows nothing of the tree.
    *("BadTarball", "BaseUnusable", "CopyMisread", "OtherProtocol", "OverLimit", "Refusal", "RulesMissing"),
    *("UnexpectedPage", "UnnamedDatabase", "Unscrubbable"),
}
"""Signals between two functions, caught before anything reaches a caller."""


def test_codes_are_stable_words_and_no_two_classes_share_one() -> None:
    codes = Counter(kind.code for kind in TREE if has_own_code(kind))
    assert [code for code, count in codes.items() if count > 1] == []
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", code) for code in codes)


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_a_class_says_what_happened_and_what_to_do(kind: type[SidecarError]) -> None:
    assert "__doc__" in vars(kind)
    assert re.fullmatch(r"[A-Z`].+[.\w)]", told(kind)), "the first line of its docstring says what happened"
    if kind is SidecarProblem:  # the service says what to do
        assert kind.default_hint == ""
    else:
        assert kind.default_hint
    if not has_own_code(kind):  # it is told as its parent: what the reference says of that one is true of it
        bases: tuple[Any, ...] = kind.__bases__
        (parent,) = bases
        assert (status_of(kind), kind.exit_code) == (status_of(parent), parent.exit_code)


def test_every_code_is_in_the_reference() -> None:
    page = (PROJECT / "docs/reference/errors.md").read_text()
    assert [
        kind.code for kind in TREE if has_own_code(kind) and f"\n| `{kind.code}` | {told(kind)} |" not in page
    ] == []


def test_the_drawing_has_every_class_of_the_module() -> None:
    drawn = set(re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)*\b", errors.__doc__ or ""))
    own = {kind.__name__ for kind in TREE if kind.__module__ == errors.__name__}
    assert own - drawn == set()


def test_what_is_raised_is_in_the_tree() -> None:
    known = {kind.__name__ for kind in TREE}
    found = {name for tree in trees() for name in _exceptions(tree)}
    outside = {name.lstrip("_") for name in found - known}
    assert outside - WITHIN == set(), "let it inherit from a class of sidecar.errors"
    assert WITHIN - outside == set(), "no longer there"


def _exceptions(tree: ast.AST) -> set[str]:
    """The classes that inherit straight from an exception of Python's own."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    builtin = {"Exception", "BaseException", "ValueError", "RuntimeError", "OSError", "KeyError", "TypeError"}
    return {one.name for one in classes if builtin & {getattr(base, "id", "") for base in one.bases}}
