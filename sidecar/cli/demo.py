"""``demo``: a home with a live SQLite writer is exported, deleted, and restored elsewhere. ``demo --home`` only makes a
sample home.

Everything happens in a temporary folder, with the ordinary commands. It takes seconds.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sidecar.cli.result import Result
from sidecar.errors import SidecarError, UsageError
from sidecar.host.text import format_count

WRITER = """
import sqlite3, sys, time
database = sqlite3.connect(sys.argv[1], timeout=10)
while True:
    with database:
        database.execute("INSERT INTO observations (title, text) VALUES ('live', 'written while the export runs')")
    time.sleep(0.002)
"""
WRITTEN = 100
"""How many rows the writer adds before the demo continues."""
LONG_TERM = """# What I know

- The deploy key lives in the vault, not in the repo.
- The database team reviews migrations; ask before one.
"""
TODAY = "Moved the queue to Redis. Next: the flaky test in the importer.\n"


class DemoFailed(SidecarError):
    """The demo did not bring the memory back."""

    code = "demo-failed"
    default_hint = "Run it again; if it fails again, report it with what it printed."


def run_demo(args: argparse.Namespace) -> Result:
    """Run ``demo``, or only make a sample home."""
    if args.home:
        home = Path(args.home).expanduser()
        make_home(home, rows=200)
        files = sorted(str(file.relative_to(home)) for file in home.rglob("*") if file.is_file())
        words = f"A sample home is in {home}: {', '.join(files)}."
        return Result({"home": str(home.resolve()), "files": files}, [words])
    with tempfile.TemporaryDirectory(prefix="memory-sidecar-demo-") as folder:
        rows = _Demo(Path(folder), quiet=args.json).play()
    words = "Try it with your own: memory-sidecar export NAME --sandbox local:$HOME --project PATH"
    return Result({"ok": True, "rows": rows}, ["", words])


def make_home(home: Path, rows: int) -> Path:
    """Make a sample home of an agent: a claude-mem database in WAL mode, and Markdown notes. Return the database's
    path.

    Raise ``UsageError`` if the folder is not empty.
    """
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise UsageError(f"{home} is there already, and not empty.", hint="Name a folder that is not there yet.")
    data = home / ".claude-mem"
    for folder in (data, home / "memory"):
        folder.mkdir(parents=True)
    (data / "settings.json").write_text('{"CLAUDE_MEM_DATA_DIR": "/root/.claude-mem", "CLAUDE_MEM_MODE": "code"}\n')
    (home / "MEMORY.md").write_text(LONG_TERM)
    (home / "memory" / f"{time.strftime('%Y-%m-%d')}.md").write_text(TODAY)
    path = data / "claude-mem.db"
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("CREATE TABLE observations (id INTEGER PRIMARY KEY, title TEXT, text TEXT)")
    texts = ((f"observation {n}", f"What happened in step {n}. " * 20) for n in range(rows))
    with database:
        database.executemany("INSERT INTO observations (title, text) VALUES (?, ?)", texts)
    database.close()
    return path


class _Demo:
    """Runs the demo in a folder. With ``quiet``, nothing is printed."""

    def __init__(self, folder: Path, *, quiet: bool) -> None:
        self._folder = folder
        self._quiet = quiet

    def play(self) -> int:
        """Run the demo and return how many rows were restored. Raise ``DemoFailed``."""
        first, second = self._folder / "first-sandbox", self._folder / "second-sandbox"
        second.mkdir()
        database = make_home(first, rows=20_000)
        self._print_comment("An agent works in a sandbox; something writes to its memory all the time.")
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(database)])
        try:
            _wait_for_rows(database)
            self._run_sidecar("export", "conductor", "--sandbox", f"local:{first}")
            _wait_for_rows(database)
            self._print_comment("A second export carries only what changed.")
            self._run_sidecar("export", "conductor", "--sandbox", f"local:{first}")
        finally:
            writer.kill()
            writer.wait()
        self._run_sidecar("export", "conductor", "--sandbox", f"local:{first}", "--label", "last words")
        rows = _count_rows(database)
        self._print_comment("The sandbox is gone.")
        shutil.rmtree(first)
        self._print(f"$ rm -rf {first}")
        self._print_comment("A new sandbox, somewhere else, remembers.")
        self._run_sidecar("restore", "conductor", "--sandbox", f"local:{second}")
        restored = _count_rows(second / ".claude-mem" / "claude-mem.db", checked=True)
        self._print(f"$ cat {second}/MEMORY.md")
        self._print((second / "MEMORY.md").read_text().rstrip())
        self._print(
            f"Before: {format_count(rows, 'row')}. Now: {format_count(restored, 'row')}. SQLite's integrity check: ok."
        )
        if rows != restored:
            raise DemoFailed("The demo lost rows.")
        self._print_comment("Every version is kept, and still whole.")
        self._run_sidecar("log", "conductor")
        self._run_sidecar("verify")
        return restored

    def _run_sidecar(self, *words: str) -> None:
        """Run a command in a new process, as a person would type it."""
        self._print(f"$ memory-sidecar {shlex.join(words)}")
        command = [sys.executable, "-m", "sidecar", *words, "--store", f"file:{self._folder}/store"]
        ran = subprocess.run([*command, *(["--json"] if self._quiet else [])], check=False, capture_output=self._quiet)
        if ran.returncode:
            said = json.loads(ran.stdout or b"{}").get("error", {}).get("message", "")
            raise DemoFailed(f"`memory-sidecar {words[0]}` ended with exit code {ran.returncode}. {said}".rstrip())

    def _print_comment(self, text: str) -> None:
        self._print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n== {text}")

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)


def _wait_for_rows(path: Path) -> None:
    """Wait until the writer has added ``WRITTEN`` rows."""
    start = _count_rows(path)
    while _count_rows(path) < start + WRITTEN:
        time.sleep(0.02)


def _count_rows(path: Path, *, checked: bool = False) -> int:
    database = sqlite3.connect(path, timeout=10)
    try:
        if checked and database.execute("PRAGMA integrity_check").fetchone()[0] != "ok":
            raise DemoFailed(f"SQLite finds {path} damaged.")
        return int(database.execute("SELECT count(*) FROM observations").fetchone()[0])
    finally:
        database.close()
