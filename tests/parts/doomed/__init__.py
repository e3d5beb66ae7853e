"""A service, as a process of its own, that kills itself (SIGKILL) at its n-th write to the store that matters to a start, once
a file says so: before that write, or after it.

The file is named by ``DOOM``; it holds a number, "before" or "after", and maybe a prefix of keys.
``python -m tests.parts.doomed`` takes what ``sidecar`` takes.
"""

from __future__ import annotations

from pathlib import Path

from sidecar.cli import main as _loaded  # noqa: F401  (processes are forked from one that has it)
from tests.parts.services import Service

DOOM = "DOOMED_BY"


class DoomedService(Service):
    """The service, and a client of it."""

    program = "tests.parts.doomed"

    def doom(self, number: int, when: str, of: str = "") -> None:
        """Have it die at a write from now on; ``of``: only those below this prefix count."""
        Path(self._env[DOOM]).write_text(f"{number} {when} {of}")

    def spare(self) -> None:
        Path(self._env[DOOM]).unlink(missing_ok=True)

    @property
    def dead(self) -> bool:
        return self.process.poll() is not None
