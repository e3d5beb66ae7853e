"""One trouble at one step of an export or a restore, at one provider: what comes of it, and whether that may be."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from adapters.sandboxes import long_commands
from adapters.sandboxes.daytona import Daytona
from adapters.sandboxes.e2b import E2B
from adapters.sandboxes.local import open_local
from adapters.sandboxes.remote import RemoteSandbox
from emulators import DaytonaEmulator, E2BEmulator, Fault
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.core import Timing
from sidecar.errors import SidecarError
from sidecar.receipts import ExportOutcome, RestoreOutcome
from tests.parts.homes import Tree, claude_mem_home, empty_home, engine_at, memory_tree, observe, write

MEMORY = "conductor"
BIG = 2_500_000
IDLE_SECONDS = 1.5
TIDY_SECONDS = 10.0
EMULATORS: dict[str, type[E2BEmulator] | type[DaytonaEmulator]] = {"e2b": E2BEmulator, "daytona": DaytonaEmulator}
VENDORS = {"e2b": E2B, "daytona": Daytona}

TROUBLES: dict[str, dict[str, Any]] = {
    "refused": {"kind": "refuse"},
    "cut at once": {"kind": "cut"},
    "cut half way": {"kind": "cut", "after": -2},
    "answer lost": {"kind": "lose"},
    "stalled": {"kind": "stall", "after": -2},
    "truncated cleanly": {"kind": "truncate", "after": -2},
    "one byte flipped": {"kind": "corrupt"},
    "file shrunk while read": {"kind": "shrink", "after": -2},
    "429": {"kind": "status", "status": 429},
    "500": {"kind": "status", "status": 500},
    "502": {"kind": "status", "status": 502},
    "503": {"kind": "status", "status": 503},
    "sandbox killed": {"kind": "kill", "after": -2},
    "sandbox timed out": {"kind": "expire", "after": -2},
    "slow link": {"kind": "slow", "rate": 3_000_000},
}
"""``after: -2`` stands for half of what the step moves."""
STEPS = {"export": ("info", "command", "download"), "restore": ("info", "upload", "command")}
MOVED = {"info": 400, "command": 2_000, "download": BIG, "upload": BIG}
ENDS = ("sandbox killed", "sandbox timed out")
GIVEN_UP = {"sandbox-gone", "sandbox-asleep", "sandbox-unreachable", "sandbox-busy", "sandbox-timeout"}
TAMPERED = {"size-mismatch", "digest-mismatch", "bad-answer", "transfer-failed", "upload-damaged"}


@dataclass(frozen=True, slots=True)
class Case:
    provider: str
    verb: str
    step: str
    trouble: str
    always: bool

    def __str__(self) -> str:
        return f"{self.provider}-{self.verb}-{self.step}-{self.trouble}-{'always' if self.always else 'once'}"

    @property
    def fault(self) -> Fault:
        spec = dict(TROUBLES[self.trouble])
        if spec.get("after") == -2:
            spec["after"] = MOVED[self.step] // 2
        return Fault(self.step, times=None if self.always else 1, **spec)  # type: ignore[arg-type]


def cases() -> Iterator[Case]:
    for provider in EMULATORS:
        for verb, steps in STEPS.items():
            for step in steps:
                for trouble in TROUBLES:
                    if trouble == "file shrunk while read" and step != "download":
                        continue
                    for always in (False, True):
                        # What ends a sandbox, or is merely slow, need not happen again and again.
                        if always and trouble in (*ENDS, "slow link"):
                            continue
                        yield Case(provider, verb, step, trouble, always)


class Scene:
    """A provider with one sandbox, a store that has its memory, and changes not yet exported."""

    def __init__(self, case: Case, folder: Path, server: E2BEmulator | DaytonaEmulator) -> None:
        self.case = case
        self.folder = folder
        self.server = server
        self.engine: Engine = replace(
            engine_at(folder / "store"), timing=Timing(command=4.0, turn_wait=4.0, database_wait=5.0)
        )
        self.box = server.create()
        self.left: list[str] = []
        """Paths outside the home at which something was put."""

    def sandbox(self) -> RemoteSandbox:
        provider = self.case.provider
        vendor = VENDORS[provider]()
        if isinstance(vendor, Daytona):
            vendor = Daytona(patience=2)
        return RemoteSandbox(f"{provider}:{self.box.id}", vendor, idle=IDLE_SECONDS)

    def memory(self) -> Tree:
        return memory_tree(self.box.home / ".claude-mem")

    async def head(self) -> str:
        return (await self.engine.repository.head(MEMORY)).snapshot

    async def stored(self) -> Tree:
        """What the head holds, restored elsewhere."""
        home = empty_home(self.folder / "check")
        receipt = await restore(self.engine, open_local(str(home)), RestoreRequest(memory=MEMORY))
        assert receipt.outcome is RestoreOutcome.COMPLETE, receipt
        assert not receipt.warnings, receipt
        return memory_tree(home / ".claude-mem")

    async def tidied(self) -> list[str]:
        """What of ours is still in the sandbox, after the time it may take to go."""
        deadline = time.monotonic() + TIDY_SECONDS
        while (left := self._scratch()) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return left

    def _scratch(self) -> list[str]:
        work = [str(path) for path in (self.box.home / ".cache/memory-sidecar").glob("work-*")]
        staged = [str(path) for path in self.box.home.glob(".*memory-sidecar*")]
        return (
            work + staged + [path for path in self.left if os.path.exists(path)] + list(map(str, self.box.processes()))
        )


def watched(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Note every path that an upload or a command uses outside the home."""
    from sidecar.engine import core
    from sidecar.engine.restores import placement

    def noted() -> str:
        scene.left.append(path := core.new_upload_path())
        return path

    monkeypatch.setattr(placement, "new_upload_path", noted)
    made = long_commands.LongCommand.__init__

    def noting(self: long_commands.LongCommand, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        scene.left.append(f"/tmp/{self._name}")

    monkeypatch.setattr(long_commands.LongCommand, "__init__", noting)


async def exported(scene: Scene) -> str:
    """Export a change under the case's trouble; return what came of it once all promises were found kept."""
    case, home = scene.case, scene.box.home
    claude_mem_home(home, 20)
    first = await export(scene.engine, scene.sandbox(), ExportRequest(memory=MEMORY))
    assert first.outcome is ExportOutcome.COMMITTED
    before = await scene.head()
    observe(home, 5, "later")
    if case.step == "download":
        write(home / ".claude-mem/corpora/big.bin", os.urandom(BIG))
    memory = scene.memory()
    scene.server.faults.add(case.fault)
    try:
        receipt = await export(scene.engine, scene.sandbox(), ExportRequest(memory=MEMORY))
        said = receipt.outcome.value
    except SidecarError as problem:
        said = problem.code
    scene.server.faults.clear()
    if said == "committed":
        assert await scene.head() == receipt.snapshot
        assert await scene.stored() == memory
    else:
        _may_be(case, said)
        assert await scene.head() == before
    if case.trouble not in ENDS:
        assert scene.memory() == memory
        assert await scene.tidied() == []
    return said


async def restored(scene: Scene) -> str:
    """Restore into a sandbox with other memories under the case's trouble; the same promises."""
    case, home = scene.case, scene.box.home
    source = claude_mem_home(empty_home(scene.folder / "source"), 20)
    write(source / ".claude-mem/corpora/big.bin", os.urandom(BIG))
    await export(scene.engine, open_local(str(source)), ExportRequest(memory=MEMORY))
    claude_mem_home(home, 3)
    old, new = scene.memory(), memory_tree(source / ".claude-mem")
    scene.server.faults.add(case.fault)
    try:
        receipt = await restore(scene.engine, scene.sandbox(), RestoreRequest(memory=MEMORY))
        said = receipt.reason.code if receipt.reason else receipt.outcome.value
    except SidecarError as problem:
        said = problem.code
    scene.server.faults.clear()
    if case.trouble in ENDS:
        assert said in GIVEN_UP
        return said
    assert await scene.tidied() == []
    if said == "complete":
        assert scene.memory() == new
        return said
    _may_be(case, said)
    assert scene.memory() == old
    return said


def _may_be(case: Case, said: str) -> None:
    """A failure is one of those that fit the trouble, and only trouble that goes on may end in one."""
    assert said in GIVEN_UP | TAMPERED, said
    if case.trouble in ENDS:
        assert said in ("sandbox-gone", "sandbox-asleep"), said
    elif not case.always:
        # One stalled command has used up all the time there was.
        assert (case.verb, case.trouble, case.step, said) == ("export", "stalled", "command", "sandbox-timeout")


async def outcome(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    with EMULATORS[case.provider]() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        scene = Scene(case, folder, server)
        watched(scene, monkeypatch)
        return await (exported if case.verb == "export" else restored)(scene)
