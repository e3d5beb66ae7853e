"""The S3 store against servers and networks that lie, break, refuse and forget."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import adapters
from adapters.stores import s3_client, s3_single_writer
from adapters.stores.s3 import S3Store
from adapters.stores.s3_conditions import RACES, WRITERS
from adapters.stores.s3_errors import Unsupported, WriteConflict, translate_code
from adapters.stores.urls import open_store
from sidecar.errors import (
    EncryptionRefused,
    KeyRefused,
    ObjectMissing,
    SecondWriter,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreMissing,
    StoreUnreachable,
    StoreUnsafe,
    SwapLost,
)
from sidecar.ports import Store
from sidecar.wiring import open_repository
from tests.parts.homes import claude_mem_home, empty_home, memory_tree, observe, run_cli
from tests.parts.keys import ENCRYPTED
from tests.parts.s3_servers import S3Server, comparing_first, free_port
from tests.parts.wire import Wire, wire_to

PROJECT = Path(adapters.__file__).parents[1]
MIB = 1 << 20
Become = Callable[[S3Server], None]


def _url(server: S3Server, bucket: str, endpoint: str = "", **options: str) -> str:
    more = "".join(f"&{name.replace('_', '-')}={value}" for name, value in options.items())
    region = "" if "region" in options else "&region=us-east-1"
    return f"s3://{bucket}/p?endpoint={endpoint or server.endpoint}{region}{more}"


@pytest.fixture
def on_weed(weed: S3Server, credentials_of: Become) -> str:
    credentials_of(weed)
    return weed.make_bucket(f"b-{uuid.uuid4().hex}")


@pytest.fixture
def on_moto(moto_server: S3Server, credentials_of: Become) -> str:
    credentials_of(moto_server)
    return moto_server.make_bucket(f"b-{uuid.uuid4().hex}")


@pytest.fixture
def on_rclone(rclone_server: S3Server, credentials_of: Become) -> str:
    credentials_of(rclone_server)
    return rclone_server.make_bucket(f"b-{uuid.uuid4().hex}")


@pytest.fixture
def on_supabase(supabase_server: S3Server, credentials_of: Become) -> str:
    credentials_of(supabase_server)
    return supabase_server.make_bucket(f"b-{uuid.uuid4().hex}")


@pytest.fixture
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_client, "_ATTEMPTS", 1)


@pytest.fixture
def wire(weed: S3Server) -> Iterator[Wire]:
    with wire_to(weed.endpoint) as made:
        yield made


async def _keys(store: Store, prefix: str = "") -> list[str]:
    return [info.key async for info in store.list(prefix)]


async def _read(store: Store, key: str) -> bytes:
    return b"".join([chunk async for chunk in store.stream(key)])


def _said(error: StoreError) -> str:
    return f"{error.message} {error.hint}"


# Conditional writes


async def test_a_server_that_ignores_conditions_is_refused(rclone_server: S3Server, on_rclone: str) -> None:
    store = open_store(_url(rclone_server, on_rclone))
    with pytest.raises(StoreUnsafe) as refused:
        await store.prepare()
    assert refused.value.code == "store-no-conditional-writes"
    assert "single-writer=true" in refused.value.hint
    assert await _keys(store) == [], "the probe is gone, and nothing claims that this store is safe"


async def test_a_single_writer_may_use_it(rclone_server: S3Server, on_rclone: str, tmp_path: Path) -> None:
    store = open_store(_url(rclone_server, on_rclone, single_writer="true"))
    await store.prepare()
    first = await store.swap("m/head", b"1", expected=None)
    with pytest.raises(SwapLost):
        await store.swap("m/head", b"2", expected=None)

    async def race(who: int) -> bool:
        try:
            await store.swap("m/head", f"racer {who}".encode(), expected=first)
        except SwapLost:
            return False
        return True

    assert sum(await asyncio.gather(*map(race, range(16)))) == 1
    big = tmp_path / "big"
    big.write_bytes(os.urandom(33 * MIB))
    await store.put("m/big", big)
    assert await _read(store, "m/big") == big.read_bytes()
    assert await store.purge("m/") == 2
    assert await _keys(store) == ["writer.json"]
    await store.close()
    assert await _keys(store) == [], "it has let go"


async def test_the_proof_is_remembered_and_not_asked_for_again(weed: S3Server, on_weed: str) -> None:
    await open_store(_url(weed, on_weed)).prepare()
    marker = json.loads(weed.client.get_object(Bucket=on_weed, Key="p/store.json")["Body"].read())
    raced = marker.pop("raced")
    assert marker == {"format": 1, "conditional_writes": True, "server": weed.endpoint}
    assert (raced["writers"], raced["races"]) == (WRITERS, RACES)
    with wire_to(weed.endpoint) as wire:
        wire.cut_request = lambda sent: sent.startswith((b"PUT", b"POST", b"DELETE"))
        told = {**marker, "server": wire.endpoint, "raced": raced}
        weed.client.put_object(Bucket=on_weed, Key="p/store.json", Body=json.dumps(told).encode())
        store = open_store(_url(weed, on_weed, wire.endpoint))
        await store.prepare()
        assert f"{RACES} races of {WRITERS} writers, each with one winner" in await store.safety()


@pytest.mark.parametrize("raced", [None, {"races": 3, "writers": 2, "at": "2026-01-01"}, "yes"])
async def test_a_store_of_a_version_that_did_not_race_is_asked_again(
    weed: S3Server, on_weed: str, raced: object
) -> None:
    marker = {"format": 1, "conditional_writes": True, "server": weed.endpoint} | ({"raced": raced} if raced else {})
    weed.client.put_object(Bucket=on_weed, Key="p/store.json", Body=json.dumps(marker).encode())
    await open_store(_url(weed, on_weed)).prepare()
    told = json.loads(weed.client.get_object(Bucket=on_weed, Key="p/store.json")["Body"].read())
    assert told["raced"]["races"] == RACES


async def test_a_server_that_compares_and_then_writes_is_found_out(
    moto_server: S3Server, credentials_of: Become
) -> None:
    credentials_of(moto_server)
    with comparing_first() as server:
        store = open_store(_url(server, "bucket"))
        with pytest.raises(StoreUnsafe, match="compares before it writes, but not in one step") as refused:
            await store.prepare()
        assert "single-writer=true" in refused.value.hint
        assert await _keys(store) == [], "nothing claims that this store is safe"


async def test_what_the_server_does_is_proved_at_the_first_write_and_then_remembered(
    weed: S3Server, on_weed: str
) -> None:
    with wire_to(weed.endpoint) as wire:
        asked = []
        wire.answer_after = 0.1
        wire.cut_request = lambda sent: asked.append(sent.count(b" HTTP/1.1\r\n")) is not None
        counts = []
        for _ in range(2):
            asked.clear()
            await open_store(_url(weed, on_weed, wire.endpoint)).prepare()
            counts.append(sum(asked))
        assert counts[0] > 50 and counts[1] <= 4, counts


async def test_a_proof_from_another_server_does_not_count(rclone_server: S3Server, on_rclone: str) -> None:
    marker = json.dumps({"format": 1, "conditional_writes": True, "server": "https://s3.amazonaws.com"})
    rclone_server.client.put_object(Bucket=on_rclone, Key="p/store.json", Body=marker.encode())
    with pytest.raises(StoreUnsafe):
        await open_store(_url(rclone_server, on_rclone)).prepare()


async def test_a_store_of_a_later_format_is_left_alone(moto_server: S3Server, on_moto: str) -> None:
    marker = b'{"format": 2, "conditional_writes": true}'
    moto_server.client.put_object(Bucket=on_moto, Key="p/store.json", Body=marker)
    with pytest.raises(StoreError, match="format is 2"):
        await open_store(_url(moto_server, on_moto)).prepare()


async def test_our_own_success_with_a_lost_answer_is_not_taken_for_a_lost_race(
    weed: S3Server, on_weed: str, wire: Wire
) -> None:
    store = open_store(_url(weed, on_weed, wire.endpoint))
    assert await store.get("m/head") is None
    wire.lose_answers = 1
    version = await store.swap("m/head", b"mine", expected=None)
    assert wire.lose_answers == 0
    wire.lose_answers = 1
    version = await store.swap("m/head", b"mine too", expected=version)
    found = await store.get("m/head")
    assert found is not None
    assert (found.data, found.version) == (b"mine too", version)


@pytest.mark.usefixtures("one_attempt")
async def test_a_swap_that_gets_no_answer_finds_out_whether_it_won(weed: S3Server, on_weed: str, wire: Wire) -> None:
    store = open_store(_url(weed, on_weed, wire.endpoint))
    wire.lose_answers = 1
    assert await store.swap("m/head", b"mine", expected=None)
    wire.cut_request = lambda sent: sent.startswith(b"PUT")
    with pytest.raises(StoreUnreachable, match="No answer"):
        await store.swap("m/other", b"mine", expected=None)
    assert await store.get("m/other") is None


# Transfers that break


@pytest.mark.usefixtures("one_attempt")
async def test_a_body_that_ends_early_is_never_taken_for_the_whole(weed: S3Server, on_weed: str, wire: Wire) -> None:
    store = open_store(_url(weed, on_weed, wire.endpoint))
    await store.put("m/x", os.urandom(5 * MIB))
    wire.answer_limit = 3 * MIB
    received = 0
    with pytest.raises(StoreUnreachable):
        async for chunk in store.stream("m/x"):
            received += len(chunk)
    assert received < 5 * MIB
    with pytest.raises(StoreUnreachable):
        await store.get("m/x")


@pytest.mark.usefixtures("one_attempt")
async def test_an_answer_cut_anywhere_is_a_failure_or_the_truth(weed: S3Server, on_weed: str, wire: Wire) -> None:
    store = open_store(_url(weed, on_weed, wire.endpoint))
    for name in "abc":
        await store.put(f"m/{name}", name.encode())
    swapped = 0
    for limit in range(0, 700, 11):
        wire.answer_limit = limit
        with suppress(StoreUnreachable):
            assert await _keys(store, "m/") == ["m/a", "m/b", "m/c"]
        with suppress(StoreUnreachable):
            assert (await store.get("m/a") or pytest.fail("lost")).data == b"a"
        with suppress(StoreUnreachable):
            assert await _read(store, "m/b") == b"b"
        with suppress(StoreUnreachable):
            assert await store.get("m/none") is None
        with suppress(StoreUnreachable):
            version = await store.swap(f"n/{limit}", b"%d" % limit, expected=None)
            wire.answer_limit = None
            assert (await store.get(f"n/{limit}") or pytest.fail("lost")).version == version
            swapped += 1
    assert swapped > 20


@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize("page", [b"", b"<html><body/></html>", b"<!DOCTYPE html><html><p>default backend - 404"])
async def test_what_is_no_s3_server_is_not_an_empty_store(
    moto_server: S3Server, credentials_of: Become, page: bytes, status: int
) -> None:
    credentials_of(moto_server)
    with _answering(lambda method, path: (status, page)) as (endpoint, _):
        store = open_store(_url(moto_server, "bucket", endpoint))
        with pytest.raises((StoreMissing, StoreUnreachable)):
            await _keys(store)
        with pytest.raises((StoreMissing, StoreUnreachable, StoreUnsafe)):
            await store.prepare()
        if status == 404:
            with pytest.raises(StoreMissing):
                await store.get("m/head")


@pytest.mark.usefixtures("one_attempt")
async def test_an_upload_that_breaks_half_way_leaves_nothing(
    weed: S3Server, on_weed: str, wire: Wire, tmp_path: Path
) -> None:
    big = tmp_path / "big"
    big.write_bytes(os.urandom(40 * MIB))
    store = open_store(_url(weed, on_weed, wire.endpoint))
    wire.cut_request = lambda sent: sent.startswith(b"PUT") and b"partNumber=2" in sent
    with pytest.raises(StoreUnreachable):
        await store.put("m/big", big)
    assert await _keys(store) == []
    assert weed.client.list_multipart_uploads(Bucket=on_weed).get("Uploads", []) == []


# Refusals


@pytest.mark.parametrize("server_name", ["weed", "moto_server", "rclone_server"])
async def test_a_missing_bucket_is_named_and_not_made(
    server_name: str, request: pytest.FixtureRequest, credentials_of: Become
) -> None:
    server: S3Server = request.getfixturevalue(server_name)
    credentials_of(server)
    store = open_store(_url(server, "no-such-bucket"))
    with pytest.raises(StoreMissing, match=f"no bucket 'no-such-bucket' at {server.endpoint}") as missing:
        await store.prepare()
    assert "Create it" in missing.value.hint
    with pytest.raises(StoreMissing):
        await store.get("m/x")
    with pytest.raises(StoreMissing):
        await open_store(_url(server, "no-such-bucket", single_writer="true")).prepare()
    assert "no-such-bucket" not in [bucket["Name"] for bucket in server.client.list_buckets()["Buckets"]]


async def test_a_wrong_secret_is_denied_and_not_repeated(
    weed: S3Server, on_weed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    store = open_store(_url(weed, on_weed))
    big = tmp_path / "big"
    big.write_bytes(bytes(33 * MIB))
    sealed = open_repository(_url(weed, on_weed), ENCRYPTED).store
    for attempt in (
        sealed.prepare(),
        sealed.get("memories/m/head.json"),
        store.prepare(),
        store.get("m/x"),
        store.put("m/x", b"1"),
        store.put("m/x", big),
        store.swap("m/x", b"1", expected=None),
        _read(store, "m/x"),
        _keys(store),
        store.copy("m/x", "m/y"),
        store.delete(["m/x"]),
        store.sweep("", older_than=0),
        store.purge(""),
    ):
        # Before a copy the object is asked for by HEAD, and an answer to that has no words.
        said = f"{weed.endpoint} (did not accept the credentials|refused .* does not say why)"
        with pytest.raises(StoreDenied, match=said) as denied:
            await attempt
        assert "hunter2" not in _said(denied.value)
        assert "AWS_SECRET_ACCESS_KEY" in denied.value.hint
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(StoreDenied, match="InvalidAccessKeyId"):
        await open_store(_url(weed, on_weed)).prepare()


async def test_no_credentials_at_all(moto_server: S3Server, forget_aws: None) -> None:
    with pytest.raises(StoreDenied, match="No usable credentials") as denied:
        await open_store(_url(moto_server, "bucket")).prepare()
    assert "AWS_ACCESS_KEY_ID" in denied.value.hint
    with pytest.raises(StoreDenied, match="profile"):
        await open_store(_url(moto_server, "bucket", profile="nobody")).prepare()


async def test_an_endpoint_where_nobody_listens(moto_server: S3Server, credentials_of: Become, tmp_path: Path) -> None:
    credentials_of(moto_server)
    endpoint = f"http://127.0.0.1:{free_port()}"
    started = time.monotonic()
    with pytest.raises(StoreUnreachable, match=f"No answer from {endpoint}"):
        await open_store(_url(moto_server, "bucket", endpoint)).prepare()
    assert time.monotonic() - started < 120


@pytest.mark.parametrize(("option", "value"), [("region", "no such region"), ("AWS_ENDPOINT_URL", "nonsense")])
async def test_an_address_that_is_none(
    moto_server: S3Server, credentials_of: Become, monkeypatch: pytest.MonkeyPatch, option: str, value: str
) -> None:
    credentials_of(moto_server)
    monkeypatch.setenv(option, value)
    with pytest.raises(StoreMissing) as missing:
        await open_store(f"s3://bucket?region={value}" if option == "region" else "s3://bucket").prepare()
    assert "Correct" in missing.value.hint


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("NoSuchKey", 404, ObjectMissing),
        ("NoSuchBucket", 404, StoreMissing),
        ("404", 404, StoreMissing),
        ("PermanentRedirect", 301, StoreMissing),
        ("AccessDenied", 403, StoreDenied),
        ("ExpiredToken", 400, StoreDenied),
        ("InvalidKey", 400, KeyRefused),
        ("RequestTimeTooSkewed", 403, StoreDenied),
        ("403", 403, StoreDenied),
        ("QuotaExceeded", 403, StoreFull),
        ("", 507, StoreFull),
        ("SlowDown", 503, StoreUnreachable),
        ("InternalError", 500, StoreUnreachable),
        ("BadDigest", 400, StoreUnreachable),
        ("", 429, StoreUnreachable),
        ("PreconditionFailed", 412, SwapLost),
        ("ConditionalRequestConflict", 409, WriteConflict),
        ("NotImplemented", 501, Unsupported),
        ("SomethingNew", 400, StoreError),
    ],
)
def test_what_servers_say_in_our_words(code: str, status: int, error: type[StoreError]) -> None:
    assert type(translate_code(code, status, "bucket", "http://server", "key", "words")) is error


# Servers that answer what a test tells them to


@contextmanager
def _answering(answer: Callable[[str, str], tuple[int, bytes]], **headers: str) -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do(self) -> None:
            if length := int(self.headers.get("Content-Length", 0)):
                self.rfile.read(length)
            asked.append(self.command)
            status, body = answer(self.command, self.path)
            self.send_response(status)
            for name, value in {"ETag": '"0"', **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
        setattr(Answer, f"do_{method}", Answer.do)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()


@pytest.mark.parametrize("conflicts", [2, 1000])
async def test_a_conflict_at_the_server_is_tried_again_within_bounds(
    moto_server: S3Server, credentials_of: Become, conflicts: int
) -> None:
    credentials_of(moto_server)
    left = conflicts

    def answer(method: str, path: str) -> tuple[int, bytes]:
        nonlocal left
        if method == "GET":
            return 404, _error("NoSuchKey")
        left -= 1
        return (409, _error("ConditionalRequestConflict")) if left >= 0 else (200, b"")

    with _answering(answer) as (endpoint, asked):
        swap = open_store(_url(moto_server, "bucket", endpoint)).swap("m/head", b"1", expected=None)
        if conflicts == 2:
            assert await swap == '"0"'
            assert asked == ["PUT"] * 3
        else:
            with pytest.raises(SwapLost):
                await swap
            assert asked == ["PUT"] * 5 + ["GET"]


@pytest.mark.usefixtures("one_attempt")
async def test_an_error_that_carries_an_objects_checksum(moto_server: S3Server, credentials_of: Become) -> None:
    credentials_of(moto_server)
    checksum = {"x-amz-checksum-crc32": "AAAAAA=="}
    answering = _answering(lambda method, path: (404, _error("NoSuchKey")), **checksum)
    with answering as (endpoint, _), pytest.raises(StoreUnreachable):
        await open_store(_url(moto_server, "bucket", endpoint)).get("m/x")


async def test_an_object_that_could_not_be_deleted_is_said(moto_server: S3Server, credentials_of: Become) -> None:
    credentials_of(moto_server)
    body = (
        b"<DeleteResult><Error><Key>p/m/a</Key><Code>NoSuchKey</Code></Error>"
        b"<Error><Key>p/m/b</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    )
    with _answering(lambda method, path: (200, body)) as (endpoint, _), pytest.raises(StoreDenied, match="'m/b'"):
        await open_store(_url(moto_server, "bucket", endpoint)).delete(["m/a", "m/b"])


async def test_a_server_that_does_not_know_conditions_is_unsafe(moto_server: S3Server, credentials_of: Become) -> None:
    credentials_of(moto_server)
    puts = 0

    def answer(method: str, path: str) -> tuple[int, bytes]:
        nonlocal puts
        puts += method == "PUT"
        if method == "PUT":  # the first one has a condition, the one after it does not
            return (501, _error("NotImplemented")) if puts == 1 else (200, b"")
        return (404, _error("NoSuchKey")) if method == "GET" else (200, b"<DeleteResult/>")

    with _answering(answer) as (endpoint, _), pytest.raises(StoreUnsafe):
        await open_store(_url(moto_server, "bucket", endpoint)).prepare()
    assert puts == 2


@pytest.mark.parametrize("more", [{}, {"single_writer": "true"}])
async def test_encryption_that_the_server_does_not_do_is_called_that(
    moto_server: S3Server, credentials_of: Become, more: dict[str, str]
) -> None:
    credentials_of(moto_server)
    # As MinIO answers without a key service.
    words = b"Server side encryption specified but KMS is not configured"
    refused = b"<Error><Code>NotImplemented</Code><Message>%s</Message></Error>" % words

    def answer(method: str, path: str) -> tuple[int, bytes]:
        if method == "PUT":
            return 501, refused
        return (404, _error("NoSuchKey")) if method == "GET" else (200, b"<DeleteResult/>")

    with _answering(answer) as (endpoint, _):
        store = open_store(_url(moto_server, "bucket", endpoint, sse="AES256", **more))
        for attempt in (store.prepare(), store.put("m/x", b"1")):
            with pytest.raises(EncryptionRefused, match="does not encrypt with sse=AES256") as said:
                await attempt
            assert "conditional" not in _said(said.value)
            assert "single-writer" not in _said(said.value)
            assert "Leave sse" in said.value.hint


# One writer at a time


@contextmanager
def _elsewhere() -> Iterator[None]:
    """Inside this block we are a writer on another machine."""
    with mock.patch.object(s3_single_writer, "_identify_self", lambda: ("elsewhere", 7, "another")):
        yield


async def test_a_second_writer_stops_and_says_who_the_first_is(supabase_server: S3Server, on_supabase: str) -> None:
    url = _url(supabase_server, on_supabase, single_writer="true")
    first = open_store(url)
    await first.prepare()
    version = await first.swap("m/head", b"1", expected=None)
    second = open_store(url)
    for attempt in (second.prepare(), second.swap("m/head", b"2", expected=version)):
        with _elsewhere(), pytest.raises(SecondWriter, match=rf"process {os.getpid()} on .*, \d+ s ago") as stopped:
            await attempt
        assert "Nothing was written" in stopped.value.message
    assert await _read(second, "m/head") == b"1"


async def test_writers_take_turns_when_one_lets_go(
    supabase_server: S3Server, on_supabase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = _url(supabase_server, on_supabase, single_writer="true")
    first, second = open_store(url), open_store(url)
    version = await first.swap("m/head", b"1", expected=None)
    await first.close()
    with _elsewhere():
        version = await second.swap("m/head", b"2", expected=version)
    monkeypatch.setattr(s3_single_writer, "LEASE_SECONDS", -1.0)  # nobody has written for a while
    assert await open_store(url).swap("m/head", b"3", expected=version)


async def test_a_writer_that_was_overtaken_stops_before_it_writes(
    supabase_server: S3Server, on_supabase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(_url(supabase_server, on_supabase, single_writer="true"))
    version = await store.swap("m/head", b"1", expected=None)
    monkeypatch.setattr(s3_single_writer, "RENEWED_AFTER", 0.0)
    other = json.dumps({"format": 1, "host": "elsewhere", "process": 7, "token": "another"})
    supabase_server.client.put_object(Bucket=on_supabase, Key="p/writer.json", Body=other.encode())
    with pytest.raises(SecondWriter, match="process 7 on elsewhere"):
        await store.swap("m/head", b"2", expected=version)
    assert await _read(store, "m/head") == b"1"


async def test_of_two_that_write_at_the_same_moment_the_first_is_told(
    supabase_server: S3Server, on_supabase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(_url(supabase_server, on_supabase, single_writer="true"))
    assert isinstance(store, S3Store)
    write = store._objects.write

    def overwritten(key: str, data: bytes, **condition: str) -> str:
        version = write(key, data, **condition)
        if key == "m/head":
            write(key, b"another's")
        return version

    monkeypatch.setattr(store._objects, "write", overwritten)
    with pytest.raises(SecondWriter, match="at the same moment"):
        await store.swap("m/head", b"1", expected=None)


# Supabase Storage's dialect


async def test_supabase_is_asked_for_a_single_writer_in_one_line(supabase_server: S3Server, on_supabase: str) -> None:
    store = open_store(_url(supabase_server, on_supabase))
    with pytest.raises(StoreUnsafe, match="ignores conditional writes") as refused:
        await store.prepare()
    assert "Add single-writer=true to the store URL" in refused.value.hint
    assert "\n" not in _said(refused.value)
    assert await _keys(store) == [], "the probe could be removed"


async def test_a_missing_object_is_missing_also_where_errors_are_in_a_namespace(
    supabase_server: S3Server, on_supabase: str
) -> None:
    store = open_store(_url(supabase_server, on_supabase))
    assert await store.get("m/none") is None
    with pytest.raises(ObjectMissing):
        await store.copy("m/none", "m/other")
    with pytest.raises(StoreMissing, match="no bucket 'nowhere'"):
        await open_store(_url(supabase_server, "nowhere")).get("m/none")


async def test_a_bare_403_speaks_of_credentials_and_of_the_region(supabase_server: S3Server, on_supabase: str) -> None:
    with pytest.raises(StoreDenied) as denied:
        await open_store(_url(supabase_server, on_supabase, region="eu-west-1")).get("m/x")
    assert "region" in denied.value.hint
    assert "AWS_SECRET_ACCESS_KEY" in denied.value.hint


def test_a_memory_lives_on_supabase(supabase_server: S3Server, on_supabase: str, tmp_path: Path) -> None:
    url = _url(supabase_server, on_supabase, single_writer="true")
    home, fresh = claude_mem_home(tmp_path / "home", rows=5), empty_home(tmp_path / "fresh")
    first = run_cli("export", "acme/agent-7", "--sandbox", f"local:{home}", store=url).document
    observe(home, 3, "more")
    second = run_cli("export", "acme/agent-7", "--sandbox", f"local:{home}", store=url).document
    assert (first["outcome"], second["outcome"], second["kind"]) == ("committed", "committed", "delta")
    restored = run_cli("restore", "acme/agent-7", "--sandbox", f"local:{fresh}", "--must-exist", store=url).document
    assert (restored["outcome"], restored["snapshot"]) == ("complete", second["snapshot"])
    assert memory_tree(fresh / ".claude-mem") == memory_tree(home / ".claude-mem")
    assert {"~" in key for key in _there(supabase_server, on_supabase)} == {False}
    doctor = run_cli("doctor", store=url).document
    assert "single-writer" in next(row["detail"] for row in doctor["checks"] if row["name"] == "store")
    assert run_cli("delete", "acme/agent-7", "--yes", store=url).code == 0
    assert _there(supabase_server, on_supabase) == {"p/store-id"}


def _there(server: S3Server, bucket: str) -> set[str]:
    return {row["Key"] for row in server.client.list_objects_v2(Bucket=bucket)["Contents"]}


# What is left behind


async def test_purge_removes_old_versions_and_delete_markers(weed: S3Server, on_weed: str) -> None:
    weed.client.put_bucket_versioning(Bucket=on_weed, VersioningConfiguration={"Status": "Enabled"})
    store = open_store(_url(weed, on_weed))
    await store.prepare()
    for turn in range(3):
        await store.put("m/x", b"%d" % turn)
    await store.put("m/y", b"1")
    await store.put("n/z", b"1")
    await store.delete(["m/x"])
    held = weed.client.list_object_versions(Bucket=on_weed, Prefix="p/m/")
    assert (len(held["Versions"]), len(held["DeleteMarkers"])) == (4, 1)
    assert await store.purge("m/") == 5
    held = weed.client.list_object_versions(Bucket=on_weed, Prefix="p/m/")
    assert held.get("Versions", []) + held.get("DeleteMarkers", []) == []
    assert await _keys(store, "n/") == ["n/z"]


async def test_sweep_spares_uploads_under_way(weed: S3Server, on_weed: str) -> None:
    weed.client.create_multipart_upload(Bucket=on_weed, Key="p/m/big")
    store = open_store(_url(weed, on_weed))
    assert await store.sweep("m/", older_than=time.time() - 3600) == 0
    assert await store.sweep("m/", older_than=time.time() + 3600) == 1


async def test_more_objects_than_one_page_or_one_batch_holds(weed: S3Server, on_weed: str) -> None:
    store = open_store(_url(weed, on_weed))
    keys = sorted(f"m/{number:04}{mark}x" for number in range(505) for mark in "/-")
    for start in range(0, len(keys), 100):
        await asyncio.gather(*(store.put(key, b"1") for key in keys[start : start + 100]))
    assert await _keys(store, "m/") == keys
    await store.delete(keys[:-1])
    assert await _keys(store, "m/") == keys[-1:]


# Settings


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"sse": "AES256"}, ("AES256", None)),
        ({"sse_kms_key_id": "key-1"}, ("aws:kms", "key-1")),
    ],
)
async def test_every_way_of_writing_encrypts(
    moto_server: S3Server, on_moto: str, tmp_path: Path, options: dict[str, str], kept: tuple[str, str | None]
) -> None:
    store = open_store(_url(moto_server, on_moto, **options))
    big = tmp_path / "big"
    big.write_bytes(bytes(33 * MIB))
    await store.put("bytes", b"1")
    await store.put("file", Path(__file__))
    await store.put("parts", big)
    await store.swap("swapped", b"1", expected=None)
    await store.copy("bytes", "copy")
    for key in ("bytes", "file", "parts", "swapped", "copy"):
        head = moto_server.client.head_object(Bucket=on_moto, Key=f"p/{key}")
        assert (head["ServerSideEncryption"], head.get("SSEKMSKeyId")) == kept, key


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
async def test_an_endpoint_from_the_environment_is_used_with_the_bucket_in_the_path(
    moto_server: S3Server, on_moto: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, moto_server.endpoint.replace("127.0.0.1", "localhost"))
    store = open_store(f"s3://{on_moto}")
    await store.put("m/x", b"1")
    assert moto_server.client.get_object(Bucket=on_moto, Key="m/x")["Body"].read() == b"1"
    assert isinstance(store, S3Store)
    config: Any = store._objects._get_client().meta.config
    assert config.s3["addressing_style"] == "path"


def test_at_aws_itself_the_bucket_stays_in_the_host_name(moto_server: S3Server, credentials_of: Become) -> None:
    credentials_of(moto_server)
    store = open_store("s3://bucket?region=eu-west-1")
    assert isinstance(store, S3Store)
    client = store._objects._get_client()
    assert "bucket.s3" in client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "k"})


_PUT_AND_STREAM = """
import asyncio, resource, sys
from pathlib import Path
from adapters.stores.urls import open_store
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
async def main():
    store = open_store(sys.argv[1])
    await store.put("small", b"1")
    before = peak()
    await store.put("big", Path(sys.argv[2]))
    put = peak()
    length = 0
    async for chunk in store.stream("big"):
        length += len(chunk)
    assert length == 200 << 20
    print(before, put, peak())
asyncio.run(main())
"""


def test_200_mb_pass_in_bounded_memory(weed: S3Server, on_weed: str, tmp_path: Path) -> None:
    big = tmp_path / "big"
    with big.open("wb") as file:
        for _ in range(200):
            file.write(os.urandom(MIB))
    command = [sys.executable, "-c", _PUT_AND_STREAM, _url(weed, on_weed), str(big)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    told = subprocess.run(command, env=environment, capture_output=True, timeout=90, check=True).stdout
    before, put, streamed = map(int, told.split())
    print(f"peak memory in MB: {before} before, {put} after the put, {streamed} after the stream")
    assert streamed - before < 80
