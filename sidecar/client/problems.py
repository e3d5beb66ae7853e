"""What a call can fail with, all in the one tree of ``sidecar.errors``.

    SidecarError
    ├── SidecarProblem        the service answered with an error: its code, message, hint, retryable, and the status
    ├── ServiceUnreachable    no answer came, however often it was tried
    ├── UnexpectedAnswer      something answered, but not a sidecar of this kind
    ├── NotRestored           a conversation did not begin: the restore is incomplete (with the receipt)
    └── NotSaved              a conversation ended, but the head did not move (with the receipt)

No message holds a token, nor anything else of a request but the service's address.
"""

from __future__ import annotations

import http
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar

import httpx
import msgspec

from sidecar.errors import SidecarError
from sidecar.models.answers import Problem
from sidecar.receipts import ExportOutcome, ExportReceipt, RestoreReceipt

PASSING = frozenset({429, 502, 503, 504, *range(520, 525)})
"""Status codes of a service that is busy or restarting, or of a gateway in front of one that does not answer."""


class SidecarProblem(SidecarError):
    """The service answered with an error; ``code`` is the code that it sent."""

    default_hint = ""  # the service sends its own hint

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        hint: str = "",
        retryable: bool = False,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.status = status
        self.retryable = retryable
        self.retry_after = retry_after
        """Seconds the service asked to wait."""


class ServiceUnreachable(SidecarError):
    """No answer came from the service, however often it was tried.

    ``sent`` is False when the request certainly did not arrive.
    """

    code = "service-unreachable"
    retryable = True
    default_hint = (
        "Check that the service runs (`memory-sidecar serve`) and its address (MEMORY_SIDECAR_URL); the same call may safely"
        " be made again."
    )

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class UnexpectedAnswer(SidecarError):
    """Something answered that is not a sidecar, or a much older one."""

    code = "unexpected-answer"
    default_hint = "Check that the address is that of a sidecar, and that it is not much older than this client."


class NotRestored(SidecarError):
    """A conversation did not begin, because the restore is incomplete."""

    code = "not-restored"
    default_hint = "The sandbox is as it was. Restore another snapshot, or begin anyway with require_restore=False."

    def __init__(self, receipt: RestoreReceipt) -> None:
        super().__init__(f"{receipt.memory} was not restored into {receipt.sandbox}. {_describe_reason(receipt)}")
        self.receipt = receipt


class NotSaved(SidecarError):
    """A conversation ended, and its export did not become the head."""

    code = "not-saved"
    default_hint = (
        "Compare it with the head (diff); accept makes it the head, and so does an export with force=True or,"
        " where one guard objects, allow=[its code]."
    )

    waits_hint: ClassVar[str] = (
        "`memory-sidecar accept`, or accept() here, makes it the head; the next exports wait with it until then."
    )

    def __init__(self, receipt: ExportReceipt) -> None:
        kept = f"Snapshot {receipt.snapshot} is kept" if receipt.snapshot else "Nothing was kept"
        self.waits = receipt.outcome is ExportOutcome.PENDING
        """It is kept, and becomes the head once somebody accepts it."""
        super().__init__(
            f"The head of {receipt.memory} did not move: the export was {receipt.outcome}. {_describe_reason(receipt)} {kept}.",
            hint=self.waits_hint if self.waits else "",
        )
        self.receipt = receipt


def _describe_reason(receipt: ExportReceipt | RestoreReceipt) -> str:
    return receipt.reason.headline if receipt.reason else "No reason was given."


@contextmanager
def translate_errors(address: str) -> Iterator[None]:
    """Raise ``ServiceUnreachable`` for any transport error."""
    try:
        yield
    except httpx.TransportError as problem:
        sent = not isinstance(problem, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
        words = f"{type(problem).__name__}: {problem}".removesuffix(": ")
        # Without the cause: the transport's exception refers to the request, whose headers contain the token.
        raise ServiceUnreachable(f"No answer from {address} ({words}).", sent=sent) from None


def build_problem(status: int, headers: httpx.Headers, body: bytes) -> SidecarProblem:
    """Return the error for an unsuccessful answer, from the service or from a proxy on the way."""
    unsaid = {"status": status, "title": "", "detail": "", "code": ""}
    try:
        said = msgspec.convert({**unsaid, **msgspec.json.decode(body, type=dict[str, Any])}, Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = msgspec.convert(unsaid, Problem)
    ours = bool(said.code)
    return SidecarProblem(
        said.detail or said.title or f"The answer was {status} {_name_status(status)}.",
        status=status,
        code=said.code or f"http-{status}",
        hint=said.hint,
        retryable=said.retryable if ours else status in PASSING,
        retry_after=_parse_retry_after(headers.get("Retry-After", "")),
    )


def _name_status(status: int) -> str:
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return "(not a standard status)"


def _parse_retry_after(text: str) -> float | None:
    """Return the seconds of a ``Retry-After`` header, which is a number or a date; ``None`` if it is neither."""
    if text.isascii() and text.isdecimal() and len(text) < 10:
        return float(text)
    try:
        then = parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, (then.replace(tzinfo=then.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
