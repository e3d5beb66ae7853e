"""The in-sandbox program as a process that costs milliseconds: forked from one that has it loaded, as mortal as any other."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar.ports import CommandResult

if TYPE_CHECKING:
    from tests.parts.sent import Sent

PROJECT = Path(__file__).resolve().parents[2]


class Job:
    """One run of the program: begun when it is made."""

    def __init__(self, address: str, home: Path, environment: Mapping[str, str], sent: Sent) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(address)
        words = [sent.nonce, *(part.decode("latin-1") for part in sent[1:])]
        request = json.dumps({"home": str(home), "environment": dict(environment), "sent": words})
        self._connection.sendall(request.encode() + b"\n")
        self._answer = self._connection.makefile("rb")
        self.pid = int(self._answer.readline() or 0)

    def result(self) -> CommandResult:
        """Wait for its end; one that was killed has no answer."""
        with self._connection, self._answer:
            code, _, size = self._answer.readline().partition(b" ")
            return CommandResult(int(code), self._answer.read(int(size))) if size else CommandResult(137, b"", "Killed")

    def kill(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Until it runs no more, whoever has its answer."""
        deadline = time.monotonic() + 60
        while self.pid and _lives(self.pid):
            assert time.monotonic() < deadline, "the program never ended"
            time.sleep(0.002)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Forks:
    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="forks-")
        self.address = f"{self._folder}/socket"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.parts.forked_program", self.address],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None and self._process.stdout.readline() == b"ready\n"

    def start(self, home: Path, environment: Mapping[str, str], sent: Sent) -> Job:
        return Job(self.address, home, environment, sent)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        os.rmdir(self._folder)


@contextlib.contextmanager
def forks() -> Iterator[Forks]:
    made = Forks()
    try:
        yield made
    finally:
        made.close()


def _serve(connection: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    connection.sendall(b"%d\n" % os.getpid())
    request = json.loads(connection.makefile("rb").readline())
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["home"])
    printed = io.BytesIO()
    sys.stdout = io.TextIOWrapper(printed)
    from sidecar.program.main import main

    nonce, *parts = request["sent"]
    code = main(nonce, *(part.encode("latin-1") for part in parts))
    connection.sendall(b"%d %d\n" % (code, len(printed.getvalue())) + printed.getvalue())


def _main(address: str) -> None:
    import sidecar.program

    for module in pkgutil.walk_packages(sidecar.program.__path__, "sidecar.program."):
        importlib.import_module(module.name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                code = 1
                try:
                    listener.close()
                    _serve(connection)
                    code = 0
                finally:
                    os._exit(code)
            connection.close()
    os.unlink(address)


if __name__ == "__main__":
    _main(sys.argv[1])
