"""``run -- COMMAND…``: the command has a sidecar while it runs, gets our signals, and we exit as it did."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

import httpx
import pytest

from emulators import E2BEmulator
from tests.parts import forked_sidecar
from tests.parts.forked_sidecar import Sidecar
from tests.parts.homes import PROJECT, empty_home, run_cli, write

pytestmark = pytest.mark.usefixtures("forked_programs")

OWN_TOKEN = "a-token-that-was-set-before-0123456789"


def _command(store: Path, *child: str, more: tuple[str, ...] = ()) -> list[str]:
    return ["run", f"--store=file:{store}", *more, "--", *child]


def _python(program: str) -> tuple[str, ...]:
    return sys.executable, "-c", textwrap.dedent(program)


def _environment(**more: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if not name.startswith("MEMORY_SIDECAR_")}, **more}


def _run(store: Path, *child: str, **more: str) -> subprocess.CompletedProcess[str]:
    return forked_sidecar.run(_command(store, *child), env=_environment(**more), text=True)


def _line(process: Sidecar) -> str:
    """The next line that the command prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_command_has_a_sidecar_that_ends_with_it_and_what_it_exports_is_kept(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"# remembered\n")
    program = f"""
        import os
        from sidecar.client import Client
        with Client() as client, client.conversation("conductor", sandbox="local:{home}") as memory:
            print(memory.restored.outcome, len(os.environ["MEMORY_SIDECAR_TOKEN"]))
        print(memory.exported.outcome, client.url)
    """
    ran = _run(tmp_path / "store", *_python(program))
    restored, length, exported, url = ran.stdout.split()
    assert (ran.returncode, restored, length, exported) == (0, "empty", "64", "committed"), ran.stderr
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/healthz", trust_env=False)
    assert list((tmp_path / "store/memories/conductor/snapshots").iterdir())


def test_a_command_has_the_screen_to_itself(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"# remembered\n")
    program = f"""
        from sidecar.client import Client
        print(Client().export("conductor", sandbox="local:{home}").outcome)
    """
    ran = _run(tmp_path / "store", *_python(program))
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "committed\n", "")
    told = _run(tmp_path / "store", *_python(program), MEMORY_SIDECAR_SERVICE_LOG="json")
    assert '"event": "serving"' in told.stderr
    trouble = _run(tmp_path / "store", *_python(program.replace(str(home), str(tmp_path / "none"))))
    (line, *_) = trouble.stderr.splitlines()
    assert "export failed" in line and not line.startswith("{")


def test_a_token_that_is_set_is_kept_and_the_exit_code_is_the_commands(tmp_path: Path) -> None:
    program = "import os; raise SystemExit(7 if os.environ['MEMORY_SIDECAR_TOKEN'] == os.environ['WANTED'] else 8)"
    tokens = f"{OWN_TOKEN},another-token-0123456789"
    ran = _run(tmp_path / "store", *_python(program), MEMORY_SIDECAR_TOKEN=tokens, WANTED=OWN_TOKEN)
    assert ran.returncode == 7
    assert OWN_TOKEN not in ran.stderr


def test_a_command_that_a_signal_killed_exits_with_128_and_its_number(tmp_path: Path) -> None:
    ran = _run(tmp_path / "store", *_python("import os; os.kill(os.getpid(), 9)"))
    assert ran.returncode == 128 + 9


def test_a_command_that_cannot_be_started_exits_127_and_says_why(tmp_path: Path) -> None:
    ran = _run(tmp_path / "store", str(tmp_path / "no-such-program"))
    assert ran.returncode == 127
    assert "no-such-program cannot be started: No such file or directory" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_command_is_not_started_when_the_service_cannot_be(tmp_path: Path) -> None:
    child = _python(f"open({str(tmp_path / 'ran')!r}, 'w')")
    command = _command(tmp_path / "store", *child, more=("--bind", "127.0.0.1"))
    ran = forked_sidecar.run(command, env=_environment(), text=True)
    assert ran.returncode == 2 and "address" in ran.stderr
    assert not (tmp_path / "ran").exists()


def test_signals_reach_the_command_which_may_still_use_the_sidecar(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"# remembered\n")
    program = f"""
        import signal
        from sidecar.client import Client
        wanted = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM]
        signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
        print("ready", flush=True)
        for _ in wanted:
            print(signal.sigwait(wanted).name, flush=True)
        print(Client().export("m", sandbox="local:{home}").outcome)
        raise SystemExit(5)
    """
    process = Sidecar(
        _command(tmp_path / "store", *_python(program)),
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # no terminal: nobody else passes a signal on
    )
    try:
        assert _line(process) == "ready"
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
            assert _line(process) == number.name
        said, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (said, process.returncode) == ("committed\n", 5)


ATTACHES = """
    from sidecar.client import Client
    Client().attach("m", sandbox="{sandbox}", checkpoint_every=3600, restore=False)
    print("attached", flush=True)
"""


def test_what_is_attached_is_saved_when_the_command_ends(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"# remembered\n")
    ran = _run(tmp_path / "store", *_python(ATTACHES.format(sandbox=f"local:{home}")))
    assert ran.returncode == 0, ran.stderr
    assert len(list((tmp_path / "store/memories/m/snapshots").glob("2*.json"))) == 1


def test_a_command_that_went_well_exits_1_when_something_could_not_be_saved(tmp_path: Path) -> None:
    with E2BEmulator() as e2b:
        box = e2b.create()
        write(box.home / "MEMORY.md", b"# remembered\n")
        program = ATTACHES.format(sandbox=f"e2b:{box.id}") + "    input()\n"
        process = Sidecar(
            _command(tmp_path / "store", *_python(program)),
            env=_environment(**e2b.environment(), MEMORY_SIDECAR_SERVICE_GRACE="3"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert _line(process) == "attached"
            e2b.latency = 60
            _, complaint = process.communicate("\n", timeout=30)
            e2b.latency = 0
        finally:
            process.kill()
    assert process.returncode == 1
    assert "not saved" in complaint and "Traceback" not in complaint


TALKS = """
    import sys, time
    from sidecar.client import Client
    with Client().conversation("m", sandbox="local:{home}", conversation="c1"):
        open("{home}/MEMORY.md", "a").write("said\\n")
        print("talking", flush=True)
        time.sleep(60)
"""
RESTORES = """
    from sidecar.client import Client
    Client().restore("m", sandbox="local:{home}", conversation="c1")
    open("{home}/MEMORY.md", "a").write("said\\n")
    print("talking", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("program", [TALKS, RESTORES + "    import time; time.sleep(60)\n"], ids=["client", "calls"])
def test_a_redeploy_within_a_conversation_loses_nothing(tmp_path: Path, program: str, number: signal.Signals) -> None:
    """SIGTERM to all of it, as a platform sends it; or the command alone is killed."""
    home = empty_home(tmp_path / "home")
    process = Sidecar(
        _command(tmp_path / "store", *_python(program.format(home=home))),
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert _line(process) == "talking"
        if number is signal.SIGTERM:
            process.terminate()
        else:
            os.kill(_child(process.pid), number)
        _, complaint = process.communicate(timeout=40)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    log = run_cli("log", "m", store=tmp_path / "store").document["snapshots"]
    assert [(row["standing"], row["conversation"]) for row in log] == [("head", "c1")]
    by_client = program is TALKS and number is signal.SIGTERM
    assert ("restored and never exported" in complaint) != by_client
    assert log[0]["label"] == ("" if by_client else "shutdown")


def _child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def test_what_was_restored_and_never_exported_is_told_exported_and_closed(tmp_path: Path) -> None:
    home = empty_home(tmp_path / "home")
    ran = _run(tmp_path / "store", *_python(RESTORES.format(home=home)))
    assert ran.returncode == 0 and "restored and never exported" in ran.stderr
    assert len(list((tmp_path / "store/memories/m/snapshots").glob("2*.json"))) == 1
    # The next run does not find it open: whoever had the conversation is gone.
    again = _run(
        tmp_path / "store", *_python("from sidecar.client import Client; print(Client().attachments()[0].state)")
    )
    assert (again.returncode, again.stdout) == (0, "idle\n")


@pytest.mark.parametrize("code", [0, 5])
def test_what_was_restored_and_never_saved_is_an_exit_code(tmp_path: Path, code: int) -> None:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"# remembered\n" * 10)
    assert run_cli("export", "m", "--sandbox", f"local:{home}", store=tmp_path / "store").code == 0
    program = f"""
        import os
        from sidecar.client import Client
        Client().restore("m", sandbox="local:{home}")
        os.unlink("{home}/MEMORY.md")
        raise SystemExit({code})
    """
    ran = _run(tmp_path / "store", *_python(program))
    assert ran.returncode == (code or 1)
    assert "not saved" in ran.stderr and "rejected (empty)" in ran.stderr
    saved = _run(tmp_path / "store", *_python(program.replace("os.unlink", "print")))
    assert saved.returncode == code, "and beside it one that is saved"


def test_what_another_left_unsaved_on_the_store_is_told_and_is_no_exit_code(tmp_path: Path) -> None:
    home, mine = empty_home(tmp_path / "home"), empty_home(tmp_path / "mine")
    write(home / "MEMORY.md", b"# remembered\n" * 10)
    assert run_cli("export", "m", "--sandbox", f"local:{home}", store=tmp_path / "store").code == 0
    leaves = f"""
        import os
        from sidecar.client import Client
        Client().restore("m", sandbox="local:{home}")
        os.unlink("{home}/MEMORY.md")
    """
    assert _run(tmp_path / "store", *_python(leaves)).returncode == 1
    talks = f"""
        import time
        from sidecar.client import Client
        with Client() as client, client.conversation("mine", sandbox="local:{mine}"):
            while not [one for one in client.attachments() if one.memory == "m" and one.owner]:
                time.sleep(0.1)
            open("{mine}/MEMORY.md", "a").write("said\\n")
    """
    ran = _run(tmp_path / "store", *_python(talks))
    assert ran.returncode == 0, ran.stderr
    assert "not saved, and not begun here" in ran.stderr and "rejected (empty)" in ran.stderr


def test_a_signal_after_the_command_ended_ends_the_saving_at_once(tmp_path: Path) -> None:
    with E2BEmulator() as e2b:
        box = e2b.create()
        write(box.home / "MEMORY.md", b"# remembered\n")
        process = Sidecar(
            _command(tmp_path / "store", *_python(ATTACHES.format(sandbox=f"e2b:{box.id}") + "    input()\n")),
            env=_environment(
                **e2b.environment(), MEMORY_SIDECAR_SERVICE_GRACE="300", MEMORY_SIDECAR_SERVICE_LOG="json"
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert _line(process) == "attached"
            e2b.latency = 60
            assert process.stdin is not None and process.stderr is not None
            process.stdin.write("\n")
            process.stdin.flush()
            while "stopping" not in (said := process.stderr.readline()):
                assert said, "it ended without being told"
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 130
            e2b.latency = 0
        finally:
            process.kill()


def test_ctrl_c_at_a_terminal_reaches_the_command_once_each_time(tmp_path: Path) -> None:
    program = """
        import signal, time
        seen = []
        def see(number, frame):
            seen.append(number)
            print("got", len(seen), flush=True)
        signal.signal(signal.SIGINT, see)
        print("ready", flush=True)
        while len(seen) < 3:
            time.sleep(0.01)
        time.sleep(0.5)  # one that came twice has come by then
        print("seen", len(seen), flush=True)
    """
    leader, follower = os.openpty()
    pid = os.fork()
    if not pid:  # a session of its own, with the pseudo-terminal as its terminal
        _login(follower)
        os.chdir(PROJECT)
        command = _command(tmp_path / "store", *_python(program))
        os.execve(sys.executable, [sys.executable, "-m", "sidecar", *command], _environment())
    os.close(follower)
    _until(leader, "ready")
    for number in range(1, 4):
        os.write(leader, b"\x03")
        _until(leader, f"got {number}")
    assert "seen 3" in _until(leader, "seen")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(leader)


def _login(terminal: int) -> None:
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for number in (0, 1, 2):
        os.dup2(terminal, number)


def _until(terminal: int, word: str) -> str:
    said, deadline = "", time.monotonic() + 30
    while word not in said or not said.endswith("\n"):
        assert time.monotonic() < deadline, said
        said += os.read(terminal, 4096).decode(errors="replace")
    return said
