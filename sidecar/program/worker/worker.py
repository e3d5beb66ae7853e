"""Stop the processes that have memory files open before a restore swaps the files, and start them again afterwards.

A process that keeps a database open while its file is replaced goes on writing to the old one, or damages the new one.
So a restore calls ``find_holders`` and ``stop_holders``, swaps only if no holder is left, and calls ``start_again`` in
any case. No process is ever killed: one that does not stop is reported, and the restore is refused.

A memory worker may have accepted more than it has written, so ``wait_until_drained`` waits a little for its queue.
"""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from typing import Any

from sidecar.program.capture.roots import Root
from sidecar.program.worker.holders import Holder, find_holders, find_ports, is_gone

_POLL = 0.02
_ASK_WITHIN = 2.0
_SETTLE = 0.3


def stop_holders(holders: list[Holder], *, shutdown: dict[str, Any] | None, timeout: float) -> list[Holder]:
    """Stop the holders, and return those that still have their files open after ``timeout`` seconds.

    If ``shutdown`` says how, they are asked first: ``method`` and ``path`` of an HTTP request to 127.0.0.1, at the port
    in the holder's variable ``port_env``, else under ``settings_key`` in the JSON file ``settings`` (beside the open
    file, unless absolute), else any of ``ports``. Half of the time is for that; then SIGTERM is sent, and never
    SIGKILL. A process that opened the files in the meantime, such as a worker that its supervisor restarted, is among
    those returned. So is process 1, which is never signalled: the sandbox ends with it.
    """
    deadline = time.monotonic() + timeout
    others = [holder for holder in holders if holder.pid != 1]
    if shutdown:
        asked = [holder for holder in others if not is_gone(holder) and _ask_to_leave(holder, shutdown, deadline)]
        _wait_until_gone(asked, time.monotonic() + (deadline - time.monotonic()) / 2)
    for holder in others:
        if not is_gone(holder):
            try:
                os.kill(holder.pid, signal.SIGTERM)
            except OSError:
                continue  # exited by itself, or belongs to another user: the wait shows which
    return (
        _wait_until_gone(others, deadline)
        + [holder for holder in holders if holder.pid == 1]
        + _find_newcomers(holders)
    )


def start_again(holders: list[Holder]) -> list[str]:
    """Start the holders that have exited, each in its own session. Return the problems, as sentences.

    Arguments, folder, environment and user are the same; there is no input and no output. A holder that is a child of
    another is left to its parent, and one that was restarted by something else is not started twice.
    """
    import subprocess  # late, as the socket below: mostly there is nobody to ask or to start

    pids = {holder.pid for holder in holders}
    back = [newcomer.argv for newcomer in _find_newcomers(holders)]
    problems = []
    started = []
    for holder in holders:
        if not pids.isdisjoint(holder.ancestors) or not is_gone(holder) or holder.argv in back:
            continue
        try:
            process = subprocess.Popen(
                holder.argv,
                cwd=holder.cwd,
                env=holder.environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=partial(_become_user, holder) if os.geteuid() == 0 != holder.uid else None,
            )
        except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
            problems.append("%r was stopped and could not be started again: %s." % (holder, error))
        else:
            started.append((holder, process))
    if started:
        time.sleep(_SETTLE)
    for holder, process in started:
        if process.poll():
            problems.append("%r was started again but ended at once with code %d." % (holder, process.returncode))
    return problems


def _find_newcomers(holders: list[Holder]) -> list[Holder]:
    """Return the processes that have the files open and are not among these."""
    known = {(holder.pid, holder.started) for holder in holders}
    found = find_holders([path for holder in holders for path in holder.held])
    return [holder for holder in found if (holder.pid, holder.started) not in known]


def _wait_until_gone(holders: list[Holder], deadline: float) -> list[Holder]:
    """Wait until they have exited or the deadline; return those still running."""
    alive = [holder for holder in holders if not is_gone(holder)]
    while alive and time.monotonic() < deadline:
        time.sleep(_POLL)
        alive = [holder for holder in alive if not is_gone(holder)]
    return alive


def _ask_to_leave(holder: Holder, shutdown: dict[str, Any], deadline: float) -> bool:
    """Send the shutdown request to the holder's ports; return whether one of them accepted it."""
    import socket

    request = "%s %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    for port in find_ports(holder, shutdown):
        within = min(_ASK_WITHIN, deadline - time.monotonic())
        if within <= 0:
            continue
        try:
            with socket.create_connection(("127.0.0.1", port), within) as connection:
                connection.sendall((request % (shutdown["method"], shutdown["path"])).encode())
                if connection.recv(32)[9:10] == b"2":
                    return True
        except OSError:
            continue
    return False


def _become_user(holder: Holder) -> None:
    """Take on the holder's user and groups, in the child process."""
    os.setgroups(holder.groups)
    os.setgid(holder.gid)
    os.setuid(holder.uid)


_POLL_QUEUE = 0.1
_ASK_QUEUE_WITHIN = 2.0


def wait_until_drained(root: Root, wait: float, then: str) -> list[str]:
    """Wait at most ``wait`` seconds until the workers of a root have written what they accepted. Return warnings, with
    the consequence ``then``, if something is still queued."""
    worker = root.layout.get("worker") or {}
    if not worker.get("busy_path"):
        return []
    try:
        databases = [name for name in os.listdir(root.folder) if root.rules.database(name)]
    except OSError:
        return []  # the walk reports it
    settings = dict(worker, settings=os.path.join(root.folder, worker["settings"]))
    deadline = time.monotonic() + wait
    warnings = []
    for holder in find_holders([os.path.join(root.folder, name) for name in databases]):
        left = _count_queued(holder, settings)
        while left and time.monotonic() < deadline:
            time.sleep(_POLL_QUEUE)
            left = _count_queued(holder, settings)
        if left:
            warnings.append("%r still had %d things to write after %g s: %s." % (holder, left, wait, then))
    return warnings


def _count_queued(holder: Holder, worker: dict[str, Any]) -> int:
    """Return how many items the worker says are queued; 0 if it does not say."""
    import http.client  # only where there is a worker to ask

    for port in find_ports(holder, worker):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ASK_QUEUE_WITHIN)
        try:
            connection.request("GET", worker["busy_path"])
            value = json.loads(connection.getresponse().read(1 << 16))
            return max(0, int(value[worker["busy_key"]]))
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            continue
        finally:
            connection.close()
    return 0
