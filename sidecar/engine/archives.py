"""Ordinary tarballs, out and in: ``download`` writes one that unpacks into a home, ``import`` adopts one made of a home."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import posixpath
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, BinaryIO

import zstandard

from sidecar.engine.export import ExportRequest, export
from sidecar.engine.parts import Engine
from sidecar.errors import LimitExceeded, SidecarError, UnsafeLink, UnsafeMember, UnsafePath
from sidecar.inside.compression import opened
from sidecar.inside.index import DIR, FILE, LINK, Entry
from sidecar.inside.packing import CHUNK
from sidecar.inside.rules import compiled
from sidecar.layouts import Layout
from sidecar.ports import Sandbox
from sidecar.receipts import ExportReceipt, Skip
from sidecar.snapshots.arrival import HEADER_ALLOWANCE, LONGEST_PATH, open_tar
from sidecar.snapshots.fetch import Fetched, fetch
from sidecar.snapshots.fold import PackFile, materialise
from sidecar.snapshots.manifest import Manifest
from sidecar.spool import spool

MOST_SKIPPED = 50


class NotAnArchive(SidecarError):
    code = "not-an-archive"
    default_hint = "Give a .tar, .tar.gz or .tar.zst of a home that holds a memory, such as .claude-mem/."


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
    packs = [
        PackFile(file.path, pack.codec, index)
        for file, pack, index in zip(fetched.packs, fetched.manifest.packs, fetched.indexes, strict=True)
    ]
    staged = materialise(packs, fetched.entries, folder)
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
            member = _member(entry, posixpath.join(places[name], relative))
            if entry.type == FILE:
                with open(staged[path].place, "rb") as contents:
                    tar.addfile(member, contents)
            else:
                tar.addfile(member)


def _home_place(name: str, hint: str, layout: Layout | None) -> str:
    """Where a root goes in a home: its layout's usual place, or where a project was."""
    for root in layout.roots if layout else ():
        if root.paths and root.name == name:
            return root.paths[0].removeprefix("~/")
    return hint.removeprefix("~").strip("/")


def _member(entry: Entry, name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = entry.mode, entry.mtime / 1e9
    if entry.type == DIR:
        member.type, member.mtime = tarfile.DIRTYPE, 0
    elif entry.type == LINK:
        member.type, member.linkname, member.mode, member.mtime = tarfile.SYMTYPE, entry.target, 0o777, 0
    else:
        member.size = entry.size
    return member


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


async def adopt(
    engine: Engine, memory: str, archive: Path, open_home: Callable[[Path], Sandbox], request: ExportRequest
) -> ExportReceipt:
    """Import a tarball: unpack it, checked, into a home of our own, and export that. It counts as grown from the head."""
    async with spool() as scratch:
        home = scratch.new()
        home.mkdir()
        engine.progress.step("unpacking")
        skipped = await asyncio.to_thread(_unpack, engine, archive, home)
        sandbox = open_home(home)
        receipt = await export(engine, sandbox, replace(request, memory=memory, adopt=True, origin="import"))
    return replace(receipt, sandbox=f"import:{archive.name}", skipped=[*skipped, *receipt.skipped])


def _unpack(engine: Engine, archive: Path, home: Path) -> list[Skip]:
    with _members(archive, engine) as tar:
        names = [_name(member) for member in tar]
    placements = _placements([name for name in names if name], engine.layouts.values())
    if not placements:
        raise NotAnArchive(f"{archive.name} holds no memory of any known layout.")
    links: list[tuple[Path, str]] = []
    skipped: list[Skip] = []
    total = files = 0
    with _members(archive, engine) as tar:
        for member in tar:
            name = _name(member)
            place = _placed(name, placements)
            if place is None:
                if name and not member.isdir() and len(skipped) < MOST_SKIPPED:
                    skipped.append(Skip(path=name, reason="not part of the memory"))
                continue
            files += 1
            total += member.size
            _within(files, total, member.size, engine)
            target = home / place
            if member.issym():
                links.append((target, member.linkname))
            elif member.isdir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                contents = tar.extractfile(member)
                assert contents is not None
                _write(target, contents, member)
    for target, link in links:
        inside = os.path.normpath(os.path.join(os.path.dirname(os.path.relpath(target, home)), link))
        if os.path.isabs(link) or inside == ".." or inside.startswith("../"):
            raise UnsafeLink(f"The link {target.name!r} in {archive.name} leads out of the memory.")
        if not os.path.lexists(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(link)
    return skipped


@contextlib.contextmanager
def _members(archive: Path, engine: Engine) -> Iterator[tarfile.TarFile]:
    most = engine.limits.bytes + HEADER_ALLOWANCE * (engine.limits.files + 8)
    try:
        with archive.open("rb") as file:
            magic = file.read(4)
            file.seek(0)
            codec = {b"\x1f\x8b": "gz", b"\x28\xb5": "zst"}.get(magic[:2], "")
            with opened(file, codec) if codec else contextlib.nullcontext(file) as plain, open_tar(plain, most) as tar:
                yield tar
    except OSError as problem:
        raise NotAnArchive(f"{archive} cannot be read: {problem.strerror or problem}.") from None
    except (tarfile.TarError, EOFError, zlib.error, zstandard.ZstdError) as problem:
        raise NotAnArchive(f"{archive.name} is not a whole tarball: {problem}.") from None


def _name(member: tarfile.TarInfo) -> str:
    """A member's name without a leading ``./``. Raise when it, or what it is, has no place in a memory."""
    name = member.name.removeprefix("./")
    if name in ("", "."):
        return ""
    if len(name) > LONGEST_PATH or name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
        raise UnsafePath(f"{name[:200]!r} is not a plain relative path.")
    if not (member.isreg() or member.isdir() or member.issym()):
        raise UnsafeMember(f"{name!r} is neither a file, a folder nor a symbolic link.")
    return name


def _placements(names: list[str], layouts: Iterable[Layout]) -> list[_Placement]:
    """Which folders of a tarball are memory: a layout's usual folder, wherever it is; else the folder of its database;
    for project layouts the shallowest folder that holds any of their files."""
    placements: list[_Placement] = []
    for layout in layouts:
        for root in layout.roots:
            firsts = compiled(pattern.split("/")[0] for pattern in layout.keep + layout.databases)
            if root.project:
                found = [posixpath.dirname(name) for name in names if firsts.match(posixpath.basename(name))]
                placements += [_Placement(min(found, key=lambda p: (p.count("/"), len(p))), "")] if found else []
                continue
            usual = root.paths[0].removeprefix("~/")
            prefixes = {name[: at + len(usual)] for name in names if (at := _find(name, usual)) >= 0}
            databases = compiled(layout.databases)
            prefixes = prefixes or {
                posixpath.dirname(name) for name in names if databases.match(posixpath.basename(name))
            }
            placements += [_Placement(min(prefixes, key=len), usual)] if prefixes else []
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


def _within(files: int, total: int, size: int, engine: Engine) -> None:
    limits = engine.limits
    if files > limits.files:
        raise LimitExceeded(f"The tarball holds more than {limits.files} files.", code="limit-files")
    if size > limits.file_bytes:
        raise LimitExceeded(
            f"A file in the tarball has {size} bytes; {limits.file_bytes} are allowed.", code="limit-file-bytes"
        )
    if total > limits.bytes:
        raise LimitExceeded(f"The tarball holds more than {limits.bytes} bytes.", code="limit-bytes")


def _write(target: Path, contents: IO[bytes], member: tarfile.TarInfo) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        shutil.copyfileobj(contents, file, CHUNK)
    os.chmod(target, member.mode & 0o777 | 0o600)
    moment = round(member.mtime * 1e9)
    os.utime(target, ns=(moment, moment))
