"""Somebody may write to the store: whatever they do to an object of a signed one is refused by name or reported, and the
newest good snapshot still comes back."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyrage
import pytest

from adapters.sandboxes.local import open_local
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.heads import rollback
from sidecar.engine.restores.choice import choose_snapshot
from sidecar.errors import SnapshotDamaged
from sidecar.host.files import open_spool
from sidecar.host.work import NoProgress
from sidecar.ids import MemoryKeys, build_attachment_key, build_outbox_prefix
from sidecar.receipts import ExportOutcome, RestoreOutcome
from sidecar.service.attachments.attachment import Attachment, Attachments
from sidecar.service.idempotency import RememberedCall, _encode
from sidecar.store import head_copies
from sidecar.store.encryption.check import check_keys, check_memory, check_store
from sidecar.store.encryption.encrypted_store import EncryptedStore
from sidecar.store.encryption.given_keys import GivenKeys
from sidecar.store.encryption.record import COPY, RECORD
from sidecar.store.encryption.rekey import rekey
from sidecar.store.encryption.signatures import Signatures
from sidecar.store.encryption.signed_store import MARK, SignedStore
from sidecar.store.folder_names import SIGNPOST
from sidecar.store.marks import Marks, State
from sidecar.store.pins import pin
from sidecar.store.repository import Repository
from sidecar.store.verification import verify_memory
from tests.parts.homes import claude_mem_home, empty_home, forget_caches, memory_tree, observe, told
from tests.parts.keys import BOTH, ONE, OTHER_SIGNING, SIGNED, SIGNING, engine_with, recipient

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "conductor"
KEYS = MemoryKeys.of(MEMORY)
LATE = 10**14
"""A generation that no head will have."""
SLOW = pytest.mark.slow
KINDS = {"encrypted and signed": BOTH, "signed": SIGNED}


@dataclass(frozen=True)
class Scene:
    """A store with two whole snapshots that share nothing, and one of each object there is; and how it was earlier."""

    given: GivenKeys
    store: Path
    earlier: Path
    snapshots: tuple[str, str]
    """Newest first."""
    names: dict[str, str]
    """What the sidecar calls each object."""

    def engine(self) -> Engine:
        return engine_with(self.store, self.given)

    def objects(self) -> list[str]:
        """Every object, as it lies on the disk."""
        return sorted(_objects(self.store))

    def shown(self, key: str) -> str:
        """What the sidecar calls it."""
        return self.names.get(key, key)


def _objects(store: Path) -> Iterator[str]:
    for path in store.rglob("*"):
        if path.is_file() and not path.name.startswith(".lock-"):
            yield str(path.relative_to(store))


async def _shown(engine: Engine, key: str) -> str:
    store = engine.repository.store
    assert isinstance(store, SignedStore)
    assert isinstance(store.inner, EncryptedStore)
    state = await store.inner.opening.open_to_read()
    return state.names.shown(key) if state else key


async def _built(folder: Path, given: GivenKeys) -> Scene:
    store, home = folder / "store", claude_mem_home(empty_home(folder / "home"), 5)
    engine = engine_with(store, given)
    under = engine.repository.store
    await under.prepare()
    attachments = Attachments(under)
    held = await attachments.add(Attachment(memory=MEMORY, sandbox="e2b:box", generation=1))
    call_ = RememberedCall("key", MEMORY, "export", "digest", "20260101T000000000Z-00000000")
    version = await under.swap(KEYS.call("key"), _encode(call_), expected=None)
    marks = Marks(under, KEYS)
    mark = await marks.change("0" * 24, None, State.WAITING)
    first = await export(engine, open_local(str(home)), ExportRequest(memory=MEMORY))
    shutil.copytree(store, folder / "earlier")
    observe(home, 2, "later")
    forget_caches(home)
    second = await export(engine, open_local(str(home)), ExportRequest(memory=MEMORY, force=True))
    assert second.kind == "full"
    await attachments.write(replace(held.attachment, generation=2), held)
    await under.swap(KEYS.call("key"), _encode(replace(call_, receipt={})), expected=version)
    await marks.change("0" * 24, mark, State.KEPT)
    await pin(engine.repository, MEMORY, first.snapshot or "")
    await under.put(KEYS.damage("20250101T000000000Z-00000000"), b"a note")
    await under.put(f"{build_outbox_prefix('http://hook')}1.json", b'{"type": "x"}')
    await under.put("instances/host-1.json", b"{}")
    names = {key: await _shown(engine, key) for key in [*_objects(store)]}
    return Scene(given, store, folder / "earlier", (second.snapshot or "", first.snapshot or ""), names)


SIGNED_IN_CAMPAIGNS = pytest.mark.parametrize(
    "built", ["encrypted and signed", pytest.param("signed", marks=SLOW)], indirect=True
)


@pytest.fixture(scope="module", params=KINDS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return asyncio.run(_built(tmp_path_factory.mktemp("tampering"), KINDS[request.param]))


@pytest.fixture
def scene(built: Scene, tmp_path: Path) -> Scene:
    return _copy(built, tmp_path / "store")


def _copy(scene: Scene, to: Path) -> Scene:
    shutil.copytree(scene.store, to)
    return replace(scene, store=to)


def flipped(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[min(len(data) - 1, int(len(data) * at))] ^= 0x20
    path.write_bytes(data)


async def found(scene: Scene) -> tuple[str, str]:
    """What a restore takes, and all that is said: by the restore, and by ``verify``."""
    engine, said = scene.engine(), []
    async with open_spool() as scratch:
        choice = await choose_snapshot(engine.repository, MEMORY, "latest", scratch)
    assert choice is not None, "a memory that is there is never called empty"
    said += choice.warnings
    report = await verify_memory(scene.engine().repository, MEMORY, NoProgress())
    said += [report.head_problem, *(f"{row.snapshot}: {row.problem}" for row in report.snapshots if not row.ok)]
    repository = scene.engine().repository
    for looked in (check_memory(repository, MEMORY), check_store(repository), check_keys(repository)):
        said += await looked
    return choice.fetched.manifest.snapshot, "\n".join(said)


def named(scene: Scene, key: str, told: str) -> bool:
    """Whether an object is named in what was said: by its key, its snapshot or pack, or as the head."""
    name = scene.shown(key)
    stem = name.rpartition("/")[2].removesuffix(".json")
    return name in told or stem in told or (name == KEYS.head and "head" in told)


def check(scene: Scene, key: str) -> None:
    snapshot, told = asyncio.run(found(scene))
    newest = scene.snapshots[0]
    assert named(scene, key, told), f"{scene.shown(key)} was altered and nobody said so: {told}"
    if snapshot != newest:
        assert snapshot == scene.snapshots[1]
        name = scene.shown(key)
        assert name.startswith(KEYS.packs) or newest in name, f"{name} need not have cost a snapshot"
        assert newest in told


@pytest.mark.parametrize("at", [pytest.param(0.02, marks=SLOW), 0.5, pytest.param(0.999, marks=SLOW)])
def test_a_flipped_byte(scene: Scene, tmp_path: Path, at: float) -> None:
    for number, key in enumerate(scene.objects()):
        one = _copy(scene, tmp_path / str(number))
        flipped(one.store / key, at)
        check(one, key)


@pytest.mark.parametrize("left", [pytest.param(0.0, marks=SLOW), 0.7])
def test_a_truncated_object(scene: Scene, tmp_path: Path, left: float) -> None:
    for number, key in enumerate(scene.objects()):
        one = _copy(scene, tmp_path / str(number))
        data = (one.store / key).read_bytes()
        (one.store / key).write_bytes(data[: int(len(data) * left)])
        check(one, key)


@SIGNED_IN_CAMPAIGNS
def test_an_object_in_the_place_of_another(scene: Scene, tmp_path: Path) -> None:
    keys = scene.objects()
    for number, key in enumerate(keys):
        folder = key.rpartition("/")[0]
        siblings = [other for other in keys if other != key and other.rpartition("/")[0] == folder]
        siblings = [other for other in siblings if {key, other} != {RECORD, COPY}]  # the same twice
        for other in (siblings or [keys[(number + 1) % len(keys)]])[:1]:
            one = _copy(scene, tmp_path / f"{number}-{keys.index(other)}")
            shutil.copyfile(scene.store / other, one.store / key)
            check(one, key)


def test_an_older_version_put_back(scene: Scene, tmp_path: Path) -> None:
    older = [key for key in _objects(scene.earlier) if (scene.store / key).exists()]
    changed = [key for key in older if (scene.store / key).read_bytes() != (scene.earlier / key).read_bytes()]
    shown = {scene.shown(key) for key in changed}
    assert {KEYS.head, build_attachment_key(MEMORY), KEYS.call("key"), KEYS.mark("0" * 24)} <= shown
    for number, key in enumerate(changed):
        one = _copy(scene, tmp_path / str(number))
        shutil.copyfile(scene.earlier / key, one.store / key)
        snapshot, told = asyncio.run(found(one))
        assert snapshot == scene.snapshots[0]
        if scene.shown(key) == KEYS.head:
            assert "put back" in told


@SIGNED_IN_CAMPAIGNS
@pytest.mark.parametrize("gone", [RECORD, COPY, MARK, "heads/"])
async def test_an_object_taken_away_whose_twin_serves(built: Scene, tmp_path: Path, gone: str) -> None:
    scene = _copy(built, tmp_path / "store")
    wanted = [key for key in scene.objects() if key == gone or f"/{gone}" in key]
    if not wanted:
        pytest.skip("a store that is not encrypted has no such object")
    (scene.store / wanted[-1]).unlink()
    snapshot, told = await found(scene)
    assert (snapshot, named(scene, wanted[-1], told)) == (scene.snapshots[0], True)
    await rekey(scene.engine().repository, "", NoProgress())
    _, told = await found(scene)
    assert told.strip() == "" or gone == "heads/"


def test_a_head_taken_away(scene: Scene) -> None:
    head = next(key for key in scene.objects() if key.endswith("/head.json"))
    (scene.store / head).unlink()
    snapshot, told = asyncio.run(found(scene))
    assert snapshot == scene.snapshots[0]
    assert "removed" in told


def forged(scene: Scene, key: str, data: bytes, how: str) -> None:
    """Put an object there as somebody would who knows everything but the signing key."""
    signer = GivenKeys(signing_key=OTHER_SIGNING) if how == "signed by another" else GivenKeys()

    async def put() -> None:
        if scene.given.encrypts:
            right = scene.engine().repository.store.inner  # type: ignore[attr-defined]
            state = await right.opening.open_to_read()
            path = scene.store / state.names.hide(key)
            sealed = pyrage.encrypt(_signed(key, data), [pyrage.x25519.Recipient.from_str(recipient(ONE))])
        else:
            path, sealed = scene.store / key, _signed(key, data)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sealed)

    def _signed(name: str, plain: bytes) -> bytes:
        return Signatures(signer.signing_key, ()).sign(name, plain) if signer.signing_key else plain

    asyncio.run(put())


@pytest.mark.parametrize("how", ["unsigned", "signed by another"])
def test_planted_objects(scene: Scene, how: str, caplog: pytest.LogCaptureFixture) -> None:
    newest, older = scene.snapshots
    planted = "20991231T000000000Z-deadbeef"

    async def manifest() -> bytes:
        whole = await scene.engine().repository.manifest(MEMORY, newest)
        return replace(whole, snapshot=planted, label="planted").encode()

    async def head() -> bytes:
        state = await scene.engine().repository.head(MEMORY)
        assert state.head is not None
        return replace(state.head, snapshot=older, generation=LATE).encode()

    packs = asyncio.run(scene.engine().repository.manifest(MEMORY, newest)).packs
    objects = {
        KEYS.snapshot(planted): asyncio.run(manifest()),
        KEYS.witness(LATE): asyncio.run(head()),
        KEYS.pin(newest): b"2026",
        KEYS.damage(newest): b"it is damaged, believe me",
        KEYS.mark(packs[0].id): b"going 0",
        build_attachment_key("victim"): b'{"memory":"victim","sandbox":"e2b:theirs"}',
        KEYS.call("other"): b"{}",
        f"{build_outbox_prefix('http://hook')}2.json": b'{"type": "theirs"}',
    }
    for key, data in objects.items():
        forged(scene, key, data, how)
    forged(scene, KEYS.head, asyncio.run(head()), how)
    snapshot, told = asyncio.run(found(scene))
    assert snapshot == newest
    assert f"{planted}: Snapshot {planted}" in told
    assert "head.json is not signed" in told
    assert f"{KEYS.witness(LATE)} is not signed" in told

    async def looked_at() -> None:
        engine = scene.engine()
        survey = await engine.repository.survey(MEMORY)
        assert (survey.pinned, newest in survey.damaged) == ({older}, False)
        assert [held.attachment.memory for held in await Attachments(engine.repository.store).all()] == [MEMORY]
        mark = await Marks(engine.repository.store, KEYS).find(packs[0].id)
        assert mark is not None
        assert mark.state is State.KEPT
        for key in objects:
            with pytest.raises(SnapshotDamaged, match="not signed"):
                await engine.repository.store.get(key)

    asyncio.run(looked_at())
    for key in (KEYS.pin(newest), KEYS.damage(newest), KEYS.mark(packs[0].id)):
        assert key in caplog.text, "what is ignored is ignored loudly"


@SIGNED_IN_CAMPAIGNS
async def test_a_planted_snapshot_is_named_and_does_not_set_the_time_of_the_next(built: Scene, tmp_path: Path) -> None:
    scene, planted = _copy(built, tmp_path / "store"), "99991231T235959999Z-ffffffff"
    await asyncio.to_thread(forged, scene, KEYS.snapshot(planted), b"junk", "unsigned")
    home = empty_home(tmp_path / "home")
    await restore(scene.engine(), open_local(str(home)), RestoreRequest(memory=MEMORY))
    observe(home, 1, "after the plant")
    receipt = await export(scene.engine(), open_local(str(home)), ExportRequest(memory=MEMORY))
    assert receipt.outcome is ExportOutcome.COMMITTED
    assert str(receipt.snapshot) < "2099"
    assert any(planted in warning for warning in receipt.warnings)


@SIGNED_IN_CAMPAIGNS
async def test_after_a_replay_everything_goes_on(built: Scene, tmp_path: Path) -> None:
    scene = _copy(built, tmp_path / "store")
    home = empty_home(tmp_path / "home")
    before = await restore(scene.engine(), open_local(str(home)), RestoreRequest(memory=MEMORY))
    assert (before.outcome, before.warnings) == (RestoreOutcome.COMPLETE, [])
    head = next(key for key in scene.objects() if key.endswith("/head.json"))
    shutil.copyfile(scene.earlier / head, scene.store / head)
    observe(home, 1, "after the replay")
    receipt = await export(scene.engine(), open_local(str(home)), ExportRequest(memory=MEMORY))
    assert receipt.outcome is ExportOutcome.COMMITTED
    assert any("put back" in warning for warning in receipt.warnings)
    other = empty_home(tmp_path / "other")
    back = await restore(scene.engine(), open_local(str(other)), RestoreRequest(memory=MEMORY))
    assert (back.snapshot, back.warnings) == (receipt.snapshot, [])
    assert memory_tree(other / ".claude-mem") == memory_tree(home / ".claude-mem")


@SIGNED_IN_CAMPAIGNS
async def test_a_process_remembers_what_it_has_seen(built: Scene, tmp_path: Path) -> None:
    """Also when all later copies are gone; and a memory that was deleted and begun anew is no replay."""
    scene = _copy(built, tmp_path / "store")
    engine = scene.engine()
    newest = (await engine.repository.head(MEMORY)).snapshot
    for key in scene.objects():
        if "/heads/" in key or key.endswith("/head.json"):
            (scene.store / key).unlink()
            if (scene.earlier / key).exists():
                shutil.copyfile(scene.earlier / key, scene.store / key)
    state = await engine.repository.head(MEMORY)
    assert (state.snapshot, "put back" in state.notice) == (newest, True)
    fresh = scene.engine().repository
    assert await fresh.delete_memory(MEMORY)
    assert (await fresh.head(MEMORY)).head is None
    receipt = await export(
        scene.engine(), open_local(str(claude_mem_home(empty_home(tmp_path / "new"), 2))), ExportRequest(memory=MEMORY)
    )
    again = await engine.repository.head(MEMORY)
    assert (again.snapshot, again.notice) == (receipt.snapshot, "")


@dataclass(frozen=True)
class Line:
    """A signed and encrypted store with four snapshots in a row, the oldest first, and the store as it was after each."""

    store: Path
    after: list[Path]
    snapshots: list[str]

    def repository(self) -> Repository:
        return engine_with(self.store, BOTH).repository

    def put_back(self, number: int) -> None:
        """The head as it was then."""
        (head,) = self.store.glob("memories/*/head.json")
        shutil.copyfile(self.after[number] / head.relative_to(self.store), head)

    def copies(self) -> list[Path]:
        """Of heads, the latest first."""
        return sorted(self.store.glob("memories/*/heads/[0-9]*"), reverse=True)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Line:
    folder = tmp_path_factory.mktemp("line")
    line = Line(folder / "store", [], [])
    home = empty_home(folder / "home")
    for number in range(4):
        (home / "MEMORY.md").write_text(f"{number}\n")
        receipt = asyncio.run(
            export(engine_with(line.store, BOTH), open_local(str(home)), ExportRequest(memory=MEMORY))
        )
        assert (receipt.outcome, told(receipt)) == (ExportOutcome.COMMITTED, [])
        line.snapshots.append(str(receipt.snapshot))
        line.after.append(folder / str(number))
        shutil.copytree(line.store, line.after[-1])
    return line


@pytest.fixture
def line(grown: Line, tmp_path: Path) -> Line:
    shutil.copytree(grown.store, tmp_path / "line")
    return replace(grown, store=tmp_path / "line")


@pytest.mark.parametrize("how", ["altered", "removed"])
async def test_an_old_head_and_a_copy_that_cannot_tell(line: Line, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line.put_back(2)
    newest = line.copies()[0]
    newest.write_bytes(b"x") if how == "altered" else newest.unlink()
    # An export that is under way looks the same, so for some minutes nothing is said of it.
    assert line.snapshots[3] not in (await line.repository().head(MEMORY)).notice
    monkeypatch.setattr(head_copies, "UNDER_WAY", 0.0)
    state = await line.repository().head(MEMORY)
    assert state.snapshot == line.snapshots[2]
    assert line.snapshots[3] in state.notice
    assert "rollback" in state.notice
    assert (f"heads/{newest.name} is damaged: it is not sealed" in state.notice) == (how == "altered")
    report = await verify_memory(line.repository(), MEMORY, NoProgress())
    assert not report.ok
    await rollback(line.repository(), MEMORY, line.snapshots[3])
    assert (await line.repository().head(MEMORY)).notice == ""


async def test_an_old_head_that_later_snapshots_were_made_without(line: Line) -> None:
    line.put_back(1)
    for copy in line.copies()[:2]:
        copy.unlink()
    state = await line.repository().head(MEMORY)
    assert state.head is not None
    assert [snapshot for snapshot, _ in state.head.history] == line.snapshots[::-1]
    assert f"was put back to {line.snapshots[1]}" in state.notice


async def test_a_copy_that_a_crash_left_out_is_written_with_the_next_head(line: Line, tmp_path: Path) -> None:
    line.copies()[0].unlink()  # as if the sidecar had died right after it wrote the head
    (said,) = await check_memory(line.repository(), MEMORY)
    assert "The next export that moves the head writes it too." in said
    home = empty_home(tmp_path / "home")
    await restore(engine_with(line.store, BOTH), open_local(str(home)), RestoreRequest(memory=MEMORY))
    (home / "MEMORY.md").write_text("after the crash\n")
    receipt = await export(engine_with(line.store, BOTH), open_local(str(home)), ExportRequest(memory=MEMORY))
    assert (receipt.outcome, receipt.warnings) == (ExportOutcome.COMMITTED, [])
    assert await check_memory(line.repository(), MEMORY) == []
    line.put_back(2)
    state = await line.repository().head(MEMORY)
    assert (state.snapshot, "put back" in state.notice) == (receipt.snapshot, True)


async def test_no_alarm_at_what_happens_every_day(line: Line, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    started = RestoreRequest(memory=MEMORY, snapshot=line.snapshots[0])
    await restore(engine_with(line.store, BOTH), open_local(str(home)), started)
    (home / "MEMORY.md").write_text("beside\n")
    beside = await export(engine_with(line.store, BOTH), open_local(str(home)), ExportRequest(memory=MEMORY))
    assert beside.outcome is ExportOutcome.DIVERGED
    (home / "MEMORY.md").unlink()
    lost = await export(engine_with(line.store, BOTH), open_local(str(home)), ExportRequest(memory=MEMORY))
    assert lost.outcome is not ExportOutcome.COMMITTED
    assert (await line.repository().head(MEMORY)).notice == ""
    await rollback(line.repository(), MEMORY, line.snapshots[1])
    await line.repository().fence(MEMORY)
    state = await line.repository().head(MEMORY)
    assert (state.snapshot, state.notice) == (line.snapshots[1], "")


async def test_what_a_deleted_memory_was_is_not_taken_for_what_it_is(line: Line, tmp_path: Path) -> None:
    await line.repository().delete_memory(MEMORY)
    home = empty_home(tmp_path / "home")
    (home / "MEMORY.md").write_text("a new life\n")
    receipt = await export(engine_with(line.store, BOTH), open_local(str(home)), ExportRequest(memory=MEMORY))
    for old in line.after[-1].rglob("memories/*/*/*"):
        new = line.store / old.relative_to(line.after[-1])
        if old.is_file() and not new.exists():
            new.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(old, new)
    state = await line.repository().head(MEMORY)
    assert (state.snapshot, state.notice) == (receipt.snapshot, "")
    told = await check_memory(line.repository(), MEMORY)
    assert len(told) == 3
    assert all("put it back" in problem for problem in told)


async def test_unsigned_memories_are_not_believed_and_not_called_damaged(tmp_path: Path) -> None:
    home, store = claude_mem_home(empty_home(tmp_path / "home"), 2), tmp_path / "store"
    await export(engine_with(store, GivenKeys()), open_local(str(home)), ExportRequest(memory=MEMORY))
    with pytest.raises(SnapshotDamaged, match="is not signed"):
        await restore(
            engine_with(store, GivenKeys(signing_key=SIGNING)), open_local(str(home)), RestoreRequest(memory=MEMORY)
        )
    assert not (store / KEYS.damaged).exists()


async def test_a_planted_signpost_hides_no_memory(tmp_path: Path) -> None:
    memory, store, home = "acme/agent-7", tmp_path / "store", claude_mem_home(tmp_path / "home", rows=3)
    folder = store / MemoryKeys.of(memory).prefix
    (folder / "calls").mkdir(parents=True)
    (folder / "calls" / "x").write_text("from a version that called its folders so")
    before = await export(engine_with(store, SIGNED), open_local(str(home)), ExportRequest(memory=memory))
    assert (before.outcome, (folder / "head.json").is_file()) == (ExportOutcome.COMMITTED, True)
    (folder / "head.json").write_bytes(SIGNPOST)
    fresh = empty_home(tmp_path / "fresh")
    after = await restore(engine_with(store, SIGNED), open_local(str(fresh)), RestoreRequest(memory=memory))
    assert (after.outcome, after.snapshot) == (RestoreOutcome.COMPLETE, before.snapshot)
    assert after.warnings, "and it is told"
