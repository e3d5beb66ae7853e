"""Random homes with secrets planted in every form, and what must be left of them, worked out while they are made.

Whatever is secret has ``NEEDLE`` in it, or is listed; so a store can be searched for all of them at once.
"""

from __future__ import annotations

import gzip
import json
import random
import sqlite3
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

NEEDLE = "zqjxkvw"
WORDS = (
    "alpha",
    "private",
    "beta",
    "Größe",
    "delta",
    "<privateer>",
    "x < y",
    'a "quoted" word',
    "back\\slash",
    "日本",
    "ok",
)
OPENS = ("<private>", "<PRIVATE>", "<Private >", '<private reason="mine">', "<private\n>")
CLOSES = ("</private>", "</PRIVATE>", "</private >", "</ private>")
LETTERS = string.ascii_letters + string.digits

Pair = tuple[str, str]
"""What is there, and what is to be left of it."""


def _some(chance: random.Random, count: int, letters: str = LETTERS) -> str:
    return "".join(chance.choices(letters, k=count))


CREDENTIALS: dict[str, Callable[[random.Random], str]] = {
    "aws-access-key": lambda chance: "AKIA" + _some(chance, 16, string.ascii_uppercase),
    "github-token": lambda chance: "ghp_" + _some(chance, 36),
    "github-fine-grained-token": lambda chance: f"github_pat_{_some(chance, 22)}_{_some(chance, 59)}",
    "gitlab-token": lambda chance: "glpat-" + _some(chance, 20),
    "anthropic-key": lambda chance: "sk-ant-api03-" + _some(chance, 95),
    "openai-key": lambda chance: "sk-proj-" + _some(chance, 120),
    "google-api-key": lambda chance: "AIza" + _some(chance, 35),
    "slack-token": lambda chance: f"xoxb-{_some(chance, 12, '0123456789')}-{_some(chance, 24)}",
    "stripe-key": lambda chance: "sk_live_" + _some(chance, 24),
    "npm-token": lambda chance: "npm_" + _some(chance, 36),
    "pypi-token": lambda chance: "pypi-AgEIcHlwaS5vcmc" + _some(chance, 120),
    "huggingface-token": lambda chance: "hf_" + _some(chance, 34),
    "sendgrid-key": lambda chance: f"SG.{_some(chance, 22)}.{_some(chance, 43)}",
    "jwt": lambda chance: f"eyJ{_some(chance, 33)}.eyJ{_some(chance, 300)}.{_some(chance, 43)}",
    "age-secret-key": lambda chance: "AGE-SECRET-KEY-1" + _some(chance, 58, string.ascii_uppercase),
    "e2b-key": lambda chance: "e2b_" + _some(chance, 40, "0123456789abcdef"),
    "daytona-key": lambda chance: "dtn_" + _some(chance, 64, "0123456789abcdef"),
    "databricks-token": lambda chance: "dapi" + _some(chance, 32, "0123456789abcdef"),
    "digitalocean-token": lambda chance: "dop_v1_" + _some(chance, 64, "0123456789abcdef"),
    "private-key": lambda chance: (
        "-----BEGIN OPENSSH PRIVATE KEY-----\n"
        + "\n".join(_some(chance, 70) for _ in range(chance.choice((5, 36))))
        + "\n-----END OPENSSH PRIVATE KEY-----"
    ),
}


@dataclass
class Planted:
    """A home being made: files and rows with secrets, and what is expected of each after an export and a restore."""

    home: Path
    chance: random.Random
    files: dict[str, bytes] = field(default_factory=dict)
    rows: dict[int, tuple[str, str, str | bytes | None]] = field(default_factory=dict)
    credentials: list[str] = field(default_factory=list)

    def secret(self) -> str:
        return f"{NEEDLE}{_some(self.chance, 12)} {NEEDLE} " * self.chance.choice((1, 1, 2, 9))

    def block(self, depth: int = 0) -> str:
        """A closed private block, with others in it now and then."""
        inner = self.secret() + (
            self.block(depth + 1) + self.secret() if self.chance.random() < 0.3 and depth < 3 else ""
        )
        return f"{self.chance.choice(OPENS)}{inner}{self.chance.choice(CLOSES)}"

    def text(self, pieces: int = 6, unclosed: bool = True, long: int = 0) -> Pair:
        """Words and secrets in any order."""
        there, left = [], []
        for _ in range(self.chance.randint(0, pieces)):
            kind = self.chance.random()
            if kind < 0.25:
                there.append(self.block())
                left.append("[private]")
            elif kind < 0.4:
                name = self.chance.choice(list(CREDENTIALS))
                self.credentials.append(CREDENTIALS[name](self.chance))
                there.append(f" {self.credentials[-1]}\n")
                left.append(f" [redacted:{name}]\n")
            else:
                word = self.chance.choice(WORDS) + self.chance.choice((" ", "\n", ""))
                there.append(word)
                left.append(word)
            if long and self.chance.random() < 0.5:
                filler = "f" * self.chance.randint(long - 1400, long)
                there.append(filler)
                left.append(filler)
        if unclosed and self.chance.random() < 0.15:
            there.append(self.chance.choice(OPENS) + self.secret())
            left.append("[private]")
        return "".join(there), "".join(left)

    def value(self, depth: int = 0) -> tuple[Any, Any]:
        """A JSON value, and what is to be left of it."""
        kind = self.chance.random()
        if depth < 3 and kind < 0.25:
            pairs = {f"key {number}": self.value(depth + 1) for number in range(self.chance.randint(0, 4))}
            return {key: pair[0] for key, pair in pairs.items()}, {key: pair[1] for key, pair in pairs.items()}
        if depth < 3 and kind < 0.4:
            rows = [self.value(depth + 1) for _ in range(self.chance.randint(0, 3))]
            return [row[0] for row in rows], [row[1] for row in rows]
        if depth < 2 and kind < 0.5:  # JSON in a JSON string
            return self.json({"inner": self.text(4, unclosed=False)})
        if kind < 0.6:
            return (self.chance.random(),) * 2
        return self.text(4)

    def json(self, pairs: dict[str, tuple[Any, Any]]) -> Pair:
        """Both sides written the same way: with ``<`` or ``/`` escaped, or not, and on one line or several."""
        ascii_only, angle, slash = (self.chance.random() < 0.5 for _ in range(3))

        def written(side: int) -> str:
            text = json.dumps({key: pair[side] for key, pair in pairs.items()}, ensure_ascii=ascii_only)
            text = text.replace("<", "\\u003c").replace(">", "\\u003e") if angle else text
            return text.replace("/", "\\/") if slash else text

        return written(0), written(1)

    def put(self, name: str, pair: Pair) -> None:
        place = self.home / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(pair[0].encode())
        self.files[name] = pair[1].encode()

    def plant(self) -> None:
        """Files of every kind, and rows; what is there already may be replaced."""
        chance = self.chance
        for number in range(chance.randint(1, 4)):
            self.put(f"app/memory/note {number}.md", self.text(8))
        if chance.random() < 0.3:
            self.put("app/MEMORY.md", self.text(6, long=chance.choice((65536, 65536, 1 << 20))))
        for number in range(chance.randint(0, 2)):
            self.put(f"app/memory/data-{number}.json", self.json({"a": self.value(), "b": self.value()}))
        if chance.random() < 0.7:
            lines = [self.json({"type": ("user", "user"), "m": self.value()}) for _ in range(chance.randint(1, 6))]
            there, left = ("".join(f"{line[side]}\n" for line in lines) for side in (0, 1))
            self.put(f".claude/projects/-app/{chance.randint(1, 2)}.jsonl", (there, left))
        if chance.random() < 0.3:
            binary = bytes(chance.randrange(256) for _ in range(2000)).replace(b"<", b"")
            (self.home / "app/memory").mkdir(parents=True, exist_ok=True)
            (self.home / "app/memory/picture.bin").write_bytes(binary)
            self.files["app/memory/picture.bin"] = binary
        if chance.random() < 0.7:
            self.observe()

    def observe(self) -> None:
        """Rows with secrets: short and long ones, in text, JSON and blobs, with a full-text mirror and its triggers."""
        place = self.home / ".claude-mem/claude-mem.db"
        place.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(place)
        connection.executescript(SCHEMA)
        exported = list(self.rows)  # what is deleted before any export may leave words in a full-text index
        for _ in range(self.chance.randint(1, 6)):
            long = self.chance.choice((0, 0, 2000, 4096, 9000))
            pairs = self.text(5, long=long), self.json({"facts": self.value()}), self.text(3)
            blob = self.chance.random() < 0.3
            there = (pairs[0][0], pairs[1][0], pairs[2][0].encode() if blob else pairs[2][0])
            left = (pairs[0][1], pairs[1][1], pairs[2][1].encode() if blob else pairs[2][1])
            row = self.chance.choice([*exported, *[max(self.rows, default=0) + 1] * 2])
            exported = [one for one in exported if one != row]
            connection.execute("DELETE FROM observations WHERE id = ?", (row,))
            connection.execute("INSERT INTO observations VALUES (?, ?, ?, ?)", (row, *there))
            self.rows[row] = left
        connection.commit()
        connection.close()

    def secrets(self) -> list[bytes]:
        """What may be found nowhere: the needle for all that is private, and the middle of each credential."""
        lines = [max(token.split("\n"), key=len) for token in self.credentials]
        return [NEEDLE.encode(), *(line[len(line) // 2 :][:24].encode() for line in lines)]


SCHEMA = """
CREATE TABLE IF NOT EXISTS schema_versions (version INTEGER);
CREATE TABLE IF NOT EXISTS observations (id INTEGER PRIMARY KEY, narrative TEXT, facts TEXT, extra);
CREATE INDEX IF NOT EXISTS by_extra ON observations (extra);
CREATE VIRTUAL TABLE IF NOT EXISTS observations_fts USING fts5(narrative, facts, content='observations', content_rowid='id');
CREATE TRIGGER IF NOT EXISTS observations_ai AFTER INSERT ON observations BEGIN
  INSERT INTO observations_fts(rowid, narrative, facts) VALUES (new.id, new.narrative, new.facts);
END;
CREATE TRIGGER IF NOT EXISTS observations_ad AFTER DELETE ON observations BEGIN
  INSERT INTO observations_fts(observations_fts, rowid, narrative, facts)
  VALUES ('delete', old.id, old.narrative, old.facts);
END;
CREATE TRIGGER IF NOT EXISTS observations_au AFTER UPDATE ON observations BEGIN
  INSERT INTO observations_fts(observations_fts, rowid, narrative, facts)
  VALUES ('delete', old.id, old.narrative, old.facts);
  INSERT INTO observations_fts(rowid, narrative, facts) VALUES (new.id, new.narrative, new.facts);
END;
"""


def everything_in(store: Path) -> Iterator[tuple[Path, bytes]]:
    """Every object of a store as it is, and unpacked."""
    for path in sorted(store.rglob("*")):
        if not path.is_file():
            continue
        data = path.read_bytes()
        yield path, data
        if path.suffix == ".gz":
            yield path, gzip.decompress(data)
        elif path.suffix == ".zst":
            with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as plain:
                yield path, plain.read()
