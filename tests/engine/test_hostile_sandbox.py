"""The sandbox is hostile input: each lie is refused under its own code, and leaves no trace in the store or on the disk."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import pytest

from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.engine.sandbox.dialogue import build_error
from sidecar.errors import OutputTooLarge, SandboxTimeout, SidecarError
from sidecar.format.protocol import ProgramError
from tests.parts import forked_sidecar
from tests.parts.forgery import (
    BIG_AFTER,
    BOMBS,
    CASES,
    MEMORY,
    Bundle,
    ForgedSandbox,
    big_base,
    entry,
    export_forged,
    framed,
    good_delta,
    honest,
)
from tests.parts.homes import WatchedSandbox, empty_home, engine_at, tree
from tests.parts.sent import request_in

T = TypeVar("T")
ROOM = 400 << 10
"""KiB that refusing anything may take: far below what the bombs hold."""
PATIENCE = 180  # a bomb would take far longer, or all the memory; a busy machine must not fail this
"""Seconds that refusing anything may take."""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A store with one honest snapshot, and a temporary folder that is watched."""
    spool = tmp_path / "spool"
    spool.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spool))
    made = engine_at(tmp_path / "store")
    assert asyncio.run(export_forged(made, big_base))[0] == "committed"
    return made


def test_an_honest_answer_is_committed(engine: Engine, tmp_path: Path) -> None:
    code, sandbox = asyncio.run(export_forged(engine, good_delta))
    assert code == "committed"
    home = empty_home(tmp_path / "home")
    asyncio.run(restore(engine, WatchedSandbox(home), RestoreRequest(memory=MEMORY)))
    assert (home / "MEMORY.md").read_bytes() == BIG_AFTER
    assert not sandbox.tidied


@pytest.mark.parametrize("case", [name for name in CASES if name not in BOMBS])
def test_a_lie_is_refused_with_its_own_code_and_nothing_is_written(case: str, engine: Engine, tmp_path: Path) -> None:
    code, forge = CASES[case]
    before = tree(tmp_path)
    said, sandbox = asyncio.run(export_forged(engine, forge))
    assert said == code
    assert tree(tmp_path) == before
    assert sandbox.uploaded == 0


@pytest.mark.parametrize("case", BOMBS)
def test_a_bomb_is_refused_quickly_and_in_little_memory(case: str, engine: Engine, tmp_path: Path) -> None:
    code, _ = CASES[case]
    before = tree(tmp_path)
    ran = forked_sidecar.run(
        [case, tmp_path / "store"],
        kind="tests.parts.forgery",
        env={**os.environ, "TMPDIR": str(tmp_path / "spool")},
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = json.loads(ran.stdout)
    assert said["code"] == code
    assert said["grew_kib"] < ROOM
    assert said["seconds"] < PATIENCE
    assert said["sent"] < 40 << 20, "this is no bomb but simply large"
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("disk-full", "disk-full"),
        ("limit-files", "limit-files"),
        ("made-up", "sandbox-program-failed"),
        ("limit-made-up", "sandbox-program-failed"),
        ("unauthorized", "sandbox-program-failed"),
    ],
)
def test_a_code_that_only_a_sandbox_knows_is_not_told_to_callers(said: str, told: str) -> None:
    assert build_error(ProgramError(code=said, message="It says so.")).code == told


def test_what_is_unchanged_since_no_snapshot_at_all_is_not_believed(tmp_path: Path) -> None:
    engine = engine_at(tmp_path / "store")
    code, _ = asyncio.run(export_forged(engine, lambda request: honest(status="unchanged")))
    assert code == "bad-answer"
    assert not (tmp_path / "store/memories").exists()


def test_a_download_that_is_cut_short_is_refused(engine: Engine, tmp_path: Path) -> None:
    before = tree(tmp_path)
    sandbox = _downloading(b"only the beginning")
    assert _refusal(engine, sandbox) == "size-mismatch"
    assert len(sandbox.asked) > 1, "a transfer that was cut short deserves another try"
    assert tree(tmp_path) == before


def test_a_download_that_never_ends_is_stopped_at_what_was_said(engine: Engine, tmp_path: Path) -> None:
    before = tree(tmp_path)
    sent = 0

    def endless() -> object:
        nonlocal sent
        while True:
            sent += 1 << 20
            yield bytes(1 << 20)

    sandbox = ForgedSandbox(lambda request: Bundle(honest().pack, honest().index, inline=False))
    sandbox.downloads = endless()  # type: ignore[assignment]
    assert _refusal(engine, sandbox) == "size-mismatch"
    assert sent < 16 << 20
    assert tree(tmp_path) == before


def test_a_download_of_other_bytes_is_refused(engine: Engine, tmp_path: Path) -> None:
    before = tree(tmp_path)
    whole = honest()
    swapped = bytearray(whole.pack + whole.index)
    swapped[len(swapped) // 2] ^= 1
    assert _refusal(engine, _downloading(bytes(swapped))) == "digest-mismatch"
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "path", ["/home/user/work-of-years/thesis", "/home/user", "relative/work-1/x", "/work-1/../home"]
)
def test_the_sidecar_fetches_and_removes_nothing_in_a_sandbox_but_its_own(path: str, engine: Engine) -> None:
    sandbox = ForgedSandbox(
        lambda request: Bundle(honest().pack, honest().index, {"bundle": {"path": path}}, inline=False)
    )
    _refusal(engine, sandbox)
    assert sandbox.fetched == []
    for command in sandbox.tidied:
        assert path not in command and path not in str(request_in(command))


def test_output_that_never_ends_is_cut_off_and_its_process_is_gone(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    sandbox = WatchedSandbox(home)
    started = time.monotonic()
    with pytest.raises(OutputTooLarge) as refused:
        asyncio.run(_promptly(sandbox.run("echo $$ > pid; yes & yes", timeout=60, output_limit=4 << 20)))
    assert refused.value.code == "output-too-large"
    assert time.monotonic() - started < 50, "cut off by its output, not by the time-out"
    assert _session_is_gone(int((home / "pid").read_text()))


def test_a_command_that_never_ends_is_ended(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    with pytest.raises(SandboxTimeout):
        command = "echo $$ > pid; sleep 1000 & sleep 1000"
        asyncio.run(_promptly(WatchedSandbox(home).run(command, timeout=1, output_limit=1 << 20)))
    assert _session_is_gone(int((home / "pid").read_text()))


def test_an_export_from_a_sandbox_whose_output_never_ends_fails_as_such(engine: Engine, tmp_path: Path) -> None:
    """A sandbox whose python3 is not Python at all: the real local sandbox, end to end."""
    home = empty_home(tmp_path / "home")
    fake = tmp_path / "bin/python3"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexec yes\n")
    fake.chmod(0o755)
    sandbox = WatchedSandbox(home)
    sandbox._environment["PATH"] = f"{fake.parent}:{sandbox._environment['PATH']}"
    before = tree(tmp_path / "store")
    assert _refusal(engine, sandbox) == "output-too-large"
    assert tree(tmp_path / "store") == before


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ({"status": "complete", "memory": "somebody-else"}, "memory-mismatch"),
        ({"status": "complete", "snapshot": "20200101T000000000Z-00000000"}, "memory-mismatch"),
        ({"status": "fine"}, "bad-answer"),
        ({}, "bad-answer"),
        ({"status": "complete", "files": -1}, "bad-answer"),
        ({"status": "complete", "warnings": "none"}, "bad-answer"),
    ],
)
def test_a_restore_is_complete_only_when_the_sandbox_says_exactly_so(
    answer: dict[str, object], code: str, engine: Engine
) -> None:
    def forge(request: dict[str, object]) -> bytes:
        said = {"memory": request["memory"], "snapshot": request["snapshot"], **answer}
        return framed(str(request["nonce"]), said)

    with pytest.raises(SidecarError) as refused:
        asyncio.run(restore(engine, ForgedSandbox(forge), RestoreRequest(memory=MEMORY)))
    assert refused.value.code == code


def test_a_restore_is_not_complete_when_files_are_said_to_be_missing(engine: Engine) -> None:
    """The sandbox took the upload, says all is well, and placed nothing: nobody may call that complete."""

    def forge(request: dict[str, object]) -> bytes:
        said = {"memory": request["memory"], "snapshot": request["snapshot"], "status": "complete", "files": 0}
        return framed(str(request["nonce"]), said)

    try:
        receipt = asyncio.run(restore(engine, ForgedSandbox(forge), RestoreRequest(memory=MEMORY)))
    except SidecarError:
        return
    assert receipt.outcome != "complete"


def test_what_a_layout_never_restores_does_not_arrive_even_if_a_snapshot_has_it(engine: Engine, tmp_path: Path) -> None:
    """A sandbox slips a foreign file into its export: a restored supervisor.json made a worker kill a stranger."""
    roots = [{"name": "claude-mem", "layout": "claude-mem", "hint": "~/.claude-mem"}]
    names = ["supervisor.json", "worker.pid", ".env", "oauth-token.json", "not-of-any-layout.sh"]
    lines = [entry(f"claude-mem/{name}") for name in names] + [entry("claude-mem/modes/code.json")]
    asyncio.run(_export_all_layouts(engine, ForgedSandbox(lambda request: honest(lines, roots=roots))))
    home = empty_home(tmp_path / "home")
    with_it = asyncio.run(_restored(engine, home))
    assert [name for name in names if (home / ".claude-mem" / name).exists()] == [], with_it


async def _export_all_layouts(engine: Engine, sandbox: ForgedSandbox) -> None:
    try:
        await export(engine, sandbox, ExportRequest(memory="other"))
    except SidecarError:
        return  # refused at the door: just as well


async def _restored(engine: Engine, home: Path) -> object:
    return await restore(engine, WatchedSandbox(home), RestoreRequest(memory="other"))


def _downloading(what: bytes) -> ForgedSandbox:
    sandbox = ForgedSandbox(lambda request: Bundle(honest().pack, honest().index, inline=False))
    sandbox.downloads = [what]
    return sandbox


def _refusal(engine: Engine, sandbox: object) -> str:
    try:
        asked = ExportRequest(memory=MEMORY, layouts=("three-tier",))
        receipt = asyncio.run(_promptly(export(engine, sandbox, asked)))  # type: ignore[arg-type]
    except SidecarError as problem:
        return problem.code
    return str(receipt.outcome)


async def _promptly(work: Awaitable[T]) -> T:
    """What would hang must fail."""
    async with asyncio.timeout(120):
        return await work


def _session_is_gone(session: int) -> bool:
    """Whether no process of this session lives any more, given a moment to be reaped."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if session not in {os.getsid(int(pid)) for pid in os.listdir("/proc") if pid.isdigit() and _lives(int(pid))}:
            return True
        time.sleep(0.02)
    return False


def _lives(pid: int) -> bool:
    try:
        os.getsid(pid)
        return b"\nState:\tZ" not in Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False
