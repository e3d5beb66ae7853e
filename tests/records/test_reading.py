"""What ``records``, ``cat``, ``history``, ``blame`` and ``diff`` cost and show: few packs, nothing raw, the same from sealed
stores, and nothing left behind."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapters.sandboxes.local import open_local
from sidecar.cli.main import main
from sidecar.engine import Engine, ExportRequest, export
from sidecar.engine.comparison import compare_records
from sidecar.engine.histories import PageWanted, blame, list_records, trace_file, trace_record
from sidecar.engine.queries import list_snapshots
from sidecar.errors import RecordNotFound, SnapshotNotFound
from sidecar.models.answers import Counts
from sidecar.store.selectors import resolve_snapshot
from tests.parts.commands import done
from tests.parts.conversations import SCRIPTS
from tests.parts.homes import engine_at
from tests.parts.keys import BOTH, engine_with

pytestmark = pytest.mark.usefixtures("forked_programs")


async def grow(engine: Engine, home: Path, count: int) -> None:
    home.mkdir(exist_ok=True)
    for number in range(count):
        SCRIPTS["claude-mem"](home, number)
        request = ExportRequest(memory="m", conversation=f"c{number}", label="odd" if number % 2 else "even")
        await export(engine, open_local(str(home)), request)


class Watched:
    """Counts what is read of a store, by key."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: Counter[str] = Counter()
        kind = type(engine.repository.store)
        stream = kind.stream

        def counted(store: object, key: str, *rest: object) -> object:
            self.read[key] += 1
            return stream(store, key, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(kind, "stream", counted)

    @property
    def packs(self) -> list[int]:
        return [count for key, count in self.read.items() if ".tar." in key]


async def test_no_pack_is_read_for_a_log_and_each_once_for_blame_and_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_at(tmp_path / "store")
    await grow(engine, tmp_path / "home", 12)  # more than a snapshot has packs: some are folded
    watched = Watched(engine, monkeypatch)
    rows = (await list_snapshots(engine.repository, "m")).snapshots
    assert watched.packs == [] and all(row.changes for row in rows)
    await trace_file(engine.repository, "m", "latest", "claude-mem/claude-mem.db")
    assert watched.packs == []
    found = await blame(engine, "m", "latest")
    assert set(watched.packs) == {1} and {one.origin.conversation for one in found.records} == {
        f"c{n}" for n in range(12)
    }
    watched.read.clear()
    key = next(one.key for one in found.records if one.title == "saw 1.1")
    versions = await trace_record(engine, "m", "latest", key)
    assert set(watched.packs) == {1} and [one.origin.conversation for one in versions] == ["c1", "c3", "c6"]
    watched.read.clear()
    await compare_records(engine, "m", "", "latest")
    assert set(watched.packs) == {1}


async def test_snapshots_have_more_names_than_their_ids(tmp_path: Path) -> None:
    engine = engine_at(tmp_path / "store")
    await grow(engine, tmp_path / "home", 4)
    rows = (await list_snapshots(engine.repository, "m")).snapshots
    ids = [row.snapshot for row in reversed(rows)]
    for wanted, number in (
        ("latest~0", 3),
        ("latest~3", 0),
        ("conversation:c1", 1),
        ("label:odd", 3),
        ("label:even", 2),
    ):
        assert await resolve_snapshot(engine.repository, "m", wanted) == ids[number]
    for wanted in ("latest~4", "conversation:c9", "label:", "latest~x"):
        with pytest.raises(SnapshotNotFound):
            await resolve_snapshot(engine.repository, "m", wanted)


async def test_where_retention_forgot_blame_says_before(tmp_path: Path) -> None:
    engine = engine_at(tmp_path / "store")
    await grow(engine, tmp_path / "home", 4)
    rows = (await list_snapshots(engine.repository, "m")).snapshots
    keys = [
        path
        for path in (tmp_path / "store").rglob("snapshots/*.json")
        if path.stem in {rows[1].snapshot, rows[3].snapshot}
    ]
    for path in keys:
        path.unlink()
    found = await blame(engine, "m", "latest")
    told = {(one.origin.snapshot, one.origin.before) for one in found.records}
    assert told == {(rows[0].snapshot, True), (rows[2].snapshot, True)}


async def test_a_sealed_store_gives_the_same_answers_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    for name, engine in (("plain", engine_at(tmp_path / "plain")), ("sealed", engine_with(tmp_path / "sealed", BOTH))):
        await grow(engine, tmp_path / f"home-{name}", 3)
        page = await list_records(engine, "m", "latest", page=PageWanted(limit=4))
        assert page.next == "4"
        rest = await list_records(engine, "m", "latest", page=PageWanted(start=4))
        assert rest.next is None
        difference = await compare_records(engine, "m", "", "latest")
        blamed = await blame(engine, "m", "latest")
        answers.append(
            (
                [row.title for row in (*page.records, *rest.records)],
                [(row.change, row.title) for row in difference.records],
                [(one.title, one.origin.conversation) for one in blamed.records],
            )
        )
    assert answers[0] == answers[1] and len(answers[0][0]) == 15
    assert list((tmp_path / "scratch").rglob("*")) == []


async def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    engine = engine_at(tmp_path / "store")
    await grow(engine, tmp_path / "home", 1)
    for name in ("nothing", "", "claude-mem/other.db"):
        with pytest.raises(RecordNotFound):
            await trace_record(engine, "m", "latest", name or "?")
    with pytest.raises(RecordNotFound):
        await blame(engine, "m", "latest", path="nothing")


HOSTILE = "\x1b[31mred\x1b[0m \x07 \u202e right\x9b2J"


def test_nothing_that_a_terminal_acts_on_is_printed(tmp_path: Path) -> None:
    home, store = tmp_path / "home", tmp_path / "store"
    home.mkdir()
    where = (f"--sandbox=local:{home}", f"--project={home}")
    (home / "MEMORY.md").write_text("# A\n")
    done("export", "m", *where, store=store)
    (home / "MEMORY.md").write_bytes(f"# A\n{HOSTILE}\n\n## {HOSTILE}\n``` {HOSTILE}\n".encode() + b"\xff\xfe\0")
    (home / "memory").mkdir()
    (home / "memory/deep.json").write_text("[" * 50_000)
    done("export", "m", *where, store=store)
    for words in (("diff", "m"), ("diff", "m", "--markdown"), ("records", "m"), ("blame", "m"), ("log", "m")):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert main([words[0], f"--store=file:{store}", *words[1:]]) == 0
        shown = printed.getvalue().replace("\n", "")
        assert shown.isprintable(), (words, [c for c in shown if not c.isprintable()][:5])


def test_a_database_that_is_not_what_it_says_is_compared_as_a_file(tmp_path: Path) -> None:
    home, store = tmp_path / "home", tmp_path / "store"
    (home / ".cm/memory").mkdir(parents=True)
    (home / ".cm/memory/learnings.json").write_text(json.dumps([{"id": 1, "whatFailed": "a"}]))
    where = (f"--sandbox=local:{home}", f"--project={home}")
    done("export", "m", *where, store=store)
    (home / ".cm/memory/learnings.json").write_text("[" * 100_000)
    done("export", "m", *where, store=store)
    found = done("diff", "m", store=store)
    assert found["records"] == [] and [row["path"] for row in found["files"]] == ["cm/memory/learnings.json"]
    assert "cm/memory/learnings.json cannot be read" in found["problems"][0]
    assert done("log", "m", store=store)["snapshots"][0]["changes"] is None


async def test_the_log_of_a_thousand_snapshots_reads_each_manifest_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, home = engine_at(tmp_path / "store"), tmp_path / "home"
    await grow(engine, home, 1)
    repository = engine.repository
    (first,) = [await repository.manifest("m", one) for one in await repository.list_snapshot_ids("m")]
    for number in range(999):
        name = f"20200101T{number // 3600:02d}{number // 60 % 60:02d}{number % 60:02d}000Z-{number:08x}"
        changes = {"observation": (number, 0, 0)}
        copy = replace(first, snapshot=name, conversation=f"c{number}", changes=changes)
        (tmp_path / f"store/memories/m/snapshots/{name}.json").write_bytes(copy.encode())
    read: Counter[str] = Counter()
    store = type(repository.store)
    for verb in ("stream", "get"):
        original = getattr(store, verb)

        def counted(this: object, key: str, *rest: Any, original: Any = original, **more: Any) -> Any:
            read[key] += 1
            return original(this, key, *rest, **more)

        monkeypatch.setattr(store, verb, counted)
    rows = (await list_snapshots(repository, "m")).snapshots
    assert len(rows) == 1000 and rows[1].changes == {"observation": Counts(added=998)}
    manifests = [count for key, count in read.items() if "/snapshots/" in key and key.endswith(".json")]
    assert manifests == [1] * 1000 and sum(read.values()) < 1010
    assert not [key for key in read if ".tar." in key]
