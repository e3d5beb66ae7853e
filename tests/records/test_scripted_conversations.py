"""``diff``, ``log``, ``blame`` and ``history`` name exactly what each conversation added, changed and removed."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.parts.commands import done
from tests.parts.conversations import CONVERSATIONS, MESSAGES, SCRIPTS, Taught
from tests.parts.homes import run_cli


def titles(rows: list[dict[str, Any]], change: str) -> list[tuple[str, str]]:
    return sorted((row["kind"], row["title"]) for row in rows if row["change"] == change)


def kinds_of(taught: Taught) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for change in ("added", "changed", "removed"):
        for kind, count in Counter(kind for kind, _ in getattr(taught, change)).items():
            found.setdefault(kind, {"added": 0, "changed": 0, "removed": 0})[change] = count
    return found


@pytest.mark.parametrize("system", SCRIPTS)
def test_each_conversation_is_told_apart_exactly(system: str, tmp_path: Path) -> None:
    home, store = tmp_path / "home", tmp_path / "store"
    home.mkdir()
    script: list[Taught] = []
    for number in range(CONVERSATIONS):
        script.append(SCRIPTS[system](home, number))
        done("export", "m", f"--sandbox=local:{home}", f"--project={home}", f"--conversation=c{number}", store=store)
    for number in range(1, CONVERSATIONS):
        found = done("diff", "m", f"conversation:c{number - 1}", f"conversation:c{number}", store=store)
        for change in ("added", "changed", "removed"):
            assert titles(found["records"], change) == sorted(getattr(script[number], change)), (number, change)
        counted = {kind: count for kind, count in found["counts"].items() if kind != "message"}
        assert counted == kinds_of(script[number])
        assert found["counts"].get("message", {}).get("added", 0) == MESSAGES.get(system, 0)
        assert found["files"] == [] and found["problems"] == []
    logged = [row["changes"] for row in reversed(done("log", "m", store=store)["snapshots"])]
    for number, changes in enumerate(logged):
        assert changes.pop("message", {}).get("added", 0) == MESSAGES.get(system, 0)
        assert changes == kinds_of(script[number])
    last: dict[tuple[str, str], tuple[int, int]] = {}
    for number, taught in enumerate(script):
        last |= dict.fromkeys(taught.added, (number, number))
        last |= {one: (number, last[one][1]) for one in taught.changed}
        for one in taught.removed:
            del last[one]
    blamed = done("blame", "m", store=store)["records"]
    assert {
        (row["kind"], row["title"]): (row["origin"]["conversation"], row["first"]["conversation"]) for row in blamed
    } == {one: (f"c{origin}", f"c{first}") for one, (origin, first) in last.items()}
    assert len(blamed) == len(last)
    listed = done("records", "m", store=store)["records"]
    assert sorted((row["kind"], row["title"]) for row in listed) == sorted(last)
    often = max(last, key=lambda one: (sum(one in taught.changed for taught in script), one))
    (record,) = [row for row in listed if (row["kind"], row["title"]) == often]
    versions = done("history", "m", record["id"], store=store)["versions"]
    expected = [
        (f"c{number}", change)
        for number, taught in enumerate(script)
        for change in ("added", "changed")
        if often in getattr(taught, change)
    ]
    assert [(one["origin"]["conversation"], one["change"]) for one in versions] == expected


@pytest.mark.parametrize("system", ["claude-mem", "three-tier"])
def test_what_a_sandbox_has_not_saved_yet_is_told_and_nothing_is_stored(system: str, tmp_path: Path) -> None:
    home, store = tmp_path / "home", tmp_path / "store"
    home.mkdir()
    where = (f"--sandbox=local:{home}", f"--project={home}")
    first = SCRIPTS[system](home, 0)
    found = done("diff", "m", *where, store=store)
    assert titles(found["records"], "added") == sorted(first.added) and found["to"] == "unsaved"
    done("export", "m", *where, store=store)
    assert done("diff", "m", *where, store=store)["counts"] == {}
    taught = SCRIPTS[system](home, 1)
    kept = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    for _ in range(2):
        found = done("diff", "m", *where, store=store)
        for change in ("added", "changed", "removed"):
            assert titles(found["records"], change) == sorted(getattr(taught, change))
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == kept
    receipt = done("export", "m", *where, store=store)
    assert (receipt["outcome"], receipt["kind"], receipt["warnings"]) == ("committed", "delta", [])
    again = done("diff", "m", store=store)
    assert again["records"] == found["records"]


def test_a_fork_is_compared_with_its_origin(tmp_path: Path) -> None:
    home, store = tmp_path / "home", tmp_path / "store"
    home.mkdir()
    where = (f"--sandbox=local:{home}", f"--project={home}")
    SCRIPTS["claude-mem"](home, 0)
    done("export", "m", *where, store=store)
    done("fork", "m", "other", store=store)
    assert done("diff", "m", "--with=other", store=store)["counts"] == {}
    taught = SCRIPTS["claude-mem"](home, 1)
    done("export", "m", *where, store=store)
    found = done("diff", "other", "--with=m", store=store)
    assert titles(found["records"], "added") == sorted(taught.added) and found["files"] == []
    assert done("log", "other", store=store)["snapshots"][0]["changes"] is None
    (row,) = {row["origin"]["before"] for row in done("blame", "other", store=store)["records"]}
    assert row is True


def test_a_layout_of_the_config_says_where_its_records_are(tmp_path: Path) -> None:
    home, store, config = tmp_path / "home", tmp_path / "store", tmp_path / "config.toml"
    (home / ".notes").mkdir(parents=True)
    config.write_text(
        '[layouts.notes]\nkeep = ["ideas.json"]\ndatabases = ["notes.db"]\n'
        '[[layouts.notes.roots]]\nname = "notes"\npaths = ["~/.notes"]\n'
        '[[layouts.notes.records]]\nfiles = ["notes.db"]\nreader = "table"\ntable = "notes"\nkind = "note"\n'
        'key = [["uuid"]]\ntitle = ["title"]\ntext = ["body"]\n'
        '[[layouts.notes.records]]\nfiles = ["ideas.json"]\nreader = "list"\nlist = ["ideas"]\nkind = "idea"\n'
        'text = ["idea.text"]\n'
    )
    where = ("--layout=notes", f"--sandbox=local:{home}", f"--config={config}")
    for number in range(2):
        with contextlib.closing(sqlite3.connect(home / ".notes/notes.db")) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS notes (uuid TEXT, title TEXT, body TEXT)")
            database.execute("INSERT INTO notes VALUES (?, ?, 'text')", (f"u{number}", f"note {number}"))
            database.execute("UPDATE notes SET body = ? WHERE uuid = 'u0'", (f"text {number}",))
        ideas = [{"idea": {"text": f"idea {one}"}} for one in range(number + 1)]
        (home / ".notes/ideas.json").write_text(json.dumps({"version": 1, "ideas": ideas}))
        done("export", "m", *where, store=store)
    found = done("diff", "m", f"--config={config}", store=store)
    told = [(row["change"], row["kind"], row["title"]) for row in found["records"]]
    assert sorted(told) == [("added", "idea", "idea 1"), ("added", "note", "note 1"), ("changed", "note", "note 0")]
    assert found["records"][0]["key"].startswith("notes/ideas.json#~") and found["files"] == []
    wrong = config.with_name("wrong.toml")
    wrong.write_text(config.read_text().replace('reader = "list"', 'reader = "lists"'))
    assert "unknown reader 'lists'" in run_cli("log", "m", f"--config={wrong}", store=store).stderr
