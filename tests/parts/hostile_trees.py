"""Homes that a hostile agent leaves behind, made from a seed: links everywhere, odd names, odd kinds of files, and whatever it
could plant among the sidecar's own files."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
from pathlib import Path

ROOTS = (
    *(".claude-mem", ".claude/projects/-root", ".codex/sessions", ".local/share/opencode/storage", "memory", "tasks"),
    *(".config/opencode/MEMORY/WORK", ".cm/memory", ".codymaster", "app/memory", "app/.cm"),
)
KNOWN = (
    *("claude-mem.db", "claude-mem.db-wal", "settings.json", "a.jsonl", "MEMORY.md", "SESSION-STATE.md", "todo.md"),
    *("CONTINUITY.md", "learnings.json", "context.db", "opencode.db", "state_1.sqlite", "kanban.json", "lessons.md"),
)
OWN = ("lineage", "journal", "keys", "answer", "turn", "notes", "lineage.new", "journal.new", "index-x", "set-aside")
ODD = (
    *("new\nline", "tab\there", "quote'\"`$(id)", "-rf", "..", "...", " ", "é", "e\u0301", "\u202egnp.md", "🧠", "~"),
    *(
        "a" * 255,
        "con",
        "\x1b[31mred",
        "*",
        "?",
        "[a]",
        "{b,c}",
        "%2e%2e",
        "\\",
        "C:\\x",
        ".memory-sidecar-000000000000",
    ),
)
CONTENTS = (
    *(b"", b"text\n", b"\0" * 5000, b"SQLite format 3\0" + b"\xff" * 200, b"{}", b"[" * 50_000, b'{"a":' * 20_000),
    *(b"SQLite format 3\0\x10\x00\x02\x02\x00\x40\x20\x20" + b"\0" * 4076, b"<private>x</private>", b"\xff\xfe\xfd"),
)


def plant(home: Path, others: list[Path], seed: int, memory: str) -> None:
    """Fill a home. ``others`` are places outside of it that links are to lead to."""
    chance = random.Random(seed)
    home.mkdir(parents=True, exist_ok=True)
    folders = [home]
    for _ in range(chance.randrange(1, 5)):
        folders.append(_folder(home, chance.choice(ROOTS)))
    for _ in range(chance.randrange(3, 25)):
        with contextlib.suppress(OSError, ValueError):
            _one(chance, home, chance.choice(folders), folders, others)
    if chance.random() < 0.6:
        own = _folder(home, f".cache/memory-sidecar/{memory}")
        for _ in range(chance.randrange(1, 4)):
            with contextlib.suppress(OSError, ValueError):
                _planted(chance, own / chance.choice(OWN), home, others)
    if chance.random() < 0.3:
        with contextlib.suppress(OSError):
            (home / chance.choice((".cache", ".cache/memory-sidecar", *ROOTS))).symlink_to(chance.choice(others))


def _folder(home: Path, name: str) -> Path:
    folder = home / name
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _one(chance: random.Random, home: Path, folder: Path, folders: list[Path], others: list[Path]) -> None:
    """One thing in a folder: a file, a folder, a link, or something that is none of these. Links are made, never used."""
    place = folder / chance.choice(chance.choice((KNOWN, ODD)))
    if os.path.lexists(place) or not folder.resolve().is_relative_to(home.resolve()):
        return
    kind = chance.randrange(10)
    if kind < 4:
        place.write_bytes(chance.choice(CONTENTS))
        place.chmod(chance.choice((0o644, 0o600, 0o000, 0o4755)))
    elif kind < 6:
        place.mkdir()
        folders.append(place)
    elif kind < 8:
        target = chance.choice([*map(str, others), "..", ".", "../..", "/proc/self/root", place.name, "no"])
        place.symlink_to(target)
    elif kind == 8:
        os.mkfifo(place)
    else:
        _deep(chance, place)


def _deep(chance: random.Random, place: Path) -> None:
    if chance.random() < 0.3:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(place)[:100])
        listening.close()
        return
    for _ in range(chance.randrange(1, 90)):
        place = place / "d"
    place.mkdir(parents=True)
    (place / "x.md").write_bytes(b"deep")


def _planted(chance: random.Random, place: Path, home: Path, others: list[Path]) -> None:
    other = chance.choice(others)
    stage = f"{chance.choice([home, other])}/.memory-sidecar-{'0' * 12}"
    journal = {
        "state": chance.choice(["staging", "swapping", "done", 7]),
        "stages": chance.choice([[], [stage], [str(other)], [str(home)], None]),
        "made": chance.choice([[], [str(other)], [str(home / "memory")]]),
        "moves": chance.choice(
            [[], [[str(home / "taken"), str(other / "kept.md")]], [[f"{stage}/1", str(other / "kept.md")]]]
        ),
    }
    kind = chance.randrange(5)
    if place.exists() or place.is_symlink():
        place.unlink()
    if kind == 0:
        place.symlink_to(other / "kept.md")
    elif kind == 1:
        place.mkdir()
    elif kind == 2:
        os.mkfifo(place)
    elif kind == 3:
        place.write_bytes(chance.choice(CONTENTS))
    else:
        place.write_text(json.dumps(journal))
