"""Each guard objects for its own reason, and each can be allowed by itself."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.errors import UnknownReason
from sidecar.policy.limits import REASONS, Guards, Limits
from sidecar.ports import CommandResult
from sidecar.receipts import ExportReceipt
from tests.parts.homes import WatchedSandbox, empty_home, engine_at, forget_caches, observe, run_cli, write
from tests.parts.memories import damage_database
from tests.parts.services import serving

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "conductor"


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_at(tmp_path / "store")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    write(home / ".claude-mem/modes/code.json", b"{}")
    write(home / ".claude-mem/corpora/large.json", b"corpus " * 40_000)
    write(home / "app/MEMORY.md", b"what matters")
    observe(home, 60)
    return home


async def exported(engine: Engine, home: Path, **asked: object) -> ExportReceipt:
    return await export(engine, WatchedSandbox(home), ExportRequest(memory=MEMORY, projects=("app",), **asked))  # type: ignore[arg-type]


async def restored(engine: Engine, home: Path) -> Path:
    receipt = await restore(engine, WatchedSandbox(empty_home(home)), RestoreRequest(memory=MEMORY))
    assert receipt.outcome == "complete"
    return home


def _schema(home: Path, version: int) -> None:
    connection = sqlite3.connect(home / ".claude-mem/claude-mem.db", isolation_level=None)
    connection.execute("DELETE FROM schema_versions WHERE version > ?", (version,))
    connection.close()


def _lose(*folders: str) -> Callable[[Path], None]:
    def lose(home: Path) -> None:
        for folder in folders:
            shutil.rmtree(home / folder)

    return lose


SPOILED: dict[str, Callable[[Path], None]] = {
    "empty": _lose(".claude-mem", "app"),
    "required-missing": lambda home: (home / ".claude-mem/claude-mem.db").unlink(),
    "root-missing": _lose("app"),
    "shrunk": lambda home: (home / ".claude-mem/corpora/large.json").unlink(),
    "schema-downgrade": lambda home: _schema(home, 51),
    "database-damaged": damage_database,
}


def test_there_is_a_case_for_each_guard() -> None:
    elsewhere = {"credentials"}  # told in the sandbox: tests/privacy
    elsewhere |= {"unknown-lineage", "other-memory"}  # not about what an export brings: tests/engine/test_identity.py
    assert set(SPOILED) == set(REASONS) - elsewhere


@pytest.mark.parametrize("reason", SPOILED)
async def test_a_guard_objects_and_is_allowed_by_itself(
    reason: str, engine: Engine, home: Path, tmp_path: Path
) -> None:
    head = (await exported(engine, home)).snapshot
    worse = await restored(engine, tmp_path / "worse")
    SPOILED[reason](worse)
    others = tuple(other for other in REASONS if other != reason)
    for allow in ((), others):
        receipt = await exported(engine, worse, allow=allow)
        assert receipt.reason is not None
        assert (receipt.outcome, receipt.reason.code, receipt.head) == ("rejected", reason, head)
    # Kept and unchanged since, or anew: only this reason has to be allowed.
    allowed = await exported(engine, worse, allow=(reason,))
    assert (allowed.outcome, allowed.head) == ("committed", receipt.snapshot)


async def test_allowing_one_guard_leaves_the_others(engine: Engine, home: Path, tmp_path: Path) -> None:
    head = (await exported(engine, home)).snapshot
    worse = await restored(engine, tmp_path / "worse")
    SPOILED["shrunk"](worse)
    SPOILED["schema-downgrade"](worse)
    reasons = []
    for allow in ((), ("schema-downgrade",), ("shrunk",)):  # the second and third time nothing has changed since
        receipt = await exported(engine, worse, allow=allow)
        assert receipt.outcome == "rejected" and receipt.head == head and receipt.reason is not None
        reasons.append(receipt.reason.code)
    assert reasons == ["schema-downgrade", "shrunk", "schema-downgrade"]
    assert (await exported(engine, worse, allow=("shrunk", "schema-downgrade"))).outcome == "committed"


async def test_an_unknown_reason_is_refused_with_the_nearest(engine: Engine, home: Path) -> None:
    sandbox = WatchedSandbox(home)
    with pytest.raises(UnknownReason) as refused:
        await export(engine, sandbox, ExportRequest(memory=MEMORY, allow=("shrank",)))
    assert refused.value.hint == "Did you mean 'shrunk'?"
    assert sandbox.calls == []


async def test_guards_can_be_set_for_some_memories_and_layouts(engine: Engine, home: Path, tmp_path: Path) -> None:
    await exported(engine, home)
    worse = await restored(engine, tmp_path / "worse")
    SPOILED["shrunk"](worse)
    write(worse / "memory/a.md", b"x" * 400_000)  # by itself, it makes up for what the other layout lost
    request = ExportRequest(memory=MEMORY, projects=("~/app", "~"))
    part = replace(engine, guards=Guards(layouts={"claude-mem": {"shrink_to": 0.9}}))
    receipt = await export(part, WatchedSandbox(worse), request)
    assert receipt.reason is not None
    assert (receipt.reason.code, "Its claude-mem part" in receipt.reason.message) == ("shrunk", True)
    other = replace(engine, guards=Guards(memories={"conduct*": {"allow": ["shrunk"]}}))
    assert (await export(other, WatchedSandbox(worse), request)).outcome == "committed"


def test_a_project_that_is_not_there_is_named_and_the_head_keeps_it(home: Path, tmp_path: Path) -> None:
    store, words = tmp_path / "store", ("export", MEMORY, "--sandbox", f"local:{home}")
    assert run_cli(*words, "--project", "app", store=store).code == 0
    wrong = run_cli(*words, "--project", "ap", store=store)  # mistyped
    assert (wrong.code, wrong.error) == (3, "root-missing")
    assert "project (three-tier in ~/app); the head has 1 file there" in wrong.document["reason"]["message"]
    assert any(f"no folder {home}/ap " in told for told in wrong.document["warnings"])
    forgotten = run_cli(*words, store=store)
    assert (forgotten.code, forgotten.document["outcome"]) == (0, "unchanged"), "it is found by its marker"
    seen = run_cli("doctor", "--sandbox", f"local:{home}", "--project", "ap", store=store)
    assert seen.code == 1 and "There is no folder" in seen.document["checks"][-1]["detail"]


class WorkingIn(WatchedSandbox):
    def __init__(self, home: Path, folder: str) -> None:
        super().__init__(home)
        self.folder = folder

    async def run(self, command: str, **how: Any) -> CommandResult:
        return await super().run(f"cd {self.folder}\n{command}", **how)


async def test_a_root_that_a_limit_left_out_is_not_missing(engine: Engine, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "small")
    write(home / "MEMORY.md", b"hot")
    write(home / ".codymaster/kanban.json", b"k" * 3000)
    assert (await export(engine, WatchedSandbox(home), ExportRequest(memory=MEMORY))).outcome == "committed"
    write(home / "MEMORY.md", b"hotter")
    trimming = replace(engine, limits=Limits(bytes=1000, over="trim"))
    receipt = await export(trimming, WatchedSandbox(home), ExportRequest(memory=MEMORY))
    assert (receipt.outcome, [row.path for row in receipt.dropped]) == ("committed", ["codymaster/kanban.json"])


async def test_nor_is_it_once_another_objection_was_allowed(engine: Engine, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "small")
    write(home / "MEMORY.md", b"hot" * 30_000)
    write(home / ".codymaster/kanban.json", b"k" * 3000)
    assert (await export(engine, WatchedSandbox(home), ExportRequest(memory=MEMORY))).outcome == "committed"
    write(home / "MEMORY.md", b"hot")
    trimming = replace(engine, limits=Limits(bytes=1000, over="trim"))
    receipt = await export(trimming, WatchedSandbox(home), ExportRequest(memory=MEMORY))
    assert receipt.reason is not None and receipt.reason.code == "shrunk"
    allowed = ExportRequest(memory=MEMORY, allow=("shrunk",))
    assert (await export(trimming, WatchedSandbox(home), allowed)).outcome == "committed"


async def test_what_was_left_out_may_go(engine: Engine, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "small")
    write(home / "MEMORY.md", b"hot")
    write(home / ".codymaster/kanban.json", b"k" * 3000)
    trimming = replace(engine, limits=Limits(bytes=1000, over="trim"))
    assert (await export(trimming, WatchedSandbox(home), ExportRequest(memory=MEMORY))).outcome == "committed"
    shutil.rmtree(home / ".codymaster")
    write(home / "MEMORY.md", b"hottest")
    assert (await export(trimming, WatchedSandbox(home), ExportRequest(memory=MEMORY))).outcome == "committed"


async def test_another_project_does_not_take_the_place_of_the_first(engine: Engine, home: Path) -> None:
    for project in ("app", "other"):
        write(home / project / "MEMORY.md", project.encode())
        receipt = await export(engine, WorkingIn(home, project), ExportRequest(memory=MEMORY))
        assert receipt.outcome == "committed"
    assert receipt.warnings == []
    manifest = await engine.repository.manifest(MEMORY, receipt.snapshot or "")
    hints = {root.name: root.hint for root in manifest.roots if root.layout == "three-tier"}
    assert hints == {"project": "~/app", "project-2": "~/other"}


async def test_a_limit_is_no_guard(engine: Engine, home: Path) -> None:
    head = (await exported(engine, home)).snapshot
    write(home / ".claude-mem/modes/more.json", b"[]")
    small = replace(engine, limits=Limits(bytes=1000))
    receipt = await exported(small, home, force=True, allow=REASONS)
    assert receipt.reason is not None
    assert (receipt.outcome, receipt.reason.code, receipt.head) == ("rejected", "limit-bytes", head)


def test_the_command_line_says_how_to_allow_it(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sidecar.cli import main

    store = tmp_path / "store"
    words = ["export", MEMORY, "--sandbox", f"local:{home}"]
    assert run_cli(*words, store=store).code == 0
    SPOILED["shrunk"](home)
    assert main([*words, f"--store=file:{store}"]) == 3
    assert "To let this be next time: --allow shrunk" in capsys.readouterr().out
    wrong = run_cli(*words, "--allow", "shrunken", store=store)
    assert (wrong.code, wrong.error) == (2, "unknown-reason")
    assert run_cli(*words, "--allow", "empty", store=store).code == 3
    for verb in ("log", "show"):
        latest = [run_cli("log", MEMORY, store=store).document["snapshots"][0]["snapshot"]] if verb == "show" else []
        assert main([verb, MEMORY, *latest, f"--store=file:{store}"]) == 0
        assert "shrunk: " in capsys.readouterr().out
    assert run_cli(*words, "--allow", "shrunk", store=store).code == 0
    for verb in ("log", "show"):
        assert main([verb, MEMORY, f"--store=file:{store}"]) == 0
        assert "shrunk: " not in capsys.readouterr().out, "it is the head, and nothing is against it any more"


def test_the_service_takes_the_same_words(home: Path, tmp_path: Path) -> None:
    limits = '[limits.memories."small/*"]\nbytes = 100\n[limits.memories."trimmed/*"]\nbytes = 200000\nover = "trim"\n'
    with serving(f"file:{tmp_path / 'store'}", tmp_path / "log", more=limits) as running:
        sandbox = f"local:{home}"
        over = running.export("small/a", sandbox).json()
        assert (over["outcome"], over["reason"]["code"], over["snapshot"]) == ("rejected", "limit-bytes", None)
        trimmed = running.export("trimmed/a", sandbox).json()
        forget_caches(home)  # as if that had been another sandbox
        assert (trimmed["outcome"], trimmed["dropped_files"]) == ("committed", 1)
        assert trimmed["dropped"][0]["path"] == "claude-mem/corpora/large.json"
        assert running.export(MEMORY, sandbox).json()["outcome"] == "committed"
        SPOILED["shrunk"](home)
        assert running.export(MEMORY, sandbox).json()["reason"]["code"] == "shrunk"
        wrong = running.export(MEMORY, sandbox, allow=["shrank"])
        assert (wrong.status_code, wrong.json()["code"]) == (400, "unknown-reason")
        assert "shrunk" in wrong.json()["hint"]
        assert running.export(MEMORY, sandbox, allow=["shrunk"]).json()["outcome"] == "committed"
