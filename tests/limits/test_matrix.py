"""Each limit, exactly at it and one over, at each provider, in both modes: the right outcome, exit code and head."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.ids import MemoryKeys
from tests.parts.commands import done
from tests.parts.homes import Ran, observe, run_cli, titles, tree, write
from tests.parts.providers import Made, Provider

pytestmark = pytest.mark.usefixtures("forked_programs")

KEYS = ("bytes", "file_bytes", "files", "depth", "packed_bytes", "memory_bytes", "store_bytes")
CODES = {key: f"limit-{key.replace('_', '-')}" for key in KEYS} | {"packed_bytes": "limit-packed"}
HOT = ("MEMORY.md", "SESSION-STATE.md", ".claude-mem/settings.json", ".claude-mem/.cleanup-v1-applied")
OLD = 1_600_000_000


def home_of(home: Path) -> None:
    """A memory whose largest, deepest and oldest files are cold."""
    for name in HOT:
        write(home / name, b'{"CLAUDE_MEM_MODEL": "small"}')
    observe(home, 30)
    write(home / ".claude-mem/modes/code.json", b"{}" * 40)
    write(home / ".claude-mem/corpora/a/b/c/deep.json", b"[]" * 30)
    write(home / ".claude-mem/corpora/large.bin", random.Random(1).randbytes(400_000))
    write(home / "memory/2026-11-16.md", b"today\n" * 40)
    write(home / "memory/papers/one.md", random.Random(2).randbytes(3000))
    write(home / "memory/papers/two.md", random.Random(3).randbytes(3000))
    for number, name in enumerate(["memory/papers/one.md", ".claude-mem/corpora/large.bin", "memory/papers/two.md"]):
        os.utime(home / name, (OLD + number, OLD + number))


class Bench:
    """A sandbox with two states of one memory, and exports of it under memories whose ids are equally long."""

    def __init__(self, made: Made, store: Path, folder: Path) -> None:
        self.made, self.store, self.folder = made, store, folder
        self.made_ids = 0

    def export(self, memory: str, *more: str, limits: str = "") -> Ran:
        shutil.rmtree(self.made.home / ".cache", ignore_errors=True)  # every export is full, and so equally large
        config = self.folder / "config.toml"
        config.write_text(f"[limits]\n{limits}\n")
        words: tuple[str | Path, ...] = ("--sandbox", self.made.ref, "--config", config, "--project", "~", *more)
        return run_cli("export", memory, *words, store=self.store)

    def begun(self, state: Callable[[], None], before: Callable[[], None]) -> str:
        """A memory that has the earlier state as its head; the sandbox then has the later one."""
        self.made_ids += 1
        memory = f"memory-{self.made_ids:03}"
        before()
        ran = self.export(memory)
        assert (ran.code, ran.document["outcome"]) == (0, "committed"), ran
        state()
        return memory

    def held(self, memory: str = "") -> int:
        prefix = MemoryKeys.of(memory).prefix if memory else "memories/"
        return sum(file.stat().st_size for file in (self.store / prefix).rglob("*") if file.is_file())


def figures(bench: Bench, memory: str) -> dict[str, int]:
    """What an export of the later state comes to, by each limit."""
    before = bench.held(memory)
    assert bench.export(memory, "--force").code == 0
    shown = done("show", memory, store=bench.store)
    pack = shown["packs"][-1]
    return {
        "bytes": shown["bytes"],
        "files": len(shown["entries"]),
        "file_bytes": max(row["size"] for row in shown["entries"]),
        "depth": max(row["path"].count("/") for row in shown["entries"]),
        "packed_bytes": pack["bytes"] + pack["index_bytes"],
        "memory_bytes": bench.held(memory),
        "store_bytes": bench.held(memory) - before,  # to be added to what the store holds by then
    }


def check(bench: Bench, provider: Provider, key: str, mode: str, figure: dict[str, int], states: Any) -> None:
    at, over = bench.begun(*states), bench.begun(*states)
    most = figure[key] + (bench.held() if key == "store_bytes" else 0)
    head = done("log", over, store=bench.store)["head"]
    stored = tree(bench.store / MemoryKeys.of(over).prefix)

    # One over, and nothing but the config moves a limit. A head is never forgotten to make room.
    ran = bench.export(over, "--force", limits=f'{key} = {most - 1}\nover = "{mode}"')
    if mode == "reject" or key in ("memory_bytes", "store_bytes"):
        assert (ran.code, ran.document["outcome"], ran.error) == (3, "rejected", CODES[key]), ran
        assert f"limits.{key}" in ran.document["reason"]["message"]
        assert ran.document["head"] == head == done("log", over, store=bench.store)["head"]
        assert tree(bench.store / MemoryKeys.of(over).prefix) == stored
    else:
        assert (ran.code, ran.document["outcome"]) == (0, "committed"), ran
        restored(bench, provider, over, ran.document)

    ran = bench.export(at, "--force", limits=f'{key} = {most}\nover = "{mode}"')
    assert (ran.code, ran.document["outcome"], ran.document["dropped"]) == (0, "committed", []), ran
    assert any(f"100 % of limits.{key}" in warning for warning in ran.document["warnings"]), ran.document["warnings"]


def restored(bench: Bench, provider: Provider, memory: str, document: dict[str, Any]) -> None:
    """A trimmed snapshot restores, holds every hot file, and says everywhere what it lacks."""
    dropped = {row["path"] for row in document["dropped"]}
    assert dropped and not [path for path in dropped if path.endswith((*HOT, "claude-mem.db"))]
    assert all(row["tier"] in ("cold", "rebuildable", "warm") for row in document["dropped"])
    assert any("left out" in warning.lower() for warning in document["warnings"])
    shown = done("show", memory, store=bench.store)
    assert shown["dropped"] == document["dropped_files"] > 0
    entries = {row["path"] for row in shown["entries"]}
    assert not entries & {path.rstrip("/") for path in dropped}
    target = provider.create()
    words = ["restore", memory, "--sandbox", target.ref, "--project", "~"]
    came = done(*words, store=bench.store)
    assert any("was trimmed" in warning for warning in came["warnings"])
    for name in HOT:
        assert (target.home / name).read_bytes().strip() == (bench.made.home / name).read_bytes().strip()
    assert titles(target.home) == titles(bench.made.home)
    found = {path.relative_to(target.home) for path in target.home.rglob("*") if path.is_file()}
    assert len([path for path in found if path.parts[0] != ".cache"]) == shown["files"]


def run(name: str, mode: str, keys: tuple[str, ...], provider: Provider, tmp_path: Path) -> None:
    made = provider.create()
    bench = Bench(made, tmp_path / "store", tmp_path)
    home_of(made.home)
    settings = made.home / ".claude-mem/settings.json"
    settings.write_text('{\n  "CLAUDE_MEM_MODEL": "small"\n}\n')  # as it is written after it was cleared of secrets

    def states(word: bytes) -> Callable[[], None]:
        return lambda: write(made.home / "MEMORY.md", b"# %s\n" % word)

    both = (states(b"later"), states(b"first"))
    figure = figures(bench, bench.begun(*both))
    for key in keys:
        check(bench, provider, key, mode, figure, both)


@pytest.mark.parametrize("mode", ["reject", "trim"])
def test_each_limit_at_it_and_one_over(mode: str, provider_of: Callable[[str], Provider], tmp_path: Path) -> None:
    run("local", mode, KEYS, provider_of("local"), tmp_path)


@pytest.mark.parametrize(("name", "mode", "key"), [("e2b", "trim", "bytes"), ("daytona", "reject", "files")])
def test_a_limit_holds_at_a_provider(
    name: str, mode: str, key: str, provider_of: Callable[[str], Provider], tmp_path: Path
) -> None:
    run(name, mode, (key,), provider_of(name), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reject", "trim"])
@pytest.mark.parametrize("name", ["e2b", "daytona"])
def test_each_limit_at_it_and_one_over_at_each_provider(
    name: str, mode: str, provider_of: Callable[[str], Provider], tmp_path: Path
) -> None:
    run(name, mode, KEYS, provider_of(name), tmp_path)
