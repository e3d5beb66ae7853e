"""A process that brings rows up to date, over and over, to be killed at any moment.

It is started once and forks for each time, so that a kill costs milliseconds and not the start of a Python.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.parts.homes import PROJECT


class Writers:
    def __init__(self, store: Path, indexes: Path | None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.parts.writers", f"file:{store}", *([str(indexes)] if indexes else [])],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, kill_after: float | None = None) -> int:
        """Bring everything up to date, or be killed on the way; the wait status."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(pid, signal.SIGKILL)  # it is waited for below, so its number is nobody else's yet
        self._process.stdin.write("wait\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def writers(store: Path, indexes: Path | None = None) -> Iterator[Writers]:
    """Write to Postgres, or to the index in a folder on this machine."""
    made = Writers(store, indexes)
    try:
        yield made
    finally:
        made.close()


async def _catch_up(url: str, indexes: str) -> None:
    from adapters.search.sqlite import EmbeddedSearch
    from sidecar.search.settings import Postgres
    from sidecar.search.upkeep import SearchIndex
    from sidecar.store.repository import Repository
    from sidecar.wiring import open_search, open_store

    sink = EmbeddedSearch(Path(indexes)) if indexes else open_search(Postgres())
    assert sink is not None
    async for done in SearchIndex(Repository(open_store(url)), sink).catch_up():
        assert done.state != "failed", done


def _main(url: str, indexes: str = "") -> None:
    import adapters.search.sqlite  # noqa: F401
    import sidecar.search.upkeep  # noqa: F401

    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                asyncio.run(_catch_up(url, indexes))
                os._exit(0)
            except BaseException as problem:
                print(repr(problem), file=sys.stderr)
                os._exit(1)
        print(pid, flush=True)
        sys.stdin.readline()
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
