"""What the command line says to somebody who does not know it yet: help, suggestions, completion, tables."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sidecar.cli.arguments import EXAMPLES, build_parser, list_commands
from sidecar.cli.main import main
from tests.parts.homes import PROJECT, empty_home, run_cli, write

COMMANDS = sorted(list_commands(build_parser()))


@pytest.mark.parametrize(
    ("typed", "meant"), [("exprot", "export"), ("restroe", "restore"), ("docter", "doctor"), ("serv", "serve")]
)
def test_a_mistyped_command_gets_a_suggestion(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([typed, "x"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and f"There is no command '{typed}'. Did you mean '{meant}'?" in said
    assert "invalid choice" not in said


def test_a_command_like_no_other_is_answered_with_where_they_are(tmp_path: Path) -> None:
    ran = run_cli("zzzzzz", store=tmp_path)
    assert (ran.code, ran.error) == (2, "usage")
    assert ran.document["error"]["message"] == "There is no command 'zzzzzz'. --help lists them."


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_the_parser_takes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert "examples:\n  " in said
    for line in EXAMPLES[command]:
        assert line in said
        if line.startswith(command):
            build_parser().parse_args(shlex.split(line.partition(" > ")[0]))


# Completion


def _bash(tmp_path: Path, line: str) -> set[str]:
    """What bash would offer at the end of a line."""
    script = tmp_path / "complete.bash"
    script.write_text("\n".join(_script("bash")))
    words = line.split(" ")
    quoted = " ".join(map(shlex.quote, words))
    asked = f". {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _memory_sidecar; "
    asked += 'printf "%s\\n" "${COMPREPLY[@]}"'
    ran = subprocess.run(["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True)
    assert ran.stderr == ""
    return set(ran.stdout.split())


def _script(shell: str) -> list[str]:
    return str(run_cli("completion", shell, store="file:/nowhere").document["script"]).split("\n")


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_options_and_values(tmp_path: Path) -> None:
    (tmp_path / "some.tar.gz").touch()
    assert _bash(tmp_path, "memory-sidecar ex") == {"export"}
    assert set(COMMANDS) < _bash(tmp_path, "memory-sidecar ")
    assert _bash(tmp_path, "memory-sidecar export conductor --sand") == {"--sandbox"}
    assert _bash(tmp_path, "memory-sidecar restore m --mode ") == {"replace", "seed"}
    assert _bash(tmp_path, "memory-sidecar config ch") == {"check"}
    assert _bash(tmp_path, "memory-sidecar completion ") >= {"bash", "zsh", "fish"}
    assert _bash(tmp_path, "memory-sidecar import m so") == {"some.tar.gz"}
    assert _bash(tmp_path, "memory-sidecar export m --config so") == {"some.tar.gz"}
    assert _bash(tmp_path, "memory-sidecar export m --sandbox e2") == {"e2b:"}
    assert _bash(tmp_path, "memory-sidecar run -- py") == set()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_every_command_and_option(shell: str) -> None:
    script = "\n".join(_script(shell))
    for name, sub in list_commands(build_parser()).items():
        assert name in script
        for flag in (flag for action in sub._actions for flag in action.option_strings):
            assert (f"-l {flag[2:]} " if shell == "fish" and flag.startswith("--") else flag[1:]) in script, (
                name,
                flag,
            )
    if shutil.which(shell):
        subprocess.run([shell, "-n", "-c", script], check=True, timeout=30)


# Tables


def test_list_and_log_say_what_is_stored_and_of_which_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, home = tmp_path / "store", empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"# remembered\n" * 1000)
    assert run_cli("export", "m", f"--sandbox=local:{home}", "--conversation=c-42", store=store).code == 0
    there = sum(file.stat().st_size for file in store.rglob("memories/**/*") if file.is_file())
    (memory,) = run_cli("list", store=store).document["memories"]
    assert memory["stored_bytes"] == there > 0
    (snapshot,) = run_cli("log", "m", store=store).document["snapshots"]
    packs = sum(file.stat().st_size for file in store.rglob("packs/*") if file.is_file())
    assert (snapshot["stored_bytes"], snapshot["conversation"]) == (packs, "c-42")
    capsys.readouterr()
    assert main(["list", f"--store=file:{store}"]) == 0
    assert "STORED" in capsys.readouterr().out.splitlines()[0]
    assert main(["log", "m", f"--store=file:{store}"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert "STORED" in head and "CONVERSATION" in head and "c-42" in row


def test_an_empty_sandbox_is_answered_with_the_option_that_helps(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    write(home / "deep/down/in/some/place/MEMORY.md", b"# not found without being named\n")
    ran = run_cli("export", "m", f"--sandbox=local:{home}", store=tmp_path / "store")
    assert ran.code == 3 and ran.document["reason"]["code"] == "empty"
    assert "--project PATH" in ran.document["reason"]["message"]


def test_one_file_is_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, home = tmp_path / "store", empty_home(tmp_path / "home")
    write(home / ".claude-mem/settings.json", b"{}")
    write(home / "MEMORY.md", b"# one\n" * 100)
    for day in range(30):
        write(home / f"memory/note-{day}.md", b"note\n" * 100)
    assert run_cli("export", "m", f"--sandbox=local:{home}", store=store).code == 0
    (home / ".claude-mem/settings.json").unlink()
    shutil.rmtree(home / "memory")
    capsys.readouterr()
    assert main(["export", "m", f"--sandbox=local:{home}", f"--store=file:{store}"]) == 3
    said = capsys.readouterr().out
    assert "1 file" in said and "1 files" not in said, said


HEAVY = (
    "fastapi",
    "starlette",
    "pydantic",
    "boto3",
    "httpx",
    "rich",
    "structlog",
    "cryptography",
    "pyrage",
    "apscheduler",
)
NOT_ASKED_FOR = (
    *HEAVY,
    "zoneinfo",
    "difflib",
    "sidecar.search.port",
    "sidecar.host.cron",
    "sidecar.store.retention",
    "sidecar.store.garbage",
    "sidecar.engine.without_python",
    "sidecar.engine.archives.tarballs",
    "sidecar.records",
    "sidecar.program.capture.export",
    "sidecar.program.restore.holdings",
)
EXPORTS = ("sidecar.engine.exports.steps", "sidecar.engine.exports.commit", "sidecar.store.refusals")
RESTORES = ("sidecar.engine.restores.steps", "sidecar.engine.restores.run")
UNHURRIED = "from sidecar.engine.exports import arrival\narrival.LOADED_AFTER = 3600\n"
"""While a slow sandbox works, an export loads what a change would need. Here no sandbox is slow."""


@pytest.mark.parametrize(
    ("words", "without"),
    [
        (["export", "m", "--sandbox"], (*NOT_ASKED_FOR, *RESTORES, "sidecar.models.answers", "tenacity")),
        (["restore", "m", "--sandbox"], (*NOT_ASKED_FOR, *EXPORTS, "sidecar.models.answers", "tenacity")),
        (["list"], (*NOT_ASKED_FOR, *EXPORTS, *RESTORES, "sidecar.engine.sandbox.dialogue", "tenacity", "tomllib")),
        (["log", "m"], (*NOT_ASKED_FOR, *EXPORTS, *RESTORES, "sidecar.engine.sandbox.dialogue", "tenacity", "tomllib")),
        (["pin", "m", "latest"], (*HEAVY, *EXPORTS, *RESTORES)),
        (["verify", "m"], (*HEAVY, *RESTORES)),
        (["records", "m"], HEAVY),
        (["layouts"], HEAVY),
    ],
    ids=lambda one: one[0] if isinstance(one, list) else "",
)
def test_a_command_loads_only_what_it_needs(tmp_path: Path, words: list[str], without: tuple[str, ...]) -> None:
    store, home = tmp_path / "store", empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"# one\n")
    assert run_cli("export", "m", f"--sandbox=local:{home}", store=store).code == 0
    words = [f"{word}=local:{home}" if word == "--sandbox" else word for word in words]
    program = (
        f"import sys\nfrom sidecar.cli import main\n{UNHURRIED if words[0] == 'export' else ''}"
        f"code = main({[*words, f'--store=file:{store}']!r})\n"
        f"print(code, [name for name in {without!r} if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert ran.stdout.splitlines()[-1] == "0 []", ran.stdout + ran.stderr


MOST_LOADED = {"list": 170, "log": 170, "export": 215, "restore": 210}
"""How many modules, beyond those that ``asyncio`` and ``json`` load, a command may load: the cost of its start."""


@pytest.mark.parametrize("verb", MOST_LOADED)
def test_a_command_loads_few_modules(tmp_path: Path, verb: str) -> None:
    store, home = tmp_path / "store", empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"# one\n")
    assert run_cli("export", "m", f"--sandbox=local:{home}", store=store).code == 0
    words = {"list": ["list"], "log": ["log", "m"]}.get(verb, [verb, "m", f"--sandbox=local:{home}"])
    program = (
        "import asyncio, json, sys\nbefore = len(sys.modules)\nfrom sidecar.cli import main\n"
        f"{UNHURRIED if verb == 'export' else ''}"
        f"code = main({[*words, f'--store=file:{store}']!r})\nprint(code, len(sys.modules) - before)"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    code, loaded = map(int, ran.stdout.splitlines()[-1].split())
    assert code == 0 and loaded <= MOST_LOADED[verb], loaded


def test_a_class_is_completed_when_it_is_first_used() -> None:
    """What a command loads and does not use costs it next to nothing: no ``__init__`` was compiled."""
    program = (
        "import dataclasses\nmade = []\nplain = dataclasses.dataclass\n"
        "dataclasses.dataclass = lambda *a, **k: made.append(1) or plain(*a, **k)\n"
        "import sidecar.format.protocol\nprint(len(made))"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert ran.stdout.split() == ["0"], ran.stdout + ran.stderr
