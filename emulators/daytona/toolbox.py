"""The toolbox of a Daytona sandbox: which part of it answers, and its commands."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from emulators.calls import Step
from emulators.daytona import files
from emulators.daytona.errors import DAEMON, PROXY, refusal
from emulators.processes import DeadlinePassed, Process
from emulators.server import Exchange
from emulators.values import texts
from emulators.wire import Request

if TYPE_CHECKING:
    from emulators.daytona.control import DaytonaEmulator, DaytonaSandbox

Act = Callable[[Exchange, "DaytonaSandbox"], None]


def route(server: DaytonaEmulator, request: Request, id: str, path: str) -> tuple[Step, Callable[[Exchange], None]]:
    """The step a toolbox request counts as, and what answers it. Asking is activity."""
    step, act = _ROUTES.get((request.method, path), ("other", _unknown))

    def checked(exchange: Exchange) -> None:
        sandbox = server.find(id)
        if sandbox is None or sandbox.state == sandbox.GONE:
            said = f"not found: failed to get runner info: sandbox with ID {id} not found"
            raise refusal(404, said, code="SANDBOX_NOT_FOUND", source=PROXY)
        if not sandbox.running:
            said = "bad request: failed to get runner info: sandbox is not started"
            raise refusal(400, said, code="SANDBOX_NOT_STARTED", source=PROXY)
        sandbox.touch()
        with sandbox.serving(exchange.connection):
            act(exchange, sandbox)

    return step, checked


def _execute(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    """Pipe a script to a shell and answer when it is done. It outlives its client; its time-out ends it."""
    asked = exchange.request.json()
    timeout = asked.get("timeout")
    deadline = time.monotonic() + timeout if isinstance(timeout, int | float) and timeout else None
    process = _spawned(sandbox, asked)
    try:
        output = _collected(exchange, process, deadline)
    except DeadlinePassed:
        process.wait()
        said = "command execution timeout"
        raise refusal(408, said, code="PROCESS_EXECUTION_TIMEOUT", source=DAEMON) from None
    except BaseException:
        # Whatever broke was the connection: the command does not notice.
        process.leave(deadline)
        raise
    code = process.wait()
    if exchange.truncated:
        code = 0
    exchange.json(200, {"exitCode": max(code, -1), "result": output.decode("utf-8", "replace")})


def _collected(exchange: Exchange, process: Process, deadline: float | None) -> bytes:
    events = process.output(deadline)
    output = b"".join(exchange.shaped(event.data for event in events))
    for _ in events:
        pass
    return output


def _spawned(sandbox: DaytonaSandbox, asked: dict[str, object]) -> Process:
    command = asked.get("command")
    if not isinstance(command, str) or not command:
        raise refusal(400, "command is required", code="BAD_REQUEST", source=DAEMON)
    cwd = files.resolved(sandbox, str(asked.get("cwd") or ""))
    try:
        process = sandbox.spawn(["/bin/sh"], cwd=cwd, envs=texts(asked.get("envs")), merged=True, open_stdin=True)
    except OSError as error:
        raise refusal(400, f"chdir {cwd}: {error.strerror}", code="BAD_REQUEST", source=DAEMON) from None
    process.feed(command.encode("utf-8", "surrogatepass"))
    return process


def _folder_said(folder: Callable[[DaytonaSandbox], Path]) -> Act:
    return lambda exchange, sandbox: exchange.json(200, {"dir": str(folder(sandbox))})


def _unknown(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    raise refusal(404, "API route not found", code="NOT_FOUND", source=DAEMON)


_ROUTES: dict[tuple[str, str], tuple[Step, Act]] = {
    ("POST", "/process/execute"): ("command", _execute),
    ("POST", "/files/bulk-upload"): ("upload", files.bulk_upload),
    ("POST", "/files/bulk-download"): ("download", files.bulk_download),
    ("GET", "/files/download"): ("download", files.download),
    ("GET", "/files"): ("filesystem", files.list_folder),
    ("GET", "/files/info"): ("filesystem", files.info),
    ("DELETE", "/files"): ("filesystem", files.delete),
    ("POST", "/files/folder"): ("filesystem", files.make_folder),
    ("POST", "/files/move"): ("filesystem", files.move),
    ("GET", "/user-home-dir"): ("home", _folder_said(lambda sandbox: sandbox.home)),
    ("GET", "/work-dir"): ("home", _folder_said(lambda sandbox: sandbox.work)),
}
