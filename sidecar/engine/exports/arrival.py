"""What arrives from a sandbox: ask for the export, fetch the bundle, compare it with the sandbox's claims, check it as
hostile input, and apply it on top of its base."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, field, replace
from typing import TYPE_CHECKING

from sidecar.engine.archives.notes import apply_notes
from sidecar.engine.core import Engine
from sidecar.engine.exports.run import Base, ExportRun
from sidecar.engine.limits import Bounds, build_bounds, check_dropped, check_layouts, loosen_limits
from sidecar.engine.sandbox.dialogue import ask
from sidecar.engine.sandbox.links import RELAYED, NotDirect, receive_through_bucket
from sidecar.engine.sandbox.presence import clean_up_on_failure, keep_alive
from sidecar.errors import (
    BadAnswer,
    DigestMismatch,
    SizeMismatch,
    SnapshotDamaged,
    SnapshotNotFound,
    StoreError,
    UnsafePath,
    UntrustedSandbox,
)
from sidecar.format.index import DIR, FILE, Entry, Index, apply_index
from sidecar.format.patterns import Rules, is_secret
from sidecar.format.protocol import Bundle, ExportAnswer, ExportQuestion
from sidecar.host.files import Spool, SpooledFile
from sidecar.host.values import dataclass
from sidecar.host.work import Deadline, retry_safely, run_in_thread
from sidecar.ids import MemoryKeys
from sidecar.layouts import choose_layouts, find_spec
from sidecar.ports import Store
from sidecar.store.fetch import fetch_entries
from sidecar.store.fold import PackFile
from sidecar.store.intake import LONGEST_NAME, check_entries, check_hint, check_pack, check_path, read_index
from sidecar.store.manifest import Manifest

if TYPE_CHECKING:
    from sidecar.records.files import KeptFiles

MOST_AHEAD = 8 << 20
"""How many bytes of indexes are read ahead at most, before it is known whether they are needed."""
LOADED_AFTER = 0.1
"""Seconds after which the sandbox has surely begun to work, and nearly always has ended if nothing changed."""
MOST_COUNTED = 64 << 20
"""If files have more bytes than this, their records are not counted: an export is not to wait for its own description."""
_SCRATCH_FILE = re.compile(r"\A/.*/memory-sidecar(-\d+)?/work-[\w-]+/bundle\Z", re.DOTALL)
"""Where bundles are in a sandbox. A sandbox must not be able to make the sidecar fetch or remove any other file."""


class BaseDamaged(SnapshotDamaged):
    """The base of a delta cannot be read. Retryable, because a full export needs no base."""

    retryable = True


@dataclass(frozen=True, slots=True)
class ReceivedPack:
    """A checked pack, and all entries of the memory once it is applied."""

    pack: PackFile
    entries: dict[str, Entry]
    kept: KeptFiles | None = None
    """Of a full pack: its files that hold records."""


@dataclass(frozen=True, slots=True)
class CheckedExport:
    """A checked export on top of the snapshot that it is based on. ``base`` is ``None`` for a full export; ``arrived``
    is ``None`` if nothing changed."""

    answer: ExportAnswer
    base: Manifest | None = None
    base_entries: dict[str, Entry] = field(default_factory=dict)
    base_indexes: list[Index] = field(default_factory=list)
    """The indexes of the base's packs, from which its entries are put together."""
    arrived: ReceivedPack | None = None
    read: float = 0.0
    """When the base was read, by ``time.monotonic``."""

    @property
    def received_pack(self) -> ReceivedPack:
        """The received pack. Only valid if something changed."""
        assert self.arrived is not None
        return self.arrived

    @property
    def entries(self) -> dict[str, Entry]:
        """All entries of the memory. Only valid if something changed."""
        return self.received_pack.entries

    @property
    def unchanged(self) -> Manifest:
        """The base of an export in which nothing changed. Raise ``BadAnswer`` if there is none."""
        if self.base is None:
            raise BadAnswer("The sandbox says nothing changed, but not since when.")
        return self.base


@asynccontextmanager
async def delete_unused(store: Store) -> AsyncIterator[set[str]]:
    """Yield a set of keys for the body to fill. Keys that are in it at the end are deleted from the store."""
    keys: set[str] = set()
    try:
        yield keys
    finally:
        if keys:
            with contextlib.suppress(StoreError):  # what is left is collected after the grace period
                await store.delete(keys)


async def fetch_and_check(run: ExportRun, question: ExportQuestion) -> CheckedExport:
    """Request the export from the sandbox, fetch the bundle and check it; start again if a transfer was cut short. The
    sandbox is kept alive meanwhile, and cleaned up after a failure."""
    async with keep_alive(run, run.presence), clean_up_on_failure(run), _read_ahead(run):
        async for attempt in retry_safely():
            with attempt:
                return await _fetch_once(run, question)
    raise AssertionError("unreachable")


async def _fetch_once(run: ExportRun, question: ExportQuestion) -> CheckedExport:
    """Make one attempt. ``question`` is changed if the next one has to request something else."""
    engine = run.engine
    engine.progress.step("reading the memory")

    def write_script() -> str:
        from sidecar.engine.shell.scripts import build_export_script  # late: most sandboxes have Python

        return build_export_script(question, choose_layouts(run.request.layouts, engine.layouts))

    how = replace(run.asking, inline_bytes=question.inline_bytes, shell=write_script)
    answer, inline = await ask(run.sandbox, question, ExportAnswer, how)
    read = time.monotonic()
    if run.request.noted is not None:
        answer = apply_notes(answer, run.request.noted, engine.layouts)
    if answer.status == "refused":
        return CheckedExport(answer)
    checked = CheckedExport(answer, *await _find_base(run, answer, question), read=read)
    if answer.status == "unchanged":
        return checked
    stored = ""
    if answer.status == "tarball":
        from sidecar.engine.without_python import match_roots, read_tarball  # late: it has no Python

        roots = match_roots(engine, answer, question)
        tarball = await _fetch_bundle(run, answer, within=build_bounds(engine.limits))
        answer, bundle = await read_tarball(run, answer, question, roots, tarball)
        if bundle is None:
            return CheckedExport(answer)
        checked = replace(checked, answer=answer)
    else:
        bundle, stored = await _receive_bundle(run, answer, inline)
    spool, seconds = run.scratch, engine.timing.unpack
    try:
        return await run_in_thread(check_bundle, engine, checked, bundle, stored, spool, seconds=seconds)
    except UntrustedSandbox as problem:
        _ask_for_full_export(run, question, answer, problem)
        raise


async def _find_base(
    run: ExportRun, answer: ExportAnswer, question: ExportQuestion
) -> tuple[Manifest | None, dict[str, Entry], list[Index]]:
    """Return the base that the sandbox named, with its entries and indexes if they are needed; nothing for a full
    export.

    A delta on a base that is damaged or forgotten would be lost with it: raise ``BaseDamaged`` then, and make the next
    attempt request an export without it.
    """
    if not answer.base:
        return None, {}, []
    if answer.base not in run.known:
        raise BadAnswer(f"The sandbox builds on a snapshot it was not asked about: {answer.base[:80]!r}.")
    try:
        if run.ahead is not None and answer.base == run.state.snapshot:
            return await run.ahead
        if answer.status == "unchanged":
            manifest = await run.engine.repository.manifest(run.request.memory, answer.base, run.survey)
            await run.engine.repository.check_present(manifest, run.survey)
            return manifest, {}, []
        return await read_base(run, answer.base)
    except (SnapshotDamaged, SnapshotNotFound) as damage:
        if isinstance(damage, SnapshotDamaged):
            await run.engine.repository.mark_damaged(run.request.memory, answer.base, damage)
        run.survey.damaged.add(answer.base)
        question.unusable = sorted({*question.unusable, *run.survey.damaged})
        raise BaseDamaged(damage.message) from None


@asynccontextmanager
async def _read_ahead(run: ExportRun) -> AsyncIterator[None]:
    """Read the head in a background task while the sandbox works, since the head is the usual base. Cancel the task at
    the end."""
    head, manifest = run.state.snapshot, run.replaces
    if manifest is not None and head not in run.survey.damaged and _is_near(run, manifest):
        run.ahead = asyncio.create_task(read_base(run, head))
    loading = asyncio.get_running_loop().call_later(LOADED_AFTER, _load_ahead)
    try:
        yield
    finally:
        loading.cancel()
        if run.ahead is not None:
            run.ahead.cancel()
            # An error in it matters only to ``_find_base``, which awaits the task itself.
            await asyncio.gather(run.ahead, return_exceptions=True)


def _load_ahead() -> None:
    """Load what will be needed if something changed."""
    from sidecar.engine.exports import counts  # noqa: F401


def _is_near(run: ExportRun, manifest: Manifest) -> bool:
    """Whether the indexes of a snapshot can be read without requests that an export of nothing new would not need."""
    if sum(pack.index_bytes for pack in manifest.packs) > MOST_AHEAD:
        return False
    keys, recalled = MemoryKeys.of(manifest.memory), run.recalled
    remote = bool(run.survey.versions)
    return not remote or all(recalled.find(keys.index(pack.id)) is not None for pack in manifest.packs)


async def read_base(run: ExportRun, snapshot: str) -> Base:
    """Read a snapshot's manifest, entries and indexes. Raise ``SnapshotDamaged`` if parts of it are missing in the
    store."""
    manifest = run.replaces
    if manifest is None or manifest.snapshot != snapshot:
        manifest = await run.engine.repository.manifest(run.request.memory, snapshot, run.survey)
    await run.engine.repository.check_present(manifest, run.survey)
    store = run.engine.repository.store
    entries, indexes, _ = await fetch_entries(store, manifest, run.scratch, run.recalled)
    return manifest, entries, indexes


def _ask_for_full_export(
    run: ExportRun, question: ExportQuestion, answer: ExportAnswer, problem: UntrustedSandbox
) -> None:
    """Make the next attempt request a full export, once, after a delta that makes no sense. The base is recorded in the
    sandbox's notes, which the agent can write; without this, a sandbox with wrong notes could never be exported again.
    """
    if answer.base and answer.base not in question.unusable:
        question.unusable = sorted([*question.unusable, answer.base])
        run.warnings.append(f"What the sandbox noted of {answer.base} is not so; all of the memory was read again.")
        problem.retryable = True


async def _receive_bundle(run: ExportRun, answer: ExportAnswer, inline: bytes) -> tuple[SpooledFile, str]:
    """Fetch the bundle to this machine and check its size and hash against the sandbox's claim.

    Return it with the id of its pack if the sandbox wrote the pack directly to the store, else with an empty id. In the
    first case the keys of the written objects are added to ``run.unused``. The sandbox removes its own copy.
    """
    claim, limits = answer.bundle, run.engine.limits
    if claim is None or not 0 < answer.pack_bytes < claim.bytes:
        raise BadAnswer("The sandbox says something changed but brings nothing.")
    _check_claim(claim, Bounds(limits, limits))
    if run.engine.direct and not claim.inline:
        try:
            bundle, name = await receive_through_bucket(run, answer)
            return _compare_claim(bundle, claim), name
        except NotDirect as reason:
            told = RELAYED.format(reason=reason)
            run.warnings += [told] if str(reason) and told not in run.warnings else []
    return await _fetch_bundle(run, answer, inline, within=Bounds(limits, limits)), ""


async def _fetch_bundle(
    run: ExportRun, answer: ExportAnswer, inline: bytes | None = None, *, within: Bounds
) -> SpooledFile:
    """Download the bundle that the answer names, or use the ``inline`` bytes. Raise ``SizeMismatch``,
    ``DigestMismatch`` or ``LimitExceeded``."""
    claim = answer.bundle
    if claim is None:
        raise BadAnswer("The sandbox says something changed but brings nothing.")
    _check_claim(claim, within)
    if claim.inline and inline is not None:
        return _compare_claim(await run.scratch.take(_yield_once(inline), most=claim.bytes), claim)
    run.engine.progress.step("fetching", claim.bytes)
    async with contextlib.aclosing(run.sandbox.download(claim.path)) as chunks:
        return _compare_claim(await run.scratch.take(chunks, most=claim.bytes), claim)


def _check_claim(claim: Bundle, within: Bounds) -> None:
    """Raise ``UnsafePath`` or ``LimitExceeded`` before anything is fetched."""
    if not claim.inline and (not _SCRATCH_FILE.search(claim.path) or "/../" in claim.path):
        raise UnsafePath(f"The sandbox offers {claim.path[:200]!r}, which is not in the program's own folder.")
    within.check("packed_bytes", claim.bytes, f"Its pack has {claim.bytes:,} bytes")


def _compare_claim(bundle: SpooledFile, claim: Bundle) -> SpooledFile:
    if bundle.size != claim.bytes:
        raise SizeMismatch(f"{bundle.size} bytes of {claim.bytes} arrived from the sandbox, or more than it said.")
    if claim.sha256 and bundle.sha256 != claim.sha256:
        raise DigestMismatch("What arrived from the sandbox is not what it sent.")
    return bundle


async def _yield_once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def check_bundle(
    engine: Engine, checked: CheckedExport, bundle: SpooledFile, stored: str, spool: Spool, deadline: Deadline
) -> CheckedExport:
    """Check a bundle as hostile input and apply it on top of the base of ``checked``. Return the export with what
    arrived. ``stored`` is the id of the pack if it is in the store already; ``spool`` gets the files of a full pack whose
    records are to be counted.

    Raise ``UntrustedSandbox`` (``UnpackTimeout`` if it takes too long) or ``LimitExceeded``.
    """
    answer, base = checked.answer, checked.base_entries
    roots = {root.name: root.layout for root in checked.base.roots} if checked.base else {}
    if answer.codec not in ("gz", "zst") or answer.kind != ("delta" if answer.base else "full"):
        raise BadAnswer("The sandbox names a kind of pack that was not asked for.")
    check_dropped(answer, engine.limits)
    index = read_index(bundle.path, answer.pack_bytes, engine.limits, len(base))
    os.truncate(bundle.path, answer.pack_bytes)
    entries = dict(base)
    try:
        apply_index(entries, index)
    except ValueError as problem:
        raise BadAnswer(f"The sandbox's index makes no sense: {problem}.") from None
    if index.kind != answer.kind or len({change.entry.path for change in index.changes}) != len(index.changes):
        raise BadAnswer("The sandbox's index names a path twice, or is of another kind.")
    _check_roots(engine, answer)
    _check_keyed(engine, answer)
    layout_of = {**roots, **{root.name: root.layout for root in answer.roots}}
    check_entries(entries, layout_of, loosen_limits(engine.limits), base)
    check_layouts(entries, layout_of, engine.limits)
    carried = sum(change.entry.size for change in index.changes if change.blocks is None)
    engine.progress.step("checking", carried)
    kept = None
    if index.kind == "full":
        from sidecar.records.files import KeptFiles  # late: a warm export brings a delta

        kept = KeptFiles(spool, _choose_kept(engine, answer, entries, layout_of))
    check_pack(bundle.path, answer.codec, index, engine.progress, deadline, kept.open if kept is not None else None)
    _check_rules(engine, answer, index)
    pack = PackFile(bundle.path, answer.codec, index, stored)
    return replace(checked, arrived=ReceivedPack(pack, entries, kept))


def _choose_kept(
    engine: Engine, answer: ExportAnswer, entries: Mapping[str, Entry], layout_of: Mapping[str, str]
) -> set[str]:
    """Return the files that have to be read to count records: none of the databases that the sandbox counted, and none at
    all if they are too large."""
    from sidecar.records.units import list_read, plan_units  # for the same reason as KeptFiles

    files = (path for path, entry in entries.items() if entry.type == FILE and path not in answer.counted)
    wanted = list_read(plan_units(files, layout_of, engine.layouts).values())
    return wanted if sum(entries[path].size for path in wanted) <= MOST_COUNTED else set()


def _check_roots(engine: Engine, answer: ExportAnswer) -> None:
    """Raise unless each root is named once, belongs to a known layout that has such a root, and has a safe path."""
    names = [root.name for root in answer.roots]
    if len(set(names)) != len(names):
        raise BadAnswer("The sandbox names a root twice.")
    for root in answer.roots:
        spec, _ = find_spec(root.name, engine.layouts.get(root.layout))
        if spec is None:
            raise BadAnswer(f"The sandbox brings a root {root.name[:80]!r} that its layout does not have.")
        check_hint(f"The root {root.name!r}", root.hint)
        # A restore puts a project's root back at this path, so it must not lead to any other folder (such as ~/.ssh).
        if spec.project and spec.below and not root.hint.endswith(f"/{spec.below}"):
            raise UnsafePath(
                f"The root {root.name!r} is said to be at {root.hint[:200]!r}, which is no {spec.below}.",
                hint=f"If {spec.below} is a link there, let it lead to a folder of the same name. The head did not move.",
            )


def _check_keyed(engine: Engine, answer: ExportAnswer) -> None:
    """Raise unless the folders named after projects are where a layout has such folders, and the paths of projects are
    safe."""
    tops = {
        f"{root.name}/{layout.keyed.folder}"
        for root in answer.roots
        if (layout := engine.layouts[root.layout]).keyed is not None
    }
    for path in answer.keyed:
        check_path(path)
        if path.rpartition("/")[0] not in tops:
            raise BadAnswer(f"The sandbox names a project for {path[:200]!r}, which is no project's folder.")
    if any(len(root) > LONGEST_NAME or len(version) > LONGEST_NAME for root, version in answer.versions.items()):
        raise BadAnswer("The sandbox names a version that is none.")
    for hint in (*answer.projects, *answer.keyed.values()):
        check_hint("A project", hint)


def _check_rules(engine: Engine, answer: ExportAnswer, index: Index) -> None:
    """Raise ``UnsafePath`` for an entry that its layout does not keep, or that must never leave a sandbox."""
    rules = {}
    for root in answer.roots:
        layout = engine.layouts[root.layout]
        spec, _ = find_spec(root.name, layout)
        rules[root.name] = Rules(layout.for_sandbox(), asdict(spec) if spec else None)
    for change in index.changes:
        name, _, relative = change.entry.path.partition("/")
        if name in rules and (not rules[name].allows(relative, change.entry.type == DIR) or _is_secret(change.entry)):
            raise UnsafePath(f"{change.entry.path[:200]!r} is not part of its layout, or must never leave a sandbox.")


def _is_secret(entry: Entry) -> bool:
    return entry.type == FILE and is_secret(entry.path)
