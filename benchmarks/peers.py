"""The whole of it beside general backup tools, in one run, by turns: a first export, one after a conversation, one with
nothing new, a restore.

The tools copy the live files, which is not safe for a database; it is their bytes and seconds that are of interest here.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import homes
from benchmarks.measure import PROJECT, bytes_in
from benchmarks.table import Section, seconds, size

OURS = "sidecar"
FIRST, AFTER, SAME, RESTORE = "first export", "after a conversation", "nothing new", "restore"
ROWS = (FIRST, AFTER, SAME, RESTORE)
MOST_OF_PEERS = {
    FIRST: {"restic": 1.0},
    AFTER: {"restic": 0.5, "borg": 0.8},
    SAME: {"restic": 0.35},
    RESTORE: {"restic": 0.8},
}
"""The goals: seconds, as a share of a peer's."""
PACKAGES = {"restic": "restic", "borg": "borgbackup"}


@dataclass(frozen=True, slots=True)
class Cost:
    """What one command took: by the clock, of all processors (its children's too), and how much the store grew."""

    seconds: float
    cpu: float
    added: int


@dataclass(slots=True)
class Tool:
    """One way to keep a memory. ``$home``, ``$store`` and ``$target`` stand for its own folders."""

    name: str
    begin: Sequence[str]
    export: Sequence[str]
    restore: Sequence[str]
    version: str = ""
    costs: dict[str, list[Cost]] = field(default_factory=dict)


def find_tools() -> list[Tool]:
    """Return ourselves and the peers that are on this machine. A missing one is installed where that is possible: by
    ``apt-get`` as root, or, for borg, by pip."""
    us = [sys.executable, "-c", "from sidecar.cli import run_alone; run_alone()"]  # as the installed command does
    tools = [
        Tool(
            OURS,
            [],
            [*us, "export", "m", "--store=file:$store", "--sandbox=local:$home", "--json"],
            [*us, "restore", "m", "--store=file:$store", "--sandbox=local:$target", "--json"],
        )
    ]
    if _find("restic"):
        restic = ["restic", "-q", "--repo", "$store"]
        tools.append(
            Tool(
                "restic",
                [*restic, "init"],
                [*restic, "backup", "$home"],
                [*restic, "restore", "latest", "--target", "$target"],
                _read_version("restic", "version"),
            )
        )
    if _find("borg"):
        create = 'borg create --chunker-params fixed,4096 "$store::$(date +%s%N)" "$home"'
        extract = 'cd "$target" && borg extract "$store::$(borg list --last 1 --short "$store")"'
        tools.append(
            Tool(
                "borg",
                ["borg", "init", "--encryption=none", "$store"],
                ["sh", "-c", create],
                ["sh", "-c", extract],
                _read_version("borg", "--version") + ", fixed 4 KiB blocks",
            )
        )
    return tools


def _find(name: str) -> bool:
    if shutil.which(name):
        return True
    ways = [["apt-get", "install", "-y", PACKAGES[name]]] if os.geteuid() == 0 and shutil.which("apt-get") else []
    ways += [[sys.executable, "-m", "pip", "install", "--quiet", "borgbackup"]] if name == "borg" else []
    for way in ways:
        subprocess.run(way, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if shutil.which(name):
            return True
    return False


def _read_version(*words: str) -> str:
    return " ".join(subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[:2])


def make_home(home: Path, scale: float = 1.0) -> None:
    """Make a memory of 102 MB: a claude-mem database of 80 MB, 1,500 notes, a transcript of 20 MB; or smaller."""
    words = homes.Words(3, 16 << 20)
    homes.claude_mem(home, int(80_000_000 * scale), words)
    homes.small_files(home, int(1500 * scale), words)
    place = _transcript(home)
    place.parent.mkdir(parents=True)
    with place.open("w") as transcript:
        while transcript.tell() < 20_000_000 * scale:
            transcript.write(_message(words))


def converse(home: Path, words: homes.Words) -> None:
    """One conversation: 30 observations, two notes edited, 60 messages more."""
    homes.converse(home, words)
    notes = sorted((home / ".config/opencode/MEMORY").rglob("*.md"))
    for place in (notes[len(notes) // 3], notes[len(notes) // 2]):
        place.write_text(place.read_text() + "\n" + words.take(40))
    with _transcript(home).open("a") as transcript:
        transcript.writelines(_message(words) for _ in range(60))


def _transcript(home: Path) -> Path:
    return home / ".claude/projects/-home-project/session.jsonl"


def _message(words: homes.Words) -> str:
    content = [{"type": "text", "text": words.take(900)}]
    return json.dumps({"type": "assistant", "uuid": words.noise(16).hex(), "message": {"content": content}}) + "\n"


class Yard:
    """The folders of all tools: each has its own copy of the memory, and its own store."""

    def __init__(self, folder: Path, tools: Sequence[Tool]) -> None:
        self._folder = folder
        self._tools = tools
        os.environ.setdefault("RESTIC_PASSWORD", "benchmark")
        os.environ["BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK"] = "yes"
        os.environ["BORG_RELOCATED_REPO_ACCESS_IS_OK"] = "yes"
        # Each command of a user finds its bytecode; so must ours.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        subprocess.run([sys.executable, "-m", "compileall", "-q", "sidecar", "adapters"], cwd=PROJECT, check=True)

    def renew(self, home: Path) -> None:
        """Give every tool a fresh copy of the memory and an empty store."""
        for tool in self._tools:
            shutil.rmtree(self._folder / tool.name, ignore_errors=True)
            shutil.copytree(home, self._at(tool, "home"))
            self._at(tool, "target").mkdir()
            if tool.begin:
                self._run(tool, tool.begin)
        os.sync()

    def converse(self, seed: int) -> None:
        """Have the same conversation in every copy."""
        for tool in self._tools:
            converse(self._at(tool, "home"), homes.Words(seed, 1 << 20))
        time.sleep(0.3)  # files younger than a tick of the clock are read again

    def measure(self, row: str, turn: int) -> None:
        """Run one row's command of each tool; who begins changes with the turn."""
        order = [*self._tools[turn % len(self._tools) :], *self._tools[: turn % len(self._tools)]]
        for tool in order:
            before = self._weigh(tool)
            cost = self._run(tool, tool.restore if row == RESTORE else tool.export)
            tool.costs.setdefault(row, []).append(Cost(cost.seconds, cost.cpu, self._weigh(tool) - before))

    def _at(self, tool: Tool, name: str) -> Path:
        return self._folder / tool.name / name

    def _weigh(self, tool: Tool) -> int:
        return bytes_in(self._at(tool, "store")) if self._at(tool, "store").exists() else 0

    def _run(self, tool: Tool, words: Sequence[str]) -> Cost:
        """Run a command. Raise RuntimeError if it fails."""
        places = {name: str(self._at(tool, name)) for name in ("home", "store", "target")}
        if words[0] != "sh":
            for name, place in places.items():
                words = [word.replace(f"${name}", place) for word in words]
        complaint = self._folder / "complaint"
        with complaint.open("wb") as stderr:
            began = time.monotonic()
            process = subprocess.Popen(
                words, cwd=PROJECT, env={**os.environ, **places}, stdout=subprocess.DEVNULL, stderr=stderr
            )
            _, status, used = os.wait4(process.pid, 0)
            took = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{tool.name} ended with {process.returncode}: {complaint.read_text()[-500:]}")
        return Cost(took, used.ru_utime + used.ru_stime, 0)


def measure(folder: Path, scale: float, rounds: int) -> Section:
    """Measure every tool ``rounds`` times, by turns, and compare the medians."""
    tools = find_tools()
    yard = Yard(folder / "yard", tools)
    make_home(folder / "home", scale)
    for turn in range(rounds):
        yard.renew(folder / "home")
        yard.measure(FIRST, turn)
        yard.converse(100 + turn)
        yard.measure(AFTER, turn)
        time.sleep(0.3)
        yard.measure(SAME, turn)
        yard.measure(RESTORE, turn)
    names = ", ".join(tool.version for tool in tools if tool.version)
    section = Section(
        f"A memory of {size(bytes_in(folder / 'home'))} beside {names or 'no other tool'}: medians of {rounds}"
    )
    for row in ROWS:
        ours = _take_median(tools[0], row)
        section.add(row, _describe(ours), "; ".join(_compare(ours, tool, row) for tool in tools[1:]))
    missing = set(PACKAGES) - {tool.name for tool in tools}
    for name in sorted(missing):
        section.add(name, "", "could not be installed here, skipped")
    return section


def _take_median(tool: Tool, row: str) -> Cost:
    costs = tool.costs[row]
    return Cost(
        statistics.median(cost.seconds for cost in costs),
        statistics.median(cost.cpu for cost in costs),
        int(statistics.median(cost.added for cost in costs)),
    )


def _describe(cost: Cost) -> str:
    return f"{seconds(cost.seconds)}, CPU {seconds(cost.cpu)}" + (f", {size(cost.added)}" if cost.added else "")


def _compare(ours: Cost, tool: Tool, row: str) -> str:
    theirs = _take_median(tool, row)
    goal = MOST_OF_PEERS[row].get(tool.name)
    told = f"; at most {goal:.2f} × is the goal" if goal else ""
    ratios = f"{ours.seconds / theirs.seconds:.2f} × its time, {ours.cpu / theirs.cpu:.2f} × its CPU{told}"
    return f"{tool.name}: {_describe(theirs)} ({ratios})"


def grow(folder: Path, scale: float, conversations: int) -> list[Tool]:
    """Export with every tool after each of ``conversations`` conversations. Return the tools with what that cost."""
    tools = find_tools()
    yard = Yard(folder / "yard", tools)
    make_home(folder / "home", scale)
    yard.renew(folder / "home")
    yard.measure(FIRST, 0)
    for number in range(conversations):
        yard.converse(500 + number)
        yard.measure(AFTER, number)
    return tools
