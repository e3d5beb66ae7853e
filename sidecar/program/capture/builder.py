"""Build an export of what was found, path by path: compare with the base, scrub, and pack what is new.

An export's bundle is one file: a pack, followed by its index.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
from typing import TYPE_CHECKING, Any, BinaryIO, Dict, Iterable

from sidecar.format import index, protocol
from sidecar.format.protocol import ExportAnswer, ExportQuestion, FoundDatabase
from sidecar.format.refusal import Refusal
from sidecar.program import cache, places
from sidecar.program.capture import reader
from sidecar.program.capture.walk import FoundPath, Skipped, read_link_target
from sidecar.program.limits.fit import ExportLimits
from sidecar.program.scratch import Scratch

if TYPE_CHECKING:
    from sidecar.format.packs import Packer
    from sidecar.program.privacy.screen import Screen
    from sidecar.program.sqlite import sketches
    from sidecar.program.sqlite.backup import CheckedCopy
    from sidecar.program.sqlite.follower import Follower

PERMISSIONS = 0o777
SCRUBBED = "+"
"""Appended to the first page's digest of a database whose copy had to be scrubbed."""


class CopyMisread(Exception):
    """What was read of a database's copy while it was written is not what it became: it is read after that."""


class ExportBuilder:
    """What an export has collected so far: its entries, how they differ from the base, and its warnings."""

    def __init__(
        self,
        question: ExportQuestion,
        scratch: Scratch,
        fit: ExportLimits,
        base: cache.Base | None,
        looked_at: bool,
        follows: bool = True,
    ) -> None:
        self.entries: dict[str, cache.Row] = {}
        self.changes: list[index.Change] = []
        self.skipped = Skipped()
        self.warnings: list[str] = []
        self.databases: list[FoundDatabase] = []
        self.counted: dict[str, dict[str, tuple[int, int, int]]] = {}
        """By changed database: which records came, changed and went."""
        self.total = 0
        self.refreshed = False
        self.bundle = Bundle(scratch, base is None)
        self.screened: Screen | None = None
        self._question = question
        self._work = scratch.work
        self._kept = scratch.memory
        self._strict = scratch.contained.beneath is not None
        """This is a folder among others on a machine: what a link leads to may belong to somebody else."""
        self._fit = fit
        self._base = base
        self._looked_at = looked_at
        self._copy: tuple[FoundPath, CheckedCopy, list[Any]] | None = None
        """The database that was copied last, and its stat signature from before."""
        self._removed: list[CheckedCopy] = []
        self._follows = follows

    @property
    def screen(self) -> Screen:
        """The privacy screen; created only when something is read."""
        if self.screened is None:
            from sidecar.program.privacy.screen import Screen

            self.screened = Screen(self._question.privacy, self._work, self.skipped)
        return self.screened

    def copy_first(self, databases: Iterable[FoundPath]) -> None:
        """Begin to copy the first of these databases that has changed: it is copied while other files are read."""
        for found in databases:
            signature = _compute_database_signature(found.place)
            if self._base is None or self._base.find_unchanged(found.path, signature) is None:
                self.copy_database(found)
                return

    def find_known(self, found: FoundPath) -> cache.KnownEntry | None:
        """Return what the base has at this path, if its name was looked at by the present rules."""
        return self._base.known(found.path) if self._base is not None and self._looked_at else None

    def take(self, found: FoundPath) -> None:
        """Add one path to the export. Raise OverLimit if a limit is exceeded, Refusal if the path may not be read."""
        mode = found.status.st_mode
        known = self.find_known(found)
        if known is None and not self.screen.name(found):
            return
        if stat.S_ISDIR(mode):
            self._record(index.Entry(found.path, index.DIR, mode & PERMISSIONS), [])
        elif stat.S_ISLNK(mode):
            target = read_link_target(found.place, found.root, found.relative)
            if target is None:
                self.skipped.add(found.path, "link leads out of the memory")
            elif (known is not None and known.entry.target == target) or self.screen.link(found, target):
                self._record(index.Entry(found.path, index.LINK, target=target), [])
        else:
            try:
                self._take_file(found)
            except FileNotFoundError:
                self.warnings.append("%s vanished while it was read." % found.path)
            except PermissionError:
                if found.root.found and (self._base is None or self._base.known(found.path) is None):
                    self.skipped.add(found.path, "may not be read")
                    self.warnings.append("%s may not be read by this user, and was left out." % found.path)
                    return
                raise Refusal("unreadable", "%s may not be read by this user." % found.path) from None

    def _take_file(self, found: FoundPath) -> None:
        """Add a file: as it was if its stat signature is unchanged, else by its kind (filtered settings, database,
        plain file)."""
        known = self._base.known(found.path) if self._base is not None else None
        is_database = known.entry.database if known else False
        signature = _compute_database_signature(found.place) if is_database else cache.compute_signature(found.status)
        same = self._base.find_unchanged(found.path, signature) if self._base is not None else None
        if same is not None:
            self._count(found, same.entry.size)
            self.entries[found.path] = same
            if is_database:
                self.databases.append(FoundDatabase(found.path, "unchanged", "ok"))
                self._warn_of_free_pages(found, found.place)
            return
        if found.root.rules.careful(found.relative):
            self.warnings.append("%s is said to hold credentials; it is part of this memory." % found.path)
        drop = found.root.rules.filters.get(found.relative)
        if drop is not None:
            self._take_filtered(found, known, drop)
        elif found.root.rules.database(found.relative):
            self._take_database(found, known)
        else:
            try:
                contents = self.screen.file(found, known, self._looked_at)
            except reader.UnnamedDatabase:
                self._take_database(found, known)
                return
            if contents is None:
                return
            self._count(found, contents.size)
            if not contents.steady:
                self.warnings.append("%s kept changing while it was read." % found.path)
            scrubbed = contents.size != found.status.st_size
            mtime = _choose_mtime(found, known, contents) if scrubbed else found.status.st_mtime_ns
            self._take_contents(found, known, contents, signature, mtime)

    def _take_filtered(self, found: FoundPath, known: cache.KnownEntry | None, drop: list[str]) -> None:
        """Add a settings file without the keys that its layout drops; skip it if it is not valid JSON."""
        from sidecar.program.privacy import settings_files

        with open(places.open_file(found.place), "rb") as file:
            data = file.read(self._fit.largest)
        text = settings_files.drop_keys(data, drop)
        if text is None:
            self.skipped.add(found.path, "not valid JSON, so it could not be cleared of secrets")
            return
        self.screen.settings(found, settings_files.list_secret_keys(data, drop))
        text = self.screen.text(found, text)
        self._count(found, len(text))
        contents = reader.wrap_bytes(text)
        self.screen.note_filtered(contents, known)
        self._take_contents(
            found, known, contents, cache.compute_signature(found.status), _choose_mtime(found, known, contents)
        )

    def _take_database(self, found: FoundPath, known: cache.KnownEntry | None) -> None:
        """Add a database: copy it with the backup API, scrub the copy, and carry its changed pages."""
        if self._copy is None or self._copy[0] != found:
            self.end_copy()
            self.copy_database(found)
        assert self._copy is not None
        _, copy, signature = self._copy
        emptied = found.root.rules.emptied(found.relative)
        before = known is not None and known.first_page.endswith(SCRUBBED)
        follower = None
        if self._follows and known is not None and known.entry.sums and not emptied and not before:
            follower = copy.follow(known.entry.block)
        copy.expect()
        target = copy.target
        if emptied and copy.read_check() != "ok":
            self.skipped.add(found.path, "damaged, so it could not be cleared of secrets")
            self.end_copy()
            return
        contents, first = self._read_copy(copy, known, follower)
        counted = self._count_rows(found, copy, known, contents)
        check = copy.read_check()  # it went on while the copy was read
        sound = check == "ok"
        if not sound:
            counted = None
        scrubbed = self.screen.database(found, copy, contents, sound, self._looked_at, before)
        if scrubbed is not False:
            contents.carried.close()
        if scrubbed is None:
            self.end_copy()
            return
        if scrubbed:
            contents, first = self._read_copy(copy, known)
            first += SCRUBBED
            counted = self._count_rows(found, copy, known, contents) if sound else None
        if emptied:
            self.screen.note_filtered(contents, known)
        row = FoundDatabase(found.path, "online-backup", check)
        schema = found.root.layout.get("schemas", {}).get(found.relative)
        if schema is not None and sound:
            from sidecar.program.sqlite import backup

            row.schema = backup.query_number(target, schema)
        self.databases.append(row)
        size = contents.size
        self._count(found, size)
        self._warn_of_free_pages(found, target)
        if contents.blocks == [0] and known is not None and first == known.first_page and size == known.entry.size:
            # Only counters changed (a checkpoint, a re-opened copy): nothing that a reader of the data could notice.
            self._take_unchanged(known, signature, first)
            contents.carried.close()
        else:
            if counted is not None:
                counted.keep(self._kept, contents.digest)
                if counted.counts is not None:
                    self.counted[found.path] = counted.counts
            self._take_contents(found, known, contents, signature, _choose_mtime(found, known, contents), first)
        self.end_copy()

    def copy_database(self, found: FoundPath) -> None:
        """Begin to copy a database that is taken later."""
        from sidecar.program.sqlite import backup

        signature = backup.compute_database_signature(found.place)
        target = os.path.join(self._work, "database")
        emptied = found.root.rules.emptied(found.relative)
        look = self.screen.plan_look(found, target) if self.find_known(found) is None else None
        wait = self._question.database_wait
        copy = backup.CheckedCopy(found.place, target, wait, emptied, self._strict, look)
        self._copy = found, copy, signature

    def end_copy(self) -> None:
        """Remove the copy of a database, if there is one."""
        if self._copy is not None:
            self._copy[1].remove()
            self._removed.append(self._copy[1])
            self._copy = None

    def confirm(self) -> None:
        """Raise CopyMisread unless the copies of databases have what was read of them while they were written."""
        if not all(copy.confirm() for copy in self._removed):
            raise CopyMisread
        for copy in self._removed:
            copy.end()

    def end(self) -> None:
        """End what still works on a copy, and remove it. Nothing of it runs any more then."""
        self.end_copy()
        while self._removed:
            self._removed.pop().wait()

    def _count_rows(
        self, found: FoundPath, copy: CheckedCopy, known: cache.KnownEntry | None, contents: reader.Contents
    ) -> sketches.Counted | None:
        """Count which of a database's records came, changed and went."""
        if self._question.trial or not found.root.layout.get("tables"):
            return None
        if known is not None and known.entry.digest == contents.digest:
            return None
        from sidecar.program.sqlite import sketches

        tables = sketches.choose_tables(found.root.layout, found.path.partition("/")[2])
        if not tables:
            return None
        old = sketches.load(self._kept, known.entry.digest, tables) if known is not None else None
        return sketches.count_rows(copy.target, tables, old, contents.list_changed_pages(copy.page), known is None)

    def _read_copy(
        self, copy: CheckedCopy, known: cache.KnownEntry | None, follower: Follower | None = None
    ) -> tuple[reader.Contents, str]:
        """Return a database's copy as contents, and the digest of its first page without the counters."""
        from sidecar.program.sqlite import backup

        page = copy.page
        stream = open(copy.target, "rb")
        first = hashlib.sha256(backup.blank_counters(stream.read(page))).hexdigest()
        stream.seek(0)
        contents = reader.read_stream(stream, os.path.getsize(copy.target), known, self._work, page, follower)
        if contents.carried is not stream:
            stream.close()
        return contents, first

    def _warn_of_free_pages(self, found: FoundPath, place: str) -> None:
        from sidecar.program.sqlite import backup

        words = backup.describe_free_pages(found.path, place)
        self.warnings += [words] if words else []

    def _take_unchanged(self, known: cache.KnownEntry, signature: list[Any], first_page: str) -> None:
        """Keep an entry as the base has it, with a new stat signature."""
        self.entries[known.entry.path] = cache.KnownEntry(known.entry, signature, first_page)
        self.refreshed = True

    def _take_contents(
        self,
        found: FoundPath,
        known: cache.KnownEntry | None,
        contents: reader.Contents,
        signature: list[Any],
        mtime: int,
        first_page: str = "",
    ) -> None:
        """Record a file that was read, and add it to the bundle unless only its mode or time changed."""
        entry = index.Entry(
            found.path,
            index.FILE,
            found.status.st_mode & PERMISSIONS,
            contents.size,
            mtime,
            contents.digest,
            contents.block,
            contents.sums,
            database=bool(first_page),
        )
        blocks = contents.blocks
        # Equal in path, type, size, digest, block, sums, target and database flag: only mode or mtime differ, so the
        # entry is recorded with empty ``blocks`` and no bytes are carried.
        if (
            known is not None
            and entry[:2] + entry[3:4] + entry[5:] == known.entry[:2] + known.entry[3:4] + known.entry[5:]
        ):
            blocks = []
        if (
            self._record(entry, signature, blocks, contents.select_carried_sums() if blocks else b"", first_page)
            and blocks != []
        ):
            self.bundle.add(entry, blocks, contents.carried, contents.length)
        contents.carried.close()

    def _record(
        self,
        entry: index.Entry,
        signature: list[Any],
        blocks: list[int] | None = None,
        sums: bytes = b"",
        first_page: str = "",
    ) -> bool:
        """Record an entry and return whether it differs from the base. Folders and links are packed here, in a full pack."""
        known = self._base.known(entry.path) if self._base is not None else None
        self.entries[entry.path] = cache.KnownEntry(entry, signature, first_page)
        if known is not None and known.entry == entry:
            self.refreshed = self.refreshed or known.signature != signature or bool(signature)
            return False
        self.changes.append(index.Change(entry if blocks is None else entry._replace(sums=sums), blocks))
        if entry.type != index.FILE and self._base is None:
            self.bundle.packer.add(entry, None, 0)
        return True

    def _count(self, found: FoundPath, size: int) -> None:
        """Count a file's bytes. Raise OverLimit if a limit is exceeded."""
        self.total += size
        self._fit.count(found, size, self.total)


def _compute_database_signature(place: str) -> list[Any]:
    from sidecar.program.sqlite import backup

    return backup.compute_database_signature(place)


def _choose_mtime(found: FoundPath, known: cache.KnownEntry | None, contents: reader.Contents) -> int:
    """Return the time to record. Databases and filtered files are rewritten without a change of contents; then the old
    time stays."""
    if known is not None and (known.entry.digest, known.entry.size) == (contents.digest, contents.size):
        return known.entry.mtime
    return found.status.st_mtime_ns


class Bundle:
    """The bundle being written; it is created with the first thing that is packed. ``carried`` is how many bytes of
    each path are in it."""

    def __init__(self, scratch: Scratch, is_full: bool) -> None:
        self._scratch = scratch
        self._is_full = is_full
        self._path = os.path.join(scratch.work, "bundle")
        self._packer: Packer | None = None
        self._file: BinaryIO | None = None
        self.carried: Dict[str, int] = {}

    @property
    def packer(self) -> Packer:
        """The packer; the file is created on first use."""
        if self._packer is None:
            from sidecar.format.packs import QUICKLY, WELL, Packer

            self._file = open(places.create_file(self._path), "wb", buffering=0)
            self._packer = Packer(self._file, level=QUICKLY if self._is_full else WELL)
        return self._packer

    def add(self, entry: index.Entry, blocks: list[int] | None, stream: BinaryIO, length: int) -> None:
        """Add a file, or only some of its blocks."""
        (self.packer.add if blocks is None else self.packer.add_blocks)(entry, stream, length)
        self.carried[entry.path] = length

    def abandon(self) -> None:
        """Stop writing and remove the incomplete file."""
        if self._packer is not None:
            self._packer.abandon()
            os.unlink(self._path)

    def finish(self, changes: index.Index, answer: ExportAnswer) -> None:
        """Complete the pack and append its index. Put the sizes and hashes of both into the answer."""
        packer, listed = self.packer, io.BytesIO()
        index.write(listed, changes)  # first: the compressor has still much to do
        codec = packer.finish()
        assert self._file is not None
        self._file.close()
        pack_size = os.path.getsize(self._path)
        with open(self._path, "ab") as bundle:
            bundle.write(listed.getbuffer())
        pack_digest, index_digest = hashlib.sha256(), hashlib.sha256()
        with open(self._path, "rb") as bundle:
            for chunk in iter(lambda: bundle.read(min(1 << 20, pack_size - bundle.tell())), b""):
                pack_digest.update(chunk)
            whole = pack_digest.copy()
            for chunk in iter(lambda: bundle.read(1 << 20), b""):
                index_digest.update(chunk)
                whole.update(chunk)
        self._scratch.give_to_user(self._path)
        answer.kind = changes.kind
        answer.codec = codec
        answer.pack_bytes = pack_size
        answer.pack_sha256 = pack_digest.hexdigest()
        answer.index_sha256 = index_digest.hexdigest()
        answer.bundle = protocol.Bundle(self._path, os.path.getsize(self._path), whole.hexdigest())
