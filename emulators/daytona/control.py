"""Daytona's control plane: create, look, start, stop, archive, pause, delete."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from emulators.calls import Step
from emulators.daytona import toolbox
from emulators.daytona.errors import refusal, unauthorized
from emulators.sandboxes import Sandbox
from emulators.server import Emulator, Exchange, Route
from emulators.values import moment, texts
from emulators.webhooks import Sign, sign_as_bearer
from emulators.wire import Request

AUTO_STOP = 15
PAGE = 100
"""How many sandboxes a page of a listing has at most."""
AS = "'setpriv --reuid={uid} --regid={uid} --clear-groups'"
SUDO = """#!/bin/sh
# sudo as far as it is needed: -n -H -u NAME [--preserve-env=A,B] [--] COMMAND…
keep=
while :; do
case $1 in
-n|-H) ;;
-u) user=$2; shift;;
--preserve-env=*) keep=$(echo "${{1#*=}}" | tr , ' ');;
--) shift; break;;
*) break;;
esac
shift
done
case $user in
{cases}*) echo "sudo: a password is required" >&2; exit 1;;
esac
for name in $keep; do
eval "value=\\$$name"
set -- "$name=$value" "$@"
done
exec env -i PATH="$PATH" HOME="$home" USER="$user" LOGNAME="$user" {marker}={id} $as env "$@"
"""


class DaytonaSandbox(Sandbox):
    USER = "daytona"
    MARKER = "DAYTONA_SANDBOX_ID"
    RUNNING = "started"
    GONE = "destroyed"

    name: str
    toolbox: str
    ephemeral = False
    auto_stop: float = AUTO_STOP
    """In minutes; 0: never."""
    minute = 60.0
    active_at = 0.0
    daemon_down = False
    """Its daemon is not there: the proxy before it answers."""
    lives = 1
    """How often its daemon was started."""
    work_handle = -1
    """The working folder, held open: the daemon started in it, and so do its commands, also when it was removed."""

    @property
    def shell(self) -> str:
        """What commands are piped to: zsh, else bash, else what SHELL says, else sh."""
        for name in ("zsh", "bash"):
            if found := shutil.which(name, path=self.path):
                return found
        return self.envs.get("SHELL", "/bin/sh")

    @property
    def path(self) -> str:
        return super().path if self.tools is not None else f"{self.folder / 'sbin'}:{super().path}"

    @property
    def sessions(self) -> list[str]:
        """The shell sessions that clients began; they have no commands here."""
        return self._sessions

    def start_in(self, work: Path) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.users[self.USER].own(work)
        self._sessions: list[str] = []
        self.work, self.work_handle = work, os.open(work, os.O_RDONLY | os.O_DIRECTORY)

    def allow_sudo(self, *names: str) -> None:
        """Let the daemon's user work as these, without a password; by default as nobody else."""
        homes = {name: self.users[name] for name in names}
        cases = "".join(
            f"{name}) home={shlex.quote(str(user.home))}; as={'' if user.uid is None else AS.format(uid=user.uid)};;\n"
            for name, user in homes.items()
        )
        place = self.folder / "sbin/sudo"
        place.parent.mkdir(exist_ok=True)
        place.write_text(SUDO.format(cases=cases, marker=self.MARKER, id=self.id))
        place.chmod(0o755)

    def crash(self) -> None:
        """The proxy before it answers for what was under way."""
        with self._changed:
            self.lives += 1
            self._end_processes()

    def kill(self) -> None:
        super().kill()
        with self._changed:
            handle, self.work_handle = self.work_handle, -1
        if handle >= 0:
            os.close(handle)

    def touch(self) -> None:
        """Note activity: the auto-stop interval starts anew. What its commands do is none."""
        self.active_at = time.time()
        if self.running:
            self.end_in(self.auto_stop * self.minute if self.auto_stop else None)

    def end_in(self, seconds: float | None) -> None:
        """As if its last activity were just so long ago that it is stopped then."""
        if seconds is not None:
            self.active_at = time.time() + seconds - self.auto_stop * self.minute
        super().end_in(seconds)

    def stop(self) -> None:
        if self.ephemeral:
            self.kill()
        else:
            super().stop()

    def archive(self) -> None:
        """Move a stopped sandbox to slow storage; its files stay where they are here."""
        self._leave_for("archived")

    def details(self) -> dict[str, object]:
        """What a client may know about it."""
        state = self.state
        return {
            "id": self.id,
            "organizationId": "emulator",
            "name": self.name,
            "user": self.USER,
            "snapshot": "emulator",
            "env": self.envs,
            "labels": self.metadata,
            "public": False,
            "networkBlockAll": False,
            "kvm": False,
            "target": "local",
            "cpu": 2,
            "gpu": 0,
            "memory": 1,
            "disk": 3,
            "state": state,
            "desiredState": state,
            "autoStopInterval": self.auto_stop,
            "autoArchiveInterval": 10080,
            "autoDeleteInterval": 0 if self.ephemeral else -1,
            "createdAt": moment(self.created_at),
            "updatedAt": moment(self.active_at),
            "lastActivityAt": moment(self.active_at),
            "toolboxProxyUrl": self.toolbox,
        }


class DaytonaEmulator(Emulator[DaytonaSandbox]):
    """Daytona. ``minute`` is how many seconds a minute of an auto-stop interval lasts here."""

    def __init__(
        self, *, port: int = 0, key: str | None = None, base: Path | None = None, minute: float = 60.0
    ) -> None:
        self.minute = minute
        self.page = PAGE
        super().__init__(port=port, key=key, base=base)

    @staticmethod
    def new_key() -> str:
        return f"dtn_{secrets.token_hex(32)}"

    def environment(self) -> dict[str, str]:
        return {"DAYTONA_API_URL": f"{self.url}/api", "DAYTONA_API_KEY": self.key}

    def create(
        self,
        *,
        name: str | None = None,
        auto_stop: float = AUTO_STOP,
        ephemeral: bool = False,
        envs: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        tools: Path | None = None,
        work: str = "",
        uids: Mapping[str, int | None] | None = None,
        sudo: Sequence[str] = (),
    ) -> DaytonaSandbox:
        """A new started sandbox that stops after ``auto_stop`` minutes without activity.

        With ``tools`` its commands find the programs of that folder and no others. ``work`` is the folder that commands
        start in and that relative paths start from, itself relative to the home. ``uids`` say whose files and processes
        those of each user are on this machine (for root alone to choose); ``sudo`` are the users whom its own may become.
        """
        id = str(uuid.uuid4())
        sandbox = DaytonaSandbox(
            id, self._base, envs=envs or {}, metadata=labels or {}, tools=tools, on_timeout="stop", uids=uids
        )
        sandbox.start_in(sandbox.home / work)
        sandbox.allow_sudo(*sudo)
        sandbox.name = name or id
        sandbox.toolbox = f"{self.url}/toolbox"
        sandbox.ephemeral = ephemeral
        sandbox.auto_stop = auto_stop
        sandbox.minute = self.minute
        sandbox.touch()
        return self.keep(sandbox)

    def find(self, id: str) -> DaytonaSandbox | None:
        """By its id, or by the name of one that still is."""
        found = super().find(id)
        if found is not None:
            return found
        return next((one for one in self.sandboxes() if one.name == id and one.state != one.GONE), None)

    def sign_with(self, secret: str) -> Sign:
        return sign_as_bearer(secret)

    def describe_change(self, sandbox: DaytonaSandbox, state: str, *, created: bool) -> dict[str, object]:
        about: dict[str, object] = {"id": sandbox.id, "organizationId": "emulator", "timestamp": moment(time.time())}
        if created:
            return {"event": "sandbox.created", **about, "state": state.upper(), "class": "SMALL"}
        return {"event": "sandbox.state.updated", **about, "oldState": "UNKNOWN", "newState": state.upper()}

    def route(self, request: Request) -> Route:
        service, *parts = [part for part in request.path.split("/") if part] or [""]
        if service == "api" and parts[:1] == ["sandbox"]:
            step, name, act = self._control(request.method, parts[1:])
            found = self.find(name) if name else None
            return Route(step, found.id if found else name, self._with_key(act))
        if service == "toolbox" and parts:
            step, act = toolbox.route(self, request, parts[0], "/" + "/".join(parts[1:]))
            return Route(step, parts[0], self._with_key(act))
        return Route("other", None, self._with_key(_unknown))

    def _with_key(self, act: Callable[[Exchange], None]) -> Callable[[Exchange], None]:
        def checked(exchange: Exchange) -> None:
            given = exchange.request.header("Authorization")
            if not secrets.compare_digest(given.encode(), f"Bearer {self.key}".encode()):
                raise unauthorized()
            act(exchange)

        return checked

    def _control(self, method: str, parts: list[str]) -> tuple[Step, str | None, Callable[[Exchange], None]]:
        if not parts:
            return ("create", None, self._create) if method == "POST" else ("list", None, self._list)
        name, *rest = parts
        step, act = _ACTIONS.get((method, rest[0] if rest else ""), _NO_ACTION)

        def found(exchange: Exchange) -> None:
            sandbox = self.find(name)
            if sandbox is None or sandbox.state == sandbox.GONE:
                raise refusal(404, f"Sandbox with ID or name {name} not found", code="SANDBOX_NOT_FOUND")
            act(exchange, sandbox, rest[1:])

        return step, name, found

    def _create(self, exchange: Exchange) -> None:
        asked = exchange.request.json()
        stop, delete = asked.get("autoStopInterval"), asked.get("autoDeleteInterval")
        sandbox = self.create(
            name=str(asked["name"]) if asked.get("name") else None,
            auto_stop=stop if isinstance(stop, int) else AUTO_STOP,
            ephemeral=delete == 0,
            envs=texts(asked.get("env")),
            labels=texts(asked.get("labels")),
        )
        exchange.json(200, sandbox.details())

    def _list(self, exchange: Exchange) -> None:
        """Those that have all of the labels asked for, page by page."""
        query = exchange.request.query
        wanted = texts(json.loads(query.get("labels") or "{}"))
        found = [one for one in self.sandboxes() if one.state != one.GONE and wanted.items() <= one.metadata.items()]
        if query.get("sort") == "createdAt":
            found.sort(key=lambda one: one.created_at, reverse=query.get("order") == "desc")
        begin, size = int(query.get("cursor") or 0), min(int(query.get("limit") or self.page), self.page)
        following = str(begin + size) if begin + size < len(found) else None
        exchange.json(200, {"items": [one.details() for one in found[begin : begin + size]], "nextCursor": following})


def _info(exchange: Exchange, sandbox: DaytonaSandbox, rest: list[str]) -> None:
    exchange.json(200, sandbox.details())


def _delete(exchange: Exchange, sandbox: DaytonaSandbox, rest: list[str]) -> None:
    sandbox.kill()
    exchange.json(200, sandbox.details())


def _start(exchange: Exchange, sandbox: DaytonaSandbox, rest: list[str]) -> None:
    if sandbox.running:
        raise refusal(400, "Sandbox is already started", code="SANDBOX_INVALID_STATE")
    sandbox.resume()
    sandbox.touch()
    exchange.json(200, sandbox.details())


def _stop(exchange: Exchange, sandbox: DaytonaSandbox, rest: list[str]) -> None:
    if not sandbox.running:
        raise refusal(400, "Sandbox is not started", code="SANDBOX_INVALID_STATE")
    sandbox.stop()
    exchange.json(200, sandbox.details())


def _archive(exchange: Exchange, sandbox: DaytonaSandbox, rest: list[str]) -> None:
    if sandbox.state != "stopped":
        raise refusal(400, "Sandbox is not stopped", code="SANDBOX_INVALID_STATE")
    sandbox.archive()
    exchange.json(200, sandbox.details())


def _pause(exchange: Exchange, sandbox: DaytonaSandbox, rest: list[str]) -> None:
    if not sandbox.running:
        raise refusal(400, "Sandbox is not started", code="SANDBOX_INVALID_STATE")
    sandbox.pause()
    exchange.json(200, sandbox.details())


def _auto_stop(exchange: Exchange, sandbox: DaytonaSandbox, rest: list[str]) -> None:
    if not rest or not rest[0].isdigit():
        raise refusal(400, "Auto-stop interval must be a non-negative integer", code="BAD_REQUEST")
    sandbox.auto_stop = int(rest[0])
    sandbox.touch()
    exchange.json(200, sandbox.details())


def _activity(exchange: Exchange, sandbox: DaytonaSandbox, rest: list[str]) -> None:
    sandbox.touch()
    exchange.empty(201)


def _none(exchange: Exchange, sandbox: DaytonaSandbox, rest: list[str]) -> None:
    _unknown(exchange)


_Action = tuple[Step, Callable[[Exchange, DaytonaSandbox, list[str]], None]]
_NO_ACTION: _Action = ("other", _none)
_ACTIONS: dict[tuple[str, str], _Action] = {
    ("GET", ""): ("info", _info),
    ("DELETE", ""): ("kill", _delete),
    ("POST", "start"): ("start", _start),
    ("POST", "stop"): ("stop", _stop),
    ("POST", "archive"): ("archive", _archive),
    ("POST", "pause"): ("pause", _pause),
    ("POST", "autostop"): ("timeout", _auto_stop),
    ("POST", "last-activity"): ("activity", _activity),
}


def _unknown(exchange: Exchange) -> None:
    raise refusal(404, f"Cannot {exchange.request.method} {exchange.request.path}", code="NOT_FOUND")
