"""Docker or Podman, whichever is there, for the scripts beside this module."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

# A machine that is a container itself has no systemd, and may not raise its own limits.
NESTED = ("--cgroup-manager=cgroupfs", "--runtime=runc")
NESTED_RUN = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=1000:1000")
NESTED_BUILD = ("--isolation=chroot", "--network=host")


class Engine:
    """Commands of a container engine: ``$CONTAINER_ENGINE``, else docker, else podman. ``nested`` needs podman."""

    def __init__(self, *, nested: bool = False) -> None:
        wanted = os.environ.get("CONTAINER_ENGINE")
        names = [wanted] if wanted else ["podman"] if nested else ["docker", "podman"]
        found = next((path for name in names if (path := shutil.which(name))), None)
        if found is None:
            sys.exit(f"Needed and not found: {' or '.join(names)}.")
        self.is_podman = "podman" in os.path.basename(found)
        self._words = [found, *(NESTED if nested else ())]
        self._run = NESTED_RUN if nested else ()
        self._build = NESTED_BUILD if nested else ()

    def build(self, *words: str) -> None:
        # Podman's own format has no HEALTHCHECK.
        form = ["--format=docker"] if self.is_podman else []
        subprocess.run([*self._words, "build", *form, *self._build, *words], check=True)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.ask("run", *self._run, *words)

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command and return what it said, whatever came of it."""
        return subprocess.run([*self._words, *words], capture_output=True, text=True, check=False, timeout=300)

    def tell(self, *words: str) -> str:
        """Run a command that must succeed, and return its output."""
        done = self.ask(*words)
        if done.returncode:
            sys.exit(f"{' '.join(words)} failed: {done.stderr.strip()}")
        return done.stdout.strip()
