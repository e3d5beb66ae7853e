"""Ordinary tarballs, out and in: ``download`` writes one that unpacks into a home, ``import`` adopts one made of a home."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import posixpath
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import zstandard

from sidecar.engine.export import export
from sidecar.engine.exporting import ExportRequest
from sidecar.engine.limiting import Bounds, bounds
from sidecar.engine.parts import Engine
from sidecar.engine.privacy import shown
from sidecar.engine.unpacked import NotAnArchive, entry_member, members, plain_name, unpack
from sidecar.inside.index import FILE
from sidecar.inside.packing import CHUNK
from sidecar.inside.rules import compiled
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
    places = {root.name: _home_place(root.name, root.hint, layout(root.layout)) for root in fetched.manifest.roots}
    with (
        _compressed(target, codec) as plain,
        tarfile.open(
            fileobj=plain,
            mode="w|",
            bufsize=CHUNK,
            format=tarfile.PAX_FORMAT,
            encoding="utf-8",
            errors="surrogateescape",
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


def _home_place(name: str, hint: str, layout: Layout | None) -> str:
    """Where a root goes in a home: its layout's usual place, or where a project was."""
    for root in layout.roots if layout else ():
        if root.paths and root.name == name:
            return posixpath.join(root.paths[0].removeprefix("~/"), root.below)
    return hint.removeprefix("~").strip("/")


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


@dataclass(frozen=True, slots=True)
class _Placement:
    """A folder of the tarball and where it belongs in a home."""

    prefix: str
    target: str


async def adopt(engine: Engine, archive: Path, request: ExportRequest) -> ExportReceipt:
    """Import a tarball: unpack it, checked, into a home of our own, and export that. It counts as grown from the head."""
    async with spool() as scratch:
        home = scratch.new()
        home.mkdir()
        engine.progress.step("unpacking")
        within = bounds(engine.limits.of(request.memory))
        skipped = await asyncio.to_thread(_unpack, engine, archive, home, within)
        sandbox = engine.open_home(home)
        sandbox.ref = f"import:{archive.name}"
        receipt = await export(engine, sandbox, replace(request, adopt=True, origin="import"))
    return replace(receipt, skipped=[*(replace(row, path=shown(row.path)) for row in skipped), *receipt.skipped])


def _unpack(engine: Engine, archive: Path, home: Path, within: Bounds) -> list[Skip]:
    with members(archive, within) as tar:
        names = [plain_name(member) for member in tar]
    placements = _placements([name for name in names if name], engine.layouts.values())
    if not placements:
        raise NotAnArchive(f"{archive.name} holds no memory of any known layout.")
    left = unpack(archive, home, lambda name: _placed(name, placements), within)
    return [Skip(path=name, reason="not part of the memory") for name in left[:MOST_SKIPPED]]


def _placements(names: list[str], layouts: Iterable[Layout]) -> list[_Placement]:
    """Which folders of a tarball are memory: a layout's usual folder, wherever it is; else the folder of its database;
    for project layouts the shallowest folder that holds any of their files, outside of those."""
    roots = [(layout, root) for layout in layouts for root in layout.roots]
    placements: list[_Placement] = []
    for layout, root in roots:
        usual = [path.removeprefix("~/").removeprefix("./") for path in root.paths]
        ways = [posixpath.join(path, root.below).rstrip("/") for path in usual] or [root.below]
        prefixes = {name[: at + len(way)] for way in ways if way for name in names if (at := _find(name, way)) >= 0}
        if not prefixes and not root.project and len(layout.roots) == 1:
            databases = compiled(layout.databases)
            prefixes = {posixpath.dirname(name) for name in names if databases.match(posixpath.basename(name))}
        placements += [_Placement(min(prefixes, key=len), ways[0])] if prefixes else []
    others = [name for name in names if _placed(name, placements) is None]
    for layout, root in roots:
        if root.project and not root.below:
            firsts = compiled(pattern.split("/")[0] for pattern in layout.keep + layout.databases)
            found = [posixpath.dirname(name) for name in others if firsts.match(posixpath.basename(name))]
            placements += [_Placement(min(found, key=lambda p: (p.count("/"), len(p))), "")] if found else []
    return sorted(placements, key=lambda placement: -len(placement.prefix))


def _find(name: str, folder: str) -> int:
    """Where ``folder`` begins as whole parts of ``name``; -1 when it does not."""
    return f"/{name}/".find(f"/{folder}/")


def _placed(name: str, placements: list[_Placement]) -> str | None:
    for placement in placements:
        prefix = f"{placement.prefix}/" if placement.prefix else ""
        if name.startswith(prefix) and name != placement.prefix:
            return posixpath.join(placement.target, name[len(prefix) :])
    return None
