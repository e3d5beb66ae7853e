"""A memory of thousands of small files, as PAI's users have: what changed travels, and all of it arrives at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from tests.parts.memories import Name, Provider, engine_on

pytestmark = pytest.mark.usefixtures("forked_programs")

FILES = 9_000


@pytest.mark.parametrize("name", ["local", pytest.param("e2b", marks=pytest.mark.slow)])
async def test_of_thousands_of_files_only_the_changed_ones_travel_and_all_arrive(
    name: Name, open_provider: Callable[[Name], Provider], tmp_path: Path
) -> None:
    provider = open_provider(name)
    first, second = provider.box(), provider.box()
    data = first.home / ".config/opencode/MEMORY"
    for number in range(FILES):
        place = data / f"LEARNING/ALGORITHM/{number % 90:02}/note-{number}.md"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"# Note {number}\n")
    engine: Engine = engine_on(f"file:{tmp_path / 'store'}")
    assert (await export(engine, first.open(), ExportRequest(memory="m"))).files == FILES
    time.sleep(0.3)  # files younger than a tick of the clock are read again
    for number in (7, 4_000, FILES - 1):
        (data / f"LEARNING/ALGORITHM/{number % 90:02}/note-{number}.md").write_text("# Changed\n")
    warm = await export(engine, first.open(), ExportRequest(memory="m"))
    assert (warm.outcome, warm.kind, warm.files) == ("committed", "delta", FILES)
    assert warm.packed_bytes < 64 * 1024
    assert {kind: count for kind, count in warm.trips.items() if kind != "control"} == {"command": 1}
    back = await restore(engine, second.open(), RestoreRequest(memory="m"))
    assert (back.outcome, back.files) == ("complete", FILES)
    assert {kind: count for kind, count in back.trips.items() if kind != "control"} == {"upload": 1, "command": 1}
    assert (second.home / ".config/opencode/MEMORY/LEARNING/ALGORITHM/07/note-7.md").read_text() == "# Changed\n"
