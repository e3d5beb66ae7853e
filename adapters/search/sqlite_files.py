"""Where the embedded index lies on this disk, who may write to it, and how it is thrown away.

An index that is damaged, or of another version, is never repaired and never overwritten: a new file with a name that was
never used takes its place. SQLite removes the files beside a database by their names when the last connection to it is
closed, so a process that still has an old one open would else take the log of the new one with it
(https://www.sqlite.org/howtocorrupt.html, "unlinking or renaming a database file while in use").
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from adapters.search.sqlite_schema import FORMAT, create_tables, has_tables
from sidecar.errors import (
    IndexReset,
    SearchBusy,
    SearchDenied,
    SearchError,
    SearchUnfit,
)
from sidecar.host.files import PRIVATE
from sidecar.host.work import PARTING_SECONDS, start_in_thread

T = TypeVar("T")
BUSY_SECONDS = 60.0
"""How long SQLite waits by itself. Writers take turns before they get there, so this is for what happens around a crash."""
LOCK_SECONDS = 60.0
"""How long a writer waits for its turn."""
PAGES = -32_000
"""32 MB of pages in memory while rows are written."""
CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
DENIED = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH})
_STORE = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
PLAIN_NAMES = re.compile(r"(?:index-(\d+)-\d+\.db(?:-wal|-shm)?|\.new-[0-9-]+(?:-wal|-shm|-journal)?)\Z")
HOW_TO_MOVE = "Check the folder's rights, or name another one in [search] folder."


WAS_DAMAGED = "The search index on this machine was damaged, and is built again."


class IndexFiles(Protocol):
    """The files of one index. Everything but ``take_turn`` is for a thread."""

    def open_to_read(self) -> sqlite3.Connection | None:
        """``None``: there is no index yet. Raise ``IndexReset``, ``OSError`` or ``sqlite3.Error``."""
        ...

    def open_to_write(self) -> sqlite3.Connection:
        """Open the index for whoever has the turn; create it if there is none. Raise as above."""
        ...

    def commit(self, connection: sqlite3.Connection) -> None: ...

    def identify(self) -> str:
        """Return what tells this index from one that takes its place."""
        ...

    def discard(self) -> None:
        """Remove the index, for whoever has the turn."""
        ...

    def take_turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Wait until no other process writes. Raise ``SearchBusy`` after ``LOCK_SECONDS``."""
        ...


class PlainFiles:
    """An index as an SQLite database in a folder."""

    def __init__(self, base: Path, store: str) -> None:
        if not _STORE.match(store):
            raise SearchError(f"{store[:80]!r} is no id of a store.")
        self.folder = base / store

    @asynccontextmanager
    async def take_turn(self) -> AsyncIterator[None]:
        with _translate_os_errors(self.folder):
            descriptor = await run_to_end(self._open_lock)
        waiting = start_in_thread(lambda: fcntl.flock(descriptor, fcntl.LOCK_EX))
        try:
            async with asyncio.timeout(LOCK_SECONDS):
                await asyncio.shield(waiting)
        except BaseException as stopped:
            # The thread still waits for the lock: it is given back as soon as it is there.
            waiting.add_done_callback(lambda _: os.close(descriptor))
            if isinstance(stopped, TimeoutError):
                raise SearchBusy("Another process writes to the search index.") from None
            if isinstance(stopped, OSError):  # a disk without locks
                raise translate_error(stopped, self.folder) from None
            raise
        try:
            yield
        finally:
            os.close(descriptor)

    def _open_lock(self) -> int:
        make_private_folder(self.folder)
        return os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)

    def open_to_read(self) -> sqlite3.Connection | None:
        for _ in range(3):
            found = self._list_current()
            if not found:
                return None
            try:
                connection = _connect(found[-1])
            except sqlite3.OperationalError as problem:
                if problem.sqlite_errorcode == sqlite3.SQLITE_CANTOPEN and not found[-1].exists():
                    continue  # another process has replaced it
                raise
            connection.execute("PRAGMA query_only = ON")
            return connection
        return None

    def open_to_write(self) -> sqlite3.Connection:
        found = self._list_current()
        connection = _connect(found[-1] if found else self._create())
        connection.execute(f"PRAGMA cache_size = {PAGES}")
        connection.execute("PRAGMA synchronous = NORMAL")
        for older in found[:-1]:
            _remove(older)
        return connection

    def commit(self, connection: sqlite3.Connection) -> None:
        connection.execute("COMMIT")

    def identify(self) -> str:
        return "".join(path.name for path in self._list_current()[-1:])

    def discard(self) -> None:
        for path in self._list_current():
            _remove(path)

    def _list_current(self) -> list[Path]:
        """Return the databases of this version, the newest last."""
        return sorted(self.folder.glob(f"index-{FORMAT}-*.db"))

    def _create(self) -> Path:
        """Create an empty index, whole at once, and remove what is left of earlier ones."""
        for left in self.folder.iterdir():
            match = PLAIN_NAMES.match(left.name)
            if match and int(match[1] or 0) <= FORMAT:
                left.unlink(missing_ok=True)
        name = f"{FORMAT}-{time.time_ns():020d}"
        fresh = self.folder / f".new-{name}"
        os.close(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE))
        connection = sqlite3.connect(fresh, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            create_tables(connection)
        finally:
            connection.close()
        return fresh.rename(self.folder / f"index-{name}.db")


def make_private_folder(folder: Path) -> None:
    """Create a folder that only its owner may enter, and the missing ones above it."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for one in (folder.parent, folder):
        one.mkdir(mode=0o700, exist_ok=True)
        if one.stat().st_mode & 0o077 and one.stat().st_uid == os.geteuid():
            one.chmod(0o700)


def _connect(path: Path) -> sqlite3.Connection:
    """Open a database that exists. Raise ``IndexReset`` if it is not an index of this version."""
    uri = f"{path.absolute().as_uri()}?mode=rw"
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA temp_store = MEMORY")
        check_tables(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def check_tables(connection: sqlite3.Connection) -> None:
    try:
        whole = has_tables(connection)
    except sqlite3.DatabaseError as problem:
        if is_damage(problem):
            raise IndexReset(WAS_DAMAGED) from None
        raise
    if not whole:
        raise IndexReset(WAS_DAMAGED)


def _remove(path: Path) -> None:
    for end in ("", "-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)


def is_damage(problem: sqlite3.Error) -> bool:
    """Return whether SQLite says that the file is not what it should be."""
    code = getattr(problem, "sqlite_errorcode", 0) or 0
    return (code & 0xFF) in CORRUPT


def translate_error(problem: sqlite3.Error | OSError, folder: Path) -> SearchError:
    """Return what to raise for an error of SQLite, or of the disk."""
    if isinstance(problem, OSError):
        return SearchDenied(f"The search index in {folder} cannot be used: {problem.strerror}.", hint=HOW_TO_MOVE)
    code = (getattr(problem, "sqlite_errorcode", 0) or 0) & 0xFF
    if is_damage(problem):
        return IndexReset(WAS_DAMAGED)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_INTERRUPT):
        return SearchBusy("The search index took too long to answer.")
    if code in DENIED:
        return SearchDenied(f"The search index in {folder} cannot be used: {problem}.", hint=HOW_TO_MOVE)
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        hint = "Free space there, or name another [search] folder; the store and its snapshots are not affected."
        return SearchError(f"The search index in {folder} could not be written: {problem}.", hint=hint)
    if "fts5" in str(problem):
        hint = "Use a Python whose SQLite has FTS5, or Postgres; see docs/search.md."
        return SearchUnfit("The SQLite of this Python has no full-text search (FTS5).", hint=hint)
    return SearchError(f"The search index in {folder} failed: {problem}.")


@contextmanager
def _translate_os_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise translate_error(problem, folder) from None


async def open_plain(base: Path, store: str) -> PlainFiles:
    """Return the files of a store's index, as they lie on this disk."""
    return PlainFiles(base, store)


async def run_to_end(work: Callable[[], T], interrupt: Callable[[], None] = lambda: None) -> T:
    """Run ``work`` in a thread. If the caller is cancelled, ``interrupt`` the work and wait until it has stopped."""
    running = start_in_thread(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        interrupt()
        await asyncio.wait({running}, timeout=PARTING_SECONDS)
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise
