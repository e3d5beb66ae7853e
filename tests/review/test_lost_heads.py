"""No head comes to be that nobody accepted: not by what was forgotten, copied or stored before, nor when a head is lost."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.engine.exports.steps import finish_export
from sidecar.engine.reviews import accept
from sidecar.policy.retention import Retention
from sidecar.policy.review import Review
from sidecar.store.manifest import Head
from sidecar.store.repository import Repository
from sidecar.store.retention import forget
from tests.parts.homes import empty_home, engine_at
from tests.review.test_gate import MEMORY, Scene

pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def lose_head(scene: Scene, how: str) -> None:
    place = next(path for path in scene.store.rglob("head.json") if b'"snapshot"' in path.read_bytes())
    if how == "missing":
        place.unlink()
    else:
        place.write_text("x")


def export_foreign(scene: Scene) -> str:
    """An export of a sandbox that was never restored: it diverges, and has no parent."""
    other = scene.new_home("other")
    scene.learn("A lie", other)
    ran = scene.export(home=other)
    assert ran.document["outcome"] == "diverged", ran.document
    return str(ran.document["snapshot"])


def forget_snapshot(scene: Scene, snapshot: str) -> None:
    """As retention does."""
    next(scene.store.rglob(f"{snapshot}.json")).unlink()


@pytest.mark.parametrize("reviewed", [True, False])
@pytest.mark.parametrize("more", [(), ("--force",)])
def test_what_grew_out_of_a_declined_one_that_is_forgotten_stays_declined(
    scene: Scene, reviewed: bool, more: tuple[str, ...]
) -> None:
    head = scene.first_head()
    scene.learn("A lie")
    lie = scene.pending()
    restored = empty_home(scene.folder / "restored")
    assert scene.restore("--snapshot", lie, home=restored).code == 0
    assert scene.run("decline", MEMORY, lie, "--because", "not so").code == 0
    scene.learn("More", restored)
    assert scene.export("--force", home=restored).error == "declined"
    forget_snapshot(scene, lie)
    if not reviewed:
        scene.config.write_text("")
    for home in (scene.home, restored):  # one has the lie itself, one what grew out of it
        for change in (False, True):
            if change:
                scene.learn("Yet more", home)
            ran = scene.export(*more, home=home)
            assert (ran.code, scene.head) == (3, head), ran.document
            if home == restored and not more:
                assert ran.document["outcome"] in ("diverged", "rejected")  # it did not start from the head
            else:
                assert (ran.error, "not so" in ran.document["reason"]["message"]) == ("declined", True), ran.document


@pytest.mark.parametrize("how", ["missing", "damaged"])
@pytest.mark.parametrize("required", ["acme/*", ""])
def test_a_repeated_call_does_not_replace_a_lost_head_by_what_diverged(scene: Scene, how: str, required: str) -> None:
    scene.first_head()
    lie = export_foreign(scene)
    lose_head(scene, how)
    review = Review(required=[required] if required else [])
    engine = replace(engine_at(scene.store), repository=scene.repository, review=review)
    receipt = asyncio.run(finish_export(engine, MEMORY, lie, "local:x"))
    assert receipt is not None and receipt.outcome.value == "diverged"
    assert asyncio.run(scene.repository.head(MEMORY)).head is None


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_lost_head_is_not_found_again_in_what_diverged(scene: Scene, how: str) -> None:
    head = scene.first_head()
    lie = export_foreign(scene)
    lose_head(scene, how)
    fresh = empty_home(scene.folder / "fresh")
    assert scene.restore(home=fresh).document["snapshot"] == head
    ran = scene.run("rollback", MEMORY, lie)
    assert (ran.code, ran.error) == (2, "not-reviewed")
    assert scene.run("rollback", MEMORY, head).document["head"] == head
    state = asyncio.run(scene.repository.head(MEMORY))
    assert state.head is not None and not state.head.was_head(lie)


def test_the_head_that_the_first_accepted_one_replaced_is_found_again(scene: Scene) -> None:
    reviewed = scene.config.read_text()
    scene.config.write_text("")
    first = scene.export().document["snapshot"]
    scene.config.write_text(reviewed)
    lie = export_foreign(scene)
    scene.learn("One")
    one = scene.pending()
    scene.run("accept", MEMORY)
    lose_head(scene, "missing")
    head = asyncio.run(scene.repository.rebuild_head(MEMORY))
    assert head is not None and [snapshot for snapshot, _ in head.history] == [one, first]
    assert scene.run("rollback", MEMORY, first).code == 0
    state = asyncio.run(scene.repository.head(MEMORY))
    assert state.head is not None and not state.head.was_head(lie)
    earlier = (
        "An earlier version of the sidecar would make a head of what grew out of one that waits: it refuses this one."
    )
    assert state.head.format == head.format > 1, earlier


def test_a_memory_under_review_is_begun_only_with_a_copy_of_what_was_a_head(scene: Scene) -> None:
    head = scene.first_head()
    lie = export_foreign(scene)
    ran = scene.run("fork", MEMORY, "acme/new", "--snapshot", lie)
    assert (ran.code, ran.error) == (2, "not-reviewed")
    assert "acme/new is under review" in ran.stderr
    assert scene.run("fork", MEMORY, "acme/new").document["origin"].endswith(head)
    assert scene.run("fork", MEMORY, "other/new", "--snapshot", lie).code == 0  # where nobody asks for a review


def test_what_was_accepted_is_kept_until_it_is_the_head(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever accepted it was killed before the head moved."""
    scene.first_head()
    scene.learn("One")
    one = scene.pending()

    async def killed(*_: object, **__: object) -> Head:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(Repository, "move_head", killed)
        asyncio.run(accept(scene.repository, MEMORY, one))
    other = empty_home(scene.folder / "other")
    scene.restore(home=other)
    for number in range(3):
        scene.learn(f"More {number}", other)
        scene.pending(home=other)
        scene.run("accept", MEMORY)
    asyncio.run(forget(scene.repository, MEMORY, Retention(keep_last=1)))
    assert scene.standing(one) == "accepted"
    assert scene.run("accept", MEMORY, one).document["head"] == one
