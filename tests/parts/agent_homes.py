"""Sandboxes with agents in them: what they write, tidy away and lose, each write a word that goes into the ledger."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from tests.parts.ledger import NONE, Ledger, Words, Write, system_of, words_in
from tests.parts.providers import Made

SCHEMA = """
PRAGMA journal_mode=WAL;
CREATE TABLE IF NOT EXISTS schema_versions (version INTEGER PRIMARY KEY, applied_at TEXT);
INSERT OR IGNORE INTO schema_versions VALUES (52, 'now');
CREATE TABLE IF NOT EXISTS observations (id INTEGER PRIMARY KEY, title TEXT, narrative TEXT);
"""
INSERT = "INSERT INTO observations (title, narrative) VALUES (?, ?)"
TRANSCRIPTS = ".claude/projects"


@dataclass(slots=True)
class Box:
    """A sandbox, and what its agent is owed: every word that ever was in it and that the agent did not remove itself."""

    made: Made
    name: str
    ledger: Ledger
    chance: random.Random
    kinds: Collection[str] = ("notes", "transcripts")
    """What its agent writes beside rows."""
    alive: bool = True
    owed: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    """Removed here by its agent, on purpose."""
    holds: str = ""
    """The memory that was restored or exported here last, and successfully."""
    base: str = ""
    """The snapshot of that memory that it had then."""
    wiped: set[str] = field(default_factory=set)
    """What an accident took, as long as its agent did not go on without it."""
    reader: bool = False
    shaken: bool = False
    """Something died while it worked here: until the next run, things may be in a place that only it knows."""
    arrived: dict[str, float] = field(default_factory=dict)
    """When a restore brought what was not there."""
    during: set[str] = field(default_factory=set)
    """Written while it was exported."""
    last_words: Words = NONE
    """Of one that is dead: what went with it."""
    opened_at: float = 0.0
    """When a restore last opened a conversation here."""
    closed_at: float = 0.0
    """When its caller last got a receipt of an export that kept something."""
    opened: bool = False
    """A service looks after it, as far as the conductor knows."""
    memory: str = ""
    """The memory that it is looked after for."""

    @property
    def ref(self) -> str:
        return self.made.ref

    @property
    def home(self) -> Path:
        return self.made.home

    def words(self) -> Words:
        return words_in(self.home) if self.alive else self.last_words

    def words_of(self, systems: Collection[str]) -> Words:
        """What of these memory systems is in it."""
        if not self.alive:
            return self.last_words
        places = [place for place in self.home.iterdir() if system_of(place.name) in systems and place.name != ".cache"]
        files = [words_in_file(place) for place in places if place.is_file()]
        return frozenset().union(*files, *(words_in(place) for place in places if place.is_dir()))

    def words_anywhere(self) -> Words:
        return words_in(self.home, everywhere=True)

    # What agents do

    def talk(self, rows: int = 3) -> None:
        """A conversation's worth of rows, Markdown and transcripts."""
        # What begins again in a file that is gone cannot be told from what was overwritten.
        self.remove(frozenset(self.wiped))
        self.wiped.clear()
        self.observe(rows)
        if "notes" in self.kinds and self.chance.random() < 0.7:
            self.note()
        if "transcripts" in self.kinds and self.chance.random() < 0.5:
            self.transcribe()

    def observe(self, rows: int) -> None:
        """Rows of a claude-mem database, in its log until something works them in."""
        place = self.home / ".claude-mem/claude-mem.db"
        place.parent.mkdir(parents=True, exist_ok=True)
        words = [self._word() for _ in range(rows)]
        with closing(sqlite3.connect(place, timeout=30)) as connection:
            connection.executescript(SCHEMA)
            with connection:
                connection.executemany(INSERT, [(word, self._ballast(600)) for word in words])
        self._wrote(words)

    def note(self) -> None:
        """Three tiers of Markdown: a state that is overwritten, a long-term memory and daily logs that grow."""
        words = [self._word() for _ in range(4)]
        state = self.home / "SESSION-STATE.md"
        if state.exists():
            self.remove(words_in_file(state))
        state.write_text(f"# Now\n{words[0]}\n")
        day = f"2026-11-{self.chance.randint(1, 28):02}.md"
        (self.home / "memory").mkdir(exist_ok=True)
        for name, word in (
            ("MEMORY.md", words[1]),
            (f"memory/{day}", words[2]),
            ("memory/working-buffer.md", words[3]),
        ):
            with (self.home / name).open("a") as file:
                file.write(f"- {word}\n")
        self._wrote(words)

    def transcribe(self, sessions: int = 1) -> None:
        folder = self.home / TRANSCRIPTS / re.sub("[^A-Za-z0-9]", "-", str(self.home.resolve()))
        folder.mkdir(parents=True, exist_ok=True)
        for _ in range(sessions):
            words = [self._word() for _ in range(2)]
            lines = [json.dumps({"cwd": str(self.home.resolve()), "text": word}) for word in words]
            session = uuid.UUID(int=self.chance.getrandbits(128))
            (folder / f"{session}.jsonl").write_text("\n".join(lines) + "\n")
            self._wrote(words)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A worker that adds rows all the time."""
        stop, before = threading.Event(), set(self.owed)

        def work() -> None:
            while not stop.is_set():
                self.observe(1)
                time.sleep(0.002)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            yield
        finally:
            stop.set()
            worker.join()
            self.during |= self.owed - before

    def clean_up(self) -> None:
        """Most rows deleted and the room given back; old transcripts and daily logs gone by their own rules."""
        before = self.words()
        place = self.home / ".claude-mem/claude-mem.db"
        if place.exists():
            with closing(sqlite3.connect(place, timeout=30)) as connection:
                with connection:
                    connection.execute("DELETE FROM observations WHERE id % 4 != 0")
                connection.execute("VACUUM")
        self._rotate()
        self.remove(before - self.words())

    def rotate(self) -> None:
        before = self.words()
        self._rotate()
        self.remove(before - self.words())

    def _rotate(self) -> None:
        old = [*self.home.glob(f"{TRANSCRIPTS}/*/*.jsonl"), *self.home.glob("memory/2*.md")]
        for place in sorted(old):
            if self.chance.random() < 0.7:
                place.unlink()

    def remove(self, words: Words) -> None:
        """Note what the agent itself removed."""
        self.owed -= words
        self.removed |= words
        self.ledger.forgotten |= words

    def wipe(self) -> None:
        """An accident: a whole root is gone. Nobody wanted that."""
        before = self.words()
        if self.chance.random() < 0.5:
            shutil.rmtree(self.home / ".claude-mem", ignore_errors=True)
        else:
            for name in ("MEMORY.md", "SESSION-STATE.md"):
                (self.home / name).unlink(missing_ok=True)
            shutil.rmtree(self.home / "memory", ignore_errors=True)
        self.wiped |= before - self.words()
        self.owed -= self.wiped

    def become_copy_of(self, other: Box) -> None:
        """A template that was baked out of another sandbox, with the sidecar's cache folder."""
        shutil.copytree(other.home, self.home, symlinks=True, dirs_exist_ok=True)
        self.owed |= self.words()

    def die(self) -> None:
        self.last_words = self.words()
        self.alive = False
        if self.made.handle is None:
            self.home.rename(self.home.with_name(f"{self.home.name}-gone"))
        else:
            self.made.handle.kill()

    def _word(self) -> str:
        return f"w{self.chance.getrandbits(48):012x}"

    def _wrote(self, words: list[str]) -> None:
        now = time.time()
        self.owed |= set(words)
        self.ledger.written.update((word, Write(self.name, now)) for word in words)

    def _ballast(self, size: int) -> str:
        return f"{self.chance.getrandbits(4 * size):x}"


def words_in_file(place: Path) -> Words:
    return frozenset(re.findall(r"\bw[0-9a-f]{12}\b", place.read_text()))
