"""The HTTP API, as callers use it: a real service, real requests, local sandboxes."""

from __future__ import annotations

import io
import shutil
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sidecar.ids import MemoryKeys
from tests.parts import forked_sidecar
from tests.parts.homes import claude_mem_home, empty_home, memory_tree, observe, three_tier_home
from tests.parts.services import Service, path, serving

pytestmark = pytest.mark.usefixtures("forked_programs")

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving(tmp_path / "store", tmp_path / "service.log") as started:
        yield started


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One for all tests that change nothing."""
    folder = tmp_path_factory.mktemp("shared")
    with serving(folder / "store", folder / "service.log") as started:
        yield started


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return claude_mem_home(empty_home(tmp_path / "home") / "agent")


def test_a_memory_goes_out_and_comes_back(service: Service, home: Path, tmp_path: Path) -> None:
    sent = service.export("acme/agent-7", f"local:{home}", conversation="c1", label="first")
    assert sent.status_code == 200
    receipt = sent.json()
    assert (receipt["outcome"], receipt["memory"], receipt["conversation"]) == ("committed", "acme/agent-7", "c1")
    assert receipt["round_trips"] == 1 and receipt["databases"][0]["check"] == "ok"
    other = empty_home(tmp_path / "other")
    came = service.restore("acme/agent-7", f"local:{other}").json()
    assert (came["outcome"], came["snapshot"]) == ("complete", receipt["snapshot"])
    assert memory_tree(other / ".claude-mem") == memory_tree(home / ".claude-mem")
    assert service.restore("nobody", f"local:{other}").json()["outcome"] == "empty"


def test_a_store_can_be_looked_into(service: Service, home: Path) -> None:
    first = service.export("me", f"local:{home}").json()["snapshot"]
    observe(home, 5, "later")
    second = service.export("me", f"local:{home}").json()["snapshot"]
    assert [row["memory"] for row in service.http.get("/v1/memories").json()["memories"]] == ["me"]
    assert service.http.get(path("me")).json()["head"] == second
    log = service.http.get(path("me", "snapshots")).json()
    assert [(row["snapshot"], row["standing"]) for row in log["snapshots"]] == [
        (second, "head"),
        (first, "earlier head"),
    ]
    shown = service.http.get(path("me", "snapshots", "latest")).json()
    assert shown["snapshot"] == second and any(row["database"] for row in shown["entries"])
    diff = service.http.get(path("me", "diff"), params={"from": first, "to": second}).json()
    assert [row["path"] for row in diff["changed"]] == ["claude-mem/claude-mem.db"]
    assert diff == service.http.get(path("me", "diff")).json()


def test_tarballs_go_out_and_in(service: Service, home: Path) -> None:
    service.export("me", f"local:{home}")
    archive = service.http.get(path("me", "snapshots", "latest", "archive"))
    assert archive.headers["content-type"] == "application/gzip"
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        assert ".claude-mem/claude-mem.db" in tar.getnames()
    gzip = {"Content-Type": archive.headers["content-type"]}
    adopted = service.http.post(path("twin", "archives"), content=archive.content, headers=gzip)
    assert (adopted.status_code, adopted.json()["outcome"]) == (200, "committed")
    assert service.http.get(path("twin")).json()["files"] == service.http.get(path("me")).json()["files"]
    refused = service.http.post(path("twin", "archives"), content=b"no tarball", headers=gzip).json()
    assert adopted.json()["sandbox"] == "import:upload"
    assert refused["detail"].startswith("upload cannot be read as a tarball")


def test_heads_fork_roll_back_and_go(service: Service, home: Path) -> None:
    first = service.export("me", f"local:{home}").json()["snapshot"]
    observe(home, 5, "later")
    service.export("me", f"local:{home}")
    forked = service.http.post(path("me", "forks"), json={"memory": "you"})
    assert (forked.status_code, forked.json()["memory"]) == (201, "you")
    assert service.http.put(path("me", "head"), json={"snapshot": first}).json()["head"] == first
    assert service.http.delete(path("me")).json()["removed"] > 0
    assert service.http.get(path("me")).status_code == 404
    assert service.http.get(path("you")).status_code == 200


@pytest.mark.parametrize(
    ("how", "status", "code"),
    [
        (lambda s: s.export("me", "local:/nowhere/at/all"), 404, "sandbox-not-found"),
        (lambda s: s.export("me", "e3b:x"), 400, "bad-reference"),
        (lambda s: s.export("a//b", "local:/tmp"), 400, "bad-memory-id"),
        (lambda s: s.export("me", "local:/tmp", layouts=["no-such"]), 400, "unknown-layout"),
        (lambda s: s.export("me", "local:/tmp", colour="red"), 422, "bad-request"),
        (lambda s: s.export("me", "local:/tmp", force="yes"), 422, "bad-request"),
        (lambda s: s.export("me", "local:/tmp", layouts=[""]), 422, "bad-request"),
        (lambda s: s.restore("me", "local:/tmp", mode="sideways"), 422, "bad-request"),
        (lambda s: s.restore("me", "local:/tmp", checkpoint_every="300"), 422, "bad-request"),
        (lambda s: s.restore("me", "local:/tmp", checkpoint_every=0.5), 422, "bad-request"),
        (lambda s: s.restore("me", "local:/tmp", snapshot="@yesterday"), 400, "bad-reference"),
        (lambda s: s.http.post(path("me", "exports"), content=b"{", headers=JSON), 422, "bad-request"),
        (lambda s: s.http.post(path("me", "exports"), content=b"{}"), 415, "unsupported-media-type"),
        (lambda s: s.http.get(path("nobody")), 404, "memory-not-found"),
        (lambda s: s.http.get(path("nobody", "snapshots")), 404, "memory-not-found"),
        (lambda s: s.http.get("/v1/operations/none"), 404, "not-found"),
        (lambda s: s.http.get("/v1/nothing"), 404, "not-found"),
        (lambda s: s.http.put("/v1/memories"), 405, "method-not-allowed"),
        (lambda s: s.http.get(path("me", "attachment")), 404, "not-attached"),
        (lambda s: s.export("me", "local:/tmp", label="x" * 2_000_000), 413, "too-large"),
    ],
)
def test_what_goes_wrong_is_a_problem_with_our_code(shared: Service, how: object, status: int, code: str) -> None:
    answer: httpx.Response = how(shared)  # type: ignore[operator]
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert (answer.status_code, problem["status"], problem["code"]) == (status, status, code)
    assert problem["detail"] and isinstance(problem["retryable"], bool)


def test_without_a_token_only_probes_the_page_and_the_document_are_answered(shared: Service) -> None:
    bare = httpx.Client(base_url=shared.url)
    for place in ("/healthz", "/readyz", "/", "/openapi.json"):
        assert bare.get(place).status_code == 200
    for place in ("/v1/memories", "/metrics", "/v1/attachments", "/v1/events", "/openapi.json/", "/v1/openapi.json"):
        refused = bare.get(place, headers={"Authorization": "Bearer wrong"})
        assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
        assert refused.headers["www-authenticate"] == "Bearer"


def test_without_any_token_nothing_but_loopback_is_bound(tmp_path: Path) -> None:
    ran = forked_sidecar.run(["serve", f"--store=file:{tmp_path}", "--bind", "0.0.0.0:0"], text=True)
    assert ran.returncode == 2
    assert "MEMORY_SIDECAR_TOKEN" in ran.stderr and "Traceback" not in ran.stderr


def test_an_operation_can_be_followed_instead_of_waited_for(service: Service, home: Path) -> None:
    accepted = service.http.post(path("me", "exports"), params={"wait": "false"}, json={"sandbox": f"local:{home}"})
    assert accepted.status_code == 202
    where = accepted.headers["location"]
    deadline = time.monotonic() + 60
    while (standing := service.http.get(where).json())["state"] != "done" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert standing["receipt"]["outcome"] == "committed" and standing["problem"] is None


def test_events_tell_what_happens(service: Service, home: Path) -> None:
    got: list[str] = []
    listening = threading.Event()

    def listen() -> None:
        with service.http.stream("GET", "/v1/events") as stream:
            for line in stream.iter_lines():
                listening.set()
                if line.startswith("event: "):
                    got.append(line.removeprefix("event: "))
                    return

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    assert listening.wait(10)
    service.export("me", f"local:{home}")
    listener.join(10)
    assert got == ["export.committed"]


def test_metrics_count_what_happened(service: Service, home: Path) -> None:
    service.export("me", f"local:{home}")
    service.export("me", f"local:{home}")
    service.export("me", "local:/nowhere")
    text = service.http.get("/metrics").text
    for line in (
        'memory_sidecar_operations_total{kind="export",outcome="committed"} 1.0',
        'memory_sidecar_operations_total{kind="export",outcome="unchanged"} 1.0',
        'memory_sidecar_operations_total{kind="export",outcome="failed"} 1.0',
        'memory_sidecar_memories_by_age{up_to="+Inf"} 1.0',
        'memory_sidecar_memories_by_saved_age{up_to="300"} 1.0',
        'memory_sidecar_memories_by_size{up_to="1e+09"} 1.0',
        "memory_sidecar_oldest_head_age_seconds",
        "memory_sidecar_attachments_at_risk 0.0",
    ):
        assert line in text
    assert 'memory="' not in text


def test_a_repeated_call_is_done_once_also_across_a_restart(service: Service, home: Path) -> None:
    first = service.export("me", f"local:{home}", key="one").json()
    observe(home, 5, "later")
    again = service.export("me", f"local:{home}", key="one").json()
    assert again == first
    service.kill()
    service.start()
    assert service.export("me", f"local:{home}", key="one").json() == first
    assert len(service.http.get(path("me", "snapshots")).json()["snapshots"]) == 1
    other = service.export("me", f"local:{home}", key="one", label="another")
    assert (other.status_code, other.json()["code"]) == (422, "idempotency-key-reused")
    assert service.export("me", f"local:{home}", key="two").json()["outcome"] == "committed"


def test_the_answer_to_one_call_put_in_the_place_of_another_is_refused(
    service: Service, home: Path, tmp_path: Path
) -> None:
    for key in ("one", "two"):
        service.export("me", f"local:{home}", key=key)
    shutil.copyfile(
        tmp_path / "store" / MemoryKeys.of("me").call("one"), tmp_path / "store" / MemoryKeys.of("me").call("two")
    )
    answer = service.export("me", f"local:{home}", key="two")
    assert (answer.status_code, answer.json()["code"]) == (422, "idempotency-key-reused")


def test_a_call_repeated_while_it_runs_is_the_same_call(service: Service, home: Path) -> None:
    answers: list[dict[str, object]] = []
    calls = [
        threading.Thread(target=lambda: answers.append(service.export("me", f"local:{home}", key="k").json()))
        for _ in range(8)
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert len({answer["snapshot"] for answer in answers}) == 1
    assert len(service.http.get(path("me", "snapshots")).json()["snapshots"]) == 1


def test_a_failed_call_may_be_repeated_and_meant(service: Service, tmp_path: Path) -> None:
    late = tmp_path / "late"
    assert service.export("me", f"local:{late}", key="k").status_code == 404
    three_tier_home(empty_home(late))
    assert service.export("me", f"local:{late}", key="k").json()["outcome"] == "committed"


def test_told_to_stop_it_finishes_what_runs(service: Service, home: Path) -> None:
    started = [
        service.http.post(path(f"m{number}", "exports"), params={"wait": "false"}, json={"sandbox": f"local:{home}"})
        for number in range(6)
    ]
    assert [answer.status_code for answer in started] == [202] * 6
    assert service.stop() == 0
    service.start()
    assert len(service.http.get("/v1/memories").json()["memories"]) == 6


def test_beyond_the_queue_callers_are_told_to_wait(tmp_path: Path, home: Path) -> None:
    with serving(tmp_path / "s", tmp_path / "busy.log", concurrency=1, queue=2) as service:
        answers = [
            service.http.post(path(f"m{n}", "exports"), params={"wait": "false"}, json={"sandbox": f"local:{home}"})
            for n in range(12)
        ]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused and {answer.status_code for answer in answers} == {202, 429}
        assert refused[0].json()["code"] == "too-busy" and int(refused[0].headers["retry-after"]) > 0


def test_every_step_is_logged_with_what_it_is_about(service: Service, tmp_path: Path) -> None:
    home = claude_mem_home(empty_home(tmp_path / "logged") / "agent")
    fresh = empty_home(tmp_path / "fresh")
    exported = service.export("me", f"local:{home}", conversation="talk 7").json()
    service.restore("me", f"local:{fresh}", conversation="talk 8")
    lines = service.lines()
    for kind, sandbox, conversation in (("export", home, "talk 7"), ("restore", fresh, "talk 8")):
        mine = [line for line in lines if line.get("conversation") == conversation]
        steps = [line["event"] for line in mine]
        assert steps[0] == f"{kind} begins" and steps[-1] in ("export committed", "restore complete")
        assert len(steps) >= 5, steps
        assert {line["memory"] for line in mine} == {"me"}
        assert {line["sandbox"] for line in mine} == {f"local:{sandbox}"}
        assert len({line["operation"] for line in mine}) == 1
        assert {line["snapshot"] for line in mine[3:]} == {exported["snapshot"]}
