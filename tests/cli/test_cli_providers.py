"""The command line over E2B and Daytona, as a user types it; the SDKs are the real ones, the clouds are emulated."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from emulators import DaytonaEmulator, E2BEmulator, Fault
from tests.parts.homes import PROJECT, Ran, claude_mem_home, memory_tree, observe, run_cli, told
from tests.parts.providers import EMULATORS

pytestmark = pytest.mark.usefixtures("forked_programs")

Server = E2BEmulator | DaytonaEmulator
BOTH = pytest.mark.parametrize("provider", ["e2b", "daytona"])
EITHER = pytest.mark.parametrize("provider", ["e2b", pytest.param("daytona", marks=pytest.mark.slow)])


@pytest.fixture
def server(provider: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with EMULATORS[provider]() as started:
        for name, value in started.environment().items():
            monkeypatch.setenv(name, value)
        yield started


def export(ref: str, store: Path, *more: str, env: dict[str, str] | None = None) -> Ran:
    return run_cli("export", "conductor", "--sandbox", ref, *more, store=store, env=env)


def restore(ref: str, store: Path, *more: str) -> Ran:
    return run_cli("restore", "conductor", "--sandbox", ref, *more, store=store)


@BOTH
def test_a_memory_outlives_its_sandbox(provider: str, server: Server, tmp_path: Path) -> None:
    first = server.create()
    claude_mem_home(first.home)
    ref = f"{provider}:{first.id}"
    sent = export(ref, tmp_path, "--conversation", "c1")
    assert (sent.code, sent.document["outcome"], sent.document["sandbox"]) == (0, "committed", ref)
    observe(first.home, 10, "later")
    server.clear()
    again = export(ref, tmp_path)
    assert (again.document["outcome"], again.document["kind"]) == ("committed", "delta")
    assert again.document["trips"] == {"control": 1, "command": 1}
    assert [call.step for call in server.calls] == ["info", "command"]
    memory = memory_tree(first.home / ".claude-mem")
    first.kill()
    second = server.create()
    server.clear()
    came = restore(f"{provider}:{second.id}", tmp_path)
    assert (came.code, came.document["outcome"], came.document["round_trips"]) == (0, "complete", 3)
    assert [call.step for call in server.calls] == ["info", "upload", "command"]
    assert memory_tree(second.home / ".claude-mem") == memory


@pytest.mark.parametrize("provider", ["e2b"])
def test_the_user_to_work_as_can_be_named(provider: str, server: Server, tmp_path: Path) -> None:
    box, fresh = server.create(), server.create()
    home = box.users["root"].home
    claude_mem_home(home)
    sent = export(f"e2b:{box.id}", tmp_path, "--user", "root")
    assert (sent.code, sent.document["home"]) == (0, str(home))
    came = restore(f"e2b:{fresh.id}", tmp_path, "--user", "root")
    assert (came.code, came.document["home"]) == (0, str(fresh.users["root"].home))
    assert memory_tree(fresh.users["root"].home / ".claude-mem") == memory_tree(home / ".claude-mem")
    nobody = export(f"e2b:{box.id}", tmp_path, "--user", "alice")
    assert (nobody.code, nobody.error) == (1, "sandbox-denied") and "alice" in nobody.stderr


@EITHER
def test_a_sandbox_that_is_gone_is_said_to_be_gone_at_once(provider: str, server: Server, tmp_path: Path) -> None:
    box = server.create()
    box.kill()
    server.clear()
    for ran in (export(f"{provider}:{box.id}", tmp_path), restore(f"{provider}:never-was", tmp_path)):
        assert (ran.code, ran.error) == (1, "sandbox-gone")
        assert not ran.document["error"]["retryable"]
        assert len(ran.stderr.strip().splitlines()) == 1
    assert [call.step for call in server.calls] == ["info"] * 2, "no retries"


@EITHER
def test_a_wrong_key_gets_one_clear_line_and_is_never_shown(provider: str, server: Server, tmp_path: Path) -> None:
    box, variable = server.create(), {"e2b": "E2B_API_KEY", "daytona": "DAYTONA_API_KEY"}[provider]
    wrong = "e2b_0123456789abcdef0123456789abcdef01234567"
    server.clear()
    ran = export(f"{provider}:{box.id}", tmp_path, env={variable: wrong})
    assert (ran.code, ran.error) == (1, "sandbox-denied")
    assert len(ran.stderr.strip().splitlines()) == 1 and variable in ran.stderr
    assert wrong not in ran.stderr and wrong not in str(ran.document)
    assert [call.step for call in server.calls] == ["info"], "no retries"
    without = export(f"{provider}:{box.id}", tmp_path, env={variable: ""})
    assert (without.code, without.error) == (1, "sandbox-denied") and variable in without.stderr


@EITHER
def test_a_sandbox_that_sleeps_is_left_asleep_unless_it_is_to_be_woken(
    provider: str, server: Server, tmp_path: Path
) -> None:
    box = server.create()
    claude_mem_home(box.home)
    box.pause() if provider == "e2b" else box.stop()
    asleep = box.state
    ran = export(f"{provider}:{box.id}", tmp_path)
    assert (ran.code, ran.error, box.state) == (1, "sandbox-asleep", asleep)
    assert "--wake" in ran.stderr
    woken = export(f"{provider}:{box.id}", tmp_path, "--wake")
    assert (woken.code, woken.document["outcome"]) == (0, "committed")
    assert "woken" in told(woken.document)[0]
    assert box.state != asleep


@EITHER
def test_a_sandbox_that_is_about_to_end_is_exported_in_time(provider: str, server: Server, tmp_path: Path) -> None:
    box = server.create()
    claude_mem_home(box.home)
    box.end_in(20)
    ends_at = box.ends_at
    ran = export(f"{provider}:{box.id}", tmp_path)
    assert (ran.code, ran.document["outcome"], told(ran.document)) == (0, "committed", [])
    assert ran.document["trips"] == {"control": 2, "command": 2}  # it had never seen the program
    assert ends_at is not None and box.ends_at is not None and box.ends_at > ends_at + 30


@EITHER
def test_the_receipt_says_when_a_sandbox_could_not_be_kept(provider: str, server: Server, tmp_path: Path) -> None:
    box = server.create()
    claude_mem_home(box.home)
    box.end_in(20)
    server.faults.add(Fault("timeout" if provider == "e2b" else "activity", "status", status=500, times=None))
    ran = export(f"{provider}:{box.id}", tmp_path)
    assert (ran.code, ran.document["outcome"]) == (0, "committed")
    assert "could not be prolonged" in told(ran.document)[0]


@EITHER
def test_the_doctor_looks_into_a_sandbox(provider: str, server: Server, tmp_path: Path) -> None:
    box = server.create()
    claude_mem_home(box.home, 5)
    ran = run_cli("doctor", "--sandbox", f"{provider}:{box.id}", store=tmp_path)
    assert ran.code == 0
    found = {row["name"]: row["detail"] for row in ran.document["checks"]}["sandbox"]
    assert str(box.home) in found and "python3" in found and "ends in" in found


@EITHER
def test_a_missing_sdk_is_named_with_the_line_that_installs_it(provider: str, server: Server, tmp_path: Path) -> None:
    script = f"import sys; sys.modules[{provider!r}] = None; from sidecar.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["export", "m", "--sandbox", f"{provider}:abc", f"--store=file:{tmp_path}"]
    ran = subprocess.run([sys.executable, "-c", script, *words], cwd=PROJECT, capture_output=True, text=True)
    assert ran.returncode == 1
    assert f"pip install 'memory-sidecar[{provider}]'" in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    "ref", ["e2b:", "e2b:../x", "e2b:a/b", "e2b:a b", "daytona:", "daytona:a?b=c", "e3b:x", "nothing"]
)
def test_what_is_no_reference_is_wrong_usage(ref: str, tmp_path: Path) -> None:
    ran = export(ref, tmp_path)
    assert (ran.code, ran.error) == (2, "bad-reference")


def test_local_sandboxes_need_no_sdk(tmp_path: Path) -> None:
    script = "import sys; from sidecar.wiring import open_sandbox; open_sandbox(sys.argv[1]); print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", script, f"local:{tmp_path}"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        env={**os.environ},
    )
    assert ran.returncode == 0
    assert not {"e2b", "daytona", "httpx"} & set(ran.stdout.split())
