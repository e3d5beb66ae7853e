"""Sandboxes at providers: how they live, sleep and end, and what every failure of an SDK is called here."""

from __future__ import annotations

import asyncio
import inspect
import logging
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import daytona.common.errors
import e2b
import e2b.exceptions
import httpx
import pytest

import adapters
from adapters.sandboxes import remote
from adapters.sandboxes.daytona import Daytona
from adapters.sandboxes.e2b import E2B
from adapters.sandboxes.remote import RemoteSandbox, SandboxConnection, Vendor
from emulators import DaytonaSandbox, Fault
from emulators.calls import Step
from emulators.faults import Kind
from sidecar.errors import (
    BadReference,
    SandboxAsleep,
    SandboxBusy,
    SandboxDenied,
    SandboxError,
    SandboxFull,
    SandboxGone,
    SandboxTimeout,
    SandboxUnreachable,
    SdkMissing,
    TransferFailed,
)
from sidecar.ports import Sandbox
from sidecar.wiring import open_sandbox
from tests.parts.providers import (
    EMULATORS,
    Emulated,
    Made,
    Provider,
    at_most,
    chunks_of,
    downloaded,
    nothing_left_waiting,
)

PROJECT = Path(adapters.__file__).parents[1]
MIB = 1 << 20
SIZE = 3 * MIB
Use = Callable[[Sandbox, Made], Awaitable[object]]


async def _connect(sandbox: Sandbox, made: Made) -> None:
    await sandbox.connect()


async def _run(sandbox: Sandbox, made: Made) -> None:
    assert (await sandbox.run("echo fine", timeout=10, output_limit=MIB)).output == b"fine\n"


async def _upload(sandbox: Sandbox, made: Made) -> None:
    await sandbox.upload(str(made.home / "up"), chunks_of(bytes(SIZE)))


async def _download(sandbox: Sandbox, made: Made) -> None:
    assert await downloaded(sandbox, made.home / "down") == bytes(SIZE)


async def _remove(sandbox: Sandbox, made: Made) -> None:
    await sandbox.remove(str(made.home / "removed"))


USES: dict[Step, Use] = {
    "info": _connect,
    "command": _run,
    "upload": _upload,
    "download": _download,
    "filesystem": _remove,
}
INSIDE: tuple[Step, ...] = ("command", "upload", "download", "filesystem")
every_use = pytest.mark.parametrize("step", list(USES))
every_use_inside = pytest.mark.parametrize("step", INSIDE)


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    with at_most(30):
        yield


@pytest.fixture(params=["e2b", "daytona"])
def provider(request: pytest.FixtureRequest, provider_of: Callable[[str], Provider]) -> Provider:
    return provider_of(request.param)


@pytest.fixture
def made(provider: Provider) -> Made:
    made = provider.create()
    (made.home / "down").write_bytes(bytes(SIZE))
    return made


@pytest.fixture
async def sandbox(provider: Provider, made: Made) -> AsyncIterator[Sandbox]:
    sandbox = provider.open(made)
    yield sandbox
    await sandbox.close()


def _asleep(made: Made, state: str) -> Emulated:
    """Put it to sleep behind its clients' backs."""
    handle = made.emulated
    handle.pause() if state == "paused" else handle.stop()
    if state == "archived":
        assert isinstance(handle, DaytonaSandbox)
        handle.archive()
    assert handle.state == state
    return handle


every_sleep = pytest.mark.parametrize(
    ("provider", "state"),
    [("e2b", "paused"), ("daytona", "stopped"), ("daytona", "paused"), ("daytona", "archived")],
    indirect=["provider"],
)


# How long it lives


@pytest.mark.parametrize("seconds", [120, 1800])
async def test_its_end_is_told_to_the_second(provider: Provider, seconds: int) -> None:
    made = provider.create(seconds=seconds)
    presence = await provider.open(made).connect()
    assert presence.ends_at == pytest.approx(made.emulated.ends_at, abs=1.5)
    assert presence.ends_at == pytest.approx(made.emulated.created_at + seconds, abs=2)


async def test_a_daytona_sandbox_that_never_stops_has_no_end(provider_of: Callable[[str], Provider]) -> None:
    provider = provider_of("daytona")
    sandbox = provider.open(provider.create(seconds=0))
    assert (await sandbox.connect()).ends_at is None
    assert (await sandbox.prolong(600)).ends_at is None
    assert len(provider.control_calls()) == 1


async def test_prolonging_moves_its_end(provider: Provider) -> None:
    made = provider.create(seconds=900)
    handle = made.emulated
    handle.end_in(100)
    sandbox = provider.open(made)
    assert (await sandbox.connect()).ends_at == pytest.approx(handle.ends_at, abs=1.5)
    presence = await sandbox.prolong(850)
    assert handle.ends_at is not None
    assert handle.ends_at >= time.time() + 845
    assert presence.ends_at == pytest.approx(handle.ends_at, abs=1.5)
    assert [call.step for call in provider.control_calls()] == [
        "info",
        "timeout" if provider.name == "e2b" else "activity",
    ]
    assert sandbox.control_trips == 2
    assert (await sandbox.connect()).ends_at == presence.ends_at


async def test_prolonging_enough_life_asks_once(provider: Provider, made: Made, sandbox: Sandbox) -> None:
    for _ in range(3):
        await sandbox.prolong(60)
    assert [call.step for call in provider.control_calls()] == ["info"]


async def test_prolonging_does_not_undo_what_somebody_else_did_a_while_ago(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = provider.create(seconds=60)
    sandbox = provider.open(made)
    await sandbox.connect()
    if isinstance(made.handle, DaytonaSandbox):
        made.handle.auto_stop = 120
    made.emulated.end_in(7200)
    monkeypatch.setattr(remote, "REMEMBERED_SECONDS", -1)
    presence = await sandbox.prolong(600)
    assert made.emulated.ends_at == pytest.approx(time.time() + 7200, abs=5)
    assert presence.ends_at == pytest.approx(time.time() + 7200, abs=5)


# Asleep


@every_sleep
async def test_a_sandbox_that_sleeps_stays_asleep_unless_it_is_to_be_woken(provider: Provider, state: str) -> None:
    made = provider.create()
    handle = _asleep(made, state)
    sandbox = provider.open(made)
    for use in (*USES.values(), lambda sandbox, made: sandbox.prolong(60)):
        with pytest.raises(SandboxAsleep) as caught:
            await use(sandbox, made)  # type: ignore[no-untyped-call]
        assert state in str(caught.value)
        assert "--wake" in caught.value.hint
        assert not caught.value.retryable
    assert handle.state == state
    assert {call.step for call in provider.control_calls()} == {"info"}


@every_sleep
async def test_a_sandbox_that_is_to_be_woken_runs_again(provider: Provider, state: str) -> None:
    made = provider.create()
    handle = _asleep(made, state)
    sandbox = provider.open(made, wake=True)
    presence = await sandbox.connect()
    assert presence.woken
    assert handle.running
    assert presence.ends_at == pytest.approx(handle.ends_at, abs=2)
    assert sandbox.control_trips == len(provider.control_calls())
    await _run(sandbox, made)


async def test_a_sandbox_that_runs_is_not_said_to_be_woken(provider: Provider, made: Made) -> None:
    assert not (await provider.open(made, wake=True).connect()).woken
    assert [call.step for call in provider.control_calls()] == ["info"]


@every_sleep
@every_use_inside
async def test_a_sandbox_that_falls_asleep_between_two_calls_is_asleep(
    provider: Provider, state: str, step: Step
) -> None:
    made = provider.create()
    sandbox = provider.open(made)
    await _run(sandbox, made)
    handle = _asleep(made, state)
    with pytest.raises(SandboxAsleep):
        await USES[step](sandbox, made)
    assert handle.state == state


async def test_a_sandbox_that_fell_asleep_is_not_taken_for_gone_when_prolonged(
    provider_of: Callable[[str], Provider],
) -> None:
    provider = provider_of("e2b")
    made = provider.create()
    sandbox = provider.open(made)
    await sandbox.connect()
    handle = _asleep(made, "paused")
    with pytest.raises(SandboxAsleep):
        await sandbox.prolong(1800)
    assert handle.state == "paused"


async def test_a_sandbox_that_was_started_again_is_used_again(provider: Provider, made: Made, sandbox: Sandbox) -> None:
    await _run(sandbox, made)
    handle = _asleep(made, "paused")
    with pytest.raises(SandboxAsleep):
        await _run(sandbox, made)
    handle.resume()
    handle.end_in(300)
    await _run(sandbox, made)


@pytest.mark.parametrize(
    ("state", "expected", "retryable"),
    [
        ("starting", SandboxBusy, True),
        ("restoring", SandboxBusy, True),
        ("error", SandboxError, False),
        ("destroying", SandboxGone, False),
    ],
)
async def test_a_daytona_sandbox_in_between_says_so(
    provider_of: Callable[[str], Provider],
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    expected: type[SandboxError],
    retryable: bool,
) -> None:
    provider = provider_of("daytona")
    sandbox = provider.open(provider.create(), wake=True)
    monkeypatch.setattr(DaytonaSandbox, "state", state)
    with pytest.raises(expected) as caught:
        await sandbox.connect()
    assert type(caught.value) is expected
    assert caught.value.retryable is retryable
    assert [call.step for call in provider.control_calls()] == ["info"]


# Gone


@pytest.mark.parametrize("how", ["killed", "unknown"])
async def test_a_sandbox_that_is_gone_is_found_out_by_one_request(provider: Provider, how: str) -> None:
    made = provider.create()
    if how == "killed":
        made.emulated.kill()
        sandbox = provider.open(made)
    else:
        sandbox = open_sandbox(f"{provider.name}:never-was")
    began = time.monotonic()
    with pytest.raises(SandboxGone) as caught:
        await sandbox.connect()
    assert time.monotonic() - began < 2
    assert not caught.value.retryable
    assert "restore it into a new sandbox" in caught.value.hint
    assert len(provider.control_calls()) == 1
    assert len(provider.server.calls) == 1


async def test_a_request_that_found_it_gone_is_counted(provider: Provider, made: Made, sandbox: Sandbox) -> None:
    made.emulated.kill()
    with pytest.raises(SandboxGone):
        await sandbox.connect()
    assert sandbox.control_trips == 1


@every_use_inside
async def test_a_sandbox_killed_between_two_calls_is_gone(
    provider: Provider, made: Made, sandbox: Sandbox, step: Step
) -> None:
    await sandbox.connect()
    made.emulated.kill()
    with pytest.raises(SandboxGone):
        await USES[step](sandbox, made)
    assert len(provider.control_calls()) == 2


async def test_a_sandbox_that_is_gone_is_not_taken_for_a_slow_command(
    provider: Provider, made: Made, sandbox: Sandbox
) -> None:
    await sandbox.connect()
    made.emulated.kill()
    with pytest.raises(SandboxGone):
        await sandbox.run("true", timeout=1, output_limit=MIB)


@every_use_inside
@pytest.mark.parametrize("end", ["kill", "expire"])
async def test_a_sandbox_that_ends_in_the_middle_is_found_out_by_the_next_call_at_the_latest(
    provider: Provider, made: Made, sandbox: Sandbox, step: Step, end: Kind
) -> None:
    provider.server.faults.add(Fault(step, end, after=MIB if step in ("upload", "download") else 0))
    over = SandboxAsleep if (provider.name, end) == ("daytona", "expire") else SandboxGone
    with pytest.raises((over, SandboxUnreachable)):
        await USES[step](sandbox, made)
    with pytest.raises(over):
        await USES[step](sandbox, made)


# Credentials


@pytest.mark.parametrize("given", ["wrong", "none"])
async def test_a_key_that_is_not_accepted_is_said_and_never_shown(
    provider: Provider, made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    variable = f"{provider.name.upper()}_API_KEY"
    key = type(provider.server).new_key()
    monkeypatch.setenv(variable, key) if given == "wrong" else monkeypatch.delenv(variable)
    sandbox = provider.open(made)
    with caplog.at_level(logging.DEBUG), pytest.raises(SandboxDenied) as caught:
        await sandbox.connect()
    assert not caught.value.retryable
    assert variable in caught.value.hint and "where memory-sidecar itself is started" in caught.value.hint
    assert (given == "none") == (f"{variable} is not set in the environment of the sidecar" in caught.value.message)
    assert len(provider.server.calls) == (1 if given == "wrong" else 0)
    shown = [
        *(str(caught.value), repr(caught.value), str(caught.value.as_dict()), repr(vars(sandbox))),
        "".join(traceback.format_exception(caught.value)),
        caplog.text,
    ]
    assert not [text for text in shown if key in text or provider.server.key in text]


class _Tattling:
    """A vendor whose errors repeat what they were sent."""

    def __init__(self, vendor: Vendor, problem: Exception) -> None:
        self._problem = problem
        self.meaning = vendor.meaning

    def reach(self, name: str, *, wake: bool) -> SandboxConnection:
        raise self._problem


@pytest.mark.parametrize("status", [None, 400, 403, 404, 409, 429, 500, 503])
async def test_a_provider_that_repeats_the_key_does_not_spread_it(
    provider: Provider, caplog: pytest.LogCaptureFixture, status: int | None
) -> None:
    key = provider.server.key
    kind = e2b.SandboxException if provider.name == "e2b" else daytona.DaytonaError
    problem = kind(f"request with {key} failed", status_code=status)
    sandbox = RemoteSandbox(f"{provider.name}:x", _Tattling(provider.vendor(), problem))  # type: ignore[arg-type]
    with caplog.at_level(logging.DEBUG), pytest.raises(SandboxError) as caught:
        await sandbox.connect()
    shown = [str(caught.value), repr(caught.value), str(caught.value.as_dict()), caplog.text]
    shown.append("".join(traceback.format_exception(caught.value)))
    assert not [text for text in shown if key in text]


async def test_a_use_that_goes_well_logs_no_key(
    provider: Provider, made: Made, sandbox: Sandbox, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        for use in USES.values():
            await use(sandbox, made)
    assert provider.server.key not in caplog.text


# Trouble


def _gateway(provider: Provider, step: Step, status: int) -> None:
    provider.server.faults.add(Fault(step, "status", times=None, status=status))


@every_use
@pytest.mark.parametrize("status", [429, 503])
async def test_a_provider_that_asks_to_wait_is_busy(
    provider: Provider, made: Made, sandbox: Sandbox, step: Step, status: int
) -> None:
    _gateway(provider, step, status)
    # Of a 503 from inside a sandbox E2B's SDK does not tell that it was one.
    unclear = provider.name == "e2b" and status == 503 and step != "info"
    with pytest.raises((SandboxBusy, SandboxUnreachable) if unclear else SandboxBusy) as caught:
        await USES[step](sandbox, made)
    assert caught.value.retryable


@every_use
@pytest.mark.parametrize("status", [502, 504])
async def test_a_gateway_that_fails_leaves_the_sandbox_unreachable(
    provider: Provider, made: Made, sandbox: Sandbox, step: Step, status: int
) -> None:
    _gateway(provider, step, status)
    with pytest.raises(SandboxUnreachable) as caught:
        await USES[step](sandbox, made)
    assert caught.value.retryable
    provider.server.faults.clear()
    await USES[step](sandbox, made)


@every_use
@pytest.mark.parametrize("kind", ["refuse", "cut", "lose"])
async def test_a_connection_that_breaks_leaves_the_sandbox_unreachable(
    provider: Provider, made: Made, sandbox: Sandbox, step: Step, kind: Kind
) -> None:
    after = MIB if step in ("upload", "download") else 0
    provider.server.faults.add(Fault(step, kind, after=after, times=None))
    with pytest.raises(SandboxUnreachable) as caught:
        await USES[step](sandbox, made)
    assert caught.value.retryable
    provider.server.faults.clear()
    await USES[step](sandbox, made)


@pytest.mark.parametrize("step", ["info", "upload", "download", "filesystem"])
async def test_a_connection_that_stands_still_is_given_up(provider: Provider, made: Made, step: Step) -> None:
    sandbox = provider.open_impatient(made)
    provider.server.faults.add(Fault(step, "stall", after=MIB if step in ("upload", "download") else 0, times=None))
    began = time.monotonic()
    with pytest.raises(SandboxUnreachable) as caught:
        await USES[step](sandbox, made)
    assert caught.value.retryable
    assert time.monotonic() - began < 6
    provider.server.faults.clear()
    await USES[step](sandbox, made)


async def test_a_transfer_that_is_slow_but_moves_is_not_given_up(provider: Provider, made: Made) -> None:
    sandbox = provider.open_impatient(made)
    (made.home / "slow").write_bytes(bytes(300_000))
    provider.server.faults.add(Fault("download", "slow", rate=150_000))
    assert await downloaded(sandbox, made.home / "slow") == bytes(300_000)


async def test_a_download_cancelled_while_it_waits_leaves_nothing_hanging(
    provider: Provider, made: Made, sandbox: Sandbox
) -> None:
    await sandbox.connect()
    provider.server.faults.add(Fault("download", "slow", rate=30_000))
    async with nothing_left_waiting():
        reading = asyncio.create_task(_download(sandbox, made))
        await asyncio.sleep(0.5)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_a_command_whose_answer_never_comes_is_given_up(provider: Provider, made: Made, sandbox: Sandbox) -> None:
    await sandbox.connect()
    provider.server.faults.add(Fault("command", "stall"))
    began = time.monotonic()
    with pytest.raises((SandboxTimeout, SandboxUnreachable)) as caught:
        await sandbox.run("echo", timeout=1, output_limit=MIB)
    assert caught.value.retryable
    assert time.monotonic() - began < 12


@every_use
async def test_a_provider_that_is_not_there_leaves_the_sandbox_unreachable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, provider: Provider, step: Step
) -> None:
    with EMULATORS[provider.name]() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        here = Provider(provider.name, base=tmp_path, server=server)
        made = here.create()
        sandbox = here.open(made)
        if step != "info":
            await sandbox.connect()
    began = time.monotonic()
    with pytest.raises(SandboxUnreachable) as caught:
        await USES[step](sandbox, made)
    assert caught.value.retryable
    assert time.monotonic() - began < 15


async def test_one_refused_request_is_tried_again_by_the_next_call(
    provider: Provider, made: Made, sandbox: Sandbox
) -> None:
    provider.server.faults.add(Fault("info", "status", status=503, times=4 if provider.name == "e2b" else 1))
    with pytest.raises(SandboxBusy):
        await sandbox.connect()
    await _run(sandbox, made)


async def test_a_full_disk_is_a_full_disk(provider: Provider, mount: Callable[..., Path]) -> None:
    made = provider.create()
    mount(made.home, size="1m")
    with pytest.raises(SandboxFull) as caught:
        await _upload(provider.open(made), made)
    assert not caught.value.retryable


async def test_a_gateway_that_says_the_disk_is_full_is_believed(
    provider: Provider, made: Made, sandbox: Sandbox
) -> None:
    _gateway(provider, "upload", 507)
    with pytest.raises(SandboxFull):
        await _upload(sandbox, made)


# References and SDKs


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a?b", "a#b", "a b", "a%2fb", "a\n", "-a", ".", "ä", "x" * 200])
async def test_what_cannot_be_an_id_is_never_asked_for(provider: Provider, name: str) -> None:
    with pytest.raises(BadReference) as caught:
        open_sandbox(f"{provider.name}:{name}")
    assert f"{provider.name}:<" in caught.value.hint
    assert provider.server.calls == []


async def test_a_daytona_sandbox_is_found_by_its_name(provider_of: Callable[[str], Provider]) -> None:
    provider = provider_of("daytona")
    made = provider.create(name="my-box.1")
    done = await open_sandbox("daytona:my-box.1").run("pwd", timeout=10, output_limit=MIB)
    assert done.output.decode().strip() == str(made.home)


async def test_a_missing_sdk_is_named_with_the_line_that_installs_it(
    provider: Provider, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{provider.name.upper()}_API_KEY", f"another-{provider.server.key}")
    monkeypatch.setitem(sys.modules, provider.name, None)
    with pytest.raises(SdkMissing) as caught:
        await provider.open(made).connect()
    assert caught.value.hint == f"pip install 'memory-sidecar[{provider.name}]'"
    assert not caught.value.retryable
    assert provider.server.calls == []


_IMPORTED = """
import asyncio, sys
from sidecar.errors import BadReference
from sidecar.wiring import open_sandbox

async def main():
    local = open_sandbox("local:" + sys.argv[1])
    await local.run("true", timeout=10, output_limit=1000)
    open_sandbox("e2b:abc"), open_sandbox("daytona:abc")
    try:
        open_sandbox("e2b:a/b")
    except BadReference:
        pass

asyncio.run(main())
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"e2b", "daytona", "httpx", "pydantic", "pyqwest"}))
"""


def test_no_sdk_is_imported_before_a_sandbox_is_reached(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED, tmp_path],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert done.stdout.strip() == ""


# What an SDK's exceptions mean

UNUSED = SandboxError
"""Of a part of the SDK that is not used here: one of ours, whichever."""

E2B_MEANINGS: dict[str, tuple[type[SandboxError], bool | None]] = {
    "SandboxException": (SandboxUnreachable, True),
    "TimeoutException": (SandboxUnreachable, True),
    "InvalidArgumentException": (SandboxError, False),
    "NotEnoughSpaceException": (SandboxFull, False),
    "NotFoundException": (SandboxGone, False),
    "FileNotFoundException": (TransferFailed, True),
    "SandboxNotFoundException": (SandboxGone, False),
    "SandboxNotRunningException": (SandboxGone, False),
    "SandboxUnreachableException": (SandboxUnreachable, True),
    "AuthenticationException": (SandboxDenied, False),
    "TemplateException": (SandboxError, False),
    "RateLimitException": (SandboxBusy, True),
    "GuestUnresponsiveException": (SandboxError, False),
    "ServiceBusyException": (SandboxBusy, True),
    **dict.fromkeys(
        [
            "GitAuthException",
            "GitUpstreamException",
            "BuildException",
            "FileUploadException",
            "VolumeException",
            "VolumeNotFoundException",
            "VolumePathNotFoundException",
            "SecretException",
            "SecretNotFoundException",
        ],
        (UNUSED, None),
    ),
}

DAYTONA_MEANINGS: dict[str, tuple[int | None, type[SandboxError], bool | None]] = {
    "DaytonaError": (None, SandboxUnreachable, True),
    "DaytonaNotFoundError": (404, SandboxGone, False),
    "DaytonaAuthenticationError": (401, SandboxDenied, False),
    "DaytonaForbiddenError": (403, SandboxDenied, False),
    "DaytonaRateLimitError": (429, SandboxBusy, True),
    "DaytonaConflictError": (409, SandboxBusy, True),
    "DaytonaBadRequestError": (400, TransferFailed, True),
    "DaytonaTimeoutError": (None, SandboxUnreachable, True),
    "DaytonaQueueTimeoutError": (None, SandboxError, None),
    "DaytonaSpotEvictedError": (None, SandboxGone, False),
    "DaytonaConnectionError": (None, SandboxUnreachable, True),
    "DaytonaConnectionTimeoutError": (None, SandboxUnreachable, True),
    "DaytonaGoneError": (410, SandboxGone, False),
    "DaytonaUnprocessableEntityError": (422, TransferFailed, True),
    "DaytonaInternalServerError": (500, SandboxUnreachable, True),
    "DaytonaBadGatewayError": (502, SandboxUnreachable, True),
    "DaytonaServiceUnavailableError": (503, SandboxBusy, True),
    "DaytonaFileNotFoundError": (404, TransferFailed, True),
    "DaytonaFileAccessDeniedError": (403, TransferFailed, True),
    "DaytonaInvalidFilePathError": (400, TransferFailed, True),
    "DaytonaFileReadFailedError": (500, SandboxError, True),
    "DaytonaProcessExecutionTimeoutError": (408, SandboxTimeout, True),
    "DaytonaProcessNotFoundError": (404, UNUSED, None),
    "DaytonaSessionEndedError": (410, UNUSED, None),
    "DaytonaCommandAlreadyCompletedError": (410, UNUSED, None),
    "DaytonaLspServerNotInitializedError": (400, UNUSED, None),
    "DaytonaA11yUnavailableError": (503, UNUSED, None),
    "DaytonaRecordingStillActiveError": (409, UNUSED, None),
    "DaytonaRecordingFfmpegNotFoundError": (503, UNUSED, None),
    "DaytonaGitAuthFailedError": (401, UNUSED, None),
    "DaytonaGitRepoNotFoundError": (404, UNUSED, None),
    "DaytonaGitBranchNotFoundError": (404, UNUSED, None),
    "DaytonaGitBranchExistsError": (409, UNUSED, None),
    "DaytonaGitPushRejectedError": (409, UNUSED, None),
    "DaytonaGitDirtyWorktreeError": (409, UNUSED, None),
    "DaytonaGitMergeConflictError": (409, UNUSED, None),
    "DaytonaGitTransportFailedError": (502, UNUSED, None),
    "DaytonaGitRemoteRejectedError": (422, UNUSED, None),
}


def _meant(meaning: SandboxError, expected: type[SandboxError], retryable: bool | None) -> None:
    assert isinstance(meaning, expected)
    if retryable is not None:
        assert meaning.retryable is retryable
    if expected is SandboxDenied:
        assert "API_KEY" in meaning.hint
    assert "e2b." not in type(meaning).__module__
    assert "daytona." not in type(meaning).__module__


@pytest.mark.parametrize("name", E2B_MEANINGS)
def test_every_exception_of_the_e2b_sdk_has_a_meaning(name: str) -> None:
    expected, retryable = E2B_MEANINGS[name]
    _meant(E2B().meaning(getattr(e2b.exceptions, name)("it says so"), "e2b:x"), expected, retryable)


@pytest.mark.parametrize("name", DAYTONA_MEANINGS)
def test_every_exception_of_the_daytona_sdk_has_a_meaning(name: str) -> None:
    status, expected, retryable = DAYTONA_MEANINGS[name]
    problem = getattr(daytona.common.errors, name)("it says so", status_code=status)
    _meant(Daytona().meaning(problem, "daytona:x"), expected, retryable)


@pytest.mark.parametrize(
    ("module", "table"), [(e2b.exceptions, E2B_MEANINGS), (daytona.common.errors, DAYTONA_MEANINGS)]
)
def test_no_exception_of_an_sdk_is_forgotten(module: object, table: dict[str, object]) -> None:
    defined = {kind.__name__ for _, kind in inspect.getmembers(module, inspect.isclass) if issubclass(kind, Exception)}
    assert defined == set(table)


@pytest.mark.parametrize(
    "problem",
    [
        httpx.RemoteProtocolError("peer closed"),
        httpx.ReadTimeout("slow"),
        httpx.ConnectError("refused"),
        ConnectionResetError(104, "reset"),
        TimeoutError(),
        ValueError("not JSON"),
        KeyError("id"),
    ],
    ids=lambda problem: type(problem).__name__,
)
@pytest.mark.parametrize("vendor", [E2B(), Daytona()], ids=["e2b", "daytona"])
def test_what_breaks_below_an_sdk_leaves_the_sandbox_unreachable(vendor: Vendor, problem: Exception) -> None:
    meaning = vendor.meaning(problem, "x:y")
    assert type(meaning) is SandboxUnreachable
    assert meaning.retryable


def test_a_full_disk_is_known_by_its_words_at_daytona() -> None:
    refused = daytona.common.errors.DaytonaBadRequestError("/home/x: no space left on device", status_code=400)
    assert type(Daytona().meaning(refused, "daytona:x")) is SandboxFull


@pytest.mark.parametrize("status", [400, 409, 422])
def test_what_e2b_refuses_is_not_tried_again(status: int) -> None:
    meaning = E2B().meaning(e2b.SandboxException("no", status_code=status), "e2b:x")
    assert type(meaning) is SandboxError
    assert not meaning.retryable
