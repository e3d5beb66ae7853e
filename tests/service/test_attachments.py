"""Attached sandboxes are looked after: checkpoints, the end of a sandbox, other services, and the end of this one."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emulators import E2BEmulator
from sidecar.format.checksums import decode_checksummed
from sidecar.service.attachments.attachment import ATTACHED, FORGOTTEN_AFTER, OPEN, Attachment, _decode, _encode
from tests.parts.homes import claude_mem_home, empty_home, memory_tree, observe
from tests.parts.s3_servers import S3Server
from tests.parts.services import Service, path, serving, until
from tests.parts.wire import wire_to

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def e2b(monkeypatch: pytest.MonkeyPatch) -> Iterator[E2BEmulator]:
    with E2BEmulator() as emulator:
        for name, value in emulator.environment().items():
            monkeypatch.setenv(name, value)
        yield emulator


def attach(service: Service, memory: str, sandbox: str, **more: Any) -> dict[str, Any]:
    answer = service.http.put(path(memory, "attachment"), json={"sandbox": sandbox, **more})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def snapshots(service: Service, memory: str = "me") -> int:
    answer = service.http.get(path(memory, "snapshots"))
    return len(answer.json()["snapshots"]) if answer.status_code == 200 else 0


def events(service: Service, name: str) -> list[dict[str, Any]]:
    return [line for line in service.lines() if line["event"] == name]


def test_an_attached_sandbox_is_exported_by_itself_when_something_changed(tmp_path: Path) -> None:
    home = claude_mem_home(empty_home(tmp_path / "home") / "agent")
    with serving(tmp_path / "store", tmp_path / "log") as service:
        attach(service, "me", f"local:{home}", checkpoint_every=1)
        until(lambda: snapshots(service) == 1)
        until(lambda: len(events(service, "export unchanged")) >= 2)
        assert snapshots(service) == 1, "nothing changed, so nothing is stored"
        observe(home, 5, "later")
        until(lambda: snapshots(service) == 2)
        standing = service.http.get(path("me", "attachment")).json()["attachment"]
        assert (standing["state"], standing["problem"]) == ("open", "")
        assert service.http.delete(path("me", "attachment")).status_code == 200
        observe(home, 5, "unseen")
        time.sleep(2.5)
        assert snapshots(service) == 2
        assert service.http.delete(path("me", "attachment")).json()["code"] == "not-attached"


def test_attaching_restores_first_when_asked_and_exports_last_when_asked(tmp_path: Path) -> None:
    home = claude_mem_home(empty_home(tmp_path / "home") / "agent")
    fresh = empty_home(tmp_path / "fresh")
    with serving(tmp_path / "store", tmp_path / "log") as service:
        service.export("me", f"local:{home}")
        answer = attach(service, "me", f"local:{fresh}", restore=True, checkpoint_every=3600)
        assert answer["restored"]["outcome"] == "complete"
        assert memory_tree(fresh / ".claude-mem") == memory_tree(home / ".claude-mem")
        observe(fresh, 5, "said")
        ended = service.http.delete(path("me", "attachment"), params={"export": "true"}).json()
        assert ended["exported"]["outcome"] == "committed"


def test_an_attachment_keeps_the_user_as_whom_it_is_exported(tmp_path: Path, e2b: E2BEmulator) -> None:
    box = e2b.create()
    home = box.users["root"].home
    claude_mem_home(home)
    with serving(tmp_path / "store", tmp_path / "log") as service:
        assert service.export("me", f"e2b:{box.id}", user="root").json()["home"] == str(home)
        attached = attach(service, "me", f"e2b:{box.id}", user="root", restore=True, checkpoint_every=1)
        assert (attached["attachment"]["user"], attached["attachment"]["state"]) == ("root", "open")
        assert attached["restored"]["home"] == str(home)
        observe(home, 5, "later")
        until(lambda: snapshots(service) == 2)
        observe(home, 5, "at last")
        ended = service.http.delete(path("me", "attachment"), params={"export": "true"}).json()
        assert ended["exported"]["home"] == str(home)
        wrong = service.http.put(path("me", "attachment"), json={"sandbox": f"e2b:{box.id}", "user": "a b"})
        assert (wrong.status_code, wrong.json()["code"]) == (400, "bad-reference")


def test_services_of_earlier_versions_do_not_take_over_what_is_exported_as_a_user() -> None:
    """They know of no user, and would look into another home."""
    mine = Attachment(memory="m", sandbox="e2b:x", user="root", attached="2026-11-16T10:00:00Z", snapshot="s")
    assert decode_checksummed(_encode(mine))["state"] not in (OPEN, ATTACHED, *FORGOTTEN_AFTER)
    assert _decode(_encode(mine)) == replace(mine, saved=mine.attached)
    assert decode_checksummed(_encode(replace(mine, user="")))["state"] == OPEN


def test_letting_go_may_be_sent_again_under_its_key(tmp_path: Path) -> None:
    home = claude_mem_home(empty_home(tmp_path / "home") / "agent")
    with serving(tmp_path / "store", tmp_path / "log") as service:
        attach(service, "me", f"local:{home}", checkpoint_every=3600)
        once: dict[str, Any] = {"params": {"export": "true"}, "headers": {"Idempotency-Key": "k"}}
        first = service.http.delete(path("me", "attachment"), **once)
        again = service.http.delete(path("me", "attachment"), **once)
        assert (first.status_code, first.json()) == (200, again.json())
        attach(service, "me", f"local:{home}", checkpoint_every=3600)
        service.http.delete(path("me", "attachment"), **once)
        assert service.http.get(path("me", "attachment")).status_code == 200, "a later attachment is not meant"


def test_a_restarted_service_takes_its_attachments_up_again(tmp_path: Path) -> None:
    home = claude_mem_home(empty_home(tmp_path / "home") / "agent")
    with serving(tmp_path / "store", tmp_path / "log", lease=3) as service:
        attach(service, "me", f"local:{home}", checkpoint_every=3600)
        service.kill()
        observe(home, 5, "while nobody looked")
        service.start()
        until(lambda: snapshots(service) == 1)
        assert service.http.get(path("me", "attachment")).json()["attachment"]["generation"] == 2


def test_told_to_stop_it_saves_what_is_attached(tmp_path: Path) -> None:
    homes = [claude_mem_home(empty_home(tmp_path / f"home{n}") / "agent", rows=5) for n in range(4)]
    with serving(tmp_path / "store", tmp_path / "log") as service:
        for number, home in enumerate(homes):
            attach(service, f"m{number}", f"local:{home}", checkpoint_every=3600)
        assert service.stop() == 0
        service.start()
        assert all(snapshots(service, f"m{number}") == 1 for number in range(4))


def test_what_cannot_be_saved_in_time_is_told(tmp_path: Path, e2b: E2BEmulator) -> None:
    box = e2b.create()
    claude_mem_home(box.home)
    with serving(tmp_path / "store", tmp_path / "log", grace=2) as service:
        attach(service, "me", f"e2b:{box.id}", checkpoint_every=3600)
        e2b.latency = 30
        began = time.monotonic()
        assert service.stop() == 1
        assert time.monotonic() - began < 12, "the grace period is all there is"
        assert [line["memory"] for line in events(service, "not saved")] == ["me"]
        e2b.latency = 0


def test_a_sandbox_is_exported_before_its_provider_ends_it(tmp_path: Path, e2b: E2BEmulator) -> None:
    with serving(tmp_path / "store", tmp_path / "log", lead=57) as service:
        box = e2b.create(timeout=60)
        claude_mem_home(box.home)
        ends_at = box.ends_at
        attach(service, "me", f"e2b:{box.id}", checkpoint_every=3600)
        until(lambda: snapshots(service) == 1)
        assert ends_at is not None and time.time() < ends_at


def test_a_lost_sandbox_is_said_loudly(tmp_path: Path, e2b: E2BEmulator) -> None:
    box = e2b.create()
    claude_mem_home(box.home)
    with serving(tmp_path / "store", tmp_path / "log") as service:
        attach(service, "me", f"e2b:{box.id}", checkpoint_every=1)
        until(lambda: snapshots(service) == 1)
        box.kill()
        until(lambda: events(service, "sandbox lost"))
        lost = events(service, "sandbox lost")[0]
        assert lost["level"] == "critical" and lost["unsaved_seconds"] < 30
        # It is said first, and then written down.
        until(lambda: service.http.get(path("me", "attachment")).json()["attachment"]["state"] == "lost")
        assert service.http.get(path("me", "attachment")).json()["attachment"]["snapshot"] != ""
        metrics = service.http.get("/metrics").text
        assert "memory_sidecar_sandboxes_lost_total 1.0" in metrics
        assert "memory_sidecar_attachments_at_risk 1.0" in metrics


def test_another_service_takes_over_from_one_that_died(tmp_path: Path) -> None:
    home = claude_mem_home(empty_home(tmp_path / "home") / "agent")
    store = tmp_path / "store"
    with serving(store, tmp_path / "one.log", lease=4) as one, serving(store, tmp_path / "two.log", lease=4) as two:
        attach(one, "me", f"local:{home}", checkpoint_every=1)
        until(lambda: snapshots(two) == 1)
        before = two.http.get(path("me", "attachment")).json()["attachment"]
        time.sleep(5)
        assert two.http.get(path("me", "attachment")).json()["attachment"]["owner"] == before["owner"], "it lives"
        one.kill()
        observe(home, 5, "after")
        until(lambda: events(two, "taken over"))
        until(lambda: snapshots(two) == 2)
        after = two.http.get(path("me", "attachment")).json()["attachment"]
        assert after["owner"] != before["owner"] and after["generation"] == before["generation"] + 1


def test_one_that_wakes_after_it_was_taken_for_dead_writes_nothing(tmp_path: Path) -> None:
    home = claude_mem_home(empty_home(tmp_path / "home") / "agent")
    store = tmp_path / "store"
    with serving(store, tmp_path / "one.log", lease=4) as one, serving(store, tmp_path / "two.log", lease=4) as two:
        attach(one, "me", f"local:{home}", checkpoint_every=4)
        until(lambda: events(one, "export committed"))
        time.sleep(1)  # one that holds a file's lock while it sleeps would hold up everybody
        one.process.send_signal(signal.SIGSTOP)
        try:
            until(lambda: events(two, "taken over"))
            saved = len(events(one, "export committed"))
        finally:
            one.process.send_signal(signal.SIGCONT)
        for number in range(6):
            observe(home, 2, f"round {number}")
            time.sleep(1)
        assert len(events(one, "export committed")) == saved, "it does not own it any more"
        until(lambda: events(two, "export committed"))
        heads = two.http.get(path("me", "snapshots")).json()["snapshots"]
        assert {row["standing"] for row in heads} <= {"head", "earlier head"}


@pytest.mark.slow
def test_of_two_services_on_one_bucket_only_one_writes_when_the_other_is_cut_off(
    tmp_path: Path, weed: S3Server, credentials_of: Callable[[S3Server], None]
) -> None:
    credentials_of(weed)
    bucket = weed.make_bucket(f"cut-{time.time_ns()}")
    home = claude_mem_home(empty_home(tmp_path / "home") / "agent", rows=3)
    with (
        wire_to(weed.endpoint) as wire,
        serving(f"s3://{bucket}/x?endpoint={wire.endpoint}", tmp_path / "one.log", lease=5) as one,
        serving(f"s3://{bucket}/x?endpoint={weed.endpoint}", tmp_path / "two.log", lease=5) as two,
    ):
        attach(one, "me", f"local:{home}", checkpoint_every=1)
        until(lambda: events(one, "export committed"))
        wire.cut_request = lambda sent: True
        until(lambda: events(two, "taken over"))
        taken = events(two, "taken over")[0]["timestamp"]
        for number in range(3):
            observe(home, 1, f"cut off {number}")
            time.sleep(1)
        wire.cut_request = lambda sent: False
        for number in range(4):
            observe(home, 1, f"back {number}")
            time.sleep(1)
        until(lambda: len(events(two, "export committed")) >= 2)
        late = [line for line in events(one, "export committed") if line["timestamp"] > taken]
        assert late == [], "two services wrote the same attachment"
        rows = two.http.get(path("me", "snapshots")).json()["snapshots"]
        assert {row["standing"] for row in rows} <= {"head", "earlier head"}
