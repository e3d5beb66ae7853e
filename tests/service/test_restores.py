"""Restores over HTTP: what is left, saved first or set aside is told in receipts, events, metrics and the log alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.client import Client
from sidecar.engine import ExportRequest, RestoreRequest
from sidecar.service.core import encode_request
from tests.parts.homes import empty_home, write
from tests.parts.memories import grow, grow_large, plain_home
from tests.parts.services import TOKEN, Service, path, serving, until

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving(tmp_path / "store", tmp_path / "service.log") as started:
        yield started


@pytest.fixture
def first(service: Service, tmp_path: Path) -> Path:
    home = plain_home(empty_home(tmp_path / "first"))
    assert service.export("me", f"local:{home}").json()["outcome"] == "committed"
    return home


def _restored(service: Service, home: Path, **body: Any) -> dict[str, Any]:
    answer = service.restore("me", f"local:{home}", **body)
    assert answer.status_code == 200, answer.text
    receipt: dict[str, Any] = answer.json()
    return receipt


def test_it_is_told_everywhere(service: Service, first: Path, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"it came with the sandbox")
    aside = _restored(service, home)["set_aside"]
    assert (aside["files"], Path(aside["path"]).is_dir()) == (1, True)
    write(home / "memory/new.md", b"not exported")
    kept = _restored(service, home)
    assert (kept["outcome"], kept["kept"], kept["saved_first"]) == ("complete", True, None)
    grow(first)
    service.export("me", f"local:{first}")
    saved = _restored(service, home)["saved_first"]
    log = {row["snapshot"]: row for row in service.http.get(path("me", "snapshots")).json()["snapshots"]}
    assert (log[saved]["standing"], log[saved]["origin"]) == ("diverged", "saved-first")
    write(home / "memory/new.md", b"not exported")
    gone = _restored(service, home, discard=True)
    assert (gone["kept"], gone["saved_first"]) == (False, None) and "memory/new.md" in gone["warnings"][0]
    said = [line for line in service.lines() if line.get("event") == "restore complete"]
    assert [{name for name in ("kept", "saved_first", "set_aside", "read_only") if name in line} for line in said] == [
        {"set_aside"},
        {"kept"},
        {"saved_first"},
        set(),
    ]
    assert said[2]["saved_first"] == saved
    figures = service.http.get("/metrics").text
    for how in ("kept", "saved_first", "set_aside"):
        assert f'memory_sidecar_restores_spared_total{{how="{how}"}} 1.0' in figures


def test_an_event_tells_it_too(service: Service, first: Path) -> None:
    heard: list[dict[str, Any]] = []
    with service.http.stream("GET", "/v1/events", headers={"Last-Event-ID": "0"}) as events:
        _restored(service, first)
        for line in events.iter_lines():
            if line.startswith("data:"):
                heard.append(json.loads(line[5:]))
            if heard and heard[-1]["type"] == "restore.complete":
                break
    assert heard[-1]["details"]["kept"] is True


def test_a_reader_over_http_and_with_the_client(service: Service, first: Path, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    with Client(service.url, token=TOKEN) as client:
        assert client.restore("me", sandbox=f"local:{home}", read_only=True).read_only
        write(home / "memory/new.md", b"by a reader")
        kept = client.restore("me", sandbox=f"local:{home}", read_only=True)
        assert kept.kept and kept.set_aside is None
        receipt = client.export("me", sandbox=f"local:{home}")
        assert receipt.reason is not None and (receipt.outcome, receipt.reason.code) == ("diverged", "read-only")
        gone = client.restore("me", sandbox=f"local:{home}", discard=True)
        assert not gone.kept and not (home / "memory/new.md").exists()


def test_what_a_reader_has_is_kept_beside_the_head_by_attachments_too(
    service: Service, first: Path, tmp_path: Path
) -> None:
    home = empty_home(tmp_path / "home")
    _restored(service, home, read_only=True)
    head = service.http.get(path("me")).json()["head"]
    body = {"sandbox": f"local:{home}", "checkpoint_every": 1}
    assert service.http.put(path("me", "attachment"), json=body).status_code == 200
    write(home / "memory/new.md", b"by a reader")
    until(lambda: len(service.http.get(path("me", "snapshots")).json()["snapshots"]) == 2)
    assert service.http.get(path("me")).json()["head"] == head


def test_a_large_memory_is_not_sent_to_a_sandbox_that_has_it(service: Service, tmp_path: Path) -> None:
    first, home = plain_home(empty_home(tmp_path / "first")), empty_home(tmp_path / "home")
    grow_large(first, size=6 << 20)
    service.export("me", f"local:{first}")
    assert _restored(service, home)["trips"] == {"upload": 1, "command": 1}
    write(home / "memory/new.md", b"not exported")
    kept = _restored(service, home)
    assert (kept["kept"], kept["trips"]) == (True, {"command": 1}) and kept["transferred_bytes"] < 1 << 20
    grow(first)
    service.export("me", f"local:{first}")
    came = _restored(service, home)
    assert came["saved_first"] and came["trips"] == {"command": 3, "upload": 1}
    service.export("me", f"local:{first}")
    grow(first)
    service.export("me", f"local:{first}")
    assert _restored(service, home)["trips"] == {"command": 2, "upload": 1}, (
        "it was asked first, and had nothing to keep"
    )


def test_what_cannot_be_saved_is_told_as_incomplete(tmp_path: Path) -> None:
    limits = "[limits]\nbytes = 100000\n"
    first, home = plain_home(empty_home(tmp_path / "first")), empty_home(tmp_path / "home")
    with serving(tmp_path / "store", tmp_path / "service.log", more=limits) as service:
        service.export("me", f"local:{first}")
        _restored(service, home)
        grow_large(home, size=200_000)
        grow(first)
        service.export("me", f"local:{first}")
        receipt = _restored(service, home)
        assert (receipt["outcome"], receipt["reason"]["code"]) == ("incomplete", "unsaved")
        assert "limit-bytes" in receipt["reason"]["message"] and (home / "memory/large-1.md").exists()
        assert _restored(service, home, discard=True)["outcome"] == "complete"


def test_a_call_that_an_earlier_version_remembers_is_the_same_call() -> None:
    """Its digest has no room for options that came later."""
    asked = {"memory": "me", "snapshot": "latest", "mode": "replace", "projects": None, "force": False}
    assert encode_request(RestoreRequest(memory="me")) == asked
    assert "beside" not in encode_request(ExportRequest(memory="me"))
    assert encode_request(RestoreRequest(memory="me", discard=True)) == {**asked, "discard": True}
