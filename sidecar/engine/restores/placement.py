"""Place a chosen snapshot in a sandbox: uploaded by the sidecar, or fetched by the sandbox directly from the bucket."""

from __future__ import annotations

import gzip
import hashlib
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from sidecar.engine.core import CountedSandbox, Engine, new_upload_path
from sidecar.engine.exports.coverage import get_rules
from sidecar.engine.restores.choice import LATEST
from sidecar.engine.restores.unsaved import StoreFacts
from sidecar.engine.sandbox.delivery import CarriedParts
from sidecar.engine.sandbox.dialogue import Asking, ask
from sidecar.engine.sandbox.identity import build_identity
from sidecar.engine.sandbox.links import UNABLE, NotDirect, make_links
from sidecar.engine.sandbox.package import build_program, build_rules
from sidecar.engine.without_python import Tarball, send_tarball
from sidecar.errors import BadAnswer, ProgramFailed, UnknownLayout
from sidecar.format.compression import decompress
from sidecar.format.protocol import Coverage, PackPart, RestoreAnswer, RestoreQuestion, RootHint, UploadedBundle
from sidecar.host.retries import retry_safely
from sidecar.host.spool import Spool, SpooledFile, read_chunks
from sidecar.host.threads import run_in_thread
from sidecar.ids import build_memory_key
from sidecar.store.fetch import FetchedSnapshot
from sidecar.store.manifest import Manifest, Pack


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What to restore, and how. The sandbox is passed separately."""

    memory: str
    snapshot: str = LATEST
    mode: str = "replace"
    projects: tuple[str, ...] | None = None
    force: bool = False
    must_exist: bool = False
    """Treat a missing memory as an error, not as a first start."""
    conversation: str = ""
    discard: bool = False
    """Replace files that no snapshot has, and files that came with the sandbox, without keeping them."""
    read_only: bool = False
    """Later exports of this sandbox are stored beside the head."""
    withhold_projects: bool | None = None
    """Leave out projects that were not named and whose folders do not exist yet; ``None``: as the settings say."""
    in_use: bool = False
    """The sandbox was in use before: ask what it has before much is uploaded to it."""


@dataclass(slots=True)
class SnapshotUpload:
    """The upload of a snapshot to a sandbox. Uploaded files stay there while something has to be saved first."""

    fetched: FetchedSnapshot
    scratch: Spool
    uploads: list[str] = field(default_factory=list)
    """Every path that was uploaded to, for cleaning up."""
    packs: list[SpooledFile] = field(default_factory=list)
    codecs: list[str] = field(default_factory=list)
    bundle: UploadedBundle | None = None
    """The bundle that is in the sandbox now."""
    carried: CarriedParts | None = None
    """What is in front of it: the rules and the program, if the sandbox may lack them."""
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


async def place_directly(
    engine: Engine,
    sandbox: CountedSandbox,
    request: RestoreRequest,
    manifest: Manifest,
    standing: StoreFacts,
    operation: str,
) -> RestoreAnswer:
    """Let the sandbox fetch the snapshot from the bucket with one command. Raise ``NotDirect`` if it cannot, or if
    parts of the snapshot are missing: the path through the sidecar then looks for an older one."""
    question = _build_question(engine, sandbox, request, manifest, manifest.packs, standing, operation)
    question.links = await make_links(engine, manifest)
    how = replace(_choose_asking(engine), at_once=not request.in_use)
    try:
        async for attempt in retry_safely():
            with attempt:
                answer = await _ask_and_check(sandbox, question, manifest, how)
    except ProgramFailed as problem:
        if problem.code in UNABLE:
            raise NotDirect(problem.message) from None
        raise
    if answer.status == "no-python":
        raise NotDirect
    if answer.status == "complete":
        sandbox.transferred_bytes += sum(part.bytes for part in question.links)
    return answer


async def ask_first(
    engine: Engine,
    sandbox: CountedSandbox,
    request: RestoreRequest,
    parcel: SnapshotUpload,
    standing: StoreFacts,
    operation: str,
) -> RestoreAnswer:
    """Ask what the sandbox has, without uploading anything. The status "clear" means that it can be restored."""
    manifest = parcel.fetched.manifest
    question = _build_question(engine, sandbox, request, manifest, [], standing, operation)
    return await _ask_and_check(sandbox, replace(question, ask=True), manifest, _choose_asking(engine))


async def place_through_sidecar(
    engine: Engine,
    sandbox: CountedSandbox,
    request: RestoreRequest,
    parcel: SnapshotUpload,
    standing: StoreFacts,
    operation: str,
) -> RestoreAnswer:
    """Place the snapshot with one upload and one command; try again if the upload was cut short, or the sandbox cannot
    read zstd."""
    manifest = parcel.fetched.manifest
    async for attempt in retry_safely():
        with attempt:
            try:
                if parcel.tarball is None:
                    answer = await _upload_and_ask(engine, sandbox, request, parcel, standing, operation)
                    if answer.status != "no-python":
                        return answer
                question = _build_question(engine, sandbox, request, manifest, manifest.packs, standing, operation)
                parcel.tarball = parcel.tarball or Tarball()
                return await send_tarball(
                    engine, sandbox, question, parcel.fetched, parcel.scratch, parcel.tarball, parcel.uploads
                )
            except ProgramFailed as problem:
                if problem.code != "no-zstd":
                    raise
                parcel.packs = [
                    await run_in_thread(_recompress, pack, parcel.scratch) if codec == "zst" else pack
                    for pack, codec in zip(parcel.packs, parcel.codecs, strict=True)
                ]
                parcel.codecs = ["gz"] * len(parcel.packs)
                return await _upload_and_ask(engine, sandbox, request, parcel, standing, operation)
    raise AssertionError("unreachable")


async def _upload_and_ask(
    engine: Engine,
    sandbox: CountedSandbox,
    request: RestoreRequest,
    parcel: SnapshotUpload,
    standing: StoreFacts,
    operation: str,
) -> RestoreAnswer:
    """Upload the bundle unless it is in the sandbox already, and request the restore. The bundle stays there only if
    something has to be saved first."""
    bundle, parcel.bundle = parcel.bundle, None
    if bundle is None:
        bundle = await _upload(engine, sandbox, parcel, fresh=not request.in_use)
    engine.progress.step("putting it in place")
    question = _build_question(
        engine, sandbox, request, parcel.fetched.manifest, parcel.list_sent_packs(), standing, operation
    )
    question.bundle, question.uploads = bundle, parcel.uploads
    how = replace(_choose_asking(engine), carried=parcel.carried)
    answer = await _ask_and_check(sandbox, question, parcel.fetched.manifest, how)
    parcel.bundle = bundle if answer.status == "unsaved" else None
    return answer


async def _upload(engine: Engine, sandbox: CountedSandbox, parcel: SnapshotUpload, *, fresh: bool) -> UploadedBundle:
    """Upload the bundle. To a ``fresh`` sandbox it brings the rules and the program too; one on this machine needs
    neither."""
    parcel.uploads.append(path := new_upload_path())
    digest, parcel.carried = hashlib.sha256(), None
    if fresh and sandbox.ground(None) is None:
        parcel.carried = CarriedParts(path, build_rules(engine.layouts.values()), build_program())
    before = parcel.carried.data if parcel.carried else b""
    engine.progress.step("sending", len(before) + parcel.size)
    await sandbox.upload(path, _chain_files(before, parcel.parts, digest))
    return UploadedBundle(path, len(before), parcel.size, digest.hexdigest())


def _choose_asking(engine: Engine) -> Asking:
    return Asking(timeout=engine.timing.command, rules=build_rules(engine.layouts.values()))


async def _ask_and_check(
    sandbox: CountedSandbox, question: RestoreQuestion, manifest: Manifest, how: Asking
) -> RestoreAnswer:
    """Request the restore. Raise ``BadAnswer`` if the sandbox reports success but not all files."""
    answer, _ = await ask(sandbox, question, RestoreAnswer, how)
    missing = manifest.files - answer.files - len(answer.skipped) - sum(row.files for row in answer.withheld)
    if answer.status == "complete" and missing > 0:
        raise BadAnswer(f"The sandbox says it is done, but of its files {missing} are missing.")
    return answer


def _build_question(
    engine: Engine,
    sandbox: CountedSandbox,
    request: RestoreRequest,
    manifest: Manifest,
    packs: Sequence[Pack],
    standing: StoreFacts,
    operation: str,
) -> RestoreQuestion:
    """Build the question for the in-sandbox program. Raise ``UnknownLayout`` if a layout of the snapshot is not
    known here."""
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
        operation=operation,
        identity=build_identity(sandbox, request, standing.store),
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
            name: Coverage(list(rules.keep), list(rules.left))
            for name, rules in get_rules(manifest).items()
            if rules.keep
        },
        keyed=manifest.keyed,
        versions=manifest.versions,
        force=request.force,
        discard=request.discard,
        read_only=request.read_only,
        stored=standing.stored,
        unusable=standing.unusable,
        heads=standing.heads,
        keep=standing.keep,
        saved=standing.saved,
    )


async def _chain_files(before: bytes, parts: list[SpooledFile], digest: hashlib._Hash) -> AsyncIterator[bytes]:
    """Yield what comes first, and the files. The digest is that of the files."""
    if before:
        yield before
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
