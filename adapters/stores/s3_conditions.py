"""Compare-and-swap on S3: the swap itself, and the probe that shows that a server really compares.

Some S3 look-alikes ignore ``If-Match`` and ``If-None-Match`` and answer 200; others compare first and write after, so
that two simultaneous requests both pass. There two writers would silently overwrite each other's head, so nothing is
written before the server has shown that it refuses, also when several ask at once.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime

from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from adapters.stores.s3_client import HeldBackBody
from adapters.stores.s3_errors import Unsupported, WriteConflict
from adapters.stores.s3_objects import S3Objects
from sidecar.errors import ObjectMissing, StoreError, StoreUnreachable, StoreUnsafe, SwapLost
from sidecar.host.values import dataclass

MARKER = "store.json"
_FORMAT = 1
WRITERS = 2
AT_ONCE = 8
TURNS = 4
RACES = AT_ONCE * TURNS
"""Of plain requests sent at once, two won in a quarter to a third of the races on a server that compares and then
writes (s3proxy 4.1), and far fewer on a busy machine. So all writers first send everything but the last byte, wait
until the server has had time to compare, and then finish together: this makes the time between comparing and writing as
long as needed. The races run side by side, because one after the other would cost a round trip each, and a third of a
second on servers that have later writers wait for a lock (SeaweedFS). All of it takes about a second at 100 ms, once in
a store's life.
"""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 0.5


@dataclass(frozen=True, slots=True)
class RaceResult:
    """How often the probe raced, and when."""

    races: int
    writers: int
    at: str

    def __str__(self) -> str:
        return f"{self.races} races of {self.writers} writers, each with one winner, on {self.at[:10]}"


def prove_conditions(objects: S3Objects) -> RaceResult:
    """Raise ``StoreUnsafe`` unless this server lets exactly one of several writers win. Return the result of the probe.

    A store is probed once. That it passed is recorded in its ``store.json``, together with the server: a store that is
    copied to another server is probed again there, and so is one of a version that did not race.
    """
    remembered = objects.read(MARKER)
    raced = _read_vouched(remembered.data, objects.server) if remembered is not None else None
    if raced is None:
        raced = _probe(objects)
        marker = {"format": _FORMAT, "conditional_writes": True, "server": objects.server, "raced": asdict(raced)}
        objects.write(MARKER, json.dumps(marker).encode())
    return raced


def swap(objects: S3Objects, key: str, data: bytes, expected: str | None) -> str:
    """Swap as ``Store.swap`` does, decided by the server.

    A refusal may be caused by our own success: if the first answer is lost, botocore sends the request again, and that
    one meets the object that the first has written. So the object is read, and the swap succeeded if it contains our
    bytes. That makes two callers who write the same bytes both winners; what is swapped must differ by writer, as heads
    do.
    """
    condition = {"IfNoneMatch": "*"} if expected is None else {"IfMatch": expected}
    try:
        return _write_until_decided(objects, key, data, condition)
    except (SwapLost, ObjectMissing, StoreUnreachable) as refused:
        found = objects.read(key)
        if found is not None and found.data == data:
            return found.version
        if isinstance(refused, StoreUnreachable):
            hint = "It is not known whether the write will still arrive: read the object before you write it again."
            raise StoreUnreachable(refused.message, hint=hint) from refused
        raise make_swap_lost(key) from refused


@retry(
    retry=retry_if_exception_type(WriteConflict),
    stop=stop_after_attempt(5),
    wait=wait_random_exponential(multiplier=0.1, max=2),
    reraise=True,
)
def _write_until_decided(objects: S3Objects, key: str, data: bytes, condition: dict[str, str]) -> str:
    """Write on a condition; repeat while the server decides between no writers."""
    return objects.write(key, data, **condition)


def make_swap_lost(key: str) -> SwapLost:
    return SwapLost(f"{key} was changed by someone else.", hint="Read it again, then repeat the change.")


def _read_vouched(marker: bytes, server: str) -> RaceResult | None:
    """Return the recorded probe of this server; ``None`` if it has to be probed."""
    try:
        known = json.loads(marker)
        form, holds, where = known["format"], known["conditional_writes"], known.get("server")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if form != _FORMAT:
        raise StoreError(
            f"This store says that its format is {form!r}; this sidecar knows {_FORMAT}.", hint="Use a newer sidecar."
        )
    try:
        raced = RaceResult(**known["raced"])
        enough = raced.races >= RACES and raced.writers >= WRITERS and isinstance(raced.at, str)
    except (KeyError, TypeError):
        return None
    return raced if holds is True and where == server and enough else None


def _probe(objects: S3Objects) -> RaceResult:
    """Check first whether the server compares at all, which takes four requests; then whether it does so for
    simultaneous writers."""
    with _make_scratch_keys(objects, 1) as (key,):
        began = time.monotonic()
        if not _compares_versions(objects, key):
            raise _make_unsafe_error(
                f"{objects.server} ignores conditional writes: two writers could overwrite each other here."
            )
        pause = min(
            max((time.monotonic() - began) / 2, SHORTEST_PAUSE), LONGEST_PAUSE
        )  # the time of two of its four requests
    with _make_scratch_keys(objects, AT_ONCE) as keys, ThreadPoolExecutor(AT_ONCE * WRITERS) as writers:
        return _run_race(objects, keys, writers, pause)


def _compares_versions(objects: S3Objects, key: str) -> bool:
    """Return whether the server refuses writes whose condition does not hold."""
    wrong = f'"{"0" * 32}"'
    try:
        version = objects.write(key, b"first", IfNoneMatch="*")
        return (
            _refuses(objects, key, IfNoneMatch="*")
            and _refuses(objects, key, IfMatch=wrong)
            and not _refuses(objects, key, IfMatch=version)
        )
    except Unsupported:
        # If this succeeds, only the condition is unsupported; else it raises what is wrong.
        objects.write(key, b"first")
        return False


def _run_race(objects: S3Objects, keys: list[str], writers: ThreadPoolExecutor, pause: float) -> RaceResult:
    """Have several writers swap the same version of each key, several times. Raise ``StoreUnsafe`` if two of them win."""
    versions: dict[str, str | None] = dict.fromkeys(keys)

    def attempt(key: str, body: HeldBackBody) -> str | None:
        version = versions[key]
        try:
            return objects.write_late(key, body, **({"IfNoneMatch": "*"} if version is None else {"IfMatch": version}))
        except (SwapLost, ObjectMissing):
            return None

    for turn in range(TURNS):
        waiting, go = threading.Semaphore(0), threading.Event()
        tried = [
            (key, HeldBackBody(b"%d %d" % (turn, who), waiting.release, go)) for who in range(WRITERS) for key in keys
        ]
        attempts = [writers.submit(attempt, *one) for one in tried]
        deadline = time.monotonic() + LONGEST_PAUSE * 4
        for _ in tried:
            waiting.acquire(timeout=max(0.0, deadline - time.monotonic()))
        time.sleep(pause)
        go.set()
        won: dict[str, list[str]] = {key: [] for key in keys}
        for (key, _), one in zip(tried, attempts, strict=True):
            won[key] += [version] if (version := one.result()) else []
        most = max(map(len, won.values()))
        if most > 1:
            raise _make_unsafe_error(
                f"{objects.server} compares before it writes, but not in one step: of {WRITERS} writers at the same moment"
                f" {most} were told that they alone had written, so two could overwrite each other here."
            )
        for key, winners in won.items():
            # No writer won if all met at the server, or the winner's first answer was lost.
            found = None if winners else objects.read(key)
            versions[key] = winners[0] if winners else found.version if found is not None else None
    return RaceResult(RACES, WRITERS, datetime.now(UTC).isoformat(timespec="seconds"))


def _refuses(objects: S3Objects, key: str, **condition: str) -> bool:
    """Return whether the server refuses a write on this condition."""
    try:
        objects.write(key, b"second", **condition)
    except SwapLost:
        return True
    return False


@contextmanager
def _make_scratch_keys(objects: S3Objects, count: int) -> Iterator[list[str]]:
    """Yield keys of the sidecar's own, and remove their objects afterwards."""
    keys = [f"probe-{uuid.uuid4().hex}" for _ in range(count)]
    try:
        yield keys
    except BaseException:
        with suppress(StoreError):  # the first problem is the one to report
            objects.remove(keys)
        raise
    objects.remove(keys)


def _make_unsafe_error(message: str) -> StoreUnsafe:
    return StoreUnsafe(
        message, hint="Add single-writer=true to the store URL if exactly one sidecar ever writes to it, or move it."
    )
