"""A layout that keeps everything in a folder (``**``): what is there, what was staged, and what is ours are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parts.homes import empty_home, run_cli, tree, without_cache, write

pytestmark = pytest.mark.usefixtures("forked_programs")

CONFIG = """
[layouts.notes]
keep = ["**"]
[[layouts.notes.roots]]
name = "notes"
paths = ["{place}"]
"""


def _config(tmp_path: Path, place: str = "~/notes") -> str:
    file = tmp_path / "config.toml"
    file.write_text(CONFIG.format(place=place))
    return f"--config={file}"


def test_a_restore_over_a_folder_that_has_files_replaces_them_and_removes_nothing_else(tmp_path: Path) -> None:
    store, config = tmp_path / "store", _config(tmp_path)
    home = empty_home(tmp_path / "home")
    for name in ("a.md", "deep/b.md", "deep/er/c.md"):
        write(home / "notes" / name, name.encode())
    assert run_cli("export", "m", f"--sandbox=local:{home}", config, store=store).code == 0
    before = tree(home / "notes")
    other = empty_home(tmp_path / "other")
    write(other / "notes/a.md", b"another")
    write(other / "notes/deep/old.md", b"older")
    ran = run_cli("restore", "m", f"--sandbox=local:{other}", config, store=store)
    assert (ran.code, ran.document["outcome"], ran.document["files"]) == (0, "complete", 3), ran
    assert tree(other / "notes") == before


def test_what_the_sidecar_keeps_in_a_sandbox_is_never_memory(tmp_path: Path) -> None:
    """A layout may keep the whole home; the sidecar's own folder in it neither travels nor goes."""
    store, config = tmp_path / "store", _config(tmp_path, "~")
    home = empty_home(tmp_path / "home")
    write(home / "a.md", b"a")
    for text in (b"a", b"b"):
        write(home / "b.md", text)
        sent = run_cli("export", "m", f"--sandbox=local:{home}", config, store=store)
        assert sent.code == 0 and sent.document["files"] == 2, sent
    other = empty_home(tmp_path / "other")
    write(other / "mine.md", b"mine")
    for _ in range(2):
        ran = run_cli("restore", "m", f"--sandbox=local:{other}", config, store=store)
        assert (ran.code, ran.document["outcome"]) == (0, "complete"), ran
        assert without_cache(tree(other)) == without_cache(tree(home))
    assert (other / ".cache/memory-sidecar/m/lineage").exists()
    assert run_cli("export", "m", f"--sandbox=local:{other}", config, store=store).document["outcome"] == "unchanged"
