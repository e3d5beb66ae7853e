"""The command line: ``memory-sidecar``."""

from sidecar.cli.main import main, run

__all__ = ["main", "run"]
