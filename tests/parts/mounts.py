"""Real mounts for tests of volumes and full disks. They need root; ``CannotMount`` says so where there is none."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class CannotMount(Exception):
    """Mounting is not allowed or not possible here; the message says why."""


@contextmanager
def tmpfs(folder: Path, *, size: str = "64m", read_only: bool = False) -> Iterator[Path]:
    """A small filesystem in memory, mounted at ``folder`` (made when not there) and taken away at the end."""
    with _mounted(folder, "-t", "tmpfs", "-o", f"size={size}{',ro' if read_only else ''}", "tmpfs"):
        yield folder


@contextmanager
def bound(source: Path, folder: Path) -> Iterator[Path]:
    """``source`` seen at ``folder`` as well: a mount that stays on the same disk."""
    with _mounted(folder, "--bind", str(source)):
        yield folder


def unmount(folder: Path) -> None:
    """Take the mount away under whoever uses it; at the end of its block it may be gone already."""
    subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True, timeout=20)


@contextmanager
def _mounted(folder: Path, *how: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(["mount", *how, str(folder)], check=True, capture_output=True, timeout=20)
    except FileNotFoundError as error:
        raise CannotMount("there is no mount program") from error
    except subprocess.CalledProcessError as error:
        raise CannotMount(error.stderr.decode(errors="replace").strip()) from error
    try:
        yield
    finally:
        unmount(folder)
