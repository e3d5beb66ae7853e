"""Where an S3 store is, and the boto3 client that reaches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from botocore.model import OperationModel
    from mypy_boto3_s3 import S3Client

_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class S3Config:
    """One prefix of one bucket. Credentials are no part of it: boto3 finds them as every AWS tool does."""

    bucket: str
    prefix: str = ""
    """Empty, or ending in '/'."""
    endpoint: str | None = None
    """``None``: whatever boto3 is configured for (``AWS_ENDPOINT_URL_S3``, …), else AWS."""
    region: str | None = None
    path_style: bool | None = None
    """``None``: on everywhere but at AWS."""
    sse: Literal["AES256", "aws:kms"] | None = None
    sse_kms_key_id: str | None = None
    single_writer: bool = False
    profile: str | None = None


def connect(config: S3Config) -> S3Client:
    """Make a client, without talking to the server. Raise what botocore raises."""
    style = config.path_style if config.path_style is not None or config.endpoint is None else True
    client = _client(config, path_style=style)
    if style is None and not _is_aws(client.meta.endpoint_url):
        # The endpoint came from the environment or an AWS config file; boto3 alone knows all the places to look.
        client = _client(config, path_style=True)
    return client


def _client(config: S3Config, *, path_style: bool | None) -> S3Client:
    import boto3  # slow to import: not before an S3 store is really used
    from botocore.config import Config

    # Checksums stay at boto3's default (CRC32 on every upload, checked on download where the server keeps it);
    # AWS_REQUEST_CHECKSUM_CALCULATION=when_required helps with a server that cannot take them.
    style: Literal["auto", "path", "virtual"] = "path" if path_style else "auto" if path_style is None else "virtual"
    client = boto3.Session(profile_name=config.profile).client(
        "s3",
        endpoint_url=config.endpoint,
        region_name=config.region,
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": style},
            retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
            connect_timeout=8,
            read_timeout=60,
            max_pool_connections=8,
            tcp_keepalive=True,
        ),
    )
    client.meta.events.register_last("before-call.s3", _send_body_at_once)
    client.meta.events.register("before-parse.s3", _distrust_cut_answers)
    return client


def _send_body_at_once(params: dict[str, Any], **_: object) -> None:
    """Do not ask the server first whether it wants the body.

    The question costs a round trip with every write, and botocore waits for its answer in a loop that never ends when
    the connection does.
    """
    params["headers"].pop("Expect", None)


def _distrust_cut_answers(response_dict: dict[str, Any], operation_model: OperationModel, **_: object) -> None:
    """Make a failure, one that is tried again, of an answer that was cut within its headers.

    Python's HTTP client takes the end of a connection for the end of the headers, so that such an answer looks whole
    and empty: a store full of memories would list as one without any.
    """
    if not _is_whole(response_dict, asked_for_head=operation_model.http["method"] == "HEAD"):
        response_dict.update(status_code=500, body=b"")


def _is_whole(answer: dict[str, Any], *, asked_for_head: bool) -> bool:
    status, headers, body = answer["status_code"], answer["headers"], answer["body"]
    if status >= 300 and not isinstance(body, bytes):
        return False  # an error with an object's checksum, as rclone sends in a race; botocore's parser trips over it
    if status == 204 or (asked_for_head and status != 200):
        return True  # these have no body and need not tell its length
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return True  # its last chunk says that it is the last
    length = headers.get("content-length", "")
    still_to_come = asked_for_head or not isinstance(body, bytes)
    return bool(length.isdigit() if still_to_come else length == str(len(body)))


def _is_aws(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws"))
