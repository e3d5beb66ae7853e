"""General backup tools on the same memory, where they are installed. They copy the live files, which is not safe; it is
their bytes and seconds that are of interest here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import bytes_in, shell
from benchmarks.table import Section, seconds, size

TOOLS = {
    "restic": (
        'restic -q init --repo "$repository"',
        'restic -q backup --repo "$repository" "$home/.claude-mem"',
    ),
    "borg": (
        'borg init --encryption=none "$repository"',
        'borg create "$repository::{now:%s%f}" "$home/.claude-mem"',
    ),
}


def measure(section: Section, folder: Path, change: Callable[[], None]) -> None:
    """Add what each tool needs for one more conversation, made by ``change``."""
    found = [tool for tool in TOOLS if shutil.which(tool)]
    for tool in TOOLS:
        if tool not in found:
            section.add(tool, "", "not installed, skipped")
    os.environ.setdefault("RESTIC_PASSWORD", "benchmark")
    for tool in found:
        begin, backup = TOOLS[tool]
        places = {"repository": folder / tool, "home": folder / "home"}
        shell(begin, **places)
        shell(backup, **places)
        before = bytes_in(folder / tool)
        change()
        took = shell(backup, **places)
        section.add(
            tool, "", f"{size(bytes_in(folder / tool) - before)} added, {seconds(took)} for one more conversation"
        )
