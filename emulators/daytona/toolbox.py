"""The toolbox of a Daytona sandbox: which part of it answers, and its commands."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from emulators.calls import Step
from emulators.daytona import files
from emulators.daytona.errors import PROXY, complaint, refusal
from emulators.processes import DeadlinePassed, Process
from emulators.server import Exchange, Refused
from emulators.values import texts
from emulators.wire import Request

if TYPE_CHECKING:
    from emulators.daytona.control import DaytonaEmulator, DaytonaSandbox

VERSION = "0.190.0"
MOST_REPLAYED = 256 << 10
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
        if sandbox.daemon_down:
            exchange.request.body()
            raise Refused(502, None)
        sandbox.touch()
        with sandbox.serving(exchange.connection):
            try:
                act(exchange, sandbox)
            except Refused as refused:
                if isinstance(refused.body, dict) and "timestamp" in refused.body:
                    refused.body |= {"path": path, "method": request.method}
                raise

    return step, checked


def _execute(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    """Pipe a script to a shell and answer when it is done. It outlives its client; its time-out ends it."""
    asked = exchange.request.json()
    command, timeout, envs = str(asked.get("command") or ""), asked.get("timeout"), texts(asked.get("envs"))
    if not command.strip():
        raise complaint(400, "command is required", code="BAD_REQUEST")
    if timeout is not None and (not isinstance(timeout, int) or timeout < 0):
        raise complaint(400, "invalid request body: cannot unmarshal timeout into uint32", code="BAD_REQUEST")
    if wrong := [name for name in envs if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)]:
        raise complaint(400, f"invalid environment variable name: {wrong[0]}", code="BAD_REQUEST")
    if exchange.replayed:
        _run(exchange, sandbox, asked, command, timeout, envs)
        if len(command) > MOST_REPLAYED:
            raise Refused(502, None)
    code, output = _run(exchange, sandbox, asked, command, timeout, envs)
    exchange.json(200, {"exitCode": code, "result": output})


def _run(
    exchange: Exchange,
    sandbox: DaytonaSandbox,
    asked: dict[str, object],
    command: str,
    timeout: int | None,
    envs: dict[str, str],
) -> tuple[int, str]:
    lives, deadline = sandbox.lives, time.monotonic() + timeout if timeout else None
    cwd = files.resolved(sandbox, str(asked["cwd"])) if asked.get("cwd") else _start(sandbox)
    try:
        process = sandbox.spawn([sandbox.shell], cwd=cwd, envs=envs, merged=True, open_stdin=True)
    except OSError as error:
        return -1, f"fork/exec {sandbox.shell}: {(error.strerror or '').lower()}"
    process.feed(command.encode("utf-8", "surrogatepass"))
    try:
        output = _collected(exchange, process, deadline)
    except DeadlinePassed:
        process.wait()
        raise complaint(408, "command execution timeout", code="REQUEST_TIMEOUT") from None
    except BaseException:
        # Whatever broke was the connection: the command does not notice.
        process.leave(deadline)
        raise
    code = process.wait()
    if sandbox.lives != lives:
        raise Refused(502, None)
    return 0 if exchange.truncated else max(code, -1), output.decode("utf-8", "replace")


def _start(sandbox: DaytonaSandbox) -> Path:
    """The working folder of the daemon; that is the one it started in, whatever became of it."""
    return sandbox.work if sandbox.work.is_dir() else Path(f"/proc/self/fd/{sandbox.work_handle}")


def _collected(exchange: Exchange, process: Process, deadline: float | None) -> bytes:
    events = process.output(deadline)
    output = b"".join(exchange.shaped(event.data for event in events))
    for _ in events:
        pass
    return output


def _folder_said(folder: Callable[[DaytonaSandbox], Path]) -> Act:
    return lambda exchange, sandbox: exchange.json(200, {"dir": str(folder(sandbox))})


def _version(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    exchange.json(200, {"version": VERSION})


def _sessions(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    exchange.json(200, [{"sessionId": name, "commands": []} for name in sandbox.sessions])


def _begin_session(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    name = str(exchange.request.json().get("sessionId") or "")
    if not name:
        raise complaint(400, "sessionId is required", code="BAD_REQUEST")
    if name in sandbox.sessions:
        raise complaint(409, "session already exists", code="CONFLICT")
    sandbox.sessions.append(name)
    exchange.empty(201)


def _unknown(exchange: Exchange, sandbox: DaytonaSandbox) -> None:
    raise Refused(404, "404 page not found")


_ROUTES: dict[tuple[str, str], tuple[Step, Act]] = {
    ("POST", "/process/execute"): ("command", _execute),
    ("GET", "/process/session"): ("other", _sessions),
    ("POST", "/process/session"): ("other", _begin_session),
    ("POST", "/files/bulk-upload"): ("upload", files.bulk_upload),
    ("POST", "/files/upload"): ("upload", files.upload),
    ("POST", "/files/bulk-download"): ("download", files.bulk_download),
    ("GET", "/files/download"): ("download", files.download),
    ("GET", "/files"): ("filesystem", files.list_folder),
    ("GET", "/files/info"): ("filesystem", files.info),
    ("DELETE", "/files"): ("filesystem", files.delete),
    ("POST", "/files/folder"): ("filesystem", files.make_folder),
    ("POST", "/files/move"): ("filesystem", files.move),
    ("GET", "/user-home-dir"): ("home", _folder_said(lambda sandbox: sandbox.home)),
    ("GET", "/work-dir"): ("home", _folder_said(lambda sandbox: sandbox.work)),
    ("GET", "/version"): ("other", _version),
}
