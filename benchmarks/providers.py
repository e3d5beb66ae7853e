"""A conversation's end at a provider 100 ms away: the sidecar beside a tarball that is made and fetched by hand.

The providers are emulated on this machine; the SDKs are the real ones, and every request waits before it is answered.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks import homes
from benchmarks.table import Section, seconds, size
from emulators import DaytonaEmulator, E2BEmulator
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.store.repository import Repository
from sidecar.wiring import open_sandbox, open_store

LATENCY = 0.1
TAR = "tar -czf /tmp/by-hand-{id}.tar.gz -C {home} .claude-mem; echo done"
UNTAR = "tar -xzf /tmp/by-hand-{id}.tar.gz -C {home}; rm /tmp/by-hand-{id}.tar.gz; echo done"


def measure(folder: Path, database: int) -> Section:
    section = Section(f"A memory of {size(database)} at a provider {LATENCY * 1000:.0f} ms away")
    for name, emulator in (("E2B", E2BEmulator), ("Daytona", DaytonaEmulator)):
        with emulator() as server:
            os.environ.update(server.environment())
            asyncio.run(_measure(section, name, server, folder / name, database))
    return section


async def _measure(
    section: Section, name: str, server: E2BEmulator | DaytonaEmulator, folder: Path, database: int
) -> None:
    provider = name.lower()
    engine = Engine(open_sandbox=open_sandbox, repository=Repository(open_store(f"file:{folder}/store")))
    words = homes.Words(7, 4 << 20)
    box, fresh, other = server.create(), server.create(), server.create()
    homes.claude_mem(box.home, database, words)
    sandbox, target = open_sandbox(f"{provider}:{box.id}"), open_sandbox(f"{provider}:{fresh.id}")
    request = ExportRequest(memory=provider)
    server.latency = LATENCY
    hand, its = _by_hand(provider, box.id), _by_hand(provider, other.id)
    tarball = folder / "by-hand.tar.gz"

    async def first() -> str:
        receipt = await export(engine, sandbox, request)
        return f"{size(receipt.transferred_bytes)} moved"

    async def warm() -> str:
        receipt = await export(engine, sandbox, request)
        return f"{size(receipt.transferred_bytes)} moved"

    async def back() -> str:
        receipt = await restore(engine, target, RestoreRequest(memory=provider))
        return f"{size(receipt.transferred_bytes)} moved"

    async def fetched() -> str:
        await asyncio.to_thread(
            hand.fetch, TAR.format(id=box.id, home=box.home), f"/tmp/by-hand-{box.id}.tar.gz", tarball
        )
        return f"{size(tarball.stat().st_size)} moved"

    async def placed() -> str:
        await asyncio.to_thread(
            its.place, tarball, f"/tmp/by-hand-{other.id}.tar.gz", UNTAR.format(id=other.id, home=other.home)
        )
        return f"{size(tarball.stat().st_size)} moved"

    section.add(f"{name}: first export", await _timed(server, first), f"tar and fetch: {await _timed(server, fetched)}")
    homes.converse(box.home, words)
    section.add(
        f"{name}: after a conversation", await _timed(server, warm), f"tar and fetch: {await _timed(server, fetched)}"
    )
    section.add(f"{name}: restore", await _timed(server, back), f"send and untar: {await _timed(server, placed)}")
    Path(f"/tmp/by-hand-{box.id}.tar.gz").unlink(missing_ok=True)


async def _timed(server: E2BEmulator | DaytonaEmulator, work: Callable[[], Awaitable[str]]) -> str:
    server.clear()
    started = time.monotonic()
    about = await work()
    took = time.monotonic() - started
    return f"{seconds(took)}, {len(server.calls)} requests, {about}"


def _by_hand(provider: str, box_id: str) -> Any:
    return (_E2B if provider == "e2b" else _Daytona)(box_id)


class _E2B:
    def __init__(self, box_id: str) -> None:
        self.box_id = box_id

    def fetch(self, command: str, path: str, target: Path) -> None:
        from e2b import Sandbox

        box = Sandbox.connect(self.box_id)
        box.commands.run(command, timeout=300)
        with target.open("wb") as file, box.files.read(path, format="stream") as stream:
            for chunk in stream:
                file.write(chunk)

    def place(self, source: Path, path: str, command: str) -> None:
        from e2b import Sandbox

        box = Sandbox.connect(self.box_id)
        with source.open("rb") as file:
            box.files.write(path, file)
        box.commands.run(command, timeout=300)


class _Daytona:
    def __init__(self, box_id: str) -> None:
        self.box_id = box_id

    def fetch(self, command: str, path: str, target: Path) -> None:
        from daytona import Daytona

        box = Daytona().get(self.box_id)
        box.process.exec(command, timeout=300)
        with target.open("wb") as file:
            for chunk in box.fs.download_file_stream(path):
                file.write(chunk)

    def place(self, source: Path, path: str, command: str) -> None:
        from daytona import Daytona

        box = Daytona().get(self.box_id)
        box.fs.upload_file(str(source), path)
        box.process.exec(command, timeout=300)
