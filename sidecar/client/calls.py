"""The API, call by call: what is sent, how the answer is read, and whether it may be sent twice. No I/O here.

Each function describes one call; ``Client`` and ``AsyncClient`` make methods of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote
from uuid import uuid4

import httpx
import msgspec

from sidecar.client.answers import (
    Attached,
    Attachment,
    Deleted,
    Difference,
    Forgotten,
    Forked,
    Head,
    Memory,
    Operation,
    Pinned,
    Snapshot,
    SnapshotContents,
)
from sidecar.client.problems import UnexpectedAnswer, problem_of
from sidecar.errors import UsageError
from sidecar.ids import check_memory_id
from sidecar.receipts import ExportReceipt, RestoreReceipt

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    method: str
    path: str
    read: Callable[[bytes], T]
    query: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    file: Path | None = None
    """Sent instead of a body."""
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True
    """Whether doing it twice is as good as once."""

    def request(self) -> dict[str, Any]:
        """Arguments for ``httpx``."""
        kind = {} if self.body is None else {"Content-Type": "application/json"}
        return {
            "method": self.method,
            "url": self.path,
            "params": dict(self.query),
            "headers": {**kind, **self.headers},
            "content": None if self.body is None else json.dumps(self.body).encode(),
        }

    def answer(self, response: httpx.Response) -> T:
        """Read an answer. Raise ``SidecarProblem`` when it is one, and ``UnexpectedAnswer`` when it is no answer to this."""
        check(response)
        return self.read(response.content)


def check(response: httpx.Response) -> None:
    """Raise ``SidecarProblem`` unless a response, already read, is a success."""
    if not response.is_success:
        raise problem_of(response.status_code, response.headers, response.content)


def export(
    memory: str,
    *,
    sandbox: str,
    conversation: str = "",
    label: str = "",
    layouts: Sequence[str] = (),
    projects: Sequence[str] | None = None,
    force: bool = False,
    allow: Sequence[str] = (),
    wake: bool = False,
    idempotency_key: str | None = None,
) -> Call[ExportReceipt]:
    """Export a sandbox's memory as a new snapshot. The receipt's ``outcome`` says what came of it."""
    body = {
        "sandbox": sandbox,
        "layouts": list(layouts),
        "projects": None if projects is None else list(projects),
        "conversation": conversation,
        "label": label,
        "force": force,
        **({"allow": list(allow)} if allow else {}),
        "wake": wake,
    }
    return _once("exports", memory, body, idempotency_key, ExportReceipt)


def restore(
    memory: str,
    *,
    sandbox: str,
    snapshot: str = "latest",
    mode: Literal["replace", "seed"] = "replace",
    projects: Sequence[str] | None = None,
    conversation: str = "",
    force: bool = False,
    wake: bool = False,
    idempotency_key: str | None = None,
) -> Call[RestoreReceipt]:
    """Restore a memory into a sandbox. ``empty`` is a first start; ``incomplete`` leaves the sandbox as it was."""
    body = {
        "sandbox": sandbox,
        "snapshot": snapshot,
        "mode": mode,
        "projects": None if projects is None else list(projects),
        "conversation": conversation,
        "force": force,
        "wake": wake,
    }
    return _once("restores", memory, body, idempotency_key, RestoreReceipt)


def memories() -> Call[list[Memory]]:
    """Every memory of the store."""
    return Call(method="GET", path="/v1/memories", read=_part("memories", list[Memory]))


def memory(memory: str) -> Call[Memory]:
    """One memory: its head and how many snapshots it has."""
    return Call(method="GET", path=path_of(memory), read=_whole(Memory))


def snapshots(memory: str) -> Call[list[Snapshot]]:
    """A memory's snapshots, newest first."""
    return Call(method="GET", path=path_of(memory, "snapshots"), read=_part("snapshots", list[Snapshot]))


def snapshot(memory: str, snapshot: str = "latest") -> Call[SnapshotContents]:
    """A snapshot and every file in it."""
    return Call(method="GET", path=path_of(memory, "snapshots", snapshot), read=_whole(SnapshotContents))


def diff(memory: str, from_: str = "", to: str = "latest") -> Call[Difference]:
    """What changed between two snapshots; by default, since the parent of ``to``."""
    return Call(method="GET", path=path_of(memory, "diff"), query={"from": from_, "to": to}, read=_whole(Difference))


def adopt(memory: str, file: str | Path, *, label: str = "") -> Call[ExportReceipt]:
    """Adopt an ordinary tarball of a home (.tar, .tar.gz, .tar.zst) as a new snapshot."""
    return Call(
        method="POST",
        path=path_of(memory, "archives"),
        query={"label": label},
        file=Path(file),
        headers={"Content-Type": "application/octet-stream"},
        read=_whole(ExportReceipt),
        repeatable=False,
    )


def fork(memory: str, new: str, *, snapshot: str = "latest") -> Call[Forked]:
    """Begin a new memory with a copy of a snapshot."""
    body = {"memory": new, "snapshot": snapshot}
    return Call(method="POST", path=path_of(memory, "forks"), body=body, read=_whole(Forked), repeatable=False)


def rollback(memory: str, snapshot: str) -> Call[Head]:
    """Make another snapshot the head; nothing is removed."""
    body = {"snapshot": snapshot}
    # Not repeatable: between the two, somebody's export may have become the head.
    return Call(method="PUT", path=path_of(memory, "head"), body=body, read=_whole(Head), repeatable=False)


def pin(memory: str, snapshot: str) -> Call[Pinned]:
    """Keep a snapshot whatever the retention rules say."""
    return Call(method="PUT", path=path_of(memory, "snapshots", snapshot, "pin"), read=_whole(Pinned))


def unpin(memory: str, snapshot: str) -> Call[Pinned]:
    """Leave a snapshot to the retention rules again."""
    return Call(method="DELETE", path=path_of(memory, "snapshots", snapshot, "pin"), read=_whole(Pinned))


def forget(memory: str, *, dry_run: bool = False) -> Call[Forgotten]:
    """Apply the service's retention rules to a memory; with ``dry_run``, only say what stays and what would go."""
    return Call(method="POST", path=path_of(memory, "forget"), body={"dry_run": dry_run}, read=_whole(Forgotten))


def delete(memory: str) -> Call[Deleted]:
    """Remove every byte of a memory."""
    return Call(method="DELETE", path=path_of(memory), read=_whole(Deleted), repeatable=False)


def attach(
    memory: str,
    *,
    sandbox: str,
    layouts: Sequence[str] = (),
    projects: Sequence[str] | None = None,
    checkpoint_every: float = 300,
    restore: bool = True,
    wake: bool = False,
) -> Call[Attached]:
    """Look after a sandbox from now on: restore into it, then export it now and then and before its provider ends it."""
    body = {
        "sandbox": sandbox,
        "layouts": list(layouts),
        "projects": None if projects is None else list(projects),
        "checkpoint_every": checkpoint_every,
        "restore": restore,
        "wake": wake,
    }
    return Call(method="PUT", path=path_of(memory, "attachment"), body=body, read=_whole(Attached))


def detach(memory: str, *, export: bool = False, idempotency_key: str | None = None) -> Call[Attached]:
    """Stop looking after a memory's sandbox; with ``export``, export it a last time first."""
    query = {"export": "true" if export else "false"}
    path, headers = path_of(memory, "attachment"), _key(idempotency_key)
    return Call(method="DELETE", path=path, query=query, headers=headers, read=_whole(Attached))


def attachment(memory: str) -> Call[Attached]:
    """How the attached sandbox stands."""
    return Call(method="GET", path=path_of(memory, "attachment"), read=_whole(Attached))


def attachments() -> Call[list[Attachment]]:
    """Every sandbox that is looked after."""
    return Call(method="GET", path="/v1/attachments", read=_part("attachments", list[Attachment]))


def operation(id: str) -> Call[Operation]:
    """How an export or a restore stands."""
    return Call(method="GET", path=f"/v1/operations/{_segment(id)}", read=_operation)


def archive(memory: str, snapshot: str, target: Path) -> Call[None]:
    """A snapshot as a tarball, compressed as the target's name says. Raise ``UsageError`` for one that is not."""
    if target.suffix == ".tar":
        raise UsageError("The service writes compressed tarballs.", hint="Name the file .tar.gz or .tar.zst.")
    query = {"codec": "zst" if target.suffix in (".zst", ".tzst") else "gz"}
    return Call(
        method="GET", path=path_of(memory, "snapshots", snapshot, "archive"), query=query, read=lambda body: None
    )


def events(after: int | None) -> Call[None]:
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    return Call(method="GET", path="/v1/events", headers=headers, read=lambda body: None)


def path_of(memory: str, *rest: str) -> str:
    """The path of a memory, or of something below it. The one place where ids become parts of a path."""
    return "/".join(("/v1/memories", _segment(check_memory_id(memory)), *map(_segment, rest)))


def _segment(text: str) -> str:
    if text in ("", ".", ".."):
        raise UsageError(f"{text!r} names nothing.")
    return quote(text, safe="", errors="surrogateescape")


def _once(verb: str, memory: str, body: Mapping[str, Any], key: str | None, kind: type[T]) -> Call[T]:
    """A call that is done once however often it is sent: it has a key, which all its attempts share."""
    return Call(method="POST", path=path_of(memory, verb), body=body, headers=_key(key), read=_whole(kind))


def _key(given: str | None) -> dict[str, str]:
    return {"Idempotency-Key": given or str(uuid4())}


def _whole(kind: type[T]) -> Callable[[bytes], T]:
    return lambda body: _converted(_decoded(body), kind)


def _part(name: str, kind: type[T]) -> Callable[[bytes], T]:
    return lambda body: _converted(_converted(_decoded(body), dict[str, Any]).get(name), kind)


def _operation(body: bytes) -> Operation:
    answer = _converted(_decoded(body), dict[str, Any])
    place = "exported" if answer.get("kind") == "export" else "restored"
    return _converted({**answer, place: answer.get("receipt")}, Operation)


def _decoded(body: bytes) -> object:
    try:
        # Not msgspec's decoder: names of files that are not UTF-8 come as lone surrogates, which it refuses.
        return json.loads(body)
    except ValueError as problem:
        raise UnexpectedAnswer(f"The answer is not JSON: {problem}.") from None


def _converted(answer: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as problem:
        raise UnexpectedAnswer(f"The answer is not what was expected: {problem}.") from None
