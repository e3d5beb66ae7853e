"""Claude Code names a project's folder after its path: memory is found again where that path is another."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from adapters.sandboxes.local import LocalSandbox
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.archives.tarballs import adopt, download
from sidecar.engine.exports.arrival import _check_keyed
from sidecar.errors import UntrustedSandbox
from sidecar.format.protocol import ExportAnswer, FoundRoot
from sidecar.program.capture.project_folders import make_slug
from sidecar.receipts import ExportReceipt
from sidecar.store.manifest import Manifest
from sidecar.store.selectors import resolve_snapshot
from tests.parts.homes import empty_home, engine_at, forget_caches, write

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "m"
LONG = f"/tmp/real/h/claude/{'d' * 120}/{'é' * 60}/🧠/x_y"


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_at(tmp_path / "store")


def session(home: Path, project: Path, name: str = "s1", text: str = "said") -> Path:
    """A project with a transcript and a memory, as Claude Code keeps them. Return its folder."""
    project.mkdir(parents=True, exist_ok=True)
    folder = home / ".claude/projects" / make_slug(str(project.resolve()), 200)
    write(folder / f"{name}.jsonl", (json.dumps({"cwd": str(project.resolve()), "text": text}) + "\n").encode())
    write(folder / "memory/MEMORY.md", text.encode())
    return folder


async def out(engine: Engine, home: Path, *projects: str) -> tuple[ExportReceipt, Manifest]:
    request = ExportRequest(memory=MEMORY, projects=projects or None)
    receipt = await export(engine, LocalSandbox(home), request)
    assert receipt.outcome in ("committed", "unchanged"), receipt
    return receipt, await engine.repository.manifest(MEMORY, receipt.snapshot or "")


async def into(engine: Engine, home: Path, *projects: str) -> list[str]:
    """Restore; return the warnings."""
    empty_home(home) if not home.exists() else None
    receipt = await restore(engine, LocalSandbox(home), RestoreRequest(memory=MEMORY, projects=projects or None))
    assert receipt.outcome == "complete", receipt
    return receipt.warnings


def folders(home: Path) -> set[str]:
    return set(os.listdir(home / ".claude/projects"))


def said(home: Path, project: Path) -> str:
    """What Claude Code would find in a project."""
    return (home / ".claude/projects" / make_slug(str(project.resolve()), 200) / "memory/MEMORY.md").read_text()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/user/my_app.v2", "-home-user-my-app-v2"),
        ("/home/user/cafe\u0301", "-home-user-caf-"),
        ("/home/user/🧠", "-home-user---"),
        ("/" + "a" * 199, "-" + "a" * 199),
        (LONG, f"-tmp-real-h-claude-{'d' * 120}{'-' * 61}-hbbft1"),
    ],
)
def test_names_are_those_the_program_gives(path: str, name: str) -> None:
    """The last was made by Claude Code 2.1.197 itself."""
    assert make_slug(path, 200) == name


async def test_store_names_stay_when_the_home_changes_twice(engine: Engine, tmp_path: Path) -> None:
    homes = [tmp_path / "home/user", tmp_path / "root", tmp_path / "elsewhere/deep"]
    session(empty_home(homes[0]), homes[0] / "app")
    _, manifest = await out(engine, homes[0])
    (path,) = manifest.keyed
    assert manifest.keyed == {path: "~/app"}
    for number, home in enumerate(homes[1:]):
        await into(engine, home)
        assert said(home, home / "app") == ("said later" if number else "said")
        assert len(folders(home)) == 1
        assert (await out(engine, home))[0].outcome == "unchanged"
        session(home, home / "app", f"s{number + 2}", "said later")
        receipt, manifest = await out(engine, home)
        assert manifest.keyed == {path: "~/app"}
        assert (receipt.kind, receipt.files) == ("delta", number + 3)


async def test_a_project_named_elsewhere_takes_its_memory_and_that_of_its_folders_along(
    engine: Engine, tmp_path: Path
) -> None:
    home, other = empty_home(tmp_path / "home"), tmp_path / "other"
    session(home, tmp_path / "work/app")
    session(home, tmp_path / "work/app/packages/web", text="web")
    session(home, home / "mine", text="mine")
    await out(engine, home, str(tmp_path / "work/app"))
    await into(engine, other, str(other / "code"))
    assert said(other, other / "code") == "said"
    assert said(other, other / "code/packages/web") == "web"
    assert said(other, other / "mine") == "mine"
    assert (await out(engine, other, str(other / "code")))[0].outcome == "unchanged"


async def test_a_tarball_says_which_projects_the_folders_in_it_are_of(engine: Engine, tmp_path: Path) -> None:
    home, archive = empty_home(tmp_path / "home"), tmp_path / "out.tar"
    session(home, tmp_path / "work/app")
    session(home, home / "mine", text="mine")
    write(session(home, home / "quiet", text="quiet") / "s1.jsonl", b"{}\n")
    _, manifest = await out(engine, home, str(tmp_path / "work/app"))
    with archive.open("wb") as file:
        await download(engine, MEMORY, "latest", file, "")
    listed = subprocess.run(["tar", "-tf", archive], check=True, capture_output=True)
    assert listed.stderr == b""
    await adopt(engine, archive, ExportRequest(memory="twin"))
    twin = await engine.repository.manifest("twin", await resolve_snapshot(engine.repository, "twin", "latest"))
    assert (twin.tree, twin.keyed, twin.projects) == (manifest.tree, manifest.keyed, manifest.projects)

    other = empty_home(tmp_path / "other")
    await restore(engine, LocalSandbox(other), RestoreRequest(memory="twin", projects=(str(other / "code"),)))
    assert said(other, other / "code") == "said"
    assert said(other, other / "mine") == "mine"
    assert said(other, other / "quiet") == "quiet"
    only = await adopt(engine, archive, ExportRequest(memory="some", layouts=("three-tier",), allow=("empty",)))
    assert (only.outcome, only.files) == ("committed", 0)


async def test_the_only_project_is_the_one_that_is_named_later(engine: Engine, tmp_path: Path) -> None:
    home, other = empty_home(tmp_path / "home"), tmp_path / "other"
    session(home, home / "app")
    await out(engine, home)
    await into(engine, other, str(other / "code"))
    assert said(other, other / "code") == "said"


async def test_a_project_nobody_knows_keeps_its_name(engine: Engine, tmp_path: Path) -> None:
    home, other = empty_home(tmp_path / "home"), tmp_path / "other"
    session(home, home / "app")
    stranger = home / ".claude/projects/-opt-thing"
    write(stranger / "s.jsonl", b'{"cwd": "/opt/other"}\n{"cwd": 3}\n{"cwd": "cut sho')
    _, manifest = await out(engine, home)
    assert list(manifest.keyed.values()) == ["~/app"]
    (warning,) = await into(engine, other)
    assert "-opt-thing" in folders(other)
    assert "claude-code/projects/-opt-thing keeps the name it had" in warning and "--project" in warning


@pytest.mark.parametrize("place", ["app", "work/my.app"])
async def test_a_project_without_a_transcript_is_found_by_its_folder_near_the_home(
    place: str, engine: Engine, tmp_path: Path
) -> None:
    home, other = empty_home(tmp_path / "home"), tmp_path / "other"
    folder = session(home, home / place)
    (folder / "s1.jsonl").unlink()
    _, manifest = await out(engine, home)
    assert list(manifest.keyed.values()) == [f"~/{place}"]
    assert await into(engine, other) == []
    assert said(other, other / place) == "said"


async def test_a_project_that_is_gone_keeps_its_name_and_that_is_said_in_another_home_only(
    engine: Engine, tmp_path: Path
) -> None:
    home, other = empty_home(tmp_path / "home"), tmp_path / "other"
    folder = session(home, home / "app")
    (folder / "s1.jsonl").unlink()
    (home / "app").rmdir()
    await out(engine, home)
    (warning,) = await into(engine, other)
    assert f"claude-code/projects/{folder.name} keeps the name it had" in warning
    home.rename(tmp_path / "gone")
    assert await into(engine, home) == []


async def test_a_project_outside_the_home_that_nobody_moved_stays(engine: Engine, tmp_path: Path) -> None:
    home, other = empty_home(tmp_path / "home"), tmp_path / "other"
    folder = session(home, tmp_path / "srv/app")
    await out(engine, home)
    await into(engine, other)
    assert folders(other) == {folder.name}


async def test_a_new_project_with_an_old_ones_name_is_not_mixed_with_it(engine: Engine, tmp_path: Path) -> None:
    """The store calls a folder as it was first called. Another that is really called so now must not become the same."""
    home, other = empty_home(tmp_path / "home"), tmp_path / "other"
    session(home, tmp_path / "srv/app", text="old")
    await out(engine, home, str(tmp_path / "srv/app"))
    await into(engine, other, str(other / "code"))
    session(other, tmp_path / "srv/app", text="new")
    _, manifest = await out(engine, other, str(other / "code"))
    assert manifest.files == 4
    third = tmp_path / "third"
    await into(engine, third, str(third / "code"))
    assert (said(third, third / "code"), said(third, tmp_path / "srv/app")) == ("old", "new")


async def test_two_projects_that_come_to_one_path_are_both_kept_and_it_is_said(engine: Engine, tmp_path: Path) -> None:
    home, other = empty_home(tmp_path / "home"), tmp_path / "other"
    session(home, tmp_path / "srv/app", text="named")
    session(home, home / "code", text="at home")
    await out(engine, home, str(tmp_path / "srv/app"))
    (warning,) = await into(engine, other, str(other / "code"))
    assert "another project's folder" in warning
    assert said(other, other / "code") == "named"
    assert sorted(path.read_text() for path in other.rglob("MEMORY.md")) == ["at home", "named"]
    assert (await out(engine, other, str(other / "code")))[0].outcome == "unchanged"


async def test_without_its_notes_a_sandbox_exports_in_full_and_nothing_twice(engine: Engine, tmp_path: Path) -> None:
    home, other = empty_home(tmp_path / "home"), tmp_path / "other"
    session(home, home / "app")
    await out(engine, home)
    await into(engine, other)
    forget_caches(other)
    receipt = await export(engine, LocalSandbox(other), ExportRequest(memory=MEMORY, force=True))
    assert (receipt.outcome, receipt.kind, receipt.files) == ("committed", "full", 2)


@pytest.mark.parametrize(
    "claim",
    [
        {"keyed": {"claude-code/projects/-a/b": "~/a"}},
        {"keyed": {"claude-code/todos/x": "~/a"}},
        {"keyed": {"claude-code/projects/..": "~/a"}},
        {"keyed": {"claude-code/projects/-a": "~/../a"}},
        {"keyed": {"claude-code/projects/-a": "relative"}},
        {"keyed": {"claude-code/projects/-a": "/" + "a" * 5000}},
        {"projects": ["~/a\0b"]},
        {"versions": {"claude-code": "1" * 1000}},
    ],
)
def test_a_sandbox_that_lies_about_projects_is_refused(claim: dict[str, object], engine: Engine) -> None:
    root = FoundRoot(name="claude-code", layout="claude-code", hint="~/.claude")
    answer = ExportAnswer(status="changed", memory="m", snapshot="s", roots=[root], **claim)  # type: ignore[arg-type]
    with pytest.raises(UntrustedSandbox):
        _check_keyed(engine, answer)
