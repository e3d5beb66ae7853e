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

PYTHONS = tuple(f"3.{minor}" for minor in range(8, 15))
"""The versions that the in-sandbox program promises to run on."""


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


def find_python(version: str) -> str:
    """A Python of this version on this machine; empty when there is none."""
    places = [*sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")), f"python{version}"]
    return next((found for place in places if (found := shutil.which(str(place)))), "")


def python_38() -> str:
    """The oldest Python that counts; empty when there is none."""
    return find_python(PYTHONS[0])
