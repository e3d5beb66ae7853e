"""Place a chosen snapshot in a sandbox: uploaded by the sidecar, or fetched by the sandbox directly from the bucket."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import field, replace

from sidecar.engine.core import new_upload_path
from sidecar.engine.restores.run import RestoreRun
from sidecar.engine.restores.source import ReadySnapshot
from sidecar.engine.sandbox.delivery import CarriedFiles, build_program, build_rules
from sidecar.engine.sandbox.dialogue import Asking, ask
from sidecar.engine.sandbox.links import UNABLE, NotDirect, make_links
from sidecar.errors import BadAnswer, ProgramFailed, UnknownLayout
from sidecar.format.protocol import (
    BriefFile,
    Coverage,
    PackPart,
    RestoreAnswer,
    RestoreQuestion,
    RootHint,
    UploadedBundle,
)
from sidecar.host.files import SpooledFile, read_chunks
from sidecar.host.values import dataclass
from sidecar.host.work import retry_safely
from sidecar.ids import build_memory_key
from sidecar.store.fetch import FetchedSnapshot
from sidecar.store.manifest import Pack


@dataclass(slots=True)
class SnapshotUpload:
    """The upload of a snapshot to a sandbox. Uploaded files stay there while something has to be saved first."""

    ready: ReadySnapshot
    packs: list[SpooledFile] = field(default_factory=list)
    codecs: list[str] = field(default_factory=list)
    bundle: UploadedBundle | None = None
    """The bundle that is in the sandbox now."""
    carried: CarriedFiles | None = None
    """What is in front of it in the same file: the rules and the program, if the sandbox may lack them."""
    without_python: bool = False
    tarball: str = ""
    """Where the tarball for a sandbox without Python is in it now."""

    def __post_init__(self) -> None:
        self.packs = list(self.fetched.packs)
        self.codecs = [pack.codec for pack in self.fetched.manifest.packs]

    @property
    def fetched(self) -> FetchedSnapshot:
        return self.ready.fetched

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


async def place_directly(run: RestoreRun) -> RestoreAnswer:
    """Let the sandbox fetch the snapshot from the bucket with one command. Raise ``NotDirect`` if it cannot, or if
    parts of the snapshot are missing: the path through the sidecar then looks for an older one."""
    question = _build_question(run, run.chosen.packs)
    question.links = await make_links(run.engine, run.chosen)
    how = replace(run.asking, at_once=not run.request.in_use)
    try:
        async for attempt in retry_safely():
            with attempt:
                answer = await _ask_and_check(run, question, how)
    except ProgramFailed as problem:
        if problem.code in UNABLE:
            raise NotDirect(problem.message) from None
        raise
    if answer.status == "no-python":
        raise NotDirect
    if answer.status == "complete":
        run.sandbox.transferred_bytes += sum(part.bytes for part in question.links)
    return answer


async def ask_first(run: RestoreRun) -> RestoreAnswer:
    """Ask what the sandbox has, without uploading anything. The status "clear" means that it can be restored."""
    return await _ask_and_check(run, replace(_build_question(run, []), ask=True, brief=None), run.asking)


async def place_through_sidecar(run: RestoreRun, parcel: SnapshotUpload) -> RestoreAnswer:
    """Place the snapshot with one upload and one command; try again if the upload was cut short, or the sandbox cannot
    read zstd."""
    async for attempt in retry_safely():
        with attempt:
            try:
                if not parcel.without_python:
                    answer = await _upload_and_ask(run, parcel)
                    if answer.status != "no-python":
                        return answer
                question = _build_question(run, run.chosen.packs)
                from sidecar.engine.without_python import send_tarball  # late: it has no Python

                parcel.without_python = True
                return await send_tarball(run, question, parcel)
            except ProgramFailed as problem:
                if problem.code != "no-zstd":
                    raise
                parcel.packs = await parcel.ready.recompress()
                parcel.codecs = ["gz"] * len(parcel.packs)
                return await _upload_and_ask(run, parcel)
    raise AssertionError("unreachable")


async def _upload_and_ask(run: RestoreRun, parcel: SnapshotUpload) -> RestoreAnswer:
    """Upload the bundle unless it is in the sandbox already, and request the restore. The bundle stays there only if
    something has to be saved first."""
    bundle, parcel.bundle = parcel.bundle, None
    if bundle is None:
        bundle = await _upload(run, parcel)
    run.engine.progress.step("putting it in place")
    question = _build_question(run, parcel.list_sent_packs())
    question.bundle, question.uploads = bundle, run.uploads
    answer = await _ask_and_check(run, question, replace(run.asking, carried=parcel.carried))
    parcel.bundle = bundle if answer.status == "unsaved" else None
    return answer


async def _upload(run: RestoreRun, parcel: SnapshotUpload) -> UploadedBundle:
    """Upload the bundle. Unless the sandbox was in use before, it brings the rules and the program too; a folder on this
    machine needs neither."""
    run.uploads.append(path := new_upload_path())
    digest, parcel.carried = hashlib.sha256(), None
    if not run.request.in_use and run.sandbox.ground(None) is None:
        parcel.carried = CarriedFiles(path, build_rules(run.engine.layouts.values()), build_program())
    before = parcel.carried.data if parcel.carried else b""
    run.engine.progress.step("sending", len(before) + parcel.size)
    await run.sandbox.upload(path, _chain_files(before, parcel.parts, digest))
    return UploadedBundle(path, len(before), parcel.size, digest.hexdigest())


async def _ask_and_check(run: RestoreRun, question: RestoreQuestion, how: Asking) -> RestoreAnswer:
    """Request the restore. Raise ``BadAnswer`` if the sandbox reports success but not all files."""
    answer, _ = await ask(run.sandbox, question, RestoreAnswer, how)
    missing = run.chosen.files - answer.files - len(answer.skipped) - sum(row.files for row in answer.withheld)
    if answer.status == "complete" and missing > 0:
        raise BadAnswer(f"The sandbox says it is done, but of its files {missing} are missing.")
    return answer


def _build_question(run: RestoreRun, packs: Sequence[Pack]) -> RestoreQuestion:
    """Build the question for the in-sandbox program. Raise ``UnknownLayout`` if a layout of the snapshot is not
    known here."""
    engine, request, manifest, standing = run.engine, run.request, run.chosen, run.standing
    names = {root.layout for root in manifest.roots}
    if unknown := names - set(engine.layouts):
        raise UnknownLayout(
            f"This memory was exported with the layout {min(unknown)!r}, which is not known here.",
            hint="Use the config file that defines it.",
        )
    return RestoreQuestion(
        memory=request.memory,
        snapshot=manifest.snapshot,
        key=build_memory_key(request.memory),
        operation=run.operation,
        identity=replace(
            run.build_identity(standing.store),
            label=(request.label or run.sandbox.ref) if request.read_only else "",
        ),
        layouts=sorted(names),
        roots=[RootHint(root.name, root.hint) for root in manifest.roots],
        packs=[PackPart(pack.index_bytes, pack.bytes, pack.codec) for pack in packs],
        mode=request.mode,
        policy=manifest.privacy,
        set_aside_bytes=engine.set_aside_bytes,
        worker_wait=engine.timing.worker_wait,
        turn_wait=engine.timing.turn_wait,
        projects=None if request.projects is None else list(request.projects),
        project_hints=manifest.projects,
        withhold=engine.restoring.withhold if request.withhold_projects is None else request.withhold_projects,
        covered={
            name: Coverage(list(rules.keep), list(rules.left)) for name, rules in manifest.rules.items() if rules.keep
        },
        keyed=manifest.keyed,
        versions=manifest.versions,
        force=request.force,
        discard=request.discard,
        read_only=request.read_only,
        part=run.part,
        stored=standing.stored,
        unusable=standing.unusable,
        heads=standing.heads,
        keep=standing.keep,
        saved=standing.saved,
        brief=BriefFile(request.brief_path, run.brief.text) if run.brief and request.brief_path else None,
    )


async def _chain_files(before: bytes, parts: list[SpooledFile], digest: hashlib._Hash) -> AsyncIterator[bytes]:
    """Yield what comes first, then the files. The digest is that of the files."""
    if before:
        yield before
    for part in parts:
        async for chunk in read_chunks(part.path):
            digest.update(chunk)
            yield chunk
