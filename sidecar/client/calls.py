"""The API, call by call: the request, the type of the answer, and whether it may be repeated. No I/O here.

Each function describes one call; ``Client`` and ``AsyncClient`` make methods of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from sidecar.client.answers import (
    Acceptance,
    Attached,
    Attachment,
    Deleted,
    Difference,
    Forgotten,
    Forked,
    Found,
    Head,
    Memory,
    Operation,
    Overview,
    Pinned,
    Snapshot,
    SnapshotContents,
)
from sidecar.client.wire import (
    Call,
    build_key_header,
    build_keyed_call,
    build_path,
    convert,
    decode,
    quote_segment,
    read_part,
    read_whole,
)
from sidecar.errors import UsageError
from sidecar.receipts import ExportReceipt, RestoreReceipt


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
    user: str = "",
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
        **({"user": user} if user else {}),
    }
    return build_keyed_call("exports", memory, body, idempotency_key, ExportReceipt)


def restore(
    memory: str,
    *,
    sandbox: str,
    snapshot: str = "latest",
    mode: Literal["replace", "seed"] = "replace",
    projects: Sequence[str] | None = None,
    conversation: str = "",
    force: bool = False,
    must_exist: bool = False,
    withhold_projects: bool | None = None,
    read_only: bool = False,
    discard: bool = False,
    wake: bool = False,
    user: str = "",
    attach: bool = True,
    layouts: Sequence[str] = (),
    checkpoint_every: float | None = None,
    idempotency_key: str | None = None,
) -> Call[RestoreReceipt]:
    """Restore a memory into a sandbox. ``empty`` is a first start, unless the memory ``must_exist``: then it raises
    ``SidecarProblem`` (``memory-not-found``). ``incomplete`` leaves the sandbox as it was.

    Files in the sandbox that no snapshot has are saved first or set aside (``saved_first``, ``set_aside``), unless
    ``discard``; a sandbox that has the latest snapshot already is left as it is (``kept``). With ``read_only``, later
    exports of the sandbox are stored beside the head. With ``withhold_projects``, projects whose folders do not exist
    yet wait for a later restore (``withheld``).
    """
    body = {
        "sandbox": sandbox,
        "snapshot": snapshot,
        "mode": mode,
        "projects": None if projects is None else list(projects),
        "conversation": conversation,
        "force": force,
        **({"must_exist": True} if must_exist else {}),
        **({} if withhold_projects is None else {"withhold_projects": withhold_projects}),
        **({"read_only": True} if read_only else {}),
        **({"discard": True} if discard else {}),
        "wake": wake,
        **({"user": user} if user else {}),
        # Only where they are needed: services of earlier versions do not know them.
        **({} if attach else {"attach": False}),
        **({"layouts": list(layouts)} if layouts else {}),
        **({} if checkpoint_every is None else {"checkpoint_every": checkpoint_every}),
    }
    return build_keyed_call("restores", memory, body, idempotency_key, RestoreReceipt)


def memories() -> Call[list[Memory]]:
    """Every memory of the store."""
    return Call(method="GET", path="/v1/memories", read=read_part("memories", list[Memory]))


def memory(memory: str) -> Call[Memory]:
    """One memory: its head and how many snapshots it has."""
    return Call(method="GET", path=build_path(memory), read=read_whole(Memory))


def snapshots(memory: str) -> Call[list[Snapshot]]:
    """A memory's snapshots, newest first."""
    return Call(method="GET", path=build_path(memory, "snapshots"), read=read_part("snapshots", list[Snapshot]))


def snapshot(memory: str, snapshot: str = "latest") -> Call[SnapshotContents]:
    """A snapshot and every file in it."""
    return Call(method="GET", path=build_path(memory, "snapshots", snapshot), read=read_whole(SnapshotContents))


def diff(memory: str, from_: str = "", to: str = "latest") -> Call[Difference]:
    """What changed between two snapshots; by default, since the parent of ``to``."""
    return Call(
        method="GET", path=build_path(memory, "diff"), query={"from": from_, "to": to}, read=read_whole(Difference)
    )


def adopt(memory: str, file: str | Path, *, label: str = "") -> Call[ExportReceipt]:
    """Adopt an ordinary tarball of a home (.tar, .tar.gz, .tar.zst) as a new snapshot."""
    return Call(
        method="POST",
        path=build_path(memory, "archives"),
        query={"label": label},
        file=Path(file),
        headers={"Content-Type": "application/octet-stream"},
        read=read_whole(ExportReceipt),
        repeatable=False,
    )


def fork(memory: str, new: str, *, snapshot: str = "latest") -> Call[Forked]:
    """Begin a new memory with a copy of a snapshot."""
    body = {"memory": new, "snapshot": snapshot}
    return Call(method="POST", path=build_path(memory, "forks"), body=body, read=read_whole(Forked), repeatable=False)


def rollback(memory: str, snapshot: str) -> Call[Head]:
    """Make another snapshot the head; nothing is removed."""
    body = {"snapshot": snapshot}
    # Not repeatable: between two attempts, an export may have become the head.
    return Call(method="PUT", path=build_path(memory, "head"), body=body, read=read_whole(Head), repeatable=False)


def accept(memory: str, snapshot: str = "") -> Call[Acceptance]:
    """Make a snapshot the head that a guard rejected, or that has diverged; by default, the newest that was rejected since the
    head was made. The one that it replaces is pinned."""
    # Not repeatable: between two attempts, an export may have become the head.
    body = {"snapshot": snapshot}
    return Call(
        method="POST", path=build_path(memory, "acceptances"), body=body, read=read_whole(Acceptance), repeatable=False
    )


def pin(memory: str, snapshot: str) -> Call[Pinned]:
    """Keep a snapshot whatever the retention rules say."""
    return Call(method="PUT", path=build_path(memory, "snapshots", snapshot, "pin"), read=read_whole(Pinned))


def unpin(memory: str, snapshot: str) -> Call[Pinned]:
    """Leave a snapshot to the retention rules again."""
    return Call(method="DELETE", path=build_path(memory, "snapshots", snapshot, "pin"), read=read_whole(Pinned))


def forget(memory: str, *, dry_run: bool = False) -> Call[Forgotten]:
    """Apply the service's retention rules to a memory; with ``dry_run``, only return what would be kept and removed."""
    return Call(method="POST", path=build_path(memory, "forget"), body={"dry_run": dry_run}, read=read_whole(Forgotten))


def delete(memory: str) -> Call[Deleted]:
    """Remove every byte of a memory."""
    return Call(method="DELETE", path=build_path(memory), read=read_whole(Deleted), repeatable=False)


def search(
    words: str, *, memories: Sequence[str] = (), kinds: Sequence[str] = (), limit: int = 20, offset: int = 0
) -> Call[Found]:
    """Search the records of all memories, or of those named. Raise ``SidecarProblem`` (``no-index``) if the service has
    no search database."""
    query: dict[str, str | list[str]] = {
        "q": words,
        "memory": list(memories),
        "kind": list(kinds),
        "limit": str(limit),
        "offset": str(offset),
    }
    return Call(method="GET", path="/v1/search", query=query, read=read_whole(Found))


def attach(
    memory: str,
    *,
    sandbox: str,
    layouts: Sequence[str] = (),
    projects: Sequence[str] | None = None,
    checkpoint_every: float = 300,
    conversation: str = "",
    restore: bool = True,
    wake: bool = False,
    user: str = "",
) -> Call[Attached]:
    """Attach a sandbox until it is detached, in addition to others of the memory: restore into it, then export it
    periodically, before its provider ends it, and when the service stops."""
    body = {
        "sandbox": sandbox,
        "layouts": list(layouts),
        "projects": None if projects is None else list(projects),
        "checkpoint_every": checkpoint_every,
        **({"conversation": conversation} if conversation else {}),
        "restore": restore,
        "wake": wake,
        **({"user": user} if user else {}),
    }
    return Call(method="PUT", path=build_path(memory, "attachment"), body=body, read=read_whole(Attached))


def detach(
    memory: str, *, sandbox: str = "", export: bool = False, idempotency_key: str | None = None
) -> Call[Attached]:
    """Detach a memory's sandbox; with ``export``, export it a last time first. If there are several, name one."""
    query = {"export": "true" if export else "false", **_build_query(sandbox)}
    path, headers = build_path(memory, "attachment"), build_key_header(idempotency_key)
    return Call(method="DELETE", path=path, query=query, headers=headers, read=read_whole(Attached))


def attachment(memory: str, *, sandbox: str = "") -> Call[Attached]:
    """Return the state of the attached sandbox. If there are several, name one."""
    return Call(
        method="GET", path=build_path(memory, "attachment"), query=_build_query(sandbox), read=read_whole(Attached)
    )


def attachments() -> Call[list[Attachment]]:
    """Return every attachment on the store, including those that have ended lately."""
    return Call(method="GET", path="/v1/attachments", read=read_part("attachments", list[Attachment]))


def overview() -> Call[Overview]:
    """Return every attachment, with the service that answers and its store."""
    return Call(method="GET", path="/v1/attachments", read=read_whole(Overview))


def operation(id: str) -> Call[Operation]:
    """Return the state of an export or a restore."""
    return Call(method="GET", path=f"/v1/operations/{quote_segment(id)}", read=_decode_operation)


def archive(memory: str, snapshot: str, target: Path) -> Call[None]:
    """Return the call for a snapshot as a tarball, compressed as the target's name says. Raise ``UsageError`` for a
    plain .tar."""
    if target.suffix == ".tar":
        raise UsageError("The service writes compressed tarballs.", hint="Name the file .tar.gz or .tar.zst.")
    query = {"codec": "zst" if target.suffix in (".zst", ".tzst") else "gz"}
    return Call(
        method="GET", path=build_path(memory, "snapshots", snapshot, "archive"), query=query, read=lambda body: None
    )


def events(after: int | None) -> Call[None]:
    """Return the call for the stream of events after number ``after``."""
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    return Call(method="GET", path="/v1/events", headers=headers, read=lambda body: None)


def _build_query(sandbox: str) -> dict[str, str]:
    return {"sandbox": sandbox} if sandbox else {}


def _decode_operation(body: bytes) -> Operation:
    answer = convert(decode(body), dict[str, Any])
    place = "exported" if answer.get("kind") == "export" else "restored"
    return convert({**answer, place: answer.get("receipt")}, Operation)
