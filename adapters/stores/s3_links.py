"""Presigned requests to S3 that a sandbox sends by itself: signed by the sidecar, so that no credentials enter the
sandbox.

A link is a URL with a SigV4 signature over its method, host, key, query, time and every header we name, so that a
server refuses it for anything else. The size and the hash of an upload are such headers, and the server compares the
bytes with that hash. What a link reveals is the id of the access key and, with temporary credentials, their token,
neither of which signs anything without the secret.

Signing sends nothing to the server, so two problems show only when a link is used: that temporary credentials ended
before the link did, and that the region is not the bucket's own. AWS redirects the store itself to the right region; a
signature is valid for one region only.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from adapters.stores.s3_client import S3Connection
from sidecar.ports import Link

LARGEST_PUT = 5 << 30
"""The most bytes that S3 accepts in one request."""
LONGEST = 7 * 24 * 3600
"""The most seconds that a SigV4 signature may last."""

_HEADER_OF = {
    "ContentLength": "Content-Length",
    "ContentType": "Content-Type",
    "ChecksumSHA256": "x-amz-checksum-sha256",
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
}


def sign_get(connection: S3Connection, key: str, seconds: int) -> Link:
    """Return a link that reads one object. Raise ``StoreDenied`` if there are no credentials to sign with."""
    return Link("GET", _sign_url(connection, "get_object", key, {}, seconds), {})


def sign_put(connection: S3Connection, key: str, size: int, sha256: str, seconds: int) -> Link | None:
    """Return a link that writes one object of exactly that size and hash, encrypted as the store's own writes are.

    ``None`` for more bytes than one request may carry. Raise ``StoreDenied`` if there are no credentials to sign with,
    ``ValueError`` for a size or hash that no object has.
    """
    digest = bytes.fromhex(sha256)
    if len(digest) != 32 or size < 0:
        raise ValueError(f"no object has {size} bytes and the SHA-256 {sha256!r}")
    if size > LARGEST_PUT:
        return None
    pinned: dict[str, Any] = {
        "ContentLength": size,
        # Without a content type Python's urllib declares any body a form, and a server or a firewall on the way may
        # read it as such.
        "ContentType": "application/octet-stream",
        "ChecksumSHA256": b64encode(digest).decode(),
        **connection.config.encryption,
    }
    url = _sign_url(connection, "put_object", key, pinned, seconds)
    return Link("PUT", url, {_HEADER_OF[name]: str(value) for name, value in pinned.items()})


def _sign_url(connection: S3Connection, operation: str, key: str, pinned: Mapping[str, Any], seconds: int) -> str:
    """Sign a request. Raise ``ValueError`` if it would last too long."""
    if not 0 < seconds <= LONGEST:
        raise ValueError(f"a link cannot last {seconds} seconds")
    config = connection.config
    with connection.named(key):
        url: str = connection.get_sandbox_client().generate_presigned_url(
            operation,
            Params={"Bucket": config.bucket, "Key": config.prefix + key, **pinned},
            ExpiresIn=seconds,
        )
        return url
