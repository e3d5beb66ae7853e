"""``restore --brief PATH``: what to read first is in the sandbox, never as memory, never over a file that is not ours, with
Python and without; and a brief that fails never makes a restore fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.errors import UnsafePath, UsageError
from sidecar.host.files import open_spool
from sidecar.ids import MemoryKeys
from sidecar.program.brief import SIGNATURE, find_taker
from sidecar.receipts import RestoreOutcome, RestoreReceipt
from sidecar.store.fetch import fetch_entries
from tests.parts.homes import write
from tests.parts.memories import Box, Name, Provider, engine_on, grow, plain_home, shell_tools

pytestmark = pytest.mark.usefixtures("forked_programs")
MEMORY = "conductor"


@pytest.fixture(params=["local", pytest.param("e2b", marks=pytest.mark.slow)])
def provider(request: pytest.FixtureRequest, open_provider: Callable[[Name], Provider]) -> Provider:
    return open_provider(request.param)


@pytest.fixture(params=["python", "shell"])
def tools(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return shell_tools(tmp_path / "tools") if request.param == "shell" else None


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_on(f"file:{tmp_path / 'store'}")


async def place(engine: Engine, box: Box, path: str = "", tokens: int = 1000, **asked: Any) -> RestoreReceipt:
    request = RestoreRequest(memory=MEMORY, brief=tokens if path else 0, brief_path=path, **asked)
    return await restore(engine, box.open(), request)


async def begin(engine: Engine, provider: Provider) -> Box:
    first = provider.box()
    plain_home(first.home)
    await export(engine, first.open(), ExportRequest(memory=MEMORY))
    return first


async def test_a_brief_is_put_refreshed_moved_and_removed(
    engine: Engine, provider: Provider, tools: Path | None
) -> None:
    first = await begin(engine, provider)
    box = provider.box(tools=tools)
    receipt = await place(engine, box, "notes/of ours/BRIEF.md")
    file = box.home / "notes/of ours/BRIEF.md"
    assert receipt.outcome is RestoreOutcome.COMPLETE and receipt.brief is not None
    assert receipt.brief.path == "notes/of ours/BRIEF.md" and receipt.brief.tokens <= 1000
    text = file.read_text()
    assert text == receipt.brief.text and text.startswith(SIGNATURE) and "# Long term" in text
    grow(first.home, "learned since")
    await export(engine, first.open(), ExportRequest(memory=MEMORY))
    again = await place(engine, box, "notes/of ours/BRIEF.md", discard=True)
    assert "learned since" in file.read_text() and again.brief and again.snapshot == again.brief.snapshot
    await place(engine, box, "BRIEF.md")  # kept as it is, and the brief moves
    assert not file.exists() and "learned since" in (box.home / "BRIEF.md").read_text()
    last = await place(engine, box)
    assert not (box.home / "BRIEF.md").exists() and last.brief is None
    assert await box.is_clean()


async def test_a_brief_never_becomes_memory(engine: Engine, provider: Provider, tools: Path | None) -> None:
    await begin(engine, provider)
    box = provider.box(tools=tools)
    await place(engine, box, "BRIEF.md")
    grow(box.home)
    done = await export(engine, box.open(), ExportRequest(memory=MEMORY))
    manifest = await engine.repository.manifest(MEMORY, str(done.snapshot))
    async with open_spool() as spool:
        entries, _, _ = await fetch_entries(engine.repository.store, manifest, spool)
    assert not any("BRIEF" in path or "brief" in path for path in entries)


@pytest.mark.parametrize("there", ["a file", "a link", "a link on the way", "a folder"])
async def test_what_is_there_stays(
    engine: Engine, provider: Provider, tools: Path | None, tmp_path: Path, there: str
) -> None:
    await begin(engine, provider)
    box, outside = provider.box(tools=tools), tmp_path / "outside"
    outside.mkdir()
    write(outside / "x.md", SIGNATURE.encode() + b"\nof others")
    path = "sub/x.md" if there == "a link on the way" else "x.md"
    if there == "a file":
        write(box.home / "x.md", b"of the agent")
    elif there == "a folder":
        write(box.home / "x.md/inside", b"of the agent")
    else:
        (box.home / path.split("/")[0]).symlink_to(outside if "way" in there else outside / "x.md")
    receipt = await place(engine, box, path)
    assert receipt.outcome is RestoreOutcome.COMPLETE and (box.home / "MEMORY.md").exists()
    assert receipt.brief is not None and receipt.brief.path == "" and "# Long term" in receipt.brief.text
    assert any("brief could not be put" in warning for warning in receipt.warnings)
    assert (outside / "x.md").read_bytes().endswith(b"of others") and sorted(outside.iterdir()) == [outside / "x.md"]
    if there == "a file":
        assert (box.home / "x.md").read_bytes() == b"of the agent"


async def test_a_file_that_took_the_place_of_a_brief_stays(
    engine: Engine, provider: Provider, tools: Path | None
) -> None:
    await begin(engine, provider)
    box = provider.box(tools=tools)
    await place(engine, box, "notes/BRIEF.md")
    (box.home / "notes/BRIEF.md").write_text("the agent's own by now")
    await place(engine, box)
    assert (box.home / "notes/BRIEF.md").read_text() == "the agent's own by now"


async def test_a_forged_note_leads_nowhere(
    engine: Engine, provider: Provider, tools: Path | None, tmp_path: Path
) -> None:
    await begin(engine, provider)
    box = provider.box(tools=tools)
    await place(engine, box, "BRIEF.md")
    write(tmp_path / "outside.md", SIGNATURE.encode() + b"\n")
    write(box.home / "linked.md", b"")
    (box.home / "linked.md").unlink()
    (box.home / "linked.md").symlink_to(tmp_path / "outside.md")
    note = box.home / ".cache/memory-sidecar" / MEMORY / "brief"
    relative = "../" * len(box.home.parts) + str(tmp_path / "outside.md").lstrip("/")
    for said in (str(tmp_path / "outside.md"), relative, "linked.md", "", "\x00", "a\nb", "/" * 5000):
        note.write_text(said)
        assert (await place(engine, box)).outcome is RestoreOutcome.COMPLETE
        assert (tmp_path / "outside.md").exists() and (box.home / "linked.md").is_symlink()


HOSTILE = [
    "../x",
    "/etc/x",
    "a/../../x",
    "a//b",
    "./x",
    "x/",
    "a\nb",
    "\x1b[2J",
    "a\\b",
    "x" * 300,
    "\u202ex",
    "~/../x",
]
TAKEN = {
    "MEMORY.md": "three-tier",
    "app/memory/brief.md": "three-tier",
    ".claude-mem/brief.md": "claude-mem",
    "app/.cm/BRIEF.md": "codymaster",
    ".claude/CLAUDE.md": "claude-code",
    ".config/opencode/MEMORY/x.md": "pai",
    "app/.opencode/MEMORY/x.md": "pai",
    ".codex/memories/x.md": "codex",
    ".letta/agents/a/memory/x": "letta",
}


@pytest.mark.parametrize("path", [*HOSTILE, *TAKEN])
async def test_paths_that_lead_out_or_are_memory_are_refused_before_anything_is_done(
    engine: Engine, open_provider: Callable[[Name], Provider], path: str
) -> None:
    box = open_provider("local").box()
    with pytest.raises(UnsafePath):
        await place(engine, box, path)
    assert list(box.home.iterdir()) == []


def test_other_paths_are_no_memory(engine: Engine) -> None:
    layouts = [layout.for_sandbox() for layout in engine.layouts.values()]
    for path in ("BRIEF.md", "app/BRIEF.md", "notes/brief.md", ".brief", ".claude/brief.md", "memory.txt"):
        assert find_taker(path, layouts) == ""
    for path, layout in TAKEN.items():
        assert find_taker(path, layouts) == layout


async def test_a_moved_root_takes_no_brief(engine: Engine, open_provider: Callable[[Name], Provider]) -> None:
    provider = open_provider("local")
    await begin(engine, provider)
    box = provider.box()
    opened = box.open()
    opened._sandbox._environment["CLAUDE_MEM_DATA_DIR"] = str(box.home / "elsewhere")  # type: ignore[attr-defined]
    request = RestoreRequest(memory=MEMORY, brief=1000, brief_path="elsewhere/x.md")
    receipt = await restore(engine, opened, request)
    assert receipt.outcome is RestoreOutcome.COMPLETE and (box.home / "elsewhere/claude-mem.db").exists()
    assert not (box.home / "elsewhere/x.md").exists() and any("would be memory" in one for one in receipt.warnings)


MOVED = {
    "data/BRIEF.md": {"CLAUDE_MEM_DATA_DIR": "data"},
    "cc/plans/BRIEF.md": {"CLAUDE_CONFIG_DIR": "/cc/./"},
    "xdg/opencode/storage/session_diff/x.json": {"XDG_DATA_HOME": "/xdg/"},
    "kept/x.json": {"MEMORY_FILE_PATH": "/kept/x.json"},
    "deep/down/BRIEF.md": {"CLAUDE_MEM_DATA_DIR": "~/deep/down"},
}


@pytest.mark.parametrize("path", MOVED)
async def test_a_moved_root_takes_no_brief_though_the_snapshot_has_nothing_of_it(
    engine: Engine, provider: Provider, tools: Path | None, path: str
) -> None:
    first, box = provider.box(), provider.box(tools=tools)
    write(first.home / "MEMORY.md", b"# Long term\n")
    await export(engine, first.open(), ExportRequest(memory=MEMORY))
    ((variable, value),) = MOVED[path].items()
    opened = box.open()
    where = f"{box.home}{value}" if value.startswith("/") else value
    variables = opened._sandbox._environment if box.emulated is None else box.emulated.envs  # type: ignore[attr-defined]
    variables[variable] = where
    receipt = await restore(engine, opened, RestoreRequest(memory=MEMORY, brief=1000, brief_path=path))
    assert receipt.outcome is RestoreOutcome.COMPLETE and (box.home / "MEMORY.md").exists()
    assert not (box.home / path.split("/")[0]).exists() and receipt.brief is not None and not receipt.brief.path
    assert any("would be memory" in one for one in receipt.warnings)
    again = await restore(engine, opened, RestoreRequest(memory=MEMORY, brief=1000, brief_path="other/BRIEF.md"))
    assert again.brief is not None and again.brief.path == "other/BRIEF.md"


async def test_a_root_that_a_setting_names_takes_no_brief(
    engine: Engine, open_provider: Callable[[Name], Provider]
) -> None:
    provider = open_provider("local")
    await begin(engine, provider)
    box = provider.box()
    write(box.home / "app/.claude/settings.json", b'{"autoMemoryDirectory": "notes"}')
    receipt = await place(engine, box, "app/notes/BRIEF.md")
    assert any("would be memory" in one for one in receipt.warnings) and not (box.home / "app/notes").exists()
    await place(engine, box, "app/BRIEF.md")
    assert (box.home / "app/BRIEF.md").exists()


async def test_a_brief_that_fails_is_a_warning(
    engine: Engine, open_provider: Callable[[Name], Provider], monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = open_provider("local")
    await begin(engine, provider)

    def fail(*_: object) -> None:
        raise RecursionError

    monkeypatch.setattr("sidecar.engine.briefs.read_parts", fail)
    monkeypatch.setattr("sidecar.engine.briefs._find_cache", lambda: None)
    box = provider.box()
    receipt = await place(engine, box, "BRIEF.md")
    assert receipt.outcome is RestoreOutcome.COMPLETE and receipt.brief is None
    assert (box.home / "MEMORY.md").exists() and not (box.home / "BRIEF.md").exists()
    assert any("There is no brief" in warning for warning in receipt.warnings)


async def test_a_budget_that_no_brief_can_have_is_refused(
    engine: Engine, open_provider: Callable[[Name], Provider]
) -> None:
    box = open_provider("local").box()
    for tokens in (1, 299, 50_001):
        with pytest.raises(UsageError):
            await place(engine, box, "x.md", tokens)


async def test_a_first_start_has_no_brief(engine: Engine, open_provider: Callable[[Name], Provider]) -> None:
    box = open_provider("local").box()
    receipt = await place(engine, box, "BRIEF.md")
    assert receipt.outcome is RestoreOutcome.EMPTY and receipt.brief is None and not (box.home / "BRIEF.md").exists()


async def test_a_brief_costs_no_round_trip_with_python(
    engine: Engine, open_provider: Callable[[Name], Provider]
) -> None:
    provider = open_provider("local")
    await begin(engine, provider)
    plain = await place(engine, provider.box())
    assert (await place(engine, provider.box(), "BRIEF.md")).trips == plain.trips


async def test_the_brief_is_of_what_was_restored(engine: Engine, open_provider: Callable[[Name], Provider]) -> None:
    provider = open_provider("local")
    first = await begin(engine, provider)
    grow(first.home, "learned since")
    await export(engine, first.open(), ExportRequest(memory=MEMORY))
    newest = (await engine.repository.manifest(MEMORY, (await engine.repository.head(MEMORY)).snapshot)).packs[-1]
    await engine.repository.store.delete([MemoryKeys.of(MEMORY).pack(newest.id, newest.codec)])
    receipt = await place(engine, provider.box(), "BRIEF.md")
    assert receipt.wanted and receipt.brief is not None
    assert receipt.brief.snapshot == receipt.snapshot and "learned since" not in receipt.brief.text
