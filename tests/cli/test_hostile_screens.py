"""Names, labels and messages of others on a terminal: they show, and do nothing else.

Each command is run with them in whatever it is given, once into pipes and once on a terminal; no byte comes out that a
terminal acts on, but for the line breaks of our own lines and the colours of our own bars.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli.screen import ProgressBar
from sidecar.host.text import make_printable
from tests.parts import forked_sidecar
from tests.parts.former import former_ids
from tests.parts.homes import PROJECT, empty_home, run_cli, three_tier_home, write
from tests.parts.memories import Name, Provider, shell_tools
from tests.parts.postgres import Database
from tests.parts.services import TOKEN, path

pytestmark = pytest.mark.usefixtures("forked_programs")

HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x9b31mb\rc\x08\x7f\u202ed\u2066e\u200bf\u2028g\ufeff\ue000[red]h[bold]"
BROKEN = f"{HOSTILE}\nmemory-sidecar: all is well"
"""With a line break, and a line that looks like ours."""
ODD_ID = "acme/\u202etnega\u200b[bold]x"
OWN = re.compile(
    rb"\x1b\[\??[0-9;]*[A-Za-z]"  # colours and cursor movements, by the bar
)


def _tree(home: Path) -> Path:
    three_tier_home(home)
    write(home / "memory" / BROKEN, b"# what it says\n" + BROKEN.encode() + b"\n")
    write(Path(os.fsdecode(os.fsencode(home) + b"/memory/raw-\x9b\xff\x1b[1m")), b"raw")
    (home / "memory" / f"out-{BROKEN}").symlink_to("/etc/passwd")
    write(home / "memory" / f"{BROKEN}.swp", b"left out")
    return home


class Scene:
    """A store whose every name is hostile, and the home it came from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.home = _tree(empty_home(folder / f"home {HOSTILE}"))
        self.sandbox = f"local:{self.home}"
        with former_ids():
            for memory in ("m", ODD_ID):
                ran = run_cli(
                    *("export", memory, f"--sandbox={self.sandbox}", "--label", BROKEN, "--conversation", BROKEN),
                    *("--allow", "other-memory"),
                    store=self.store,
                )
                assert ran.code == 0, ran
                self.first = ran.document["snapshot"]
        write(self.home / "memory" / f"more {BROKEN}", b"more")
        assert run_cli("export", "m", f"--sandbox={self.sandbox}", "--label", BROKEN, store=self.store).code == 0


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("screens"))


def _config(scene: Scene) -> str:
    config = scene.folder / f"config {HOSTILE}.toml"
    config.write_text(
        f"[retention]\nkeep_last = 1\nkeep_labelled = [{json.dumps(BROKEN)}]\n"
        f"[retention.memories.{json.dumps(HOSTILE)}]\nkeep_last = 2\n"
    )
    return str(config)


def _wrong_config(scene: Scene) -> str:
    config = scene.folder / "wrong.toml"
    config.write_text(f"[limits]\n{json.dumps(BROKEN)} = 1\n")
    return str(config)


def _in_the_way(scene: Scene) -> str:
    """A home where something is in the way, under a hostile name."""
    home = empty_home(scene.folder / f"way {time.monotonic_ns()}")
    (home / "memory" / BROKEN / "full").mkdir(parents=True)
    (home / "memory" / BROKEN / "full/x").write_text("x")
    return f"local:{home}"


def _copied(scene: Scene) -> Path:
    """A store to break."""
    copy = scene.folder / f"copy-{time.monotonic_ns()}"
    subprocess.run(["cp", "-r", scene.store, copy], check=True)
    return copy


def _damaged(scene: Scene) -> str:
    store = _copied(scene)
    for pack in store.glob("memories/m/packs/*"):
        pack.write_bytes(b"\x1b[31m")
    (store / "memories/m/head.json").write_text(json.dumps({"memory": BROKEN, "snapshot": BROKEN}))
    return f"file:{store}"


COMMANDS: dict[str, Callable[[Scene], list[str]]] = {
    "export": lambda s: ["export", "m", f"--sandbox={s.sandbox}", "--label", BROKEN],
    "export, over a limit": lambda s: [
        *("export", "m", f"--sandbox={s.sandbox}", "--config", _limit(s), f"--store=file:{_copied(s)}"),
    ],
    "export of an odd id": lambda s: ["export", ODD_ID, f"--sandbox={s.sandbox}"],
    "export of a bad id": lambda s: ["export", f"x{BROKEN}", f"--sandbox={s.sandbox}"],
    "export of no sandbox": lambda s: ["export", "m", f"--sandbox=local:/nowhere/{BROKEN}"],
    "export of a provider that is none": lambda s: ["export", "m", f"--sandbox={BROKEN}"],
    "export of an e2b sandbox that is none": lambda s: ["export", "m", f"--sandbox=e2b:{BROKEN}"],
    "export of a layout that is none": lambda s: ["export", "m", f"--sandbox={s.sandbox}", "--layout", BROKEN],
    "export of a project that is none": lambda s: ["export", "m", f"--sandbox={s.sandbox}", "--project", BROKEN],
    "export with a reason that is none": lambda s: ["export", "m", f"--sandbox={s.sandbox}", "--allow", BROKEN],
    "restore": lambda s: ["restore", "m", f"--sandbox=local:{empty_home(s.folder / f'r {time.monotonic_ns()}')}"],
    "restore, incomplete": lambda s: ["restore", "m", "--project", "~", f"--sandbox={_in_the_way(s)}"],
    "restore of a snapshot that is none": lambda s: ["restore", "m", "--snapshot", BROKEN, f"--sandbox={s.sandbox}"],
    "restore of a damaged one": lambda s: [
        *("restore", "m", f"--sandbox={s.sandbox}", f"--store={_damaged(s)}"),
    ],
    "list": lambda s: ["list"],
    "list of a damaged store": lambda s: ["list", f"--store={_damaged(s)}"],
    "log": lambda s: ["log", "m"],
    "log of an odd id": lambda s: ["log", ODD_ID],
    "log of nothing": lambda s: ["log", "\u202enone"],
    "show": lambda s: ["show", "m"],
    "show of an odd id": lambda s: ["show", ODD_ID],
    "show of a snapshot that is none": lambda s: ["show", "m", BROKEN],
    "diff": lambda s: ["diff", "m"],
    "download": lambda s: ["download", "m", "-o", str(s.folder / f"x {BROKEN}.tar.gz")],
    "download that cannot be written": lambda s: ["download", "m", "-o", str(s.folder / "no" / BROKEN)],
    "import of nothing": lambda s: ["import", "m", str(s.folder / BROKEN)],
    "import": lambda s: ["import", "m2", _archive(s)],
    "import of no archive": lambda s: ["import", "m2", _noise(s)],
    "fork": lambda s: ["fork", "m", f"f{time.monotonic_ns()}"],
    "fork of an odd id": lambda s: ["fork", ODD_ID, f"f{time.monotonic_ns()}"],
    "fork to an odd id": lambda s: ["fork", "m", "\u202ef"],
    "rollback": lambda s: ["rollback", ODD_ID, s.first],
    "verify": lambda s: ["verify"],
    "verify, damaged": lambda s: ["verify", f"--store={_damaged(s)}"],
    "drill": lambda s: ["verify", "--drill", "--count", "1"],
    "doctor": lambda s: ["doctor"],
    "doctor of a sandbox": lambda s: ["doctor", f"--sandbox={s.sandbox}"],
    "doctor of a project": lambda s: ["doctor", f"--sandbox={s.sandbox}", "--project", BROKEN],
    "layouts": lambda s: ["layouts"],
    "layouts of none": lambda s: ["layouts", BROKEN],
    "pin": lambda s: ["pin", ODD_ID, "latest"],
    "unpin": lambda s: ["unpin", ODD_ID, "latest"],
    "forget, dry": lambda s: ["forget", "--dry-run", "--config", _config(s)],
    "forget": lambda s: ["forget", "--keep-last", "9", "--keep-labelled", BROKEN],
    "rekey": lambda s: ["rekey"],
    "config check": lambda s: ["config", "check", "--config", _config(s)],
    "config check, wrong": lambda s: ["config", "check", "--config", _wrong_config(s)],
    "config that is not there": lambda s: ["list", "--config", f"/nowhere/{BROKEN}"],
    "a store that is none": lambda s: ["list", "--store", BROKEN],
    "a store elsewhere": lambda s: ["list", "--store", f"file:{s.folder}/nowhere-{HOSTILE.encode().hex()}%1b%0a"],
    "an option that is none": lambda s: ["list", f"--{BROKEN}"],
    "a command that is none": lambda s: [BROKEN],
    "keygen": lambda s: ["keygen", "-o", str(s.folder / f"{time.monotonic_ns()} {BROKEN}")],
    "search": lambda s: ["search", BROKEN],
    "run of nothing": lambda s: ["run", "--", f"/nowhere/{BROKEN}"],
    "delete, not really": lambda s: ["delete", ODD_ID],
    "delete": lambda s: ["delete", ODD_ID, "--yes", f"--store=file:{_copied(s)}"],
}


def _limit(scene: Scene) -> str:
    config = scene.folder / "limit.toml"
    config.write_text('[limits]\nfiles = 3\nover = "trim"\n')
    return str(config)


def _archive(scene: Scene) -> str:
    archive = scene.folder / "home.tar.gz"
    assert run_cli("download", "m", "-o", archive, store=scene.store).code == 0
    return str(archive)


def _noise(scene: Scene) -> str:
    place = scene.folder / f"noise {BROKEN}"
    place.write_bytes(b"\x1b[31mnoise")
    return str(place)


def _words(scene: Scene, name: str) -> list[str]:
    command, *rest = COMMANDS[name](scene)
    own = any(word.startswith("--store") for word in rest)
    return [command, *([] if own or command == BROKEN else [f"--store=file:{scene.store}"]), *rest]


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("E2B_", "MEMORY_SIDECAR_"))}
    return {**kept, "LC_ALL": "C.UTF-8", "TERM": "xterm", "COLUMNS": "500", "PYTHONPATH": str(PROJECT)}


def _piped(words: list[str]) -> bytes:
    ran = forked_sidecar.run(words, env=_environment())
    assert ran.returncode in (0, 1, 2, 3, 4, 127), ran
    assert b"Traceback" not in ran.stderr, ran.stderr.decode()
    return ran.stdout + ran.stderr


def _on_a_terminal(words: list[str]) -> bytes:
    """All that a command puts on a terminal, its bars included."""
    ours, theirs = pty.openpty()
    command = forked_sidecar.Sidecar(words, env=_environment(), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown, deadline = bytearray(), time.monotonic() + 120
    with suppress(OSError):  # the other end is closed
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 1)[0]:
                if not (data := os.read(ours, 65536)):
                    break
                shown += data
    os.close(ours)
    assert command.wait(30) in (0, 1, 2, 3, 4, 127)
    return OWN.sub(b"", bytes(shown)).replace(b"\r\n", b"\n").replace(b"\r", b"")


def _acting(shown: bytes) -> list[str]:
    """What of this would do something on a terminal, or not show."""
    text = shown.decode("utf-8", "surrogateescape")
    kinds = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return [ascii(c) for c in text if c != "\n" and unicodedata.category(c) in kinds]


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_prints_what_a_terminal_acts_on(scene: Scene, name: str) -> None:
    shown = _piped(_words(scene, name))
    assert _acting(shown) == [], shown
    assert not [line for line in shown.splitlines() if line.startswith(b"memory-sidecar: all is well")], shown


@pytest.mark.parametrize(
    "name",
    [
        *("export", "restore", "restore, incomplete", "list", "log", "show", "diff", "doctor of a sandbox"),
        *(
            "export of a bad id",
            "export of no sandbox",
            "verify",
            "verify, damaged",
            "forget, dry",
            "an option that is none",
        ),
    ],
)
def test_nor_on_a_terminal(scene: Scene, name: str) -> None:
    shown = _on_a_terminal(_words(scene, name))
    assert shown and _acting(shown) == [], shown
    assert not [line for line in shown.splitlines() if line.startswith(b"memory-sidecar: all is well")], shown


def test_names_still_show_and_markup_is_text(scene: Scene) -> None:
    shown = _piped(_words(scene, "show")).decode()
    assert make_printable(f"project/memory/{BROKEN}") in shown
    assert "[red]h[bold]" in shown and "project/memory/🧠 émoji.md" in shown
    assert "acme/\\u202etnega\\u200b" in _piped(_words(scene, "list")).decode()


def test_json_is_exact(scene: Scene) -> None:
    shown = run_cli("show", "m", store=scene.store).document
    assert shown["label"] == BROKEN
    assert f"project/memory/{BROKEN}" in {entry["path"] for entry in shown["entries"]}
    raw = forked_sidecar.run(["list", f"--store=file:{scene.store}", "--json"], env=_environment()).stdout
    assert _acting(raw) == [] and ODD_ID in {row["memory"] for row in json.loads(raw)["memories"]}


def test_what_a_program_in_a_sandbox_says(tmp_path: Path, open_provider: Callable[[Name], Provider]) -> None:
    """Also while the command is tried again, which is logged."""
    tools = shell_tools(tmp_path / "tools")
    python = tools / "python3"
    python.write_text(f"#!/bin/sh\nprintf '%s' '{HOSTILE}\n\033]0;owned\007{HOSTILE[-9:]}' >&2\nexit 5\n")
    python.chmod(0o755)
    provider = open_provider("e2b")
    box = provider.box(tools=tools)
    three_tier_home(box.home)
    ran = forked_sidecar.run(["export", "m", f"--sandbox={box.ref}", f"--store=file:{tmp_path}/store"])
    assert ran.returncode == 1 and b"exit code 5" in ran.stderr and b"trying again" in ran.stderr, ran
    assert _acting(ran.stdout + ran.stderr) == [], ran
    assert b"\\x1b]0;owned" in ran.stderr


def test_a_search_shows_what_it_found_and_does_nothing(tmp_path: Path, database: Database) -> None:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", f"# heron {HOSTILE}\n\nthe heron {HOSTILE} nests\n".encode())
    assert run_cli("export", "m", f"--sandbox=local:{home}", store=tmp_path / "store").code == 0
    words = ["search", f"--store=file:{tmp_path}/store", "heron"]
    ran = forked_sidecar.run(words)
    assert ran.returncode == 0 and b"heron" in ran.stdout, ran
    assert _acting(ran.stdout + ran.stderr) == [], ran


def test_a_bar_shows_a_name_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERM", "xterm")
    bar = ProgressBar()
    bar._bar.start()
    bar.step(f"verifying {BROKEN}", 10)
    bar.advance(5)
    bar._bar.refresh()
    bar._bar.stop()
    shown = OWN.sub(b"", capsys.readouterr().err.encode()).replace(b"\r", b"")
    assert b"[red]h[bold]" in shown and b"\\x1b]0;owned" in shown
    assert _acting(shown) == []


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_name_is_no_line_of_a_log(tmp_path: Path, form: str) -> None:
    home = _tree(empty_home(tmp_path / "home"))
    log = tmp_path / "log"
    conversation = (
        "c\n2026-11-18T00:00:00.000000Z [info     ] serving                        address=http://evil\x1b[2J"
    )
    with serving_in(tmp_path / "store", log, form) as call:
        assert call("PUT", path("m", "attachment"), {"sandbox": f"local:{home}"}) == 200
        assert call("POST", path("m", "exports"), {"sandbox": f"local:{home}", "conversation": conversation}) == 200
        assert call("POST", path("m", "exports"), {"sandbox": f"local:/nowhere/{BROKEN}"}) == 404
    text = log.read_bytes()
    plain = OWN.sub(b"", text) if form == "console" else text
    assert _acting(plain) == [], plain
    assert (b"\\x1b]0;owned" if form == "console" else b"\\u001b]0;owned") in plain


_LOGGING = """
import logging, sys
import structlog
from sidecar.service.logs import configure_logs
configure_logs(sys.argv[1])
text = sys.argv[2]
structlog.get_logger("sidecar").info(text, memory=text, listed=[text], found={text: text})
logging.getLogger("elsewhere").warning("told: %s", text)
try:
    raise ValueError(text)
except ValueError:
    structlog.get_logger("sidecar").exception("failed")
    logging.getLogger("elsewhere").exception("failed")
"""


@pytest.mark.parametrize("form", ["console", "json"])
def test_no_text_makes_a_line_of_its_own_in_a_log(form: str) -> None:
    fake = "2026-11-18T00:00:00.000000Z [info     ] serving"
    ran = subprocess.run(
        [sys.executable, "-c", _LOGGING, form, f"{HOSTILE}\n{fake}"], cwd=PROJECT, capture_output=True, timeout=60
    )
    plain = OWN.sub(b"", ran.stderr)
    assert ran.returncode == 0 and _acting(plain) == [], ran.stderr
    lines = plain.decode().splitlines()
    assert not [line for line in lines if line.startswith(fake)], lines
    assert len([line for line in lines if re.match(r"20\d\d-|\{", line)]) == 4
    if form == "json":
        assert json.loads(lines[0])["memory"] == f"{HOSTILE}\n{fake}"


class serving_in:  # noqa: N801 - reads as a statement
    """A service with this kind of log, and what calls it."""

    def __init__(self, store: Path, log: Path, form: str) -> None:
        self._store, self._log, self._form = store, log, form

    def __enter__(self) -> Callable[[str, str, Any], int]:
        import httpx

        config = self._log.with_suffix(".toml")
        config.write_text(f'[service]\nlog = "{self._form}"\n')
        words = ["serve", f"--store=file:{self._store}", f"--config={config}", "--bind=127.0.0.1:0"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sidecar", *words],
                cwd=PROJECT,
                env={**os.environ, "MEMORY_SIDECAR_TOKEN": TOKEN, "PYTHONPATH": str(PROJECT), "PYTHONUNBUFFERED": "1"},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        url = re.search(r"http://\S+", self._process.stdout.readline())
        assert url is not None
        client = httpx.Client(base_url=url[0], headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)
        return lambda method, place, body: client.request(method, place, json=body).status_code

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
