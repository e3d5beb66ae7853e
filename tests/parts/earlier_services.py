"""The sidecar as it was in an earlier version, to run beside this one."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.parts.homes import PROJECT
from tests.parts.s3_servers import CannotStart
from tests.parts.services import Service

ONE_PER_MEMORY = "c716831"
"""The last version that knew one attachment per memory, and no conversations."""


@contextmanager
def earlier_service(folder: Path, version: str = ONE_PER_MEMORY) -> Iterator[type[Service]]:
    """A kind of service that runs that version's code. Raise ``CannotStart`` where its history is not there."""
    command = ["git", "-C", str(PROJECT), "archive", version, "sidecar", "adapters"]
    try:
        archive = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as problem:
        raise CannotStart(f"version {version} cannot be had from git: {problem}") from None
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")

    class Earlier(Service):
        code = folder

    yield Earlier
