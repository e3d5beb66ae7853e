"""The rooms of the house: what each may import, as ARCHITECTURE.md draws it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parts.homes import PROJECT

ORDER = (
    *(
        "format",
        "program",
        "errors",
        "host",
        "ids",
        "ports",
        "schema",
        "receipts",
        "models",
        "layouts",
        "policy",
        "store",
        "records",
        "search",
        "audit",
    ),
    *("engine", "service", "config", "client", "adapters", "wiring", "cli"),
)
"""From the bottom to the top: a room imports only what stands before it, and itself."""
ALONE = {"format": set(), "program": {"format"}, "client": {"errors", "host", "ids", "schema", "receipts", "models"}}
"""Rooms that may import less than what stands before them: these go elsewhere by themselves."""
VENDORS = {"e2b", "daytona", "boto3", "botocore", "s3transfer", "psycopg"}
OVER_HTTP = {"api", "door", "server.py", "warmup.py"}
"""What of the service may know that there is HTTP."""
WEB = {"fastapi", "starlette", "uvicorn"}
MOST_MODULES = 20
MOST_PARAMETERS = 6


def _modules() -> Iterator[tuple[str, Path]]:
    """Every module of the product, with the room it is in."""
    for path in sorted((PROJECT / "sidecar").rglob("*.py")):
        parts = path.relative_to(PROJECT / "sidecar").with_suffix("").parts
        yield parts[0], path
    for path in sorted((PROJECT / "adapters").rglob("*.py")):
        yield "adapters", path


MODULES = [(room, path) for room, path in _modules() if room not in ("__init__", "__main__")]


@functools.cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """The modules that a module imports anywhere in it: in functions, and for types alone, too."""
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: imports are written from the top"
            if node.module in ("sidecar", "adapters"):
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module or ""


def _room_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] == "adapters":
        return "adapters"
    return parts[1] if parts[0] == "sidecar" and len(parts) > 1 and parts[1] in ORDER else None


def test_every_module_is_in_a_room() -> None:
    assert {room for room, _ in MODULES} == set(ORDER)


@pytest.mark.parametrize("room", ORDER)
def test_a_room_imports_only_what_is_below_it(room: str) -> None:
    below = set(ORDER[: ORDER.index(room) + 1])
    allowed = ALONE.get(room, below) | {room}
    wrong = [
        f"{path.relative_to(PROJECT)}:{line} imports {module}"
        for own, path in MODULES
        if own == room
        for line, module in _imports(path)
        if (other := _room_of(module)) is not None and other not in allowed
    ]
    assert wrong == []


def test_what_goes_into_a_sandbox_imports_the_standard_library_alone() -> None:
    import sys

    wrong = [
        f"{path.relative_to(PROJECT)}:{line} imports {module}"
        for room, path in MODULES
        if room in ("format", "program")
        for line, module in _imports(path)
        if module.split(".")[0] not in (*sys.stdlib_module_names, "sidecar", "__future__", "compression", "zstandard")
    ]
    assert wrong == []


def test_vendors_are_imported_in_adapters_alone() -> None:
    wrong = [
        f"{path.relative_to(PROJECT)}:{line} imports {module}"
        for room, path in MODULES
        if room != "adapters"
        for line, module in _imports(path)
        if module.split(".")[0] in VENDORS
    ]
    assert wrong == []


def test_what_the_service_does_knows_nothing_of_http() -> None:
    """Routes call the core of the service, never the other way round."""
    wrong = [
        f"{path.relative_to(PROJECT)}:{line} imports {module}"
        for room, path in MODULES
        if room == "service" and path.relative_to(PROJECT / "sidecar/service").parts[0] not in OVER_HTTP
        for line, module in _imports(path)
        if module.startswith("sidecar.service.api") or module.split(".")[0] in WEB
    ]
    assert wrong == []


def test_no_room_is_a_heap() -> None:
    folders = {path.parent for _, path in MODULES}
    counts = {folder: len([file for file in folder.glob("*.py") if file.name != "__init__.py"]) for folder in folders}
    assert {str(folder.relative_to(PROJECT)): count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_functions_of_the_engine_take_the_run_and_few_other_things() -> None:
    wrong = [
        f"{path.relative_to(PROJECT)}:{node.lineno} {node.name} has {count} parameters"
        for room, path in MODULES
        if room == "engine"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (count := _count_parameters(node.args)) > MOST_PARAMETERS
    ]
    assert wrong == []


def _count_parameters(given: ast.arguments) -> int:
    """The number of parameters, also of those that are only passed by name; an object itself does not count."""
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, [given.vararg, given.kwarg])]
    return len([one for one in parameters if one.arg not in ("self", "cls")])


def test_modules_of_one_room_import_each_other_in_one_direction() -> None:
    """No two modules need each other to be loaded; for types alone they may."""
    graph = {_name(path): set(_loaded(path)) for _, path in MODULES}
    for name in graph:
        seen, todo = set(), [*graph[name]]
        while todo:
            other = todo.pop()
            assert other != name, f"{name} is imported by what it imports"
            if other not in seen:
                seen.add(other)
                todo += graph.get(other, ())


def _name(path: Path) -> str:
    name = ".".join(path.relative_to(PROJECT).with_suffix("").parts)
    return name.removesuffix(".__init__")


NAMES = {_name(path) for _, path in MODULES}


def _loaded(path: Path) -> Iterator[str]:
    """What a module imports when it is loaded: not in functions, and not for types alone."""
    todo: list[ast.AST] = list(_parse(path).body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in NAMES else node.module or ""
        todo += ast.iter_child_nodes(node)


def test_no_two_files_of_tests_have_one_name() -> None:
    """Of two such files pytest collects one, and stops at the other."""
    names = [path.name for path in (PROJECT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
