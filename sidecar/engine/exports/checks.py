"""Run checks of one's own on a snapshot before it becomes the head.

Each check runs in a private folder with a copy of the snapshot's files, in a process group of its own, with a time limit
and an environment that has nothing of ours but ``PATH`` and ``LANG``. What it prints is bounded and escaped. Whatever
goes wrong with it counts as a failed check, never as a passed one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from sidecar.format.index import DIR, FILE
from sidecar.host.files import PRIVATE, Spool, build_full_error, open_spool
from sidecar.host.text import make_printable
from sidecar.host.work import run_in_thread
from sidecar.models.records import Comparison
from sidecar.policy.review import CHECK_FAILED, ExportCheck
from sidecar.receipts import Reason
from sidecar.records.comparison import Version

MOST_OUTPUT = 64 << 10
"""Bytes at the end of what a check prints that are kept."""
MOST_LINES = 5
LONGEST_LINE = 200
LAST_OUTPUT_SECONDS = 2.0
"""How long output is waited for once a check has ended: a process that left its group may hold the pipe open."""
PRIVATE_FOLDER = 0o700
EXECUTABLE = 0o100
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
DEFAULT_LANG = "C.UTF-8"


async def run_checks(checks: Iterable[ExportCheck], version: Version, changes: Comparison) -> Reason | None:
    """Run the checks one after the other on a snapshot. Return why the first that fails did; ``None`` if all pass."""
    document = changes.as_dict()
    del document["next"]
    told = json.dumps(document).encode()
    for check in checks:
        # A folder of its own: nothing that the check does can reach what the export still needs.
        async with open_spool() as scratch:
            if problem := await _run_check(check, version, told, scratch):
                return Reason(code=CHECK_FAILED, message=f"The check {make_printable(check.title)!r} {problem}")
    return None


async def _run_check(check: ExportCheck, version: Version, told: bytes, scratch: Spool) -> str:
    """Run one check. Return what went wrong: the end of a sentence, then lines that it printed; "" if it passed."""
    folder = scratch.folder / "memory"
    try:
        await run_in_thread(_prepare, folder, version)
    except OSError as problem:
        if full := build_full_error(problem):
            raise full from None
        return f"could not be given the memory's files: {problem.strerror or problem}."
    environment = {
        "PATH": os.environ.get("PATH", DEFAULT_PATH),
        "HOME": str(folder),
        "LANG": os.environ.get("LANG", DEFAULT_LANG),
    }
    with tempfile.TemporaryFile(dir=scratch.folder) as stdin, _open_pipe() as (output, its_end):
        stdin.write(told)
        stdin.seek(0)
        try:
            # A pipe that asyncio does not know of: it would wait for its end, not only for the process.
            process = await asyncio.create_subprocess_exec(
                *check.command,
                cwd=folder,
                env=environment,
                stdin=stdin,
                stdout=its_end,
                stderr=its_end,
                start_new_session=True,
            )
        except (OSError, ValueError) as problem:
            why = problem.strerror if isinstance(problem, OSError) else str(problem)
            return f"could not be started: {make_printable(check.command[0])}: {why}."
        its_end.close()
        return await _watch(check, process, output)


@contextlib.contextmanager
def _open_pipe() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yield both ends of a pipe, to read from and to write to."""
    ends = os.pipe()
    with open(ends[0], "rb", buffering=0) as reader, open(ends[1], "wb", buffering=0) as writer:
        yield reader, writer


def _prepare(folder: Path, version: Version) -> None:
    folder.mkdir(mode=PRIVATE_FOLDER)
    _build_tree(folder, version)


def _build_tree(folder: Path, version: Version) -> None:
    """Write the files of a snapshot below a folder, under the paths that `show` lists. Links are left out: what reads the
    folder must not be led out of it."""
    for path, entry in sorted(version.entries.items()):
        place = folder / path
        if entry.type == DIR:
            place.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        elif entry.type == FILE and path in version.files:
            place.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            shutil.copyfile(version.files[path].place, place)
            place.chmod(PRIVATE | (entry.mode & EXECUTABLE))


async def _watch(check: ExportCheck, process: asyncio.subprocess.Process, output: BinaryIO) -> str:
    """Wait for a check to end, at most for its time. Return what went wrong; "" if nothing."""
    kept: deque[bytes] = deque()
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), output
    )
    reading = asyncio.create_task(_keep_last(stream, kept))
    in_time = True
    try:
        try:
            async with asyncio.timeout(check.timeout):
                await process.wait()
        except TimeoutError:
            in_time = False
    finally:
        # Also after an orderly end, and when the export is cancelled: nothing that it began goes on.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await asyncio.wait([reading], timeout=LAST_OUTPUT_SECONDS)
        reading.cancel()
        transport.close()
    last = _quote_end(b"".join(kept))
    if not in_time:
        return f"took more than {check.timeout:g} s and was ended{last}"
    code = process.returncode
    if code == 0:
        return ""
    how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
    return f"{how}{last}"


async def _keep_last(stream: asyncio.StreamReader, kept: deque[bytes]) -> None:
    """Read a stream to its end; keep the last chunks."""
    size = 0
    while chunk := await stream.read(MOST_OUTPUT):
        kept.append(chunk)
        size += len(chunk)
        while len(kept) > 1 and size - len(kept[0]) >= MOST_OUTPUT:
            size -= len(kept.popleft())


def _quote_end(output: bytes) -> str:
    """Return the last lines of an output, escaped, to follow on a sentence."""
    lines = [line for line in output[-MOST_OUTPUT:].decode("utf-8", "replace").splitlines() if line.strip()]
    last = [make_printable(line[:LONGEST_LINE]) for line in lines[-MOST_LINES:]]
    return "".join([". It printed last:", *(f"\n{line}" for line in last)]) if last else ", and printed nothing."


def find_check_problem(check: ExportCheck) -> str:
    """Return why a check's command cannot be started on this machine; "" if it seems that it can."""
    program = check.command[0]
    if "/" in program and not Path(program).is_absolute():
        return f"{program!r} is relative, and a check runs in a folder of its own: write its whole path."
    if shutil.which(program, path=os.environ.get("PATH", DEFAULT_PATH)) is not None:
        return ""
    if "/" not in program:
        return f"{program!r} is not found in PATH."
    return f"{program!r} is not executable." if Path(program).exists() else f"{program!r} is not there."
