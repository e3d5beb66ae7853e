"""A service on an encrypted store: what it keeps there for itself tells nothing either, and it says when a key is missing."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from pathlib import Path

import pytest

from adapters.sandboxes.local import open_local
from sidecar.engine import ExportRequest, export
from tests.parts import forked_sidecar
from tests.parts.homes import claude_mem_home, empty_home, observe, run_cli
from tests.parts.keys import BOTH, engine_with, environment
from tests.parts.services import path, serving, until

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "acme/secret-agent"
CONVERSATION = "talk-with-mrs-miller"


def test_a_copied_store_tells_nothing(tmp_path: Path) -> None:
    """Sizes and times aside: no path, no text, no page of a database, no id, no host, no sandbox, no key of a caller."""
    home = claude_mem_home(empty_home(tmp_path / "home-of-the-agent"), rows=5)
    observe(home, 2, "words-nobody-may-read")
    store, sandbox = tmp_path / "store", f"local:{home}"
    seen: list[bytes] = []

    def copied() -> None:
        for place in store.rglob("*"):
            seen.append(str(place.relative_to(store)).encode())
            if place.is_file():
                seen.append(place.read_bytes())

    hook = '[[webhooks]]\nurl = "http://127.0.0.1:9/hook-of-acme"\nevents = ["*"]\n'
    with serving(store, tmp_path / "log", environment(BOTH), more=hook, grace=5) as service:
        done = service.export(MEMORY, sandbox, key="call-of-mrs-miller", conversation=CONVERSATION, label="a-label")
        assert done.json()["outcome"] == "committed", done.text
        assert service.export(
            MEMORY, sandbox, key="call-of-mrs-miller", conversation=CONVERSATION, label="a-label"
        ).json()
        body = {"sandbox": sandbox, "checkpoint_every": 600}
        assert service.http.put(path(MEMORY, "attachment"), json=body).status_code == 200
        snapshot = done.json()["snapshot"]
        assert service.http.put(path(MEMORY, "snapshots", snapshot, "pin")).status_code == 200
        until(lambda: (store / "outbox").exists())
        copied()
        assert service.http.get("/readyz").status_code == 200
        service.kill()
    copied()
    top = {place.name for place in store.iterdir() if not place.name.startswith(".")}
    assert {"memories", "conversations", "instances", "outbox", "sealing", "signed"} <= top
    everything = b"\n".join(seen)
    words = [
        *(MEMORY, "acme", "secret-agent", "conductor", CONVERSATION, "miller", "a-label", "words-nobody-may-read"),
        *("home-of-the-agent", "claude-mem", "SQLite format 3", "observations", "local:", "export", "hook-of-acme"),
    ]
    for word in words:
        assert word.encode() not in everything, word
    # A service is called after its host; a short name alone may come about by chance.
    assert not re.search(re.escape(socket.gethostname()[:40].encode()) + rb"-[0-9a-f]{12}", everything)
    log = (tmp_path / "log").read_text()
    assert not any(secret in log for secret in ("SECRET-KEY", "PRIVATE KEY", *BOTH.identities))


def test_what_is_read_is_told_to_the_caller_alone(tmp_path: Path) -> None:
    """Nothing of a record is in a log, a metric, or a file that stays, whichever way it is read."""
    home = claude_mem_home(empty_home(tmp_path / "home"), rows=5)
    observe(home, 2, "words-nobody-may-read")
    (tmp_path / "tmp").mkdir()
    env = {**environment(BOTH), "TMPDIR": str(tmp_path / "tmp"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with serving(tmp_path / "store", tmp_path / "log", env) as service:
        assert service.export(MEMORY, f"local:{home}").json()["outcome"] == "committed"
        observe(home, 3, "words-nobody-may-read")
        assert service.export(MEMORY, f"local:{home}").json()["outcome"] == "committed"
        changes, database = "diff?from=latest~1&to=latest", "claude-mem%2Fclaude-mem.db"
        answers = {
            one: service.http.get(path(MEMORY, *one.split()))
            for one in (
                *("snapshots", changes, "blame", "snapshots latest records", "snapshots latest brief"),
                *(f"history?path={database}", f"snapshots latest files {database}"),
            )
        }
        assert {name: one.status_code for name, one in answers.items()} == dict.fromkeys(answers, 200)
        telling = (changes, "blame", "snapshots latest records", "snapshots latest brief")
        assert all("words-nobody-may-read" in answers[name].text for name in telling)
        record = answers["snapshots latest records"].json()["records"][0]
        asked = service.http.get(path(MEMORY, "history"), params={"record": record["id"]})
        assert asked.json()["versions"], asked.text
        # Search is off for an encrypted store unless the config says how its index may lie on this disk.
        assert service.http.get("/v1/search", params={"q": "nobody"}).status_code == 409
        told = service.http.get("/metrics").text
        service.close()
    stays = [place for top in ("tmp", "cache") for place in (tmp_path / top).rglob("*") if place.is_file()]
    for text in (told, (tmp_path / "log").read_text(), *(place.read_bytes().decode("latin-1") for place in stays)):
        assert "words-nobody-may-read" not in text and record["title"] not in text


def test_a_service_without_the_key_does_not_start(tmp_path: Path) -> None:
    home, store = claude_mem_home(empty_home(tmp_path / "home"), rows=3), tmp_path / "store"
    asyncio.run(export(engine_with(store, BOTH), open_local(str(home)), ExportRequest(memory=MEMORY)))
    ended = forked_sidecar.run(["serve", f"--store=file:{store}", "--bind=127.0.0.1:0"])
    assert ended.returncode == 1
    assert b"This store is encrypted" in ended.stderr
    assert b"Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_service_whose_store_was_encrypted_meanwhile_is_not_ready(tmp_path: Path) -> None:
    home, store = claude_mem_home(empty_home(tmp_path / "home"), rows=3), tmp_path / "store"
    with serving(store, tmp_path / "log") as plain:
        assert plain.http.get("/readyz").status_code == 200
        ran = run_cli("export", MEMORY, f"--sandbox=local:{home}", store=store, env=environment(BOTH))
        assert ran.code == 0, ran
        until(lambda: plain.http.get("/readyz").status_code == 503, seconds=80)
        assert "encrypted" in plain.http.get("/readyz").json()["checks"]["store"]
        refused = plain.restore(MEMORY, f"local:{empty_home(tmp_path / 'other')}")
        assert (refused.status_code, refused.json()["code"]) == (503, "key-needed")
        assert refused.json()["retryable"] is False
        plain.stop(signal.SIGTERM)
