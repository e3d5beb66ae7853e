"""The command line: ``memory-sidecar``."""

import gc

_collects = gc.isenabled()
gc.disable()  # all that is loaded stays, and to look for garbage meanwhile is a tenth of the time until a command starts

from sidecar.cli.main import main, run_alone  # noqa: E402

if _collects:
    gc.enable()

__all__ = ["main", "run_alone"]
