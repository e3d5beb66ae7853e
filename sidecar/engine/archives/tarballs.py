"""Ordinary tarballs: ``download`` writes one that unpacks into a home, ``adopt`` imports one that was made of a home."""

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

from sidecar.engine.archives.homes import Layouts, assign_project_places, find_placements, lay_out_home, place_member
from sidecar.engine.archives.notes import (
    TarballNotes,
    build_header,
    build_member_headers,
    parse_comments,
    pick_comments,
)
from sidecar.engine.archives.unpack import Destination, NotAnArchive, build_member, read_members, unpack_archive
from sidecar.engine.core import Engine
from sidecar.engine.exports.run import ExportRequest
from sidecar.engine.exports.steps import export
from sidecar.engine.limits import Bounds, build_bounds
from sidecar.engine.sandbox.dialogue import redact
from sidecar.errors import PackBomb
from sidecar.format.index import FILE
from sidecar.format.packs import CHUNK
from sidecar.host.files import open_spool
from sidecar.host.work import Deadline, run_in_thread
from sidecar.receipts import ExportReceipt, Skip
from sidecar.store.fetch import FetchedSnapshot, fetch
from sidecar.store.fold import unpack_files
from sidecar.store.intake import check_path
from sidecar.store.manifest import Manifest
from sidecar.store.selectors import resolve_snapshot

MOST_COMMENTS, LONGEST_COMMENTS = 5_000, 4 << 20
MOST_PROJECTS = 1_000


async def download(engine: Engine, memory: str, wanted: str, target: BinaryIO, codec: str) -> Manifest:
    """Write a snapshot to ``target`` as a tarball that plain ``tar`` unpacks into a home: ``.claude-mem/…``,
    ``memory/…``."""
    repository = engine.repository
    manifest = await repository.manifest(memory, await resolve_snapshot(repository, memory, wanted))
    async with open_spool() as scratch:
        engine.progress.step("fetching", manifest.packed_bytes)
        fetched = await fetch(repository.store, manifest, scratch)
        engine.progress.step("writing")
        await run_in_thread(_write_tar, fetched, engine.layouts, scratch.new(), target, codec)
    return manifest


def _write_tar(fetched: FetchedSnapshot, layouts: Layouts, folder: Path, target: BinaryIO, codec: str) -> None:
    """Unpack the snapshot into ``folder``, then write it as a tarball to ``target``."""
    staged = unpack_files(fetched.list_pack_files(), fetched.entries, folder)
    places, projects = lay_out_home(fetched.manifest, layouts)
    notes = build_member_headers(fetched.manifest, fetched.entries)
    with (
        _open_compressed(target, codec) as plain,
        tarfile.open(
            fileobj=plain,
            mode="w|",
            bufsize=CHUNK,
            format=tarfile.PAX_FORMAT,
            encoding="utf-8",
            errors="surrogateescape",
            pax_headers=build_header(fetched.manifest, projects),
        ) as tar,
    ):
        for path in sorted(fetched.entries):
            entry = fetched.entries[path]
            name, _, relative = path.partition("/")
            member = build_member(entry, posixpath.join(places[name], relative))
            member.pax_headers = notes.get(path, {})
            if entry.type == FILE:
                with open(staged[path].place, "rb") as contents:
                    tar.addfile(member, contents)
            else:
                tar.addfile(member)


@contextlib.contextmanager
def _open_compressed(target: BinaryIO, codec: str) -> Iterator[BinaryIO]:
    if codec == "gz":
        with gzip.GzipFile(fileobj=target, mode="wb", compresslevel=6, mtime=0) as plain:
            yield plain  # type: ignore[misc]
    elif codec == "zst":
        with zstandard.ZstdCompressor(level=3).stream_writer(target, closefd=False) as plain:
            yield plain
    else:
        yield target


async def adopt(engine: Engine, archive: Path, request: ExportRequest) -> ExportReceipt:
    """Import a tarball: unpack it, with checks, into a folder of the sidecar's own, and export that as based on the
    head."""
    async with open_spool() as scratch:
        home = scratch.new()
        home.mkdir()
        engine.progress.step("unpacking")
        within = build_bounds(engine.limits.of(request.memory))
        skipped, noted = await run_in_thread(_unpack, engine, archive, home, within, seconds=engine.timing.unpack)
        sandbox = engine.open_home(home)
        sandbox.ref = f"import:{archive.name}"
        places = None if noted.projects is None else assign_project_places(noted.projects).values()
        projects = None if places is None else tuple(f"~/{place}" for place in places)
        adopted = replace(request, projects=projects, noted=noted, adopt=True, origin="import")
        receipt = await export(engine, sandbox, adopted)
    return replace(receipt, skipped=[*(replace(row, path=redact(row.path)) for row in skipped), *receipt.skipped])


def _unpack(
    engine: Engine, archive: Path, home: Path, within: Bounds, deadline: Deadline
) -> tuple[list[Skip], TarballNotes]:
    """Unpack the members that are part of a memory. Return the others, and what the tarball's comments say."""
    names, noted = _list_members(archive, within, deadline)
    places = list(filter(None, assign_project_places(noted.projects or []).values()))
    folders = sum(place.count("/") + 1 for place in places)
    within.check("files", folders, f"The projects of the tarball need {folders:,} folders")
    for place in places:
        check_path(place)
    placements = find_placements(names, engine.layouts, noted.projects)
    if not placements:
        raise NotAnArchive(f"{archive.name} holds no memory of any known layout.")
    for place in places:
        (home / place).mkdir(parents=True, exist_ok=True)
    destination = Destination(home, lambda name: place_member(name, placements))
    left = unpack_archive(archive, destination, within, deadline)
    return [Skip(path=name, reason="not part of the memory") for name in left], noted


def _list_members(archive: Path, within: Bounds, deadline: Deadline) -> tuple[list[str], TarballNotes]:
    """Return the names in a tarball, and what its comments say. Raise ``PackBomb`` if there are too many comments."""
    names: list[str] = []
    comments: dict[str, None] = {}
    length = 0
    for name, member, _ in read_members(archive, within, deadline):
        names += filter(None, [name])
        for comment in pick_comments(member.pax_headers).keys() - comments.keys():
            comments[comment], length = None, length + len(comment)
        if len(comments) > MOST_COMMENTS or length > LONGEST_COMMENTS:
            raise PackBomb("The tarball has more comments than any memory has projects.")
    noted = parse_comments(comments)
    if len(noted.projects or []) > MOST_PROJECTS:
        raise PackBomb("The tarball names more projects than any memory has.")
    return names, noted
