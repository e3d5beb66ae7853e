"""A part of a memory is restored to be read: nothing else in the sandbox is touched, and what comes back never counts as more
than that part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.reviews import accept
from sidecar.engine.without_python import _build_filter
from sidecar.errors import SidecarError
from sidecar.format.patterns import PathSet, compile_patterns
from sidecar.host.files import open_spool
from sidecar.program import notes
from sidecar.program.restore.swap import PART
from sidecar.receipts import ExportReceipt, RestoreReceipt
from sidecar.store.fetch import fetch_entries
from tests.parts.earlier import BEFORE_PARTS, earlier
from tests.parts.homes import PROJECT, empty_home, run_cli, titles, tree, without_cache, write
from tests.parts.memories import Box, Name, Provider, engine_on, manifests_of, plain_home, shell_tools

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "conductor"
ONLY = ("project/memory/**",)


@pytest.fixture(params=["local", "e2b", pytest.param("daytona", marks=pytest.mark.slow)])
def provider(request: pytest.FixtureRequest, open_provider: Callable[[Name], Provider]) -> Provider:
    return open_provider(request.param)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_on(f"file:{tmp_path / 'store'}")


@pytest.fixture(params=["python", "shell"])
def tools(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return shell_tools(tmp_path / "tools") if request.param == "shell" else None


on_this_machine = pytest.mark.parametrize("provider", ["local"], indirect=True)


async def _export(engine: Engine, box: Box, **asked: Any) -> ExportReceipt:
    return await export(engine, box.open(), ExportRequest(memory=MEMORY, **asked))


async def _restore(engine: Engine, box: Box, **asked: Any) -> RestoreReceipt:
    return await restore(engine, box.open(), RestoreRequest(memory=MEMORY, **asked))


async def _begun(engine: Engine, provider: Provider) -> tuple[Box, str]:
    first = provider.box()
    plain_home(first.home)
    write(first.home / "memory/deep/note.md", b"a note")
    return first, str((await _export(engine, first)).snapshot)


def _contents(home: Path) -> dict[str, bytes]:
    return {
        name: path.read_bytes()
        for path in sorted(home.rglob("*"))
        if path.is_file()
        for name in [str(path.relative_to(home))]
        if not name.startswith(".cache")
    }


async def _paths(engine: Engine, snapshot: str | None) -> dict[str, str]:
    assert snapshot
    async with open_spool() as spool:
        manifest = await engine.repository.manifest(MEMORY, snapshot)
        entries, _, _ = await fetch_entries(engine.repository.store, manifest, spool)
    return {path: entry.digest for path, entry in entries.items() if entry.type != "dir"}


async def test_only_the_part_is_placed_and_nothing_else_is_touched(
    engine: Engine, provider: Provider, tools: Path | None
) -> None:
    first, head = await _begun(engine, provider)
    box = provider.box(tools=tools)
    write(box.home / "MEMORY.md", b"of this sandbox")
    write(box.home / ".claude-mem/settings.json", b'{"mine": 1}')
    write(box.home / "memory/old.md", b"in the part, and not in the snapshot")
    receipt = await _restore(engine, box, only=ONLY)
    assert (receipt.outcome, receipt.snapshot, receipt.read_only, receipt.only) == ("complete", head, True, [*ONLY])
    placed = {name: data for name, data in _contents(first.home).items() if name.startswith("memory/")}
    mine = {"MEMORY.md": b"of this sandbox", ".claude-mem/settings.json": b'{"mine": 1}'}
    assert _contents(box.home) == {**placed, **mine}
    assert receipt.files == len(placed)
    aside = receipt.set_aside
    assert aside is not None and aside.files == 1
    again = await _restore(engine, box, only=ONLY)
    assert again.kept and again.snapshot == head


async def test_what_a_worker_learned_stands_beside_the_head_with_all_of_the_memory(
    engine: Engine, provider: Provider, tools: Path | None
) -> None:
    first, head = await _begun(engine, provider)
    before = await _paths(engine, head)
    box = provider.box(tools=tools)
    await _restore(engine, box, only=ONLY, label="worker-1")
    unchanged = await _export(engine, box)
    assert (unchanged.outcome, unchanged.snapshot) == ("unchanged", head)
    write(box.home / "memory/learned.md", b"what it learned")
    write(box.home / "MEMORY.md", b"outside of the part")
    (box.home / "memory/deep/note.md").unlink()
    exported = await _export(engine, box)
    assert (exported.outcome, exported.head, exported.label) == ("diverged", head, "worker-1"), exported
    assert any(row.path == "project/MEMORY.md" for row in exported.skipped) or tools
    after = await _paths(engine, exported.snapshot)
    assert set(after) - set(before) == {"project/memory/learned.md"}
    assert set(before) - set(after) == {"project/memory/deep/note.md"}
    assert all(after[path] == before[path] for path in after if path in before)
    manifests = {one.snapshot: one for one in await manifests_of(engine, MEMORY)}
    made = manifests[str(exported.snapshot)]
    assert (made.parent, made.label, made.sandbox) == (head, "worker-1", box.open().ref)
    # And on: the next export builds on it.
    write(box.home / "memory/learned.md", b"what it learned since")
    later = await _export(engine, box)
    assert (later.outcome, later.head) == ("diverged", head)
    assert set(await _paths(engine, later.snapshot)) == set(after)
    # It is in the other sandboxes once it was taken over.
    await accept(engine.repository, MEMORY, str(later.snapshot))
    fresh = provider.box()
    assert (await _restore(engine, fresh)).snapshot == later.snapshot
    assert (fresh.home / "memory/learned.md").read_bytes() == b"what it learned since"
    assert (fresh.home / "MEMORY.md").read_bytes() == (first.home / "MEMORY.md").read_bytes()
    assert titles(fresh.home) == titles(first.home)


@on_this_machine
async def test_all_of_it_after_a_part_is_all_of_it(engine: Engine, provider: Provider, tools: Path | None) -> None:
    first, _ = await _begun(engine, provider)
    box = provider.box(tools=tools)
    await _restore(engine, box, only=ONLY)
    write(box.home / "memory/learned.md", b"what it learned")
    write(box.home / "MEMORY.md", b"outside of the part")
    receipt = await _restore(engine, box)
    assert (receipt.kept, receipt.read_only, receipt.only, receipt.set_aside is None) == (False, False, [], False)
    assert "project/memory/learned.md" in await _paths(engine, receipt.saved_first)
    assert _contents(box.home) == _contents(first.home)
    write(box.home / "MEMORY.md", b"of a writer again")
    assert (await _export(engine, box)).outcome == "committed"


@on_this_machine
async def test_a_part_takes_the_place_of_nothing_else(engine: Engine, provider: Provider, tools: Path | None) -> None:
    first, _ = await _begun(engine, provider)
    write(first.home / "MEMORY.md", b"not saved yet")
    box = provider.box(tools=tools)
    assert (await _restore(engine, box, only=ONLY)).outcome == "complete"
    cases = [(first, ONLY), (box, ("project/tasks/**", "project/MEMORY.md"))]
    if tools is not None:  # who has it restored with Python is asked with Python
        cases = cases[1:]
    for where, only in cases:
        before = _contents(where.home)
        refused = await _restore(engine, where, only=only)
        assert refused.outcome == "incomplete" and refused.reason is not None and refused.reason.code == "other-part"
        assert _contents(where.home) == before and not refused.only
    assert (await _restore(engine, box, only=("project/MEMORY.md",), discard=True)).outcome == "complete"
    assert (await _export(engine, first)).outcome == "committed"


@on_this_machine
async def test_a_part_whose_index_was_lost_is_completed_and_one_that_stands_alone_never_becomes_the_head(
    engine: Engine, provider: Provider, tmp_path: Path
) -> None:
    first, head = await _begun(engine, provider)
    before, box = await _paths(engine, head), provider.box()
    await _restore(engine, box, only=ONLY)
    for index in box.home.glob(".cache/memory-sidecar/*/index-*"):
        index.unlink()
    assert (await _export(engine, box)).outcome == "unchanged"
    write(box.home / "memory/learned.md", b"what it learned")
    for index in box.home.glob(".cache/memory-sidecar/*/index-*"):
        index.unlink()
    exported = await _export(engine, box)
    after = await _paths(engine, exported.snapshot)
    assert exported.outcome == "diverged" and set(after) - set(before) == {"project/memory/learned.md"}
    assert set(before) <= set(after)
    other = provider.box()
    await _restore(engine, other, only=ONLY)
    write(first.home / "MEMORY.md", b"another head")
    assert (await _export(engine, first)).outcome == "committed"
    for snapshot in (head, str(exported.snapshot)):
        (manifest,) = (tmp_path / "store").rglob(f"{snapshot}.json")
        manifest.unlink()
    now = (await engine.repository.head(MEMORY)).snapshot
    for force in (False, True):
        write(other.home / "memory/learned.md", f"forced: {force}".encode())
        alone = await _export(engine, other, force=force)
        assert alone.outcome == "rejected" and alone.reason is not None and alone.reason.code == "partial"
        again = await _export(engine, other, force=force)
        assert again.outcome == "rejected" and again.reason is not None and again.reason.code == "partial"
        assert (await engine.repository.head(MEMORY)).snapshot == now


@on_this_machine
async def test_layouts_tiers_and_what_belongs_together(engine: Engine, provider: Provider) -> None:
    first = provider.box()
    plain_home(first.home)
    write(first.home / ".claude-mem/corpora/one.json", b"{}")
    memory = first.home / ".opencode/MEMORY"
    write(memory / "STATE/current-work.json", b'{"work_dir": "w1"}')
    write(memory / "WORK/w1/plan.md", b"the plan")
    write(memory / "WORK/w2/plan.md", b"another plan")
    head = await _export(engine, first)
    paths = await _paths(engine, head.snapshot)
    cases: list[tuple[tuple[str, ...], Callable[[str], bool]]] = [
        (("layout:claude-mem",), lambda path: path.startswith("claude-mem/")),
        (("claude-mem/",), lambda path: path.startswith("claude-mem/")),
        (("project/MEMORY.md",), lambda path: path == "project/MEMORY.md"),
        (("**/{settings,corpora/**}.json", "claude-mem/**/one.json"), lambda path: path.endswith("/one.json")),
    ]
    for only, inside in cases:
        box = provider.box()
        receipt = await _restore(engine, box, only=only)
        wanted = {path for path in paths if inside(path)}
        assert wanted and receipt.files == len(wanted), (only, sorted(paths))
    box = provider.box()
    await _restore(engine, box, only=("tier:hot",))
    there = set(_contents(box.home))
    assert {".claude-mem/claude-mem.db", ".opencode/MEMORY/WORK/w1/plan.md", "MEMORY.md"} <= there
    assert not {".claude-mem/corpora/one.json", ".opencode/MEMORY/WORK/w2/plan.md"} & there
    box = provider.box()
    await _restore(engine, box, only=("tier:cold",))
    assert (box.home / ".claude-mem/corpora/one.json").exists() and not (box.home / "MEMORY.md").exists()
    pointers = [path for path in paths if path.endswith("STATE/current-work.json")]
    assert pointers, sorted(paths)
    box = provider.box()
    receipt = await _restore(engine, box, only=(pointers[0],))
    assert receipt.files == 2, "the pointer, and the folder that it points at"
    assert [path.name for path in box.home.rglob("plan.md")] == ["plan.md"]
    for wrong in ("layout:nothing", "tier:nothing", "/etc/passwd", "project/../x", "", "nothing/**", "{a}{b}{c}"):
        with pytest.raises(SidecarError) as refused:
            await _restore(engine, provider.box(), only=(wrong,))
        assert refused.value.hint
    with pytest.raises(SidecarError, match="seed"):
        await _restore(engine, provider.box(), only=ONLY, mode="seed")


def test_an_earlier_version_takes_a_part_for_no_memory_of_its_own(tmp_path: Path) -> None:
    before = earlier(tmp_path / "earlier", BEFORE_PARTS)
    store, home = tmp_path / "store", plain_home(empty_home(tmp_path / "first"))
    head = run_cli("export", "me", f"--sandbox=local:{home}", store=store).document["snapshot"]
    worker = empty_home(tmp_path / "worker")
    words = f"--sandbox=local:{worker}"
    assert run_cli("restore", "me", words, "--only=project/memory/**", store=store).document["only"]
    write(worker / "memory/learned.md", b"what it learned")
    exported = before.run("export", "me", words, store=store)
    assert exported.code == 3 and exported.document["head"] == head, exported.document
    # What it wrote is what counts from now on: no part any more, and not the head.
    later = run_cli("export", "me", words, store=store)
    assert later.code == 3 and later.document["head"] == head
    restored = before.run("restore", "me", words, store=store)
    assert restored.document["outcome"] == "complete" and restored.document["snapshot"] == head
    assert without_cache(tree(worker)) == without_cache(tree(home))
    write(worker / "memory/learned.md", b"as a writer")
    assert run_cli("export", "me", words, store=store).document["outcome"] == "committed"


def test_an_earlier_version_refuses_the_journal_of_a_part(tmp_path: Path) -> None:
    code = earlier(tmp_path / "earlier", BEFORE_PARTS)
    journal = {
        "state": "done", "stages": [], "asides": [], "made": [], "moves": [], "snapshot": "s", "displaced": [],
        "notes": None, "reader": PART, "part": ["project/**"],
    }  # fmt: skip
    memory = empty_home(tmp_path / "home") / "m"
    memory.mkdir()
    for place in (PROJECT, code.folder):
        (memory / "journal").write_text(json.dumps(journal))
        program = (
            "import sys\nfrom sidecar.program.restore.swap import settle\nfrom sidecar.program.places import Containment\n"
            "try:\n    settle(sys.argv[1], Containment(None, []))\n"
            "except Exception as problem:\n    print(getattr(problem, 'code', problem))"
        )
        ran = subprocess.run(
            [sys.executable, "-c", program, str(memory / "journal")],
            env={**os.environ, "PYTHONPATH": str(place)}, cwd=place, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        if place == PROJECT:
            assert not ran.stdout and (memory / "part-lineage").exists(), ran
            assert notes.read_part(str(memory)) == ["project/**"] and notes.read_lineage(str(memory)) == ["s"]
            (memory / "part-lineage").unlink()
        else:
            assert ran.stdout.strip() == "journal-damaged" and not list(memory.glob("*lineage"))


def test_names_are_matched_as_patterns_say_however_they_are_matched(tmp_path: Path) -> None:
    names = ["r/a", "r/a/b", "r/a/b/c.md", "r/ab.md", "r/x/a.md", "r/x/y/a.md", "r/a b", "r/a.b(c)[d]", "r/ä.md", "q/a"]
    names += ["r/a+b", "r/$a^", "r/a|b", "r/a\\b", "r/.a", "r/--a", "r/x/y/z/w"]
    patterns = ["**", "*", "r/**", "r/*", "r/*.md", "r/**/*.md", "r/**/a.md", "*/a", "r/a?b", "r/a b", "r/a.b(c)[d]"]
    patterns += ["r/x/**/w", "**/a.md", "r/*/y/**", "r/a+b", "r/$a^", "r/a|b", "r/a\\b", "r/?*", "**/x/**", "r/a*/**"]
    for pattern in patterns:
        by_expression = compile_patterns([pattern]).match
        wanted = [name for name in names if by_expression(name)]
        assert [name for name in names if PathSet([pattern]).has(name)] == wanted, pattern
        script = tmp_path / "script"
        script.write_text("\n".join(_build_filter("r", [pattern])) + "\n")
        lines = "".join(f"./{name[2:]}\n" for name in names if name.startswith("r/"))
        ran = subprocess.run(
            ["sed", "-E", "-f", script], input=lines.encode(), capture_output=True, check=True, env={"LC_ALL": "C"}
        )
        assert ["r/" + line[2:] for line in ran.stdout.decode().splitlines()] == [
            name for name in wanted if name.startswith("r/")
        ], pattern
    hostile = PathSet(["**/" * 40 + "x", "a/" + "*a" * 100 + "b"])
    assert not hostile.has("/".join(["a"] * 60)) and not hostile.has("a/" + "a" * 250)


def test_what_a_worker_learned_is_compared_and_accepted_by_command(tmp_path: Path) -> None:
    store, home, worker = tmp_path / "store", plain_home(empty_home(tmp_path / "lead")), empty_home(tmp_path / "worker")
    head = run_cli("export", "conductor", f"--sandbox=local:{home}", store=store).document["snapshot"]
    sandbox = f"--sandbox=local:{worker}"
    done = run_cli("restore", "conductor", sandbox, "--only=project/memory/**", "--label=tests-worker", store=store)
    assert done.code == 0 and done.document["only"] == ["project/memory/**"] and done.document["read_only"]
    ready = json.loads((worker / ".cache/memory-sidecar/ready.json").read_text())
    assert ready["part"] == ["project/memory/**"] and ready["read_only"]
    write(worker / "memory/flaky-tests.md", b"# The flaky test waits for a port\n")
    exported = run_cli("export", "conductor", sandbox, store=store)
    assert exported.code == 3 and exported.document["head"] == head
    rows = run_cli("log", "conductor", store=store).document["snapshots"]
    assert [(row["standing"], row["label"]) for row in rows] == [("diverged", "tests-worker"), ("head", "")]
    found = run_cli("diff", "conductor", "latest", "label:tests-worker", "--files", store=store).document
    assert [row["path"] for row in found["added"]] == ["project/memory/flaky-tests.md"]
    assert not found["removed"] and not found["changed"]
    accepted = run_cli("accept", "conductor", "label:tests-worker", store=store)
    assert accepted.code == 0 and accepted.document["head"] == exported.document["snapshot"]
    fresh = empty_home(tmp_path / "fresh")
    run_cli("restore", "conductor", f"--sandbox=local:{fresh}", store=store)
    assert (fresh / "memory/flaky-tests.md").exists() and (fresh / "MEMORY.md").exists()
    assert titles(fresh) == titles(home)
    # Without a label, it is that of the sandbox.
    other = empty_home(tmp_path / "other")
    sandboxes = (f"--sandbox=local:{other}", f"--sandbox=local:{tmp_path / 'nowhere'}")
    assert run_cli("restore", "conductor", *sandboxes, "--only=tier:hot", store=store).code == 1
    write(other / "MEMORY.md", b"learned\n")
    run_cli("export", "conductor", f"--sandbox=local:{other}", store=store)
    assert run_cli("log", "conductor", store=store).document["snapshots"][0]["label"] == f"local:{other}"
