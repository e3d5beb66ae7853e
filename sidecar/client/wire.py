"""Build requests and parse answers. No I/O here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote
from uuid import uuid4

import httpx
import msgspec

from sidecar.client.problems import UnexpectedAnswer, build_problem
from sidecar.errors import UsageError
from sidecar.host.values import dataclass
from sidecar.ids import check_memory_id
from sidecar.models.answers import ExportOperation, Operation, Overview, RestoreOperation
from sidecar.models.records import Comparison
from sidecar.models.requests import Body

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One call of the API, with the function that parses its answer."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    query: Mapping[str, str | list[str]] = field(default_factory=dict)
    body: Body | None = None
    file: Path | None = None
    """Sent instead of a body."""
    target: Path | None = None
    """Where the answer is written."""
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True
    """Whether sending it twice has the same effect as once."""

    def request(self) -> dict[str, Any]:
        """Return the arguments for ``httpx``."""
        kind = {} if self.body is None else {"Content-Type": "application/json"}
        return {
            "method": self.method,
            "url": self.path,
            "params": dict(self.query),
            "headers": {**kind, **self.headers},
            "content": None if self.body is None else json.dumps(self.body.as_dict()).encode(),
        }

    def follow(self, answer: T) -> Call[T] | None:
        """Return the call for the next page of a listing that is read to its end; ``None`` if there is none."""
        after = answer.next if isinstance(answer, Rows | Overview) else None
        return replace(self, query={**self.query, "after": after}) if after else None

    def answer(self, response: httpx.Response) -> T:
        """Parse the answer. Raise ``SidecarProblem`` if it is an error, and ``UnexpectedAnswer`` if it is not what this
        call returns."""
        check_response(response)
        return self.read(response)


class Rows(list[T]):
    """The rows of a page, and where the next one begins."""

    next: str | None = None


def join_pages(first: T, second: T) -> T:
    """Return two pages of a listing as one, which is followed by what follows the second."""
    if isinstance(first, Rows) and isinstance(second, Rows):
        first.extend(second)
        first.next = second.next
    elif isinstance(first, Overview) and isinstance(second, Overview):
        return replace(second, attachments=[*first.attachments, *second.attachments])
    return first


def check_response(response: httpx.Response) -> None:
    """Raise ``SidecarProblem`` unless a response, already read, is a success."""
    if not response.is_success:
        raise build_problem(response.status_code, response.headers, response.content)


def build_path(memory: str, *rest: str) -> str:
    """Return the path of a memory, or of something below it. The only place where ids become parts of a path."""
    return "/".join(("/v1/memories", quote_segment(check_memory_id(memory)), *map(quote_segment, rest)))


def quote_segment(text: str) -> str:
    """Quote a text as one segment of a path. Raise ``UsageError`` for a text that cannot be one."""
    if text in ("", ".", ".."):
        raise UsageError(f"{text!r} names nothing.")
    return quote(text, safe="", errors="surrogateescape")


def build_keyed_call(verb: str, memory: str, body: Body, key: str | None, kind: type[T]) -> Call[T]:
    """Return a call with an idempotency key, which all its attempts share, so that it is done once however often it is
    sent."""
    return Call(
        method="POST", path=build_path(memory, verb), body=body, headers=build_key_header(key), read=read_whole(kind)
    )


def build_key_header(given: str | None) -> dict[str, str]:
    """Return the idempotency header with the given key, or a new one."""
    return {"Idempotency-Key": given or str(uuid4())}


def read_whole(kind: type[T]) -> Callable[[httpx.Response], T]:
    """Return a parser for an answer of this type."""
    return lambda response: convert(decode(response), kind)


def read_part(name: str, kind: type[T]) -> Callable[[httpx.Response], T]:
    """Return a parser for one field of an answer."""
    return lambda response: convert(_decode_object(response).get(name), kind)


def read_rows(name: str, kind: type[T]) -> Callable[[httpx.Response], list[T]]:
    """Return a parser for a page of a listing."""

    def read(response: httpx.Response) -> list[T]:
        answer = _decode_object(response)
        rows = Rows(convert(answer.get(name), list[kind]))  # type: ignore[valid-type]
        rows.next = convert(answer.get("next"), str | None)  # type: ignore[arg-type]
        return rows

    return read


def read_comparison(response: httpx.Response) -> Comparison:
    """Parse a comparison, whose field "from" has another name in Python."""
    answer = _decode_object(response)
    return convert({**answer, "from_": answer.get("from")}, Comparison)


def read_operation(response: httpx.Response) -> Operation:
    """Parse an operation as what it is: an export or a restore."""
    answer = _decode_object(response)
    if answer.get("kind") == "export":
        return convert(answer, ExportOperation)
    return convert(answer, RestoreOperation)


def read_nothing(response: httpx.Response) -> None:
    """Leave an answer to be read as a stream."""


def decode(response: httpx.Response) -> object:
    """Parse JSON. Raise ``UnexpectedAnswer``."""
    try:
        # Not msgspec's decoder: it refuses lone surrogates, which file names that are not UTF-8 contain.
        return json.loads(response.content)
    except ValueError as problem:
        raise UnexpectedAnswer(f"The answer is not JSON: {problem}.") from None


def _decode_object(response: httpx.Response) -> dict[str, Any]:
    return convert(decode(response), dict[str, Any])


def convert(answer: object, kind: type[T]) -> T:
    """Convert parsed JSON to a type. Raise ``UnexpectedAnswer``."""
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as problem:
        raise UnexpectedAnswer(f"The answer is not what was expected: {problem}.") from None
