"""Ten scripted conversations of each memory system, and what each of them added, changed and removed: known from the script,
not read back by our own readers."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.parts.remembering import SCHEMA

CONVERSATIONS = 10
Titles = set[tuple[str, str]]


@dataclass
class Taught:
    """What one conversation did, as (kind, title)."""

    added: Titles = field(default_factory=set)
    changed: Titles = field(default_factory=set)
    removed: Titles = field(default_factory=set)


Script = Callable[[Path, int], Taught]


def three_tier(home: Path, number: int) -> Taught:
    """MEMORY.md grows by a section, one is edited and, later, one is removed; a task comes, and the one before is done."""
    memory, todo = home / "MEMORY.md", home / "tasks/todo.md"
    todo.parent.mkdir(exist_ok=True)
    if number == 0:
        memory.write_text("# Memory\nabout me\n")
        todo.write_text("# Todo\n")
    before = memory.read_text()
    taught = Taught(added={("section", f"Memory › Day {number}"), ("task", f"step {number}")})
    if number == 0:
        taught.added |= {("section", "Memory"), ("section", "Todo")}
    memory.write_text(f"{before}\n## Day {number}\nlearned {number}\n")
    todo.write_text(f"{todo.read_text()}- [ ] step {number}\n")
    if number >= 1:
        todo.write_text(todo.read_text().replace(f"[ ] step {number - 1}\n", f"[x] step {number - 1}\n"))
        taught.changed.add(("task", f"step {number - 1}"))
    if number >= 2:
        memory.write_text(memory.read_text().replace(f"learned {number - 2}\n", f"learned {number - 2} better\n"))
        taught.changed.add(("section", f"Memory › Day {number - 2}"))
    if number == 7:
        memory.write_text(memory.read_text().replace("\n## Day 1\nlearned 1 better\n", ""))
        taught.removed.add(("section", "Memory › Day 1"))
    return taught


def codymaster(home: Path, number: int) -> Taught:
    """A learning in the database and in JSON, a decision that changes, a section of CONTINUITY.md."""
    folder = home / ".cm/memory"
    folder.mkdir(parents=True, exist_ok=True)
    learnings, continuity = folder / "learnings.json", home / ".cm/CONTINUITY.md"
    known = json.loads(learnings.read_text()) if learnings.exists() else []
    learnings.write_text(json.dumps([*known, {"id": f"l{number}", "whatFailed": f"failed {number}"}]))
    with contextlib.closing(sqlite3.connect(home / ".cm/context.db")) as database, database:
        database.execute(
            "CREATE TABLE IF NOT EXISTS learnings (id TEXT PRIMARY KEY, what_failed TEXT, why_failed TEXT)"
        )
        database.execute("INSERT INTO learnings VALUES (?, ?, 'why')", (f"l{number}", f"failed {number}"))
    decided = [{"id": "d1", "decision": "the same", "rationale": f"because {number}"}]
    (folder / "decisions.json").write_text(json.dumps(decided, indent=number % 3))
    continuity.write_text(f"# CodyMaster Continuity\n\n## Active Goal\ngoal {number}\n\n## Just Completed\nnothing\n")
    taught = Taught(added={("learning", f"failed {number}")})
    rest = {("decision", "the same"), ("section", "CodyMaster Continuity › Active Goal")}
    if number:
        taught.changed |= rest
    else:
        more = {("section", "CodyMaster Continuity"), ("section", "CodyMaster Continuity › Just Completed")}
        taught.added |= rest | more
    return taught


def pai(home: Path, number: int) -> Taught:
    """A learning, a rating, and work whose state changes."""
    memory = home / ".config/opencode/MEMORY"
    for name in ("LEARNING/ALGORITHM", "LEARNING/SIGNALS", "WORK/w1"):
        (memory / name).mkdir(parents=True, exist_ok=True)
    (memory / f"LEARNING/ALGORITHM/{number}.md").write_text(f"# Learned {number}\ntext\n")
    with (memory / "LEARNING/SIGNALS/ratings.jsonl").open("a") as file:
        rating = {
            "timestamp": f"2026-11-1{number}T10:00:00Z",
            "rating": 5,
            "session_id": "s",
            "comment": f"good {number}",
        }
        file.write(json.dumps(rating) + "\n")
    (memory / "WORK/w1/META.yaml").write_text(f"title: Ship it\nstatus: {number}\n")
    taught = Taught(added={("learning", f"Learned {number}"), ("rating", f"good {number}")})
    (taught.changed if number else taught.added).add(("work", "Ship it"))
    if number == 5:
        (memory / "LEARNING/ALGORITHM/2.md").unlink()
        taught.removed.add(("learning", "Learned 2"))
    return taught


def claude_code(home: Path, number: int) -> Taught:
    """Auto-memory grows by a section; messages are counted."""
    folder = home / ".claude/projects/-home-app/memory"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "MEMORY.md").open("a") as file:
        file.write(f"\n## Topic {number}\nnotes {number}\n")
    with (folder.parent / "11111111-1111-4111-8111-111111111111.jsonl").open("a") as file:
        for message in range(3):
            line = {"uuid": f"u{number}-{message}", "cwd": "/home/app", "type": "user", "message": {"content": "hello"}}
            file.write(json.dumps(line) + "\n")
    return Taught(added={("section", f"Topic {number}")})


def codex(home: Path, number: int) -> Taught:
    """A note in memories/; messages are counted."""
    folder = home / ".codex/memories"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"note-{number}.md").write_text(f"# Note {number}\nremember\n")
    sessions = home / ".codex/sessions/2026"
    sessions.mkdir(parents=True, exist_ok=True)
    line = {"timestamp": "2026-11-16T10:00:00Z", "payload": {"content": [{"text": f"hi {number}"}]}}
    with (sessions / "rollout.jsonl").open("a") as file:
        file.write((json.dumps(line) + "\n") * 3)
    taught = Taught(added={("section", f"Note {number}")})
    if number == 4:
        (folder / "note-3.md").write_text("# Note 3\nremember better\n")
        taught.changed.add(("section", "Note 3"))
    return taught


def claude_mem(home: Path, number: int) -> Taught:
    """Observations, a prompt and a summary; one observation changes, one is removed."""
    folder = home / ".claude-mem"
    folder.mkdir(exist_ok=True)
    at = 1_790_000_000_000 + number * 1000
    taught = Taught()
    with contextlib.closing(sqlite3.connect(folder / "claude-mem.db")) as database, database:
        for statement in SCHEMA.split(";"):
            database.execute(statement)
        for one in range(3):
            database.execute(
                "INSERT INTO observations (memory_session_id, project, type, title, narrative, content_hash, created_at,"
                " created_at_epoch) VALUES (?, 'app', 'change', ?, 'told', ?, '', ?)",
                (f"m{number}", f"saw {number}.{one}", f"h{number}.{one}", at),
            )
            taught.added.add(("observation", f"saw {number}.{one}"))
        database.execute(
            "INSERT INTO user_prompts (content_session_id, prompt_number, prompt_text, created_at, created_at_epoch)"
            " VALUES (?, 1, ?, '', ?)",
            (f"t{number}", f"asked {number}", at),
        )
        taught.added.add(("prompt", f"asked {number}"))
        database.execute(
            "INSERT INTO session_summaries (memory_session_id, project, request, created_at, created_at_epoch)"
            " VALUES (?, 'app', ?, '', ?)",
            (f"m{number}", f"request {number}", at),
        )
        taught.added.add(("summary", f"request {number}"))
        if number in (3, 6):
            database.execute("UPDATE observations SET narrative = ? WHERE title = 'saw 1.1'", (f"again {number}",))
            taught.changed.add(("observation", "saw 1.1"))
        if number == 5:
            database.execute("DELETE FROM observations WHERE title = 'saw 0.2'")
            taught.removed.add(("observation", "saw 0.2"))
    return taught


SCRIPTS: dict[str, Script] = {
    "three-tier": three_tier,
    "codymaster": codymaster,
    "pai": pai,
    "claude-code": claude_code,
    "codex": codex,
    "claude-mem": claude_mem,
}
MESSAGES = {"claude-code": 3, "codex": 3}
"""How many messages each conversation of a system has."""
