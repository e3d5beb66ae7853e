"""Roots that settings, links and clones put where they do not belong, or that lie in one another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from adapters.sandboxes.local import LocalSandbox
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.queries import read_contents
from sidecar.receipts import ExportReceipt, RestoreReceipt
from tests.parts.homes import empty_home, engine_at, tree, write

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_at(tmp_path / "store")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return empty_home(tmp_path / "home")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return empty_home(tmp_path / "other")


async def out(engine: Engine, home: Path, memory: str = "m", **asked: object) -> ExportReceipt:
    return await export(engine, LocalSandbox(home), ExportRequest(memory=memory, **asked))  # type: ignore[arg-type]


async def back(engine: Engine, home: Path, **asked: object) -> RestoreReceipt:
    return await restore(engine, LocalSandbox(home), RestoreRequest(memory="m", **asked))  # type: ignore[arg-type]


async def paths(engine: Engine, receipt: ExportReceipt) -> set[str]:
    shown = await read_contents(engine.repository, "m", receipt.snapshot or "")
    return {row.path for row in shown.entries if row.type == "file"}


def auto_memory(home: Path, place: str) -> None:
    write(home / ".claude/settings.json", json.dumps({"autoMemoryDirectory": place}).encode())


def graph(home: Path, place: str) -> None:
    servers = {"memory": {"env": {"MEMORY_FILE_PATH": place}}}
    write(home / ".mcp.json", json.dumps({"mcpServers": servers}).encode())


NESTED = {
    "auto-memory in a project": ("~/work/memory", {"work/MEMORY.md", "work/memory/topic.md"}),
    "auto-memory where it always is": ("~/.claude/projects/-x/memory", {".claude/projects/-x/memory/MEMORY.md"}),
}


@pytest.mark.parametrize("what", NESTED)
async def test_a_root_in_another_comes_back_once(what: str, engine: Engine, home: Path, other: Path) -> None:
    place, files = NESTED[what]
    auto_memory(home, place)
    for name in files:
        write(home / name, name.encode())
    receipt = await out(engine, home)
    assert (receipt.outcome, receipt.files, receipt.warnings[1:]) == ("committed", len(files), [])
    auto_memory(other, place)
    assert (await back(engine, other)).outcome == "complete"
    assert {name: (other / name).read_text() for name in files} == {name: name for name in files}


async def test_a_graph_in_a_project_and_a_named_workspace_come_back_once(
    engine: Engine, home: Path, other: Path
) -> None:
    graph(home, "~/work/memory/graph.jsonl")
    for name in ("work/MEMORY.md", "work/memory/graph.jsonl", ".openclaw/workspace/MEMORY.md"):
        write(home / name, b"{}")
    receipt = await out(engine, home, projects=("~/work", "~/.openclaw/workspace"))
    assert (receipt.outcome, receipt.files) == ("committed", 3)
    graph(other, "~/work/memory/graph.jsonl")
    assert (await back(engine, other)).outcome == "complete"
    assert (other / "work/memory/graph.jsonl").exists() and (other / ".openclaw/workspace/MEMORY.md").exists()


@pytest.mark.parametrize("discard", [False, True])
@pytest.mark.parametrize("place", ["~", "/", "~/..", "~/work"])
async def test_a_setting_never_empties_the_home_or_a_repository(
    place: str, discard: bool, engine: Engine, home: Path, other: Path
) -> None:
    auto_memory(home, "~/notes")
    write(home / "notes/MEMORY.md", b"known")
    await out(engine, home)
    auto_memory(other, place)
    for name in (".bashrc", ".ssh/id", "work/main.py", "work/.git/HEAD"):
        write(other / name, b"mine")
    before = tree(other)
    receipt = await back(engine, other, discard=discard)
    after = tree(other)
    assert receipt.outcome == "complete" and {name: after.get(name) for name in before} == before
    assert (other / ("work" if place == "~/work" else "notes") / "MEMORY.md").read_bytes() == b"known"


@pytest.mark.parametrize("hint", ["~", "~/.ssh", "/etc"])
async def test_what_a_setting_named_plants_nothing_elsewhere(
    hint: str, engine: Engine, home: Path, other: Path
) -> None:
    auto_memory(home, hint)
    for place in (home, home / ".ssh"):
        write(place / "authorized_keys", b"planted")
    write(home / "MEMORY.md", b"known")
    await out(engine, home)
    write(other / ".ssh/authorized_keys", b"mine")
    await back(engine, other)
    assert (other / ".ssh/authorized_keys").read_bytes() == b"mine" and not (other / "authorized_keys").exists()


@pytest.mark.parametrize(("link", "to"), [(".cm", "../.aws"), (".cm", "."), (".cm", ".."), (".opencode", "../.codex")])
async def test_a_link_in_a_repository_brings_nothing_else_out(
    link: str, to: str, engine: Engine, home: Path, other: Path
) -> None:
    write(home / ".aws/credentials", b"hunter2")
    write(home / ".codex/MEMORY/auth.json", b"hunter2")
    write(home / "repo/MEMORY.md", b"known")
    write(home / "repo/main.py", b"code")
    (home / "repo" / link).symlink_to(to)
    for projects in (None, ("~/repo",)):
        receipt = await out(engine, home, projects=projects)
        assert await paths(engine, receipt) <= {"project/MEMORY.md"}
        assert link != ".cm" or any("leads out of its project" in told for told in receipt.warnings)
    write(other / "repo/main.py", b"mine")
    await back(engine, other)
    assert (other / "repo/main.py").read_bytes() == b"mine"


async def test_of_two_names_for_one_folder_one_counts_again_and_again(engine: Engine, home: Path) -> None:
    write(home / "proj/.cm/CONTINUITY.md", b"known")
    (home / ".cm").symlink_to("proj/.cm")
    for _ in range(3):
        write(home / "proj/.cm/more.md", str(_).encode())
        assert (await out(engine, home)).outcome == "committed"


async def test_a_clone_before_the_second_restore_does_not_become_the_memory(
    engine: Engine, home: Path, other: Path
) -> None:
    write(home / ".codex/session_index.jsonl", b"{}")
    write(home / "app/MEMORY.md", b"of the memory")
    write(home / "app/CLAUDE.md", b"of the memory")
    await out(engine, home)
    await back(engine, other, withhold_projects=True)
    write(other / "app/MEMORY.md", b"of the clone")
    write(other / "app/memory/new.md", b"written since")
    between = await out(engine, other)
    assert between.outcome == "committed" and any("waits for its restore" in told for told in between.warnings)
    assert [row.path for row in between.skipped if "waits" in row.reason] == ["project/MEMORY.md"]
    await back(engine, other, withhold_projects=True)
    assert (other / "app/MEMORY.md").read_bytes() == b"of the memory"
    third = empty_home(other.parent / "third")
    await back(engine, third)
    assert (third / "app/MEMORY.md").read_bytes() == b"of the memory"
    assert (third / "app/memory/new.md").read_bytes() == b"written since"


async def test_what_gave_way_to_a_template_stays_in_the_head(engine: Engine, home: Path, other: Path) -> None:
    write(home / "MEMORY.md", b"known")
    write(home / "CLAUDE.md", b"of the memory")
    await out(engine, home)
    write(other / "CLAUDE.md", b"of the template")
    receipt = await back(engine, other)
    assert "CLAUDE.md" in str(receipt.skipped)
    write(other / "MEMORY.md", b"known and more")
    assert (await out(engine, other)).outcome == "committed"
    third = empty_home(other.parent / "third")
    await back(engine, third)
    assert (third / "CLAUDE.md").read_bytes() == b"of the memory"
    assert (third / "MEMORY.md").read_bytes() == b"known and more"


async def test_a_setting_that_changes_does_not_replace_the_memory(engine: Engine, home: Path, other: Path) -> None:
    auto_memory(home, "~/notes")
    for number in range(5):
        write(home / f"notes/{number}.md", b"fact")
    await out(engine, home)
    auto_memory(other, "~/notes")
    await back(engine, other)
    auto_memory(other, "~/elsewhere")
    write(other / "elsewhere/stranger.md", b"who")
    receipt = await out(engine, other)
    assert receipt.outcome == "unchanged" and any("move it, or restore again" in told for told in receipt.warnings)
    shutil.rmtree(other / "elsewhere")
    (other / "notes").rename(other / "elsewhere")
    assert (await out(engine, other)).files == 5


async def test_another_file_for_the_graph_is_not_taken_for_it(engine: Engine, home: Path, other: Path) -> None:
    graph(home, "~/graphs/one.jsonl")
    write(home / "graphs/one.jsonl", b'{"type":"entity"}\n')
    await out(engine, home)
    graph(other, "~/graphs/one.jsonl")
    await back(engine, other)
    graph(other, "~/graphs/two.jsonl")
    write(other / "graphs/two.jsonl", b"")
    assert (await out(engine, other)).outcome == "unchanged"
    assert not (await back(engine, other)).kept
    assert (other / "graphs/two.jsonl").read_bytes() == b'{"type":"entity"}\n'


async def test_projects_of_the_memory_are_looked_at_whatever_a_search_would_find(
    engine: Engine, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home / "z/app/MEMORY.md", b"known")
    await out(engine, home)
    for number in range(101):
        write(home / f"a{number:03}/MEMORY.md", b"nearer")
    receipt = await out(engine, home)
    assert receipt.outcome == "committed" and "project/MEMORY.md" in await paths(engine, receipt)


@pytest.mark.parametrize("value", ["\ud800", "/tmp/x.jsonl", "~/**", "~/.ssh/*", "~/.codex/auth.json", "~"])
async def test_one_bad_setting_does_not_stop_the_rest(value: str, engine: Engine, home: Path, other: Path) -> None:
    write(home / "MEMORY.md", b"known")
    write(home / ".codex/session_index.jsonl", b"{}")
    write(home / ".codex/auth.json", b"hunter2")
    graph(home, value)
    auto_memory(home, value)
    receipt = await out(engine, home)
    assert receipt.outcome == "committed"
    assert await paths(engine, receipt) == {"project/MEMORY.md", "codex/session_index.jsonl"}
    graph(other, value)
    auto_memory(other, value)
    assert (await back(engine, other)).outcome == "complete"


async def test_a_project_that_is_another_memorys_is_not_taken_along(engine: Engine, home: Path) -> None:
    write(home / "proj/MEMORY.md", b"of the other")
    await out(engine, home, "other", projects=("~/proj",))
    write(home / ".codex/session_index.jsonl", b"{}")
    receipt = await out(engine, home)
    assert await paths(engine, receipt) == {"codex/session_index.jsonl"}
    assert any("holds the memory other" in told for told in receipt.warnings)


async def test_settings_of_a_found_project_count_inside_of_it(engine: Engine, home: Path) -> None:
    write(home / "repo/MEMORY.md", b"known")
    graph(home / "repo", "data/graph.jsonl")
    write(home / "repo/data/graph.jsonl", b"{}")
    write(home / "bad/MEMORY.md", b"known")
    graph(home / "bad", "~/private.jsonl")
    write(home / "private.jsonl", b"{}")
    receipt = await out(engine, home)
    assert await paths(engine, receipt) == {"project/MEMORY.md", "project-2/MEMORY.md", "mcp-memory/memory.jsonl"}
    assert receipt.files == 3


async def test_a_copy_of_a_sandbox_keeps_its_projects_where_they_are(engine: Engine, home: Path, other: Path) -> None:
    write(home / "MEMORY.md", b"known")
    write(home / ".codex/session_index.jsonl", b"{}")
    await out(engine, home)
    shutil.copytree(home, other, dirs_exist_ok=True)
    write(other / "MEMORY.md", b"known and more")
    receipt = await out(engine, other)
    assert receipt.outcome == "committed" and "project/MEMORY.md" in await paths(engine, receipt)
