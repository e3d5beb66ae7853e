"""Export and restore behave the same at every provider and on every store, and cost the round trips that were promised."""

from __future__ import annotations

import json
import os
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emulators import Fault
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.errors import SandboxAsleep
from sidecar.layouts import Layout, RootSpec
from sidecar.receipts import ExportReceipt, RestoreReceipt
from tests.parts.homes import (
    KEPT_KEYS,
    claude_mem_home,
    memory_tree,
    project_tree,
    three_tier_home,
    titles,
    told,
    tree,
    without_cache,
    write,
)
from tests.parts.memories import (
    Box,
    Name,
    Provider,
    damage_database,
    engine_on,
    grow,
    grow_large,
    plain_home,
    shell_tools,
    strays,
)
from tests.parts.s3_servers import S3Server

MEMORY = "acme/agent 7"
LATENCY = 0.3

Become = Callable[[S3Server], None]
remote = pytest.mark.parametrize("provider", ["e2b", "daytona"], indirect=True)
on_disk = pytest.mark.parametrize("engine", ["file"], indirect=True)


@pytest.fixture(params=["local", "e2b", "daytona"])
def provider(request: pytest.FixtureRequest, open_provider: Callable[[Name], Provider]) -> Provider:
    return open_provider(request.param)


@pytest.fixture(scope="session")
def bucket(weed: S3Server) -> str:
    return weed.make_bucket(f"providers-{uuid.uuid4().hex}")


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest, tmp_path: Path, credentials_of: Become) -> Engine:
    if request.param == "file":
        return engine_on(f"file:{tmp_path / 'store'}")
    weed: S3Server = request.getfixturevalue("weed")
    credentials_of(weed)
    return engine_on(f"s3://{request.getfixturevalue('bucket')}/{uuid.uuid4().hex}?endpoint={weed.endpoint}")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    return shell_tools(tmp_path / "tools")


async def _export(engine: Engine, box: Box, **asked: object) -> ExportReceipt:
    return await export(engine, box.open(), ExportRequest(memory=MEMORY, **asked))  # type: ignore[arg-type]


async def _committed(engine: Engine, box: Box, kind: str = "", **asked: object) -> ExportReceipt:
    receipt = await _export(engine, box, **asked)
    assert receipt.outcome == "committed", receipt
    assert kind in ("", receipt.kind), receipt
    return receipt


async def _restore(engine: Engine, box: Box, **asked: object) -> RestoreReceipt:
    return await restore(engine, box.open(), RestoreRequest(memory=MEMORY, **asked))  # type: ignore[arg-type]


async def _complete(engine: Engine, box: Box, **asked: object) -> RestoreReceipt:
    receipt = await _restore(engine, box, **asked)
    assert receipt.outcome == "complete", receipt
    return receipt


async def _head(engine: Engine) -> str:
    return (await engine.repository.head(MEMORY)).snapshot


def _same(home: Path, other: Path) -> None:
    assert memory_tree(other / ".claude-mem") == memory_tree(home / ".claude-mem")
    assert project_tree(other) == project_tree(home)
    assert titles(other) == titles(home)


# What leaves and what arrives


async def test_everything_odd_leaves_one_sandbox_and_arrives_whole_in_another(
    engine: Engine, provider: Provider
) -> None:
    """Names with blanks, line breaks, emoji and bytes that are not UTF-8; links, modes, times, holes."""
    box, other = provider.box(), provider.box()
    three_tier_home(claude_mem_home(box.home))
    sent = await _committed(engine, box, "full")
    receipt = await _complete(engine, other)
    _same(box.home, other.home)
    assert len(memory_tree(other.home / ".claude-mem")) > 25 and len(project_tree(other.home)) > 25
    assert json.loads((other.home / ".claude-mem/settings.json").read_bytes()) == KEPT_KEYS
    assert (receipt.files, receipt.bytes, receipt.snapshot) == (sent.files, sent.bytes, sent.snapshot)
    assert (told(sent), receipt.warnings) == ([], [])
    assert [row.check for row in (*sent.databases, *receipt.databases)] == ["ok", "ok"]
    assert (sent.sandbox, receipt.sandbox) == (box.ref, other.ref)
    held = b"".join(path.read_bytes() for path in other.home.rglob("*") if path.is_file())
    assert b"hunter2" not in held


async def test_only_what_changed_leaves_the_next_time_and_nothing_when_nothing_did(
    engine: Engine, provider: Provider
) -> None:
    box, other = provider.box(), provider.box()
    plain_home(box.home, rows=100)
    write(box.home / "memory/with blank.md", b"blank")
    write(box.home / "memory/run.sh", b"#!/bin/sh\n", 0o755)
    grow_large(box.home, size=300_000)
    full = await _committed(engine, box, "full")
    unchanged = await _export(engine, box)
    assert (unchanged.outcome, unchanged.snapshot, unchanged.packed_bytes) == ("unchanged", full.snapshot, 0)
    grow(box.home)
    (box.home / "memory/with blank.md").unlink()
    os.chmod(box.home / "memory/run.sh", 0o700)
    delta = await _committed(engine, box, "delta")
    assert delta.parent == full.snapshot
    assert 0 < delta.packed_bytes < full.packed_bytes / 4
    await _complete(engine, other)
    _same(box.home, other.home)
    again = await _export(engine, other)
    assert (again.outcome, again.snapshot) == ("unchanged", delta.snapshot)


async def test_a_large_pack_leaves_and_arrives_whole(engine: Engine, provider: Provider) -> None:
    box, other = provider.box(), provider.box()
    plain_home(box.home)
    grow_large(box.home)
    provider.clear()
    receipt = await _committed(engine, box, "full")
    assert (receipt.trips.get("command"), receipt.trips.get("download")) == (_first(provider), 1)
    await _complete(engine, other)
    assert without_cache(tree(other.home)) == without_cache(tree(box.home))


@pytest.mark.parametrize("engine", ["file", "s3"], indirect=True)
async def test_a_memory_goes_on_at_another_provider_and_comes_back_to_the_byte(
    engine: Engine, open_provider: Callable[[Name], Provider]
) -> None:
    local, e2b, daytona = (open_provider(name) for name in ("local", "e2b", "daytona"))
    first = e2b.box()
    three_tier_home(claude_mem_home(first.home))
    born = await _committed(engine, first, "full")

    second = daytona.box()
    await _complete(engine, second)
    _same(first.home, second.home)
    grow(second.home, "at the second provider")
    write(second.home / "memory/new 🦊\n.md", b"only here")
    (second.home / "memory/nowhere.md").unlink()
    grown = await _committed(engine, second, "delta")
    assert grown.parent == born.snapshot

    third = e2b.box()
    await _complete(engine, third)
    assert without_cache(tree(third.home)) == without_cache(tree(second.home))
    grow(third.home, "back again")
    last = await _committed(engine, third, "delta")
    assert last.parent == grown.snapshot

    fourth = local.box()
    await _complete(engine, fourth)
    assert without_cache(tree(fourth.home)) == without_cache(tree(third.home))
    assert [word in titles(fourth.home)[-6:] for word in ("at the second provider 2", "back again 2")] == [True, True]
    ended = await _export(engine, fourth)
    assert (ended.outcome, ended.head) == ("unchanged", last.snapshot)
    assert await strays(engine, MEMORY) == set()


# Nothing good is overwritten by something worse


async def test_a_sandbox_that_did_not_start_from_the_head_is_stored_beside_it(
    engine: Engine, provider: Provider
) -> None:
    box, other = provider.box(), provider.box()
    plain_home(box.home)
    await _committed(engine, box)
    await _complete(engine, other)
    grow(other.home, "meanwhile")
    head = await _committed(engine, other, "delta")
    grow(box.home, "too late")
    receipt = await _export(engine, box)
    assert (receipt.outcome, receipt.head) == ("diverged", head.snapshot)
    assert receipt.reason is not None and receipt.reason.code == "diverged"
    assert await _head(engine) == head.snapshot
    fresh = provider.box()
    await _complete(engine, fresh, snapshot=receipt.snapshot)
    assert without_cache(tree(fresh.home)) == without_cache(tree(box.home))


def _lose_the_database(home: Path) -> None:
    (home / ".claude-mem/claude-mem.db").unlink()


def _lose_everything(home: Path) -> None:
    for path in (home / ".claude-mem", home / "memory"):
        path.rename(home / f"gone-{path.name}")
    (home / "MEMORY.md").unlink()


def _shrink(home: Path) -> None:
    (home / "memory/large-1.md").write_bytes(b"most of it is gone")


WORSE = {"shrunk": _shrink, "required-missing": _lose_the_database, "empty": _lose_everything}
"""From bad to worse, one upon the other."""


async def test_what_got_worse_is_kept_but_does_not_become_the_head(engine: Engine, provider: Provider) -> None:
    box, other = provider.box(), provider.box()
    plain_home(box.home, rows=10)
    grow_large(box.home, size=600_000)
    good = without_cache(tree(box.home))
    first = await _committed(engine, box)
    for code, worsen in WORSE.items():
        worsen(box.home)
        receipt = await _export(engine, box)
        assert (receipt.outcome, receipt.reason and receipt.reason.code) == ("rejected", code)
        assert receipt.head == await _head(engine) == first.snapshot
        assert receipt.snapshot in await engine.repository.list_snapshot_ids(MEMORY)
    restored = await _complete(engine, other)
    assert restored.snapshot == first.snapshot
    assert without_cache(tree(other.home)) == good


# Restores over what is there


async def test_replace_removes_another_memory_and_leaves_everything_else(engine: Engine, provider: Provider) -> None:
    box, other = provider.box(), provider.box()
    plain_home(box.home)
    await _committed(engine, box)
    claude_mem_home(other.home, rows=3)
    write(other.home / "memory/of another.md", b"another")
    write(other.home / "MEMORY.md", b"another")
    write(other.home / "src/main.py", b"not memory")
    write(other.home / ".claude-mem/claude-mem.db-wal", b"a stale log")
    await _complete(engine, other)
    assert project_tree(other.home) == project_tree(box.home)
    assert titles(other.home) == titles(box.home)
    assert not (other.home / "memory/of another.md").exists()
    assert not (other.home / ".claude-mem/claude-mem.db-wal").exists()
    assert not (other.home / ".claude-mem/corpora/with blank.md").exists()
    assert (other.home / "src/main.py").read_bytes() == b"not memory"
    assert (other.home / ".claude-mem/.env").exists() and (other.home / ".claude-mem/worker.pid").exists()


async def test_seed_brings_what_is_missing_and_touches_nothing_that_is_there(
    engine: Engine, provider: Provider
) -> None:
    box, other = provider.box(), provider.box()
    plain_home(box.home)
    await _committed(engine, box)
    write(other.home / "MEMORY.md", b"mine")
    write(other.home / "memory/mine.md", b"mine too")
    before = without_cache(tree(other.home))
    await _complete(engine, other, mode="seed")
    after = without_cache(tree(other.home))
    assert {name: after[name] for name in before} == before
    assert titles(other.home) == titles(box.home)
    assert (other.home / "memory/day 🦊.md").read_bytes() == (box.home / "memory/day 🦊.md").read_bytes()


async def test_a_restore_that_finds_a_damaged_database_leaves_the_sandbox_as_it_was(
    engine: Engine, provider: Provider
) -> None:
    box, other = provider.box(), provider.box()
    plain_home(box.home)
    damage_database(box.home)
    damaged = await _export(engine, box)
    assert (damaged.outcome, damaged.reason and damaged.reason.code) == ("rejected", "database-damaged")
    plain_home(other.home, rows=3)
    before = without_cache(tree(other.home))
    provider.clear()
    receipt = await _restore(engine, other, snapshot=damaged.snapshot)
    assert (receipt.outcome, receipt.reason and receipt.reason.code) == ("incomplete", "database-damaged")
    assert without_cache(tree(other.home)) == before
    assert await other.is_clean(), other.left_behind()
    assert receipt.trips == provider.asked()


async def test_a_first_start_is_empty_and_no_error(engine: Engine, provider: Provider) -> None:
    receipt = await _restore(engine, box := provider.box())
    assert (receipt.outcome, receipt.snapshot, tree(box.home)) == ("empty", None, {})


# Without Python


async def test_sh_and_tar_bring_a_memory_out_and_in_where_there_is_no_python(
    engine: Engine, provider: Provider, tools: Path
) -> None:
    box, other = provider.box(tools=tools), provider.box(tools=tools)
    plain_home(box.home)
    write(box.home / "memory/private.md", b"0600", 0o600)
    (box.home / "memory/link.md").symlink_to("private.md")
    sent = await _committed(engine, box, "full")
    assert any("no usable python3" in warning for warning in sent.warnings)
    assert sent.trips == {"command": 3, "download": 1, **_control(provider)} == provider.asked()
    provider.clear()

    write(other.home / "memory/of another.md", b"another")
    write(other.home / "src/main.py", b"not memory")
    receipt = await _complete(engine, other)
    assert receipt.trips == {"command": 2, "upload": 2, **_control(provider)} == provider.asked()
    assert _by_the_second(project_tree(other.home)) == _by_the_second(project_tree(box.home))
    assert titles(other.home) == titles(box.home)
    assert (other.home / "src/main.py").exists()
    for each in (box, other):
        assert await each.is_clean(), each.left_behind()

    grow(other.home)
    later = await _committed(engine, other)
    assert later.parent == sent.snapshot
    unaware = provider.box()
    await _complete(engine, unaware)
    assert titles(unaware.home) == titles(other.home)


@on_disk
async def test_a_name_that_only_python_can_restore_leaves_a_sandbox_without_it_as_it_was(
    engine: Engine, provider: Provider, tools: Path
) -> None:
    box, other = provider.box(), provider.box(tools=tools)
    plain_home(box.home)
    write(box.home / "memory/unit\x1fseparator.md", b"odd")
    await _committed(engine, box)
    plain_home(other.home, rows=3)
    before = without_cache(tree(other.home))
    receipt = await _restore(engine, other)
    assert (receipt.outcome, receipt.reason and receipt.reason.code) == ("incomplete", "name-needs-python")
    assert without_cache(tree(other.home)) == before
    assert await other.is_clean(), other.left_behind()


@on_disk
@pytest.mark.parametrize("provider", ["e2b"], indirect=True)
async def test_what_a_login_shell_says_is_not_taken_for_the_answer(engine: Engine, provider: Provider) -> None:
    box, other = provider.box(), provider.box()
    plain_home(box.home)
    for home in (box.home, other.home):
        write(home / ".bash_profile", b"echo 'Welcome! memory-sidecar begin'\necho '{}' >&2\nfalse\ncd /\n")
    await _committed(engine, box)
    await _complete(engine, other)
    assert titles(other.home) == titles(box.home)


# Round trips, as the provider counts them


@on_disk
async def test_the_receipt_says_the_round_trips_that_the_provider_counted(engine: Engine, provider: Provider) -> None:
    box = provider.box()
    plain_home(box.home)
    sandbox = box.open()

    async def exported() -> ExportReceipt:
        provider.clear()
        receipt = await export(engine, sandbox, ExportRequest(memory=MEMORY))
        assert receipt.round_trips == sum(receipt.trips.values())
        return receipt

    first = await exported()
    assert first.trips == {"command": _first(provider), **_control(provider)} == provider.asked()
    grow(box.home)
    small = await exported()
    assert (small.kind, small.trips) == ("delta", {"command": 1})
    assert small.trips == provider.asked(), "a sandbox that is open is not connected to again"
    unchanged = await exported()
    assert (unchanged.outcome, unchanged.trips) == ("unchanged", {"command": 1})
    assert unchanged.trips == provider.asked()
    assert unchanged.transferred_bytes < 8_000
    grow_large(box.home)
    large = await exported()
    assert (large.kind, large.trips) == ("delta", {"command": 1, "download": 1})
    assert large.trips == provider.asked()

    provider.clear()
    other = provider.box().open()
    cold = await restore(engine, other, RestoreRequest(memory=MEMORY))
    assert cold.trips == {"upload": 1, "command": 1, **_control(provider)} == provider.asked()
    provider.clear()
    warm = await restore(engine, other, RestoreRequest(memory=MEMORY))
    assert warm.trips == {"upload": 1, "command": 1} == provider.asked()
    assert warm.round_trips == 2
    provider.clear()
    after = await export(engine, other, ExportRequest(memory=MEMORY))
    assert (after.outcome, after.trips) == ("unchanged", {"command": 1}), "the restore brought the program"
    assert after.transferred_bytes < 8_000


def _control(provider: Provider) -> dict[str, int]:
    """What connecting for the first time costs."""
    return {"control": 1} if provider.emulator else {}


def _first(provider: Provider) -> int:
    """How many commands the first export takes in a sandbox that nothing was restored into: it lacks the program."""
    return 2 if provider.emulator else 1


# Requests of any length


@on_disk
@pytest.mark.parametrize("there", [50, pytest.param(1_000, marks=pytest.mark.slow)])
async def test_a_thousand_projects_a_long_layout_and_the_longest_id(
    engine: Engine, provider: Provider, there: int
) -> None:
    """No request is too long for any provider. The names are random, so that they stay long when they are packed."""
    chance = random.Random(7)
    patterns = tuple(f"notes/{chance.randbytes(20).hex()}.md" for _ in range(4_300))
    long = Layout(name="long", roots=(RootSpec(name="long", paths=("~/long",)),), keep=("kept.md", *patterns))
    assert len(json.dumps(long.for_sandbox())) > 200_000
    engine = replace(engine, layouts={**engine.layouts, "long": long})
    memory = ("longest/" + "é" * 200)[:200]
    box, other = provider.box(), provider.box()
    write(box.home / "long/kept.md", b"kept")
    projects = tuple(f"~/work/{chance.randbytes(60).hex()}" for _ in range(1_000))
    for number, project in enumerate(projects[-there:]):
        write(box.home / project[2:] / "MEMORY.md", b"%d" % number)
    asked = ExportRequest(memory=memory, projects=projects)
    first = await export(engine, box.open(), asked)
    assert (first.outcome, first.files) == ("committed", there + 1), first.warnings
    write(box.home / projects[-1][2:] / "MEMORY.md", b"changed")
    provider.clear()
    second = await export(engine, box.open(), asked)
    assert (second.outcome, second.kind) == ("committed", "delta")
    assert second.trips == {"command": 1, **_control(provider)} == provider.asked(), "no file was uploaded for it"
    back = await restore(engine, other.open(), RestoreRequest(memory=memory, projects=projects))
    assert (back.outcome, back.files) == ("complete", there + 1), back
    assert without_cache(tree(other.home)) == without_cache(tree(box.home))
    for each in (box, other):
        assert await each.is_clean(), each.left_behind()


@remote
@on_disk
async def test_a_slow_network_costs_its_round_trips_and_no_more(engine: Engine, provider: Provider) -> None:
    box, other = provider.box(), provider.box()
    plain_home(box.home)
    sandbox, target = box.open(), other.open()
    await export(engine, sandbox, ExportRequest(memory=MEMORY))
    await restore(engine, target, RestoreRequest(memory=MEMORY))

    async def small() -> ExportReceipt:
        grow(box.home, str(time.time()))
        return await export(engine, sandbox, ExportRequest(memory=MEMORY))

    async def back() -> RestoreReceipt:
        return await restore(engine, target, RestoreRequest(memory=MEMORY))

    for work, trips in ((small, 1), (back, 2)):
        provider.server.latency = 0
        near = await _seconds(work, trips)
        provider.server.latency = LATENCY
        allowed = near + (trips + 1) * LATENCY
        tries = [far] if (far := await _seconds(work, trips)) < allowed else [far, await _seconds(work, trips)]
        assert trips * LATENCY < min(tries) < allowed, f"{work.__name__}: {near:.2f} s became {tries}"


async def _seconds(work: Callable[[], Awaitable[ExportReceipt | RestoreReceipt]], trips: int) -> float:
    started = time.monotonic()
    assert (await work()).round_trips == trips
    return time.monotonic() - started


# What stays behind: nothing


@on_disk
async def test_nothing_of_ours_stays_in_a_sandbox(engine: Engine, provider: Provider) -> None:
    """A pack that was fetched goes by itself; so does the process that waits for that."""
    box, other = provider.box(), provider.box()
    plain_home(box.home)
    await _committed(engine, box)
    assert await box.is_clean(), box.left_behind()
    grow_large(box.home)
    large = await _committed(engine, box)
    assert large.trips["download"] == 1
    assert box.left_behind(), "something has to watch over the pack, or this test sees nothing"
    await _complete(engine, other)
    assert await other.is_clean(), other.left_behind()
    assert await box.is_clean(within=15), box.left_behind()
    assert len(other.provider.opened[-1].uploads) == 1


# How long a sandbox lives


def _ending_soon(provider: Provider) -> Box:
    """A sandbox that ends in 20 seconds, says its provider."""
    more: dict[str, Any] = {"auto_stop": 1} if provider.name == "daytona" else {}
    box = provider.box(**more)
    if provider.name == "daytona":
        box.emulated.active_at = time.time() - 40
    box.emulated.end_in(20)
    plain_home(box.home)
    return box


@remote
@on_disk
async def test_a_sandbox_about_to_end_is_prolonged_and_exported(engine: Engine, provider: Provider) -> None:
    box = _ending_soon(provider)
    receipt = await _committed(engine, box)
    assert box.emulated.ends_at - time.time() > (200 if provider.name == "e2b" else 50)
    assert told(receipt) == []
    assert receipt.trips == {"command": 2, "control": 2} == provider.asked()
    assert [call.status < 300 for call in provider.server.calls if call.step in ("timeout", "activity")] == [True]


@remote
@on_disk
@pytest.mark.parametrize("status", [403, 500])
async def test_a_sandbox_that_cannot_be_prolonged_is_exported_and_the_receipt_warns(
    engine: Engine, provider: Provider, status: int
) -> None:
    box, other = _ending_soon(provider), provider.box()
    for step in ("timeout", "activity"):
        provider.server.faults.add(Fault(step, "status", status=status, times=None))
    receipt = await _committed(engine, box)
    assert [warning for warning in receipt.warnings if "could not be prolonged" in warning] == told(receipt) != []
    assert provider.server.key not in str(receipt)
    await _complete(engine, other)
    assert titles(other.home) == titles(box.home)


@remote
@on_disk
async def test_a_sandbox_with_time_left_is_not_prolonged(engine: Engine, provider: Provider) -> None:
    box = provider.box()
    plain_home(box.home)
    await _committed(engine, box)
    assert provider.server.count("timeout") + provider.server.count("activity") == 0


@remote
@on_disk
async def test_a_sandbox_asleep_stays_asleep(engine: Engine, provider: Provider) -> None:
    box = _asleep(provider)
    state = box.emulated.state
    with pytest.raises(SandboxAsleep) as refused:
        await _export(engine, box)
    assert refused.value.code == "sandbox-asleep"
    with pytest.raises(SandboxAsleep):
        await _restore(engine, box)
    assert (box.emulated.state, state) in [("paused", "paused"), ("stopped", "stopped")]
    assert {call.step for call in provider.server.calls} == {"info"}
    assert await engine.repository.memories() == []


@remote
@on_disk
async def test_a_sandbox_asleep_is_woken_when_that_is_asked_for_and_the_receipt_says_so(
    engine: Engine, provider: Provider
) -> None:
    box = _asleep(provider)
    receipt = await export(engine, box.open(wake=True), ExportRequest(memory=MEMORY))
    assert receipt.outcome == "committed"
    assert any("was asleep and has been woken" in warning for warning in receipt.warnings)
    assert box.emulated.running
    assert receipt.trips == {"command": 2, "control": 2} == provider.asked()
    target = _asleep(provider)
    restored = await restore(engine, target.open(wake=True), RestoreRequest(memory=MEMORY))
    assert restored.outcome == "complete"
    assert any("has been woken" in warning for warning in restored.warnings)


def _asleep(provider: Provider) -> Box:
    box = provider.box()
    plain_home(box.home)
    box.emulated.pause() if provider.name == "e2b" else box.emulated.stop()
    provider.clear()
    return box


def _by_the_second(found: dict[bytes, tuple[str, int, int, str]]) -> dict[bytes, tuple[str, int, int, str]]:
    """A tree as tar without extensions keeps it: times to the second; folders come only with files in them."""
    return {
        name: (kind, mode, mtime // 10**9, held) for name, (kind, mode, mtime, held) in found.items() if kind != "dir"
    }
