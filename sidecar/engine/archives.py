"""Ordinary tarballs, out and in: ``download`` writes one that unpacks into a home, ``import`` adopts one made of a home."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import posixpath
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import zstandard

from sidecar.engine.export import export
from sidecar.engine.exporting import ExportRequest
from sidecar.engine.homes import laid_out, note_of, noted, of_layouts, of_projects, placed
from sidecar.engine.limiting import Bounds, bounds
from sidecar.engine.parts import Engine
from sidecar.engine.privacy import shown
from sidecar.engine.unpacked import NotAnArchive, entry_member, members, plain_name, unpack
from sidecar.inside.index import FILE
from sidecar.inside.packing import CHUNK
from sidecar.layouts import Layout
from sidecar.receipts import ExportReceipt, Skip
from sidecar.snapshots.fetch import Fetched, fetch
from sidecar.snapshots.fold import materialise
from sidecar.snapshots.manifest import Manifest
from sidecar.spool import spool

MOST_SKIPPED = 50


async def download(engine: Engine, memory: str, wanted: str, target: BinaryIO, codec: str) -> Manifest:
    """Write a snapshot as a tarball that plain ``tar`` unpacks into a home: ``.claude-mem/…``, ``memory/…``."""
    repository = engine.repository
    manifest = await repository.manifest(memory, await repository.resolve(memory, wanted))
    async with spool() as scratch:
        engine.progress.step("fetching", manifest.packed_bytes)
        fetched = await fetch(repository.store, manifest, scratch)
        engine.progress.step("writing")
        await asyncio.to_thread(_write_tar, fetched, engine.layouts.get, scratch.new(), target, codec)
    return manifest


def _write_tar(
    fetched: Fetched, layout: Callable[[str], Layout | None], folder: Path, target: BinaryIO, codec: str
) -> None:
    staged = materialise(fetched.pack_files(), fetched.entries, folder)
    places, projects = laid_out(fetched.manifest, layout)
    with (
        _compressed(target, codec) as plain,
        tarfile.open(
            fileobj=plain,
            mode="w|",
            bufsize=CHUNK,
            format=tarfile.PAX_FORMAT,
            encoding="utf-8",
            errors="surrogateescape",
            pax_headers=note_of(projects),
        ) as tar,
    ):
        for path in sorted(fetched.entries):
            entry = fetched.entries[path]
            name, _, relative = path.partition("/")
            member = entry_member(entry, posixpath.join(places[name], relative))
            if entry.type == FILE:
                with open(staged[path].place, "rb") as contents:
                    tar.addfile(member, contents)
            else:
                tar.addfile(member)


@contextlib.contextmanager
def _compressed(target: BinaryIO, codec: str) -> Iterator[BinaryIO]:
    if codec == "gz":
        with gzip.GzipFile(fileobj=target, mode="wb", compresslevel=6, mtime=0) as plain:
            yield plain  # type: ignore[misc]
    elif codec == "zst":
        with zstandard.ZstdCompressor(level=3).stream_writer(target, closefd=False) as plain:
            yield plain
    else:
        yield target


async def adopt(engine: Engine, archive: Path, request: ExportRequest) -> ExportReceipt:
    """Import a tarball: unpack it, checked, into a home of our own, and export that. It counts as grown from the head."""
    async with spool() as scratch:
        home = scratch.new()
        home.mkdir()
        engine.progress.step("unpacking")
        within = bounds(engine.limits.of(request.memory))
        skipped, projects = await asyncio.to_thread(_unpack, engine, archive, home, scratch.new(), within)
        sandbox = engine.open_home(home)
        sandbox.ref = f"import:{archive.name}"
        receipt = await export(engine, sandbox, replace(request, projects=projects, adopt=True, origin="import"))
    return replace(receipt, skipped=[*(replace(row, path=shown(row.path)) for row in skipped), *receipt.skipped])


def _unpack(
    engine: Engine, archive: Path, home: Path, elsewhere: Path, within: Bounds
) -> tuple[list[Skip], tuple[str, ...] | None]:
    """Unpack what is memory; return what is not, and the folders of the projects, when the tarball says which there are."""
    with members(archive, within) as tar:
        names = [plain_name(member) for member in tar]
        projects = noted(tar.pax_headers)
    named = None if projects is None else of_projects(projects, home, elsewhere)
    placements = of_layouts([name for name in names if name], engine.layouts.values(), home, named)
    if not placements:
        raise NotAnArchive(f"{archive.name} holds no memory of any known layout.")
    folders = None if named is None else tuple(placement.base / placement.target for placement in named)
    for folder in folders or ():
        folder.mkdir(parents=True, exist_ok=True)
    left = unpack(archive, lambda name: placed(name, placements), within)
    skipped = [Skip(path=name, reason="not part of the memory") for name in left[:MOST_SKIPPED]]
    return skipped, None if folders is None else tuple(map(str, folders))
