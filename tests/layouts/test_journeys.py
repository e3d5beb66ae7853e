"""Each layout's memory goes from one provider to the next and comes back equal, without what must stay behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.receipts import ExportReceipt
from tests.parts.homes import KEPT_KEYS, write
from tests.parts.homes import PROJECT as CODE
from tests.parts.memories import Box, Name, Provider, engine_on, strays
from tests.parts.samples import PROJECT, SAMPLES, SECRET, database, leaked, memory

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "acme/agent 7"
PROJECTS = (f"~/{PROJECT}",)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_on(f"file:{tmp_path / 'store'}")


async def _export(engine: Engine, box: Box, **asked: object) -> ExportReceipt:
    return await export(engine, box.open(), ExportRequest(memory=MEMORY, projects=PROJECTS, **asked))  # type: ignore[arg-type]


async def _arrives(engine: Engine, box: Box, expected: Mapping[bytes, object]) -> None:
    receipt = await restore(engine, box.open(), RestoreRequest(memory=MEMORY, projects=PROJECTS))
    # A sample has a project that nobody knows, and that is said; there is nothing else to say.
    others = [words for words in receipt.warnings if "-somewhere-nobody-knows keeps the name it had" not in words]
    assert (receipt.outcome, receipt.reason, others) == ("complete", None, [])
    assert memory(box.home) == expected
    assert leaked(box.home) == []


@pytest.mark.parametrize("layout", [*SAMPLES, "all of them at once"])
async def test_a_memory_travels_from_e2b_to_daytona_to_here(
    layout: str, engine: Engine, open_provider: Callable[[Name], Provider], tmp_path: Path
) -> None:
    samples = [SAMPLES[layout]] if layout in SAMPLES else list(SAMPLES.values())
    local, e2b, daytona = (open_provider(name) for name in ("local", "e2b", "daytona"))
    first, second, third = e2b.box(), daytona.box(), local.box()
    for sample in samples:
        sample.build(first.home)
    there = memory(first.home)
    assert leaked(first.home), "this sample has nothing that must stay behind"

    born = await _export(engine, first)
    assert (born.outcome, born.kind) == ("committed", "full")
    manifest = await engine.repository.manifest(MEMORY, born.snapshot or "")
    expected = {layout} if layout in SAMPLES else set(SAMPLES)
    assert {root.layout for root in manifest.roots} == expected
    assert born.files == manifest.files == sum(about[0] == "file" for about in there.values()) + _settings(expected)

    await _arrives(engine, second, there)
    assert (await _export(engine, second)).outcome == "unchanged"
    for sample in samples:
        sample.grow(second.home)
    grown = await _export(engine, second)
    assert (grown.outcome, grown.kind, grown.parent) == ("committed", "delta", born.snapshot)
    assert (grown.files, grown.packed_bytes < born.packed_bytes + 4096) == (born.files, True)

    await _arrives(engine, third, memory(second.home))
    assert (await _export(engine, third)).outcome == "unchanged"
    assert await strays(engine, MEMORY) == set()
    _read_without_us(tmp_path)


async def test_nested_projects_and_two_of_one_name_travel_though_nobody_names_them(
    engine: Engine, open_provider: Callable[[Name], Provider]
) -> None:
    """With what the layouts do not know, into a project that is there already in part."""
    first, second, third = (open_provider(name).box() for name in ("e2b", "daytona", "local"))
    for project in ("work/app", "play/app", "work/app/packages/inner"):
        write(first.home / project / "MEMORY.md", project.encode())
        write(first.home / project / "memory/odd/unknown.bin", project.encode() * 3)
        write(first.home / project / ".cm/what comes next.txt", project.encode())
        write(first.home / project / "AGENTS.md", project.encode())
    database(first.home / ".claude-mem/memory.db", "CREATE TABLE t (x)", "INSERT INTO t VALUES ('remembered')")
    there, request = memory(first.home), ExportRequest(memory=MEMORY)
    born = await export(engine, first.open(), request)
    assert (born.outcome, born.files) == ("committed", 13)
    assert [(row.path, row.check) for row in born.databases] == [("claude-mem/memory.db", "ok")]
    names = {root.name: root.hint for root in (await engine.repository.manifest(MEMORY, born.snapshot or "")).roots}

    for box in (second, third):
        arrived = await restore(engine, box.open(), RestoreRequest(memory=MEMORY))
        assert (arrived.outcome, arrived.warnings) == ("complete", [])
        assert memory(box.home) == there
        assert (await export(engine, box.open(), request)).outcome == "unchanged"
    write(third.home / "a/app/MEMORY.md", b"one more of that name, and before all others")
    grown = await export(engine, third.open(), request)
    assert (grown.outcome, grown.files) == ("committed", 14)
    now = {root.name: root.hint for root in (await engine.repository.manifest(MEMORY, grown.snapshot or "")).roots}
    assert now == {**names, "project-4": "~/a/app"}, "no project has taken another's number"


def _settings(layouts: set[str]) -> int:
    """How many files travel changed."""
    return int("claude-mem" in layouts)


def _read_without_us(folder: Path) -> None:
    """What is in the store holds nothing that must stay behind, as the stand-alone reader has it."""
    import runpy

    reader = runpy.run_path(str(CODE / "docs/read_snapshot.py"))
    reader["read"](str(folder / "store"), MEMORY, str(folder / "read"))
    assert leaked(folder / "read") == []
    for settings in (folder / "read").rglob("settings.json"):
        assert json.loads(settings.read_bytes()) == KEPT_KEYS


async def test_what_is_left_out_is_said(engine: Engine, open_provider: Callable[[Name], Provider]) -> None:
    box = open_provider("local").box()
    for sample in SAMPLES.values():
        sample.build(box.home)
    receipt = await _export(engine, box)
    reasons = {skip.path: skip.reason for skip in receipt.skipped}
    assert reasons["claude-code/.credentials.json"] == reasons["codex/auth.json"] == "secret"
    assert reasons["claude-code/history.jsonl"] == reasons["pai/RAW/"] == "never exported"
    assert reasons["pai/WORK/20261116-101500_ship-the-thing/tasks/001_ship/ISC.json.lock/"] == "never exported"
    assert not any(SECRET.decode() in path for path in reasons)
    assert any("transcript.jsonl is said to hold credentials" in warning for warning in receipt.warnings)
