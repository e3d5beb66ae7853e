"""An earlier version of the sidecar, taken out of this repository's history and run as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.parts.homes import PROJECT, Ran

WITHOUT_IDS = "c71683173505ac23eb192849a40568692387865a"
"""The last version that knew no ids of stores and left no notes in sandboxes."""

WITH_TILDES = "50c46266f017404a20ab4faac4052f3bb76fc921"
"""The last version that gave every id that is not plain a folder with a ``~``."""

BEFORE_OWNED = "f35a996"
"""The last version that knew neither owned folders nor projects that nobody names."""

BEFORE_PARTS = "9d454ab"
"""The last version that knew no parts of memories."""


class Earlier:
    """The command line of that version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *words: str | Path, store: Path) -> Ran:
        command, *rest = map(str, words)
        ran = subprocess.run(
            [sys.executable, "-m", "sidecar", command, f"--store=file:{store}", "--json", *rest],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "Traceback" not in ran.stderr, ran.stderr
        return Ran(ran.returncode, json.loads(ran.stdout), ran.stderr)


def earlier(folder: Path, commit: str) -> Earlier:
    """Take that version out of the history; skip the test where there is none (a copy without ``.git``, a shallow clone)."""
    folder.mkdir()
    archive = folder / "code.tar"
    taken = subprocess.run(
        ["git", "-C", str(PROJECT), "archive", f"--output={archive}", commit, "sidecar", "adapters"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if taken.returncode:
        pytest.skip(f"the history has no {commit[:7]}: {taken.stderr.strip()}")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return Earlier(folder)
