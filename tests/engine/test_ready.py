"""Whoever waits in a sandbox sees when its memory is in place: ``ready.json``, never too early, and never in a memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.host.files import open_spool
from sidecar.receipts import RestoreReceipt
from sidecar.store.fetch import fetch_entries
from tests.parts.homes import write
from tests.parts.memories import Box, Name, Provider, engine_on, grow, plain_home, shell_tools

pytestmark = pytest.mark.usefixtures("forked_programs")
MEMORY = "conductor"


@pytest.fixture(params=["local", "e2b", pytest.param("daytona", marks=pytest.mark.slow)])
def provider(request: pytest.FixtureRequest, open_provider: Callable[[Name], Provider]) -> Provider:
    return open_provider(request.param)


@pytest.fixture(params=["python", "shell"])
def tools(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return shell_tools(tmp_path / "tools") if request.param == "shell" else None


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_on(f"file:{tmp_path / 'store'}")


def _sign(box: Box) -> Path:
    return box.home / ".cache/memory-sidecar/ready.json"


def _read(box: Box) -> dict[str, Any]:
    return dict(json.loads(_sign(box).read_text()))


async def _restore(engine: Engine, box: Box, **asked: Any) -> RestoreReceipt:
    return await restore(engine, box.open(), RestoreRequest(memory=MEMORY, **asked))


async def _begun(engine: Engine, provider: Provider) -> str:
    first = provider.box()
    plain_home(first.home)
    return str((await export(engine, first.open(), ExportRequest(memory=MEMORY))).snapshot)


async def test_the_sign_has_the_essentials_of_the_receipt(
    engine: Engine, provider: Provider, tools: Path | None
) -> None:
    snapshot, box = await _begun(engine, provider), provider.box(tools=tools)
    receipt = await _restore(engine, box, conversation="c\"1'", read_only=True)
    said = _read(box)
    assert {name: said[name] for name in ("outcome", "memory", "snapshot", "sandbox", "conversation", "files")} == {
        "outcome": "complete",
        "memory": MEMORY,
        "snapshot": snapshot,
        "sandbox": receipt.sandbox,
        "conversation": "c\"1'",
        "files": receipt.files,
    }
    assert (said["kept"], said["read_only"]) == (False, True)
    assert _sign(box).stat().st_mode & 0o777 == 0o600


async def test_a_sandbox_that_is_left_as_it_is_has_it_too(
    engine: Engine, provider: Provider, tools: Path | None
) -> None:
    await _begun(engine, provider)
    box = provider.box(tools=tools)
    await _restore(engine, box)
    _sign(box).write_text("of another sandbox")
    assert (await _restore(engine, box)).kept
    assert _read(box)["kept"] is True


async def test_it_is_gone_after_a_restore_that_was_not_done(
    engine: Engine, provider: Provider, tools: Path | None
) -> None:
    await _begun(engine, provider)
    box = provider.box(tools=tools)
    await _restore(engine, box)
    grow(box.home)
    write(box.home / "MEMORY.md", b"changed and not saved")
    later = provider.box()
    await _restore(engine, later)
    grow(later.home)
    await export(engine, later.open(), ExportRequest(memory=MEMORY))
    assert _sign(box).exists()
    # What is unsaved there can neither be saved nor set aside: its export is over a limit, and nothing may be set aside.
    tight = replace(engine, limits=replace(engine.limits, packed_bytes=1, bytes=1))
    assert (await _restore(tight, box)).outcome == "incomplete"
    assert not _sign(box).exists()


async def test_whoever_asks_is_told_of_a_first_start_with_one_command(engine: Engine, provider: Provider) -> None:
    box = provider.box()
    unasked = await _restore(engine, box)
    assert unasked.outcome == "empty" and not _sign(box).exists()
    receipt = await _restore(engine, box, announce=True, conversation="it's")
    assert (receipt.outcome, receipt.round_trips) == ("empty", unasked.round_trips + 1)
    assert (_read(box)["outcome"], _read(box)["snapshot"], _read(box)["conversation"]) == ("empty", None, "it's")


async def test_it_is_never_part_of_a_memory(engine: Engine, provider: Provider, tmp_path: Path) -> None:
    await _begun(engine, provider)
    box = provider.box()
    await _restore(engine, box)
    grow(box.home)
    exported = await export(engine, box.open(), ExportRequest(memory=MEMORY, projects=(str(box.home),)))
    assert exported.outcome == "committed"
    manifest = await engine.repository.manifest(MEMORY, str(exported.snapshot))
    async with open_spool() as spool:
        entries, _, _ = await fetch_entries(engine.repository.store, manifest, spool)
    assert entries and not [path for path in entries if "ready.json" in path]


@pytest.mark.parametrize("provider", ["local"], indirect=True)
async def test_a_memory_of_that_name_is_restored_without_it(engine: Engine, provider: Provider) -> None:
    first, second = provider.box(), provider.box()
    plain_home(first.home)
    await export(engine, first.open(), ExportRequest(memory="ready.json"))
    for _ in range(2):
        receipt = await restore(engine, second.open(), RestoreRequest(memory="ready.json"))
        assert receipt.outcome == "complete" and any("ready.json cannot be written" in one for one in receipt.warnings)
    assert _sign(second).is_dir()


@pytest.mark.parametrize("provider", ["local"], indirect=True)
async def test_what_an_agent_put_in_its_place_is_replaced_and_not_followed(
    engine: Engine, provider: Provider, tmp_path: Path
) -> None:
    await _begun(engine, provider)
    box, secret = provider.box(), tmp_path / "secret"
    secret.write_text("kept")
    _sign(box).parent.mkdir(parents=True)
    _sign(box).symlink_to(secret)
    await _restore(engine, box)
    assert secret.read_text() == "kept" and not _sign(box).is_symlink() and _read(box)["outcome"] == "complete"
