"""Whoever has memory files open must let go of them before a restore swaps them, and be back afterwards.

A process that keeps a database open while its file is replaced goes on writing to the old one, or damages the new one.
So a restore calls ``find_holders``, ``stop``, swaps only when nobody is left, and ``start_again`` in any case.
Nobody is ever killed: a process that will not leave is reported, and the restore gives way.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from functools import partial
from typing import Any, NamedTuple

_POLL = 0.02
_ASK_WITHIN = 2.0
_SETTLE = 0.3
_LEFT = (OSError, ValueError, IndexError, KeyError)  # what reading about a process that is just leaving may raise


class Holder(NamedTuple):
    """A process that has memory files open, and all it takes to start it anew."""

    pid: int
    started: int  # in clock ticks since boot: a reused pid has another
    argv: list[str]
    cwd: str
    environ: dict[str, str]
    uid: int
    gid: int
    groups: list[int]
    ancestors: list[int]  # its parent first
    held: list[str]  # which of the paths asked for

    def __repr__(self) -> str:
        """Never its environment, which holds secrets."""
        return "process %d (%s)" % (self.pid, os.path.basename(self.argv[0]) if self.argv else "?")


def find_holders(paths: list[str]) -> list[Holder]:
    """The processes that have any of these files open, parents before children; never ourselves or our ancestors.

    A file that was deleted or replaced while open counts too, by its name. Processes we may not look into are passed
    over, and where there is no /proc, nobody is found.
    """
    inodes = {_inode(path): path for path in paths}
    inodes.pop(None, None)
    names = {os.path.realpath(path): path for path in paths}
    ours = {os.getpid(), *_ancestors(os.getpid())}
    holders = []
    for pid in map(int, filter(str.isdigit, _entries("/proc"))):
        held = set() if pid in ours else _held(pid, inodes, names)
        if held:
            try:
                holders.append(_describe(pid, sorted(held)))
            except _LEFT:
                continue
    return sorted(holders, key=lambda holder: len(holder.ancestors))


def stop(holders: list[Holder], *, shutdown: dict[str, Any] | None, timeout: float) -> list[Holder]:
    """Make the holders let go, and return whoever still has their files open after ``timeout`` seconds.

    Ask first where ``shutdown`` says how: ``method`` and ``path`` of an HTTP request to 127.0.0.1, at the port that is
    in the holder's variable ``port_env``, else under ``settings_key`` in the JSON file ``settings`` (beside the held
    file, unless absolute), else any of ``ports``. Half of the time is for that; then SIGTERM, and never worse.
    Whoever opened the files meanwhile, a worker its supervisor brought back for one, is among those returned, and so is
    process 1, which is left in peace: a sandbox ends with it.
    """
    deadline = time.monotonic() + timeout
    others = [holder for holder in holders if holder.pid != 1]
    if shutdown:
        asked = [holder for holder in others if not _gone(holder) and _asked_to_leave(holder, shutdown, deadline)]
        _wait(asked, time.monotonic() + (deadline - time.monotonic()) / 2)
    for holder in others:
        if not _gone(holder):
            try:
                os.kill(holder.pid, signal.SIGTERM)
            except OSError:
                continue  # left by itself, or not ours to signal: the wait tells
    return _wait(others, deadline) + [holder for holder in holders if holder.pid == 1] + _newcomers(holders)


def start_again(holders: list[Holder]) -> list[str]:
    """Start the holders that are gone, each in a session of its own; return what went wrong, in sentences.

    Same arguments, folder, environment and user; no input and no output. A holder below another is left to that one,
    and one that somebody else has brought back already is not started twice.
    """
    pids = {holder.pid for holder in holders}
    back = [newcomer.argv for newcomer in _newcomers(holders)]
    problems = []
    started = []
    for holder in holders:
        if not pids.isdisjoint(holder.ancestors) or not _gone(holder) or holder.argv in back:
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
                preexec_fn=partial(_become, holder) if os.geteuid() == 0 != holder.uid else None,
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


def _newcomers(holders: list[Holder]) -> list[Holder]:
    known = {(holder.pid, holder.started) for holder in holders}
    found = find_holders([path for holder in holders for path in holder.held])
    return [holder for holder in found if (holder.pid, holder.started) not in known]


def _held(pid: int, inodes: dict[tuple[int, int] | None, str], names: dict[str, str]) -> set[str]:
    held = set()
    for link, target in _open_files(pid).items():
        if target[:1] == "/":
            path = inodes.get(_inode(link))
            if path is None and _undeleted(target) in names and _sees_our_files(pid):
                path = names[_undeleted(target)]
            if path is not None:
                held.add(path)
    return held


def _inode(path: str) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _open_files(pid: int) -> dict[str, str]:
    """What a process has open: each of its entries in /proc, with what that points at."""
    folder = "/proc/%d/fd/" % pid
    found = {}
    for number in _entries(folder):
        try:
            found[folder + number] = os.readlink(folder + number)
        except OSError:
            continue  # closed since
    return found


def _undeleted(target: str) -> str:
    return target[: -len(" (deleted)")] if target.endswith(" (deleted)") else target


def _sees_our_files(pid: int) -> bool:
    """Whether a path means the same to it as to us: in a container of its own, it need not."""
    try:
        return os.readlink("/proc/%d/ns/mnt" % pid) == os.readlink("/proc/self/ns/mnt")
    except OSError:
        return True


def _read(pid: int, name: str) -> str:
    with open("/proc/%d/%s" % (pid, name), "rb") as file:
        return os.fsdecode(file.read())


def _stat(pid: int) -> list[str]:
    """The fields of /proc/pid/stat from the third on: the second, a name, may hold anything."""
    return _read(pid, "stat").rpartition(")")[2].split()


def _ancestors(pid: int) -> list[int]:
    found: list[int] = []
    try:
        while pid > 1 and pid not in found[:-1]:
            pid = int(_stat(pid)[1])
            found.append(pid)
    except _LEFT:
        pass
    return found


def _describe(pid: int, held: list[str]) -> Holder:
    status = dict(line.split(":", 1) for line in _read(pid, "status").split("\n") if ":" in line)
    return Holder(
        pid=pid,
        started=int(_stat(pid)[19]),
        argv=_read(pid, "cmdline").split("\0")[:-1],
        cwd=_undeleted(os.readlink("/proc/%d/cwd" % pid)),
        environ=dict(pair.split("=", 1) for pair in _read(pid, "environ").split("\0") if "=" in pair),
        uid=int(status["Uid"].split()[1]),
        gid=int(status["Gid"].split()[1]),
        groups=[int(group) for group in status.get("Groups", "").split()],
        ancestors=_ancestors(pid),
        held=held,
    )


def _gone(holder: Holder) -> bool:
    try:
        fields = _stat(holder.pid)
        return fields[0] in "ZX" or int(fields[19]) != holder.started
    except _LEFT:
        return True


def _wait(holders: list[Holder], deadline: float) -> list[Holder]:
    alive = [holder for holder in holders if not _gone(holder)]
    while alive and time.monotonic() < deadline:
        time.sleep(_POLL)
        alive = [holder for holder in alive if not _gone(holder)]
    return alive


def _asked_to_leave(holder: Holder, shutdown: dict[str, Any], deadline: float) -> bool:
    listening = _listening(holder)
    request = "%s %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    for port in _ports(holder, shutdown):
        within = min(_ASK_WITHIN, deadline - time.monotonic())
        if within <= 0 or (listening is not None and port not in listening):
            continue
        try:
            with socket.create_connection(("127.0.0.1", port), within) as connection:
                connection.sendall((request % (shutdown["method"], shutdown["path"])).encode())
                if connection.recv(32)[9:10] == b"2":
                    return True
        except OSError:
            continue
    return False


def _ports(holder: Holder, shutdown: dict[str, Any]) -> list[int]:
    """Where the holder may answer, from the first source that says anything."""
    sources: list[list[object]] = [[holder.environ.get(shutdown.get("port_env", ""))]]
    for path in holder.held:
        try:
            with open(os.path.join(os.path.dirname(path), shutdown["settings"]), encoding="utf-8") as file:
                sources.append([json.load(file)[shutdown["settings_key"]]])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    sources.append(shutdown.get("ports") or [37700 + holder.uid % 100, 37777])
    found = [[int(text) for text in map(str, ports) if text.isdecimal() and len(text) < 6] for ports in sources]
    return [port for port in next(filter(None, found), []) if port < 65536]


def _listening(holder: Holder) -> set[int] | None:
    """The ports this very process listens on; ``None`` where the system does not tell."""
    ports: dict[str, int] = {}
    told = False
    for name in ("tcp", "tcp6"):
        try:
            with open("/proc/net/" + name) as table:
                rows = [line.split() for line in table][1:]
        except OSError:
            continue
        told = True
        ports.update(("socket:[%s]" % row[9], int(row[1].rpartition(":")[2], 16)) for row in rows if row[3] == "0A")
    return {ports[target] for target in _open_files(holder.pid).values() if target in ports} if told else None


def _become(holder: Holder) -> None:
    os.setgroups(holder.groups)
    os.setgid(holder.gid)
    os.setuid(holder.uid)
