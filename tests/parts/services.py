"""A real service in a process of its own, to be called, cut off, stopped and killed."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx

from tests.parts.forked_sidecar import Sidecar
from tests.parts.homes import PROJECT
from tests.parts.leaks import leaked

TOKEN = "a-token-for-the-tests-0123456789"


class Service:
    """``memory-sidecar serve`` and a client of it."""

    program = "sidecar"
    """The module that is run."""
    code = PROJECT
    """Where the sidecar is that is run."""

    def __init__(
        self,
        store: str,
        log: Path,
        settings: Mapping[str, Any],
        env: Mapping[str, str],
        more: str,
        token: str,
        files: int,
    ) -> None:
        self.log = log
        self._token = token
        config = log.with_suffix(".toml")
        given = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
        config.write_text(f"[service]\n{given}\n{more}")
        self._words = ["serve", f"--store={store}", f"--config={config}"]
        if "bind" not in settings:
            self._words += ["--bind=127.0.0.1:0"]
        self._files = files
        self._env = {**os.environ, "MEMORY_SIDECAR_TOKEN": token, **env}
        self.start()

    def start(self) -> None:
        before = len(self.lines())
        with self.log.open("ab") as log:
            self.process = self.spawn(log)
        deadline = time.monotonic() + 30
        while True:
            said = [line for line in self.lines()[before:] if line.get("event") == "serving"]
            if said:
                break
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        self.url = said[-1]["address"].replace("//0.0.0.0:", "//127.0.0.1:")
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        self.http = httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def spawn(self, log: IO[bytes]) -> Any:
        """Start the process."""
        return Sidecar(
            self._words,
            cwd=self.code,
            code=self.code,
            env=self._env,
            stderr=log,
            stdout=subprocess.DEVNULL,
            files=self._files,
            kind=self.program,
        )

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def lines(self) -> list[dict[str, Any]]:
        """What it logged: each line is one JSON object, or the service broke."""
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def export(self, memory: str, sandbox: str, *, key: str = "", **body: Any) -> httpx.Response:
        headers = {"Idempotency-Key": key} if key else {}
        return self.http.post(path(memory, "exports"), json={"sandbox": sandbox, **body}, headers=headers)

    def restore(self, memory: str, sandbox: str, *, key: str = "", **body: Any) -> httpx.Response:
        headers = {"Idempotency-Key": key} if key else {}
        return self.http.post(path(memory, "restores"), json={"sandbox": sandbox, **body}, headers=headers)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        whole, _, _ = self.log.read_bytes().rpartition(b"\n")  # it may have died in the middle of a line
        self.log.write_bytes(whole + b"\n")

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.stop()
        assert not leaked([self.log.read_text()]) and TOKEN not in self.log.read_text(), "a credential was logged"


def path(memory: str, *rest: str) -> str:
    return "/".join(["/v1/memories", memory.replace("/", "%2F"), *rest])


def until(true: Callable[[], object], seconds: float = 60) -> None:
    """Wait for something to come true. Who asks more and more rarely leaves the machine to those who are waited for."""
    deadline, pause = time.monotonic() + seconds, 0.02
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(pause)
        pause = min(pause * 1.5, 0.3)


@contextmanager
def serving(
    store: str | Path,
    log: Path,
    env: Mapping[str, str] | None = None,
    *,
    more: str = "",
    given_token: str = TOKEN,
    files: int = 0,
    kind: type[Service] = Service,
    **settings: Any,
) -> Iterator[Service]:
    """With ``given_token=""`` the service gets none: it makes one, or with ``token="off"`` goes without. With ``files`` it may
    have no more than so many open."""
    url = store if isinstance(store, str) else f"file:{store}"
    service = kind(url, log, settings, env or {}, more, given_token, files)
    try:
        yield service
    finally:
        service.close()


def without_settings(**more: str) -> dict[str, str]:
    """The environment without any setting of ours but these."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith("MEMORY_SIDECAR_")}, **more}


@contextmanager
def printed(tmp_path: Path, *, terminal: bool, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """What a service prints when it is ready, on a terminal or into a pipe; it runs meanwhile."""
    words = ["serve", f"--store=file:{tmp_path}/store", "--bind=127.0.0.1:0"]
    reading, writing = pty.openpty() if terminal else os.pipe()
    with (tmp_path / "stderr").open("wb") as log:
        process = Sidecar(words, env=without_settings(**(env or {})), stdout=writing, stderr=log)
    os.close(writing)
    try:
        said, deadline = "", time.monotonic() + 60
        while "\n  cat $d" not in said and "A call that tries it:\n  " not in said:
            assert time.monotonic() < deadline and process.poll() is None, (tmp_path / "stderr").read_text()
            said += os.read(reading, 1 << 16).decode()
        yield said.replace("\r\n", "\n")
    finally:
        process.terminate()
        assert process.wait(60) == 0
        os.close(reading)
    assert "Traceback" not in (tmp_path / "stderr").read_text()
