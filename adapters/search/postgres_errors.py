"""Translate the errors of Postgres and its driver, and never repeat the password."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from urllib.parse import quote, urlsplit

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict

from sidecar.errors import SearchBusy, SearchDenied, SearchError, SearchUnfit, SearchUnreachable

LONGEST = 300
_DENIED = (errors.InsufficientPrivilege, errors.InvalidPassword, errors.InvalidAuthorizationSpecification)
_GONE = (errors.UndefinedTable, errors.UndefinedColumn, errors.InvalidSchemaName)
_BUSY = (errors.QueryCanceled, errors.LockNotAvailable, errors.DeadlockDetected, errors.SerializationFailure)


class SchemaGone(SearchUnreachable):
    """The tables do not exist any more. The next call creates them again."""


class Redactor:
    """Removes the secrets of a URL from texts."""

    def __init__(self, url: str) -> None:
        about = conninfo_to_dict(url)
        passwords = {
            urlsplit(url).password or "",
            str(about.get("password") or ""),
            str(about.get("sslpassword") or ""),
        }
        written = {quote(password, safe="") for password in passwords}
        self._secrets = sorted({url, *passwords, *written} - {""}, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return text

    def __repr__(self) -> str:
        return "Redacted(…)"


@contextlib.contextmanager
def translate_errors(redacted: Redactor) -> Iterator[None]:
    """Raise a ``SearchError`` for whatever the driver raises."""
    try:
        yield
    except (psycopg.Error, OSError, TimeoutError) as problem:
        # Without the cause: its text, or its arguments, could contain the URL.
        raise _translate_error(problem, redacted) from None


def _translate_error(problem: Exception, redacted: Redactor) -> SearchError:
    if isinstance(problem, TimeoutError):
        return SearchUnreachable("Postgres did not answer in time.")
    if not isinstance(problem, psycopg.Error):
        return SearchUnreachable(f"Postgres cannot be reached: {redacted(str(problem))[:LONGEST]}.")
    lines = (problem.diag.message_primary or str(problem)).strip().splitlines() or [type(problem).__name__]
    said = redacted(lines[0])[:LONGEST].rstrip(".")
    if isinstance(problem, _DENIED):
        return SearchDenied(f"Postgres refuses: {said}.")
    if isinstance(problem, _GONE):
        return SchemaGone(f"The tables in Postgres are gone: {said}.", hint="They are made again by the next call.")
    if isinstance(problem, _BUSY):
        return SearchBusy(f"Postgres took too long: {said}.")
    if isinstance(problem, errors.UndefinedObject):
        return SearchUnfit(f"Postgres says: {said}.", hint="Is [postgres] text_search the name of one that it has?")
    if problem.sqlstate is None or problem.sqlstate[:2] in ("08", "53", "57"):
        return SearchUnreachable(f"Postgres cannot be used: {said}.")
    return SearchError(f"Postgres failed: {said} ({problem.sqlstate}).")
