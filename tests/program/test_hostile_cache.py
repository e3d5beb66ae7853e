"""The files of the program in a sandbox, written by an agent that means harm: an export is full then, and still an export."""

from __future__ import annotations

import hashlib
import json
import marshal
import os
import stat
import string
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from sidecar.format import index
from sidecar.program import cache, places, rows
from tests.parts.commands import ended, start
from tests.parts.homes import Ran, empty_home, project_tree, run_cli, three_tier_home, write

# A tuple that holds a dictionary whose key is the tuple, which is not finished: to hash it is a segmentation fault.
DEADLY = bytes([ord("(") | 0x80]) + struct.pack("<i", 1) + b"{r" + struct.pack("<i", 0) + b"N0"
FORMER = f"4 {sys.version_info[0]}.{sys.version_info[1]}"


class Scene:
    """A home whose memory was exported once, and has changed since."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.home = three_tier_home(empty_home(folder / "home"))
        first = self.export()
        assert (first.code, first.document["outcome"]) == (0, "committed")
        self.notes = self.home / ".cache/memory-sidecar/conductor"
        self.index = self.notes / f"index-{first.document['snapshot']}"
        assert self.index.is_file()
        write(self.home / "MEMORY.md", b"# Long term\nand what came after\n")

    def export(self) -> Ran:
        """In a process of its own, which may not take for ever."""
        command = start("export", "conductor", f"--sandbox=local:{self.home}", store=self.store)
        try:
            return ended(command, 60)
        finally:
            command.kill()

    def check(self, ran: Ran, folder: Path) -> None:
        """What was exported is what is there, all of it."""
        kept = ran.document["snapshot"]
        restored = empty_home(folder / "restored")
        again = run_cli(
            "restore",
            "conductor",
            "--snapshot",
            kept,
            "--project",
            "~",
            f"--sandbox=local:{restored}",
            store=self.store,
        )
        assert again.code == 0, again
        assert project_tree(restored) == project_tree(self.home)

    def head(self, body: bytes, **fields: Any) -> bytes:
        """An index with this body that says it is what it should be."""
        told = {
            "cache": cache.VERSION,
            "snapshot": self.index.name.partition("-")[2],
            "taken": 1,
            "rules": "",
            "full": "",
            "policy": "",
            "sections": [len(body), *[0] * (rows.SECTIONS - 1)],
            "sha256": hashlib.sha256(body).hexdigest(),
        }
        return json.dumps({**told, **fields}).encode() + b"\n" + body


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def _replaced(place: Path, make: Callable[[Path], object]) -> None:
    place.unlink()
    make(place)


def _huge(place: Path) -> None:
    with place.open("wb") as file:
        file.truncate(1 << 40)


INDEXES: dict[str, Callable[[Scene], object]] = {
    "deadly, as it was written before": lambda s: s.index.write_bytes(s.head(DEADLY, cache=FORMER)),
    "deadly, by another's version": lambda s: s.index.write_bytes(s.head(DEADLY)),
    "true, as it was written before": lambda s: s.index.write_bytes(s.head(marshal.dumps({}), cache=FORMER)),
    "empty": lambda s: s.index.write_bytes(b""),
    "noise": lambda s: s.index.write_bytes(os.urandom(100_000)),
    "a deep head": lambda s: s.index.write_bytes(b"[" * 60_000),
    "a long head": lambda s: s.index.write_bytes(b"1" * 10_000_000),
    "a head of nothing": lambda s: s.index.write_bytes(b"null\n"),
    "a head of lists": lambda s: s.index.write_bytes(s.head(b"", taken=[], rules={}, full=None)),
    "a huge number": lambda s: s.index.write_bytes(s.head(b"").replace(b'"taken": 1', b'"taken": ' + b"9" * 50_000)),
    "a time of nonsense": lambda s: s.index.write_bytes(s.head(b"", taken=float("nan"))),
    "sections of nonsense": lambda s: s.index.write_bytes(s.head(b"abc", sections=[-1, 4, 0, 0, 0, 0, 0, 0])),
    "too few sections": lambda s: s.index.write_bytes(s.head(b"abc", sections=[3])),
    "built on itself": lambda s: s.index.write_bytes(s.head(b"", full=s.index.name.partition("-")[2])),
    "built on something elsewhere": lambda s: s.index.write_bytes(s.head(b"", full="../../../../../etc/passwd")),
    "built on a name that is none": lambda s: s.index.write_bytes(s.head(b"", full="\0")),
    "a pipe": lambda s: _replaced(s.index, os.mkfifo),
    "a folder": lambda s: _replaced(s.index, lambda place: (place / "sub").mkdir(parents=True)),
    "a link to a device": lambda s: _replaced(s.index, lambda place: place.symlink_to("/dev/zero")),
    "a terabyte": lambda s: _replaced(s.index, _huge),
    "nobody's": lambda s: s.index.chmod(0),
}


@pytest.mark.parametrize("harm", INDEXES)
def test_an_index_that_is_none_means_a_full_export(scene: Scene, tmp_path: Path, harm: str) -> None:
    INDEXES[harm](scene)
    ran = scene.export()
    assert (ran.code, ran.document.get("outcome")) == (0, "committed"), ran
    if harm != "nobody's" or os.geteuid():
        assert ran.document["kind"] == "full"
    scene.check(ran, tmp_path)
    write(scene.home / "MEMORY.md", b"# Long term\nand what came after that\n")
    ran = scene.export()
    assert (ran.code, ran.document["outcome"], ran.document["kind"]) == (0, "committed", "delta"), "it has mended"


def test_an_index_as_it_should_be_means_only_what_changed(scene: Scene, tmp_path: Path) -> None:
    ran = scene.export()
    assert (ran.code, ran.document["outcome"], ran.document["kind"]) == (0, "committed", "delta")
    scene.check(ran, tmp_path)


def _known(path: str, kind: str = index.FILE, **more: Any) -> cache.Row:
    return cache.KnownEntry(index.Entry(path, kind, 0o644, 5, 1, "ab" * 32, 65536)._replace(**more), [1, 2, 3, 4, 5])


LIES: dict[str, Callable[[dict[str, cache.Row]], object]] = {
    "a file that never was": lambda e: e.update({"project/x.md": _known("project/x.md")}),
    "a way out": lambda e: e.update({"project/../../x": _known("project/../../x")}),
    "nothing at all": lambda e: e.clear(),
    "a folder for a file": lambda e: e.update({"project/MEMORY.md": _known("project/MEMORY.md", index.DIR)}),
    "other sums": lambda e: e.update(
        {"project/memory/blocks.bin": _known("project/memory/blocks.bin", sums=b"x" * 80)}
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_is_not_true_harms_no_export(scene: Scene, tmp_path: Path, lie: str) -> None:
    base = cache.load_base(str(scene.notes), [scene.index.name.partition("-")[2]])
    assert base is not None
    LIES[lie](base.entries)
    cache._write_index(str(scene.notes), base)
    ran = scene.export()
    assert (ran.code, ran.document.get("outcome")) == (0, "committed"), ran
    scene.check(ran, tmp_path)


NOTES: dict[str, Callable[[Scene], object]] = {
    "lineage a pipe": lambda s: _replaced(s.notes / "lineage", os.mkfifo),
    "lineage a folder": lambda s: _replaced(s.notes / "lineage", lambda place: (place / "sub").mkdir(parents=True)),
    "lineage endless": lambda s: _replaced(s.notes / "lineage", lambda place: place.symlink_to("/dev/zero")),
    "lineage no text": lambda s: (s.notes / "lineage").write_bytes(bytes(range(256))),
    "lineage leads elsewhere": lambda s: (s.notes / "lineage").write_text("../../../../../../etc/passwd\n"),
    "the new lineage a folder": lambda s: (s.notes / "lineage.new/sub").mkdir(parents=True),
    "an index of a folder": lambda s: (s.notes / "index-x/sub").mkdir(parents=True),
    "names a pipe": lambda s: os.mkfifo(s.notes / "keys"),
    "names that are none": lambda s: (s.notes / "keys").write_text('{"claude": {"a": [1, 2], "..": ["../..", "/"]}}'),
    "names too deep": lambda s: (s.notes / "keys").write_text("[" * 100_000),
    "an answer too deep": lambda s: (s.notes / "answer").write_text("[" * 100_000),
    "a number for an answer": lambda s: (s.notes / "answer").write_text("7"),
    "a pipe for a turn": lambda s: _replaced(s.notes / "turn", os.mkfifo),
    "a pipe in an old run": lambda s: ((s.notes.parent / "work-x").mkdir(), os.mkfifo(s.notes.parent / "work-x/keep")),
    "noise in an old run": lambda s: write(s.notes.parent / "work-x/keep", bytes(range(256))),
}


@pytest.mark.parametrize("harm", NOTES)
def test_other_notes_that_are_none_end_no_export(scene: Scene, tmp_path: Path, harm: str) -> None:
    NOTES[harm](scene)
    ran = scene.export()
    # Without its lineage, nothing says that the sandbox started from the head.
    outcome = (3, "diverged") if harm.startswith("lineage") else (0, "committed")
    assert (ran.code, ran.document.get("outcome")) == outcome, ran
    scene.check(ran, tmp_path)


@pytest.mark.parametrize("name", ["lineage", "lineage.new", "keys", "keys.new", "answer", "answer.new", "turn"])
def test_nothing_is_written_through_a_link(scene: Scene, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (scene.notes / name).unlink(missing_ok=True)
    (scene.notes / name).symlink_to(victim)
    exported = scene.export()
    restored = run_cli("restore", "conductor", f"--sandbox=local:{scene.home}", store=scene.store)
    assert victim.read_text() == "precious"
    if name != "turn":
        assert exported.document["outcome"] == ("diverged" if name == "lineage" else "committed"), exported
        assert restored.code == 0, restored


@pytest.mark.parametrize("behind", ["memory-sidecar", "memory-sidecar/conductor"])
def test_nothing_is_written_removed_or_given_away_behind_a_link(scene: Scene, tmp_path: Path, behind: str) -> None:
    victim = empty_home(tmp_path / "victim")
    for name in ("index-precious", "work-precious/keep", "own"):
        write(victim / name, b"precious", 0o600)
    before = {str(place): (place.stat().st_uid, place.stat().st_mode) for place in victim.rglob("*")}
    if os.geteuid() == 0:
        os.chown(scene.home, 1234, 1234)  # then what is made in this home is given to that user
    folder = scene.home / ".cache" / behind
    folder.rename(tmp_path / "away")
    folder.symlink_to(victim)
    scene.export()
    assert {str(place): (place.stat().st_uid, place.stat().st_mode) for place in victim.rglob("*")} == before


def _modes(folder: Path) -> set[tuple[str, int]]:
    return {
        ("d" if place.is_dir() else "f", stat.S_IMODE(place.lstat().st_mode)) for place in [folder, *folder.rglob("*")]
    }


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_notes_are_for_the_user_of_the_sandbox_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        scene = Scene(tmp_path)
        assert scene.export().code == 0
        assert run_cli("restore", "conductor", f"--sandbox=local:{scene.home}", store=scene.store).code == 0
    finally:
        os.umask(before)
    assert {place.name.partition("-")[0] for place in scene.notes.iterdir()} >= {"lineage", "index", "answer", "turn"}
    assert _modes(scene.notes.parent) == {("d", 0o700), ("f", 0o600)}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root works in the homes of others")
def test_notes_that_root_makes_in_a_home_belong_to_whose_home_it_is(tmp_path: Path) -> None:
    home = three_tier_home(empty_home(tmp_path / "home"))
    os.chown(home, 1234, 1235)
    for _ in range(2):
        assert run_cli("export", "m", f"--sandbox=local:{home}", store=tmp_path / "store").code == 0
        assert run_cli("restore", "m", f"--sandbox=local:{home}", store=tmp_path / "store").code == 0
    notes = home / ".cache/memory-sidecar/m"
    assert {(place.stat().st_uid, place.stat().st_gid) for place in [notes.parent, notes, *notes.rglob("*")]} == {
        (1234, 1235)
    }


# The reader by itself, with anything that bytes can be

_names = some.text(some.characters(exclude_characters="\0", exclude_categories=()), min_size=1, max_size=20)
_numbers = some.integers(-(1 << 70), 1 << 70)
_signatures: some.SearchStrategy[list[Any]] = some.one_of(
    some.just([]), some.lists(some.integers(0, 1 << 64), min_size=5, max_size=5), some.just([[1, 2, 3, 4, 5], [], []])
)
_digests = some.one_of(some.just(""), some.binary(min_size=32, max_size=32).map(bytes.hex))


@some.composite
def _rows(draw: some.DrawFn) -> tuple[str, cache.Row]:
    path = draw(_names)
    kind = draw(some.sampled_from([index.FILE, index.FILE, index.DIR, index.LINK]))
    if kind == index.DIR:
        return path, cache.KnownEntry(index.Entry(path, kind, draw(some.integers(0, 0o777))), [])
    if kind == index.LINK:
        return path, cache.KnownEntry(index.Entry(path, kind, target=draw(some.text(max_size=9))), [])
    entry = index.Entry(
        path,
        kind,
        draw(some.integers(0, 0o777)),
        draw(some.integers(0, 1 << 66)),
        draw(_numbers),
        draw(_digests),
        draw(some.integers(0, 1 << 40)),
        draw(some.sampled_from([b"", b"", b"s" * 32])),
        database=draw(some.booleans()),
    )
    return path, cache.KnownEntry(entry, draw(_signatures), draw(some.sampled_from(["", "", "f" * 64])))


def _is_sound(base: cache.Base) -> bool:
    """Whether all that an export takes from it is of the kind it expects."""
    for path, (entry, signature, first) in base.entries.items():
        kinds = [str, str, int, int, int, str, int, bytes, str, bool]
        assert [type(value) for value in entry] == kinds and type(path) is type(first) is str
        assert entry[1] in (index.FILE, index.DIR, index.LINK) and min(entry[2], entry[3], entry[6]) >= 0
        assert len(entry[5]) in (0, 64) and set(entry[5]) <= set(string.hexdigits)
        parts = signature if signature and type(signature[0]) is list else [signature]
        assert all(type(part) is list and len(part) in (0, 5) for part in parts)
        assert all(type(number) is int for part in parts for number in part)
    return type(base.taken) is int and type(base.rules) is type(base.policy) is type(base.full) is str


@settings(max_examples=300, deadline=None)
@given(some.lists(_rows(), max_size=8), some.lists(_names, max_size=3))
def test_rows_come_back_as_they_were(found: list[tuple[str, cache.Row]], gone: list[str]) -> None:
    written: dict[str, cache.Row | None] = {**dict.fromkeys(gone), **dict(found)}
    sizes, body = rows.dump(written)
    read, left = rows.load(sizes, memoryview(body))
    assert {path: (tuple(entry), signature, first) for path, (entry, signature, first) in read.items()} == {
        path: (tuple(row[0]), row[1], row[2]) for path, row in written.items() if row is not None
    }
    assert sorted(left) == sorted(path for path, row in written.items() if row is None)


def _loaded(data: bytes) -> cache.Base | None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "index-s").write_bytes(data)
        return cache.load_base(folder, ["s"])


@settings(max_examples=500, deadline=None)
@given(some.one_of(some.binary(max_size=400), some.text(max_size=200).map(str.encode)))
def test_no_bytes_are_a_trouble_to_read(data: bytes) -> None:
    assert _loaded(data) is None


@settings(max_examples=500, deadline=None)
@given(some.lists(_rows(), max_size=6), some.lists(_names, max_size=2), some.data())
def test_no_change_to_a_true_file_is_a_trouble_to_read(
    found: list[tuple[str, cache.Row]], gone: list[str], data: some.DataObject
) -> None:
    """Its hash is made to fit again: whoever changes a file can do that, too."""
    sizes, body = rows.dump({**dict.fromkeys(gone), **dict(found)})
    changed, told = bytearray(body), [*sizes]
    for _ in range(data.draw(some.integers(0, 4))):
        what = data.draw(some.sampled_from(["flip", "cut", "add", "move"]))
        at = data.draw(some.integers(0, max(0, len(changed) - 1)))
        if what == "flip" and changed:
            changed[at] = data.draw(some.integers(0, 255))
        elif what == "cut":
            del changed[at : at + data.draw(some.integers(1, 80))]
        elif what == "add":
            changed[at:at] = data.draw(
                some.one_of(some.binary(max_size=80), some.just(b"\0" * 8), some.just(b"\n[]\n"))
            )
        else:
            told[data.draw(some.integers(0, rows.SECTIONS - 1))] += data.draw(some.integers(-80, 80))
    if data.draw(some.booleans()):
        told[data.draw(some.integers(0, rows.SECTIONS - 1))] += len(changed) - sum(told)
    head: dict[str, Any] = {
        "cache": cache.VERSION,
        "snapshot": "s",
        "taken": 7,
        "rules": "r",
        "full": "",
        "policy": "p",
        "sections": told,
        "sha256": hashlib.sha256(changed).hexdigest(),
    }
    if data.draw(some.integers(0, 9)) == 0:
        head[data.draw(some.sampled_from(sorted(head)))] = data.draw(
            some.one_of(some.none(), some.integers(), some.text(max_size=5), some.lists(some.integers(), max_size=9))
        )
    base = _loaded(json.dumps(head).encode() + b"\n" + changed)
    assert base is None or _is_sound(base)


def test_a_file_that_grows_while_it_is_read_is_not_read_for_ever(tmp_path: Path) -> None:
    maps = f"/proc/{os.getpid()}/maps"  # which says that it has no bytes
    if Path(maps).exists():
        with pytest.raises(OSError):
            places.read_file(maps, 10)
    (tmp_path / "small").write_bytes(b"1234567890")
    assert places.read_file(str(tmp_path / "small"), 10) == b"1234567890"
    with pytest.raises(OSError):
        places.read_file(str(tmp_path / "small"), 9)
