"""``search`` and ``index`` as commands, and what other commands say when Postgres is away."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyrage
import pytest

from sidecar.cli import main
from tests.parts.commands import done
from tests.parts.homes import PROJECT, Ran, forget_caches, run_cli, told
from tests.parts.leaks import DATABASE_PASSWORD as PASSWORD
from tests.parts.postgres import Database
from tests.parts.remembering import Agent
from tests.parts.searched import Searched

pytestmark = pytest.mark.usefixtures("forked_programs")

NOWHERE = f"postgresql://somebody:{PASSWORD}@127.0.0.1:9/memories"


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    agent = Agent(tmp_path / "home")
    agent.converse()
    return agent


def export(agent: Agent, store: Path, memory: str = "conductor", *more: str) -> Ran:
    words = ("export", memory, f"--sandbox=local:{agent.home}", f"--project={agent.project}", *more)
    return run_cli(*words, store=store)


def shown(*words: str | Path) -> str:
    """What a command that goes well says to a person."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([str(word) for word in words]) == 0
    return printed.getvalue()


def test_every_command_that_moves_a_head_brings_the_rows_along(
    tmp_path: Path, agent: Agent, database: Database
) -> None:
    store = tmp_path / "store"
    first = export(agent, store)
    assert first.code == 0 and told(first.document) == []
    assert sorted(database.rows()) == agent.expected("conductor")
    rows = dict(agent.rows)
    agent.converse()
    assert export(agent, store).code == 0
    assert sorted(database.rows()) == agent.expected("conductor")
    done("fork", "conductor", "other", store=store)
    assert sorted(database.rows()) == sorted(agent.expected("conductor") + agent.expected("other"))
    done("rollback", "conductor", first.document["snapshot"], store=store)
    done("delete", "other", "--yes", store=store)
    agent.rows = rows
    assert sorted(database.rows()) == agent.expected("conductor")
    tarball = tmp_path / "home.tar.gz"
    done("download", "conductor", "-o", tarball, store=store)
    done("import", "adopted", tarball, store=store)
    assert {row[0] for row in database.rows()} == {"conductor", "adopted"}
    assert done("index", store=store) == {"ok": True, "memories": []}
    assert "up to date" in done("doctor", store=store)["checks"][-1]["detail"]


def test_who_only_looks_writes_nothing(tmp_path: Path, database: Database) -> None:
    assert done("search", "otter", store=tmp_path / "store")["hits"] == []
    assert done("index", store=tmp_path / "store") == {"ok": True, "memories": []}
    assert not (tmp_path / "store").exists()


def test_what_was_never_indexed_is_not_said_to_hold_nothing(
    tmp_path: Path, agent: Agent, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    with monkeypatch.context() as without:
        without.delenv("MEMORY_SIDECAR_POSTGRES")
        assert export(agent, store).code == 0
        assert export(agent, store, "other", "--allow=other-memory").code == 0
    title = agent.observed[1][1][0]
    document = done("search", title, store=store)
    assert (document["hits"], document["unindexed"]) == ([], ["conductor", "other"])
    said = shown("search", title, f"--store=file:{store}")
    assert "conductor, other" in said and "not indexed yet" in said and "memory-sidecar index" in said
    assert done("search", title, "--memory=other", store=store)["unindexed"] == ["other"]
    done("index", "conductor", store=store)
    assert done("search", title, store=store)["unindexed"] == []  # what it found, it found
    assert done("search", "nowhere-to-be-found", store=store)["unindexed"] == ["other"]
    done("index", store=store)
    assert shown("search", "nowhere-to-be-found", f"--store=file:{store}") == "Nothing found.\n"


def test_a_search_shows_a_table_or_one_document(tmp_path: Path, agent: Agent, database: Database) -> None:
    store = tmp_path / "store"
    export(agent, store)
    title, text = agent.observed[1][1][:2]
    rare = text.split()[30]
    document = done("search", rare, store=store)
    (hit,) = document["hits"]
    assert (hit["memory"], hit["kind"], hit["title"], hit["snapshot"]) == (
        "conductor",
        "observation",
        title,
        done("show", "conductor", store=store)["snapshot"],
    )
    assert document["behind"] == [] and document["query"] == rare
    said = shown("search", rare, f"--store=file:{store}")
    assert "MEMORY" in said and f"**{rare}**" in said and "conductor" in said
    assert done("search", rare, "--kind=summary", store=store)["hits"] == []
    assert done("search", rare, "--memory=conductor", "--memory=x", store=store)["hits"] == [hit]
    assert len(done("search", "otter or brave", "--limit=2", store=store)["hits"]) == 2
    assert shown("search", "neverheardof", f"--store=file:{store}").strip() == "Nothing found."
    assert done("search", "neverheardof", store=store)["hits"] == []


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["search", " "], 2),
        (["search", "x", "--limit=0"], 2),
        (["search", "x", "--kind=otter"], 2),
        (["search", "x", "--memory=.."], 2),
        (["index", "nobody"], 1),
    ],
)
def test_wrong_words_are_refused(tmp_path: Path, database: Database, words: list[str], code: int) -> None:
    ran = run_cli(*words, store=tmp_path / "store")
    assert ran.code == code and ran.document["error"]["message"]


def test_where_search_is_off_it_is_said_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMORY_SIDECAR_SEARCH_EMBEDDED", "off")
    for words in (["search", "x"], ["index"]):
        ran = run_cli(*words, store=tmp_path / "store")
        assert (ran.code, ran.error) == (2, "no-index")
        assert "MEMORY_SIDECAR_POSTGRES" in ran.document["error"]["hint"]


def test_a_search_needs_nothing_but_this_machine(tmp_path: Path, agent: Agent) -> None:
    store, cache = tmp_path / "store", Path(os.environ["XDG_CACHE_HOME"])
    assert export(agent, store).code == 0
    assert not cache.exists(), "an export does not index"
    rare = agent.observed[1][1][1].split()[30]
    (hit,) = done("search", rare, store=store)["hits"]
    assert (hit["memory"], hit["kind"], hit["snippet"].count(f"**{rare}**")) == ("conductor", "observation", 1)
    agent.converse()
    assert export(agent, store).code == 0
    newest = agent.observed[-1][1][1].split()[30]
    document = done("search", newest, store=store)
    assert len(document["hits"]) == 1 and document["behind"] == document["unindexed"] == []
    assert "on this machine" in done("doctor", store=store)["checks"][-1]["detail"]
    assert shown("search", "neverheardof", f"--store=file:{store}") == "Nothing found.\n"
    done("fork", "conductor", "other", store=store)
    assert {hit["memory"] for hit in done("search", rare, store=store)["hits"]} == {"conductor", "other"}
    done("delete", "conductor", "--yes", store=store)
    (file,) = cache.glob("memory-sidecar/search/*/index-*.db")
    with contextlib.closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT memory FROM memories").fetchall() == [("other",)]
    assert done("index", store=store) == {"ok": True, "memories": []}


def test_a_search_of_the_past_says_since_when_and_until_when(tmp_path: Path, searched: Searched) -> None:
    store, agent = tmp_path / "store", Agent(tmp_path / "home")
    notes = agent.home / "app/memory/notes.md"
    for text in ("# Plan\nthe heron", "# Plan\nthe lapwing", "# Plan\nthe heron", "# Plan\nthe curlew"):
        notes.write_text(text)
        assert export(agent, store).code == 0
    assert done("index", "--all", store=store)["memories"][0]["state"] == "written"
    created = [row["created"] for row in done("log", "conductor", store=store)["snapshots"]][::-1]
    assert done("search", "heron", store=store)["hits"] == []
    hits = done("search", "heron", "--all", store=store)["hits"]
    assert sorted((hit["since"], hit["until"]) for hit in hits) == [(created[0], created[1]), (created[2], created[3])]
    (now,) = done("search", "curlew", "--all", store=store)["hits"]
    assert (now["since"], now["until"], now["last"]) == (created[3], None, "")
    table = shown("search", "lapwing", "--all", f"--store=file:{store}")
    assert "KNOWN (UTC)" in table and table.count(" to ") == 1
    first = done("log", "conductor", store=store)["snapshots"][-1]["snapshot"]
    done("forget", "conductor", "--keep-last=2", store=store)
    assert first not in [row["snapshot"] for row in done("log", "conductor", store=store)["snapshots"]]
    done("index", "--all", store=store)
    (left,) = done("search", "heron", "--all", store=store)["hits"]
    assert left["since"] == created[2]
    assert done("search", "lapwing", "--all", store=store)["hits"] == []
    third = done("log", "conductor", store=store)["snapshots"][1]["snapshot"]
    done("rollback", "conductor", third, store=store)
    done("index", "--all", store=store)
    assert done("search", "curlew", "--all", store=store)["hits"] == []
    (back,) = done("search", "heron", "--all", store=store)["hits"]
    assert back["until"] is None


def test_what_is_wanted_can_be_narrowed(tmp_path: Path, agent: Agent) -> None:
    store = tmp_path / "store"
    export(agent, store)
    assert done("search", "otter or brave", "--since=2026-01-01", "--until=2026-01-02", store=store)["hits"] == []
    assert done("search", "otter or brave", "--project=nowhere", store=store)["hits"] == []
    hits = done("search", "otter or brave", "--project=app", "--limit=100", store=store)["hits"]
    assert hits and {hit["project"] for hit in hits} == {"app"}
    ran = run_cli("search", "x", "--since=yesterday", store=store)
    assert (ran.code, ran.error) == (2, "usage") and "--since" in ran.document["error"]["message"]
    ran = run_cli("search", "x" * 2000, store=store)
    assert (ran.code, ran.error) == (2, "usage")


def test_an_encrypted_store_is_searched_once_it_is_said_how(
    tmp_path: Path, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cache = tmp_path / "store", Path(os.environ["XDG_CACHE_HOME"])
    monkeypatch.setenv("MEMORY_SIDECAR_IDENTITY", str(pyrage.x25519.Identity.generate()))
    assert export(agent, store).code == 0
    rare = agent.observed[1][1][1].split()[30]
    for words in (["search", rare], ["index"]):
        ran = run_cli(*words, store=store)
        assert (ran.code, ran.error) == (2, "no-index")
        assert "encrypted" in ran.document["error"]["message"] and "sealed" in ran.document["error"]["hint"]
    assert not cache.exists()
    monkeypatch.setenv("MEMORY_SIDECAR_SEARCH_EMBEDDED", "plain")
    assert len(done("search", rare, store=store)["hits"]) == 1
    assert any(rare.encode() in path.read_bytes() for path in cache.rglob("*") if path.is_file())
    monkeypatch.setenv("MEMORY_SIDECAR_SEARCH_EMBEDDED", "sealed")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    for _ in range(2):
        assert len(done("search", rare, store=store)["hits"]) == 1
    agent.converse()
    assert export(agent, store).code == 0
    newest = agent.observed[-1][1][1].split()[30]
    assert len(done("search", newest, "--all", store=store)["hits"]) == 1
    files = [path for folder in (cache, temporary) for path in folder.rglob("*") if path.is_file()]
    assert [path.name.partition("-")[0] for path in files if path.name != "lock"] == ["sealed"]
    assert not any(word.encode() in path.read_bytes() for path in files for word in (rare, newest, "conductor"))
    (sealed,) = (path for path in files if path.name != "lock")
    sealed.write_bytes(sealed.read_bytes()[:-5] + b"wrong")
    assert len(done("search", newest, store=store)["hits"]) == 1
    monkeypatch.setenv("MEMORY_SIDECAR_SEARCH_SEALED_BYTES", str(1 << 20))
    agent.observe(3000)
    assert export(agent, store).code == 0
    ran = run_cli("search", rare, store=store)
    assert (ran.code, ran.error) == (1, "index-unfit") and "sealed_bytes" in ran.document["error"]["hint"]
    monkeypatch.delenv("MEMORY_SIDECAR_IDENTITY")
    ran = run_cli("search", rare, store=tmp_path / "another")
    assert (ran.code, ran.error) == (2, "bad-config") and "sealed" in ran.document["error"]["message"]


def test_a_search_that_is_stopped_goes_on_from_there(tmp_path: Path, agent: Agent) -> None:
    store, cache = tmp_path / "store", Path(os.environ["XDG_CACHE_HOME"])
    agent.converse(observations=300)
    assert export(agent, store, "m0").code == 0
    for number in range(1, 40):
        done("fork", "m0", f"m{number}", store=store)
    words = [sys.executable, "-m", "sidecar", "search", "otter", f"--store=file:{store}"]
    process = subprocess.Popen(
        words,
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what runs in the background ignores it
    )

    def count() -> int:
        for file in cache.glob("memory-sidecar/search/*/index-*.db"):
            with contextlib.closing(sqlite3.connect(file, timeout=60)) as connection:
                return int(connection.execute("SELECT count(*) FROM memories").fetchone()[0])
        return 0

    deadline = time.monotonic() + 60
    while not count() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "goes on from there" in said and "Traceback" not in said, said
    stopped = count()
    assert 0 < stopped < 40
    began = [row["memory"] for row in done("index", store=store)["memories"]]
    assert len(began) == 40 - stopped
    assert len({hit["memory"] for hit in done("search", "otter", "--limit=1000", store=store)["hits"]}) == 40


def test_without_the_driver_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMORY_SIDECAR_POSTGRES", NOWHERE)
    monkeypatch.setitem(sys.modules, "adapters.search.postgres", None)
    ran = run_cli("search", "x", store=tmp_path / "store")
    assert (ran.code, ran.error) == (2, "driver-missing")
    assert "memory-sidecar[postgres]" in ran.document["error"]["hint"]


@pytest.mark.parametrize(
    "url",
    [
        f"mysql://a:{PASSWORD}@host/db",
        f"{PASSWORD}",
        f"postgresql://a:{PASSWORD}@host:99999999/db",
        f"postgresql://a:{PASSWORD}@[::/db",
        f"postgresql://a:{PASSWORD}@host/db?nonsense=1",
        f"postgresql://a:%zz{PASSWORD}@host/db",
        "postgres:/",
        f"postgresql://a:half@{PASSWORD}@host/db",
        f"postgresql://a:12/{PASSWORD}@host/db",
    ],
    ids=range(9),
)
def test_a_wrong_url_is_refused_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("MEMORY_SIDECAR_POSTGRES", url)
    for words in (["search", "x"], ["export", "m", f"--sandbox=local:{tmp_path}"], ["config", "check"]):
        ran = run_cli(*words, store=tmp_path / "store")
        assert (ran.code, ran.error) == (2, "bad-config")
        assert PASSWORD not in json.dumps(ran.document) + ran.stderr
        assert "MEMORY_SIDECAR_POSTGRES" in ran.document["error"]["message"]


def test_the_url_may_be_in_another_variable_and_is_no_option(
    tmp_path: Path, agent: Agent, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEMORY_SIDECAR_POSTGRES")
    config = tmp_path / "sidecar.toml"
    config.write_text('[postgres]\nurl_env = "SOME_DATABASE"\nschema = "agents"\n')
    monkeypatch.setenv("MEMORY_SIDECAR_CONFIG", str(config))
    ran = run_cli("config", "check", store=tmp_path / "store")
    assert (ran.code, ran.error) == (2, "bad-config") and "SOME_DATABASE" in ran.document["error"]["message"]
    monkeypatch.setenv("SOME_DATABASE", database.url)
    document = done("config", "check", store=tmp_path / "store")
    assert document["searched"] is True and PASSWORD not in json.dumps(document)
    export(agent, tmp_path / "store")
    database.schema = "agents"
    assert sorted(database.rows()) == agent.expected("conductor")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('schema = "Public"', "lower-case"),
        ('schema = "public"', "one of its own"),
        ('schema = "pg_catalog"', "one of its own"),
        ('text_search = "a\'b"', "lower-case"),
        ("timeout = 0", "at least a second"),
        ("url = 'postgresql://x'", "unknown key 'url'"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, words: str) -> None:
    config = tmp_path / "sidecar.toml"
    config.write_text(f"[postgres]\n{text}\n")
    ran = run_cli("config", "check", f"--config={config}", store=tmp_path / "store")
    assert ran.code == 2 and words in ran.document["error"]["message"]


def test_a_text_search_that_postgres_does_not_have_is_said(
    tmp_path: Path, agent: Agent, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMORY_SIDECAR_POSTGRES_TEXT_SEARCH", "klingon")
    ran = export(agent, tmp_path / "store")
    assert ran.code == 0 and "klingon" in told(ran.document)[0]
    ran = run_cli("search", "x", store=tmp_path / "store")
    assert (ran.code, ran.error) == (1, "index-unfit")


@pytest.fixture
def black_hole() -> Iterator[str]:
    """A server that accepts and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"postgresql://somebody:{PASSWORD}@127.0.0.1:{server.getsockname()[1]}/memories"


def test_postgres_away_or_silent_changes_no_outcome(
    tmp_path: Path, agent: Agent, monkeypatch: pytest.MonkeyPatch, black_hole: str
) -> None:
    monkeypatch.setenv("MEMORY_SIDECAR_POSTGRES_TIMEOUT", "1")
    for number, url in enumerate((NOWHERE, black_hole)):
        monkeypatch.setenv("MEMORY_SIDECAR_POSTGRES", url)
        forget_caches(agent.home)  # as if each were another sandbox
        began = time.monotonic()
        ran = export(agent, tmp_path / "store", f"m{number}")
        assert time.monotonic() - began < 12
        assert (ran.code, ran.document["outcome"]) == (0, "committed")
        (warning,) = told(ran.document)
        assert "memory-sidecar index" in warning
        assert PASSWORD not in json.dumps(ran.document) + ran.stderr
        ill = run_cli("doctor", store=tmp_path / "store")
        assert ill.code == 1 and ill.document["checks"][-1]["code"] == "index-unreachable"
        for words in (["search", "x"], ["index"]):
            ran = run_cli(*words, store=tmp_path / "store")
            assert (ran.code, ran.error) == (1, "index-unreachable") and ran.document["error"]["retryable"]
            assert PASSWORD not in json.dumps(ran.document) + ran.stderr


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), RuntimeError("a mistake")])
def test_no_trouble_with_search_takes_a_receipt_away(
    tmp_path: Path, agent: Agent, database: Database, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def fail(*_: object) -> None:
        raise problem

    monkeypatch.setattr("sidecar.records.snapshot.unpack_files", fail)
    ran = export(agent, tmp_path / "store")
    assert (ran.code, ran.document["outcome"]) == (0, "committed")
    assert str(problem) in told(ran.document)[0]


def test_a_real_process_shows_no_password_and_no_traceback(tmp_path: Path, agent: Agent) -> None:
    env = {"MEMORY_SIDECAR_POSTGRES": NOWHERE}
    ran = run_cli("export", "m", f"--sandbox=local:{agent.home}", store=tmp_path / "store", env=env)
    assert ran.code == 0 and told(ran.document)
    assert PASSWORD not in json.dumps(ran.document) + ran.stderr


def test_a_memory_that_is_not_there_is_not_one_that_says_nothing(tmp_path: Path, agent: Agent) -> None:
    store = tmp_path / "store"
    assert export(agent, store).code == 0
    ran = run_cli("search", "otter", "--memory", "nobody", store=store)
    assert (ran.code, ran.error) == (1, "memory-not-found")
    assert done("search", "neverheardof", "--memory", "conductor", store=store)["hits"] == []
    ran = run_cli("records", "conductor", "--kind", "nokind", store=store)
    assert (ran.code, ran.error) == (2, "usage")
