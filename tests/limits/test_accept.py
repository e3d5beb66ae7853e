"""`accept`, for people: what a guard rejected, or what has diverged, becomes the head, and what it replaces is kept."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from sidecar.cli import main
from sidecar.client import Acceptance, Client, SidecarProblem
from sidecar.engine.reviews import accept
from sidecar.errors import SwapLost
from sidecar.ids import build_memory_key, build_portable_folder
from sidecar.store.encryption.given_keys import GivenKeys
from sidecar.wiring import open_repository
from tests.parts.homes import Ran, empty_home, run_cli, write
from tests.parts.services import TOKEN, path, serving

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "acme/agent"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"what matters")
    write(home / "memory/large.md", b"fact " * 40_000)
    return home


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def exported(store: Path, home: Path, *more: str) -> Ran:
    return run_cli("export", MEMORY, "--sandbox", f"local:{home}", *more, store=store)


def restored(store: Path, home: Path) -> Path:
    assert run_cli("restore", MEMORY, "--sandbox", f"local:{empty_home(home)}", store=store).code == 0
    return home


def rejected(store: Path, home: Path) -> tuple[str, str]:
    """A head, and a snapshot that a guard refused to put in its place."""
    head = exported(store, home).document["snapshot"]
    (home / "memory/large.md").unlink()
    ran = exported(store, home)
    assert (ran.code, ran.error) == (3, "shrunk")
    return head, ran.document["snapshot"]


def standing(store: Path, snapshot: str) -> str:
    rows = run_cli("log", MEMORY, store=store).document["snapshots"]
    return str(next(row["standing"] for row in rows if row["snapshot"] == snapshot))


@pytest.mark.parametrize("named", [False, True])
def test_the_newest_rejected_snapshot_or_the_one_named_becomes_the_head(
    named: bool, home: Path, store: Path, tmp_path: Path
) -> None:
    head, refused = rejected(store, home)
    ran = run_cli("accept", MEMORY, *([refused] if named else []), store=store)
    assert (ran.code, ran.document["head"], ran.document["previous"]) == (0, refused, head)
    assert (ran.document["standing"], ran.document["reason"]["code"]) == ("rejected", "shrunk")
    assert "the head has 200,012" in ran.document["reason"]["message"]
    rows = {row["snapshot"]: row for row in run_cli("log", MEMORY, store=store).document["snapshots"]}
    assert (rows[refused]["standing"], rows[head]["standing"], rows[head]["pinned"]) == ("head", "earlier head", True)
    assert rows[head]["pinned_because"] == f"{refused} took its place though shrunk (accepted by a person)"
    other = restored(store, tmp_path / "other")
    assert not (other / "memory/large.md").exists()
    # The sandbox goes on from there, and the head that was can be had back.
    write(home / "MEMORY.md", b"what matters now")
    assert exported(store, home).document["outcome"] == "committed"
    assert run_cli("rollback", MEMORY, head, store=store).code == 0


def test_what_has_diverged_is_accepted_too(home: Path, store: Path, tmp_path: Path) -> None:
    exported(store, home)
    other = restored(store, tmp_path / "other")
    write(home / "MEMORY.md", b"here")
    head = exported(store, home).document["snapshot"]
    write(other / "MEMORY.md", b"there")
    beside = exported(store, other).document["snapshot"]
    assert run_cli("accept", MEMORY, store=store).error == "nothing-to-accept", "it has to be named"
    ran = run_cli("accept", MEMORY, beside, store=store)
    assert (ran.code, ran.document["previous"], ran.document["standing"]) == (0, head, "diverged")
    assert (standing(store, beside), standing(store, head)) == ("head", "earlier head")


def test_what_is_or_was_the_head_cannot_be_accepted(home: Path, store: Path) -> None:
    first = exported(store, home).document["snapshot"]
    write(home / "MEMORY.md", b"more")
    head = exported(store, home).document["snapshot"]
    for snapshot, said in ((head, "is the head of acme/agent already"), (first, "was the head of acme/agent before")):
        ran = run_cli("accept", MEMORY, snapshot, store=store)
        assert (ran.code, ran.error) == (2, "nothing-to-accept")
        assert said in ran.document["error"]["message"]
    assert f"memory-sidecar rollback {MEMORY} {first}" in ran.document["error"]["hint"]
    nothing = run_cli("accept", MEMORY, store=store)
    assert (nothing.code, nothing.error) == (2, "nothing-to-accept")
    assert standing(store, head) == "head"


@pytest.mark.parametrize("words", [["accept", "nobody"], ["accept", MEMORY, "20200101T000000000Z-00000000"]])
def test_what_is_not_there_cannot_be_accepted(words: list[str], home: Path, store: Path) -> None:
    rejected(store, home)
    ran = run_cli(*words, store=store)
    assert (ran.code, ran.error) == (1, "memory-not-found" if words[1] == "nobody" else "snapshot-not-found")


def test_a_rejection_from_before_the_head_is_not_taken_unless_it_is_named(home: Path, store: Path) -> None:
    _, refused = rejected(store, home)
    write(home / "memory/large.md", b"fact " * 50_000)
    newer = exported(store, home).document["snapshot"]
    assert run_cli("accept", MEMORY, store=store).error == "nothing-to-accept"
    assert standing(store, newer) == "head"
    assert run_cli("accept", MEMORY, refused[-8:], store=store).document["previous"] == newer


def test_what_is_damaged_is_not_made_the_head(home: Path, store: Path) -> None:
    head, refused = rejected(store, home)
    top = store / "memories" / build_portable_folder(build_memory_key(MEMORY))
    pack = json.loads((top / f"snapshots/{refused}.json").read_bytes())["packs"][-1]
    place = top / f"packs/{pack['id']}.tar.{pack['codec']}"
    whole = place.read_bytes()
    place.write_bytes(whole[:-1])
    assert run_cli("accept", MEMORY, store=store).error == "snapshot-damaged"
    place.write_bytes(whole[:-9] + b"x" + whole[-8:])
    assert run_cli("verify", MEMORY, store=store).code == 1
    ran = run_cli("accept", MEMORY, refused, store=store)
    assert (ran.code, ran.error) == (1, "snapshot-damaged")
    assert standing(store, head) == "head"


def test_words_for_people(home: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, _ = rejected(store, home)
    write(home / "MEMORY.md", b"more")
    capsys.readouterr()
    assert main(["export", MEMORY, "--sandbox", f"local:{home}", f"--store=file:{store}"]) == 3
    said = capsys.readouterr().out
    command = next(line for line in said.splitlines() if line.startswith("To make it the head: "))
    words = command.removeprefix("To make it the head: memory-sidecar ").split()
    assert words[:2] == ["accept", MEMORY]
    assert main([*words, f"--store=file:{store}"]) == 0
    said = capsys.readouterr().out
    assert f"It replaces {head}, which is pinned. Nothing was removed." in said
    assert "[shrunk]" in said and f"To go back: memory-sidecar rollback {MEMORY} {head}" in said
    assert main(["log", MEMORY, f"--store=file:{store}"]) == 0
    assert "earlier head, pinned" in capsys.readouterr().out


def test_somebody_who_moves_the_head_meanwhile_wins(home: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, refused = rejected(store, home)
    repository, newer = open_repository(f"file:{store}", GivenKeys()), ""

    async def held(*about: object) -> None:
        """Between looking at the head and moving it."""
        nonlocal newer
        write(home / "memory/large.md", b"fact " * 50_000)
        newer = exported(store, home).document["snapshot"]  # in a process of its own, as a loop runs here

    monkeypatch.setattr("sidecar.engine.reviews.hold_packs", held)
    with pytest.raises(SwapLost):
        asyncio.run(accept(repository, MEMORY, refused))
    assert standing(store, newer) == "head"
    assert not any(row["pinned"] for row in run_cli("log", MEMORY, store=store).document["snapshots"]), "nor a pin left"


def test_over_http_and_from_python(home: Path, store: Path, tmp_path: Path) -> None:
    head, refused = rejected(store, home)
    with serving(store, tmp_path / "log") as running, Client(running.url, token=TOKEN) as client:
        wrong = running.http.post(path(MEMORY, "acceptances"), json={"snapshot": head})
        assert (wrong.status_code, wrong.json()["code"]) == (409, "nothing-to-accept")
        assert running.http.post(path(MEMORY, "acceptances"), json={"snapshots": head}).status_code == 422
        assert running.http.post(path("nobody", "acceptances")).status_code == 404
        done = running.http.post(path(MEMORY, "acceptances"))
        assert done.status_code == 200
        assert done.json() == {
            "memory": MEMORY,
            "head": refused,
            "previous": head,
            "standing": "rejected",
            "reason": {"code": "shrunk", "message": "It has 12 bytes; the head has 200,012."},
            "pinned": True,
            "by": "admin",
            "because": "",
            "included": [],
        }
        assert 'memory_sidecar_accepted_total{by="person",reason="shrunk"} 1.0' in running.http.get("/metrics").text
        assert any(line.get("event") == "accepted what guards objected to" for line in running.lines())
        with pytest.raises(SidecarProblem) as refusal:
            client.accept(MEMORY)
        assert (refusal.value.status, refusal.value.code) == (409, "nothing-to-accept")
        client.rollback(MEMORY, head)
        # It has been the head by now, and so is one of those to go back to.
        with pytest.raises(SidecarProblem) as refusal:
            client.accept(MEMORY, refused)
        assert "rollback" in refusal.value.hint
        write(home / "MEMORY.md", b"new")
        assert running.export(MEMORY, f"local:{restored(store, tmp_path / 'other')}").json()["outcome"] == "unchanged"
        (tmp_path / "other/memory/large.md").unlink()
        again = client.export(MEMORY, sandbox=f"local:{tmp_path / 'other'}")
        assert again.reason is not None and again.reason.code == "shrunk" and again.accepted is None
        accepted = client.accept(MEMORY)
        assert isinstance(accepted, Acceptance)
        assert (accepted.head, accepted.previous, accepted.reason.code) == (again.snapshot, head, "shrunk")
