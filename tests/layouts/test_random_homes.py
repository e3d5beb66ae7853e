"""What is exported out of random homes when nobody names a project is what a plain model of the rules says."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from sidecar.engine import Engine, ExportRequest, export
from sidecar.host.files import open_spool
from sidecar.store.fetch import fetch_entries
from tests.parts.homes import WatchedSandbox, empty_home, engine_at, write

pytestmark = pytest.mark.usefixtures("forked_programs")

HOMES, SLICE = 2_000, 40

AGENTS = (".claude-mem", ".claude", ".codex", ".openclaw", ".hermes", ".letta", ".mcp-memory", ".local/share/opencode")
"""Folders of agents, of which no project is part."""
FOLDERS = ("a", "b", "work", "memory", "tasks", ".hidden", ".git", "node_modules", "venv", ".cm", ".opencode", "MEMORY")
NAMES = (
    *("MEMORY.md", "SESSION-STATE.md", "working-buffer.md", "CLAUDE.md", "AGENTS.md", "cm-tasks.json", "todo.md"),
    *("main.py", "x.lock", ".env", "unknown.bin", "2026-11-15.md"),
)
OF_AGENTS = (
    *(".claude-mem/new.json", ".claude-mem/logs/x.log", ".claude-mem/worker.pid", ".claude-mem/a/.env"),
    *(
        ".claude/CLAUDE.md",
        ".claude/projects/-x/memory/MEMORY.md",
        ".claude/plugins/x/MEMORY.md",
        ".claude/skills.json",
    ),
    *(".codex/sessions/1.jsonl", ".codex/auth.json", ".codex/MEMORY.md", ".openclaw/workspace/MEMORY.md"),
    *(
        ".openclaw/workspace/memory/deep/x.md",
        ".openclaw/state/x.json",
        ".hermes/memories/USER.md",
        ".hermes/MEMORY.md",
    ),
    *(".letta/agents/a/memory/.git/HEAD", ".letta/agents/a/memory/.git/config", ".letta/agents/a/memory/x.md"),
)
TAKEN = {
    *(".claude-mem/new.json", ".claude/CLAUDE.md", ".claude/projects/-x/memory/MEMORY.md", ".codex/sessions/1.jsonl"),
    *(".openclaw/workspace/MEMORY.md", ".openclaw/workspace/memory/deep/x.md", ".hermes/memories/USER.md"),
    *(".letta/agents/a/memory/.git/HEAD", ".letta/agents/a/memory/x.md"),
}


def build(home: Path, chance: random.Random) -> None:
    """A home of mixed layouts, links, nested repositories and markers in odd places."""
    for name in OF_AGENTS:
        if chance.random() < 0.5:
            write(home / name, name.encode())
    folders = [home]
    for _ in range(chance.randrange(5, 60)):
        folder = chance.choice(folders) / chance.choice(FOLDERS)
        if (
            len(folder.relative_to(home).parts) <= 7
            and not folder.is_symlink()
            and (not folder.exists() or folder.is_dir())
        ):
            folder.mkdir(parents=True, exist_ok=True)
            folders.append(folder)
    for _ in range(chance.randrange(5, 60)):
        place = chance.choice(folders) / chance.choice(NAMES)
        if not place.exists():
            write(place, str(place.relative_to(home)).encode())
    for folder in folders:
        if folder.name == "venv" and chance.random() < 0.8:
            write(folder / "pyvenv.cfg", b"home = /usr/bin")
        if chance.random() < 0.05 and not (folder / "link").exists():
            (folder / "link").symlink_to(chance.choice(folders))
    if chance.random() < 0.3:
        for number in range(chance.randrange(400)):
            write(home / f"huge/{number % 20}/{number}.txt", b"")


def expected(home: Path) -> set[str]:
    """The files that are memory, by the words of the documentation."""
    every = {
        os.path.relpath(os.path.join(folder, name), home)
        for folder, _, names in os.walk(home)
        for name in names
        if not os.path.islink(os.path.join(folder, name))
    }
    inside = {"/".join(path.split("/")[:depth]) for path in every for depth in range(1, path.count("/") + 1)}
    inside |= {os.path.relpath(folder, home) for folder, _, _ in os.walk(home)} - {"."}

    def has(folder: str, name: str) -> bool:
        return os.path.normpath(f"{folder}/{name}") in every

    def is_marked(folder: str) -> bool:
        files = ("MEMORY.md", "SESSION-STATE.md", *(f"memory/{name}" for name in ("MEMORY.md", "SESSION-STATE.md")))
        return (
            any(has(folder, name) for name in (*files, "memory/working-buffer.md"))
            or os.path.normpath(f"{folder}/.cm") in inside
            or os.path.normpath(f"{folder}/.opencode/MEMORY") in inside
        )

    def is_in(path: str, folder: str) -> bool:
        return path == folder or path.startswith(f"{folder}/")

    projects = ["."]
    for folder in sorted(inside, key=lambda folder: folder.count("/")):
        ways = ["/".join(folder.split("/")[:depth]) for depth in range(1, folder.count("/") + 2)]
        own = [
            os.path.normpath(f"{p}/{name}")
            for p in projects
            for name in ("memory", ".cm", ".opencode/MEMORY", "memories")
        ]
        if (
            len(ways) <= 4
            and is_marked(folder)
            and not {".git", "node_modules"} & set(folder.split("/"))
            and not any(has(way, "pyvenv.cfg") for way in ways)
            and not any(is_in(folder, agent) for agent in AGENTS)
            and not any(is_in(folder, other) for other in own)
            and not (is_in(folder, ".opencode") and ".opencode/MEMORY" in inside)
        ):
            projects.append(folder)
    taken = TAKEN & every
    for project in projects:
        names = ["MEMORY.md", "SESSION-STATE.md", "tasks/todo.md", "cm-tasks.json"]
        names += ["CLAUDE.md", "AGENTS.md"] if is_marked(project) else []
        taken |= {path for name in names if (path := os.path.normpath(f"{project}/{name}")) in every}
        for name in ("memory", ".cm", ".opencode/MEMORY"):
            taken |= {path for path in every if path.startswith(os.path.normpath(f"{project}/{name}") + "/")}
    return {path for path in taken if not path.endswith((".lock", ".env"))}


async def exported(engine: Engine, home: Path, memory: str) -> set[str]:
    receipt = await export(engine, WatchedSandbox(home), ExportRequest(memory=memory))
    if receipt.outcome == "rejected":
        assert receipt.reason is not None and receipt.reason.code == "empty"
        return set()
    manifest = await engine.repository.manifest(memory, receipt.snapshot or "")
    places = {root.name: root.hint for root in manifest.roots}
    async with open_spool() as scratch:
        entries, _, _ = await fetch_entries(engine.repository.store, manifest, scratch)
    files = [path.partition("/") for path, entry in entries.items() if entry.type == "file"]
    paths = [os.path.normpath(f"{places[root]}/{name}".removeprefix("~/").removeprefix("~")) for root, _, name in files]
    paths = [path.lstrip("/") for path in paths]
    twice = {path for path in paths if paths.count(path) > 1}
    assert not twice, f"taken twice: {twice}, by {places}"
    return set(paths)


async def _check(first: int, count: int, tmp_path: Path) -> None:
    engine = engine_at(tmp_path / "store")
    for seed in range(first, first + count):
        home = empty_home(tmp_path / f"home-{seed}")
        build(home, random.Random(seed))
        assert await exported(engine, home, f"m{seed}") == expected(home), f"seed {seed}"


@pytest.mark.parametrize("first", range(0, SLICE, 10))
async def test_what_is_exported_is_what_the_model_says(first: int, tmp_path: Path) -> None:
    await _check(first, 10, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SLICE, HOMES, 40))
async def test_and_of_many_more_homes(first: int, tmp_path: Path) -> None:
    await _check(first, 40, tmp_path)
