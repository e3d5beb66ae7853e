"""The same without Python, straight from the bucket, in a sandbox that lies, and in one that an earlier version left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.errors import BadAnswer
from sidecar.ports import CommandResult
from sidecar.receipts import ExportReceipt, RestoreReceipt
from tests.parts.forgery import framed
from tests.parts.homes import WatchedSandbox, empty_home, engine_at, observe, titles, tree, without_cache, write
from tests.parts.memories import Box, Name, Provider, engine_on, grow, manifests_of, plain_home, shell_tools
from tests.parts.s3_servers import S3Server
from tests.parts.sent import request_in

MEMORY = "conductor"
BEFORE = "c716831"
"""The last version that destroyed what was not saved."""
PROJECT = Path(__file__).parents[2]


@pytest.fixture(params=["local"])
def provider(request: pytest.FixtureRequest, open_provider: Callable[[Name], Provider]) -> Provider:
    return open_provider(request.param)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_on(f"file:{tmp_path / 'store'}")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    return shell_tools(tmp_path / "tools")


async def _export(engine: Engine, box: Box, memory: str = MEMORY, **asked: Any) -> ExportReceipt:
    return await export(engine, box.open(), ExportRequest(memory=memory, **asked))


async def _committed(engine: Engine, box: Box, memory: str = MEMORY) -> str:
    receipt = await _export(engine, box, memory)
    assert receipt.outcome == "committed", receipt
    return str(receipt.snapshot)


async def _restore(engine: Engine, box: Box, memory: str = MEMORY, **asked: Any) -> RestoreReceipt:
    return await restore(engine, box.open(), RestoreRequest(memory=memory, **asked))


async def _complete(engine: Engine, box: Box, memory: str = MEMORY, **asked: Any) -> RestoreReceipt:
    receipt = await _restore(engine, box, memory, **asked)
    assert receipt.outcome == "complete", receipt
    return receipt


# Without Python


@pytest.mark.parametrize("provider", ["local", "e2b", pytest.param("daytona", marks=pytest.mark.slow)], indirect=True)
async def test_a_sandbox_without_python_keeps_what_no_snapshot_has(
    engine: Engine, provider: Provider, tools: Path
) -> None:
    first, box = provider.box(), provider.box(tools=tools)
    plain_home(first.home)
    older = await _committed(engine, first)
    write(box.home / "memory/of the template.md", b"it came with the sandbox")
    receipt = await _complete(engine, box)
    aside = receipt.set_aside
    assert aside is not None and (aside.files, aside.bytes) == (1, len(b"it came with the sandbox"))
    assert (Path(aside.path) / "project/memory/of the template.md").read_bytes() == b"it came with the sandbox"
    assert not (box.home / "memory/of the template.md").exists()

    write(box.home / "memory/new.md", b"not exported")
    before = without_cache(tree(box.home))
    receipt = await _complete(engine, box)
    assert (receipt.kept, receipt.snapshot, receipt.set_aside) == (True, older, None)
    assert without_cache(tree(box.home)) == before

    grow(first.home)
    newer = await _committed(engine, first)
    receipt = await _complete(engine, box)
    assert (receipt.snapshot, receipt.kept, receipt.set_aside) == (newer, False, None)
    assert not (box.home / "memory/new.md").exists() and titles(box.home) == titles(first.home)
    assert (await engine.repository.head(MEMORY)).snapshot == newer
    other = provider.box()
    await _complete(engine, other, snapshot=str(receipt.saved_first))
    assert (other.home / "memory/new.md").read_bytes() == b"not exported"
    assert await box.is_clean()


async def test_without_python_a_wiped_folder_is_restored_and_discard_replaces_all(
    engine: Engine, provider: Provider, tools: Path
) -> None:
    first, box = provider.box(), provider.box(tools=tools)
    plain_home(first.home)
    await _committed(engine, first)
    await _complete(engine, box)
    for path in (box.home / "memory").iterdir():
        path.unlink()
    (box.home / "MEMORY.md").unlink()
    receipt = await _complete(engine, box)
    assert not receipt.kept and titles(box.home) == titles(first.home) and (box.home / "MEMORY.md").exists()
    write(box.home / "memory/new.md", b"not exported")
    count = len(await manifests_of(engine, MEMORY))
    receipt = await _complete(engine, box, discard=True)
    assert (receipt.kept, receipt.saved_first, receipt.set_aside) == (False, None, None)
    assert not (box.home / "memory/new.md").exists() and len(await manifests_of(engine, MEMORY)) == count


async def test_without_python_another_memory_is_saved_and_too_much_is_not_replaced(
    engine: Engine, provider: Provider, tools: Path
) -> None:
    first, box, foreign = provider.box(), provider.box(tools=tools), provider.box(tools=tools)
    plain_home(first.home)
    await _committed(engine, first, "acme/other")
    plain_home(box.home, rows=3)
    await _committed(engine, box)
    write(box.home / "memory/new.md", b"not exported")
    receipt = await _complete(engine, box, "acme/other")
    assert receipt.saved_first_memory == MEMORY and titles(box.home) == titles(first.home)
    other = provider.box()
    await _complete(engine, other, snapshot=str(receipt.saved_first))
    assert (other.home / "memory/new.md").read_bytes() == b"not exported"
    assert not (await _complete(engine, box)).kept, "this memory is not there any more"
    assert len(titles(box.home)) == 3

    write(foreign.home / "MEMORY.md", b"x" * 20_000)
    before = without_cache(tree(foreign.home))
    receipt = await _restore(replace(engine, set_aside_bytes=10_000), foreign)
    assert receipt.reason is not None and (receipt.outcome, receipt.reason.code) == ("incomplete", "set-aside-full")
    assert without_cache(tree(foreign.home)) == before


async def test_without_python_only_so_much_is_kept_aside(engine: Engine, provider: Provider, tools: Path) -> None:
    first, box = provider.box(), provider.box(tools=tools)
    plain_home(first.home)
    await _committed(engine, first)
    cache, paths = box.home / ".cache/memory-sidecar", []
    for number in range(7):
        subprocess.run(["rm", "-rf", cache / MEMORY, box.home / "memory", box.home / ".claude-mem"], check=True)
        write(box.home / "MEMORY.md", b"%d" % number)
        receipt = await _complete(engine, box)
        assert receipt.set_aside is not None
        path = Path(receipt.set_aside.path)
        os.rename(path, later := path.with_name(f"2026010{number}{path.name[8:]}"))  # as if days had passed
        paths.append(later)
    assert [path.exists() for path in paths] == [False, False, True, True, True, True, True], "the newest five"


# Straight from the bucket


@pytest.fixture
def direct(weed: S3Server, credentials_of: Callable[[S3Server], None]) -> Engine:
    credentials_of(weed)
    bucket = weed.make_bucket(f"unsaved-{uuid.uuid4().hex}")
    return engine_on(f"s3://{bucket}/p?endpoint={weed.endpoint}", direct=True)


async def test_straight_from_the_bucket_nothing_is_lost_either(direct: Engine, provider: Provider) -> None:
    first, box = provider.box(), provider.box()
    plain_home(first.home)
    await _committed(direct, first)
    write(box.home / "MEMORY.md", b"it came with the sandbox")
    receipt = await _complete(direct, box)
    assert receipt.trips == {"command": 1} and receipt.set_aside is not None and receipt.set_aside.files == 1
    write(box.home / "memory/new.md", b"not exported")
    receipt = await _complete(direct, box)
    assert receipt.kept and receipt.trips == {"command": 1} and receipt.warnings[0].endswith("project/memory/new.md.")
    grow(first.home)
    newer = await _committed(direct, first)
    receipt = await _complete(direct, box)
    assert (receipt.snapshot, receipt.trips) == (newer, {"command": 3})
    assert not (box.home / "memory/new.md").exists()
    other = provider.box()
    await _complete(direct, other, snapshot=str(receipt.saved_first))
    assert (other.home / "memory/new.md").exists()


# A sandbox that lies


class LyingSandbox(WatchedSandbox):
    """Answers restores with what a test says, and does all else."""

    def __init__(self, home: Path, *answers: dict[str, Any]) -> None:
        super().__init__(home)
        self.answers, self.asked = list(answers), list[dict[str, Any]]()

    async def run(self, command: str, **how: Any) -> CommandResult:
        request = request_in(command, how.get("environment"))
        self.asked.append(request)
        if request["do"] == "restore" and self.answers:
            about = {"memory": request["memory"], "snapshot": request["snapshot"]}
            return CommandResult(0, framed(request["nonce"], {**self.answers.pop(0), **about}))
        return await super().run(command, **how)


def _row(**about: Any) -> dict[str, Any]:
    return {"status": "unsaved", "unsaved": [{"memory": "victim", "key": "victim", "files": 1, **about}]}


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"lineage": ["20260101T000000000Z-00000000"]},
        {"key": MEMORY + "x"},
        {"memory": "../victim", "key": "..%2fvictim"},
        {"memory": "", "key": "../victim"},
        {"memory": "victim", "key": "x/../victim"},
        {"memory": "", "key": "victim~" + "0" * 32},
    ],
)
async def test_no_sandbox_has_anything_saved_as_a_memory_it_does_not_know(
    engine: Engine, tmp_path: Path, row: dict[str, Any]
) -> None:
    victim, home = plain_home(empty_home(tmp_path / "victim")), plain_home(empty_home(tmp_path / "home"), rows=2)
    await export(engine, WatchedSandbox(victim), ExportRequest(memory="victim"))
    await export(engine, WatchedSandbox(victim), ExportRequest(memory=MEMORY, force=True))
    sandbox = LyingSandbox(home, _row(**row))
    receipt = await restore(engine, sandbox, RestoreRequest(memory=MEMORY))
    assert receipt.reason is not None and (receipt.outcome, receipt.reason.code) == ("incomplete", "unsaved")
    assert [request["do"] for request in sandbox.asked] == ["restore", "tidy"]
    assert len(await manifests_of(engine, "victim")) == 1
    assert len(await manifests_of(engine, MEMORY)) == 1


async def test_a_sandbox_is_told_no_more_of_another_memory_than_it_knew(engine: Engine, tmp_path: Path) -> None:
    victim, home = plain_home(empty_home(tmp_path / "victim")), plain_home(empty_home(tmp_path / "home"), rows=2)
    known = (await export(engine, WatchedSandbox(victim), ExportRequest(memory="victim"))).snapshot
    grow(victim)
    secret = (await export(engine, WatchedSandbox(victim), ExportRequest(memory="victim"))).snapshot
    await export(engine, WatchedSandbox(victim), ExportRequest(memory=MEMORY, force=True))
    sandbox = LyingSandbox(home, _row(lineage=[known, "20260101T000000000Z-00000000"], unchanged=known))
    receipt = await restore(engine, sandbox, RestoreRequest(memory=MEMORY))
    assert receipt.outcome == "complete"
    restores = [request for request in sandbox.asked if request["do"] == "restore"]
    assert restores[-1]["stored"]["victim"] == [known] and str(secret) not in json.dumps(restores)


@pytest.mark.parametrize("status", ["unsaved", "clear", "no-python"])
async def test_a_sandbox_that_never_comes_to_an_end_is_not_believed(
    engine: Engine, tmp_path: Path, status: str
) -> None:
    first, home = plain_home(empty_home(tmp_path / "first")), plain_home(empty_home(tmp_path / "home"), rows=2)
    await export(engine, WatchedSandbox(first), ExportRequest(memory=MEMORY))
    answer = _row(key=MEMORY) if status == "unsaved" else {"status": status}
    sandbox = LyingSandbox(home, *[answer] * 20)
    before = without_cache(tree(home))
    if status == "no-python":
        receipt = await restore(engine, sandbox, RestoreRequest(memory=MEMORY))
        assert receipt.reason is not None and (receipt.outcome, receipt.reason.code) == ("incomplete", "no-python")
    else:
        with pytest.raises(BadAnswer):
            await restore(engine, sandbox, RestoreRequest(memory=MEMORY))
    assert len([request for request in sandbox.asked if request["do"] == "restore"]) <= 3
    assert without_cache(tree(home)) == before


async def test_a_local_sandbox_does_not_choose_what_of_this_machine_is_read(engine: Engine, tmp_path: Path) -> None:
    """Its notes name a folder beyond it as its project; what is saved first must not come from there."""
    first, home = plain_home(empty_home(tmp_path / "first")), empty_home(tmp_path / "home")
    await export(engine, WatchedSandbox(first), ExportRequest(memory=MEMORY))
    await export(engine, WatchedSandbox(first), ExportRequest(memory="other", force=True))
    await restore(engine, WatchedSandbox(home), RestoreRequest(memory=MEMORY))
    write(home / "memory/new.md", b"not exported")
    secret = empty_home(tmp_path / "secret")
    write(secret / "MEMORY.md", b"of somebody else")
    notes = home / f".cache/memory-sidecar/{MEMORY}/notes"
    for folder in (str(secret), f"{home}/../secret"):
        told = json.loads(notes.read_text())
        told["roots"]["project-2"] = folder
        notes.write_text(json.dumps(told))
        receipt = await restore(engine, WatchedSandbox(home), RestoreRequest(memory="other"))
        assert receipt.outcome == "complete"
        assert receipt.saved_first is not None and receipt.saved_first_memory == MEMORY
        saved = await engine.repository.manifest(MEMORY, receipt.saved_first)
        assert {root.name: root.hint for root in saved.roots} == {"claude-mem": "~/.claude-mem", "project": "~"}
        await restore(engine, WatchedSandbox(home), RestoreRequest(memory=MEMORY))
        write(home / "memory/new.md", b"not exported again")


async def test_an_index_that_claims_that_nothing_changed_only_hurts_its_own_sandbox(
    engine: Engine, provider: Provider
) -> None:
    """Whoever can write there can as well delete the files. The head, and every snapshot, are as they were."""
    first, box = provider.box(), provider.box()
    plain_home(first.home)
    await _committed(engine, first)
    await _complete(engine, box)
    write(box.home / "memory/new.md", b"not exported")
    cache = box.home / f".cache/memory-sidecar/{MEMORY}"
    script = (
        "import sys, os; sys.path.insert(0, sys.argv[1])\n"
        "from sidecar.format import index\n"
        "from sidecar.program import cache\n"
        "folder, place = sys.argv[2:]\n"
        "base = cache.load_base(folder, cache.find_lineage(folder, open(folder + '/lineage').read().split()))\n"
        "status = os.stat(place)\n"
        "entry = index.Entry('project/memory/new.md', index.FILE, size=status.st_size, mtime=status.st_mtime_ns)\n"
        "base.entries['project/memory/new.md'] = cache.KnownEntry(entry, cache.compute_signature(status))\n"
        "cache.write_restored(folder, base)\n"
    )
    command = [sys.executable, "-c", script, str(PROJECT), str(cache), str(box.home / "memory/new.md")]
    subprocess.run(command, check=True, timeout=60)
    grow(first.home)
    newer = await _committed(engine, first)
    receipt = await _complete(engine, box)
    assert (receipt.snapshot, receipt.saved_first) == (newer, None)
    assert titles(box.home) == titles(first.home) and (await engine.repository.head(MEMORY)).snapshot == newer


@pytest.mark.parametrize("where", ["set-aside", "folder", "cache"])
async def test_what_is_set_aside_never_goes_through_a_link(engine: Engine, provider: Provider, where: str) -> None:
    first, box = provider.box(), provider.box()
    plain_home(first.home)
    await _committed(engine, first)
    outside = empty_home(box.home.parent / f"outside {uuid.uuid4().hex}")
    write(box.home / "memory/of the template.md", b"it came with the sandbox")
    cache = box.home / ".cache/memory-sidecar"
    cache.mkdir(parents=True)
    if where == "set-aside":
        (cache / "set-aside").symlink_to(outside)
    elif where == "folder":
        (cache / "set-aside").mkdir()
        for number in range(120):
            stamp = time.strftime("%Y%m%dT%H%M%SZ-", time.gmtime(time.time() + number - 5))
            snapshot = (await engine.repository.head(MEMORY)).snapshot
            (cache / "set-aside" / (stamp + snapshot)).symlink_to(outside)
    else:
        (cache / MEMORY).symlink_to(outside)
    before = without_cache(tree(box.home))
    receipt = await _restore(engine, box)
    assert list(outside.iterdir()) == []
    if receipt.outcome == "incomplete":
        assert receipt.reason is not None and receipt.reason.code == "in-the-way"
        assert without_cache(tree(box.home)) == before
    else:
        assert where == "folder" and receipt.set_aside is not None
        assert (Path(receipt.set_aside.path) / "project/memory/of the template.md").exists()


async def test_a_journal_cannot_have_something_moved_out_of_another_place(engine: Engine, tmp_path: Path) -> None:
    """A folder it calls set aside must be one: nothing is moved or removed for one that is not."""
    home, outside = plain_home(empty_home(tmp_path / "home")), empty_home(tmp_path / "outside")
    await export(engine, WatchedSandbox(home), ExportRequest(memory=MEMORY))
    write(outside / "thesis/x.md", b"years of work")
    cache = home / f".cache/memory-sidecar/{MEMORY}"
    plan = {"state": "swapping", "stages": [], "made": [], "moves": []}
    for aside in (str(outside / "thesis"), f"{cache.parent}/set-aside/../../../../outside/thesis", str(cache)):
        (cache / "journal").write_text(json.dumps({**plan, "asides": [aside]}))
        before = tree(outside)
        with pytest.raises(Exception, match="cannot be read"):
            await export(engine, WatchedSandbox(home), ExportRequest(memory=MEMORY))
        assert tree(outside) == before and cache.exists()
    (cache / "journal").write_text(json.dumps({**plan, "state": "done", "displaced": ["../../../outside"]}))
    with pytest.raises(Exception, match="cannot be read"):
        await export(engine, WatchedSandbox(home), ExportRequest(memory=MEMORY))


# What an earlier version left


@pytest.fixture(scope="session")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The code of the version before, to run in a process of its own."""
    folder = tmp_path_factory.mktemp("earlier") / "code"
    folder.mkdir()
    packed = subprocess.run(
        ["git", "archive", BEFORE, "sidecar", "adapters"], cwd=PROJECT, capture_output=True, timeout=60
    )
    if packed.returncode:
        pytest.skip("the history of this project is not here")
    subprocess.run(["tar", "-xf", "-", "-C", folder], input=packed.stdout, check=True, timeout=60)
    yield folder


def _by_earlier(earlier: Path, store: Path, *words: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "sidecar", words[0], f"--store=file:{store}", "--json", *words[1:]],
        cwd=earlier,
        env={**os.environ, "PYTHONPATH": str(earlier)},
        capture_output=True,
        timeout=120,
    )
    document: dict[str, Any] = json.loads(ran.stdout)
    return document


@pytest.mark.parametrize("how", ["ahead", "another head", "another memory", "reader"])
async def test_a_sandbox_of_an_earlier_version_is_taken_up_without_loss(
    earlier: Path, tmp_path: Path, how: str
) -> None:
    engine = engine_at(tmp_path / "store")
    first, home = plain_home(empty_home(tmp_path / "first")), empty_home(tmp_path / "home")
    sandbox, store = f"local:{home}", tmp_path / "store"
    assert _by_earlier(earlier, store, "export", "acme/one", "--sandbox", f"local:{first}")["outcome"] == "committed"
    assert _by_earlier(earlier, store, "restore", "acme/one", "--sandbox", sandbox)["outcome"] == "complete"
    write(home / "memory/new.md", b"not exported")
    observe(home, 1, "not exported")
    assert _by_earlier(earlier, store, "export", "acme/one", "--sandbox", sandbox)["outcome"] == "committed"
    write(home / "memory/newer.md", b"not exported")
    before = without_cache(tree(home))

    async def restored(memory: str, **asked: Any) -> RestoreReceipt:
        receipt = await restore(engine, WatchedSandbox(home), RestoreRequest(memory=memory, **asked))
        assert receipt.outcome == "complete", receipt
        return receipt

    if how == "ahead":
        assert (await restored("acme/one")).kept and without_cache(tree(home)) == before
        receipt = await export(engine, WatchedSandbox(home), ExportRequest(memory="acme/one"))
        assert (receipt.outcome, receipt.kind) == ("committed", "delta")
        return
    if how == "reader":
        (home / "memory/newer.md").unlink()
        assert (await restored("acme/one", read_only=True)).kept
        write(home / "memory/newer.md", b"by a reader")
        answer = _by_earlier(earlier, store, "export", "acme/one", "--sandbox", sandbox)
        assert answer["outcome"] == "diverged", "a version that knows no readers does not move the head either"
        return
    memory = "acme/one"
    if how == "another head":
        await restore(engine, WatchedSandbox(first), RestoreRequest(memory=memory))
        grow(first)
        assert (await export(engine, WatchedSandbox(first), ExportRequest(memory=memory))).outcome == "committed"
    else:
        memory = "two"
        other = plain_home(empty_home(tmp_path / "other"), rows=2)
        await export(engine, WatchedSandbox(other), ExportRequest(memory=memory))
    back = await restored(memory)
    assert back.saved_first and not (home / "memory/newer.md").exists()
    box = empty_home(tmp_path / "box")
    await restore(engine, WatchedSandbox(box), RestoreRequest(memory="acme/one", snapshot=back.saved_first))
    assert without_cache(tree(box)) == before
