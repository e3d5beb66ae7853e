"""Daytona: ``daytona:<id or name>``, through its SDK (``memory-sidecar[daytona]``) with ``DAYTONA_API_KEY`` from the
environment (and ``DAYTONA_API_URL``, ``DAYTONA_TARGET``)."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from io import RawIOBase
from typing import TYPE_CHECKING, Any

from adapters.sandboxes.long_commands import LongCommand, build_user_prefix, check_user, parse_ending
from adapters.sandboxes.remote import (
    LONGEST_ARGUMENT,
    MARK,
    FileMissing,
    RemoteSandbox,
    SandboxConnection,
    format_problem,
    make_denied_error,
    means_no_room,
    means_unwritable,
)
from sidecar.errors import (
    BadReference,
    OutputTooLarge,
    SandboxAsleep,
    SandboxBusy,
    SandboxError,
    SandboxFull,
    SandboxGone,
    SandboxTimeout,
    SandboxUnreachable,
    SandboxUnwritable,
    SdkMissing,
    TransferFailed,
)
from sidecar.ports import ASLEEP, CHANGING, RUNNING, CommandResult, ListedSandbox, SandboxPage, SandboxPlan

if TYPE_CHECKING:
    from daytona import Daytona as Client
    from daytona import Sandbox

COMPLAINT = 4096
WAKE_SECONDS = 120
CREATE_SECONDS = 120
PAGE = 100
"""How many sandboxes are listed with one request."""
PATIENCE_SECONDS = 40
SPARE_SECONDS = 15
ASLEEP_STATES = ("stopped", "paused", "archived")
GONE = ("destroyed", "destroying")
BROKEN = ("error", "build_failed")


def open_daytona(name: str, *, wake: bool = False, user: str = "") -> RemoteSandbox:
    """Return the sandbox for what follows ``daytona:``. No request is sent to Daytona yet."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,127}", name, re.ASCII):
        raise BadReference(
            f"{name[:80]!r} is no id or name of a Daytona sandbox.", hint="Write daytona:<sandbox id or name>."
        )
    return RemoteSandbox(f"daytona:{name}", Daytona(user=user), wake=wake)


class Daytona:
    """The Daytona vendor. ``patience`` is how many seconds a request may stay silent.

    Its requests name no user: commands for another user go through ``sudo``, and files always belong to the daemon's
    user.
    """

    longest_command = LONGEST_ARGUMENT

    def __init__(self, patience: int = PATIENCE_SECONDS, user: str = "") -> None:
        self._patience = patience
        self._user = user

    @property
    def uploads_are_others(self) -> bool:
        return bool(self._user)

    def reach(self, name: str, *, wake: bool) -> SandboxConnection:
        """Connect, starting a stopped sandbox if ``wake``. Raise ``SandboxGone``, ``SandboxBusy`` or ``SandboxAsleep``."""
        box = _get_client().get(name)
        state = box.state.value if box.state is not None else "unknown"
        if state in GONE:
            raise SandboxGone(f"daytona:{name} is gone: it was deleted.")
        if state in BROKEN:
            raise SandboxError(f"daytona:{name} is broken, says Daytona: {box.error_reason or state}")
        if state == "started":
            return SandboxConnection(box, _compute_end(box), slides=_compute_end(box) == _compute_stop(box))
        if state not in ASLEEP_STATES:
            raise SandboxBusy(f"daytona:{name} is {state}.")
        if not wake:
            raise SandboxAsleep(f"daytona:{name} is {state}.")
        box.start(timeout=WAKE_SECONDS)
        return SandboxConnection(
            box, _compute_end(box), woken=True, trips=2, slides=_compute_end(box) == _compute_stop(box)
        )

    def prolong(self, box: Sandbox, seconds: float) -> float | None:
        box.refresh_activity()
        box.last_activity_at = datetime.now().astimezone().isoformat()
        return _compute_end(box)

    def run(
        self,
        box: Sandbox,
        command: str,
        *,
        timeout: float,
        output_limit: int,
        environment: Mapping[str, str],
        started: Callable[[Callable[[], Any]], None],
    ) -> CommandResult:
        """Run a command in the background of the sandbox, with as many requests as it takes."""
        deadline = time.monotonic() + timeout
        patient = LongCommand(
            command,
            output_limit=output_limit,
            longest=math.ceil(timeout) + SPARE_SECONDS,
            user=self._user,
            variables=tuple(environment),
        )
        ended: tuple[str, int] | None = None
        started(lambda: ended or box.process.exec(patient.kill, timeout=self._patience))
        request, variables, trips = patient.start, dict(environment), 0
        while True:
            asked = time.monotonic()
            patience = max(1, min(self._patience, math.ceil(deadline - asked)))
            answer = box.process.exec(request(patience), env=variables or None, timeout=patience + SPARE_SECONDS)
            trips += 1
            try:
                check_user(answer.result, self._user)
                ended = parse_ending(answer.result)
            except SandboxError:
                ended = "", 1  # nothing was started: there is nothing to kill
                raise
            if ended is not None:
                break
            if time.monotonic() > deadline:
                raise SandboxTimeout(f"The command did not end within {timeout:.0f} seconds.")
            # A sandbox that does not even have `sleep` answers at once.
            time.sleep(max(0.0, asked + 1 - time.monotonic()))
            request, variables = patient.wait, {}
        text, code = ended
        if len(output := text.encode()) > output_limit:
            raise OutputTooLarge(f"The sandbox printed more than {output_limit} bytes.")
        return CommandResult(code, output, text[-COMPLAINT:], trips)

    def upload(self, box: Sandbox, path: str, source: RawIOBase) -> None:
        box.fs.upload_file_stream(source, path)

    def download(self, box: Sandbox, path: str) -> Iterator[bytes]:
        if self._user:
            yield from self._download_as_user(box, path)
            return
        if path.startswith("~/"):
            path = f"{box.get_user_home_dir()}/{path[2:]}"
        yield from _stream(box, path)

    def _download_as_user(self, box: Sandbox, path: str) -> Iterator[bytes]:
        """Yield a file of another user, which the daemon may not read: that user copies it into a file of the daemon's."""
        ours = f"/tmp/memory-sidecar-{secrets.token_hex(8)}.bundle"
        place = f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
        copy = shlex.quote(f"cat -- {place}")
        said = box.process.exec(
            f'{build_user_prefix(self._user)}umask 077\n"$@" /bin/sh -c {copy} > {ours}\n', timeout=600
        )
        check_user(said.result, self._user)
        try:
            if said.exit_code != 0:
                raise TransferFailed(f"{path} could not be read as {self._user}: {' '.join(said.result.split())[:200]}")
            yield from _stream(box, ours)
        finally:
            with contextlib.suppress(FileMissing):
                self.remove(box, ours)

    def remove(self, box: Sandbox, path: str) -> None:
        from daytona import DaytonaNotFoundError

        try:
            box.fs.delete_file(path)
        except DaytonaNotFoundError as problem:
            raise _make_missing_error(path, problem) from None

    def meaning(self, problem: Exception, ref: str, *, inside: bool = False) -> SandboxError:
        """Translate an SDK error, by its status first."""
        import daytona

        words = format_problem(problem)
        status = getattr(problem, "status_code", None)
        response = getattr(problem, "response", None)
        if status is None and response is not None:
            status = response.status_code
        if status is None:  # of the client below the SDK's own
            status = getattr(problem, "status", None)
        if isinstance(problem, daytona.DaytonaFileNotFoundError | daytona.DaytonaFileAccessDeniedError):
            return TransferFailed(f"A file of {ref} could not be reached: {words}")
        if status in (401, 403) or isinstance(problem, daytona.DaytonaAuthenticationError):
            return make_denied_error(ref, "Daytona", "DAYTONA_API_KEY")
        if status in (404, 410) or isinstance(problem, daytona.DaytonaSpotEvictedError):
            return SandboxGone(f"{ref} is gone: Daytona does not know it (any more).")
        if status in (409, 423, 429, 503):
            return SandboxBusy(f"Daytona asks to wait before {ref} is used again: {words}")
        if status == 507 or means_no_room(words):
            return SandboxFull(f"There is no space left in {ref}.")
        if inside and means_unwritable(words):
            return SandboxUnwritable(f"A file could not be written in {ref}: {words}")
        if isinstance(problem, daytona.DaytonaProcessExecutionTimeoutError) or status == 408:
            return SandboxTimeout(f"The command in {ref} was ended by its time-out.")
        if status is not None and status < 500:
            return TransferFailed(f"Daytona refused a request for {ref}: {words}")
        return SandboxUnreachable(f"{ref} could not be reached: {words}")


def _stream(box: Sandbox, path: str) -> Iterator[bytes]:
    """Yield a file's bytes. Raise ``FileMissing`` if there is none."""
    from daytona import DaytonaError, DaytonaNotFoundError

    try:
        try:
            yield from box.fs.download_file_stream(path)
        except DaytonaError as problem:
            # The SDK reports an empty file as missing data.
            if "No file data" not in str(problem) or box.fs.get_file_info(path).size:
                raise
    except DaytonaNotFoundError as problem:
        raise _make_missing_error(path, problem) from None


def _make_missing_error(path: str, problem: Exception) -> FileMissing:
    """Return the error for a 404. The daemon does not say what it is that was not found."""
    return FileMissing(f"{path} is not there: {format_problem(problem)}")


def _get_client() -> Client:
    """Return the SDK's client for the account that the environment names."""
    return _make_client(
        tuple(os.environ.get(f"DAYTONA_{name}") for name in ("API_URL", "API_KEY", "JWT_TOKEN", "TARGET"))
    )


@functools.lru_cache(maxsize=4)
def _make_client(account: tuple[str | None, ...]) -> Client:
    try:
        from daytona import Daytona as Client
        from daytona import DaytonaConfig
    except ImportError:
        raise SdkMissing(
            "daytona: sandboxes need the Daytona SDK, which is not installed.",
            hint="pip install 'memory-sidecar[daytona]'",
        ) from None
    # Otherwise the client keeps a socket open for events that are not used here.
    return Client(DaytonaConfig(use_deprecated_polling=True))


def _compute_end(box: Sandbox) -> float | None:
    """Return when Daytona will stop or delete it, unless it is used before."""
    destroyed_at = _parse_time(box.auto_destroy_at) if box.auto_destroy_at else None
    return min((end for end in (_compute_stop(box), destroyed_at) if end is not None), default=None)


def _compute_stop(box: Sandbox) -> float | None:
    """Return when it will be stopped for being idle."""
    if not box.auto_stop_interval or not box.last_activity_at:
        return None
    return _parse_time(box.last_activity_at) + box.auto_stop_interval * 60


def _parse_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _read_state(box: Any) -> str:
    return str(getattr(box.state, "value", box.state) or "unknown")


def _list_one(box: Any) -> ListedSandbox:
    state = _read_state(box)
    return ListedSandbox(
        ref=f"daytona:{box.id}",
        state=RUNNING if state == "started" else ASLEEP if state in ASLEEP_STATES else CHANGING,
        metadata=dict(box.labels or {}),
        created=_parse_time(box.created_at) if box.created_at else 0.0,
        ends_at=_parse_time(box.auto_destroy_at) if getattr(box, "auto_destroy_at", None) else None,
        plan=(box.labels or {}).get(MARK, ""),
    )


class DaytonaAccount:
    """Creates, finds and ends sandboxes of the account that the environment names."""

    vendor = Daytona()

    def create(self, plan: SandboxPlan) -> str:
        client = _get_client()
        from daytona import CreateSandboxFromSnapshotParams

        minutes = None if plan.timeout is None else max(1, math.ceil(plan.timeout / 60))
        params = CreateSandboxFromSnapshotParams(
            snapshot=plan.template or None,
            labels={**plan.metadata, MARK: plan.name},
            auto_stop_interval=minutes,
        )
        return f"daytona:{client.create(params, timeout=CREATE_SECONDS).id}"

    def find(self, name: str) -> list[str]:
        client = _get_client()
        from daytona import ListSandboxesQuery

        boxes = client.list(ListSandboxesQuery(labels={MARK: name}))
        return [
            f"daytona:{box.id}"
            for box in boxes
            if box.labels.get(MARK) == name and (box.state is None or box.state.value not in GONE)
        ]

    def list_page(self, page: str) -> SandboxPage:
        client = _get_client()
        from daytona import SandboxListSortDirection, SandboxListSortField

        # Below the public ``list``, which fails altogether where one sandbox has a label that it does not like, and which
        # does not say where a page ends.
        found = client._sandbox_api.list_sandboxes(
            cursor=page or None,
            limit=PAGE,
            sort=SandboxListSortField.CREATEDAT,
            order=SandboxListSortDirection.DESC,
            _request_timeout=PATIENCE_SECONDS,
        )
        return SandboxPage(
            [_list_one(box) for box in found.items if _read_state(box) not in GONE], found.next_cursor or ""
        )

    def look(self, name: str) -> ListedSandbox:
        box = _get_client().get(name)
        if _read_state(box) in GONE:
            raise SandboxGone(f"daytona:{name} is gone: it was deleted.")
        return _list_one(box)

    def end(self, name: str) -> None:
        client = _get_client()
        from daytona import DaytonaNotFoundError

        with contextlib.suppress(DaytonaNotFoundError):
            client.delete(client.get(name))
