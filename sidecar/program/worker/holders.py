"""Find the processes that have memory files open (holders), and the ports they listen on.

Everything is read from /proc; on a system without it no holder is found.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

_LEFT = (OSError, ValueError, IndexError, KeyError)  # what reading about a process that is just exiting may raise


class Holder(NamedTuple):
    """A process that has memory files open, with all that is needed to start it again."""

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
        """Name the process. Its environment contains secrets and is never shown."""
        return "process %d (%s)" % (self.pid, os.path.basename(self.argv[0]) if self.argv else "?")


def find_holders(paths: list[str]) -> list[Holder]:
    """Return the processes that have any of these files open, parents before children; never this process or its
    ancestors.

    A file that was deleted or replaced while open counts too, by its name. Processes that this user may not inspect are
    left out, and without /proc the list is empty.
    """
    inodes = {_read_inode(path): path for path in paths}
    inodes.pop(None, None)
    names = {os.path.realpath(path): path for path in paths}
    ours = {os.getpid(), *_list_ancestors(os.getpid())}
    holders = []
    for pid in map(int, filter(str.isdecimal, _list_folder("/proc"))):
        held = set() if pid in ours else _find_held(pid, inodes, names)
        if held:
            try:
                holders.append(_describe(pid, sorted(held)))
            except _LEFT:
                continue
    return sorted(holders, key=lambda holder: len(holder.ancestors))


def _find_held(pid: int, inodes: dict[tuple[int, int] | None, str], names: dict[str, str]) -> set[str]:
    """Return which of the files a process has open, by inode, or by name if it sees the same file system."""
    held = set()
    for link, target in _read_open_files(pid).items():
        if target[:1] == "/":
            path = inodes.get(_read_inode(link))
            if path is None and _strip_deleted(target) in names and _sees_our_files(pid):
                path = names[_strip_deleted(target)]
            if path is not None:
                held.add(path)
    return held


def _read_inode(path: str) -> tuple[int, int] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _list_folder(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read_open_files(pid: int) -> dict[str, str]:
    """Return what a process has open: its entries in /proc/PID/fd, with their targets."""
    folder = "/proc/%d/fd/" % pid
    found = {}
    for number in _list_folder(folder):
        try:
            found[folder + number] = os.readlink(folder + number)
        except OSError:
            continue  # closed since
    return found


def _strip_deleted(target: str) -> str:
    """Remove the " (deleted)" that the kernel appends to the path of a deleted file."""
    return target[: -len(" (deleted)")] if target.endswith(" (deleted)") else target


def _sees_our_files(pid: int) -> bool:
    """Return whether a path means the same file to it as to this process; in a container of its own it may not."""
    try:
        return os.readlink("/proc/%d/ns/mnt" % pid) == os.readlink("/proc/self/ns/mnt")
    except OSError:
        return True


def _read(pid: int, name: str) -> str:
    """Return a text from a process's folder in /proc."""
    with open("/proc/%d/%s" % (pid, name), "rb") as file:
        return os.fsdecode(file.read())


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on; the second, the process's name, may contain anything."""
    return _read(pid, "stat").rpartition(")")[2].split()


def _list_ancestors(pid: int) -> list[int]:
    """Return the process ids of its ancestors, its parent first."""
    found: list[int] = []
    try:
        while pid > 1 and pid not in found[:-1]:
            pid = int(_read_stat(pid)[1])
            found.append(pid)
    except _LEFT:
        pass
    return found


def _describe(pid: int, held: list[str]) -> Holder:
    """Read all that is needed to start the process again."""
    status = dict(line.split(":", 1) for line in _read(pid, "status").split("\n") if ":" in line)
    return Holder(
        pid=pid,
        started=int(_read_stat(pid)[19]),
        argv=_read(pid, "cmdline").split("\0")[:-1],
        cwd=_strip_deleted(os.readlink("/proc/%d/cwd" % pid)),
        environ=dict(pair.split("=", 1) for pair in _read(pid, "environ").split("\0") if "=" in pair),
        uid=int(status["Uid"].split()[1]),
        gid=int(status["Gid"].split()[1]),
        groups=[int(group) for group in status.get("Groups", "").split()],
        ancestors=_list_ancestors(pid),
        held=held,
    )


def is_gone(holder: Holder) -> bool:
    """Return whether the process has exited; a process with the same number but another start time is another one."""
    try:
        fields = _read_stat(holder.pid)
        return fields[0] in "ZX" or int(fields[19]) != holder.started
    except _LEFT:
        return True


def find_ports(holder: Holder, shutdown: dict[str, Any]) -> list[int]:
    """Return the ports on which the holder may answer, from the first source that names any, if it listens on them."""
    sources: list[list[object]] = [[holder.environ.get(shutdown.get("port_env", ""))]]
    for path in holder.held:
        try:
            with open(os.path.join(os.path.dirname(path), shutdown["settings"]), encoding="utf-8") as file:
                sources.append([json.load(file)[shutdown["settings_key"]]])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    sources.append(shutdown.get("ports") or [37700 + holder.uid % 100, 37777])
    found = [[int(text) for text in map(str, ports) if text.isdecimal() and len(text) < 6] for ports in sources]
    listening = _list_listening_ports(holder)
    return [port for port in next(filter(None, found), []) if port < 65536 and (listening is None or port in listening)]


def _list_listening_ports(holder: Holder) -> set[int] | None:
    """Return the TCP ports this very process listens on; ``None`` if the system does not say."""
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
    return {ports[target] for target in _read_open_files(holder.pid).values() if target in ports} if told else None
