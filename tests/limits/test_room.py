"""Room in the store: what a memory and all of them may have there, and what is known of it at start."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, core, export, restore
from sidecar.policy.limits import Limits
from sidecar.policy.retention import Retention
from sidecar.receipts import ExportReceipt
from sidecar.store.pins import pin
from tests.parts import forked_sidecar
from tests.parts.homes import WatchedSandbox, empty_home, engine_at, run_cli, tree, write

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "conductor"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = empty_home(tmp_path / "home")
    grow(home, 1)
    return home


def grow(home: Path, seed: int) -> None:
    write(home / "MEMORY.md", random.Random(seed).randbytes(20_000))


def engine_with(tmp_path: Path, **limits: object) -> Engine:
    return engine_at(tmp_path / "store", limits=Limits(**limits))  # type: ignore[arg-type]


async def exported(engine: Engine, home: Path, memory: str = MEMORY) -> ExportReceipt:
    return await export(
        engine, WatchedSandbox(home), ExportRequest(memory=memory, projects=("~",), allow=("other-memory",))
    )


async def test_a_full_memory_is_refused_before_bytes_travel(home: Path, tmp_path: Path) -> None:
    engine = engine_with(tmp_path, memory_bytes=30_000)
    assert (await exported(engine, home)).outcome == "committed"
    grow(home, 2)
    before = tree(tmp_path / "store")
    refused = await exported(engine, home)
    assert refused.reason is not None
    assert (refused.outcome, refused.reason.code) == ("rejected", "limit-memory-bytes")
    assert "leaves room for" in refused.reason.message, "said in the sandbox"
    assert tree(tmp_path / "store") == before
    grow(home, 1)
    assert (await exported(engine, home)).outcome == "unchanged", "what adds nothing needs no room"


@pytest.mark.parametrize("key", ["memory_bytes", "store_bytes"])
async def test_with_trim_the_oldest_snapshots_make_room_and_no_more_of_them_than_needed(
    key: str, home: Path, tmp_path: Path
) -> None:
    engine = engine_with(tmp_path, **{key: 50_000, "over": "trim"})
    made = [await exported(engine, home)]
    for seed in range(2, 6):
        (home / ".cache").rename(tmp_path / f"cache-{seed}")  # full exports, so that the older ones are not needed
        grow(home, seed)
        request = ExportRequest(memory=MEMORY, projects=("~",), force=True)
        made.append(await export(engine, WatchedSandbox(home), request))
        assert made[-1].outcome == "committed", made[-1].reason
    left = await engine.repository.list_snapshot_ids(MEMORY)
    needed = sum(row.packed_bytes for row in made if row.snapshot in left)
    assert left == sorted((row.snapshot or "" for row in made[-len(left) :]), reverse=True), "the oldest go first"
    assert 50_000 - max(row.packed_bytes for row in made) < needed <= 50_000


async def test_what_may_not_be_forgotten_makes_no_room(home: Path, tmp_path: Path) -> None:
    engine = engine_with(tmp_path, memory_bytes=50_000, over="trim")
    first = await exported(engine, home)
    await pin(engine.repository, MEMORY, first.snapshot or "")
    for seed in (2, 3):
        (home / ".cache").rename(tmp_path / f"cache-{seed}")
        grow(home, seed)
        receipt = await export(engine, WatchedSandbox(home), ExportRequest(memory=MEMORY, projects=("~",), force=True))
    assert receipt.reason is not None and receipt.reason.code == "limit-memory-bytes"
    assert "nothing forgotten" in receipt.reason.message
    assert first.snapshot in await engine.repository.list_snapshot_ids(MEMORY)


async def test_what_is_kept_beside_the_head_takes_no_ordinary_snapshots_place(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    write(home / ".codex/session_index.jsonl", b"{}")
    engine = engine_with(tmp_path, memory_bytes=60_000, over="trim")
    kept = []
    for seed in range(4):
        write(home / "memory/today.md", random.Random(seed).randbytes(10_000))
        kept.append((await exported(engine, home)).snapshot)
    (home / ".codex").rename(tmp_path / "codex")
    for seed in range(4, 8):
        write(home / "memory/today.md", random.Random(seed).randbytes(10_000))
        receipt = await exported(engine, home)
        assert receipt.outcome == "rejected"
    assert set(kept) <= set(await engine.repository.list_snapshot_ids(MEMORY))
    # And what was rejected does not stand in the way of what comes after it.
    (tmp_path / "codex").rename(home / ".codex")
    for seed in range(8, 12):
        write(home / "memory/today.md", random.Random(seed).randbytes(10_000))
        receipt = await exported(engine, home)
        assert receipt.outcome == "committed", receipt.reason


def part(home: Path, seed: int) -> None:
    """Change half of a memory."""
    write(home / "memory/today.md", random.Random(seed).randbytes(9000))


@pytest.mark.parametrize("key", ["memory_bytes", "store_bytes"])
async def test_a_memory_whose_packs_leave_no_room_is_folded(key: str, tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", random.Random(1).randbytes(11_000))
    engine = engine_with(tmp_path, **{key: 45_000, "over": "trim"})
    for seed in range(8):
        part(home, seed)
        before = await engine.repository.list_snapshot_ids(MEMORY)
        receipt = await exported(engine, home)
        assert receipt.outcome == "committed", receipt.reason
        gone = set(before) - set(await engine.repository.list_snapshot_ids(MEMORY))
        told = [words for words in receipt.warnings if "forgotten" in words]
        assert [f"{len(gone)} of the oldest" in words for words in told] == [True] * bool(gone)
    assert receipt.snapshot and gone != set(before), "folded now and then, and not each time"
    other = empty_home(tmp_path / "other")
    came = await restore(engine, WatchedSandbox(other), RestoreRequest(memory=MEMORY, projects=("~",)))
    assert came.outcome == "complete"
    assert (other / "memory/today.md").read_bytes() == (home / "memory/today.md").read_bytes()


async def test_nothing_is_forgotten_unless_it_is_enough(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", random.Random(1).randbytes(11_000))
    engine = engine_with(tmp_path, memory_bytes=48_000, over="trim")
    for seed in range(3):
        part(home, seed)
        made = await exported(engine, home)
    await pin(engine.repository, MEMORY, made.snapshot or "")
    part(home, 3)
    before = tree(tmp_path / "store")
    refused = await exported(engine, home)
    assert refused.reason is not None
    assert (refused.outcome, refused.reason.code) == ("rejected", "limit-memory-bytes")
    assert len(await engine.repository.list_snapshot_ids(MEMORY)) == 3 and tree(tmp_path / "store") == before


async def test_a_rule_about_bytes_forgets_nothing_for_a_head_that_is_too_large(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", random.Random(1).randbytes(11_000))
    engine = engine_at(tmp_path / "store", retention=Retention(memory_bytes=45_000))
    for seed in range(5):
        part(home, seed)
        receipt = await exported(engine, home)
    assert len(await engine.repository.list_snapshot_ids(MEMORY)) == 5
    (told,) = receipt.warnings
    assert "more in the store than retention.memory_bytes allows (45,000): its head alone" in told


async def test_the_store_is_counted_now_and_then_and_before_it_refuses(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with(tmp_path, store_bytes=70_000)
    lists = []
    counted = engine.repository.store.list

    def listed(prefix: str):  # type: ignore[no-untyped-def]
        lists.append(prefix)
        return counted(prefix)

    monkeypatch.setattr(engine.repository.store, "list", listed)
    for number in range(3):
        assert (await exported(engine, home, f"memory-{number}")).outcome == "committed"
    assert lists.count("memories/") == 1, "the second and third time it was known"
    refused = await exported(engine, home, "memory-3")
    assert refused.reason is not None and refused.reason.code == "limit-store-bytes"
    assert lists.count("memories/") == 2
    await engine.repository.delete_memory("memory-0")
    assert (await exported(engine, home, "memory-3")).outcome == "committed", "counted again before it is refused"
    monkeypatch.setattr(core, "STALE_SECONDS", 0.0)
    await engine.repository.delete_memory("memory-1")
    assert (await exported(engine, home, "memory-4")).outcome == "committed"


def test_a_limit_below_the_hot_tier_is_refused_at_start_with_its_line(home: Path, tmp_path: Path) -> None:
    store, config = tmp_path / "store", tmp_path / "config.toml"
    words = ["export", MEMORY, "--sandbox", f"local:{home}", "--project", "~"]
    assert run_cli(*words, store=store).code == 0
    config.write_text("[limits]\nfiles = 100\nbytes = 19999\n")
    served = forked_sidecar.run(
        ["serve", f"--store=file:{store}", "--bind=127.0.0.1:0", f"--config={config}"],
        env={**os.environ, "MEMORY_SIDECAR_TOKEN": "a-token-for-the-tests-0123456789"},
        text=True,
    )
    assert served.returncode == 2
    assert f"{config}:3: [limits] bytes is 19,999, below the hot tier of 'conductor'" in served.stderr
    checked = run_cli("config", "check", "--config", config, store=store)
    assert (checked.code, checked.error) == (2, "bad-config")
    assert "20000 or more" in checked.document["error"]["hint"]

    config.write_text("[limits]\nbytes = 19999\n[limits.memories.conductor]\nbytes = 20000\n")
    assert run_cli("config", "check", "--config", config, store=store).code == 0
    config.write_text("[limits.memories.'con*']\nfiles = 9\nbytes = 3\n")
    checked = run_cli("config", "check", "--config", config, store=store)
    assert f"{config}:3: " in checked.document["error"]["message"]


@pytest.mark.parametrize(
    ("text", "line", "least"),
    [
        ("[limits]\nover = 'trim'\nfile_bytes = 19999\n", 3, 20_000),
        ("[limits]\nfiles = 2\n", 2, 3),
        ("[limits]\ndepth = 1\n", 2, 2),
        ("[limits.layouts.three-tier]\nfiles = 9\nbytes = 20000\n", 3, 20_005),
        ("[limits.memories.'*']\nfile_bytes = 100\n", 2, 20_000),
    ],
)
def test_every_limit_below_the_hot_tier_is_found(text: str, line: int, least: int, home: Path, tmp_path: Path) -> None:
    store, config = tmp_path / "store", tmp_path / "config.toml"
    write(home / "memory/MEMORY.md", b"index")
    assert run_cli("export", MEMORY, "--sandbox", f"local:{home}", "--project", "~", store=store).code == 0
    config.write_text(text)
    checked = run_cli("config", "check", "--config", config, store=store)
    assert (checked.code, checked.error) == (2, "bad-config"), checked.document
    assert f"{config}:{line}: " in checked.document["error"]["message"]
    assert f"Set it to {least} or more" in checked.document["error"]["hint"]
    key, _, low = text.splitlines()[line - 1].partition(" = ")
    config.write_text(text.replace(f"{key} = {low}", f"{key} = {least}"))
    assert run_cli("config", "check", "--config", config, store=store).code == 0


def test_a_store_that_cannot_be_used_is_said_once(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[limits]\nbytes = 5\n")
    checked = run_cli("config", "check", "--config", config, store=f"volume:{tmp_path}")
    assert checked.code == 1
    (problem,) = checked.document["problems"]
    assert "No volume is mounted" in problem["message"]
