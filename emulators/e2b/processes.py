"""The daemon's ``process.Process`` service: start a command and stream it, list, signal, feed."""

from __future__ import annotations

import base64
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from emulators.calls import Step
from emulators.e2b.connect import END, caller, envelope, refusal, unwrapped
from emulators.e2b.files import resolved
from emulators.processes import DeadlinePassed, Output, Process
from emulators.sandboxes import User
from emulators.server import Exchange
from emulators.values import texts

if TYPE_CHECKING:
    from emulators.e2b.control import E2BSandbox

KEEPALIVE = 90.0


def _start(exchange: Exchange, sandbox: E2BSandbox) -> None:
    """Run a command and stream what it prints. It outlives its client; its time-out ends it."""
    asked = unwrapped(exchange.request.body())
    deadline = _deadline(exchange.request.header("Connect-Timeout-Ms"))
    process = _spawned(sandbox, asked, caller(exchange.request, sandbox))
    try:
        exchange.start(200, {"Content-Type": "application/connect+json"})
        _stream(exchange, process, deadline)
    except BaseException:
        # Whatever broke was the connection: the command does not notice.
        process.leave(deadline)
        raise


def _stream(exchange: Exchange, process: Process, deadline: float | None) -> None:
    connection = exchange.connection
    connection.send(_event("start", {"pid": process.pid}))
    silence = exchange.request.header("Keepalive-Ping-Interval")
    events = process.output(deadline, float(silence) if silence.isdigit() else KEEPALIVE)
    streams: list[str] = []
    try:
        for piece in exchange.shaped(_noted(events, streams, lambda: connection.send(_event("keepalive", {})))):
            connection.send(_event("data", {streams[-1]: base64.b64encode(piece).decode()}))
        if exchange.truncated:
            for _ in events:
                pass
    except DeadlinePassed:
        process.wait()
        late = {"code": "deadline_exceeded", "message": "context deadline exceeded"}
        connection.send(envelope({"error": late}, END))
        connection.finish()
        return
    code = process.wait()
    connection.send(_event("end", _ended(0 if exchange.truncated else code)))
    connection.send(envelope({}, END))
    connection.finish()


def _noted(events: Iterator[Output], streams: list[str], on_silence: Callable[[], None]) -> Iterator[bytes]:
    """The bytes of the output, noting beside which stream the latest were written to."""
    for event in events:
        if event.data:
            streams[:] = [event.stream]
            yield event.data
        else:
            on_silence()


def _event(kind: str, value: dict[str, object]) -> bytes:
    return envelope({"event": {kind: value}})


def _ended(code: int) -> dict[str, object]:
    if code < 0:
        said = f"signal: {signal.strsignal(-code)}".lower()
        return {"exitCode": -1, "exited": False, "status": said, "error": said}
    said = f"exit status {code}"
    return {"exitCode": code, "exited": True, "status": said, **({"error": said} if code else {})}


def _spawned(sandbox: E2BSandbox, asked: dict[str, object], user: User) -> Process:
    config = asked.get("process")
    config = config if isinstance(config, dict) else {}
    argv = [str(config.get("cmd", "")), *map(str, config.get("args", []))]
    if sandbox.tools is not None and argv[1:3] == ["-l", "-c"]:
        # A login shell reads its PATH from the machine's profile: put the sandbox's own back before the command.
        argv[3] = f"export PATH={shlex.quote(str(sandbox.tools))}; {argv[3]}"
    cwd = resolved(user, str(config["cwd"])) if config.get("cwd") else sandbox.work
    if not cwd.is_dir():
        raise refusal("invalid_argument", f"cwd '{cwd}' does not exist")
    try:
        envs = texts(config.get("envs"))
        return sandbox.spawn(argv, cwd=cwd, envs=envs, open_stdin=bool(asked.get("stdin")), user=user)
    except OSError as error:
        # All of the command comes before the reason, however long it is.
        reason = (error.strerror or "").lower()
        said = f"error starting process '{' '.join(argv)}': fork/exec {argv[0]}: {reason}"
        raise refusal("invalid_argument", said) from None


def _list(exchange: Exchange, sandbox: E2BSandbox) -> None:
    running = [
        {"pid": process.pid, "config": {"cmd": process.argv[0], "args": process.argv[1:], "cwd": str(process.cwd)}}
        for process in sandbox.commands()
    ]
    exchange.json(200, {"processes": running})


def _send_signal(exchange: Exchange, sandbox: E2BSandbox) -> None:
    asked = exchange.request.json()
    process = _selected(sandbox, asked)
    process.signal(signal.SIGTERM if asked.get("signal") == "SIGNAL_SIGTERM" else signal.SIGKILL)
    exchange.json(200, {})


def _send_input(exchange: Exchange, sandbox: E2BSandbox) -> None:
    asked = exchange.request.json()
    process = _selected(sandbox, asked)
    given = asked.get("input")
    if isinstance(given, dict):
        with suppress(ValueError):
            process.write(base64.b64decode(str(given.get("stdin", ""))))
    exchange.json(200, {})


def _close_stdin(exchange: Exchange, sandbox: E2BSandbox) -> None:
    _selected(sandbox, exchange.request.json()).close_stdin()
    exchange.json(200, {})


METHODS: dict[str, tuple[Step, Callable[[Exchange, E2BSandbox], None]]] = {
    "Start": ("command", _start),
    "List": ("other", _list),
    "SendSignal": ("signal", _send_signal),
    "SendInput": ("other", _send_input),
    "CloseStdin": ("other", _close_stdin),
}


def _selected(sandbox: E2BSandbox, asked: dict[str, object]) -> Process:
    selector = asked.get("process")
    pid = selector.get("pid") if isinstance(selector, dict) else None
    for process in sandbox.commands():
        if process.pid == pid:
            return process
    raise refusal("not_found", f"process with pid {pid} not found")


def _deadline(milliseconds: str) -> float | None:
    return time.monotonic() + int(milliseconds) / 1000 if milliseconds.isdigit() else None
