"""Creates, lists and ends sandboxes: at a provider through its SDK, or as folders of this machine."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from adapters.sandboxes.remote import KEYS, Vendor, remove_credentials
from sidecar.errors import (
    BadReference,
    SandboxError,
    SandboxGone,
    SandboxNotAllowed,
    SandboxNotFound,
    SandboxUnreachable,
    SidecarError,
    UsageError,
)
from sidecar.host.work import start_in_thread
from sidecar.policy.local_folders import ALLOW, LocalPolicy
from sidecar.ports import RUNNING, ListedSandbox, SandboxPage, SandboxPlan

PATIENCE_SECONDS = 150.0
"""How long a provider may take to create a sandbox."""
PREFIX = "memory-sidecar-sandbox-"
_FOLDER = re.compile(PREFIX + "[0-9a-f]{40}")
T = TypeVar("T")


class Account(Protocol):
    """One provider's SDK. Every method blocks, and raises whatever the SDK raises, or a ``SidecarError``."""

    @property
    def vendor(self) -> Vendor:
        """Who translates the SDK's errors."""
        ...

    def create(self, plan: SandboxPlan) -> str:
        """Create a sandbox, marked with the name of its plan, and return its reference."""
        ...

    def find(self, name: str) -> list[str]:
        """Return the references of the living sandboxes with the mark of a plan."""
        ...

    def list_page(self, page: str) -> SandboxPage:
        """Return a page of all sandboxes, which says which page is next; "" is the first."""
        ...

    def look(self, name: str) -> ListedSandbox:
        """Return what is known of one sandbox, by its id."""
        ...

    def end(self, name: str) -> None:
        """End a sandbox, by its id; one that is gone already is no error."""
        ...


class RemoteProvider:
    """Sandboxes behind a vendor's SDK."""

    def __init__(self, provider: str, account: Account) -> None:
        self._provider = provider
        self._account = account

    async def create(self, plan: SandboxPlan) -> str:
        try:
            return await self._call(lambda: self._account.create(plan), f"a new {self._provider} sandbox")
        except SandboxError as problem:
            if not problem.retryable and problem.hint == SandboxError.default_hint:
                problem.hint = f"Check the name after {self._provider}:, and what the account may create."
            raise

    async def find(self, name: str) -> Sequence[str]:
        return await self._call(lambda: self._account.find(name), f"the list of {self._provider} sandboxes")

    async def list(self, page: str = "") -> SandboxPage:
        return await self._call(lambda: self._account.list_page(page), f"the list of {self._provider} sandboxes")

    async def look(self, ref: str) -> ListedSandbox | None:
        try:
            return await self._call(lambda: self._account.look(ref.partition(":")[2]), ref)
        except (SandboxGone, SandboxNotFound):
            return None

    def check_end(self, ref: str) -> None:
        """Any may be ended: whether the account may is for the provider to say."""

    async def end(self, ref: str) -> None:
        await self._call(lambda: self._account.end(ref.partition(":")[2]), ref)

    async def _call(self, work: Callable[[], T], what: str) -> T:
        """Run a blocking call in a thread, and translate its errors."""
        calling = start_in_thread(work)
        done, _ = await asyncio.wait({calling}, timeout=PATIENCE_SECONDS)
        if not done:
            raise SandboxUnreachable(f"The provider did not answer about {what} within {PATIENCE_SECONDS:.0f} seconds.")
        try:
            return calling.result()
        except SidecarError:
            raise
        except Exception as problem:
            raise remove_credentials(self._account.vendor.meaning(problem, what)) from None


class LocalProvider:
    """Folders of this machine: below the first of the allowed roots, else in the temporary folder.

    Only folders with the names that are given here are ever removed.
    """

    def __init__(self, policy: LocalPolicy) -> None:
        self._policy = policy

    async def create(self, plan: SandboxPlan) -> str:
        if plan.template or plan.timeout is not None:
            raise UsageError("A local sandbox has no template and no time-out.", hint="Write --on local: alone.")
        folder = self._find_base() / f"{PREFIX}{plan.name}"
        self._policy.check(str(folder))
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            _check_own(folder)
        except OSError as problem:
            raise SandboxError(f"{folder} cannot be made: {problem.strerror}.") from None
        return f"local:{folder}"

    async def find(self, name: str) -> Sequence[str]:
        folder = self._find_base() / f"{PREFIX}{name}"
        return [f"local:{folder}"] if folder.is_dir() and not folder.is_symlink() else []

    async def list(self, page: str = "") -> SandboxPage:
        """Folders have no metadata: none is listed."""
        return SandboxPage([])

    async def look(self, ref: str) -> ListedSandbox | None:
        folder = Path(ref.partition(":")[2])
        return ListedSandbox(ref=ref, state=RUNNING) if folder.is_dir() else None

    def check_end(self, ref: str) -> None:
        folder = Path(ref.partition(":")[2])
        if not _FOLDER.fullmatch(folder.name) or folder.is_symlink() or folder.parent != self._find_base():
            raise SandboxNotAllowed(
                f"{ref} is a folder that was not made by `start`, and is not removed.",
                hint="`memory-sidecar detach` stops looking after it; the folder is yours to remove.",
            )

    async def end(self, ref: str) -> None:
        self.check_end(ref)
        folder = Path(ref.partition(":")[2])
        try:
            await asyncio.to_thread(shutil.rmtree, folder)
        except FileNotFoundError:
            return
        except OSError as problem:
            raise SandboxError(f"{folder} cannot be removed: {problem.strerror}.") from None

    def _find_base(self) -> Path:
        if self._policy.roots:
            return Path(self._policy.roots[0])
        if self._policy.confined:
            raise SandboxNotAllowed("This service has no folders that may be sandboxes.", hint=ALLOW)
        return Path(os.path.realpath(tempfile.gettempdir()))


def _check_own(folder: Path) -> None:
    """Raise ``SandboxNotAllowed`` unless a folder that is there already can only be one of an earlier attempt: others may
    write to the temporary folder too."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
        raise SandboxNotAllowed(f"{folder} is there already, and was not made by `start`.", hint="Remove it.")


def find_missing_key(provider: str) -> str:
    """Return the variable that this process has to have for a provider, if it has neither that nor another one; else ""."""
    names = KEYS.get(provider, ())
    return names[0] if names and not any(os.environ.get(name) for name in names) else ""


def open_account(provider: str, policy: LocalPolicy) -> RemoteProvider | LocalProvider:
    """Return who creates sandboxes at a provider. Raise ``BadReference``."""
    if provider == "local":
        return LocalProvider(policy)
    if provider == "e2b":
        from adapters.sandboxes.e2b import E2BAccount

        return RemoteProvider(provider, E2BAccount())
    if provider == "daytona":
        from adapters.sandboxes.daytona import DaytonaAccount

        return RemoteProvider(provider, DaytonaAccount())
    raise BadReference(
        f"{provider[:80]!r} is no provider of sandboxes.", hint="Write e2b:TEMPLATE, daytona:SNAPSHOT or local:."
    )
