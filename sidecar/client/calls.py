"""Every call of the API, written once for both kinds of clients. No I/O here.

Each method builds the call that ``Client`` or ``AsyncClient`` sends: what it says it returns is ``Call[T]``, and what
comes back is a ``T``, or in the case of ``AsyncClient`` an awaitable of one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Generic, Literal, TypeVar

from sidecar.client.conversations import ConversationPlan
from sidecar.client.methods import sent
from sidecar.client.wire import (
    Call,
    build_key_header,
    build_keyed_call,
    build_path,
    quote_segment,
    read_comparison,
    read_nothing,
    read_operation,
    read_part,
    read_rows,
    read_whole,
)
from sidecar.errors import UsageError
from sidecar.models.answers import (
    Acceptance,
    Attached,
    Attachment,
    Declined,
    Deleted,
    Forgotten,
    Forked,
    Found,
    Head,
    Memory,
    Moved,
    Operation,
    Overview,
    Pinned,
    Restores,
    SandboxStanding,
    Snapshot,
    SnapshotContents,
)
from sidecar.models.records import Blame, Brief, Comparison, HistoryEntry, Records
from sidecar.models.requests import (
    AcceptBody,
    AttachBody,
    BriefBody,
    DeclineBody,
    ExportBody,
    ForgetBody,
    ForkBody,
    MoveBody,
    RestoreBody,
    RollbackBody,
    StartBody,
)
from sidecar.receipts import ExportReceipt, RestoreReceipt

C = TypeVar("C")
TOKENS = 2000


class Calls(Generic[C]):
    """The methods of a client. ``C`` is its kind of conversation."""

    @sent
    def export(
        self,
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
        body = ExportBody(
            sandbox=sandbox,
            layouts=list(layouts),
            projects=None if projects is None else list(projects),
            conversation=conversation,
            label=label,
            force=force,
            allow=list(allow),
            wake=wake,
            user=user,
        )
        return build_keyed_call("exports", memory, body, idempotency_key, ExportReceipt)

    @sent
    def restore(
        self,
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
        only: Sequence[str] = (),
        label: str = "",
        discard: bool = False,
        wake: bool = False,
        user: str = "",
        attach: bool = True,
        layouts: Sequence[str] = (),
        checkpoint_every: float | None = None,
        brief: int = 0,
        brief_path: str = "",
        idempotency_key: str | None = None,
    ) -> Call[RestoreReceipt]:
        """Restore a memory into a sandbox. ``empty`` is a first start, unless the memory ``must_exist``: then it raises
        ``SidecarProblem`` (``memory-not-found``). ``incomplete`` leaves the sandbox as it was.

        Files in the sandbox that no snapshot has are saved first or set aside (``saved_first``, ``set_aside``), unless
        ``discard``; a sandbox that has the latest snapshot already is left as it is (``kept``). With ``read_only``,
        later exports of the sandbox are stored beside the head, under the ``label`` (default: the sandbox's reference); with
        ``only``, a part of the memory is restored like that. With ``withhold_projects``, projects whose folders do
        not exist yet wait for a later restore (``withheld``). With ``brief``, the receipt has what to read first,
        in at most so many tokens; with ``brief_path``, so has that file of the sandbox's home.
        """
        body = RestoreBody(
            sandbox=sandbox,
            snapshot=snapshot,
            mode=mode,
            projects=None if projects is None else list(projects),
            conversation=conversation,
            force=force,
            must_exist=must_exist,
            withhold_projects=withhold_projects,
            read_only=read_only,
            only=list(only),
            label=label,
            discard=discard,
            wake=wake,
            user=user,
            attach=attach,
            layouts=list(layouts),
            checkpoint_every=checkpoint_every,
            brief=BriefBody(tokens=brief or TOKENS, path=brief_path) if brief or brief_path else None,
        )
        return build_keyed_call("restores", memory, body, idempotency_key, RestoreReceipt)

    @sent
    def restore_many(
        self,
        memory: str,
        *,
        sandboxes: Sequence[str],
        snapshot: str = "latest",
        projects: Sequence[str] | None = None,
        read_only: bool = True,
        only: Sequence[str] = (),
        label: str = "",
        conversation: str = "",
        must_exist: bool = False,
        withhold_projects: bool | None = None,
        discard: bool = False,
        wake: bool = False,
        user: str = "",
        attach: bool = True,
        idempotency_key: str | None = None,
    ) -> Call[Restores]:
        """Restore a memory into several sandboxes, from one fetch: by default to be read, so that what they export is
        stored beside the head. The answer has a receipt or a problem for each; look whether it is ``complete``. What fails
        in one sandbox does not keep the others from being restored, and raises nothing. Repeated under the same
        ``idempotency_key``, only those are restored that are not."""
        body = RestoreBody(
            sandboxes=list(sandboxes),
            snapshot=snapshot,
            projects=None if projects is None else list(projects),
            conversation=conversation,
            must_exist=must_exist,
            withhold_projects=withhold_projects,
            read_only=read_only,
            only=list(only),
            label=label,
            discard=discard,
            wake=wake,
            user=user,
            attach=attach,
        )
        return build_keyed_call("restores", memory, body, idempotency_key, Restores)

    def conversation(
        self,
        memory: str,
        *,
        sandbox: str,
        conversation: str = "",
        label: str = "",
        layouts: Sequence[str] = (),
        projects: Sequence[str] | None = None,
        snapshot: str = "latest",
        mode: Literal["replace", "seed"] = "replace",
        wake: bool = False,
        user: str = "",
        require_restore: bool = True,
        must_exist: bool = False,
        checkpoint_every: float | None = None,
    ) -> C:
        """Restore a memory before a conversation and export it after, also when the conversation fails.

        In between the service exports the sandbox every ``checkpoint_every`` seconds (default: the service's setting),
        before its provider ends it, and when the service or this process is told to end. SIGTERM ends the conversation
        first and then the process, with exit code 143, unless the program has its own handler for it.

        Raise ``NotRestored`` at the start if the restore is incomplete, unless ``require_restore`` is False, and
        ``NotSaved`` at the end if the head did not move. If the conversation itself failed, its error is raised, with a
        note about the memory if that was not saved.
        """
        named = None if projects is None else list(projects)
        before = RestoreBody(
            sandbox=sandbox,
            snapshot=snapshot,
            mode=mode,
            projects=named,
            conversation=conversation,
            must_exist=must_exist,
            wake=wake,
            user=user,
            layouts=list(layouts),
            checkpoint_every=checkpoint_every,
        )
        after = ExportBody(
            sandbox=sandbox,
            layouts=list(layouts),
            projects=named,
            conversation=conversation,
            label=label,
            wake=wake,
            user=user,
        )
        return self._converse(ConversationPlan(memory, before, after, require_restore))

    @abstractmethod
    def _converse(self, plan: ConversationPlan) -> C:
        """Return the conversation that a plan describes."""

    @sent
    def memories(self) -> Call[list[Memory]]:
        """Every memory of the store."""
        return Call(method="GET", path="/v1/memories", read=read_rows("memories", Memory))

    @sent
    def memory(self, memory: str) -> Call[Memory]:
        """One memory: its head and how many snapshots it has."""
        return Call(method="GET", path=build_path(memory), read=read_whole(Memory))

    @sent
    def snapshots(self, memory: str) -> Call[list[Snapshot]]:
        """A memory's snapshots, newest first."""
        return Call(method="GET", path=build_path(memory, "snapshots"), read=read_rows("snapshots", Snapshot))

    @sent
    def snapshot(self, memory: str, snapshot: str = "latest") -> Call[SnapshotContents]:
        """A snapshot and every file in it."""
        return Call(method="GET", path=build_path(memory, "snapshots", snapshot), read=read_whole(SnapshotContents))

    @sent
    def diff(
        self,
        memory: str,
        from_: str = "",
        to: str = "latest",
        *,
        other: str = "",
        files: bool = False,
        kinds: Sequence[str] = (),
        limit: int = 1000,
        after: str = "",
    ) -> Call[Comparison]:
        """What differs between two snapshots, record by record; by default, since the parent of ``to``, which is a
        snapshot of ``other`` if that is named. With ``files``, only files are compared. ``next`` of the answer is
        ``after`` of the next page."""
        query: dict[str, str | list[str]] = {
            "from": from_,
            "to": to,
            **({"with": other} if other else {}),
            **({"files": "true"} if files else {}),
            "kind": list(kinds),
            "limit": str(limit),
            "after": after,
        }
        return Call(method="GET", path=build_path(memory, "diff"), query=query, read=read_comparison)

    @sent
    def records(
        self, memory: str, snapshot: str = "latest", *, kinds: Sequence[str] = (), limit: int = 1000, after: str = ""
    ) -> Call[Records]:
        """What a snapshot says, a page at a time: ``next`` of the answer is ``after`` of the next one."""
        query: dict[str, str | list[str]] = {"kind": list(kinds), "limit": str(limit), "after": after}
        path = build_path(memory, "snapshots", snapshot, "records")
        return Call(method="GET", path=path, query=query, read=read_whole(Records))

    @sent
    def file(self, memory: str, path: str, *, snapshot: str = "latest") -> Call[bytes]:
        """A file of a snapshot, as ``snapshot`` lists it: ``project/MEMORY.md``."""
        place = build_path(memory, "snapshots", snapshot, "files", path)
        return Call(method="GET", path=place, read=lambda response: response.content)

    @sent
    def history(
        self, memory: str, *, path: str = "", record: str = "", snapshot: str = "latest"
    ) -> Call[list[HistoryEntry]]:
        """Every version of a file or of a record, the oldest first, with its conversation."""
        query = {"snapshot": snapshot, **({"path": path} if path else {"record": record})}
        read = read_part("versions", list[HistoryEntry])
        return Call(method="GET", path=build_path(memory, "history"), query=query, read=read)

    @sent
    def blame(
        self, memory: str, *, path: str = "", snapshot: str = "latest", kinds: Sequence[str] = (), after: str = ""
    ) -> Call[Blame]:
        """Which conversation and sandbox taught each record of a snapshot, a page at a time."""
        query: dict[str, str | list[str]] = {"path": path, "snapshot": snapshot, "kind": list(kinds), "after": after}
        return Call(method="GET", path=build_path(memory, "blame"), query=query, read=read_whole(Blame))

    @sent
    def brief(self, memory: str, snapshot: str = "latest", *, tokens: int = 2000) -> Call[Brief]:
        """What an agent should read first of a snapshot, within a budget of tokens: ``text`` is all of it as Markdown,
        framed as reference, not as instructions."""
        path = build_path(memory, "snapshots", snapshot, "brief")
        return Call(method="GET", path=path, query={"tokens": str(tokens)}, read=read_whole(Brief))

    @sent
    def download(self, memory: str, snapshot: str, target: str | Path) -> Call[Path]:
        """Write a snapshot to a file as an ordinary tarball (.tar.gz or .tar.zst), completely or not at all."""
        place = Path(target)
        if place.suffix == ".tar":
            raise UsageError("The service writes compressed tarballs.", hint="Name the file .tar.gz or .tar.zst.")
        return Call(
            method="GET",
            path=build_path(memory, "snapshots", snapshot, "archive"),
            query={"codec": "zst" if place.suffix in (".zst", ".tzst") else "gz"},
            target=place,
            read=lambda response: place,
        )

    @sent
    def adopt(self, memory: str, file: str | Path, *, label: str = "") -> Call[ExportReceipt]:
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

    @sent
    def fork(self, memory: str, new: str, *, snapshot: str = "latest") -> Call[Forked]:
        """Begin a new memory with a copy of a snapshot."""
        return Call(
            method="POST",
            path=build_path(memory, "forks"),
            body=ForkBody(memory=new, snapshot=snapshot),
            read=read_whole(Forked),
            repeatable=False,
        )

    @sent
    def rollback(self, memory: str, snapshot: str) -> Call[Head]:
        """Make another snapshot the head; nothing is removed."""
        return Call(
            method="PUT",
            path=build_path(memory, "head"),
            body=RollbackBody(snapshot=snapshot),
            read=read_whole(Head),
            repeatable=False,  # between two attempts, an export may have become the head
        )

    @sent
    def accept(self, memory: str, snapshot: str = "", *, because: str = "") -> Call[Acceptance]:
        """Make a snapshot the head that waits for a review, was rejected or has diverged; by default, the newest that
        waits, else the newest that was rejected since the head was made. Nothing is removed."""
        return Call(
            method="POST",
            path=build_path(memory, "acceptances"),
            body=AcceptBody(snapshot=snapshot, because=because),
            read=read_whole(Acceptance),
            repeatable=False,  # between two attempts, an export may have become the head
        )

    @sent
    def decline(self, memory: str, snapshot: str = "", *, because: str = "") -> Call[Declined]:
        """Keep a snapshot from ever becoming the head; by default, the newest that waits for a review."""
        return Call(
            method="POST",
            path=build_path(memory, "declines"),
            body=DeclineBody(snapshot=snapshot, because=because),
            read=read_whole(Declined),
            repeatable=False,  # between two attempts, another may have come to wait
        )

    @sent
    def pin(self, memory: str, snapshot: str) -> Call[Pinned]:
        """Keep a snapshot whatever the retention rules say."""
        return Call(method="PUT", path=build_path(memory, "snapshots", snapshot, "pin"), read=read_whole(Pinned))

    @sent
    def unpin(self, memory: str, snapshot: str) -> Call[Pinned]:
        """Leave a snapshot to the retention rules again."""
        return Call(method="DELETE", path=build_path(memory, "snapshots", snapshot, "pin"), read=read_whole(Pinned))

    @sent
    def forget(self, memory: str, *, dry_run: bool = False) -> Call[Forgotten]:
        """Apply the service's retention rules to a memory; with ``dry_run``, only return what would be kept and
        removed."""
        body = ForgetBody(dry_run=dry_run)
        return Call(method="POST", path=build_path(memory, "forget"), body=body, read=read_whole(Forgotten))

    @sent
    def delete(self, memory: str) -> Call[Deleted]:
        """Remove every byte of a memory."""
        return Call(method="DELETE", path=build_path(memory), read=read_whole(Deleted), repeatable=False)

    @sent
    def search(
        self,
        words: str,
        *,
        memories: Sequence[str] = (),
        kinds: Sequence[str] = (),
        projects: Sequence[str] = (),
        since: datetime | None = None,
        until: datetime | None = None,
        history: bool = False,
        limit: int = 20,
        offset: int = 0,
    ) -> Call[Found]:
        """Search the records of all memories, or of those named; with ``history``, also what they do not know any more.
        Raise ``SidecarProblem`` (``no-index``) if search is off in the service."""
        query: dict[str, str | list[str]] = {
            "q": words,
            "memory": list(memories),
            "kind": list(kinds),
            "project": list(projects),
            "limit": str(limit),
            "offset": str(offset),
        }
        for name, moment in (("since", since), ("until", until)):
            if moment is not None:
                query[name] = moment.isoformat()
        if history:
            query["all"] = "true"
        return Call(method="GET", path="/v1/search", query=query, read=read_whole(Found))

    @sent
    def attach(
        self,
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
        body = AttachBody(
            sandbox=sandbox,
            layouts=list(layouts),
            projects=None if projects is None else list(projects),
            checkpoint_every=checkpoint_every,
            conversation=conversation,
            restore=restore,
            wake=wake,
            user=user,
        )
        return Call(method="PUT", path=build_path(memory, "attachment"), body=body, read=read_whole(Attached))

    @sent
    def detach(
        self, memory: str, *, sandbox: str = "", export: bool = False, idempotency_key: str | None = None
    ) -> Call[Attached]:
        """Detach a memory's sandbox; with ``export``, export it a last time first. If there are several, name one."""
        return Call(
            method="DELETE",
            path=build_path(memory, "attachment"),
            query={"export": "true" if export else "false", **_name_sandbox(sandbox)},
            headers=build_key_header(idempotency_key),
            read=read_whole(Attached),
        )

    @sent
    def start(
        self,
        memory: str,
        *,
        on: str,
        metadata: Mapping[str, str] | None = None,
        timeout: float | None = None,
        snapshot: str = "latest",
        must_exist: bool = False,
        layouts: Sequence[str] = (),
        projects: Sequence[str] | None = None,
        checkpoint_every: float | None = None,
        conversation: str = "",
        user: str = "",
        idempotency_key: str | None = None,
    ) -> Call[Attached]:
        """Create a sandbox (``on`` is ``e2b:TEMPLATE``, ``daytona:SNAPSHOT`` or ``local:``), restore the memory into it
        and attach it: ``attachment.sandbox`` is its reference."""
        body = StartBody(
            on=on,
            metadata=dict(metadata or {}),
            timeout=timeout,
            snapshot=snapshot,
            must_exist=must_exist,
            layouts=list(layouts),
            projects=None if projects is None else list(projects),
            checkpoint_every=checkpoint_every,
            conversation=conversation,
            user=user,
        )
        return build_keyed_call("sandboxes", memory, body, idempotency_key, Attached)

    @sent
    def move(
        self,
        memory: str,
        *,
        to: str,
        sandbox: str = "",
        keep_old: bool = False,
        metadata: Mapping[str, str] | None = None,
        timeout: float | None = None,
        user: str = "",
        idempotency_key: str | None = None,
    ) -> Call[Moved]:
        """Move a memory to a new sandbox (``to`` is as ``on`` of ``start``). The old one is ended once the new one has it;
        with ``keep_old`` it is detached. If anything fails, it is as it was and looked after."""
        body = MoveBody(
            to=to,
            sandbox=sandbox,
            keep_old=keep_old,
            metadata=dict(metadata or {}),
            timeout=timeout,
            user=user,
        )
        return build_keyed_call("moves", memory, body, idempotency_key, Moved)

    @sent
    def stop(self, memory: str, *, sandbox: str = "", discard: bool = False) -> Call[Attached]:
        """Export an attached sandbox, then end it. Raise ``SidecarProblem`` (``not-ended``) if its memory was not saved,
        unless ``discard``: then it is not ended. If there are several, name one."""
        return Call(
            method="DELETE",
            path=build_path(memory, "sandboxes"),
            query={"discard": "true" if discard else "false", **_name_sandbox(sandbox)},
            read=read_whole(Attached),
        )

    @sent
    def sandbox(self, sandbox: str, *, wait: float = 0) -> Call[SandboxStanding]:
        """Return whether the memory of a sandbox is in place, whoever restored it; at the latest after ``wait`` seconds."""
        path, query = f"/v1/sandboxes/{quote_segment(sandbox)}", {"wait": f"{wait:g}"} if wait else {}
        return Call(method="GET", path=path, query=query, read=read_whole(SandboxStanding))

    @sent
    def attachment(self, memory: str, *, sandbox: str = "") -> Call[Attached]:
        """Return the state of the attached sandbox. If there are several, name one."""
        path = build_path(memory, "attachment")
        return Call(method="GET", path=path, query=_name_sandbox(sandbox), read=read_whole(Attached))

    @sent
    def attachments(self) -> Call[list[Attachment]]:
        """Return every attachment on the store, including those that have ended lately."""
        return Call(method="GET", path="/v1/attachments", read=read_rows("attachments", Attachment))

    @sent
    def overview(self) -> Call[Overview]:
        """Return every attachment, with the service that answers and its store."""
        return Call(method="GET", path="/v1/attachments", read=read_whole(Overview))

    @sent
    def operation(self, id: str) -> Call[Operation]:
        """Return the state of an export or a restore."""
        return Call(method="GET", path=f"/v1/operations/{quote_segment(id)}", read=read_operation)


def build_events_call(after: int | None) -> Call[None]:
    """Return the call for the stream of events after number ``after``."""
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    return Call(method="GET", path="/v1/events", headers=headers, read=read_nothing)


def _name_sandbox(sandbox: str) -> dict[str, str]:
    return {"sandbox": sandbox} if sandbox else {}
