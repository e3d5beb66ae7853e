"""What the store remembers of calls under an ``Idempotency-Key``: those that were admitted, and no others."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from sidecar.ids import MemoryKeys
from tests.parts.homes import claude_mem_home, empty_home, observe
from tests.parts.services import Service, path, serving

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving(tmp_path / "store", tmp_path / "service.log") as started:
        yield started


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return claude_mem_home(empty_home(tmp_path / "home") / "agent", rows=5)


def remembered(tmp_path: Path) -> list[str]:
    """Every call that the store remembers."""
    return sorted(place.name for place in (tmp_path / "store").rglob("calls/*") if not place.name.startswith("."))


def memories(tmp_path: Path) -> list[str]:
    """Every folder of a memory in the store."""
    top = tmp_path / "store" / "memories"
    return sorted(place.name for place in top.iterdir()) if top.exists() else []


HOPELESS: dict[str, tuple[Callable[[Service], httpx.Response], int, str]] = {
    "export-nowhere": (lambda s: s.export("ghost", "local:/nowhere/at/all", key="k"), 404, "sandbox-not-found"),
    "restore-nowhere": (lambda s: s.restore("ghost", "local:/nowhere/at/all", key="k"), 404, "sandbox-not-found"),
    "export-no-provider": (lambda s: s.export("ghost", "e3b:x", key="k"), 400, "bad-reference"),
    "restore-no-provider": (lambda s: s.restore("ghost", "nothing", key="k"), 400, "bad-reference"),
    "export-no-memory-id": (lambda s: s.export("a//b", "local:/tmp", key="k"), 400, "bad-memory-id"),
    "restore-no-snapshot": (
        lambda s: s.restore("ghost", "local:/tmp", snapshot="@yesterday", key="k"),
        400,
        "bad-reference",
    ),
    "detach-nothing": (
        lambda s: s.http.delete(path("ghost", "attachment"), headers={"Idempotency-Key": "k"}),
        404,
        "not-attached",
    ),
}


@pytest.mark.parametrize("case", HOPELESS)
def test_a_key_of_a_call_that_names_what_is_not_there_is_not_kept(case: str, service: Service, tmp_path: Path) -> None:
    call, status, code = HOPELESS[case]
    for _ in range(2):
        answer = call(service)
        assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert remembered(tmp_path) == [] and memories(tmp_path) == []


def test_a_restore_of_what_never_was_keeps_no_key(service: Service, tmp_path: Path) -> None:
    fresh = empty_home(tmp_path / "fresh")
    for number in range(5):
        assert service.restore(f"ghost-{number}", f"local:{fresh}", key="k").json()["outcome"] == "empty"
    assert remembered(tmp_path) == [] and memories(tmp_path) == []


def test_keys_of_admitted_calls_are_kept(service: Service, home: Path, tmp_path: Path) -> None:
    exported = service.export("me", f"local:{home}", key="out").json()
    fresh = empty_home(tmp_path / "fresh")
    restored = service.restore("me", f"local:{fresh}", key="in").json()
    assert (exported["outcome"], restored["outcome"]) == ("committed", "complete")
    assert remembered(tmp_path) == sorted(MemoryKeys.of("me").call(key).rsplit("/", 1)[1] for key in ("out", "in"))
    shutil.rmtree(fresh)
    assert service.restore("me", f"local:{fresh}", key="in").json() == restored, (
        "done once, also when it is gone by now"
    )


def test_a_key_that_the_queue_refused_is_not_kept(tmp_path: Path, home: Path) -> None:
    with serving(tmp_path / "store", tmp_path / "log", concurrency=1, queue=1) as service:
        answers = [
            service.http.post(
                path(f"m{number}", "exports"),
                params={"wait": "false"},
                json={"sandbox": f"local:{home}"},
                headers={"Idempotency-Key": "k"},
            )
            for number in range(12)
        ]
        refused = [number for number, answer in enumerate(answers) if answer.status_code == 429]
        assert refused and service.stop() == 0
    assert not set(memories(tmp_path)) & {f"m{number}" for number in refused}
    assert len(remembered(tmp_path)) == 12 - len(refused)


def test_a_key_cannot_be_used_for_another_call_while_the_first_runs(service: Service, home: Path) -> None:
    observe(home, 200, "much")
    answers: list[httpx.Response] = []

    def call(label: str) -> None:
        answers.append(service.export("me", f"local:{home}", key="k", label=label))

    calls = [threading.Thread(target=call, args=[label]) for label in ("one", "two", "one", "two")]
    for thread in calls:
        thread.start()
    for thread in calls:
        thread.join()
    told = [(answer.status_code, answer.json().get("label", answer.json().get("code"))) for answer in answers]
    done = [row for row in told if row[0] == 200]
    assert len({label for _, label in done}) == 1 and len(done) == 2
    assert [row for row in told if row[0] != 200] == [(422, "idempotency-key-reused")] * 2
    assert len(service.http.get(path("me", "snapshots")).json()["snapshots"]) == 1


def test_a_call_that_was_cut_short_before_its_sandbox_was_reached_is_simply_done(
    service: Service, home: Path, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    home.rename(away)
    assert service.export("me", f"local:{home}", key="k").status_code == 404
    service.kill()
    away.rename(home)
    service.start()
    first = service.export("me", f"local:{home}", key="k").json()
    assert first["outcome"] == "committed"
    assert service.export("me", f"local:{home}", key="k").json() == first
