"""What an agent cannot do without, what it can, and what stays or goes together."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

import pytest

from sidecar.layouts import load_built_in
from sidecar.program.limits.tiers import TierRules
from tests.parts.homes import write
from tests.parts.samples import OTHER_SESSION, SESSION


def tiers(layout: str, folder: str = "") -> TierRules:
    return TierRules(load_built_in()[layout].for_sandbox(), folder)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("claude-mem", {"claude-mem.db": "hot", "modes/x": "warm", "corpora/x": "cold", "chroma/x": "rebuildable"}),
        ("claude-code", {"projects/a/memory/x.md": "hot", "todos/x": "warm", f"projects/a/{SESSION}.jsonl": "cold"}),
        ("codymaster", {"CONTINUITY.md": "hot", "context.db": "hot", "cm-tasks.json": "warm", "skeleton.md": "cold"}),
        ("codex", {"state_5.sqlite": "hot", "session_index.jsonl": "warm", "sessions/2026/x.jsonl": "cold"}),
        ("opencode", {"opencode.db": "hot", "storage/todo/x": "warm", "storage/part/x": "cold"}),
        ("pai", {"STATE/current-work.json": "hot", "WISDOM/x": "warm", "WORK/old/x": "cold", "RESEARCH/x": "cold"}),
        ("three-tier", {"MEMORY.md": "hot", "memory/SESSION-STATE.md": "hot", "tasks/todo.md": "warm"}),
    ],
)
def test_every_layout_says_what_matters_most(layout: str, expected: dict[str, str]) -> None:
    assert {path: tiers(layout).of(path) for path in expected} == expected


def test_daily_logs_cool_down() -> None:
    today = datetime.date.today()
    ages = {age: tiers("three-tier").of(f"memory/{today - datetime.timedelta(age)}.md") for age in (-1, 0, 1, 2, 400)}
    assert ages == {-1: "warm", 0: "warm", 1: "warm", 2: "cold", 400: "cold"}
    assert tiers("three-tier").of("memory/2026-99-99.md") == tiers("three-tier").of("memory/notes.md") == "warm"


def test_the_session_written_to_last_is_hot_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    write(tmp_path / f"projects/a/{SESSION}.jsonl", b"{}")
    write(tmp_path / f"projects/b/{OTHER_SESSION}.jsonl", b"{}")
    os.utime(tmp_path / f"projects/a/{SESSION}.jsonl")
    seen = tiers("claude-code", str(tmp_path))
    assert seen.of(f"projects/a/{SESSION}.jsonl") == "hot"
    assert seen.of(f"projects/b/{OTHER_SESSION}.jsonl") == "cold"
    paths = [f"projects/a/{SESSION}.jsonl", f"projects/a/{SESSION}/subagents/x.jsonl", "projects/a/memory/x.md"]
    (together,) = seen.sets([*paths, f"projects/b/{OTHER_SESSION}.jsonl"])
    assert (together.tier, together.paths) == ("hot", paths[:2])


def test_a_pointer_and_the_folder_it_names_stay_together(tmp_path: Path) -> None:
    state = {"session_dir": "now", "work_dir": ""}
    write(tmp_path / "STATE/current-work.json", json.dumps(state).encode())
    write(tmp_path / "STATE/current-work-2.json", json.dumps({"work_dir": "now"}).encode())
    seen = tiers("pai", str(tmp_path))
    assert (seen.of("WORK/now/deep/x.md"), seen.of("WORK/nowhere/x.md")) == ("hot", "cold")
    paths = ["STATE/current-work.json", "STATE/current-work-2.json", "WORK/now", "WORK/now/deep/x.md", "WORK/old/x.md"]
    (together,) = seen.sets(paths)
    assert (together.tier, sorted(together.paths)) == ("hot", sorted(paths[:4]))


@pytest.mark.parametrize(
    "text",
    ['{"session_dir": "../LEARNING"}', '{"session_dir": ""}', '{"session_dir": [1]}', "[]", "{", "null", "[" * 9999],
)
def test_a_pointer_that_leads_nowhere_points_at_nothing(text: str, tmp_path: Path) -> None:
    write(tmp_path / "STATE/current-work.json", text.encode())
    seen = tiers("pai", str(tmp_path))
    assert (seen.of("LEARNING/x/y"), seen.of("WORK/x")) == ("warm", "cold")
    assert seen.sets(["STATE/current-work.json", "WORK/x", "LEARNING/x"]) == []


def test_sets_need_more_than_one_side() -> None:
    chroma = ["chroma/a", "chroma/b"]
    assert tiers("claude-mem").sets(chroma) == []
    (together,) = tiers("claude-mem").sets([*chroma, "chroma-sync-state.json"])
    assert (together.tier, len(together.paths)) == ("rebuildable", 3)
    (both,) = tiers("codymaster").sets(["context.db", "memory/learnings.json", "memory/decisions.json", "config.yaml"])
    assert (both.tier, len(both.paths)) == ("hot", 3)


def test_an_opencode_session_stays_or_goes_with_its_messages_and_their_parts(tmp_path: Path) -> None:
    sessions = {
        name: [
            f"storage/session/p/ses_{name}.json",
            f"storage/message/ses_{name}/msg_{name}1.json",
            f"storage/message/ses_{name}/msg_{name}2.json",
            f"storage/part/msg_{name}1/prt_1.json",
            f"storage/part/msg_{name}2/prt_2.json",
        ]
        for name in ("old", "new")
    }
    for age, paths in enumerate(sessions.values()):
        for path in paths:
            write(tmp_path / path, b"{}")
            os.utime(tmp_path / path, (age, age))
    together = tiers("opencode", str(tmp_path)).sets([path for paths in sessions.values() for path in paths])
    assert {each.tier: sorted(each.paths) for each in together} == {
        "cold": sorted(sessions["old"]),
        "hot": sorted(sessions["new"]),
    }


def test_active_sessions_and_pointers_are_found_by_the_patterns_of_a_layout(tmp_path: Path) -> None:
    layout = {
        **load_built_in()["three-tier"].for_sandbox(),
        "never": ["*.tmp.jsonl"],
        "tiers": {"cold": ["**"], "active": ["{a,.b}/*.jsonl"]},
        "pointers": [{"file": "{a,.b}/now.json", "keys": ["at"], "folder": "work/{}"}],
    }
    write(tmp_path / "a/1.jsonl", b"{}")
    write(tmp_path / ".b/2.jsonl", b"{}")
    write(tmp_path / ".b/now.json", b'{"at": "x"}')
    write(tmp_path / "a/3.tmp.jsonl", b"{}")
    for age, name in enumerate(("a/1.jsonl", ".b/2.jsonl", "a/3.tmp.jsonl")):
        os.utime(tmp_path / name, (age, age))
    seen = TierRules(layout, str(tmp_path))
    paths = ["a/1.jsonl", ".b/2.jsonl", "work/x/y.md", "work/z/y.md"]
    assert [seen.of(path) for path in paths] == ["cold", "hot", "hot", "cold"]
