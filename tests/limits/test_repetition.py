"""A guard delays, it never freezes: what is refused again and again is accepted, loudly, and what it replaces is kept."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.host.work import NoProgress
from sidecar.ids import STORE_ID, MemoryKeys
from sidecar.policy.limits import Guards, Limits
from sidecar.policy.retention import Retention
from sidecar.receipts import ExportReceipt
from sidecar.store.encryption.check import check_memory
from sidecar.store.pins import pin
from sidecar.store.repository import Repository
from sidecar.store.retention import forget
from sidecar.store.verification import verify_memory
from sidecar.wiring import open_sandbox
from tests.parts.homes import Ran, WatchedSandbox, empty_home, engine_at, observe, run_cli, write
from tests.parts.keys import BOTH, engine_with
from tests.parts.memories import damage_database
from tests.parts.memory_store import MemoryStore
from tests.parts.providers import Made, Provider
from tests.parts.services import path, serving, until

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "conductor"
HOUR = 3600.0


def make_home(home: Path) -> Path:
    write(home / ".claude-mem/modes/code.json", b"{}")
    write(home / ".claude-mem/corpora/large.json", b"corpus " * 40_000)
    write(home / "app/MEMORY.md", b"what matters")
    observe(home, 400)
    return home


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return make_home(tmp_path / "home")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def exported(store: Path, home: Path, conversation: str = "", *more: str | Path) -> Ran:
    words = ("--conversation", conversation) if conversation else ()
    return run_cli("export", MEMORY, "--sandbox", f"local:{home}", "--project", "app", *words, *more, store=store)


def restored(store: Path, home: Path) -> Path:
    ran = run_cli("restore", MEMORY, "--sandbox", f"local:{empty_home(home)}", "--project", "app", store=store)
    assert ran.document["outcome"] == "complete"
    return home


def delete_rows(home: Path, keep: int = 20) -> None:
    """As a person does who cleans up: most rows go, and the file with them."""
    connection = sqlite3.connect(home / ".claude-mem/claude-mem.db", isolation_level=None)
    connection.execute("DELETE FROM observations WHERE id > ?", (keep,))
    connection.execute("INSERT INTO observations_fts(observations_fts) VALUES ('rebuild')")
    connection.execute("VACUUM")
    connection.close()
    (home / ".claude-mem/corpora/large.json").unlink(missing_ok=True)


def lose_app(home: Path) -> None:
    shutil.rmtree(home / "app")


def lose_database(home: Path) -> None:
    (home / ".claude-mem/claude-mem.db").unlink()


def empty_it(home: Path) -> None:
    shutil.rmtree(home / ".claude-mem")
    shutil.rmtree(home / "app")


def downgrade(home: Path) -> None:
    connection = sqlite3.connect(home / ".claude-mem/claude-mem.db", isolation_level=None)
    connection.execute("DELETE FROM schema_versions WHERE version > 51")
    connection.close()


def grow(home: Path, word: str) -> None:
    """So little that it changes nothing for the guards."""
    write(home / f".claude-mem/modes/{word}.json", word.encode())


def head_of(store: Path) -> str:
    return str(run_cli("log", MEMORY, store=store).document["head"])


def pins_of(store: Path) -> list[str]:
    return [row["snapshot"] for row in run_cli("log", MEMORY, store=store).document["snapshots"] if row["pinned"]]


@pytest.mark.parametrize(
    ("reason", "spoil"),
    [("shrunk", delete_rows), ("root-missing", lose_app), ("required-missing", lose_database)],
)
@pytest.mark.parametrize("changing", [False, True])
def test_what_comes_in_a_third_conversation_is_accepted_and_the_head_pinned(
    changing: bool, reason: str, spoil: Callable[[Path], None], home: Path, store: Path
) -> None:
    """Whether the sandbox goes on changing in between, or is just exported again."""
    first = exported(store, home, "c0").document["snapshot"]
    spoil(home)
    for conversation in ("c1", "c2"):
        if changing:
            grow(home, conversation)
        ran = exported(store, home, conversation)
        assert (ran.code, ran.error, ran.document["head"], ran.document["accepted"]) == (3, reason, first, None)
    if changing:
        grow(home, "c3")
    ran = exported(store, home, "c3")
    assert (ran.code, ran.document["outcome"], ran.document["reason"]) == (0, "committed", None)
    accepted = ran.document["accepted"]
    assert accepted["reasons"][0]["code"] == reason
    assert (accepted["refusals"], accepted["conversations"]) == (2, 3)
    assert (accepted["replaced"], accepted["pinned"]) == (first, True)
    assert accepted["since"].startswith("20")
    assert reason in ran.document["warnings"][0] and first in ran.document["warnings"][0]
    assert (head_of(store), pins_of(store)) == (ran.document["snapshot"], [first])
    # And from now on it is the measure.
    grow(home, "afterwards")
    after = exported(store, home, "c4")
    assert (after.code, after.document["outcome"], after.document["accepted"]) == (0, "committed", None)


def test_both_things_that_are_wrong_are_accepted_together(home: Path, store: Path) -> None:
    assert exported(store, home, "c0").code == 0
    delete_rows(home)
    lose_app(home)
    assert [exported(store, home, name).error for name in ("c1", "c2")] == ["root-missing"] * 2
    ran = exported(store, home, "c3")
    assert (ran.code, [row["code"] for row in ran.document["accepted"]["reasons"]]) == (0, ["root-missing", "shrunk"])


def test_one_conversation_however_often_it_is_exported_is_one(home: Path, store: Path) -> None:
    assert exported(store, home, "c0").code == 0
    delete_rows(home)
    for number in range(5):
        grow(home, str(number % 2))
        assert exported(store, home, "c1").error == "shrunk"
        assert exported(store, home).error == "shrunk", "and without a conversation it is none"
    assert exported(store, home, "c2").error == "shrunk"
    assert exported(store, home, "c3").code == 0


def test_it_may_get_worse_from_time_to_time(home: Path, store: Path) -> None:
    assert exported(store, home, "c0").code == 0
    for keep, conversation in ((40, "c1"), (30, "c2")):
        delete_rows(home, keep)
        assert exported(store, home, conversation).error == "shrunk"
    delete_rows(home, 20)
    assert exported(store, home, "c3").document["outcome"] == "committed"


@pytest.mark.parametrize("how", ["committed", "unchanged"])
def test_when_it_recovers_in_between_the_count_begins_again(how: str, home: Path, store: Path, tmp_path: Path) -> None:
    good = exported(store, home, "c0").document["snapshot"]
    shutil.copytree(home / "app", tmp_path / "kept")
    for conversation in ("c1", "c2"):
        if (home / "app").exists():
            lose_app(home)
        assert exported(store, home, conversation).error == "root-missing"
    shutil.copytree(tmp_path / "kept", home / "app")
    if how == "committed":
        grow(home, "more")
    recovered = exported(store, home, "c3").document
    assert recovered["outcome"] == how
    assert (recovered["head"] == good) == (how == "unchanged")
    lose_app(home)
    for conversation in ("c4", "c5"):
        assert exported(store, home, conversation).error == "root-missing"
    assert exported(store, home, "c6").document["accepted"]["refusals"] == 2


def test_two_sandboxes_of_different_lineage_do_not_add_up(home: Path, store: Path, tmp_path: Path) -> None:
    assert exported(store, home, "c0").code == 0
    one, two = (restored(store, tmp_path / name) for name in ("one", "two"))
    for sandbox in (one, two):
        delete_rows(sandbox)
    for sandbox, conversation in ((one, "c1"), (two, "c2"), (one, "c3"), (two, "c4")):
        grow(sandbox, conversation)
        assert exported(store, sandbox, conversation).error == "shrunk"
    assert exported(store, one, "c5").document["outcome"] == "committed", "its own third"


def test_a_fresh_sandbox_for_every_conversation_adds_up(home: Path, store: Path, tmp_path: Path) -> None:
    """Each is restored from the head, and in each the same happens: else the head would be frozen for good."""
    assert exported(store, home, "c0").code == 0
    for number in (1, 2):
        sandbox = restored(store, tmp_path / f"fresh-{number}")
        delete_rows(sandbox, 20 + number)
        assert exported(store, sandbox, f"c{number}").error == "shrunk"
    sandbox = restored(store, tmp_path / "fresh-3")
    delete_rows(sandbox)
    assert exported(store, sandbox, "c3").document["accepted"]["conversations"] == 3


def test_a_sandbox_that_did_not_start_from_the_head_never_gets_it_this_way(
    home: Path, store: Path, tmp_path: Path
) -> None:
    assert exported(store, home, "c0").code == 0
    stale = restored(store, tmp_path / "stale")
    grow(home, "newer")
    head = exported(store, home, "c1").document["snapshot"]
    delete_rows(stale)
    for conversation in ("c2", "c3", "c4", "c5"):
        grow(stale, conversation)
        assert exported(store, stale, conversation).document["outcome"] == "rejected"
    assert head_of(store) == head


@pytest.mark.parametrize(
    ("reason", "spoil"),
    [("empty", empty_it), ("database-damaged", damage_database), ("schema-downgrade", downgrade)],
)
def test_what_cannot_be_meant_is_never_accepted_by_repetition(
    reason: str, spoil: Callable[[Path], None], home: Path, store: Path, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[guards]\naccept_after_conversations = 2\naccept_after = "0.001s"\n')
    head = exported(store, home, "c0").document["snapshot"]
    spoil(home)
    for number in range(1, 7):
        ran = exported(store, home, f"c{number}", "--config", config)
        assert (ran.code, ran.error, ran.document["head"]) == (3, reason, head)


def test_nor_are_credentials_and_limits(home: Path, store: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[privacy]\ncredentials = "refuse"\n[limits.memories."small"]\nbytes = 100\n')
    assert exported(store, home, "c0").code == 0
    write(home / "app/MEMORY.md", b"AKIA" + b"IOSFODNN7" + b"EXAMPLE")
    for number in range(1, 6):
        assert exported(store, home, f"c{number}", "--config", config).error == "credentials"
        words = ("export", "small", "--sandbox", f"local:{home}", "--conversation", f"c{number}")
        assert run_cli(*words, "--config", config, store=store).error == "limit-bytes"


def test_what_can_be_meant_waits_while_something_else_is_wrong(home: Path, store: Path) -> None:
    assert exported(store, home, "c0").code == 0
    delete_rows(home)
    downgrade(home)
    for number in range(1, 5):
        assert exported(store, home, f"c{number}").error == "schema-downgrade"
    assert exported(store, home, "c5", "--allow", "schema-downgrade").document["accepted"]["conversations"] == 5


@pytest.mark.parametrize(
    ("settings", "accepted"),
    [
        ('accept_after_conversations = 0\naccept_after = ""', None),
        ('accept_after_conversations = 2\naccept_after = ""', 2),
        ("accept_after_conversations = 5", 5),
        ('[guards.memories."conduct*"]\naccept_after_conversations = 2', 2),
    ],
)
def test_how_often_it_has_to_come_is_configured(
    settings: str, accepted: int | None, home: Path, store: Path, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f"[guards]\n{settings}\n")
    assert exported(store, home, "c0").code == 0
    delete_rows(home)
    outcomes = [exported(store, home, f"c{n}", "--config", config).document["outcome"] for n in range(1, 7)]
    assert (outcomes.index("committed") + 1 if "committed" in outcomes else None) == accepted


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("accept_after_conversations = 1", "must be 0 (never), or from 2 to 20"),
        ("accept_after_conversations = 21", "must be 0 (never), or from 2 to 20"),
        ('accept_after = "a while"', "is no duration"),
        ('[guards.memories."a/*"]\naccept_after = "soon"', "is no duration"),
        ("[guards.layouts.claude-mem]\naccept_after_conversations = 2", "unknown key"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(settings: str, said: str, store: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f"[guards]\n{settings}\n")
    ran = run_cli("config", "check", "--config", config, store=store)
    assert (ran.code, ran.error) == (2, "bad-config")
    assert said in ran.document["error"]["message"]


# By time, which the store's clock tells: here one that a test can turn.


class Clocked:
    """A memory in a store whose clock stands still until it is set."""

    def __init__(self, home: Path, **settings: Any) -> None:
        self.store = MemoryStore(time.time())
        self.engine = Engine(open_sandbox=open_sandbox, repository=Repository(self.store), **settings)
        self.home = home

    async def export(self, hours: float = 0.0, **asked: Any) -> ExportReceipt:
        self.store.now += hours * HOUR
        request = ExportRequest(memory=MEMORY, projects=("app",), **asked)
        return await export(self.engine, WatchedSandbox(self.home), request)


async def test_over_a_day_it_is_accepted_without_any_conversation(home: Path) -> None:
    clocked = Clocked(home)
    first = await clocked.export()
    delete_rows(home)
    for hours in (0, 11, 12.9):
        receipt = await clocked.export(hours)
        assert (receipt.outcome, receipt.accepted) == ("rejected", None)
    receipt = await clocked.export(0.2)
    assert receipt.outcome == "committed" and receipt.accepted is not None
    assert (receipt.accepted.refusals, receipt.accepted.conversations) == (3, 0)
    assert receipt.accepted.replaced == first.snapshot
    assert MemoryKeys.of(MEMORY).pin(str(first.snapshot)) in clocked.store.objects
    assert MemoryKeys.of(MEMORY).refusals not in clocked.store.objects, "what was counted is of no use any more"


async def test_a_clock_that_jumps_does_not_accept_after_one_refusal(home: Path) -> None:
    clocked = Clocked(home)
    await clocked.export()
    delete_rows(home)
    assert (await clocked.export()).outcome == "rejected"
    assert (await clocked.export(24 * 365)).outcome == "rejected"
    # Nor does one that was ahead for a while make anything wait for that time to come.
    assert (await clocked.export(-24 * 364)).outcome == "committed"


async def test_a_count_that_began_on_a_clock_that_was_ahead_does_not_wait_for_that_time(home: Path) -> None:
    clocked = Clocked(home)
    await clocked.export()
    delete_rows(home)
    assert (await clocked.export(24 * 365)).outcome == "rejected"
    assert (await clocked.export(-24 * 365)).outcome == "rejected"
    assert (await clocked.export(23)).outcome == "rejected"
    assert (await clocked.export(1)).outcome == "committed"


async def test_retention_that_forgets_what_was_refused_does_not_lose_the_count(home: Path, tmp_path: Path) -> None:
    clocked = Clocked(home)
    head = await clocked.export()
    delete_rows(home)
    refused = []
    for conversation in ("c1", "c2"):
        grow(home, conversation)
        refused.append(str((await clocked.export(conversation=conversation)).snapshot))
    for snapshot in refused:  # as the rules do
        await clocked.store.delete([MemoryKeys.of(MEMORY).snapshot(snapshot)])
    await forget(clocked.engine.repository, MEMORY, Retention())
    receipt = await clocked.export(conversation="c3")
    assert receipt.accepted is not None
    assert (receipt.accepted.refusals, receipt.accepted.replaced) == (2, head.snapshot)


async def test_a_head_that_is_written_again_as_it_is_does_not_lose_the_count(home: Path) -> None:
    """As a service does that takes over an attachment."""
    clocked = Clocked(home)
    await clocked.export()
    delete_rows(home)
    for conversation in ("c1", "c2"):
        assert (await clocked.export(conversation=conversation)).outcome == "rejected"
        await clocked.engine.repository.fence(MEMORY)
    assert (await clocked.export(conversation="c3")).outcome == "committed"


async def test_refusals_that_nobody_counted_are_known_from_their_snapshots(home: Path) -> None:
    """Those of an earlier version, or of one that was killed before it could count."""
    clocked = Clocked(home)
    await clocked.export()
    delete_rows(home)
    for conversation in ("c1", "c2"):
        grow(home, conversation)
        assert (await clocked.export(conversation=conversation)).outcome == "rejected"
        await clocked.store.delete([MemoryKeys.of(MEMORY).refusals])
    assert (await clocked.export(24)).outcome == "rejected", "but not when that was"
    grow(home, "c3")
    receipt = await clocked.export(conversation="c3")
    assert receipt.accepted is not None
    assert (receipt.accepted.conversations, receipt.accepted.refusals) == (3, 3)


@pytest.mark.parametrize("damage", [b"", b"junk", b'{"format":2}\n'])
async def test_of_a_count_that_cannot_be_read_only_what_the_snapshots_say_is_left(damage: bytes, home: Path) -> None:
    clocked = Clocked(home)
    await clocked.export()
    delete_rows(home)
    for conversation in ("c1", "c2"):
        assert (await clocked.export(conversation=conversation)).outcome == "rejected"
    await clocked.store.put(MemoryKeys.of(MEMORY).refusals, damage)
    # The snapshot was made in c1, and in c2 it was just refused again.
    outcomes = [(await clocked.export(conversation=f"c{number}")).outcome for number in (3, 4)]
    assert outcomes == ["rejected", "committed"]


async def test_the_count_stays_small_however_long_it_goes_on(home: Path) -> None:
    never = Guards(accept_after_conversations=0, accept_after="")
    clocked = Clocked(home, guards=never)
    await clocked.export()
    delete_rows(home)
    for number in range(30):
        grow(home, str(number))
        assert (await clocked.export(conversation=f"c{number}" * 100)).outcome == "rejected"
    assert len(clocked.store.objects[MemoryKeys.of(MEMORY).refusals][0]) < 10_000
    assert await clocked.engine.repository.delete_memory(MEMORY) > 0
    assert set(clocked.store.objects) == {STORE_ID}, "and goes with the memory"


async def test_many_sandboxes_are_counted_in_bounds(home: Path) -> None:
    from sidecar.store.manifest import Head
    from sidecar.store.refusals import MOST_LINES, ExportOrigin, Refusals, RefusedExport

    head = Head(memory=MEMORY, snapshot="s", generation=1, created="", files=1, bytes=1, history=[("s", "then")])
    counted = Refusals.over(head)
    for number in range(5 * MOST_LINES):
        origin = ExportOrigin(sandbox=f"e2b:{number}" + "x" * 1000, lineage=("s",), straight=True)
        refused = RefusedExport(snapshot=f"snapshot-{number}", reasons=["shrunk"])
        counted = counted.with_one(origin, refused, at=float(number))
    fresh = ExportOrigin(sandbox="e2b:another", lineage=("s",), straight=True)
    tally = counted.before(fresh, "shrunk")
    assert tally is not None and (tally.since, tally.times) == (0.0, 5 * MOST_LINES)
    assert len(counted.encode()) < 100_000
    assert Refusals.decode(counted.encode()) == counted


# Pins.


async def test_the_newest_five_automatic_pins_stay_and_a_persons_own_always(home: Path) -> None:
    clocked = Clocked(home, guards=Guards(accept_after_conversations=2))
    heads = [str((await clocked.export()).snapshot)]
    await pin(clocked.engine.repository, MEMORY, heads[0])
    for size in range(8):
        write(home / ".claude-mem/corpora/large.json", b"corpus " * 40_000)
        heads.append(str((await clocked.export()).snapshot))
        (home / ".claude-mem/corpora/large.json").unlink()
        delete_rows(home, 100 - size)
        assert (await clocked.export(conversation=f"a{size}")).outcome == "rejected"
        receipt = await clocked.export(conversation=f"b{size}")
        assert receipt.accepted is not None and receipt.accepted.replaced == heads[-1]
    assert await clocked.engine.repository.pinned(MEMORY) == {heads[0], *heads[-5:]}


async def test_a_person_makes_an_automatic_pin_their_own(home: Path) -> None:
    clocked = Clocked(home, guards=Guards(accept_after_conversations=2))
    head = str((await clocked.export()).snapshot)
    delete_rows(home)
    for conversation in ("c1", "c2"):
        await clocked.export(conversation=conversation)
    from sidecar.store.pins import list_automatic_pins, unpin

    assert list(await list_automatic_pins(clocked.engine.repository, MEMORY)) == [head]
    await pin(clocked.engine.repository, MEMORY, head)
    assert await list_automatic_pins(clocked.engine.repository, MEMORY) == {}
    await unpin(clocked.engine.repository, MEMORY, head)
    assert await clocked.engine.repository.pinned(MEMORY) == set()


async def test_an_automatic_pin_gives_way_when_there_is_no_room_left(home: Path, tmp_path: Path) -> None:
    """Else what a guard let go would be frozen by a limit."""
    engine = engine_at(tmp_path / "store", guards=Guards(accept_after_conversations=2))
    write(home / ".claude-mem/corpora/large.json", random.Random(1).randbytes(300_000))

    async def done(conversation: str = "", **limits: Any) -> ExportReceipt:
        limited = replace(engine, limits=Limits(over="trim", **limits))
        request = ExportRequest(memory=MEMORY, projects=("app",), conversation=conversation)
        return await export(limited, WatchedSandbox(home), request)

    head = await done()
    delete_rows(home)
    for conversation in ("c1", "c2"):
        receipt = await done(conversation)
    assert receipt.accepted is not None and receipt.accepted.pinned
    grow(home, "more")
    receipt = await done(memory_bytes=200_000)
    assert receipt.outcome == "committed"
    assert head.snapshot not in await engine.repository.list_snapshot_ids(MEMORY)
    assert await engine.repository.pinned(MEMORY) == set()


async def test_a_persons_pin_does_not_give_way(home: Path, tmp_path: Path) -> None:
    engine = engine_at(tmp_path / "store", guards=Guards(accept_after_conversations=2))
    write(home / ".claude-mem/corpora/large.json", random.Random(1).randbytes(300_000))
    head = await export(engine, WatchedSandbox(home), ExportRequest(memory=MEMORY, projects=("app",)))
    await pin(engine.repository, MEMORY, str(head.snapshot))
    delete_rows(home)
    for conversation in ("c1", "c2"):
        request = ExportRequest(memory=MEMORY, projects=("app",), conversation=conversation)
        receipt = await export(engine, WatchedSandbox(home), request)
    assert receipt.accepted is not None and receipt.accepted.pinned
    grow(home, "more")
    limited = replace(engine, limits=Limits(over="trim", memory_bytes=200_000))
    receipt = await export(limited, WatchedSandbox(home), ExportRequest(memory=MEMORY, projects=("app",)))
    assert receipt.reason is not None and receipt.reason.code == "limit-memory-bytes"
    assert await engine.repository.pinned(MEMORY) == {head.snapshot}


# Told everywhere.


def test_a_refusal_says_when_it_will_be_accepted(
    home: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sidecar.cli import main

    assert exported(store, home, "c0").code == 0
    delete_rows(home)
    said = [exported(store, home, name).document["warnings"][-1] for name in ("c1", "c2")]
    assert said[0].startswith("Refused once. It becomes the head by itself when it comes again in 2 more conversations")
    assert said[1].startswith("Refused 2 times since 20") and "in 1 more conversation or after 20" in said[1]
    words = ["export", MEMORY, "--sandbox", f"local:{home}", "--project", "app", "--conversation", "c3"]
    assert main([*words, f"--store=file:{store}"]) == 0
    out = capsys.readouterr().out
    assert "committed" in out and "Accepted after 2 refusals since" in out


def test_the_service_tells_of_it_in_receipt_event_log_and_metric(home: Path, tmp_path: Path) -> None:
    with serving(f"file:{tmp_path / 'store'}", tmp_path / "log") as running:
        sandbox = f"local:{home}"

        def done(conversation: str) -> dict[str, Any]:
            answer: dict[str, Any] = running.export(MEMORY, sandbox, projects=["app"], conversation=conversation).json()
            return answer

        first = done("c0")["snapshot"]
        delete_rows(home)
        assert [done(name)["outcome"] for name in ("c1", "c2")] == ["rejected", "rejected"]
        receipt = done("c3")
        assert (receipt["outcome"], receipt["accepted"]["replaced"]) == ("committed", first)
        with running.http.stream("GET", "/v1/events", headers={"Last-Event-ID": "0"}) as stream:
            for line in itertools.islice(stream.iter_lines(), 1000):
                if line.startswith("data: ") and json.loads(line[6:])["type"] == "guard.accepted":
                    event = json.loads(line[6:])
                    break
        assert (event["memory"], event["sandbox"]) == (MEMORY, sandbox)
        assert event["details"]["snapshot"] == receipt["snapshot"]
        assert (event["details"]["reasons"], event["details"]["replaced"]) == (["shrunk"], first)
        assert event["details"]["by"] == "repetition"
        assert 'memory_sidecar_accepted_total{by="repetition",reason="shrunk"} 1.0' in running.http.get("/metrics").text
        until(lambda: any(line.get("event") == "accepted what guards objected to" for line in running.lines()))
        (said,) = [line for line in running.lines() if line.get("event") == "accepted what guards objected to"]
        assert (said["level"], said["reasons"], said["replaced"]) == ("warning", ["shrunk"], first)
        rows = running.http.get(path(MEMORY, "snapshots")).json()["snapshots"]
        (pinned,) = [row for row in rows if row["pinned"]]
        assert pinned["snapshot"] == first
        assert pinned["pinned_because"] == f"{receipt['snapshot']} took its place though shrunk"


async def test_the_count_is_sealed_and_signed_like_all_else(home: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    engine = engine_with(store, BOTH)

    async def done(conversation: str) -> ExportReceipt:
        request = ExportRequest(memory=MEMORY, projects=("app",), conversation=conversation)
        return await export(engine, WatchedSandbox(home), request)

    await done("c0")
    delete_rows(home)
    assert (await done("c1")).outcome == "rejected"
    (count,) = store.rglob("refusals.json")
    assert b"shrunk" not in count.read_bytes() and str(home).encode() not in count.read_bytes()
    assert (await done("c2")).outcome == "rejected"
    before = count.read_bytes()
    count.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))  # somebody altered it: it does not count
    assert [(await done(name)).outcome for name in ("c3", "c4")] == ["rejected", "committed"]
    assert not count.exists()
    assert (await verify_memory(engine.repository, MEMORY, NoProgress())).ok
    assert await check_memory(engine.repository, MEMORY) == []


async def test_a_restore_after_an_acceptance_brings_what_was_accepted(home: Path, tmp_path: Path) -> None:
    engine = engine_at(tmp_path / "store", guards=Guards(accept_after_conversations=2))
    for conversation in ("c0", "c1", "c2"):
        request = ExportRequest(memory=MEMORY, projects=("app",), conversation=conversation)
        receipt = await export(engine, WatchedSandbox(home), request)
        delete_rows(home)
    other = empty_home(tmp_path / "other")
    back = await restore(engine, WatchedSandbox(other), RestoreRequest(memory=MEMORY))
    assert (back.snapshot, back.warnings) == (receipt.snapshot, [])
    assert not (other / ".claude-mem/corpora/large.json").exists()


@pytest.mark.parametrize("name", ["e2b", "daytona"])
def test_at_a_provider_a_fresh_sandbox_for_every_conversation(
    name: str, provider_of: Callable[[str], Provider], store: Path
) -> None:
    """What a conductor does: a new sandbox each time, restored from the head, in which the same is cleared out again."""
    provider = provider_of(name)

    def call(verb: str, made: Made, *more: str) -> Ran:
        return run_cli(verb, MEMORY, "--sandbox", made.ref, "--project", "app", *more, store=store)

    first = provider.create()
    make_home(first.home)
    head = call("export", first, "--conversation", "c0").document["snapshot"]
    receipts = []
    for number in (1, 2, 3):
        made = provider.create()
        (made.home / "app").mkdir()
        assert call("restore", made).document["outcome"] == "complete"
        delete_rows(made.home, 20 + number)
        receipts.append(call("export", made, "--conversation", f"c{number}"))
    assert [ran.document["outcome"] for ran in receipts] == ["rejected", "rejected", "committed"]
    assert receipts[2].document["accepted"]["replaced"] == head
    assert [ran.document["round_trips"] for ran in receipts[1:]] == [receipts[0].document["round_trips"]] * 2
    assert (head_of(store), pins_of(store)) == (receipts[2].document["snapshot"], [head])
