"""The command line: ``memory-sidecar``."""

from sidecar.cli.main import main, run_alone

__all__ = ["main", "run_alone"]
