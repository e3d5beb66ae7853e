"""Two services export one sandbox at the same time: a checkpoint of one is no divergence for a caller of the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.engine import ExportRequest, RestoreRequest
from sidecar.receipts import ExportReceipt
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.core import Sidecar
from sidecar.service.jobs.scheduler import Jobs
from sidecar.service.sandboxes import SandboxTarget
from sidecar.service.settings import Service
from tests.parts.homes import empty_home, engine_at, write

pytestmark = pytest.mark.usefixtures("forked_programs")

Hook = Callable[[], Awaitable[None]]


def service(store: Path, before_moving: Hook | None = None) -> Sidecar:
    sidecar = Sidecar(replace(engine_at(store), check_right=before_moving), Service())
    Keeper(sidecar, Jobs())
    return sidecar


async def exported(sidecar: Sidecar, home: Path) -> ExportReceipt:
    receipt = await (await sidecar.start_export(ExportRequest(memory="m"), SandboxTarget(f"local:{home}"))).result()
    assert isinstance(receipt, ExportReceipt)
    return receipt


@pytest.mark.parametrize("later", ["theirs", "ours"], ids=["the other one read later", "we read later"])
async def test_an_export_that_another_of_the_same_sandbox_overtook_is_saved(tmp_path: Path, later: str) -> None:
    store, home = tmp_path / "store", empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"# remembered\n")
    first = await exported(service(store), home)
    others: list[asyncio.Task[ExportReceipt]] = []
    we_have_read = asyncio.Event()
    write(home / "MEMORY.md", b"# remembered, and more\n")
    if later == "ours":  # it has read the sandbox, and waits before it moves the head
        other = service(store, we_have_read.wait)  # type: ignore[arg-type]
        others.append(asyncio.create_task(exported(other, home)))
        while not list((store / "memories/m/snapshots").glob("[!.]*"))[1:]:
            await asyncio.sleep(0.02)
        write(home / "MEMORY.md", b"# remembered, and more than that\n")

    async def overtaken() -> None:
        if not we_have_read.is_set():
            we_have_read.set()
            if later == "theirs":
                write(home / "MEMORY.md", b"# remembered, and more than that\n")
                others.append(asyncio.create_task(exported(service(store), home)))
            assert (await others[0]).outcome == "committed"

    receipt = await exported(service(store, overtaken), home)
    assert receipt.is_saved and receipt.head != first.snapshot
    state = await engine_at(store).repository.head("m")
    assert state.snapshot == receipt.head
    manifest = await engine_at(store).repository.manifest("m", state.snapshot)
    assert manifest.bytes == len(b"# remembered, and more than that\n"), "the later of the two is the head"


async def test_another_sandbox_that_was_faster_is_a_divergence(tmp_path: Path) -> None:
    store, home, other = tmp_path / "store", empty_home(tmp_path / "home"), empty_home(tmp_path / "other")
    write(home / "MEMORY.md", b"# remembered\n")
    await exported(service(store), home)
    await (await service(store).start_restore(RestoreRequest(memory="m"), SandboxTarget(f"local:{other}"))).result()
    write(home / "MEMORY.md", b"# remembered here\n")
    write(other / "MEMORY.md", b"# remembered there, too\n")

    async def overtaken() -> None:
        assert (await exported(service(store), other)).outcome == "committed"

    assert (await exported(service(store, overtaken), home)).outcome == "diverged"
