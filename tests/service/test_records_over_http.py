"""Records over HTTP and through the client: paged, and the same as on the command line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sidecar.client import Client, SidecarProblem
from tests.parts.commands import done
from tests.parts.conversations import SCRIPTS
from tests.parts.services import TOKEN, path, serving


def test_records_are_read_over_http_page_by_page(tmp_path: Path) -> None:
    home, store = tmp_path / "home", tmp_path / "store"
    home.mkdir()
    with serving(store, tmp_path / "log") as service, Client(service.url, token=TOKEN) as client:
        for number in range(3):
            SCRIPTS["claude-mem"](home, number)
            SCRIPTS["three-tier"](home, number)
            client.export("acme/m", sandbox=f"local:{home}", projects=[str(home)], conversation=f"c{number}")
        listed, after = [], ""
        while True:
            page = client.records("acme/m", limit=4, after=after)
            listed += page.records
            assert len(page.records) <= 4
            if page.next is None:
                break
            after = page.next
        told = done("records", "acme/m", store=store)["records"]
        assert [row.id for row in listed] == [row["id"] for row in told] and len(listed) > 12
        only = client.records("acme/m", "conversation:c0", kinds=["prompt"]).records
        assert [row.title for row in only] == ["asked 0"]

        compared = client.diff("acme/m", limit=2)
        rest = client.diff("acme/m", after=compared.next or "")
        told = done("diff", "acme/m", store=store)
        assert [row.id for row in (*compared.records, *rest.records)] == [row["id"] for row in told["records"]]
        assert compared.counts["observation"].added == 3 and rest.next is None
        assert client.diff("acme/m", files=True).records == [] and client.diff("acme/m", files=True).changed

        assert client.file("acme/m", "project/MEMORY.md") == (home / "MEMORY.md").read_bytes()
        plain = service.http.get(f"{path('acme/m')}/snapshots/latest/files/project/MEMORY.md")
        assert plain.content == (home / "MEMORY.md").read_bytes()
        assert plain.headers["content-disposition"] == "attachment"
        versions = client.history("acme/m", path="project/MEMORY.md")
        assert [one.origin.conversation for one in versions] == ["c0", "c1", "c2"]
        day = next(row for row in listed if row.title == "Memory › Day 0")
        assert [one.change for one in client.history("acme/m", record=day.id[:10])] == ["added", "changed"]
        blamed = client.blame("acme/m", path="project/MEMORY.md").records
        assert {row.title: row.origin.conversation for row in blamed}["Memory › Day 0"] == "c2"
        logged = client.snapshots("acme/m")[0].changes
        assert logged is not None and logged["observation"].added == 3

        for call in (
            lambda: client.file("acme/m", "nothing"),
            lambda: client.history("acme/m", record="nothing"),
            lambda: client.blame("acme/m", path="nothing"),
            lambda: client.records("other"),
        ):
            with pytest.raises(SidecarProblem) as problem:
                call()
            assert problem.value.code in ("record-not-found", "memory-not-found")
        assert service.http.get(f"{path('acme/m')}/history").status_code == 400


def test_a_brief_is_read_over_http_and_comes_with_a_restore(tmp_path: Path) -> None:
    home, box, store = tmp_path / "home", tmp_path / "box", tmp_path / "store"
    home.mkdir()
    box.mkdir()
    with serving(store, tmp_path / "log") as service, Client(service.url, token=TOKEN) as client:
        SCRIPTS["claude-mem"](home, 0)
        SCRIPTS["three-tier"](home, 0)
        client.export("acme/m", sandbox=f"local:{home}", projects=[str(home)], conversation="c0")
        found = client.brief("acme/m", tokens=900)
        assert found.tokens <= 900 and "about me" in found.text and found.items[0].conversation == "c0"
        assert found.text == done("brief", "acme/m", "--tokens", "900", store=store)["text"]
        assert client.brief("acme/m", "conversation:c0", tokens=900) == found

        receipt = client.restore("acme/m", sandbox=f"local:{box}", brief=900, brief_path="BRIEF.md", attach=False)
        assert receipt.brief is not None and receipt.brief.text == found.text == (box / "BRIEF.md").read_text()
        plain = service.http.post(
            f"{path('acme/m')}/restores",
            json={"sandbox": f"local:{box}", "brief": {}, "attach": False},
            headers={"Idempotency-Key": "k"},
        ).json()
        assert plain["kept"] and plain["brief"]["budget"] == 2000 and plain["brief"]["path"] == ""
        assert not (box / "BRIEF.md").exists()  # removed by the next restore
        without = client.restore("acme/m", sandbox=f"local:{box}", attach=False)
        assert without.brief is None
        # What a memory says is in its packs alone: not in what is remembered of calls.
        assert not any(b"about me" in file.read_bytes() for file in store.rglob("*.json"))
        for tokens in (1, 100_000):
            assert service.http.get(f"{path('acme/m')}/snapshots/latest/brief?tokens={tokens}").status_code == 422
        for wrong in ("../x", "MEMORY.md"):
            body = {"sandbox": f"local:{box}", "brief": {"path": wrong}}
            assert service.http.post(f"{path('acme/m')}/restores", json=body).json()["code"] == "unsafe-path"
        client.delete("acme/m")
        cache = Path(os.environ["XDG_CACHE_HOME"]) / "memory-sidecar/.briefs"
        assert not cache.exists() or not any(b"about me" in one.read_bytes() for one in cache.iterdir())
