"""One writer at a time, for servers that do not decide between writers.

This is what can be done without the server's help: a writer says so in ``writer.json``, and stops if it finds another
writer there that was active a moment ago. A writer that has nothing to write gives up its lease after a while, so that
a service and a command can alternate. Each swap is read again after it was written: of two that met all the same, the
first notices. Two that begin within the same few milliseconds may still not see each other; only a server that compares
can distinguish those.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress

from adapters.stores.s3_conditions import make_swap_lost
from adapters.stores.s3_objects import S3Objects
from sidecar.errors import SecondWriter, StoreError

WRITER = "writer.json"
LEASE_SECONDS = 30.0
"""For this long after its last renewal, a writer counts as active."""
RENEWED_AFTER = LEASE_SECONDS / 3
_FORMAT = 1
_ONE_WRITER = threading.Lock()
"""For all stores of this process, because they may be the same."""
_TOKEN = secrets.token_hex(8)


class SingleWriter:
    """Swaps objects of a store that no other process writes to, and stops if one does."""

    def __init__(self, objects: S3Objects) -> None:
        self._objects = objects
        self._said = float("-inf")

    def begin(self) -> None:
        """Take the lease. Raise ``SecondWriter`` if another process has it."""
        with _ONE_WRITER:
            self._renew_lease()

    def swap(self, key: str, data: bytes, expected: str | None) -> str:
        """Swap as ``Store.swap`` does, among the threads of this process. Raise ``SecondWriter`` if another process
        writes too."""
        with _ONE_WRITER:
            self._renew_lease()
            found = self._objects.read(key)
            if (found.version if found else None) != expected:
                raise make_swap_lost(key)
            version = self._objects.write(key, data)
            there = self._objects.read(key)
            if there is None or there.data != data:
                raise SecondWriter(
                    f"Another sidecar wrote '{key}' at the same moment; {self._objects.server} cannot tell which of the two"
                    " should have been refused. Nothing that was stored before is lost: look at the memory's log."
                )
            return version

    def end(self) -> None:
        """Give up the lease at once, so that another process can write."""
        with _ONE_WRITER, suppress(StoreError):  # the lease expires by itself
            if self._said > float("-inf"):
                self._said = float("-inf")
                if _parse_writer(self._objects.read_dated(WRITER)[0]) == _identify_self():
                    self._objects.remove([WRITER])

    def _renew_lease(self) -> None:
        """Renew the lease if it is old enough. Raise ``SecondWriter``."""
        if time.monotonic() - self._said < RENEWED_AFTER:
            return
        self._check_only_writer()
        host, pid, token = _identify_self()
        said = {"format": _FORMAT, "host": host, "process": pid, "token": token}
        self._objects.write(WRITER, json.dumps(said).encode())
        self._check_only_writer()  # of two that began at once, the later one stays
        self._said = time.monotonic()

    def _check_only_writer(self) -> None:
        """Raise ``SecondWriter`` if another process has a lease that is not expired."""
        data, age = self._objects.read_dated(WRITER)
        other = _parse_writer(data)
        if other is None or other == _identify_self() or age > LEASE_SECONDS or _is_dead(other):
            return
        host, pid, _ = other
        raise SecondWriter(
            f"Another sidecar writes to this store (process {pid} on {host}, {age:.0f} s ago), and with single-writer only"
            " one may. Nothing was written.",
            hint=f"Stop it, or wait: {LEASE_SECONDS:.0f} s after its last write another may begin.",
        )


Writer = tuple[str, int, str]


def _identify_self() -> Writer:
    return socket.gethostname(), os.getpid(), _TOKEN


def _parse_writer(data: bytes | None) -> Writer | None:
    """Return the writer named in ``writer.json``; ``None`` if it is missing or not valid."""
    try:
        said = json.loads(data or b"")
        return str(said["host"]), int(said["process"]), str(said["token"])
    except (ValueError, KeyError, TypeError):
        return None


def _is_dead(writer: Writer) -> bool:
    """Return whether it was a process of this machine that has exited. In another container of the same host name it
    may be alive."""
    host, pid, _ = writer
    if host != socket.gethostname() or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
