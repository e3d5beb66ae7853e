"""Restore: a snapshot becomes a sandbox's memory again."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import secrets
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from sidecar.engine.asking import Answer, ask
from sidecar.engine.parts import CountedSandbox, Engine
from sidecar.engine.without_python import send_tarball
from sidecar.errors import (
    BadAnswer,
    LimitExceeded,
    ProgramFailed,
    SnapshotDamaged,
    SnapshotError,
    StoreError,
    UnknownLayout,
)
from sidecar.ids import check_memory_id, memory_key
from sidecar.inside.compression import opened
from sidecar.ports import Sandbox
from sidecar.receipts import Reason, RestoreOutcome, RestoreReceipt
from sidecar.repository import Repository
from sidecar.retries import retrying
from sidecar.snapshots.fetch import Fetched, fetch
from sidecar.snapshots.manifest import Manifest
from sidecar.spool import Spool, Spooled, file_chunks, spool

LATEST = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    memory: str
    snapshot: str = LATEST
    mode: str = "replace"
    projects: tuple[str, ...] | None = None
    force: bool = False


@dataclass(frozen=True, slots=True)
class _Choice:
    """The snapshot to restore: the one wanted, or the newest one that could be read and why."""

    fetched: Fetched
    warnings: list[str]
    wanted: str = ""


async def restore(engine: Engine, sandbox: Sandbox, request: RestoreRequest) -> RestoreReceipt:
    """Restore a memory into ``sandbox``: staged, verified, then swapped there.

    Raise a ``SidecarError`` when nothing could be tried. Outcome ``incomplete`` says that the sandbox refused; what it had
    is as it was.
    """
    started = time.monotonic()
    counted = CountedSandbox(sandbox, engine.progress)
    check_memory_id(request.memory)
    async with spool() as scratch:
        engine.progress.step("fetching the snapshot")
        choice = await _choose(engine, request, scratch)
        if choice is None:
            return await _nothing(engine, started, counted, request)
        manifest = choice.fetched.manifest
        try:
            answer = await _place(engine, counted, request, choice.fetched, scratch)
        except (ProgramFailed, LimitExceeded) as problem:
            reason = Reason(code=problem.code, message=problem.message)
            receipt = _receipt(started, counted, request, RestoreOutcome.INCOMPLETE, manifest, reason=reason)
            return replace(receipt, wanted=choice.wanted, warnings=choice.warnings)
    receipt = _receipt(started, counted, request, RestoreOutcome.COMPLETE, manifest, answer)
    return replace(receipt, wanted=choice.wanted, warnings=choice.warnings + receipt.warnings)


async def _choose(engine: Engine, request: RestoreRequest, scratch: Spool) -> _Choice | None:
    """The snapshot asked for, whole and on our disk; when the head cannot be read, the newest one that can."""
    repository = engine.repository
    if request.snapshot != LATEST and not request.snapshot.startswith("@"):
        manifest = await repository.manifest(request.memory, await repository.resolve(request.memory, request.snapshot))
        return _Choice(await fetch(repository.store, manifest, scratch), [])
    state = await repository.head(request.memory)
    if state.version is None and not await repository.any_good(
        request.memory, await repository.snapshot_ids(request.memory)
    ):
        return None
    first = await repository.resolve(request.memory, request.snapshot) if request.snapshot != LATEST else state.snapshot
    candidates = [snapshot async for snapshot in repository.candidates(request.memory)]
    if first:
        candidates = candidates[candidates.index(first) :] + candidates[: candidates.index(first)]
    problems = [] if state.head else [state.problem or "The head is missing."]
    for snapshot in candidates:
        try:
            manifest = await repository.manifest(request.memory, snapshot)
            if manifest.rejected and snapshot != first:
                continue
            fetched = await fetch(repository.store, manifest, scratch)
        except SnapshotError as damage:
            problems.append(damage.message)
            await _remember(repository, request.memory, snapshot, damage)
            continue
        if not problems:
            return _Choice(fetched, [])
        told = f"Restored {snapshot} instead of {first or 'the head'}: {' '.join(problems)}"
        return _Choice(fetched, [told], first or "head")
    raise SnapshotDamaged(f"No snapshot of {request.memory} can be read: {' '.join(problems)}")


async def _remember(repository: Repository, memory: str, snapshot: str, damage: SnapshotError) -> None:
    """Tell later exports; a store that may only be read must not keep anyone from restoring."""
    with contextlib.suppress(StoreError):
        await repository.mark_damaged(memory, snapshot, damage.message)


async def _place(
    engine: Engine, sandbox: CountedSandbox, request: RestoreRequest, fetched: Fetched, scratch: Spool
) -> Answer:
    """One upload and one command; again when the upload was cut short, or the sandbox cannot read zstd."""
    packs = list(fetched.packs)
    codecs = [pack.codec for pack in fetched.manifest.packs]
    async for attempt in retrying():
        with attempt:
            try:
                answer = await _send(engine, sandbox, request, fetched, packs, codecs)
                if answer.status == "no-python":
                    question = _question(engine, request, fetched, packs, codecs)
                    return await send_tarball(engine, sandbox, question, fetched, scratch)
                return answer
            except ProgramFailed as problem:
                if problem.code != "no-zstd":
                    raise
                packs = [
                    await asyncio.to_thread(_as_gzip, pack, scratch) if codec == "zst" else pack
                    for pack, codec in zip(packs, codecs, strict=True)
                ]
                codecs = ["gz"] * len(packs)
                return await _send(engine, sandbox, request, fetched, packs, codecs)
    raise AssertionError("unreachable")


async def _send(
    engine: Engine,
    sandbox: CountedSandbox,
    request: RestoreRequest,
    fetched: Fetched,
    packs: list[Spooled],
    codecs: list[str],
) -> Answer:
    parts = [file for pair in zip(fetched.index_files, packs, strict=True) for file in pair]
    path = f"/tmp/memory-sidecar-{secrets.token_hex(8)}.bundle"
    size = sum(part.size for part in parts)
    digest = hashlib.sha256()
    taken = False
    try:
        engine.progress.step("sending", size)
        await sandbox.upload(path, _chained(parts, digest))
        engine.progress.step("putting it in place")
        question = _question(engine, request, fetched, packs, codecs)
        question["bundle"] = {"path": path, "bytes": size, "sha256": digest.hexdigest()}
        answer, _ = await ask(sandbox, question, Answer, timeout=engine.timing.command)
        taken = answer.status != "no-python"
        missing = fetched.manifest.files - answer.files - len(answer.skipped)
        if taken and missing > 0:
            raise BadAnswer(f"The sandbox says it is done, but {missing} files are missing.")
        return answer
    finally:
        if not taken:
            await sandbox.remove(path)


def _question(
    engine: Engine, request: RestoreRequest, fetched: Fetched, packs: list[Spooled], codecs: list[str]
) -> dict[str, Any]:
    manifest = fetched.manifest
    names = {root.layout for root in manifest.roots}
    if unknown := names - set(engine.layouts):
        raise UnknownLayout(
            f"This memory was exported with the layout {min(unknown)!r}, which is not known here.",
            hint="Use the config file that defines it.",
        )
    return {
        "do": "restore",
        "memory": request.memory,
        "key": memory_key(request.memory),
        "snapshot": manifest.snapshot,
        "roots": [{"name": root.name, "hint": root.hint} for root in manifest.roots],
        "layouts": [engine.layouts[name].for_sandbox() for name in sorted(names)],
        "projects": None if request.projects is None else list(request.projects),
        "mode": request.mode,
        "force": request.force,
        "turn_wait": engine.timing.turn_wait,
        "packs": [
            {"index_bytes": index.size, "bytes": pack.size, "codec": codec}
            for index, pack, codec in zip(fetched.index_files, packs, codecs, strict=True)
        ],
    }


async def _chained(parts: list[Spooled], digest: hashlib._Hash) -> AsyncIterator[bytes]:
    for part in parts:
        async for chunk in file_chunks(part.path):
            digest.update(chunk)
            yield chunk


def _as_gzip(pack: Spooled, scratch: Spool) -> Spooled:
    path = scratch.new()
    with (
        pack.path.open("rb") as source,
        opened(source, "zst") as plain,
        gzip.open(path, "wb", compresslevel=1) as target,
    ):
        shutil.copyfileobj(plain, target, 1 << 20)
    return Spooled(path, path.stat().st_size, "")


async def _nothing(engine: Engine, started: float, sandbox: CountedSandbox, request: RestoreRequest) -> RestoreReceipt:
    """There is no head: a first start, which is no error."""
    receipt = _receipt(started, sandbox, request, RestoreOutcome.EMPTY)
    if beside := await engine.repository.snapshot_ids(request.memory):
        return replace(receipt, warnings=[f"{len(beside)} snapshots exist, but none of them ever became the head."])
    return receipt


def _receipt(
    started: float,
    sandbox: CountedSandbox,
    request: RestoreRequest,
    outcome: RestoreOutcome,
    manifest: Manifest | None = None,
    answer: Answer | None = None,
    reason: Reason | None = None,
) -> RestoreReceipt:
    return RestoreReceipt(
        outcome=outcome,
        memory=request.memory,
        snapshot=manifest.snapshot if manifest else None,
        parent=(manifest.parent or None) if manifest else None,
        sandbox=sandbox.ref,
        mode=request.mode,
        files=answer.files if answer else 0,
        bytes=answer.bytes if answer else 0,
        transferred_bytes=sandbox.transferred_bytes,
        round_trips=sandbox.round_trips,
        duration_ms=round((time.monotonic() - started) * 1000),
        databases=[row.report() for row in answer.databases] if answer else [],
        skipped=list(answer.skipped) if answer else [],
        warnings=list(answer.warnings) if answer else [],
        reason=reason,
    )
