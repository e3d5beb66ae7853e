"""Receive a bundle: fetch it, compare it with the sandbox's claims, check it as hostile input, and apply it on top of
its base."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass

from sidecar.engine.archives.homes import find_spec
from sidecar.engine.core import CountedSandbox, Engine
from sidecar.engine.limits import Bounds, check_dropped, check_layouts, loosen_limits
from sidecar.engine.sandbox.links import RELAYED, NotDirect, receive_through_bucket
from sidecar.errors import BadAnswer, DigestMismatch, SizeMismatch, UnsafePath
from sidecar.format.index import DIR, FILE, Entry, Index, apply_index
from sidecar.format.patterns import Rules, is_secret
from sidecar.format.protocol import Bundle, ExportAnswer
from sidecar.host.spool import Spool, SpooledFile
from sidecar.host.threads import Deadline
from sidecar.store.arrival import check_pack, read_index
from sidecar.store.claims import LONGEST_NAME, check_entries, check_hint, check_path
from sidecar.store.fold import PackFile

_SCRATCH_FILE = re.compile(r"\A/.*/memory-sidecar(-\d+)?/work-[\w-]+/bundle\Z", re.DOTALL)
"""Where bundles are in a sandbox. A sandbox must not be able to make the sidecar fetch or remove any other file."""


@dataclass(frozen=True, slots=True)
class ReceivedPack:
    """A checked pack, and all entries of the memory once it is applied."""

    pack: PackFile
    entries: dict[str, Entry]


async def receive_bundle(
    engine: Engine,
    sandbox: CountedSandbox,
    answer: ExportAnswer,
    inline: bytes,
    spool: Spool,
    warnings: list[str],
    unclaimed: set[str],
) -> tuple[SpooledFile, str]:
    """Fetch the bundle to this machine and check its size and hash against the sandbox's claim.

    Return it with the id of its pack if the sandbox wrote the pack directly to the store, else with an empty id. In the
    first case the keys of the written objects are added to ``unclaimed``. The sandbox removes its own copy.
    """
    claim = answer.bundle
    if claim is None or not 0 < answer.pack_bytes < claim.bytes:
        raise BadAnswer("The sandbox says something changed but brings nothing.")
    _check_claim(claim, Bounds(engine.limits, engine.limits))
    if engine.direct and not claim.inline:
        try:
            bundle, name = await receive_through_bucket(engine, sandbox, answer, spool, unclaimed)
            return _compare_claim(bundle, claim), name
        except NotDirect as reason:
            told = RELAYED.format(reason=reason)
            warnings += [told] if str(reason) and told not in warnings else []
    return await fetch_bundle(engine, sandbox, answer, spool, inline), ""


async def fetch_bundle(
    engine: Engine,
    sandbox: CountedSandbox,
    answer: ExportAnswer,
    spool: Spool,
    inline: bytes | None = None,
    within: Bounds | None = None,
) -> SpooledFile:
    """Download the bundle that the answer names, or use the ``inline`` bytes. Raise ``SizeMismatch``,
    ``DigestMismatch`` or ``LimitExceeded``."""
    claim = answer.bundle
    if claim is None:
        raise BadAnswer("The sandbox says something changed but brings nothing.")
    _check_claim(claim, within or Bounds(engine.limits, engine.limits))
    if claim.inline and inline is not None:
        return _compare_claim(await spool.take(_yield_once(inline), most=claim.bytes), claim)
    engine.progress.step("fetching", claim.bytes)
    async with contextlib.aclosing(sandbox.download(claim.path)) as chunks:
        return _compare_claim(await spool.take(chunks, most=claim.bytes), claim)


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
    engine: Engine,
    answer: ExportAnswer,
    bundle: SpooledFile,
    base: dict[str, Entry],
    roots: Mapping[str, str],
    stored: str,
    deadline: Deadline,
) -> ReceivedPack:
    """Check a bundle as hostile input and apply it on top of ``base``. ``roots`` maps the base's roots to their
    layouts.

    Raise ``UntrustedSandbox`` (``UnpackTimeout`` if it takes too long) or ``LimitExceeded``.
    """
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
    check_pack(bundle.path, answer.codec, index, engine.progress, deadline)
    _check_rules(engine, answer, index)
    return ReceivedPack(PackFile(bundle.path, answer.codec, index, stored), entries)


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
