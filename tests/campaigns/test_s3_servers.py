"""Races on S3 servers that people run: never two winners on a store that we call safe, and one that is not is found out."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from adapters.stores.urls import open_store
from sidecar.errors import EncryptionRefused, StoreUnsafe, SwapLost
from tests.parts.homes import claude_mem_home, empty_home, memory_tree, observe, run_cli
from tests.parts.s3_servers import S3Server

ROUNDS, WRITERS, AT_ONCE = 200, 8, 4
SAFE = ("weed", "minio_server", "versitygw_server")
UNSAFE = ("s3proxy_server",)
Become = Callable[[S3Server], None]
pytestmark = pytest.mark.servers


def _each(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.xdist_group(name.removesuffix("_server"))) for name in names]
    )


@pytest.fixture
def server(name: str, request: pytest.FixtureRequest, credentials_of: Become) -> S3Server:
    found: S3Server = request.getfixturevalue(name)
    credentials_of(found)
    return found


@pytest.fixture
def url(server: S3Server) -> str:
    bucket = server.make_bucket(f"b-{uuid.uuid4().hex}")
    return f"s3://{bucket}/p?endpoint={server.endpoint}&region=us-east-1"


async def _winners(url: str) -> list[int]:
    """How many of the writers won each round."""
    store = open_store(url)
    await store.prepare()

    async def one_key(key: str) -> list[int]:
        version, counts = None, []
        for turn in range(ROUNDS // AT_ONCE):

            async def swapped(who: int, turn: int = turn, version: str | None = version) -> str | None:
                try:
                    return await store.swap(key, f"{turn} {who}".encode(), expected=version)
                except SwapLost:
                    return None

            won = [one for one in await asyncio.gather(*map(swapped, range(WRITERS))) if one]
            counts.append(len(won))
            found = await store.get(key)
            assert found is not None
            version = found.version
        return counts

    counts = await asyncio.gather(*(one_key(f"m{number}/head") for number in range(AT_ONCE)))
    await store.close()
    return [count for some in counts for count in some]


@_each(*SAFE)
async def test_no_round_has_two_winners_on_a_store_that_we_call_safe(url: str) -> None:
    winners = await _winners(url)
    assert len(winners) == ROUNDS
    assert set(winners) == {1}


@_each(*UNSAFE)
async def test_a_server_that_compares_and_then_writes_never_passes_for_safe(url: str) -> None:
    for attempt in range(20):
        store = open_store(url.replace("/p?", f"/p{attempt}?"))
        with pytest.raises(StoreUnsafe, match="not in one step") as refused:
            await store.prepare()
        assert "single-writer=true" in refused.value.hint
        await store.close()


@_each(*UNSAFE)
async def test_with_a_single_writer_no_round_has_two_winners_there_either(url: str) -> None:
    assert set(await _winners(f"{url}&single-writer=true")) == {1}


@_each("minio_server")
async def test_minio_without_a_key_service_is_told_from_a_server_without_conditions(url: str) -> None:
    store = open_store(f"{url}&sse=AES256")
    with pytest.raises(EncryptionRefused, match="does not encrypt with sse=AES256"):
        await store.prepare()
    await store.close()


@_each(*SAFE, *UNSAFE)
def test_a_memory_goes_there_and_back(url: str, name: str, tmp_path: Path) -> None:
    url += "&single-writer=true" if name in UNSAFE else ""
    home, fresh = claude_mem_home(tmp_path / "home", rows=20), empty_home(tmp_path / "fresh")
    for number in range(3):
        observe(home, 3, f"conversation {number}")
        told = run_cli("export", "acme/agent-7", "--sandbox", f"local:{home}", store=url)
        assert told.document["outcome"] == "committed"
    assert run_cli("doctor", store=url).document["ok"] is True
    restored = run_cli("restore", "acme/agent-7", "--sandbox", f"local:{fresh}", "--must-exist", store=url)
    assert restored.document["snapshot"] == told.document["snapshot"]
    assert memory_tree(fresh / ".claude-mem") == memory_tree(home / ".claude-mem")
    assert run_cli("verify", store=url).code == 0
    assert run_cli("delete", "acme/agent-7", "--yes", store=url).code == 0
