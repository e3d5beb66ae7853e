"""The docstrings below the fields of a class, which Python itself does not keep."""

from __future__ import annotations

import ast
import inspect
from typing import Any


def read_field_docs(kind: type[Any]) -> dict[str, str]:
    """Return the description of each field of a class and its bases that has one, read from their source."""
    about: dict[str, str] = {}
    for one in reversed(kind.__mro__[:-1]):
        field = ""
        for node in _parse_body(one):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                field = node.target.id
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and field:
                about[field] = " ".join(str(node.value.value).split())
    return about


def _parse_body(kind: type[Any]) -> list[ast.stmt]:
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # a base that is not written in Python, such as ``Protocol``
        return []
    body = ast.parse(inspect.cleandoc(source)).body[0]
    assert isinstance(body, ast.ClassDef)
    return body.body
