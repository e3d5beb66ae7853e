"""Memories in an encrypted store: they come back with the key, tell nothing without it, and say so in one sentence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyrage
import pytest

from adapters.sandboxes.local import open_local
from sidecar.engine import ExportRequest, RestoreRequest, export, restore
from sidecar.errors import KeyNeeded
from sidecar.ids import MemoryKeys
from sidecar.policy.limits import Limits
from sidecar.receipts import ExportOutcome, RestoreOutcome
from sidecar.store.encryption.given_keys import GivenKeys
from sidecar.store.verification import verify_memory
from tests.parts.homes import (
    PROJECT,
    claude_mem_home,
    empty_home,
    engine_at,
    forget_caches,
    memory_tree,
    observe,
    run_cli,
)
from tests.parts.keys import BOTH, ENCRYPTED, ONE, OTHER, SIGNED, engine_with, environment, recipient
from tests.parts.memories import grow

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "acme/secret-agent"


def files_of(store: Path) -> list[Path]:
    return [path for path in store.rglob("*") if path.is_file()]


def everything_in(store: Path) -> bytes:
    """Every name and every byte."""
    return b"\n".join(str(path.relative_to(store)).encode() + b"\n" + path.read_bytes() for path in files_of(store))


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(ENCRYPTED, id="encrypted", marks=pytest.mark.slow),
        pytest.param(SIGNED, id="signed", marks=pytest.mark.slow),
        pytest.param(BOTH, id="both"),
    ],
)
async def test_what_is_exported_comes_back(tmp_path: Path, keys: GivenKeys) -> None:
    home, other = claude_mem_home(empty_home(tmp_path / "home"), 20), empty_home(tmp_path / "other")
    store = tmp_path / "store"
    request = ExportRequest(memory=MEMORY, conversation="talk-4711", label="first words")
    first = await export(engine_with(store, keys), open_local(str(home)), request)
    observe(home, 5, "later")
    second = await export(engine_with(store, keys), open_local(str(home)), request)
    assert (first.outcome, second.outcome, second.kind) == (ExportOutcome.COMMITTED, ExportOutcome.COMMITTED, "delta")
    again = await export(engine_with(store, keys), open_local(str(home)), request)
    assert again.outcome is ExportOutcome.UNCHANGED
    receipt = await restore(engine_with(store, keys), open_local(str(other)), RestoreRequest(memory=MEMORY))
    assert receipt.outcome is RestoreOutcome.COMPLETE
    assert not receipt.warnings
    assert memory_tree(other / ".claude-mem") == memory_tree(home / ".claude-mem")
    report = await verify_memory(engine_with(store, keys).repository, MEMORY, engine_at(store).progress)
    assert report.ok, report


async def test_sizes_are_those_of_the_store(tmp_path: Path) -> None:
    home, store = claude_mem_home(empty_home(tmp_path / "home"), 20), tmp_path / "store"
    engine = engine_with(store, BOTH)
    receipt = await export(engine, open_local(str(home)), ExportRequest(memory=MEMORY))
    manifest = await engine.repository.manifest(MEMORY, receipt.snapshot or "")
    listed = {info.key: info.size async for info in engine.repository.store.list(MemoryKeys.of(MEMORY).packs)}
    assert tuple(listed[key] for key in sorted(listed, reverse=True)) == manifest.packs[0].in_store
    assert manifest.packs[0].stored_bytes > manifest.packs[0].bytes
    grown = sum(listed.values()) + (await _size(engine, MemoryKeys.of(MEMORY).snapshot(manifest.snapshot)))
    assert receipt.packed_bytes == grown


async def _size(engine, key: str) -> int:  # type: ignore[no-untyped-def]
    prefix = key.rpartition("/")[0] + "/"
    return {info.key: info.size async for info in engine.repository.store.list(prefix)}[key]


async def test_a_limit_holds_for_what_is_really_stored(tmp_path: Path) -> None:
    home, store = claude_mem_home(empty_home(tmp_path / "home"), 5), tmp_path / "store"
    await export(engine_with(store, BOTH), open_local(str(home)), ExportRequest(memory=MEMORY))

    async def held() -> int:
        return sum([info.size async for info in engine_with(store, BOTH).repository.store.list("memories/")])

    limit, outcomes = await held() + 12_000, []
    for turn in range(3):
        observe(home, 1, f"turn {turn}")
        engine = engine_with(store, BOTH, limits=Limits(memory_bytes=limit))
        receipt = await export(engine, open_local(str(home)), ExportRequest(memory=MEMORY))
        outcomes.append(receipt.outcome)
        assert await held() <= limit
    assert (outcomes[0], outcomes[-1]) == (ExportOutcome.COMMITTED, ExportOutcome.REJECTED)


async def test_plain_age_opens_a_pack(tmp_path: Path) -> None:
    home, store, key = claude_mem_home(empty_home(tmp_path / "home"), 5), tmp_path / "store", tmp_path / "key"
    await export(engine_with(store, ENCRYPTED), open_local(str(home)), ExportRequest(memory=MEMORY))
    pack = next(path for path in files_of(store) if ".tar." in path.name)
    key.write_text(ONE)
    if age := shutil.which("age"):
        tar = subprocess.run([age, "-d", "-i", key, pack], capture_output=True, check=True).stdout
    else:
        tar = pyrage.decrypt(pack.read_bytes(), [pyrage.x25519.Identity.from_str(ONE)])
    (tmp_path / f"pack{''.join(pack.suffixes)}").write_bytes(tar)
    listed = subprocess.run(
        ["tar", "-tf", tmp_path / f"pack{''.join(pack.suffixes)}"], capture_output=True, text=True, check=True
    ).stdout
    assert "claude-mem/claude-mem.db" in listed


async def test_a_memory_opened_by_hand_is_read_without_us(tmp_path: Path) -> None:
    home, store, plain = claude_mem_home(empty_home(tmp_path / "home"), 5), tmp_path / "store", tmp_path / "plain"
    await export(engine_with(store, BOTH), open_local(str(home)), ExportRequest(memory="conductor"))
    folder = next((store / "memories").iterdir())
    for path in files_of(folder):
        if not path.name.startswith("."):
            target = plain / "memories/conductor" / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(pyrage.decrypt(path.read_bytes(), [pyrage.x25519.Identity.from_str(ONE)]))
    reader: list[str | Path] = [sys.executable, PROJECT / "docs/read_snapshot.py", plain, "conductor", tmp_path / "out"]
    ran = subprocess.run(reader, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    database = "claude-mem.db"
    assert (tmp_path / "out/claude-mem" / database).exists()


@pytest.mark.skipif(not shutil.which("age"), reason="the age tool is not installed")
async def test_the_recipe_for_doing_it_by_hand_works_for_any_id(tmp_path: Path) -> None:
    home, store, key = empty_home(tmp_path / "home"), tmp_path / "store", tmp_path / "memories.key"
    (home / "MEMORY.md").write_text("by hand\n")
    await export(engine_with(store, BOTH), open_local(str(home)), ExportRequest(memory="agentA"))
    key.write_text(ONE)
    recipe = (PROJECT / "docs/security.md").read_text().split("```\n")[-2]
    paths = {
        "store/memories/gcqo7nides…": next((store / "memories").iterdir()),
        "/safe/memories.key": key,
        "/safe/read_snapshot.py": PROJECT / "docs/read_snapshot.py",
        "/tmp/plain": tmp_path / "plain",
        "/tmp/memory": tmp_path / "out",
    }
    for written, meant in paths.items():
        assert written in recipe
        recipe = recipe.replace(written, str(meant))
    ran = subprocess.run(["sh", "-e", "-c", recipe], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert [path.read_text() for path in (tmp_path / "out").rglob("MEMORY.md")] == ["by hand\n"]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("age"), reason="the age tool is not installed")
async def test_what_plain_age_seals_is_read(tmp_path: Path) -> None:
    home, store = claude_mem_home(empty_home(tmp_path / "home"), 5), tmp_path / "store"
    await export(engine_with(store, ENCRYPTED), open_local(str(home)), ExportRequest(memory=MEMORY))
    for path in files_of(store):
        if path.stat().st_size and not path.name.startswith("."):
            plain = pyrage.decrypt(path.read_bytes(), [pyrage.x25519.Identity.from_str(ONE)])
            sealed = subprocess.run(["age", "-r", recipient(ONE)], input=plain, capture_output=True, check=True).stdout
            path.write_bytes(sealed)
    other = empty_home(tmp_path / "other")
    receipt = await restore(engine_with(store, ENCRYPTED), open_local(str(other)), RestoreRequest(memory=MEMORY))
    assert receipt.outcome is RestoreOutcome.COMPLETE
    assert memory_tree(other / ".claude-mem") == memory_tree(home / ".claude-mem")


@pytest.mark.parametrize("given", [GivenKeys(), GivenKeys(identities=(OTHER,))], ids=["no key", "another key"])
def test_without_the_key_every_command_says_so_and_changes_nothing(
    tmp_path: Path, given: GivenKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, store = claude_mem_home(empty_home(tmp_path / "home"), 5), tmp_path / "store"
    for name, value in environment(BOTH).items():
        monkeypatch.setenv(name, value)
    assert run_cli("export", MEMORY, f"--sandbox=local:{home}", store=store).code == 0
    for name in environment(BOTH):
        monkeypatch.delenv(name)
    for name, value in environment(given).items():
        monkeypatch.setenv(name, value)
    before = everything_in(store)
    sandbox = f"--sandbox=local:{empty_home(tmp_path / 'other')}"
    commands = [
        ("list",),
        ("verify",),
        ("forget",),
        *(
            (verb, name)
            for verb in ("log", "show", "diff", "verify", "forget", "rekey")
            for name in (MEMORY, "no-such-memory")
            if (verb, name, given) != ("rekey", MEMORY, GivenKeys())
        ),
        *((verb, name, sandbox) for verb in ("restore", "export") for name in (MEMORY, "no-such-memory")),
        ("fork", MEMORY, "new"),
        ("delete", MEMORY, "--yes"),
    ]
    for words in commands:
        ran = run_cli(*words, store=store)
        assert (ran.code, ran.error) == (1, "key-needed"), (words, ran)
        assert "identity_files" in ran.stderr
        assert "passphrase_file" in ran.stderr
    doctor = run_cli("doctor", store=store)
    assert doctor.code == 1
    assert "key-needed" in {row.get("code") for row in doctor.document["checks"]}
    assert everything_in(store) == before


def test_a_first_start_is_still_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = f"--sandbox=local:{empty_home(tmp_path / 'home')}"
    for keys in (GivenKeys(), BOTH):
        for name, value in environment(keys).items():
            monkeypatch.setenv(name, value)
        assert run_cli("restore", MEMORY, sandbox, store=tmp_path / "store").document["outcome"] == "empty"


async def test_a_store_may_mix_old_and_new(tmp_path: Path) -> None:
    home, store = claude_mem_home(empty_home(tmp_path / "home"), 20), tmp_path / "store"
    await export(engine_at(store), open_local(str(home)), ExportRequest(memory=MEMORY))
    observe(home, 3, "sealed")
    sealed = await export(engine_with(store, ENCRYPTED), open_local(str(home)), ExportRequest(memory=MEMORY))
    assert sealed.kind == "delta", "it builds on the plain one"
    fresh = await export(engine_with(store, ENCRYPTED), open_local(str(home)), ExportRequest(memory="hidden-one"))
    for snapshot, memory in ((sealed.snapshot, MEMORY), (fresh.snapshot, "hidden-one")):
        other = empty_home(tmp_path / (snapshot or ""))
        request = RestoreRequest(memory=memory, snapshot=snapshot or "")
        receipt = await restore(engine_with(store, ENCRYPTED), open_local(str(other)), request)
        assert receipt.outcome is RestoreOutcome.COMPLETE
    assert sorted(await engine_with(store, ENCRYPTED).repository.memories()) == [MEMORY, "hidden-one"]
    assert b"hidden-one" not in everything_in(store)
    with pytest.raises(KeyNeeded):
        await restore(engine_with(store, GivenKeys()), open_local(str(home)), RestoreRequest(memory=MEMORY))


def test_a_recipient_that_cannot_be_read_again_is_wrong_usage(tmp_path: Path) -> None:
    env = {"MEMORY_SIDECAR_IDENTITY": ONE, "MEMORY_SIDECAR_RECIPIENTS": recipient(OTHER)}
    ran = run_cli("list", store=tmp_path / "store", env=env)
    assert (ran.code, ran.error) == (2, "bad-config")
    assert "SECRET" not in ran.stderr
    checked = run_cli("config", "check", store=tmp_path / "store", env={"MEMORY_SIDECAR_IDENTITY": ONE})
    assert checked.code == 0
    assert "SECRET" not in str(checked.document)


def test_new_keys_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    age, signing = run_cli("keygen", store="file:/nowhere"), run_cli("keygen", "--signing", store="file:/nowhere")
    assert recipient(age.document["identity"]) == age.document["recipient"]
    home = claude_mem_home(empty_home(tmp_path / "home"), 5)
    for name, text in (("IDENTITY_FILE", age.document["identity"]), ("SIGNING_KEY_FILE", signing.document["private"])):
        file = tmp_path / name
        file.write_text(text)
        file.chmod(0o600)
        monkeypatch.setenv(f"MEMORY_SIDECAR_{name}", str(file))
    ran = run_cli("export", MEMORY, f"--sandbox=local:{home}", store=tmp_path / "store")
    assert (ran.code, ran.stderr) == (0, "")
    os.chmod(tmp_path / "IDENTITY_FILE", 0o640)
    assert "chmod 600" in run_cli("list", store=tmp_path / "store").stderr


@pytest.mark.slow
async def test_forks_and_folds_are_sealed_too(tmp_path: Path) -> None:
    from sidecar.engine.heads import fork

    home, store = claude_mem_home(empty_home(tmp_path / "home"), 20), tmp_path / "store"
    engine = engine_with(store, BOTH)
    for turn in range(10):
        grow(home, f"turn {turn}")
        receipt = await export(engine, open_local(str(home)), ExportRequest(memory=MEMORY))
        assert receipt.outcome is ExportOutcome.COMMITTED
    await fork(engine.repository, MEMORY, "other")
    forget_caches(home)
    for memory in (MEMORY, "other"):
        other = empty_home(tmp_path / memory.replace("/", "-"))
        back = await restore(engine, open_local(str(other)), RestoreRequest(memory=memory))
        assert back.outcome is RestoreOutcome.COMPLETE
        assert memory_tree(other / ".claude-mem") == memory_tree(home / ".claude-mem")
    assert all(
        path.read_bytes().startswith(b"age-encryption.org/v1\n") for path in files_of(store) if path.stat().st_size
    )


def test_a_planted_folder_stops_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home, store = claude_mem_home(empty_home(tmp_path / "home"), 5), tmp_path / "store"
    for name, value in environment(BOTH).items():
        monkeypatch.setenv(name, value)
    assert run_cli("export", MEMORY, f"--sandbox=local:{home}", store=store).code == 0
    planted = store / "memories" / ("a" * 160)
    planted.mkdir()
    (planted / "head.json").write_text("{}")
    for command in ("list", "forget", "rekey"):
        caplog.clear()
        assert run_cli(command, store=store).code == 0
        assert planted.name in caplog.text
    ran = run_cli("verify", store=store)
    assert (ran.code, planted.name in "".join(ran.document["problems"])) == (1, True)
    shutil.rmtree(planted)
    assert run_cli("verify", store=store).code == 0
    (copy,) = store.glob("memories/*/heads/[0-9]*")
    copy.write_bytes(b"x")
    for words in (["verify"], ["verify", MEMORY]):
        ran = run_cli(*words, store=store)
        assert (ran.code, copy.name in "".join(ran.document["memories"][0]["problems"])) == (1, True)
