"""A real claude-mem worker on loopback: installed once from npm, run in a home of its own, always ended.

No model and no vectors are needed: rows go in through its HTTP interface and come back through its search.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

VERSION = "13.25.3"
BUN = "1.4.4"
ZOD = "4.4.3"
"""The one dependency the worker loads; without it beside the plugin, bun would fetch it at every start."""

_CACHE = Path(__file__).resolve().parents[2] / ".cache" / f"claude-mem-{VERSION}"
_INSTALL_WITHIN = 300.0
_START_WITHIN = 60.0
_LEAVE_WITHIN = 20.0


def installed() -> Path:
    """The cache folder with ``package/`` and ``node_modules/``, filled on first use, once among parallel runs.

    Skip the test where npm is missing or cannot install; fail it instead where the variable CI is set.
    """
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = _CACHE / "done"
        if not done.exists():
            _install(_CACHE)
            done.touch()
    return _CACHE


def _install(folder: Path) -> None:
    npm = shutil.which("npm")
    if not npm:
        _unavailable("npm is not installed")
    for leftover in ("package", "node_modules"):
        shutil.rmtree(folder / leftover, ignore_errors=True)
    # `npm install claude-mem` fails on a grammar it does not need here, so the package is only unpacked.
    commands = (
        [npm, "pack", "--loglevel=error", f"claude-mem@{VERSION}"],
        ["tar", "-xzf", f"claude-mem-{VERSION}.tgz"],
        [npm, "install", "--no-save", "--no-audit", "--no-fund", "--loglevel=error", f"bun@{BUN}", f"zod@{ZOD}"],
    )
    for command in commands:
        try:
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=_INSTALL_WITHIN)
        except subprocess.CalledProcessError as error:
            _unavailable(f"`{' '.join(command[:2])}` failed: {error.stderr[-400:]}")
        except subprocess.TimeoutExpired:
            _unavailable(f"`{' '.join(command[:2])}` took more than {_INSTALL_WITHIN:.0f} s")
    _bun(folder)


def _bun(folder: Path) -> str:
    """The bun binary: npm's install script puts it in one place, and where scripts are off it stays in the other."""
    modules = folder / "node_modules"
    for candidate in (modules / "bun" / "bin" / "bun.exe", *sorted(modules.glob("@oven/bun-*/bin/bun"))):
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run([candidate, "--version"], check=True, capture_output=True, timeout=20)
            return str(candidate)
    return _unavailable("npm installed no bun that runs here")


def _unavailable(reason: str) -> NoReturn:
    message = f"no claude-mem worker to test with: {reason}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


class Worker:
    """One worker with its data in ``home/.claude-mem``. As a context manager it starts, and is killed at the end.

    Whoever else started a worker in this home, a restore for one, ``kill`` ends that one too.
    """

    def __init__(self, home: Path, port: int | None = None) -> None:
        self.home = home
        self.data = home / ".claude-mem"
        self.database = self.data / "claude-mem.db"
        self.port = port or free_port()

    def __enter__(self) -> Worker:
        try:
            return self.start()
        except BaseException:
            self.kill()
            raise

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "DO_NOT_TRACK": "1",
            "CLAUDE_MEM_WORKER_PORT": str(self.port),
            "CLAUDE_MEM_CHROMA_ENABLED": "false",
            "BUN_RUNTIME_TRANSPILER_CACHE_PATH": str(_CACHE / "transpiled"),
        }

    def start(self) -> Worker:
        """Start the daemon the way the plugin does, and return when it is ready to serve."""
        folder = installed()
        self.home.mkdir(parents=True, exist_ok=True)
        script = folder / "package" / "plugin" / "scripts" / "worker-service.cjs"
        subprocess.run(
            [_bun(folder), str(script), "start"],
            cwd=self.home,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=_START_WITHIN,
        )
        return self.wait_ready()

    def wait_ready(self, within: float = _START_WITHIN) -> Worker:
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError):
                if self._call("GET", "/api/readiness").get("status") == "ready":
                    return self
            time.sleep(0.05)
        raise TimeoutError(f"the worker on port {self.port} was not ready in {within:.0f} s")

    @property
    def pid(self) -> int:
        """As the worker itself wrote it down."""
        return int(json.loads((self.data / "worker.pid").read_text())["pid"])

    def save(self, text: str, title: str, project: str = "tests") -> int:
        """Save one observation; its id, once the worker has acknowledged it."""
        answer = self._call("POST", "/api/memory/save", {"text": text, "title": title, "project": project})
        return int(answer["id"])

    def search(self, query: str, limit: int = 100) -> str:
        """The worker's own words about what it found, a table with one title a line."""
        parameters = urllib.parse.urlencode({"query": query, "limit": limit})
        return str(self._call("GET", f"/api/search?{parameters}")["content"][0]["text"])

    def stats(self) -> dict[str, Any]:
        return self._call("GET", "/api/stats")

    def shutdown(self) -> None:
        """Ask it to leave, and return when it is gone; its database is then one file."""
        self._call("POST", "/api/admin/shutdown")
        deadline = time.monotonic() + _LEAVE_WITHIN
        while _processes_at_home(self.home):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the worker on port {self.port} did not leave in {_LEAVE_WITHIN:.0f} s")
            time.sleep(0.05)

    def kill(self) -> None:
        """End every process of this home at once, politeness aside."""
        deadline = time.monotonic() + _LEAVE_WITHIN
        while (pids := _processes_at_home(self.home)) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _call(self, method: str, path: str, body: dict[str, object] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=method,
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=20) as answer:
            return dict(json.load(answer))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _processes_at_home(home: Path) -> list[int]:
    """The living processes that were started with this HOME and a worker's port: the worker and all its children."""
    wanted = os.fsencode(f"HOME={home}")
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                variables = (entry / "environ").read_bytes().split(b"\0")
                if wanted in variables and any(v.startswith(b"CLAUDE_MEM_WORKER_PORT=") for v in variables):
                    found.append(int(entry.name))
    return found
