"""The map names files and functions that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.parts.homes import PROJECT

RECORDS = sorted((PROJECT / "docs/decisions").glob("*.md"))
PAGES = ["ARCHITECTURE.md", "CONTRIBUTING.md", *(str(page.relative_to(PROJECT)) for page in RECORDS)]
TOPS = ("adapters/", "tests/", "docs/", "emulators/", "benchmarks/", "deploy/", "sidecar/")
NAMED = re.compile(r"`([\w./-]+\.(?:py|sh|toml|md))(?::([\w.]+))?`")


def _find(path: str) -> Path:
    """Paths of the map begin below ``sidecar/``, unless they name another folder."""
    return PROJECT / path if path.startswith(TOPS) else PROJECT / "sidecar" / path


def _names(path: Path) -> set[str]:
    """The functions, classes and methods of a module, and what it sets at its top."""
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{one.name}"
                for one in node.body
                if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            }
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("page", PAGES)
def test_what_the_map_names_is_there(page: str) -> None:
    wrong = []
    for path, name in NAMED.findall((PROJECT / page).read_text("utf-8")):
        if "NAME" in path or "/" not in path:
            continue
        place = _find(path)
        if not place.is_file() or (name and name not in _names(place)):
            wrong.append(f"{path}:{name}" if name else path)
    assert wrong == []
