"""Ten conversations through a real claude-mem worker: each is told apart by what was said to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parts.claude_mem import Worker
from tests.parts.commands import done


@pytest.mark.slow
def test_what_a_real_worker_saved_is_told_by_conversation(tmp_path: Path) -> None:
    home, store = tmp_path / "home", tmp_path / "store"
    with Worker(home) as worker:
        for number in range(10):
            for one in range(2):
                worker.save(f"The otter repaired lantern {number}.{one}", f"Lantern {number}.{one}", project="app")
            done("export", "m", f"--sandbox=local:{home}", f"--conversation=c{number}", store=store)
    for number in range(1, 10):
        found = done("diff", "m", f"conversation:c{number - 1}", f"conversation:c{number}", store=store)
        seen = {(row["change"], row["title"]) for row in found["records"] if row["kind"] == "observation"}
        assert seen == {("added", f"Lantern {number}.{one}") for one in range(2)}
        assert {row["kind"] for row in found["records"]} <= {"observation", "session"}
    logged = [row["changes"]["observation"] for row in done("log", "m", store=store)["snapshots"]]
    assert logged == [{"added": 2, "changed": 0, "removed": 0}] * 10
    blamed = done("blame", "m", "--kind=observation", store=store)["records"]
    assert {row["title"]: row["origin"]["conversation"] for row in blamed} == {
        f"Lantern {number}.{one}": f"c{number}" for number in range(10) for one in range(2)
    }
