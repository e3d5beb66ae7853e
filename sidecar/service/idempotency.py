"""Idempotency: under one ``Idempotency-Key`` a call is done once, also across a restart.

The store records each key, with the id of the snapshot that the export will have, from the moment the sandbox was
reached: a call that names a missing sandbox, or that the queue refuses, writes nothing. A repeated call finds its
receipt there. If the service died before the receipt was recorded, the repetition looks for that snapshot: if it was
stored, the export is finished from there and not made a second time.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

import msgspec

from sidecar.engine import Engine, finish_export
from sidecar.errors import SwapLost, UsageError
from sidecar.format.checksums import decode_checksummed, encode_checksummed
from sidecar.host.values import dataclass
from sidecar.ids import MemoryKeys
from sidecar.receipts import ExportReceipt, RestoreReceipt
from sidecar.service.access.grants import ITSELF, Caller

LONGEST_KEY = 255
REUSED = "This Idempotency-Key was used for another call."


class KeyReused(UsageError):
    """The Idempotency-Key was used for another call."""

    code = "idempotency-key-reused"
    default_hint = "Use a new Idempotency-Key for each call that is not a repetition."


@dataclass(frozen=True, slots=True)
class RememberedCall:
    """A call under a key, as recorded in the store."""

    key: str
    memory: str
    kind: str
    body: str
    """A digest of the request."""
    snapshot: str
    receipt: dict[str, Any] | None = None
    """The answer, once there is one."""


class KeyedCall:
    """A call that was received with a key. Each named token has keys of its own. Raise ``UsageError`` for a key that is
    too long."""

    def __init__(self, key: str, memory: str, kind: str, body: dict[str, Any], caller: Caller = ITSELF) -> None:
        if len(key) > LONGEST_KEY:
            raise UsageError(f"An Idempotency-Key has at most {LONGEST_KEY} characters.")
        self.key, self.memory, self.kind = caller.scope_key(key), memory, kind
        self.digest = hashlib.sha256(json.dumps([kind, body], sort_keys=True).encode()).hexdigest()

    @property
    def place(self) -> tuple[str, str]:
        """The key for the index of calls that wait or run."""
        return self.memory, self.key

    def check_same(self, other: KeyedCall) -> None:
        """Raise ``KeyReused`` unless both are the same request."""
        if (self.kind, self.digest) != (other.kind, other.digest):
            raise KeyReused(REUSED)


class RememberedCalls:
    """The calls recorded in the store."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def find(self, asked: KeyedCall) -> RememberedCall | None:
        """Return the recorded call; ``None`` if there is none. Raise ``KeyReused`` if the key was used for another
        call."""
        call = await self._read_call(asked.memory, asked.key)
        if call is not None and (call.kind, call.body) != (asked.kind, asked.digest):
            raise KeyReused(REUSED)
        return call

    async def begin(self, asked: KeyedCall, snapshot: str = "") -> tuple[RememberedCall, bool]:
        """Record a call with the snapshot that it will make. Return it and ``False``, or the call that was recorded
        already and ``True``.

        Raise ``KeyReused`` if the key was used for another call.
        """
        store = self._engine.repository.store
        call = RememberedCall(asked.key, asked.memory, asked.kind, asked.digest, snapshot)
        await store.prepare()
        try:
            # Created only if it does not exist: of two services that get the same call, one records it and the other
            # finds that.
            await store.swap(MemoryKeys.of(asked.memory).call(asked.key), _encode(call), expected=None)
        except SwapLost:
            before = await self.find(asked)
            if before is None:
                raise
            return before, True
        return call, False

    async def _read_call(self, memory: str, key: str) -> RememberedCall | None:
        """Read a recorded call; ``None`` if there is none. Raise ``KeyReused`` if it is damaged or belongs to another
        key."""
        stored = await self._engine.repository.store.get(MemoryKeys.of(memory).call(key))
        if stored is None:
            return None
        try:
            call = msgspec.convert(decode_checksummed(stored.data), RememberedCall)
        except (ValueError, msgspec.ValidationError):
            raise KeyReused("What is remembered under this Idempotency-Key is damaged.") from None
        if (call.key, call.memory) != (key, memory):
            raise KeyReused("What is remembered under this Idempotency-Key is of another call.")
        return call

    def read_receipt(self, call: RememberedCall) -> ExportReceipt | RestoreReceipt | None:
        """Return the receipt if the call was answered before."""
        if call.receipt is None:
            return None
        if call.kind == "export":
            return msgspec.convert(call.receipt, ExportReceipt)
        return msgspec.convert(call.receipt, RestoreReceipt)

    async def finish(self, call: RememberedCall, sandbox: str) -> ExportReceipt | None:
        """Finish an export that was stored before its service died, and return its receipt; ``None`` if it was not
        stored."""
        return await finish_export(self._engine, call.memory, call.snapshot, sandbox)

    async def end(self, call: RememberedCall, answer: dict[str, Any]) -> None:
        """Record the answer."""
        ended = RememberedCall(call.key, call.memory, call.kind, call.body, call.snapshot, answer)
        await self._engine.repository.store.put(MemoryKeys.of(call.memory).call(call.key), _encode(ended))


def _encode(call: RememberedCall) -> bytes:
    return encode_checksummed(asdict(call))
