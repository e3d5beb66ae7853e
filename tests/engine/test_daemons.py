"""What daemons in sandboxes do, and what an export or a restore makes of it: other users, crashes, folders that are gone or
full, commands that are too long, and what killed runs leave behind."""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from emulators import Fault
from sidecar.engine import Engine, ExportRequest, RestoreRequest, export, restore
from sidecar.errors import (
    BadReference,
    SandboxDenied,
    SandboxError,
    SandboxFull,
    SandboxUnreachable,
    SandboxUnwritable,
)
from sidecar.ports import Sandbox
from sidecar.program import leftovers
from sidecar.receipts import ExportReceipt, RestoreReceipt
from sidecar.wiring import open_sandbox
from tests.parts.homes import memory_tree, project_tree, write
from tests.parts.memories import Box, Provider, engine_on, grow_large, plain_home, provider_named, shell_tools

MEMORY = "m"
NOBODY = 65534
ME = pwd.getpwuid(os.geteuid()).pw_name
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root may work as others")
remote = pytest.mark.parametrize("provider", ["e2b", "daytona"], indirect=True)
at_e2b = pytest.mark.parametrize("provider", ["e2b"], indirect=True)
at_daytona = pytest.mark.parametrize("provider", ["daytona"], indirect=True)


@pytest.fixture
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    """An emulated provider whose folders any user may enter, as sandboxes' are."""
    folder = Path(f"/tmp/daemons-{os.getpid()}-{time.monotonic_ns()}")
    folder.mkdir(mode=0o711)
    folder.chmod(0o711)
    try:
        with provider_named(request.param, folder) as provider:
            for name, value in provider.server.environment().items():
                monkeypatch.setenv(name, value)
            yield provider
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return engine_on(f"file:{tmp_path / 'store'}")


async def _export(engine: Engine, sandbox: Sandbox, **asked: object) -> ExportReceipt:
    return await export(engine, sandbox, ExportRequest(memory=MEMORY, **asked))  # type: ignore[arg-type]


async def _restore(engine: Engine, sandbox: Sandbox, **asked: object) -> RestoreReceipt:
    return await restore(engine, sandbox, RestoreRequest(memory=MEMORY, **asked))  # type: ignore[arg-type]


def _same(home: Path, other: Path) -> None:
    assert project_tree(other) == project_tree(home)
    assert memory_tree(other / ".claude-mem") == memory_tree(home / ".claude-mem")


def _given(home: Path, uid: int) -> None:
    for folder, folders, files in os.walk(home):
        for name in (".", *folders, *files):
            os.lchown(os.path.join(folder, name), uid, uid)


def _left_behind(*boxes: Box) -> list[Path]:
    """Of what was uploaded, what is still there."""
    assert any(box.emulated.uploaded for box in boxes)
    return [path for box in boxes for path in box.emulated.uploaded if path.exists()]


# Whose home it is


@remote
async def test_receipts_name_the_home_and_the_user(engine: Engine, provider: Provider) -> None:
    box, other = provider.box(), provider.box()
    plain_home(box.home)
    sent = await _export(engine, box.open())
    came = await _restore(engine, other.open())
    again = await _export(engine, other.open())
    assert [(one.home, one.user) for one in (sent, came, again)] == [
        (str(box.home), ME),
        (str(other.home), ME),
        (str(other.home), ME),
    ]
    assert came.warnings == []


@at_e2b
async def test_a_restore_into_another_home_than_the_memory_came_from_warns(engine: Engine, provider: Provider) -> None:
    box, other = provider.box(), provider.box()
    plain_home(box.home)
    await _export(engine, box.open())
    other.emulated.crash()
    receipt = await _restore(engine, other.open())
    wrong = other.emulated.folder / "root"
    assert (receipt.outcome, receipt.home) == ("complete", str(wrong))
    assert any(str(box.home) in words and str(wrong) in words and "--user" in words for words in receipt.warnings)
    told = await _restore(engine, open_sandbox(other.ref, user="user"))
    assert (told.outcome, told.home, told.warnings) == ("complete", str(other.home), [])
    _same(box.home, other.home)


@at_e2b
async def test_an_export_that_finds_nothing_after_a_crash_says_which_home_it_looked_in(
    engine: Engine, provider: Provider
) -> None:
    box = provider.box()
    plain_home(box.home)
    first = await _export(engine, box.open())
    write(box.home / "MEMORY.md", b"# More\n")
    box.emulated.crash()
    box.emulated.work = box.emulated.folder / "empty"
    box.emulated.work.mkdir()
    receipt = await _export(engine, box.open())
    assert (receipt.outcome, receipt.head) == ("rejected", first.snapshot)
    assert receipt.home == str(box.emulated.folder / "root")
    assert any(str(box.home) in words and "--user" in words for words in receipt.warnings)
    told = await _export(engine, open_sandbox(box.ref, user="user"))
    assert (told.outcome, told.home) == ("committed", str(box.home))


async def test_a_folder_of_this_machine_is_no_other_home(engine: Engine, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for home in (one, two):
        home.mkdir()
    plain_home(one)
    assert (await _export(engine, open_sandbox(f"local:{one}", user=ME))).user == ME
    assert (await _restore(engine, open_sandbox(f"local:{two}"))).warnings == []


def test_a_folder_of_this_machine_is_worked_in_as_the_present_user_alone(tmp_path: Path) -> None:
    with pytest.raises(BadReference, match="works as the user it runs as"):
        open_sandbox(f"local:{tmp_path}", user="somebody-else")


@pytest.mark.parametrize("user", ["a b", "-x", "a;id", "$(id)", "x" * 40, "a\n"])
def test_what_can_be_no_name_of_a_user_is_never_asked_for(user: str) -> None:
    with pytest.raises(BadReference, match="no name of a user"):
        open_sandbox("daytona:x", user=user)


@root_only
@pytest.mark.parametrize("large", [False, True])
@remote
async def test_a_user_that_is_named_is_worked_as(engine: Engine, provider: Provider, large: bool) -> None:
    """Also where that user's files are for nobody else, and where what is exported is too large for a command's output."""
    more: dict[str, Any] = {"sudo": ["agent"]} if provider.name == "daytona" else {}
    box, other = provider.box(uids={"agent": NOBODY}, **more), provider.box(uids={"agent": NOBODY}, **more)
    home, there = (one.emulated.users["agent"].home for one in (box, other))
    plain_home(home)
    if large:
        grow_large(home)
    _given(home, NOBODY)
    write(box.home / "MEMORY.md", b"somebody else's")
    for one in (home, there):
        one.chmod(0o700)
    sent = await _export(engine, open_sandbox(box.ref, user="agent"))
    came = await _restore(engine, open_sandbox(other.ref, user="agent"))
    assert (sent.outcome, sent.home, sent.user) == ("committed", str(home), "nobody")
    assert (came.outcome, came.home, came.user, came.warnings) == ("complete", str(there), "nobody", [])
    _same(home, there)
    assert {path.lstat().st_uid for path in there.rglob("*")} == {NOBODY}
    assert list(other.home.iterdir()) == []
    assert _left_behind(box, other) == []


@at_daytona
async def test_links_reach_a_program_that_runs_as_another(provider: Provider) -> None:
    box = provider.box(uids={"agent": None}, sudo=["agent"])
    sandbox = open_sandbox(box.ref, user="agent")
    done = await sandbox.run('echo "$A $USER"', timeout=10, output_limit=1000, environment={"A": "kept"})
    assert done.output.decode() == "kept agent\n"


@at_daytona
async def test_a_sudo_that_passes_no_variables_on_is_enough(engine: Engine, provider: Provider) -> None:
    box = provider.box(uids={"agent": None}, sudo=["agent"])
    sudo = box.emulated.folder / "sbin/sudo"
    first, rest = sudo.read_text().split("\n", 1)
    refuse = "case \"$*\" in *--preserve-env=*) echo 'sudo: sorry, you are not allowed to do that' >&2; exit 1;; esac"
    sudo.write_text(f"{first}\n{refuse}\n{rest}")
    plain_home(box.emulated.users["agent"].home)
    for trips in ({"command": 3, "upload": 1}, {"command": 1}):
        sent = await _export(engine, open_sandbox(box.ref, user="agent"))
        assert sent.outcome in ("committed", "unchanged")
        assert {kind: count for kind, count in sent.trips.items() if kind in ("command", "upload")} == trips
    assert _left_behind(box) == []


@at_daytona
async def test_a_user_that_sudo_does_not_let_us_be_is_refused(engine: Engine, provider: Provider) -> None:
    box = provider.box(uids={"agent": None})
    with pytest.raises(SandboxDenied, match=r"'agent'.*a password is required") as refused:
        await _export(engine, open_sandbox(box.ref, user="agent"))
    assert "--user" in refused.value.hint and "NOPASSWD" in refused.value.hint


@at_e2b
async def test_a_user_that_is_not_there_is_said_to_be_missing(engine: Engine, provider: Provider) -> None:
    box = provider.box()
    with pytest.raises(SandboxDenied, match="no user 'alice'") as refused:
        await _export(engine, open_sandbox(box.ref, user="alice"))
    assert "API key" not in str(refused.value)


@at_e2b
async def test_a_token_that_the_daemon_refuses_is_no_wrong_api_key(engine: Engine, provider: Provider) -> None:
    box = provider.box()
    sandbox = open_sandbox(box.ref)
    await sandbox.connect()
    box.emulated.token = "another"
    with pytest.raises(SandboxDenied, match="access token") as refused:
        await _export(engine, sandbox)
    assert "did not accept the API key" not in str(refused.value)


# What is done is said, whatever else goes wrong


@root_only
@at_e2b
async def test_a_restore_whose_upload_cannot_be_removed_there_is_complete(engine: Engine, provider: Provider) -> None:
    """The upload is root's, in a folder where only its owner removes a file, and the command is another user's."""
    box, other = provider.box(uids={"user": NOBODY}), provider.box(uids={"user": NOBODY, "root": 0})
    _given(plain_home(box.home), NOBODY)
    sent = await _export(engine, box.open())

    class AsRoot:
        """As a daemon that was started again between the two: the upload is root's."""

        def __init__(self, sandbox: Sandbox) -> None:
            self._sandbox, self._root = sandbox, open_sandbox(sandbox.ref, user="root")

        def __getattr__(self, name: str) -> object:
            return getattr(self._root if name in ("upload", "remove") else self._sandbox, name)

    receipt = await _restore(engine, AsRoot(open_sandbox(other.ref)))  # type: ignore[arg-type]
    assert (receipt.outcome, receipt.files, receipt.warnings) == ("complete", sent.files, [])
    _same(box.home, other.home)
    assert _left_behind(other) == []


# Folders that are gone, full or not to be written


@remote
async def test_a_working_folder_that_was_removed_is_in_nobodys_way(engine: Engine, provider: Provider) -> None:
    box, other = provider.box(work="project"), provider.box(work="project")
    plain_home(box.home)
    for one in (box, other):
        one.emulated.work.rmdir()
    provider.clear()
    sent = await _export(engine, box.open())
    assert sent.outcome == "committed" and sent.trips == provider.asked()
    assert (await _restore(engine, other.open())).outcome == "complete"
    _same(box.home, other.home)


def test_a_program_that_starts_in_a_folder_that_was_removed_takes_the_home_for_it(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    script = "import os; os.chdir('gone'); os.rmdir('../gone')\nfrom sidecar.program.capture.roots import find_working_folder"
    script += "\nprint(find_working_folder('/home/agent'))"
    here = {**os.environ, "PYTHONPATH": str(Path(leftovers.__file__).parents[2])}
    ran = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=here, capture_output=True, text=True)
    assert ran.stdout == "/home/agent\n", ran.stderr


@at_daytona
async def test_a_working_folder_that_was_removed_is_no_finding(provider: Provider) -> None:
    box = provider.box(work="project")
    box.emulated.work.rmdir()
    done = await open_sandbox(box.ref).run("pwd -P", timeout=10, output_limit=1000)
    assert done.output.decode() == f"{box.home.resolve()}\n"


@remote
async def test_a_tmp_that_cannot_be_written_is_no_fault_of_the_network(engine: Engine, provider: Provider) -> None:
    box, other = provider.box(), provider.box()
    plain_home(box.home)
    await _export(engine, box.open())
    other.emulated.read_only = (Path("/tmp"),)
    with pytest.raises(SandboxUnwritable, match="read-only file system") as refused:
        await _restore(engine, other.open())
    assert refused.value.code == "sandbox-unwritable" and "/tmp" in refused.value.hint
    assert "network" not in refused.value.hint


def _with_tmp(box: Path, options: str) -> list[str]:
    """The beginning of a command that has a /tmp of its own, in which only the sandbox's folder is as it was."""
    script = f"""set -e
mount --bind {box} /mnt; mount -t tmpfs -o size=64k none /tmp; mkdir -p {box}; mount --bind /mnt {box}; {options}
exec "$@" """
    return ["unshare", "--mount", "sh", "-c", script, "sh"]


@pytest.fixture
def own_tmp() -> Callable[[object, str], None]:
    """Call it with a sandbox and what is to be done to its /tmp before each command."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no mounts of one's own here")

    def give(emulated: object, options: str) -> None:
        spawn = emulated.spawn  # type: ignore[attr-defined]
        prefix = _with_tmp(emulated.folder, options)  # type: ignore[attr-defined]
        emulated.spawn = lambda argv, **more: spawn([*prefix, *argv], **more)  # type: ignore[attr-defined]

    return give


@root_only
@pytest.mark.parametrize("options", ["mount -o remount,ro /tmp", "head -c 60k /dev/zero > /tmp/full || :"])
@at_daytona
async def test_an_export_needs_no_room_in_tmp_where_the_home_has_some(
    engine: Engine, provider: Provider, own_tmp: Callable[[object, str], None], options: str
) -> None:
    box = provider.box()
    plain_home(box.home)
    own_tmp(box.emulated, options)
    receipt = await _export(engine, box.open())
    assert receipt.outcome == "committed"
    assert [path for path in box.home.iterdir() if "memory-sidecar" in path.name] == []


@root_only
@at_daytona
async def test_no_room_anywhere_is_said_to_be_a_full_disk(
    provider: Provider, own_tmp: Callable[[object, str], None]
) -> None:
    box = provider.box()
    own_tmp(box.emulated, f"mount -o remount,ro /tmp; mount -t tmpfs -o size=64k none {box.home}")
    with pytest.raises(SandboxFull, match="no room"):
        await open_sandbox(box.ref).run("echo", timeout=10, output_limit=1000)


@root_only
@at_e2b
async def test_a_home_that_cannot_be_written_is_said(engine: Engine, provider: Provider) -> None:
    box = provider.box(uids={"user": NOBODY})
    _given(plain_home(box.home), NOBODY)
    os.chown(box.home, 0, 0)
    cache = Path(f"/tmp/memory-sidecar-{NOBODY}")
    try:
        receipt = await _export(engine, box.open())
        assert receipt.outcome == "committed"
        assert any(str(cache) in words and "sent again" in words for words in receipt.warnings)
        assert (await _export(engine, box.open())).outcome == "unchanged"
    finally:
        shutil.rmtree(cache, ignore_errors=True)


# Commands that are too long


@remote
async def test_any_number_of_projects_can_be_exported(engine: Engine, provider: Provider) -> None:
    box = provider.box()
    projects = [f"~/work/{number} {os.urandom(32).hex()}/service" for number in range(1500)]
    plain_home(box.home)
    for project in (projects[0], projects[-1]):
        write(box.home / project[2:] / "MEMORY.md", project.encode())
    provider.clear()
    sent = await _export(engine, box.open(), projects=tuple(projects))
    assert (sent.outcome, sent.trips) == ("committed", provider.asked())
    assert sent.trips["command"] == 2 and sent.round_trips == sum(sent.trips.values())
    assert not box.emulated.uploaded


@remote
async def test_a_script_that_is_too_long_for_a_command_goes_by_a_file(
    engine: Engine, provider: Provider, tmp_path: Path
) -> None:
    box = provider.box(tools=shell_tools(tmp_path / "tools"))
    projects = [f"~/work/{number} {os.urandom(32).hex()}/service" for number in range(1500)]
    plain_home(box.home)
    write(box.home / projects[-1][2:] / "MEMORY.md", b"last")
    provider.clear()
    sent = await _export(engine, box.open(), projects=tuple(projects))
    assert (sent.outcome, sent.trips) == ("committed", provider.asked())
    assert sent.trips["upload"] == 1, "the script; the request is in the environment"
    assert _left_behind(box) == []


@at_e2b
async def test_a_command_that_is_refused_is_told_by_its_reason(provider: Provider) -> None:
    box = provider.box()
    sandbox = open_sandbox(box.ref)
    with pytest.raises(SandboxError) as refused:
        await sandbox.run("true", timeout=10, output_limit=1000, environment={"A": "x" * (200 << 10)})
    assert "argument list too long" in refused.value.message and len(refused.value.message) < 500


@at_daytona
async def test_a_command_that_a_proxy_sends_again_does_no_harm(engine: Engine, provider: Provider) -> None:
    box, other = provider.box(), provider.box()
    plain_home(box.home)
    provider.server.faults.add(Fault("command", "replay"))
    sent = await _export(engine, box.open())
    assert sent.outcome == "committed"
    provider.server.faults.add(Fault("command", "replay"))
    came = await _restore(engine, other.open())
    assert (came.outcome, came.files) == ("complete", sent.files)
    _same(box.home, other.home)
    assert _left_behind(other) == []


@at_daytona
async def test_a_daemon_that_is_down_is_not_reached_and_found_again(engine: Engine, provider: Provider) -> None:
    box = provider.box()
    plain_home(box.home)
    box.emulated.daemon_down = True
    with pytest.raises(SandboxUnreachable):
        await open_sandbox(box.ref).run("true", timeout=10, output_limit=1000)
    box.emulated.daemon_down = False
    assert (await _export(engine, box.open())).outcome == "committed"


# What killed runs leave


def _left(name: str, age: float) -> Path:
    path = Path(f"/tmp/memory-sidecar-{os.urandom(8).hex()}.{name}")
    if name == "run":
        path.mkdir(mode=0o700)
    else:
        path.write_bytes(b"x" * 1000)
    os.utime(path, (time.time() - age,) * 2)
    return path


@remote
async def test_what_a_daemon_that_was_killed_left_is_removed_by_the_next_good_restore(
    engine: Engine, provider: Provider
) -> None:
    box, other = provider.box(), provider.box()
    plain_home(box.home)
    await _export(engine, box.open())
    provider.server.faults.add(Fault("command", "crash", times=None))
    provider.server.faults.add(Fault("filesystem", "status", status=502, times=None))
    with pytest.raises(SandboxError):
        await _restore(engine, open_sandbox(other.ref))
    provider.server.faults.clear()
    left = [*_left_behind(other), *(path for path in map(Path, provider.named) if path.exists())]
    assert left
    for path in left:  # later
        os.utime(path, (time.time() - 60,) * 2)
    user = "user" if provider.name == "e2b" else ""
    assert (await _restore(engine, open_sandbox(other.ref, user=user))).outcome == "complete"
    assert [path for path in left if path.exists()] == []


async def test_nothing_goes_that_a_live_run_uses(engine: Engine, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    plain_home(home)
    running = subprocess.Popen(["sleep", "60"])
    gone = [_left(name, 60) for name in ("bundle", "command", "run")]
    fresh, held, spared, alive, done = (_left(name, 60) for name in ("bundle", "bundle", "bundle", "run", "run"))
    try:
        os.utime(fresh)
        lock = leftovers.lock_upload(str(held))
        leftovers.keep_uploads([str(spared)])
        (alive / "pid").write_text(f"{running.pid}\n")
        (done / "done").touch()
        for path in (alive, done):
            os.utime(path, (time.time() - 60,) * 2)
        assert (await _export(engine, open_sandbox(f"local:{home}"))).outcome == "committed"
        assert [path for path in gone if path.exists()] == []
        assert [path for path in (fresh, held, spared, alive, done) if not path.exists()] == []
        assert lock is not None
        with held.open() as file, pytest.raises(BlockingIOError) as locked:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert locked.value.errno == errno.EWOULDBLOCK
        os.close(lock)
    finally:
        running.kill()
        running.wait()
        for path in (*gone, fresh, held, spared, alive, done):
            leftovers.remove(str(path))
