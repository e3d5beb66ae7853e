"""Checks of one's own: a command looks at a snapshot before it becomes the head, and gets nothing of ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from sidecar.host.files import SPOOL_PREFIX
from tests.parts.homes import PROJECT, Ran, claude_mem_home, empty_home, observe, run_cli, write

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "acme/agent"
DEADLINE = 60.0


class Scene:
    """A store, a home, and a config with one check: a Python program that the test gives."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store, self.home = folder, folder / "store", empty_home(folder / "home")
        self.config, self.program = folder / "checks.toml", folder / "check.py"
        write(self.home / "MEMORY.md", b"# Facts\n")
        self.check("pass")

    def check(self, program: str, *, timeout: float = 60, more: str = "") -> None:
        self.program.write_text(program)
        command = json.dumps([sys.executable, str(self.program)])
        self.config.write_text(f'[[checks]]\nname = "ours"\ncommand = {command}\ntimeout = {timeout}\n{more}')

    def learn(self, what: str) -> None:
        place = self.home / "MEMORY.md"
        place.write_text(f"{place.read_text()}\n## {what}\n{what} is so.\n")

    def run(self, *words: str | Path) -> Ran:
        return run_cli(*words, "--config", self.config, store=self.store)

    def export(self, *more: str) -> Ran:
        return self.run("export", MEMORY, "--sandbox", f"local:{self.home}", *more)

    @property
    def head(self) -> str | None:
        head: str | None = self.run("log", MEMORY).document["head"]
        return head


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return Scene(tmp_path)


def _failed(ran: Ran) -> str:
    assert (ran.code, ran.document["outcome"], ran.error) == (3, "rejected", "check-failed"), ran.document
    return str(ran.document["reason"]["message"])


def test_a_check_gets_what_changed_and_the_files(scene: Scene, tmp_path: Path) -> None:
    claude_mem_home(scene.home, rows=5)
    first = scene.export().document["snapshot"]
    observe(scene.home, 2, "learned")
    scene.learn("Deploys")
    seen = tmp_path / "seen.json"
    scene.check(
        "import json, os, sqlite3, sys\n"
        "from pathlib import Path\n"
        "told = json.load(sys.stdin)\n"
        "base = sqlite3.connect('claude-mem/claude-mem.db')\n"
        "rows = base.execute('SELECT count(*) FROM observations').fetchone()[0]\n"
        "here = dict(told=told, rows=rows, memory=Path('project/MEMORY.md').read_text(), mode=os.stat('.').st_mode & 0o777,\n"
        "            cwd=os.getcwd(), env=dict(os.environ), group=os.getpgrp() == os.getpid())\n"
        f"Path({str(seen)!r}).write_text(json.dumps(here))\n"
    )
    done = scene.export().document
    assert done["outcome"] == "committed"
    got = json.loads(seen.read_text())
    assert (got["rows"], got["memory"], got["mode"], got["group"]) == (
        7,
        (scene.home / "MEMORY.md").read_text(),
        0o700,
        True,
    )
    told = got["told"]
    assert (told["memory"], told["from"], told["to"]) == (MEMORY, first, done["snapshot"])
    assert told["counts"]["section"] == {"added": 1, "changed": 0, "removed": 0}
    assert [row["title"] for row in told["records"] if row["kind"] == "section"] == ["Facts › Deploys"]
    assert not Path(got["cwd"]).exists() and not Path(got["cwd"]).parent.exists()
    ours = {"PATH", "HOME", "LANG"}
    assert ours <= set(got["env"]) <= ours | {"LC_CTYPE"}  # which Python sets for itself
    assert got["env"]["HOME"] == got["cwd"]


def test_no_credentials_of_ours_are_in_its_environment(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMORY_SIDECAR_TOKEN", "AWS_SECRET_ACCESS_KEY", "E2B_API_KEY", "ANYTHING"):
        monkeypatch.setenv(name, "hunter2-in-the-environment")
    scene.check("import os, sys\nsys.exit('hunter2' in str(os.environ))")
    assert scene.export().document["outcome"] == "committed"


def test_a_check_that_fails_keeps_it_from_becoming_the_head_and_says_why(scene: Scene) -> None:
    head = scene.export().document["snapshot"]
    scene.learn("A lie")
    scene.check("for n in range(9): print('line', n)\nprint('\\x1b[31mA lie\\x07')\nraise SystemExit(7)")
    ran = scene.export()
    assert _failed(ran) == (
        "The check 'ours' ended with exit code 7. It printed last:\nline 5\nline 6\nline 7\nline 8\n\\x1b[31mA lie\\x07"
    )
    assert scene.head == head
    assert _failed(scene.export("--force"))  # nor by force, nor by repetition
    for number in range(4):
        scene.learn(f"More {number}")
        assert _failed(scene.export("--conversation", f"c{number}"))
    row = next(
        row for row in scene.run("log", MEMORY).document["snapshots"] if row["snapshot"] == ran.document["snapshot"]
    )
    assert (row["standing"], row["rejected"].partition(":")[0]) == ("rejected", "check-failed")
    scene.check("pass")  # the check is put right: what the sandbox has becomes the head, though nothing is new in it
    assert scene.export().document["outcome"] == "committed"


def test_a_person_can_accept_what_a_check_refused(scene: Scene) -> None:
    scene.export()
    scene.learn("One")
    scene.check("raise SystemExit(1)")
    ran = scene.export()
    assert _failed(ran) == "The check 'ours' ended with exit code 1, and printed nothing."
    done = scene.run("accept", MEMORY).document
    assert (done["head"], done["reason"]["code"]) == (ran.document["snapshot"], "check-failed")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            "import time\nprint('waiting', flush=True)\ntime.sleep(600)",
            "took more than 1 s and was ended. It printed last:\nwaiting",
        ),
        ("import os\nos.kill(os.getpid(), 11)", "was ended by signal 11, and printed nothing."),
        ("print('x' * 50_000_000)\nraise SystemExit(1)", f"ended with exit code 1. It printed last:\n{'x' * 200}"),
        (
            "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe' * 9)\nraise SystemExit(1)",
            f"ended with exit code 1. It printed last:\n{'�' * 18}",
        ),
    ],
    ids=["hangs", "crashes", "floods", "not text"],
)  # fmt: skip
def test_whatever_goes_wrong_with_it_is_a_failed_check(scene: Scene, program: str, words: str) -> None:
    scene.check(program, timeout=1 if "sleep" in program else 60)
    assert _failed(scene.export()) == f"The check 'ours' {words}"
    assert scene.head is None
    assert not [*Path(tempfile.gettempdir()).glob(f"{SPOOL_PREFIX}*")]


def test_a_check_that_cannot_be_started_is_a_failed_one_and_config_check_says_so(scene: Scene) -> None:
    scene.config.write_text('[[checks]]\ncommand = ["/nowhere/check"]\n')
    message = _failed(scene.export())
    assert message == "The check 'check' could not be started: /nowhere/check: No such file or directory."
    ran = scene.run("config", "check")
    assert (ran.code, ran.error) == (2, "bad-config")
    assert "'/nowhere/check' is not there." in ran.document["problems"][0]["message"]
    scene.check("pass")
    assert not [one for one in scene.run("config", "check").document["problems"] if "check" in one["message"]]


def test_nothing_that_it_began_goes_on(scene: Scene, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    scene.check(
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
    )
    began = time.monotonic()
    assert scene.export().document["outcome"] == "committed"
    assert time.monotonic() - began < 300  # it did not wait for the child, which holds the pipe open
    _await_end(int(pid.read_text()))


def test_a_child_that_left_its_group_holds_nothing_up(scene: Scene, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    scene.check(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
    )
    try:
        assert scene.export().document["outcome"] == "committed"
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_what_a_check_does_to_its_files_changes_nothing(scene: Scene, tmp_path: Path) -> None:
    scene.check("open('project/MEMORY.md', 'w').write('altered')")
    scene.config.write_text(scene.config.read_text() + scene.config.read_text().replace("ours", "second"))
    assert scene.export().document["outcome"] == "committed"
    fresh = empty_home(tmp_path / "fresh")
    assert scene.run("restore", MEMORY, "--sandbox", f"local:{fresh}").code == 0
    assert (fresh / "MEMORY.md").read_text() == (scene.home / "MEMORY.md").read_text()


def test_links_lead_a_check_nowhere(scene: Scene) -> None:
    write(scene.home / "memory/a.md", b"a")
    (scene.home / "memory/link.md").symlink_to("a.md")
    scene.check(
        "import os, sys\nsys.exit(any(os.path.islink(os.path.join(f, n)) for f, d, ns in os.walk('.') for n in d + ns))"
    )
    assert scene.export().document["outcome"] == "committed"


def test_a_check_is_for_the_memories_that_it_names(scene: Scene) -> None:
    scene.check("raise SystemExit(1)", more='memories = ["other/*"]\n')
    assert scene.export().document["outcome"] == "committed"


def test_checks_come_before_a_review(scene: Scene) -> None:
    scene.check("raise SystemExit('no')", more='[review]\nrequired = ["acme/*"]\n')
    assert _failed(scene.export()).endswith("It printed last:\nno")
    scene.check("pass", more='[review]\nrequired = ["acme/*"]\n')
    ran = scene.export()
    assert (ran.code, ran.document["outcome"]) == (3, "pending")


def test_killed_during_a_check_nothing_is_stored_and_the_next_makes_it_good(scene: Scene, tmp_path: Path) -> None:
    head = scene.export().document["snapshot"]
    scene.learn("One")
    pid = tmp_path / "pid"
    scene.check(f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    words = [
        "export",
        MEMORY,
        f"--sandbox=local:{scene.home}",
        f"--store=file:{scene.store}",
        f"--config={scene.config}",
    ]
    process = subprocess.Popen([sys.executable, "-m", "sidecar", *words], cwd=PROJECT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + DEADLINE
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)  # an orderly end takes the check along
    process.wait(DEADLINE)
    _await_end(int(pid.read_text()))
    assert scene.head == head
    scene.check("pass")
    assert scene.export().document["outcome"] == "committed"


def _await_end(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.02)
    raise AssertionError(f"the process {pid} goes on")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[[checks]]\ncommand = []\n", "command"),
        ('[[checks]]\nname = "x"\n', "command"),
        ('[[checks]]\ncommand = "true"\n', "command"),
        ('[[checks]]\ncommand = ["true"]\ntimeout = 0\n', "timeout"),
        ('[[checks]]\ncommand = ["true"]\ntimeout = 99999\n', "timeout"),
        ('[[checks]]\ncommand = ["true"]\nmemories = []\n', "memories"),
        ('[[checks]]\ncommand = ["true"]\nmemories = ["a//b"]\n', "memories"),
        ('[[checks]]\ncommand = ["true"]\n[[checks]]\ncommand = ["true"]\n', "true"),
        ('[checks]\ncommand = ["true"]\n', "[[checks]]"),
        ('[[checks]]\ncomand = ["true"]\n', "comand"),
        ('[review]\nrequired = ["a//b"]\n', "required"),
        ('[review]\nrequired = "acme/*"\n', "required"),
    ],
)
def test_a_config_that_could_never_work_is_refused(scene: Scene, text: str, key: str) -> None:
    scene.config.write_text(text)
    ran = scene.export()
    assert (ran.code, ran.error) == (2, "bad-config")
    assert key in ran.document["error"]["message"], ran.document
