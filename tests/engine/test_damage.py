"""One byte wrong, anywhere in a store: noticed before a sandbox is touched, and the next good snapshot is restored."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from sidecar.engine import ExportRequest, RestoreRequest, export, restore
from sidecar.errors import SnapshotDamaged
from sidecar.host.work import NoProgress
from sidecar.receipts import RestoreReceipt
from sidecar.store.verification import MemoryReport, verify_memory
from tests.parts.homes import (
    WatchedSandbox,
    claude_mem_home,
    empty_home,
    engine_at,
    observe,
    run_cli,
    titles,
    tree,
    without_cache,
)

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "m"
OBJECTS = [f"{kind}-{number}" for kind in ("pack", "index", "manifest") for number in (1, 2, 3)] + ["head"]
Damage = Callable[[bytes], bytes | None]


class Made(NamedTuple):
    """A store with a full snapshot and two deltas over it, oldest first, and what each of them holds."""

    store: Path
    snapshots: list[str]
    held: list[list[str]]
    places: dict[str, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("damage")
    home, store = claude_mem_home(folder / "home", rows=40), folder / "store"
    snapshots, held = [], []
    for number in range(3):
        observe(home, 3, f"round {number}")
        receipt = asyncio.run(export(engine_at(store), WatchedSandbox(home), ExportRequest(memory=MEMORY)))
        assert (receipt.outcome, receipt.kind) == ("committed", "delta" if number else "full")
        snapshots.append(str(receipt.snapshot))
        held.append(titles(home))
    return Made(store, snapshots, held, _places(store, snapshots))


def _places(store: Path, snapshots: list[str]) -> dict[str, Path]:
    """Where each object of the store is, by what it is for."""
    top = store / "memories" / MEMORY
    places = {"head": Path("head.json")}
    for number, snapshot in enumerate(snapshots, 1):
        places[f"manifest-{number}"] = Path(f"snapshots/{snapshot}.json")
        pack = json.loads((top / places[f"manifest-{number}"]).read_bytes())["packs"][-1]
        places[f"pack-{number}"] = Path(f"packs/{pack['id']}.tar.{pack['codec']}")
        places[f"index-{number}"] = Path(f"packs/{pack['id']}.index.gz")
    assert {top / place for place in places.values()} == {
        path for path in top.rglob("*") if path.is_file() and not path.name.startswith(".")
    }
    return places


class Case(NamedTuple):
    """A copy of the store with one object damaged, and a home that holds another memory."""

    store: Path
    home: Path
    sandbox: WatchedSandbox


def _damaged(made: Made, folder: Path, damages: dict[str, Damage]) -> Case:
    store = folder / "store"
    shutil.rmtree(store, ignore_errors=True)
    shutil.copytree(made.store, store)
    for name, damage in damages.items():
        place = store / "memories" / MEMORY / made.places[name]
        changed = damage(place.read_bytes())
        if changed is None:
            place.unlink()
        else:
            place.write_bytes(changed)
    home = folder / "home"
    if not home.exists():
        claude_mem_home(home, rows=5)
    return Case(store, home, WatchedSandbox(home))


def _readable(name: str) -> list[int]:
    """Which snapshots can still be restored when this object is damaged: best first."""
    kind, _, number = name.partition("-")
    if kind == "head":
        return [3, 2, 1]
    if kind == "manifest":
        return [snapshot for snapshot in (3, 2, 1) if snapshot != int(number)]
    return [snapshot for snapshot in (3, 2, 1) if snapshot < int(number)]


def _restored(case: Case, snapshot: str = "latest") -> RestoreReceipt:
    return asyncio.run(restore(engine_at(case.store), case.sandbox, RestoreRequest(memory=MEMORY, snapshot=snapshot)))


def _verified(case: Case) -> MemoryReport:
    return asyncio.run(verify_memory(engine_at(case.store).repository, MEMORY, NoProgress()))


def _flip(share: float) -> Damage:
    def damage(data: bytes) -> bytes:
        at = min(int(len(data) * share), len(data) - 1)
        return data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]

    return damage


DAMAGES: dict[str, Damage] = {
    "first byte": _flip(0),
    "early byte": _flip(0.2),
    "middle byte": _flip(0.5),
    "last byte": _flip(1),
    "cut short": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\n",
    "emptied": lambda data: b"",
    "gone": lambda data: None,
}
TELLING = ("middle byte", "last byte", "cut short", "gone")
"""Those of the default run."""


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=() if how in TELLING else pytest.mark.slow) for how in DAMAGES]
)
@pytest.mark.parametrize("name", OBJECTS)
def test_damage_is_noticed_before_the_sandbox_is_touched_and_the_next_good_snapshot_comes_back(
    name: str, how: str, made: Made, tmp_path: Path
) -> None:
    case = _damaged(made, tmp_path, {name: DAMAGES[how]})
    good = _readable(name)
    if not good:
        before = tree(case.home)
        with pytest.raises(SnapshotDamaged) as refused:
            _restored(case)
        assert (case.sandbox.calls, tree(case.home)) == ([], before)
        assert str(made.places[name]) in refused.value.message
    else:
        receipt = _restored(case)
        assert receipt.outcome == "complete"
        assert receipt.snapshot == made.snapshots[good[0] - 1]
        assert titles(case.home) == made.held[good[0] - 1]
        assert case.sandbox.calls == ["upload", "run"], "nothing of a damaged snapshot is ever sent"
        if good[0] == 3 and name != "head":
            assert (receipt.wanted, receipt.warnings) == ("", [])
        else:
            assert receipt.wanted == ("head" if name == "head" else made.snapshots[2])
            assert made.snapshots[good[0] - 1] in receipt.warnings[0], "which one came back"
            assert ("head" if name == "head" else made.places[name].stem.split(".")[0]) in receipt.warnings[0], (
                "and why"
            )


@pytest.mark.parametrize("how", ["middle byte", "cut short", "gone"])
@pytest.mark.parametrize("name", OBJECTS)
def test_verify_names_every_snapshot_that_is_damaged(name: str, how: str, made: Made, tmp_path: Path) -> None:
    if (name, how) in (("manifest-1", "gone"), ("manifest-2", "gone")):
        pytest.skip("a snapshot that was forgotten looks the same")
    report = _verified(_damaged(made, tmp_path, {name: DAMAGES[how]}))
    assert not report.ok
    wrong = {row.snapshot for row in report.snapshots if not row.ok}
    good = {made.snapshots[number - 1] for number in _readable(name)}
    assert wrong <= set(made.snapshots) - good
    if (name, how) == ("manifest-3", "gone") or name == "head":
        assert report.head_problem
    else:
        assert wrong == set(made.snapshots) - good
        assert all(row.problem for row in report.snapshots if not row.ok)


@pytest.mark.parametrize("name", ["pack-2", "index-3", "manifest-3", "head"])
def test_the_verify_command_fails_and_names_the_damage(name: str, made: Made, tmp_path: Path) -> None:
    case = _damaged(made, tmp_path, {name: DAMAGES["middle byte"]})
    for words in (["verify", MEMORY], ["verify"]):
        ran = run_cli(*words, store=case.store)
        assert (ran.code, ran.document["ok"]) == (1, False)
        (report,) = ran.document["memories"]
        text = json.dumps(report)
        assert made.places[name].stem.split(".")[0] in text
        assert report["head_problem"] if name == "head" else not all(row["ok"] for row in report["snapshots"])


def test_the_verify_command_misses_manifests_that_must_be_there(made: Made, tmp_path: Path) -> None:
    case = _damaged(made, tmp_path, {})
    assert run_cli("pin", MEMORY, made.snapshots[0], store=case.store).code == 0
    for number in (1, 2, 3):
        (case.store / "memories" / MEMORY / made.places[f"manifest-{number}"]).unlink()
    ran = run_cli("verify", MEMORY, store=case.store)
    (report,) = ran.document["memories"]
    assert (ran.code, report["ok"]) == (1, False)
    assert [row["snapshot"] for row in report["snapshots"] if "pinned" in row["problem"]] == [made.snapshots[0]]
    assert made.snapshots[2] in report["head_problem"]


def test_the_verify_command_is_content_with_a_whole_store(made: Made, tmp_path: Path) -> None:
    ran = run_cli("verify", MEMORY, store=_damaged(made, tmp_path, {}).store)
    assert (ran.code, ran.document["ok"]) == (0, True)
    assert len(ran.document["memories"][0]["snapshots"]) == 3


@pytest.mark.parametrize("name", ["pack-3", "index-2", "manifest-3"])
def test_a_damaged_snapshot_that_was_asked_for_by_name_is_refused(name: str, made: Made, tmp_path: Path) -> None:
    case = _damaged(made, tmp_path, {name: DAMAGES["middle byte"]})
    before = without_cache(tree(case.home))
    ran = run_cli(
        *("restore", MEMORY, "--sandbox", f"local:{case.home}", "--snapshot", made.snapshots[2]), store=case.store
    )
    assert (ran.code, ran.error) == (1, "snapshot-damaged")
    assert len(ran.stderr.strip().splitlines()) == 1
    assert without_cache(tree(case.home)) == before


def test_the_restore_command_says_loudly_that_an_older_snapshot_came_back(made: Made, tmp_path: Path) -> None:
    case = _damaged(made, tmp_path, {"pack-3": DAMAGES["last byte"]})
    ran = run_cli("restore", MEMORY, "--sandbox", f"local:{case.home}", store=case.store)
    assert (ran.code, ran.document["outcome"]) == (0, "complete")
    assert (ran.document["snapshot"], ran.document["wanted"]) == (made.snapshots[1], made.snapshots[2])
    assert made.places["pack-3"].name in ran.document["warnings"][0]


@pytest.mark.parametrize("head", ["middle byte", "gone"])
def test_when_every_snapshot_is_damaged_the_error_says_so(head: str, made: Made, tmp_path: Path) -> None:
    flip = DAMAGES["middle byte"]
    case = _damaged(made, tmp_path, {"manifest-1": flip, "pack-2": flip, "index-3": flip, "head": DAMAGES[head]})
    before = without_cache(tree(case.home))
    ran = run_cli("restore", MEMORY, "--sandbox", f"local:{case.home}", store=case.store)
    assert (ran.code, ran.error) == (1, "snapshot-damaged")
    assert "No snapshot of m can be read" in ran.document["error"]["message"]
    assert len(ran.stderr.strip().splitlines()) == 1
    assert without_cache(tree(case.home)) == before


def test_a_memory_without_a_head_or_a_readable_manifest_is_not_taken_for_an_empty_one(
    made: Made, tmp_path: Path
) -> None:
    damages = {f"manifest-{number}": DAMAGES["middle byte"] for number in (1, 2, 3)}
    case = _damaged(made, tmp_path, {**damages, "head": DAMAGES["gone"]})
    ran = run_cli("restore", MEMORY, "--sandbox", f"local:{case.home}", store=case.store)
    assert (ran.code, ran.error) == (1, "snapshot-damaged")
    assert all(snapshot in ran.document["error"]["message"] for snapshot in made.snapshots)
    other = WatchedSandbox(claude_mem_home(empty_home(tmp_path / "other"), rows=1))
    receipt = asyncio.run(export(engine_at(case.store), other, ExportRequest(memory=MEMORY)))
    assert receipt.outcome == "diverged"


def test_two_damages_in_a_row_fall_back_twice(made: Made, tmp_path: Path) -> None:
    case = _damaged(made, tmp_path, {"pack-3": DAMAGES["gone"], "manifest-2": DAMAGES["first byte"]})
    receipt = _restored(case)
    assert (receipt.snapshot, receipt.wanted) == (made.snapshots[0], made.snapshots[2])
    assert titles(case.home) == made.held[0]


@pytest.mark.parametrize("name", ["index-3", "manifest-3", "pack-1"])
def test_an_export_over_a_damaged_base_is_still_saved_whole(name: str, made: Made, tmp_path: Path) -> None:
    """The sandbox knows only a snapshot that is lost: what it brings must not build on it."""
    case = _damaged(made, tmp_path, {})
    _restored(case)
    observe(case.home, 2, "afterwards")
    place = case.store / "memories" / MEMORY / made.places[name]
    place.write_bytes(place.read_bytes()[:-5])
    receipt = asyncio.run(export(engine_at(case.store), case.sandbox, ExportRequest(memory=MEMORY)))
    assert receipt.kind == "full"
    other = WatchedSandbox(empty_home(tmp_path / "other"))
    request = RestoreRequest(memory=MEMORY, snapshot=str(receipt.snapshot))
    assert asyncio.run(restore(engine_at(case.store), other, request)).outcome == "complete"
    assert titles(other.home) == titles(case.home)


def test_a_snapshot_of_another_memory_put_in_its_place_is_damage(made: Made, tmp_path: Path) -> None:
    """Whole and sealed, but somebody else's: a manifest is only good under its own name."""
    case = _damaged(made, tmp_path, {})
    top = case.store / "memories" / MEMORY
    shutil.copy(top / made.places["manifest-1"], top / made.places["manifest-3"])
    receipt = _restored(case)
    assert (receipt.snapshot, receipt.wanted) == (made.snapshots[1], made.snapshots[2])
