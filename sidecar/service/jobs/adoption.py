"""The adoption job: make memories of the backups in a folder, once, when the service starts.

Whoever kept an agent's home as a tarball before there was a sidecar finds its memory there: ``conductor.tar.gz`` becomes
the memory ``conductor``, unless there is one. Files are only read. One that is still being written is looked at again
later. Of several services, the one whose claim is in the store first adopts a file.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import structlog

from sidecar.engine import ExportRequest, finish_export
from sidecar.engine.archives.tarballs import adopt
from sidecar.errors import BadMemoryId, SidecarError, SwapLost
from sidecar.format.checksums import decode_checksummed, encode_checksummed
from sidecar.host.values import dataclass
from sidecar.host.work import run_in_thread
from sidecar.ids import MemoryKeys, check_new_memory_id, make_snapshot_id
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.core import Sidecar
from sidecar.service.jobs.scheduler import Jobs
from sidecar.service.operations import NotWanted, Operation, Receipt

SUFFIXES = (".tar.gz", ".tgz", ".tar.zst", ".tar")
LABEL = "adopted"
SETTLED = 5.0
"""A file that was written within so many seconds may not be complete."""
LOOK_AGAIN = 10.0
"""Seconds until files are looked at again that could not be adopted yet."""
CLAIM = "adoption of a backup"
"""The name of the claim among the calls that are remembered of a memory."""

Reporter = Callable[[Path, str, str], None]
"""Is told of a file that does not become a memory, why, and what to do."""


class StillWritten(SidecarError):
    """A backup was changed while it was read."""

    code = "backup-still-written"
    retryable = True
    default_hint = "It is looked at again when it has not changed for a few seconds; nothing was stored of it."


@dataclass(frozen=True, slots=True)
class Backup:
    """A tarball in the folder, and what it looked like."""

    file: Path
    memory: str
    stamp: tuple[int, int, int]
    """Its inode, size and time of change: a file with the same stamp was not written in between."""

    @property
    def modified(self) -> float:
        return self.stamp[2] / 1e9


@dataclass(frozen=True, slots=True)
class Claim:
    """Who adopts a memory, as an object in the store, and under which id."""

    instance: str
    snapshot: str


class AdoptionJob:
    """Adopts the backups of a folder, one after the other, in the background."""

    def __init__(self, keeper: Keeper, sidecar: Sidecar, jobs: Jobs, folder: str) -> None:
        self._lease = keeper.lease
        self._sidecar = sidecar
        self._jobs = jobs
        self._folder = Path(os.path.expanduser(folder)) if folder else None
        self._refused: dict[Path, tuple[int, int, int]] = {}
        """Files that could not be adopted. They are tried again when they have changed."""
        self._reported: set[Path] = set()
        self._known: set[str] = set()
        """Memories that were seen in the store, so that it is not asked again."""
        self._log = structlog.get_logger("sidecar")

    def start(self) -> None:
        if self._folder is not None:
            self._jobs.run_once("adopt", 0, self.run_round)

    async def run_round(self) -> None:
        """Adopt what can be adopted. Come back while there are files that may be complete later."""
        assert self._folder is not None
        left = 0
        for backup in await run_in_thread(list_backups, self._folder, self._report):
            if self._sidecar.operations.stopping:
                return
            if backup.memory not in self._known and not await self._adopt_if_settled(backup):
                left += 1
        if left:
            self._jobs.run_once("adopt", LOOK_AGAIN, self.run_round)

    async def _adopt_if_settled(self, backup: Backup) -> bool:
        """Return whether its memory exists now."""
        if self._refused.get(backup.file) == backup.stamp:
            return False
        if await self._is_known(backup.memory):
            return True
        if abs(time.time() - backup.modified) < SETTLED or _read_stamp(backup.file) != backup.stamp:
            self._log.info("a backup is still being written", file=str(backup.file))
            return False
        ref = f"import:{backup.file.name}"
        operation = Operation("export", backup.memory, ref, why="adopt")
        started = self._sidecar.operations.start(operation, lambda run: self._adopt(backup, run), ours=True)
        try:
            await started.result()
        except NotWanted:
            return await self._is_known(backup.memory)
        except SidecarError as problem:  # logged and published by the operation
            if not isinstance(problem, StillWritten):
                self._refused[backup.file] = backup.stamp
            return False
        self._known.add(backup.memory)
        return True

    async def _is_known(self, memory: str) -> bool:
        """Whether a memory exists. One that a service has claimed and not finished does not: the claim is removed once
        the adoption has ended, so that it is there only while a service adopts, or after it died."""
        has_memory, claimed = await self._look_up(memory)
        if has_memory and not claimed:
            self._known.add(memory)
        return memory in self._known

    async def _look_up(self, memory: str) -> tuple[bool, bool]:
        """Return whether the store has a snapshot of a memory, and whether a service has claimed it. Packs alone are what
        a service left that died."""
        keys, has_memory, claimed = MemoryKeys.of(memory), False, False
        async for info in self._sidecar.engine.repository.store.list(keys.prefix):
            has_memory |= info.key == keys.head or info.key.startswith(keys.snapshots)
            claimed |= info.key == keys.call(CLAIM)
        return has_memory, claimed

    async def _adopt(self, backup: Backup, operation: Operation) -> Receipt:
        """Adopt a backup under this service's claim. Raise ``NotWanted`` if another service does, or has."""
        store, key = self._sidecar.engine.repository.store, MemoryKeys.of(backup.memory).call(CLAIM)
        claim, taken_over = await self._claim(key)
        try:
            finished = await self._finish(backup, claim, operation) if taken_over else None
            receipt = finished or await self._adopt_claimed(backup, claim, operation)
        except SidecarError:
            await store.delete([key])
            raise
        await store.delete([key])
        return receipt

    async def _finish(self, backup: Backup, claim: Claim, operation: Operation) -> Receipt | None:
        """Finish what a service stored before it died, perhaps without moving the head; ``None`` if it stored nothing."""
        await operation.intend(claim.snapshot)
        return await finish_export(self._sidecar.engine, backup.memory, claim.snapshot, operation.sandbox)

    async def _adopt_claimed(self, backup: Backup, claim: Claim, operation: Operation) -> Receipt:
        engine = self._sidecar.engine
        if (await self._look_up(backup.memory))[0]:
            raise NotWanted(f"{backup.memory} exists by now.")

        async def check_unchanged(snapshot: str) -> None:
            """Called before anything is stored: what was unpacked is still what the file holds."""
            if _read_stamp(backup.file) != backup.stamp:
                raise StillWritten(f"{backup.file} was changed while it was read.")
            await operation.intend(snapshot)

        request = ExportRequest(memory=backup.memory, label=LABEL, snapshot=claim.snapshot)
        return await adopt(replace(engine, progress=operation, reached=check_unchanged), backup.file, request)

    async def _claim(self, key: str) -> tuple[Claim, bool]:
        """Write this service's claim, or take over that of a service that no longer lives, with its snapshot's id. Return
        it, and whether it was taken over. Raise ``NotWanted`` if a living service has claimed it."""
        store = self._sidecar.engine.repository.store
        await store.prepare()
        stored = await store.get(key)
        ours = Claim(self._lease.instance, make_snapshot_id(datetime.now(UTC)))
        if stored is not None:
            try:
                before = msgspec.convert(decode_checksummed(stored.data), Claim)
                ours = replace(ours, snapshot=before.snapshot)
            except (ValueError, msgspec.ValidationError):
                self._log.warning("a claim to adopt a backup is damaged and replaced", object=key)
            else:
                if before.instance != ours.instance and before.instance in await self._lease.list_living():
                    raise NotWanted("Another service adopts it.")
        try:
            await store.swap(key, encode_checksummed(asdict(ours)), expected=stored.version if stored else None)
        except SwapLost:
            raise NotWanted("Another service adopts it.") from None
        return ours, stored is not None

    def _report(self, file: Path, message: str, hint: str) -> None:
        """Log once why a file does not become a memory."""
        if file not in self._reported:
            self._reported.add(file)
            self._log.warning("a backup is not adopted", file=str(file), message=message, hint=hint)


def find_memory_id(name: str) -> str:
    """Return the id of the memory that a file is a backup of; empty if it is no tarball by its name. Raise
    ``BadMemoryId``."""
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    if not suffix or name.startswith("."):  # hidden files are those that others have not finished
        return ""
    return check_new_memory_id(name.removesuffix(suffix))


def list_backups(folder: Path, report: Reporter) -> list[Backup]:
    """Return the tarballs in a folder, one for each memory: the newest, if several have its name. Report the others."""
    found: dict[str, Backup] = {}
    try:
        files = sorted(folder.iterdir())
    except OSError as problem:
        report(folder, f"The folder cannot be read: {problem.strerror}.", "It is read again when a service starts.")
        return []
    if files and folder.stat().st_mode & stat.S_IWOTH:
        report(folder, "Everybody on this machine can write there, and so plant memories.", "Run chmod o-w on it.")
    for file in files:
        try:
            memory = find_memory_id(file.name)
        except BadMemoryId as problem:
            report(file, problem.message, f"Adopt it under another id: memory-sidecar import MEMORY {file.name}")
            continue
        stamp = _read_stamp(file) if memory else None
        if memory and stamp is None:
            report(file, "It is no regular file.", "Put the file itself there: links are not followed.")
        elif stamp is not None:
            other, this = found.get(memory), Backup(file, memory, stamp)
            found[memory] = this if other is None or this.modified > other.modified else other
            if other is not None:
                older = file if found[memory] is other else other.file
                report(older, f"{found[memory].file.name} is newer and of the same memory.", "Give it another name.")
    return list(found.values())


def _read_stamp(file: Path) -> tuple[int, int, int] | None:
    """Return what tells whether a file was written; ``None`` if it is no regular file. Links are not followed."""
    try:
        status = file.lstat()
    except OSError:
        return None
    return (status.st_ino, status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None
