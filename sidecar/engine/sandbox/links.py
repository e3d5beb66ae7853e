"""Direct transfer: packs travel between sandbox and bucket by signed links, and the sidecar only checks what was
stored.

A sandbox writes to keys of its own. The pack is copied within the store to a key that the sandbox has no link to
*before* it is checked, so that it cannot be replaced afterwards.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from sidecar.engine.core import CountedSandbox, Engine
from sidecar.engine.sandbox.delivery import LONGEST_VARIABLE, encode_links
from sidecar.engine.sandbox.dialogue import Asking, ask
from sidecar.errors import ObjectMissing, ProgramFailed
from sidecar.format import protocol
from sidecar.format.protocol import ExportAnswer, IncomingPart, OutgoingPart, SendAnswer, SendQuestion
from sidecar.host.files import SpooledFile
from sidecar.ids import MemoryKeys, make_pack_id
from sidecar.ports import Link, Store
from sidecar.store.manifest import Manifest

if TYPE_CHECKING:
    from sidecar.engine.exports.run import ExportRun

RELAYED = "The sandbox and the bucket did not reach each other ({reason}); it went through the sidecar instead."
UNABLE = ("no-direct", "no-zstd")
"""Error codes of the program that mean that the transfer has to go through the sidecar."""


class NotDirect(Exception):
    """This transfer has to go through the sidecar."""


async def receive_through_bucket(run: ExportRun, answer: ExportAnswer) -> tuple[SpooledFile, str]:
    """Have the sandbox upload its bundle to the bucket. Return the bundle, read back from there, and the id of the
    stored pack.

    The keys of all objects made are added to ``run.unused``: those that no manifest names in the end are deleted.
    Raise ``NotDirect``.
    """
    assert answer.bundle is not None
    engine, sandbox, memory = run.engine, run.sandbox, run.request.memory
    store, keys, name = engine.repository.store, MemoryKeys.of(memory), make_pack_id()
    parked, index_bytes = make_pack_id(), answer.bundle.bytes - answer.pack_bytes
    parts = [
        (keys.pack(parked, answer.codec), 0, answer.pack_bytes, answer.pack_sha256),
        (keys.index(parked), answer.pack_bytes, index_bytes, answer.index_sha256),
    ]
    links = [await _make_put_link(engine, key, size, digest) for key, _, size, digest in parts]
    if None in links:
        raise NotDirect
    question = SendQuestion(
        memory=memory,
        snapshot=run.snapshot,
        path=answer.bundle.path,
        parts=[
            OutgoingPart(start, size, _copy_link(link))
            for (_, start, size, _), link in zip(parts, links, strict=True)
            if link is not None
        ],
    )
    _check_length([part.link for part in question.parts])
    engine.progress.step("sending to the bucket", answer.bundle.bytes)
    (pack, *_), (index, *_), ours = *parts, keys.pack(name, answer.codec)
    run.unused |= {pack, index, ours}
    await _ask_to_send(engine, sandbox, question)
    sandbox.transferred_bytes += answer.bundle.bytes
    await store.prepare()
    try:
        # Copied before it is read: the sandbox's link still works for ``pack``, but there is none for ``ours``.
        await store.copy(pack, ours)
        return await run.scratch.take(_chain_objects(store, [ours, index]), most=answer.bundle.bytes), name
    except ObjectMissing:
        raise NotDirect("what it says it sent is not there") from None


async def make_links(engine: Engine, manifest: Manifest) -> list[IncomingPart]:
    """Build the links with which a sandbox fetches a snapshot: each index followed by its pack, in order. Raise
    ``NotDirect``."""
    keys, parts = MemoryKeys.of(manifest.memory), list[IncomingPart]()
    for pack in manifest.packs:
        for key, size, digest in (
            (keys.index(pack.id), pack.index_bytes, pack.index_sha256),
            (keys.pack(pack.id, pack.codec), pack.bytes, pack.sha256),
        ):
            link = await engine.repository.store.link_to_get(key, seconds=engine.timing.direct)
            if link is None:
                raise NotDirect
            parts.append(IncomingPart(size, digest, _copy_link(link)))
    _check_length([part.link for part in parts])
    return parts


def _check_length(links: Sequence[protocol.Link | None]) -> None:
    """Raise ``NotDirect`` if the links do not fit into an environment variable."""
    if len(encode_links(links)) > LONGEST_VARIABLE:
        raise NotDirect("its links are too long")


async def _make_put_link(engine: Engine, key: str, size: int, sha256: str) -> Link | None:
    """Return a link to upload an object of exactly this size and hash; ``None`` if the hash is not one or the store
    cannot make links."""
    if len(sha256) != 64:
        return None
    return await engine.repository.store.link_to_put(key, size=size, sha256=sha256, seconds=engine.timing.direct)


async def _ask_to_send(engine: Engine, sandbox: CountedSandbox, question: SendQuestion) -> None:
    try:
        answer, _ = await ask(sandbox, question, SendAnswer, Asking(timeout=engine.timing.command))
    except ProgramFailed as problem:
        if problem.code in UNABLE:
            raise NotDirect(problem.message) from None
        raise
    if answer.status != "sent":
        raise NotDirect("it has no Python any more")


def _copy_link(link: Link) -> protocol.Link:
    return protocol.Link(link.url, dict(link.headers))


async def _chain_objects(store: Store, keys: list[str]) -> AsyncIterator[bytes]:
    for key in keys:
        async for chunk in store.stream(key):
            yield chunk
