"""A real service in a process of its own, to be called, cut off, stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.parts.homes import PROJECT
from tests.parts.leaks import leaked

TOKEN = "a-token-for-the-tests-0123456789"


class Service:
    """``memory-sidecar serve`` and a client of it."""

    code = PROJECT
    """Where the sidecar is that is run."""

    def __init__(self, store: str, log: Path, settings: Mapping[str, Any], env: Mapping[str, str], more: str) -> None:
        self.log = log
        config, bind = log.with_suffix(".toml"), settings.get("bind", "127.0.0.1:0")
        given = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
        config.write_text(f"[service]\n{given}\n{more}")
        self._command = [sys.executable, "-m", "sidecar", "serve", f"--store={store}", f"--config={config}"]
        self._command += [f"--bind={bind}"]
        self._env = {**os.environ, "MEMORY_SIDECAR_TOKEN": TOKEN, **env}
        self.start()

    def start(self) -> None:
        before = len(self.lines())
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, cwd=self.code, env=self._env, stderr=log, stdout=subprocess.DEVNULL
            )
        deadline = time.monotonic() + 30
        while True:
            said = [line for line in self.lines()[before:] if line.get("event") == "serving"]
            if said:
                break
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        self.url = said[-1]["address"].replace("//0.0.0.0:", "//127.0.0.1:")
        self.http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)

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
    """Wait for something to come true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


@contextmanager
def serving(
    store: str | Path,
    log: Path,
    env: Mapping[str, str] | None = None,
    *,
    more: str = "",
    kind: type[Service] = Service,
    **settings: Any,
) -> Iterator[Service]:
    url = store if isinstance(store, str) else f"file:{store}"
    service = kind(url, log, settings, env or {}, more)
    try:
        yield service
    finally:
        service.close()
