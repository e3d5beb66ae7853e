"""Links to objects in a bucket, used as a sandbox uses them: by plain HTTP, by someone who may be hostile.

SeaweedFS is the judge, for it checks signatures and checksums as AWS does. moto believes any signature.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import os
import time
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from adapters.stores import s3_client
from adapters.stores.s3 import S3Store
from adapters.stores.s3_links import LARGEST_PUT
from adapters.stores.urls import open_store
from sidecar.errors import StoreDenied, StoreError
from sidecar.ports import Link, Store
from tests.parts.s3_servers import S3Server, free_port
from tests.parts.wire import wire_to

MIB = 1 << 20
PACK = bytes(range(256)) * 20
OTHER = PACK[::-1]
KEY = "memories/m/packs/1.tar.gz"
Become = Callable[[S3Server], None]


@pytest.fixture
def bucket(weed: S3Server, credentials_of: Become) -> str:
    credentials_of(weed)
    return weed.make_bucket(f"b-{uuid.uuid4().hex}")


@pytest.fixture
def store(weed: S3Server, bucket: str) -> Store:
    return open_store(f"s3://{bucket}/p?endpoint={weed.endpoint}")


async def _to_put(store: Store, data: bytes = PACK, key: str = KEY, seconds: int = 60) -> Link:
    link = await store.link_to_put(key, size=len(data), sha256=hashlib.sha256(data).hexdigest(), seconds=seconds)
    assert link is not None
    return link


async def _to_get(store: Store, key: str = KEY, seconds: int = 60) -> Link:
    link = await store.link_to_get(key, seconds=seconds)
    assert link is not None
    return link


async def _held(store: Store, key: str = KEY) -> bytes | None:
    held = await store.get(key)
    return held.data if held else None


def _send(link: Link, body: bytes = b"", *, cut: bool = False) -> tuple[int, bytes]:
    """Send exactly what the link says and that body, whatever sense it makes; status 0 when there was no answer."""
    parts = urlsplit(link.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    try:
        connection.putrequest(link.method, f"{parts.path}?{parts.query}", skip_accept_encoding=True)
        for name, value in link.headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        connection.send(body)
        if cut:
            return 0, b""
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _checksum(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def _signed_headers(link: Link) -> set[str]:
    return {*parse_qs(urlsplit(link.url).query)["X-Amz-SignedHeaders"][0].split(";")}


# What a link is for


@pytest.mark.parametrize("size", [0, 1, 40 * MIB + 7])
async def test_a_pack_goes_up_and_comes_down_by_plain_requests(store: Store, size: int) -> None:
    pack = os.urandom(size)
    up, down = await _to_put(store, pack), await _to_get(store)
    sent = urllib.request.Request(up.url, data=pack, headers=dict(up.headers), method=up.method)
    with urllib.request.urlopen(sent, timeout=30) as answer:
        assert answer.status == 200
    asked = urllib.request.Request(down.url, headers=dict(down.headers), method=down.method)
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert answer.read() == pack
    assert [(info.key, info.size) async for info in store.list("memories/")] == [(KEY, size)]


@pytest.mark.parametrize("key", ["a~b/x", "with blank/x", "ü/日本", "100%/a+b=c&d;e", "%2e%2e/x"])
async def test_any_key_has_its_links(store: Store, key: str) -> None:
    assert _send(await _to_put(store, key=key), PACK)[0] == 200
    assert await _held(store, key) == PACK
    assert _send(await _to_get(store, key)) == (200, PACK)


async def test_a_link_to_what_is_not_there_says_so_when_it_is_used(store: Store) -> None:
    status, said = _send(await _to_get(store))
    assert (status, b"NoSuchKey" in said) == (404, True)


# What a link is not for


def _instead(**changes: str) -> Callable[[Mapping[str, str]], dict[str, str]]:
    """The link's headers with others in their place; an empty one is left out."""
    named = {name.replace("_", "-"): value for name, value in changes.items()}

    def changed(headers: Mapping[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in headers.items() if name.lower() not in named}
        return kept | {name: value for name, value in named.items() if value}

    return changed


_CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(PACK), PACK)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        pytest.param(_instead(), OTHER, id="other bytes"),
        pytest.param(_instead(x_amz_checksum_sha256=_checksum(OTHER)), OTHER, id="other bytes with their checksum"),
        pytest.param(_instead(content_length=str(len(PACK) + 1)), PACK + b"x", id="one byte more"),
        pytest.param(_instead(content_length=str(len(PACK) - 1)), PACK[:-1], id="one byte less"),
        pytest.param(_instead(x_amz_checksum_sha256=""), PACK, id="no checksum"),
        pytest.param(_instead(x_amz_checksum_sha256=""), OTHER, id="other bytes, no checksum"),
        pytest.param(_instead(content_length="", transfer_encoding="chunked"), _CHUNKED, id="no length"),
        pytest.param(_instead(x_amz_sdk_checksum_algorithm="CRC32"), OTHER, id="another kind of checksum"),
        pytest.param(_instead(x_amz_content_sha256="STREAMING-UNSIGNED-PAYLOAD-TRAILER"), OTHER, id="another encoding"),
        pytest.param(_instead(content_type="text/html"), PACK, id="another type"),
        pytest.param(_instead(x_amz_acl="public-read"), PACK, id="for all to read"),
        pytest.param(_instead(x_amz_meta_a="b"), PACK, id="with a note"),
    ],
)
async def test_an_upload_of_anything_else_is_refused(
    store: Store, headers: Callable[[Mapping[str, str]], dict[str, str]], body: bytes
) -> None:
    link = await _to_put(store)
    assert _send(replace(link, headers=headers(link.headers)), body)[0] in (400, 403, 500)
    assert await _held(store) is None
    assert _send(link, PACK)[0] == 200, "the link itself was good"


async def test_an_upload_cannot_be_turned_into_a_copy_of_someone_elses_object(store: Store, bucket: str) -> None:
    await store.put("memories/another/pack", PACK)
    link = await _to_put(store)
    for length in (str(len(PACK)), "0"):
        stolen = _instead(x_amz_copy_source=f"/{bucket}/p/memories/another/pack", content_length=length)
        assert _send(replace(link, headers=stolen(link.headers)), PACK[: int(length)])[0] == 403
    assert await _held(store) is None


async def test_an_upload_that_ends_early_leaves_nothing(store: Store) -> None:
    _send(await _to_put(store), PACK[:-1], cut=True)
    time.sleep(0.5)
    assert await _held(store) is None


async def test_bytes_after_the_last_are_no_part_of_the_object(store: Store) -> None:
    assert _send(await _to_put(store), PACK + b"x")[0] == 200
    assert await _held(store) == PACK


async def test_a_link_ends(store: Store) -> None:
    await store.put(KEY, OTHER)
    up, down = await _to_put(store, seconds=1), await _to_get(store, seconds=1)
    time.sleep(2.2)
    assert _send(up, PACK)[0] == 403
    assert _send(down)[0] == 403
    assert await _held(store) == OTHER


async def test_a_link_is_for_one_object_and_one_method(store: Store) -> None:
    await store.put(KEY, OTHER)
    await store.put("memories/another/pack", OTHER)
    up, down = await _to_put(store), await _to_get(store)
    for link in (up, down):
        body = PACK if link is up else b""
        elsewhere = replace(link, url=link.url.replace("memories/m/packs/1.tar.gz", "memories/another/pack"))
        assert _send(elsewhere, body)[0] == 403
        above = replace(link, url=link.url.replace("packs/1.tar.gz", "packs/../../another/pack"))
        assert _send(above, body)[0] != 200
        for query in ("acl", "tagging", "uploads", "versionId=null", "X-Amz-Expires=600000"):
            assert _send(replace(link, url=f"{link.url}&{query}"), body)[0] in (400, 403), query
    for method in ("GET", "HEAD", "DELETE", "POST"):
        assert _send(replace(up, method=method), PACK)[0] in (403, 405), method
    for method in ("PUT", "HEAD", "DELETE", "POST"):
        assert _send(replace(down, method=method, headers={"Content-Length": "0"}))[0] in (403, 405, 411), method
    sent = replace(down, method="PUT", headers=up.headers)
    assert _send(sent, PACK)[0] == 403
    assert await _held(store) == await _held(store, "memories/another/pack") == OTHER


async def test_a_link_used_again_can_only_write_the_same_bytes(store: Store) -> None:
    """While it lasts it also brings back an object that was deleted: who deletes one waits for its links to end."""
    link = await _to_put(store)
    assert _send(link, PACK)[0] == 200
    assert _send(link, OTHER)[0] == 400
    assert await _held(store) == PACK
    assert _send(link, PACK)[0] == 200
    await store.delete([KEY])
    assert _send(link, PACK)[0] == 200
    assert await _held(store) == PACK


@pytest.mark.parametrize("server_name", ["moto_server", "rclone_server"])
async def test_a_server_that_enforces_less_is_found_out_by_reading(
    server_name: str, request: pytest.FixtureRequest, credentials_of: Become
) -> None:
    server: S3Server = request.getfixturevalue(server_name)
    credentials_of(server)
    bucket = server.make_bucket(f"b-{uuid.uuid4().hex}")
    store = open_store(f"s3://{bucket}/p?endpoint={server.endpoint}&single-writer=true")
    link = await _to_put(store)
    assert _send(link, PACK)[0] == 200
    assert await _held(store) == PACK
    longer = _instead(content_length=str(len(PACK) + 1))
    for key, headers, body in (("other", _instead(), OTHER), ("longer", longer, PACK + b"x")):
        link = await _to_put(store, key=key)
        status, _ = _send(replace(link, headers=headers(link.headers)), body)
        try:
            held = await _held(store, key)
        except StoreError:
            continue  # the server kept the checksum that was promised, and the bytes are not those
        assert held == (body if status == 200 else None)


# How a link is made


async def test_nothing_is_sent_to_sign(weed: S3Server, credentials_of: Become) -> None:
    credentials_of(weed)
    store = open_store(f"s3://bucket?endpoint=http://127.0.0.1:{free_port()}")
    assert (await _to_put(store)).method == "PUT"
    assert (await _to_get(store)).method == "GET"


@pytest.mark.parametrize(
    ("options", "headers"),
    [
        ("", {}),
        ("&sse=AES256", {"x-amz-server-side-encryption": "AES256"}),
        ("&sse=aws:kms", {"x-amz-server-side-encryption": "aws:kms"}),
        (
            "&sse-kms-key-id=key-1",
            {"x-amz-server-side-encryption": "aws:kms", "x-amz-server-side-encryption-aws-kms-key-id": "key-1"},
        ),
    ],
)
async def test_every_header_is_signed_and_encryption_is_among_them(
    weed: S3Server, bucket: str, moto_server: S3Server, options: str, headers: dict[str, str]
) -> None:
    store = open_store(f"s3://{bucket}/p?endpoint={weed.endpoint}{options}")
    link = await _to_put(store)
    assert link.headers == {
        "Content-Length": str(len(PACK)),
        "Content-Type": "application/octet-stream",
        "x-amz-checksum-sha256": _checksum(PACK),
        **headers,
    }
    assert _signed_headers(link) == {"host", *(name.lower() for name in link.headers)}
    for name in headers:
        left_out = {kept: value for kept, value in link.headers.items() if kept != name}
        assert _send(replace(link, headers=left_out), PACK)[0] == 403, name
    down = await _to_get(store)
    assert (down.headers, _signed_headers(down)) == ({}, {"host"})
    # SeaweedFS has no keys to encrypt with here; moto tells what it was asked for.
    moto_server.make_bucket(bucket)
    assert _send(await _to_put(open_store(f"s3://{bucket}/p?endpoint={moto_server.endpoint}{options}")), PACK)[0] == 200
    kept = moto_server.client.head_object(Bucket=bucket, Key=f"p/{KEY}")
    if headers:
        assert kept["ServerSideEncryption"] == headers["x-amz-server-side-encryption"]
        assert kept.get("SSEKMSKeyId") == headers.get("x-amz-server-side-encryption-aws-kms-key-id")


async def test_links_are_for_the_address_that_sandboxes_know(weed: S3Server, bucket: str) -> None:
    with wire_to(weed.endpoint) as wire:
        store = open_store(f"s3://{bucket}/p?endpoint={weed.endpoint}&sandbox-endpoint={wire.endpoint}")
        up, down = await _to_put(store), await _to_get(store)
        assert up.url.startswith(f"{wire.endpoint}/{bucket}/p/{KEY}?")
        assert _send(up, PACK)[0] == 200
        assert _send(down) == (200, PACK)
        elsewhere = replace(down, url=down.url.replace(wire.endpoint, weed.endpoint))
        assert _send(elsewhere)[0] == 403, "signed for one host alone"
        wire.cut_request = lambda sent: True
        assert await _held(store) == PACK, "the store itself does not go that way"


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ("?endpoint=http://s3:1&sandbox-endpoint=https://s3.example.com", "https://s3.example.com/bucket/p/k?"),
        (
            "?endpoint=http://s3:1&path-style=false&sandbox-endpoint=https://s3.example.com",
            "https://bucket.s3.example.com/p/k?",
        ),
        ("?region=me-south-1", "https://bucket.s3.me-south-1.amazonaws.com/p/k?"),
        ("?region=eu-west-1&path-style=true", "https://s3.eu-west-1.amazonaws.com/bucket/p/k?"),
        (
            "?region=eu-west-1&sandbox-endpoint=https://s3.dualstack.eu-west-1.amazonaws.com",
            "https://bucket.s3.dualstack.eu-west-1.amazonaws.com/p/k?",
        ),
        ("?path-style=true&sandbox-endpoint=https://s3.example.com", "https://s3.example.com/bucket/p/k?"),
    ],
)
async def test_links_have_the_bucket_where_the_store_has_it(
    weed: S3Server, credentials_of: Become, options: str, start: str
) -> None:
    credentials_of(weed)
    link = await _to_get(open_store(f"s3://bucket/p{options}"), "k")
    assert link.url.startswith(start)


async def test_profile_and_region_are_the_stores_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text("[profile ops]\nregion = ap-south-1\n")
    (tmp_path / "credentials").write_text("[ops]\naws_access_key_id = OPS\naws_secret_access_key = hunter2\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for more in ("", "&sandbox-endpoint=https://s3.example.com"):
        for region, signed in (("", "ap-south-1"), ("&region=eu-west-1", "eu-west-1")):
            link = await _to_get(open_store(f"s3://bucket?profile=ops{more}{region}"))
            [credential] = parse_qs(urlsplit(link.url).query)["X-Amz-Credential"]
            access_key, _, *scope = credential.split("/")
            assert (access_key, scope) == ("OPS", [signed, "s3", "aws4_request"])


async def test_a_link_tells_no_secret_and_no_log_tells_a_link(
    weed: S3Server, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for link in (await _to_put(store), await _to_get(store)):
        assert weed.secret_key not in f"{link.url} {link.headers}"
        assert "X-Amz-Signature" not in f"{link!r} {link}"
    monkeypatch.setenv("AWS_SESSION_TOKEN", "passing")
    await store.close()
    link = await _to_get(store)
    assert parse_qs(urlsplit(link.url).query)["X-Amz-Security-Token"] == ["passing"]


async def test_no_link_without_credentials() -> None:
    for options in ("", "&sandbox-endpoint=http://127.0.0.1:2"):
        store = open_store(f"s3://bucket?endpoint=http://127.0.0.1:1{options}")
        with pytest.raises(StoreDenied, match="No usable credentials"):
            await _to_get(store)
        with pytest.raises(StoreDenied, match="No usable credentials"):
            await _to_put(store)


@pytest.mark.parametrize(("options", "clients"), [("", 1), ("&sandbox-endpoint=http://127.0.0.1:1", 2)])
async def test_clients_are_made_once(
    weed: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, options: str, clients: int
) -> None:
    made: list[object] = []
    make = s3_client._build_client

    def counted(*arguments: object) -> object:
        made.append(arguments)
        return make(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(s3_client, "_build_client", counted)
    store = open_store(f"s3://{bucket}/p?endpoint={weed.endpoint}{options}")
    for _ in range(3):
        await _to_put(store)
        await _to_get(store)
        await store.get(KEY)
    assert len(made) == clients
    await store.close()
    await _to_get(store)
    assert len(made) == 2 * clients, "a closed store signs again"


async def test_what_no_link_can_be_made_for(store: Store) -> None:
    assert isinstance(store, S3Store)
    digest = hashlib.sha256(PACK).hexdigest()
    assert await store.link_to_put(KEY, size=LARGEST_PUT, sha256=digest, seconds=60)
    assert await store.link_to_put(KEY, size=LARGEST_PUT + 1, sha256=digest, seconds=60) is None
    for size, sha256, seconds in ((-1, digest, 60), (1, digest[:-2], 60), (1, "no hash", 60), (1, digest, 0)):
        with pytest.raises(ValueError):
            await store.link_to_put(KEY, size=size, sha256=sha256, seconds=seconds)
    for seconds in (0, -1, 7 * 24 * 3600 + 1):
        with pytest.raises(ValueError):
            await store.link_to_get(KEY, seconds=seconds)
