"""Place a chosen snapshot in a sandbox: uploaded by the sidecar, or fetched by the sandbox directly from the bucket."""

from __future__ import annotations

import gzip
import hashlib
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sidecar.engine.core import new_upload_path
from sidecar.engine.restores.run import RestoreRun
from sidecar.engine.sandbox.dialogue import ProgramAnswer, ask
from sidecar.engine.sandbox.links import UNABLE, NotDirect, make_links
from sidecar.engine.without_python import Tarball, send_tarball
from sidecar.errors import BadAnswer, ProgramFailed, UnknownLayout
from sidecar.format.compression import decompress
from sidecar.host.files import Spool, SpooledFile, read_chunks
from sidecar.host.work import retry_safely, run_in_thread
from sidecar.ids import build_memory_key
from sidecar.store.fetch import FetchedSnapshot
from sidecar.store.manifest import Pack


@dataclass(slots=True)
class SnapshotUpload:
    """The upload of a snapshot to a sandbox. Uploaded files stay there while something has to be saved first."""

    fetched: FetchedSnapshot
    packs: list[SpooledFile] = field(default_factory=list)
    codecs: list[str] = field(default_factory=list)
    bundle: dict[str, Any] | None = None
    """The bundle that is in the sandbox now."""
    tarball: Tarball | None = None
    """The tarball, for a sandbox without Python."""

    def __post_init__(self) -> None:
        self.packs = list(self.fetched.packs)
        self.codecs = [pack.codec for pack in self.fetched.manifest.packs]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def parts(self) -> list[SpooledFile]:
        """The files to upload: each index followed by its pack."""
        return [file for pair in zip(self.fetched.index_files, self.packs, strict=True) for file in pair]

    def list_sent_packs(self) -> list[Pack]:
        """Return the packs as they are sent: sizes and codecs may differ from the manifest after recompression."""
        return [
            replace(pack, bytes=file.size, codec=codec)
            for pack, file, codec in zip(self.fetched.manifest.packs, self.packs, self.codecs, strict=True)
        ]


async def place_directly(run: RestoreRun) -> ProgramAnswer:
    """Let the sandbox fetch the snapshot from the bucket with one command. Raise ``NotDirect`` if it cannot, or if
    parts of the snapshot are missing: the path through the sidecar then looks for an older one."""
    question = _build_question(run, run.chosen.packs)
    question["links"] = await make_links(run.engine, run.chosen)
    try:
        async for attempt in retry_safely():
            with attempt:
                answer = await _ask_and_check(run, question)
    except ProgramFailed as problem:
        if problem.code in UNABLE:
            raise NotDirect(problem.message) from None
        raise
    if answer.status == "no-python":
        raise NotDirect
    if answer.status == "complete":
        run.sandbox.transferred_bytes += sum(part["bytes"] for part in question["links"])
    return answer


async def ask_first(run: RestoreRun) -> ProgramAnswer:
    """Ask what the sandbox has, without uploading anything. The status "clear" means that it can be restored."""
    return await _ask_and_check(run, {**_build_question(run, []), "ask": True})


async def place_through_sidecar(run: RestoreRun, parcel: SnapshotUpload) -> ProgramAnswer:
    """Place the snapshot with one upload and one command; try again if the upload was cut short, or the sandbox cannot
    read zstd."""
    async for attempt in retry_safely():
        with attempt:
            try:
                if parcel.tarball is None:
                    answer = await _upload_and_ask(run, parcel)
                    if answer.status != "no-python":
                        return answer
                question = _build_question(run, run.chosen.packs)
                parcel.tarball = parcel.tarball or Tarball()
                return await send_tarball(run, question, parcel.fetched, parcel.tarball)
            except ProgramFailed as problem:
                if problem.code != "no-zstd":
                    raise
                parcel.packs = [
                    await run_in_thread(_recompress, pack, run.scratch) if codec == "zst" else pack
                    for pack, codec in zip(parcel.packs, parcel.codecs, strict=True)
                ]
                parcel.codecs = ["gz"] * len(parcel.packs)
                return await _upload_and_ask(run, parcel)
    raise AssertionError("unreachable")


async def _upload_and_ask(run: RestoreRun, parcel: SnapshotUpload) -> ProgramAnswer:
    """Upload the bundle unless it is in the sandbox already, and request the restore. The bundle stays there only if
    something has to be saved first."""
    bundle, parcel.bundle = parcel.bundle, None
    if bundle is None:
        bundle = await _upload(run, parcel)
    run.engine.progress.step("putting it in place")
    question = _build_question(run, parcel.list_sent_packs())
    question["bundle"] = bundle
    question["uploads"] = run.uploads
    answer = await _ask_and_check(run, question)
    parcel.bundle = bundle if answer.status == "unsaved" else None
    return answer


async def _upload(run: RestoreRun, parcel: SnapshotUpload) -> dict[str, Any]:
    run.uploads.append(path := new_upload_path())
    digest = hashlib.sha256()
    run.engine.progress.step("sending", parcel.size)
    await run.sandbox.upload(path, _chain_files(parcel.parts, digest))
    return {"path": path, "bytes": parcel.size, "sha256": digest.hexdigest()}


async def _ask_and_check(run: RestoreRun, question: dict[str, Any]) -> ProgramAnswer:
    """Request the restore. Raise ``BadAnswer`` if the sandbox reports success but not all files."""
    answer, _ = await ask(run.sandbox, question, ProgramAnswer, timeout=run.engine.timing.command)
    missing = run.chosen.files - answer.files - len(answer.skipped) - sum(row.files for row in answer.withheld)
    if answer.status == "complete" and missing > 0:
        raise BadAnswer(f"The sandbox says it is done, but of its files {missing} are missing.")
    return answer


def _build_question(run: RestoreRun, packs: Sequence[Pack]) -> dict[str, Any]:
    """Build the restore request for the in-sandbox program. Raise ``UnknownLayout`` if a layout of the snapshot is not
    known here."""
    engine, request, manifest = run.engine, run.request, run.chosen
    names = {root.layout for root in manifest.roots}
    if unknown := names - set(engine.layouts):
        raise UnknownLayout(
            f"This memory was exported with the layout {min(unknown)!r}, which is not known here.",
            hint="Use the config file that defines it.",
        )
    return {
        "do": "restore",
        "memory": request.memory,
        "key": build_memory_key(request.memory),
        "snapshot": manifest.snapshot,
        "operation": run.operation,
        "notes": run.build_notes(run.standing.store),
        "roots": [{"name": root.name, "hint": root.hint} for root in manifest.roots],
        "layouts": [engine.layouts[name].for_sandbox() for name in sorted(names)],
        "projects": None if request.projects is None else list(request.projects),
        "project_hints": manifest.projects,
        "withhold": engine.restoring.withhold if request.withhold_projects is None else request.withhold_projects,
        "covered": {name: asdict(rules) for name, rules in manifest.rules.items() if rules.keep},
        "keyed": manifest.keyed,
        "versions": manifest.versions,
        "policy": manifest.privacy,
        "mode": request.mode,
        "force": request.force,
        "discard": request.discard,
        "read_only": request.read_only,
        **asdict(run.standing),
        "set_aside_bytes": engine.set_aside_bytes,
        "turn_wait": engine.timing.turn_wait,
        "worker_wait": engine.timing.worker_wait,
        "packs": [{"index_bytes": pack.index_bytes, "bytes": pack.bytes, "codec": pack.codec} for pack in packs],
    }


async def _chain_files(parts: list[SpooledFile], digest: hashlib._Hash) -> AsyncIterator[bytes]:
    for part in parts:
        async for chunk in read_chunks(part.path):
            digest.update(chunk)
            yield chunk


def _recompress(pack: SpooledFile, scratch: Spool) -> SpooledFile:
    """Recompress a zstd pack with gzip, for a sandbox that cannot read zstd."""
    path = scratch.new()
    with (
        pack.path.open("rb") as source,
        decompress(source, "zst") as plain,
        gzip.open(path, "wb", compresslevel=1) as target,
    ):
        shutil.copyfileobj(plain, target, 1 << 20)
    return SpooledFile(path, path.stat().st_size, "")
