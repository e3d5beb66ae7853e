"""The benchmarks run, and the one promise among their figures that no machine's speed can change holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.warm import conversations
from tests.parts.homes import PROJECT


def test_warm_export_adds_little_more_than_the_changed_pages(tmp_path: Path) -> None:
    for row in conversations(tmp_path, database=4_000_000, count=3):
        assert row.packs > 1, "this was no delta"
        assert row.added <= 1.3 * min(row.gzip_6, row.gzip_9), row


@pytest.mark.slow
def test_quick_mode_prints_a_table_and_writes_nothing() -> None:
    before = {place.name for place in (PROJECT / "benchmarks").iterdir()} | {"__pycache__"}
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick"], cwd=PROJECT, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    for title in (
        "A memory of",
        "A database of",
        "small files, 3 of them changed",
        "at a provider 100 ms away",
        "Sealing",
        "Reading",
    ):
        assert title in ran.stdout
    assert {place.name for place in (PROJECT / "benchmarks").iterdir()} <= before
