"""Commands and services that can die at any moment: as real processes, or in this one, where dying costs nothing.

In this process a death is a ``Killed`` at the n-th call of a port (a store, a sandbox), before it, after it or while it goes
on; from then on every port refuses that command or service, so that no clean-up of it has any effect outside: as little as
that of a process that was killed. What the sandbox runs goes on, or dies with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest
import structlog

from adapters.sandboxes.local import LocalSandbox
from adapters.sandboxes.remote import RemoteSandbox
from adapters.stores.disk import DiskStore
from sidecar.cli import main
from sidecar.config.own_files import build_local_policy
from sidecar.config.settings import load_config
from sidecar.engine import Engine
from sidecar.errors import SandboxUnreachable, StoreUnreachable
from sidecar.host.work import NoProgress
from sidecar.ports import CommandResult
from sidecar.service import server
from sidecar.service.logs import configure_logs
from sidecar.service.readiness import StartChecks
from sidecar.store.encryption.given_keys import read_given_keys
from sidecar.wiring import find_store_folder, open_repository, open_sandbox
from tests.parts.forked_program import Forks, Job
from tests.parts.homes import PROJECT
from tests.parts.sent import sent_by
from tests.parts.services import TOKEN, Service

Kind = Literal["before", "after", "during", "interrupt", "trouble", "stop"]
STORE = ("prepare", "get", "put", "swap", "copy", "delete", "sweep", "purge")
SANDBOX = ("run", "upload")
STREAMS = ((DiskStore, "stream"), (DiskStore, "list"), (LocalSandbox, "download"), (RemoteSandbox, "download"))


class Killed(BaseException):
    """Nothing that a process does when it is killed is of any use any more."""


@dataclass(slots=True)
class Fate:
    """What happens to a command or a service, at its n-th call of a port from now on."""

    kind: Kind
    at: int
    chance: random.Random
    dead: bool = False
    happened: bool = False
    jobs: list[Job] = field(default_factory=list)
    on_stop: Callable[[], object] = lambda: None

    def before(self, port: object) -> bool:
        """Whether the call that begins is to be left under way."""
        if self.dead:
            raise Killed
        self.at -= 1
        if self.at != 0:
            return False
        self.happened = True
        if self.kind == "before":
            self.die()
        if self.kind == "interrupt":
            signal.raise_signal(signal.SIGINT)
        if self.kind == "stop":
            self.on_stop()
        if self.kind == "trouble":
            trouble = StoreUnreachable if isinstance(port, DiskStore) else SandboxUnreachable
            raise trouble("The line is cut, for the test.")
        return self.kind == "during"

    def after(self) -> None:
        if self.dead or (self.at == 0 and self.kind == "after"):
            self.die()

    def die(self) -> None:
        self.dead = True
        raise Killed

    def settle(self) -> None:
        """Wait for the end of what it has run in sandboxes."""
        for job in self.jobs:
            job.wait()
        self.jobs.clear()


FATE: ContextVar[Fate | None] = ContextVar("fate", default=None)


def make_mortal(patch: pytest.MonkeyPatch, forks: Forks) -> None:
    """Have every port ask for the fate of who calls it; local sandboxes run the program as a fork."""
    patch.setattr(LocalSandbox, "run", _forked(LocalSandbox.run, forks))
    for kind, names in ((DiskStore, STORE), (LocalSandbox, SANDBOX), (RemoteSandbox, SANDBOX)):
        for name in names:
            patch.setattr(kind, name, _mortal(getattr(kind, name)))
    for kind, name in STREAMS:
        patch.setattr(kind, name, _mortal_stream(getattr(kind, name)))


def _mortal(method: Any) -> Any:
    @functools.wraps(method)
    async def mortal(self: Any, *args: Any, **more: Any) -> Any:
        fate = FATE.get()
        if fate is None:
            return await method(self, *args, **more)
        if fate.before(self):
            under_way = asyncio.ensure_future(method(self, *args, **more))
            await asyncio.wait({under_way}, timeout=fate.chance.uniform(0, 0.03))
            fate.dead = True  # what is cancelled now in a sandbox ends on its own: see ``_forked``
            if fate.chance.random() < 0.5:
                for job in fate.jobs:
                    job.kill()
            under_way.cancel()
            await asyncio.wait({under_way})
            raise Killed
        result = await method(self, *args, **more)
        fate.after()
        return result

    return mortal


def _mortal_stream(method: Any) -> Any:
    @functools.wraps(method)
    async def mortal(self: Any, *args: Any) -> AsyncIterator[Any]:
        fate = FATE.get()
        if fate is not None:
            fate.before(self)
        async with contextlib.aclosing(method(self, *args)) as chunks:
            async for chunk in chunks:
                if fate is not None and fate.dead:
                    raise Killed
                yield chunk
        if fate is not None:
            fate.after()

    return mortal


def _forked(method: Any, forks: Forks) -> Any:
    async def run(self: Any, command: str, *, environment: Any = None, **how: Any) -> CommandResult:
        if not self.home.is_dir() or type(self) is not LocalSandbox:
            result: CommandResult = await method(self, command, environment=environment, **how)
            return result
        sent = sent_by(command, environment)
        assert sent is not None
        job = await asyncio.to_thread(forks.start, self.home, {**self._environment, **(environment or {})}, sent)
        fate = FATE.get()
        if fate is not None:
            fate.jobs.append(job)
        try:
            return await asyncio.to_thread(job.result)
        except BaseException:
            if fate is None or not fate.dead:
                job.kill()
            raise

    return run


class Served(Protocol):
    """A service that was started."""

    url: str

    def stop(self) -> int: ...
    def kill(self) -> None: ...
    def doom(self, fate: Fate | None) -> None: ...
    @property
    def doomed(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended. ``code`` is -9 for one that was killed, and then there is no document."""

    code: int
    document: dict[str, Any]


class Means(Protocol):
    """How a day's commands and services are run."""

    def run(self, words: list[str], fate: Fate | None) -> Ran: ...
    def serve(self, store: str, config: Path) -> Served: ...


class InThisProcess:
    def run(self, words: list[str], fate: Fate | None = None) -> Ran:
        printed, said = io.StringIO(), io.StringIO()
        context = copy_context()
        context.run(FATE.set, fate)
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
            try:
                code = context.run(main, words)
            except SystemExit as ended:
                code = int(str(ended.code))
            except BaseException:
                if fate is None or not fate.happened:
                    raise
                code = -9
        if fate is not None:
            fate.settle()
            if fate.dead:
                return Ran(-9, {})
        return Ran(code, json.loads(printed.getvalue()))

    def serve(self, store: str, config: Path) -> Served:
        return ThreadedService(store, config)


class ThreadedService:
    """``serve`` in a thread of its own."""

    def __init__(self, store: str, config: Path) -> None:
        self._store, self._config = store, config
        self._fate = Fate("before", -1, random.Random(0))
        self._ready = threading.Event()
        self._code: int | None = None
        self._trouble: BaseException | None = None
        self.url = ""
        context = copy_context()
        context.run(FATE.set, self._fate)
        self._thread = threading.Thread(target=context.run, args=(self._live,), daemon=True)
        self._thread.start()
        assert self._ready.wait(60) and self.url, self._trouble

    def _live(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as trouble:  # its loop was stopped under it
            self._trouble = trouble
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._told = asyncio.Event(), asyncio.Event()
        config = load_config(str(self._config), store=self._store)
        engine = Engine(
            open_sandbox=open_sandbox,
            repository=open_repository(config.store, read_given_keys(config.encryption, config.signing)),
            layouts=config.layouts,
            limits=config.limits,
            guards=config.guards,
            timing=config.timing,
            local=build_local_policy(config, str(self._config), find_store_folder(config.store)),
            progress=NoProgress(),
        )
        settings = replace(config.service, bind="127.0.0.1:0")

        def ready(url: str) -> None:
            self.url = url
            self._ready.set()

        self._code = await server.serve(
            engine, server.ServiceConfig(service=settings), ready=ready, orders=server.Orders(*self._told)
        )
        self._fate.dead = True  # the process of a service ends here, whatever is still under way

    def doom(self, fate: Fate | None) -> None:
        """Give it a fate. One whose kind is "stop" is told to end, as by SIGTERM."""
        if fate is None:
            self._fate.at = -1
        else:
            self._fate.kind, self._fate.at, self._fate.happened = fate.kind, fate.at, False
            self._fate.on_stop = self._told[0].set

    @property
    def doomed(self) -> bool:
        """Whether it is dead, or ending."""
        return self._fate.dead or self._told[0].is_set()

    def stop(self) -> int:
        self._fate.at = -1
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._told[0].set)
        self._thread.join(60)
        assert not self._thread.is_alive(), "the service never ended"
        self._fate.settle()
        return -9 if self._code is None else self._code

    def kill(self) -> None:
        self._fate.dead = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        assert not self._thread.is_alive(), "the service cannot be killed"
        self._fate.settle()


async def _compare_nothing(readiness: StartChecks) -> None:
    pass


@contextlib.contextmanager
def quiet_logs(log: Path) -> Iterator[None]:
    """What services in this process log goes into a file."""
    handlers = logging.getLogger().handlers[:]
    with log.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", file)
        configure_logs("json")
        patch.undo()
        patch.setattr(server, "configure_logs", lambda form, *, beside=False: None)
        # A service refuses to start with a limit below what it may never leave out. Here one is lowered under those that run.
        patch.setattr(StartChecks, "check_limits", _compare_nothing)
        yield
        structlog.reset_defaults()
        logging.getLogger().handlers[:] = handlers


class InProcesses:
    """Real processes, and ``kill -9`` after a part of the time that they usually take."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._usual = 1.0
        self._services = 0

    def run(self, words: list[str], fate: Fate | None = None) -> Ran:
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "sidecar", *words],
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        if fate is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._usual * fate.chance.uniform(0.4, 1.0))
            _end(process, fate)
        printed, said = process.communicate(timeout=120)
        assert b"Traceback" not in said, said.decode()
        if fate is None:
            self._usual = 0.7 * self._usual + 0.3 * (time.monotonic() - began)
        elif process.returncode < 0:
            fate.dead = True
            return Ran(-9, {})
        return Ran(process.returncode, json.loads(printed))

    def serve(self, store: str, config: Path) -> Served:
        self._services += 1
        return ServiceProcess(store, config, self._folder / f"service-{self._services}.log")

    def conduct(
        self, store: str, config: Path, memory: str, sandbox: str, conversation: str
    ) -> subprocess.Popen[bytes]:
        """A conductor in a conversation, with a sidecar of its own (``run``). Its receipts come out on stdout."""
        program = [sys.executable, "-m", "tests.parts.conductor_program", memory, sandbox, conversation]
        return subprocess.Popen(
            [sys.executable, "-m", "sidecar", "run", f"--store={store}", f"--config={config}", "--", *program],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )


def _end(process: subprocess.Popen[bytes], fate: Fate) -> None:
    if process.poll() is not None:
        return
    fate.happened = True
    if fate.kind == "interrupt":
        process.send_signal(signal.SIGINT)
        return
    pids = [process.pid]
    if fate.chance.random() < 0.5:
        process.send_signal(signal.SIGSTOP)
        pids += descendants(process.pid)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(FileNotFoundError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


class ServiceProcess:
    """``memory-sidecar serve`` as a process; a fate is a kill a little later."""

    def __init__(self, store: str, config: Path, log: Path) -> None:
        # A service refuses to start with a limit below what it may never leave out; commands have it all the same.
        settings = config.read_text().partition("[limits]")[0]
        self._service = Service(store, log, {}, {}, settings.replace("[service]\n", "", 1), TOKEN, 0)
        self.url = self._service.url
        self.log = log
        self._timer: threading.Timer | None = None

    def doom(self, fate: Fate | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if fate is not None:
            number = signal.SIGTERM if fate.kind == "stop" else signal.SIGKILL
            self._timer = threading.Timer(
                fate.chance.uniform(0, 0.5), self._service.process.send_signal, args=(number,)
            )
            self._timer.start()

    @property
    def doomed(self) -> bool:
        return self._timer is not None or self._service.process.poll() is not None

    def stop(self) -> int:
        self.doom(None)
        process = self._service.process
        return process.wait(60) if process.poll() is not None else self._service.stop()

    def kill(self) -> None:
        self.doom(None)
        self._service.kill()
