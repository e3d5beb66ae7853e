"""How much memory a process has needed."""

from __future__ import annotations

import re
import resource
from pathlib import Path


def peak_kib() -> int:
    """The most this process has had at once, in KiB. Not by ``ru_maxrss`` where it can be helped: that begins with what the
    parent had."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    return int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
