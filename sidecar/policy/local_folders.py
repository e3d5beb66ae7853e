"""Which folders of this machine may be sandboxes (``local:``), and which paths are never part of one."""

from __future__ import annotations

import os
from collections.abc import Sequence

from sidecar.errors import SandboxNotAllowed
from sidecar.format.roots import resolve_hint
from sidecar.host.values import dataclass
from sidecar.ports import AllowedPaths
from sidecar.program.places import is_in

ALLOW = "Set service.local_roots (MEMORY_SIDECAR_SERVICE_LOCAL_ROOTS) to the folders that may be sandboxes."


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPolicy:
    """Real paths. In any case, the roots of a sandbox's memory stay in its home, its projects, and ``roots``."""

    roots: tuple[str, ...] = ()
    """Roots of a memory may be in these too, if a link in a sandbox leads there."""
    apart: tuple[str, ...] = ()
    """Excluded paths: where the sidecar keeps its store, its encryption keys and its own files."""
    confined: bool = False
    """Sandboxes, and projects that are named, must be in ``roots``."""

    def check(self, folder: str) -> None:
        """Raise ``SandboxNotAllowed`` unless this folder may be a sandbox, or a project in one."""
        if any(is_in(folder, place) for place in self.apart):
            raise SandboxNotAllowed(
                f"{folder} is where the sidecar keeps its own files.", hint="Choose a folder outside of the store."
            )
        if self.confined and not any(is_in(folder, root) for root in self.roots):
            raise SandboxNotAllowed(f"{folder} may not be a sandbox of this service.", hint=ALLOW)

    def ground(self, home: str, projects: Sequence[str] | None) -> AllowedPaths:
        """Return the allowed places for the roots of a memory with these projects. Raise ``SandboxNotAllowed``."""
        return AllowedPaths((*self.list_folders(home, projects), *self.roots), self.apart)

    def list_folders(self, home: str, projects: Sequence[str] | None) -> list[str]:
        """Return the real paths of a home and of those named projects that are not in it. Raise ``SandboxNotAllowed``."""
        folders = [home]
        for project in projects or ():
            # The sandbox decides where a project in the home really is, so it must not lead out of the home; a project
            # elsewhere was named by the caller, and its real path is allowed.
            named = os.path.normpath(os.path.join(home, resolve_hint(project, home)))
            if not is_in(named, home):
                self.check(real := os.path.realpath(named))
                if not any(is_in(real, folder) for folder in folders):
                    folders.append(real)
        return folders


OF_OUR_OWN = LocalPolicy()
"""For folders that the sidecar created itself."""
