"""A review: exports wait beside the head until a person accepts or declines them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from sidecar.cli import main
from sidecar.engine.exports import gate
from sidecar.engine.exports.steps import finish_export
from sidecar.engine.reviews import Word, accept, decline
from sidecar.errors import AlreadyDecided, SwapLost
from sidecar.ids import MemoryKeys
from sidecar.policy.review import Review
from sidecar.receipts import GREW
from sidecar.store.encryption.given_keys import GivenKeys
from sidecar.store.manifest import REVIEWED, Head
from sidecar.store.repository import Repository
from sidecar.store.reviews import read_reviews
from sidecar.wiring import open_repository
from tests.parts.earlier import BEFORE_OWNED, earlier
from tests.parts.homes import Ran, empty_home, engine_at, run_cli, write

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "acme/agent"


class Scene:
    """A store, a config that asks for reviews, and homes of agents."""

    def __init__(self, folder: Path, more: str = "") -> None:
        self.folder, self.store = folder, folder / "store"
        self.config = folder / "review.toml"
        self.config.write_text(f'[review]\nrequired = ["acme/*"]\n{more}')
        self.home = self.new_home("home")

    def new_home(self, name: str) -> Path:
        home = empty_home(self.folder / name)
        write(home / "MEMORY.md", b"# Facts\n")
        return home

    def learn(self, what: str, home: Path | None = None) -> None:
        place = (home or self.home) / "MEMORY.md"
        place.write_text(f"{place.read_text()}\n## {what}\n{what} is so.\n")

    def run(self, *words: str | Path) -> Ran:
        return run_cli(*words, "--config", self.config, store=self.store)

    def say(self, *words: str | Path) -> str:
        """What a command prints for people."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            main([*map(str, words), f"--config={self.config}", f"--store=file:{self.store}"])
        return printed.getvalue()

    def export(self, *more: str, home: Path | None = None) -> Ran:
        return self.run("export", MEMORY, "--sandbox", f"local:{home or self.home}", *more)

    def pending(self, *more: str, home: Path | None = None) -> str:
        """An export that waits."""
        ran = self.export(*more, home=home)
        assert (ran.code, ran.document["outcome"], ran.error) == (3, "pending", "pending"), ran.document
        return str(ran.document["snapshot"])

    def restore(self, *more: str, home: Path | None = None) -> Ran:
        return self.run("restore", MEMORY, "--sandbox", f"local:{home or self.home}", *more)

    @property
    def repository(self) -> Repository:
        return open_repository(f"file:{self.store}", GivenKeys())

    @property
    def head(self) -> str:
        return str(self.run("log", MEMORY).document["head"])

    def standing(self, snapshot: str) -> str:
        rows = self.run("log", MEMORY).document["snapshots"]
        return str(next(row["standing"] for row in rows if row["snapshot"] == snapshot))

    def memory(self, home: Path) -> str:
        return (home / "MEMORY.md").read_text()

    def first_head(self) -> str:
        snapshot = self.pending()
        assert self.run("accept", MEMORY).document["head"] == snapshot
        return snapshot


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_an_export_waits_with_what_it_changes_until_it_is_accepted(scene: Scene) -> None:
    head = scene.first_head()
    scene.learn("Deploys \x1b[31m")
    ran = scene.export()
    snapshot = ran.document["snapshot"]
    assert ran.document["reason"]["message"] == (
        "It waits for a review: +1 section.\n+ section: Facts › Deploys \\x1b[31m"
    )
    assert (scene.head, scene.standing(snapshot)) == (head, "pending")
    shown = scene.run("show", MEMORY, snapshot).document
    assert (shown["pending"], shown["review"]) == (ran.document["reason"]["message"], None)
    done = scene.run("accept", MEMORY, "--because", "read it").document
    assert (done["head"], done["previous"], done["standing"], done["pinned"]) == (snapshot, head, "pending", False)
    review = scene.run("show", MEMORY, snapshot).document["review"]
    assert (review["decision"], review["because"], bool(review["by"]), bool(review["at"])) == (
        "accepted", "read it", True, True,
    )  # fmt: skip
    fresh = empty_home(scene.folder / "fresh")
    assert scene.restore(home=fresh).code == 0
    assert scene.memory(fresh) == scene.memory(scene.home)


def test_what_follows_grows_from_it_and_is_accepted_with_it(scene: Scene) -> None:
    head = scene.first_head()
    scene.learn("One")
    one = scene.pending()
    kept = scene.restore()
    assert (kept.code, kept.document["kept"]) == (0, True)  # not set back
    scene.learn("Two")
    two = scene.pending()
    assert scene.pending() == two  # nothing new: it waits still
    scene.learn("Three")
    three = scene.pending()
    rows = {row["snapshot"]: row for row in scene.run("log", MEMORY).document["snapshots"]}
    assert (rows[three]["parent"], rows[two]["parent"], rows[one]["parent"]) == (two, one, head)
    fresh = empty_home(scene.folder / "fresh")
    assert scene.restore(home=fresh).document["snapshot"] == head
    assert "One" not in scene.memory(fresh)
    assert scene.run("accept", MEMORY, two).document["included"] == [one]
    assert [scene.standing(snapshot) for snapshot in (one, two, three)] == ["accepted", "head", "pending"]
    assert scene.run("accept", MEMORY).document["head"] == three
    ran = scene.run("accept", MEMORY)
    assert (ran.code, ran.error) == (2, "nothing-to-accept")


def test_what_was_declined_never_becomes_the_head_nor_what_grows_out_of_it(scene: Scene) -> None:
    head = scene.first_head()
    scene.learn("A lie")
    lie = scene.pending()
    assert scene.run("decline", MEMORY, "--because", "not so").document["snapshot"] == lie
    again = scene.export()
    assert (again.code, again.error, again.document["snapshot"]) == (3, "declined", lie)
    assert again.document["reason"]["message"].endswith("declined it: not so.")
    scene.learn("More")
    more = scene.export("--force")
    assert (more.code, more.error) == (3, "declined")
    for words in (["accept", MEMORY, lie], ["rollback", MEMORY, lie], ["fork", MEMORY, "other", "--snapshot", lie]):
        assert scene.run(*words).code == 2, words
    assert (scene.standing(lie), scene.head) == ("declined", head)
    assert scene.run("accept", MEMORY).error == "nothing-to-accept"  # not unless it is named
    # What grew out of it is rejected, and a person who names it can accept it.
    done = scene.run("accept", MEMORY, more.document["snapshot"]).document
    assert (done["head"], done["reason"]["code"]) == (more.document["snapshot"], "declined")
    scene.learn("Then")
    assert scene.pending()


def test_a_restore_sets_back_a_sandbox_that_goes_on_from_what_was_declined(scene: Scene) -> None:
    head = scene.first_head()
    before = scene.memory(scene.home)
    scene.learn("A lie")
    scene.pending()
    scene.run("decline", MEMORY)
    scene.learn("Not saved yet")
    ran = scene.restore()
    assert (ran.code, ran.document["snapshot"], ran.document["kept"]) == (0, head, False)
    assert ran.document["saved_first"] and scene.memory(scene.home) == before
    scene.learn("The truth")
    snapshot = scene.pending()
    assert scene.run("accept", MEMORY).document["head"] == snapshot


def test_neither_force_nor_allow_nor_an_import_passes_a_review(scene: Scene, tmp_path: Path) -> None:
    head = scene.first_head()
    scene.learn("One")
    assert scene.pending("--force")
    assert scene.run("download", MEMORY, "-o", tmp_path / "m.tar.gz").code == 0
    write(scene.home / "memory/a.md", b"more")
    ran = scene.run("import", MEMORY, tmp_path / "m.tar.gz")
    assert (ran.code, ran.document["outcome"]) == (0, "unchanged")
    (tmp_path / "other").mkdir()
    other = Scene(tmp_path / "other")
    assert other.run("import", MEMORY, tmp_path / "m.tar.gz").document["outcome"] == "pending"
    assert scene.head == head
    assert scene.export("--allow", "pending").error == "unknown-reason"


def test_a_guard_comes_before_a_review_and_what_it_lets_by_waits(scene: Scene) -> None:
    write(scene.home / "memory/large.md", b"fact " * 40_000)
    head = scene.first_head()
    (scene.home / "memory/large.md").unlink()
    ran = scene.export()
    assert (ran.code, ran.error) == (3, "shrunk")
    waits = scene.export("--allow", "shrunk")  # the same snapshot, whose manifest says that it was rejected
    assert (waits.document["outcome"], waits.document["snapshot"]) == ("pending", ran.document["snapshot"])
    assert (scene.standing(waits.document["snapshot"]), scene.head) == ("pending", head)
    assert scene.run("accept", MEMORY).document["head"] == waits.document["snapshot"]


def test_what_grew_out_of_one_that_waits_waits_without_the_config_too(scene: Scene) -> None:
    scene.first_head()
    scene.learn("One")
    scene.pending()
    scene.learn("Two")
    scene.config.write_text("")
    two = scene.pending()
    assert scene.run("accept", MEMORY).document["head"] == two
    scene.learn("Three")
    assert scene.export().document["outcome"] == "committed"  # said in docs/review.md: the config asks for a review


def test_a_second_sandbox_whose_head_has_moved_on_has_to_be_named(scene: Scene) -> None:
    scene.first_head()
    other = empty_home(scene.folder / "other")
    scene.restore(home=other)
    scene.learn("One")
    one = scene.pending()
    scene.learn("Two", other)
    two = scene.pending(home=other)
    assert scene.run("accept", MEMORY, one).code == 0
    ran = scene.run("accept", MEMORY)
    assert (ran.code, ran.error) == (2, "nothing-to-accept") and two in ran.stderr
    assert scene.run("list").document["memories"][0]["pending"] == 1
    assert scene.export(home=other).document["outcome"] == "diverged"


def test_of_two_reviewers_the_second_is_told(scene: Scene) -> None:
    scene.first_head()
    scene.learn("One")
    one = scene.pending()
    scene.learn("Two")
    two = scene.pending()
    repository = scene.repository

    async def both() -> tuple[object, object]:
        return await asyncio.gather(
            accept(repository, MEMORY, two, Word(by="ann")),
            decline(repository, MEMORY, one, Word(by="bob", because="no")),
            return_exceptions=True,
        )

    done = asyncio.run(both())
    assert sum(isinstance(answer, AlreadyDecided) for answer in done) == 1, done
    reviews, _ = asyncio.run(read_reviews(repository.store, MEMORY))
    if scene.head == two:
        assert reviews.get_decision(one) == "accepted" and reviews.rows[one].within == two
    else:
        assert reviews.get_decision(one) == "declined"
        # Named, what grew out of it can be accepted: that is a person's word.
        assert scene.run("accept", MEMORY, two).document["head"] == two


def test_an_acceptance_that_was_killed_is_finished_by_the_next(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    head = scene.first_head()
    scene.learn("One")
    one = scene.pending()
    repository = scene.repository

    async def killed(*_: object, **__: object) -> Head:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(type(repository), "move_head", killed)
        asyncio.run(accept(repository, MEMORY, one))
    assert (scene.head, scene.standing(one)) == (head, "accepted")
    with pytest.raises(AlreadyDecided):
        asyncio.run(decline(repository, MEMORY, one))
    assert scene.run("accept", MEMORY, one).document["head"] == one


def test_an_export_that_moves_the_head_meanwhile_is_not_overwritten(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.first_head()
    other = empty_home(scene.folder / "other")
    scene.restore(home=other)
    scene.learn("One")
    one = scene.pending()
    scene.learn("Two", other)
    newer = ""

    async def held(*_: object) -> None:
        """Between looking at the head and moving it."""
        nonlocal newer
        ran = run_cli("export", MEMORY, "--sandbox", f"local:{other}", store=scene.store)  # without the config
        newer = ran.document["snapshot"]

    monkeypatch.setattr("sidecar.engine.reviews.hold_packs", held)
    with pytest.raises(SwapLost):
        asyncio.run(accept(scene.repository, MEMORY, one))
    assert scene.head == newer


def test_an_export_that_died_before_it_answered_still_waits(scene: Scene) -> None:
    head = scene.first_head()
    scene.learn("One")
    ran = scene.export()
    engine = replace(engine_at(scene.store), repository=scene.repository, review=Review(required=["acme/*"]))
    receipt = asyncio.run(finish_export(engine, MEMORY, ran.document["snapshot"], "local:x"))
    assert receipt is not None and receipt.reason is not None
    assert (receipt.outcome.value, receipt.reason.message) == ("pending", ran.document["reason"]["message"])
    assert scene.head == head


def test_reviews_that_cannot_be_read_let_nothing_by(scene: Scene) -> None:
    head = scene.first_head()
    scene.learn("One")
    scene.pending()
    key = MemoryKeys.of(MEMORY).reviews
    place = next(scene.store.rglob("reviews.json"))
    assert place.as_posix().endswith(key.rpartition("/")[2])
    place.write_bytes(b"{}")
    scene.learn("Two")
    scene.config.write_text("")  # not even where no review is asked for
    scene.pending()
    assert scene.run("accept", MEMORY).code == 1
    assert scene.head == head


def test_a_head_that_is_gone_is_found_again_by_what_was_accepted(scene: Scene) -> None:
    scene.first_head()
    scene.learn("One")
    one = scene.pending()
    scene.run("accept", MEMORY)
    scene.learn("Two")
    scene.pending()
    next(path for path in scene.store.rglob("head.json") if b'"format":2' not in path.read_bytes()).unlink()
    fresh = empty_home(scene.folder / "fresh")
    ran = scene.restore(home=fresh)
    assert (ran.code, ran.document["snapshot"]) == (0, one)
    assert "Two" not in scene.memory(fresh) and "One" in scene.memory(fresh)


def test_retention_keeps_what_waits_within_its_bound(scene: Scene) -> None:
    head = scene.first_head()
    waiting = []
    for number in range(4):
        scene.learn(f"Number {number}")
        waiting.append(scene.pending())
    scene.config.write_text(f"{scene.config.read_text()}[retention]\nkeep_last = 1\n")
    fates = scene.run("forget", MEMORY, "--dry-run").document["memories"][0]["snapshots"]
    assert {row["snapshot"]: row["reason"] for row in fates} == {
        head: "head", **dict.fromkeys(waiting, "waits for a review"),
    }  # fmt: skip
    scene.config.write_text(f"{scene.config.read_text()}keep_pending = 2\n")
    scene.run("forget", MEMORY)
    left = [row["snapshot"] for row in scene.run("log", MEMORY).document["snapshots"]]
    assert set(waiting[-2:]) <= set(left)
    assert scene.run("accept", MEMORY).document["head"] == waiting[-1]


def test_an_earlier_version_refuses_a_memory_that_is_under_review(scene: Scene, tmp_path: Path) -> None:
    before = earlier(tmp_path / "earlier", BEFORE_OWNED)
    scene.config.write_text("")
    assert scene.export().document["outcome"] == "committed"
    scene.config.write_text('[review]\nrequired = ["acme/*"]\n')
    scene.learn("One")
    scene.pending()
    head = scene.head
    heads = [json.loads(path.read_text()) for path in scene.store.rglob("head.json")]
    assert REVIEWED in {one["format"] for one in heads}
    scene.learn("Two")
    wrote = before.run("export", MEMORY, "--sandbox", f"local:{scene.home}", store=scene.store)
    assert wrote.code != 0, wrote.document
    assert scene.head == head


def test_what_was_decided_is_not_offered_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.first_head()
    scene.learn("Deploys")
    declined = scene.pending()
    scene.run("decline", MEMORY, declined)
    said = scene.say("export", MEMORY, "--sandbox", f"local:{scene.home}")
    assert "rejected" in said and "memory-sidecar accept" not in said and "The decision stays" in said
    shown = scene.say("show", MEMORY, declined)
    assert "It waits" not in shown and "It waited for a review: +1 section" in shown
    scene.learn("More")
    assert "memory-sidecar accept" in scene.say("export", MEMORY, "--sandbox", f"local:{scene.home}")
    assert gate.GREW.startswith(GREW)


def test_a_snapshot_beside_the_head_is_compared_with_the_head(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    first = scene.first_head()
    scene.learn("Deploys")
    second = scene.pending()
    scene.learn("Backups")
    third = scene.pending()
    for words in ((third,), ("latest", third)):
        for how in ((), ("--files",)):
            found = scene.run("diff", MEMORY, *words, *how).document
            assert (found["from"], found["to"]) == (first, third) and found["changed"]
    found = scene.run("diff", MEMORY, third[-8:]).document
    assert found["counts"] == {"section": {"added": 2, "changed": 0, "removed": 0}}
    scene.run("accept", MEMORY, second)
    for former in (first, second):
        found = scene.run("diff", MEMORY, former).document
        assert (found["from"], found["to"]) == (former, second)
