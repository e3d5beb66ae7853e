"""``search`` and ``index`` as commands, and what other commands say when Postgres is away."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.cli import main
from tests.parts.commands import done
from tests.parts.homes import Ran, forget_caches, run_cli, told
from tests.parts.leaks import DATABASE_PASSWORD as PASSWORD
from tests.parts.postgres import Database
from tests.parts.remembering import Agent

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


def test_without_postgres_it_is_said_what_to_set(tmp_path: Path) -> None:
    for words in (["search", "x"], ["index"]):
        ran = run_cli(*words, store=tmp_path / "store")
        assert (ran.code, ran.error) == (2, "no-index")
        assert "MEMORY_SIDECAR_POSTGRES" in ran.document["error"]["hint"]


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
