"""A review through a service: what is told, who may decide, and what counts as saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from sidecar.client import Client, NotSaved, SidecarProblem
from sidecar.service.access.grants import Verb
from sidecar.service.access.token_file import TokenRecord, add_token
from tests.parts.browser import browsing
from tests.parts.homes import empty_home, write
from tests.parts.services import TOKEN, Service, path, serving, until

MEMORY = "acme/agent"
REVIEW = '[review]\nrequired = ["acme/*"]\n'
EVIL = "<img src=x onerror=document.title='run'>"


class Scene:
    def __init__(self, service: Service, home: Path, tokens: dict[str, str]) -> None:
        self.service, self.home, self.tokens = service, home, tokens
        self.ref = f"local:{home}"

    def learn(self, what: str) -> None:
        place = self.home / "MEMORY.md"
        place.write_text(f"{place.read_text()}\n## {what}\n{what} is so.\n")

    def client(self, name: str = "") -> Client:
        return Client(self.service.url, token=self.tokens[name] if name else TOKEN)

    def events(self, kind: str) -> list[dict[str, object]]:
        return [line for line in self.service.lines() if line.get("event") == kind]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    home, file = empty_home(tmp_path / "home"), tmp_path / "tokens.json"
    write(home / "MEMORY.md", b"# Facts\n")
    verbs = {
        "reads": (Verb.READ,),
        "exports": (Verb.EXPORT,),
        "appends": (Verb.READ, Verb.EXPORT, Verb.RESTORE),
        "reviews": (Verb.READ, Verb.CHANGE),
    }
    tokens = {
        name: add_token(file, TokenRecord(id="", name=name, salt="", digest="", memories=("acme/*", "x"), verbs=may))
        for name, may in verbs.items()
    }
    env = {"MEMORY_SIDECAR_SERVICE_TOKENS": str(file)}
    with serving(tmp_path / "store", tmp_path / "log", env, more=REVIEW) as service:
        yield Scene(service, home, tokens)


def test_only_who_may_change_a_memory_decides(scene: Scene) -> None:
    with scene.client("appends") as appends, scene.client("reviews") as reviews, scene.client("reads") as reads:
        first = appends.export(MEMORY, sandbox=scene.ref, force=False)
        assert first.outcome.value == "pending" and not first.is_saved
        for caller in (appends, reads):
            for call in (caller.accept, caller.decline):
                with pytest.raises(SidecarProblem) as refused:
                    call(MEMORY)
                assert refused.value.status == 403
        with pytest.raises(SidecarProblem) as refused:  # force is a change, and it would not help
            appends.export(MEMORY, sandbox=scene.ref, force=True)
        assert refused.value.status == 403
        done = reviews.accept(MEMORY, because="right")
        assert (done.head, done.by, done.because) == (first.snapshot, "reviews", "right")
        scene.learn("A lie")
        lie = appends.export(MEMORY, sandbox=scene.ref)
        declined = reviews.decline(MEMORY, because="not so")
        assert (declined.snapshot, declined.head, declined.by) == (lie.snapshot, first.snapshot, "reviews")
        for call in (reviews.accept, reviews.decline):
            with pytest.raises(SidecarProblem) as refused:
                call(MEMORY, str(lie.snapshot))
            assert (refused.value.status, refused.value.code) == (409, "already-decided")
        rows = {row.snapshot: row for row in reads.snapshots(MEMORY)}
        review = rows[str(lie.snapshot)].review
        assert review is not None and (review.decision, review.because) == ("declined", "not so")
        # A fork into a memory under review would begin it with what nobody accepted there.
        with pytest.raises(SidecarProblem) as refused:
            appends.fork(MEMORY, "acme/other")
        assert refused.value.status == 403
        assert appends.fork(MEMORY, "x").memory == "x"


def test_who_may_only_export_does_not_learn_what_the_head_has(scene: Scene) -> None:
    with scene.client("exports") as exports, scene.client("reviews") as reviews:
        exports.export(MEMORY, sandbox=scene.ref)
        reviews.accept(MEMORY)
        scene.learn("A secret")
        exports.export(MEMORY, sandbox=scene.ref)
        receipt = exports.export(MEMORY, sandbox=scene.ref)
        assert receipt.reason is not None and receipt.reason.message == "It waits for a review: +1 section."
    assert "A secret" not in scene.service.log.read_text()


def test_a_conversation_says_that_its_memory_waits(scene: Scene) -> None:
    with scene.client() as client:
        with pytest.raises(NotSaved) as waits, client.conversation(MEMORY, sandbox=scene.ref, conversation="c1"):
            scene.learn("One")
        problem = waits.value
        assert problem.waits and "It waits for a review: +2 sections." in problem.message and "accept" in problem.hint
        row = next(row for row in client.attachments() if row.memory == MEMORY)
        assert row.problem.startswith("pending: It waits for a review") and "decline" in row.hint
        assert "Facts" not in row.problem
        until(lambda: "memory_sidecar_attachments_pending 1.0" in scene.service.http.get("/metrics").text)
        client.accept(MEMORY)
        with client.conversation(MEMORY, sandbox=scene.ref, conversation="c2") as memory:
            pass
        assert memory.saved
        assert "memory_sidecar_attachments_pending 0.0" in scene.service.http.get("/metrics").text


def test_it_is_told_in_events(scene: Scene) -> None:
    with scene.client() as client, scene.service.http.stream("GET", "/v1/events") as heard:
        lines = heard.iter_lines()
        client.export(MEMORY, sandbox=scene.ref)
        client.accept(MEMORY, because="yes")
        scene.learn("One")
        client.export(MEMORY, sandbox=scene.ref)
        client.decline(MEMORY, because="no")
        seen = []
        for line in lines:
            if line.startswith("event: "):
                seen.append(line.removeprefix("event: "))
            if "review.declined" in seen:
                break
    assert seen == ["export.pending", "review.accepted", "export.pending", "review.declined"]


def test_stopped_while_it_waits_a_service_says_so_by_name(scene: Scene) -> None:
    attached = {"sandbox": scene.ref, "checkpoint_every": 3600}
    assert scene.service.http.put(path(MEMORY, "attachment"), json=attached).status_code == 200
    assert scene.service.stop() == 1
    assert scene.events("not saved: kept, and waits for a review")


def test_the_page_shows_what_waits_and_decides(scene: Scene) -> None:
    expect.set_options(timeout=30_000)
    scene.learn(EVIL)
    with scene.client() as client, browsing() as page:
        first = client.export(MEMORY, sandbox=scene.ref).snapshot
        page.goto(f"{scene.service.url}/#token={scene.tokens['reads']}")
        expect(page.locator("#waiting tbody tr")).to_have_count(1)
        expect(page.locator("#waiting tbody")).to_contain_text("<img src=x")
        expect(page.locator("#waiting button:text('Accept')")).to_have_count(0)
        page.goto("about:blank")
        page.goto(f"{scene.service.url}/#token={TOKEN}")
        page.fill("#waiting input", "read on the page")
        page.click("#waiting button:text('Accept')")
        expect(page.locator("#decided")).to_contain_text("accepted")
        expect(page.locator("#waiting")).to_be_hidden()
        assert client.memory(MEMORY).head == first
        scene.learn("Two")
        two = client.export(MEMORY, sandbox=scene.ref).snapshot
        page.click("#waiting button:text('Decline')")
        expect(page.locator("#decided")).to_contain_text("declined")
        rows = {row.snapshot: row for row in client.snapshots(MEMORY)}
        assert rows[str(two)].standing == "declined" and client.memory(MEMORY).head == first
        review = rows[str(first)].review
        assert review is not None and review.because == "read on the page"
        assert page.title() == "memory-sidecar"


def test_the_page_compares_what_waits_with_the_head_and_clears_what_it_showed(scene: Scene) -> None:
    expect.set_options(timeout=30_000)
    with scene.client() as client, browsing() as page:
        for title in ("One", "Two", "Three"):
            scene.learn(title)
            client.export(MEMORY, sandbox=scene.ref)
            if title == "One":
                client.accept(MEMORY)
        client.fork(MEMORY, "other")
        page.set_viewport_size({"width": 1000, "height": 300})
        page.goto(f"{scene.service.url}/#token={TOKEN}")
        expect(page.locator("#waiting tbody tr")).to_have_count(2)
        page.locator("#waiting tbody tr:first-child td:nth-child(2) button").click()
        expect(page.locator("#how")).to_have_text("What would change with")
        expect(page.locator("#changes tbody")).to_contain_text("Two")
        expect(page.locator("#changes tbody")).to_contain_text("Three")
        expect(page.locator("#changes tbody")).not_to_contain_text("removed")
        expect(page.locator("#changes h2")).to_be_in_viewport()
        expect(page.locator("#files")).to_be_visible()
        page.locator("#memories button:has-text('other')").click()
        expect(page.locator("#of")).to_have_text("other")
        for section in ("#changes", "#says", "#files"):
            expect(page.locator(section)).to_be_hidden()
        page.locator("#snapshots tbody button").first.click()
        expect(page.locator("#how")).to_have_text("What changed with")
        expect(page.locator("#says tbody")).to_contain_text("One")
