"""What every emulator is: sandboxes behind a loopback server that counts calls and causes trouble on demand."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import shutil
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

from emulators.calls import Call, Calls, Step
from emulators.faults import Fault, Faults, shaped
from emulators.sandboxes import NotRunning, Sandbox
from emulators.webhooks import Sign, Webhooks
from emulators.wire import Connection, Dropped, Listener, Request, Reset

SandboxT = TypeVar("SandboxT", bound=Sandbox)


class Refused(Exception):
    """A request that is answered with an error: as JSON, as plain text, or without a word."""

    def __init__(self, status: int, body: Mapping[str, object] | str | None) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


class Exchange:
    """One request and its answer, with the fault it meets."""

    def __init__(
        self,
        connection: Connection,
        request: Request,
        sandbox: Sandbox | None,
        fault: Fault | None,
        settle: Callable[[int], None],
    ) -> None:
        self.connection = connection
        self.request = request
        self._sandbox = sandbox
        self._fault = fault
        self._settle = settle
        self._spent = False

    @property
    def replayed(self) -> bool:
        """Whether a proxy is to send this request a second time, as the first time nobody answered."""
        return self._fault is not None and self._fault.kind == "replay"

    @property
    def truncated(self) -> bool:
        """Whether this transfer is to end early and look whole."""
        return self._fault is not None and self._fault.kind == "truncate"

    def shaped(self, chunks: Iterable[bytes], size: int | None = None, file: Path | None = None) -> Iterator[bytes]:
        """The content of this exchange's transfer as its fault lets it through."""
        self._spent = True

        def act(what: str) -> None:
            if what == "shrink":
                if file is not None and self._fault is not None:
                    os.truncate(file, self._fault.after)
            elif self._sandbox is not None and what == "kill":
                self._sandbox.kill()
            elif self._sandbox is not None and what == "crash":
                self._sandbox.crash()
            elif self._sandbox is not None:
                self._sandbox.expire()

        return shaped(self._fault, chunks, act, size)

    def json(self, status: int, value: object, headers: Mapping[str, str] | None = None) -> None:
        self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def empty(self, status: int) -> None:
        self.answer(status, b"", {})

    def refuse(self, refused: Refused) -> None:
        if refused.body is None:
            self.empty(refused.status)
        elif isinstance(refused.body, str):
            self.answer(refused.status, refused.body.encode(), {"Content-Type": "text/plain"})
        else:
            self.json(refused.status, refused.body)

    def answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """A whole answer. A fault that met no other content of this exchange meets its body."""
        if not self._spent:
            body = b"".join(self.shaped([body], len(body)))
        self._settle(0 if self.connection.muted else status)
        self.connection.answer(status, body, headers)

    def start(self, status: int, headers: Mapping[str, str], length: int | None = None) -> None:
        self._settle(0 if self.connection.muted else status)
        self.connection.start(status, headers, length)


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request leads: the step it counts as, the sandbox it is about, and what answers it."""

    step: Step
    sandbox: str | None
    act: Callable[[Exchange], None]


class Emulator(ABC, Generic[SandboxT]):
    """A provider's API on 127.0.0.1. It listens as soon as it exists and must be closed; ``with`` does.

    ``latency`` seconds pass before each request is handled. Closing ends every sandbox and removes its folder.
    """

    def __init__(self, *, port: int = 0, key: str | None = None, base: Path | None = None) -> None:
        self.key = key or self.new_key()
        self.latency = 0.0
        self.faults = Faults()
        self.webhooks: Webhooks | None = None
        """Where it tells what happens to sandboxes."""
        self._calls = Calls()
        self._lock = threading.Lock()
        self._sandboxes: dict[str, SandboxT] = {}
        self._own_base = base is None
        self._base = Path(tempfile.mkdtemp(prefix="sandboxes-")) if base is None else base
        self._listener = Listener(port, self._serve)
        # Whoever forgets to close it leaves no processes behind.
        atexit.register(self.close)
        self.url = f"http://127.0.0.1:{self._listener.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        atexit.unregister(self.close)
        self._listener.close()
        self.stop_webhooks()
        for sandbox in self.sandboxes():
            sandbox.kill()
        if self._own_base:
            shutil.rmtree(self._base, ignore_errors=True)

    @staticmethod
    def new_key() -> str:
        return secrets.token_hex(20)

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """The environment variables that turn an unmodified SDK to this server."""

    @abstractmethod
    def route(self, request: Request) -> Route:
        """Where this request leads."""

    # Webhooks

    def send_webhooks(self, url: str, secret: str) -> Webhooks:
        """Tell this address from now on what happens to sandboxes; nobody else any more."""
        self.stop_webhooks()
        self.webhooks = Webhooks(url, self.sign_with(secret))
        return self.webhooks

    def stop_webhooks(self) -> None:
        if self.webhooks is not None:
            self.webhooks.close()
        self.webhooks = None

    @abstractmethod
    def sign_with(self, secret: str) -> Sign:
        """How the provider shows that a webhook is from it."""

    @abstractmethod
    def describe_change(self, sandbox: SandboxT, state: str, *, created: bool) -> Mapping[str, object]:
        """The event for a sandbox that entered a state."""

    def _tell(self, sandbox: SandboxT, state: str, *, created: bool = False) -> None:
        if self.webhooks is not None:
            self.webhooks.tell(self.describe_change(sandbox, state, created=created))

    # Sandboxes

    def sandboxes(self) -> list[SandboxT]:
        """All there ever were, the ended ones included."""
        with self._lock:
            return list(self._sandboxes.values())

    def find(self, id: str) -> SandboxT | None:
        with self._lock:
            return self._sandboxes.get(id)

    def keep(self, sandbox: SandboxT) -> SandboxT:
        with self._lock:
            self._sandboxes[sandbox.id] = sandbox
        sandbox.on_change = lambda state: self._tell(sandbox, state)
        self._tell(sandbox, sandbox.RUNNING, created=True)
        return sandbox

    # Calls

    @property
    def calls(self) -> list[Call]:
        """The requests so far, in the order they came."""
        return self._calls.list()

    def count(self, step: Step) -> int:
        return sum(call.step == step for call in self.calls)

    def clear(self) -> None:
        """Forget the requests so far."""
        self._calls.clear()

    # Serving

    def _serve(self, connection: Connection, request: Request) -> None:
        if "/socket.io" in request.path:
            connection.answer(404, b"", {})
            return
        if self.latency:
            time.sleep(self.latency)
        route = self.route(request)
        ticket = self._calls.begin(Call(route.step, request.method, request.path, route.sandbox))
        fault = self.faults.take(route.step)
        sandbox = self.find(route.sandbox) if route.sandbox else None
        exchange = Exchange(connection, request, sandbox, fault, lambda status: self._calls.settle(ticket, status))
        if fault is not None and fault.kind == "refuse":
            if route.step == "upload":
                raise Reset
            # Unread bytes would turn a close into a reset, now and then.
            request.body()
            raise Dropped
        if fault is not None and fault.kind == "status":
            _gateway_answer(exchange, fault)
            return
        connection.muted = fault is not None and fault.kind == "lose"
        try:
            route.act(exchange)
        except Refused as refused:
            exchange.refuse(refused)
        except NotRunning:
            # It ended between the look at its state and the use of it: the connection ends with it.
            raise Dropped from None
        if connection.muted:
            raise Dropped


def _gateway_answer(exchange: Exchange, fault: Fault) -> None:
    """What a proxy in front of the provider says: not JSON, and not the provider's words."""
    for _ in exchange.request.chunks():
        pass
    body = f"<html><head><title>{fault.status}</title></head><body><h1>{fault.status}</h1></body></html>\r\n"
    headers = {"Content-Type": "text/html"}
    if fault.retry_after is not None:
        headers["Retry-After"] = str(fault.retry_after)
    exchange.answer(fault.status, body.encode(), headers)
