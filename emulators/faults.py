"""Troubles to order: what goes wrong with the next requests of a step.

``after`` counts bytes of content: of the file for uploads and downloads, of the output for commands, of the answer's
body for everything else. Framing and compression do not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from emulators.calls import Step
from emulators.wire import Held, Reset

Kind = Literal[
    "refuse", "cut", "lose", "stall", "truncate", "shrink", "status", "kill", "expire", "crash", "slow", "corrupt", "replay"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """A trouble for the next ``times`` requests of ``step`` (``None``: for all of them), sparing the first ``skip``.

    - ``refuse``: the connection is closed (of an upload: reset) before anything is done.
    - ``cut``: the connection is reset after ``after`` bytes. A command that was started goes on.
    - ``lose``: everything is done, and the connection is closed without the answer.
    - ``stall``: after ``after`` bytes nothing moves any more, and the connection stays open.
    - ``truncate``: the transfer ends cleanly after ``after`` bytes, and claims success.
    - ``shrink``: the file is cut to ``after`` bytes on disk once so many were sent.
    - ``status``: a gateway answers ``status`` (and ``Retry-After: retry_after``) and nothing is done.
    - ``kill``: the sandbox is killed after ``after`` bytes.
    - ``expire``: the sandbox reaches its time-out after ``after`` bytes.
    - ``crash``: the daemon in the sandbox dies after ``after`` bytes, with what it runs, and starts again.
    - ``replay``: the daemon takes a command and hangs up, and the proxy before it (Daytona's) sends it once more.
    - ``slow``: the transfer runs at ``rate`` bytes per second.
    - ``corrupt``: one byte arrives flipped: number ``after``, or one in the middle when that is 0.
    """

    step: Step
    kind: Kind
    after: int = 0
    times: int | None = 1
    skip: int = 0
    status: int = 503
    retry_after: int | None = None
    rate: int = 65536


class Faults:
    """The faults waiting for requests, oldest first; a request takes at most one. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._waiting.append(_Waiting(fault, fault.times, fault.skip))

    def remove(self, fault: Fault) -> None:
        with self._lock:
            self._waiting = [waiting for waiting in self._waiting if waiting.fault != fault]

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()

    def take(self, step: Step) -> Fault | None:
        """The fault for a request of this step that has just come in."""
        with self._lock:
            for waiting in self._waiting:
                if waiting.fault.step != step:
                    continue
                if waiting.skip:
                    waiting.skip -= 1
                    continue
                if waiting.left is not None:
                    waiting.left -= 1
                    if not waiting.left:
                        self._waiting.remove(waiting)
                return waiting.fault
        return None


@dataclass(slots=True)
class _Waiting:
    fault: Fault
    left: int | None
    skip: int


def shaped(
    fault: Fault | None, chunks: Iterable[bytes], act: Callable[[str], None], size: int | None = None
) -> Iterator[bytes]:
    """The chunks of a transfer as this fault lets them through.

    ``act`` does what a fault does to the sandbox or the file: it is called with "kill", "expire", "crash" or "shrink".
    ``size`` is the length of the transfer where it is known. Raise ``Reset`` or ``Held`` where the connection ends.
    """
    chunks = iter(chunks)
    if fault is None:
        yield from chunks
    elif fault.kind == "slow":
        yield from _slowed(chunks, fault.rate)
    elif fault.kind == "corrupt":
        yield from _corrupted(chunks, fault.after or (size or 0) // 2)
    elif fault.kind == "shrink":
        yield from _until(chunks, fault.after)
        act("shrink")
        yield from chunks
    elif fault.kind in ("cut", "stall", "truncate", "kill", "expire", "crash"):
        yield from _until(chunks, fault.after)
        if fault.kind in ("kill", "expire", "crash"):
            act(fault.kind)
        if fault.kind == "stall":
            raise Held
        if fault.kind != "truncate":
            raise Reset
    else:
        yield from chunks


def _until(chunks: Iterable[bytes], limit: int) -> Iterator[bytes]:
    """The first ``limit`` bytes. Never asks for more than it needs: the next bytes may never come."""
    left = limit
    if not left:
        return
    for chunk in chunks:
        yield chunk[:left]
        left -= len(chunk)
        if left <= 0:
            return


def _slowed(chunks: Iterable[bytes], rate: int) -> Iterator[bytes]:
    step = max(1, min(rate // 10, 65536))
    for chunk in chunks:
        for start in range(0, len(chunk), step):
            piece = chunk[start : start + step]
            time.sleep(len(piece) / rate)
            yield piece


def _corrupted(chunks: Iterable[bytes], target: int) -> Iterator[bytes]:
    seen = 0
    done = False
    for chunk in chunks:
        # Of a transfer of unknown length the first chunk has to do.
        at = target - seen if target else len(chunk) // 2
        if not done and 0 <= at < len(chunk):
            chunk = chunk[:at] + bytes([chunk[at] ^ 0x01]) + chunk[at + 1 :]
            done = True
        seen += len(chunk)
        yield chunk
