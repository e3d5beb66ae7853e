"""The pages that come from the code say what the code says."""

from __future__ import annotations

import ast
import fnmatch
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.generate import CHECK, SECRET, pages, trees
from sidecar.service import event_types
from sidecar.service.event_details import DETAILS
from sidecar.service.event_types import EVENTS
from sidecar.service.settings import check_events
from tests.parts.homes import PROJECT


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_page_is_what_the_code_says(page: Path) -> None:
    assert page.read_text() == pages()[page], "run `make reference`"


def test_no_other_page_is_in_the_folder_of_reference_pages() -> None:
    assert set((PROJECT / "docs/reference").iterdir()) == {page for page in pages() if page.parent.name == "reference"}


def test_every_event_that_is_published_has_a_type_and_every_type_is_published() -> None:
    published = {kind for tree in trees() for kind in _published(tree)}
    assert {kind for kind in published if not fnmatch.filter(EVENTS, kind)} == set()
    assert {kind for kind in EVENTS if not any(fnmatch.fnmatchcase(kind, one) for one in published)} == set()


def _published(tree: ast.AST) -> Iterator[str]:
    """The type in each call of ``publish``; of one that is put together, a pattern."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if getattr(call.func, "id", getattr(call.func, "attr", "")) != "publish":
            continue
        match call.args[0]:
            case ast.JoinedStr(values=values):
                # Only the verb and the outcome of an operation are put together.
                parts = [str(part.value) if isinstance(part, ast.Constant) else "*" for part in values]
                assert len(parts) in (2, 3) and parts[1].startswith("."), ast.unparse(call)
                yield "".join(parts)
            case ast.Name(id=name):
                yield getattr(event_types, name)
            case kind:
                texts = [node.value for node in ast.walk(kind) if isinstance(node, ast.Constant)]
                assert texts, ast.unparse(call)
                yield from map(str, texts)


def test_what_is_published_has_the_details_that_the_document_names() -> None:
    schemas = json.loads((PROJECT / "docs/openapi.json").read_text())["components"]["schemas"]
    declared = {kind: schemas[details.__name__] for details, kinds in DETAILS.items() for kind in kinds}
    assert declared.keys() == EVENTS.keys()
    checked = set()
    for function in (node for tree in trees() for node in ast.walk(tree) if isinstance(node, FUNCTIONS)):
        for call in _calls(function, "publish", "publish_accepted"):
            given = _keywords(function, call)
            kinds = [event_types.ACCEPTED] if _called(call) == "publish_accepted" else [*_types(call)]
            for kind in [one for pattern in kinds for one in fnmatch.filter(EVENTS, pattern)]:
                if "*" in kinds[0] and not kind.startswith(VERBS):
                    continue
                details = declared[kind]
                if given is not None:
                    assert {*details.get("required", ())} <= given <= details["properties"].keys(), (kind, given)
                    checked.add(kind)
    # What the others hold depends on the receipt: a service is asked (tests/service/test_schema.py).
    assert EVENTS.keys() - checked == {
        kind for kind in EVENTS if kind.startswith(VERBS) and not kind.endswith(".failed")
    }


VERBS = ("export.", "restore.")
"""Only the types of their events are put together."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NOT_DETAILS = {"memory", "sandbox"}


def _called(call: ast.Call) -> str:
    return str(getattr(call.func, "id", getattr(call.func, "attr", "")))


def _calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) in names)


def _types(call: ast.Call) -> Iterator[str]:
    return _published(ast.Expression(body=call))


def _keywords(function: ast.AST, call: ast.Call) -> set[str] | None:
    """The details that a call gives, also by dictionaries that are written out in the function, or that a method
    returns; else ``None``."""
    given = {one.arg for one in call.keywords if one.arg}
    for method in (_called(one.value) for one in call.keywords if isinstance(one.value, ast.Call) and one.arg is None):
        given |= _returned(method)
    for name in (one.value.id for one in call.keywords if one.arg is None and isinstance(one.value, ast.Name)):
        written = [
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign | ast.AnnAssign) and _assigns(node, name)
        ]
        if not written or not all(isinstance(one, ast.Dict) and None not in one.keys for one in written):
            return None
        keys = [key for one in written if isinstance(one, ast.Dict) for key in one.keys]
        given |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    return {name for name in given if name} - NOT_DETAILS


def _returned(method: str) -> set[str]:
    """The keys of the dictionary that a method returns."""
    functions = (node for tree in trees() for node in ast.walk(tree) if isinstance(node, FUNCTIONS))
    (found,) = (one for one in functions if one.name == method)
    (answer,) = (node.value for node in ast.walk(found) if isinstance(node, ast.Return))
    assert isinstance(answer, ast.Dict)
    return {str(key.value) for key in answer.keys if isinstance(key, ast.Constant)}


def _assigns(node: ast.Assign | ast.AnnAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def test_the_webhook_example_passes_the_check_that_the_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (PROJECT / "docs/reference/webhooks.md").read_text()
    head, body = re.findall(r"```http\n(.*?)\n\n(.*?)\n```", page, re.DOTALL)[0]
    headers = dict(line.split(": ", 1) for line in head.splitlines()[1:])
    shown: dict[str, object] = {}
    exec(CHECK, shown)
    is_genuine, time = shown["is_genuine"], shown["time"]
    assert callable(is_genuine) and CHECK in page
    monkeypatch.setattr(time, "time", lambda: float(headers["Memory-Sidecar-Time"]))
    assert is_genuine(SECRET, headers, body.encode())
    assert not is_genuine(SECRET, headers, body.encode() + b" ")
    assert not is_genuine("another", headers, body.encode())


def test_the_webhook_settings_on_the_page_are_taken() -> None:
    page = (PROJECT / "docs/reference/webhooks.md").read_text()
    (hook,) = tomllib.loads(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[0])["webhooks"]
    check_events(hook["events"], ())
