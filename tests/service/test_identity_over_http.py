"""Over HTTP and through the client: a memory that must exist, ids that look alike, and exports that would mix memories up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.client import AsyncClient, Client, NotSaved, SidecarProblem
from tests.parts.homes import claude_mem_home, empty_home, observe, run_cli
from tests.parts.services import TOKEN, Service, serving

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY, MISTYPED = "acme/agent-7", "acme/agnet-7"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving(tmp_path / "store", tmp_path / "service.log") as started:
        yield started


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return claude_mem_home(tmp_path / "home", rows=5)


def test_a_memory_that_must_exist_and_does_not_is_a_404(service: Service, home: Path, tmp_path: Path) -> None:
    other = f"local:{empty_home(tmp_path / 'other')}"
    missing = service.restore(MEMORY, other, must_exist=True)
    assert (missing.status_code, missing.json()["code"]) == (404, "memory-not-found")
    for number in range(2):  # a call that failed is made again under its key
        assert service.restore(MEMORY, other, must_exist=True, key="k").status_code == 404, number
    first = service.restore(MEMORY, other).json()
    assert first["outcome"] == "empty" and "a first start, or another store?" in first["warnings"][0]
    begun = service.export(MEMORY, f"local:{home}", key="first").json()
    assert begun["outcome"] == "committed" and "A new store was begun" in begun["warnings"][0]
    mistyped = service.restore(MISTYPED, other, must_exist=True).json()
    assert f"Is it {MEMORY!r}?" in mistyped["detail"]
    assert service.restore(MEMORY, other, must_exist=True, key="k").json()["outcome"] == "complete"


def test_exports_that_mix_memories_up_are_refused(service: Service, home: Path, tmp_path: Path) -> None:
    ref = f"local:{home}"
    assert service.export(MEMORY, ref).json()["outcome"] == "committed"
    observe(home, 2, "later")
    mistyped = service.export(MISTYPED, ref).json()
    assert (mistyped["outcome"], mistyped["reason"]["code"]) == ("rejected", "other-memory")
    # The store is taken away below a service that lives on.
    (tmp_path / "store").rename(tmp_path / "away")
    elsewhere = service.export(MEMORY, ref).json()
    assert (elsewhere["outcome"], elsewhere["reason"]["code"]) == ("rejected", "unknown-lineage")
    assert service.export(MEMORY, ref, allow=["unknown-lineage"]).json()["outcome"] == "committed"
    assert run_cli("log", MEMORY, store=tmp_path / "away").code == 0


async def test_clients_ask_for_a_memory_that_exists(service: Service, home: Path, tmp_path: Path) -> None:
    other = f"local:{empty_home(tmp_path / 'other')}"
    with Client(service.url, token=TOKEN) as client:
        with pytest.raises(SidecarProblem) as missing:
            client.restore(MEMORY, sandbox=other, must_exist=True)
        assert (missing.value.code, missing.value.status) == ("memory-not-found", 404)
        begun = False
        with pytest.raises(SidecarProblem), client.conversation(MEMORY, sandbox=other, must_exist=True):
            begun = True
        assert not begun
        with client.conversation(MEMORY, sandbox=f"local:{home}"):
            observe(home, 2, "said")
        with pytest.raises(NotSaved) as mixed, client.conversation(MISTYPED, sandbox=f"local:{home}"):
            observe(home, 2, "more")
        assert mixed.value.receipt.reason is not None and mixed.value.receipt.reason.code == "other-memory"
    async with AsyncClient(service.url, token=TOKEN) as client:
        with pytest.raises(SidecarProblem, match=f"Is it {MEMORY!r}"):
            await client.restore(MISTYPED, sandbox=other, must_exist=True)
        assert (await client.restore(MEMORY, sandbox=other, must_exist=True)).outcome == "complete"
