"""Tarballs from outside, imported or brought by sandboxes without Python, are hostile input as packs are."""

from __future__ import annotations

import asyncio
import json
import os
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.engine import ExportRequest, RestoreRequest, export, restore
from sidecar.format.roots import make_hint
from tests.parts import forked_sidecar
from tests.parts.forgery import pax
from tests.parts.homes import WatchedSandbox, empty_home, run_cli, tree
from tests.parts.hostile_archives import (
    ANSWERS,
    ARCHIVES,
    ASKED,
    END,
    ESCAPED,
    GOOD,
    HONEST_ROOT,
    MEMORY,
    PLANTED,
    BareForgery,
    Chance,
    _gz,
    engine_for,
    file,
    folder,
    link,
    long_name,
    plant,
    read_answer,
    read_archive,
    record,
    tarball_of,
)

PATIENCE = 240
"""Seconds for one of them on a busy machine; what hangs takes all of them."""
ROOM = 300 << 10
"""KiB that reading any of them may take, Python and the libraries included."""
SLOW = ("zeros-in-a-member",)
"""Gigabytes have to be read before it can be known what they are of."""
AROUND = (Path("/"), Path("/tmp"), Path("/var/tmp"), Path.home())
"""Where what escaped would be seen, besides the folders of the test."""


def is_default(number: int, name: str) -> bool:
    """Each takes a process of its own: every third is tried by default, all of them in the campaign."""
    return number % 3 == 0 and name not in SLOW


@pytest.fixture(autouse=True)
def nothing_escapes(tmp_path: Path) -> Iterator[None]:
    """A deep folder to work in, and nothing new anywhere above it."""
    before = {place: set(os.listdir(place)) for place in AROUND}
    yield
    for place, names in before.items():
        assert not [name for name in set(os.listdir(place)) - names if ESCAPED in name]
    spool = tmp_path / "a/b/c/d/spool"
    assert list(tmp_path.rglob(f"*{ESCAPED}*")) == []
    assert not spool.exists() or list(spool.iterdir()) == []
    assert sorted(place.name for place in tmp_path.iterdir()) in ([], ["a"])


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a/b/c/d/spool").mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a/b/c/d/spool"))
    return tmp_path / "a/b/c/d"


def _lines(deep: Path, *words: str, seconds: float) -> list[dict[str, Any]]:
    """What a process of its own says of what it read."""
    ran = forked_sidecar.run(
        [*words, deep],
        kind="tests.parts.hostile_archives",
        env={**os.environ, "TMPDIR": str(deep / "spool")},
        text=True,
        timeout=seconds,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize(
    "case",
    [
        name if is_default(number, name) else pytest.param(name, marks=pytest.mark.slow)
        for number, name in enumerate(ARCHIVES)
    ],
)
def test_a_hostile_archive_is_refused_in_time_and_in_little_memory(case: str, deep: Path) -> None:
    (said,) = _lines(deep, "case", case, seconds=PATIENCE)
    assert (said["code"], said["broke"]) == (ARCHIVES[case][0], "")
    assert said["peak_kib"] < ROOM
    assert not (deep / "store").exists()


LAWFUL: dict[str, tuple[Callable[[], bytes], dict[str, bytes]]] = {
    "gzip-members": (
        lambda: _gz(GOOD) + _gz(b"") + _gz(file(".claude-mem/modes/b.json", b"b"), END) + bytes(512),
        {".claude-mem/modes/code.json": b"{}", ".claude-mem/modes/b.json": b"b"},
    ),
    "one-block-for-an-end": (lambda: _gz(GOOD, bytes(512)), {".claude-mem/modes/code.json": b"{}"}),
    "padded-to-records": (lambda: _gz(GOOD, bytes(20 * 512)), {".claude-mem/modes/code.json": b"{}"}),
    "pax-path": (
        lambda: _gz(pax(record(b"path", ".claude-mem/modes/\N{BRAIN}.json".encode())), file("x", b"p"), END),
        {".claude-mem/modes/\N{BRAIN}.json": b"p"},
    ),
    "pax-size": (
        lambda: _gz(
            pax(record(b"size", b"3") + record(b"mtime", b"1.5")), file(".claude-mem/modes/b.json", b"abc"), END
        ),
        {".claude-mem/modes/b.json": b"abc"},
    ),
    "pax-for-all": (
        lambda: _gz(pax(record(b"comment", b"0123abcd"), b"g"), GOOD, END),
        {".claude-mem/modes/code.json": b"{}"},
    ),
    "long-name": (
        lambda: _gz(long_name(b".claude-mem/corpora/" + b"d/" * 40 + b"n" * 120), file("x", b"long"), END),
        {".claude-mem/corpora/" + "d/" * 40 + "n" * 120: b"long"},
    ),
    "the-last-of-two-counts": (
        lambda: _gz(GOOD, file(".claude-mem/modes/code.json", b"later"), END),
        {".claude-mem/modes/code.json": b"later"},
    ),
    "folders-and-links": (
        lambda: _gz(folder(".claude-mem/modes"), GOOD, link(".claude-mem/modes/l.json", "code.json"), END),
        {".claude-mem/modes/code.json": b"{}", ".claude-mem/modes/l.json": b"{}"},
    ),
}


@pytest.mark.parametrize("case", LAWFUL)
def test_a_lawful_archive_is_adopted_whatever_its_dialect(case: str, deep: Path) -> None:
    make, files = LAWFUL[case]
    (deep / "archive").write_bytes(make())
    engine = engine_for(deep)
    assert asyncio.run(read_archive(engine, deep / "archive")) == "committed"
    home = empty_home(deep / "home")
    asyncio.run(restore(engine, WatchedSandbox(home), RestoreRequest(memory=MEMORY)))
    assert {name: (home / name).read_bytes() for name in files} == files


@pytest.mark.parametrize("case", ANSWERS)
def test_a_hostile_answer_makes_nothing_on_the_disk(case: str, deep: Path) -> None:
    code, said = ANSWERS[case]
    before = tree(deep)
    assert asyncio.run(read_answer(engine_for(deep), tarball_of(), said)) == code
    ours = {b"store", b"store/store-id", b"store/.lock-store-id"}  # which the sandbox is asked to note
    assert {name: about for name, about in tree(deep).items() if name not in ours} == before


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"roots": [HONEST_ROOT, {**HONEST_ROOT, "name": "project-2", "hint": "/home/user/app"}]},
        {"roots": [{**HONEST_ROOT, "name": "project-2"}]},
        {"roots": [{**HONEST_ROOT, "hint": "/home/us er/ünï 🦊"}]},
        {"home": "/home"},
    ],
    ids=["plain", "two projects", "the second project alone", "an odd hint", "another home"],
)
def test_an_honest_answer_is_committed(said: dict[str, Any], deep: Path) -> None:
    names = [root["name"] for root in said.get("roots", [HONEST_ROOT])]
    tar = tarball_of(*(file(f"./{name}/MEMORY.md", name.encode()) for name in names))
    engine = engine_for(deep)
    assert asyncio.run(read_answer(engine, tar, said)) == "committed"
    state = asyncio.run(engine.repository.head(MEMORY))
    manifest = asyncio.run(engine.repository.manifest(MEMORY, state.snapshot))
    hints = [root["hint"] for root in said.get("roots", [HONEST_ROOT])]
    assert [root.hint for root in manifest.roots] == [make_hint(hint, said.get("home", "/home/user")) for hint in hints]


def test_a_link_that_leads_out_is_listed_and_never_made(deep: Path) -> None:
    out = {
        "absolute": "/etc/passwd",
        "up": f"../../../../../{ESCAPED}",
        "into another root": "../../.claude-mem/x",
        "beside": "/home/user-2/x",
        "up from within": "/home/user/../../etc/passwd",
        "to the root of all": "/",
    }
    inward = {"by its path": "/home/user/memory/a.md", "in its folder": "a.md", "to its root": "/home/user"}
    links = [link(f"./project/memory/{name}", target) for name, target in {**out, **inward}.items()]
    tar = tarball_of(file("./project/memory/a.md", b"a"), *links)
    engine, said = engine_for(deep), {"folders": {"project": "home/user"}}
    receipt = asyncio.run(export(engine, BareForgery(tar, said), ExportRequest(memory=MEMORY, layouts=ASKED)))
    assert (receipt.outcome, receipt.files) == ("committed", 1)
    listed = {row.path: row.reason for row in receipt.skipped}
    assert listed == {f"project/memory/{name}": "link leads out of the memory" for name in out}
    home = empty_home(deep / "home")
    asyncio.run(restore(engine, WatchedSandbox(home), RestoreRequest(memory=MEMORY)))
    made = {path.name: os.readlink(path) for path in (home / "memory").iterdir() if path.is_symlink()}
    assert made == {"by its path": "a.md", "in its folder": "a.md", "to its root": ".."}


def test_a_hard_link_from_outside_is_refused(deep: Path) -> None:
    hard = tarfile.TarInfo("./project/memory/b.md")
    hard.type, hard.linkname = tarfile.LNKTYPE, "./project/memory/a.md"
    tar = tarball_of(file("./project/memory/a.md", b"a"), hard.tobuf(tarfile.GNU_FORMAT))
    assert asyncio.run(read_answer(engine_for(deep), tar, {})) == "unsafe-member"


BARE_CASES = [
    name for name in ARCHIVES if name.startswith(("size-", "header-", "sparse-", "million", "no-end", "damage"))
]


@pytest.mark.parametrize("case", BARE_CASES)
def test_what_a_sandbox_without_python_brings_is_read_as_carefully(case: str, deep: Path) -> None:
    (said,) = _lines(deep, "bare", case, seconds=PATIENCE)
    assert (said["code"], said["broke"]) == (ARCHIVES[case][0].replace("not-an-archive", "bad-answer"), "")
    assert said["peak_kib"] < ROOM
    assert not (deep / "store/memories").exists()


@pytest.mark.parametrize("case", PLANTED)
def test_a_pack_that_was_planted_in_the_store_harms_neither_sidecar_nor_sandbox(case: str, deep: Path) -> None:
    home, target = empty_home(deep / "home"), empty_home(deep / "target")
    (home / "MEMORY.md").write_text("# Long term\n")
    (target / "MEMORY.md").write_text("as it was")
    assert run_cli("export", "me", "--sandbox", f"local:{home}", store=deep / "store").code == 0
    plant(deep / "store", PLANTED[case]())
    began = time.monotonic()
    # In a process of its own, so that what hangs is ended; and the sidecar's own reader, which is that of folds as well.
    restored = run_cli("restore", "me", "--sandbox", f"local:{target}", store=deep / "store", env={})
    downloaded = run_cli("download", "me", "-o", deep / "out.tar.gz", store=deep / "store", env={})
    assert restored.code == 4 and downloaded.code == 1, (restored, downloaded)
    assert restored.document["reason"]["code"] in ("pack-damaged", "incomplete")
    assert time.monotonic() - began < PATIENCE
    assert (target / "MEMORY.md").read_text() == "as it was"
    assert not (deep / "out.tar.gz").exists()


def _campaign(deep: Path, first: int, count: int) -> Counter[str]:
    (deep / "store").mkdir()
    told: Counter[str] = Counter()
    for seed, said in enumerate(_lines(deep, "seeds", str(first), str(count), seconds=60 + 4 * count), first):
        assert said["broke"] == "", f"seed {seed}: {said['broke']}"
        assert said["seconds"] < 60, f"seed {seed} took {said['seconds']} s"
        assert said["peak_kib"] < ROOM, f"seed {seed}"
        told[said["code"]] += 1
    assert len(list((deep / "spool").iterdir())) == 0
    assert sum(told.values()) == count
    return told


def test_random_hostile_tarballs_and_answers_are_refused_or_read(deep: Path) -> None:
    told = _campaign(deep, 0, 150)
    assert told["committed"] + told["unchanged"] > 5, "those that are only odd get through"
    assert len(told) > 8, told


@pytest.mark.slow
@pytest.mark.parametrize("first", [1000, 2500])
def test_thousands_of_random_hostile_tarballs_and_answers(
    first: int, deep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _campaign(deep, first, 1500)
    with capsys.disabled():
        print(f"\n{first}: {dict(told.most_common())}")
    assert told["committed"] + told["unchanged"] > 50


def test_the_generator_makes_the_same_of_the_same_seed() -> None:
    assert Chance(7).archive() == Chance(7).archive()
    assert Chance(8).answer() == Chance(8).answer()
