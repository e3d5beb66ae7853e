"""``doctor`` finds what would go wrong, and names the cure of each thing once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli.main import main
from tests.parts.homes import Ran, empty_home, run_cli, write
from tests.parts.keys import identity

pytestmark = pytest.mark.usefixtures("forked_programs")

MEMORY = "conductor"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A memory with three snapshots."""
    home = empty_home(tmp_path / "home")
    for number in range(3):
        write(home / "MEMORY.md", f"# {number}\n".encode() * 50)
        assert run_cli("export", MEMORY, f"--sandbox=local:{home}", store=tmp_path / "store").code == 0
    return tmp_path / "store"


def _snapshots(store: Path) -> list[str]:
    return [row["snapshot"] for row in run_cli("log", MEMORY, store=store).document["snapshots"]]


def _wrong(ran: Ran) -> dict[str, Any]:
    (row,) = [row for row in ran.document["checks"] if not row["ok"]]
    assert ran.code == 1 and row["hint"]
    return dict(row)


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)


def _pack_of_the_head(store: Path) -> Path:
    return max(store.rglob("*.tar.*"), key=lambda file: file.stat().st_mtime_ns)


DAMAGES: dict[str, Callable[[Path, str], object]] = {
    "the head's own object": lambda store, head: (next(store.rglob("head.json"))).write_text("{"),
    "no head's object": lambda store, head: (next(store.rglob("head.json"))).unlink(),
    "its manifest": lambda store, head: _flip(next(store.rglob(f"{head}.json"))),
    "no manifest": lambda store, head: next(store.rglob(f"{head}.json")).unlink(),
    "a pack is gone": lambda store, head: _pack_of_the_head(store).unlink(),
    "a pack is cut short": lambda store, head: _pack_of_the_head(store).write_bytes(b"x"),
    "one bit of a pack": lambda store, head: _flip(_pack_of_the_head(store)),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_head_is_found_and_the_cure_works(what: str, store: Path, tmp_path: Path) -> None:
    assert run_cli("doctor", store=store).code == 0
    DAMAGES[what](store, _snapshots(store)[0])
    row = _wrong(run_cli("doctor", store=store))
    assert row["name"] == "heads" and MEMORY in row["detail"]
    words = row["hint"].split("`")[1].split()
    assert words[:3] == ["memory-sidecar", "rollback", MEMORY]
    assert run_cli(*words[1:], store=store).code == 0
    assert run_cli("doctor", store=store).code == 0
    restored = run_cli("restore", MEMORY, f"--sandbox=local:{empty_home(tmp_path / 'other')}", store=store)
    assert restored.document["outcome"] == "complete" and restored.document["warnings"] == []


def test_a_memory_without_any_whole_snapshot_is_said_to_have_none(store: Path) -> None:
    for file in store.rglob("*.tar.*"):
        file.unlink()
    assert "No snapshot of conductor is whole" in _wrong(run_cli("doctor", store=store))["hint"]


def test_snapshots_still_in_the_clear_are_counted_until_they_are_encrypted(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMORY_SIDECAR_IDENTITY", identity())
    row = _wrong(run_cli("doctor", store=store))
    assert (row["name"], row["code"]) == ("encryption", "stored-in-the-clear")
    assert f"3 snapshots of {MEMORY}" in row["detail"] and "memory-sidecar rekey" in row["hint"]
    home = empty_home(tmp_path / "new")
    write(home / "MEMORY.md", b"after")
    assert run_cli("export", "later", f"--sandbox=local:{home}", store=store).code == 0
    assert f": 3 snapshots of {MEMORY}." in _wrong(run_cli("doctor", store=store))["detail"]
    assert run_cli("rekey", store=store).code == 0
    assert run_cli("doctor", store=store).code == 0


def test_a_look_does_not_encrypt_a_store_that_others_use_in_the_clear(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as keyed:
        keyed.setenv("MEMORY_SIDECAR_IDENTITY", identity())
        assert run_cli("doctor", store=store).code == 1
    assert run_cli("doctor", store=store).code == 0


@pytest.mark.parametrize(("provider", "variable"), [("e2b", "E2B_API_KEY"), ("daytona", "DAYTONA_API_KEY")])
def test_a_key_that_is_not_set_is_said_to_be_not_set(provider: str, variable: str, store: Path) -> None:
    row = _wrong(run_cli("doctor", "--sandbox", f"{provider}:abc", store=store))
    assert row["name"] == "sandbox" and row["detail"].startswith(f"{variable} is not set")
    assert "accept" not in row["detail"] and variable in row["hint"]


def test_each_cure_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home, volume = empty_home(tmp_path / "home"), tmp_path / "volume"
    volume.mkdir()
    assert main(["doctor", f"--store=volume:{volume}", f"--sandbox=local:{home}"]) == 1
    said = capsys.readouterr().out
    assert said.count("Mount a volume at") == 1 and said.count("No volume is mounted") == 1
    assert said.count("--project PATH") == 1 and said.count("no memory of any layout") == 1
