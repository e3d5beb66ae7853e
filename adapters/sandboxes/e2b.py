"""E2B: ``e2b:<sandbox id>``, through its SDK (``memory-sidecar[e2b]``) with ``E2B_API_KEY`` from the environment.

The blocking SDK is used, in threads: its async streams have been seen to abort the interpreter at exit.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from io import RawIOBase
from typing import TYPE_CHECKING, Any

from adapters.sandboxes.remote import (
    LONGEST_ARGUMENT,
    MARK,
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
    SandboxDenied,
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
    from e2b import Sandbox, SandboxInfo
    from e2b.api.client.models import SandboxDetail

COMPLAINT = 4096
PAGE = 100
"""How many sandboxes are listed with one request."""
_NO_FOLDER = re.compile(r"\bcwd '[^']*' does not exist")
WAKE_SECONDS = 300
"""How long a sandbox that was woken runs at least."""


def open_e2b(name: str, *, wake: bool = False, user: str = "") -> RemoteSandbox:
    """Return the sandbox for what follows ``e2b:``. No request is sent to E2B yet."""
    if not re.fullmatch(r"[A-Za-z0-9][\w-]{0,127}", name, re.ASCII):
        raise BadReference(f"{name[:80]!r} is no id of an E2B sandbox.", hint="Write e2b:<sandbox id>.")
    return RemoteSandbox(f"e2b:{name}", E2B(user), wake=wake)


class E2B:
    """The E2B vendor. ``user`` is the user that commands run as, in that user's home, and that files belong to; "": the
    sandbox's default user, in its working folder."""

    longest_command = LONGEST_ARGUMENT
    uploads_are_others = False

    def __init__(self, user: str = "") -> None:
        self._user = user or None

    def reach(self, name: str, *, wake: bool) -> SandboxConnection:
        """Connect, resuming a paused sandbox if ``wake``. Raise ``SandboxGone`` or ``SandboxAsleep``."""
        sdk = _import_sandbox()
        detail = _read_detail(name)
        ends_at = detail.end_at.timestamp()
        if detail.state == "paused":
            if not wake:
                raise SandboxAsleep(f"e2b:{name} is paused.")
            box = sdk.connect(name, timeout=WAKE_SECONDS)
            return SandboxConnection(box, time.time() + WAKE_SECONDS, woken=True, trips=2)
        if not isinstance(detail.envd_access_token, str):
            return SandboxConnection(sdk.connect(name), ends_at, trips=2)
        return SandboxConnection(_open_sandbox(detail, detail.envd_access_token), ends_at)

    def prolong(self, box: Sandbox, seconds: float) -> float:
        box.set_timeout(round(seconds))
        return time.time() + round(seconds)

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
        """Run a command in the working folder, or in the home if that folder was removed."""
        from e2b import InvalidArgumentException

        how: dict[str, Any] = {"timeout": timeout, "output_limit": output_limit, "environment": environment}
        try:
            # The working folder may be another user's home, or after a crash the root of the file system.
            return self._run(box, command, cwd="~" if self._user else None, started=started, **how)
        except InvalidArgumentException as problem:
            if self._user or not _NO_FOLDER.search(str(problem)):
                raise
            # The folder that commands start in was removed. The home serves as well.
            done = self._run(box, command, cwd="~", started=started, **how)
            return replace(done, trips=done.trips + 1)

    def _run(
        self,
        box: Sandbox,
        command: str,
        *,
        cwd: str | None = None,
        timeout: float,
        output_limit: int,
        environment: Mapping[str, str],
        started: Callable[[Callable[[], Any]], None],
    ) -> CommandResult:
        """Run a command in one folder, reading its output while it runs."""
        from e2b import CommandExitException, TimeoutException
        from e2b.exceptions import SandboxNotRunningException, SandboxUnreachableException

        began, output, complaint = time.monotonic(), bytearray(), ""
        try:
            handle = box.commands.run(
                command,
                background=True,
                envs=dict(environment) or None,
                user=self._user,
                cwd=cwd,
                timeout=timeout,
                retain_output=False,
            )
            started(handle.kill)
            for stdout, stderr, _ in handle:
                output += (stdout or "").encode()
                complaint = (complaint + (stderr or ""))[-COMPLAINT:]
                if len(output) > output_limit:
                    raise OutputTooLarge(f"The sandbox printed more than {output_limit} bytes.")
            return CommandResult(handle.wait().exit_code, bytes(output), complaint)
        except CommandExitException as ended:
            return CommandResult(ended.exit_code, bytes(output), complaint)
        except TimeoutException as problem:
            # The SDK raises this for many reasons; a time-out of the command is recognised by the clock.
            other = isinstance(problem, SandboxNotRunningException | SandboxUnreachableException)
            if other or time.monotonic() - began < timeout - 1:
                raise
            raise SandboxTimeout(f"The command did not end within {timeout:.0f} seconds.") from None

    def upload(self, box: Sandbox, path: str, source: RawIOBase) -> None:
        box.files.write(path, source, user=self._user)

    def download(self, box: Sandbox, path: str) -> Iterator[bytes]:
        return box.files.read(path, format="stream", user=self._user)

    def remove(self, box: Sandbox, path: str) -> None:
        from e2b import FileNotFoundException

        with contextlib.suppress(FileNotFoundException):
            box.files.remove(path, user=self._user)

    def meaning(self, problem: Exception, ref: str, *, inside: bool = False) -> SandboxError:
        """Translate an SDK error, by its type first."""
        import e2b
        from e2b.exceptions import SandboxNotRunningException, ServiceBusyException

        words = format_problem(problem)
        status = getattr(problem, "status_code", None)
        if isinstance(problem, e2b.AuthenticationException) or status in (401, 403):
            return self._make_turned_away_error(words, ref) if inside else make_denied_error(ref, "E2B", "E2B_API_KEY")
        if isinstance(problem, e2b.FileNotFoundException):
            return TransferFailed(f"A file of {ref} could not be read: {words}")
        if isinstance(problem, e2b.NotFoundException):
            return SandboxGone(f"{ref} is gone: E2B does not know it (any more).")
        if isinstance(problem, SandboxNotRunningException):
            return SandboxGone(f"{ref} is gone: it was killed or reached its time-out.")
        if isinstance(problem, e2b.RateLimitException | ServiceBusyException):
            return SandboxBusy(f"E2B asks to wait before {ref} is used again: {words}")
        if isinstance(problem, e2b.NotEnoughSpaceException) or means_no_room(words):
            return SandboxFull(f"There is no space left in {ref}.")
        if inside and means_unwritable(words):
            return SandboxUnwritable(f"A file could not be written in {ref}: {words}")
        refused = isinstance(problem, e2b.InvalidArgumentException | e2b.TemplateException)
        if refused or (isinstance(problem, e2b.SandboxException) and (status or 0) in range(400, 500)):
            return SandboxError(f"E2B refused a request for {ref}: {words}")
        return SandboxUnreachable(f"{ref} could not be reached: {words}")

    def _make_turned_away_error(self, words: str, ref: str) -> SandboxDenied:
        """Return the error if the daemon in the sandbox, which knows no API key, denies access."""
        if "user" in words.lower():
            whom = f"user {self._user!r}" if self._user else "default user"
            return SandboxDenied(
                f"There is no {whom} in {ref}, says its daemon.",
                hint="Name one that is there with --user, or leave it out for the sandbox's default user.",
            )
        return SandboxDenied(
            f"The daemon in {ref} did not accept the access token that E2B gave for it.",
            hint="It was started again, or is not the one that E2B knows: pause and resume the sandbox, or make a new one."
            " The API key is fine.",
        )


def _read_detail(name: str) -> SandboxDetail:
    """Return what E2B knows of a sandbox, in one request that does not change it: ``Sandbox.connect`` would wake a
    paused one, and the public ``get_info`` does not return what is needed to talk to it."""
    from e2b.api import handle_api_exception
    from e2b.api.client.models import SandboxDetail
    from e2b.api.client_sync import get_api_client
    from e2b.connection_config import ConnectionConfig

    answer = get_api_client(ConnectionConfig()).get_httpx_client().get(f"/sandboxes/{name}")
    if answer.status_code == 404:
        raise SandboxGone(f"e2b:{name} is gone: E2B does not know it (any more).")
    if answer.status_code >= 300:
        raise handle_api_exception(answer)
    return SandboxDetail.from_dict(answer.json())


def _open_sandbox(detail: SandboxDetail, token: str) -> Sandbox:
    """Return the SDK's object for a running sandbox, built from what is known of it, as ``Sandbox.connect`` does after
    its request."""
    from e2b import Sandbox
    from e2b.connection_config import ConnectionConfig
    from packaging.version import Version

    headers = {
        "E2b-Sandbox-Id": detail.sandbox_id,
        "E2b-Sandbox-Port": str(ConnectionConfig.envd_port),
        "X-Access-Token": token,
    }
    return Sandbox(
        sandbox_id=detail.sandbox_id,
        sandbox_domain=detail.domain if isinstance(detail.domain, str) else None,
        envd_version=Version(detail.envd_version),
        envd_access_token=token,
        traffic_access_token=None,
        connection_config=ConnectionConfig(extra_sandbox_headers=headers),
    )


class E2BAccount:
    """Creates, finds and ends sandboxes of the account that the environment names."""

    vendor = E2B()

    def create(self, plan: SandboxPlan) -> str:
        sdk = _import_sandbox()
        # The idempotency key covers a request that was sent twice; the metadata, one whose answer was lost for good.
        box = sdk.create(
            plan.template or None,
            timeout=None if plan.timeout is None else round(plan.timeout),
            metadata={**plan.metadata, MARK: plan.name},
            idempotency_key=f"{plan.name}-{plan.attempt}",
        )
        return f"e2b:{box.sandbox_id}"

    def find(self, name: str) -> list[str]:
        sdk = _import_sandbox()
        from e2b import SandboxQuery

        pages, found = sdk.list(query=SandboxQuery(metadata={MARK: name})), []
        while pages.has_next:
            found += [f"e2b:{info.sandbox_id}" for info in pages.next_items() if info.metadata.get(MARK) == name]
        return found

    def list_page(self, page: str) -> SandboxPage:
        sdk = _import_sandbox()
        # Earlier versions of the SDK know no order; the service has the newest first then, as it always had.
        order: Any = {"order": "desc"} if "order" in inspect.signature(sdk.list).parameters else {}
        pages = sdk.list(limit=PAGE, next_token=page or None, **order)
        return SandboxPage([_list_one(info) for info in pages.next_items()], pages.next_token or "")

    def look(self, name: str) -> ListedSandbox:
        _import_sandbox()
        return _list_one(_read_detail(name))

    def end(self, name: str) -> None:
        _import_sandbox().kill(name)  # False for one that does not exist


def _list_one(info: SandboxInfo | SandboxDetail) -> ListedSandbox:
    metadata = info.metadata if isinstance(info.metadata, Mapping) else {}
    state = getattr(info.state, "value", info.state)
    return ListedSandbox(
        ref=f"e2b:{info.sandbox_id}",
        state=RUNNING if state == "running" else ASLEEP if state == "paused" else CHANGING,
        metadata=dict(metadata),
        created=info.started_at.timestamp(),
        ends_at=info.end_at.timestamp() if state == "running" else None,
        plan=metadata.get(MARK, ""),
    )


def _import_sandbox() -> type[Sandbox]:
    try:
        from e2b import Sandbox
    except ImportError:
        raise SdkMissing(
            "e2b: sandboxes need the E2B SDK, which is not installed.", hint="pip install 'memory-sidecar[e2b]'"
        ) from None
    return Sandbox
