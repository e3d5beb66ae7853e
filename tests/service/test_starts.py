"""One call for a sandbox that remembers: never two, none that is forgotten, and none ended before it is saved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.engine import ExportRequest, RestoreRequest, export
from sidecar.errors import BadReference, NotEnded, SandboxError, SandboxNotAllowed, SidecarError, UsageError
from sidecar.ids import STARTS
from sidecar.models.answers import Attached
from sidecar.ports import SandboxPlan
from sidecar.service import starts
from sidecar.service.attachments.attachment import CareOptions
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.core import Sidecar
from sidecar.service.idempotency import KeyReused
from sidecar.service.jobs.scheduler import Jobs
from sidecar.service.settings import Service
from sidecar.service.starts import StartRequest, Starts, StartUnderWay
from sidecar.wiring import open_provider, open_sandbox
from tests.parts.homes import empty_home, engine_at, run_cli, write
from tests.parts.providers import Provider
from tests.parts.services import TOKEN, path, serving

pytestmark = pytest.mark.usefixtures("forked_programs")
PROVIDERS = ("local", "e2b", "daytona")


class Starter:
    """A service without HTTP that creates sandboxes."""

    def __init__(self, tmp_path: Path, provider: Provider) -> None:
        self.engine = engine_at(tmp_path / "store", open_provider=open_provider)
        self.sidecar = Sidecar(self.engine, Service())
        self.keeper = Keeper(self.sidecar, Jobs())
        self.starts = Starts(self.sidecar, self.keeper)
        self.provider = provider

    async def start(self, key: str = "", memory: str = "me", **more: Any) -> Attached:
        await self.keeper.lease.renew()
        plan: dict[str, Any] = {"template": "", "metadata": {}, "timeout": None, **more}
        request = StartRequest(
            provider=self.provider.name,
            restore=RestoreRequest(memory=memory, must_exist=memory == "nobody", announce=True),
            care=CareOptions(lasting=True),
            **plan,
        )
        return await self.starts.start(request, key)

    async def records(self) -> list[str]:
        return [info.key async for info in self.engine.repository.store.list(STARTS)]

    async def die(self) -> None:
        """What others see of a service that was killed, once its lease is over."""
        await self.keeper.lease.release()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where local sandboxes are created."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest, provider_of: Callable[[str], Provider], temporary: Path) -> Provider:
    return provider_of(request.param)


def living(provider: Provider, temporary: Path) -> list[Path]:
    """The homes of the sandboxes that exist."""
    if provider.remote:
        return [one.home for one in provider.server.sandboxes() if one.state != one.GONE]
    return sorted(temporary.glob("memory-sidecar-sandbox-*"))


async def remember(tmp_path: Path, text: str = "learned") -> None:
    home = empty_home(tmp_path / "first")
    write(home / "MEMORY.md", text.encode())
    await export(engine_at(tmp_path / "store"), open_sandbox(f"local:{home}"), ExportRequest(memory="me"))


async def test_a_sandbox_that_is_started_remembers_and_is_saved_before_it_is_ended(
    tmp_path: Path, provider: Provider, temporary: Path
) -> None:
    await remember(tmp_path)
    starter = Starter(tmp_path, provider)
    more: dict[str, Any] = {} if provider.name == "local" else {"metadata": {"team": "docs"}, "timeout": 1200.0}
    started = await starter.start("k1", **more)
    (home,) = living(provider, temporary)
    assert (home / "MEMORY.md").read_text() == "learned"
    assert started.restored is not None and started.restored.outcome.value == "complete"
    assert started.attachment.lasting and started.attachment.sandbox == started.restored.sandbox
    if provider.remote:
        (made,) = [one for one in provider.server.sandboxes() if one.home == home]
        assert made.metadata["team"] == "docs" and made.ends_at is not None
    again = await starter.start("k1", **more)
    other = Starter(tmp_path, provider)
    assert (
        again.attachment.sandbox == (await other.start("k1", **more)).attachment.sandbox == started.attachment.sandbox
    )
    with pytest.raises(KeyReused):
        await other.start("k1", metadata={"other": "1"})
    assert living(provider, temporary) == [home] and not await starter.records()
    write(home / "MEMORY.md", b"learned, and more")
    stopped = await starter.starts.stop("me")
    assert stopped.exported is not None and stopped.exported.is_saved and stopped.attachment.state == "ended"
    assert living(provider, temporary) == [] and not await starter.keeper.find_all()
    await starter.start("k2", **more)
    (home,) = living(provider, temporary)
    assert (home / "MEMORY.md").read_text() == "learned, and more"


class Killed(BaseException):
    """The service is gone at this very moment."""


STEPS = (
    "before it is created",
    "its answer is lost",
    "before it is restored",
    "before it is attached",
    "before the end",
)


def kill_at(step: str, starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a service die at a step of a start, so that nothing of it runs afterwards."""
    engine = starter.engine

    class Dying:
        """A provider that takes the request of a service that does not live to see the answer."""

        def __init__(self, name: str, **how: Any) -> None:
            self.inner = open_provider(name, **how)

        async def create(self, plan: SandboxPlan) -> str:
            if step == "before it is created":
                raise Killed
            ref = await self.inner.create(plan)
            if step == "its answer is lost":
                raise Killed
            return ref

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    async def die(*args: Any, **more: Any) -> Any:
        raise Killed

    object.__setattr__(starter.sidecar.engine, "open_provider", Dying)
    assert starter.sidecar.engine is not engine
    if step == "before it is restored":
        monkeypatch.setattr(starter.sidecar, "start_restore", die)
    elif step == "before it is attached":
        monkeypatch.setattr(starter.keeper, "look_after", die)
    elif step == "before the end":
        monkeypatch.setattr(starter.sidecar.remembered_calls, "begin", die)


def late_plan(records: list[str]) -> SandboxPlan:
    """What a service asked for that died, and that its provider does late."""
    return SandboxPlan(name=records[0].removeprefix(STARTS), attempt="late")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["local", "e2b", "daytona"])
async def test_a_service_that_dies_leaves_no_second_sandbox_and_none_that_is_forgotten(
    step: str,
    name: str,
    tmp_path: Path,
    provider_of: Callable[[str], Provider],
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provider = provider_of(name)
    await remember(tmp_path)
    for repeated in (True, False):
        dying, other = Starter(tmp_path, provider), Starter(tmp_path, provider)
        with monkeypatch.context() as patched:
            kill_at(step, dying, patched)
            with pytest.raises(Killed):
                await dying.start(f"key {repeated}")
        assert len(await dying.records()) == 1
        with pytest.raises(StartUnderWay):
            await other.start(f"key {repeated}")
        await other.starts.clear_up()
        assert len(await other.records()) == 1, "the other one may still be at it"
        await dying.die()
        if repeated:
            started = await other.start(f"key {repeated}")
            (home,) = living(provider, temporary)
            assert (home / "MEMORY.md").read_text() == "learned"
            await other.starts.clear_up()
            assert living(provider, temporary) == [home] and len(await other.records()) == 1
            # A second one that the dead service asked for may appear late. The one that was answered with is never ended.
            await other.keeper.detach(started.attachment)
            extra = await open_provider(name).create(late_plan(await other.records())) if provider.remote else ""
            await other.starts.clear_up()
            assert living(provider, temporary) == [home], extra
            with monkeypatch.context() as patched:
                patched.setattr(starts, "LATE_SECONDS", -1.0)
                await other.starts.clear_up()
            assert living(provider, temporary) == [home] and not await other.records()
            await other.keeper.look_after(("me", started.attachment.sandbox), CareOptions(lasting=True))
            await other.starts.stop("me", started.attachment.sandbox)
        else:
            monkeypatch.setattr(starts, "LATE_SECONDS", -1.0)
            await other.keeper.lease.renew()
            await other.starts.clear_up()
            attached = [one.sandbox for one in await other.keeper.find_all()]
            assert len(living(provider, temporary)) == len(attached) == (step == "before the end")
            assert not await other.records()


async def test_a_sandbox_whose_memory_cannot_be_restored_is_ended_and_it_is_said(
    tmp_path: Path, provider: Provider, temporary: Path
) -> None:
    starter = Starter(tmp_path, provider)
    with pytest.raises(SidecarError) as refused:
        await starter.start("k", memory="nobody")
    assert refused.value.code == "memory-not-found" and "was ended; it held nothing else" in refused.value.message
    assert living(provider, temporary) == [] and not await starter.records()


async def test_what_a_provider_refuses_is_said_and_leaves_nothing(
    tmp_path: Path, provider_of: Callable[[str], Provider], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = provider_of("e2b")
    starter = Starter(tmp_path, provider)
    with pytest.raises(SandboxError, match="template 'missing-template' not found"):
        await starter.start("k", template="missing-template")
    monkeypatch.setattr(starts, "LATE_SECONDS", -1.0)
    await starter.starts.clear_up()
    assert living(provider, temporary) == [] and not await starter.records()
    with pytest.raises(BadReference, match="no provider"):
        await Starter(tmp_path, Provider("modal", base=tmp_path)).start()
    with pytest.raises(UsageError, match="no template"):
        await Starter(tmp_path, provider_of("local")).start(template="x")


async def test_a_sandbox_that_is_not_saved_is_not_ended_unless_that_is_said(
    tmp_path: Path, provider: Provider, temporary: Path
) -> None:
    await remember(tmp_path)
    starter = Starter(tmp_path, provider)
    started = await starter.start()
    (home,) = living(provider, temporary)
    (home / "MEMORY.md").unlink()  # the export is rejected: nothing of the memory is left
    with pytest.raises(NotEnded, match="was not ended"):
        await starter.starts.stop("me")
    assert living(provider, temporary) == [home]
    assert [one.sandbox for one in await starter.keeper.find_all()] == [started.attachment.sandbox]
    await starter.starts.stop("me", discard=True)
    assert living(provider, temporary) == [] and not await starter.keeper.find_all()


async def test_a_second_sandbox_of_a_memory_is_warned_of(
    tmp_path: Path, provider_of: Callable[[str], Provider], temporary: Path
) -> None:
    starter = Starter(tmp_path, provider_of("local"))
    first, second = await starter.start(), await starter.start()
    assert first.restored is not None and "other sandboxes" not in " ".join(first.restored.warnings)
    assert second.restored is not None
    (warning,) = [one for one in second.restored.warnings if "other sandboxes" in one]
    assert first.attachment.sandbox in warning and second.attachment.sandbox not in warning


async def test_a_first_start_that_was_never_used_is_ended_and_one_that_was_is_not(
    tmp_path: Path, provider: Provider, temporary: Path
) -> None:
    starter = Starter(tmp_path, provider)
    await starter.start()
    stopped = await starter.starts.stop("me")
    assert stopped.attachment.state == "ended" and living(provider, temporary) == []
    assert stopped.exported is not None and stopped.exported.outcome == "rejected"
    await starter.start()
    (home,) = living(provider, temporary)
    time.sleep(0.05)  # the clock of a file system ticks every few milliseconds
    write(home / "work/notes.odd", b"no layout knows it")
    with pytest.raises(NotEnded, match="holds no memory"):
        await starter.starts.stop("me")
    assert living(provider, temporary) == [home]


async def test_a_folder_that_was_not_made_by_start_is_never_removed_or_restored_into(
    tmp_path: Path, provider_of: Callable[[str], Provider], temporary: Path
) -> None:
    await remember(tmp_path)
    starter, home = Starter(tmp_path, provider_of("local")), tmp_path / "first"
    await starter.keeper.look_after(("me", f"local:{home}"), CareOptions(lasting=True))
    before = (await starter.engine.repository.head("me")).snapshot
    write(home / "MEMORY.md", b"learned more")
    with pytest.raises(SandboxNotAllowed, match="not made by `start`"):
        await starter.starts.stop("me", discard=True)
    assert (home / "MEMORY.md").exists() and (await starter.engine.repository.head("me")).snapshot == before
    planted = temporary / f"memory-sidecar-sandbox-{'a' * 40}"
    planted.symlink_to(home)
    account = open_provider("local")
    with pytest.raises(SandboxNotAllowed, match="there already"):
        await account.create(SandboxPlan(name="a" * 40, attempt="1"))
    for ref in (f"local:{planted}", f"local:{tmp_path}/elsewhere/memory-sidecar-sandbox-{'b' * 40}"):
        with pytest.raises(SandboxNotAllowed):
            await account.end(ref)


@pytest.mark.parametrize("name", ["e2b", "daytona"])
async def test_a_sandbox_is_found_by_its_name_whatever_page_it_is_on(
    name: str, provider_of: Callable[[str], Provider], monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = provider_of(name)
    monkeypatch.setattr(provider.server, "page", 2)
    account = open_provider(name)
    for number in range(5):
        await account.create(SandboxPlan(name=f"{number:040x}", attempt="0", metadata={"all": "same"}))
    twice = SandboxPlan(name="f" * 40, attempt="1")
    first, second = await asyncio.gather(account.create(twice), account.create(twice))
    found = await account.find("f" * 40)
    assert set(found) == {first, second} and (name == "daytona" or first == second)
    assert len(await account.find(f"{3:040x}")) == 1 and not await account.find("0" * 39 + "9")
    for ref in found:
        await account.end(ref)
        await account.end(ref)  # one that is gone is no error
    assert not await account.find("f" * 40)
    again = await account.create(SandboxPlan(name="f" * 40, attempt="2"))
    assert again not in (first, second) and await account.find("f" * 40) == [again]


def test_start_and_stop_by_command_and_over_http(tmp_path: Path, temporary: Path) -> None:
    roots = tmp_path / "roots"
    roots.mkdir()
    with serving(tmp_path / "store", tmp_path / "log", local_roots=[str(roots)]) as service:
        env = {"MEMORY_SIDECAR_URL": service.url, "MEMORY_SIDECAR_TOKEN": TOKEN}
        words = ("start", "me", "--on=local:", "--key=k1")
        started = run_cli(*words, store=tmp_path / "store", env=env)
        assert started.code == 0, started
        (home,) = roots.iterdir()
        assert started.document["sandbox"] == f"local:{home}" and started.document["restored"]["outcome"] == "empty"
        assert run_cli(*words, store=tmp_path / "store", env=env).document["sandbox"] == f"local:{home}"
        write(home / "notes.odd", b"no layout knows it")
        refused = run_cli("stop", "me", store=tmp_path / "store", env=env)
        assert refused.code == 3 and refused.document["error"]["code"] == "not-ended" and home.exists()
        write(home / "MEMORY.md", b"learned")
        stopped = run_cli("stop", "me", store=tmp_path / "store", env=env)
        assert stopped.code == 0 and stopped.document["exported"]["outcome"] == "committed" and not home.exists()
        body = {"on": "local:", "conversation": "c2"}
        answer = service.http.post(path("me", "sandboxes"), json=body, headers={"Idempotency-Key": "k2"}).json()
        (home,) = roots.iterdir()
        assert answer["attachment"]["sandbox"] == f"local:{home}" and (home / "MEMORY.md").read_text() == "learned"
        assert service.http.delete(path("me", "sandboxes")).json()["attachment"]["state"] == "ended"
        assert service.http.delete(path("me", "sandboxes")).status_code == 404
        assert service.http.post(path("me", "sandboxes"), json={"on": "modal:x"}).status_code == 400
        bad = run_cli("start", "me", "--on=local:", "--metadata=x", store=tmp_path / "store", env=env)
        assert bad.code == 2
