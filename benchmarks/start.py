"""How soon a command begins: the time from the start of its process to its first look at the store or the sandbox, beside
a Python that loads what every such command needs and ends."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import homes
from benchmarks.measure import PROJECT, sidecar
from benchmarks.table import Section

BARE = [sys.executable, "-c", "import asyncio, json"]
MOST = 1.8
"""The goal: at most so many times as long."""

# As the installed command does; it ends with the first thing that it does in one of the folders named.
FIRST = """
import os, sys, time
places, seen = tuple(sys.argv.pop(1).split(":")), []
def look(event, args):
    if event in ("open", "os.scandir", "os.listdir", "os.mkdir") and not seen and str(args[0]).startswith(places):
        seen.append(1)  # another thread may look too
        sys.stdout.write(repr(time.time()))
        sys.stdout.flush()
        os._exit(0)
sys.addaudithook(look)
from sidecar.cli import run_alone
run_alone()
"""


def measure(folder: Path, rounds: int) -> Section:
    home, store, temporary = folder / "home", folder / "store", folder / "tmp"
    temporary.mkdir(parents=True)
    homes.claude_mem(home, 1_000_000, homes.Words(5, 1 << 20))
    ref, url = f"--sandbox=local:{home}", f"file:{store}"
    for _ in range(2):
        sidecar("export", "m", ref, store=url, temporary=temporary)
    commands = [["list"], ["log", "m"], ["show", "m"], ["verify", "m"], ["diff", "m"], ["records", "m"], ["blame", "m"]]
    commands += [["history", "m", "x"], ["brief", "m"], ["search", "x"], ["forget", "m", "--dry-run"], ["audit"]]
    commands += [["export", "m", ref], ["restore", "m", ref], ["doctor"]]
    bare, took = list[float](), {" ".join(words[:1]): list[float]() for words in commands}
    for _ in range(rounds):
        for words in commands:
            bare.append(_run_bare())
            took[words[0]].append(_measure_first([*words, f"--store={url}"], (home, store)))
    section = Section(f"Until a command does something, the median of {rounds}")
    beside = statistics.median(bare)
    section.add("python -c 'import asyncio, json', all of it", "", f"{beside * 1000:.0f} ms")
    for name, times in took.items():
        ours = statistics.median(times)
        section.add(name, f"{ours * 1000:.0f} ms", f"{ours / beside:.2f} × (at most {MOST:.1f} × is the goal)")
    return section


def _run_bare() -> float:
    began = time.time()
    subprocess.run(BARE, cwd=PROJECT, check=True)
    return time.time() - began


def _measure_first(words: list[str], places: tuple[Path, ...]) -> float:
    """Return how long a command takes to its first look at one of these folders. Raise RuntimeError if it looks at none."""
    began = time.time()
    command = [sys.executable, "-c", FIRST, ":".join(map(str, places)), *words]
    ran = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    try:
        return float(ran.stdout) - began
    except ValueError:
        raise RuntimeError(f"{words[0]} did nothing: {ran.stdout[-200:]}{ran.stderr[-500:]}") from None
