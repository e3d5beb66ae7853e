"""A random week of exports under review, with reviews, checks that fail, hang and crash, and processes that are killed:
the head only ever holds what was accepted, and nothing that waits is lost."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.host.files import open_spool
from sidecar.store.encryption.given_keys import GivenKeys
from sidecar.store.fetch import fetch
from sidecar.store.manifest import Manifest
from sidecar.store.repository import Repository
from sidecar.store.reviews import Reviews, read_reviews
from sidecar.wiring import open_repository
from tests.parts.homes import PROJECT, Ran, empty_home, run_cli, write

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "acme/agent"
CHECK = """
import os, pathlib, sys, time
text = pathlib.Path('project/MEMORY.md').read_text().splitlines()[-1]
if 'fails' in text:
    sys.exit('it fails')
if 'hangs' in text:
    time.sleep(600)
if 'crashes' in text:
    os.kill(os.getpid(), 11)
"""
DIES_AT_A_WRITE = """
import itertools, os, sys
from adapters.stores.disk import DiskStore
from sidecar.cli import main
writes, fatal, after = itertools.count(1), int(sys.argv[1]), sys.argv[2] == "after"
write = DiskStore._write
def dying(self, key, fill):
    here = next(writes) == fatal
    if here and not after:
        os.kill(os.getpid(), 9)
    write(self, key, fill)
    if here:
        os.kill(os.getpid(), 9)
DiskStore._write = dying
sys.exit(main(sys.argv[3:]))
"""


class Week:
    """One memory under review, and some sandboxes; every promise is looked at after each step."""

    more = ""
    """What else the config says."""
    loses_decided = False
    """Retention removes what was decided, and heads are lost."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.folder, self.store, self.config = folder, folder / "store", folder / "config.toml"
        (folder / "check.py").write_text(CHECK)
        command = json.dumps([sys.executable, str(folder / "check.py")])
        self.config.write_text(
            f'[review]\nrequired = ["acme/*"]\n[[checks]]\ncommand = {command}\ntimeout = 2\n{self.more}'
        )
        self.homes = [self._make_home(f"home{number}") for number in range(3)]
        self.accepted: set[str] = set()
        """What a person's command was given for, whether or not it lived to answer."""
        self.waiting: dict[str, str] = {}
        """What an export said that waits, and what its sandbox had then."""
        self.declined: set[str] = set()
        self.count, self.heads = 0, 0

    def _make_home(self, name: str) -> Path:
        home = empty_home(self.folder / name)
        write(home / "MEMORY.md", b"# Facts\n")
        return home

    def run(self, *words: str) -> Ran | None:
        """Run a command; one in eight dies at one of its writes. ``None`` if it died."""
        words = (*words, "--config", str(self.config))
        if self.chance.random() >= 0.125:
            return run_cli(*words, store=self.store)
        fatal, when = self.chance.randint(1, 6), self.chance.choice(["before", "after"])
        full = [*words[:1], f"--store=file:{self.store}", "--json", *words[1:]]
        died = subprocess.run(
            [sys.executable, "-c", DIES_AT_A_WRITE, str(fatal), when, *full],
            cwd=PROJECT,
            capture_output=True,
            text=True,
        )
        assert "Traceback" not in died.stderr, died.stderr
        return (
            None if died.returncode == -signal.SIGKILL else Ran(died.returncode, json.loads(died.stdout), died.stderr)
        )

    def export(self) -> None:
        home = self.chance.choice(self.homes)
        place, what = home / "MEMORY.md", self.chance.choices(["is so", "fails", "hangs", "crashes"], [40, 4, 1, 2])[0]
        self.count += 1
        if self.chance.random() < 0.9:
            lines = [line for line in place.read_text().splitlines() if "is so" in line or line.startswith("#")]
            place.write_text("\n".join([*lines, f"Fact {self.count} {what}"]) + "\n")
        more = self.chance.choices([(), ("--force",), ("--conversation", f"c{self.count}")], [6, 1, 2])[0]
        ran = self.run("export", MEMORY, "--sandbox", f"local:{home}", *more)
        if ran is None:
            return
        if ran.document["outcome"] == "committed":  # whoever accepted it was killed before the head moved
            assert ran.document["snapshot"] in self.accepted, ran.document
            return
        assert ran.document["outcome"] in ("pending", "rejected", "diverged", "unchanged"), ran.document
        if ran.document["outcome"] == "pending":
            assert (ran.code == 3 and what == "is so") or "is so" in place.read_text()
            self.waiting.setdefault(ran.document["snapshot"], place.read_text())
        if what != "is so" and place.read_text().endswith(f"{what}\n") and ran.document["outcome"] == "rejected":
            assert ran.error in ("check-failed", "declined"), ran.document

    def restore(self) -> None:
        home = self.chance.choice(self.homes)
        if self.chance.random() < 0.3:  # a new sandbox
            shutil.rmtree(home)
            self._make_home(home.name)
        ran = self.run("restore", MEMORY, "--sandbox", f"local:{home}", *self.choose_restore())
        assert ran is None or ran.code == 0, ran

    def choose_restore(self) -> tuple[str, ...]:
        return ()

    def accept(self) -> None:
        reviews = self.reviews()
        named = self.chance.random() < 0.4 and [one for one in reviews.pending if one in self.list_snapshots()]
        chosen = self.chance.choice(named) if named else ""
        before = set(reviews.pending)
        ran = self.run("accept", MEMORY, *([chosen] if chosen else []), "--because", "read")
        if ran is None:
            self.accepted |= {chosen} if chosen else before | self.list_snapshots()
        elif ran.code == 0:
            self.accepted.add(ran.document["head"])
        else:
            assert ran.error in ("nothing-to-accept", "already-decided", "memory-not-found"), ran

    def decline(self) -> None:
        before = self.reviews()
        ran = self.run("decline", MEMORY, "--because", "not so")
        if ran is not None and ran.code == 0:
            assert before.get_decision(ran.document["snapshot"]) == "pending"
            self.declined.add(ran.document["snapshot"])
        assert ran is None or ran.code == 0 or ran.error in ("nothing-to-accept", "memory-not-found"), ran

    def two_at_once(self) -> None:
        """Two people decide about the same snapshot, and a sandbox is exported meanwhile."""
        waiting = [one for one in self.reviews().pending if one in self.list_snapshots()]
        if not waiting:
            return
        snapshot, words = (
            self.chance.choice(waiting),
            [f"--store=file:{self.store}", "--json", f"--config={self.config}"],
        )
        home = self.chance.choice(self.homes)
        commands = [
            ["accept", *words, MEMORY, snapshot],
            ["decline", *words, MEMORY, snapshot],
            ["export", *words, MEMORY, f"--sandbox=local:{home}"],
        ]
        self.chance.shuffle(commands)
        running = [
            subprocess.Popen([sys.executable, "-m", "sidecar", *one], cwd=PROJECT, stdout=subprocess.PIPE, text=True)
            for one in commands
        ]
        if self.chance.random() < 0.3:
            time.sleep(self.chance.random() / 2)
            os.kill(self.chance.choice(running).pid, signal.SIGKILL)
        said = {one[0]: process for one, process in zip(commands, running, strict=True)}
        for process in running:
            process.wait(120)
        accepted, declined = said["accept"].returncode, said["decline"].returncode
        assert accepted != 0 or declined != 0, "both were told that it was done"
        if accepted in (0, -signal.SIGKILL):
            self.accepted.add(snapshot)
        if declined == 0:
            self.declined.add(snapshot)
        for process in running:
            assert process.stdout is not None
            process.stdout.close()

    def reviews(self) -> Reviews:
        return asyncio.run(read_reviews(self.repository.store, MEMORY))[0]

    def list_snapshots(self) -> set[str]:
        return set(asyncio.run(self.repository.list_snapshot_ids(MEMORY)))

    @property
    def repository(self) -> Repository:
        return open_repository(f"file:{self.store}", GivenKeys())

    def check(self) -> None:
        """The promises, from what is in the store."""

        async def read() -> None:
            repository = self.repository
            state = await repository.head(MEMORY)
            assert self.loses_decided or not state.problem
            reviews, _ = await read_reviews(repository.store, MEMORY)
            head = state.head or await repository.rebuild_head(MEMORY)
            past = {snapshot for snapshot, _ in head.history} if head else set()
            assert past <= self.accepted, past - self.accepted
            ids = set(await repository.list_snapshot_ids(MEMORY))
            assert past & ids <= set(reviews.accepted)
            assert self.declined.isdisjoint(past) and self.declined <= reviews.declined
            self.heads = len(past)
            undecided = {one for one in self.waiting if reviews.get_decision(one) in ("", "pending")}
            assert undecided <= ids, "lost"
            assert undecided <= reviews.rows.keys(), "it waits, and is not listed"
            assert self.loses_decided or set(self.waiting) <= ids, "lost"

        asyncio.run(read())

    def check_contents(self) -> None:
        """Everything that an export said it keeps can be brought back, as it was."""

        async def read() -> None:
            for snapshot in self.waiting:
                async with open_spool() as scratch:
                    manifest = await self.repository.manifest(MEMORY, snapshot)
                    assert isinstance(manifest, Manifest)
                    await fetch(self.repository.store, manifest, scratch)

        there = self.list_snapshots()
        self.waiting = {one: text for one, text in self.waiting.items() if one in there}
        asyncio.run(read())
        for number, (snapshot, text) in enumerate(list(self.waiting.items())[-10:]):
            fresh = empty_home(self.folder / f"fresh{number}")
            ran = run_cli("restore", MEMORY, "--sandbox", f"local:{fresh}", "--snapshot", snapshot, store=self.store)
            assert ran.code == 0 and (fresh / "MEMORY.md").read_text() == text


class HarshWeek(Week):
    """Also with everything else that moves a head or removes a snapshot, and heads that are lost."""

    more = "[retention]\nkeep_last = 3\nkeep_pending = 1000\n"
    loses_decided = True

    def choose_restore(self) -> tuple[str, ...]:
        there = sorted(self.list_snapshots())
        named = ("--snapshot", self.chance.choice(there)) if there else ()
        return self.chance.choices([(), named, ("--read-only",), ("--discard",)], [6, 3, 1, 1])[0]

    def rollback(self) -> None:
        there = sorted(self.list_snapshots())
        if not there:
            return
        ran = self.run("rollback", MEMORY, self.chance.choice(there))
        assert ran is None or ran.code == 0 or ran.error in ("not-reviewed", "head-moved", "snapshot-not-found"), ran
        if ran is not None and ran.code == 0:
            assert ran.document["head"] in self.accepted

    def fork(self) -> None:
        there = sorted(self.list_snapshots())
        if not there:
            return
        chosen = self.chance.choice(there)
        ran = run_cli("fork", MEMORY, "acme/copy", "--snapshot", chosen, "--config", self.config, store=self.store)
        assert ran.code == 0 or ran.error == "not-reviewed", ran
        if ran.code == 0:
            assert chosen in self.accepted
            run_cli("delete", "acme/copy", "--yes", store=self.store)

    def bring_back(self) -> None:
        """Download any snapshot, and import it."""
        there, archive = sorted(self.list_snapshots()), self.folder / "archive.tar.gz"
        if not there:
            return
        assert run_cli("download", MEMORY, self.chance.choice(there), "-o", archive, store=self.store).code == 0
        ran = self.run("import", MEMORY, str(archive))
        archive.unlink()
        assert ran is None or ran.document["outcome"] in ("pending", "rejected", "unchanged"), ran

    def lose_head(self) -> None:
        """The head is damaged or gone; somebody makes one again of what it was."""
        place = next((one for one in self.store.rglob("head.json") if b'"snapshot"' in one.read_bytes()), None)
        if place is None:
            return
        if self.chance.random() < 0.5:
            place.unlink()
        else:
            place.write_text("x")
        self.check()
        for step in self.chance.choices([self.export, self.restore, self.rollback, self.fork], k=2):
            step()
            self.check()
        state = asyncio.run(self.repository.head(MEMORY))
        rebuilt = None if state.head else asyncio.run(self.repository.rebuild_head(MEMORY))
        if rebuilt is not None:
            ran = run_cli("rollback", MEMORY, rebuilt.snapshot, "--config", self.config, store=self.store)
            assert ran.code == 0, ran
        elif state.problem:  # retention left nothing that was the head
            place.unlink()


@pytest.mark.parametrize(
    ("seed", "exports"),
    [(1, 14), *(pytest.param(seed, 500, marks=pytest.mark.slow) for seed in (2, 6))],
)
def test_the_head_only_ever_holds_what_was_accepted(tmp_path: Path, seed: int, exports: int) -> None:
    week = Week(tmp_path, seed)
    steps: list[Callable[[], None]] = [week.export, week.restore, week.accept, week.decline, week.two_at_once]
    run_week(week, exports, steps, [60, 12, 14, 8, 3])


@pytest.mark.parametrize(
    ("seed", "exports"),
    [(3, 8), *(pytest.param(seed, 250, marks=pytest.mark.slow) for seed in (4, 5))],
)
def test_nor_by_any_other_way(tmp_path: Path, seed: int, exports: int) -> None:
    week = HarshWeek(tmp_path, seed)
    steps: list[Callable[[], None]] = [week.export, week.restore, week.accept, week.decline, week.two_at_once]
    others: list[Callable[[], None]] = [week.rollback, week.fork, week.bring_back, week.lose_head]
    run_week(week, exports, [*steps, *others], [60, 14, 12, 10, 2, 5, 3, 4, 3])


def run_week(week: Week, exports: int, steps: list[Callable[[], None]], weights: list[int]) -> None:
    while week.count < exports:
        week.chance.choices(steps, weights)[0]()
        week.check()
    week.accepted |= week.list_snapshots()
    accepted = run_cli("accept", MEMORY, store=week.store)
    assert accepted.code == 0 or accepted.error == "nothing-to-accept"
    week.check()
    week.check_contents()
    assert week.heads and week.waiting
