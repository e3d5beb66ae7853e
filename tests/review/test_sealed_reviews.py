"""Reviews in stores that encrypt and sign: nobody else decides, and nothing that waits is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.store.encryption.given_keys import GivenKeys
from tests.parts.homes import Ran, empty_home, run_cli, write
from tests.parts.keys import BOTH, ENCRYPTED, SIGNED, environment

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "acme/agent"


class Scene:
    def __init__(self, folder: Path, given: GivenKeys) -> None:
        self.store, self.home, self.env = folder / "store", empty_home(folder / "home"), environment(given)
        self.config = folder / "review.toml"
        self.config.write_text('[review]\nrequired = ["acme/*"]\n')
        write(self.home / "MEMORY.md", b"# Facts\n")

    def run(self, *words: str | Path) -> Ran:
        return run_cli(*words, "--config", self.config, store=self.store, env=self.env)

    def export(self) -> Ran:
        return self.run("export", MEMORY, "--sandbox", f"local:{self.home}")

    def learn(self, what: str) -> None:
        place = self.home / "MEMORY.md"
        place.write_text(f"{place.read_text()}\n## {what}\n{what} is so.\n")

    def pending(self) -> str:
        ran = self.export()
        assert (ran.code, ran.document["outcome"]) == (3, "pending"), ran.document
        return str(ran.document["snapshot"])


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(ENCRYPTED, id="encrypted", marks=pytest.mark.slow),
        pytest.param(SIGNED, id="signed", marks=pytest.mark.slow),
        pytest.param(BOTH, id="both"),
    ],
)
def test_a_review_works_in_a_sealed_store(given: GivenKeys, tmp_path: Path) -> None:
    scene = Scene(tmp_path, given)
    first = scene.pending()
    assert scene.run("accept", MEMORY).document["head"] == first
    scene.learn("Xyzzy")
    lie = scene.pending()
    assert scene.run("decline", MEMORY, "--because", "plugh").document["snapshot"] == lie
    assert scene.export().error == "declined"
    found = scene.run("log", MEMORY).document
    assert (found["head"], found["problem"]) == (first, "")
    report = scene.run("verify", MEMORY)
    assert report.code == 0, report.document
    fresh = empty_home(tmp_path / "fresh")
    restored = scene.run("restore", MEMORY, "--sandbox", f"local:{fresh}")
    assert (restored.code, restored.document["snapshot"], restored.document["warnings"]) == (0, first, [])
    if given.encrypts:
        told = [path for path in scene.store.rglob("*") if path.is_file()]
        assert not [path for path in told if b"Xyzzy" in path.read_bytes() or b"plugh" in path.read_bytes()]


def test_a_forged_decision_counts_for_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path, SIGNED)
    first = scene.pending()
    scene.run("accept", MEMORY)
    scene.learn("One")
    one = scene.pending()
    place = next(scene.store.rglob("reviews.json"))
    place.write_bytes(place.read_bytes().replace(b'"pending"', b'"accepted"'))
    for words in (["accept", MEMORY], ["accept", MEMORY, one], ["decline", MEMORY, one], ["rollback", MEMORY, one]):
        assert scene.run(*words).code == 1, words
    assert scene.export().document["outcome"] == "pending"
    assert scene.run("log", MEMORY).document["head"] == first
    # Removed, all that waited waits again.
    place.unlink()
    assert scene.run("log", MEMORY).document["snapshots"][0]["standing"] == "pending"
    assert scene.run("accept", MEMORY).document["head"] == one
