"""Whoever holds a memory file open is found, asked to leave, never killed, and brought back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.program.worker import holders as holding
from sidecar.program.worker import worker
from tests.parts.claude_mem import Worker, free_port
from tests.parts.homes import PROJECT

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="holders are found through /proc")

CLAUDE_MEM = {
    "method": "POST",
    "path": "/api/admin/shutdown",
    "port_env": "CLAUDE_MEM_WORKER_PORT",
    "settings": "settings.json",
    "settings_key": "CLAUDE_MEM_WORKER_PORT",
    "ports": [37700, 37777],
}
ASK = {**CLAUDE_MEM, "path": "/leave", "port_env": "KEEPER_PORT", "settings_key": "PORT"}

KEEPER = '''
"""Keep a file open (argv: log, file, manner, port) and write down what happens to us."""
import http.server, os, signal, subprocess, sys, time

log, path, manner, port = sys.argv[1:]

def note(what):
    with open(log, "a") as file:
        file.write("%d %s\\n" % (os.getpid(), what))

def terminated(*_):
    note("terminated")
    sys.exit(0)

class Desk(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        note("asked " + self.path)
        self.send_response(200)
        self.end_headers()
        self.wfile.flush()
        if manner == "polite":
            os._exit(0)

    def log_message(self, *_):
        pass

signal.signal(signal.SIGTERM, signal.SIG_IGN if manner == "stubborn" else terminated)
kept = open(path, "rb") if path != "-" else None
if manner == "parent":
    subprocess.Popen([sys.executable, __file__, log, path, "child", "0"])
desk = http.server.HTTPServer(("127.0.0.1", int(port)), Desk) if int(port) else None
note("started in %s with %s" % (os.getcwd(), os.environ.get("TOKEN")))
desk.serve_forever() if desk else time.sleep(60)
'''

DRIVER = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
from sidecar.program.worker import worker
from sidecar.program.worker.holders import find_holders
request = json.load(sys.stdin)
holders = find_holders(request["paths"])
answer = {"found": [holder._asdict() for holder in holders]}
begin = time.monotonic()
if "stop" in request:
    answer["alive"] = [holder.pid for holder in worker.stop_holders(holders, **request["stop"])]
answer["seconds"] = time.monotonic() - begin
if request.get("start"):
    answer["problems"] = worker.start_again(holders)
print(json.dumps(answer))
"""


def pythons() -> list[str]:
    """This interpreter, and the oldest one a sandbox may have, where it is found."""
    managed = sorted(map(str, Path.home().glob(".pyenv/versions/3.8.*/bin/python3.8")))
    oldest = next(iter(managed), shutil.which("python3.8"))
    return [sys.executable, *([oldest] if oldest else [])]


@pytest.fixture(params=pythons(), ids=lambda python: Path(python).name)
def python(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Room:
    """A folder with a file to hold, and the processes that hold it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "memory.db"
        self.file.write_bytes(b"rows")
        self.script = folder / "keeper.py"
        self.script.write_text(KEEPER)
        self.log = folder / "log"
        self.log.touch()
        self.children: list[subprocess.Popen[bytes]] = []

    def keeper(self, manner: str = "plain", *, port: int = 0, path: object = None, **environ: str) -> int:
        """Start a keeper and return its pid once it holds the file."""
        command = [sys.executable, str(self.script), str(self.log), str(path or self.file), manner, str(port)]
        process = subprocess.Popen(command, cwd=self.folder, env={**os.environ, "TOKEN": "s3cret", **environ})
        self.children.append(process)
        self.wait_for(lambda: f"{process.pid} started" in self.log.read_text())
        return process.pid

    def notes(self, pid: int) -> list[str]:
        return [line.split(" ", 1)[1] for line in self.log.read_text().splitlines() if line.split(" ")[0] == str(pid)]

    def pids(self) -> list[int]:
        return list(dict.fromkeys(int(line.split(" ")[0]) for line in self.log.read_text().splitlines()))

    def runs(self, pid: int) -> bool:
        try:
            return str(self.script).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False

    @staticmethod
    def wait_for(condition: Any, within: float = 10.0) -> None:
        deadline = time.monotonic() + within
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.01)

    def inside(self, python: str, **request: object) -> dict[str, Any]:
        """What the module answers when that interpreter runs it, alone and by its path."""
        finished = subprocess.run(
            [python, "-W", "error", "-c", DRIVER, str(PROJECT)],
            input=json.dumps({"paths": [str(self.file)], **request}),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert finished.returncode == 0, finished.stderr
        return dict(json.loads(finished.stdout))

    def clear(self) -> None:
        for pid in self.pids():
            if self.runs(pid):
                os.kill(pid, signal.SIGKILL)
        for child in self.children:
            child.kill()
            child.wait()


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path)
    try:
        yield room
    finally:
        room.clear()


def test_a_holder_is_found_with_all_it_takes_to_start_it_again(room: Room, python: str) -> None:
    pid = room.keeper()
    (found,) = room.inside(python)["found"]
    assert found["pid"] == pid
    assert found["argv"][1:] == [str(room.script), str(room.log), str(room.file), "plain", "0"]
    assert found["cwd"] == str(room.folder)
    assert found["environ"]["TOKEN"] == "s3cret"
    assert (found["uid"], found["gid"]) == (os.geteuid(), os.getegid())
    assert found["started"] == int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    assert found["held"] == [str(room.file)]


def test_nobody_is_found_when_nobody_holds_the_file(room: Room, python: str) -> None:
    room.keeper(path="-")
    assert room.inside(python)["found"] == []
    assert room.inside(python, paths=[str(room.folder / "nothing.db")])["found"] == []


def test_nobody_is_found_where_proc_is_missing_or_hidden(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    room.keeper()
    monkeypatch.setattr(holding, "_list_folder", lambda folder: [])
    assert holding.find_holders([str(room.file)]) == []


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
def test_a_file_of_the_same_name_in_another_mount_namespace_is_not_ours(room: Room) -> None:
    script = 'mount -t tmpfs none "$1" && echo >"$2" && exec 3<"$2" && exec sleep 60'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(room.folder), str(room.file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as other:
        fd = Path(f"/proc/{other.pid}/fd/3")
        try:
            room.wait_for(lambda: other.poll() is not None or (fd.exists() and fd.readlink() == room.file))
            if other.poll() is not None:
                pytest.skip("mount namespaces are not allowed here")
            assert holding.find_holders([str(room.file)]) == []
        finally:
            other.kill()


def test_the_asking_process_and_its_ancestors_are_never_holders(room: Room, python: str) -> None:
    with room.file.open("rb"):
        assert holding.find_holders([str(room.file)]) == []
        assert room.inside(python)["found"] == []


@pytest.mark.parametrize("fate", ["deleted", "replaced", "symlinked", "hard-linked"])
def test_a_file_is_recognised_after_it_lost_its_name_or_under_another(room: Room, fate: str) -> None:
    pid = room.keeper()
    asked = room.file
    if fate == "deleted":
        room.file.unlink()
    elif fate == "replaced":
        other = room.folder / "other"
        other.write_bytes(b"new")
        other.replace(room.file)
    else:
        asked = room.folder / "link.db"
        asked.symlink_to(room.file) if fate == "symlinked" else asked.hardlink_to(room.file)
    assert [holder.pid for holder in holding.find_holders([str(asked)])] == [pid]


def test_a_holder_shows_no_environment_when_printed(room: Room) -> None:
    pid = room.keeper()
    text = repr(holding.find_holders([str(room.file)]))
    assert f"process {pid}" in text
    assert "s3cret" not in text


def test_a_plain_holder_leaves_on_sigterm_and_comes_back_the_same(room: Room, python: str) -> None:
    pid = room.keeper()
    answer = room.inside(python, stop={"shutdown": None, "timeout": 10}, start=True)
    assert answer["alive"] == []
    assert answer["problems"] == []
    assert room.notes(pid)[-1] == "terminated"
    room.wait_for(lambda: len(room.pids()) == 2)
    new = room.pids()[1]
    assert room.notes(new) == [f"started in {room.folder} with s3cret"]
    assert os.getsid(new) == new
    assert {Path(f"/proc/{new}/fd/{number}").readlink() for number in (0, 1, 2)} == {Path(os.devnull)}


def test_a_stubborn_holder_is_reported_alive_and_not_killed(room: Room, python: str) -> None:
    pid = room.keeper("stubborn")
    answer = room.inside(python, stop={"shutdown": None, "timeout": 0.5}, start=True)
    assert answer["alive"] == [pid]
    assert answer["seconds"] >= 0.5
    assert room.runs(pid)
    assert answer["problems"] == []
    assert room.pids() == [pid], "one that never left must not be started twice"


@pytest.mark.parametrize("source", ["environment", "settings"])
def test_a_polite_holder_is_asked_at_its_own_port_and_gets_no_signal(room: Room, python: str, source: str) -> None:
    port = free_port()
    other = str(free_port())
    environ = {"KEEPER_PORT": str(port)} if source == "environment" else {}
    settings = {"PORT": other if source == "environment" else str(port)}
    (room.folder / "settings.json").write_text(json.dumps(settings))
    pid = room.keeper("polite", port=port, **environ)
    answer = room.inside(python, stop={"shutdown": ASK, "timeout": 10})
    assert answer["alive"] == []
    assert room.notes(pid)[1:] == ["asked /leave"]


def test_a_holder_that_answers_but_stays_gets_sigterm(room: Room, python: str) -> None:
    port = free_port()
    pid = room.keeper("chatty", port=port, KEEPER_PORT=str(port))
    answer = room.inside(python, stop={"shutdown": ASK, "timeout": 2})
    assert answer["alive"] == []
    assert room.notes(pid)[1:] == ["asked /leave", "terminated"]


def test_a_stranger_at_the_holders_port_is_not_asked(room: Room, python: str) -> None:
    port = free_port()
    stranger = room.keeper("polite", port=port, path="-")
    holder = room.keeper(KEEPER_PORT=str(port))
    answer = room.inside(python, stop={"shutdown": ASK, "timeout": 10})
    assert answer["alive"] == []
    assert room.notes(holder)[-1] == "terminated"
    assert room.notes(stranger)[1:] == []


def test_where_listeners_are_hidden_the_holders_port_is_asked_all_the_same(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "_list_listening_ports", lambda holder: None)
    port = free_port()
    pid = room.keeper("polite", port=port)
    holders = holding.find_holders([str(room.file)])
    assert worker.stop_holders(holders, shutdown={**ASK, "ports": [free_port(), port]}, timeout=10) == []
    assert room.notes(pid)[1:] == ["asked /leave"]


@pytest.mark.parametrize("port", ["70000", "-1", "", "one", "1", "9" * 5000], ids=lambda port: port[:6])
def test_a_broken_settings_file_or_port_does_not_matter(room: Room, monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setattr(holding, "_list_listening_ports", lambda holder: None)
    (room.folder / "settings.json").write_text('["PORT"')
    pid = room.keeper(KEEPER_PORT=port)
    holders = holding.find_holders([str(room.file)])
    assert worker.stop_holders(holders, shutdown={**ASK, "ports": [free_port()]}, timeout=10) == []
    assert room.notes(pid)[1:] == ["terminated"]


def test_a_process_that_got_the_pid_of_a_holder_is_left_alone(room: Room) -> None:
    pid = room.keeper()
    (holder,) = holding.find_holders([str(room.file)])
    former = holder._replace(started=holder.started - 1, held=[])
    assert worker.stop_holders([former], shutdown=None, timeout=5) == []
    assert room.runs(pid)
    assert room.notes(pid)[1:] == []


def test_process_1_is_reported_and_gets_no_signal(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    room.keeper()
    (holder,) = holding.find_holders([str(room.file)])
    started = int(Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19])
    first = holder._replace(pid=1, started=started, held=[])
    signals: list[object] = []
    monkeypatch.setattr(os, "kill", lambda *call: signals.append(call))
    alive = worker.stop_holders([first], shutdown=ASK, timeout=1)
    monkeypatch.undo()
    assert (alive, signals) == ([first], [])


def test_one_that_opened_the_file_meanwhile_is_reported_and_not_started_twice(room: Room) -> None:
    room.keeper()
    holders = holding.find_holders([str(room.file)])
    newcomer = room.keeper()
    assert [holder.pid for holder in worker.stop_holders(holders, shutdown=None, timeout=5)] == [newcomer]
    assert worker.start_again(holders) == []
    assert len(room.pids()) == 2


def test_of_a_family_only_the_head_is_started_again(room: Room, python: str) -> None:
    parent = room.keeper("parent")
    room.wait_for(lambda: len(room.pids()) == 2)
    answer = room.inside(python, stop={"shutdown": None, "timeout": 10}, start=True)
    assert [found["pid"] for found in answer["found"]] == [parent, room.pids()[1]]
    assert answer["alive"] == []
    room.wait_for(lambda: len(room.pids()) == 4)
    time.sleep(0.3)
    assert len(room.pids()) == 4, "the head starts its own child, and nobody else does"


@pytest.mark.parametrize("broken", ["program", "folder"])
def test_one_that_cannot_be_started_again_is_a_problem_in_words(room: Room, broken: str) -> None:
    pid = room.keeper()
    (holder,) = holding.find_holders([str(room.file)])
    assert worker.stop_holders([holder], shutdown=None, timeout=10) == []
    changed = holder._replace(**({"argv": ["/no/such/program"]} if broken == "program" else {"cwd": "/no/such/folder"}))
    (problem,) = worker.start_again([changed])
    assert f"process {pid}" in problem
    assert "could not be started again" in problem
    assert "/no/such" in problem


def test_one_that_ends_at_once_is_a_problem_in_words(room: Room) -> None:
    room.keeper()
    (holder,) = holding.find_holders([str(room.file)])
    assert worker.stop_holders([holder], shutdown=None, timeout=10) == []
    (problem,) = worker.start_again([holder._replace(argv=[sys.executable, "-c", "raise SystemExit(3)"])])
    assert "ended at once with code 3" in problem


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as somebody else")
def test_root_starts_a_holder_again_as_the_user_it_was() -> None:
    nobody = 65534
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chown(folder, nobody, nobody)
        file, log = folder / "memory.db", folder / "log"
        file.touch(mode=0o644)
        script = 'exec 3<"$1"; echo "$$ $(id -u) $(id -g) $(id -G)" >>"$2"; exec sleep 60'
        command = ["/bin/sh", "-c", script, "sh", str(file), str(log)]
        child = subprocess.Popen(command, cwd=folder, user=nobody, group=nobody, extra_groups=[12])
        try:
            Room.wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
            (holder,) = holding.find_holders([str(file)])
            assert worker.stop_holders([holder], shutdown=None, timeout=10) == []
            assert worker.start_again([holder._replace(argv=command)]) == []
            Room.wait_for(lambda: log.read_text().count("\n") == 2)
            first, second = (line.split() for line in log.read_text().splitlines())
            os.kill(int(second[0]), signal.SIGKILL)
            assert second[1:] == first[1:]
            assert second[1] == str(nobody)
        finally:
            child.kill()
            child.wait()


def test_a_claude_mem_worker_leaves_politely_and_comes_back_with_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[object] = []
    with Worker(tmp_path / "home") as memory:
        for number in range(5):
            memory.save(f"the heron number {number} nests at dawn", f"heron {number}")
        before = memory.pid
        beside = [memory.database.with_name(memory.database.name + end) for end in ("-wal", "-shm")]
        assert all(path.exists() for path in beside)

        holders = holding.find_holders([str(memory.database)])
        assert [holder.pid for holder in holders] == [before]
        assert holders[0].argv[-1] == "--daemon"

        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda *call: signals.append(call))
            assert worker.stop_holders(holders, shutdown=CLAUDE_MEM, timeout=20) == []
        assert signals == []
        assert not any(path.exists() for path in beside)

        assert worker.start_again(holders) == []
        memory.wait_ready()
        assert memory.pid != before
        assert memory.stats()["database"]["path"] == str(memory.database)
        found = memory.search("heron")
        assert all(f"heron {number}" in found for number in range(5))
