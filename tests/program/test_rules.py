"""Patterns: what is memory and what is not."""

from __future__ import annotations

import pytest

from sidecar.format.patterns import Rules, compile_patterns
from sidecar.layouts import load_built_in


@pytest.mark.parametrize(
    ("pattern", "anywhere", "matches", "others"),
    [
        ("corpora/**", False, ["corpora/a", "corpora/a/b.json"], ["corpora", "x/corpora/a", "corporate/a"]),
        ("*.sock", True, ["a.sock", "deep/er/b.sock"], ["a.sock.txt"]),
        ("logs/", True, ["logs", "logs/a", "logs/a/b"], ["logs.txt", "blogs/a"]),
        ("/logs/", True, ["logs", "logs/a"], ["corpora/logs", "corpora/logs/a"]),
        ("/daemon.*", True, ["daemon.pid"], ["memory/daemon.md", "x/daemon.pid"]),
        (".cleanup-v*-applied", False, [".cleanup-v12.4.3-applied"], ["x/.cleanup-v1-applied", ".cleanup-v/1-applied"]),
        ("MEMORY/{WORK,LEARNING}/**", False, ["MEMORY/WORK/a", "MEMORY/LEARNING/b/c"], ["MEMORY/RAW/a"]),
        ("a?c", False, ["abc", "a\nc"], ["ac", "a/c"]),
        ("memory/*.md", False, ["memory/a.md", "memory/ü 🦊.md"], ["memory/a/b.md"]),
        ("a.b", False, ["a.b"], ["axb", "a.b\n"]),
    ],
)
def test_patterns(pattern: str, anywhere: bool, matches: list[str], others: list[str]) -> None:
    expression = compile_patterns([pattern], anywhere)
    assert [name for name in matches if not expression.match(name)] == []
    assert [name for name in others if expression.match(name)] == []


def test_a_walk_enters_only_folders_that_can_hold_memory() -> None:
    rules = Rules(load_built_in()["three-tier"].for_sandbox())
    assert rules.may_hold("memory")
    assert rules.may_hold("memory/deep/er")
    assert rules.may_hold("tasks")
    assert not rules.may_hold("tasks/sub")
    assert not rules.may_hold("node_modules")


def test_claude_mem_keeps_and_leaves_what_the_layout_says() -> None:
    rules = Rules(load_built_in()["claude-mem"].for_sandbox())
    assert all(rules.keep(name) for name in ("claude-mem.db", "corpora/x/y", "modes/a.json", ".cwd-remap-applied-v1"))
    assert rules.database("claude-mem.db")
    for name in (
        "worker.pid",
        "logs/a.log",
        "claude-mem.db.bak-1",
        "chroma/x",
        "chroma-sync-state.json",
        "state/x",
        "a.sock",
    ):
        assert rules.never(name), name
    assert rules.secret(".env")
    assert rules.secret("oauth-token.json")


@pytest.mark.parametrize(
    ("layout", "kept", "left"),
    [
        (
            "claude-code",
            ["memory/daemon.md", "memory/debug/flaky.md", "memory/plugins/p.md", "memory/history.jsonl"],
            ["memory/a.lock", "memory/a.tmp.1", "memory/.credentials.json"],
        ),
        ("claude-mem", ["logs/n.json", "state/n.json", "telemetry.json", "oauth-flow.json"], ["a.sock", ".env"]),
        ("pai", ["SECURITY/s.md", "RAW/r.md"], ["x.lock/pid", "a.tmp.1"]),
        ("opencode", ["snapshot/x.json", "log/x.json"], ["x.lock", "auth.json"]),
        ("codex", ["tmp/a.md", "config.toml", "log/a.md"], ["auth.json", "x.lock"]),
        ("codymaster", ["token-budget.json"], ["x.lock"]),
    ],
)
def test_what_is_meant_for_the_root_leaves_memory_of_that_name_alone(
    layout: str, kept: list[str], left: list[str]
) -> None:
    below = {
        "claude-code": "projects/-root-app/",
        "claude-mem": "corpora/",
        "pai": "LEARNING/",
        "opencode": "storage/",
        "codex": "memories/",
        "codymaster": "memory/",
    }
    rules = Rules(load_built_in()[layout].for_sandbox())
    assert [name for name in kept if not rules.allows(below[layout] + name, False)] == []
    assert [name for name in left if rules.allows(below[layout] + name, False)] == []
