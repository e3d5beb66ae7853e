"""docs/read_snapshot.py, which knows nothing but docs/format.md, reads every kind of snapshot there is."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.parts.commands import done, python_38
from tests.parts.homes import PROJECT, Tree, claude_mem_home, observe, three_tier_home, tree, without_cache, write
from tests.parts.hostile_archives import PLANTED, plant
from tests.parts.s3_servers import S3Server

pytestmark = pytest.mark.usefixtures("forked_programs")

READER = PROJECT / "docs" / "read_snapshot.py"
ODD_ID = "acme/Agent 7 🧠"


def read(store: Path, memory: str, output: Path, *snapshot: str, python: str = sys.executable) -> str:
    """Run the reader alone: no site-packages, no folder of ours to import from. Return what it complained about."""
    ran = subprocess.run(
        [python, "-I", "-S", "-X", "utf8", str(READER), str(store), memory, str(output), *snapshot],
        cwd=output.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in ran.stderr, ran.stderr
    assert output.exists() == (ran.returncode == 0)
    return ran.stderr if ran.returncode else ""


def restored(store: Path | str, memory: str, home: Path, snapshot: str) -> Tree:
    """What the command line restores, under the names the reader uses: roots, not places in a home."""
    home.mkdir()
    receipt = done("restore", memory, "--sandbox", f"local:{home}", "--snapshot", snapshot, store=store)
    assert receipt["outcome"] == "complete"
    found: Tree = {}
    for name, about in without_cache(tree(home)).items():
        if name == b".claude-mem":
            continue
        root, relative = (b"claude-mem", name[12:]) if name.startswith(b".claude-mem/") else (b"project", name)
        found[root + b"/" + relative] = about
    return found


def assert_reader_agrees(objects: Path, memory: str, folder: Path, store: Path | str = "") -> list[dict[str, Any]]:
    """The reader and a restore agree on each snapshot. Return the manifests as stored, newest first."""
    store = store or objects
    rows = done("log", memory, store=store)["snapshots"]
    folder.mkdir()
    manifests = []
    for number, row in enumerate(rows):
        output, home, snapshot = folder / f"read-{number}", folder / f"home-{number}", row["snapshot"]
        assert read(objects, memory, output, snapshot) == ""
        found = {name: about for name, about in tree(output).items() if b"/" in name}
        assert found == restored(store, memory, home, snapshot)
        assert sum(about[0] == "file" for about in found.values()) == row["files"] > 0
        (place,) = objects.glob(f"memories/*/snapshots/{snapshot}.json")
        manifests.append(json.loads(place.read_text()))
        shutil.rmtree(output)
        shutil.rmtree(home)
    return manifests


def change(home: Path, turn: int) -> None:
    """Something of every kind a delta can carry, a little different each time."""
    corpora = home / ".claude-mem/corpora"
    observe(home, 5, f"turn {turn}")
    with (corpora / "blocks.bin").open("r+b") as file:
        file.seek(turn * 40_000 % 260_000)
        file.write(b"changed in the middle")
        if turn % 3 == 0:
            file.truncate(300_000 - turn * 9_000)
        elif turn % 3 == 1:
            file.seek(0, os.SEEK_END)
            file.write(bytes([turn]) * 70_000)
    write(corpora / f"new-{turn}.md", b"new" * turn)
    (corpora / f"new-{turn - 2}.md").unlink(missing_ok=True)
    (corpora / "run.sh").chmod(0o700 + turn % 8)
    os.utime(corpora / "private.md", ns=(turn, turn * 1_000_000_007))
    (corpora / "empty.md").write_bytes(b"x" * (turn % 2))
    (corpora / "link.md").unlink()
    (corpora / "link.md").symlink_to(f"new-{turn}.md")
    shape = corpora / "shape"
    if shape.is_dir():
        shutil.rmtree(shape)
    else:
        shape.unlink(missing_ok=True)
    if turn % 4 == 0:
        write(shape, b"a file" * 20_000)
    elif turn % 4 == 1:
        write(shape / "inner.md", b"now a folder")
    elif turn % 4 == 2:
        shape.symlink_to("run.sh")


def export(home: Path, store: Path | str, memory: str) -> dict[str, Any]:
    receipt = done("export", memory, "--sandbox", f"local:{home}", store=store)
    assert receipt["outcome"] == "committed", receipt
    return receipt


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = claude_mem_home(tmp_path_factory.mktemp("format") / "home", rows=300)
    (home / ".claude-mem/corpora/ballast.bin").write_bytes(random.Random(1).randbytes(1 << 20))
    return three_tier_home(home)


@pytest.fixture(scope="module")
def store(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with full, delta and folded snapshots, a fork, and an import."""
    store = tmp_path_factory.mktemp("format") / "store"
    export(home, store, ODD_ID)
    for turn in range(1, 10):
        change(home, turn)
        export(home, store, ODD_ID)
    done("fork", ODD_ID, "forked", store=store)
    return store


def test_reader_is_about_a_page_and_imports_only_the_standard_library() -> None:
    text = READER.read_text()
    imports = {line.split()[1] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imports <= sys.stdlib_module_names
    assert len(text.splitlines()) <= 130


def test_full_delta_and_folded_snapshots_read_as_they_restore(store: Path, tmp_path: Path) -> None:
    manifests = assert_reader_agrees(store, ODD_ID, tmp_path / "out")
    packs = [[pack["kind"] for pack in manifest["packs"]] for manifest in manifests]
    assert packs[::-1][:2] == [["full"], ["full", "delta"]]
    assert max(map(len, packs)) == 8
    assert packs[1] == ["full", "delta"], "nine exports should have folded the deltas into one"
    assert {pack["id"] for pack in manifests[1]["packs"]}.isdisjoint({p["id"] for p in manifests[2]["packs"][1:]})


def test_fork_reads_as_what_it_was_forked_from(store: Path, tmp_path: Path) -> None:
    (manifest,) = assert_reader_agrees(store, "forked", tmp_path / "out")
    assert manifest["origin"].startswith(f"fork of {ODD_ID} at ")
    assert read(store, "forked", tmp_path / "a") == read(store, ODD_ID, tmp_path / "b") == ""
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_memory_whose_deltas_outweigh_it_is_folded_whole(tmp_path: Path) -> None:
    home, store = claude_mem_home(tmp_path / "home", rows=5), tmp_path / "store"
    chance = random.Random(3)
    for turn in range(1, 10):
        write(home / ".claude-mem/corpora/noise.bin", chance.randbytes(120_000 + turn))
        change(home, turn)
        export(home, store, "small")
    manifests = assert_reader_agrees(store, "small", tmp_path / "out")
    assert [len(manifest["packs"]) for manifest in manifests] == [1, 8, 7, 6, 5, 4, 3, 2, 1]


def test_imported_and_zstd_packed_snapshots_read_as_they_restore(tmp_path: Path) -> None:
    home, store, archive = claude_mem_home(tmp_path / "home"), tmp_path / "store", tmp_path / "conductor.tar.gz"
    write(home / ".claude-mem/corpora/large.bin", random.Random(4).randbytes(9 << 20))
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(home / ".claude-mem", "root/.claude-mem")
    done("import", "conductor", archive, store=store)
    (manifest,) = assert_reader_agrees(store, "conductor", tmp_path / "out")
    assert manifest["origin"] == "import"
    assert manifest["packs"][0]["codec"] == ("zst" if shutil.which("zstd") else "gz")


def test_objects_of_a_bucket_read_as_those_of_a_folder(
    weed: S3Server, credentials_of: Callable[[S3Server], None], tmp_path: Path
) -> None:
    credentials_of(weed)
    bucket = weed.make_bucket("format")
    url = f"s3://{bucket}/some/prefix?endpoint={weed.endpoint}"
    home = claude_mem_home(tmp_path / "home", rows=20)
    for turn in range(1, 4):
        change(home, turn)
        export(home, url, "conductor")
    mirror = tmp_path / "mirror"
    for page in weed.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix="some/prefix/memories/"):
        for row in page["Contents"]:
            place = mirror / row["Key"].removeprefix("some/prefix/")
            place.parent.mkdir(parents=True, exist_ok=True)
            weed.client.download_file(bucket, row["Key"], str(place))
    assert len(assert_reader_agrees(mirror, "conductor", tmp_path / "out", store=url)) == 3


def test_reader_runs_on_python_38(store: Path, tmp_path: Path) -> None:
    if not (python := python_38()):
        pytest.skip("there is no Python 3.8 on this machine")
    assert read(store, ODD_ID, tmp_path / "old", python=python) == ""
    assert read(store, ODD_ID, tmp_path / "new") == ""
    assert tree(tmp_path / "old") == tree(tmp_path / "new")


def test_every_python_computes_the_same_tree_digest(tmp_path: Path) -> None:
    """Which characters are printable differs between Pythons, so nothing stored may depend on it."""
    if not (python := python_38()):
        pytest.skip("there is no Python 3.8 on this machine")
    home = three_tier_home(tmp_path / "home")
    write(home / "memory/melting \U0001fae0.md", b"a character of Unicode 14")
    export(home, tmp_path / "store", "conductor")
    assert read(tmp_path / "store", "conductor", tmp_path / "out", python=python) == ""


def objects_of(store: Path) -> Iterator[Path]:
    """What the head of the forked memory needs: its head, its manifest, and each pack with its index."""
    for place in sorted(store.rglob("*")):
        if place.is_file() and not place.name.startswith(".lock-"):
            yield place


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_reader_refuses_one_flipped_byte_in_any_object(store: Path, share: float, tmp_path: Path) -> None:
    shutil.copytree(store / "memories/forked", tmp_path / "store/memories/forked")
    kinds = set()
    for number, place in enumerate(objects_of(tmp_path / "store")):
        good = place.read_bytes()
        bad = bytearray(good)
        bad[round(share * (len(good) - 1))] ^= 0x10
        place.write_bytes(bad)
        assert read(tmp_path / "store", "forked", tmp_path / f"out-{number}").startswith("Refused: ")
        place.write_bytes(good)
        kinds.add(place.name.split(".")[1])
    assert kinds == {"json", "tar", "index"}


@pytest.mark.parametrize("case", ["size-by-pax", "size-of-another", "size-base-256", "no-end", "no-tarball"])
def test_reader_does_not_wait_for_what_a_planted_pack_says_it_holds(case: str, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/MEMORY.md").write_text("# Long term\n")
    export(tmp_path / "home", tmp_path / "store", "me")
    plant(tmp_path / "store", PLANTED[case]())
    assert read(tmp_path / "store", "me", tmp_path / "out").startswith("Refused: ")


def test_reader_refuses_a_manifest_of_another_memory(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store / "memories/forked", tmp_path / "store/memories/other")
    assert "is not of" in read(tmp_path / "store", "other", tmp_path / "out")
