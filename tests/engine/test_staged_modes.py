"""What lies in a sandbox's /tmp while a memory is brought there: for the sandbox's user alone."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sidecar.engine import ExportRequest, RestoreRequest, export, restore
from tests.parts.memories import Name, Provider, engine_on, grow_large, plain_home, provider_named, shell_tools


@contextmanager
def watched(pattern: str) -> Iterator[dict[Path, set[int]]]:
    """The modes of all that is seen in /tmp meanwhile."""
    seen, ended = dict[Path, set[int]](), threading.Event()

    def watch() -> None:
        while not ended.is_set():
            for place in Path("/tmp").glob(pattern):
                try:
                    mode = stat.S_IMODE(place.lstat().st_mode)
                except FileNotFoundError:
                    continue
                seen.setdefault(place, set()).add(mode)
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Provider]:
    name: Name = "local"
    with provider_named(name, tmp_path / "provider") as provider:
        yield provider


@pytest.mark.parametrize("bare", [False, True], ids=["with python", "without"])
async def test_nobody_else_can_read_a_memory_on_its_way(local: Provider, tmp_path: Path, bare: bool) -> None:
    tools = shell_tools(tmp_path / "tools") if bare else None
    box, other = local.box(tools=tools), local.box(tools=tools)
    plain_home(box.home)
    grow_large(box.home)
    engine = engine_on(f"file:{tmp_path / 'store'}")
    assert (await export(engine, box.open(), ExportRequest(memory="m"))).outcome == "committed"
    with watched("memory-sidecar-*") as seen:
        sandbox = other.open()
        receipt = await restore(engine, sandbox, RestoreRequest(memory="m"))
    assert receipt.outcome == "complete"
    ours = {Path(path).stem for path in sandbox.uploads}  # others' tests may be about, too
    modes = {(place.suffix, mode) for place, found in seen.items() if place.stem in ours for mode in found}
    assert modes == {(".bundle", 0o600), *([(".unpacked", 0o700)] if bare else [])}
    notes = other.home / ".cache/memory-sidecar/m"
    assert {stat.S_IMODE(place.stat().st_mode) for place in notes.iterdir()} == {0o600}
    assert stat.S_IMODE(notes.stat().st_mode) == 0o700
