"""Large memories through either SDK in little memory, and a clean end of the process every time."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulators import DaytonaEmulator, E2BEmulator
from tests.parts.homes import PROJECT, claude_mem_home, empty_home, memory_tree, run_cli, write
from tests.parts.providers import EMULATORS

pytestmark = pytest.mark.slow

MOST_GROWTH = 60 << 20
LARGE = 200_000_000
EXITS = 40
MEASURED = """
import asyncio, json, re, sys
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.store.repository import Repository
from sidecar.wiring import open_sandbox, open_store

def peak():  # getrusage would tell of whoever started us as well
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

async def main(store, small, large, target):
    engine = Engine(open_sandbox=open_sandbox, repository=Repository(open_store(f"file:{store}")))
    await export(engine, open_sandbox(small), ExportRequest(memory="small"))
    await restore(engine, open_sandbox(target), RestoreRequest(memory="small"))
    before = peak()
    sent = await export(engine, open_sandbox(large), ExportRequest(memory="large"))
    exported = peak()
    came = await restore(engine, open_sandbox(target), RestoreRequest(memory="large"))
    print(json.dumps([sent.outcome, came.outcome, sent.transferred_bytes, exported - before, peak() - before]))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(params=["e2b", "daytona"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[E2BEmulator | DaytonaEmulator]:
    with EMULATORS[request.param]() as emulator:
        for name, value in emulator.environment().items():
            monkeypatch.setenv(name, value)
        yield emulator


def _ref(server: E2BEmulator | DaytonaEmulator, box_id: str) -> str:
    return f"{'e2b' if isinstance(server, E2BEmulator) else 'daytona'}:{box_id}"


def test_two_hundred_megabytes_pass_through_in_little_memory(
    server: E2BEmulator | DaytonaEmulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large, target = server.create(), server.create(), server.create()
    claude_mem_home(small.home)
    claude_mem_home(large.home)
    chance = random.Random(1)
    for part in range(4):
        write(large.home / f".claude-mem/corpora/{part}.bin", chance.randbytes(LARGE // 4))
    refs = [_ref(server, box.id) for box in (small, large, target)]
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path), *refs], cwd=PROJECT, capture_output=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr.decode()
    sent, came, moved, exporting, in_all = json.loads(ran.stdout)
    assert (sent, came) == ("committed", "complete") and moved > LARGE
    assert memory_tree(target.home / ".claude-mem") == memory_tree(large.home / ".claude-mem")
    with capsys.disabled():
        print(
            f"\n{refs[0].split(':')[0]}: 200 MB: RSS +{exporting >> 20} MiB to export, +{in_all >> 20} MiB with the restore"
        )
    assert in_all < MOST_GROWTH


def test_the_process_ends_cleanly_every_time(
    server: E2BEmulator | DaytonaEmulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    box = server.create()
    claude_mem_home(box.home)
    codes = []
    for number in range(EXITS):
        write(box.home / ".claude-mem/corpora/big.bin", os.urandom(2_000_000))
        ran = run_cli("export", "m", "--sandbox", _ref(server, box.id), store=empty_home(tmp_path / str(number)))
        codes.append(ran.code)
        assert ran.document["trips"]["download"] == 1
        assert ran.stderr == ""
    with capsys.disabled():
        print(f"\n{_ref(server, '')} {codes.count(0)} of {EXITS} exports with a streamed download ended cleanly")
    assert codes == [0] * EXITS
