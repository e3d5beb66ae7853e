"""A memory is moved to another sandbox: the old one goes only when the new one has it, whatever fails and whoever dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from emulators import Fault
from emulators.calls import Step
from tests.parts.homes import empty_home, run_cli, write
from tests.parts.providers import Emulated, Emulator, Provider
from tests.parts.services import TOKEN, Service, path, serving, until

BOTH = ("e2b", "daytona")


class Places:
    """Two providers, and a service that looks after a sandbox at the first."""

    def __init__(self, tmp_path: Path, provider_of: Callable[[str], Provider]) -> None:
        self.e2b, self.daytona = provider_of("e2b"), provider_of("daytona")
        self.base, self.store = tmp_path, tmp_path / "store"

    @contextmanager
    def served(self, **settings: Any) -> Iterator[Service]:
        with serving(self.store, self.base / "log", lease=1, **settings) as service:
            yield service

    def living(self) -> list[Emulated]:
        boxes = [*self.e2b.server.sandboxes(), *self.daytona.server.sandboxes()]
        return [one for one in boxes if one.state != one.GONE]

    def begin(self, service: Service, text: str = "learned") -> Emulated:
        """Start a sandbox at E2B in which something was learned that is not saved."""
        answer = service.http.post(path("me", "sandboxes"), json={"on": "e2b:", "checkpoint_every": 3600})
        assert answer.status_code == 200, answer.text
        (sandbox,) = self.living()
        write(sandbox.home / "MEMORY.md", text.encode())
        return sandbox

    def looked_after(self, service: Service) -> list[str]:
        rows = service.http.get("/v1/attachments").json()["attachments"]
        return [row["sandbox"] for row in rows if row["state"] in ("open", "idle")]

    def move(self, service: Service, key: str = "", **body: Any) -> httpx.Response:
        headers = {"Idempotency-Key": key} if key else {}
        return service.http.post(path("me", "moves"), json={"to": "daytona:", **body}, headers=headers)

    def move_until_done(self, service: Service, key: str) -> Any:
        """Repeat a call as a client does, until the lease of the service that died is over."""
        answers: list[httpx.Response] = []

        def done() -> bool:
            answers.append(self.move(service, key))
            return answers[-1].status_code == 200

        until(done)
        return answers[-1].json()


@pytest.fixture
def places(tmp_path: Path, provider_of: Callable[[str], Provider]) -> Places:
    return Places(tmp_path, provider_of)


def test_a_memory_is_moved_to_another_provider_and_back_by_http_and_by_command(places: Places) -> None:
    with places.served() as service:
        old = places.begin(service)
        moved = places.move(service, "k", metadata={"team": "docs"}).json()
        (new,) = places.living()
        assert moved["former"] == f"e2b:{old.id}" and moved["former_state"] == "ended"
        assert moved["attachment"]["sandbox"] == f"daytona:{new.id}" and new.metadata["team"] == "docs"
        assert moved["exported"]["outcome"] == "committed" and (new.home / "MEMORY.md").read_text() == "learned"
        assert moved["attachment"]["checkpoint_every"] == 3600
        again = places.move(service, "k", metadata={"team": "docs"}).json()
        assert again == moved and places.living() == [new]
        assert places.looked_after(service) == [f"daytona:{new.id}"]
        write(new.home / "MEMORY.md", b"learned more")
        env = {"MEMORY_SIDECAR_URL": service.url, "MEMORY_SIDECAR_TOKEN": TOKEN}
        back = run_cli("move", "me", "--to=e2b:base", "--keep-old", store=places.store, env=env)
        assert back.code == 0 and back.document["former_state"] == "detached", back
        assert places.looked_after(service) == [back.document["sandbox"]] and new in places.living()
        (here,) = [one for one in places.living() if one is not new]
        assert (here.home / "MEMORY.md").read_text() == "learned more"


def test_what_is_not_saved_is_not_moved(places: Places) -> None:
    with places.served() as service:
        old = places.begin(service)
        assert service.export("me", f"e2b:{old.id}").json()["outcome"] == "committed"
        (old.home / "MEMORY.md").unlink()
        refused = places.move(service)
        assert refused.status_code == 409 and refused.json()["code"] == "not-moved"
        assert places.living() == [old] and places.looked_after(service) == [f"e2b:{old.id}"]
        env = {"MEMORY_SIDECAR_URL": service.url, "MEMORY_SIDECAR_TOKEN": TOKEN}
        assert run_cli("move", "me", "--to=daytona:", store=places.store, env=env).code == 3
        assert places.move(service, to="modal:x").status_code == 400
        assert service.http.post(path("nobody", "moves"), json={"to": "daytona:"}).status_code == 404


@pytest.mark.parametrize(
    ("at", "fault"),
    [
        ("daytona", Fault("create", "status", status=400)),
        ("daytona", Fault("command", "kill", times=None)),
        ("e2b", Fault("kill", "status", status=403, times=None)),
    ],
    ids=["cannot be created", "dies in the restore", "the old one cannot be ended"],
)
def test_whatever_fails_leaves_the_old_sandbox_as_it_was_and_no_other(places: Places, at: str, fault: Fault) -> None:
    with places.served() as service:
        old = places.begin(service)
        server: Emulator = places.daytona.server if at == "daytona" else places.e2b.server
        server.faults.add(fault)
        answer = places.move(service, "k")
        assert answer.status_code >= 400 and "is looked after as before" in answer.json()["detail"], answer.text
        until(lambda: places.living() == [old])
        assert places.looked_after(service) == [f"e2b:{old.id}"]
        assert (old.home / "MEMORY.md").read_text() == "learned"
        server.faults.clear()
        moved = places.move(service, "k")
        assert moved.status_code == 200, moved.text
        assert [f"daytona:{one.id}" for one in places.living()] == [moved.json()["attachment"]["sandbox"]]


def test_a_folder_that_is_not_ours_to_remove_is_left_by_keeping_it(places: Places) -> None:
    home = empty_home(places.base / "mine")
    write(home / "MEMORY.md", b"learned")
    with places.served() as service:
        service.http.put(path("me", "attachment"), json={"sandbox": f"local:{home}"})
        refused = places.move(service)
        assert refused.json()["code"] == "sandbox-not-allowed" and places.living() == []
        assert "keep-old" in refused.json()["hint"]
        assert not any(call.step == "create" for call in places.daytona.server.calls)
        assert places.looked_after(service) == [f"local:{home}"] and (home / "MEMORY.md").exists()
        moved = places.move(service, keep_old=True).json()
        assert moved["former_state"] == "detached" and (home / "MEMORY.md").exists()


# The service is killed at every step


class Killer:
    """Kills a service at the n-th request to any provider since it was armed; that request arrives, or not."""

    def __init__(self, places: Places, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        self._service, self._seen, self._at, self._arrives = service, 0, -1, True
        for server in (places.e2b.server, places.daytona.server):
            take = server.faults.take
            monkeypatch.setattr(server.faults, "take", lambda step, take=take: self._on_request(step, take))

    def arm(self, at: int, *, arrives: bool) -> None:
        self._seen, self._at, self._arrives = 0, at, arrives

    @property
    def fired(self) -> bool:
        return self._at < 0

    def _on_request(self, step: Step, take: Callable[[Step], Fault | None]) -> Fault | None:
        self._seen += 1
        if self._seen - 1 != self._at:
            return take(step)
        self._service.kill()
        self._at = -1
        return None if self._arrives else Fault(step, "refuse")


def kill_at_requests(places: Places, numbers: range, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return at how many requests a move was killed."""
    killed = 0
    with places.served() as service:
        killer = Killer(places, service, monkeypatch)
        for number in numbers:
            for arrives, repeated in ((True, False), (False, False), (True, True)):
                text = f"lesson {number} {arrives} {repeated}"
                old = places.begin(service, text)
                killer.arm(number, arrives=arrives)
                moved: httpx.Response | None = None
                try:
                    moved = places.move(service, text)
                    killer.arm(-1, arrives=True)  # it has fewer requests: what follows is not to be killed
                except httpx.HTTPError:
                    until(lambda: killer.fired)
                    killed += 1
                    service.start()
                    if repeated:
                        assert places.move_until_done(service, text)["former"] == f"e2b:{old.id}"
                        assert old not in places.living()
                until(lambda: len(places.living()) == 1)
                until(lambda: len(places.looked_after(service)) == 1)
                (left,) = places.living()
                name = "e2b" if left is old else "daytona"
                assert places.looked_after(service) == [f"{name}:{left.id}"]
                assert (left.home / "MEMORY.md").read_text() == text
                assert service.http.delete(path("me", "sandboxes")).status_code == 200
                if moved is not None:
                    return killed
    return killed


def test_a_service_that_is_killed_in_a_move_leaves_one_sandbox_with_the_memory(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kill_at_requests(places, range(3, 4), monkeypatch) == 3


@pytest.mark.slow
def test_a_service_that_is_killed_at_any_request_of_a_move_leaves_one_sandbox_with_the_memory(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kill_at_requests(places, range(60), monkeypatch) > 12
