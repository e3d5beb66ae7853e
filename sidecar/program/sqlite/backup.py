"""Copy a SQLite database while other processes write to it.

The online-backup API takes all pages in one read transaction. But opening a database must not write beside it, and
SQLite does: a reader of a closed WAL database leaves ``-wal`` and ``-shm`` behind. So a database that no process has
open is read as immutable, or, if a crash left a log beside it, copied with its log and opened in the scratch folder. In
both cases the files must be unchanged afterwards.

Byte offsets are those of https://www.sqlite.org/fileformat2.html, section 1.3 (The Database Header).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import stat
import threading
import time
from functools import partial
from typing import Any, Callable

from sidecar.format.refusal import Refusal
from sidecar.program import places
from sidecar.program.capture.walk import MAGIC
from sidecar.program.child import Ask, Child, Tell
from sidecar.program.sqlite.follower import PIECE, Follower, list_checksums

HEADER = 100
# Header fields that SQLite sets when it writes a copy (file format, sections 1.3.6, 1.3.9 and 1.3.16): the file change
# counter, the schema cookie, the version-valid-for number and the library's version.
COUNTERS = ((24, 28), (40, 44), (92, 96), (96, 100))
WAL_TAIL, SHM_TAIL, JOURNAL_TAIL = "-wal", "-shm", "-journal"
WAL_HEADER, INDEX_HEADER = 32, 48
SQLITE_DONE = 101
SIZEABLE = 1 << 20
LARGE = 4 << 20
CHUNK = 1 << 20
MOST_MAPPED = 64 << 20
PAUSE_SECONDS = 0.002
PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-~")


def compute_database_signature(place: str) -> list[list[int]]:
    """Return the stat signature of a database and its logs: any commit changes it."""
    rows: list[list[int]] = []
    for tail in ("", WAL_TAIL, JOURNAL_TAIL):
        try:
            status = os.stat(place + tail)
        except FileNotFoundError:
            rows.append([])
            continue
        row = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        # Where this runs as root, SQLite sets the owner of the log of each database that it opens, to read as well, and
        # that sets the log's ctime: a database whose log is there would be copied each time because it was copied
        # before. So its time is when it was written to, and it is also known by what SQLite says of its contents.
        rows.append([_identify_log(place), *row[1:4], status.st_mtime_ns] if tail == WAL_TAIL else row)
    return rows


def _identify_log(place: str) -> int:
    """Return a number for what the log of a database says: its header, with salts that are new when it begins again, and
    the wal-index's, with the number, the checksum and the change counter of the last commit (walformat.html, section
    2.1; the file format's section 4.1)."""
    said = hashlib.sha256()
    for tail, length in ((WAL_TAIL, WAL_HEADER), (SHM_TAIL, INDEX_HEADER)):
        try:
            with open(places.open_file(place + tail), "rb") as file:
                said.update(file.read(length))
        except (OSError, Refusal):
            said.update(b"-")
    return int.from_bytes(said.digest()[:7], "big")


class CheckedCopy:
    """A database, copied to the new file ``target`` and checked by a process of its own, while other files are read.

    While SQLite reads the database itself, nothing else may run in the process that does it. Whoever closes a file of a
    process ends all locks that the process has on that file (POSIX; "How To Corrupt An SQLite Database File", section
    2.2). One look at the database or its logs by another thread, and a checkpoint of its writer may overwrite what is
    being read: the copy is then torn, and passes every check. What other processes close ends none of these locks.

    The rows of the tables ``emptied`` are not in the copy. SQLite opens files by their paths and follows links. With
    ``strict``, what it opened must be the very file found at this path without following any link. ``look`` is a question
    about the copy, if it is large.
    """

    def __init__(
        self,
        source: str,
        target: str,
        wait: float,
        emptied: list[str] | None = None,
        strict: bool = False,
        look: Callable[[], bool] | None = None,
    ) -> None:
        self.source = source
        self.target = target
        self._copy_it = partial(_copy_live, source, target, wait, emptied, strict)
        self._look = look
        self._told: dict[str, Any] = {}
        self._followed: Follower | None = None
        self._child = Child(self._work) if _is_large(source) else None

    def _work(self, tell: Tell, ask: Ask) -> None:
        """Copy, check, and look or read it again, in the child."""
        try:
            check = self._copy_it()
        except Refusal as problem:
            tell({"refusal": [problem.code, problem.message, problem.retryable]})
            return
        # Stays open: what is removed is given back to the disk when this process ends.
        copy = os.open(self.target, os.O_RDONLY)
        tell({"copied": check})
        if not check and read_page_size(self.target):
            # Both at once: only one of them holds the interpreter's lock.
            checking = threading.Thread(target=self._tell_check, args=(tell,))
            checking.start()
            if self._look is not None:
                tell({"found": self._look()})
            elif ask():
                tell({"checksums": list_checksums(copy)})
            checking.join()

    def _tell_check(self, tell: Tell) -> None:
        check = None  # if anything is raised, the parent checks the copy
        try:
            check = quick_check(self.target, mapped=True)
        finally:
            tell({"check": check})

    def _hear(self, what: str) -> Any:
        """Return what the child says of something; ``None`` if it will not tell."""
        while what not in self._told:
            said = self._child.hear() if self._child is not None else None
            if said is None:
                return None
            self._told.update(said)
        return self._told[what]

    def follow(self, block: int) -> Follower | None:
        """Read the copy while it is written, in blocks of this size, and return what was read: it counts if ``confirm``
        says so, later. ``None`` if nothing was read before the copy was complete."""
        if self._child is None or self._look is not None or not 0 < block <= PIECE:
            return None
        follower = Follower(self.target, block)
        try:
            while not self._child.has_told(0 if follower.advance() else PAUSE_SECONDS):
                pass
        finally:
            follower.close()
        if not follower.checksums:
            return None
        self._child.ask()
        self._followed = follower
        return follower

    def confirm(self) -> bool:
        """Return whether the complete copy has what was read while it was written."""
        if self._followed is None:
            return True
        checksums = self._hear("checksums")
        return checksums is not None and checksums[: len(self._followed.checksums)] == self._followed.checksums

    def expect(self) -> None:
        """Wait for the copy. Raise Refusal (``database-busy``, retryable) if writers left no gap, or if the database could
        not be opened or the copy not written; or OSError."""
        if self._hear("copied") is None:
            if "refusal" in self._told:
                why: list[Any] = self._told["refusal"]
                raise Refusal(*why)
            self.wait()
            self._told = {"copied": self._copy_it()}

    @property
    def page(self) -> int:
        """The page size; 0 if it is no database."""
        self.expect()
        return 0 if self._told["copied"] else read_page_size(self.target)

    def read_check(self) -> str:
        """Wait for the check. Return "ok" or SQLite's problem: a damaged database is still copied."""
        page = self.page
        if self._told.get("check") is None and (self._told["copied"] or not page or self._hear("check") is None):
            self._told["check"] = self._told["copied"] or quick_check(self.target)
        return str(self._told["check"])

    def read_look(self) -> bool | None:
        """Return the answer to the question about the copy; ``None`` if it was not asked."""
        self.expect()
        return None if self._look is None or self._told["copied"] else self._hear("found")

    def remove(self) -> None:
        """Remove the copy. What was read of it can still be confirmed."""
        for tail in ("", WAL_TAIL, SHM_TAIL, JOURNAL_TAIL):
            if os.path.exists(self.target + tail):
                os.unlink(self.target + tail)
        if self._followed is None:
            self.end()

    def end(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.end()

    def wait(self) -> None:
        """End the process, and wait for its end."""
        if self._child is not None:
            self._child.wait()


def _is_large(place: str) -> bool:
    """Return whether a process of its own is worth it for a database."""
    try:
        return sum(os.path.getsize(one) for one in (place, place + WAL_TAIL) if os.path.exists(one)) > LARGE
    except OSError:
        return False


def _copy_live(source: str, target: str, wait: float, emptied: list[str] | None, strict: bool) -> str:
    """Copy a database. Return why the copy is damaged; "" if that is not known yet. Raise Refusal."""
    deadline = time.monotonic() + wait
    try:
        while not _try_strict_copy(source, target, deadline, strict):
            if time.monotonic() > deadline:
                raise Refusal("database-busy", "The database %s did not hold still for a copy." % source, True)
            time.sleep(0.02)
    except sqlite3.OperationalError as problem:
        code = "disk-full" if "full" in str(problem) else "database-unreadable"
        raise Refusal(code, "The database %s could not be copied: %s." % (source, problem), True) from None
    except sqlite3.DatabaseError as problem:
        _copy_file(source, target)
        return str(problem) or "it is no database"
    _keep_counters(source, target)
    return _clear_tables(target, emptied) if emptied else ""


def _clear_tables(place: str, tables: list[str]) -> str:
    """Delete all rows of these tables, where they exist, and overwrite them with zeros. Unused bytes are cleared too,
    because they may contain rows that were deleted or replaced earlier. Return the problem, or ""."""
    from sidecar.program.sqlite import pages

    try:
        connection = sqlite3.connect(place, isolation_level=None)
        try:
            connection.execute("PRAGMA secure_delete=ON")
            there = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            for table in tables:
                quoted = '"%s"' % table.replace('"', '""')
                if table in there and connection.execute("SELECT 1 FROM %s LIMIT 1" % quoted).fetchone():
                    connection.execute("DELETE FROM " + quoted)
        finally:
            connection.close()
        if os.path.getsize(place):
            pages.clear_unused(place)
    except (sqlite3.Error, pages.UnexpectedPage) as problem:
        return str(problem) or "its pages are not what they should be"
    return ""


def read_page_size(place: str) -> int:
    """Return a database file's page size; 0 if the file is too short to have one."""
    with open(places.open_file(place), "rb") as file:
        # Offset 16, two bytes; the value 1 stands for 65536 (file format, section 1.3.2).
        size = int.from_bytes(file.read(HEADER)[16:18], "big")
    return 65536 if size == 1 else size


def measure(place: str) -> tuple[int, int]:
    """Return how many bytes a copy of a database will have, and how many of them are free pages.

    Read from the header and from the last commit in the log, without opening it in SQLite; it may change before it is
    copied. Raise OSError.
    """
    with open(places.open_file(place), "rb") as file:
        header, whole = file.read(HEADER), os.fstat(file.fileno()).st_size
    page = read_page_size(place)
    if not page:
        return whole, 0
    pages = whole // page
    try:
        with open(places.open_file(place + WAL_TAIL), "rb") as log:
            # WAL format (file format, section 4.1): a 32-byte header with two salts at offset 16, then frames of a
            # 24-byte header and a page. A frame belongs to this log if its salts match. Its first four bytes are the
            # page number; the next four are the database's size in pages for a commit frame, else zero.
            salts, newest = log.read(32)[16:24], header
            while True:
                frame = log.read(24)
                if len(frame) < 24 or frame[8:16] != salts:
                    break
                start = log.read(HEADER)
                log.seek(page - len(start), os.SEEK_CUR)
                newest = start if frame[:4] == b"\0\0\0\1" else newest
                if any(frame[4:8]):
                    pages, header = int.from_bytes(frame[4:8], "big"), newest
    except FileNotFoundError:
        pass
    # Offset 36: the number of freelist pages (section 1.3.8).
    return pages * page, int.from_bytes(header[36:40], "big") * page if header.startswith(MAGIC) else 0


def describe_free_pages(path: str, place: str) -> str:
    """Return a warning about a large database most of whose pages are free; "" if it is not one."""
    try:
        whole, free = measure(place)
    except OSError:
        return ""
    if whole < SIZEABLE or free * 2 <= whole:
        return ""
    return (
        "%s is mostly free pages: %.1f of its %.1f MB hold nothing. Stop what has it open, run `sqlite3 FILE VACUUM` on it"
        " and start that again; the next export carries it whole, once." % (path, free / 1e6, whole / 1e6)
    )


def connect_read_only(place: str) -> sqlite3.Connection:
    """Return a connection to a database file that no process writes to. Nothing is written beside it."""
    return sqlite3.connect(_make_uri(place, "mode=ro&immutable=1"), uri=True)


def quick_check(place: str, mapped: bool = False) -> str:
    """Return SQLite's verdict on a database file: "ok" or its first problem. Nothing is written.

    ``mapped``: the file is mapped, which is faster, and kills this process if somebody shortens it meanwhile.
    """
    try:
        connection = connect_read_only(place)
        try:
            if mapped:
                connection.execute("PRAGMA mmap_size=%d" % MOST_MAPPED)
            found = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
            if not found.startswith("NULL value in "):
                return found
            # Some versions report this for tables WITHOUT ROWID whose key columns are not in the table's column order,
            # though they are sound.
            return str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
        finally:
            connection.close()
    except sqlite3.Error as problem:
        return str(problem)


def _make_uri(place: str, options: str) -> str:
    """Return a database's path as SQLite takes it (https://www.sqlite.org/uri.html), with every other byte escaped."""
    path = "".join(chr(byte) if byte in PLAIN else "%%%02X" % byte for byte in os.fsencode(place))
    return "file:" + path + "?" + options


def _is_wal(place: str) -> bool:
    """Return whether a database is in WAL mode (file format, section 1.3.3: both version numbers are 2)."""
    with open(places.open_file(place), "rb") as file:
        return file.read(20)[18:20] == b"\x02\x02"


def _try_strict_copy(source: str, target: str, deadline: float, strict: bool) -> bool:
    """Try once to copy. Return False if the database, or the file at its path, was replaced in the meantime and the
    copy cannot be trusted."""
    if not strict:
        return _try_copy(source, target, deadline)
    before = _identify_file(source)
    return _try_copy(source, target, deadline, before) and _identify_file(source) == before


def _identify_file(source: str) -> tuple[int, int]:
    """Return which file is at this path, by device and inode. Raise Refusal if it, or a log that SQLite would read with
    it, is a link."""
    for tail in (WAL_TAIL, SHM_TAIL, JOURNAL_TAIL, ""):
        try:
            status = places.read_status(source + tail)
        except FileNotFoundError:
            if not tail:
                raise
            continue
        if not stat.S_ISREG(status.st_mode):
            raise Refusal("database-unreadable", "%s is not a file, so the database is not read." % (source + tail))
    return status.st_dev, status.st_ino


def _has_open(identity: tuple[int, int]) -> bool:
    """Return whether this process has that file open; True if the system cannot tell."""
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return True
    for number in numbers:
        try:
            status = os.stat("/proc/self/fd/" + number)
        except OSError:
            continue
        if (status.st_dev, status.st_ino) == identity:
            return True
    return False


def _try_copy(source: str, target: str, deadline: float, itself: tuple[int, int] | None = None) -> bool:
    """Try once to copy, in the way that fits the database's journal. Return False if it changed in the meantime and the
    copy cannot be trusted."""
    if not _is_wal(source):
        try:
            return _run_backup(_make_uri(source, "mode=ro"), target, deadline, itself)
        except sqlite3.OperationalError as problem:
            # A hot journal: its writer died. Reading needs a rollback, which is done to a copy of both files instead.
            if "readonly" not in str(problem) or not os.path.exists(source + JOURNAL_TAIL):
                raise
            return _try_copy_offline(source, target, deadline)
    if os.path.exists(source + SHM_TAIL):
        return _run_backup(_make_uri(source, "mode=ro"), target, deadline, itself)
    if os.path.exists(source + WAL_TAIL) or os.path.exists(source + JOURNAL_TAIL):
        return _try_copy_offline(source, target, deadline)
    before = compute_database_signature(source)
    right = _run_backup(_make_uri(source, "mode=ro&immutable=1"), target, deadline, itself)
    return right and compute_database_signature(source) == before and not os.path.exists(source + SHM_TAIL)


def _try_copy_offline(source: str, target: str, deadline: float) -> bool:
    """Copy a database that no process has open together with its log, and let SQLite recover that copy. Return False if
    it changed."""
    before = compute_database_signature(source)
    twin = target + ".twin"
    try:
        for tail in ("", WAL_TAIL, JOURNAL_TAIL):
            if os.path.exists(source + tail):
                _copy_file(source + tail, twin + tail)
        if compute_database_signature(source) != before or os.path.exists(source + SHM_TAIL):
            return False
        return _run_backup(_make_uri(twin, "mode=rw"), target, deadline)
    finally:
        for tail in ("", WAL_TAIL, SHM_TAIL, JOURNAL_TAIL):
            if os.path.exists(twin + tail):
                os.unlink(twin + tail)


def _copy_file(source: str, target: str) -> None:
    with open(places.open_file(source), "rb") as original, open(target, "wb") as copy:
        shutil.copyfileobj(original, copy, CHUNK)


def _run_backup(source_uri: str, target: str, deadline: float, itself: tuple[int, int] | None = None) -> bool:
    """Copy a database by the backup API. Return False, with nothing copied, if SQLite opened another file than ``itself``."""
    for tail in ("", WAL_TAIL, SHM_TAIL, JOURNAL_TAIL):
        if os.path.exists(target + tail):
            os.unlink(target + tail)

    def still_time(status: int, remaining: int, total: int) -> None:
        if time.monotonic() > deadline and status != SQLITE_DONE:
            raise Refusal("database-busy", "Writers kept the database locked; no copy was possible.", True)

    source = sqlite3.connect(source_uri, uri=True, timeout=0.2, isolation_level=None)
    try:
        if itself is not None and not _has_open(itself):
            return False
        copy = sqlite3.connect(target, isolation_level=None)
        try:
            copy.execute("PRAGMA journal_mode=OFF")
            copy.execute("PRAGMA synchronous=OFF")
            source.backup(copy, pages=-1, progress=still_time, sleep=0.02)
        finally:
            copy.close()
        return True
    finally:
        source.close()


def _keep_counters(source: str, target: str) -> None:
    """Take the source's first page as it is if the copy's differs from it in counters only: then a database that is not
    written to is exported byte for byte."""
    page = read_page_size(target)
    with open(places.open_file(source), "rb") as original, open(target, "r+b") as copy:
        theirs, ours = original.read(page), copy.read(page)
        if len(theirs) == len(ours) == page > 0 and blank_counters(theirs) == blank_counters(ours):
            copy.seek(0)
            copy.write(theirs)


def blank_counters(page: bytes) -> bytes:
    """Return a database's first page with its counters set to zero: equal before and after a checkpoint or a plain copy."""
    blank = bytearray(page)
    for start, end in COUNTERS:
        blank[start:end] = bytes(end - start)
    return bytes(blank)


def query_number(place: str, query: str) -> int:
    """Return one number from a database file that no process writes to, such as its schema's version; 0 if there is none."""
    try:
        connection = connect_read_only(place)
        try:
            return int((connection.execute(query).fetchone() or [0])[0] or 0)
        finally:
            connection.close()
    except (sqlite3.Error, ValueError, TypeError):
        return 0
