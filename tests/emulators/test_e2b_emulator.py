"""The E2B emulator, seen through the unmodified SDK."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.request import Request, urlopen

import httpx
import pytest
from connectrpc.errors import ConnectError
from e2b import (
    AuthenticationException,
    CommandExitException,
    FileNotFoundException,
    InvalidArgumentException,
    RateLimitException,
    Sandbox,
    SandboxNotFoundException,
    TimeoutException,
)
from e2b.exceptions import SandboxNotRunningException, SandboxUnreachableException

from emulators import E2BEmulator, E2BSandbox, Fault
from emulators.faults import Kind

MIB = 1 << 20


@pytest.fixture(scope="module")
def shared() -> Iterator[E2BEmulator]:
    with E2BEmulator() as server:
        yield server


@pytest.fixture
def server(shared: E2BEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[E2BEmulator]:
    for name, value in shared.environment().items():
        monkeypatch.setenv(name, value)
    yield shared
    shared.faults.clear()
    shared.clear()
    shared.latency = 0.0
    for sandbox in shared.sandboxes():
        sandbox.kill()


@pytest.fixture
def here(server: E2BEmulator) -> E2BSandbox:
    """A sandbox as the server sees it."""
    return server.create()


@pytest.fixture
def sandbox(server: E2BEmulator, here: E2BSandbox) -> Sandbox:
    """The same sandbox as a client sees it."""
    connected = Sandbox.connect(here.id)
    server.clear()
    return connected


# Lifecycle


def test_create_then_look_then_kill(server: E2BEmulator) -> None:
    created = Sandbox.create(timeout=60, metadata={"owner": "me"}, envs={"COLOUR": "green"})
    info = created.get_info()
    assert (info.state.value, info.metadata, info.envd_version) == ("running", {"owner": "me"}, "0.6.13")
    assert abs((info.end_at - datetime.now(UTC)).total_seconds() - 60) < 10
    assert created.commands.run("echo $COLOUR").stdout == "green\n"
    assert [found.sandbox_id for found in Sandbox.list().next_items()] == [created.sandbox_id]
    assert created.is_running()
    assert created.kill()
    assert not created.kill()
    assert not created.is_running()
    assert [server.count(step) for step in ("create", "info", "list", "kill", "health")] == [1, 1, 1, 2, 2]


def test_connect_only_lengthens_a_time_out_and_set_timeout_also_shortens_it(here: E2BSandbox) -> None:
    end = here.ends_at
    connected = Sandbox.connect(here.id, timeout=10)
    assert here.ends_at == end
    connected.connect(timeout=1000)
    assert here.ends_at is not None and here.ends_at - time.time() > 990
    connected.set_timeout(20)
    assert here.ends_at - time.time() < 21


def test_a_time_out_kills(server: E2BEmulator) -> None:
    created = server.create()
    connected = Sandbox.connect(created.id)
    running = connected.commands.run("sleep 100", background=True)
    assert running.pid in created.processes()
    created.end_in(0.1)
    _until(lambda: created.state == "killed" and not created.processes())
    assert not created.folder.exists()
    with pytest.raises(SandboxNotRunningException):
        connected.commands.run("true")
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect(created.id)


def test_a_time_out_pauses_and_connect_resumes(server: E2BEmulator) -> None:
    created = Sandbox.create(timeout=60, lifecycle={"on_timeout": "pause"})
    here = server.find(created.sandbox_id)
    assert here is not None
    counting = created.commands.run("while :; do date +%N > beat; sleep 0.02; done", background=True, timeout=0)
    _until((here.home / "beat").exists)
    created.set_timeout(0)
    _until(lambda: here.state == "paused")
    with pytest.raises(SandboxNotRunningException):
        created.files.read("beat")
    created.pause()
    assert server.calls[-1].status == 409
    still = (here.home / "beat").read_bytes()
    time.sleep(0.1)
    assert (here.home / "beat").read_bytes() == still
    resumed = Sandbox.connect(created.sandbox_id)
    assert server.calls[-1].status == 201
    _until(lambda: (here.home / "beat").read_bytes() not in (still, b""))
    assert resumed.commands.kill(counting.pid)
    _until(lambda: not here.processes())


def test_a_wrong_key_is_refused(server: E2BEmulator, here: E2BSandbox) -> None:
    with pytest.raises(AuthenticationException):
        Sandbox.connect(here.id, api_key="e2b_" + "0" * 40)
    assert server.calls[-1].status == 401


def test_a_wrong_access_token_is_refused(server: E2BEmulator, here: E2BSandbox) -> None:
    request = Request(f"{server.url}/files?path=x", headers={"E2b-Sandbox-Id": here.id, "X-Access-Token": "no"})
    with pytest.raises(OSError, match="401"):
        urlopen(request)


def test_a_daemon_that_crashed_takes_root_and_its_folder_until_it_is_told_again(
    sandbox: Sandbox, here: E2BSandbox
) -> None:
    look = "echo $USER $HOME; pwd"
    assert sandbox.commands.run(look).stdout == f"user {here.home}\n{here.home}\n"
    here.crash()
    assert sandbox.commands.run(look).stdout == f"root {here.folder}/root\n{here.folder}\n"
    assert sandbox.commands.run(look, user="user", cwd="~").stdout == f"user {here.home}\n{here.home}\n"
    here.tell()
    assert sandbox.commands.run(look).stdout == f"user {here.home}\n{here.home}\n"


def test_a_user_that_is_not_known_is_turned_away(sandbox: Sandbox) -> None:
    for use in (
        lambda: sandbox.commands.run("true", user="alice"),
        lambda: sandbox.files.write("x", b"1", user="alice"),
        lambda: sandbox.files.read("x", user="alice"),
        lambda: sandbox.files.remove("x", user="alice"),
    ):
        with pytest.raises(AuthenticationException, match="alice"):
            use()


def test_files_are_those_of_the_user_of_the_call(sandbox: Sandbox, here: E2BSandbox) -> None:
    sandbox.files.write("mine", b"1")
    sandbox.files.write("~/mine", b"2", user="root")
    assert (here.home / "mine").read_bytes() == b"1"
    assert (here.folder / "root/mine").read_bytes() == b"2"
    assert sandbox.files.read("mine", user="root") == "2"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_uploads_and_commands_belong_to_the_user_of_the_call(server: E2BEmulator) -> None:
    here = server.create(uids={"user": 65534, "root": 0})
    box = Sandbox.connect(here.id)
    box.files.write("up", b"1")
    box.files.write(f"{here.home}/roots", b"1", user="root")
    assert [(here.home / name).stat().st_uid for name in ("up", "roots")] == [65534, 0]
    assert [box.commands.run("id -u", user=name).stdout for name in ("user", "root")] == ["65534\n", "0\n"]


def test_a_command_that_cannot_start_is_quoted_before_the_reason(sandbox: Sandbox) -> None:
    command = f": {'x' * (128 << 10)}"
    with pytest.raises(InvalidArgumentException) as raised:
        sandbox.commands.run(command)
    assert command in str(raised.value) and str(raised.value).rstrip(".").endswith("argument list too long")


def test_a_working_folder_that_is_missing_fails_the_command(server: E2BEmulator) -> None:
    here = server.create(work="project")
    here.work.rmdir()
    with pytest.raises(InvalidArgumentException, match=r"cwd '.*/project' does not exist"):
        Sandbox.connect(here.id).commands.run("true")


def test_an_unknown_sandbox_is_not_found(server: E2BEmulator) -> None:
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect("nobody")
    with pytest.raises(SandboxNotFoundException):
        Sandbox.get_info("nobody")


# Commands


def test_a_command_has_its_streams_apart_and_its_code(sandbox: Sandbox, here: E2BSandbox) -> None:
    done = sandbox.commands.run("pwd; echo wrong >&2")
    assert (done.stdout, done.stderr, done.exit_code) == (f"{here.home}\n", "wrong\n", 0)
    with pytest.raises(CommandExitException) as raised:
        sandbox.commands.run("echo some; exit 7")
    assert (raised.value.exit_code, raised.value.stdout) == (7, "some\n")
    with pytest.raises(CommandExitException) as killed:
        sandbox.commands.run("kill -9 $$")
    assert killed.value.exit_code == -1


def test_a_command_finds_nothing_of_the_servers_environment(sandbox: Sandbox, here: E2BSandbox) -> None:
    names = {line.partition("=")[0] for line in sandbox.commands.run("env").stdout.splitlines()}
    expected = {"PATH", "LANG", "HOME", "USER", "LOGNAME", "E2B_SANDBOX", "E2B_SANDBOX_ID", "E2B_TEMPLATE_ID"}
    assert expected <= names <= expected | {"PWD", "SHLVL", "_", "OLDPWD"}
    assert sandbox.commands.run("echo $HOME").stdout.strip() == str(here.home)
    assert sandbox.commands.run("echo $A; pwd", envs={"A": "1"}, cwd="/").stdout == "1\n/\n"


def test_a_command_may_print_much_and_need_not_print_text(sandbox: Sandbox) -> None:
    assert len(sandbox.commands.run("head -c 2000000 /dev/zero | tr '\\0' x").stdout) == 2_000_000
    assert sandbox.commands.run(r"printf 'a\377b'").stdout == "a\ufffdb"


def test_a_time_out_ends_the_command_with_its_children(sandbox: Sandbox, here: E2BSandbox) -> None:
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 100 | sleep 100", timeout=0.3)
    _until(lambda: not here.processes())


def test_the_deadline_is_said_in_the_stream(server: E2BEmulator, here: E2BSandbox) -> None:
    body = b'{"process":{"cmd":"/bin/bash","args":["-l","-c","sleep 100"]}}'
    headers = {
        "E2b-Sandbox-Id": here.id,
        "X-Access-Token": here.token,
        "Content-Type": "application/connect+json",
        "Connect-Timeout-Ms": "100",
    }
    envelope = b"\0" + len(body).to_bytes(4, "big") + body
    answer = urlopen(Request(f"{server.url}/process.Process/Start", envelope, headers)).read()
    assert b'"deadline_exceeded"' in answer and b"\x02" in answer
    assert not here.processes()


def test_a_command_outlives_its_client(sandbox: Sandbox, here: E2BSandbox) -> None:
    handle = sandbox.commands.run("sleep 0.3; echo done > done", background=True)
    handle.disconnect()
    _until((here.home / "done").exists)


def test_a_command_can_be_fed_listed_and_killed(sandbox: Sandbox) -> None:
    fed = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.commands.send_stdin(fed.pid, "hello")
    sandbox.commands.close_stdin(fed.pid)
    assert fed.wait().stdout == "hello"
    long = sandbox.commands.run("sleep 100", background=True)
    assert [found.pid for found in sandbox.commands.list()] == [long.pid]
    assert long.kill()
    _until(lambda: not sandbox.commands.list())
    assert not sandbox.commands.kill(long.pid)


def test_tools_are_all_that_commands_find(server: E2BEmulator, tmp_path: Path) -> None:
    for name in ("cat", "ls"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    created = Sandbox.connect(server.create(tools=tmp_path).id)
    done = created.commands.run("echo $PATH; command -v cat; command -v python3 || echo none")
    assert done.stdout == f"{tmp_path}\n{tmp_path}/cat\nnone\n"


# Files


def test_files_stream_both_ways_unchanged(sandbox: Sandbox, here: E2BSandbox) -> None:
    data = os.urandom(20 * MIB)
    sandbox.files.write("deep/in/big", io.BytesIO(data))
    assert (here.home / "deep/in/big").read_bytes() == data
    received = hashlib.sha256()
    for piece in sandbox.files.read("~/deep/in/big", format="stream"):
        received.update(piece)
    assert received.digest() == hashlib.sha256(data).digest()


def test_files_may_be_written_in_every_way(sandbox: Sandbox, here: E2BSandbox) -> None:
    sandbox.files.write("plain", b"1" * 1000)
    sandbox.files.write("squeezed", io.BytesIO(b"2" * 1000), gzip=True)
    sandbox.files.write("piecewise", iter([b"3" * 500, b"3" * 500]))
    sandbox.files.write_files([{"path": f"{here.home}/several/{n}", "data": f"{n}"} for n in range(3)])
    assert [sandbox.files.read(name)[:2] for name in ("plain", "squeezed", "piecewise")] == ["11", "22", "33"]
    assert [entry.name for entry in sandbox.files.list("several")] == ["0", "1", "2"]
    assert bytes(sandbox.files.read("squeezed", format="bytes", gzip=True)) == b"2" * 1000


@pytest.mark.parametrize("name", ["a b", "é😀", "x\ny", 'q"u\\o', "%41+&=?#", "~x"])
def test_any_name_may_be_used(sandbox: Sandbox, here: E2BSandbox, name: str) -> None:
    sandbox.files.write(name, "text")
    sandbox.files.write(f"{name}.2", io.BytesIO(b"bytes"))
    assert ((here.home / name).read_text(), sandbox.files.read(name)) == ("text", "text")
    assert sandbox.files.read(f"{name}.2") == "bytes"
    assert {entry.name for entry in sandbox.files.list(".")} == {name, f"{name}.2"}


def test_the_usual_errands(sandbox: Sandbox, here: E2BSandbox) -> None:
    assert sandbox.files.make_dir("a/b")
    assert not sandbox.files.make_dir("a/b")
    sandbox.files.write("a/b/c", "1")
    assert sandbox.files.rename("a/b/c", "a/d").path == str(here.home / "a/d")
    assert sandbox.files.get_info("a/d").size == 1
    assert {entry.path for entry in sandbox.files.list("~", depth=2)} == {
        str(here.home / path) for path in ("a", "a/b", "a/d")
    }
    sandbox.files.remove("a")
    assert not sandbox.files.exists("a")
    with pytest.raises(FileNotFoundException):
        sandbox.files.read("a/d")
    with pytest.raises(FileNotFoundException):
        sandbox.files.list("a")


def test_downloads_are_compressed_on_the_fly_or_of_a_known_length(server: E2BEmulator, here: E2BSandbox) -> None:
    (here.home / "x").write_bytes(b"x" * 1000)
    headers = {"E2b-Sandbox-Id": here.id, "X-Access-Token": here.token, "Accept-Encoding": "gzip"}
    with urlopen(Request(f"{server.url}/files?path=x", headers=headers)) as answer:
        assert answer.headers["Content-Length"] is None
        assert gzip.decompress(answer.read()) == b"x" * 1000
    headers["Accept-Encoding"] = "identity"
    with urlopen(Request(f"{server.url}/files?path=x", headers=headers)) as answer:
        assert (answer.headers["Content-Length"], len(answer.read())) == ("1000", 1000)
    with urlopen(Request(f"{server.url}/files?path=x", headers={**headers, "Range": "bytes=10-19"})) as answer:
        assert (answer.status, len(answer.read())) == (206, 10)


# Trouble


def test_refuse_closes_before_anything_is_done(server: E2BEmulator, sandbox: Sandbox, here: E2BSandbox) -> None:
    server.faults.add(Fault("command", "refuse", times=None))
    with pytest.raises(SandboxUnreachableException):
        sandbox.commands.run("touch ran")
    assert not (here.home / "ran").exists()
    server.faults.clear()
    sandbox.commands.run("touch ran")
    assert (here.home / "ran").exists()


def test_cut_command_goes_on(server: E2BEmulator, sandbox: Sandbox, here: E2BSandbox) -> None:
    server.faults.add(Fault("command", "cut", after=3))
    with pytest.raises(ConnectError):
        sandbox.commands.run("echo some; sleep 0.2; touch ran")
    _until((here.home / "ran").exists)
    assert server.count("command") == 1


def test_cut_download_breaks(server: E2BEmulator, sandbox: Sandbox, here: E2BSandbox) -> None:
    (here.home / "big").write_bytes(os.urandom(4 * MIB))
    server.faults.add(Fault("download", "cut", after=MIB))
    received = 0
    with pytest.raises(httpx.TransportError):
        for piece in sandbox.files.read("big", format="stream"):
            received += len(piece)
    assert received <= MIB


def test_cut_upload_leaves_a_part(server: E2BEmulator, sandbox: Sandbox, here: E2BSandbox) -> None:
    (here.home / "big").write_bytes(b"old" * MIB)
    server.faults.add(Fault("upload", "cut", after=1000))
    with pytest.raises(httpx.TransportError):
        sandbox.files.write("big", io.BytesIO(bytes(20 * MIB)))
    assert (here.home / "big").read_bytes() == bytes(1000)


def test_lose_acts_and_says_nothing(server: E2BEmulator, sandbox: Sandbox, here: E2BSandbox) -> None:
    server.faults.add(Fault("command", "lose"))
    with pytest.raises(SandboxUnreachableException):
        sandbox.commands.run("echo; sleep 0.1; touch ran")
    assert (here.home / "ran").exists()
    server.faults.add(Fault("upload", "lose"))
    with pytest.raises(httpx.TransportError):
        sandbox.files.write("up", io.BytesIO(b"all of it"))
    assert (here.home / "up").read_bytes() == b"all of it"
    assert [call.status for call in server.calls if call.step in ("command", "upload")] == [0, 0]


def test_stall_stops_the_bytes(server: E2BEmulator, sandbox: Sandbox, here: E2BSandbox) -> None:
    (here.home / "big").write_bytes(os.urandom(4 * MIB))
    server.faults.add(Fault("download", "stall", after=MIB))
    received = 0
    with pytest.raises(httpx.ReadTimeout):
        for piece in sandbox.files.read("big", format="stream", request_timeout=0.5):
            received += len(piece)
    assert received == MIB
    server.faults.add(Fault("command", "stall", after=1))
    with pytest.raises(TimeoutException):
        sandbox.commands.run("echo some", timeout=0.5)
    server.faults.add(Fault("upload", "stall", after=10))
    with pytest.raises(httpx.TimeoutException):
        sandbox.files.write("up", bytes(4 * MIB), request_timeout=0.5)


def test_truncate_looks_whole(server: E2BEmulator, sandbox: Sandbox, here: E2BSandbox) -> None:
    (here.home / "big").write_bytes(bytes(4 * MIB))
    for step in ("download", "upload", "command"):
        server.faults.add(Fault(step, "truncate", after=1000))
    assert len(b"".join(sandbox.files.read("big", format="stream"))) == 1000
    sandbox.files.write("up", io.BytesIO(bytes(4 * MIB)))
    assert (here.home / "up").stat().st_size == 1000
    done = sandbox.commands.run("head -c 5000 /dev/zero | tr '\\0' x; touch ran; exit 4")
    assert (len(done.stdout), done.exit_code) == (1000, 0)
    assert (here.home / "ran").exists()


def test_shrink_ends_cleanly(server: E2BEmulator, sandbox: Sandbox, here: E2BSandbox) -> None:
    (here.home / "big").write_bytes(bytes(4 * MIB))
    server.faults.add(Fault("download", "shrink", after=MIB))
    assert len(b"".join(sandbox.files.read("big", format="stream"))) == MIB
    assert (here.home / "big").stat().st_size == MIB


def test_status_answers_for_a_gateway(server: E2BEmulator, sandbox: Sandbox, here: E2BSandbox) -> None:
    server.faults.add(Fault("command", "status", status=429))
    with pytest.raises(RateLimitException):
        sandbox.commands.run("touch ran")
    server.faults.add(Fault("upload", "status", status=502))
    with pytest.raises(SandboxUnreachableException):
        sandbox.files.write("ran", io.BytesIO(bytes(MIB)))
    assert not (here.home / "ran").exists()
    server.faults.add(Fault("info", "status", status=503, times=2))
    assert sandbox.get_info().sandbox_id == here.id
    assert server.count("info") == 3


@pytest.mark.parametrize("kind", ["kill", "expire"])
def test_the_sandbox_ends_under_a_command(server: E2BEmulator, sandbox: Sandbox, here: E2BSandbox, kind: Kind) -> None:
    server.faults.add(Fault("command", kind))
    with pytest.raises(SandboxNotRunningException):
        sandbox.commands.run("sleep 100")
    assert (here.state, here.processes(), here.folder.exists()) == ("killed", [], False)


def test_the_sandbox_pauses_under_a_download(server: E2BEmulator) -> None:
    here = server.create(on_timeout="pause")
    (here.home / "big").write_bytes(os.urandom(4 * MIB))
    connected = Sandbox.connect(here.id)
    server.faults.add(Fault("download", "expire", after=MIB))
    with pytest.raises(httpx.TransportError):
        b"".join(connected.files.read("big", format="stream"))
    assert here.state == "paused"
    Sandbox.connect(here.id)
    assert len(b"".join(connected.files.read("big", format="stream"))) == 4 * MIB


def test_slow_takes_its_time(server: E2BEmulator, sandbox: Sandbox, here: E2BSandbox) -> None:
    (here.home / "x").write_bytes(bytes(50_000))
    server.faults.add(Fault("download", "slow", rate=100_000))
    begun = time.monotonic()
    assert len(b"".join(sandbox.files.read("x", format="stream"))) == 50_000
    assert time.monotonic() - begun > 0.4


def test_corrupt_flips_one_byte(server: E2BEmulator, sandbox: Sandbox, here: E2BSandbox) -> None:
    (here.home / "x").write_bytes(bytes(MIB))
    for step in ("download", "upload", "command"):
        server.faults.add(Fault(step, "corrupt"))
    assert sum(b"".join(sandbox.files.read("x", format="stream"))) == 1
    sandbox.files.write("up", io.BytesIO(bytes(MIB)))
    assert sum((here.home / "up").read_bytes()) == 1
    assert sandbox.commands.run("printf aaaa").stdout == "aa`a"


def test_faults_wait_their_turn(server: E2BEmulator, sandbox: Sandbox) -> None:
    server.faults.add(Fault("command", "truncate", skip=1, times=2))
    assert [sandbox.commands.run("echo x").stdout for _ in range(4)] == ["x\n", "", "", "x\n"]


def test_latency_is_added(server: E2BEmulator, sandbox: Sandbox) -> None:
    server.latency = 0.2
    begun = time.monotonic()
    sandbox.commands.run("true")
    assert time.monotonic() - begun >= 0.2


def test_closing_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with E2BEmulator() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        created = Sandbox.create()
        here = server.find(created.sandbox_id)
        assert here is not None
        created.commands.run("(setsid sleep 100 >/dev/null 2>&1 &)")
        _until(lambda: len(here.processes()) == 1)
        port = int(server.url.rpartition(":")[2])
    assert (here.processes(), here.folder.parent.exists()) == ([], False)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def _until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it never came to be"
        time.sleep(0.01)
