"""A restore never destroys what no snapshot has: it leaves it, saves it first or sets it aside, and says which."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.heads import rollback
from sidecar.engine.reviews import accept
from sidecar.errors import StoreFull
from sidecar.ids import MemoryKeys
from sidecar.policy.limits import Limits
from sidecar.policy.privacy import Privacy
from sidecar.receipts import ExportReceipt, RestoreReceipt
from sidecar.store.repository import Repository
from tests.parts.homes import claude_mem_home, observe, titles, tree, without_cache, write
from tests.parts.memories import (
    LARGE,
    Box,
    Hook,
    Name,
    Provider,
    engine_on,
    grow,
    grow_large,
    manifests_of,
    plain_home,
    shell_tools,
)

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "conductor"
everywhere = pytest.mark.parametrize(
    "provider", ["local", "e2b", pytest.param("daytona", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture(params=["local"])
def provider(request: pytest.FixtureRequest, open_provider: Callable[[Name], Provider]) -> Provider:
    return open_provider(request.param)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_on(f"file:{tmp_path / 'store'}")


async def _export(engine: Engine, box: Box, memory: str = MEMORY, **asked: Any) -> ExportReceipt:
    return await export(engine, box.open(), ExportRequest(memory=memory, **asked))


async def _committed(engine: Engine, box: Box, memory: str = MEMORY, **asked: Any) -> str:
    receipt = await _export(engine, box, memory, **asked)
    assert receipt.outcome == "committed", receipt
    return str(receipt.snapshot)


async def _restore(
    engine: Engine, box: Box, memory: str = MEMORY, before: Hook | None = None, **asked: Any
) -> RestoreReceipt:
    return await restore(engine, box.open(before=before), RestoreRequest(memory=memory, **asked))


async def _complete(engine: Engine, box: Box, memory: str = MEMORY, **asked: Any) -> RestoreReceipt:
    receipt = await _restore(engine, box, memory, **asked)
    assert receipt.outcome == "complete", receipt
    return receipt


async def _head(engine: Engine, memory: str = MEMORY) -> str:
    return (await engine.repository.head(memory)).snapshot


class _FullStore:
    """A store that has room for packs, and none for the manifest that makes a snapshot of them."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def swap(self, key: str, data: bytes, *, expected: str | None) -> Any:
        raise StoreFull("there is no room for it")


def _full(engine: Engine) -> Engine:
    return replace(engine, repository=Repository(_FullStore(engine.repository.store)))


def _spent(receipt: RestoreReceipt) -> dict[str, int]:
    return {kind: count for kind, count in receipt.trips.items() if kind != "control"}


USUAL = {"upload": 1, "command": 1}


async def _two(engine: Engine, provider: Provider) -> tuple[Box, str, str]:
    """A sandbox that holds the older of two snapshots; the newer one is the head."""
    first, box = provider.box(), provider.box()
    plain_home(first.home)
    older = await _committed(engine, first)
    await _complete(engine, box)
    grow(first.home, "by another")
    newer = await _committed(engine, first)
    return box, older, newer


def _change(home: Path) -> None:
    """What an agent and its worker write after the last export."""
    observe(home, 3, "late summary")
    with (home / "MEMORY.md").open("ab") as file:
        file.write(b"written late\n")
    write(home / "memory/new.md", b"a new note")


def _has_changes(home: Path) -> bool:
    late = [title for title in titles(home) if "late summary" in title]
    note, text = home / "memory/new.md", (home / "MEMORY.md").read_bytes()
    return len(late) == 3 and note.exists() and text.endswith(b"written late\n")


async def _holds_changes(engine: Engine, provider: Provider, snapshot: str | None, memory: str = MEMORY) -> bool:
    """Whether a snapshot has what ``_change`` wrote."""
    box = provider.box()
    await _complete(engine, box, memory, snapshot=str(snapshot))
    return _has_changes(box.home)


# A sandbox that is ahead


@everywhere
async def test_a_sandbox_that_is_ahead_of_the_head_is_left_as_it_is(engine: Engine, provider: Provider) -> None:
    first, box = provider.box(), provider.box()
    plain_home(first.home)
    head = await _committed(engine, first)
    await _complete(engine, box)
    _change(box.home)
    before = without_cache(tree(box.home))
    receipt = await _complete(engine, box)
    assert (receipt.kept, receipt.snapshot, receipt.saved_first, receipt.set_aside) == (True, head, None, None)
    assert without_cache(tree(box.home)) == before
    assert [warning.partition(": ")[2] for warning in receipt.warnings] == [
        "claude-mem/claude-mem.db, project/MEMORY.md, project/memory/new.md."
    ]
    assert _spent(receipt) == USUAL and receipt.packed_bytes == 0
    saved = await _committed(engine, box)
    assert await _holds_changes(engine, provider, saved)
    assert await box.is_clean()


@everywhere
async def test_a_sandbox_that_holds_the_head_and_nothing_more_is_left_as_it_is(
    engine: Engine, provider: Provider
) -> None:
    box = provider.box()
    plain_home(box.home)
    head = await _committed(engine, box)
    before = without_cache(tree(box.home))
    receipt = await _complete(engine, box)
    assert (receipt.kept, receipt.snapshot, receipt.warnings) == (True, head, [])
    assert receipt.files == len([one for one in before.values() if one[0] != "dir"])
    assert without_cache(tree(box.home)) == before
    assert _spent(receipt) == USUAL


async def test_a_note_that_was_deleted_stays_deleted(engine: Engine, provider: Provider) -> None:
    box = provider.box()
    plain_home(box.home)
    await _committed(engine, box)
    next((box.home / "memory").iterdir()).unlink()
    assert (await _complete(engine, box)).kept
    assert list((box.home / "memory").iterdir()) == []


@pytest.mark.parametrize("how", ["folder", "files", "all", "home"])
async def test_a_sandbox_whose_memory_was_wiped_is_restored(engine: Engine, provider: Provider, how: str) -> None:
    box = provider.box()
    plain_home(box.home)
    await _committed(engine, box)
    before = without_cache(tree(box.home))
    if how in ("folder", "home"):
        shutil.rmtree(box.home / ".claude-mem")
    if how in ("files", "home"):
        shutil.rmtree(box.home / "memory")
        (box.home / "MEMORY.md").unlink()
    if how == "all":
        for path in (box.home / ".claude-mem").rglob("*"):
            path.unlink() if path.is_file() else None
    receipt = await _complete(engine, box)
    assert not receipt.kept and receipt.saved_first is None
    assert without_cache(tree(box.home)) == before


@pytest.mark.parametrize("how", ["gone", "another"])
async def test_a_sandbox_that_lost_its_database_is_restored(engine: Engine, provider: Provider, how: str) -> None:
    """Somebody removed it, and perhaps its worker began a new one: that is no memory that grew."""
    box = provider.box()
    plain_home(box.home, rows=2000)
    await _committed(engine, box)
    wanted = titles(box.home)
    for path in (box.home / ".claude-mem").glob("claude-mem.db*"):
        path.unlink()
    write(box.home / ".claude-mem/modes/new.json", b"{}")
    if how == "another":
        observe(box.home, 2, "begun anew")
    receipt = await _complete(engine, box)
    assert not receipt.kept and titles(box.home) == wanted
    other = provider.box()
    await _complete(engine, other, snapshot=str(receipt.saved_first))
    assert (other.home / ".claude-mem/modes/new.json").exists()
    assert how == "gone" or titles(other.home) == ["begun anew 0", "begun anew 1"]


async def test_an_export_that_never_reached_the_store_is_not_taken_for_saved(
    engine: Engine, provider: Provider
) -> None:
    """The sandbox has noted a snapshot that there is not: all that it knows of it is unsaved."""
    box, _, newer = await _two(engine, provider)
    _change(box.home)
    with pytest.raises(StoreFull):
        await _export(_full(engine), box)
    assert len(await manifests_of(engine, MEMORY)) == 2
    receipt = await _complete(engine, box)
    assert receipt.snapshot == newer and await _holds_changes(engine, provider, receipt.saved_first)


async def test_the_same_where_the_sandbox_holds_the_head(engine: Engine, provider: Provider) -> None:
    box = provider.box()
    plain_home(box.home)
    head = await _committed(engine, box)
    _change(box.home)
    with pytest.raises(StoreFull):
        await _export(_full(engine), box)
    receipt = await _complete(engine, box)
    assert (receipt.kept, receipt.snapshot) == (True, head) and _has_changes(box.home)
    assert await _holds_changes(engine, provider, await _committed(engine, box))


async def test_a_head_that_the_store_lost_is_kept_in_the_sandbox_that_has_it(
    engine: Engine, provider: Provider
) -> None:
    box = provider.box()
    plain_home(box.home)
    older = await _committed(engine, box)
    _change(box.home)
    head = await _committed(engine, box)
    (manifest,) = [one for one in await manifests_of(engine, MEMORY) if one.snapshot == head]
    await engine.repository.store.delete(
        [MemoryKeys.of(MEMORY).pack(pack.id, pack.codec) for pack in manifest.packs[-1:]]
    )
    receipt = await _complete(engine, box)
    assert (receipt.kept, receipt.snapshot, receipt.wanted) == (True, head, "") and _has_changes(box.home)
    assert "still has it" in receipt.warnings[0]
    other = await _complete(engine, provider.box())
    assert (other.kept, other.snapshot, other.wanted) == (False, older, head)
    receipt = await _complete(engine, box, snapshot=older)
    assert await _holds_changes(engine, provider, receipt.saved_first), "the damaged snapshot does not count as one"


# Saved first


@everywhere
async def test_what_is_not_saved_is_exported_before_another_head_takes_its_place(
    engine: Engine, provider: Provider
) -> None:
    box, older, newer = await _two(engine, provider)
    _change(box.home)
    provider.clear()
    receipt = await _complete(engine, box)
    assert _spent(receipt) == {"upload": 1, "command": 3} and provider.asked().get("upload") == 1
    assert (receipt.kept, receipt.snapshot, receipt.saved_first_memory) == (False, newer, "")
    assert any("by another" in title for title in titles(box.home)) and not (box.home / "memory/new.md").exists()
    assert await _head(engine) == newer
    (saved,) = [one for one in await manifests_of(engine, MEMORY) if one.snapshot == receipt.saved_first]
    assert (saved.origin, saved.parent, saved.rejected) == ("saved-first", older, "")
    assert receipt.packed_bytes > 0 and receipt.set_aside is None
    assert [str(receipt.saved_first) in warning for warning in receipt.warnings] == [True]
    assert await _holds_changes(engine, provider, receipt.saved_first)
    assert await box.is_clean()
    assert (await _complete(engine, box)).kept
    grow(box.home)
    await _committed(engine, box)


@everywhere
async def test_an_older_snapshot_is_restored_over_what_is_not_saved(engine: Engine, provider: Provider) -> None:
    box = provider.box()
    plain_home(box.home)
    older = await _committed(engine, box)
    grow(box.home)
    head = await _committed(engine, box)
    _change(box.home)
    receipt = await _complete(engine, box, snapshot=older)
    assert receipt.snapshot == older and not _has_changes(box.home)
    assert await _holds_changes(engine, provider, receipt.saved_first)
    assert await _head(engine) == head
    provider.clear()
    again = await _complete(engine, box, snapshot=head)
    assert (again.saved_first, again.set_aside, again.warnings) == (None, None, [])
    assert _spent(again) == USUAL


@everywhere
async def test_what_is_saved_costs_nothing_more(engine: Engine, provider: Provider) -> None:
    box, older, newer = await _two(engine, provider)
    for snapshot in ("latest", older, newer, older):
        receipt = await _complete(engine, box, snapshot=snapshot)
        assert (receipt.saved_first, receipt.set_aside, receipt.kept) == (None, None, False)
        assert _spent(receipt) == USUAL
    assert len(await manifests_of(engine, MEMORY)) == 2


async def test_what_was_only_touched_is_saved_already(engine: Engine, provider: Provider) -> None:
    """A file with another time, and a database whose log was worked into it."""
    box, older, _ = await _two(engine, provider)
    await _complete(engine, box)
    database = sqlite3.connect(box.home / ".claude-mem/claude-mem.db")
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("INSERT INTO observations(title, narrative) VALUES ('in the log', 'alpha')")
    database.commit()
    head = await _committed(engine, box)
    database.close()
    assert not (box.home / ".claude-mem/claude-mem.db-wal").exists()
    os.utime(box.home / "MEMORY.md")
    assert (await _complete(engine, box)).warnings == []
    receipt = await _complete(engine, box, snapshot=older)
    assert (receipt.saved_first, receipt.set_aside, receipt.warnings) == (None, None, []) and _spent(receipt) == USUAL
    await _complete(engine, box, snapshot=head)
    (box.home / "MEMORY.md").write_bytes(b"L" + (box.home / "MEMORY.md").read_bytes()[1:])
    assert (await _complete(engine, box, snapshot=older)).saved_first, "of the same size, but not the same"


@everywhere
async def test_what_is_large_and_not_saved_costs_a_download_too(engine: Engine, provider: Provider) -> None:
    box, _, newer = await _two(engine, provider)
    grow_large(box.home)
    receipt = await _complete(engine, box)
    assert receipt.snapshot == newer
    assert _spent(receipt) == {"upload": 1, "command": 3, "download": 1}
    other = provider.box()
    await _complete(engine, other, snapshot=str(receipt.saved_first))
    assert (other.home / "memory/large-1.md").stat().st_size == LARGE
    assert await box.is_clean()


async def test_after_a_rollback_the_earlier_snapshot_comes_back(engine: Engine, provider: Provider) -> None:
    box = provider.box()
    plain_home(box.home)
    older = await _committed(engine, box)
    _change(box.home)
    newer = await _committed(engine, box)
    await rollback(engine.repository, MEMORY, older)
    receipt = await _complete(engine, box)
    assert (receipt.snapshot, receipt.kept, receipt.saved_first) == (older, False, None)
    assert not _has_changes(box.home) and await _holds_changes(engine, provider, newer)


@pytest.mark.parametrize("tools", [False, True], ids=["python", "shell"])
@everywhere
async def test_what_a_guard_held_back_stays_in_its_sandbox_until_it_is_accepted(
    engine: Engine, provider: Provider, tools: bool, tmp_path: Path
) -> None:
    """Else a guard would never let go: what it refused would be gone before it could come again."""
    box = provider.box(tools=shell_tools(tmp_path / "tools") if tools else None)
    plain_home(box.home)
    for number in range(30):
        write(box.home / f"memory/note-{number}.md", b"to be cleaned up\n" * 500)
    head = await _committed(engine, box)
    for number in range(29):
        (box.home / f"memory/note-{number}.md").unlink()
    for conversation in ("c1", "c2"):
        write(box.home / "memory/new.md", conversation.encode())
        rejected = await _export(engine, box, conversation=conversation)
        assert (rejected.outcome, rejected.head) == ("rejected", head)
        assert rejected.reason is not None and rejected.reason.code == "shrunk"
        receipt = await _complete(engine, box)
        assert (receipt.snapshot, receipt.kept, receipt.saved_first) == (head, True, None)
        assert any(str(rejected.snapshot) in warning for warning in receipt.warnings)
        assert (box.home / "memory/new.md").read_text() == conversation
        assert not (box.home / "memory/note-7.md").exists()
    write(box.home / "memory/new.md", b"c3")
    accepted = await _export(engine, box, conversation="c3")
    assert accepted.outcome == "committed" and accepted.accepted is not None


@pytest.mark.parametrize("tools", [False, True], ids=["python", "shell"])
@pytest.mark.parametrize("lost", ["a folder", "a database"])
@pytest.mark.parametrize("times", [1, 3])
async def test_a_sandbox_that_lost_its_memory_gets_it_back_also_after_a_refused_export(
    engine: Engine, provider: Provider, tools: bool, lost: str, times: int, tmp_path: Path
) -> None:
    """Nobody starts with amnesia by accident; and what is there and in no snapshot is saved first."""
    box, other = provider.box(tools=shell_tools(tmp_path / "tools") if tools else None), provider.box()
    plain_home(box.home)
    head = await _committed(engine, box)
    if lost == "a folder":
        shutil.rmtree(box.home / ".claude-mem")
    else:
        (box.home / ".claude-mem/claude-mem.db").unlink()
    for number in range(times):
        write(box.home / "memory/new.md", b"%d" % number)
        assert (await _export(engine, box, conversation="c1")).outcome == "rejected"
    write(box.home / "memory/late.md", b"late")
    receipt = await _complete(engine, box)
    assert (receipt.snapshot, receipt.kept) == (head, False)
    assert (box.home / ".claude-mem/claude-mem.db").exists() and not (box.home / "memory/late.md").exists()
    await _complete(engine, other, snapshot=str(receipt.saved_first))
    assert (other.home / "memory/late.md").read_bytes() == b"late"


@pytest.mark.parametrize("tools", [False, True], ids=["python", "shell"])
async def test_an_export_refused_under_a_mistyped_id_does_not_make_that_memory_live_here(
    engine: Engine, provider: Provider, tools: bool, tmp_path: Path
) -> None:
    box, other = provider.box(tools=shell_tools(tmp_path / "tools") if tools else None), provider.box()
    plain_home(box.home)
    head = await _committed(engine, box)
    grow(box.home)
    mistyped = await _export(engine, box, "conductro")
    assert mistyped.reason is not None and mistyped.reason.code == "other-memory"
    kept = await _complete(engine, box)
    assert (kept.snapshot, kept.kept) == (head, True)

    await _complete(engine, other)
    grow(other.home, "elsewhere")
    await _committed(engine, other)
    receipt = await _complete(engine, box)
    assert receipt.saved_first is not None and receipt.saved_first_memory == ""


async def test_a_memory_that_was_accepted_after_its_refusal_is_exported_from_there(
    engine: Engine, provider: Provider
) -> None:
    box = provider.box()
    plain_home(box.home)
    await _committed(engine, box)
    renamed = await _export(engine, box, "renamed")
    assert renamed.reason is not None and renamed.reason.code == "other-memory"
    await accept(engine.repository, "renamed", str(renamed.snapshot))
    grow(box.home)
    await _committed(engine, box, "renamed")


@everywhere
async def test_what_a_guard_held_back_is_replaced_when_a_person_or_another_moves_the_head(
    engine: Engine, provider: Provider
) -> None:
    box, other = provider.box(), provider.box()
    plain_home(box.home)
    older = await _committed(engine, box)
    grow(box.home)
    newer = await _committed(engine, box)
    for moved in ("by a rollback", "by another"):
        (box.home / ".claude-mem/claude-mem.db").unlink()
        rejected = await _export(engine, box)
        assert rejected.outcome == "rejected"
        write(box.home / "memory/late.md", b"after that")
        if moved == "by a rollback":
            await rollback(engine.repository, MEMORY, older)
            expected = older
        else:
            await _complete(engine, other)
            grow(other.home)
            expected = await _committed(engine, other)
        receipt = await _complete(engine, box)
        assert (receipt.snapshot, receipt.kept) == (expected, False), moved
        assert (box.home / ".claude-mem/claude-mem.db").exists() and not (box.home / "memory/late.md").exists()
        saved = provider.box()
        await _complete(engine, saved, snapshot=str(receipt.saved_first))
        assert (saved.home / "memory/late.md").read_bytes() == b"after that"
    assert newer


@everywhere
async def test_another_memory_in_the_same_folders_is_saved_as_that_memory(engine: Engine, provider: Provider) -> None:
    first, box = provider.box(), provider.box()
    plain_home(first.home)
    await _committed(engine, first, "acme/other")
    plain_home(box.home, rows=7)
    head = await _committed(engine, box, MEMORY)
    _change(box.home)
    receipt = await _complete(engine, box, "acme/other")
    assert (receipt.saved_first_memory, receipt.set_aside) == (MEMORY, None)
    assert any(f"{receipt.saved_first} of {MEMORY}" in warning for warning in receipt.warnings)
    assert await _head(engine) == head and titles(box.home) == titles(first.home)
    assert await _holds_changes(engine, provider, receipt.saved_first, MEMORY)
    back = await _complete(engine, box, MEMORY)
    assert (back.kept, back.saved_first) == (False, None), "what is there now is the other one's"
    assert len(titles(box.home)) == 7


async def test_another_memory_that_is_saved_is_replaced_without_ado(engine: Engine, provider: Provider) -> None:
    first, box = provider.box(), provider.box()
    plain_home(first.home)
    await _committed(engine, first, "acme/other")
    plain_home(box.home, rows=7)
    await _committed(engine, box, MEMORY)
    receipt = await _complete(engine, box, "acme/other")
    assert (receipt.saved_first, receipt.set_aside, receipt.warnings) == (None, None, [])
    assert _spent(receipt) == {"upload": 1, "command": 2}, "the sandbox cannot know whether that export was stored"
    receipt = await _complete(engine, box, MEMORY)
    assert _spent(receipt) == USUAL, "what was restored was stored"


async def test_another_memory_whose_export_never_reached_the_store_is_saved(engine: Engine, provider: Provider) -> None:
    first, box = provider.box(), provider.box()
    plain_home(first.home)
    await _committed(engine, first, "acme/other")
    plain_home(box.home, rows=7)
    await _committed(engine, box, MEMORY)
    _change(box.home)
    with pytest.raises(StoreFull):
        await _export(_full(engine), box)
    receipt = await _complete(engine, box, "acme/other")
    assert await _holds_changes(engine, provider, receipt.saved_first, MEMORY)


@pytest.mark.parametrize("what", ["limit", "credentials", "store"])
async def test_what_cannot_be_saved_is_not_replaced(engine: Engine, provider: Provider, what: str) -> None:
    box, older, newer = await _two(engine, provider)
    _change(box.home)
    token = "ghp_" + "4xB9" * 9
    write(box.home / "memory/token.md", f"token: {token}".encode())
    unable = {
        "limit": replace(engine, limits=Limits(bytes=1000)),
        "credentials": replace(engine, privacy=Privacy(credentials="refuse")),
        "store": _full(engine),
    }[what]
    before = without_cache(tree(box.home))
    receipt = await _restore(unable, box)
    assert (receipt.outcome, receipt.saved_first) == ("incomplete", None)
    assert receipt.reason is not None and receipt.reason.code == "unsaved"
    assert {"limit": "limit-bytes", "credentials": "credentials", "store": "no room"}[what] in receipt.reason.message
    assert token not in json.dumps(receipt.as_dict())
    assert without_cache(tree(box.home)) == before
    assert await box.is_clean()
    assert {one.snapshot for one in await manifests_of(engine, MEMORY)} == {older, newer}
    receipt = await _complete(engine, box)
    assert await _holds_changes(engine, provider, receipt.saved_first), "once it can be, it is saved"


@everywhere
async def test_an_index_that_cannot_be_read_counts_as_unsaved(engine: Engine, provider: Provider) -> None:
    box, older, newer = await _two(engine, provider)
    (index,) = (box.home / ".cache/memory-sidecar/conductor").glob("index-*")
    index.write_bytes(b"not an index")
    _change(box.home)
    receipt = await _complete(engine, box)
    assert receipt.snapshot == newer and receipt.set_aside is None
    assert await _holds_changes(engine, provider, receipt.saved_first)
    (saved,) = [one for one in await manifests_of(engine, MEMORY) if one.snapshot == receipt.saved_first]
    assert (len(saved.packs), saved.packs[0].kind, saved.parent) == (1, "full", older)


async def test_an_index_that_cannot_be_read_does_not_cost_the_one_who_is_ahead(
    engine: Engine, provider: Provider
) -> None:
    box = provider.box()
    plain_home(box.home)
    await _committed(engine, box)
    for index in (box.home / ".cache/memory-sidecar/conductor").glob("index-*"):
        index.write_bytes(b"not an index")
    _change(box.home)
    assert (await _complete(engine, box)).kept
    assert _has_changes(box.home)


async def test_what_is_written_while_it_is_saved_is_set_aside(engine: Engine, provider: Provider) -> None:
    box, _, newer = await _two(engine, provider)
    _change(box.home)
    asked: list[str] = []

    def write_late(request: dict[str, Any]) -> None:
        asked.append(request["do"])
        if len(asked) == 3:
            write(box.home / "memory/later.md", b"after the export")

    receipt = await _complete(engine, box, before=write_late)
    assert asked == ["restore", "export", "restore"]
    assert receipt.snapshot == newer and receipt.set_aside is not None
    assert receipt.set_aside.files == 1
    assert (Path(receipt.set_aside.path) / "project/memory/later.md").read_bytes() == b"after the export"


async def test_what_limits_leave_out_of_the_snapshot_is_set_aside(engine: Engine, provider: Provider) -> None:
    box, _, newer = await _two(engine, provider)
    write(box.home / ".claude-mem/corpora/large.json", os.urandom(200_000))
    trimming = replace(engine, limits=Limits(file_bytes=150_000, over="trim"))
    receipt = await _complete(trimming, box)
    assert receipt.snapshot == newer and receipt.set_aside is not None
    kept = Path(receipt.set_aside.path) / "claude-mem/corpora/large.json"
    assert kept.stat().st_size == 200_000


async def test_seed_saves_nothing_and_replaces_nothing(engine: Engine, provider: Provider) -> None:
    box, _, _ = await _two(engine, provider)
    _change(box.home)
    before = without_cache(tree(box.home))
    receipt = await _complete(engine, box, mode="seed")
    assert (receipt.kept, receipt.saved_first, receipt.set_aside) == (False, None, None)
    now = without_cache(tree(box.home))
    assert {name: now.get(name) for name in before} == before


# Set aside


@everywhere
async def test_files_that_came_with_a_sandbox_are_set_aside(engine: Engine, provider: Provider) -> None:
    first, box = provider.box(), provider.box()
    plain_home(first.home)
    head = await _committed(engine, first)
    plain_home(box.home, rows=5)
    write(box.home / "memory/of the template.md", b"it came with the sandbox", 0o640)
    (box.home / "memory/link.md").symlink_to("of the template.md")
    database = (box.home / ".claude-mem/claude-mem.db").read_bytes()
    note = tree(box.home)[b"memory/of the template.md"]
    receipt = await _complete(engine, box)
    assert (receipt.snapshot, receipt.kept, receipt.saved_first) == (head, False, None)
    assert _spent(receipt) == USUAL and len(await manifests_of(engine, MEMORY)) == 1
    assert titles(box.home) == titles(first.home) and not (box.home / "memory/of the template.md").exists()
    aside = receipt.set_aside
    assert aside is not None and aside.path.startswith(f"{box.home.resolve()}/.cache/memory-sidecar/set-aside/2")
    kept = tree(Path(aside.path))
    assert kept[b"project/memory/of the template.md"] == note
    assert kept[b"project/memory/link.md"][3] == "of the template.md"
    assert (Path(aside.path) / "claude-mem/claude-mem.db").read_bytes() == database
    assert aside.files == len([one for one in kept.values() if one[0] != "dir"])
    assert aside.bytes == sum(path.lstat().st_size for path in Path(aside.path).rglob("*") if not path.is_dir())
    assert await box.is_clean()
    grow(box.home)
    await _committed(engine, box)
    manifest = max(await manifests_of(engine, MEMORY), key=lambda one: one.snapshot)
    assert manifest.files < 10, "what is set aside is no memory"


@everywhere
async def test_a_template_with_a_memory_of_its_own_costs_what_an_empty_one_does(
    engine: Engine, provider: Provider
) -> None:
    first, empty, template = provider.box(), provider.box(), provider.box()
    plain_home(first.home)
    await _committed(engine, first)
    shutil.rmtree(claude_mem_home(template.home, rows=0) / "memory", ignore_errors=True)
    receipts = [await _complete(engine, box) for box in (empty, template)]
    assert receipts[0].set_aside is None and receipts[1].set_aside is not None
    for receipt in receipts:
        assert (receipt.saved_first, receipt.kept, receipt.packed_bytes) == (None, False, 0)
    assert receipts[0].trips == receipts[1].trips and receipts[0].round_trips == receipts[1].round_trips
    assert receipts[1].transferred_bytes - receipts[0].transferred_bytes < 500, "no more than where it is kept"
    assert len(await manifests_of(engine, MEMORY)) == 1


async def test_a_sandbox_that_is_empty_has_nothing_set_aside(engine: Engine, provider: Provider) -> None:
    first, box = provider.box(), provider.box()
    plain_home(first.home)
    await _committed(engine, first)
    write(box.home / "notes.txt", b"not memory")
    receipt = await _complete(engine, box)
    assert receipt.set_aside is None and not (box.home / ".cache/memory-sidecar/set-aside").exists()
    assert (box.home / "notes.txt").exists()


async def test_a_database_is_set_aside_with_its_log(engine: Engine, provider: Provider) -> None:
    first, box = provider.box(), provider.box()
    plain_home(first.home)
    await _committed(engine, first)
    data = box.home / ".claude-mem"
    data.mkdir()
    if (pid := os.fork()) == 0:
        connection = sqlite3.connect(data / "claude-mem.db")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE rows (text)")
        connection.execute("INSERT INTO rows VALUES ('only in the log')")
        connection.commit()
        os._exit(0)
    os.waitpid(pid, 0)
    receipt = await _complete(engine, box)
    assert receipt.set_aside is not None
    kept = sqlite3.connect(Path(receipt.set_aside.path) / "claude-mem/claude-mem.db")
    assert kept.execute("SELECT text FROM rows").fetchall() == [("only in the log",)]
    kept.close()
    assert titles(box.home) == titles(first.home)


async def test_only_so_much_is_kept_aside(engine: Engine, provider: Provider) -> None:
    first, box = provider.box(), provider.box()
    plain_home(first.home)
    await _committed(engine, first)
    small = replace(engine, set_aside_bytes=10_000)
    paths = []
    for number in range(8):
        shutil.rmtree(box.home / ".cache/memory-sidecar/conductor", ignore_errors=True)
        for name in ("memory", ".claude-mem"):
            shutil.rmtree(box.home / name, ignore_errors=True)
        write(box.home / "MEMORY.md", b"%d" % number * (1000 if number < 7 else 9500))
        receipt = await _complete(small, box)
        assert receipt.set_aside is not None
        paths.append(Path(receipt.set_aside.path))
        assert (paths[-1] / "project/MEMORY.md").read_bytes().startswith(b"%d" % number)
        if number == 6:
            assert [path.exists() for path in paths] == [False, False, True, True, True, True, True]
    assert [path.exists() for path in paths] == [False] * 7 + [True], "so much room is only for the newest"


async def test_what_was_just_set_aside_stays_also_when_the_clock_was_put_back(
    engine: Engine, provider: Provider
) -> None:
    first, box = provider.box(), provider.box()
    plain_home(first.home)
    await _committed(engine, first)
    kept = [box.home / f".cache/memory-sidecar/set-aside/29990101T00000{number}Z-x" for number in range(5)]
    for folder in kept:
        write(folder / "project/MEMORY.md", b"of a clock that ran ahead")
    write(box.home / "MEMORY.md", b"written before anything was restored here")
    receipt = await _complete(engine, box)
    assert receipt.set_aside is not None
    ours = Path(receipt.set_aside.path) / "project/MEMORY.md"
    assert ours.read_bytes() == b"written before anything was restored here"
    assert [folder.exists() for folder in kept] == [False, True, True, True, True]


async def test_what_is_too_much_to_set_aside_is_not_replaced(engine: Engine, provider: Provider) -> None:
    first, box = provider.box(), provider.box()
    plain_home(first.home)
    await _committed(engine, first)
    write(box.home / "MEMORY.md", b"x" * 20_000)
    before = without_cache(tree(box.home))
    small = replace(engine, set_aside_bytes=10_000)
    receipt = await _restore(small, box)
    assert receipt.outcome == "incomplete" and receipt.reason is not None
    assert receipt.reason.code == "set-aside-full" and "10000 bytes" in receipt.reason.message
    assert without_cache(tree(box.home)) == before and await box.is_clean()
    assert not list((box.home / ".cache/memory-sidecar").glob("set-aside/*"))
    assert (await _complete(small, box, discard=True)).set_aside is None


async def test_a_project_on_another_file_system_is_copied_aside(
    engine: Engine, provider: Provider, mount: Callable[..., Path], tmp_path: Path
) -> None:
    first, box = provider.box(), provider.box()
    plain_home(first.home)
    await _committed(engine, first)
    apart = tmp_path / "apart"
    apart.mkdir()
    mount(apart, size="4m")
    write(apart / "MEMORY.md", b"of the template", 0o640)
    (apart / "memory").mkdir()
    (apart / "memory/link.md").symlink_to("../MEMORY.md")
    note = tree(apart)[b"MEMORY.md"]
    receipt = await _complete(engine, box, projects=(str(apart),))
    assert receipt.set_aside is not None and receipt.set_aside.files == 2
    assert tree(Path(receipt.set_aside.path))[b"project/MEMORY.md"] == note
    assert os.readlink(Path(receipt.set_aside.path) / "project/memory/link.md") == "../MEMORY.md"
    assert (apart / "MEMORY.md").read_bytes() == (first.home / "MEMORY.md").read_bytes()


# Discard


@everywhere
async def test_discard_replaces_everything_and_says_what_went(engine: Engine, provider: Provider) -> None:
    box, _, newer = await _two(engine, provider)
    _change(box.home)
    receipt = await _complete(engine, box, discard=True)
    assert (receipt.snapshot, receipt.saved_first, receipt.set_aside) == (newer, None, None)
    assert receipt.warnings == [
        "What was here and in no snapshot is gone, as was asked for: "
        "claude-mem/claude-mem.db, project/MEMORY.md, project/memory/new.md."
    ]
    assert _spent(receipt) == USUAL and len(await manifests_of(engine, MEMORY)) == 2
    _change(box.home)
    receipt = await _complete(engine, box, discard=True)
    assert not receipt.kept and not _has_changes(box.home), "not even one that is ahead is kept"
    fresh = provider.box()
    plain_home(fresh.home, rows=2)
    receipt = await _complete(engine, fresh, discard=True)
    assert receipt.set_aside is None and "claude-mem/claude-mem.db" in receipt.warnings[0]
    assert (await _complete(engine, fresh)).warnings == []


async def test_a_diverged_export_that_a_restore_replaces_is_named_once(engine: Engine, provider: Provider) -> None:
    one, two = provider.box(), provider.box()
    claude_mem_home(one.home, rows=5)
    await _committed(engine, one)
    await _complete(engine, two)
    observe(one.home, 1, "first")
    head = await _committed(engine, one)
    observe(two.home, 1, "second")
    beside = await _export(engine, two)
    assert beside.outcome == "diverged"
    receipt = await _complete(engine, two)
    assert (receipt.snapshot, receipt.saved_first) == (head, None)
    assert [warning for warning in receipt.warnings if str(beside.snapshot) in warning] == [
        f"What was exported from here last ({beside.snapshot}) never became the head, and is not here any more:"
        " it stands beside it."
    ]
    assert (await _complete(engine, two)).warnings == []
