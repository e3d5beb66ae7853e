"""A memory worker may have taken on more than it has written: wait a little until its queue is empty."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from .holders import Holder, find_holders, find_ports
from .roots import Root

_POLL = 0.1
_ASK_WITHIN = 2.0


def wait_until_drained(root: Root, wait: float, then: str) -> list[str]:
    """Wait at most so many seconds; return what to say, with what comes of it ``then``, when something is still to be written
    after that."""
    worker = root.layout.get("worker") or {}
    if not worker.get("busy_path"):
        return []
    try:
        databases = [name for name in os.listdir(root.folder) if root.rules.database(name)]
    except OSError:
        return []  # the walk will say so
    settings = dict(worker, settings=os.path.join(root.folder, worker["settings"]))
    deadline = time.monotonic() + wait
    warnings = []
    for holder in find_holders([os.path.join(root.folder, name) for name in databases]):
        left = _count_queued(holder, settings)
        while left and time.monotonic() < deadline:
            time.sleep(_POLL)
            left = _count_queued(holder, settings)
        if left:
            warnings.append("%r still had %d things to write after %g s: %s." % (holder, left, wait, then))
    return warnings


def _count_queued(holder: Holder, worker: dict[str, Any]) -> int:
    """How much the worker says it has yet to do; 0 when it does not say."""
    import http.client  # only where there is a worker to ask

    for port in find_ports(holder, worker):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ASK_WITHIN)
        try:
            connection.request("GET", worker["busy_path"])
            value = json.loads(connection.getresponse().read(1 << 16))
            return max(0, int(value[worker["busy_key"]]))
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            continue
        finally:
            connection.close()
    return 0
