"""A memory that is to have a living sandbox has one: after every loss, within its budget, whoever dies."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.ids import STARTS, WANTED
from tests.parts.doomed import DOOM, DoomedService
from tests.parts.homes import empty_home, run_cli, write
from tests.parts.killing import Killer
from tests.parts.providers import Emulated, Provider
from tests.parts.services import TOKEN, Service, path, serving, until

REMOTE = ("e2b", "daytona")


class World:
    """A provider, a store with a memory, and services that are to keep a sandbox for it."""

    def __init__(self, tmp_path: Path, provider: Provider) -> None:
        self.provider, self.store, self.base = provider, tmp_path / "store", tmp_path
        home = empty_home(tmp_path / "first")
        write(home / "MEMORY.md", b"lesson 0")
        assert run_cli("export", "me", f"--sandbox=local:{home}", store=self.store).code == 0

    @contextmanager
    def served(
        self,
        log: str = "log",
        *,
        lease: float = 2.0,
        on: str = "",
        kind: type[Service] = Service,
        env: Mapping[str, str] | None = None,
        **table: Any,
    ) -> Iterator[Service]:
        rows = {"memory": "me", "on": on or f"{self.provider.name}:", "check_every": 1, "backoff": 1, "budget": 100}
        more = "".join(f"{key} = {json.dumps(value)}\n" for key, value in {**rows, **table}.items())
        with serving(self.store, self.base / log, env, more=f"[[start]]\n{more}", kind=kind, lease=lease) as service:
            yield service

    def living(self) -> list[Emulated]:
        return [one for one in self.provider.server.sandboxes() if one.state != one.GONE]

    def await_sandbox(self, service: Service, but: str = "") -> Emulated:
        """The one living sandbox, once it is looked after."""
        found: list[Emulated] = []

        def there() -> bool:
            refs = self.looked_after(service)
            found[:] = [one for one in self.living() if f"{self.provider.name}:{one.id}" in refs and one.id != but]
            return len(found) == 1

        until(there)
        return found[0]

    def looked_after(self, service: Service) -> set[str]:
        return {row["sandbox"] for row in self.attachments(service) if row["state"] in ("open", "idle")}

    def is_looked_after(self, service: Service, but: str) -> bool:
        """Whether one sandbox is looked after that is not this one. A service that has just died does not say."""
        try:
            return bool(self.looked_after(service) - {f"{self.provider.name}:{but}"})
        except httpx.TransportError:
            return False

    def attachments(self, service: Service) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = service.http.get("/v1/attachments").json()["attachments"]
        return rows

    def save(self, service: Service, sandbox: Emulated, text: str) -> None:
        write(sandbox.home / "MEMORY.md", text.encode())
        answer = service.export("me", f"{self.provider.name}:{sandbox.id}")
        assert answer.json()["outcome"] in ("committed", "unchanged"), answer.text  # a checkpoint may have been quicker

    def records(self) -> list[str]:
        return [one.name for one in (self.store / STARTS).iterdir()] if (self.store / STARTS).exists() else []

    def created(self) -> int:
        """How often the provider was asked to create one."""
        return sum(call.step == "create" for call in self.provider.server.calls)


@pytest.fixture
def world(tmp_path: Path, provider_of: Callable[[str], Provider]) -> Callable[[str], World]:
    return lambda name: World(tmp_path, provider_of(name))


def lose_again_and_again(world: World, times: int) -> None:
    with world.served() as service:
        sandbox = world.await_sandbox(service)
        for number in range(1, times + 1):
            world.save(service, sandbox, f"lesson {number}")
            sandbox.kill()
            sandbox = world.await_sandbox(service, but=sandbox.id)
            assert (sandbox.home / "MEMORY.md").read_text() == f"lesson {number}"
        assert world.created() == times + 1 and world.living() == [sandbox]
        # The last one is looked after a moment before its creation is over.
        counted = f"memory_sidecar_sandboxes_started_total {times + 1}.0"
        until(lambda: not world.records() and counted in service.http.get("/metrics").text)


@pytest.mark.parametrize("name", REMOTE)
def test_each_sandbox_that_is_killed_is_followed_by_one_with_the_memory_of_the_last_save(
    world: Callable[[str], World], name: str
) -> None:
    lose_again_and_again(world(name), 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", REMOTE)
def test_twenty_sandboxes_are_killed_and_twenty_fresh_ones_remember(world: Callable[[str], World], name: str) -> None:
    lose_again_and_again(world(name), 20)


def test_a_provider_that_refuses_is_asked_within_the_budget_and_it_is_said_loudly(
    world: Callable[[str], World],
) -> None:
    here = world("e2b")
    with here.served(on="e2b:missing-template", budget=3) as service:
        until(lambda: "its budget" in json.dumps(service.http.get("/v1/attachments").json()["missing"]))
        assert here.created() == 3 and here.living() == []
        ready = service.http.get("/readyz")
        assert ready.status_code == 200 and ready.json()["checks"]["sandboxes"].startswith("1 that should be there")
        assert "memory_sidecar_sandboxes_missing 1.0" in service.http.get("/metrics").text
        said = [line for line in service.lines() if line["event"] == "a wanted sandbox is missing"]
        assert [line["level"] for line in said] == ["critical"] * 4
        assert "missing-template" in said[0]["problem"] and "budget" in said[-1]["problem"]
        pauses = [line["next"] for line in said]
        assert pauses == sorted(set(pauses)), "each pause ends later than the one before"
        env = {"MEMORY_SIDECAR_URL": service.url, "MEMORY_SIDECAR_TOKEN": TOKEN}
        assert '"missing"' in json.dumps(run_cli("attachments", store=here.store, env=env).document)
        service.kill()
        service.start()  # the budget is in the store
        until(lambda: service.http.get("/v1/attachments").json()["missing"])
        assert here.created() == 3
    with here.served("mended", budget=4) as service:  # another template, and one more
        here.await_sandbox(service)
        assert service.http.get("/v1/attachments").json()["missing"] == [] and here.created() == 4


def test_what_is_stopped_stays_stopped_until_it_is_started_or_its_table_changes(world: Callable[[str], World]) -> None:
    here = world("e2b")
    with here.served() as service:
        sandbox = here.await_sandbox(service)
        write(sandbox.home / "MEMORY.md", b"the last words")
        stopped = service.http.delete(path("me", "sandboxes")).json()
        assert stopped["exported"]["outcome"] == "committed" and here.living() == []
        assert service.http.get("/v1/attachments").json()["missing"] == []
        service.stop()
        service.start()
        until(lambda: any((here.store / WANTED).iterdir()))
        assert service.http.delete(path("me", "sandboxes")).status_code == 404
        assert here.living() == [] and here.created() == 1
        started = service.http.post(path("me", "sandboxes"), json={"on": "e2b:"}).json()
        sandbox = here.await_sandbox(service)
        assert started["attachment"]["sandbox"] == f"e2b:{sandbox.id}"
        assert (sandbox.home / "MEMORY.md").read_text() == "the last words"
        sandbox.kill()
        sandbox = here.await_sandbox(service, but=sandbox.id)
        service.http.delete(path("me", "sandboxes"))
        assert here.living() == []
    with here.served("changed", timeout=1234) as service:
        sandbox = here.await_sandbox(service)
        assert sandbox.ends_at is not None


def test_a_paused_sandbox_is_not_lost_and_none_is_created_beside_it(world: Callable[[str], World]) -> None:
    here = world("e2b")
    with here.served() as service:
        sandbox = here.await_sandbox(service)
        sandbox.pause()
        before = len(here.provider.control_calls())
        until(lambda: len(here.provider.control_calls()) >= before + 3)  # it was looked at, again and again
        assert here.living() == [sandbox] and here.created() == 1 and sandbox.state == "paused"
        sandbox.kill()
        here.await_sandbox(service, but=sandbox.id)


def test_of_several_services_one_creates(world: Callable[[str], World]) -> None:
    here = world("daytona")
    with here.served("a") as first, here.served("b") as second, here.served("c") as third:
        sandbox = here.await_sandbox(first)
        for killed in (first, second):
            sandbox.kill()
            killed.kill()
            sandbox = here.await_sandbox(third, but=sandbox.id)
        assert here.living() == [sandbox] and here.created() == 3


# The service is killed at every step


def kill_at_requests(world: World, numbers: range, monkeypatch: pytest.MonkeyPatch) -> None:
    with world.served(lease=1.0) as service:
        killer = Killer(world.provider.server, service, monkeypatch)
        sandbox = world.await_sandbox(service)
        for number in numbers:
            for arrives in (True, False):
                world.save(service, sandbox, f"lesson {number} {arrives}")
                killer.arm(number, arrives=arrives)
                sandbox.kill()
                before = sandbox.id
                until(lambda: killer.fired or (len(world.living()) == 1 and not world.records()))
                if not killer.fired:
                    killer.arm(-1, arrives=True)
                    return  # a whole creation needs no more requests than these
                service.start()
                sandbox = world.await_sandbox(service, but=before)
                assert (sandbox.home / "MEMORY.md").read_text() == f"lesson {number} {arrives}"
                until(lambda: len(world.living()) == 1)
                assert world.living() == [sandbox]


@pytest.mark.parametrize("name", REMOTE)
def test_a_service_that_is_killed_while_it_creates_leaves_one_sandbox_and_no_orphan(
    world: Callable[[str], World], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_at_requests(world(name), range(1, 3), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", REMOTE)
def test_a_service_that_is_killed_at_any_request_of_a_creation_leaves_one_sandbox_and_no_orphan(
    world: Callable[[str], World], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_at_requests(world(name), range(30), monkeypatch)


def await_death_or(service: DoomedService, settled: Callable[[], object]) -> bool:
    """Wait until the service has killed itself, or nothing more is to be done. Return whether it has."""
    until(lambda: service.dead or settled())
    if not service.dead:
        time.sleep(0.5)  # what follows a start at once
    service.spare()
    if dead := service.dead:
        service.kill()  # its log may end in the middle of a line
        service.start()
    return dead


def kill_at_writes(world: World, numbers: range, of: str = "") -> None:
    """Have the service that is to keep a sandbox die before and after each write of a creation, or of its record alone."""
    with world.served(lease=1.0, kind=DoomedService, env={DOOM: str(world.base / "doom")}) as service:
        assert isinstance(service, DoomedService)
        sandbox = world.await_sandbox(service)
        for number in numbers:
            for when in ("before", "after"):
                until(lambda: len(world.living()) == 1)
                world.save(service, sandbox, f"lesson {number} {when}")
                before = sandbox.id
                service.doom(number, when, of)
                sandbox.kill()
                died = await_death_or(service, partial(world.is_looked_after, service, before))
                sandbox = world.await_sandbox(service, but=before)
                assert (sandbox.home / "MEMORY.md").read_text() == f"lesson {number} {when}"
                assert world.living() == [sandbox]
                assert died or number > numbers.start
                if not died:
                    return  # a whole creation has no more writes than these


@pytest.mark.parametrize("name", REMOTE)
def test_a_service_that_is_killed_at_a_write_leaves_one_sandbox_and_no_orphan(
    world: Callable[[str], World], name: str
) -> None:
    kill_at_writes(world(name), range(2, 3), STARTS)  # the sandbox is there, and not noted yet


@pytest.mark.slow
@pytest.mark.parametrize("name", REMOTE)
def test_a_service_that_is_killed_at_any_write_of_a_creation_leaves_one_sandbox_and_no_orphan(
    world: Callable[[str], World], name: str
) -> None:
    kill_at_writes(world(name), range(1, 40))


def ask_until_done(service: Service, body: dict[str, Any], key: dict[str, str]) -> dict[str, Any]:
    """Repeat a start until the service answers with what it has done."""
    answers: list[httpx.Response] = []

    def done() -> bool:
        answers.append(service.http.post(path("me", "sandboxes"), json=body, headers=key))
        return answers[-1].status_code == 200

    until(done)
    answer: dict[str, Any] = answers[-1].json()
    return answer


def start_and_kill(world: World, numbers: range, *, repeated: bool) -> None:
    """Have a service die before and after each write of a start that a caller asked for, who repeats the call or not."""
    env = {DOOM: str(world.base / "doom")}
    with serving(world.store, world.base / "log", env, kind=DoomedService, lease=1.0) as service:
        assert isinstance(service, DoomedService)
        for number in numbers:
            for when in ("before", "after"):
                body, key = {"on": f"{world.provider.name}:"}, {"Idempotency-Key": f"start {number} {when}"}
                service.doom(number, when)
                try:
                    service.http.post(path("me", "sandboxes"), json=body, headers=key)
                except httpx.TransportError:
                    until(lambda: service.dead)
                died = await_death_or(service, lambda: True)
                if repeated:
                    answer = ask_until_done(service, body, key)
                    (living,) = world.living()
                    assert answer["attachment"]["sandbox"] == f"{world.provider.name}:{living.id}"
                    assert (living.home / "MEMORY.md").read_text() == "lesson 0"
                else:
                    # The one that is left, if any, is looked after, so it is nobody's orphan.
                    until(lambda: len(world.living()) == len(world.looked_after(service)) <= 1, seconds=120)
                for ref in world.looked_after(service):
                    ended = service.http.delete(path("me", "sandboxes"), params={"sandbox": ref})
                    assert ended.status_code == 200, ended.text
                until(lambda: not world.living())
                assert died or number > numbers.start
                if not died:
                    return


@pytest.mark.parametrize("name", REMOTE)
def test_a_start_that_is_repeated_after_a_kill_has_one_sandbox(world: Callable[[str], World], name: str) -> None:
    start_and_kill(world(name), range(2, 3), repeated=True)


@pytest.mark.slow
@pytest.mark.parametrize("repeated", [True, False])
@pytest.mark.parametrize("name", REMOTE)
def test_a_start_that_is_killed_at_any_write_has_one_sandbox_or_none(
    world: Callable[[str], World], name: str, repeated: bool
) -> None:
    start_and_kill(world(name), range(1, 40), repeated=repeated)


def test_the_first_sandbox_of_a_memory_says_that_there_is_nothing_to_wait_for(world: Callable[[str], World]) -> None:
    here = world("e2b")
    with here.served(memory="newcomer") as service:
        sandbox = here.await_sandbox(service)
        ready = json.loads((sandbox.home / ".cache/memory-sidecar/ready.json").read_text())
    assert ready["outcome"] == "empty" and ready["memory"] == "newcomer"
