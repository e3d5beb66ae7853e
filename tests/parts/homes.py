"""Agent homes with everything in them that has ever gone wrong, and the few ways tests look at them.

Names with blanks, line breaks, emoji and bytes that are not UTF-8; links, modes, holes, an empty folder; a live-looking
SQLite database; and beside the memory whatever must never leave a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import sqlite3
import stat
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from adapters.sandboxes.local import LocalSandbox
from sidecar.cli import main
from sidecar.engine import Engine
from sidecar.ports import AllowedPaths, CommandResult
from sidecar.receipts import ExportReceipt
from sidecar.store.repository import Repository
from sidecar.wiring import open_sandbox, open_store
from tests.parts import forked_sidecar
from tests.parts.leaks import leaked

PROJECT = Path(__file__).resolve().parents[2]
RAW_NAME = b"raw-\xff\xfe-name.bin"
LONG_AGO = 1_500_000_000_123_456_789
"""A modification time with nanoseconds that no test could produce by accident."""

NEVER = (
    *("worker.pid", "supervisor.json", ".server-beta.pid", ".server-beta.log", "spawn.lock", "worker.sock"),
    *(".worker-start-attempted", ".worker-clean-shutdown", "state/deep/x.json", "worker-version-recycle.json"),
    *("observer-health.json", "quota-cooldown.json", "oauth-stale.marker", "CAPTURE_BROKEN", "last-install-error.json"),
    *("logs/worker.log", "observer-audit.log", "backups/claude-mem.db", "claude-mem.db.bak-1", "archives/old.tar"),
    *("trash/x", "observer-sessions/s.jsonl", "combined_certs.pem", "telemetry.json", "transcript-watch-state.json"),
    *("chroma/vectors.bin", "chroma-sync-state.json"),
)
SECRETS = (".env", "oauth-token.json")
MACHINE_KEYS = {
    "CLAUDE_MEM_DATA_DIR": "/somewhere/else/.claude-mem",
    "CLAUDE_MEM_TRANSCRIPTS_CONFIG_PATH": "/somewhere/else/.claude-mem/transcript-watch.json",
    "CLAUDE_MEM_WORKER_PORT": "37777",
}
SECRET_KEYS = {
    "CLAUDE_MEM_GEMINI_API_KEY": "sk-hunter2",
    "CLAUDE_MEM_CLOUD_TOKEN": "tok-hunter2",
    "OPENROUTER_KEY": "key-hunter2",
}
KEPT_KEYS = {"CLAUDE_MEM_MODEL": "small", "CLAUDE_MEM_LOG_LEVEL": "INFO"}

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")

Tree = dict[bytes, tuple[str, int, int, str]]


def claude_mem_home(home: Path, rows: int = 200) -> Path:
    """A home with a claude-mem memory of ``rows`` observations, and all that must stay behind. Return the home."""
    data = home / ".claude-mem"
    for folder in ("corpora/deep/deeper", "corpora/empty", "modes"):
        (data / folder).mkdir(parents=True)
    observe(home, rows)
    odd_files(data / "corpora")
    write(data / "corpora/deep/deeper/corpus.json", b'{"items": []}' * 50)
    write(data / "modes/code.json", b'{"name": "code"}', 0o600)
    write(data / "transcript-watch.json", b"{}")
    write(data / ".cleanup-v12.4.3-applied", b"")
    write(data / ".cwd-remap-applied-v1", b"done")
    write(data / "settings.json", json.dumps({**KEPT_KEYS, **MACHINE_KEYS, **SECRET_KEYS}, indent=2).encode(), 0o600)
    for name in (*NEVER, *SECRETS):
        write(data / name, f"{name}: stays here, hunter2".encode())
    return home


def observe(home: Path, rows: int, word: str = "observed") -> None:
    """Add observations to the memory of a home, as its worker does: WAL, an FTS5 mirror, triggers, a schema version."""
    connection = sqlite3.connect(home / ".claude-mem/claude-mem.db")
    try:
        connection.executescript(
            """
            PRAGMA journal_mode=WAL;
            CREATE TABLE IF NOT EXISTS schema_versions (version INTEGER PRIMARY KEY, applied_at TEXT);
            INSERT OR IGNORE INTO schema_versions VALUES (51, 'then'), (52, 'now');
            CREATE TABLE IF NOT EXISTS observations (id INTEGER PRIMARY KEY, title TEXT, narrative TEXT);
            CREATE VIRTUAL TABLE IF NOT EXISTS observations_fts USING fts5(title, narrative, content='observations');
            CREATE TRIGGER IF NOT EXISTS mirrored AFTER INSERT ON observations BEGIN
                INSERT INTO observations_fts(rowid, title, narrative) VALUES (new.id, new.title, new.narrative);
            END;
            """
        )
        chance = random.Random(f"{word}-{rows}")
        with connection:
            for number in range(rows):
                words = " ".join(chance.choice(WORDS) for _ in range(60))
                connection.execute(
                    "INSERT INTO observations(title, narrative) VALUES (?, ?)",
                    (f"{word} {number}", f"{words} {chance.getrandbits(512):x}"),
                )
    finally:
        connection.close()


def titles(home: Path) -> list[str]:
    """Every observation in a home's memory, once SQLite has found the database whole."""
    connection = sqlite3.connect(f"file:{home}/.claude-mem/claude-mem.db?mode=ro&immutable=1", uri=True)
    try:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        found = connection.execute("SELECT title FROM observations ORDER BY id").fetchall()
        mirrored = connection.execute("SELECT count(*) FROM observations_fts WHERE observations_fts MATCH 'alpha'")
        assert mirrored.fetchone()[0] > 0 or not found
        return [row[0] for row in found]
    finally:
        connection.close()


def three_tier_home(project: Path) -> Path:
    """A project folder with Markdown memory, and an agent's other files beside it. Return the folder."""
    (project / "memory/empty").mkdir(parents=True)
    (project / "tasks").mkdir()
    (project / "src").mkdir()
    write(project / "SESSION-STATE.md", b"# Now\nhalf way through\n")
    write(project / "MEMORY.md", "# Long term\nthe user likes brevity ✓\n".encode())
    write(project / "tasks/todo.md", b"- [ ] finish\n")
    write(project / "tasks/lessons.md", b"- measure first\n", 0o600)
    odd_files(project / "memory")
    for day in range(10, 16):
        write(project / f"memory/2026-11-{day}.md", f"day {day}\n".encode() * 20)
    write(project / "memory/.#2026-11-15.md", b"an editor's lock")
    write(project / "memory/2026-11-15.md.swp", b"an editor's swap file")
    write(project / "memory/.env", b"TOKEN=hunter2")
    write(project / "src/main.py", b"print('not memory')\n")
    write(project / "tasks/scratch.txt", b"not memory either")
    return project


def odd_files(folder: Path) -> None:
    """Names, modes, links and holes that travel badly, in an existing folder."""
    write(folder / "with blank.md", b"blank")
    write(folder / "line\nbreak.md", b"line break")
    write(folder / "🧠 émoji.md", b"emoji")
    write(folder / "-rf", b"an option?")
    write(folder / "quote'\"$(x)`.md", b"quotes")
    write(Path(os.fsdecode(os.fsencode(folder) + b"/" + RAW_NAME)), bytes(range(256)))
    write(folder / "private.md", b"0600", 0o600)
    write(folder / "run.sh", b"#!/bin/sh\n", 0o755)
    write(folder / "empty.md", b"")
    write(folder / "block-exact.bin", b"b" * 65536)
    write(folder / "blocks.bin", random.Random(7).randbytes(300_000))
    sparse = folder / "sparse.bin"
    with sparse.open("wb") as file:
        file.write(b"start")
        file.seek(4 << 20)
        file.write(b"end")
    os.utime(sparse, ns=(LONG_AGO, LONG_AGO))
    (folder / "link.md").symlink_to("with blank.md")
    (folder / "nowhere.md").symlink_to("not there yet.md")
    (folder / "sub").mkdir(exist_ok=True)
    write(folder / "sub/below.md", b"below")
    (folder / "sub/up.md").symlink_to("../run.sh")
    (folder / "empty folder").mkdir()
    (folder / "closed").mkdir(mode=0o700)
    write(folder / "closed/x.md", b"x")


def write(path: Path, contents: bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(contents)
    path.chmod(mode)
    os.utime(path, ns=(LONG_AGO, LONG_AGO + len(path.name)))


def tree(path: Path) -> Tree:
    """Everything below a folder: name -> (type, mode, mtime, hash or target). Folders and links have no time here."""
    found: Tree = {}
    top = os.fsencode(path)
    for folder, folders, files in os.walk(top):
        for name in folders + files:
            place = os.path.join(folder, name)
            status = os.lstat(place)
            relative = os.path.relpath(place, top)
            if stat.S_ISLNK(status.st_mode):
                found[relative] = ("link", 0, 0, os.fsdecode(os.readlink(place)))
            elif stat.S_ISDIR(status.st_mode):
                found[relative] = ("dir", status.st_mode & 0o7777, 0, "")
            else:
                contents = Path(os.fsdecode(place)).read_bytes() if stat.S_ISREG(status.st_mode) else b""
                digest = hashlib.sha256(contents).hexdigest()
                found[relative] = ("file", status.st_mode & 0o7777, status.st_mtime_ns, digest)
    return found


def memory_tree(data: Path) -> Tree:
    """What of a ``.claude-mem`` folder must arrive exactly as it was: all of it but what never moves, and settings.json."""
    apart = {os.fsencode(name) for name in (*NEVER, *SECRETS, "settings.json")}
    apart |= {os.fsencode(parent) for name in NEVER for parent in Path(name).parents}
    return {name: about for name, about in tree(data).items() if name not in apart}


def project_tree(project: Path) -> Tree:
    """What of a three-tier project must arrive exactly as it was."""
    kept = {b"SESSION-STATE.md", b"MEMORY.md", b"tasks/todo.md", b"tasks/lessons.md"}
    never = {b"memory/.#2026-11-15.md", b"memory/2026-11-15.md.swp", b"memory/.env"}
    return {
        name: about
        for name, about in tree(project).items()
        if name in kept or (name.startswith(b"memory/") and name not in never)
    }


def without_cache(found: Tree) -> Tree:
    """A home's tree without what the sidecar keeps there for itself."""
    return {name: about for name, about in found.items() if name != b".cache" and not name.startswith(b".cache/")}


def empty_home(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def engine_at(store: Path, **settings: Any) -> Engine:
    """An engine over a ``file:`` store in this folder."""
    return replace(Engine(open_sandbox=open_sandbox, repository=Repository(open_store(f"file:{store}"))), **settings)


class OwnMachine(LocalSandbox):
    """A folder that stands for a machine of its own, as a provider's sandbox is: all that is there belongs to it."""

    def ground(self, projects: Sequence[str] | None) -> AllowedPaths | None:
        return None


class WatchedSandbox(LocalSandbox):
    """A real local sandbox that remembers what was asked of it."""

    def __init__(self, home: Path) -> None:
        super().__init__(home.resolve())
        self.calls: list[str] = []

    async def run(self, command: str, **how: Any) -> CommandResult:
        self.calls.append("run")
        return await super().run(command, **how)

    async def upload(self, path: str, chunks: AsyncIterator[bytes]) -> None:
        self.calls.append("upload")
        await super().upload(path, chunks)


class Ran(NamedTuple):
    """A command's exit code, its JSON document, and what it said on stderr."""

    code: int
    document: dict[str, Any]
    stderr: str

    @property
    def error(self) -> str:
        return str(self.document.get("error", {}).get("code", ""))


def run_cli(*words: str | Path, store: str | Path, env: Mapping[str, str] | None = None) -> Ran:
    """Run a command with ``--json``: it must print exactly one JSON document, and never a traceback.

    A process of its own is only for where it makes a difference: they are most of what the tests cost.
    """
    url = store if isinstance(store, str) else f"file:{store}"
    command, *rest = map(str, words)
    full = [command, f"--store={url}", "--json", *rest]
    own = env is not None or asyncio._get_running_loop() is not None
    code, printed, said = _in_a_process(full, env) if own else _called(full)
    assert "Traceback" not in said, said
    assert not leaked([said, printed]), "a credential was shown"
    document = json.loads(printed)  # one document: anything more or less does not parse
    assert isinstance(document, dict)
    return Ran(code, document, said)


def _in_a_process(words: list[str], env: Mapping[str, str] | None) -> tuple[int, str, str]:
    ran = forked_sidecar.run(words, env={**os.environ, **(env or {})})
    return ran.returncode, ran.stdout.decode(errors="replace"), ran.stderr.decode(errors="replace")


def _called(words: list[str]) -> tuple[int, str, str]:
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        try:
            code = main(words)
        except SystemExit as ended:
            code = int(str(ended.code))
    return code, printed.getvalue(), said.getvalue()


def told(receipt: ExportReceipt | Mapping[str, Any]) -> list[str]:
    """The warnings of an export, but for the one that every first export into a store has."""
    warnings = receipt.warnings if isinstance(receipt, ExportReceipt) else receipt["warnings"]
    return [warning for warning in warnings if not warning.startswith("A new store was begun at ")]


def forget_caches(home: Path) -> None:
    """Make a home look as if no sidecar had ever been there."""
    shutil.rmtree(home / ".cache", ignore_errors=True)
