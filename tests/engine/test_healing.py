"""A store that lost something must not keep an agent from saving, nor let it believe in what is gone."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.ids import MemoryKeys, is_snapshot_id, parse_snapshot_time
from sidecar.receipts import ExportOutcome, RestoreOutcome
from sidecar.store.repository import Repository
from sidecar.wiring import open_sandbox, open_store

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(open_sandbox=open_sandbox, repository=Repository(open_store(f"file:{tmp_path / 'store'}")))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    (home / "memory").mkdir(parents=True)
    (home / "MEMORY.md").write_text("one\n")
    return home


def packs(tmp_path: Path) -> list[Path]:
    return sorted(
        (tmp_path / "store" / "memories" / "m" / "packs").glob("*.tar.gz"), key=lambda p: p.stat().st_mtime_ns
    )


async def exported(engine: Engine, home: Path, text: str, **more: bool):  # type: ignore[no-untyped-def]
    (home / "MEMORY.md").write_text(text)
    return await export(engine, open_sandbox(f"local:{home}"), ExportRequest(memory="m", **more))  # type: ignore[arg-type]


async def test_an_export_over_a_lost_pack_is_full_again_and_becomes_the_head(
    engine: Engine, home: Path, tmp_path: Path
) -> None:
    await exported(engine, home, "one\n")
    packs(tmp_path)[0].unlink()
    receipt = await exported(engine, home, "two\n")
    assert (receipt.outcome, receipt.kind) == (ExportOutcome.COMMITTED, "full")
    target = tmp_path / "target"
    target.mkdir()
    restored = await restore(engine, open_sandbox(f"local:{target}"), RestoreRequest(memory="m"))
    assert (restored.outcome, restored.snapshot) == (RestoreOutcome.COMPLETE, receipt.snapshot)
    assert (target / "MEMORY.md").read_text() == "two\n"


async def test_an_unchanged_memory_is_stored_again_when_its_snapshot_is_gone(
    engine: Engine, home: Path, tmp_path: Path
) -> None:
    await exported(engine, home, "one\n")
    packs(tmp_path)[0].unlink()
    receipt = await export(engine, open_sandbox(f"local:{home}"), ExportRequest(memory="m"))
    assert receipt.outcome is ExportOutcome.COMMITTED
    assert receipt.kind == "full"


async def test_work_that_began_from_a_fallback_takes_the_place_of_the_damaged_head(
    engine: Engine, home: Path, tmp_path: Path
) -> None:
    first = await exported(engine, home, "one\n")
    await exported(engine, home, "two\n")
    newest = packs(tmp_path)[-1]
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    other = tmp_path / "other"
    other.mkdir()
    restored = await restore(engine, open_sandbox(f"local:{other}"), RestoreRequest(memory="m"))
    assert restored.snapshot == first.snapshot
    assert "instead of" in restored.warnings[0]
    receipt = await exported(engine, other, "one, and more\n")
    assert receipt.outcome is ExportOutcome.COMMITTED
    again = await restore(engine, open_sandbox(f"local:{other}"), RestoreRequest(memory="m"))
    assert (again.snapshot, again.warnings) == (receipt.snapshot, [])


@pytest.mark.parametrize(
    "planted", ["99991231T235959999Z-ffffffff", "20991231T000000000Z-deadbeef", "20261399T000000000Z-00000000"]
)
async def test_no_name_in_a_listing_stops_exports_or_sets_their_time(
    engine: Engine, home: Path, tmp_path: Path, planted: str
) -> None:
    await exported(engine, home, "one\n")
    (tmp_path / "store" / MemoryKeys.of("m").snapshot(planted)).write_text("junk")
    receipt = await exported(engine, home, "two\n")
    assert receipt.outcome is ExportOutcome.COMMITTED
    assert parse_snapshot_time(str(receipt.snapshot)) <= datetime.now(UTC)
    assert any(planted in warning for warning in receipt.warnings) == is_snapshot_id(planted)


async def test_ids_follow_a_head_from_a_clock_that_was_ahead_and_nothing_else_from_it(
    engine: Engine, home: Path
) -> None:
    first = await exported(engine, home, "one\n")
    beside = replace(
        await engine.repository.manifest("m", str(first.snapshot)), snapshot="20990101T000000000Z-00000000"
    )
    await engine.repository.commit(beside)
    second = await exported(engine, home, "two\n")
    assert (str(second.snapshot) < beside.snapshot, second.warnings) == (True, [])
    await engine.repository.move_head(await engine.repository.head("m"), beside)
    third = await exported(engine, home, "three\n", force=True)
    assert str(third.snapshot) > beside.snapshot
