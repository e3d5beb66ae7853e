"""What an agent's own program removes after a while is no loss: no guard objects to that, and to all else as before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.parts.homes import Ran, empty_home, run_cli, write

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "conductor"
SESSION = "0b5a3c1e-77aa-4d52-9f3e-1c2d3e4f5a{:02x}"
PROJECT = ".claude/projects/-home-user-app"


def exported(home: Path, *more: str | Path) -> Ran:
    return run_cli("export", MEMORY, "--sandbox", f"local:{home}", *more, store=home.parent / "store")


def claude_code_home(home: Path, transcripts: int) -> Path:
    """Transcripts, each with a folder of its own, a list of todos and a plan; and beside them what is remembered for good."""
    for number in range(transcripts):
        session = SESSION.format(number)
        write(home / f"{PROJECT}/{session}.jsonl", b'{"type":"user"}\n' * 400)
        write(home / f"{PROJECT}/{session}/tool-results/one.txt", b"result " * 300)
        write(home / f".claude/todos/{session}-agent-{session}.json", b"[]")
    write(home / f"{PROJECT}/memory/MEMORY.md", b"what matters")
    write(home / ".claude/CLAUDE.md", b"be brief")
    return home


def rotate(home: Path, transcripts: int) -> None:
    for number in range(transcripts):
        session = SESSION.format(number)
        (home / f"{PROJECT}/{session}.jsonl").unlink()
        shutil.rmtree(home / f"{PROJECT}/{session}")
        (home / f".claude/todos/{session}-agent-{session}.json").unlink()


@pytest.mark.parametrize("gone", [20, 30])
def test_transcripts_that_claude_code_removed_are_not_missed(gone: int, tmp_path: Path) -> None:
    home = claude_code_home(tmp_path / "home", 30)
    assert exported(home).document["outcome"] == "committed"
    rotate(home, gone)
    ran = exported(home)
    assert (ran.code, ran.document["outcome"], ran.document["accepted"]) == (0, "committed", None)
    assert ran.document["files"] == 3 * (30 - gone) + 2


def test_what_is_remembered_for_good_is_still_missed(tmp_path: Path) -> None:
    home = claude_code_home(tmp_path / "home", 5)
    for number in range(30):
        write(home / f"{PROJECT}/memory/{number}.md", b"fact " * 500)
    assert exported(home).code == 0
    rotate(home, 3)
    for number in range(25):
        (home / f"{PROJECT}/memory/{number}.md").unlink()
    ran = exported(home)
    assert (ran.code, ran.error) == (3, "shrunk")
    # 30 facts of 2,500 bytes, two files of 20 and the two sessions that are left, of 8,502 bytes each.
    assert ran.document["reason"]["message"] == "It has 29,524 bytes; the head has 92,024 beside what rotates."


def test_a_root_of_which_only_rotating_files_were_there_is_not_missing(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"what matters")
    write(home / ".codex/sessions/2026/11/16/rollout-1.jsonl", b"{}\n")
    assert exported(home).code == 0
    shutil.rmtree(home / ".codex/sessions")
    assert exported(home).document["outcome"] == "committed"
    write(home / ".codex/sessions/2026/11/17/rollout-2.jsonl", b"{}\n")
    write(home / ".codex/memories/one.md", b"remembered")
    assert exported(home).code == 0
    shutil.rmtree(home / ".codex")
    ran = exported(home)
    assert (ran.code, ran.error) == (3, "root-missing")
    assert "the head has 1 file there" in ran.document["reason"]["message"]


def test_daily_logs_rotate_and_files_that_only_look_alike_do_not(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"what matters")
    for day in range(1, 29):
        write(home / f"memory/2026-10-{day:02d}.md", b"log " * 1000)
    for number in range(28):
        write(home / f"memory/abcd-ef-{number:02d}.md", b"fact " * 1000)
    assert exported(home).code == 0
    for day in range(1, 29):
        (home / f"memory/2026-10-{day:02d}.md").unlink()
    assert exported(home).document["outcome"] == "committed"
    for number in range(28):
        (home / f"memory/abcd-ef-{number:02d}.md").unlink()
    assert exported(home).error == "shrunk"


CUSTOM = """
[layouts.notes]
keep = ["**"]
rotating = {rotating}
required = ["inbox/first.md"]
[[layouts.notes.roots]]
name = "notes"
paths = ["~/notes"]
"""


def with_layout(folder: Path, rotating: str) -> Path:
    config = folder / "config.toml"
    config.write_text(CUSTOM.format(rotating=rotating))
    return config


@pytest.mark.parametrize(("rotating", "outcome"), [('["inbox/**"]', "committed"), ("[]", "rejected")])
def test_a_layout_of_ones_own_says_what_rotates(rotating: str, outcome: str, tmp_path: Path) -> None:
    home, config = empty_home(tmp_path / "home"), with_layout(tmp_path, rotating)
    write(home / "notes/index.md", b"all of it")
    for name in ("first", *map(str, range(20))):
        write(home / f"notes/inbox/{name}.md", b"a message " * 500)
    assert exported(home, "--config", config).code == 0
    shutil.rmtree(home / "notes/inbox")
    ran = exported(home, "--config", config)
    assert (ran.document["outcome"], ran.error) == (outcome, "" if outcome == "committed" else "required-missing")


@pytest.mark.parametrize(
    ("rotating", "said"),
    [
        ('["/inbox/**"]', "'/inbox/**' is not a pattern relative to the root"),
        ('["../inbox"]', "'../inbox' is not a pattern relative to the root"),
        ('["inbox/{day}.md"]', "'{day}' stands for nothing; only '{date}' does"),
        ('"inbox/**"', "[layouts.notes] is not a layout"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused_with_its_line(rotating: str, said: str, tmp_path: Path) -> None:
    config = with_layout(tmp_path, rotating)
    ran = run_cli("config", "check", "--config", config, store=tmp_path / "store")
    assert (ran.code, ran.error) == (2, "bad-config")
    assert said in ran.document["error"]["message"]
    assert f"{config}:4: " in ran.document["error"]["message"]


def test_layouts_shows_what_rotates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sidecar.cli import main

    shown = run_cli("layouts", "three-tier", store=tmp_path / "store").document["layouts"][0]
    assert shown["rotating"] == ["memory/{date}.md", "memory/**/{date}.md"]
    assert main(["layouts", "claude-code", f"--store=file:{tmp_path / 'store'}"]) == 0
    assert "rotating: projects/*/*.jsonl" in capsys.readouterr().out
