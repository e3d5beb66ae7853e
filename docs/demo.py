"""The demo: an agent's home with a live SQLite writer, exported, deleted, and restored elsewhere. Takes seconds.

Everything happens in a temporary folder, through the same commands anyone would type.
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

WRITER = """
import sqlite3, sys, time
database = sqlite3.connect(sys.argv[1], timeout=10)
while True:
    with database:
        database.execute("INSERT INTO observations (title, text) VALUES ('live', 'written while the export runs')")
    time.sleep(0.002)
"""


def say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


def sidecar(*words: str) -> None:
    print(f"$ memory-sidecar {' '.join(words)}", flush=True)
    subprocess.run([sys.executable, "-m", "sidecar", *words], check=True)


def make_home(home: Path) -> Path:
    """What an agent leaves behind: a claude-mem database in WAL mode, and Markdown notes."""
    data = home / ".claude-mem"
    data.mkdir(parents=True)
    (data / "settings.json").write_text('{"CLAUDE_MEM_DATA_DIR": "/root/.claude-mem", "CLAUDE_MEM_MODE": "code"}\n')
    (home / "memory").mkdir()
    (home / "MEMORY.md").write_text("# What I know\n\nThe deploy key lives in the vault, not in the repo.\n")
    (home / "memory" / "2026-11-16.md").write_text("Today: moved the queue to Redis.\n")
    path = data / "claude-mem.db"
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("CREATE TABLE observations (id INTEGER PRIMARY KEY, title TEXT, text TEXT)")
    rows = ((f"observation {n}", f"What happened in step {n}. " * 20) for n in range(20_000))
    with database:
        database.executemany("INSERT INTO observations (title, text) VALUES (?, ?)", rows)
    database.close()
    return path


def count(path: Path) -> int:
    database = sqlite3.connect(path)
    try:
        assert database.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        return int(database.execute("SELECT count(*) FROM observations").fetchone()[0])
    finally:
        database.close()


def demo(folder: Path) -> None:
    first, second = folder / "first-sandbox", folder / "second-sandbox"
    second.mkdir()
    store = ("--store", f"file:{folder}/store")
    database = make_home(first)

    say("An agent works in a sandbox; something writes to its memory all the time.")
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(database)])
    try:
        time.sleep(0.5)
        sidecar("export", "conductor", "--sandbox", f"local:{first}", *store)
        time.sleep(0.5)
        say("A second export carries only what changed.")
        sidecar("export", "conductor", "--sandbox", f"local:{first}", *store)
    finally:
        writer.kill()
        writer.wait()
    sidecar("export", "conductor", "--sandbox", f"local:{first}", "--label", "last words", *store)
    rows = count(database)

    say("The sandbox is gone.")
    shutil.rmtree(first)
    print(f"$ rm -rf {first}")

    say("A new sandbox, somewhere else, remembers.")
    sidecar("restore", "conductor", "--sandbox", f"local:{second}", *store)
    restored = count(second / ".claude-mem" / "claude-mem.db")
    print(f"Rows before: {rows:,}. Rows now: {restored:,}. SQLite's integrity check: ok.")
    assert rows == restored, "the demo lost rows"

    say("Every version is kept, and still whole.")
    sidecar("log", "conductor", *store)
    sidecar("verify", *store)


def main() -> None:
    print(textwrap.dedent(__doc__ or "").strip())
    with tempfile.TemporaryDirectory(prefix="memory-sidecar-demo-") as folder:
        demo(Path(folder))
    say("Try it on your own: memory-sidecar export NAME --sandbox local:$HOME")


if __name__ == "__main__":
    main()
