"""A realistic memory of each layout, after the public code of its program, with every trap that was seen in the wild.

Whatever must stay behind holds the word ``SECRET``; everything else in such a home is memory.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.parts.homes import LONG_AGO, Tree, claude_mem_home, three_tier_home, tree, write

SECRET = b"hunter2"
SESSION = "0b5a3c1e-77aa-4d52-9f3e-1c2d3e4f5a6b"
OTHER_SESSION = "91e4b0aa-0000-4c42-a1cb-45d581d5ac97"
PROJECT = "app"


def slug(path: Path) -> str:
    """Claude Code's name for a project's folder, as far as short paths in ASCII go."""
    return re.sub("[^a-zA-Z0-9]", "-", str(path.resolve()))


def claude_mem(home: Path) -> None:
    claude_mem_home(home, rows=60)


def three_tier(home: Path) -> None:
    project = three_tier_home(home / PROJECT)
    for name in ("memory/.#2026-11-15.md", "memory/2026-11-15.md.swp", "src/main.py", "tasks/scratch.txt"):
        write(project / name, b"not memory: " + SECRET)


def claude_code(home: Path) -> None:
    data = home / ".claude"
    app, own = data / "projects" / slug(home / PROJECT), data / "projects" / slug(home)
    (home / PROJECT).mkdir(exist_ok=True)
    write(app / "memory/MEMORY.md", b"- [Likes brevity](user.md)\n")
    write(app / "memory/user.md", "likes brevity ✓\n".encode())
    write(app / f"{SESSION}.jsonl", _transcript(SESSION, home / PROJECT))
    write(app / f"{SESSION}/subagents/agent-a1b2.jsonl", _transcript(SESSION, home / PROJECT))
    write(app / f"{SESSION}/tool-results/toolu_1.txt", b"what a tool said\n" * 40)
    write(app / "agent-a1b2.jsonl", _transcript(SESSION, home / PROJECT))
    write(own / f"{OTHER_SESSION}.jsonl", _transcript(OTHER_SESSION, home))
    write(data / f"projects/-somewhere-nobody-knows/{OTHER_SESSION}.jsonl", b'{"type":"summary"}\n')
    write(data / f"todos/{SESSION}-agent-{SESSION}.json", b'[{"content":"finish","status":"pending"}]')
    write(data / f"tasks/{SESSION}/1.json", b'{"id":"1","status":"open"}')
    write(data / "plans/brave-otter.md", b"# Plan\n")
    write(data / "CLAUDE.md", b"Answer briefly.\n")
    _stays(
        data,
        *("debug/latest.txt", "shell-snapshots/snapshot-bash-1.sh", "session-env/x/env.sh", "paste-cache/1.txt"),
        *("image-cache/1.png", "telemetry/1p_failed.json", "ide/4711.lock", "daemon.pid", "daemon.log"),
        *("stats-cache.json", "plugins/cache/x/plugin.json", "plugins/installed_plugins.json", ".credentials.json"),
        *("history.jsonl", "settings.json", "backups/.claude.json.backup.1", "statsig/cache.json"),
        f"projects/{slug(home / PROJECT)}/{SESSION}.jsonl.tmp.17",
    )
    write(home / ".claude.json", b'{"oauthAccount": "' + SECRET + b'"}')


def pai(home: Path) -> None:
    place = home / ".config/opencode"
    data, work = place / "MEMORY", "WORK/20261116-101500_ship-the-thing"
    write(data / work / "META.yaml", b'status: "ACTIVE"\n')
    write(data / work / "tasks/001_ship/ISC.json", b'{"criteria": []}\n')
    write(data / work / "tasks/001_ship/THREAD.md", b"# Thread\n" * 30)
    (data / work / "tasks/current").symlink_to("001_ship")
    (data / work / "scratch").mkdir()
    write(data / "WORK/20260101-000000_long-done/META.yaml", b'status: "COMPLETED"\n')
    for session in ("", "-ses_1"):
        state = {"session_id": "ses_1", "session_dir": Path(work).name, "current_task": "001_ship"}
        write(data / f"STATE/current-work{session}.json", json.dumps(state, indent=2).encode())
    write(data / "STATE/progress/ship-progress.json", b"{}")
    for name in ("README.md", "STATE/algorithm-state.json", "STATE/session-names.json", "NEW/next year.md"):
        write(data / name, name.encode())
    write(place / "projects/app/2026/ses_1.jsonl", b"{}\n" * 20)
    write(data / "LEARNING/ALGORITHM/2026-11/learned.md", b"# Learned\n")
    write(data / "LEARNING/FAILURES/2026-11/x/CONTEXT.md", b"# What went wrong\n")
    write(data / "LEARNING/FAILURES/2026-11/x/transcript.jsonl", b"{}\n" * 9)
    for folder in ("RESEARCH/2026-11", "RELATIONSHIP/2026-11", "WISDOM/FRAMES", "PAISYSTEMUPDATES"):
        write(data / folder / "note.md", folder.encode())
    _stays(
        data,
        *("STATE/model-cache.json", "STATE/deep/er/last-response-cache.txt", "STATE/integrity/last.json"),
        *(
            "STATE/learning-streak.json",
            "RAW/2026-11/all.jsonl",
            "SECURITY/2026/events.jsonl",
        ),
        *(f"{work}/tasks/001_ship/ISC.json.lock/owner.json", "STATE/current-work.json.tmp.4711"),
        *("STATE/progress/ship-progress.json.lock/pid", "WORK/.env"),
    )
    _stays(place, "opencode.json", "plugins/pai-unified.ts", "node_modules/x/index.js")


def codymaster(home: Path) -> None:
    data = home / PROJECT / ".cm"
    write(data / "CONTINUITY.md", b"# CodyMaster Working Memory\nCurrent Phase: executing\n")
    write(data / "config.yaml", b"storage:\n  backend: sqlite\n")
    write(data / "memory/learnings.json", b'[{"id": "l1"}]')
    write(data / "memory/decisions.json", b'[{"id": "d1"}]')
    for name in ("context-bus.json", "skeleton.md", "architecture.mmd", "cm-tasks.json", "what comes next.txt"):
        write(data / name, name.encode())
    for name in ("learnings.json", "meta-learnings.json", "decisions.json", "../cm-tasks.json"):
        write(data / name, b'[{"id": "s1"}]')
    write(home / PROJECT / "AGENTS.md", b"# How we work\n")
    database(
        data / "context.db",
        "CREATE TABLE learnings (id TEXT PRIMARY KEY, what_failed TEXT NOT NULL)",
        "CREATE VIRTUAL TABLE learnings_fts USING fts5(what_failed, content=learnings, content_rowid=rowid)",
        "CREATE TRIGGER learnings_ai AFTER INSERT ON learnings BEGIN"
        " INSERT INTO learnings_fts(rowid, what_failed) VALUES (new.rowid, new.what_failed); END",
        "INSERT INTO learnings VALUES ('l1', 'the build')",
    )
    write(home / ".codymaster/kanban.json", b'{"projects": [], "version": 4}')
    write(home / ".codymaster/profile.json", b'{"name": "somebody"}')
    _stays(data, "memory/learnings-index.md", "skeleton-index.md", "token-budget.json", "memory/learnings.json.backup")
    _stays(home / ".codymaster", "dashboard.pid", "kanban.json.backup", ".env")


def codex(home: Path) -> None:
    data = home / ".codex"
    rollout = f"sessions/2026/11/16/rollout-2026-11-16T14-08-23-{SESSION}.jsonl"
    line = {"type": "session_meta", "payload": {"id": SESSION, "cwd": str(home / PROJECT)}}
    write(data / rollout, (json.dumps(line) + "\n").encode() * 20)
    write(data / f"archived_sessions/rollout-2026-01-01T00-00-00-{OTHER_SESSION}.jsonl", b"{}\n")
    write(data / "session_index.jsonl", json.dumps({"id": SESSION}).encode() + b"\n")
    write(data / "memories/MEMORY.md", b"# Memory\n")
    threads = "CREATE TABLE threads (id TEXT PRIMARY KEY, rollout_path TEXT)"
    for number in (4, 5):
        row = f"INSERT INTO threads VALUES ('{SESSION}', '{data / rollout}')"
        database(data / f"state_{number}.sqlite", threads, row)
    turn = f"INSERT INTO thread_turns VALUES ('{SESSION}')"
    database(data / "thread_history_1.sqlite", "CREATE TABLE thread_turns (id TEXT)", turn)
    for name in ("queue_1", "logs_2"):
        database(data / f"{name}.sqlite", "CREATE TABLE items (x)", f"INSERT INTO items VALUES ('{SECRET.decode()}')")
    _stays(
        data,
        *(
            "auth.json",
            "config.toml",
            "history.jsonl",
            "log/codex-tui.log",
            "installation_id",
            ".tmp/plugins.sync.lock",
        ),
        *("thread-writer-locks/.coordination.lock", "shell_snapshots/1.sh", "skills/.system/x/SKILL.md"),
    )


def opencode(home: Path) -> None:
    data = home / ".local/share/opencode"
    write(data / "storage/session/global/ses_1.json", b'{"id": "ses_1"}')
    write(data / "storage/message/ses_1/msg_1.json", b'{"role": "user"}')
    write(data / "storage/part/msg_1/prt_1.json", b'{"text": "remember"}')
    write(data / "storage/migration", b"2")
    write(data / "project/global/storage/session/info/ses_0.json", b"{}")
    for name in ("opencode", "opencode-dev"):
        database(
            data / f"{name}.db",
            "CREATE TABLE session (id TEXT PRIMARY KEY, directory TEXT)",
            "CREATE TABLE credential (id TEXT PRIMARY KEY, value TEXT)",
            "CREATE TABLE account (id TEXT PRIMARY KEY, access_token TEXT, refresh_token TEXT)",
            f"INSERT INTO session VALUES ('ses_1', '{home / PROJECT}')",
        )
    _stays(
        data,
        "auth.json",
        "account.json",
        "mcp-auth.json",
        "log/opencode.log",
        "repos/x/HEAD",
        "bin/rg",
        "snapshot/x/HEAD",
    )


def openclaw(home: Path) -> None:
    data = home / ".openclaw"
    for name in (
        "MEMORY.md",
        "USER.md",
        "DREAMS.md",
        "memory/2026-11-15.md",
        "memory/2026-11-15-ship.md",
        "memory/x.txt",
    ):
        write(data / "workspace" / name, name.encode() * 9)
    write(data / "workspace-second/MEMORY.md", b"of another agent")
    secret = f"INSERT INTO auth VALUES ('{SECRET.decode()}')"
    database(data / "state/openclaw.sqlite", "CREATE TABLE auth (x)", secret)
    _stays(
        data,
        *("openclaw.json", "credentials/oauth.json", "agents/main/agent/auth-profiles.json", "logs/gateway.log"),
        *("secrets.json", "workspace/memory/.env", "workspace/memory/2026-11-15.md.swp", "workspace/src/main.ts"),
    )


def hermes(home: Path) -> None:
    data = home / ".hermes"
    write(data / "memories/MEMORY.md", "uses pnpm\n§\nlikes brevity\n".encode())
    write(data / "memories/USER.md", b"somebody\n")
    _stays(
        data, ".env", "auth.json", "config.yaml", "logs/agent.log", "memories/MEMORY.md.lock", "memories/MEMORY.md.bak"
    )


def letta(home: Path) -> None:
    data = home / ".letta/agents/agent-1/memory"
    write(data / "system/persona.md", b"---\ndescription: who I am\n---\n")
    write(data / "reference/notes.md", b"# Notes\n")
    for name, text in (("HEAD", b"ref: refs/heads/main\n"), ("refs/heads/main", b"1" * 40), ("objects/ab/cdef", b"\0")):
        write(data / ".git" / name, text)
    _stays(data / ".git", "config", "hooks/pre-commit", "index.lock")
    _stays(home / ".letta", "settings.json", ".env")


def openai_agents(home: Path) -> None:
    project = home / PROJECT
    for name in (
        "MEMORY.md",
        "memory_summary.md",
        "raw_memories/r1.md",
        "rollout_summaries/s1.md",
        "skills/x/SKILL.md",
    ):
        write(project / "memories" / name, name.encode() * 5)
    write(project / "memories/phase_two_selection.json", b"{}")
    write(project / "sessions/run-1.jsonl", b"{}\n" * 20)
    _stays(project, "sessions/cache.bin", "memories/.env", "lib/app.py")


def mcp_memory(home: Path) -> None:
    write(home / ".mcp-memory/memory.jsonl", b'{"type":"entity","name":"pnpm"}\n' * 9)
    _stays(home / ".mcp-memory", "notes.txt", ".env")


def _stays(folder: Path, *names: str) -> None:
    for name in names:
        write(folder / name, name.encode() + b": stays here, " + SECRET)


def _transcript(session: str, cwd: Path) -> bytes:
    rows: Iterable[dict[str, object]] = (
        {"type": "file-history-snapshot", "messageId": "m0"},
        *({"type": "user", "cwd": str(cwd.resolve()), "sessionId": session, "n": n} for n in range(30)),
    )
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def database(path: Path, *statements: str) -> None:
    """Run statements in a database with a write-ahead log, and leave it closed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        with connection:
            for statement in statements:
                connection.execute(statement)
    finally:
        connection.close()
    os.utime(path, ns=(LONG_AGO, LONG_AGO))


@dataclass(frozen=True)
class Sample:
    """How to build a memory of a layout, and what a conversation adds to it."""

    build: Callable[[Path], None]
    grows: str
    """A file of it, with ``{app}`` for Claude Code's name of the project."""

    def grow(self, home: Path) -> None:
        with (home / self.grows.format(app=slug(home / PROJECT))).open("ab") as file:
            file.write(b'{"later": true}\n')


SAMPLES = {
    "hermes": Sample(hermes, ".hermes/memories/MEMORY.md"),
    "letta": Sample(letta, ".letta/agents/agent-1/memory/reference/notes.md"),
    "mcp-memory": Sample(mcp_memory, ".mcp-memory/memory.jsonl"),
    "openai-agents": Sample(openai_agents, f"{PROJECT}/memories/MEMORY.md"),
    "openclaw": Sample(openclaw, ".openclaw/workspace/MEMORY.md"),
    "claude-code": Sample(claude_code, ".claude/projects/{app}/" + SESSION + ".jsonl"),
    "claude-mem": Sample(claude_mem, ".claude-mem/corpora/with blank.md"),
    "codex": Sample(codex, f".codex/sessions/2026/11/16/rollout-2026-11-16T14-08-23-{SESSION}.jsonl"),
    "codymaster": Sample(codymaster, f"{PROJECT}/.cm/CONTINUITY.md"),
    "opencode": Sample(opencode, ".local/share/opencode/storage/part/msg_1/prt_1.json"),
    "pai": Sample(pai, ".config/opencode/MEMORY/WORK/20261116-101500_ship-the-thing/tasks/001_ship/THREAD.md"),
    "three-tier": Sample(three_tier, f"{PROJECT}/memory/2026-11-15.md"),
}


def memory(home: Path) -> Tree:
    """All that is memory in such a home: files and links by their names, those of project folders made the same for any home.

    ``settings.json`` of claude-mem, which travels changed, is apart.
    """
    names = {slug(home / PROJECT): "{app}", slug(home): "{home}"}
    found: Tree = {}
    for name, about in tree(home).items():
        place = os.path.join(os.fsencode(home), name)
        if about[0] == "dir" or name.startswith(b".cache/") or name == b".claude-mem/settings.json":
            continue
        if about[0] == "file" and SECRET in Path(os.fsdecode(place)).read_bytes():
            continue
        parts = [os.fsencode(names.get(os.fsdecode(part), os.fsdecode(part))) for part in name.split(b"/")]
        found[b"/".join(parts)] = about
    return found


def leaked(home: Path) -> list[str]:
    """Files of a home that hold what must never arrive there."""
    files = (path for path in home.rglob("*") if path.is_file() and not path.is_symlink())
    return [str(path) for path in files if SECRET in path.read_bytes()]
