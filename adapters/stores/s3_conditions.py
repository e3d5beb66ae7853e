"""Compare-and-swap on S3: the swap itself, and the proof that a server really compares.

Some S3 look-alikes ignore ``If-Match`` and ``If-None-Match`` and answer 200. There two writers would silently overwrite
each other's head, so nothing is written before the server has shown that it refuses.
"""

from __future__ import annotations

import json
import threading
import uuid

from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from adapters.stores.s3_errors import Unsupported, WriteConflict
from adapters.stores.s3_objects import S3Objects
from sidecar.errors import HeadMoved, ObjectMissing, StoreError, StoreUnreachable, StoreUnsafe

MARKER = "store.json"
_FORMAT = 1
_ONE_WRITER = threading.Lock()


def prove_conditions(objects: S3Objects) -> None:
    """Raise ``StoreUnsafe`` unless this server refuses a write whose condition does not hold.

    Asked once per store and remembered in its ``store.json``, together with the server that was asked: a store that is
    copied to another server is asked again there.
    """
    remembered = objects.read(MARKER)
    if remembered is None or not _vouches(remembered.data, objects.server):
        _probe(objects)
        marker = {"format": _FORMAT, "conditional_writes": True, "server": objects.server}
        objects.write(MARKER, json.dumps(marker).encode())


def swap(objects: S3Objects, key: str, data: bytes, expected: str | None) -> str:
    """As ``Store.swap``, decided by the server.

    A refusal may be the echo of our own success: when the first answer is lost, botocore sends the request again, and
    that one meets the object the first has written. So the object is read, and it is ours when it holds our bytes.
    That makes two callers who write the same bytes both winners; what is swapped must differ by writer, as heads do.
    """
    condition = {"IfNoneMatch": "*"} if expected is None else {"IfMatch": expected}
    try:
        return _write_decided(objects, key, data, condition)
    except (HeadMoved, ObjectMissing, StoreUnreachable) as refused:
        found = objects.read(key)
        if found is not None and found.data == data:
            return found.version
        if isinstance(refused, StoreUnreachable):
            hint = "It is not known whether the write will still arrive: read the object before you write it again."
            raise StoreUnreachable(refused.message, hint=hint) from refused
        raise _moved(key) from refused


def swap_alone(objects: S3Objects, key: str, data: bytes, expected: str | None) -> str:
    """As ``Store.swap`` among the threads of this process only: for servers that ignore conditions."""
    with _ONE_WRITER:
        found = objects.read(key)
        if (found.version if found else None) != expected:
            raise _moved(key)
        return objects.write(key, data)


@retry(
    retry=retry_if_exception_type(WriteConflict),
    stop=stop_after_attempt(5),
    wait=wait_random_exponential(multiplier=0.1, max=2),
    reraise=True,
)
def _write_decided(objects: S3Objects, key: str, data: bytes, condition: dict[str, str]) -> str:
    return objects.write(key, data, **condition)


def _vouches(marker: bytes, server: str) -> bool:
    try:
        known = json.loads(marker)
        form, holds, where = known["format"], known["conditional_writes"], known.get("server")
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    if form != _FORMAT:
        raise StoreError(
            f"This store says that its format is {form!r}; this sidecar knows {_FORMAT}.", hint="Use a newer sidecar."
        )
    return holds is True and where == server


def _probe(objects: S3Objects) -> None:
    key = f"probe-{uuid.uuid4().hex}"
    wrong = f'"{"0" * 32}"'
    try:
        version = objects.write(key, b"first", IfNoneMatch="*")
        honoured = (
            _refuses(objects, key, IfNoneMatch="*")
            and _refuses(objects, key, IfMatch=wrong)
            and not _refuses(objects, key, IfMatch=version)
        )
    except Unsupported:
        honoured = False
    finally:
        objects.remove([key])
    if not honoured:
        raise StoreUnsafe(
            f"{objects.server} ignores conditional writes: two writers could overwrite each other here.",
            hint="Add ?single-writer=true to the store URL if exactly one sidecar ever writes to it, or move it.",
        )


def _refuses(objects: S3Objects, key: str, **condition: str) -> bool:
    try:
        objects.write(key, b"second", **condition)
    except HeadMoved:
        return True
    return False


def _moved(key: str) -> HeadMoved:
    return HeadMoved(f"{key} was changed by someone else.", hint="Read it again, then repeat the change.")
