"""Honest standings after damage: each snapshot is called what it is, `verify` counts the head and names the cure."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from sidecar.cli import main
from tests.parts.homes import Ran, claude_mem_home, empty_home, observe, run_cli, titles
from tests.parts.services import path, serving

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "m"


class Made(NamedTuple):
    """Three heads one after the other, a snapshot that diverged and one that was rejected; and the sandbox of the head."""

    store: Path
    home: Path
    heads: list[str]
    diverged: str
    rejected: str

    @property
    def top(self) -> Path:
        return self.store / "memories" / MEMORY

    def standings(self) -> dict[str, str]:
        rows = run_cli("log", MEMORY, store=self.store).document["snapshots"]
        return {row["snapshot"]: row["standing"] for row in rows}

    def place(self, kind: str, snapshot: str) -> Path:
        """Where an object that only this snapshot needs is."""
        manifest = self.top / f"snapshots/{snapshot}.json"
        if kind == "manifest":
            return manifest
        pack = json.loads(manifest.read_bytes())["packs"][-1]
        return self.top / f"packs/{pack['id']}.{'index.gz' if kind == 'index' else 'tar.' + pack['codec']}"


def exported(store: Path, home: Path, *more: str) -> Ran:
    return run_cli("export", MEMORY, "--sandbox", f"local:{home}", *more, store=store)


def restored(store: Path, home: Path) -> Ran:
    return run_cli("restore", MEMORY, "--sandbox", f"local:{home}", store=store)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("standings")
    store, home = folder / "store", claude_mem_home(folder / "home", rows=30)
    heads = [exported(store, home).document["snapshot"]]
    stale, worse = empty_home(folder / "stale"), empty_home(folder / "worse")
    assert restored(store, stale).code == 0
    for number in (1, 2):
        observe(home, 3, f"round {number}")
        heads.append(exported(store, home).document["snapshot"])
    observe(stale, 3, "elsewhere")
    diverged = exported(store, stale)
    assert (diverged.code, diverged.document["outcome"]) == (3, "diverged")
    assert restored(store, worse).code == 0
    (worse / ".claude-mem/claude-mem.db").unlink()
    rejected = exported(store, worse)
    assert (rejected.code, rejected.error) == (3, "required-missing")
    return Made(store, home, heads, diverged.document["snapshot"], rejected.document["snapshot"])


@pytest.fixture
def made(once: Made, tmp_path: Path) -> Made:
    for folder in ("store", "home"):
        shutil.copytree(getattr(once, folder), tmp_path / folder, symlinks=True)
    return once._replace(store=tmp_path / "store", home=once.home)


def flip(place: Path) -> None:
    data = place.read_bytes()
    place.write_bytes(data[:-10] + bytes([data[-10] ^ 0x20]) + data[-9:])


def cut(place: Path) -> None:
    place.write_bytes(place.read_bytes()[:-5])


HEADS: dict[str, Callable[[Path], None]] = {"flipped": flip, "cut": cut, "gone": Path.unlink}


def usual(made: Made) -> dict[str, str]:
    return {
        made.rejected: "rejected",
        made.diverged: "diverged",
        made.heads[2]: "head",
        made.heads[1]: "earlier head",
        made.heads[0]: "earlier head",
    }


def test_standings_of_a_whole_memory(made: Made) -> None:
    assert made.standings() == usual(made)


@pytest.mark.parametrize("how", HEADS)
def test_with_a_damaged_head_each_snapshot_is_still_called_what_it_is(
    how: str, made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    HEADS[how](made.top / "head.json")
    document = run_cli("log", MEMORY, store=made.store).document
    assert (document["head"], bool(document["problem"])) == (None, True)
    assert made.standings() == {**usual(made), made.heads[2]: "earlier head"}
    for snapshot, standing in {made.heads[1]: "earlier head", made.diverged: "diverged"}.items():
        assert run_cli("show", MEMORY, snapshot, store=made.store).document["standing"] == standing
    assert main(["log", MEMORY, f"--store=file:{made.store}"]) == 0
    assert f"`memory-sidecar verify {MEMORY}` says what to do" in capsys.readouterr().out


@pytest.mark.parametrize("how", HEADS)
def test_verify_counts_a_damaged_head_and_its_cure_cures(
    how: str, made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    HEADS[how](made.top / "head.json")
    ran = run_cli("verify", MEMORY, store=made.store)
    (report,) = ran.document["memories"]
    assert (ran.code, ran.document["ok"], report["damaged"], bool(report["head_problem"])) == (1, False, 1, True)
    assert main(["verify", MEMORY, f"--store=file:{made.store}"]) == 1
    said = capsys.readouterr().out
    assert "1 damaged" in said and "Cure: " in said
    command = re.search(r"`memory-sidecar (rollback [^`]*)`", said)
    assert command is not None
    assert run_cli(*shlex.split(command[1]), store=made.store).code == 0
    # The head again, and all that was before as it was.
    assert made.standings() == usual(made)
    assert run_cli("verify", MEMORY, store=made.store).code == 0
    other = empty_home(tmp_path / "other")
    assert restored(made.store, other).document["snapshot"] == made.heads[2]
    assert titles(other) == titles(made.home)


def test_a_restore_takes_what_was_the_head_and_not_what_diverged_later(made: Made, tmp_path: Path) -> None:
    (made.top / "head.json").unlink()
    back = restored(made.store, empty_home(tmp_path / "other")).document
    assert (back["outcome"], back["snapshot"], back["wanted"]) == ("complete", made.heads[2], "head")


def test_the_next_export_mends_a_head_that_is_gone_and_the_history_stays(made: Made, tmp_path: Path) -> None:
    (made.top / "head.json").unlink()
    other = empty_home(tmp_path / "other")
    restored(made.store, other)
    observe(other, 2, "afterwards")
    receipt = exported(made.store, other).document
    assert receipt["outcome"] == "committed"
    assert made.standings() == {receipt["snapshot"]: "head", **usual(made), made.heads[2]: "earlier head"}


@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_an_export_beside_a_damaged_head_never_says_none(
    how: str, made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    HEADS[how](made.top / "head.json")
    other = empty_home(tmp_path / "other")
    restored(made.store, other)
    observe(other, 2, "afterwards")
    capsys.readouterr()
    assert main(["export", MEMORY, "--sandbox", f"local:{other}", f"--store=file:{made.store}"]) == 3
    said = capsys.readouterr().out
    assert "as there is no head that can be read" in said and "None" not in said
    kept = re.search(r"memory-sidecar (accept \S+ \S+)", said)
    assert kept is not None
    for words in (["log", MEMORY], ["verify", MEMORY], ["list"], ["restore", MEMORY, "--sandbox", f"local:{other}"]):
        main([*words, f"--store=file:{made.store}"])
        assert "None" not in capsys.readouterr().out
    # And the command that it names makes it the head, of which the others are what they were.
    assert run_cli(*kept[1].split(), store=made.store).code == 0
    newest = kept[1].split()[-1]
    assert made.standings() == {newest: "head", **usual(made), made.heads[2]: "earlier head"}


@pytest.mark.parametrize("kind", ["manifest", "pack", "index"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_damaged_snapshot_is_called_so_and_the_others_what_they_are(kind: str, number: int, made: Made) -> None:
    """Most are deltas over the one before: what is missing of that is missing of those after it."""
    hit = _needing(made, kind, made.heads[number])
    cut(made.place(kind, made.heads[number]))
    expected = {name: "damaged" if name in hit else standing for name, standing in usual(made).items()}
    assert made.standings() == expected
    document = run_cli("log", MEMORY, store=made.store).document
    assert document["head"] == made.heads[2]
    assert all(bool(row["problem"]) == (row["standing"] == "damaged") for row in document["snapshots"])


def _needing(made: Made, kind: str, snapshot: str) -> set[str]:
    """The snapshots that need the last pack of one, by their own manifests."""
    if kind.endswith("manifest"):
        return {snapshot}
    pack = made.place(kind, snapshot).name.partition(".")[0]
    manifests = {file.stem: json.loads(file.read_bytes()) for file in (made.top / "snapshots").glob("2*.json")}
    return {name for name, one in manifests.items() if pack in {row["id"] for row in one["packs"]}}


def test_damage_that_only_a_hash_tells_shows_once_it_was_found_and_not_any_more_once_it_is_mended(made: Made) -> None:
    place = made.place("pack", made.heads[2])
    whole = place.read_bytes()
    flip(place)
    assert run_cli("verify", MEMORY, store=made.store).code == 1
    row = run_cli("log", MEMORY, store=made.store).document["snapshots"][2]
    assert (row["snapshot"], row["standing"]) == (made.heads[2], "damaged")
    assert place.name in row["problem"] and f"`memory-sidecar verify {MEMORY}` looks again" in row["problem"]
    place.write_bytes(whole)
    assert run_cli("verify", MEMORY, store=made.store).code == 0
    assert made.standings() == usual(made)


@pytest.mark.parametrize("kind", ["pack", "manifest", "no manifest"])
def test_a_head_whose_snapshot_is_damaged_is_counted_once_and_its_cure_cures(
    kind: str, made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hit = _needing(made, kind, made.heads[2])
    if kind == "no manifest":
        made.place("manifest", made.heads[2]).unlink()
    else:
        flip(made.place(kind, made.heads[2]))
    ran = run_cli("verify", MEMORY, store=made.store)
    (report,) = ran.document["memories"]
    assert (ran.code, report["damaged"]) == (1, len(hit))
    assert made.heads[2] in report["head_problem"]
    assert main(["log", MEMORY, f"--store=file:{made.store}"]) == 0
    said = capsys.readouterr().out
    assert ("head, damaged" in said) == (kind != "no manifest")
    assert "The head names snapshot" in said if kind == "no manifest" else True
    command = re.search(r"`memory-sidecar (rollback [^`]*)`", report["cure"])
    assert command is not None and command[1].endswith(made.heads[1])
    # The other cure that it names: the next export of a sandbox that has this memory.
    assert "the next export of a sandbox" in report["cure"]
    other = empty_home(tmp_path / "other")
    assert restored(made.store, other).document["snapshot"] == made.heads[1]
    observe(other, 2, "afterwards")
    receipt = exported(made.store, other).document
    assert receipt["outcome"] == "committed"
    left = {name: "damaged" if name in hit else standing for name, standing in usual(made).items()}
    if kind == "no manifest":
        del left[made.heads[2]]
    assert made.standings() == {receipt["snapshot"]: "head", **left}


def test_a_damaged_snapshot_beside_a_good_head_needs_no_cure(made: Made) -> None:
    flip(made.place("manifest", made.diverged))
    ran = run_cli("verify", MEMORY, store=made.store)
    (report,) = ran.document["memories"]
    assert (ran.code, report["damaged"], report["head_problem"], report["cure"]) == (1, 1, "", "")


def test_where_nothing_is_whole_verify_says_so(made: Made) -> None:
    for file in (made.top / "snapshots").glob("2*.json"):
        flip(file)
    ran = run_cli("verify", MEMORY, store=made.store)
    (report,) = ran.document["memories"]
    assert (ran.code, report["damaged"]) == (1, 5)
    assert "No snapshot is whole" in report["cure"] and "None" not in report["cure"]


def test_the_service_tells_the_same(made: Made, tmp_path: Path) -> None:
    flip(made.top / "head.json")
    with serving(made.store, tmp_path / "log") as running:
        answer = running.http.get(path(MEMORY, "snapshots")).json()
        assert (answer["head"], bool(answer["problem"])) == (None, True)
        standings = {row["snapshot"]: row["standing"] for row in answer["snapshots"]}
        assert standings == {**usual(made), made.heads[2]: "earlier head"}
        one = running.http.get(path(MEMORY, "snapshots", made.heads[2])).json()
        assert one["standing"] == "earlier head"
        done = running.http.put(path(MEMORY, "head"), json={"snapshot": made.heads[2]}).json()
        assert (done["head"], done["previous"]) == (made.heads[2], None)
        answer = running.http.get(path(MEMORY, "snapshots")).json()
        assert {row["snapshot"]: row["standing"] for row in answer["snapshots"]} == usual(made)
        assert answer["problem"] == ""


def test_what_lost_a_race_is_not_taken_for_a_head_that_was() -> None:
    """Two made for the same place: the one that others grew out of had it."""
    from datetime import UTC, datetime, timedelta

    from sidecar.store.manifest import rebuild_head
    from tests.retention.stores import manifest_of

    start = datetime(2026, 1, 1, tzinfo=UTC)

    def one(number: int, parent: str, generation: int, rejected: str = ""):  # type: ignore[no-untyped-def]
        from dataclasses import replace

        name = f"20260101T00000000{number}Z-0000000{number}"
        manifest = manifest_of(MEMORY, name, start + timedelta(milliseconds=number), [], rejected=rejected)
        return replace(manifest, parent=parent, generation=generation)

    first = one(1, "", 0)
    lost, won = one(2, first.snapshot, 5), one(3, first.snapshot, 5)
    refused = one(4, won.snapshot, 0, "shrunk: …")
    last = one(5, won.snapshot, 6)
    head = rebuild_head([last, refused, won, lost, first])
    assert head is not None
    assert [snapshot for snapshot, _ in head.history] == [last.snapshot, won.snapshot, first.snapshot]
    assert rebuild_head([]) is None and rebuild_head([refused]) is None
