"""Ordinary tarballs, out and in: ``download`` writes one that unpacks into a home, ``import`` adopts one made of a home."""

from __future__ import annotations

import contextlib
import gzip
import posixpath
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import zstandard

from sidecar.engine.export import export
from sidecar.engine.exporting import ExportRequest
from sidecar.engine.homes import Layouts, laid_out, placed, placements_of, places_of
from sidecar.engine.limiting import Bounds, bounds
from sidecar.engine.notes import Noted, on_members, on_top, ours, read
from sidecar.engine.parts import Engine
from sidecar.engine.privacy import shown
from sidecar.engine.unpacked import NotAnArchive, entry_member, members, unpack
from sidecar.errors import PackBomb
from sidecar.inside.index import FILE
from sidecar.inside.packing import CHUNK
from sidecar.receipts import ExportReceipt, Skip
from sidecar.snapshots.claims import check_path
from sidecar.snapshots.fetch import Fetched, fetch
from sidecar.snapshots.fold import materialise
from sidecar.snapshots.manifest import Manifest
from sidecar.snapshots.resolving import resolve
from sidecar.spool import spool
from sidecar.threads import Deadline, run_long

MOST_COMMENTS, LONGEST_COMMENTS = 5_000, 4 << 20
MOST_PROJECTS = 1_000


async def download(engine: Engine, memory: str, wanted: str, target: BinaryIO, codec: str) -> Manifest:
    """Write a snapshot as a tarball that plain ``tar`` unpacks into a home: ``.claude-mem/…``, ``memory/…``."""
    repository = engine.repository
    manifest = await repository.manifest(memory, await resolve(repository, memory, wanted))
    async with spool() as scratch:
        engine.progress.step("fetching", manifest.packed_bytes)
        fetched = await fetch(repository.store, manifest, scratch)
        engine.progress.step("writing")
        await run_long(_write_tar, fetched, engine.layouts, scratch.new(), target, codec)
    return manifest


def _write_tar(fetched: Fetched, layouts: Layouts, folder: Path, target: BinaryIO, codec: str) -> None:
    staged = materialise(fetched.pack_files(), fetched.entries, folder)
    places, projects = laid_out(fetched.manifest, layouts)
    notes = on_members(fetched.manifest, fetched.entries)
    with (
        _compressed(target, codec) as plain,
        tarfile.open(
            fileobj=plain,
            mode="w|",
            bufsize=CHUNK,
            format=tarfile.PAX_FORMAT,
            encoding="utf-8",
            errors="surrogateescape",
            pax_headers=on_top(fetched.manifest, projects),
        ) as tar,
    ):
        for path in sorted(fetched.entries):
            entry = fetched.entries[path]
            name, _, relative = path.partition("/")
            member = entry_member(entry, posixpath.join(places[name], relative))
            member.pax_headers = notes.get(path, {})
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
        skipped, noted = await run_long(_unpack, engine, archive, home, within, seconds=engine.timing.unpack)
        sandbox = engine.open_home(home)
        sandbox.ref = f"import:{archive.name}"
        places = None if noted.projects is None else places_of(noted.projects).values()
        projects = None if places is None else tuple(f"~/{place}" for place in places)
        adopted = replace(request, projects=projects, noted=noted, adopt=True, origin="import")
        receipt = await export(engine, sandbox, adopted)
    return replace(receipt, skipped=[*(replace(row, path=shown(row.path)) for row in skipped), *receipt.skipped])


def _unpack(engine: Engine, archive: Path, home: Path, within: Bounds, deadline: Deadline) -> tuple[list[Skip], Noted]:
    """Unpack what is memory; return what is not, and what the tarball says besides."""
    names, noted = _survey(archive, within, deadline)
    places = list(filter(None, places_of(noted.projects or []).values()))
    folders = sum(place.count("/") + 1 for place in places)
    within.check("files", folders, f"The projects of the tarball need {folders:,} folders")
    for place in places:
        check_path(place)
    placements = placements_of(names, engine.layouts, noted.projects)
    if not placements:
        raise NotAnArchive(f"{archive.name} holds no memory of any known layout.")
    for place in places:
        (home / place).mkdir(parents=True, exist_ok=True)
    left = unpack(archive, home, lambda name: placed(name, placements), within, deadline)
    return [Skip(path=name, reason="not part of the memory") for name in left], noted


def _survey(archive: Path, within: Bounds, deadline: Deadline) -> tuple[list[str], Noted]:
    """The names in a tarball, and what its comments say."""
    names: list[str] = []
    comments: dict[str, None] = {}
    length = 0
    for name, member, _ in members(archive, within, deadline):
        names += filter(None, [name])
        for comment in ours(member.pax_headers).keys() - comments.keys():
            comments[comment], length = None, length + len(comment)
        if len(comments) > MOST_COMMENTS or length > LONGEST_COMMENTS:
            raise PackBomb("The tarball has more comments than any memory has projects.")
    noted = read(comments)
    if len(noted.projects or []) > MOST_PROJECTS:
        raise PackBomb("The tarball names more projects than any memory has.")
    return names, noted
