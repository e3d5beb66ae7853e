"""E2B's control plane: create, connect, look, time out, pause, kill."""

from __future__ import annotations

import secrets
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from emulators.calls import Step
from emulators.e2b import envd
from emulators.sandboxes import OnTimeout, Sandbox, User
from emulators.server import Emulator, Exchange, Refused, Route
from emulators.values import moment, texts
from emulators.webhooks import Sign, sign_as_e2b
from emulators.wire import Request

ENVD_VERSION = "0.6.13"
DEFAULT_TIMEOUT = 300
PAGE = 100
"""How many sandboxes a page of a listing has at most."""


class E2BSandbox(Sandbox):
    USER = "user"
    MARKER = "E2B_SANDBOX_ID"
    RUNNING = "running"
    GONE = "killed"

    token: str
    template: str
    default_user = USER
    """Who is meant where nobody is named."""
    told_work: Path

    def tell(self) -> None:
        """Tell the daemon its default user and working folder, as happens when a sandbox is started or resumed."""
        self.default_user, self.work = self.USER, self.told_work

    def crash(self) -> None:
        """What it was told is gone with it: until it is told again it takes root and / (here: the sandbox's folder)."""
        super().crash()
        self.default_user, self.work = "root", self.folder

    def resume(self) -> None:
        super().resume()
        self.tell()

    def user_named(self, name: str) -> User | None:
        """The user of a call; ``None`` when there is no such user."""
        return self.users.get(name or self.default_user)

    def identity(self) -> dict[str, object]:
        """What a client needs to reach it."""
        return {
            "sandboxID": self.id,
            "templateID": self.template,
            "clientID": "emulator",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self.token,
            "trafficAccessToken": None,
            "domain": None,
        }

    def details(self) -> dict[str, object]:
        """What a client may know about it."""
        return {
            **self.identity(),
            "alias": self.template,
            "startedAt": moment(self.created_at),
            "endAt": moment(self.ends_at or self.created_at),
            "cpuCount": 2,
            "memoryMB": 512,
            "diskSizeMB": 1024,
            "state": self.state,
            "metadata": self.metadata,
            "lifecycle": {"onTimeout": self.on_timeout, "autoResume": False},
        }


class E2BEmulator(Emulator[E2BSandbox]):
    """E2B. ``gzip`` says whether downloads are compressed on the fly, as the real daemon does when a client accepts it."""

    def __init__(self, *, port: int = 0, key: str | None = None, base: Path | None = None, gzip: bool = True) -> None:
        self.gzip = gzip
        self.page = PAGE
        self._creating = threading.Lock()
        self._created: dict[str, str] = {}
        """The sandboxes that were created under an idempotency key."""
        super().__init__(port=port, key=key, base=base)

    @staticmethod
    def new_key() -> str:
        return f"e2b_{secrets.token_hex(20)}"

    def environment(self) -> dict[str, str]:
        return {"E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url, "E2B_API_KEY": self.key}

    def create(
        self,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        on_timeout: OnTimeout = "kill",
        envs: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        tools: Path | None = None,
        template: str = "base",
        work: str = "",
        uids: Mapping[str, int | None] | None = None,
    ) -> E2BSandbox:
        """A new running sandbox. With ``tools`` its commands find the programs of that folder and no others.

        ``work`` is the folder that commands start in, relative to the home. ``uids`` say whose files and processes those of
        each user are on this machine (for root alone to choose).
        """
        id = "i" + secrets.token_hex(10)
        own = {"E2B_SANDBOX": "true", "E2B_TEMPLATE_ID": template}
        sandbox = E2BSandbox(
            id,
            self._base,
            envs={**own, **(envs or {})},
            metadata=metadata or {},
            tools=tools,
            on_timeout=on_timeout,
            uids=uids,
        )
        sandbox.told_work = sandbox.home / work
        sandbox.told_work.mkdir(parents=True, exist_ok=True)
        sandbox.tell()
        sandbox.token = "ea_" + secrets.token_hex(16)
        sandbox.template = template
        sandbox.end_in(timeout)
        return self.keep(sandbox)

    def sign_with(self, secret: str) -> Sign:
        return sign_as_e2b(secret)

    def describe_change(self, sandbox: E2BSandbox, state: str, *, created: bool) -> dict[str, object]:
        what = "created" if created else {"running": "resumed"}.get(state, state)
        return {
            "version": "v2",
            "id": str(uuid.uuid4()),
            "type": f"sandbox.lifecycle.{what}",
            "timestamp": moment(time.time()),
            "eventData": {"sandbox_metadata": sandbox.metadata},
            "sandboxId": sandbox.id,
            "sandboxExecutionId": str(uuid.uuid4()),
            "sandboxTemplateId": sandbox.template,
            "sandboxTeamId": "emulator",
        }

    def route(self, request: Request) -> Route:
        parts = [part for part in request.path.split("/") if part]
        if parts[:1] == ["v2"]:
            parts = parts[1:]
        if parts[:1] == ["sandboxes"]:
            step, id, act = self._control(request.method, parts[1:])
            return Route(step, id, self._with_key(act))
        return envd.route(self, request)

    def _with_key(self, act: Callable[[Exchange], None]) -> Callable[[Exchange], None]:
        def checked(exchange: Exchange) -> None:
            given = exchange.request.header("X-API-Key")
            if not given:
                raise refusal(401, "API key is missing")
            if not secrets.compare_digest(given, self.key):
                raise refusal(401, "Invalid API key")
            act(exchange)

        return checked

    def _control(self, method: str, parts: list[str]) -> tuple[Step, str | None, Callable[[Exchange], None]]:
        id = parts[0] if parts else None
        known: dict[tuple[str, str], tuple[Step, Callable[[Exchange, E2BSandbox], None]]] = {
            ("GET", ""): ("info", self._info),
            ("DELETE", ""): ("kill", self._kill),
            ("POST", "connect"): ("connect", self._connect),
            ("POST", "timeout"): ("timeout", self._timeout),
            ("POST", "pause"): ("pause", self._pause),
        }
        if id is None:
            return ("create", None, self._create) if method == "POST" else ("list", None, self._list)
        step, act = known.get((method, "/".join(parts[1:])), ("other", _unknown))

        def found(exchange: Exchange) -> None:
            sandbox = self.find(id)
            if sandbox is None or sandbox.state == sandbox.GONE:
                raise refusal(404, f"Sandbox \"{id}\" doesn't exist or you don't have access to it")
            act(exchange, sandbox)

        return step, id, found

    def _create(self, exchange: Exchange) -> None:
        asked, key = exchange.request.json(), exchange.request.header("Idempotency-Key")
        with self._creating:
            if key and (before := self.find(self._created.get(key, ""))) is not None:
                exchange.json(201, before.identity())  # as it was answered before, whatever became of it
                return
            sandbox = self._create_as_asked(asked)
            self._created |= {key: sandbox.id} if key else {}
        exchange.json(201, sandbox.identity())

    def _create_as_asked(self, asked: Mapping[str, object]) -> E2BSandbox:
        """Every template exists, but those whose names begin with "missing"."""
        if str(asked.get("templateID") or "base").startswith("missing"):
            raise refusal(404, f"template '{asked['templateID']}' not found")
        return self.create(
            timeout=_number(asked.get("timeout"), DEFAULT_TIMEOUT),
            on_timeout="pause" if asked.get("autoPause") else "kill",
            envs=texts(asked.get("envVars")),
            metadata=texts(asked.get("metadata")),
            template=str(asked.get("templateID") or "base"),
        )

    def _list(self, exchange: Exchange) -> None:
        """Those that have all of the metadata asked for, page by page: the header names where the next one begins."""
        query = exchange.request.query
        states = set(query.get("state", "running,paused").split(","))
        wanted = {unquote(name): unquote(value) for name, value in parse_qsl(query.get("metadata", ""))}
        found = [one for one in self.sandboxes() if one.state in states and wanted.items() <= one.metadata.items()]
        found.sort(key=lambda one: one.created_at, reverse=query.get("order") != "asc")
        begin, size = int(query.get("nextToken") or 0), min(int(query.get("limit") or self.page), self.page)
        more = {"X-Next-Token": str(begin + size)} if begin + size < len(found) else {}
        exchange.json(200, [one.details() for one in found[begin : begin + size]], more)

    def _info(self, exchange: Exchange, sandbox: E2BSandbox) -> None:
        exchange.json(200, sandbox.details())

    def _kill(self, exchange: Exchange, sandbox: E2BSandbox) -> None:
        sandbox.kill()
        exchange.empty(204)

    def _connect(self, exchange: Exchange, sandbox: E2BSandbox) -> None:
        timeout = _number(exchange.request.json().get("timeout"), DEFAULT_TIMEOUT)
        resumed = sandbox.state == "paused"
        if resumed:
            sandbox.resume()
            sandbox.end_in(timeout)
        else:
            sandbox.lengthen(timeout)
        exchange.json(201 if resumed else 200, sandbox.identity())

    def _timeout(self, exchange: Exchange, sandbox: E2BSandbox) -> None:
        if not sandbox.running:
            raise refusal(404, f"Sandbox {sandbox.id} is not running")
        sandbox.end_in(_number(exchange.request.json().get("timeout"), DEFAULT_TIMEOUT))
        exchange.empty(204)

    def _pause(self, exchange: Exchange, sandbox: E2BSandbox) -> None:
        if not sandbox.running:
            raise refusal(409, f"Sandbox {sandbox.id} is already paused")
        sandbox.pause()
        exchange.empty(204)


def refusal(status: int, message: str) -> Refused:
    return Refused(status, {"code": status, "message": message})


def _unknown(exchange: Exchange, sandbox: E2BSandbox) -> None:
    raise refusal(404, "no such endpoint")


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default
