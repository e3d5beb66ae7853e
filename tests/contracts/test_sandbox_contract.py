"""What every sandbox promises, asked of each adapter: a folder here, and the unmodified SDKs at emulated providers."""

from __future__ import annotations

import asyncio
import random
import shlex
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from emulators import DaytonaSandbox
from sidecar.errors import (
    OutputTooLarge,
    SandboxError,
    SandboxGone,
    SandboxTimeout,
    SandboxUnreachable,
    SnapshotDamaged,
    TransferFailed,
)
from sidecar.ports import CommandResult, Sandbox, SandboxStatus
from tests.parts.providers import (
    Made,
    Provider,
    at_most,
    chunks_of,
    downloaded,
    failing_after,
    nothing_left_waiting,
    until,
)

MIB = 1 << 20
ODD_NAMES = [
    "with blanks",
    "🦊 ünï",
    "two\nlines",
    "'single' and \"double\"",
    "-rf",
    "$HOME `id` \\ !",
    "100%25+&=#?;",
    ".hidden",
]
ENDLESS = "while :; do printf '%01024d' 0; sleep 0.001; done"


@dataclass(frozen=True)
class Place:
    """A sandbox under test, and what a test needs to look behind it."""

    provider: Provider
    made: Made
    sandbox: Sandbox

    async def run(self, command: str, *, timeout: float = 20, output_limit: int = 4 * MIB) -> CommandResult:
        return await self.sandbox.run(command, timeout=timeout, output_limit=output_limit)

    async def said(self, command: str) -> str:
        done = await self.run(command)
        assert done.exit_code == 0, done
        return done.output.decode().removesuffix("\n")

    def path(self, name: str) -> str:
        return str(self.made.home / name)


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    with at_most(30):
        yield


@pytest.fixture(params=["local", "e2b", "daytona"])
async def place(request: pytest.FixtureRequest, provider_of: Callable[[str], Provider]) -> AsyncIterator[Place]:
    provider = provider_of(request.param)
    made = provider.create()
    sandbox = provider.open(made)
    yield Place(provider, made, sandbox)
    await sandbox.close()


# Commands


@pytest.mark.parametrize("code", [0, 1, 3, 75, 126, 127, 255])
async def test_a_command_returns_its_output_and_exit_code(place: Place, code: int) -> None:
    done = await place.run(f"printf 'one\\ntwo'; exit {code}")
    assert (done.exit_code, done.output) == (code, b"one\ntwo")


async def test_the_output_of_quick_commands_is_theirs_alone(place: Place) -> None:
    for _ in range(8):
        done = await asyncio.gather(*(place.run("echo fine") for _ in range(16)))
        assert {(one.exit_code, one.output) for one in done} == {(0, b"fine\n")}


async def test_a_command_that_kills_itself_has_failed(place: Place) -> None:
    done = await place.run("echo last words; kill -KILL $$; echo never")
    assert done.exit_code != 0
    assert done.output.startswith(b"last words\n")
    assert b"never" not in done.output


async def test_an_unknown_command_is_no_failure_of_the_sandbox(place: Place) -> None:
    done = await place.run("no-such-program-anywhere")
    assert done.exit_code == 127
    assert "no-such-program-anywhere" in done.complaint


async def test_stderr_does_not_tear_the_lines_of_stdout(place: Place) -> None:
    done = await place.run("echo first; echo complaint >&2; echo last")
    lines = done.output.decode().splitlines()
    assert [line for line in lines if line != "complaint"] == ["first", "last"]
    assert ("complaint" in lines) is place.provider.merges_output
    assert "complaint" in done.complaint


async def test_a_command_runs_at_home_with_its_home_set(place: Place) -> None:
    assert await place.said('echo "$HOME"') == str(place.made.home)
    assert await place.said("cd && pwd -P") == str(place.made.home.resolve())


async def test_a_command_runs_as_the_user_that_the_sandbox_says(place: Place) -> None:
    await place.run("echo mine > owned")
    assert await place.said("ls -nd owned | cut -d' ' -f3") == await place.said("id -u")
    if place.provider.remote:
        assert await place.said('echo "$USER"') == place.made.emulated.USER


async def test_a_command_starts_in_the_working_folder(place: Place) -> None:
    work = place.made.handle.work if place.made.handle is not None else place.made.home
    assert await place.said("pwd -P") == str(work.resolve())


async def test_a_working_folder_may_be_another_than_the_home(provider_of: Callable[[str], Provider]) -> None:
    provider = provider_of("daytona")
    made = provider.create(work="project")
    assert isinstance(made.handle, DaytonaSandbox)
    done = await provider.open(made).run('pwd -P; echo "$HOME"', timeout=10, output_limit=MIB)
    assert done.output.decode().splitlines() == [str(made.handle.work.resolve()), str(made.home)]


async def test_a_long_script_arrives_as_it_was_written(place: Place) -> None:
    line = "'single' \"double\" $HOME ${x} $(id) `id` \\ \\n ! !! 🦊 ünï % # & ; | <> * ?\t~\n"
    text = line * (60_000 // len(line.encode()))
    done = await place.run(f"cat <<'EOF-OF-IT'\n{text}EOF-OF-IT\nprintf %s {shlex.quote(line)}")
    assert done.exit_code == 0
    assert done.output.decode() == text + line


async def test_a_script_may_use_what_posix_shells_have(place: Place) -> None:
    script = 'set -eu\nf() { local_="$1"; echo "f $local_"; }\nfor n in 1 2; do f "$n"; done\ncat <<E\n$((1 + 1))\nE'
    assert await place.said(script) == "f 1\nf 2\n2"


async def test_a_command_that_reads_its_stdin_does_not_hang(place: Place) -> None:
    done = await place.run("cat >/dev/null; true", timeout=10)
    assert done.exit_code == 0


async def test_much_output_arrives_whole(place: Place) -> None:
    done = await place.run("seq 1 220000")
    assert len(done.output) > 1.3 * MIB
    assert done.output == b"".join(b"%d\n" % number for number in range(1, 220_001))


async def test_output_that_is_not_utf8_does_not_raise(place: Place) -> None:
    done = await place.run(r"printf 'before \377\376\200 after'")
    assert done.exit_code == 0
    assert done.output.startswith(b"before ")
    assert done.output.endswith(b" after")


async def test_a_letter_is_whole_wherever_the_output_is_torn(place: Place) -> None:
    text = "x" + "ü🦊" * 30_000
    await place.sandbox.upload(path := place.path("letters"), chunks_of(text.encode()))
    assert await place.said(f"cat {path}") == text


async def test_output_up_to_the_limit_is_fine_and_one_byte_more_is_not(place: Place) -> None:
    done = await place.run("printf %0100d 0", output_limit=100)
    assert len(done.output) == 100
    with pytest.raises(OutputTooLarge):
        await place.run("printf %0101d 0", output_limit=100)


async def test_a_command_that_never_stops_printing_is_ended(place: Place) -> None:
    await place.sandbox.connect()
    began = time.monotonic()
    with pytest.raises(OutputTooLarge):
        await place.run(ENDLESS, output_limit=50_000, timeout=4)
    assert await until(lambda: not place.made.processes())
    assert time.monotonic() - began < 3


async def test_too_much_output_is_noticed_while_the_command_goes_on(place: Place) -> None:
    began = time.monotonic()
    with pytest.raises(OutputTooLarge):
        await place.run("printf %0101d 0; sleep 600", output_limit=100, timeout=30)
    assert await until(lambda: not place.made.processes())
    assert time.monotonic() - began < 25


async def test_a_command_that_takes_too_long_is_ended_with_its_children(place: Place) -> None:
    began = time.monotonic()
    with pytest.raises(SandboxTimeout) as caught:
        await place.run("sleep 600 & sleep 600; true", timeout=1)
    assert caught.value.retryable
    assert 0.9 < time.monotonic() - began < 8
    assert await until(lambda: not place.made.processes())


async def test_a_command_nobody_waits_for_any_more_is_ended(place: Place) -> None:
    running = asyncio.create_task(place.run("echo > begun; sleep 600", timeout=20))
    assert await until((place.made.home / "begun").exists)
    began = time.monotonic()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await until(lambda: not place.made.processes(), seconds=8)
    assert time.monotonic() - began < 2.5


async def test_a_command_given_up_before_it_began_does_not_run_on(place: Place) -> None:
    await place.sandbox.connect()
    if place.provider.remote:
        place.provider.server.latency = 0.4
    running = asyncio.create_task(place.run("echo > begun; sleep 600", timeout=20))
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0.5)
    assert await until(lambda: not place.made.processes(), seconds=2)


# Files


@pytest.mark.parametrize("size", [0, 1, 5 * MIB + 7])
async def test_a_file_comes_back_byte_by_byte(place: Place, size: int) -> None:
    data = random.Random(size).randbytes(size)
    await place.sandbox.upload(path := place.path("file"), chunks_of(data))
    assert Path(path).read_bytes() == data
    assert await downloaded(place.sandbox, path) == data


@pytest.mark.parametrize("name", ODD_NAMES)
async def test_a_path_means_the_same_to_a_command_and_to_the_file_methods(place: Place, name: str) -> None:
    folder = f"{place.made.home}/in {name}"
    path, back = f"{folder}/{name}", f"{folder}/{name}.back"
    await place.said(f"mkdir -- {shlex.quote(folder)}")
    await place.sandbox.upload(path, chunks_of(b"up\r\n\0\xff"))
    await place.said(f"cp -- {shlex.quote(path)} {shlex.quote(back)}")
    assert await downloaded(place.sandbox, back) == b"up\r\n\0\xff"
    assert sorted(entry.name for entry in Path(folder).iterdir()) == sorted([name, f"{name}.back"])


@pytest.mark.parametrize("name", ODD_NAMES)
async def test_a_file_is_removed_whatever_its_name(place: Place, name: str) -> None:
    (place.made.home / "kept").write_bytes(b"1")
    await place.sandbox.upload(path := place.path(name), chunks_of(b"1"))
    await place.sandbox.remove(path)
    assert [entry.name for entry in place.made.home.iterdir()] == ["kept"]


async def test_removing_what_is_not_there_is_fine(place: Place) -> None:
    await place.sandbox.remove(place.path("never was"))
    await place.sandbox.remove(place.path("nor/its folder"))


async def test_what_cannot_be_removed_is_said_in_our_words(place: Place) -> None:
    (place.made.home / "file").write_bytes(b"1")
    with suppress(SandboxError):
        await place.sandbox.remove(place.path("file/below"))
    assert (place.made.home / "file").exists()


async def test_an_upload_replaces_what_was_there(place: Place) -> None:
    path = place.path("file")
    for data in (b"longer than the next", b"short"):
        await place.sandbox.upload(path, chunks_of(data))
    assert await downloaded(place.sandbox, path) == b"short"


async def test_an_upload_takes_chunks_of_any_size(place: Place) -> None:
    data = random.Random(1).randbytes(3 * MIB)

    async def chunks() -> AsyncIterator[bytes]:
        yield data[:1]
        yield data[1 : 2 * MIB]
        await asyncio.sleep(0.05)
        yield data[2 * MIB :]

    await place.sandbox.upload(path := place.path("file"), chunks())
    assert Path(path).read_bytes() == data


async def test_an_upload_streams(place: Place) -> None:
    """It never asks for much more than it has passed on."""
    path = Path(place.path("file"))
    ahead = []

    async def chunks() -> AsyncIterator[bytes]:
        for number in range(64):
            ahead.append(number * 256 * 1024 - (path.stat().st_size if path.exists() else 0))
            yield bytes(256 * 1024)

    await place.sandbox.upload(str(path), chunks())
    assert path.stat().st_size == 16 * MIB
    assert max(ahead) < 12 * MIB


async def test_a_missing_file_is_a_failed_transfer(place: Place) -> None:
    with pytest.raises(TransferFailed):
        await downloaded(place.sandbox, place.path("no/such file"))
    assert (await place.run("true")).exit_code == 0


async def test_a_folder_is_no_file(place: Place) -> None:
    with pytest.raises(SandboxError) as caught:
        await downloaded(place.sandbox, place.made.home)
    assert not isinstance(caught.value, SandboxUnreachable | SandboxGone)


@pytest.mark.parametrize(
    "problem",
    [SnapshotDamaged("a hash differs"), TransferFailed("of a store"), OSError(5, "of our disk"), ValueError("ours")],
    ids=lambda problem: type(problem).__name__,
)
async def test_a_problem_of_what_is_uploaded_is_raised_as_it_is(place: Place, problem: Exception) -> None:
    async with nothing_left_waiting():
        with pytest.raises(type(problem)) as caught:
            await place.sandbox.upload(place.path("file"), failing_after([b"x" * 100_000] * 3, problem))
    assert caught.value is problem


async def test_an_upload_given_up_leaves_nothing_hanging(place: Place) -> None:
    never = asyncio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"x" * 100_000
        await never.wait()
        yield b"y"

    async with nothing_left_waiting():
        uploading = asyncio.create_task(place.sandbox.upload(place.path("file"), chunks()))
        await asyncio.sleep(0.2)
        uploading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await uploading
        never.set()
    assert (await place.run("true")).exit_code == 0


async def test_a_download_abandoned_half_way_leaves_nothing_hanging(place: Place) -> None:
    path = Path(place.path("file"))
    path.write_bytes(bytes(20 * MIB))
    async with nothing_left_waiting():
        for _ in range(3):
            chunks = place.sandbox.download(str(path))
            assert await anext(chunks)
            await chunks.aclose()
    assert await downloaded(place.sandbox, path) == bytes(20 * MIB)


async def test_a_download_streams(place: Place) -> None:
    path = Path(place.path("file"))
    path.write_bytes(bytes(16 * MIB))
    largest = 0
    async for chunk in place.sandbox.download(str(path)):
        largest = max(largest, len(chunk))
    assert 0 < largest <= 4 * MIB


# Many things at once


async def test_commands_and_transfers_run_side_by_side(place: Place) -> None:
    data = [random.Random(number).randbytes(300_000 + number) for number in range(8)]

    async def transfer(number: int) -> bytes:
        path = place.path(f"file-{number}")
        await place.sandbox.upload(path, chunks_of(data[number]))
        return await downloaded(place.sandbox, path)

    async def command(number: int) -> str:
        return await place.said(f"sleep 0.5; echo {number}")

    began = time.monotonic()
    results = await asyncio.gather(*map(transfer, range(8)), *map(command, range(8)))
    assert results == [*data, *map(str, range(8))]
    assert time.monotonic() - began < 3.5
    assert place.sandbox.control_trips == len(place.provider.control_calls()) == (1 if place.provider.remote else 0)


async def test_one_command_that_fails_does_not_disturb_another(place: Place) -> None:
    good = asyncio.create_task(place.said("sleep 1.5; echo fine"))
    with pytest.raises(SandboxTimeout):
        await place.run("sleep 600", timeout=1)
    assert await good == "fine"


# Presence


async def test_connecting_again_asks_nobody(place: Place) -> None:
    first = await place.sandbox.connect()
    trips = place.sandbox.control_trips
    assert trips == len(place.provider.control_calls()) == (1 if place.provider.remote else 0)
    assert await place.sandbox.connect() == first
    await place.run("true")
    assert place.sandbox.control_trips == trips == len(place.provider.control_calls())


async def test_opening_asks_nobody(place: Place) -> None:
    assert place.sandbox.ref == place.made.ref
    assert place.sandbox.control_trips == 0
    assert place.provider.control_calls() == []


async def test_a_sandbox_says_when_it_ends(place: Place) -> None:
    presence = await place.sandbox.connect()
    assert not presence.woken
    if not place.provider.remote:
        assert presence == SandboxStatus()
        return
    assert presence.ends_at == pytest.approx(place.made.emulated.ends_at, abs=1.5)


async def test_prolonging_never_shortens(place: Place) -> None:
    before = place.made.handle.ends_at if place.made.handle is not None else None
    presence = await place.sandbox.prolong(30)
    if before is None:
        assert presence == SandboxStatus()
        return
    after = place.made.emulated.ends_at
    assert after is not None
    assert after >= before
    assert presence.ends_at == pytest.approx(after, abs=1.5)
    assert place.sandbox.control_trips == len(place.provider.control_calls())


async def test_closing_twice_is_fine(place: Place) -> None:
    await place.run("true")
    await place.sandbox.close()
    await place.sandbox.close()


async def test_closing_what_was_never_reached_is_fine(place: Place) -> None:
    await place.sandbox.close()
    assert place.provider.control_calls() == []


async def test_variables_reach_the_command_and_nobody_else_sees_them(place: Place) -> None:
    secret = "s3cret/+=" * 3000
    command = 'printf %s "$HIDDEN" | wc -c; printf %s "$HIDDEN" | cksum; tr "\\0" " " < /proc/$$/cmdline'
    done = await place.sandbox.run(command, timeout=20, output_limit=4 * MIB, environment={"HIDDEN": secret})
    assert done.exit_code == 0, done
    count, _, _ = done.output.decode().partition("\n")
    assert int(count) == len(secret)
    assert b"s3cret" not in done.output, "in the command line"
    assert (await place.said('echo "${HIDDEN:-none}"')) == "none", "only for the one command"
