"""Names: checked once, and keys that can never lead out of the store."""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.cli import main
from sidecar.errors import BadMemoryId
from sidecar.ids import (
    MemoryKeys,
    build_memory_key,
    check_memory_id,
    check_new_memory_id,
    escape_id,
    is_snapshot_id,
    make_snapshot_id,
    parse_snapshot_time,
)
from tests.parts.former import former_ids
from tests.parts.homes import empty_home, run_cli, three_tier_home, write
from tests.parts.services import path, serving

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.mark.parametrize(
    "bad", ["", ".", "..", "../x", "a/../b", "/a", "a/", "a//b", " ", "a/ /b", "a\nb", "a\0b", "x" * 201, "\ud800"]
)
def test_ids_that_are_refused(bad: str) -> None:
    with pytest.raises(BadMemoryId):
        check_memory_id(bad)


@pytest.mark.parametrize(
    "good", ["conductor", "acme/agent-7", "🦊", "Ünï côde", "a" * 200, "..a", "CON", "a.b_c-d", "%2e%2e"]
)
def test_ids_that_are_accepted_make_safe_keys(good: str) -> None:
    key = build_memory_key(good)
    assert "/" not in key
    assert key not in (".", "..")
    assert len(key.encode()) < 128
    assert key == key.lower()


@given(st.text(min_size=1, max_size=200), st.text(min_size=1, max_size=200))
def test_different_ids_never_share_a_key(one: str, other: str) -> None:
    try:
        keys = build_memory_key(one), build_memory_key(other)
    except BadMemoryId:
        return
    assert (keys[0] == keys[1]) == (one == other)
    assert all(part not in ("", ".", "..") for part in MemoryKeys.of(one).head.split("/"))


def test_snapshot_ids_sort_by_time_even_when_the_clock_goes_back() -> None:
    now = datetime(2026, 11, 16, 10, 0, tzinfo=UTC)
    first = make_snapshot_id(now)
    second = make_snapshot_id(now - timedelta(hours=1), after=first)
    assert second > first
    assert parse_snapshot_time(first) == now


def test_nothing_comes_after_the_last_moment_there_is() -> None:
    now = datetime(2026, 11, 16, 10, 0, tzinfo=UTC)
    assert parse_snapshot_time(make_snapshot_id(now, after="99991231T235959999Z-ffffffff")) == now


@pytest.mark.parametrize("text", ["20261399T000000000Z-00000000", "20260230T000000000Z-00000000", "2026", ""])
def test_an_id_holds_a_time_that_there_is(text: str) -> None:
    assert not is_snapshot_id(text)


# Ids that look alike

ODD = {
    "agent\u200b": "agent",
    "ag\u200cent": "agent",
    "ag\u200dent": "agent",
    "\ufeffagent": "agent",
    "agent\u2060": "agent",
    "ag\u00adent": "agent",
    "acme/agent\u202etxt.7": "acme/agenttxt.7",
    "agent\u2066": "agent",
    "agent\ufe0f": "agent",
    "agent\u3164": "agent",
    "agent\ue000": "",
    "agent\U000f0000": "",
    "agent\u0378": "",
    "agent\uffff": "",
    "my\u00a0agent": "my agent",
    "my\u3000agent": "my agent",
    "agent ": "agent",
    " agent": "agent",
    "acme / agent": "acme/agent",
    "caf\u0065\u0301": "caf\u00e9",
    "\u1100\u1161": "\uac00",
    "\u212bngstr\u00f6m": "\u00c5ngstr\u00f6m",
}
"""Each with the one that looks the same, where there is one."""
PLAIN = [
    "conductor",
    "acme/agent-7",
    "my agent",
    "caf\u00e9",
    "\uac00",
    "🦊",
    "наблюдение",
    "記憶",
    "a.b_c-d",
    "a b/c d",
]


@pytest.mark.parametrize("odd", ODD, ids=ascii)
def test_a_new_memory_may_not_look_like_another(odd: str) -> None:
    with pytest.raises(BadMemoryId) as refused:
        check_new_memory_id(odd)
    assert refused.value.message.isprintable() and refused.value.hint.isprintable()
    if better := ODD[odd]:
        assert refused.value.hint == f"Write '{better}'."
        check_new_memory_id(better)
    assert escape_id(odd).isascii() and escape_id(odd) != odd
    assert escape_id(odd).encode().decode("unicode_escape") == odd


@pytest.mark.parametrize("plain", PLAIN)
def test_a_new_memory_may_have_any_other_name(plain: str) -> None:
    assert check_new_memory_id(plain) == escape_id(plain) == plain


@given(st.text(min_size=1, max_size=20))
def test_no_two_new_ids_are_the_same_to_a_reader(text: str) -> None:
    try:
        check_new_memory_id(text)
    except BadMemoryId as refused:
        assert refused.message.isprintable() and refused.hint.isprintable()
        return
    assert text.isprintable() and unicodedata.normalize("NFC", text) == text


@pytest.mark.parametrize("verb", ["export", "import", "restore", "fork"])
def test_no_command_begins_a_memory_that_looks_like_another(tmp_path: Path, verb: str) -> None:
    store, home = tmp_path / "store", three_tier_home(empty_home(tmp_path / "home"))
    assert run_cli("export", "agent", f"--sandbox=local:{home}", store=store).code == 0
    archive = tmp_path / "home.tar.gz"
    assert run_cli("download", "agent", "-o", archive, store=store).code == 0
    words: dict[str, list[str | Path]] = {
        "export": ["agent\u200b", f"--sandbox=local:{home}"],
        "import": ["agent\u200b", archive],
        "restore": ["agent\u200b", f"--sandbox=local:{home}"],
        "fork": ["agent", "agent\u200b"],
    }
    ran = run_cli(verb, *words[verb], store=store)
    assert (ran.code, ran.error) == (2, "bad-memory-id")
    assert "\\u200b" in ran.stderr and "Write 'agent'." in ran.stderr
    assert [row["memory"] for row in run_cli("list", store=store).document["memories"]] == ["agent"]


@pytest.mark.parametrize("odd", ["agent\u200b", "agent ", "caf\u0065\u0301", "agent\ue000"], ids=ascii)
def test_a_memory_from_before_the_rule_is_used_as_it_is(
    tmp_path: Path, odd: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store, home = tmp_path / "store", three_tier_home(empty_home(tmp_path / "home"))
    with former_ids():
        first = run_cli("export", odd, f"--sandbox=local:{home}", store=store)
        assert run_cli("export", "agent", f"--sandbox=local:{home}", "--force", store=store).code == 0
    assert first.code == 0 and first.document["memory"] == odd
    listed = run_cli("list", store=store)
    assert {row["memory"] for row in listed.document["memories"]} == {odd, "agent"}
    capsys.readouterr()
    assert main(["list", f"--store=file:{store}"]) == 0
    assert escape_id(odd) in capsys.readouterr().out

    assert [row["snapshot"] for row in run_cli("log", odd, store=store).document["snapshots"]] == [
        first.document["snapshot"]
    ]
    for words in (["show", odd], ["verify", odd], ["download", odd, "-o", tmp_path / "x.tar.gz"]):
        assert run_cli(*words, store=store).code == 0, words
    assert run_cli("pin", odd, "latest", store=store).code == 0
    assert run_cli("rollback", odd, first.document["snapshot"], store=store).code == 0
    again = empty_home(tmp_path / "again")
    assert run_cli("restore", odd, "--project", "~", f"--sandbox=local:{again}", store=store).code == 0
    write(again / "MEMORY.md", b"# and it goes on\n")
    went_on = run_cli("export", odd, "--project", "~", f"--sandbox=local:{again}", store=store)
    assert (went_on.code, went_on.document["outcome"]) == (0, "committed")
    assert run_cli("diff", odd, store=store).code == 0
    assert run_cli("fork", odd, "plain", store=store).code == 0
    assert run_cli("delete", odd, "--yes", store=store).code == 0
    assert {row["memory"] for row in run_cli("list", store=store).document["memories"]} == {"agent", "plain"}
    assert run_cli("restore", odd, f"--sandbox=local:{again}", store=store).error == "bad-memory-id", "it is gone"


def test_over_http_too(tmp_path: Path) -> None:
    store, home = tmp_path / "store", three_tier_home(empty_home(tmp_path / "home"))
    with former_ids():
        assert run_cli("export", "caf\u0065\u0301", f"--sandbox=local:{home}", store=store).code == 0
    odd, known = "agent%E2%80%8B", "cafe%CC%81"
    with serving(store, tmp_path / "log") as service:
        for answer in (
            service.export(odd, f"local:{home}"),
            service.export(odd, f"local:{home}", key="once"),
            service.export(odd, f"local:{home}", key="once"),
            service.restore(odd, f"local:{home}", key="twice"),
            service.http.put(path(odd, "attachment"), json={"sandbox": f"local:{home}"}),
            service.http.post(path(known, "forks"), json={"memory": "agent\u200b"}),
        ):
            assert (answer.status_code, answer.json()["code"]) == (400, "bad-memory-id"), answer.text
        assert service.http.get(path(odd)).status_code == 404
        assert service.restore(known, f"local:{home}").json()["outcome"] == "complete"
        assert service.export(known, f"local:{home}").json()["outcome"] in ("unchanged", "committed")
        assert service.http.delete(path(known)).status_code == 200
        assert service.http.get("/v1/memories").json()["memories"] == []
