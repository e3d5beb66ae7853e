"""The command line as something that must work, and as a process that can be killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.parts.forked_sidecar import Sidecar
from tests.parts.homes import Ran, run_cli

PYTHON_38 = (*sorted(Path.home().glob(".pyenv/versions/3.8.*/bin/python3.8")), "python3.8")


def done(*words: str | Path, store: str | Path) -> dict[str, Any]:
    """Run a command that must end with exit code 0; return its document."""
    ran = run_cli(*words, store=store)
    assert ran.code == 0, ran
    return ran.document


def start(
    *words: str | Path, store: str | Path, env: Mapping[str, str] | None = None, own_group: bool = False
) -> Sidecar:
    """Start a command with ``--json``; with ``own_group`` everything it starts in its own session can be killed with it."""
    command, *rest = map(str, words)
    return Sidecar(
        [command, f"--store={url_of(store)}", "--json", *rest],
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=own_group,
    )


def ended(process: Sidecar, timeout: float = 120) -> Ran:
    """What a started command came back with; a killed one has no document."""
    stdout, stderr = process.communicate(timeout=timeout)
    said = stderr.decode(errors="replace")
    assert "Traceback" not in said, said
    with contextlib.suppress(ValueError):
        return Ran(process.wait(), json.loads(stdout), said)
    return Ran(process.wait(), {}, said)


def url_of(store: str | Path) -> str:
    return store if isinstance(store, str) else f"file:{store}"


def python_38() -> str:
    """A Python 3.8 on this machine; empty when there is none."""
    return next((found for place in PYTHON_38 if (found := shutil.which(str(place)))), "")
