"""A store in a folder: ``file:`` anywhere, ``volume:`` only on a mounted volume.

Each object is one file at ``root/key``. Other files have names that no key has: ``.tmp-*`` is a write under way (or
left by a crash), ``.lock-*`` serialises the swaps of one object.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shlex
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from adapters.stores.disk_files import (
    PRIVATE,
    FileModes,
    find_open_to_others,
    hold_lock,
    is_mount,
    make_folder,
    open_in_folder,
    remove_empty_folders,
    remove_empty_parents,
    sync_folder,
    translate_disk_errors,
)
from sidecar.errors import ObjectMissing, StoreMissing, SwapLost
from sidecar.ports import Glance, Link, ObjectInfo, StoredObject

CHUNK = 1 << 20
_TEMP, _LOCK = ".tmp-", ".lock-"
_LISTED_AT_ONCE = 1000
_LOOKED_AT = 10_000


class DiskStore:
    """Objects as files below ``root``, or below ``root/prefix``.

    With ``mount_required`` every method raises ``StoreMissing`` unless ``root`` itself is a mount point at that time: a
    forgotten or lost volume must never turn into writes to a disk that vanishes with the machine. New files and folders
    get ``modes``; existing ones keep theirs.
    """

    def __init__(
        self, root: Path, *, url: str, mount_required: bool = False, prefix: str = "", modes: FileModes = PRIVATE
    ) -> None:
        self.url = url
        self._modes = modes
        self._mount = root if mount_required else None
        self._root = root / prefix if prefix else root

    seal = ""  # bytes are stored as they are

    def room(self, size: int) -> int:
        return size

    async def prepare(self) -> None:
        await asyncio.to_thread(self._prepare)

    async def get(self, key: str) -> StoredObject | None:
        return await asyncio.to_thread(self._get, key)

    async def put(self, key: str, source: bytes | Path) -> int:
        return await asyncio.to_thread(self._put, key, source)

    async def swap(self, key: str, data: bytes, *, expected: str | None) -> str:
        return await asyncio.to_thread(self._swap, key, data, expected)

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        file = await asyncio.to_thread(self._open, key)
        with file:
            while chunk := await asyncio.to_thread(self._read_chunk, file):
                yield chunk

    async def link_to_get(self, key: str, *, seconds: int) -> Link | None:
        return None  # a disk answers no requests

    async def link_to_put(self, key: str, *, size: int, sha256: str, seconds: int) -> Link | None:
        return None

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        found = self._iterate_objects(prefix)
        while batch := await asyncio.to_thread(lambda: [*islice(found, _LISTED_AT_ONCE)]):
            for info in batch:
                yield info

    async def glance(self, prefix: str, *, after: str = "", level: bool = False) -> Glance:
        return await asyncio.to_thread(self._glance, prefix, after, level)

    async def folders(self, prefix: str, *, most: int) -> Sequence[str]:
        return await asyncio.to_thread(self._list_subfolders, prefix, most)

    async def copy(self, source: str, target: str) -> None:
        await asyncio.to_thread(self._copy, source, target)

    async def delete(self, keys: Iterable[str]) -> None:
        await asyncio.to_thread(self._delete, keys)

    async def sweep(self, prefix: str, *, older_than: float) -> int:
        return await asyncio.to_thread(self._sweep, prefix, older_than)

    async def purge(self, prefix: str) -> int:
        return await asyncio.to_thread(self._purge, prefix)

    async def warnings(self) -> Sequence[str]:
        return await asyncio.to_thread(self._warnings)

    async def safety(self) -> str:
        return "honours conditional writes (by locks of its filesystem)"

    async def close(self) -> None:
        """Do nothing: no file stays open between calls."""

    def _prepare(self) -> None:
        """Create the root and check that it can be written and has locks."""
        with self._use_root():
            make_folder(self._root, self._modes)
            probe = self._root / f"{_TEMP}{secrets.token_hex(8)}"
            try:
                with hold_lock(
                    probe, self._modes
                ):  # both at once: the folder can be written, and its filesystem has locks
                    pass
            finally:
                probe.unlink(missing_ok=True)

    def _warnings(self) -> Sequence[str]:
        """Return a warning if users outside ``modes`` can read the store."""
        with self._use_root():
            found = find_open_to_others(self._root, self._modes, _LOOKED_AT) if self._root.is_dir() else None
        if found is None:
            return []
        who, bits = ("Users outside its group", "o") if self._modes.file & 0o060 else ("Other users", "go")
        kept = "" if bits == "o" else " If a group shares it on purpose, write the store as …?shared=group."
        return [
            f"{who} of this machine can read {found}: `chmod -R {bits}-rwx {shlex.quote(str(self._root))}` ends that.{kept}"
        ]

    def _get(self, key: str) -> StoredObject | None:
        try:
            with self._open(key) as file:
                data = file.read()
        except ObjectMissing:
            return None
        return StoredObject(data, _compute_version(data))

    def _put(self, key: str, source: bytes | Path) -> int:
        if isinstance(source, bytes):
            data = source
            self._write(key, lambda file: file.write(data))
            return len(data)
        with source.open("rb") as given:
            self._write(key, lambda file: shutil.copyfileobj(given, file, CHUNK))
            return given.tell()

    def _copy(self, source: str, target: str) -> None:
        # Copied byte by byte, never a link or a reflink: the copy must survive damage to the original.
        with self._open(source) as given:
            self._write(target, lambda file: shutil.copyfileobj(given, file, CHUNK))

    def _swap(self, key: str, data: bytes, expected: str | None) -> str:
        """Replace an object if it has the expected version, under its lock file. Raise ``SwapLost``."""
        path = self._locate(key)
        self._check_version(key, expected)  # first without the lock, so that a hopeless swap leaves no lock file
        with self._use_root(), hold_lock(_locate_lock(path), self._modes):
            self._check_version(key, expected)
            self._write(key, lambda file: file.write(data))
        return _compute_version(data)

    def _check_version(self, key: str, version: str | None) -> None:
        """Raise ``SwapLost`` unless the object has this version."""
        current = self._get(key)
        if (current.version if current else None) != version:
            raise SwapLost(f"{key} was changed by someone else.", hint="Read it again, then repeat the change.")

    def _write(self, key: str, fill: Callable[[BinaryIO], object]) -> None:
        """Write an object durably, whole or not at all: a temporary file, fsync, rename, fsync of the folders."""
        path = self._locate(key)
        with self._use_root():
            temp = path.with_name(f"{_TEMP}{secrets.token_hex(8)}")
            try:
                with open_in_folder(temp, "xb", self._modes) as file:
                    fill(file)
                    file.flush()
                    os.fsync(file.fileno())
                temp.replace(path)
            except BaseException:
                with suppress(OSError):
                    temp.unlink()
                raise
            # Every folder up to the root: one that another writer has just created may not be durable yet.
            for folder in (path.parent, *path.parent.parents):
                sync_folder(folder)
                if folder == self._root:
                    break

    def _open(self, key: str) -> BinaryIO:
        path = self._locate(key)
        with self._use_root():
            try:
                file = path.open("rb")
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                raise ObjectMissing(f"{self.url} holds no {key}.") from None
        return file

    def _read_chunk(self, file: BinaryIO) -> bytes:
        with self._use_root():
            return file.read(CHUNK)

    def _delete(self, keys: Iterable[str]) -> None:
        """Delete objects, each under its lock if it has one, and folders that are empty then."""
        for key in keys:
            path = self._locate(key)
            with self._use_root():
                lock = _locate_lock(path)
                if lock.exists():
                    with hold_lock(lock, self._modes):  # not in the middle of another process's swap
                        path.unlink(missing_ok=True)
                        lock.unlink(missing_ok=True)
                else:
                    with suppress(FileNotFoundError, NotADirectoryError):
                        path.unlink()
                remove_empty_parents(path.parent, self._root)

    def _sweep(self, prefix: str, older_than: float) -> int:
        """Delete temporary files that are older than a time, also those of the few objects that lie in the store's own
        folder; return how many."""
        swept = 0
        with self._use_root():
            own: list[os.DirEntry[str]] = []
            with suppress(FileNotFoundError), os.scandir(self._root) as there:
                own = [entry for entry in there if entry.is_file(follow_symlinks=False)]
            for entry in (*own, *(entry for _, entry in self._iterate_files(prefix))):
                if entry.name.startswith(_TEMP):
                    with suppress(FileNotFoundError):
                        if entry.stat(follow_symlinks=False).st_mtime < older_than:
                            Path(entry.path).unlink()
                            swept += 1
        return swept

    def _purge(self, prefix: str) -> int:
        purged = 0
        with self._use_root():
            for _, entry in [*self._iterate_files(prefix)]:
                Path(entry.path).unlink(missing_ok=True)
                purged += not entry.name.startswith(_LOCK)
            remove_empty_folders(self._locate_folder(prefix), self._root)
        return purged

    def _glance(self, prefix: str, after: str, level: bool) -> Glance:
        if not level:
            found = [*islice(self._iterate_objects(prefix, after), _LISTED_AT_ONCE + 1)]
            return Glance(found[:_LISTED_AT_ONCE], complete=len(found) <= _LISTED_AT_ONCE)
        with self._use_root():
            try:
                with os.scandir(self._locate_folder(prefix)) as there:
                    entries = sorted(there, key=lambda entry: entry.name)
            except FileNotFoundError:
                return Glance([])
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
            files = [(prefix + entry.name, entry) for entry in entries if prefix + entry.name > after]
            held = [name for name in names if _holds_object(self._locate_folder(f"{prefix}{name}/"))]
            return Glance([*self._describe_objects(files)], held)

    def _iterate_objects(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        with self._use_root():
            files = self._iterate_files(prefix)
            yield from self._describe_objects((key, entry) for key, entry in files if key > after)

    def _describe_objects(self, files: Iterable[tuple[str, os.DirEntry[str]]]) -> Iterator[ObjectInfo]:
        """Yield the objects among these files."""
        for key, entry in files:
            if not entry.name.startswith((_TEMP, _LOCK)) and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    about = entry.stat(follow_symlinks=False)
                    yield ObjectInfo(key, about.st_size, about.st_mtime)

    def _list_subfolders(self, prefix: str, most: int) -> Sequence[str]:
        with self._use_root():
            try:
                with os.scandir(self._locate_folder(prefix)) as found:
                    names = sorted(entry.name for entry in found if entry.is_dir(follow_symlinks=False))
            except FileNotFoundError:
                return []
            # A folder in which a crashed writer left only temporary files contains no object.
            held = (name for name in names if _holds_object(self._locate_folder(f"{prefix}{name}/")))
            return [*islice(held, most)]

    def _iterate_files(self, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield all files whose key starts with ``prefix``, in key order, including those that are not objects."""
        folder = self._locate_folder(prefix)
        start = prefix[: prefix.rfind("/") + 1]
        return _walk(folder, start, self._root, prefix[len(start) :])

    def _locate_folder(self, prefix: str) -> Path:
        parent, _, _ = prefix.rpartition("/")
        return self._locate(parent) if parent else self._root

    def _locate(self, key: str) -> Path:
        """Return where ``key`` is stored. Raise ``ValueError`` for a key that could lead out of the root or hide from
        ``list``."""
        parts = key.split("/")
        if any(part in ("", ".", "..") or part.startswith((_TEMP, _LOCK)) or "\0" in part for part in parts):
            raise ValueError(f"not a key: {key!r}")
        return self._root.joinpath(*parts)

    def _use_root(self) -> translate_disk_errors:
        """Check the root, and return the context in which disk errors are translated. Raise ``StoreMissing``."""
        if self._mount is not None and not is_mount(self._mount):
            raise StoreMissing(
                f"No volume is mounted at {self._mount}.",
                hint=f"Mount a volume at {self._mount}, or use file:{self._mount} if this disk may vanish.",
            )
        if self._root.is_file():
            raise StoreMissing(f"{self._root} is a file, not a folder.", hint="Move it away, or correct the store URL.")
        return translate_disk_errors(self._root)


def _compute_version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _locate_lock(path: Path) -> Path:
    return path.with_name(f"{_LOCK}{path.name}")


def _holds_object(folder: Path | str) -> bool:
    """Return whether there is an object anywhere below a folder. Not all of a large one is read."""
    try:
        with os.scandir(folder) as found:
            for entry in found:
                if entry.is_dir(follow_symlinks=False):
                    if _holds_object(entry.path):
                        return True
                elif not entry.name.startswith((_TEMP, _LOCK)) and entry.is_file(follow_symlinks=False):
                    return True
    except FileNotFoundError:
        pass  # removed meanwhile
    return False


def _walk(folder: Path, start: str, root: Path, begins: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield all files below a folder with their keys, in key order; of the folder itself those whose names begin so."""
    try:
        with os.scandir(folder) as found:
            entries = [entry for entry in found if entry.name.startswith(begins)]
    except FileNotFoundError:
        return  # never created, or removed during the walk
    # Key order, in which 'a-b' comes before 'a/x': a folder sorts by the '/' that follows its name in a key.
    named = [(entry.name + "/" * entry.is_dir(follow_symlinks=False), entry) for entry in entries]
    for name, entry in sorted(named, key=lambda pair: pair[0]):
        if not name.endswith("/"):
            yield start + name, entry
        elif name != "lost+found/" or folder != root:
            yield from _walk(Path(entry.path), start + name, root)
