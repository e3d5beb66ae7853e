"""The checks before a service starts, step by step.

``serve`` runs the steps and stops at the first that fails. ``config check`` tries all of them and leaves nothing
behind: no token, no listener, no record of keys in the store.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Awaitable, Callable

from sidecar.engine import Engine
from sidecar.engine.exports.checks import find_check_problem
from sidecar.engine.hot_files import check_hot_limits
from sidecar.errors import BadConfig
from sidecar.host.local_token import check_token_folder, ensure_token
from sidecar.host.loopback import is_loopback
from sidecar.service.access.callers import Callers
from sidecar.service.access.token_file import find_tokens_path
from sidecar.service.door.tls import load_tls
from sidecar.service.door.tokens import Tokens, check_bind, load_tokens
from sidecar.service.settings import AUTO, Service, parse_address
from sidecar.store.encryption.signed_store import SignedStore

BACKLOG = 1024


class StartChecks:
    """Runs the steps and holds their results. With ``trying``, nothing is created, written or kept."""

    def __init__(self, engine: Engine, settings: Service, *, trying: bool = False) -> None:
        self._engine = engine
        self._settings = settings
        self._trying = trying
        self.host, self._port = parse_address(settings.bind)
        self.callers = Callers(Tokens([]))
        self.kept = False
        """Whether the token is the one kept for this user."""
        self.tls: ssl.SSLContext | None = None
        self.listener: socket.socket | None = None
        self.notes: list[str] = []
        """What a person should know and is not necessarily a problem."""

    @property
    def steps(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        """The steps, in order; each raises a ``SidecarError``. The listener comes last: once it exists, the service can
        start."""
        steps = (self.load_tokens, self.load_certificate, self.find_checks, self.prepare_store, self.check_limits)
        return *steps, self.listen

    async def load_tokens(self) -> None:
        tokens = load_tokens(self._settings.token_file)
        self.kept = not tokens and self._settings.token == AUTO and is_loopback(self.host)
        if self.kept and self._trying:
            check_token_folder()
        elif self.kept:
            tokens = Tokens([ensure_token()])
        free = not tokens and not self.kept and is_loopback(self.host)
        self.callers = Callers(tokens, find_tokens_path(self._settings.tokens), kept=self.kept, open_to_all=free)
        check_bind(self.host, given=bool(tokens) or bool(self.callers.names))

    async def load_certificate(self) -> None:
        self.tls = load_tls(self._settings)

    async def find_checks(self) -> None:
        """Raise ``BadConfig`` for a check whose command cannot be started here: it would fail for every export."""
        for place, check in enumerate(self._engine.checks):
            if problem := find_check_problem(check):
                message = f"The check {check.title!r} cannot be started: {problem}"
                hint = "No export of its memories could become the head. Put the program there, or take the check out."
                raise BadConfig(message, hint=hint, at=("checks", place, "command"))

    async def prepare_store(self) -> None:
        store = self._engine.repository.store
        if self._trying and isinstance(store, SignedStore):
            await store.probe()
        else:
            await store.prepare()

    async def check_limits(self) -> None:
        """Raise ``BadConfig`` if a limit is below what a memory in the store already needs."""
        await check_hot_limits(self._engine)

    async def listen(self) -> None:
        """Bind the listening socket. Raise ``BadConfig`` if that fails; when only trying, an address in use is a note."""
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            both = self.host == "::" and socket.has_dualstack_ipv6()
            where = (self.host, self._port)
            listener = socket.create_server(where, family=family, backlog=BACKLOG, dualstack_ipv6=both)
        except OSError as problem:
            taken = problem.errno == errno.EADDRINUSE
            if taken and self._trying:
                self.notes.append(
                    f"{self._settings.bind} is in use: by a service that runs already, or by another program."
                )
                return
            hint = "Stop what listens there, or choose another address: --bind HOST:PORT." if taken else ""
            raise BadConfig(
                f"{self.host}:{self._port} cannot be listened on: {problem.strerror}.",
                hint=hint,
                at=("service", "bind"),
            ) from None
        if self._trying:
            listener.close()
        else:
            self.listener = listener
