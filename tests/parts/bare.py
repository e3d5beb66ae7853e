"""Sandboxes without a Python that can run the program: none at all, too old, broken; and with busybox for everything else."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.ports import CommandResult
from tests.parts.homes import OwnMachine, write
from tests.parts.memories import BareSandbox, shell_tools

BUSYBOX = shutil.which("busybox")
UNKNOWN_OPTION = """#!/bin/sh
case "$1" in -I) echo "Unknown option: -I" >&2; echo "usage: $0 [option] ... [arg] ..." >&2; exit 2;; esac
exit 1
"""
"""As Python 2.7, which has no ``-I``, and says of every question for its version that it is not recent."""
TOO_OLD = """#!/bin/sh
case "$1" in -I) exit 97;; esac
exit 1
"""
"""As Python 3.6: it runs the beginning of the program, which finds it too old."""
WITHOUT_LIBRARY = """#!/bin/sh
echo "Fatal Python error: init_fs_encoding: failed to get the Python codec of the filesystem encoding" >&2
exit 1
"""
FOR_ANOTHER_MACHINE = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xff\x7f" + bytes(60)
"""The shell cannot execute it: 126."""
Open = Callable[[Path], OwnMachine]


class BusyboxSandbox(OwnMachine):
    """A local sandbox whose shell and tools are all busybox."""

    def __init__(self, home: Path, tools: Path) -> None:
        super().__init__(home)
        self._environment = {"HOME": str(home), "PATH": str(tools)}

    async def run(self, command: str, **how: Any) -> CommandResult:
        end = f"end-{secrets.token_hex(8)}"
        return await super().run(f"exec sh <<'{end}'\n{command}\n{end}\n", **how)


def busybox_tools(folder: Path) -> Path:
    """A folder with every tool that busybox has. Skip the test where there is none; fail it where ``CI`` is set."""
    if BUSYBOX is None:
        missing = "busybox is not installed"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    folder.mkdir()
    listed = subprocess.run([BUSYBOX, "--list"], capture_output=True, text=True, check=True)
    for name in listed.stdout.split():
        (folder / name).symlink_to(BUSYBOX)
    return folder


def real_python(version: str) -> str:
    """A Python of this version on this machine. Skip the test where there is none: the imitations are tried everywhere."""
    places = (*sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")), f"python{version}")
    if not (found := next((found for place in places if (found := shutil.which(str(place)))), "")):
        pytest.skip(f"there is no Python {version} on this machine")
    return found


def _with_program(name: str, contents: str | bytes) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        tools = shell_tools(folder)
        write(tools / name, contents.encode() if isinstance(contents, str) else contents, 0o755)
        return tools

    return made


def _with_python(name: str, version: str) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        python, tools = real_python(version), shell_tools(folder)
        (tools / name).symlink_to(python)
        return tools

    return made


KINDS: dict[str, Callable[[Path], Path]] = {
    "no python": shell_tools,
    "busybox": busybox_tools,
    "like 2.7": _with_program("python", UNKNOWN_OPTION),
    "like 3.6": _with_program("python3", TOO_OLD),
    "for another machine": _with_program("python3", FOR_ANOTHER_MACHINE),
    "without its interpreter": _with_program("python3", "#!/not/there\n"),
    "without its library": _with_program("python3", WITHOUT_LIBRARY),
    "real 2.7": _with_python("python", "2.7"),
    "real 3.6": _with_python("python3", "3.6"),
    "real 3.7": _with_python("python3", "3.7"),
}


def opener(kind: str, folder: Path) -> Open:
    """What opens a home as a sandbox of this kind; its tools are in ``folder``, which is made."""
    tools = KINDS[kind](folder)
    return lambda home: (BusyboxSandbox if kind == "busybox" else BareSandbox)(home, tools)


NOBODY = 65534


def as_nobody(sandbox: OwnMachine) -> OwnMachine:
    """The same sandbox, in which commands run as a user that is not root. Skip the test where that cannot be had."""
    if os.geteuid() or not (setpriv := shutil.which("setpriv")):
        pytest.skip("only root, with setpriv, can run commands as another user")
    run, upload = sandbox.run, sandbox.upload

    async def run_as(command: str, **how: Any) -> CommandResult:
        end = f"end-{secrets.token_hex(8)}"
        user = f"--reuid={NOBODY} --regid={NOBODY} --clear-groups"
        return await run(f"exec {setpriv} {user} sh <<'{end}'\n{command}\n{end}\n", **how)

    async def upload_as(path: str, chunks: AsyncIterator[bytes]) -> None:
        await upload(path, chunks)
        os.chown(path, NOBODY, NOBODY)

    sandbox.run, sandbox.upload = run_as, upload_as  # type: ignore[method-assign]
    return sandbox
