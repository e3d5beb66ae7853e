"""Records over HTTP and through the client: paged, and the same as on the command line."""

from __future__ import annotations

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
