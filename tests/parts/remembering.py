"""An agent that goes on remembering, and what its rows have to be: known from what it did, not read back from its files."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Row = tuple[Any, ...]
START = 1_790_000_000
SCHEMA = """
PRAGMA journal_mode=WAL;
CREATE TABLE IF NOT EXISTS schema_versions (version INTEGER PRIMARY KEY, applied_at TEXT);
INSERT OR IGNORE INTO schema_versions VALUES (52, 'now');
CREATE TABLE IF NOT EXISTS sdk_sessions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, content_session_id TEXT NOT NULL, memory_session_id TEXT UNIQUE,
    project TEXT NOT NULL, platform_source TEXT NOT NULL DEFAULT 'claude', user_prompt TEXT, started_at TEXT NOT NULL,
    started_at_epoch INTEGER NOT NULL, custom_title TEXT);
CREATE TABLE IF NOT EXISTS observations (
    id INTEGER PRIMARY KEY AUTOINCREMENT, memory_session_id TEXT NOT NULL, project TEXT NOT NULL, text TEXT,
    type TEXT NOT NULL, title TEXT, subtitle TEXT, facts TEXT, narrative TEXT, concepts TEXT, files_read TEXT,
    files_modified TEXT, prompt_number INTEGER, content_hash TEXT, created_at TEXT NOT NULL,
    created_at_epoch INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS session_summaries (
    id INTEGER PRIMARY KEY AUTOINCREMENT, memory_session_id TEXT NOT NULL, project TEXT NOT NULL, request TEXT,
    investigated TEXT, learned TEXT, completed TEXT, next_steps TEXT, files_read TEXT, files_edited TEXT, notes TEXT,
    created_at TEXT NOT NULL, created_at_epoch INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS user_prompts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, session_db_id INTEGER, content_session_id TEXT NOT NULL,
    prompt_number INTEGER NOT NULL, prompt_text TEXT NOT NULL, created_at TEXT NOT NULL,
    created_at_epoch INTEGER NOT NULL);
"""
LEARNED = """
CREATE TABLE IF NOT EXISTS learnings (
    id TEXT PRIMARY KEY, what_failed TEXT NOT NULL, why_failed TEXT NOT NULL DEFAULT '',
    how_to_prevent TEXT NOT NULL DEFAULT '', created_at TEXT NOT NULL, module TEXT);
CREATE TABLE IF NOT EXISTS decisions (
    id TEXT PRIMARY KEY, decision TEXT NOT NULL, rationale TEXT NOT NULL DEFAULT '', created_at TEXT NOT NULL);
"""
MEM = "claude-mem/claude-mem.db"
WORDS = ("otter", "brave", "lantern", "quartz", "Zürich", "наблюдение", "記憶", "pipeline", "deadlock", "retry")


class Agent:
    """``home`` holds its memory; ``rows`` what a sink must hold after an export of it: (kind, key) -> the rest."""

    def __init__(self, home: Path, seed: int = 0) -> None:
        self.home = home
        self.rows: dict[tuple[str, str], Row] = {}
        self._chance = random.Random(seed)
        self._clock = START
        self._sections: dict[str, list[str]] = {}
        self._learned: list[dict[str, str]] = []
        (home / ".claude-mem").mkdir(parents=True)
        (home / "app/.cm/memory").mkdir(parents=True)
        (home / "app/memory").mkdir(parents=True)
        self._run(self.database, *SCHEMA.split(";"))
        self._run(home / "app/.cm/context.db", *LEARNED.split(";"))

    @property
    def database(self) -> Path:
        return self.home / ".claude-mem/claude-mem.db"

    @property
    def project(self) -> str:
        return str(self.home / "app")

    def converse(self, observations: int = 5) -> None:
        """A conversation: a session, a prompt, some observations, a summary, something learned, a day's notes."""
        self._clock += 86_400
        self._session(self._chance.randrange(10**9))
        self.observe(observations)
        self.learn()
        self.note()
        if self._chance.random() < 0.5:
            self.forget()

    def observe(self, count: int = 1) -> None:
        with contextlib.closing(sqlite3.connect(self.database)) as connection, connection:
            for _ in range(count):
                self._clock += 60
                title, narrative, fact = self._words(3), self._words(30), self._words(5)
                connection.execute(
                    "INSERT INTO observations (memory_session_id, project, type, title, narrative, facts, content_hash,"
                    " created_at, created_at_epoch) VALUES ('s', 'app', 'change', ?, ?, ?, ?, '', ?)",
                    (title, narrative, json.dumps([fact, "second"]), f"h{self._clock}", self._clock * 1000),
                )
                key, text = f"{MEM}#s,h{self._clock},{self._clock}000", f"{narrative}\n\n{fact}\nsecond"
                self.rows["observation", key] = (title, text, "app", "s", self._now, MEM)

    @property
    def observed(self) -> list[tuple[str, Row]]:
        """Its observations with their keys, the oldest first."""
        return [(key, row) for (kind, key), row in self.rows.items() if kind == "observation"]

    def forget(self) -> None:
        """Remove an observation and a section, change another observation."""
        mine = sorted(key for kind, key in self.rows if kind == "observation")
        if len(mine) > 2:
            gone, changed = self._chance.sample(mine, 2)
            self._run(self.database, "DELETE FROM observations WHERE content_hash = ?", values=(gone.split(",")[1],))
            change = "UPDATE observations SET title = 'changed' WHERE content_hash = ?"
            self._run(self.database, change, values=(changed.split(",")[1],))
            del self.rows["observation", gone]
            self.rows["observation", changed] = ("changed", *self.rows["observation", changed][1:])
        if self._sections:
            path = self._chance.choice(sorted(self._sections))
            (self.home / "app" / path).unlink()
            del self._sections[path]
            self.rows = {name: row for name, row in self.rows.items() if not name[1].startswith(f"project/{path}#")}

    def learn(self) -> None:
        """Something in the database, the same in JSON, and something that is only there."""
        number = len(self._learned)
        what, why = self._words(4), self._words(9)
        self._run(
            self.home / "app/.cm/context.db",
            "INSERT INTO learnings (id, what_failed, why_failed, created_at) VALUES (?, ?, ?, ?)",
            values=(f"l{number}", what, why, self._now.isoformat()),
        )
        row = (what, f"{what}\n\n{why}", "~/app", "", self._now, "cm/context.db")
        self.rows["learning", f"cm#l{number}"] = row
        self._learned.append({"id": f"l{number}", "whatFailed": what, "timestamp": self._now.isoformat()})
        decided = [{"id": "d1", "decision": f"decided {number}", "rationale": why, "timestamp": self._now.isoformat()}]
        self._write("app/.cm/memory/learnings.json", json.dumps(self._learned))
        self._write("app/.cm/memory/decisions.json", json.dumps(decided))
        row = (f"decided {number}", f"decided {number}\n\n{why}", "~/app", "", self._now, "cm/memory/decisions.json")
        self.rows["decision", "cm#d1"] = row

    def note(self) -> None:
        """A day's notes: a heading, one below it, the same below it again, and code that looks like a heading."""
        path, texts = f"memory/{self._now:%Y-%m-%d}.md", [self._words(6) for _ in range(4)]
        self._sections[path] = texts
        parts = [f"---\nname: x\n---\n{texts[0]}", f"# Day\n{texts[1]}", f"## Notes ##\n{texts[2]}"]
        self._write(f"app/{path}", "\n".join([*parts, f"## Notes\n```\n# {texts[3]}\n```"]))
        places = {"#": texts[0], "#Day": texts[1], "#Day › Notes": texts[2]}
        places["#Day › Notes#2"] = f"```\n# {texts[3]}\n```"
        self.rows["section", f"project/{path}#---"] = (
            *(f"{path[7:]} (front matter)", "name: x", "~/app", ""),
            *(self._now, f"project/{path}"),
        )
        for place, text in places.items():
            title = place[1:].removesuffix("#2") or path[7:]
            where = f"project/{path}"
            self.rows["section", f"{where}{place}"] = (title, text, "~/app", "", self._now, where)

    def _session(self, number: int) -> None:
        talk, session, prompt = f"talk-{number}", f"session-{number}", self._words(8)
        self._run(
            self.database,
            "INSERT INTO sdk_sessions (content_session_id, memory_session_id, project, user_prompt, started_at,"
            " started_at_epoch) VALUES (?, ?, 'app', ?, '', ?)",
            values=(talk, session, prompt, self._clock * 1000),
        )
        self.rows["session", f"{MEM}#{talk}"] = (prompt, prompt, "app", session, self._now, MEM)
        self._run(
            self.database,
            "INSERT INTO user_prompts (content_session_id, prompt_number, prompt_text, created_at, created_at_epoch)"
            " VALUES (?, 1, ?, '', ?)",
            values=(talk, prompt, self._clock * 1000),
        )
        self.rows["prompt", f"{MEM}#{talk},1"] = (prompt, prompt, "app", talk, self._now, MEM)
        learned = self._words(12)
        self._run(
            self.database,
            "INSERT INTO session_summaries (memory_session_id, project, request, learned, files_read, created_at,"
            " created_at_epoch) VALUES (?, 'app', ?, ?, '[\"a.py\"]', ?, 0)",
            values=(session, prompt, learned, self._now.isoformat()),
        )
        epoch = datetime.fromtimestamp(0, UTC)
        self.rows["summary", f"{MEM}#{session},0"] = (
            prompt,
            f"{prompt}\n\n{learned}\n\na.py",
            "app",
            session,
            epoch,
            MEM,
        )

    @property
    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock, UTC)

    def _words(self, count: int) -> str:
        return " ".join([*(self._chance.choice(WORDS) for _ in range(count)), f"w{self._chance.getrandbits(40):x}"])

    def _write(self, path: str, text: str) -> None:
        (self.home / path).write_text(text)
        os.utime(self.home / path, (self._clock, self._clock))

    def _run(self, database: Path, *statements: str, values: tuple[Any, ...] = ()) -> None:
        with contextlib.closing(sqlite3.connect(database)) as connection, connection:
            for statement in statements:
                connection.execute(statement, values)

    def expected(self, memory: str) -> list[Row]:
        """The rows of a sink, in its order: memory, kind, key, title, text, project, session, at, path."""
        return sorted((memory, kind, key, *row) for (kind, key), row in self.rows.items())
