"""``run -- COMMAND…``: run a command with a service of its own, which runs exactly as long as the command."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from sidecar.cli.result import Result
from sidecar.config.settings import Config, add_location, find_config_file, load_config
from sidecar.engine import Engine
from sidecar.errors import BadConfig, UsageError
from sidecar.host.local_token import TokenNotKept, ensure_token
from sidecar.host.loopback import is_loopback
from sidecar.host.work import NoProgress
from sidecar.service.server import Orders, ServiceConfig, serve
from sidecar.service.settings import AUTO, Service, parse_address

URL, TOKEN = "MEMORY_SIDECAR_URL", "MEMORY_SIDECAR_TOKEN"
ANY_PORT = "127.0.0.1:0"
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
BY_SIGNAL = 128


class CannotStart(UsageError):
    """The command after `run --` cannot be started."""

    code = "cannot-start"
    exit_code = 127
    default_hint = "Check its name and that it may be executed."


async def run_run(engine: Engine, args: argparse.Namespace) -> Result:
    """Serve while the command runs, then exit with its exit code. Raise ``CannotStart`` if it cannot be started.

    If the command succeeded but the service could not save everything, the exit code is 1.
    """
    command = args.child[1:] if args.child[:1] == ["--"] else args.child
    if not command:
        raise UsageError("There is no command to run.", hint="memory-sidecar run -- COMMAND…")
    config = load_config(args.config, store=args.store)
    settings = replace(config.service, bind=args.bind or ANY_PORT)
    if is_loopback(parse_address(settings.bind)[0]):
        # On loopback nothing travels that TLS could protect, and certificates seldom name a loopback address.
        settings = replace(settings, tls_cert="", tls_key="")
    config = replace(config, service=settings)
    token = _choose_token(config.service)
    service = _Service(replace(engine, progress=NoProgress()), config)
    relay = _Relay(service.hurried)
    try:
        async with service.running() as url:
            ended = await relay.run(command, {**os.environ, URL: _make_reachable(url), TOKEN: token})
    except BadConfig as problem:
        raise add_location(problem, find_config_file(args.config)) from None
    code = BY_SIGNAL - ended if ended < 0 else ended
    if service.left:
        # The time is over, and a regular exit would wait for what still runs. The store is consistent, as after any
        # crash.
        os._exit(code or service.left)
    return Result({"exit_code": code}, [], code)


class _Service:
    """The service, from the moment it listens until it has saved what it can."""

    def __init__(self, engine: Engine, config: Config) -> None:
        self._engine = engine
        self._config = config
        self._stopping = asyncio.Event()
        self.hurried = asyncio.Event()
        """Set it to stop saving and end at once."""
        self.left = 0
        """Its exit code: not 0 if something was left unfinished."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Start the service and yield its address; stop it at the end. Raise what keeps it from starting."""
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        given = self._config
        config = ServiceConfig(
            service=given.service,
            webhooks=given.webhooks,
            audit=given.audit,
            index_every=given.postgres.every,
            adopt=given.adopt.folder,
        )
        orders = Orders(self._stopping, self.hurried)
        serving = asyncio.create_task(serve(self._engine, config, ready=address.set_result, orders=orders, beside=True))
        try:
            started: set[asyncio.Future[Any]] = {serving, address}
            await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)
            if not address.done():
                await serving
                raise UsageError("The service ended before it could be used.")
            yield address.result()
        finally:
            self._stopping.set()
            self.left = await serving


class _Relay:
    """Runs one command and forwards signals to it. Once it has ended, a signal means to hurry."""

    def __init__(self, hurried: asyncio.Event) -> None:
        self._hurried = hurried
        self._child: Process | None = None
        self._early: signal.Signals | None = None
        for number in PASSED_ON:
            asyncio.get_running_loop().add_signal_handler(number, self._pass_on, number)

    async def run(self, command: Sequence[str], environment: dict[str, str]) -> int:
        """Run the command and return its exit code, or -n if signal n ended it. Raise ``CannotStart``."""
        if self._early is not None:
            return -self._early
        try:
            self._child = await asyncio.create_subprocess_exec(*command, env=environment)
        except (OSError, ValueError) as problem:
            words = getattr(problem, "strerror", None) or str(problem)
            raise CannotStart(f"{command[0]} cannot be started: {words}.") from None
        if self._early is not None:
            self._pass_on(self._early)
        return await self._child.wait()

    def _pass_on(self, number: signal.Signals) -> None:
        if self._child is None:
            self._early = number
        elif self._child.returncode is not None:
            self._hurried.set()
        elif not (number is signal.SIGINT and _was_typed()):
            with suppress(ProcessLookupError):
                self._child.send_signal(number)


def _was_typed() -> bool:
    """Whether Ctrl-C was typed at this terminal: the command, in the same foreground process group, has already
    received it."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _choose_token(settings: Service) -> str:
    """Return the first token that is set, else the one kept for this user, else one for this run only. The service
    reads it from the environment. Raise ``BadConfig`` if other users could have read the one kept."""
    given = [token.strip() for token in os.environ.get(TOKEN, "").split(",") if token.strip()]
    if not given:
        given = [_read_kept_token() if settings.token == AUTO else secrets.token_hex(32)]
        os.environ[TOKEN] = given[0]
    return given[0]


def _read_kept_token() -> str:
    try:
        return ensure_token()
    except TokenNotKept:  # not needed: the command gets it by its environment
        return secrets.token_hex(32)


def _make_reachable(url: str) -> str:
    """Return the address by which the command reaches a service that listens on all addresses."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
