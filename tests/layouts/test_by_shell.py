"""The layouts where a sandbox has no Python: coarser, but nothing secret leaves and what cannot be had is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.engine import ExportRequest, RestoreRequest, export, restore
from tests.parts.homes import empty_home, engine_at
from tests.parts.memories import BareSandbox, shell_tools
from tests.parts.samples import PROJECT, SAMPLES, leaked, memory

PROJECTS = (f"~/{PROJECT}",)


@pytest.mark.parametrize("layout", ["claude-code", "codex", "codymaster", "opencode", "pai"])
async def test_a_memory_leaves_and_arrives_by_sh_and_tar(layout: str, tmp_path: Path) -> None:
    engine, tools = engine_at(tmp_path / "store"), shell_tools(tmp_path / "tools")
    home, other = empty_home(tmp_path / "home"), empty_home(tmp_path / "other")
    SAMPLES[layout].build(home)
    sent = await export(engine, BareSandbox(home, tools), ExportRequest(memory="m", projects=PROJECTS))
    assert sent.outcome == "committed", sent
    got = await restore(engine, BareSandbox(other, tools), RestoreRequest(memory="m", projects=PROJECTS))
    assert (got.outcome, leaked(other)) == ("complete", [])
    expected = {name for name in memory(home) if not (layout == "opencode" and name.endswith(b".db"))}
    if layout == "claude-code":  # without Python nobody can rename folders, and the receipt says so
        assert any("named after the paths" in warning for warning in got.warnings)
        assert {name.split(b"/")[-1] for name in memory(other)} == {name.split(b"/")[-1] for name in expected}
    else:
        assert set(memory(other)) == expected
    if layout == "opencode":
        assert any("opencode*.db was left out" in warning for warning in sent.warnings)


async def test_memory_that_is_called_like_something_else_in_the_root_leaves_too(tmp_path: Path) -> None:
    engine, tools, home = engine_at(tmp_path / "store"), shell_tools(tmp_path / "tools"), empty_home(tmp_path / "home")
    kept = [
        ".claude/projects/-app/memory/daemon.md",
        ".claude/projects/-app/memory/debug/flaky.md",
        ".claude-mem/corpora/logs/settings.json",
        ".config/opencode/MEMORY/STATE/progress/x-streak.json",
        ".config/opencode/MEMORY/LEARNING/SECURITY/s.md",
        ".local/share/opencode/storage/snapshot/x.json",
    ]
    left = [".claude/projects/-app/memory/x.lock/pid", ".config/opencode/MEMORY/STATE/x/a-cache.json"]
    for name in kept + left:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    sent = await export(engine, BareSandbox(home, tools), ExportRequest(memory="m"))
    assert sent.files == len(kept)
    other = empty_home(tmp_path / "other")
    await restore(engine, BareSandbox(other, tools), RestoreRequest(memory="m"))
    assert [name for name in kept if not (other / name).is_file()] == []
