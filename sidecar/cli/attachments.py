"""``attach``, ``detach``, ``start``, ``wait`` and the like: calls to a running service, which must work on the same store."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from sidecar.cli.result import Result, Table, format_time
from sidecar.cli.verbs import EXPORT_EXITS, build_export_result, build_restore_result
from sidecar.client import AsyncClient, Retries, ServiceUnreachable, SidecarProblem
from sidecar.client.settings import URL
from sidecar.engine import Engine
from sidecar.errors import NotEnded, NotMoved, RestoreIncomplete, SidecarError, UsageError
from sidecar.ids import build_instance_key
from sidecar.models.answers import Attached, Attachment, Moved, Overview
from sidecar.ports import Store

DEFAULT_URL = "http://127.0.0.1:8077"
LONGEST_CALL = 20.0
"""Seconds for which one call waits: gateways give up after a minute."""
PATIENCE = Retries(attempts=2)
"""Few retries, because a person waits at a terminal."""


class NoService(SidecarError):
    """No service answered that could look after a sandbox."""

    code = "no-service"
    default_hint = "Start one with `memory-sidecar serve`, or set MEMORY_SIDECAR_URL."


class OtherStore(SidecarError):
    """The service that answered works on another store."""

    code = "other-store"
    default_hint = "Give both the same store, or set MEMORY_SIDECAR_URL to the service of this store."


async def run_attach(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``attach``: have a service export a sandbox periodically."""
    more = {} if args.checkpoint_every is None else {"checkpoint_every": args.checkpoint_every}
    async with _open_client() as client:
        await _check_store(client, engine.repository.store)
        with _translate(RestoreIncomplete):
            answer = await client.attach(
                args.memory,
                sandbox=args.sandbox,
                layouts=args.layout,
                projects=args.project,
                conversation=args.conversation,
                restore=args.restore,
                wake=args.wake,
                user=args.user,
                **more,
            )
    one = answer.attachment
    words: list[str | Table] = build_restore_result(answer.restored).words if answer.restored else []
    words.append(f"{one.memory}: {one.sandbox} is looked after; exported every {one.checkpoint_every:g} s.")
    return Result(_build_document(answer), words)


async def run_detach(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``detach``: have a service stop that; with ``--export``, after a last export."""
    async with _open_client() as client:
        await _check_store(client, engine.repository.store)
        answer = await client.detach(args.memory, sandbox=args.sandbox, export=args.export)
    words: list[str | Table] = build_export_result(answer.exported).words if answer.exported else []
    words.append(f"{answer.attachment.memory}: {answer.attachment.sandbox} is not looked after any more.")
    return Result(
        _build_document(answer), words, EXPORT_EXITS.get(answer.exported.outcome, 0) if answer.exported else 0
    )


async def run_start(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``start``: have a service create a sandbox that remembers."""
    metadata = dict(_split_pair(pair) for pair in args.metadata)
    async with _open_client() as client:
        await _check_store(client, engine.repository.store)
        answer = await client.start(
            args.memory,
            on=args.on,
            metadata=metadata,
            timeout=args.timeout,
            must_exist=args.must_exist,
            layouts=args.layout,
            projects=args.project,
            checkpoint_every=args.checkpoint_every,
            conversation=args.conversation,
            user=args.user,
            idempotency_key=args.key,
        )
    one = answer.attachment
    words: list[str | Table] = build_restore_result(answer.restored).words if answer.restored else []
    words.append(f"{one.memory}: {one.sandbox} was started and is looked after.")
    return Result({"sandbox": one.sandbox, **_build_document(answer)}, words)


async def run_move(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``move``: have a service move a memory to a new sandbox."""
    metadata = dict(_split_pair(pair) for pair in args.metadata)
    async with _open_client() as client:
        await _check_store(client, engine.repository.store)
        with _translate(NotMoved):
            answer = await client.move(
                args.memory,
                to=args.to,
                sandbox=args.sandbox,
                keep_old=args.keep_old,
                metadata=metadata,
                timeout=args.timeout,
                user=args.user,
                idempotency_key=args.key,
            )
    one = answer.attachment
    words: list[str | Table] = build_restore_result(answer.restored).words if answer.restored else []
    words.append(
        f"{one.memory}: moved to {one.sandbox}, which is looked after. {answer.former} was {answer.former_state}."
    )
    told = {"former": answer.former, "former_state": answer.former_state}
    return Result({"sandbox": one.sandbox, **told, **_build_document(answer)}, words)


async def run_stop(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``stop``: have a service export a sandbox and end it."""
    async with _open_client() as client:
        await _check_store(client, engine.repository.store)
        with _translate(NotEnded):
            answer = await client.stop(args.memory, sandbox=args.sandbox, discard=args.discard)
    words: list[str | Table] = []
    if (exported := answer.exported) is not None:
        unused = not (exported.is_saved or args.discard)  # else it would not have been ended
        why = f"{exported.memory}: nothing was ever written in it, so there was nothing to save."
        words += [why] if unused else build_export_result(exported).words
    words.append(f"{answer.attachment.memory}: {answer.attachment.sandbox} was ended.")
    return Result({"sandbox": answer.attachment.sandbox, **_build_document(answer)}, words)


@contextlib.contextmanager
def _translate(kind: type[SidecarError]) -> Iterator[None]:
    """Raise an error of this kind as itself if the service answers with it."""
    try:
        yield
    except SidecarProblem as problem:
        if problem.code == kind.code:
            raise kind(problem.message, hint=problem.hint) from None
        raise


def _split_pair(pair: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    if not name or not equals:
        raise UsageError(f"{pair!r} is no metadata.", hint="Write --metadata NAME=VALUE.")
    return name, value


async def run_wait(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``wait``: until the memory of a sandbox is in place, or the time is over."""
    if not args.timeout >= 0:
        raise UsageError("--timeout must not be negative.", hint="Write --timeout SECONDS; 0 only looks.")
    deadline = time.monotonic() + args.timeout
    async with _open_client() as client:
        await _check_store(client, engine.repository.store)
        while True:
            left = max(0.0, deadline - time.monotonic())
            found = await client.sandbox(args.sandbox, wait=min(left, LONGEST_CALL))
            if found.in_place or left <= LONGEST_CALL:
                break
    if found.in_place:
        what = f"{found.memory} at {found.snapshot}" if found.snapshot else f"{found.memory}, which has no snapshot yet"
        reading = "; it is a reader" if found.state == "reader" else ""
        return Result(asdict(found), [f"{found.sandbox}: {what}, is in place{reading}."])
    why = f" {found.problem} {found.hint}".rstrip() or (f" It is {found.state}." if found.state else "")
    return Result(asdict(found), [f"{found.sandbox}: no memory is in place after {args.timeout:g} s.{why}"], 1)


async def run_attachments(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``attachments``: list the attachments of all services on the store."""
    async with _open_client() as client:
        answer = await _check_store(client, engine.repository.store)
    rows = [(one.memory, one.on, "missing", "", "", one.problem) for one in answer.missing] + [
        (
            one.memory,
            one.sandbox,
            one.state,
            format_time(one.saved) if one.saved else "not yet",
            one.conversation,
            f"{one.problem} {one.hint} {one.note}".strip(),
        )
        for one in answer.attachments
    ]
    rows += [
        (one.memory, one.sandbox, one.state, "", "", f"{one.problem} {one.hint}".strip()) for one in answer.noticed
    ]
    table = Table(
        ("MEMORY", "SANDBOX", "STATE", "SAVED (UTC)", "CONVERSATION", "PROBLEM"), rows, "No sandbox is looked after."
    )
    return Result({**asdict(answer), "attachments": [*map(_describe, answer.attachments)]}, [table])


def _open_client() -> AsyncClient:
    return AsyncClient(os.environ.get(URL) or DEFAULT_URL, retries=PATIENCE)


async def _check_store(client: AsyncClient, store: Store) -> Overview:
    """Return the service's attachments, if it works on this store. Raise ``NoService`` or ``OtherStore``."""
    try:
        answer = await client.overview()
    except ServiceUnreachable as problem:
        hint = f"Start one on this store: memory-sidecar serve --store {store.url}. Elsewhere than here, set {URL}."
        raise NoService(f"There is no service to do it. {problem.message}", hint=hint) from None
    # A service's lease is in its store. So the store is the same if the lease is found in it, even if its URL is
    # written differently.
    same = (
        await store.get(build_instance_key(answer.service)) is not None if answer.service else answer.store == store.url
    )
    if not same:
        theirs = answer.store or "another store"
        raise OtherStore(
            f"The service at {client.url} keeps its memories in {theirs}, not in {store.url}.",
            hint=f"Give its store with --store, or the address of a service on yours in {URL}.",
        )
    return answer


def _build_document(answer: Attached | Moved) -> dict[str, Any]:
    receipts = {"restored": answer.restored, "exported": answer.exported}
    told = {name: receipt.as_dict() for name, receipt in receipts.items() if receipt is not None}
    return {"attachment": _describe(answer.attachment), **told}


def _describe(attachment: Attachment) -> dict[str, Any]:
    document = asdict(attachment)
    del document["generation"]  # between services
    return document
