"""TypeScript and the generator of types that a developer would take: installed once from npm, run by Node."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from tests.parts.homes import PROJECT

PACKAGES = ("openapi-typescript@7.13.0", "openapi-fetch@0.17.0", "typescript@5.9.3")
_CACHE = PROJECT / ".cache" / "typescript"
_WITHIN = 300.0
STRICT = (
    *("--strict", "--noEmit", "--target", "es2022", "--lib", "es2022,dom"),
    *("--module", "esnext", "--moduleResolution", "bundler"),
)


def installed() -> Path:
    """The folder with ``node_modules/``, filled on first use, once among parallel runs.

    Skip the test where Node or npm is missing or cannot install; fail it instead where the variable CI is set.
    """
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        _unavailable("Node and npm are not installed")
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = _CACHE / "done"
        if not done.exists() or done.read_text() != " ".join(PACKAGES):
            command = [npm, "install", "--no-save", "--no-audit", "--no-fund", "--loglevel=error", *PACKAGES]
            try:
                subprocess.run(command, cwd=_CACHE, check=True, capture_output=True, text=True, timeout=_WITHIN)
            except subprocess.CalledProcessError as error:
                _unavailable(f"`npm install` failed: {error.stderr[-400:]}")
            except subprocess.TimeoutExpired:
                _unavailable(f"`npm install` took more than {_WITHIN:.0f} s")
            done.write_text(" ".join(PACKAGES))
    return _CACHE


def generate_types(document: Path, target: Path) -> None:
    """Run ``openapi-typescript`` with its default settings."""
    ran = _run("openapi-typescript", str(document), "-o", str(target), cwd=target.parent)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def find_type_errors(folder: Path) -> list[str]:
    """What ``tsc --strict`` says of the programs in a folder."""
    if not (folder / "node_modules").exists():
        (folder / "node_modules").symlink_to(installed() / "node_modules")
    ran = _run("tsc", *STRICT, *(file.name for file in sorted(folder.glob("*.ts"))), cwd=folder)
    return (ran.stdout + ran.stderr).splitlines()


def _run(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [str(installed() / "node_modules" / ".bin" / name), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_WITHIN)


def _unavailable(reason: str) -> NoReturn:
    message = f"no TypeScript to test with: {reason}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
