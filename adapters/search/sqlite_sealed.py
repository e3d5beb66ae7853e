"""The embedded index of an encrypted store: one file, encrypted with the store's keys; readable in memory alone."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from typing import Protocol

from adapters.search.sqlite_files import PLAIN_NAMES, WAS_DAMAGED, PlainFiles, check_tables
from adapters.search.sqlite_schema import FORMAT, create_tables
from sidecar.errors import BadConfig, IndexReset, SearchUnfit
from sidecar.host.files import open_private
from sidecar.store.encryption.encrypted_store import EncryptedStore

NO_KEYS = '[search] embedded is "sealed", and no encryption keys are given.'


class Sealer(Protocol):
    """Encrypts with the keys of a store, and decrypts."""

    def seal(self, data: bytes) -> bytes: ...

    def open(self, data: bytes) -> bytes:
        """Raise any error for what these keys do not open."""
        ...


class SealedOpener:
    """Opens sealed indexes with the keys of a store. Raise ``BadConfig`` if there are none."""

    def __init__(self, encryption: EncryptedStore | None, most: int) -> None:
        if encryption is None:
            hint = 'Set [search] embedded = "plain", or give the keys of the store; see docs/security.md.'
            raise BadConfig(NO_KEYS, hint=hint, at=("search", "embedded"))
        if not hasattr(sqlite3.Connection, "deserialize"):
            raise BadConfig(
                "The SQLite of this Python cannot hold a database in memory, which a sealed search index needs.",
                hint='Use a Python with SQLite 3.36 or newer, or [search] embedded = "plain" or "off".',
                at=("search", "embedded"),
            )
        self._encryption = encryption
        self._most = most

    async def open(self, base: Path, store: str) -> SealedFiles:
        """Return the files of a store's index. Raise a ``StoreError``."""
        state = await self._encryption.opening.open_to_read()
        return SealedFiles(base, store, None if state is None else state.keyring, self._most)


class SealedFiles(PlainFiles):
    """An index as one file, encrypted with the store's keys, and in memory while it is used."""

    def __init__(self, base: Path, store: str, sealer: Sealer | None, most: int) -> None:
        super().__init__(base, store)
        self._sealer = sealer
        self._most = most
        self._place = self.folder / f"sealed-{FORMAT}.age"

    def open_to_read(self) -> sqlite3.Connection | None:
        try:
            sealed = self._place.read_bytes()
        except FileNotFoundError:
            return None
        connection = _open_in_memory()
        try:
            connection.deserialize(self._open(sealed))
            check_tables(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _open(self, sealed: bytes) -> bytes:
        if self._sealer is None:
            raise IndexReset(WAS_DAMAGED)
        try:
            return self._sealer.open(sealed)
        except Exception:  # of another key, or altered: either way it is built again
            raise IndexReset(WAS_DAMAGED) from None

    def open_to_write(self) -> sqlite3.Connection:
        # What was written before the store was encrypted lies here readable.
        for left in self.folder.iterdir():
            if PLAIN_NAMES.match(left.name) or left.name.startswith(".sealing-"):
                left.unlink(missing_ok=True)
        connection = self.open_to_read()
        if connection is None:
            connection = _open_in_memory()
            create_tables(connection)
        return connection

    def commit(self, connection: sqlite3.Connection) -> None:
        connection.execute("COMMIT")
        if self._sealer is None:
            raise SearchUnfit(
                "Nothing in this store is encrypted yet, so there is no key to seal a search index with.",
                hint="Export once, or run `memory-sidecar rekey`; then search again.",
            )
        data = connection.serialize()
        if len(data) > self._most:
            raise SearchUnfit(
                f"The sealed search index would have {len(data):,} bytes, which are all in memory; {self._most:,} are allowed.",
                hint="Raise [search] sealed_bytes, or use Postgres; see docs/search.md.",
            )
        partial = self.folder / f".sealing-{time.time_ns()}"
        with open(partial, "xb", opener=open_private) as file:
            file.write(self._sealer.seal(data))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._place)

    def identify(self) -> str:
        try:
            status = self._place.stat()
        except FileNotFoundError:
            return ""
        return f"{status.st_ino} {status.st_mtime_ns} {status.st_size}"

    def discard(self) -> None:
        self._place.unlink(missing_ok=True)


def _open_in_memory() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection
