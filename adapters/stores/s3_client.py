"""Where an S3 store is, and the boto3 client for it."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from adapters.stores.s3_errors import translate_s3_errors
from sidecar.errors import StoreMissing
from sidecar.host.values import dataclass

if TYPE_CHECKING:
    from botocore.model import OperationModel
    from mypy_boto3_s3 import S3Client

CONNECTIONS = 32
"""Connections that are kept open at most. Reading many heads, and a race of writers, use so many."""
_ATTEMPTS = 4
_NAMESPACED_ERROR = re.compile(rb"""(\A\s*(?:<\?xml[^>]*\?>\s*)?<Error)\s+xmlns=(?:"[^"]*"|'[^']*')""")
_Style = Literal["path", "virtual"]


@dataclass(frozen=True, slots=True)
class S3Config:
    """One prefix of one bucket. Credentials are not part of it: boto3 finds them as every AWS tool does."""

    bucket: str
    prefix: str = ""
    """Empty, or ending in '/'."""
    endpoint: str | None = None
    """``None``: whatever boto3 is configured for (``AWS_ENDPOINT_URL_S3``, …), else AWS."""
    sandbox_endpoint: str | None = None
    """Where sandboxes reach the same server; links are signed for that host. ``None``: the same as the store."""
    region: str | None = None
    path_style: bool | None = None
    """``None``: on everywhere except at AWS."""
    sse: Literal["AES256", "aws:kms"] | None = None
    sse_kms_key_id: str | None = None
    single_writer: bool = False
    profile: str | None = None

    @property
    def encryption(self) -> dict[str, Any]:
        """The parameters of PutObject and similar operations; boto3's types want each of them spelled out, hence the
        ``Any``."""
        asked = {"ServerSideEncryption": self.sse, "SSEKMSKeyId": self.sse_kms_key_id}
        return {name: value for name, value in asked.items() if value}


class HeldBackBody(io.BytesIO):
    """The body of a write whose last byte is delayed until it is released, once the request is being sent.

    botocore reads a body several times: for its checksum, for the signature, and to send it.
    """

    def __init__(self, data: bytes, reached: Callable[[], object], go: threading.Event) -> None:
        super().__init__(data)
        self._size, self._reached, self._go = len(data), reached, go
        self._sending = False

    def send(self) -> None:
        """From now on the request is being sent, so the last byte is delayed."""
        self._sending = True

    def read(self, size: int | None = -1, /) -> bytes:
        """Return bytes; before the last one, report that it is reached and wait for the release."""
        if self._sending and not self._go.is_set():
            if self.tell() < self._size - 1:
                return super().read(self._size - 1 - self.tell())
            self._reached()
            self._go.wait(LONGEST_WAIT)
        return super().read(size)


LONGEST_WAIT = 5.0
_SENT_LATE = threading.local()
"""The body with a delayed last byte that a thread is about to send."""


@contextmanager
def send_late(body: HeldBackBody) -> Iterator[None]:
    """Inside this block, the last byte of this thread's next write of ``body`` is delayed."""
    _SENT_LATE.body = body
    try:
        yield
    finally:
        _SENT_LATE.body = None


def _hold_back_body(**_: object) -> None:
    """Tell the delayed body, if this thread sends one, that sending begins."""
    body: HeldBackBody | None = getattr(_SENT_LATE, "body", None)
    if body is not None:
        body.send()


class S3Connection:
    """The clients of one store, created on first use and kept until closed. Safe to use from several threads."""

    def __init__(self, config: S3Config) -> None:
        self.config = config
        self._own: S3Client | None = None
        self._for_sandboxes: S3Client | None = None
        self._connecting = threading.RLock()

    @property
    def server(self) -> str:
        """The server's address, for people and to tell servers apart. Never contains credentials."""
        address = self._own.meta.endpoint_url if self._own else self.config.endpoint
        if not address:
            return "S3"
        parts = urlsplit(address)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    def client(self) -> S3Client:
        """Return the client that the store itself uses. Raise ``StoreMissing`` if the address is not valid."""
        with self._connecting:
            if self._own is None:
                try:
                    self._own = make_client(self.config)
                except ValueError as error:  # botocore's error for an address it cannot parse
                    raise StoreMissing(f"{error}.", hint="Correct ?endpoint=… or AWS_ENDPOINT_URL.") from error
            return self._own

    def get_sandbox_client(self) -> S3Client:
        """Return the client that signs requests which sandboxes will send."""
        with self._connecting:
            if self._for_sandboxes is None:
                self._for_sandboxes = _make_sandbox_client(self.config, self.client())
            return self._for_sandboxes

    def named(self, key: str) -> AbstractContextManager[None]:
        """Inside this block every failure becomes the ``StoreError`` that says what to do."""
        return translate_s3_errors(self.config.bucket, lambda: self.server, key, encryption=self.config.sse)

    def close(self) -> None:
        with self._connecting:
            for client in (self._own, self._for_sandboxes):
                if client is not None:  # closing the same client twice is harmless
                    client.close()
            self._own = self._for_sandboxes = None


def make_client(config: S3Config) -> S3Client:
    """Create a client, without talking to the server. Raise what botocore raises."""
    if config.path_style is not None:
        return _build_client(config, config.endpoint, "path" if config.path_style else "virtual")
    # At AWS never "auto": requests go the same way, but links would be for s3.amazonaws.com whatever the region, which
    # newer regions do not answer and a new bucket only redirects from, to a host the link is not signed for.
    client = _build_client(config, config.endpoint, "path" if config.endpoint else "virtual")
    if config.endpoint is None and not _is_aws(client.meta.endpoint_url):
        # The endpoint came from the environment or an AWS config file; only boto3 knows all the places to look.
        client = _build_client(config, None, "path")
    return client


def _make_sandbox_client(config: S3Config, own: S3Client) -> S3Client:
    """Return the client for links: for the sandboxes' address if there is one, else the store's own."""
    if config.sandbox_endpoint is None:
        return own
    # The store's own style, not one guessed from this address: the same server has to understand it.
    style: _Style = own.meta.config.s3["addressing_style"]  # type: ignore[attr-defined]  # not in boto3's types
    return _build_client(config, config.sandbox_endpoint, style)


def _build_client(config: S3Config, endpoint: str | None, style: _Style) -> S3Client:
    """Create a boto3 client with the sidecar's timeouts, retries and event handlers."""
    import boto3  # slow to import: not before an S3 store is really used
    from botocore.config import Config

    # Checksums stay at boto3's default (CRC32 on every upload, checked on download if the server keeps it);
    # AWS_REQUEST_CHECKSUM_CALCULATION=when_required helps with a server that does not accept them.
    client = boto3.Session(profile_name=config.profile).client(
        "s3",
        endpoint_url=endpoint,
        region_name=config.region,
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": style},
            retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
            connect_timeout=8,
            read_timeout=60,
            max_pool_connections=CONNECTIONS,
            tcp_keepalive=True,
        ),
    )
    client.meta.events.register_last("before-call.s3", _send_body_at_once)
    client.meta.events.register("before-call.s3.DeleteObjects", _set_content_type)
    client.meta.events.register("before-send.s3.PutObject", _hold_back_body)
    # Both before botocore's own handlers, which look into the body for errors; and the body's length is compared as it
    # came.
    client.meta.events.register_first("before-parse.s3", _fail_truncated_answers)
    client.meta.events.register_first("before-parse.s3", _strip_error_namespace)
    return client


def _set_content_type(params: dict[str, Any], **_: object) -> None:
    """Declare the list of objects to delete as XML: Supabase Storage ignores a body that is not declared."""
    params["headers"].setdefault("Content-Type", "application/xml")


def _strip_error_namespace(response_dict: dict[str, Any], **_: object) -> None:
    """Let botocore read the code of an error that is in an XML namespace, as Supabase Storage sends them.

    botocore compares the document's name with ``Error`` as it is, and without a code a missing object could be
    anything.
    """
    body = response_dict["body"]
    if isinstance(body, bytes):
        response_dict["body"] = _NAMESPACED_ERROR.sub(rb"\1", body, count=1)


def _send_body_at_once(params: dict[str, Any], **_: object) -> None:
    """Do not ask the server first whether it wants the body (``Expect: 100-continue``).

    The question costs a round trip with every write, and botocore waits for its answer in a loop that never ends if the
    connection does.
    """
    params["headers"].pop("Expect", None)


def _fail_truncated_answers(response_dict: dict[str, Any], operation_model: OperationModel, **_: object) -> None:
    """Turn an answer that was cut within its headers into a failure that is retried.

    Python's HTTP client takes the end of a connection for the end of the headers, so such an answer looks complete and
    empty: a store full of memories would be listed as one without any.
    """
    if not _is_whole(response_dict, asked_for_head=operation_model.http["method"] == "HEAD"):
        response_dict.update(status_code=500, body=b"")


def _is_whole(answer: dict[str, Any], *, asked_for_head: bool) -> bool:
    """Return whether an answer has the length that its headers announce."""
    status, headers, body = answer["status_code"], answer["headers"], answer["body"]
    if status >= 300 and not isinstance(body, bytes):
        return False  # an error with an object's checksum, as rclone sends in a race; botocore's parser fails on it
    if status == 204 or (asked_for_head and status != 200):
        return True  # these have no body and need not give its length
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return True  # its last chunk says that it is the last
    length = headers.get("content-length", "")
    still_to_come = asked_for_head or not isinstance(body, bytes)
    return bool(length.isdigit() if still_to_come else length == str(len(body)))


def _is_aws(endpoint: str) -> bool:
    """Return whether an endpoint is one of AWS's."""
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws"))
