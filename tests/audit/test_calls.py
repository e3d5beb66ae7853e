"""Which calls the audit tells of, and what it says: those over HTTP, those of commands, and what a service does by itself."""

from __future__ import annotations

import getpass
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sidecar.audit.lines import ADMIN, Caller
from sidecar.audit.reader import MAYBE
from sidecar.service.api.audit import AuditGate
from sidecar.service.calls import get_current_call
from tests.parts.forked_sidecar import Sidecar
from tests.parts.homes import empty_home, run_cli, write
from tests.parts.keys import BOTH, environment
from tests.parts.memories import grow, plain_home
from tests.parts.services import TOKEN, Service, path, serving, until

pytestmark = pytest.mark.usefixtures("forked_programs")

KEPT = "[audit]\nstore = true\n"
Row = dict[str, Any]


def audit(store: Path, *more: str, env: dict[str, str] | None = None) -> list[Row]:
    ran = run_cli("audit", "--verify", *more, store=store, env=env)
    assert ran.code == 0 and ran.document["problems"] == [], ran.document["problems"]
    calls: list[Row] = ran.document["calls"]
    return calls


def told(rows: list[Row]) -> list[tuple[str, str, str]]:
    """Each call by its method and the end of its route."""
    methods = [row["what"].partition(" ")[0] for row in rows]
    ends = [row["what"].rpartition("/")[2] for row in rows]
    return [
        (f"{method} {end}", row["memory"], row["outcome"]) for method, end, row in zip(methods, ends, rows, strict=True)
    ]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return plain_home(empty_home(tmp_path / "home"))


# Over HTTP


def test_every_call_that_reads_or_changes_a_memory_is_told_once(tmp_path: Path, home: Path) -> None:
    store, sandbox = tmp_path / "store", f"local:{home}"
    with serving(store, tmp_path / "log", more=KEPT) as service:
        first = service.export("acme/agent", sandbox).json()["snapshot"]
        grow(home)
        second = service.export("acme/agent", sandbox, key="k").json()["snapshot"]
        assert service.export("acme/agent", sandbox, key="k").json()["snapshot"] == second
        service.restore("acme/agent", sandbox)
        asked = {"X-Request-Id": "mine-17"}
        answer = service.http.put(path("acme/agent", "head"), json={"snapshot": first}, headers=asked)
        assert answer.headers["X-Request-Id"] == "mine-17"
        assert service.http.get("/v1/memories").headers["X-Request-Id"] not in ("", "mine-17")
        service.http.get(path("acme/agent"))
        service.http.get(path("acme/agent", "snapshots"))
        service.http.get(path("acme/agent", "snapshots", "latest"))
        service.http.get(path("acme/agent", "snapshots", "latest", "archive"))
        service.http.get(path("acme/agent", "diff"), params={"from": first, "to": second})
        service.http.put(path("acme/agent", "snapshots", second, "pin"))
        service.http.post(path("acme/agent", "forget"), json={"dry_run": True})
        service.http.post(path("acme/agent", "forks"), json={"memory": "copy"})
        service.http.delete(path("copy"))
        service.http.get(path("copy"))
        service.http.post(path("acme/agent", "exports"), json={"sandbox": 7})
        service.http.put(path("acme/agent", "attachment"), json={"sandbox": sandbox})
        service.http.get("/v1/attachments")
        service.http.delete(path("acme/agent", "attachment"))
        service.http.get("/healthz")
        service.http.get("/metrics")
        service.http.get("/v1/nothing-of-that-name")
        lines = [line for line in service.lines() if line["event"] == "audit"]
    rows = audit(store)
    assert told(rows) == [
        ("POST exports", "acme/agent", "committed"),
        ("POST exports", "acme/agent", "committed"),
        ("POST exports", "acme/agent", "repeated"),
        ("POST restores", "acme/agent", "complete"),
        ("PUT head", "acme/agent", "ok"),
        ("GET memories", "", "ok"),
        ("GET {memory}", "acme/agent", "ok"),
        ("GET snapshots", "acme/agent", "ok"),
        ("GET {snapshot}", "acme/agent", "ok"),
        ("GET archive", "acme/agent", "ok"),
        ("GET diff", "acme/agent", "ok"),
        ("PUT pin", "acme/agent", "ok"),
        ("POST forget", "acme/agent", "ok"),
        ("POST forks", "acme/agent", "ok"),
        ("DELETE {memory}", "copy", "ok"),
        ("GET {memory}", "copy", "memory-not-found"),
        ("POST exports", "acme/agent", "bad-request"),
        ("PUT attachment", "acme/agent", "ok"),
        ("GET attachments", "", "ok"),
        ("DELETE attachment", "acme/agent", "ok"),
    ]
    assert {(row["who"], row["by"], row["source"]) for row in rows} == {("admin", "admin", "127.0.0.1")}
    assert [rows[place]["snapshot"] for place in (0, 1, 2, 4, 8, 9)] == [first, second, second, first, first, first]
    assert (rows[4]["request"], rows[4]["status"], rows[13]["also"]) == ("mine-17", 200, "copy")
    assert [(line["what"], line["outcome"]) for line in lines] == [(row["what"], row["outcome"]) for row in rows]
    kept = b"".join(file.read_bytes() for file in (store / "audit").rglob("*.json*"))
    assert TOKEN.encode() not in kept and b"later" not in kept and b"remembered" not in kept


def test_a_call_that_a_kill_cut_short_may_have_happened(tmp_path: Path, home: Path) -> None:
    store = tmp_path / "store"
    with serving(store, tmp_path / "log", more=KEPT) as service:
        done = service.export("me", f"local:{home}").json()["snapshot"]
        write(home / "memory/large.md", os.urandom(3_000_000))
        service.http.post(path("me", "exports"), params={"wait": "false"}, json={"sandbox": f"local:{home}"})
        until(lambda: any(row["outcome"] == MAYBE for row in run_cli("audit", store=store).document["calls"]))
        service.kill()
        rows = audit(store)
        assert [(row["outcome"], bool(row["snapshot"])) for row in rows] == [("committed", True), (MAYBE, True)]
        assert rows[0]["snapshot"] == done != rows[1]["snapshot"]
        service.start()
    ids = {row["snapshot"] for row in run_cli("log", "me", store=store).document["snapshots"]}
    assert ids <= {row["snapshot"] for row in audit(store)}, "whatever is there is told of"


def test_what_the_service_does_by_itself_is_told_in_its_own_name(tmp_path: Path, home: Path) -> None:
    store = tmp_path / "store"
    more = f"{KEPT}[retention]\nkeep_last = 1\nevery = '1s'\n"
    with serving(store, tmp_path / "log", more=more, lease=2, drill_every=1) as service:
        body = {"sandbox": f"local:{home}", "checkpoint_every": 1}
        assert service.http.put(path("me", "attachment"), json=body).status_code == 200

        def own() -> set[tuple[str, str]]:
            rows = run_cli("audit", store=store).document["calls"]
            return {
                (row["what"], row["outcome"].split()[0]) for row in rows if row["who"] == row["source"] == "service"
            }

        until(lambda: {("checkpoint", "committed"), ("drill", "passed")} <= own())
        grow(home)
        until(lambda: ("retention", "forgot") in own())
        service.kill()
        service.start()
        until(lambda: ("take-over", "generation") in own())
        assert service.stop() == 0
        assert "shutdown" in {what for what, _ in own()}
    assert {row["memory"] for row in audit(store) if row["what"] == "checkpoint"} == {"me"}


def test_without_a_place_for_it_nothing_is_changed(tmp_path: Path, home: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    with serving(tmp_path / "store", tmp_path / "log", more=f'[audit]\nfile = "{place}/audit.jsonl"\n') as service:
        assert service.export("me", f"local:{home}").json()["outcome"] == "committed"
        grow(home)
        place.rename(tmp_path / "moved")
        refused = service.export("me", f"local:{home}")
        assert (refused.status_code, refused.json()["code"]) == (503, "audit-unwritable")
        assert service.http.post(path("me", "forks"), json={"memory": "copy"}).status_code == 503
        assert service.http.get(path("copy")).status_code == 404
        (tmp_path / "moved").rename(place)
        assert service.export("me", f"local:{home}").json()["outcome"] == "committed"
    ran = run_cli("audit", "--verify", "--file", place / "audit.jsonl", store=tmp_path / "store")
    assert ran.code == 0 and [row["outcome"] for row in ran.document["calls"]].count("committed") == 2


def test_a_check_of_nothing_is_no_good_news(tmp_path: Path, home: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'[audit]\nfile = "{tmp_path}/audit.jsonl"\n')
    store = tmp_path / "store"
    ran = run_cli("audit", "--verify", store=store)
    assert (ran.code, ran.error) == (1, "audit-altered") and "Nothing was checked" in ran.document["error"]["message"]
    run_cli("export", "me", f"--sandbox=local:{home}", f"--config={config}", store=store)
    ran = run_cli("audit", "--verify", f"--config={config}", store=store)
    assert ran.code == 0 and [row["what"] for row in ran.document["calls"]] == ["export"]
    (tmp_path / "audit.jsonl").write_bytes(b"")
    assert run_cli("audit", "--verify", f"--config={config}", store=store).code == 1


def test_by_default_calls_are_logged_and_nothing_is_kept(tmp_path: Path, home: Path) -> None:
    with serving(tmp_path / "store", tmp_path / "log") as service:
        service.export("me", f"local:{home}")
        assert [line["what"] for line in service.lines() if line["event"] == "audit"] == [
            "POST /v1/memories/{memory}/exports"
        ]
    run_cli("list", store=tmp_path / "store")
    assert not (tmp_path / "store/audit").exists()


@dataclass(frozen=True)
class Named:
    name: str
    id: str


@pytest.mark.parametrize(
    ("state", "who"),
    [
        ({}, ADMIN),
        ({"caller": Named("ci", "7f")}, Caller("ci", "token")),
        ({"caller": Named("admin", "")}, ADMIN),
        (None, ADMIN),
    ],
)
async def test_a_caller_is_called_what_the_door_calls_it(state: object, who: Caller) -> None:
    seen: list[Caller] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        current = get_current_call()
        assert current is not None
        seen.append(current.caller)

    await AuditGate(app)({"type": "http", "path": "/v1/memories", "headers": [], "state": state}, None, None)  # type: ignore[arg-type]
    assert seen == [who]


# By command


def test_commands_are_told_in_the_name_of_the_user(tmp_path: Path, home: Path) -> None:
    store, config, archive = tmp_path / "store", tmp_path / "config.toml", tmp_path / "home.tar.gz"
    config.write_text(KEPT)
    with_audit = ("--config", config)
    head = run_cli("export", "me", "--sandbox", f"local:{home}", *with_audit, store=store).document["snapshot"]
    for words in (
        ("list",),
        ("log", "me"),
        ("show", "me"),
        ("diff", "me", "latest", "latest"),
        ("records", "me"),
        ("blame", "me"),
        ("brief", "me"),
        ("download", "me", "-o", archive),
        ("import", "adopted", archive),
        ("fork", "me", "copy"),
        ("pin", "me", "latest"),
        ("restore", "me", "--sandbox", f"local:{empty_home(tmp_path / 'other')}"),
        ("verify",),
        ("rollback", "me", "20200101T000000000Z-00000000"),
        ("forget",),
        ("delete", "copy", "--yes"),
        ("doctor",),
        ("layouts",),
    ):
        run_cli(*words, *with_audit, store=store)
    rows = audit(store)
    assert [(row["what"], row["memory"], row["outcome"]) for row in rows] == [
        ("export", "me", "committed"),
        ("list", "", "ok"),
        ("log", "me", "ok"),
        ("show", "me", "ok"),
        ("diff", "me", "ok"),
        ("records", "me", "ok"),
        ("blame", "me", "ok"),
        ("brief", "me", "ok"),
        ("download", "me", "ok"),
        ("import", "adopted", "committed"),
        ("fork", "me", "ok"),
        ("pin", "me", "ok"),
        ("restore", "me", "complete"),
        ("verify", "", "ok"),
        ("rollback", "me", "snapshot-not-found"),
        ("forget", "", "ok"),
        ("delete", "copy", "ok"),
    ]
    user = getpass.getuser() if os.getuid() else "root"
    assert {(row["who"], row["by"], row["source"]) for row in rows} == {(user, "user", "cli")}
    assert [rows[place]["snapshot"] for place in (0, 3, 5, 6, 7, 8, 11, 12)] == [head] * 8 and rows[10][
        "also"
    ] == "copy"
    assert [row["what"] for row in audit(store, "--memory", "copy")] == ["fork", "delete"]
    assert audit(store, "--since", "2999-01-01") == [] and len(audit(store, "--since", "1h")) == len(rows)
    assert run_cli("audit", "--since", "yesterday", store=store).code == 2


def test_what_was_removed_or_altered_is_said_with_exit_code_1(tmp_path: Path, home: Path) -> None:
    store = tmp_path / "store"
    kept = {"MEMORY_SIDECAR_AUDIT_STORE": "true"}
    for _ in range(2):
        run_cli("export", "me", "--sandbox", f"local:{home}", store=store, env=kept)
    one = min((store / "audit/lines").rglob("*.jsonl"))
    whole = one.read_bytes()
    one.write_bytes(whole.replace(b'"who"', b'"hwo"', 1))
    ran = run_cli("audit", "--verify", store=store)
    assert (ran.code, ran.error) == (1, "audit-altered")
    assert any(row["where"].endswith(one.name) for row in ran.document["problems"])
    assert run_cli("audit", store=store).code == 0
    one.unlink()
    ran = run_cli("audit", "--verify", store=store)
    assert ran.code == 1 and "missing" in json.dumps(ran.document["problems"])


def test_a_command_that_is_killed_may_have_happened(tmp_path: Path, home: Path) -> None:
    store = tmp_path / "store"
    write(home / "memory/large.md", os.urandom(30_000_000))
    words = ["export", "me", f"--store=file:{store}", "--sandbox", f"local:{home}"]
    command = Sidecar(words, env={**os.environ, "MEMORY_SIDECAR_AUDIT_STORE": "true"})
    until(lambda: list((store / "audit/lines").rglob("*.jsonl")))
    command.send_signal(signal.SIGKILL)
    command.wait()
    (row,) = audit(store)
    assert row["outcome"] in (MAYBE, "committed")


def test_with_keys_it_is_written_and_read_with_keys(tmp_path: Path, home: Path) -> None:
    store, keys = tmp_path / "store", environment(BOTH)
    with serving(store, tmp_path / "log", keys, more=KEPT) as service:
        service.export("acme/secret", f"local:{home}")
        assert isinstance(service, Service)
    assert [row["memory"] for row in audit(store, env=keys)] == ["acme/secret"]
    assert run_cli("audit", store=store).error == "key-needed"
    assert all(b"secret" not in file.read_bytes() for file in (store / "audit").rglob("*.json*"))
