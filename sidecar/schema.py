"""What the type of a field cannot say.

The web framework asks each annotation for these methods, so neither it nor its library of models has to be imported
here: a client and most commands work without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Check:
    """A check of what is sent, in the words of pydantic's core schema: ``strict``, ``min_length``, ``max_length``,
    ``ge``, ``le``."""

    def __init__(self, **checks: object) -> None:
        self._checks = checks

    def __get_pydantic_core_schema__(self, kind: Any, build: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**build(kind), **self._checks}


class Schema:
    """Keywords of JSON Schema for the OpenAPI document, such as ``examples``. Nothing is checked by them."""

    def __init__(self, **keywords: object) -> None:
        self._keywords = keywords

    def __get_pydantic_json_schema__(self, kind: Any, build: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {**build(kind), **self._keywords}


class OneOf(Schema):
    """The words that a text in an answer can be. A client takes others too: a later service may have more."""

    def __init__(self, *words: str) -> None:
        super().__init__(enum=list(words))
