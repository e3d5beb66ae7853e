"""Run things and measure them."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]

# The child is the sidecar and nothing else: what runs inside a sandbox is a process of its own. The kernel's own mark
# (VmHWM) is read where there is one, for ru_maxrss begins with what the parent had when it started the child.
CHILD = """
import resource, sys
from sidecar.cli import main
code = main(sys.argv[1:])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
try:
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
except OSError:
    pass
print(peak, file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True, slots=True)
class Run:
    """A command of ours: its receipt, how long it took as a whole, and the sidecar's peak of resident memory."""

    receipt: dict[str, Any]
    seconds: float
    peak: int


def sidecar(*words: str | Path, store: str, temporary: Path, expect: str = "") -> Run:
    """Run a command to its end. Raise RuntimeError when it failed or its outcome is not the one expected."""
    command, *rest = map(str, words)
    started = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, command, f"--store={store}", "--json", *rest],
        cwd=PROJECT,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        check=False,
    )
    seconds = time.monotonic() - started
    receipt = json.loads(ran.stdout or b"{}")
    if ran.returncode or (expect and receipt["outcome"] != expect):
        raise RuntimeError(f"{command} ended with {ran.returncode}: {receipt} {ran.stderr.decode()[-500:]}")
    return Run(receipt, seconds, int(ran.stderr.split()[-1]))


def shell(script: str, **places: Path) -> float:
    """Seconds a shell pipeline takes; its ``$names`` are the places."""
    started = time.monotonic()
    environment = {**os.environ, **{name: str(place) for name, place in places.items()}}
    subprocess.run(["bash", "-o", "pipefail", "-c", script], check=True, env=environment, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def bytes_in(folder: Path) -> int:
    """All bytes of all files below a folder."""
    return sum(place.stat().st_size for place in folder.rglob("*") if place.is_file())


def copy_database(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as live, closing(sqlite3.connect(target)) as copy:
        live.backup(copy)


def changed_pages(old: Path, new: Path, page: int = 4096) -> bytes:
    """The pages of a database that differ from an older copy, one after the other."""
    before, after = old.read_bytes(), new.read_bytes()
    starts = range(0, len(after), page)
    return b"".join(after[at : at + page] for at in starts if after[at : at + page] != before[at : at + page])


def gzipped(data: bytes, level: int) -> int:
    return len(gzip.compress(data, level, mtime=0))
