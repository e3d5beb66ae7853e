"""Whoever takes a sandbox over writes the head anew: that stops the former owner's export, and nobody else's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.engine import ExportRequest, export
from sidecar.errors import SidecarError
from tests.parts.homes import WatchedSandbox, empty_home, engine_at, write

pytestmark = pytest.mark.usefixtures("forked_programs")

REQUEST = ExportRequest(memory="m")


@pytest.fixture
def sandbox(tmp_path: Path) -> WatchedSandbox:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"# remembered\n")
    return WatchedSandbox(home)


async def test_an_export_that_still_has_the_right_to_is_not_in_a_fences_way(
    tmp_path: Path, sandbox: WatchedSandbox
) -> None:
    engine, asked = engine_at(tmp_path / "store"), 0
    first = await export(engine, sandbox, REQUEST)

    async def check_right() -> None:
        nonlocal asked
        asked += 1
        if asked == 1:  # another service takes over another sandbox of this memory at just this moment
            await engine.repository.fence("m")

    write(sandbox.home / "MEMORY.md", b"# remembered, and more\n")
    second = await export(replace(engine, check_right=check_right), sandbox, REQUEST)
    assert (second.outcome, second.parent, asked) == ("committed", first.snapshot, 2)
    assert (await engine.repository.head("m")).snapshot == second.snapshot


async def test_one_that_lost_the_right_to_meanwhile_does_not_move_the_head(
    tmp_path: Path, sandbox: WatchedSandbox
) -> None:
    engine, asked = engine_at(tmp_path / "store"), 0
    first = await export(engine, sandbox, REQUEST)

    async def check_right() -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise SidecarError("Another service looks after this sandbox now.", code="lease-lost")
        await engine.repository.fence("m")

    write(sandbox.home / "MEMORY.md", b"# remembered, and more\n")
    with pytest.raises(SidecarError) as raised:
        await export(replace(engine, check_right=check_right), sandbox, REQUEST)
    assert raised.value.code == "lease-lost"
    assert (await engine.repository.head("m")).snapshot == first.snapshot


async def test_a_head_that_really_moved_is_still_a_divergence(tmp_path: Path, sandbox: WatchedSandbox) -> None:
    engine, other = engine_at(tmp_path / "store"), WatchedSandbox(empty_home(tmp_path / "other"))
    write(other.home / "MEMORY.md", b"# somebody else's\n")
    await export(engine, sandbox, REQUEST)

    async def check_right() -> None:
        await export(engine, other, replace(REQUEST, force=True))

    write(sandbox.home / "MEMORY.md", b"# remembered, and more\n")
    assert (await export(replace(engine, check_right=check_right), sandbox, REQUEST)).outcome == "diverged"
