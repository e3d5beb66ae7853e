"""Identify callers by their bearer tokens: those of the environment and ``token_file``, and the named ones of a file,
which is read again when it has changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from sidecar.errors import AccessDenied, BadConfig, TokenExpired
from sidecar.service.access.grants import ADMIN, ANYONE, LOCAL, Caller
from sidecar.service.access.token_file import FileStatus, TokenRecord, parse_token, read_status, read_tokens
from sidecar.service.door.tokens import Tokens

NOBODY = TokenRecord(id="", name="", salt="", digest="0" * 64, memories=(), verbs=())
"""Compared with a token that is not known, so that it takes as long as with one that is."""


class NoValidToken(AccessDenied):
    """There is no valid bearer token."""

    code = "unauthorized"
    default_hint = "Send the header Authorization: Bearer <token>; `memory-sidecar serve` prints where its token is."


class Callers:
    """Everyone who may call."""

    def __init__(
        self, plain: Tokens, path: Path | None = None, *, kept: bool = False, open_to_all: bool = False
    ) -> None:
        """Read the named tokens at ``path``. ``kept``: the plain token is the one kept for this user. ``open_to_all``: a
        call needs no token. Raise ``BadConfig``."""
        self._plain = plain
        self._unnamed = LOCAL if kept else ADMIN
        self._path = path
        self._open_to_all = open_to_all
        self._seen = _look(path)
        self._records = {record.id: record for record in (read_tokens(path) if path else [])}
        self._callers = {record.id: record.build_caller() for record in self._records.values()}
        self.on_problem: Callable[[BadConfig], None] = lambda problem: None
        """Called when the file cannot be used; the tokens that it had last count then."""

    @property
    def names(self) -> list[str]:
        """The names of the named tokens."""
        return sorted(record.name for record in self._records.values())

    @property
    def open_to_all(self) -> bool:
        return self._open_to_all

    def identify(self, authorization: str) -> Caller:
        """Return who sends this value of an ``Authorization`` header. Raise ``NoValidToken`` or ``TokenExpired``."""
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        id = parse_token(token) if scheme.lower() == "bearer" else ""
        if id:
            self.reload()
            record = self._records.get(id, NOBODY)
            if record.accepts(token):
                if record.is_over:
                    raise TokenExpired(f"The token {record.name} has expired.")
                return self._callers[id]
        if self._plain and self._plain.accept(authorization):
            return self._unnamed
        if self._open_to_all and not id:
            return ANYONE
        raise NoValidToken("No valid token.")

    def find_named(self, name: str) -> Caller | None:
        """Return the caller with the token of this name; ``None`` if it was revoked, or has expired."""
        return next(
            (self._callers[one.id] for one in self._records.values() if one.name == name and not one.is_over), None
        )

    def find_current(self, caller: Caller) -> Caller | None:
        """Return the caller with what its token allows now; ``None`` if the token was revoked, or has expired."""
        if not caller.id:
            return caller
        self.reload()
        found = self._callers.get(caller.id)
        return found if found is not None and (found.expires is None or found.expires > time.time()) else None

    def reload(self) -> None:
        """Read the file again if it has changed. If it cannot be used, what it had last still counts, loudly."""
        if self._path is None or (seen := _look(self._path)) == self._seen:
            return
        self._seen, log = seen, structlog.get_logger("sidecar")
        try:
            records = {record.id: record for record in read_tokens(self._path)}
        except BadConfig as problem:
            log.error("the file of named tokens is not used; those that it had last count", **problem.as_dict())
            self.on_problem(problem)
            return
        self._records = records
        self._callers = {record.id: record.build_caller() for record in records.values()}
        log.warning("the named tokens were read again", names=self.names)


def _look(path: Path | None) -> FileStatus | str | None:
    """Return by what a change of the file is recognised: its status, or why it cannot be had."""
    try:
        return read_status(path) if path else None
    except OSError as problem:
        return str(problem.strerror)
