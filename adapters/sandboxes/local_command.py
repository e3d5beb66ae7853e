"""One command on this machine: run to its end with bounded output, or killed with all its children."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import IO

from sidecar.errors import OutputTooLarge
from sidecar.ports import CommandResult

CHUNK = 1 << 20
COMPLAINT = 4096
BREATH_SECONDS = 0.05


class Command:
    """``run`` blocks; ``end`` may be called from another thread."""

    def __init__(self, home: Path, environment: dict[str, str], limit: int) -> None:
        self._home = home
        self._environment = environment
        self._limit = limit
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._lock = threading.Lock()

    def run(self, script: str) -> CommandResult:
        """Run a shell script. Raise ``OSError`` if it cannot be started, ``OutputTooLarge`` if it prints too much."""
        # The script is passed on stdin: a command line has a size limit, and shows in the process list.
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            ["/bin/sh", "-s"],
            cwd=self._home,
            env=self._environment,
            start_new_session=True,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
        )
        with self._lock:
            self._process = process
        if self._ended:
            self.end()
        try:
            output, complaint = self._talk(process, memoryview(script.encode()))
        except BaseException:
            self.end()
            raise
        finally:
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
            code = self._wait_for_exit(process)
        return CommandResult(code, output, complaint.decode("utf-8", "replace")[-COMPLAINT:])

    def end(self) -> None:
        """Kill it with all its children, also those that have outlived it."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def _wait_for_exit(self, process: subprocess.Popen[bytes]) -> int:
        """Return its exit code. It is reaped under the lock, so that ``end`` never kills another process that got its
        number."""
        while True:
            with self._lock, contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(BREATH_SECONDS)
                self._process = None
                return code
            time.sleep(BREATH_SECONDS)  # let other threads have the lock

    def _talk(self, process: subprocess.Popen[bytes], script: memoryview) -> tuple[bytes, bytes]:
        """Send the script and read both streams to their ends; only the tail of stderr is kept."""
        assert process.stdin and process.stdout and process.stderr
        output, complaint = bytearray(), bytearray()
        os.set_blocking(process.stdin.fileno(), False)
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdin, selectors.EVENT_WRITE)
            ready.register(process.stdout, selectors.EVENT_READ, output)
            ready.register(process.stderr, selectors.EVENT_READ, complaint)
            while ready.get_map():
                for key, _ in ready.select():
                    stream: IO[bytes] = key.fileobj  # type: ignore[assignment]
                    if stream is process.stdin:
                        script = _send_some(stream, script)
                        done = not script
                    else:
                        chunk = os.read(stream.fileno(), CHUNK)
                        key.data.extend(chunk)
                        done = not chunk
                    if done:
                        ready.unregister(stream)
                        stream.close()
                del complaint[:-COMPLAINT]
                if len(output) > self._limit:
                    raise OutputTooLarge(f"The sandbox printed more than {self._limit} bytes.")
        return bytes(output), bytes(complaint)


def _send_some(stream: IO[bytes], script: memoryview) -> memoryview:
    """Send some of the script and return the rest; nothing if the shell does not read it any more."""
    try:
        return script[os.write(stream.fileno(), script[:CHUNK]) :]
    except BlockingIOError:
        return script
    except BrokenPipeError:
        return script[:0]
