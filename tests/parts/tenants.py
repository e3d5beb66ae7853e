"""A service in this process, with named tokens, to be called request by request without a socket."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sidecar.engine import Engine
from sidecar.engine.heads import fork
from sidecar.service.access.callers import Callers
from sidecar.service.access.grants import ROLES, Verb
from sidecar.service.access.token_file import TokenRecord, add_token, remove_token
from sidecar.service.api.app import make_app
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.core import Sidecar
from sidecar.service.door.door import Hosts
from sidecar.service.door.tokens import Tokens
from sidecar.service.jobs.scheduler import Jobs
from sidecar.service.jobs.tokens import TokenJob
from sidecar.service.settings import Service
from sidecar.service.starts import Starts
from sidecar.wiring import open_provider
from tests.parts.homes import engine_at

ADMIN_TOKEN = "an-admin-token-for-the-tests-0123456789"
EVERY_VERB = tuple(verb for verb in Verb if verb is not Verb.ADMIN)
ROLE = {name: tuple(verb for verb in Verb if verb in verbs) for name, verbs in ROLES.items()}


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["code"])


@dataclass
class House:
    """A service without a socket."""

    folder: Path
    engine: Engine | None = None
    settings: Service = field(default_factory=Service)

    def __post_init__(self) -> None:
        self.store = self.folder / "store"
        self.tokens = self.folder / "tokens.json"
        self.engine = self.engine or engine_at(self.store, open_provider=open_provider)
        self.sidecar = Sidecar(self.engine, self.settings)
        self.jobs = Jobs()
        self.keeper = Keeper(self.sidecar, self.jobs)
        Starts(self.sidecar, self.keeper)
        self.callers = Callers(Tokens([ADMIN_TOKEN]), self.tokens)
        self.watch = TokenJob(self.sidecar, self.keeper, self.callers, self.jobs)
        self.sidecar.find_named = self.callers.find_named
        self.app = make_app(self.sidecar, self.keeper, self.callers, Hosts([], "127.0.0.1"))

    def grant(self, name: str, memories: Sequence[str], verbs: Sequence[Verb], **more: Any) -> str:
        """Make a token and return it."""
        record = TokenRecord(id="", name=name, salt="", digest="", memories=tuple(memories), verbs=tuple(verbs), **more)
        return add_token(self.tokens, record)

    def revoke(self, name: str) -> None:
        assert remove_token(self.tokens, name)

    async def call(
        self,
        method: str,
        path: str,
        token: str = ADMIN_TOKEN,
        body: Any = None,
        *,
        query: str = "",
        headers: Mapping[str, str] | None = None,
        peer: str = "127.0.0.1",
    ) -> Reply:
        """Send a request. ``path`` goes out byte for byte; a body that is not bytes goes as JSON."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        said = {"host": "127.0.0.1", "authorization": f"Bearer {token}" if token else "", **(headers or {})}
        if data:
            said = {"content-type": "application/json", "content-length": str(len(data)), **said}
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(self._scope(method, path, query, said, peer), _receiver(data), send)
        start = next(message for message in sent if message["type"] == "http.response.start")
        return Reply(
            start["status"],
            {name.decode().lower(): value.decode("latin-1") for name, value in start["headers"]},
            b"".join(message.get("body", b"") for message in sent),
        )

    async def listen(
        self, token: str, do: Callable[[], Awaitable[object]], *, last: int | None = None, until: int = 1
    ) -> list[dict[str, Any]]:
        """Return the events that a caller is sent while ``do`` runs, at least ``until``; all there are by then."""
        events: list[dict[str, Any]] = []
        began, enough = asyncio.Event(), asyncio.Event()

        async def send(message: Any) -> None:
            began.set()
            for part in message.get("body", b"").decode().split("\n\n"):
                data = [line[6:] for line in part.split("\n") if line.startswith("data: ")]
                events.extend(map(json.loads, data))
            if len(events) >= until:
                enough.set()

        headers = {"host": "127.0.0.1", "authorization": f"Bearer {token}"}
        headers |= {} if last is None else {"last-event-id": str(last)}
        scope = self._scope("GET", "/v1/events", "", headers, "127.0.0.1")
        listening = asyncio.create_task(self.app(scope, _receiver(b"", ends=False), send))
        await began.wait()
        await asyncio.sleep(0.01)  # the stream has begun to wait
        await do()
        filled = asyncio.create_task(enough.wait())
        await asyncio.wait({filled, listening}, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        filled.cancel()
        await asyncio.sleep(0.05)
        listening.cancel()
        with suppress(asyncio.CancelledError):
            await listening
        return events

    def _scope(self, method: str, path: str, query: str, headers: Mapping[str, str], peer: str) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
            "client": (peer, 1),
            "server": ("127.0.0.1", 80),
        }

    async def copy(self, memory: str, new: str) -> None:
        """Make another memory like one that is there."""
        assert self.engine is not None
        await fork(self.engine.repository, memory, new)

    def digest(self) -> str:
        """A digest of every byte in the store."""
        whole = hashlib.sha256()
        for file in sorted(path for path in self.store.rglob("*") if path.is_file()):
            whole.update(str(file.relative_to(self.store)).encode() + b"\0" + file.read_bytes() + b"\0")
        return whole.hexdigest()


def path(memory: str, *rest: str) -> str:
    return "/".join(["/v1/memories", quote(memory, safe=""), *rest])


def _receiver(data: bytes, *, ends: bool = True) -> Callable[[], Awaitable[Any]]:
    messages = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        if not ends:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    return receive
