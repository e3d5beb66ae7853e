"""A real claude-mem worker keeps what is private when it is saved through its interface; an export does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.sandboxes.local import LocalSandbox
from sidecar.engine import ExportRequest, RestoreRequest, export, restore
from tests.parts.claude_mem import Worker
from tests.parts.homes import engine_at
from tests.parts.secret_trees import everything_in

pytestmark = pytest.mark.usefixtures("forked_programs")

SECRET = "zqjxkvw"


@pytest.mark.slow
async def test_what_a_worker_was_told_in_private_is_not_stored(tmp_path: Path) -> None:
    engine, request = engine_at(tmp_path / "store"), ExportRequest(memory="m", projects=())
    with Worker(tmp_path / "home") as worker:
        for number in range(30):
            worker.save(f"lesson {number}: keep calm", f"row {number}")
        worker.save(f"lesson 30: <private>the {SECRET} plan</private> and carry on", "row 30")
        assert "row 30" in worker.search(SECRET)
        first = await export(engine, LocalSandbox(worker.home), request)
        assert first.outcome == "committed" and first.found["removed"] >= 1 and SECRET not in str(first)
        worker.save(f"lesson 31 <private>{SECRET}</private>", "row 31")
        second = await export(engine, LocalSandbox(worker.home), request)
        assert second.outcome == "committed" and second.kind == "delta"
        assert second.packed_bytes < first.packed_bytes
        worker.shutdown()
    assert not any(SECRET.encode() in data.lower() for _, data in everything_in(tmp_path / "store"))
    (tmp_path / "other").mkdir()
    back = await restore(engine, LocalSandbox(tmp_path / "other"), RestoreRequest(memory="m", projects=()))
    assert back.outcome == "complete" and back.scrubbed.private == second.scrubbed.private
    with Worker(tmp_path / "other") as worker:
        assert "row 30" in worker.search("carry") and "row 3" not in worker.search(SECRET)
        worker.shutdown()
