"""The Python client against a real service, also through a network that cuts, stalls and lies."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import subprocess
import sys
import tarfile
import textwrap
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from sidecar import client as public
from sidecar.client import (
    AsyncClient,
    Client,
    NotRestored,
    NotSaved,
    Retries,
    ServiceUnreachable,
    SidecarProblem,
    UnexpectedAnswer,
)
from sidecar.client.wire import convert
from sidecar.errors import BadConfig, BadMemoryId, UsageError
from sidecar.models.requests import ExportBody, RestoreBody
from tests.parts.homes import PROJECT, claude_mem_home, empty_home, observe, titles, write
from tests.parts.s3_servers import free_port

pytestmark = pytest.mark.usefixtures("forked_programs")

TOKEN = "a-token-of-the-client-tests-0123456789"
QUICK = Retries(attempts=5, seconds=20, first_wait=0.02, longest_wait=0.1)
Make = Callable[..., Any]

both_share = pytest.mark.parametrize("make", [Client], indirect=True)
"""For what both kinds of client have from the same code: one of them is enough."""


class Flaky:
    """A proxy on loopback. Each connection carries one request and meets the next trouble in line; then none.

    refuse: hang up at once · lost: the request arrives, the answer does not · half: half of the answer arrives ·
    an HTTP head such as "503 …": answered here, without asking the service.
    """

    def __init__(self, port: int) -> None:
        self._service = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.troubles: list[str] = []
        self.requests: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def keys(self) -> set[str]:
        lines = [line for request in self.requests for line in request.split("\r\n")]
        return {line.partition(": ")[2] for line in lines if line.lower().startswith("idempotency-key:")}

    def cut(self) -> None:
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                threading.Thread(target=self._carry, args=[connection], daemon=True).start()

    def _carry(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            trouble = self.troubles.pop(0) if self.troubles else ""
            if trouble == "refuse":
                return
            head, body = _request(connection)
            self.requests.append(head)
            if trouble[:3].isdigit():
                connection.sendall(f"HTTP/1.1 {trouble}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode())
                return
            with socket.create_connection(("127.0.0.1", self._service)) as service:
                service.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode("latin-1") + body)
                answer = b""
                while chunk := service.recv(65536):
                    answer += chunk
                    if not trouble:
                        connection.sendall(chunk)
                if trouble == "half":
                    connection.sendall(answer[: len(answer) - 20])


def _request(connection: socket.socket) -> tuple[str, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    lines = [line for line in head.decode("latin-1").split("\r\n") if not line.lower().startswith("connection:")]
    return "\r\n".join(lines), body


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service") / "store"


@pytest.fixture(scope="module")
def url(store: Path) -> Iterator[str]:
    """A running service that asks for a token."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sidecar", "serve", f"--store=file:{store}", f"--bind=127.0.0.1:{port}"]
    log = store.parent / "log"
    with log.open("wb") as stderr:
        service = subprocess.Popen(
            command, cwd=PROJECT, stderr=stderr, env={**os.environ, "MEMORY_SIDECAR_TOKEN": TOKEN}
        )
    try:
        deadline = time.monotonic() + 30
        while True:
            with suppress(httpx.TransportError):
                httpx.get(f"{address}/healthz", trust_env=False).raise_for_status()
                break
            assert service.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield address
        assert TOKEN not in log.read_text()
    finally:
        service.terminate()
        assert service.wait(40) in (0, 1), "1 where a test let a conversation lose its sandbox, or diverge"


@pytest.fixture
def flaky(url: str) -> Iterator[Flaky]:
    proxy = Flaky(int(url.rpartition(":")[2]))
    yield proxy
    proxy.close()


@pytest.fixture(params=[Client, AsyncClient])
async def make(request: pytest.FixtureRequest, url: str) -> AsyncIterator[Make]:
    """Call it for a client, of either kind; with an address for another than the service's own."""
    made = []

    def one(address: str = url, **settings: Any) -> Any:
        made.append(request.param(address, **{"token": TOKEN, "retries": QUICK, **settings}))
        return made[-1]

    yield one
    for client in made:
        await got(client.close())


@pytest.fixture
def client(make: Make) -> Any:
    return make()


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name[:100]}/of the tests"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"# remembered\n" * 10)
    return home


async def got(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


@asynccontextmanager
async def during(conversation: Any) -> AsyncIterator[Any]:
    if hasattr(conversation, "__aenter__"):
        async with conversation as memory:
            yield memory
    else:
        with conversation as memory:
            yield memory


async def following(events: Any) -> Any:
    return await anext(events) if hasattr(events, "__anext__") else next(events)


# Conversations


async def test_a_conversation_finds_what_the_one_before_remembered(client: Any, memory: str, tmp_path: Path) -> None:
    first, second = claude_mem_home(tmp_path / "first"), empty_home(tmp_path / "second")
    async with during(client.conversation(memory, sandbox=f"local:{first}", conversation="c1")) as began:
        assert began.restored.outcome == "empty"
        observe(first, 3, "said today")
    assert began.exported.outcome == "committed" and began.exported.conversation == "c1"

    async with during(client.conversation(memory, sandbox=f"local:{second}")) as went_on:
        assert went_on.restored.outcome == "complete"
        assert went_on.restored.snapshot == began.exported.snapshot
        assert titles(second) == titles(first)
    assert went_on.exported.outcome == "unchanged"


async def test_a_conversation_that_fails_is_saved_and_its_own_exception_raised(
    client: Any, memory: str, home: Path
) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        async with during(client.conversation(memory, sandbox=f"local:{home}")) as talk:
            write(home / "memory/today.md", b"before it broke")
            raise ZeroDivisionError
    assert talk.exported.outcome == "committed"
    assert not hasattr(raised.value, "__notes__")
    assert (await got(client.memory(memory))).head == talk.exported.snapshot


async def test_a_failed_export_is_a_note_on_the_exception_of_a_failed_conversation(
    client: Any, memory: str, home: Path
) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        async with during(client.conversation(memory, sandbox=f"local:{home}")) as talk:
            home.rename(home.with_name("gone"))
            raise ZeroDivisionError
    assert talk.exported is None
    assert "not saved" in raised.value.__notes__[0]


@both_share
async def test_a_failed_export_is_raised_when_the_conversation_went_well(client: Any, memory: str, home: Path) -> None:
    with pytest.raises(SidecarProblem):
        async with during(client.conversation(memory, sandbox=f"local:{home}")):
            home.rename(home.with_name("gone"))


@both_share
async def test_an_export_beside_the_head_raises_not_saved_with_its_receipt(
    client: Any, memory: str, home: Path, tmp_path: Path
) -> None:
    other = empty_home(tmp_path / "other")
    await got(client.export(memory, sandbox=f"local:{home}"))
    with pytest.raises(NotSaved) as raised:
        async with during(client.conversation(memory, sandbox=f"local:{other}")):
            write(home / "MEMORY.md", b"somebody else went on")
            moved = await got(client.export(memory, sandbox=f"local:{home}"))
            write(other / "MEMORY.md", b"and so did we")
    assert raised.value.receipt.outcome == "diverged"
    assert (raised.value.receipt.snapshot or "none") in raised.value.message
    assert (await got(client.memory(memory))).head == moved.snapshot


@both_share
async def test_a_rejected_export_is_a_note_when_the_conversation_failed_too(
    client: Any, memory: str, home: Path
) -> None:
    await got(client.export(memory, sandbox=f"local:{home}"))
    with pytest.raises(ZeroDivisionError) as raised:
        async with during(client.conversation(memory, sandbox=f"local:{home}")) as talk:
            (home / "MEMORY.md").unlink()
            raise ZeroDivisionError
    assert talk.exported.outcome == "rejected"
    assert "not-saved" in raised.value.__notes__[0]


@both_share
async def test_no_conversation_begins_without_its_memory_unless_that_is_allowed(
    client: Any, memory: str, home: Path, tmp_path: Path
) -> None:
    write(home / "memory/today.md", b"a day")
    await got(client.export(memory, sandbox=f"local:{home}"))
    other = empty_home(tmp_path / "other")
    write(other / "memory", b"a file in the way of the folder")
    with pytest.raises(NotRestored) as raised:
        async with during(client.conversation(memory, sandbox=f"local:{other}")):
            pytest.fail("the conversation began")
    receipt = raised.value.receipt
    assert receipt.reason and (receipt.outcome, receipt.reason.code) == ("incomplete", "in-the-way")
    assert (await got(client.memory(memory))).snapshots == 1, "and nothing was exported"

    talk = client.conversation(memory, sandbox=f"local:{other}", require_restore=False)
    with pytest.raises(NotSaved):
        async with during(talk):
            assert talk.restored.outcome == "incomplete"
            write(other / "MEMORY.md", b"it began with nothing")
    assert talk.exported.outcome == "diverged"


@pytest.mark.parametrize("how", ["task", "scope"])
async def test_a_cancelled_conversation_is_saved(how: str, url: str, home: Path) -> None:
    memory = f"cancelled-{how}"
    async with AsyncClient(url, token=TOKEN) as client:
        talk = client.conversation(memory, sandbox=f"local:{home}")
        began = asyncio.Event()

        async def conversation() -> None:
            async with talk:
                began.set()
                await asyncio.sleep(60)

        if how == "scope":
            async with anyio.create_task_group() as group:
                group.start_soon(conversation)
                await began.wait()
                group.cancel_scope.cancel()
        else:
            task = asyncio.create_task(conversation())
            await began.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert talk.exported is not None and talk.exported.outcome == "committed"
        assert (await client.memory(memory)).snapshots == 1


async def test_a_conversation_is_looked_after_until_its_export(client: Any, memory: str, home: Path) -> None:
    box = f"local:{home}"
    async with during(client.conversation(memory, sandbox=box, conversation="c1", checkpoint_every=1)) as talk:
        row = (await got(client.attachment(memory))).attachment
        assert (row.sandbox, row.state, row.conversation, row.checkpoint_every) == (box, "open", "c1", 1)
        for _ in range(200):
            if (row := (await got(client.attachment(memory))).attachment).saved:
                break
            await asyncio.sleep(0.1)
        assert (await got(client.snapshots(memory)))[0].label == "checkpoint"
        assert not talk.saved, "it is not exported yet"
    assert talk.saved and talk.exported.snapshot == row.snapshot
    assert (await got(client.attachment(memory))).attachment.state == "idle"


@both_share
async def test_a_restore_may_open_no_conversation(client: Any, memory: str, home: Path) -> None:
    await got(client.restore(memory, sandbox=f"local:{home}", attach=False))
    with pytest.raises(SidecarProblem) as raised:
        await got(client.attachment(memory))
    assert raised.value.code == "not-attached"


@both_share
async def test_what_is_not_saved_is_in_the_log_and_on_the_conversation(
    client: Any, memory: str, home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = empty_home(tmp_path / "other")
    await got(client.export(memory, sandbox=f"local:{home}"))
    talk = client.conversation(memory, sandbox=f"local:{other}")
    async with during(talk):  # nothing new is written in it, so it raises nothing
        write(home / "MEMORY.md", b"somebody else went on")
        await got(client.export(memory, sandbox=f"local:{home}"))
    assert talk.exported.outcome == "unchanged" and not talk.saved
    assert "has moved on" in caplog.text
    caplog.clear()
    with suppress(NotSaved):
        async with during(client.conversation(memory, sandbox=f"local:{home}")) as gone_on:
            (home / "MEMORY.md").unlink()
    assert gone_on.exported.outcome == "rejected" and not gone_on.saved
    assert "not saved" in caplog.text and caplog.records[-1].levelname == "WARNING"


# Told to end

SYNC = """
    import os, signal, sys, threading, time
    from sidecar.client import Client
    client = Client("{url}", token="{token}")
    def talk(memory):
        with client.conversation(memory, sandbox="local:{home}"):
            open("{home}/MEMORY.md", "a").write("said\\n")
            print("talking", flush=True)
            time.sleep(60)
            print("it went on", flush=True)
"""
ASYNC = """
    import asyncio, os, signal, sys, time
    from sidecar.client import AsyncClient
    async def talk(memory, home, client):
        async with client.conversation(memory, sandbox="local:" + home):
            open(home + "/MEMORY.md", "a").write("said\\n")
            print("talking", flush=True)
            await asyncio.sleep(60)
            print("it went on", flush=True)
    async def main(*homes):
        async with AsyncClient("{url}", token="{token}") as client:
            await asyncio.gather(*(talk("{memory}" + str(n), home, client) for n, home in enumerate(homes)))
"""


def started(program: str, **names: object) -> subprocess.Popen[str]:
    text = textwrap.dedent(program.format(token=TOKEN, **names))
    return subprocess.Popen(
        [sys.executable, "-c", text], cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def told_to_end(
    process: subprocess.Popen[str], talks: int = 1, first: Callable[[], object] = lambda: None
) -> tuple[int, str, str]:
    """Its exit code and what it said after SIGTERM, which it gets once so many conversations have begun."""
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(talks)] == ["talking\n"] * talks
        first()
        process.terminate()
        printed, complaint = process.communicate(timeout=40)
    finally:
        process.kill()
    return process.returncode, printed, complaint


def test_a_process_that_is_told_to_end_saves_its_conversation_first(url: str, home: Path) -> None:
    process = started(SYNC + '    talk("told-sync")\n', url=url, home=home)
    code, printed, complaint = told_to_end(process)
    assert (code, printed) == (143, "") and all("a first start" in line for line in complaint.splitlines()), complaint
    with Client(url, token=TOKEN) as client:
        assert [one.standing for one in client.snapshots("told-sync")] == ["head"]
        assert client.attachment("told-sync").attachment.state == "idle"


def test_a_process_with_several_conversations_saves_them_all(url: str, tmp_path: Path) -> None:
    homes = [empty_home(tmp_path / f"home{number}") for number in range(3)]
    listed = ", ".join(repr(str(home)) for home in homes)
    process = started(ASYNC + f"    asyncio.run(main({listed}))\n", url=url, memory="told-async-")
    code, printed, complaint = told_to_end(process, 3)
    assert (code, printed) == (143, ""), complaint
    with Client(url, token=TOKEN) as client:
        for number in range(3):
            assert [one.standing for one in client.snapshots(f"told-async-{number}")] == ["head"]
            assert client.attachment(f"told-async-{number}").attachment.state == "idle"


def test_conversations_within_one_another_are_both_saved(url: str, home: Path, tmp_path: Path) -> None:
    other = empty_home(tmp_path / "other")
    write(other / "MEMORY.md", b"# remembered\n" * 10)
    inner = """
    with client.conversation("told-outer", sandbox="local:{other}"):
        talk("told-inner")
"""
    code, printed, complaint = told_to_end(started(SYNC + inner, url=url, home=home, other=other))
    # Nothing but that these are first starts, perhaps the very first in this store.
    known = ("a first start", "holds no memory at all", "A new store was begun")
    assert (code, printed) == (143, ""), complaint
    assert [line for line in complaint.splitlines() if not any(words in line for words in known)] == []
    with Client(url, token=TOKEN) as client:
        for memory in ("told-outer", "told-inner"):
            assert [one.standing for one in client.snapshots(memory)] == ["head"]


def test_one_that_cannot_be_saved_is_said_on_the_way_out(url: str, home: Path) -> None:
    process = started(SYNC + '    talk("told-gone")\n', url=url, home=home)
    code, _, complaint = told_to_end(process, first=lambda: home.rename(home.with_name("gone")))
    assert code == 143 and "not saved" in complaint


def test_a_second_signal_ends_it_at_once(url: str, home: Path) -> None:
    """The export is held up by a service that does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        program = (
            SYNC
            + """
    def held_up(**request):
        print("exporting", flush=True)
        return Client("http://127.0.0.1:{port}", token="{token}")._http.stream(**request)
    with client.conversation("told-twice", sandbox="local:{home}"):
        client._http.stream = held_up
        print("talking", flush=True)
        time.sleep(60)
"""
        )
        process = started(program, url=url, home=home, port=silent.getsockname()[1])
        try:
            assert process.stdout is not None and process.stdout.readline() == "talking\n"
            process.terminate()
            assert process.stdout.readline() == "exporting\n"
            process.terminate()
            assert process.wait(20) == -15
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arranged", "code"),
    [
        ("signal.signal(signal.SIGTERM, lambda *_: os._exit(7))", 7),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN); threading.Timer(2, os._exit, [8]).start()", 8),
    ],
    ids=["a handler", "ignored"],
)
def test_whoever_arranged_something_else_for_the_signal_gets_that(
    url: str, home: Path, arranged: str, code: int
) -> None:
    process = started(SYNC + f"    {arranged}\n    talk('told-otherwise')\n", url=url, home=home)
    assert told_to_end(process)[0] == code


def test_in_another_thread_and_after_a_conversation_the_signal_is_as_it_was(url: str, home: Path) -> None:
    program = (
        SYNC
        + """
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with client.conversation("told-first", sandbox="local:{home}"):
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    threading.Thread(target=talk, args=["told-thread"], daemon=True).start()
    time.sleep(60)
"""
    )
    assert told_to_end(started(program, url=url, home=home))[0] == -15


def test_after_a_conversation_in_an_event_loop_too(url: str, home: Path) -> None:
    program = (
        ASYNC
        + f"""
    async def one():
        async with AsyncClient("{{url}}", token="{{token}}") as client:
            async with client.conversation("{{memory}}", sandbox="local:{home}"):
                assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        print("talking", flush=True)
        await asyncio.sleep(60)
    asyncio.run(one())
"""
    )
    assert told_to_end(started(program, url=url, memory="told-loop"))[0] == -15


# Retries


@pytest.mark.parametrize(
    "troubles",
    [
        ["refuse", "503 Service Unavailable\r\nRetry-After: 0", "502 Bad Gateway"],
        ["lost"],
        ["504 Gateway Timeout", "half", "lost", "524 Timed out"],
    ],
    ids=["never arrived", "answer lost", "a bad day"],
)
async def test_an_export_that_is_retried_makes_one_snapshot(
    troubles: list[str], make: Make, flaky: Flaky, memory: str, home: Path
) -> None:
    client = make(flaky.url)
    flaky.troubles = list(troubles)
    receipt = await got(client.export(memory, sandbox=f"local:{home}"))
    assert not flaky.troubles, "every trouble was met"
    assert receipt.outcome == "committed"
    assert [one.snapshot for one in await got(client.snapshots(memory))] == [receipt.snapshot]
    assert len(flaky.keys()) == 1


@both_share
async def test_a_restore_whose_answer_was_lost_tells_what_came_of_it(
    make: Make, flaky: Flaky, memory: str, home: Path, tmp_path: Path
) -> None:
    client, other = make(flaky.url), empty_home(tmp_path / "other")
    kept = await got(client.export(memory, sandbox=f"local:{home}"))
    flaky.requests.clear()
    flaky.troubles = ["lost", "half"]
    receipt = await got(client.restore(memory, sandbox=f"local:{other}"))
    assert (receipt.outcome, receipt.snapshot) == ("complete", kept.snapshot)
    assert (other / "MEMORY.md").read_bytes() == (home / "MEMORY.md").read_bytes()
    assert len(flaky.keys()) == 1


@both_share
async def test_two_exports_are_two_calls_unless_they_share_a_key(client: Any, memory: str, home: Path) -> None:
    first = await got(client.export(memory, sandbox=f"local:{home}", idempotency_key="k"))
    write(home / "MEMORY.md", b"changed meanwhile, and a bit longer than that")
    again = await got(client.export(memory, sandbox=f"local:{home}", idempotency_key="k"))
    other = await got(client.export(memory, sandbox=f"local:{home}"))
    assert first.snapshot == again.snapshot != other.snapshot


@both_share
async def test_the_time_a_service_asks_for_is_waited(make: Make, flaky: Flaky) -> None:
    flaky.troubles = ["429 Too Many Requests\r\nRetry-After: 1"]
    began = time.monotonic()
    await got(make(flaky.url).memories())
    assert 1 <= time.monotonic() - began < 5


@both_share
async def test_a_client_gives_up_after_its_attempts(make: Make, flaky: Flaky) -> None:
    flaky.troubles = ["lost"] * 10
    with pytest.raises(ServiceUnreachable) as raised:
        await got(make(flaky.url).memories())
    assert len(flaky.requests) == QUICK.attempts
    assert raised.value.retryable and flaky.url in raised.value.message


async def test_what_never_answered_on_this_machine_is_given_up_soon_and_what_did_is_waited_for(make: Make) -> None:
    port = free_port()
    stubborn = Retries(attempts=10**6, seconds=10**6, first_wait=0.01, longest_wait=0.02, unmet_seconds=0.1)
    client = make(f"http://127.0.0.1:{port}", retries=stubborn)
    with pytest.raises(ServiceUnreachable, match="Check that the service runs"):
        await got(client.memories())

    def listen() -> socket.socket:
        return socket.create_server(("127.0.0.1", port))

    def answer_once(server: socket.socket | None = None) -> None:
        with server or listen() as listening:
            connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            body = b'{"memories": []}'
            head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            connection.sendall(head % len(body) + body)

    there = threading.Thread(target=answer_once, args=(listen(),))
    replaced = threading.Timer(0.5, answer_once)
    for service in (there, replaced):
        service.start()
        assert await got(client.memories()) == []
        service.join()


@both_share
async def test_a_client_gives_up_rather_than_wait_longer_than_its_time(make: Make, flaky: Flaky) -> None:
    flaky.troubles = ["503 Service Unavailable\r\nRetry-After: 3600"]
    began = time.monotonic()
    with pytest.raises(SidecarProblem) as raised:
        await got(make(flaky.url).memories())
    assert (raised.value.status, raised.value.retryable, len(flaky.requests)) == (503, True, 1)
    assert time.monotonic() - began < 2


@both_share
async def test_what_may_not_be_done_twice_is_not_sent_again_once_it_may_have_arrived(
    make: Make, flaky: Flaky, memory: str, home: Path
) -> None:
    client = make(flaky.url)
    await got(client.export(memory, sandbox=f"local:{home}"))
    flaky.requests.clear()
    flaky.troubles = ["lost"]
    with pytest.raises(ServiceUnreachable) as raised:
        await got(client.fork(memory, f"{memory} 2"))
    assert raised.value.sent and len(flaky.requests) == 1
    flaky.troubles = ["429 Too Many Requests"]  # was not begun
    assert (await got(client.fork(memory, f"{memory} 3"))).memory == f"{memory} 3"


@both_share
async def test_what_cannot_succeed_is_not_tried_again(make: Make, flaky: Flaky) -> None:
    with pytest.raises(SidecarProblem) as raised:
        await got(make(flaky.url).snapshots("nobody's"))
    problem = raised.value
    assert (problem.code, problem.status, problem.retryable) == ("memory-not-found", 404, False)
    assert "nobody's" in problem.message and problem.hint
    assert len(flaky.requests) == 1


@both_share
async def test_something_else_that_answers_is_not_taken_for_a_sidecar(make: Make, flaky: Flaky) -> None:
    flaky.troubles = ["200 OK"]
    with pytest.raises(UnexpectedAnswer):
        await got(make(flaky.url).memories())
    flaky.troubles = ["302 Found\r\nLocation: http://127.0.0.1:9/"]
    with pytest.raises(SidecarProblem, match="302"):
        await got(make(flaky.url).memories())


# Every other call


@both_share
@pytest.mark.parametrize("name", ["acme/agent-7", "a b?c#d;e&f=+/100%2F köln/🧠"])
async def test_any_memory_id_reaches_the_service_as_it_is(name: str, client: Any, home: Path) -> None:
    receipt = await got(client.export(name, sandbox=f"local:{home}"))
    assert receipt.memory == name
    assert name in [row.memory for row in await got(client.memories())]
    assert (await got(client.snapshot(name, receipt.snapshot))).memory == name
    assert (await got(client.delete(name))).memory == name
    assert name not in [row.memory for row in await got(client.memories())]


@both_share
async def test_what_is_no_memory_id_is_never_sent(make: Make, flaky: Flaky) -> None:
    client = make(flaky.url)
    for name in ("", ".", "..", "../x", "a//b", "line\nbreak"):
        with pytest.raises(BadMemoryId):
            await got(client.delete(name))
    with pytest.raises(UsageError):
        await got(client.snapshot("m", ".."))
    assert not flaky.requests


@both_share
async def test_snapshots_can_be_looked_at_compared_and_moved_between(client: Any, memory: str, tmp_path: Path) -> None:
    home = claude_mem_home(tmp_path / "home", rows=20)
    first = await got(client.export(memory, sandbox=f"local:{home}", label="one"))
    observe(home, 5, "new")
    second = await got(client.export(memory, sandbox=f"local:{home}", label="two"))
    assert [(one.label, one.standing) for one in await got(client.snapshots(memory))] == [
        ("two", "head"),
        ("one", "earlier head"),
    ]
    shown = await got(client.snapshot(memory))
    assert shown.snapshot == second.snapshot and any(entry.database for entry in shown.entries)
    difference = await got(client.diff(memory))
    assert (difference.from_, difference.to) == (first.snapshot, second.snapshot)
    assert [change.path for change in difference.changed] == ["claude-mem/claude-mem.db"]
    assert (await got(client.pin(memory, first.snapshot))).pinned
    plan = await got(client.forget(memory, dry_run=True))
    assert [(one.snapshot, one.keep, one.reason) for one in plan.snapshots] == [
        (second.snapshot, True, "head"),
        (first.snapshot, True, "pinned"),
    ]
    assert not (await got(client.unpin(memory, first.snapshot))).pinned
    head = await got(client.rollback(memory, first.snapshot))
    assert (head.head, head.previous) == (first.snapshot, second.snapshot)
    forked = await got(client.fork(memory, f"{memory} forked", snapshot=second.snapshot))
    assert (await got(client.memory(forked.memory))).head == forked.snapshot


async def test_a_download_that_is_cut_arrives_whole_or_not_at_all(
    make: Make, flaky: Flaky, memory: str, home: Path, tmp_path: Path
) -> None:
    client, target = make(flaky.url), tmp_path / "memory.tar.gz"
    await got(client.export(memory, sandbox=f"local:{home}"))
    flaky.troubles = ["half"] * QUICK.attempts
    with pytest.raises(ServiceUnreachable):
        await got(client.download(memory, "latest", target))
    assert [path.name for path in tmp_path.iterdir()] == ["home"]

    flaky.troubles = ["half", "lost"]
    assert await got(client.download(memory, "latest", target)) == target
    with tarfile.open(target) as tar:
        assert "MEMORY.md" in tar.getnames()
    adopted = await got(client.adopt(f"{memory} adopted", target, label="by hand"))
    assert (adopted.outcome, adopted.label, adopted.files) == ("committed", "by hand", 1)


async def test_a_file_that_is_not_there_or_not_compressed_is_said_plainly(client: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        await got(client.adopt("m", tmp_path / "nothing.tar"))
    with pytest.raises(UsageError, match="compressed"):
        await got(client.download("m", "latest", tmp_path / "plain.tar"))


async def test_events_go_on_after_the_connection_was_cut(make: Make, flaky: Flaky, memory: str, home: Path) -> None:
    client = make(flaky.url)
    events = client.events(after=0)
    seen = []
    for text in (b"first", b"second, which is longer"):
        write(home / "MEMORY.md", text)
        receipt = await got(client.export(memory, sandbox=f"local:{home}"))
        while (event := await following(events)).memory != memory:
            seen.append(event.number)
        seen.append(event.number)
        assert (event.type, event.details["snapshot"]) == ("export.committed", receipt.snapshot)
        flaky.cut()
    assert seen == sorted(set(seen)), "each event once"
    operation = await got(client.operation(event.details["operation"]))
    assert operation.state == "done" and operation.exported == receipt
    await got((events.aclose if hasattr(events, "aclose") else events.close)())


@both_share
async def test_a_sandbox_can_be_attached_and_detached(client: Any, memory: str, home: Path, tmp_path: Path) -> None:
    kept = await got(client.export(memory, sandbox=f"local:{home}"))
    other = empty_home(tmp_path / "other")
    attached = await got(client.attach(memory, sandbox=f"local:{other}", checkpoint_every=300))
    assert attached.restored.snapshot == kept.snapshot
    assert (await got(client.attachment(memory))).attachment.sandbox == f"local:{other}"
    write(other / "MEMORY.md", b"something that was not there before")
    detached = await got(client.detach(memory, export=True))
    assert detached.exported.outcome == "committed"
    with pytest.raises(SidecarProblem) as raised:
        await got(client.attachment(memory))
    assert raised.value.code == "not-attached"


# What a client is


async def test_the_token_is_never_seen(
    make: Make, flaky: Flaky, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    told: list[str] = []
    for address, token in ((flaky.url, TOKEN), (flaky.url, f"{TOKEN}-wrong"), ("http://127.0.0.1:1", TOKEN)):
        client = make(address, token=token, retries=Retries(attempts=1))
        flaky.troubles = ["lost"] if token == TOKEN else []
        with pytest.raises(public.SidecarError) as raised:
            await got(client.memories())
        told += [repr(client), str(vars(client)), repr(raised.value), "".join(traceback.format_exception(raised.value))]
        assert raised.value.__cause__ is None
    for address, token in (("http://x:y@host", TOKEN), ("http://host", f"{TOKEN}\n{TOKEN}"), ("host", TOKEN)):
        with pytest.raises(BadConfig) as refused:
            make(address, token=token)
        told.append(str(refused.value.as_dict()))
    assert not [text for text in [*told, caplog.text] if TOKEN in text]


@both_share
async def test_a_wrong_token_is_told_from_a_service_that_is_away(make: Make) -> None:
    with pytest.raises(SidecarProblem) as raised:
        await got(make(token="not-the-token-of-this-service").memories())
    assert (raised.value.code, raised.value.status) == ("unauthorized", 401)


@both_share
async def test_address_and_token_come_from_the_environment(
    make: Make, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMORY_SIDECAR_URL", f"{url}/")
    monkeypatch.setenv("MEMORY_SIDECAR_TOKEN", f"{TOKEN},another-token-that-is-accepted")
    client = make(None, token=None)
    assert client.url == url
    assert isinstance(await got(client.memories()), list)
    monkeypatch.delenv("MEMORY_SIDECAR_URL")
    assert make(None).url == "http://127.0.0.1:8077"


@both_share
async def test_what_ends_a_program_says_what_to_do(make: Make) -> None:
    with pytest.raises(ServiceUnreachable) as raised:
        await got(make("http://127.0.0.1:1", retries=Retries(attempts=1)).memories())
    shown = traceback.format_exception_only(raised.value)[-1]
    assert "No answer from" in shown and "`memory-sidecar serve`" in shown and "MEMORY_SIDECAR_URL" in shown
    with pytest.raises(BadConfig) as refused:
        make("no address")
    assert "Such as http://127.0.0.1:8077." in str(refused.value)


async def test_a_service_on_this_machine_is_not_sought_through_a_proxy(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    await got(make().memories())


def test_both_clients_offer_the_same() -> None:
    def offered(kind: type) -> dict[str, Any]:
        return {
            name: list(inspect.signature(method).parameters.values())
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert offered(Client) == offered(AsyncClient)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_method_is_found_where_it_is_written_with_its_parameters_and_its_words(kind: type) -> None:
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.getdoc(method) or name == "close", name
            assert not any(one.kind is one.VAR_KEYWORD for one in inspect.signature(method).parameters.values())
            assert f"def {name}(" in inspect.getsource(method), "what the editor opens"


def test_a_request_says_only_what_is_not_as_by_default() -> None:
    """A service of an earlier version does not know every field."""
    assert ExportBody(sandbox="s").as_dict() == {"sandbox": "s"}
    asked = RestoreBody(sandbox="s", attach=False, projects=[], layouts=[], withhold_projects=False)
    assert asked.as_dict() == {"sandbox": "s", "attach": False, "projects": [], "withhold_projects": False}


def test_what_a_later_service_adds_is_no_trouble() -> None:
    row = convert({"snapshot": "s", "standing": "under review", "reviewer": "a person"}, public.Snapshot)
    assert (row.snapshot, row.standing) == ("s", "under review")
    with pytest.raises(UnexpectedAnswer):
        convert({"snapshot": 7, "standing": "head"}, public.Snapshot)


def test_the_client_is_light() -> None:
    heavy = ("adapters", "sidecar.engine", "sidecar.service", "sidecar.store", "fastapi", "pydantic", "uvicorn")
    program = f"""
import sys, sidecar.client
found = [name for name in sys.modules if name.startswith({(*heavy, "boto", "e2b", "daytona", "structlog")!r})]
sys.exit(str(found) if found else 0)
"""
    subprocess.run([sys.executable, "-c", program], cwd=PROJECT, check=True, timeout=30)
