"""Nobody starts with amnesia by accident: a sandbox knows whose memory it holds and in which store, and an export that would
continue another store's memory, or a memory under another's id, does not become the head."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.heads import rollback
from sidecar.format.checksums import decode_checksummed, encode_checksummed
from sidecar.ids import STORE_ID, MemoryKeys, build_memory_key
from sidecar.ports import StoredObject
from sidecar.program.notes import LONGEST
from sidecar.receipts import ExportReceipt, RestoreReceipt
from sidecar.store.encryption.given_keys import GivenKeys
from sidecar.store.repository import Repository
from sidecar.wiring import open_repository, open_sandbox, open_store
from tests.parts.homes import memory_tree, write
from tests.parts.keys import BOTH, ENCRYPTED, SIGNED
from tests.parts.memories import Box, Name, Provider, engine_on, grow, plain_home, shell_tools

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY, MISTYPED = "acme/agent-7", "acme/agnet-7"


@pytest.fixture(params=["local", "e2b", pytest.param("daytona", marks=pytest.mark.slow)])
def provider(request: pytest.FixtureRequest, open_provider: Callable[[Name], Provider]) -> Provider:
    return open_provider(request.param)


@pytest.fixture
def local(open_provider: Callable[[Name], Provider]) -> Provider:
    return open_provider("local")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def engine(store: Path) -> Engine:
    return engine_on(f"file:{store}")


def _filled(provider: Provider, **options: object) -> Box:
    box = provider.box(**options)  # type: ignore[arg-type]
    plain_home(box.home)
    return box


async def _export(engine: Engine, box: Box, memory: str = MEMORY, **asked: object) -> ExportReceipt:
    return await export(engine, box.open(), ExportRequest(memory=memory, **asked))  # type: ignore[arg-type]


async def _committed(engine: Engine, box: Box, memory: str = MEMORY, **asked: object) -> ExportReceipt:
    receipt = await _export(engine, box, memory, **asked)
    assert receipt.outcome == "committed", receipt
    return receipt


async def _refused(engine: Engine, box: Box, code: str, memory: str = MEMORY, **asked: object) -> ExportReceipt:
    """An export that is stored and does not become the head, for this reason."""
    receipt = await _export(engine, box, memory, **asked)
    assert receipt.outcome == "rejected" and receipt.reason is not None and receipt.reason.code == code, receipt
    assert receipt.snapshot is not None and receipt.snapshot != receipt.head
    return receipt


async def _restored(engine: Engine, box: Box, memory: str = MEMORY, **asked: object) -> RestoreReceipt:
    receipt = await restore(engine, box.open(), RestoreRequest(memory=memory, **asked))  # type: ignore[arg-type]
    assert receipt.outcome == "complete", receipt
    return receipt


async def _head(engine: Engine, memory: str = MEMORY) -> str:
    return (await engine.repository.head(memory)).snapshot


def _notes(box: Box, memory: str = MEMORY) -> Path:
    return box.home / ".cache/memory-sidecar" / build_memory_key(memory) / "notes"


def _read_notes(box: Box, memory: str = MEMORY) -> dict[str, object]:
    notes = json.loads(_notes(box, memory).read_text())
    assert isinstance(notes, dict)
    return notes


async def test_a_restore_and_an_export_note_the_store_and_the_memory(provider: Provider, engine: Engine) -> None:
    box, fresh = _filled(provider), provider.box()
    await _committed(engine, box, conversation="c1")
    await _restored(engine, fresh)
    id = (await open_store(engine.repository.store.url).get(STORE_ID)).data.decode()  # type: ignore[union-attr]
    for one in (box, fresh):
        notes = _read_notes(one)
        assert (notes["store"], notes["memory"], notes["sandbox"]) == (id, MEMORY, one.ref)
        assert notes["roots"] == {"claude-mem": f"{one.home}/.claude-mem", "project": str(one.home)}
        assert notes["reader"] is False
    assert _read_notes(box)["conversation"] == "c1"
    assert (await engine.repository.head(MEMORY)).store_id == id


async def test_a_store_that_was_moved_away_is_not_begun_again_without_a_word(
    provider: Provider, engine: Engine, store: Path
) -> None:
    box = _filled(provider)
    first = await _committed(engine, box)
    store.rename(store.with_name("away"))
    grow(box.home)
    refused = await _refused(engine, box, "unknown-lineage")
    assert refused.head is None
    assert refused.reason is not None and "--allow unknown-lineage" in refused.reason.message
    assert str(_read_notes(box)["store"]) in refused.reason.message and f"file:{store}" in refused.reason.message
    assert any("new store was begun" in warning for warning in refused.warnings)
    # Not by repetition either: not unchanged, not changed, not in other conversations.
    await _refused(engine, box, "unknown-lineage")
    for number in range(4):
        grow(box.home, f"later {number}")
        await _refused(engine, box, "unknown-lineage", conversation=f"c{number}")
    shutil.rmtree(store)
    store.with_name("away").rename(store)
    back = await _committed(engine, box)
    assert back.parent == first.snapshot and not any("store" in warning for warning in back.warnings)


async def test_who_says_that_the_other_store_is_right_goes_on_there(
    provider: Provider, engine: Engine, store: Path
) -> None:
    box = _filled(provider)
    await _committed(engine, box)
    store.rename(store.with_name("away"))
    grow(box.home)
    await _refused(engine, box, "unknown-lineage")
    allowed = await _committed(engine, box, allow=("unknown-lineage",))
    assert await _head(engine) == allowed.snapshot
    grow(box.home, "once more")
    assert (await _committed(engine, box)).kind == "delta"


async def test_a_person_can_accept_what_was_refused(local: Provider, engine: Engine, store: Path) -> None:
    box = _filled(local)
    await _committed(engine, box)
    store.rename(store.with_name("away"))
    grow(box.home)
    refused = await _refused(engine, box, "unknown-lineage")
    mistyped = await _refused(engine, box, "other-memory", MISTYPED)
    for memory, snapshot in ((MEMORY, refused.snapshot), (MISTYPED, mistyped.snapshot)):
        assert snapshot is not None
        await rollback(engine.repository, memory, snapshot)
    for memory in (MEMORY, MISTYPED):
        grow(box.home, memory)
        await _committed(engine, box, memory)
    assert _read_notes(box)["store"] == _read_notes(box, MISTYPED)["store"] != ""


async def test_a_mistyped_id_does_not_begin_a_memory(provider: Provider, engine: Engine) -> None:
    box = _filled(provider)
    await _restored_from_another(engine, provider, box)
    grow(box.home)
    refused = await _refused(engine, box, "other-memory", MISTYPED)
    assert refused.reason is not None and repr(MEMORY) in refused.reason.message
    assert await _head(engine, MISTYPED) == ""
    for number in range(4):
        grow(box.home, f"later {number}")
        await _refused(engine, box, "other-memory", MISTYPED, conversation=f"c{number}")
    await _committed(engine, box)
    grow(box.home, "on purpose")
    await _committed(engine, box, MISTYPED, allow=("other-memory",))
    for memory in (MISTYPED, MEMORY):
        grow(box.home, memory)
        await _committed(engine, box, memory)


async def test_a_memory_that_is_called_like_our_own_folders_is_not_overlooked(local: Provider, engine: Engine) -> None:
    box = _filled(local)
    await _committed(engine, box, "work-items")
    grow(box.home)
    await _refused(engine, box, "other-memory", "work-item")


async def _restored_from_another(engine: Engine, provider: Provider, box: Box) -> None:
    source = _filled(provider)
    await _committed(engine, source)
    await _restored(engine, box)


async def test_what_one_memory_left_is_not_exported_as_another_that_was_restored_since(
    provider: Provider, engine: Engine
) -> None:
    other, box = _filled(provider), _filled(provider)
    write(other.home / "MEMORY.md", b"# of another\n")
    await _committed(engine, other, "other")
    await _committed(engine, box)
    await _restored(engine, box, "other")
    grow(box.home)
    head = await _head(engine)
    await _refused(engine, box, "other-memory")
    await _refused(engine, box, "other-memory")
    assert await _head(engine) == head
    await _committed(engine, box, "other")
    await _restored(engine, box)
    grow(box.home, "again")
    await _committed(engine, box)


async def test_memories_in_different_folders_live_side_by_side(provider: Provider, engine: Engine) -> None:
    box = provider.box()
    for name in ("one", "two"):
        write(box.home / name / "MEMORY.md", name.encode())
    for name in ("one", "two", "one", "two"):
        write(box.home / name / "MEMORY.md", os.urandom(20).hex().encode())
        await _committed(engine, box, name, projects=(str(box.home / name),))


async def test_two_projects_may_share_what_belongs_to_both(local: Provider, engine: Engine) -> None:
    box = _filled(local)
    for name in ("one", "two"):
        write(box.home / name / "MEMORY.md", name.encode())
    for name in ("one", "two", "one", "two"):
        write(box.home / name / "MEMORY.md", os.urandom(20).hex().encode())
        await _committed(engine, box, name, projects=(str(box.home / name),))


async def test_a_sandbox_from_a_template_with_our_cache_in_it_is_not_mistaken(
    provider: Provider, engine: Engine, tmp_path: Path
) -> None:
    template = _filled(provider)
    await _committed(engine, template, "template")
    elsewhere = engine_on(f"file:{tmp_path / 'elsewhere'}")
    for number, into in ((1, engine), (2, elsewhere)):
        box = provider.box()
        shutil.copytree(template.home, box.home, dirs_exist_ok=True)
        await _committed(into, box, f"agent-{number}")
        assert _read_notes(box, f"agent-{number}")["sandbox"] == box.ref


async def test_a_folder_from_an_image_is_told_by_its_machine(local: Provider, engine: Engine) -> None:
    box = _filled(local)
    await _committed(engine, box, "image")
    notes = _read_notes(box, "image")
    assert notes["machine"]
    _notes(box, "image").write_text(json.dumps({**notes, "machine": "builder"}))
    await _committed(engine, box)


async def test_a_cache_without_notes_is_taken_up_and_gets_them(provider: Provider, engine: Engine) -> None:
    """A version before this one left a lineage and an index, and heads without the store's id."""
    box = _filled(provider)
    await _committed(engine, box, "other", projects=(str(box.home / "none"),))
    await _committed(engine, box, allow=("other-memory",))
    for path in (box.home / ".cache/memory-sidecar").glob("*/notes"):
        path.unlink()
    await _without_ids(engine.repository)
    grow(box.home)
    receipt = await _committed(engine, box)
    assert receipt.kind == "delta" and receipt.parent and not receipt.warnings, receipt
    assert _read_notes(box)["store"] == (await engine.repository.head(MEMORY)).store_id != ""
    # The notes of the first do not keep the second, which was here before, from going on.
    await _committed(engine, box, "other", projects=(str(box.home / "none"),))


async def _without_ids(repository: Repository) -> None:
    """Make a store what a version before ids left."""
    store = repository.store
    await store.delete([STORE_ID])
    for memory in await repository.memories():
        key = MemoryKeys.of(memory).head
        stored = await store.get(key)
        assert stored is not None
        head = decode_checksummed(stored.data)
        head.pop("store")
        await store.swap(key, encode_checksummed(head), expected=stored.version)


async def test_an_old_store_that_is_only_restored_from_gets_no_id(local: Provider, engine: Engine) -> None:
    box, fresh = _filled(local), local.box()
    await _committed(engine, box)
    await _without_ids(engine.repository)
    await _restored(engine, fresh)
    assert await engine.repository.store.get(STORE_ID) is None and _read_notes(fresh)["store"] == ""
    grow(fresh.home)
    await _committed(engine, fresh)
    assert _read_notes(fresh)["store"] == (await engine.repository.head(MEMORY)).store_id != ""


HOSTILE = {
    "not JSON": b"{",
    "not text": b"\xff\xfe\x00",
    "deep": b"[" * 60_000,
    "large": b" " * (LONGEST + 1),
    "a list": b"[]",
    "other types": b'{"memory": 7, "roots": [], "store": {}, "sandbox": null}',
    "no id": json.dumps({"memory": MEMORY, "roots": {}, "store": "../../etc"}).encode(),
    "a flag": json.dumps({"memory": MEMORY, "roots": {}, "reader": "yes"}).encode(),
    "a root": json.dumps({"memory": MEMORY, "roots": {"project": "../.."}}).encode(),
    "many roots": json.dumps({"memory": MEMORY, "roots": {f"r{n}": "/" for n in range(1000)}}).encode(),
}


@pytest.mark.parametrize("contents", HOSTILE.values(), ids=HOSTILE.keys())
async def test_notes_that_make_no_sense_are_replaced(local: Provider, engine: Engine, contents: bytes) -> None:
    box = _filled(local)
    await _committed(engine, box)
    other = _notes(box, "other")
    other.parent.mkdir(parents=True)
    for notes in (_notes(box), other):
        notes.write_bytes(contents)
    grow(box.home)
    await _committed(engine, box)
    assert _read_notes(box)["memory"] == MEMORY


async def test_notes_that_are_no_file_are_replaced_and_nothing_behind_them_is_touched(
    local: Provider, engine: Engine, tmp_path: Path
) -> None:
    box, secret = _filled(local), tmp_path / "secret"
    secret.write_text(json.dumps({"memory": "secret", "roots": {}}))
    await _committed(engine, box)
    other = _notes(box, "other")
    other.parent.mkdir(parents=True)
    os.mkfifo(other)
    _notes(box).unlink()
    _notes(box).symlink_to(secret)
    grow(box.home)
    async with asyncio.timeout(60):
        await _committed(engine, box)
    assert not _notes(box).is_symlink() and _read_notes(box)["memory"] == MEMORY
    assert json.loads(secret.read_text()) == {"memory": "secret", "roots": {}}


async def test_a_folder_in_the_place_of_notes_is_replaced(local: Provider, engine: Engine) -> None:
    box, fresh = _filled(local), _filled(local)
    await _committed(engine, box)
    await _committed(engine, fresh, "other")
    for one in (box, fresh):
        _notes(one).unlink(missing_ok=True)
        write(_notes(one) / "deeper/file", b"in the way")
    (_notes(fresh, "other").parent / "index-x").mkdir()
    grow(box.home)
    await _committed(engine, box)
    await _restored(engine, fresh)
    assert [_read_notes(one)["memory"] for one in (box, fresh)] == [MEMORY, MEMORY]
    assert (fresh.home / "MEMORY.md").read_bytes() == (box.home / "MEMORY.md").read_bytes()


async def test_an_id_in_notes_cannot_write_to_a_terminal(local: Provider, engine: Engine) -> None:
    box = _filled(local)
    await _committed(engine, box)
    notes = {**_read_notes(box), "memory": "red\x1b[31m\nexport ok"}
    _notes(box).write_text(json.dumps(notes))
    shutil.rmtree(_notes(box, MISTYPED).parent, ignore_errors=True)
    refused = await _refused(engine, box, "other-memory", MISTYPED)
    assert refused.reason is not None and refused.reason.message.isprintable()


async def test_a_sandbox_without_python_keeps_the_same_notes(
    open_provider: Callable[[Name], Provider], engine: Engine, store: Path, tmp_path: Path
) -> None:
    provider = open_provider("e2b")
    box = _filled(provider, tools=shell_tools(tmp_path / "tools"))
    await _committed(engine, box, conversation="c")
    notes = _read_notes(box)
    assert notes["roots"] == {"claude-mem": f"{box.home}/.claude-mem", "project": str(box.home)}
    assert (notes["memory"], notes["sandbox"], notes["conversation"]) == (MEMORY, box.ref, "c")
    await _refused(engine, box, "other-memory", MISTYPED)
    store.rename(store.with_name("away"))
    grow(box.home)
    for _ in range(2):
        await _refused(engine, box, "unknown-lineage")
    assert _read_notes(box)["store"] == notes["store"]
    shutil.rmtree(store)
    store.with_name("away").rename(store)
    await _committed(engine, box)
    fresh = provider.box(tools=shell_tools(tmp_path / "more tools"))
    await _restored(engine, fresh)
    assert _read_notes(fresh)["store"] == notes["store"]
    grow(fresh.home, "there")
    await _committed(engine, fresh)


async def test_notes_in_a_sandbox_without_python_are_not_believed(
    open_provider: Callable[[Name], Provider], engine: Engine, tmp_path: Path
) -> None:
    box = _filled(open_provider("e2b"), tools=shell_tools(tmp_path / "tools"))
    await _committed(engine, box)
    _notes(box).write_bytes(b'{"memory": "\\", "a\nb": \xff')
    for name, contents in HOSTILE.items():
        write(box.home / ".cache/memory-sidecar" / name / "notes", contents)
    grow(box.home)
    await _committed(engine, box)
    assert _read_notes(box)["memory"] == MEMORY


@pytest.mark.parametrize("given", [GivenKeys(), ENCRYPTED, SIGNED, BOTH], ids=["plain", "encrypted", "signed", "both"])
async def test_every_store_has_an_id_from_its_first_write(local: Provider, store: Path, given: GivenKeys) -> None:
    engine = Engine(open_sandbox=open_sandbox, repository=open_repository(f"file:{store}", given))
    box = _filled(local)
    await _committed(engine, box)
    id = (await engine.repository.head(MEMORY)).store_id
    assert len(id) == 32 and _read_notes(box)["store"] == id
    store.rename(store.with_name("away"))
    again = Engine(open_sandbox=open_sandbox, repository=open_repository(f"file:{store}", given))
    grow(box.home)
    await _refused(again, box, "unknown-lineage")


async def test_of_many_that_begin_a_store_at_once_one_gives_it_its_id(local: Provider, store: Path) -> None:
    boxes = [_filled(local) for _ in range(6)]
    engines = [engine_on(f"file:{store}") for _ in boxes]
    await asyncio.gather(
        *(_committed(engine, box, f"m{n}") for n, (engine, box) in enumerate(zip(engines, boxes, strict=True)))
    )
    ids = {_read_notes(box, f"m{n}")["store"] for n, box in enumerate(boxes)}
    heads = {head.store for head in await engines[0].repository.heads()}
    assert len(ids) == 1 and heads == ids


class _Asked:
    """A store that notes which keys are read."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self.keys: list[str] = []

    async def get(self, key: str) -> StoredObject | None:
        self.keys.append(key)
        return await self.repository.store.get(key)

    async def folders(self, prefix: str, *, most: int) -> list[str]:
        self.keys.append(prefix)
        return [*await self.repository.store.folders(prefix, most=most)]

    def __getattr__(self, name: str) -> object:
        return getattr(self.repository.store, name)


async def test_a_warm_export_and_a_restore_ask_no_more_of_the_store_for_it(local: Provider, engine: Engine) -> None:
    box, fresh = _filled(local), local.box()
    await _committed(engine, box)
    asked = _Asked(engine.repository)
    watched = Engine(open_sandbox=open_sandbox, repository=Repository(asked))  # type: ignore[arg-type]
    grow(box.home)
    warm = await _committed(watched, box)
    assert warm.trips == {"command": 1}
    restored = await _restored(watched, fresh)
    assert restored.trips == {"upload": 1, "command": 1}
    assert MemoryKeys.of(MEMORY).head in asked.keys
    assert STORE_ID not in asked.keys and "memories/" not in asked.keys


async def test_a_damaged_id_is_said_and_keeps_nothing_from_being_saved(local: Provider, engine: Engine) -> None:
    box, other = _filled(local), _filled(local)
    await _committed(engine, box)
    await engine.repository.store.put(STORE_ID, b"not an id")
    receipt = await _committed(engine, other, "other")
    assert any(STORE_ID in warning for warning in receipt.warnings), receipt
    grow(box.home)
    await _committed(engine, box)


async def test_a_rollback_a_fork_and_an_import_write_the_id_too(
    local: Provider, engine: Engine, tmp_path: Path
) -> None:
    from sidecar.engine.archives.tarballs import adopt, download
    from sidecar.engine.heads import fork

    box = _filled(local)
    first = await _committed(engine, box)
    id = (await engine.repository.head(MEMORY)).store_id
    await fork(engine.repository, MEMORY, "forked")
    archive = tmp_path / "memory.tar.gz"
    with archive.open("wb") as file:
        await download(engine, MEMORY, "latest", file, "gz")
    assert (await adopt(engine, archive, ExportRequest(memory="imported"))).outcome == "committed"
    assert {head.store for head in await engine.repository.heads()} == {id}
    await _without_ids(engine.repository)
    assert first.snapshot is not None
    await rollback(engine.repository, MEMORY, first.snapshot)
    made = (await engine.repository.head(MEMORY)).store_id
    assert made and made != id
    assert (await engine.repository.store.get(STORE_ID)).data.decode() == made  # type: ignore[union-attr]


async def test_what_was_refused_comes_back_whole(local: Provider, engine: Engine) -> None:
    box, fresh = _filled(local), local.box()
    await _committed(engine, box)
    grow(box.home)
    refused = await _refused(engine, box, "other-memory", MISTYPED)
    await _restored(engine, fresh, MISTYPED, snapshot=refused.snapshot)
    assert memory_tree(fresh.home / ".claude-mem") == memory_tree(box.home / ".claude-mem")
    assert (fresh.home / "MEMORY.md").read_bytes() == (box.home / "MEMORY.md").read_bytes()
