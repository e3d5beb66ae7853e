"""What the command line promises: one JSON document, the right exit code, one clear line, and nothing outside the store."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.engine import ExportRequest, RestoreRequest, export, restore
from tests.conftest import Mount
from tests.parts.forgery import header, pax, zeros
from tests.parts.former import former_ids
from tests.parts.homes import (
    KEPT_KEYS,
    PROJECT,
    Ran,
    WatchedSandbox,
    claude_mem_home,
    empty_home,
    engine_at,
    forget_caches,
    memory_tree,
    observe,
    project_tree,
    run_cli,
    three_tier_home,
    titles,
    tree,
    without_cache,
    write,
)
from tests.parts.s3_servers import S3Server

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "m"
GIB = 1 << 30


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "store"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"# remembered\n" * 10)
    write(home / "memory/2026-11-15.md", b"a day\n")
    return home


def _export(home: Path, store: str | Path, *more: str, memory: str = MEMORY) -> Ran:
    return run_cli("export", memory, "--sandbox", f"local:{home}", *more, store=store)


def _restore(home: Path, store: str | Path, *more: str, memory: str = MEMORY) -> Ran:
    return run_cli("restore", memory, "--sandbox", f"local:{home}", *more, store=store)


def _one_line(ran: Ran) -> str:
    """What was said on stderr: exactly one line that means something."""
    (line,) = ran.stderr.splitlines()
    assert line.startswith("memory-sidecar: ") and len(line) > 30
    return line


# Memory ids


@pytest.mark.parametrize(
    "memory",
    ["../x", "", "a" * 1000, "new\nline", ".", "..", "a//b", " ", "/", "/etc/passwd", "a/../b", "a/", "\t", "a\x7f"],
)
def test_an_id_that_is_none_is_refused_and_nothing_is_written(memory: str, home: Path, store: Path) -> None:
    before = tree(home.parent)
    for ran in (_export(home, store, memory=memory), run_cli("delete", memory, "--yes", store=store)):
        assert (ran.code, ran.error) == (2, "bad-memory-id")
        _one_line(ran)
    assert tree(home.parent) == before


@pytest.mark.parametrize("memory", ["a/b", "🧠", "a" * 200, "Ünïcode näme", "~", "%2e%2e", "-x/y"])
def test_an_unusual_id_is_kept_safely_inside_the_store(memory: str, home: Path, store: Path) -> None:
    before = tree(home.parent)
    words = ["--", memory] if memory.startswith("-") else [memory]
    ran = run_cli("export", "--sandbox", f"local:{home}", *words, store=store)
    assert (ran.code, ran.document["memory"]) == (0, memory)
    assert [row["memory"] for row in run_cli("list", store=store).document["memories"]] == [memory]
    other = empty_home(home.parent / "other")
    assert run_cli("restore", "--sandbox", f"local:{other}", *words, store=store).code == 0
    assert project_tree(other) == project_tree(home)
    assert run_cli("delete", "--yes", *words, store=store).code == 0
    outside = {name for name in tree(home.parent) if not name.startswith((b"deep", b"other", b"home/.cache"))}
    assert outside == set(before)
    assert {path.name for path in store.rglob("*") if path.is_file()} == {"store-id", ".lock-store-id"}


def test_ids_that_look_alike_are_different_memories(tmp_path: Path, store: Path) -> None:
    ids = ["a/b", "a-b", "A/B", "a b", "a~b", "e\u0301", "\u00e9"]
    engine = engine_at(store)
    for number, memory in enumerate(ids):
        home = empty_home(tmp_path / str(number))
        write(home / "MEMORY.md", memory.encode() * 50)
        with former_ids():  # that two may differ in how an accent is written is from before
            asyncio.run(export(engine, WatchedSandbox(home), ExportRequest(memory=memory)))
    assert {row["memory"] for row in run_cli("list", store=store).document["memories"]} == set(ids)
    assert run_cli("delete", "a/b", "--yes", store=store).code == 0
    for number, memory in enumerate(ids):
        other = empty_home(tmp_path / f"other-{number}")
        receipt = asyncio.run(restore(engine, WatchedSandbox(other), RestoreRequest(memory=memory)))
        if memory == "a/b":
            assert receipt.outcome == "empty"
        else:
            assert (other / "MEMORY.md").read_bytes() == memory.encode() * 50


# What makes no sense


@pytest.mark.parametrize(
    "url",
    [
        *("/plain/path", "memories", "gs://bucket/x", "fiel:/x", "file:", "file:/", "file://host/x", "file:/x#y"),
        *("volume:data", "volume:/data?prefix=../x", "s3:", "s3:///x", "s3://bucket?wibble=1", "s3://b?path-style=?"),
        *("s3://key:secret@bucket", "s3://127.0.0.1:9000/bucket", "s3://bucket?endpoint=nowhere", "s3://bucket/../x"),
    ],
)
def test_a_wrong_store_url_is_wrong_usage(url: str, home: Path) -> None:
    ran = _export(home, url)
    assert (ran.code, ran.error) == (2, "bad-reference")
    assert ran.document["error"]["hint"]
    assert "secret" not in _one_line(ran)


@pytest.mark.parametrize("words", [["list"], ["export", MEMORY], ["restore", MEMORY], ["doctor"]])
def test_an_unmounted_volume_is_refused_with_what_to_do(words: list[str], home: Path, tmp_path: Path) -> None:
    folder = empty_home(tmp_path / "volume")
    words = [*words, "--sandbox", f"local:{home}"] if len(words) > 1 else words
    ran = run_cli(*words, store=f"volume:{folder}")
    assert ran.code == 1
    assert list(folder.iterdir()) == []
    if words == ["doctor"]:
        (wrong, *_) = [row for row in ran.document["checks"] if not row["ok"]]
        assert "mount" in wrong["hint"].lower()
    else:
        assert ran.error == "store-missing"
        assert "Mount a volume" in _one_line(ran)


def test_a_mounted_volume_works(home: Path, tmp_path: Path, mount: Mount) -> None:
    volume = mount(tmp_path / "volume")
    assert _export(home, f"volume:{volume}").document["outcome"] == "committed"
    assert list(volume.iterdir()) != []


def test_a_full_volume_is_a_clear_error_and_the_head_stays(home: Path, tmp_path: Path, mount: Mount) -> None:
    volume = mount(tmp_path / "volume", size="1m")
    assert _export(home, f"volume:{volume}").code == 0
    head = run_cli("log", MEMORY, store=f"volume:{volume}").document["head"]
    (home / "memory/big.bin").write_bytes(os.urandom(3 << 20))
    ran = _export(home, f"volume:{volume}")
    assert (ran.code, ran.error) == (1, "store-full")
    _one_line(ran)
    assert run_cli("log", MEMORY, store=f"volume:{volume}").document["head"] == head
    assert run_cli("verify", MEMORY, store=f"volume:{volume}").code == 0


def test_a_missing_bucket_is_a_clear_error(
    home: Path, moto_server: S3Server, credentials_of: Callable[[S3Server], None]
) -> None:
    credentials_of(moto_server)
    url = f"s3://not-there/x?endpoint={moto_server.endpoint}&region=us-east-1"
    for ran in (_export(home, url), _restore(home, url), run_cli("list", store=url)):
        assert (ran.code, ran.error) == (1, "store-missing")
        assert "not-there" in _one_line(ran)


def test_missing_credentials_are_a_clear_error(home: Path, moto_server: S3Server) -> None:
    moto_server.make_bucket("no-credentials")
    ran = _export(home, f"s3://no-credentials/x?endpoint={moto_server.endpoint}&region=us-east-1")
    assert (ran.code, ran.error) == (1, "store-denied")
    _one_line(ran)


def test_a_server_that_is_not_there_is_a_clear_error(
    home: Path, moto_server: S3Server, credentials_of: Callable[[S3Server], None]
) -> None:
    credentials_of(moto_server)
    ran = _export(home, "s3://bucket/x?endpoint=http://127.0.0.1:9&region=us-east-1")
    assert (ran.code, ran.error) == (1, "store-unreachable")
    assert ran.document["error"]["retryable"] is True
    _one_line(ran)


def test_a_bucket_takes_the_whole_way(
    home: Path, tmp_path: Path, moto_server: S3Server, credentials_of: Callable[[S3Server], None]
) -> None:
    credentials_of(moto_server)
    bucket = moto_server.make_bucket("the-whole-way")
    url = f"s3://{bucket}/deep/prefix?endpoint={moto_server.endpoint}&region=us-east-1"
    assert _export(home, url).document["outcome"] == "committed"
    assert _export(home, url).document["outcome"] == "unchanged"
    other = empty_home(tmp_path / "other")
    assert _restore(other, url).document["outcome"] == "complete"
    assert project_tree(other) == project_tree(home)
    assert run_cli("verify", store=url).code == 0
    assert run_cli("delete", MEMORY, "--yes", store=url).code == 0
    left = moto_server.client.list_objects_v2(Bucket=bucket).get("Contents", [])
    assert [item["Key"] for item in left if MEMORY in item["Key"].split("/")] == []


@pytest.mark.parametrize(
    ("ref", "code", "error"),
    [
        ("nowhere", 2, "bad-reference"),
        ("locl:/tmp", 2, "bad-reference"),
        ("local:", 2, "bad-reference"),
        ("local:/not/there", 1, "sandbox-not-found"),
        ("local:/etc/passwd", 1, "sandbox-not-found"),
        ("", 2, "bad-reference"),
    ],
)
def test_an_unknown_sandbox_is_said_in_one_line(ref: str, code: int, error: str, store: Path) -> None:
    for verb in ("export", "restore"):
        ran = run_cli(verb, MEMORY, f"--sandbox={ref}", store=store)
        assert (ran.code, ran.error) == (code, error)
        assert ran.document["error"]["hint"]
        _one_line(ran)


def test_an_unknown_layout_is_wrong_usage(home: Path, store: Path) -> None:
    ran = _export(home, store, "--layout", "claude-men")
    assert (ran.code, ran.error) == (2, "unknown-layout")
    assert "claude-mem" in _one_line(ran)
    assert not store.exists()


@pytest.mark.parametrize("verb", ["show", "download", "rollback", "restore", "fork", "diff"])
def test_an_unknown_snapshot_fails_by_name(verb: str, home: Path, store: Path, tmp_path: Path) -> None:
    assert _export(home, store).code == 0
    wanted = "20010101T000000000Z-00000000"
    words = {
        "show": [MEMORY, wanted],
        "download": [MEMORY, wanted, "-o", str(tmp_path / "x.tar.gz")],
        "rollback": [MEMORY, wanted],
        "restore": [MEMORY, "--sandbox", f"local:{home}", "--snapshot", wanted],
        "fork": [MEMORY, "new", "--snapshot", wanted],
        "diff": [MEMORY, wanted],
    }[verb]
    ran = run_cli(verb, *words, store=store)
    assert (ran.code, ran.error) == (1, "snapshot-not-found")
    assert wanted in _one_line(ran)
    assert not (tmp_path / "x.tar.gz").exists()


@pytest.mark.parametrize("words", [["log"], ["show"], ["diff"], ["verify"], ["fork"], ["rollback"], ["delete"]])
def test_an_unknown_memory_fails_by_name(words: list[str], store: Path) -> None:
    more = {"fork": ["new"], "rollback": ["latest"], "delete": ["--yes"]}.get(words[0], [])
    ran = run_cli(*words, "nobody", *more, store=store)
    assert (ran.code, ran.error) == (1, "memory-not-found")
    assert "nobody" in _one_line(ran)


def test_a_time_that_is_none_is_wrong_usage(home: Path, store: Path) -> None:
    restore = ["restore", MEMORY, "--sandbox", f"local:{home}", "--snapshot", "@yesterday"]
    ran = run_cli(*restore, store=store)
    assert (ran.code, ran.error) == (2, "bad-reference")
    assert "Write it like @2026-11-16T10:00Z" in _one_line(ran)
    assert _export(home, store).code == 0
    for words in (restore, ["show", MEMORY, "@yesterday"]):
        assert run_cli(*words, store=store).code == 2


@pytest.mark.parametrize("wanted", ["../../x", "a/b", "", "latest ", "@", "@yesterday", "@2026-13-01", "\n", "2", "*"])
def test_an_odd_name_for_a_snapshot_is_no_surprise(wanted: str, home: Path, store: Path) -> None:
    assert _export(home, store).code == 0
    before = tree(home.parent)
    ran = run_cli("show", MEMORY, "--", wanted, store=store)
    assert (ran.code, ran.error) in [(1, "snapshot-not-found"), (2, "usage"), (2, "bad-reference"), (0, "")]
    assert ran.code == 0 if wanted == "" else ran.code != 0
    assert tree(home.parent) == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stor = 'file:/x'", "store"),
        ("[limits]\nbites = 1", "bytes"),
        ("[limits]\nbytes = -1", "bytes"),
        ("[limits]\nbytes = 'many'", "limits"),
        ("[layouts.mine]\nkep = ['x']", "keep"),
        ("[layouts.mine]\nkeep = ['x']\nroots = []", "mine"),
        ("[layouts.mine]\nkeep = 'x'\nroots = [{name='mine', paths=['~/x']}]", "mine"),
        ("[layouts]\nmine = 3", "mine"),
        ("layouts = 3", "layouts"),
        ("limits = 3", "limits"),
        ("not toml at all", "TOML"),
    ],
)
def test_a_wrong_config_is_named(text: str, said: str, home: Path, store: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(text)
    words = ["export", MEMORY, "--sandbox", f"local:{home}", "--config", str(config)]
    ran = run_cli(*words, store=store)
    assert (ran.code, ran.error) == (2, "bad-config")
    assert said in _one_line(ran)


def test_a_config_that_is_not_there_is_named(home: Path, store: Path) -> None:
    ran = _export(home, store, "--config", "/not/there.toml")
    assert (ran.code, ran.error) == (2, "bad-config")
    assert "/not/there.toml" in _one_line(ran)


@pytest.mark.parametrize(
    "words", [["expot", "m"], ["export"], ["export", "m"], ["restore", "m", "--mode", "merge"], []]
)
def test_wrong_words_are_wrong_usage(words: list[str], store: Path) -> None:
    ran = run_cli(*words, store=store) if words else run_cli("--json", store=store)
    assert (ran.code, ran.error) == (2, "usage")


# Outcomes and exit codes


def test_outcomes_of_an_export_and_their_exit_codes(home: Path, store: Path, tmp_path: Path) -> None:
    first = _export(home, store, "--label", "one", "--conversation", "c1")
    assert (first.code, first.document["outcome"], first.document["kind"]) == (0, "committed", "full")
    assert (first.document["label"], first.document["conversation"]) == ("one", "c1")
    same = _export(home, store)
    assert (same.code, same.document["outcome"], same.document["packed_bytes"]) == (0, "unchanged", 0)
    other = empty_home(tmp_path / "other")
    assert _restore(other, store).code == 0
    write(other / "MEMORY.md", b"other work\n" * 20)
    second = _export(other, store)
    assert (second.code, second.document["outcome"], second.document["parent"]) == (
        *(0, "committed"),
        first.document["snapshot"],
    )
    write(home / "MEMORY.md", b"meanwhile\n" * 20)
    beside = _export(home, store)
    assert (beside.code, beside.document["outcome"], beside.error) == (3, "diverged", "diverged")
    assert beside.document["head"] == second.document["snapshot"] != beside.document["snapshot"]
    assert _restore(empty_home(tmp_path / "third"), store).document["snapshot"] == second.document["snapshot"]
    kept = _restore(empty_home(tmp_path / "fourth"), store, "--snapshot", beside.document["snapshot"])
    assert (kept.code, (tmp_path / "fourth/MEMORY.md").read_bytes()) == (0, b"meanwhile\n" * 20)
    write(home / "MEMORY.md", b"insisting\n" * 20)
    forced = _export(home, store, "--force")
    assert (forced.code, forced.document["outcome"]) == (0, "committed")
    assert forced.document["head"] == forced.document["snapshot"]


def test_what_diverged_and_did_not_change_since_can_still_be_forced(home: Path, store: Path, tmp_path: Path) -> None:
    assert _export(home, store).code == 0
    stranger = empty_home(tmp_path / "stranger")
    write(stranger / "MEMORY.md", b"never restored\n" * 10)
    beside = _export(stranger, store)
    assert (beside.code, beside.document["outcome"]) == (3, "diverged")
    forced = _export(stranger, store, "--force")
    assert (forced.code, forced.document["outcome"]) == (0, "committed")
    assert forced.document["head"] == beside.document["snapshot"]


def test_the_guards_keep_the_head(tmp_path: Path, store: Path) -> None:
    home = claude_mem_home(tmp_path / "home", rows=400)
    head = _export(home, store).document["snapshot"]
    empty = empty_home(tmp_path / "empty")
    cases = {"empty": empty, "shrunk": tmp_path / "shrunk", "required-missing": tmp_path / "lost"}
    for name in ("shrunk", "required-missing"):
        assert _restore(empty_home(cases[name]), store).code == 0
    for big in (cases["shrunk"] / ".claude-mem/corpora").glob("*.bin"):
        big.unlink()
    (cases["required-missing"] / ".claude-mem/claude-mem.db").unlink()
    for reason, place in cases.items():
        ran = _export(place, store)
        assert (ran.code, ran.document["outcome"], ran.document["reason"]["code"]) == (3, "rejected", reason)
        assert ran.document["head"] == head
    assert run_cli("log", MEMORY, store=store).document["head"] == head
    forced = _export(cases["shrunk"], store, "--force")
    assert (forced.code, forced.document["outcome"]) == (0, "committed")


@pytest.mark.parametrize(
    ("limit", "code"),
    [("bytes = 100", "limit-bytes"), ("files = 1", "limit-files"), ("file_bytes = 5", "limit-file-bytes")],
)
def test_a_limit_keeps_the_head_and_says_which(limit: str, code: str, home: Path, store: Path, tmp_path: Path) -> None:
    assert _export(home, store).code == 0
    write(home / "MEMORY.md", b"grown\n" * 50)
    config = tmp_path / "config.toml"
    config.write_text(f"[limits]\n{limit}\n")
    before = tree(store)
    ran = _export(home, store, "--config", str(config))
    assert (ran.code, ran.document["outcome"], ran.error) == (3, "rejected", code)
    assert tree(store) == before


def test_a_receipt_has_every_field_of_the_design(home: Path, store: Path) -> None:
    fields = [
        *("outcome", "memory", "snapshot", "parent", "sandbox", "files", "bytes", "packed_bytes", "transferred_bytes"),
        *("round_trips", "duration_ms", "databases", "skipped", "warnings"),
    ]
    sent = _export(home, store).document
    came = _restore(home, store).document
    assert [name for name in fields if name not in sent or name not in came] == []
    assert (sent["round_trips"], came["round_trips"]) == (1, 2)
    assert sent["packed_bytes"] == sum(path.stat().st_size for path in store.rglob("*.gz")) + sum(
        path.stat().st_size for path in store.rglob("snapshots/*.json")
    )


# Looking into a store, and moving heads


def test_documents_about_a_store(home: Path, store: Path) -> None:
    first = _export(home, store, "--label", "one").document["snapshot"]
    write(home / "MEMORY.md", b"# changed\n" * 20)
    write(home / "memory/new.md", b"new")
    (home / "memory/2026-11-15.md").unlink()
    second = _export(home, store).document["snapshot"]
    (row,) = run_cli("list", store=store).document["memories"]
    assert (row["memory"], row["head"], row["snapshots"]) == (MEMORY, second, 2)
    log = run_cli("log", MEMORY, store=store).document
    assert log["head"] == second
    assert [(line["snapshot"], line["standing"]) for line in log["snapshots"]] == [
        (second, "head"),
        (first, "earlier head"),
    ]
    assert log["snapshots"][1]["label"] == "one"
    shown = run_cli("show", MEMORY, first, store=store).document
    assert {entry["path"] for entry in shown["entries"] if entry["type"] == "file"} == {
        "project/MEMORY.md",
        "project/memory/2026-11-15.md",
    }
    assert run_cli("show", MEMORY, store=store).document["snapshot"] == second
    for words in ([MEMORY], [MEMORY, first], [MEMORY, first, second], [MEMORY, first[-8:], second[-8:]]):
        diff = run_cli("diff", *words, store=store).document
        assert (diff["from"], diff["to"]) == (first, second)
        assert [entry["path"] for entry in diff["added"]] == ["project/memory/new.md"]
        assert [entry["path"] for entry in diff["removed"]] == ["project/memory/2026-11-15.md"]
        assert [entry["path"] for entry in diff["changed"]] == ["project/MEMORY.md"]
    none = run_cli("diff", MEMORY, second, second, store=store).document
    assert (none["added"], none["removed"], none["changed"]) == ([], [], [])
    verified = run_cli("verify", store=store)
    assert (verified.code, verified.document["ok"]) == (0, True)


def test_rollback_moves_the_head_back_and_loses_nothing(home: Path, store: Path, tmp_path: Path) -> None:
    first = _export(home, store).document["snapshot"]
    write(home / "MEMORY.md", b"second\n" * 20)
    second = _export(home, store).document["snapshot"]
    back = run_cli("rollback", MEMORY, first, store=store)
    assert (back.code, back.document["head"], back.document["previous"]) == (0, first, second)
    other = empty_home(tmp_path / "other")
    assert _restore(other, store).document["snapshot"] == first
    assert (other / "MEMORY.md").read_bytes() == b"# remembered\n" * 10
    assert run_cli("rollback", MEMORY, second, store=store).document["head"] == second
    assert len(run_cli("log", MEMORY, store=store).document["snapshots"]) == 2
    write(other / "MEMORY.md", b"from the past\n" * 20)
    assert _export(other, store).document["outcome"] == "diverged"


def test_a_fork_shares_nothing_with_its_origin(home: Path, store: Path, tmp_path: Path) -> None:
    assert _export(home, store).code == 0
    write(home / "MEMORY.md", b"more\n" * 50)
    assert _export(home, store).code == 0
    forked = run_cli("fork", MEMORY, "a/fork", store=store)
    assert (forked.code, forked.document["memory"]) == (0, "a/fork")
    again = run_cli("fork", MEMORY, "a/fork", store=store)
    assert (again.code, again.error) == (2, "usage")
    assert run_cli("fork", MEMORY, "../x", store=store).error == "bad-memory-id"
    assert run_cli("delete", MEMORY, "--yes", store=store).code == 0
    other = empty_home(tmp_path / "other")
    assert _restore(other, store, memory="a/fork").document["outcome"] == "complete"
    assert project_tree(other) == project_tree(home)
    assert run_cli("verify", "a/fork", store=store).code == 0


def test_delete_asks_first_and_then_leaves_no_byte(tmp_path: Path, store: Path) -> None:
    home = empty_home(tmp_path / "home")
    keep = empty_home(tmp_path / "keep")
    write(keep / "MEMORY.md", b"to be kept\n" * 10)
    assert _export(keep, store, memory="m2").code == 0
    kept = tree(store)
    for number in range(3):
        write(home / "MEMORY.md", b"secret %d\n" % number * 10)
        assert _export(home, store).code == 0
    write(store / "memories/m/packs/.tmp-leftover", b"of a crash")
    before = tree(store)
    refused = run_cli("delete", MEMORY, store=store)
    assert (refused.code, refused.error) == (2, "usage")
    assert "--yes" in _one_line(refused)
    assert tree(store) == before
    deleted = run_cli("delete", MEMORY, "--yes", store=store)
    assert deleted.code == 0 and deleted.document["removed"] >= 10
    assert tree(store) == kept
    assert _restore(empty_home(tmp_path / "other"), store).document["outcome"] == "empty"


def test_doctor_says_what_is_ready(home: Path, store: Path) -> None:
    well = run_cli("doctor", "--sandbox", f"local:{home}", store=store)
    assert (well.code, well.document["ok"]) == (0, True)
    assert {"store", "sandbox", "memories"} <= {row["name"] for row in well.document["checks"]}
    ill = run_cli("doctor", "--sandbox", "local:/not/there", store=store)
    assert (ill.code, ill.document["ok"]) == (1, False)
    (wrong,) = [row for row in ill.document["checks"] if not row["ok"]]
    assert (wrong["name"], wrong["code"]) == ("sandbox", "sandbox-not-found")
    assert wrong["hint"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_interrupted_says_so_in_one_document(number: int, tmp_path: Path, store: Path) -> None:
    home = claude_mem_home(tmp_path / "home", rows=5)
    with contextlib.closing(sqlite3.connect(home / ".claude-mem/claude-mem.db")) as writer:
        writer.execute("PRAGMA journal_mode=DELETE")
        writer.execute("BEGIN EXCLUSIVE")  # which the export waits for
        words = ["export", MEMORY, "--sandbox", f"local:{home}", "--store", f"file:{store}", "--json"]
        process = subprocess.Popen(
            [sys.executable, "-m", "sidecar", *words],
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what runs in the background ignores it
        )
        while not any(home.glob(".cache/memory-sidecar/*/turn")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        printed, said = process.communicate(timeout=60)
    error = json.loads(printed)["error"]
    assert (process.returncode, error["code"], error["retryable"]) == (130, "interrupted", True)
    assert error["hint"] and said == f"memory-sidecar: {error['message']} {error['hint']}\n"
    assert not (store / "memories").exists()


# Tarballs in and out


def _tar(path: Path, source: Path, prefix: str, *, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        tar.add(source, arcname=prefix)
    return path


@pytest.mark.parametrize(
    ("prefix", "mode"),
    [
        (".claude-mem", "w:gz"),
        ("./.claude-mem", "w:gz"),
        pytest.param("root/.claude-mem", "w", marks=pytest.mark.slow),
        pytest.param("home/user/.claude-mem", "w:gz", marks=pytest.mark.slow),
        ("./home/user/.claude-mem", "w"),
    ],
)
def test_import_adopts_a_tarball_of_a_home(prefix: str, mode: str, tmp_path: Path, store: Path) -> None:
    home = claude_mem_home(tmp_path / "home", rows=30)
    archive = _tar(tmp_path / "conductor.tar.gz", home / ".claude-mem", prefix, mode=mode)
    ran = run_cli("import", MEMORY, archive, store=store)
    assert (ran.code, ran.document["outcome"]) == (0, "committed"), ran
    other = empty_home(tmp_path / "other")
    assert _restore(other, store).document["outcome"] == "complete"
    assert titles(other) == titles(home)
    files = {name: about for name, about in memory_tree(home / ".claude-mem").items() if about[0] != "dir"}
    came = {name: about for name, about in memory_tree(other / ".claude-mem").items() if about[0] != "dir"}
    assert came.keys() == files.keys()
    assert {name: about[3] for name, about in came.items()} == {name: about[3] for name, about in files.items()}
    assert b"hunter2" not in b"".join(path.read_bytes() for path in store.rglob("*") if path.is_file())
    again = run_cli("import", MEMORY, archive, store=store)
    assert (again.code, again.document["outcome"]) == (0, "unchanged")


def test_import_adopts_a_bare_database_folder(tmp_path: Path, store: Path) -> None:
    home = claude_mem_home(tmp_path / "home", rows=30)
    for prefix in ("data", ""):
        archive = _tar(tmp_path / "bare.tar.gz", home / ".claude-mem", prefix)
        memory = f"bare-{prefix or 'top'}"
        assert run_cli("import", memory, archive, store=store).code == 0
        other = empty_home(tmp_path / f"other-{prefix}")
        assert _restore(other, store, memory=memory).code == 0
        assert titles(other) == titles(home)
        assert (other / ".claude-mem/modes/code.json").exists()


def test_import_leaves_a_layouts_folders_where_they_are(tmp_path: Path, store: Path) -> None:
    """A corpus that happens to hold a MEMORY.md is a corpus, not a project."""
    home = claude_mem_home(tmp_path / "home", rows=10)
    write(home / ".claude-mem/corpora/notes/MEMORY.md", b"of a corpus")
    write(home / ".claude-mem/corpora/notes/memory/x.json", b"of a corpus too")
    archive = _tar(tmp_path / "conductor.tar.gz", home / ".claude-mem", ".claude-mem")
    assert run_cli("import", MEMORY, archive, store=store).code == 0
    entries = {entry["path"] for entry in run_cli("show", MEMORY, store=store).document["entries"]}
    assert {"claude-mem/corpora/notes/MEMORY.md", "claude-mem/corpora/notes/memory/x.json"} <= entries
    assert not any(path.startswith("project/") for path in entries)


def _named(name: str, contents: bytes = b"x", kind: bytes = tarfile.REGTYPE, link: str = "", **extra: str) -> bytes:
    """A tarball of a small memory with one more member in it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        good = tarfile.TarInfo(".claude-mem/modes/code.json")
        good.size = 2
        tar.addfile(good, io.BytesIO(b"{}"))
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.size = kind, link, len(contents) if kind == tarfile.REGTYPE else 0
        info.pax_headers = extra
        tar.addfile(info, io.BytesIO(contents))
    return gzip.compress(out.getvalue())


def _bomb(size: int) -> bytes:
    name = ".claude-mem/modes/bomb.json"
    good = gzip.compress(header(".claude-mem/modes/code.json", 2) + b"{}" + bytes(510) + header(name, size))
    return good + zeros(size) + gzip.compress(bytes(1024))


HOSTILE: dict[str, tuple[Callable[[], bytes], int, str]] = {
    "dotdot": (lambda: _named(".claude-mem/../../../evil"), 1, "unsafe-path"),
    "dotdot-first": (lambda: _named("../evil"), 1, "unsafe-path"),
    "absolute": (lambda: _named("/tmp/evil-of-a-test"), 1, "unsafe-path"),
    "nul": (lambda: _named("x", path=".claude-mem/modes/a\0b"), 1, "unsafe-path"),
    "link-out": (lambda: _named(".claude-mem/modes/x", b"", tarfile.SYMTYPE, "../../../etc/passwd"), 1, "unsafe-link"),
    "link-absolute": (lambda: _named(".claude-mem/modes/x", b"", tarfile.SYMTYPE, "/etc/passwd"), 1, "unsafe-link"),
    "device": (lambda: _named(".claude-mem/modes/x", b"", tarfile.CHRTYPE), 1, "unsafe-member"),
    "fifo": (lambda: _named(".claude-mem/modes/x", b"", tarfile.FIFOTYPE), 1, "unsafe-member"),
    "hardlink": (lambda: _named(".claude-mem/modes/x", b"", tarfile.LNKTYPE, "/etc/passwd"), 1, "unsafe-member"),
    "bomb": (lambda: _bomb(256 << 20), 3, "limit-file-bytes"),
    "header-bomb": (lambda: gzip.compress(header("x", 2 * GIB, tarfile.XHDTYPE)) + zeros(2 * GIB), 1, "pack-bomb"),
    "nested-headers": (lambda: gzip.compress(pax(b"11 comment=\n") * 4000) + _named("a"), 1, "not-an-archive"),
    "time-beyond": (lambda: _named(".claude-mem/modes/x.json", mtime="1e30"), 0, ""),
    "time-no-number": (lambda: _named(".claude-mem/modes/x.json", mtime="nan"), 0, ""),
    "truncated": (lambda: _named(".claude-mem/modes/x.json", os.urandom(9000))[:-2000], 1, "not-an-archive"),
    "no-tar": (lambda: b"just some text\n" * 100, 1, "not-an-archive"),
    "no-tar-in-gzip": (lambda: gzip.compress(b"just some text\n" * 100), 1, "not-an-archive"),
    "nothing": (lambda: b"", 1, "not-an-archive"),
    "no-memory": (lambda: _other_tar(), 1, "not-an-archive"),
    "project-out": (lambda: _noted('["../../evil"]'), 1, "unsafe-path"),
    "project-absolute": (lambda: _noted('["~//tmp/evil-of-a-test"]'), 0, ""),
    "project-of-another-user": (lambda: _noted('["~x/tmp/evil-of-a-test"]'), 1, "unsafe-path"),
    "project-key-out": (lambda: _noted('null, "keyed": {"claude-mem/../x": "~"}'), 1, "unsafe-path"),
    "project-key-of-none": (lambda: _noted('null, "keyed": {"claude-mem/modes": "~"}'), 1, "bad-answer"),
    "project-no-text": (lambda: _noted('{"a": 1}'), 0, ""),
    "projects-many": (lambda: _noted(json.dumps([f"/p{number}" for number in range(100_000)])), 1, "pack-bomb"),
    "project-nested": (lambda: _noted("[" * 6000), 0, ""),
}


def _noted(projects: str) -> bytes:
    """A tarball of a small memory that says where its projects are."""
    out, note = io.BytesIO(), {"comment": f'memory-sidecar: {{"projects": {projects}}}'}
    with tarfile.open(fileobj=out, mode="w:gz", format=tarfile.PAX_FORMAT, pax_headers=note) as tar:
        tar.addfile(tarfile.TarInfo(".claude-mem/modes/code.json"), io.BytesIO())
    return out.getvalue()


def _other_tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("photos/cat.jpg"), io.BytesIO())
    return out.getvalue()


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_tarball_is_refused_and_nothing_is_written(case: str, tmp_path: Path, store: Path) -> None:
    make, code, error = HOSTILE[case]
    archive = tmp_path / "conductor.tar.gz"
    archive.write_bytes(make())
    spool = empty_home(tmp_path / "spool")
    config = tmp_path / "config.toml"
    config.write_text(f"[limits]\nbytes = {64 << 20}\nfile_bytes = {64 << 20}\n")
    before = tree(tmp_path)
    ran = run_cli("import", MEMORY, archive, "--config", config, store=store, env={"TMPDIR": str(spool)})
    assert (ran.code, ran.error) == (code, error)
    if code:
        assert tree(tmp_path) == before
        assert len(ran.stderr.splitlines()) <= 1
    else:
        assert list(spool.iterdir()) == []
    assert not Path("/tmp/evil-of-a-test").exists()


@pytest.mark.slow
def test_a_tarball_of_ten_gigabytes_of_zeros_is_refused(tmp_path: Path, store: Path) -> None:
    archive = tmp_path / "conductor.tar.gz"
    archive.write_bytes(_bomb(10 * GIB))
    ran = run_cli("import", MEMORY, archive, store=store)
    assert (ran.code, ran.error) == (3, "limit-file-bytes")
    assert not store.exists()


def test_import_of_a_file_that_is_not_there_is_wrong_usage(store: Path) -> None:
    ran = run_cli("import", MEMORY, "/not/there.tar.gz", store=store)
    assert (ran.code, ran.error) == (2, "usage")
    _one_line(ran)


@pytest.mark.parametrize("name", ["out.tar.gz", pytest.param("out.tar", marks=pytest.mark.slow), "out.tar.zst"])
def test_download_gives_a_tarball_that_plain_tar_unpacks_and_import_takes_back(
    name: str, tmp_path: Path, store: Path
) -> None:
    home = three_tier_home(claude_mem_home(tmp_path / "home", rows=30))
    assert _export(home, store).code == 0
    observe(home, 5, "later")
    assert _export(home, store).document["kind"] == "delta"
    archive = tmp_path / name
    ran = run_cli("download", MEMORY, "-o", archive, store=store)
    assert (ran.code, ran.document["packed_bytes"]) == (0, archive.stat().st_size)
    other = empty_home(tmp_path / "other")
    subprocess.run(["tar", "-xf", archive, "-C", other], check=True, capture_output=True)
    files = {name: about for name, about in memory_tree(other / ".claude-mem").items() if about[0] != "dir"}
    assert {name: (kind, mode, text) for name, (kind, mode, _, text) in files.items()} == {
        name: (kind, mode, text)
        for name, (kind, mode, _, text) in memory_tree(home / ".claude-mem").items()
        if kind != "dir"
    }
    assert {name: about[3] for name, about in project_tree(other).items()} == {
        name: about[3] for name, about in project_tree(home).items()
    }
    assert titles(other) == titles(home)
    assert list(KEPT_KEYS) == list(_settings(other))
    again = run_cli("import", MEMORY, archive, store=store)
    assert (again.code, again.document["outcome"]) == (0, "unchanged"), again
    fresh = run_cli("import", "fresh", archive, store=store)
    shown, original = (run_cli("show", memory, store=store).document for memory in ("fresh", MEMORY))
    assert fresh.code == 0 and shown["tree"] == original["tree"]


def test_a_download_of_several_projects_is_imported_whole_and_in_their_order(tmp_path: Path, store: Path) -> None:
    home = tmp_path / "home"
    write(home / ".claude-mem/modes/code.json", b"{}")
    named = [tmp_path / "work", home / "work", tmp_path / "none", home]
    for project in (tmp_path / "work", home / "work", home):
        write(project / "MEMORY.md", f"of {project}".encode())
    write(tmp_path / "work/memory/x.md", b"first")
    write(home / "work/.cm/CONTINUITY.md", b"second")
    (tmp_path / "none").mkdir()
    archive = tmp_path / "out.tar.gz"
    options = [f"--project={project}" for project in named]
    assert _export(home, store, *options).code == 0
    assert run_cli("download", MEMORY, "-o", archive, store=store).code == 0
    tarred = subprocess.run(["tar", "-tf", archive], check=True, capture_output=True, text=True)
    assert tarred.stderr == ""

    ran = run_cli("import", "twin", archive, store=store)
    assert (ran.code, ran.document["skipped"], ran.document["warnings"]) == (0, [], [])
    shown, original = (run_cli("show", memory, store=store).document for memory in ("twin", MEMORY))
    for same in ("tree", "roots", "projects"):
        assert shown[same] == original[same]
    assert run_cli("import", MEMORY, archive, store=store).document["outcome"] == "unchanged"
    there = [empty_home(tmp_path / f"there-{number}") for number in range(4)]
    options = [f"--project={project}" for project in there]
    assert _restore(empty_home(tmp_path / "other"), store, *options, memory="twin").document["outcome"] == "complete"
    assert (there[0] / "memory/x.md").read_bytes() == b"first"
    assert (there[1] / ".cm/CONTINUITY.md").read_bytes() == b"second"
    for number in (0, 1, 3):
        assert (there[number] / "MEMORY.md").read_text() == f"of {named[number]}"
    assert not any(there[2].iterdir())


def test_an_imported_project_that_was_outside_the_home_is_restored_into_the_working_folder(
    tmp_path: Path, store: Path
) -> None:
    """As it would have been from the memory that was downloaded."""
    write(tmp_path / "work/MEMORY.md", b"x")
    assert _export(empty_home(tmp_path / "home"), store, f"--project={tmp_path / 'work'}").code == 0
    archive = tmp_path / "out.tar"
    assert run_cli("download", MEMORY, "-o", archive, store=store).code == 0
    assert run_cli("import", "twin", archive, store=store).code == 0
    for memory in (MEMORY, "twin"):
        other = empty_home(tmp_path / f"home-of-{memory}")
        assert _restore(other, store, memory=memory).code == 0
        assert (other / "MEMORY.md").read_bytes() == b"x"


def test_a_download_of_a_working_folder_and_a_home_is_imported_whole(tmp_path: Path, store: Path) -> None:
    """One project lies in the other."""
    home = tmp_path / "home"
    write(home / "work/MEMORY.md", b"of the working folder")
    write(home / "MEMORY.md", b"of the home")
    assert _export(home, store, "--project", "work", "--project", "~").code == 0
    archive = tmp_path / "out.tar"
    assert run_cli("download", MEMORY, "-o", archive, store=store).code == 0
    assert run_cli("import", "twin", archive, store=store).code == 0
    other = empty_home(tmp_path / "other")
    assert _restore(other, store, memory="twin").code == 0
    assert (other / "work/MEMORY.md").read_bytes() == b"of the working folder"
    assert (other / "MEMORY.md").read_bytes() == b"of the home"


def _settings(home: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((home / ".claude-mem/settings.json").read_text())
    return found


def test_download_that_cannot_be_written_is_said_in_one_line(home: Path, store: Path, tmp_path: Path) -> None:
    assert _export(home, store).code == 0
    ran = run_cli("download", MEMORY, "-o", tmp_path / "no/such/folder/x.tar.gz", store=store)
    assert ran.code == 2
    _one_line(ran)
    both = run_cli("download", MEMORY, "-o", "-", store=store)
    assert (both.code, both.error) == (2, "usage")


def test_an_export_writes_nothing_in_the_home_but_its_own_cache(tmp_path: Path, store: Path) -> None:
    home = three_tier_home(claude_mem_home(tmp_path / "home", rows=30))
    before = tree(home)
    for _ in range(2):
        assert _export(home, store).code == 0
        assert without_cache(tree(home)) == before
    forget_caches(home)
    assert _export(home, store).document["outcome"] == "unchanged"
