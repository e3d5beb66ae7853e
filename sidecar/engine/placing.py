"""Bring a chosen snapshot into a sandbox and have it put in place: through the sidecar, or straight from the bucket."""

from __future__ import annotations

import gzip
import hashlib
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sidecar.engine.asking import Answer, ask
from sidecar.engine.choosing import LATEST
from sidecar.engine.direct import UNABLE, NotDirect, links_for
from sidecar.engine.parts import CountedSandbox, Engine, upload_path
from sidecar.engine.without_python import send_tarball
from sidecar.errors import BadAnswer, ProgramFailed, UnknownLayout
from sidecar.ids import memory_key
from sidecar.inside.compression import opened
from sidecar.retries import retrying
from sidecar.snapshots.fetch import Fetched
from sidecar.snapshots.manifest import Manifest, Pack
from sidecar.spool import Spool, Spooled, file_chunks
from sidecar.threads import run_long


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    memory: str
    snapshot: str = LATEST
    mode: str = "replace"
    projects: tuple[str, ...] | None = None
    force: bool = False


async def place_directly(
    engine: Engine, sandbox: CountedSandbox, request: RestoreRequest, manifest: Manifest, operation: str
) -> Answer:
    """Let the sandbox fetch the snapshot from the bucket by itself: one command. Raise ``NotDirect`` when it cannot, or when
    the snapshot is not all there: then somebody has to look for an older one."""
    question = _question(engine, request, manifest, manifest.packs, operation)
    question["links"] = await links_for(engine, manifest)
    try:
        async for attempt in retrying():
            with attempt:
                answer = await _asked(sandbox, question, manifest, engine.timing.command)
    except ProgramFailed as problem:
        if problem.code in UNABLE:
            raise NotDirect(problem.message) from None
        raise
    if answer.status == "no-python":
        raise NotDirect
    sandbox.transferred_bytes += sum(part["bytes"] for part in question["links"])
    return answer


async def place(
    engine: Engine,
    sandbox: CountedSandbox,
    request: RestoreRequest,
    fetched: Fetched,
    scratch: Spool,
    uploads: list[str],
    operation: str,
) -> Answer:
    """One upload and one command; again when the upload was cut short, or the sandbox cannot read zstd."""
    packs = list(fetched.packs)
    codecs = [pack.codec for pack in fetched.manifest.packs]
    async for attempt in retrying():
        with attempt:
            try:
                answer = await _send(engine, sandbox, request, fetched, packs, codecs, uploads, operation)
                if answer.status == "no-python":
                    question = _question(engine, request, fetched.manifest, fetched.manifest.packs, operation)
                    return await send_tarball(engine, sandbox, question, fetched, scratch, uploads)
                return answer
            except ProgramFailed as problem:
                if problem.code != "no-zstd":
                    raise
                packs = [
                    await run_long(_as_gzip, pack, scratch) if codec == "zst" else pack
                    for pack, codec in zip(packs, codecs, strict=True)
                ]
                codecs = ["gz"] * len(packs)
                return await _send(engine, sandbox, request, fetched, packs, codecs, uploads, operation)
    raise AssertionError("unreachable")


async def _send(
    engine: Engine,
    sandbox: CountedSandbox,
    request: RestoreRequest,
    fetched: Fetched,
    packs: list[Spooled],
    codecs: list[str],
    uploads: list[str],
    operation: str,
) -> Answer:
    parts = [file for pair in zip(fetched.index_files, packs, strict=True) for file in pair]
    uploads.append(path := upload_path())
    size = sum(part.size for part in parts)
    digest = hashlib.sha256()
    engine.progress.step("sending", size)
    await sandbox.upload(path, _chained(parts, digest))
    engine.progress.step("putting it in place")
    question = _question(engine, request, fetched.manifest, _as_sent(fetched, packs, codecs), operation)
    question["bundle"] = {"path": path, "bytes": size, "sha256": digest.hexdigest()}
    question["uploads"] = uploads
    return await _asked(sandbox, question, fetched.manifest, engine.timing.command)


def _as_sent(fetched: Fetched, packs: list[Spooled], codecs: list[str]) -> list[Pack]:
    return [
        replace(pack, bytes=file.size, codec=codec)
        for pack, file, codec in zip(fetched.manifest.packs, packs, codecs, strict=True)
    ]


async def _asked(sandbox: CountedSandbox, question: dict[str, Any], manifest: Manifest, timeout: float) -> Answer:
    answer, _ = await ask(sandbox, question, Answer, timeout=timeout)
    missing = manifest.files - answer.files - len(answer.skipped)
    if answer.status != "no-python" and missing > 0:
        raise BadAnswer(f"The sandbox says it is done, but of its files {missing} are missing.")
    return answer


def _question(
    engine: Engine, request: RestoreRequest, manifest: Manifest, packs: Sequence[Pack], operation: str
) -> dict[str, Any]:
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
        "operation": operation,
        "roots": [{"name": root.name, "hint": root.hint} for root in manifest.roots],
        "layouts": [engine.layouts[name].for_sandbox() for name in sorted(names)],
        "projects": None if request.projects is None else list(request.projects),
        "project_hints": manifest.projects,
        "keyed": manifest.keyed,
        "versions": manifest.versions,
        "policy": manifest.privacy,
        "mode": request.mode,
        "force": request.force,
        "turn_wait": engine.timing.turn_wait,
        "worker_wait": engine.timing.worker_wait,
        "packs": [{"index_bytes": pack.index_bytes, "bytes": pack.bytes, "codec": pack.codec} for pack in packs],
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
