"""A conductor that only creates sandboxes has a memory that goes on: noticed by listing and by webhooks, restored once, saved
until the end, whoever dies."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from emulators import Fault
from sidecar.ids import make_snapshot_id
from sidecar.receipts import RestoreOutcome, RestoreReceipt
from sidecar.service.attachments.attachment import CareOptions
from sidecar.service.attachments.transitions import apply_opening
from tests.parts.homes import run_cli, write
from tests.parts.killing import Killer
from tests.parts.providers import Emulated, Provider
from tests.parts.services import TOKEN, Service, path, until
from tests.parts.watching import REMOTE, SECRET_ENV, SIGN, Watched

BY: dict[str, dict[str, Any]] = {
    "listing": {},
    "webhooks": {"list_every": 0, "secret_env": SECRET_ENV},
    "both": {"secret_env": SECRET_ENV},
}
CHECKPOINT = 1.0


@pytest.fixture
def watched(tmp_path: Path, provider_of: Callable[[str], Provider]) -> Callable[[str], Watched]:
    return lambda name: Watched(tmp_path, provider_of(name))


def go_on(here: Watched, times: int, by: str) -> None:
    """The conductor of five lines: it creates a sandbox, waits for the sign, works, and kills it."""
    with here.served(checkpoint_every=CHECKPOINT, **BY[by]) as service:
        if by != "listing":
            here.hook(service)
        lessons: list[str] = []
        for number in range(times):
            sandbox = here.create(memory="conductor")
            said = here.await_sign(sandbox)
            assert said["sandbox"] == here.ref(sandbox) and not said["read_only"]
            assert said["outcome"] == ("complete" if number else "empty")
            if number:
                assert (sandbox.home / "MEMORY.md").read_text() == "\n".join(lessons)
            lessons.append(f"lesson {number}")
            write(sandbox.home / "MEMORY.md", "\n".join(lessons).encode())
            await_head(service, "\n".join(lessons))
            sandbox.kill()
        until(lambda: here.find(service, sandbox)["state"] == "lost")
        told = [line for line in service.lines() if line["event"] == "sandbox lost"]
        assert len(told) == len({line["sandbox"] for line in told}) == times
        assert all(0 <= line["unsaved_seconds"] < 60 for line in told)
    restored = here.restores("log")
    assert len(restored) == len(set(restored)) == times - 1


def await_head(service: Service, text: str) -> None:
    """Wait until the head has what the agent wrote."""
    place = path("conductor", "snapshots", "latest", "files", "project%2FMEMORY.md")
    until(lambda: service.http.get(place).text == text)


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("e2b", "listing"),
        ("daytona", "webhooks"),
        pytest.param("daytona", "listing", marks=pytest.mark.slow),
        pytest.param("e2b", "both", marks=pytest.mark.slow),
    ],
)
def test_a_conductor_that_only_creates_sandboxes_has_a_memory_that_goes_on(
    watched: Callable[[str], Watched], name: str, by: str
) -> None:
    go_on(watched(name), 3, by)


@pytest.mark.slow
@pytest.mark.parametrize("name", REMOTE)
@pytest.mark.parametrize("by", BY)
def test_a_memory_goes_on_across_twenty_sandboxes(watched: Callable[[str], Watched], name: str, by: str) -> None:
    go_on(watched(name), 20, by)


@pytest.mark.parametrize("outcome", [RestoreOutcome.COMPLETE, RestoreOutcome.EMPTY])
def test_what_may_be_lost_counts_from_before_the_agent_could_write(outcome: RestoreOutcome) -> None:
    """Its agent waits for the sign, and writes at once: before the service has the answer, and before it is attached."""
    place, snapshot = ("conductor", "e2b:i1"), make_snapshot_id(datetime.now(UTC))
    receipt = RestoreReceipt(
        outcome=outcome,
        memory=place[0],
        snapshot=snapshot if outcome is RestoreOutcome.COMPLETE else None,
        parent=None,
        sandbox=place[1],
        duration_ms=5000,
    )
    attachment = apply_opening(place, CareOptions(lasting=True), None, receipt, owner="one", every=30)
    assert attachment.unsaved_seconds >= 5


# Which memory


def test_only_what_the_patterns_allow_is_restored_and_refusals_are_said_once(watched: Callable[[str], Watched]) -> None:
    here = watched("e2b")
    for memory in ("acme/agent-7", "other/secret", "Acme/agent-7"):
        here.remember(memory, f"of {memory}")
    names = {
        "other/secret": "which no [[watch]] allows",
        "acme/../other/secret": "no id of a memory",
        "acme/agent-7\n": "no id of a memory",
        "acme/agent\u200b-7": "no id of a memory",
        " acme/agent-7": "no id of a memory",
        "Acme/agent-7": "which no [[watch]] allows",
        "acme": "which no [[watch]] allows",
        "x" * 5000: "no id of a memory",
        "*": "which no [[watch]] allows",
    }
    with here.served() as service:
        refused = {here.ref(here.create(memory=name)): why for name, why in names.items()}
        silent = [here.create(), here.create(other="acme/agent-7"), here.create(memory="")]
        good = here.create(memory="acme/agent-7")
        here.await_attached(service, good)
        assert (good.home / "MEMORY.md").read_text() == "of acme/agent-7"
        here.settle(service)
        rows = {row["sandbox"]: row for row in here.overview(service)["noticed"]}
        assert rows.keys() == refused.keys()
        for ref, why in refused.items():
            assert rows[ref]["state"] == "refused" and rows[ref]["memory"] == "" and why in rows[ref]["problem"]
        said = [line["message"] for line in service.lines() if "may not have" in line["event"]]
        assert len(said) == len(refused)
        assert 'memory_sidecar_sandboxes_noticed_total{outcome="refused"} 9.0' in service.http.get("/metrics").text
        for one in (*silent, *here.provider.server.sandboxes()):
            if one is not good:
                assert not (one.home / SIGN).exists() and not (one.home / "MEMORY.md").exists()
        env = {"MEMORY_SIDECAR_URL": service.url, "MEMORY_SIDECAR_TOKEN": TOKEN}
        assert '"refused"' in json.dumps(run_cli("attachments", store=here.store, env=env).document)


def test_what_a_caller_restored_or_looks_after_is_left_alone(watched: Callable[[str], Watched]) -> None:
    here = watched("daytona")
    here.remember("conductor", "of the conductor")
    here.remember("mine", "of a caller")
    with here.served("before", memories=["other"]) as service:
        by_call, by_command = here.create(memory="conductor"), here.create(memory="conductor")
        assert service.restore("mine", here.ref(by_call), attach=False).json()["outcome"] == "complete"
        assert run_cli("restore", "mine", f"--sandbox={here.ref(by_command)}", store=here.store).code == 0
        attached = here.create(memory="conductor")
        write(attached.home / "MEMORY.md", b"not restored")
        body = {"sandbox": here.ref(attached)}
        assert service.http.put(path("mine", "attachment"), json=body).status_code == 200
    with here.served() as service:
        here.settle(service, 4)
        assert not here.restores("log")
        assert (by_call.home / "MEMORY.md").read_text() == (by_command.home / "MEMORY.md").read_text() == "of a caller"
        assert (attached.home / "MEMORY.md").read_text() == "not restored"
        assert [row["memory"] for row in here.overview(service)["attachments"] if row["state"] == "open"] == ["mine"]


def test_a_sandbox_that_was_detached_or_exported_is_not_restored_again(watched: Callable[[str], Watched]) -> None:
    here = watched("e2b")
    here.remember()
    with here.served() as service:
        sandbox = here.create(memory="conductor")
        here.await_attached(service, sandbox)
        assert service.http.delete(path("conductor", "attachment")).status_code == 200
        write(sandbox.home / "MEMORY.md", b"the caller's own now")
        here.settle(service)
        service.kill()
        service.start()
        here.settle(service)
        assert here.find(service, sandbox) == {}
        assert (sandbox.home / "MEMORY.md").read_text() == "the caller's own now"


# Two that name one memory


def test_the_second_living_sandbox_of_a_memory_is_a_reader_and_that_is_said(watched: Callable[[str], Watched]) -> None:
    here = watched("e2b")
    here.remember()
    with here.served(checkpoint_every=CHECKPOINT) as service:
        first = here.create(memory="conductor")
        here.await_attached(service, first)
        first.pause()  # it can come back, and is not woken
        second = here.create(memory="conductor")
        assert here.await_sign(second)["read_only"]
        until(lambda: here.overview(service)["noticed"])
        (row,) = here.overview(service)["noticed"]
        assert (row["state"], row["memory"], row["sandbox"]) == ("reader", "conductor", here.ref(second))
        assert here.ref(first) in row["problem"] and first.state == "paused"
        assert here.find(service, second) == {}
        said = [line for line in service.lines() if line["event"] == "a sandbox that names its memory has it"]
        assert [line["beside"] for line in said] == ["", here.ref(first)]
        write(second.home / "MEMORY.md", b"of a reader")
        assert service.export("conductor", here.ref(second)).json()["outcome"] == "diverged"
        first.kill()
        third = here.create(memory="conductor")
        assert not here.await_sign(third)["read_only"]
        assert (third.home / "MEMORY.md").read_text() == "lesson 0"
        here.await_attached(service, third)


def test_of_many_at_once_one_writes_unless_the_watch_says_otherwise(watched: Callable[[str], Watched]) -> None:
    here = watched("e2b")
    here.remember()
    with here.served("a") as one, here.served("b"):
        together = [here.create(memory="conductor") for _ in range(6)]
        signs = [here.await_sign(sandbox) for sandbox in together]
        assert sum(not sign["read_only"] for sign in signs) == 1
        until(lambda: len([row for row in here.overview(one)["attachments"] if row["state"] == "open"]) == 1)
    for sandbox in together:
        sandbox.kill()
    with here.served("c", second="writer") as service:
        together = [here.create(memory="conductor") for _ in range(2)]
        assert not any(here.await_sign(sandbox)["read_only"] for sandbox in together)
        for sandbox in together:
            here.await_attached(service, sandbox)


# What sleeps


def test_a_paused_sandbox_is_not_woken_and_has_its_memory_when_it_runs(watched: Callable[[str], Watched]) -> None:
    here = watched("daytona")
    here.remember()
    with here.served("none", memories=["other"]):
        sandbox = here.create(memory="conductor")
        sandbox.pause()
    with here.served() as service:
        here.settle(service)
        assert sandbox.state == "paused" and not (sandbox.home / SIGN).exists()
        sandbox.resume()
        here.await_attached(service, sandbox)
        assert (sandbox.home / "MEMORY.md").read_text() == "lesson 0"
        sandbox.pause()
        here.settle(service)
        assert sandbox.state == "paused" and here.find(service, sandbox)["state"] == "open"


def test_a_sandbox_made_by_start_is_not_noticed_as_well(watched: Callable[[str], Watched]) -> None:
    here = watched("e2b")
    here.remember()
    with here.served() as service:
        body = {"on": "e2b:", "metadata": {"memory": "conductor"}, "checkpoint_every": 77}
        assert service.http.post(path("acme/agent", "sandboxes"), json=body).status_code == 200
        here.settle(service)
        (row,) = here.overview(service)["attachments"]
        assert (row["memory"], row["checkpoint_every"]) == ("acme/agent", 77) and not here.overview(service)["noticed"]


# Whoever dies


def kill_again_and_again(here: Watched, times: int, seed: int) -> None:
    """A service that is killed at random moments while sandboxes come and go loses nothing and restores nothing twice."""
    dice = random.Random(seed)
    with here.served("a", lease=1.0, checkpoint_every=CHECKPOINT) as service:
        text = ""
        for number in range(times):
            sandbox = here.create(memory="conductor")
            for _ in range(dice.randint(1, 2)):
                time.sleep(dice.uniform(0, 2.5))  # a moment in a restore, before it, or after
                service.kill()
                if (sandbox.home / SIGN).exists() and dice.random() < 0.5:
                    text = f"lesson {number}, written while nobody looked"
                    write(sandbox.home / "MEMORY.md", text.encode())
                service.start()
            here.await_sign(sandbox)
            here.await_attached(service, sandbox)
            assert not text or (sandbox.home / "MEMORY.md").read_text() == text, "what came last is there"
            text = f"lesson {number}"
            write(sandbox.home / "MEMORY.md", text.encode())
            await_head(service, text)
            sandbox.kill()
    restored = here.restores("a")
    assert len(restored) == len(set(restored)), "nothing is restored twice"


@pytest.mark.parametrize("name", ["daytona", pytest.param("e2b", marks=pytest.mark.slow)])
def test_a_service_that_is_killed_at_any_moment_goes_on_where_it_was(
    watched: Callable[[str], Watched], name: str
) -> None:
    kill_again_and_again(watched(name), 2, seed=7)


@pytest.mark.slow
@pytest.mark.parametrize("name", REMOTE)
@pytest.mark.parametrize("seed", range(2))
def test_a_service_is_killed_again_and_again(watched: Callable[[str], Watched], name: str, seed: int) -> None:
    kill_again_and_again(watched(name), 20, seed)


def await_attached_or_killed(here: Watched, service: Service, sandbox: Emulated, killer: Killer) -> bool:
    """Wait until a sandbox is looked after or the service was killed. Return whether it was not."""

    def is_attached() -> bool:
        with suppress(httpx.TransportError):  # killed just now
            return here.find(service, sandbox).get("state") == "open"
        return False

    until(lambda: killer.fired or is_attached())
    return not killer.fired


def kill_at_requests(here: Watched, numbers: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service is killed at its n-th request after a sandbox was created, for each n until it has its memory by then."""
    here.remember("conductor", "lesson")
    text = "lesson"
    with here.served("a", lease=1.0, checkpoint_every=3600) as service:
        killer = Killer(here.provider.server, service, monkeypatch)
        for number in numbers:
            for arrives in (True, False):
                here.settle(service, 1)
                killer.arm(number, arrives=arrives)
                sandbox = here.make(memory="conductor")
                done = await_attached_or_killed(here, service, sandbox, killer)
                killer.arm(-1, arrives=True)
                if not done:
                    if (sandbox.home / SIGN).exists():
                        text += ", and what was written while nobody looked"
                        write(sandbox.home / "MEMORY.md", text.encode())
                    service.start()
                here.await_attached(service, sandbox)
                assert (sandbox.home / "MEMORY.md").read_text() == text
                text = f"lesson {number} {arrives}"
                write(sandbox.home / "MEMORY.md", text.encode())
                # It may have been exported just now, since a service died.
                assert service.export("conductor", here.ref(sandbox)).json()["outcome"] in ("committed", "unchanged")
                await_head(service, text)
                sandbox.kill()
                if done:
                    return  # no more requests than these are needed
    restored = here.restores("a")
    assert len(restored) == len(set(restored))


@pytest.mark.parametrize("name", ["e2b", pytest.param("daytona", marks=pytest.mark.slow)])
def test_a_service_that_is_killed_at_a_request_goes_on_where_it_was(
    watched: Callable[[str], Watched], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_at_requests(watched(name), range(4, 5), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", REMOTE)
def test_a_service_that_is_killed_at_any_request_goes_on_where_it_was(
    watched: Callable[[str], Watched], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_at_requests(watched(name), range(30), monkeypatch)


# What goes wrong


def test_a_restore_that_fails_is_said_and_tried_again(watched: Callable[[str], Watched]) -> None:
    here = watched("e2b")
    here.remember()
    with here.served(must_exist=True) as service:
        sandbox = here.create(memory="acme/later")
        until(lambda: here.overview(service)["noticed"])
        (row,) = here.overview(service)["noticed"]
        assert (row["memory"], row["state"]) == ("acme/later", "restoring") and "memory-not-found" in row["problem"]
        here.remember("acme/later", "came later")
        here.await_attached(service, sandbox)
        assert (sandbox.home / "MEMORY.md").read_text() == "came later"
        until(lambda: not here.overview(service)["noticed"])
        never = here.create(memory="acme/never")
        until(lambda: [one["state"] for one in here.overview(service)["noticed"]] == ["failed"])
        assert ask_state(service, here.ref(never)) == (False, "failed")
        failed = [line for line in service.lines() if line["event"] == "a sandbox that names its memory has none"]
        assert [line["failures"] for line in failed if line["sandbox"] == here.ref(never)] == [1, 2, 3]
        assert 'memory_sidecar_sandboxes_noticed_total{outcome="failed"}' in service.http.get("/metrics").text
        service.kill()
        service.start()
        here.settle(service)
        assert len([one for one in service.lines() if one.get("failures") == 1]) == 2, "what failed for good is left"


def ask_state(service: Service, ref: str) -> tuple[bool, str]:
    answer = service.http.get(f"/v1/sandboxes/{ref}").json()
    return answer["in_place"], answer["state"]


@pytest.mark.slow
def test_a_provider_that_has_trouble_is_asked_again(watched: Callable[[str], Watched]) -> None:
    here = watched("e2b")
    here.remember()
    faults = here.provider.server.faults
    with here.served() as service:
        for trouble in (
            Fault("list", "status", times=2),
            Fault("info", "status", times=3),
            Fault("command", "refuse"),
            Fault("command", "cut", skip=1),
            Fault("upload", "refuse"),
        ):
            faults.add(trouble)
            sandbox = here.create(memory="conductor")
            here.await_attached(service, sandbox)
            assert (sandbox.home / "MEMORY.md").read_text() == "lesson 0"
            faults.clear()
            sandbox.kill()
        assert "checks" in service.http.get("/readyz").text and "Traceback" not in service.log.read_text()


def test_what_was_noticed_is_as_documented(watched: Callable[[str], Watched]) -> None:
    here = watched("e2b")
    with here.served() as service:
        document = service.http.get("/openapi.json").json()
        schema = {**document["components"]["schemas"]["Event"], "components": document["components"]}
        sandbox, _ = here.create(memory="conductor"), here.create(memory="nobody's")
        here.await_attached(service, sandbox)
        found: dict[str, Any] = {}
        with service.http.stream("GET", "/v1/events", headers={"Last-Event-ID": "0"}) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    jsonschema.validate(event, schema)
                    found[event["type"]] = event
                if {"sandbox.noticed", "sandbox.not-restored"} <= found.keys():
                    break
        told = found["sandbox.noticed"]["details"]
        assert (told["via"], told["outcome"], told["reader"]) == ("listing", "empty", False)
        assert found["sandbox.not-restored"]["memory"] == ""
