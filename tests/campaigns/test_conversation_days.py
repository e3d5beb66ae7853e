"""Days of conductors that are killed, with services that are killed, stopped and replaced: what was called saved is saved."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import textwrap
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.parts.homes import PROJECT, empty_home, run_cli, write
from tests.parts.services import TOKEN, Service, path, serving, until

CONDUCTOR = """
    import sys, time
    from pathlib import Path
    from sidecar.client import Client
    url, home, number, seconds = sys.argv[1], Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    with Client(url, token="{token}") as client:
        with client.conversation("me", sandbox=f"local:{{home}}", conversation=number, checkpoint_every=1) as talk:
            with (home / "MEMORY.md").open("a") as memory:
                memory.write(f"- said in {{number}}\\n")
            print("talking", flush=True)
            time.sleep(seconds)
        print("saved" if talk.saved else "not saved", flush=True)
"""
ENDS = ("export", "kill conductor", "terminate conductor", "kill service", "stop service", "kill both", "sandbox dies")


def conduct(service: Service, home: Path, number: int, seconds: float) -> subprocess.Popen[str]:
    program = textwrap.dedent(CONDUCTOR.format(token=TOKEN))
    process = subprocess.Popen(
        [sys.executable, "-c", program, service.url, str(home), f"c{number}", str(seconds)],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "talking\n"
    return process


def head_of(store: Path, tmp_path: Path) -> str:
    """What a fresh sandbox would remember, by the command line alone."""
    fresh = Path(tempfile.mkdtemp(dir=tmp_path))
    receipt = run_cli("restore", "me", "--sandbox", f"local:{fresh}", store=store).document
    return (fresh / "MEMORY.md").read_text() if receipt["outcome"] == "complete" else ""


@pytest.mark.parametrize(
    ("seed", "days"), [(1, 3), *(pytest.param(seed, 12, marks=pytest.mark.slow) for seed in range(2, 12))]
)
def test_what_was_called_saved_is_in_the_head_and_what_was_lost_was_called_lost(
    tmp_path: Path, seed: int, days: int
) -> None:
    chance, store = random.Random(seed), tmp_path / "store"
    home = empty_home(tmp_path / "home0")
    said: set[str] = set()
    """What must be in the head: all that was written, less what was called lost."""
    with serving(store, tmp_path / "log", lease=3) as service:
        for number in range(days):
            end = chance.choice(ENDS)
            conductor = conduct(service, home, number, 0 if end == "export" else 600)
            line = f"- said in c{number}"
            lost = _end(end, chance, service, conductor, home)
            conductor.wait(60)
            if end == "sandbox dies":
                home = empty_home(tmp_path / f"home{number + 1}")
            if lost:
                until(lambda: _is_lost(service, f"c{number}") or f"c{number}" in head_of(store, tmp_path))  # noqa: B023
            if not lost or _has(store, tmp_path, line):
                said.add(line)
            remembered = head_of(store, tmp_path)
            assert said <= set(remembered.splitlines()), (seed, number, end, remembered)
        assert service.stop() in (0, 1)
        assert "Traceback" not in service.log.read_text()


def _has(store: Path, tmp_path: Path, line: str) -> bool:
    return line in head_of(store, tmp_path).splitlines()


def _is_lost(service: Service, conversation: str) -> bool:
    rows: list[dict[str, Any]] = service.http.get("/v1/attachments").json()["attachments"]
    return any(row["conversation"] == conversation and row["state"] == "lost" and row["problem"] for row in rows)


def _end(end: str, chance: random.Random, service: Service, conductor: subprocess.Popen[str], home: Path) -> bool:
    """End a conversation in that way. Return whether something may be lost with it: then that has to be told."""
    if end == "export":
        assert conductor.stdout is not None and conductor.stdout.readline() == "saved\n"
        return False
    if end == "terminate conductor":
        conductor.terminate()
        assert conductor.wait(60) == 128 + signal.SIGTERM
        return False
    if end in ("kill service", "kill both"):
        service.kill()
        if end == "kill both":
            conductor.kill()
        service.start()
        until(lambda: _is_saved(service, home))  # it has taken the conversation over
        conductor.kill()
        return False
    conductor.kill()
    if end == "sandbox dies":
        home.rename(home.with_name(f"{home.name}-gone"))
        return True
    if end == "kill conductor":
        until(lambda: _is_saved(service, home))
        return False
    assert end == "stop service"
    assert service.stop() in (0, 1), "1 where an earlier day lost a sandbox"
    service.start()
    return False


def _is_saved(service: Service, home: Path) -> bool:
    said = (home / "MEMORY.md").stat().st_mtime
    answer = service.http.get(path("me", "attachment"), params={"sandbox": f"local:{home}"})
    row = answer.json().get("attachment", {})
    return bool(row.get("saved")) and datetime.fromisoformat(row["saved"]).timestamp() > said and not row["problem"]


@pytest.mark.slow
def test_the_conductor_is_told_to_end_while_its_export_runs(tmp_path: Path) -> None:
    """Of both at once, at a few moments: whoever is still there saves it."""
    for number, pause in enumerate((0.0, 0.05, 0.2)):
        home, store = empty_home(tmp_path / f"home{number}"), tmp_path / f"store{number}"
        write(home / "CLAUDE.md", b"x" * 2_000_000)
        with serving(store, tmp_path / f"log{number}") as service:
            conductor = conduct(service, home, number, pause)
            conductor.terminate()
            code = service.stop()
            assert conductor.wait(60) in (0, 128 + signal.SIGTERM)
            assert code == 0, service.log.read_text()
            assert f"c{number}" in head_of(store, tmp_path)
