"""What ``forget``, ``pin`` and ``unpin`` promise on the command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parts.commands import done
from tests.parts.homes import empty_home, run_cli, write

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "m"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with a memory of five snapshots."""
    home, store = empty_home(tmp_path / "home"), tmp_path / "store"
    for day in range(5):
        write(home / "MEMORY.md", f"day {day}\n".encode() * (day + 1))
        label = "release-1" if day == 1 else f"day {day}"
        done("export", MEMORY, f"--sandbox=local:{home}", "--label", label, store=store)
    return store


def snapshots(store: Path) -> list[str]:
    return [row["snapshot"] for row in done("log", MEMORY, store=store)["snapshots"]]


def files(store: Path) -> dict[str, bytes]:
    return {str(place): place.read_bytes() for place in store.rglob("*") if place.is_file()}


def test_a_dry_run_shows_every_snapshot_with_the_rule_that_keeps_it_or_the_reason_it_goes(store: Path) -> None:
    ids, before = snapshots(store), files(store)
    done("pin", MEMORY, ids[4], store=store)
    before = files(store)
    ran = run_cli("forget", MEMORY, "--dry-run", "--keep-last=2", "--keep-labelled=release-*", store=store)
    (row,) = ran.document["memories"]
    assert ran.document["dry_run"] and (row["kept"], row["forgotten"]) == (4, 1)
    assert [(fate["snapshot"], fate["keep"], fate["reason"]) for fate in row["snapshots"]] == [
        (ids[0], True, "head"),
        (ids[1], True, "last 2"),
        (ids[2], False, "no rule keeps it"),
        (ids[3], True, "labelled release-*"),
        (ids[4], True, "pinned"),
    ]
    assert all(fate["bytes"] > 0 and fate["created"] for fate in row["snapshots"])
    assert files(store) == before
    assert done("forget", "--dry-run", store=store)["memories"][0]["forgotten"] == 0


def test_people_get_a_table(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sidecar.cli import main

    ids = snapshots(store)
    assert main(["forget", MEMORY, f"--store=file:{store}", "--dry-run", "--keep-last", "2"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"SNAPSHOT +AGE +SIZE +LABEL +DECISION", shown)
    assert re.search(rf"{ids[0]} +\d+s +[\d.]+ k?B +day 4 +KEEP by head", shown)
    assert re.search(rf"{ids[4]} +\d+s +[\d.]+ k?B +day 0 +GO because no rule keeps it", shown)
    assert "3 snapshots would go, 2 kept" in shown


def test_what_goes_is_gone_and_what_stays_is_whole(store: Path) -> None:
    ids = snapshots(store)
    first = done("forget", MEMORY, "--keep-last=2", store=store)["memories"][0]
    assert (first["forgotten"], first["objects"]) == (3, 0)
    assert snapshots(store) == ids[:2]
    last = done("forget", "--keep-last=1", "--grace=0", store=store)["memories"][0]
    assert (last["forgotten"], last["waiting"]) == (1, 0)
    assert snapshots(store) == ids[:1]
    assert done("verify", MEMORY, store=store)["ok"]
    assert done("restore", MEMORY, f"--sandbox=local:{empty_home(store.parent / 'x')}", store=store)["files"] == 1


def test_a_pinned_snapshot_shows_in_the_log_and_stays_until_it_is_unpinned(store: Path) -> None:
    ids = snapshots(store)
    assert done("pin", MEMORY, ids[4][-8:], store=store) == {"memory": MEMORY, "snapshot": ids[4], "pinned": True}
    assert [row["pinned"] for row in done("log", MEMORY, store=store)["snapshots"]] == [False] * 4 + [True]
    assert done("show", MEMORY, ids[4], store=store)["pinned"]
    done("forget", "--keep-last=1", "--memory-bytes=1", store=store)
    assert snapshots(store) == [ids[0], ids[4]]
    assert not done("unpin", MEMORY, ids[4], store=store)["pinned"]
    done("forget", "--keep-last=1", store=store)
    assert snapshots(store) == ids[:1]
    for words in (("pin", MEMORY, "nothing"), ("unpin", MEMORY, "nothing"), ("pin", "nobody", "latest")):
        assert run_cli(*words, store=store).code == 1


def test_the_limit_of_the_store_takes_from_all_memories(store: Path, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "other home")
    write(home / "MEMORY.md", b"another\n")
    done("export", "other", f"--sandbox=local:{home}", store=store)
    config = tmp_path / "c.toml"
    config.write_text("[retention]\nstore_bytes = 1\n")
    shown = done("forget", f"--config={config}", "--dry-run", store=store)
    assert sum(row["forgotten"] for row in shown["memories"]) == 0, "the heads alone are too much"
    config.write_text(f"[retention]\nstore_bytes = {shown['store_over_bytes']}\n")
    shown = done("forget", f"--config={config}", "--dry-run", store=store)
    assert {row["memory"]: (row["kept"], row["forgotten"]) for row in shown["memories"]} == {
        MEMORY: (4, 1),
        "other": (1, 0),
    }
    assert shown["store_over_bytes"] == 0
    reasons = [fate["reason"] for row in shown["memories"] for fate in row["snapshots"] if not fate["keep"]]
    assert len(reasons) == 1 and reasons[0].endswith("bytes in the store")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--keep-last=0"], "keep_last = 0 and nothing else"),
        (["--keep-last=-3"], "must not be negative"),
        (["--keep-within=soon"], "is no duration"),
        (["--grace=soon"], "is no duration"),
    ],
)
def test_rules_that_cannot_be_meant_are_wrong_usage(store: Path, words: list[str], said: str) -> None:
    ran = run_cli("forget", *words, store=store)
    assert ran.code == 2 and said in ran.document["error"]["message"]
    assert len(snapshots(store)) == 5


def test_a_bad_policy_is_refused_before_the_first_export(store: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[retention]\nkeep_last = -1\n")
    for words in (("export", MEMORY, f"--sandbox=local:{tmp_path}/home"), ("serve",), ("config", "check")):
        ran = run_cli(*words, f"--config={config}", store=store)
        assert (ran.code, ran.document["error"]["code"]) == (2, "bad-config")
        assert "[retention] keep_last must not be negative" in ran.document["error"]["message"]
    assert len(snapshots(store)) == 5
