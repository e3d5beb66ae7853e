"""What a real claude-mem worker wrote is found by the words that were said to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parts.claude_mem import Worker
from tests.parts.commands import done
from tests.parts.homes import told
from tests.parts.postgres import Database

SESSION = {"contentSessionId": "talk-1", "project": "app", "prompt": "why is the lighthouse dark"}


@pytest.mark.slow
def test_what_a_real_worker_saved_is_found(tmp_path: Path, database: Database) -> None:
    home, store = tmp_path / "home", tmp_path / "store"
    with Worker(home) as worker:
        worker.save("The otter repaired the lantern with copper wire", "Lantern repaired", project="app")
        worker._call("POST", "/api/sessions/init", dict(SESSION))
        receipt = done("export", "conductor", f"--sandbox=local:{home}", store=store)
    assert told(receipt) == []
    (hit,) = done("search", "copper lantern", store=store)["hits"]
    assert (hit["kind"], hit["title"], hit["project"]) == ("observation", "Lantern repaired", "app")
    assert "**copper**" in hit["snippet"] and hit["at"] and hit["session"]
    hits = done("search", "lighthouse", store=store)["hits"]
    assert {(hit["kind"], hit["project"]) for hit in hits} == {("session", "app"), ("prompt", "app")}
    assert {hit["session"] for hit in hits if hit["kind"] == "prompt"} == {"talk-1"}
