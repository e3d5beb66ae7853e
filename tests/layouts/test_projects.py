"""Projects that nobody names: how they are found, which numbers they have, and where and when they come back."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from adapters.sandboxes.local import LocalSandbox
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.program.capture import projects
from sidecar.program.capture.projects import MOST_FOLDERS
from sidecar.program.places import Containment
from sidecar.receipts import ExportReceipt, RestoreReceipt
from tests.parts.homes import claude_mem_home, empty_home, engine_at, observe, run_cli, titles, write

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_at(tmp_path / "store")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return empty_home(tmp_path / "home")


async def out(engine: Engine, home: Path, **asked: object) -> ExportReceipt:
    return await export(engine, LocalSandbox(home), ExportRequest(memory="m", **asked))  # type: ignore[arg-type]


async def back(engine: Engine, home: Path, **asked: object) -> RestoreReceipt:
    return await restore(engine, LocalSandbox(home), RestoreRequest(memory="m", **asked))  # type: ignore[arg-type]


async def roots(engine: Engine, receipt: ExportReceipt) -> dict[str, str]:
    manifest = await engine.repository.manifest("m", receipt.snapshot or "")
    return {root.name: root.hint for root in manifest.roots}


@pytest.mark.parametrize(
    ("marker", "root"),
    [
        ("SESSION-STATE.md", "project"),
        ("MEMORY.md", "project"),
        ("memory/working-buffer.md", "project"),
        ("memory/MEMORY.md", "project"),
        (".cm/anything", "cm"),
        (".opencode/MEMORY/README.md", "pai-project"),
        ("memories/memory_summary.md", "agents-memory"),
    ],
)
async def test_a_marker_makes_a_project(marker: str, root: str, engine: Engine, home: Path) -> None:
    write(home / "workspace/repo" / marker, b"memory")
    found = await roots(engine, await out(engine, home))
    below = {"cm": "/.cm", "pai-project": "/.opencode/MEMORY"}.get(root, "")
    assert found == {root: f"~/workspace/repo{below}"}


@pytest.mark.parametrize(
    "place",
    [
        "a/b/c/d/e/MEMORY.md",
        "app/.git/MEMORY.md",
        "app/node_modules/x/MEMORY.md",
        ".openclaw/agents/MEMORY.md",
        ".claude/plugins/x/MEMORY.md",
        ".cache/memory-sidecar/x/MEMORY.md",
        "venv/lib/MEMORY.md",
        "repo/memory/notes.md",
        "repo/tasks/todo.md",
        "repo/CLAUDE.md",
    ],
)
async def test_elsewhere_it_makes_none(place: str, engine: Engine, home: Path) -> None:
    write(home / ".codex/session_index.jsonl", b"{}")
    write(home / "venv/pyvenv.cfg", b"home = /usr/bin")
    write(home / ".claude/CLAUDE.md", b"known")
    write(home / place, b"memory")
    assert set(await roots(engine, await out(engine, home))) == {"codex", "claude-code"}


async def test_a_link_leads_to_no_project(engine: Engine, home: Path, tmp_path: Path) -> None:
    write(tmp_path / "outside/MEMORY.md", b"hunter2")
    write(tmp_path / "outside/.cm/x", b"hunter2")
    (home / "link").symlink_to(tmp_path / "outside")
    (home / "app").mkdir()
    (home / "app/.cm").symlink_to(tmp_path / "outside/.cm")
    write(home / "app/MEMORY.md", b"memory")
    assert await roots(engine, await out(engine, home)) == {"project": "~/app"}


async def test_memory_that_nothing_marks_is_not_passed_over_in_silence(engine: Engine, home: Path) -> None:
    write(home / ".codex/session_index.jsonl", b"{}")
    for name in (
        "memory/2026-11-15.md",
        "docs/memory/README.md",
        "src/memory/pool.c",
        "marked/MEMORY.md",
        "marked/x/memory/a.md",
    ):
        write(home / "work/repo" / name, b"text")
    receipt = await out(engine, home)
    assert set((await roots(engine, receipt)).values()) == {"~/.codex", "~/work/repo/marked"}
    told = [line for line in receipt.warnings if "nothing says that it is memory" in line]
    assert [line.split()[0] for line in told] == [f"{home}/work/repo/memory"] and "--project" in told[0]
    named = await out(engine, home, projects=("~/work/repo",), allow=("root-missing",))
    assert not [line for line in named.warnings if "nothing says" in line]


async def test_with_names_exactly_those_are_taken(engine: Engine, home: Path) -> None:
    for name in ("a", "b"):
        write(home / name / "MEMORY.md", b"memory")
    assert await roots(engine, await out(engine, home, projects=("~/b",))) == {"project": "~/b"}


async def test_a_bound_that_is_reached_is_said(engine: Engine, home: Path) -> None:
    write(home / "app/MEMORY.md", b"near")
    for number in range(MOST_FOLDERS):
        (home / f"folder/{number}").mkdir(parents=True)
    write(home / f"folder/{MOST_FOLDERS - 1}/x/MEMORY.md", b"too far")
    receipt = await out(engine, home)
    assert await roots(engine, receipt) == {"project": "~/app"}
    assert any("Projects were looked for in 5,000 folders" in told for told in receipt.warnings)


async def test_a_project_keeps_its_number_whatever_comes_before_it(engine: Engine, home: Path, tmp_path: Path) -> None:
    write(home / "m/app/MEMORY.md", b"first")
    assert await roots(engine, await out(engine, home)) == {"project": "~/m/app"}
    write(home / "a/app/MEMORY.md", b"second")
    assert await roots(engine, await out(engine, home)) == {"project": "~/m/app", "project-2": "~/a/app"}
    shutil.rmtree(home / ".cache")  # nothing is noted here any more, but the head says where they were
    write(home / "a/app/MEMORY.md", b"changed")
    write(home / "0/app/.cm/x", b"third")
    receipt = await out(engine, home, force=True)
    assert await roots(engine, receipt) == {"project": "~/m/app", "project-2": "~/a/app", "cm": "~/0/app/.cm"}
    other = empty_home(tmp_path / "other")
    await back(engine, other)
    assert (other / "m/app/MEMORY.md").read_bytes() == b"first"
    assert (other / "a/app/MEMORY.md").read_bytes() == b"changed"


async def test_a_name_at_the_same_path_is_the_same_project_in_any_order(
    engine: Engine, home: Path, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        write(home / name / "MEMORY.md", name.encode())
    await out(engine, home, projects=("~/a", "~/b"))
    assert (await out(engine, home, projects=("~/b", "~/a"))).outcome == "unchanged"
    other = empty_home(tmp_path / "other")
    await back(engine, other, projects=("~/b", "~/a"))
    assert [(other / name / "MEMORY.md").read_text() for name in ("a", "b")] == ["a", "b"]


# Before the project is there


def repository(folder: Path) -> str:
    """A git repository to clone."""
    write(folder / "README.md", b"# A project\n")
    write(folder / "AGENTS.md", b"of the repository\n")
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)
    return str(folder)


def cloned(source: str, target: Path) -> bool:
    target.parent.mkdir(parents=True, exist_ok=True)
    return subprocess.run(["git", "clone", "-q", source, str(target)], capture_output=True).returncode == 0


async def test_a_clone_succeeds_between_two_restores(engine: Engine, tmp_path: Path) -> None:
    home, other = claude_mem_home(tmp_path / "home", rows=3), empty_home(tmp_path / "other")
    source = repository(tmp_path / "source")
    write(home / "work/app/MEMORY.md", b"of the project")
    write(home / "work/app/AGENTS.md", b"of the memory")
    await out(engine, home)

    first = await back(engine, other, withhold_projects=True)
    assert first.outcome == "complete"
    assert [(row.name, row.hint, row.files) for row in first.withheld] == [("project", "~/work/app", 2)]
    assert any("waits until ~/work/app is there" in told for told in first.warnings)
    observe(other, 2, "written before the clone")
    unsaved = await out(engine, other)
    assert unsaved.outcome == "committed", "what was withheld is not missing"
    assert len(unsaved.warnings) == 0 and set(await roots(engine, unsaved)) == {"claude-mem", "project"}
    observe(other, 1, "written later")
    before = titles(other)

    assert cloned(source, other / "work/app")
    second = await back(engine, other, withhold_projects=True)
    assert (second.outcome, second.kept, second.withheld) == ("complete", False, [])
    assert (other / "work/app/MEMORY.md").read_bytes() == b"of the project"
    assert (other / "work/app/AGENTS.md").read_bytes() == b"of the repository\n"
    assert titles(other) == before, "what was there is as it was"
    last = await out(engine, other)
    assert (last.outcome, last.kind) == ("committed", "delta")
    assert (await back(engine, other)).kept


async def test_what_was_withheld_stays_though_the_project_was_made_meanwhile(engine: Engine, tmp_path: Path) -> None:
    home, other = claude_mem_home(tmp_path / "home", rows=3), empty_home(tmp_path / "other")
    write(home / "app/MEMORY.md", b"old")
    write(home / "app/memory/2026-11-15.md", b"a day")
    await out(engine, home)
    await back(engine, other, withhold_projects=True)
    write(other / "app/MEMORY.md", b"made anew")
    write(other / "app/memory/2026-11-16.md", b"another day")
    receipt = await out(engine, other)
    assert receipt.outcome == "committed"
    third = empty_home(tmp_path / "third")
    await back(engine, third)
    assert (third / "app/memory/2026-11-15.md").read_bytes() == b"a day"
    assert (third / "app/memory/2026-11-16.md").read_bytes() == b"another day"
    assert (third / "app/MEMORY.md").read_bytes() == b"old", "what waits for its restore is not replaced"


def test_the_config_can_say_so_and_a_name_overrides_it(home: Path, tmp_path: Path) -> None:
    store, config = tmp_path / "store", tmp_path / "config.toml"
    config.write_text('[restore]\nprojects = "named"\n')
    write(home / "app/MEMORY.md", b"memory")
    write(home / "MEMORY.md", b"of the home")
    assert run_cli("export", "m", "--sandbox", f"local:{home}", store=store).code == 0
    for name, more, there in (("one", (), False), ("two", ("--project", "~", "--project", "~/app"), True)):
        other = empty_home(tmp_path / name)
        ran = run_cli("restore", "m", "--sandbox", f"local:{other}", "--config", str(config), *more, store=store)
        assert ran.code == 0, ran.document
        assert (other / "app/MEMORY.md").exists() is there and (other / "MEMORY.md").exists()
    config.write_text('[restore]\nprojects = "some"\n')
    assert run_cli("list", "--config", str(config), store=store).code == 2


# What a person names beside what the memory has


async def test_a_named_project_never_takes_the_place_of_one_that_is_still_here(engine: Engine, home: Path) -> None:
    write(home / "work/app/MEMORY.md", b"of the app")
    write(home / "work/lib/memory/notes.md", b"of the library")
    await out(engine, home)
    forgotten = await out(engine, home, projects=("~/work/lib",))
    assert (forgotten.outcome, forgotten.reason and forgotten.reason.code) == ("rejected", "root-missing")
    both = await out(engine, home, projects=("~/work/lib", "~/work/app"))
    assert both.outcome == "committed"
    assert await roots(engine, both) == {"project": "~/work/app", "project-2": "~/work/lib"}


async def test_a_project_that_has_moved_goes_on_and_it_is_said(engine: Engine, home: Path) -> None:
    write(home / "app/MEMORY.md", b"known")
    await out(engine, home)
    (home / "app").rename(home / "renamed")
    write(home / "renamed/MEMORY.md", b"known and more")
    moved = await out(engine, home, projects=("~/renamed",))
    assert moved.outcome == "committed" and await roots(engine, moved) == {"project": "~/renamed"}
    assert any("~/renamed now and was ~/app" in told for told in moved.warnings), moved.warnings


async def test_a_project_just_too_deep_is_named(engine: Engine, home: Path) -> None:
    write(home / "src/host/acme/site/MEMORY.md", b"taken")
    write(home / "src/host/acme/platform/core/MEMORY.md", b"too deep")
    receipt = await out(engine, home)
    assert await roots(engine, receipt) == {"project": "~/src/host/acme/site"}
    told = [line for line in receipt.warnings if "folders deep" in line]
    assert [line.split()[0] for line in told] == [f"{home}/src/host/acme/platform/core"] and "--project" in told[0]


@pytest.mark.parametrize("counts", [True, False])
def test_folders_are_told_by_their_links_only_where_the_file_system_counts_those(
    counts: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = ["a/MEMORY.md", "a/b/c/MEMORY.md", "d/.git/HEAD", "d/e/f/.cm/x"]
    for place in places:
        write(home / place, b"x")
    (home / "d/e/empty").mkdir()
    listed: list[str] = []

    def status(place: str) -> os.stat_result:
        found = os.stat(place, follow_symlinks=False)
        if not os.path.isdir(place):
            return found
        folders = [one for one in os.listdir(place) if os.path.isdir(f"{place}/{one}")] if counts else []
        return os.stat_result([*found[:3], 2 + len(folders), *found[4:]])

    def scan(place: str) -> Any:
        listed.append(os.path.relpath(place, home))
        return scandir(place)

    scandir = os.scandir
    monkeypatch.setattr(os, "lstat", status)
    monkeypatch.setattr(os, "scandir", scan)
    specs: list[dict[str, Any]] = [{"markers": ["MEMORY.md"]}, {"markers": [".cm/"], "below": ".cm"}]
    found = projects.find_projects([str(home)], specs, [], frozenset(), Containment(None, frozenset()))
    assert [os.path.relpath(folder, home) for folder in found.folders] == ["a", "a/b/c", "d/e/f"]
    assert ("d/e/empty" in listed) != counts
