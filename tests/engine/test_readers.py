"""A sandbox that was restored to be read never moves the head by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, finish_export, restore
from sidecar.receipts import ExportReceipt, RestoreReceipt
from tests.parts.homes import run_cli, titles, tree, without_cache, write
from tests.parts.memories import Box, Name, Provider, engine_on, grow, manifests_of, plain_home, shell_tools

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "conductor"


@pytest.fixture(params=["local", "e2b", pytest.param("daytona", marks=pytest.mark.slow)])
def provider(request: pytest.FixtureRequest, open_provider: Callable[[Name], Provider]) -> Provider:
    return open_provider(request.param)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_on(f"file:{tmp_path / 'store'}")


@pytest.fixture(params=["python", "shell"])
def tools(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return shell_tools(tmp_path / "tools") if request.param == "shell" else None


on_this_machine = pytest.mark.parametrize("provider", ["local"], indirect=True)


async def _export(engine: Engine, box: Box, **asked: Any) -> ExportReceipt:
    return await export(engine, box.open(), ExportRequest(memory=MEMORY, **asked))


async def _complete(engine: Engine, box: Box, **asked: Any) -> RestoreReceipt:
    receipt = await restore(engine, box.open(), RestoreRequest(memory=MEMORY, **asked))
    assert receipt.outcome == "complete", receipt
    return receipt


async def _begun(engine: Engine, provider: Provider) -> tuple[Box, str]:
    first = provider.box()
    plain_home(first.home)
    return first, str((await _export(engine, first)).snapshot)


async def test_what_a_reader_exports_is_stored_beside_the_head(
    engine: Engine, provider: Provider, tools: Path | None
) -> None:
    first, head = await _begun(engine, provider)
    box = provider.box(tools=tools)
    assert (await _complete(engine, box, read_only=True)).read_only
    if tools is None:
        assert (await _export(engine, box)).outcome == "unchanged"
    grow(box.home)
    receipt = await _export(engine, box)
    assert (receipt.outcome, receipt.head) == ("diverged", head)
    assert receipt.reason is not None and receipt.reason.code == "read-only"
    assert "restored to be read" in receipt.reason.message
    assert (await _export(engine, box, label="checkpoint")).outcome in ("diverged", "unchanged")
    grow(first.home, "by the writer")
    assert (await _export(engine, first)).outcome == "committed", "the writer goes on undisturbed"


@on_this_machine
async def test_what_a_reader_wrote_becomes_the_head_only_by_force(
    engine: Engine, provider: Provider, tools: Path | None
) -> None:
    _, head = await _begun(engine, provider)
    box = provider.box(tools=tools)
    await _complete(engine, box, read_only=True)
    write(box.home / "memory/new.md", b"by a reader")
    receipt = await _complete(engine, box)
    assert (receipt.kept, receipt.read_only) == (False, False), "what a reader wrote is not what a writer starts from"
    assert receipt.saved_first and not (box.home / "memory/new.md").exists()
    assert (await engine.repository.head(MEMORY)).snapshot == head
    write(box.home / "memory/new.md", b"by a writer")
    assert (await _export(engine, box)).outcome == "committed", "it is a writer again"
    await _complete(engine, box, read_only=True)
    write(box.home / "memory/newer.md", b"by a reader")
    assert (await _export(engine, box)).outcome == "diverged"
    write(box.home / "memory/newest.md", b"by a reader")
    assert (await _export(engine, box, force=True)).outcome == "committed"


@on_this_machine
async def test_a_reader_that_wrote_nothing_becomes_a_writer_where_it_is(engine: Engine, provider: Provider) -> None:
    await _begun(engine, provider)
    box = provider.box()
    await _complete(engine, box, read_only=True)
    before = without_cache(tree(box.home))
    assert (await _complete(engine, box)).kept
    assert without_cache(tree(box.home)) == before
    grow(box.home)
    assert (await _export(engine, box)).outcome == "committed"
    assert (await _complete(engine, box, read_only=True)).kept
    grow(box.home, "by a reader")
    assert (await _export(engine, box)).outcome == "diverged"


@on_this_machine
async def test_what_a_reader_exported_is_not_what_a_writer_starts_from(
    engine: Engine, provider: Provider, tools: Path | None
) -> None:
    _, head = await _begun(engine, provider)
    box = provider.box(tools=tools)
    await _complete(engine, box, read_only=True)
    write(box.home / "memory/new.md", b"by a reader")
    assert (await _export(engine, box)).outcome == "diverged"
    receipt = await _complete(engine, box)
    assert (receipt.snapshot, receipt.kept, receipt.read_only) == (head, False, False)
    assert not (box.home / "memory/new.md").exists()
    write(box.home / "memory/newer.md", b"by a writer")
    assert (await _export(engine, box)).outcome == "committed"


@on_this_machine
async def test_a_reader_is_left_with_what_it_wrote(engine: Engine, provider: Provider) -> None:
    await _begun(engine, provider)
    box = provider.box()
    await _complete(engine, box, read_only=True)
    write(box.home / "memory/new.md", b"by a reader")
    receipt = await _complete(engine, box, read_only=True)
    assert receipt.kept and receipt.read_only and (box.home / "memory/new.md").exists()


@on_this_machine
async def test_what_a_writer_did_not_save_is_saved_before_it_becomes_a_reader(
    engine: Engine, provider: Provider
) -> None:
    first, _ = await _begun(engine, provider)
    write(first.home / "memory/new.md", b"by the writer")
    receipt = await _complete(engine, first, read_only=True)
    assert not receipt.kept and receipt.saved_first
    other = provider.box()
    await _complete(engine, other, snapshot=receipt.saved_first)
    assert (other.home / "memory/new.md").read_bytes() == b"by the writer"


@on_this_machine
async def test_a_reader_follows_the_head(engine: Engine, provider: Provider) -> None:
    first, _ = await _begun(engine, provider)
    box = provider.box()
    await _complete(engine, box, read_only=True)
    grow(first.home)
    newer = (await _export(engine, first)).snapshot
    receipt = await _complete(engine, box, read_only=True)
    assert (receipt.snapshot, receipt.saved_first) == (newer, None) and titles(box.home) == titles(first.home)
    grow(box.home, "by a reader")
    assert (await _export(engine, box)).outcome == "diverged"
    assert len(await manifests_of(engine, MEMORY)) == 3


def test_the_command_line_says_it(tmp_path: Path) -> None:
    first, home = plain_home(tmp_path / "first"), tmp_path / "home"
    home.mkdir()
    store = tmp_path / "store"
    head = run_cli("export", MEMORY, "--sandbox", f"local:{first}", store=store).document["snapshot"]
    ran = run_cli("restore", MEMORY, "--sandbox", f"local:{home}", "--read-only", store=store)
    assert (ran.code, ran.document["outcome"], ran.document["read_only"]) == (0, "complete", True)
    assert json.loads((home / f".cache/memory-sidecar/{MEMORY}/notes").read_text())["reader"] is True
    write(home / "memory/new.md", b"by a reader")
    ran = run_cli("export", MEMORY, "--sandbox", f"local:{home}", store=store)
    assert (ran.code, ran.document["outcome"], ran.error) == (3, "diverged", "read-only")
    assert ran.document["head"] == head
    ran = run_cli("export", MEMORY, "--sandbox", f"local:{home}", "--force", store=store)
    assert (ran.code, ran.document["head"]) == (0, ran.document["snapshot"])


@on_this_machine
async def test_a_readers_export_that_was_cut_short_is_finished_beside_the_head(
    engine: Engine, provider: Provider
) -> None:
    _, head = await _begun(engine, provider)
    reader = provider.box()
    await _complete(engine, reader, read_only=True)
    grow(reader.home)
    beside = str((await _export(engine, reader)).snapshot)
    # The service died before it could answer, and the call is sent again.
    receipt = await finish_export(engine, MEMORY, beside, reader.ref)
    assert receipt is not None and (receipt.outcome, receipt.head) == ("diverged", head)
    assert (await engine.repository.head(MEMORY)).snapshot == head
