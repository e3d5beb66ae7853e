"""The Daytona emulator, seen through the unmodified SDK."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from daytona import (
    CreateSandboxFromSnapshotParams,
    Daytona,
    DaytonaAuthenticationError,
    DaytonaConfig,
    DaytonaError,
    DaytonaNotFoundError,
    Sandbox,
)
from daytona.common.errors import (
    DaytonaBadRequestError,
    DaytonaConnectionError,
    DaytonaConnectionTimeoutError,
    DaytonaFileNotFoundError,
    DaytonaTimeoutError,
)

from emulators import DaytonaEmulator, DaytonaSandbox, Fault
from emulators.calls import Step
from emulators.faults import Kind

MIB = 1 << 20


@pytest.fixture(scope="module")
def shared() -> Iterator[DaytonaEmulator]:
    with DaytonaEmulator(minute=0.1) as server:
        yield server


@pytest.fixture(scope="module")
def shared_client(shared: DaytonaEmulator) -> Daytona:
    settings = shared.environment()
    return Daytona(DaytonaConfig(api_key=settings["DAYTONA_API_KEY"], api_url=settings["DAYTONA_API_URL"]))


@pytest.fixture
def server(shared: DaytonaEmulator) -> Iterator[DaytonaEmulator]:
    yield shared
    shared.faults.clear()
    shared.clear()
    for sandbox in shared.sandboxes():
        sandbox.kill()


@pytest.fixture
def client(server: DaytonaEmulator, shared_client: Daytona) -> Daytona:
    server.clear()
    return shared_client


@pytest.fixture
def here(server: DaytonaEmulator) -> DaytonaSandbox:
    """A sandbox as the server sees it."""
    return server.create(auto_stop=0)


@pytest.fixture
def sandbox(server: DaytonaEmulator, here: DaytonaSandbox, client: Daytona) -> Sandbox:
    """The same sandbox as a client sees it."""
    found = client.get(here.id)
    server.clear()
    return found


# Lifecycle


def test_the_environment_is_all_the_sdk_needs(server: DaytonaEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    assert Daytona().create().process.exec("echo hello").result == "hello\n"


def test_create_then_stop_then_archive_then_start_then_delete(server: DaytonaEmulator, client: Daytona) -> None:
    asked = CreateSandboxFromSnapshotParams(
        name="mine", labels={"a": "b"}, env_vars={"COLOUR": "green"}, auto_stop_interval=0
    )
    created = client.create(asked)
    assert created.process.exec("echo $COLOUR; echo kept > kept").result == "green\n"
    assert client.get("mine").id == created.id
    assert [found.name for found in client.list()] == ["mine"]
    created.stop()
    assert created.state == "stopped"
    with pytest.raises(DaytonaBadRequestError, match="sandbox is not started"):
        created.process.exec("true")
    created.archive()
    assert created.state == "archived"
    created.start()
    assert created.process.exec("cat kept").result == "kept\n"
    created.pause()
    assert created.state == "paused"
    created.start()
    created.delete()
    with pytest.raises(DaytonaNotFoundError):
        created.process.exec("true")
    with pytest.raises(DaytonaNotFoundError):
        client.get(created.id)
    steps: tuple[Step, ...] = ("create", "list", "stop", "archive", "start", "pause", "kill")
    assert [server.count(step) for step in steps] == [1, 1, 1, 1, 2, 1, 1]


def test_it_stops_itself_unless_there_is_activity(server: DaytonaEmulator, client: Daytona) -> None:
    here = server.create(auto_stop=10)
    connected = client.get(here.id)
    for _ in range(5):
        time.sleep(0.25)
        connected.refresh_activity()
    assert here.state == "started"
    with pytest.raises(DaytonaError):
        # What runs inside is no activity.
        connected.process.exec("while :; do echo; sleep 0.01; done")
    assert (here.state, here.processes()) == ("stopped", [])
    assert client.get(here.id).state == "stopped"
    connected.start()
    connected.set_autostop_interval(0)
    assert (here.state, here.ends_at) == ("started", None)


def test_stopping_an_ephemeral_one_deletes_it(server: DaytonaEmulator, client: Daytona) -> None:
    created = client.create(CreateSandboxFromSnapshotParams(ephemeral=True, auto_stop_interval=0))
    created.stop()
    here = server.find(created.id)
    assert here is not None
    assert (here.state, here.folder.exists()) == ("destroyed", False)


def test_a_wrong_key_is_refused(server: DaytonaEmulator, here: DaytonaSandbox) -> None:
    stranger = Daytona(DaytonaConfig(api_key="wrong", api_url=server.environment()["DAYTONA_API_URL"]))
    with pytest.raises(DaytonaAuthenticationError, match="Invalid credentials"):
        stranger.get(here.id)
    assert server.calls[-1].status == 401


# Commands


def test_a_command_is_piped_to_a_shell_and_its_streams_come_merged(sandbox: Sandbox, here: DaytonaSandbox) -> None:
    done = sandbox.process.exec("pwd; echo wrong >&2; exit 7")
    assert (done.result, done.exit_code) == (f"{here.home}\nwrong\n", 7)
    assert sandbox.process.exec("cat <<'END'\na b\nEND\necho \"$0\"").result == f"a b\n{here.shell}\n"
    assert sandbox.process.exec("echo $A; pwd", cwd="/", env={"A": "1"}).result == "1\n/\n"


def test_a_command_finds_nothing_of_the_servers_environment(sandbox: Sandbox) -> None:
    names = {line.partition("=")[0] for line in sandbox.process.exec("env").result.splitlines()}
    expected = {"PATH", "LANG", "HOME", "USER", "LOGNAME", "DAYTONA_SANDBOX_ID"}
    assert expected <= names <= expected | {"PWD", "SHLVL", "_", "OLDPWD"}


def test_a_command_may_print_much_and_need_not_print_text(sandbox: Sandbox) -> None:
    assert len(sandbox.process.exec("head -c 2000000 /dev/zero | tr '\\0' x").result) == 2_000_000
    assert sandbox.process.exec(r"printf 'a\377b'").result == "a\ufffdb"
    assert sandbox.process.exec(f"echo {'x' * 200_000} | wc -c").result.strip() == "200001"


def test_a_time_out_ends_the_command_with_its_children(sandbox: Sandbox, here: DaytonaSandbox) -> None:
    with pytest.raises(DaytonaTimeoutError) as late:
        sandbox.process.exec("sleep 100 | sleep 100", timeout=1)
    assert (late.value.status_code, late.value.code) == (408, "REQUEST_TIMEOUT")
    _until(lambda: not here.processes())


def test_tools_and_work_folder(server: DaytonaEmulator, client: Daytona, tmp_path: Path) -> None:
    (tmp_path / "cat").symlink_to("/bin/cat")
    here = server.create(tools=tmp_path, work="project", auto_stop=0)
    connected = client.get(here.id)
    done = connected.process.exec("pwd; echo $PATH; command -v python3 || echo none")
    assert done.result == f"{here.home}/project\n{tmp_path}\nnone\n"
    assert connected.get_user_home_dir() == str(here.home)
    assert connected.get_work_dir() == str(here.home / "project")
    connected.fs.upload_file(b"1", "x")
    connected.fs.upload_file(b"1", "~/x")
    assert (here.home / "project/x").exists() and (here.home / "project/~/x").exists()


# Files


def test_files_stream_both_ways_unchanged(sandbox: Sandbox, here: DaytonaSandbox, tmp_path: Path) -> None:
    data = os.urandom(20 * MIB)
    sandbox.fs.upload_file_stream(io.BytesIO(data), f"{here.home}/deep/in/big")
    assert (here.home / "deep/in/big").read_bytes() == data
    received = hashlib.sha256()
    for piece in sandbox.fs.download_file_stream("deep/in/big"):
        received.update(piece)
    assert received.digest() == hashlib.sha256(data).digest()
    sandbox.fs.download_file("deep/in/big", str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == data


@pytest.mark.parametrize("name", ["a b", "é😀", "x\ny", 'q"u\\o', "%41+&=?#", "~x"])
def test_any_name_may_be_used(sandbox: Sandbox, here: DaytonaSandbox, name: str) -> None:
    sandbox.fs.upload_file(b"bytes", name)
    assert (here.home / name).read_bytes() == b"bytes"
    assert sandbox.fs.download_file(name) == b"bytes"
    assert b"".join(sandbox.fs.download_file_stream(name)) == b"bytes"
    assert [entry.name for entry in sandbox.fs.list_files(".")] == [name]


def test_the_usual_errands(sandbox: Sandbox, here: DaytonaSandbox) -> None:
    sandbox.fs.create_folder("a/b", "700")
    sandbox.fs.upload_file(b"1", "a/b/c")
    sandbox.fs.move_files("a/b/c", "a/d")
    info = sandbox.fs.get_file_info("a/d")
    assert (info.name, info.size, info.is_dir) == ("d", 1, False)
    assert sandbox.fs.get_file_info("a/b").permissions == "0700"
    assert {entry.path for entry in sandbox.fs.list_files(str(here.home), depth=2)} == {
        str(here.home / path) for path in ("a", "a/b", "a/d")
    }
    with pytest.raises(DaytonaBadRequestError):
        sandbox.fs.delete_file("a")
    sandbox.fs.delete_file("a", recursive=True)
    assert not (here.home / "a").exists()
    for missing in (
        lambda: sandbox.fs.download_file("a/d"),
        lambda: list(sandbox.fs.download_file_stream("a/d")),
        lambda: sandbox.fs.get_file_info("a/d"),
        lambda: sandbox.fs.delete_file("a/d"),
    ):
        with pytest.raises(DaytonaNotFoundError) as raised:
            missing()
        assert not isinstance(raised.value, DaytonaFileNotFoundError), "an error that names no source has no kind"


# What the real daemon answers, byte by byte where no client shows it


@pytest.fixture
def wire(server: DaytonaEmulator, here: DaytonaSandbox) -> Iterator[httpx.Client]:
    """The toolbox without the SDK."""
    headers = {"Authorization": f"Bearer {server.key}"}
    with httpx.Client(base_url=f"{here.toolbox}/{here.id}", headers=headers, timeout=10) as client:
        yield client


def _executed(wire: httpx.Client, **asked: object) -> httpx.Response:
    return wire.post("/process/execute", json={"command": "true", **asked})


def test_the_shell_is_zsh_else_bash_else_what_shell_says_else_sh(server: DaytonaEmulator, tmp_path: Path) -> None:
    for name in ("zsh", "bash"):
        (tmp_path / name).symlink_to("/bin/sh")
    made = server.create(tools=tmp_path, envs={"SHELL": "/bin/own"}, auto_stop=0)
    assert made.shell == str(tmp_path / "zsh")
    (tmp_path / "zsh").unlink()
    assert made.shell == str(tmp_path / "bash")
    (tmp_path / "bash").unlink()
    assert (made.shell, server.create(tools=tmp_path, auto_stop=0).shell) == ("/bin/own", "/bin/sh")


def test_a_working_folder_that_is_missing_is_an_exit_code_and_one_that_was_removed_is_used(
    wire: httpx.Client, server: DaytonaEmulator, client: Daytona
) -> None:
    answer = _executed(wire, cwd="/never/was")
    assert (answer.status_code, answer.json()["exitCode"]) == (200, -1)
    assert answer.json()["result"].startswith("fork/exec ")
    here = server.create(work="project", auto_stop=0)
    here.work.rmdir()
    done = client.get(here.id).process.exec("echo still")
    assert (done.exit_code, done.result.endswith("still\n")) == (0, True)
    assert "(deleted)" in client.get(here.id).process.exec("readlink /proc/$$/cwd").result


@pytest.mark.parametrize(
    "asked", [{"command": " \n"}, {"envs": {"A-B": "1"}}, {"envs": {"1": "1"}}, {"timeout": 1.5}, {"timeout": -1}]
)
def test_a_command_that_makes_no_sense_is_refused(wire: httpx.Client, asked: dict[str, object]) -> None:
    answer = _executed(wire, **asked)
    assert answer.status_code == 400
    assert {"statusCode", "message", "code", "timestamp", "path", "method"} == answer.json().keys()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/files/download?path=no", 404),
        ("GET", "/files/info?path=no", 404),
        ("GET", "/files?path=no", 404),
        ("DELETE", "/files?path=no", 404),
        ("DELETE", "/files?path=.", 400),
        ("POST", "/files/folder?path=x&mode=abc", 400),
    ],
)
def test_file_calls_refuse_without_a_word(wire: httpx.Client, method: str, path: str, status: int) -> None:
    answer = wire.request(method, path)
    assert (answer.status_code, answer.content) == (status, b"")


def test_downloads_say_their_length_and_type_and_may_be_partial(wire: httpx.Client, here: DaytonaSandbox) -> None:
    (here.home / "a.json").write_bytes(b'{"a": 1}')
    answer = wire.post("/files/bulk-download", json={"paths": ["a.json", "no"]})
    assert b"Content-Length: 8\r\nContent-Type: application/json\r\n\r\n{" in answer.content
    assert b'"code": "FILE_NOT_FOUND"' in answer.content and b"source" not in answer.content
    empty = wire.post("/files/bulk-download", json={"paths": []})
    assert (empty.status_code, list(empty.json())) == (400, ["error"])
    part = wire.get("/files/download?path=a.json", headers={"Range": "bytes=2-3"})
    assert (part.status_code, part.content, part.headers["Content-Range"]) == (206, b'a"', "bytes 2-3/8")


def test_uploads_say_what_was_written_or_why_not(wire: httpx.Client, here: DaytonaSandbox) -> None:
    (here.home / "folder").mkdir()

    def send(path: str) -> httpx.Response:
        return wire.post("/files/bulk-upload", data={"files[0].path": path}, files={"files[0].file": ("x", b"12345")})

    assert send("new").json() == {"files": [{"path": "new", "bytes": 5}]}
    onto = send("folder")
    assert (onto.status_code, list(onto.json())) == (400, ["errors"])
    head = b'--B\r\nContent-Disposition: form-data; name="files[0].path"\r\n\r\ncut\r\n--B\r\n'
    body = head + b'Content-Disposition: form-data; name="files[0].file"; filename="x"\r\n\r\nhal'
    cut = wire.post("/files/bulk-upload", content=body, headers={"Content-Type": "multipart/form-data; boundary=B"})
    assert (cut.status_code, list(cut.json())) == (400, ["errors"])
    assert wire.post("/files/upload?path=one", files={"file": ("x", b"1")}).status_code == 200
    assert (here.home / "one").read_bytes() == b"1"


def test_moves_neither_overwrite_nor_make_folders(wire: httpx.Client, here: DaytonaSandbox) -> None:
    for name in ("a", "b"):
        (here.home / name).write_bytes(name.encode())
    assert wire.post("/files/move?source=a&destination=b").status_code == 409
    assert wire.post("/files/move?source=a&destination=no/c").status_code == 404
    assert (here.home / "b").read_bytes() == b"b"


def test_what_else_there_is_and_what_not(wire: httpx.Client) -> None:
    assert wire.get("/version").json() == {"version": "0.190.0"}
    assert wire.post("/process/session", json={"sessionId": "s"}).status_code == 201
    assert [one["sessionId"] for one in wire.get("/process/session").json()] == ["s"]
    unknown = wire.get("/no/such/route")
    assert (unknown.status_code, unknown.headers["Content-Type"]) == (404, "text/plain")


def test_while_the_daemon_is_down_its_proxy_answers_for_it(wire: httpx.Client, here: DaytonaSandbox) -> None:
    here.daemon_down = True
    answer = _executed(wire)
    assert (answer.status_code, answer.content) == (502, b"")
    here.daemon_down = False
    assert _executed(wire).status_code == 200


def test_a_daemon_that_crashes_takes_its_commands_with_it(
    server: DaytonaEmulator, wire: httpx.Client, here: DaytonaSandbox
) -> None:
    server.faults.add(Fault("command", "crash", after=3))
    with contextlib.suppress(httpx.TransportError):
        assert _executed(wire, command="echo some; sleep 100").status_code == 502
    assert here.processes() == []


def test_a_proxy_sends_a_small_command_again_and_a_large_one_not(
    server: DaytonaEmulator, wire: httpx.Client, here: DaytonaSandbox
) -> None:
    server.faults.add(Fault("command", "replay", times=2))
    assert _executed(wire, command="echo ran >> ran").status_code == 200
    assert (here.home / "ran").read_text() == "ran\nran\n"
    large = _executed(wire, command=f"echo ran >> once # {'x' * (256 << 10)}")
    assert (large.status_code, large.content) == (502, b"")
    assert (here.home / "once").read_text() == "ran\n"


def test_sudo_works_as_whom_it_is_allowed_to_and_as_nobody_else(server: DaytonaEmulator, client: Daytona) -> None:
    here = server.create(uids={"agent": None}, sudo=["agent"], auto_stop=0)
    box = client.get(here.id)
    done = box.process.exec("A=1 B=2 sudo -n -H -u agent --preserve-env=A -- sh -c 'echo $HOME $USER $A $B'", env={})
    assert done.result == f"{here.folder}/home/agent agent 1\n"
    refused = box.process.exec("sudo -n -u root -- true")
    assert (refused.exit_code, refused.result) == (1, "sudo: a password is required\n")


# Trouble


def test_a_command_whose_answer_is_lost_runs_once_per_try(
    server: DaytonaEmulator, sandbox: Sandbox, here: DaytonaSandbox
) -> None:
    server.faults.add(Fault("command", "lose"))
    # The SDK takes a connection closed without a byte for a stale one, and asks again.
    assert sandbox.process.exec("echo ran >> ran").exit_code == 0
    assert (here.home / "ran").read_text() == "ran\nran\n"
    assert [call.status for call in server.calls] == [0, 200]


def test_refuse_closes_before_anything_is_done(server: DaytonaEmulator, sandbox: Sandbox, here: DaytonaSandbox) -> None:
    server.faults.add(Fault("command", "refuse", times=None))
    with pytest.raises(DaytonaError):
        sandbox.process.exec("touch ran")
    assert not (here.home / "ran").exists()
    assert server.count("command") == 4


def test_cut_command_goes_on(server: DaytonaEmulator, sandbox: Sandbox, here: DaytonaSandbox) -> None:
    server.faults.add(Fault("command", "cut", after=3))
    with pytest.raises(DaytonaConnectionError):
        sandbox.process.exec("echo some; sleep 0.2; touch ran")
    _until((here.home / "ran").exists)
    assert server.count("command") == 1


def test_cut_download_breaks(server: DaytonaEmulator, sandbox: Sandbox, here: DaytonaSandbox) -> None:
    (here.home / "big").write_bytes(os.urandom(4 * MIB))
    server.faults.add(Fault("download", "cut", after=MIB))
    received = 0
    with pytest.raises(httpx.TransportError):
        for piece in sandbox.fs.download_file_stream("big"):
            received += len(piece)
    assert received <= MIB


def test_cut_upload_leaves_a_part(server: DaytonaEmulator, sandbox: Sandbox, here: DaytonaSandbox) -> None:
    (here.home / "big").write_bytes(b"old" * MIB)
    server.faults.add(Fault("upload", "cut", after=1000))
    with pytest.raises(DaytonaError):
        sandbox.fs.upload_file_stream(io.BytesIO(bytes(20 * MIB)), "big")
    assert (here.home / "big").read_bytes() == bytes(1000)


def test_lost_upload_is_written(server: DaytonaEmulator, sandbox: Sandbox, here: DaytonaSandbox) -> None:
    server.faults.add(Fault("upload", "lose"))
    with pytest.raises(DaytonaError):
        sandbox.fs.upload_file_stream(io.BytesIO(b"all of it"), "up")
    assert (here.home / "up").read_bytes() == b"all of it"


def test_stall_stops_the_bytes(server: DaytonaEmulator, sandbox: Sandbox, here: DaytonaSandbox) -> None:
    (here.home / "big").write_bytes(os.urandom(4 * MIB))
    server.faults.add(Fault("download", "stall", after=MIB))
    received = 0
    with pytest.raises(httpx.ReadTimeout):
        for piece in sandbox.fs.download_file_stream("big", timeout=1):
            received += len(piece)
    assert received <= MIB
    server.faults.add(Fault("upload", "stall", after=10))
    with pytest.raises(DaytonaConnectionTimeoutError):
        sandbox.fs.upload_file_stream(io.BytesIO(bytes(20 * MIB)), "up", timeout=1)


def test_truncate_looks_whole(server: DaytonaEmulator, sandbox: Sandbox, here: DaytonaSandbox) -> None:
    (here.home / "big").write_bytes(bytes(4 * MIB))
    for step in ("download", "upload", "command"):
        server.faults.add(Fault(step, "truncate", after=1000))
    assert len(b"".join(sandbox.fs.download_file_stream("big"))) == 1000
    sandbox.fs.upload_file_stream(io.BytesIO(bytes(4 * MIB)), "up")
    assert (here.home / "up").stat().st_size == 1000
    done = sandbox.process.exec("head -c 5000 /dev/zero | tr '\\0' x; touch ran; exit 4")
    assert (len(done.result), done.exit_code) == (1000, 0)
    assert (here.home / "ran").exists()


def test_shrink_ends_cleanly(server: DaytonaEmulator, sandbox: Sandbox, here: DaytonaSandbox) -> None:
    (here.home / "big").write_bytes(bytes(4 * MIB))
    server.faults.add(Fault("download", "shrink", after=MIB))
    assert len(b"".join(sandbox.fs.download_file_stream("big"))) == MIB
    assert (here.home / "big").stat().st_size == MIB


def test_status_answers_for_a_gateway(server: DaytonaEmulator, sandbox: Sandbox, here: DaytonaSandbox) -> None:
    server.faults.add(Fault("command", "status", status=502))
    with pytest.raises(DaytonaError) as raised:
        sandbox.process.exec("touch ran")
    assert raised.value.status_code == 502
    assert not (here.home / "ran").exists()
    server.faults.add(Fault("upload", "status", status=503, retry_after=1))
    with pytest.raises(DaytonaError) as refused:
        sandbox.fs.upload_file_stream(io.BytesIO(bytes(MIB)), "up")
    assert refused.value.status_code == 503
    server.faults.add(Fault("download", "status", status=504))
    with pytest.raises(httpx.HTTPStatusError):
        list(sandbox.fs.download_file_stream("up"))


@pytest.mark.parametrize(("kind", "state"), [("kill", "destroyed"), ("expire", "stopped")])
def test_the_sandbox_ends_under_a_command(
    server: DaytonaEmulator, sandbox: Sandbox, here: DaytonaSandbox, kind: Kind, state: str
) -> None:
    server.faults.add(Fault("command", kind, after=3))
    with pytest.raises(DaytonaError):
        sandbox.process.exec("echo some; sleep 100")
    assert (here.state, here.processes()) == (state, [])


def test_slow_takes_its_time(server: DaytonaEmulator, sandbox: Sandbox, here: DaytonaSandbox) -> None:
    server.faults.add(Fault("upload", "slow", rate=100_000))
    begun = time.monotonic()
    sandbox.fs.upload_file_stream(io.BytesIO(bytes(50_000)), "x")
    assert time.monotonic() - begun > 0.4
    assert (here.home / "x").stat().st_size == 50_000


def test_corrupt_flips_one_byte(server: DaytonaEmulator, sandbox: Sandbox, here: DaytonaSandbox) -> None:
    (here.home / "x").write_bytes(bytes(MIB))
    for step in ("download", "upload", "command"):
        server.faults.add(Fault(step, "corrupt"))
    assert sum(b"".join(sandbox.fs.download_file_stream("x"))) == 1
    sandbox.fs.upload_file_stream(io.BytesIO(bytes(MIB)), "up")
    assert sum((here.home / "up").read_bytes()) == 1
    assert sandbox.process.exec("printf aaaa").result == "aa`a"


def _until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it never came to be"
        time.sleep(0.01)
