"""``layouts`` and ``doctor --sandbox``: what would be exported, and what not, without touching anything."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from sidecar.engine.sandbox.inspection import advise
from sidecar.format.protocol import Amount, SeenDatabase, SeenRoot
from sidecar.layouts import load_built_in
from tests.parts.homes import empty_home, run_cli, tree, write
from tests.parts.samples import PROJECT, SAMPLES, SECRET, memory

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = empty_home(tmp_path / "home")
    for sample in SAMPLES.values():
        sample.build(home)
    return home


def test_layouts_are_listed_with_all_they_say(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[layouts.pai]\noptions = ['raw']")
    ran = run_cli("layouts", "--config", config, store=tmp_path / "store")
    listed = {layout["name"]: layout for layout in ran.document["layouts"]}
    assert set(listed) == set(load_built_in())
    assert listed["opencode"]["roots"][0]["env"] == ["XDG_DATA_HOME/opencode"]
    assert listed["pai"]["options"]["raw"]["on"] and not listed["pai"]["options"]["security"]["on"]
    for name in ("keep", "never", "secrets", "tiers", "databases", "coupled"):
        assert name in listed["codex"]
    assert run_cli("layouts", "codx", store=tmp_path / "store").document["error"]["hint"] == "Did you mean 'codex'?"


def test_doctor_says_what_an_export_would_bring_and_changes_nothing(home: Path, tmp_path: Path) -> None:
    write(home / PROJECT / "memory/id_ed25519", SECRET)
    before = tree(home)
    ran = run_cli("doctor", "--sandbox", f"local:{home}", "--project", f"~/{PROJECT}", store=tmp_path / "store")
    assert ran.code == 0, ran.document
    assert tree(home) == before, "looking must leave no trace"
    roots = {root["name"]: root for root in ran.document["roots"]}
    agents = {"claude-code", "claude-mem", "cm", "codex", "codymaster", "opencode", "pai", "project"}
    agents |= {"openclaw", "hermes", "letta", "mcp-memory", "agents-memory"}
    assert set(roots) == agents | {"cm-project", "pai-sessions"}
    expected = sum(about[0] == "file" for about in memory(home).values()) + 1  # settings.json, which travels changed
    assert sum(root["total"]["files"] for root in roots.values()) == expected
    assert roots["claude-mem"]["tiers"]["hot"]["bytes"] > (home / ".claude-mem/claude-mem.db").stat().st_size
    assert roots["claude-mem"]["reasons"]["secret"] == 2
    assert {"path": "codex/auth.json", "reason": "secret"} in roots["codex"]["skipped"]
    assert {"path": "project/memory/id_ed25519", "reason": "secret"} in roots["project"]["skipped"]
    assert roots["pai"]["sets"] == [{"tier": "hot", "paths": 10}]
    assert list(roots["claude-code"]["keyed"].values()) == ["~", "~/app"]
    exported = run_cli(
        "export", "m", "--sandbox", f"local:{home}", "--project", f"~/{PROJECT}", store=tmp_path / "store"
    )
    assert exported.document["files"] == expected


def test_a_layout_can_be_looked_at_alone(home: Path, tmp_path: Path) -> None:
    ran = run_cli("doctor", "--sandbox", f"local:{home}", "--layout", "codex", store=tmp_path / "store")
    assert [root["name"] for root in ran.document["roots"]] == ["codex"]


def test_free_pages_are_seen(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    write(home / ".codex/session_index.jsonl", b"{}")
    connection = sqlite3.connect(home / ".codex/state_5.sqlite")
    connection.execute("CREATE TABLE big (x)")
    connection.executemany("INSERT INTO big VALUES (?)", [(b"x" * 4000,)] * 500)
    connection.commit()
    connection.execute("DELETE FROM big")
    connection.commit()
    connection.close()
    ran = run_cli("doctor", "--sandbox", f"local:{home}", store=tmp_path / "store")
    (row,) = ran.document["roots"][0]["databases"]
    assert row["free_bytes"] > row["bytes"] * 0.9


def test_a_database_of_mostly_free_pages_comes_with_what_to_do() -> None:
    row = SeenDatabase(path="claude-mem/claude-mem.db", place="/x", bytes=100 << 20, free_bytes=90 << 20)
    root = SeenRoot(name="claude-mem", layout="claude-mem", folder="/x", tiers={"hot": Amount()}, databases=[row])
    (words,) = advise(root)
    assert "mostly free pages (90% of it)" in words and "VACUUM" in words


def test_a_sandbox_without_memory_is_found_with_what_to_do(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    ran = run_cli("doctor", "--sandbox", f"local:{home}", store=tmp_path / "store")
    assert (ran.code, ran.document["roots"]) == (1, [])
    (wrong,) = [row for row in ran.document["checks"] if not row["ok"]]
    assert (wrong["name"], wrong["code"]) == ("memory there", "no-memory")
    assert "--project PATH" in wrong["hint"] and "memory-sidecar restore" in wrong["hint"]
