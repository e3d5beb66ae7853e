"""Ways around a review: no head comes to be that nobody accepted."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.engine.exports.steps import finish_export
from sidecar.engine.reviews import accept, decline
from sidecar.errors import NothingToAccept, SwapLost
from sidecar.policy.review import Review
from sidecar.receipts import ExportReceipt
from sidecar.store.manifest import Head, Manifest
from sidecar.store.repository import HeadState, Repository
from tests.parts.homes import empty_home, engine_at, run_cli
from tests.review.test_gate import MEMORY, Scene

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def lose(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> str:
    """An export that was killed after its snapshot was stored and before the head moved; where no review is asked for."""

    async def killed(*_: object, **__: object) -> Head:
        raise KeyboardInterrupt

    rows = {row["snapshot"] for row in scene.run("log", MEMORY).document.get("snapshots", ())}
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(Repository, "move_head", killed)
        run_cli("export", MEMORY, "--sandbox", f"local:{scene.home}", store=scene.store)
    (new,) = {row["snapshot"] for row in scene.run("log", MEMORY).document["snapshots"]} - rows
    return str(new)


def finish(scene: Scene, snapshot: str, required: str = "acme/*") -> ExportReceipt:
    """The call is repeated after the kill."""
    review = Review(required=[required] if required else [])
    engine = replace(engine_at(scene.store), repository=scene.repository, review=review)
    receipt = asyncio.run(finish_export(engine, MEMORY, snapshot, "local:x"))
    assert receipt is not None
    return receipt


def test_a_repeated_call_does_not_finish_what_was_declined_meanwhile(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = scene.first_head()
    scene.learn("A lie")
    lie = lose(scene, monkeypatch)
    assert scene.run("decline", MEMORY, lie, "--because", "not so").code == 0
    receipt = finish(scene, lie)
    assert receipt.reason is not None
    assert (receipt.outcome.value, receipt.reason.code, receipt.head) == ("rejected", "declined", head)
    assert receipt.reason.message.endswith("declined it: not so.")
    assert scene.head == head


def test_a_repeated_call_does_not_finish_what_waits_by_now(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    head = scene.first_head()
    scene.learn("One")
    one = lose(scene, monkeypatch)
    assert scene.pending() == one  # a later export asked for a review of it
    receipt = finish(scene, one)
    assert receipt.reason is not None
    assert (receipt.outcome.value, receipt.reason.code, scene.head) == ("pending", "pending", head)


def test_a_repeated_call_waits_while_the_reviews_cannot_be_read(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    head = scene.first_head()
    scene.learn("One")
    one = lose(scene, monkeypatch)
    next(scene.store.rglob("reviews.json")).write_bytes(b"{}")
    assert (finish(scene, one).outcome.value, scene.head) == ("pending", head)


def test_a_repeated_call_finishes_what_was_to_become_the_head(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.first_head()
    scene.learn("One")
    one = lose(scene, monkeypatch)
    assert (finish(scene, one, "").outcome.value, scene.head) == ("committed", one)


def test_a_repeated_call_waits_if_a_review_is_asked_for_by_now(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    head = scene.first_head()
    scene.learn("One")
    one = lose(scene, monkeypatch)
    for _ in range(2):
        receipt = finish(scene, one)
        assert receipt.reason is not None
        assert (receipt.outcome.value, receipt.reason.code, scene.head) == ("pending", "pending", head)
    assert scene.standing(one) == "pending"
    assert scene.run("accept", MEMORY).document["head"] == one


def test_the_first_export_of_a_memory_cannot_be_declined_while_it_may_still_move_the_head(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a head there is nothing that the decision could write again, so that the export loses its swap."""
    moved = Repository.move_head
    told: list[object] = []

    async def held(self: Repository, state: HeadState, manifest: Manifest, **how: bool) -> Head:
        """Between storing the snapshot and moving the head."""
        try:
            told.append(await decline(scene.repository, MEMORY, manifest.snapshot))
        except NothingToAccept as refusal:
            told.append(refusal)
        return await moved(self, state, manifest, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Repository, "move_head", held)
        ran = run_cli("export", MEMORY, "--sandbox", f"local:{scene.home}", store=scene.store)
    assert (ran.document["outcome"], scene.head) == ("committed", ran.document["snapshot"])
    (refusal,) = told
    assert isinstance(refusal, NothingToAccept), refusal  # not told that it is declined, as it became the head
    assert "no head" in refusal.message


def test_what_waits_in_a_memory_without_a_head_can_be_declined(scene: Scene) -> None:
    waits = scene.pending()
    assert scene.run("decline", MEMORY).document["snapshot"] == waits
    assert scene.export("--force").error == "declined"


def break_head(scene: Scene) -> None:
    next(path for path in scene.store.rglob("head.json") if b'"format":2' not in path.read_bytes()).write_text("x")


def test_a_damaged_head_is_not_replaced_by_what_was_declined(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.config.write_text("")
    head = scene.export().document["snapshot"]
    scene.learn("A lie")
    lie = lose(scene, monkeypatch)  # made for the head, by its manifest
    scene.run("decline", MEMORY, lie)
    break_head(scene)
    fresh = empty_home(scene.folder / "fresh")
    ran = scene.restore(home=fresh)
    assert (ran.code, ran.document["snapshot"]) == (0, head), ran.document
    assert "A lie" not in scene.memory(fresh)


def test_a_head_whose_packs_are_gone_is_not_replaced_by_what_was_declined(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.config.write_text("")
    head = scene.export().document["snapshot"]
    scene.learn("A lie")
    lie = lose(scene, monkeypatch)
    scene.run("decline", MEMORY, lie)
    manifest = next(scene.store.rglob(f"{head}.json"))
    manifest.write_text("x")
    fresh = empty_home(scene.folder / "fresh")
    ran = scene.restore(home=fresh)
    assert ran.code != 0 and lie not in str(ran.document.get("snapshot")), ran.document


def test_a_memory_of_which_all_was_declined_has_nothing_to_restore(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.config.write_text("")
    head = scene.export().document["snapshot"]
    scene.learn("A lie")
    lie = lose(scene, monkeypatch)
    scene.run("decline", MEMORY, lie)
    break_head(scene)
    next(scene.store.rglob(f"{head}.json")).unlink()
    fresh = empty_home(scene.folder / "fresh")
    assert scene.restore(home=fresh).document.get("snapshot") != lie


def test_what_grew_out_of_what_was_declined_or_waits_is_neither_rolled_back_to_nor_forked(scene: Scene) -> None:
    head = scene.first_head()
    scene.learn("A lie")
    one = scene.pending()
    other = empty_home(scene.folder / "other")
    assert scene.restore("--snapshot", one, home=other).code == 0
    grown = []
    for what in ("First", "Second"):  # the second grew out of the first
        scene.learn(what, other)
        ran = scene.export(home=other)
        grown.append(str(ran.document["snapshot"]))
    scene.config.write_text("")
    for decision in ("waits", "declined"):
        if decision == "declined":
            assert scene.run("decline", MEMORY, one).code == 0
        for snapshot in grown:
            ran = scene.run("rollback", MEMORY, snapshot)
            assert (ran.code, ran.error) == (2, "not-reviewed"), ran.document
            assert one in ran.stderr and decision in ran.stderr
            ran = scene.run("fork", MEMORY, f"acme/{decision}", "--snapshot", snapshot)
            assert (ran.code, ran.error) == (2, "not-reviewed"), ran.document
    assert scene.head == head


@pytest.mark.parametrize("reviewed", [True, False])
def test_a_rollback_under_review_goes_only_to_what_was_the_head(scene: Scene, reviewed: bool) -> None:
    first = scene.first_head()
    other = empty_home(scene.folder / "other")
    assert scene.restore(home=other).code == 0
    scene.learn("One")
    scene.pending()
    head = scene.run("accept", MEMORY).document["head"]
    scene.learn("Two", other)
    beside = scene.export(home=other)
    assert beside.document["outcome"] == "diverged"
    snapshot = beside.document["snapshot"]
    if not reviewed:
        scene.config.write_text("")
    ran = scene.run("rollback", MEMORY, snapshot)
    if not reviewed:
        assert ran.document["head"] == snapshot
        return
    assert (ran.code, ran.error, scene.head) == (2, "not-reviewed", head)
    assert f"accept {MEMORY} {snapshot}" in ran.stderr
    assert scene.run("rollback", MEMORY, first).document["head"] == first
    assert scene.run("accept", MEMORY, snapshot).document["head"] == snapshot


def two_that_wait(scene: Scene) -> tuple[str, str, str]:
    """A head, and two snapshots that wait and grew out of it: of ``scene.home``, and of another."""
    head = scene.first_head()
    other = empty_home(scene.folder / "other")
    scene.restore(home=other)
    scene.learn("One")
    scene.learn("Two", other)
    return head, scene.pending(), scene.pending(home=other)


def cut_short(scene: Scene, monkeypatch: pytest.MonkeyPatch, snapshot: str) -> None:
    """An acceptance that is killed before the head moves."""

    async def killed(*_: object, **__: object) -> Head:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(Repository, "move_head", killed)
        asyncio.run(accept(scene.repository, MEMORY, snapshot))


def test_an_acceptance_that_failed_does_not_take_effect_later(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    head, one, two = two_that_wait(scene)
    scene.learn("Three")
    three = scene.pending()  # accepted with ``one``
    repository, moved = scene.repository, Repository.move_head

    async def held(self: Repository, state: HeadState, manifest: Manifest, **how: bool) -> Head:
        if manifest.snapshot == three:
            await accept(repository, MEMORY, two)
        return await moved(self, state, manifest, **how)

    with monkeypatch.context() as patch, pytest.raises(SwapLost):
        patch.setattr(Repository, "move_head", held)
        asyncio.run(accept(repository, MEMORY, three))
    assert [scene.standing(each) for each in (one, two, three)] == ["pending", "head", "pending"]
    scene.run("rollback", MEMORY, head)
    assert scene.pending() == three
    assert scene.head == head
    assert scene.run("accept", MEMORY, three).document["included"] == [one]


def test_an_acceptance_that_failed_leaves_no_row_of_what_had_none(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.first_head()
    other = empty_home(scene.folder / "other")
    scene.restore(home=other)
    scene.learn("One")
    scene.pending()
    scene.run("accept", MEMORY)
    scene.learn("Two", other)
    beside = str(scene.export(home=other).document["snapshot"])

    async def lost(*_: object) -> Head:
        raise SwapLost("Somebody was faster.")

    with monkeypatch.context() as patch, pytest.raises(SwapLost):
        patch.setattr(Repository, "move_head", lost)
        asyncio.run(accept(scene.repository, MEMORY, beside))
    assert scene.standing(beside) == "diverged"


def test_an_acceptance_that_was_killed_is_finished_by_an_export_only_while_the_head_is_the_same(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, one, two = two_that_wait(scene)
    cut_short(scene, monkeypatch, one)
    scene.run("accept", MEMORY, two)
    scene.run("rollback", MEMORY, head)
    for words in ((), ("--force",)):
        assert scene.pending(*words) == one
    scene.config.write_text("")
    assert scene.pending() == one
    assert scene.head == head
    cut_short(scene, monkeypatch, one)
    assert scene.export().document["outcome"] == "committed"
    assert scene.head == one


def test_force_does_not_bring_back_what_was_rolled_back(scene: Scene) -> None:
    head = scene.first_head()
    scene.learn("One")
    scene.pending()
    scene.run("accept", MEMORY)
    scene.run("rollback", MEMORY, head)
    for words in ((), ("--force",)):
        assert scene.export(*words).document["outcome"] == "unchanged"
    assert scene.head == head
