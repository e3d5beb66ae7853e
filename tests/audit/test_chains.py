"""The audit in a store: what is written when, and that whatever is done to it afterwards is found and named."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path

import pytest

from sidecar.audit import sinks, trail
from sidecar.audit.lines import ADMIN, Call, build_own_call
from sidecar.audit.reader import MAYBE, AuditFound, list_calls, read_file, read_store
from sidecar.audit.retention import cut_audit
from sidecar.audit.settings import Audit
from sidecar.audit.trail import Trail, open_trail
from sidecar.errors import StoreUnreachable
from sidecar.ids import AUDIT_LATEST, AUDIT_LINES, AUDIT_TAILS
from sidecar.ports import Store, StoredObject
from sidecar.store.encryption.given_keys import GivenKeys
from sidecar.store.encryption.rekey import rekey
from tests.parts.keys import BOTH, ENCRYPTED, OTHER, SIGNED, engine_with
from tests.parts.memory_store import MemoryStore

DAY = 86400.0


def call(memory: str = "me", **more: str) -> Call:
    return Call(caller=ADMIN, what="PUT /v1/memories/{memory}/head", source="127.0.0.1", memory=memory, **more)


async def opened(store: Store, **settings: str) -> Trail:
    begun = open_trail(Audit(store=True, **settings), store, None)
    await begun.open()
    await begun.write()
    return begun


async def changes(begun: Trail, *memories: str) -> None:
    for memory in memories:
        record = begun.begin(call(memory))
        await record.intend()
        await record.end("ok", 200)


async def tail_follows(begun: Trail) -> None:
    """Wait until the tail says how many lines there are."""
    assert begun._chain is not None
    sink = begun._chain._sinks["store"]
    async with asyncio.timeout(10):
        while sink._told != sink._count:  # type: ignore[attr-defined]
            await asyncio.sleep(0.005)


@pytest.fixture
def quick_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "TAIL_SECONDS", 0.01)


class SlowStore(MemoryStore):
    """A store that answers when it is told to, or is away."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()
        self.away = False

    async def put(self, key: str, source: bytes | Path) -> int:
        await self.answers.wait()
        if self.away:
            raise StoreUnreachable("away")
        return await super().put(key, source)

    def pieces(self) -> list[str]:
        return [key for key in self.objects if key.startswith(AUDIT_LINES)]


# What is written, and when


async def test_a_change_is_kept_before_it_is_made_and_what_came_of_it_before_it_is_told() -> None:
    store = MemoryStore()
    begun = await opened(store)
    record = begun.begin(call("acme/agent", snapshot="latest"))
    await record.intend()
    (row,) = list_calls((await read_store(store)).lines)
    assert (row.memory, row.who, row.source, row.outcome) == ("acme/agent", "admin", "127.0.0.1", MAYBE)
    record.note(snapshot="20261116T083030845Z-318faecc")
    await record.end("ok", 200)
    (row,) = list_calls((await read_store(store)).lines)
    assert (row.snapshot, row.outcome, row.status) == ("20261116T083030845Z-318faecc", "ok", 200)


async def test_lines_that_come_while_others_are_written_are_written_together() -> None:
    store = SlowStore()
    begun = await opened(store)
    store.answers.clear()
    waiting = [asyncio.create_task(begun.begin(call(f"m{number}")).intend()) for number in range(100)]
    await asyncio.sleep(0)
    store.answers.set()
    await asyncio.gather(*waiting)
    found = await read_store(store)
    assert len(store.pieces()) <= 3 and found.findings == [] and len(list_calls(found.lines)) == 100


async def test_what_changes_nothing_is_written_with_the_next_lines_or_a_little_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    begun = await opened(store)
    await begun.begin(call("read")).end("ok", 200)
    assert list_calls((await read_store(store)).lines) == []
    await changes(begun, "changed")
    assert [row.memory for row in list_calls((await read_store(store)).lines)] == ["read", "changed"]
    monkeypatch.setattr(trail, "LAZY_SECONDS", 0.01)
    begun._later = None
    begun.add(build_own_call("drill", memory="drilled"), "passed")
    async with asyncio.timeout(10):
        while len(list_calls((await read_store(store)).lines)) < 3:
            await asyncio.sleep(0.01)


async def test_a_line_that_comes_while_others_are_written_a_little_later_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch, quick_tails: None
) -> None:
    monkeypatch.setattr(trail, "LAZY_SECONDS", 0.01)
    store = SlowStore()
    begun = await opened(store)
    await tail_follows(begun)
    store.answers.clear()
    begun.add(build_own_call("drill", memory="first"), "passed")
    async with asyncio.timeout(10):
        while begun._chain is not None and not begun._chain._turn.locked():
            await asyncio.sleep(0.005)
    begun.add(build_own_call("drill", memory="second"), "passed")
    store.answers.set()
    async with asyncio.timeout(10):
        while len(list_calls((await read_store(store)).lines)) < 2:
            await asyncio.sleep(0.01)


async def test_without_its_place_nothing_is_changed_and_what_was_changed_is_told_later(
    monkeypatch: pytest.MonkeyPatch, quick_tails: None
) -> None:
    monkeypatch.setattr(trail, "LAZY_SECONDS", 0.01)
    store = SlowStore()
    begun = await opened(store)
    record = begun.begin(call("done"))
    await record.intend()
    store.away = True
    await record.end("ok")
    with pytest.raises(StoreUnreachable):
        await begun.begin(call("refused")).intend()
    store.away = False
    async with asyncio.timeout(10):
        while [row.outcome for row in list_calls((await read_store(store)).lines, memory="done")] != ["ok"]:
            await asyncio.sleep(0.01)
    await tail_follows(begun)
    assert (await read_store(store)).findings == []


async def test_no_call_is_let_in_that_could_not_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trail, "MOST_WAITING", 3)
    begun = await opened(MemoryStore())
    for _ in range(3):
        await begun.begin(call()).end("ok")
    with pytest.raises(sinks.AuditUnwritable):
        begun.begin(call())
    await begun.write()
    begun.begin(call())


async def test_names_are_one_line_of_ascii_and_bounded() -> None:
    store = MemoryStore()
    begun = await opened(store)
    odd = 'a\nb"\x1b[31m\u202e\udc80\u2028' + "x" * 5000
    record = begun.begin(call(odd, sandbox=odd))
    await record.intend()
    await record.end("ok")
    await begun.close()
    for key in store.objects:
        data = store.objects[key][0]
        assert data.isascii() and len(data) < 4000 and b"\x1b" not in data
    found = await read_store(store)
    (row,) = list_calls(found.lines)
    assert row.memory == f"{odd[:300]}..." and found.findings == []


async def test_small_objects_give_way_to_one_with_the_same_lines(
    monkeypatch: pytest.MonkeyPatch, quick_tails: None
) -> None:
    monkeypatch.setattr(sinks, "MOST_BYTES", 5000)
    store = SlowStore()
    begun = await opened(store)
    memories = [f"m{number}" for number in range(40)]
    await changes(begun, *memories)
    assert len(store.pieces()) < 20
    await begun.close()
    assert all(len(store.objects[key][0]) < 6000 for key in store.pieces())
    found = await read_store(store)
    assert [row.memory for row in list_calls(found.lines)] == memories and found.findings == []
    assert len(store.pieces()) < 10


# What is done to it afterwards


async def _make_scene(store: Store) -> None:
    """Chains of processes that ended, that were killed, that only read; with objects large and small."""
    service = await opened(store)
    await changes(service, *(f"m{number}" for number in range(12)))
    command = open_trail(Audit(store=True), store, None)
    await command.open()
    record = command.begin(call("by-command"))
    await record.intend()
    await record.end("ok", wait=False)
    await command.close()
    reading = open_trail(Audit(store=True), store, None)
    await reading.open()
    await reading.begin(call("read")).end("ok")
    await reading.close()
    await changes(service, "n1", "n2")
    await service.close()
    killed = await opened(store)
    await changes(killed, "k1", "k2")
    await killed.begin(call("unfinished")).intend()
    await tail_follows(killed)


def _alter_one_letter(data: bytes, chance: random.Random) -> bytes:
    place = chance.choice([number for number, value in enumerate(data) if chr(value).isalnum()])
    return data[:place] + (b"7" if data[place : place + 1] != b"7" else b"8") + data[place + 1 :]


def _rename_memory(data: bytes, chance: random.Random) -> bytes:
    return data.replace(b'"who":"admin"', b'"who":"other"', 1) if b'"who"' in data else _alter_one_letter(data, chance)


def _remove_line(data: bytes, chance: random.Random) -> bytes:
    rows = data.splitlines(keepends=True)
    rows.pop(chance.randrange(len(rows)))
    return b"".join(rows)


def _remove_last_line(data: bytes, chance: random.Random) -> bytes:
    return b"".join(data.splitlines(keepends=True)[:-1])


def _swap_lines(data: bytes, chance: random.Random) -> bytes:
    rows = data.splitlines(keepends=True)
    if len(rows) < 2:
        return rows[0] * 2
    place = chance.randrange(len(rows) - 1)
    rows[place : place + 2] = rows[place + 1], rows[place]
    return b"".join(rows)


def _cut_short(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def _add_line(data: bytes, chance: random.Random) -> bytes:
    return data + data.splitlines(keepends=True)[-1]


ALTERATIONS = (_alter_one_letter, _rename_memory, _remove_line, _remove_last_line, _swap_lines, _cut_short, _add_line)


def _tamper(store: MemoryStore) -> Iterator[tuple[str, str, MemoryStore]]:
    """Each way to tamper with each object: what it is called, which object it is, and the store afterwards."""
    chance = random.Random(7)

    def altered(change: Callable[[dict[str, tuple[bytes, float, str]]], None]) -> MemoryStore:
        other = copy(store)
        other.objects = dict(store.objects)
        change(other.objects)
        return other

    keys = [key for key in store.objects if key.startswith("audit/")]
    for key in keys:
        yield "removed", key, altered(lambda objects, key=key: objects.pop(key))  # type: ignore[misc]
        for alter in ALTERATIONS:
            if key.startswith(AUDIT_LINES) or alter in (_alter_one_letter, _cut_short):
                data = alter(store.objects[key][0], chance)
                yield (
                    alter.__name__,
                    key,
                    altered(lambda objects, key=key, data=data: objects.update({key: (data, 0.0, "")})),  # type: ignore[misc]
                )
    pieces = [key for key in keys if key.startswith(AUDIT_LINES)]
    for one, other in itertools.pairwise(pieces):
        both = store.objects[one], store.objects[other]
        yield (
            "exchanged",
            one,
            altered(lambda objects, one=one, other=other, both=both: objects.update({one: both[1], other: both[0]})),  # type: ignore[misc]
        )
    for chain in {key.split("/")[2] for key in pieces}:

        def remove(objects: dict[str, tuple[bytes, float, str]], chain: str = chain) -> None:
            for key in [key for key in objects if chain in key]:
                objects.pop(key)

        yield "all of a chain removed", f"{AUDIT_LINES}{chain}/", altered(remove)


async def test_every_kind_of_tampering_is_found_and_named(monkeypatch: pytest.MonkeyPatch, quick_tails: None) -> None:
    monkeypatch.setattr(sinks, "MOST_BYTES", 2000)
    store = MemoryStore()
    await _make_scene(store)
    sound = await read_store(store)
    assert sound.findings == [] and sound.chains == 4
    rows = list_calls(sound.lines)
    assert {row.memory for row in rows if row.outcome == MAYBE} == {"unfinished"} and len(rows) == 19
    missed, ways = [], 0
    for how, key, after in _tamper(store):
        ways += 1
        found = await read_store(after)
        chain = key.removeprefix(AUDIT_LINES).removeprefix(AUDIT_TAILS).partition("/")[0].removesuffix(".json")
        if not any(one.chain == chain or one.where == key for one in found.findings):
            missed.append((how, key, found.findings))
    assert missed == [] and ways > 60


async def test_the_last_line_before_a_kill_cannot_be_altered_even_if_no_tail_names_it() -> None:
    store = MemoryStore()
    killed = await opened(store)
    await changes(killed, "me")
    last = max(key for key in store.objects if key.startswith(AUDIT_LINES))
    data = store.objects[last][0]
    await store.put(last, data.replace(b'"outcome":"ok"', b'"outcome":"no"'))
    (finding,) = (await read_store(store)).findings
    assert finding.where == last


async def test_small_objects_that_were_left_beside_the_large_one_are_no_fault(quick_tails: None) -> None:
    store = MemoryStore()
    await _make_scene(store)
    before = dict(store.objects)
    again = await opened(store)
    await changes(again, *"abcdef")
    small = {key: store.objects[key] for key in store.objects if key not in before and key.startswith(AUDIT_LINES)}
    await again.close()
    assert not set(small) <= set(store.objects)
    store.objects |= small
    found = await read_store(store)
    assert found.findings == [] and [row.memory for row in list_calls(found.lines)][-6:] == [*"abcdef"]


async def test_an_audit_is_read_while_it_is_written(monkeypatch: pytest.MonkeyPatch, quick_tails: None) -> None:
    monkeypatch.setattr(sinks, "MOST_BYTES", 3000)
    store = MemoryStore()

    class Reading(MemoryStore):
        """The same store, in which something is written before every other answer."""

        asked = 0

        async def get(self, key: str) -> StoredObject | None:
            self.asked += 1
            if self.asked % 2:
                await changes(writing, "meanwhile")
            return await super().get(key)

    writing = await opened(store)
    reading = Reading()
    reading.objects = store.objects
    for _ in range(6):
        assert (await read_store(reading)).findings == []
    await writing.close()
    assert (await read_store(reading)).findings == []


# In a file


async def test_several_processes_share_a_file_and_what_is_missing_in_it_is_found(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    first, second = (open_trail(Audit(file=str(path)), MemoryStore(), None) for _ in range(2))
    for begun in (first, second):
        await begun.open()
    for number in range(3):
        await changes(first, f"a{number}")
        await changes(second, f"b{number}")
    await first.close()
    await second.close()
    assert path.stat().st_mode & 0o777 == 0o600
    found = await read_file(path)
    assert found.findings == [] and sorted(row.memory for row in list_calls(found.lines)) == [
        *("a0", "a1", "a2", "b0", "b1", "b2")
    ]
    whole = path.read_bytes()
    rows = whole.splitlines(keepends=True)
    for altered in (
        b"".join(rows[:4] + rows[5:]),
        b"".join(rows[2:]),
        whole.replace(b'"a1"', b'"a9"', 1),
        whole[:-20],
        b"".join(rows) + b"{}\n",
    ):
        path.write_bytes(altered)
        assert (await read_file(path)).findings != [], altered


async def test_a_file_that_cannot_be_written_lets_nothing_be_changed(tmp_path: Path) -> None:
    begun = open_trail(Audit(file=str(tmp_path / "none/audit.jsonl")), MemoryStore(), None)
    await begun.open()
    with pytest.raises(sinks.AuditUnwritable, match="cannot be written"):
        await begun.begin(call()).intend()


# With keys


@pytest.mark.parametrize("given", [ENCRYPTED, SIGNED, BOTH], ids=["encrypted", "signed", "both"])
async def test_it_is_sealed_and_signed_like_everything_else(
    given: GivenKeys, tmp_path: Path, quick_tails: None
) -> None:
    store = engine_with(tmp_path / "store", given).repository.store
    await store.prepare()
    await _make_scene(store)
    reading = engine_with(tmp_path / "store", given).repository.store
    found = await read_store(reading)
    assert found.findings == [] and len(list_calls(found.lines)) == 19
    files = [path for path in (tmp_path / "store/audit").rglob("*.json*") if not path.name.startswith(".")]
    if given.encrypts:
        everything = b"".join([path.read_bytes() + str(path).encode() for path in files])
        assert b"by-command" not in everything and b"127.0.0.1" not in everything
    for path in files:
        whole = path.read_bytes()
        path.write_bytes(whole[:-30] + b"0" * 30)
        assert (await read_store(reading)).findings != [], path
        path.write_bytes(whole)
    assert (await read_store(reading)).findings == []


async def test_a_chain_that_was_forged_without_the_key_is_found(tmp_path: Path, quick_tails: None) -> None:
    store = engine_with(tmp_path / "store", SIGNED).repository.store
    await store.prepare()
    await _make_scene(store)
    forged = engine_with(tmp_path / "forged", GivenKeys()).repository.store
    begun = await opened(forged)
    await changes(begun, "me")
    await begun.close()
    for path in (tmp_path / "forged/audit").rglob("*.json*"):
        target = tmp_path / "store/audit" / path.relative_to(tmp_path / "forged/audit")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    findings = (await read_store(store)).findings
    assert any("signed" in one.problem for one in findings)


async def test_with_other_keys_it_is_the_same_audit(tmp_path: Path, quick_tails: None) -> None:
    engine = engine_with(tmp_path / "store", ENCRYPTED)
    await engine.repository.store.prepare()
    await _make_scene(engine.repository.store)
    before = await read_store(engine.repository.store)
    both = engine_with(tmp_path / "store", GivenKeys(identities=(OTHER, *ENCRYPTED.identities)))
    assert (await rekey(both.repository, "", both.progress)).finished
    after = await read_store(engine_with(tmp_path / "store", GivenKeys(identities=(OTHER,))).repository.store)
    assert after.findings == [] and after.lines == before.lines


# Old lines


class Clock:
    """A store whose time is set, and the audit of a service on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = MemoryStore()
        monkeypatch.setattr("sidecar.audit.retention.time.time", lambda: self.store.now)

    async def found(self) -> AuditFound:
        return await read_store(self.store)

    def memories(self, found: AuditFound) -> list[str]:
        return [row.memory for row in list_calls(found.lines)]


async def test_old_lines_are_cut_off_and_that_is_told_by_lines(
    monkeypatch: pytest.MonkeyPatch, quick_tails: None
) -> None:
    clock = Clock(monkeypatch)
    store = clock.store
    service = await opened(store)
    await changes(service, "first")
    other = await opened(store)
    await changes(other, "other")
    await other.close()
    store.now = 40 * DAY
    await changes(service, "second")
    assert await cut_audit(store, service, 60 * DAY) == 0
    store.now = 70 * DAY
    await changes(service, "third")
    assert await cut_audit(store, service, 60 * DAY) > 0
    found = await clock.found()
    assert found.findings == [] and clock.memories(found) == ["second", "third"]
    assert not any("other" in data.decode() for data, _, _ in store.objects.values())
    # The lines that tell of it grow old, and are told again as long as they are needed.
    for day in range(75, 400, 5):
        store.now = day * DAY
        await changes(service, f"day {day}")
        await tail_follows(service)
        await cut_audit(store, service, 60 * DAY)
        found = await clock.found()
        assert found.findings == [], day
    assert len(clock.memories(found)) < 15
    late = await opened(store)
    await late.close()
    assert (await clock.found()).findings == []


async def test_what_somebody_else_cut_off_is_still_found(monkeypatch: pytest.MonkeyPatch, quick_tails: None) -> None:
    clock = Clock(monkeypatch)
    store = clock.store
    service = await opened(store)
    await changes(service, "a", "b", "c")
    store.now = 50 * DAY
    await changes(service, "d", "e")
    await tail_follows(service)
    assert await cut_audit(store, service, 30 * DAY) > 0
    assert (await clock.found()).findings == []
    first = min(key for key in store.objects if key.startswith(AUDIT_LINES))
    del store.objects[first]
    (finding,) = (await clock.found()).findings
    assert "missing" in finding.problem
    store.now = 100 * DAY
    await changes(service, "f")
    await tail_follows(service)
    assert (await clock.found()).findings != [], "a cut that is told later does not excuse it"


async def test_the_newest_chain_is_named_whatever_goes(monkeypatch: pytest.MonkeyPatch, quick_tails: None) -> None:
    clock = Clock(monkeypatch)
    service = await opened(clock.store)
    last = await opened(clock.store)
    await changes(last, "last")
    await last.close()
    for day in (100, 200, 300):
        clock.store.now = day * DAY
        await changes(service, "now")
        await cut_audit(clock.store, service, 60 * DAY)
    named = json.loads(clock.store.objects[AUDIT_LATEST][0])["chain"]
    assert named == service.chain
    later = await opened(clock.store)
    await tail_follows(later)
    assert (await clock.found()).findings == []


async def test_that_a_chain_was_cut_is_told_as_long_as_there_is_more_of_it(
    monkeypatch: pytest.MonkeyPatch, quick_tails: None
) -> None:
    clock = Clock(monkeypatch)
    quiet, busy = await opened(clock.store), await opened(clock.store)
    await changes(quiet, "early")
    clock.store.now = 75 * DAY
    await changes(busy, "now")
    assert await cut_audit(clock.store, busy, 60 * DAY) > 0
    clock.store.now = 76 * DAY
    await changes(quiet, "late")
    await changes(busy, "now")
    clock.store.now = 135.5 * DAY
    assert await cut_audit(clock.store, busy, 60 * DAY) > 0
    found = await clock.found()
    assert found.findings == [] and "late" in clock.memories(found) and "early" not in clock.memories(found)
