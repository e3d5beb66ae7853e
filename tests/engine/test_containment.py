"""A folder on this machine is a sandbox among other things: no link in it leads an export or a restore to them."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.parts.homes import Ran, empty_home, observe, run_cli, tree, write
from tests.parts.services import serving

pytestmark = pytest.mark.usefixtures("forked_programs")

VICTIM = "victim"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with the memory of another agent in it."""
    home = empty_home(tmp_path / "another")
    write(home / "MEMORY.md", b"of another agent")
    assert run_cli("export", VICTIM, f"--sandbox=local:{home}", store=tmp_path / "store").code == 0
    return tmp_path / "store"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = empty_home(tmp_path / "home")
    write(home / "MEMORY.md", b"mine")
    return home


def _export(home: Path, store: Path, *more: str) -> Ran:
    return run_cli("export", "m", f"--sandbox=local:{home}", *more, store=store)


def _restore(home: Path, store: Path, *more: str) -> Ran:
    return run_cli("restore", "m", f"--sandbox=local:{home}", *more, store=store)


def _config(tmp_path: Path, text: str) -> str:
    file = tmp_path / "config.toml"
    file.write_text(text)
    return f"--config={file}"


def _refused(ran: Ran) -> str:
    """Why an export was refused: as an error, or a restore as incomplete."""
    assert ran.code in (1, 4), ran
    return ran.error or str(ran.document["reason"]["code"])


@pytest.mark.parametrize("place", ["", "/memories", "/memories/victim", "/memories/victim/packs"])
def test_a_root_that_leads_into_the_store_is_not_exported(home: Path, store: Path, place: str) -> None:
    before = tree(store)
    (home / ".codex").symlink_to(f"{store}{place}")
    assert _refused(_export(home, store)) in ("root-overlaps", "root-outside")
    assert tree(store) == before


def test_a_restore_never_touches_another_memory(home: Path, store: Path, tmp_path: Path) -> None:
    write(home / ".codex/sessions/2026/one.jsonl", b"{}")
    assert _export(home, store).code == 0
    before = tree(store)
    other = empty_home(tmp_path / "other")
    (other / ".codex").symlink_to(store / "memories" / VICTIM)
    assert _refused(_restore(other, store)) in ("root-overlaps", "root-outside")
    assert tree(store) == before
    assert sorted(path.name for path in other.iterdir()) in ([".codex"], [".cache", ".codex"])


@pytest.mark.parametrize("link", [".claude", ".codex", ".local/share/opencode", ".config/opencode/MEMORY", "memory"])
def test_roots_stay_in_the_sandbox(home: Path, store: Path, tmp_path: Path, link: str) -> None:
    outside = empty_home(tmp_path / "outside")
    for name in ("CLAUDE.md", "sessions/a.jsonl", "storage/a.json", "WORK/a.md", "a.md"):
        write(outside / name, b"of the machine")
    (home / link).parent.mkdir(parents=True, exist_ok=True)
    (home / link).symlink_to(outside)
    ran = _export(home, store)
    if link == "memory":  # not a root but a link in one: left out, and said
        assert ran.code == 0 and {"path": "project/memory", "reason": "a link, not a folder"} in ran.document["skipped"]
    else:
        assert _refused(ran) == "root-outside"
        assert "local_roots" in ran.document["error"]["hint"]


def test_a_link_within_the_sandbox_is_followed(home: Path, store: Path, tmp_path: Path) -> None:
    write(home / "elsewhere/sessions/a.jsonl", b"{}")
    (home / ".codex").symlink_to("elsewhere")
    assert _export(home, store).document["files"] == 2
    other = empty_home(tmp_path / "other")
    (other / "far").mkdir()
    (other / ".codex").symlink_to("far")
    assert _restore(other, store).document["outcome"] == "complete"
    assert (other / "far/sessions/a.jsonl").read_bytes() == b"{}"


def test_a_link_to_a_place_that_is_allowed_is_followed(home: Path, store: Path, tmp_path: Path) -> None:
    volume = empty_home(tmp_path / "volume")
    write(volume / "codex/sessions/a.jsonl", b"{}")
    (home / ".codex").symlink_to(volume / "codex")
    allowed = _config(tmp_path, f'[service]\nlocal_roots = ["{volume}"]\n')
    assert _export(home, store, allowed).document["files"] == 2
    write(volume / "codex/sessions/a.jsonl", b"[]")
    assert _restore(home, store, allowed).document["outcome"] == "complete"


def test_a_project_that_is_named_may_be_anywhere_but_in_the_store(home: Path, store: Path, tmp_path: Path) -> None:
    project = empty_home(tmp_path / "srv/app")
    write(project / "MEMORY.md", b"of the project")
    assert _export(home, store, f"--project={project}").document["files"] == 1
    assert _refused(_export(home, store, f"--project={store}/memories")) == "sandbox-not-allowed"
    (home / "app").symlink_to(project)  # whoever works in the sandbox can write this, so it is nobody's word
    assert _refused(_export(home, store, "--project=~/app")) == "root-outside"


def test_a_store_in_the_home_is_never_part_of_a_memory(home: Path) -> None:
    store = home / ".local/share/memory-sidecar"
    config = _config(home.parent, '[layouts.all]\nkeep = ["**"]\n[[layouts.all.roots]]\nname = "all"\npaths = ["~"]\n')
    for text in (b"one", b"two"):
        write(home / "notes.md", text)
        ran = _export(home, store, config, "--layout=all")
        assert ran.code == 0 and ran.document["files"] == 2, ran
    assert {"path": "all/.local/share/memory-sidecar", "reason": "the sidecar's own"} in ran.document["skipped"]
    before = tree(store)
    assert _restore(home, store, config).document["outcome"] == "complete"
    assert tree(store) == before


def test_keys_and_the_config_are_never_part_of_a_memory(home: Path, store: Path) -> None:
    made = run_cli("keygen", "--signing", store=store)
    write(home / "memory/signing.key", made.document["private"].encode(), 0o600)
    config = home / "memory/config.toml"
    config.write_text(f'[signing]\nkey_file = "{home}/memory/signing.key"\n')
    ran = run_cli("export", "m", f"--sandbox=local:{home}", f"--config={config}", store=home.parent / "signed")
    assert ran.code == 0 and ran.document["files"] == 1, ran


@pytest.mark.parametrize("home_in", ["", "memories", "memories/victim"])
def test_the_store_is_no_sandbox(store: Path, home_in: str) -> None:
    before = tree(store)
    ran = run_cli("export", "m", f"--sandbox=local:{store / home_in}", store=store)
    assert (ran.code, ran.error) == (1, "sandbox-not-allowed"), ran
    assert tree(store) == before


@pytest.mark.parametrize("name", ["lineage", "lineage.new", "keys.new", "answer", "answer.new", "journal.new", "turn"])
def test_links_planted_among_the_files_of_the_sidecar_are_not_written_through(
    home: Path, store: Path, name: str
) -> None:
    assert _export(home, store).code == 0
    own = home / ".cache/memory-sidecar/m"
    target = store / "memories" / VICTIM / "head.json"
    before = target.read_bytes()
    for number in range(3):
        (own / name).unlink(missing_ok=True)
        (own / name).symlink_to(target)
        write(home / "MEMORY.md", f"mine, {number} days later".encode())
        ran = _export(home, store) if number % 2 == 0 else _restore(home, store)
        assert target.read_bytes() == before and ran.code in (0, 1, 3, 4)


@pytest.mark.parametrize("place", [".cache", ".cache/memory-sidecar", ".cache/memory-sidecar/m"])
def test_the_sidecar_keeps_its_files_in_the_sandbox(home: Path, store: Path, place: str) -> None:
    before = tree(store)
    (home / place).parent.mkdir(parents=True, exist_ok=True)
    (home / place).symlink_to(store / "memories" / VICTIM)
    assert _refused(_export(home, store)) in ("root-overlaps", "root-outside", "in-the-way")
    assert tree(store) == before


def test_a_planted_journal_moves_and_removes_nothing_outside(home: Path, store: Path, tmp_path: Path) -> None:
    assert _export(home, store).code == 0
    journal = home / ".cache/memory-sidecar/m/journal"
    stage = tmp_path / f".memory-sidecar-{'0' * 12}"
    empty_home(stage)
    outside = tmp_path / "outside.md"
    outside.write_bytes(b"of the machine")
    plans = [
        {"state": "swapping", "stages": [str(store)], "made": [], "moves": []},
        {"state": "staging", "stages": [str(stage)], "made": [], "moves": []},
        {"state": "swapping", "stages": [], "made": [], "moves": [[str(home / "taken.md"), str(outside)]]},
        {"state": "swapping", "stages": [str(stage)], "made": [], "moves": [[f"{stage}/x", str(outside)]]},
        {"state": "swapping", "stages": [], "made": [str(empty_home(tmp_path / "empty"))], "moves": []},
        {"state": "swapping", "stages": [f"{home}/../{stage.name}"], "made": [], "moves": []},
        [],
        {"state": 1, "stages": [1], "made": {}, "moves": "x"},
    ]
    before = tree(store)
    for plan in plans:
        journal.write_text(json.dumps(plan))
        assert _refused(_export(home, store)) in ("root-outside", "root-overlaps", "journal-damaged"), plan
        assert tree(store) == before and stage.is_dir() and outside.exists() and (tmp_path / "empty").is_dir()
    journal.unlink()
    assert _export(home, store).code == 0


@contextmanager
def _flipping(place: Path, other: Path) -> Iterator[None]:
    """A folder that is one moment itself, the next a link to another one."""
    aside, done = place.with_name("aside"), threading.Event()

    def flip() -> None:
        while not done.is_set():
            with suppress(OSError):  # what is restored may have taken the place meanwhile
                os.rename(place, aside)
                os.symlink(other, place)
                time.sleep(0.0005)
                os.unlink(place)
                os.rename(aside, place)
            time.sleep(0.0005)

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_a_folder_that_becomes_a_link_while_it_is_read_leads_nowhere(home: Path, store: Path, tmp_path: Path) -> None:
    outside = empty_home(tmp_path / "outside")
    for number in range(40):
        write(home / f"memory/deep/{number}.md", b"mine")
        write(outside / f"{number}.md", b"of the machine")
    with _flipping(home / "memory/deep", outside):
        for _ in range(10):
            _export(home, store, "--allow=shrunk")
    target = tmp_path / "all.tar"
    for snapshot in run_cli("log", "m", store=store).document["snapshots"]:
        ran = run_cli("download", "m", snapshot["snapshot"], f"--output={target}", store=store)
        assert ran.code == 0, ran
        assert b"of the machine" not in target.read_bytes()
        target.unlink()


def test_a_folder_that_becomes_a_link_is_not_restored_through(home: Path, store: Path, tmp_path: Path) -> None:
    for number in range(40):
        write(home / f"memory/deep/{number}.md", b"mine")
    assert _export(home, store).code == 0
    outside, other = empty_home(tmp_path / "outside"), empty_home(tmp_path / "other")
    write(outside / "1.md", b"of the machine")
    write(other / "memory/deep/1.md", b"older")
    before = tree(outside)
    with _flipping(other / "memory/deep", outside):
        for number in range(10):
            _restore(other, store, *["--discard"] * (number % 2))
    assert tree(outside) == before


def test_a_database_behind_a_link_is_not_read(home: Path, store: Path, tmp_path: Path) -> None:
    outside = empty_home(tmp_path / "outside")
    (outside / ".claude-mem").mkdir()
    observe(outside, 5, "of the machine")
    (home / ".claude-mem").mkdir()
    observe(home, 5, "mine")
    with _flipping(home / ".claude-mem", outside / ".claude-mem"):
        for _ in range(10):
            _export(home, store, "--allow=shrunk", "--allow=root-missing")
    other = empty_home(tmp_path / "other")
    for snapshot in run_cli("log", "m", store=store).document["snapshots"]:
        assert _restore(other, store, f"--snapshot={snapshot['snapshot']}").code == 0
        data = other / ".claude-mem/claude-mem.db"
        assert not data.exists() or b"of the machine" not in data.read_bytes()


def test_over_http_local_sandboxes_lie_where_it_is_allowed(home: Path, store: Path, tmp_path: Path) -> None:
    with serving(store, tmp_path / "free.log") as service:
        assert service.export("m", f"local:{home}").json()["outcome"] == "committed"
    allowed = empty_home(tmp_path / "sandboxes")
    inner = empty_home(allowed / "one")
    write(inner / "MEMORY.md", b"mine")
    (allowed / "two").symlink_to(home)
    with serving(store, tmp_path / "bound.log", local_roots=[str(allowed)]) as service:
        assert service.export("one", f"local:{inner}").json()["outcome"] == "committed"
        for place in (home, allowed / "two", f"{allowed}/../home", "/", store):
            answer = service.export("two", f"local:{place}")
            assert (answer.status_code, answer.json()["code"]) == (403, "sandbox-not-allowed"), answer.text
        answer = service.export("two", f"local:{inner}", projects=[str(home)])
        assert (answer.status_code, answer.json()["code"]) == (403, "sandbox-not-allowed"), answer.text
        assert service.http.get("/v1/memories/two").status_code == 404


def test_on_an_open_address_no_local_sandbox_is_allowed_until_it_is_said(
    home: Path, store: Path, tmp_path: Path
) -> None:
    with serving(store, tmp_path / "open.log", bind="0.0.0.0:0") as service:
        answer = service.export("m", f"local:{home}")
        assert (answer.status_code, answer.json()["code"]) == (403, "sandbox-not-allowed")
        assert "local_roots" in answer.json()["hint"]
    with serving(store, tmp_path / "said.log", bind="0.0.0.0:0", local_roots=[str(home)]) as service:
        assert service.export("m", f"local:{home}").json()["outcome"] == "committed"
