"""The lines of the audit: JSON in ASCII, one object each, which names the SHA-256 of the line before it.

A call that changes something has two lines with the same ``call``: its intent, before anything is changed, and its
outcome. An intent without an outcome may have happened. A call that only reads has an outcome alone.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec

from sidecar.format.checksums import decode_checksummed, encode_checksummed
from sidecar.host.values import dataclass

FORMAT = 1
LONGEST_TEXT = 300
"""A text of a caller is cut at so many characters."""


class Kind(StrEnum):
    """What a line tells."""

    OPENED = "opened"
    """A process begins a chain."""
    INTENT = "intent"
    """A call is about to change something."""
    OUTCOME = "outcome"
    """What came of a call."""
    CUT = "cut"
    """The first lines of a chain are old, and are removed."""
    CLOSED = "closed"
    """The process ends the chain. Nothing comes after it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the name of a token, of a user of this machine, or what stands for one (``kind``)."""

    name: str
    kind: str
    """"token", "admin", "user" or "service"."""


ADMIN = Caller("admin", "admin")
SERVICE = Caller("service", "service")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is asked for, by whom and from where."""

    caller: Caller
    what: str
    """A route, a command, or what the service does by itself: "checkpoint", "retention"."""
    source: str
    """An address, "cli" or "service"."""
    request: str = ""
    memory: str = ""
    also: str = ""
    """A second memory that it concerns, such as that which a fork begins."""
    snapshot: str = ""
    sandbox: str = ""


def build_own_call(what: str, *, memory: str = "", snapshot: str = "", sandbox: str = "") -> Call:
    """Return something that a service does by itself."""
    return Call(caller=SERVICE, what=what, source="service", memory=memory, snapshot=snapshot, sandbox=sandbox)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line. Fields that it does not need are empty, and not written."""

    chain: str
    n: int
    """The number of the line in its chain, from 1."""
    at: str
    kind: str
    call: str = ""
    """The same in the intent and the outcome of one call."""
    who: str = ""
    by: str = ""
    """What kind of caller ``who`` is."""
    what: str = ""
    memory: str = ""
    also: str = ""
    snapshot: str = ""
    sandbox: str = ""
    source: str = ""
    request: str = ""
    outcome: str = ""
    status: int = 0
    """The status of an HTTP answer."""
    cut: str = ""
    """Of which chain the lines up to ``through`` are removed; the last of them begins its digest with ``digest``."""
    through: int = 0
    digest: str = ""
    after: str = ""
    """The chain that was begun before this one."""
    host: str = ""
    pid: int = 0
    version: str = ""
    format: int = 0
    prev: str = ""
    """The digest of the line before; empty in the first."""


def describe_call(id: str, call: Call) -> dict[str, str]:
    """Return a call as the fields of its lines. Long texts are cut."""
    told = {
        "call": id,
        "who": call.caller.name,
        "by": call.caller.kind,
        "what": call.what,
        "memory": call.memory,
        "also": call.also,
        "snapshot": call.snapshot,
        "sandbox": call.sandbox,
        "source": call.source,
        "request": call.request,
    }
    return {
        name: text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..." for name, text in told.items() if text
    }


def encode_line(line: Line) -> bytes:
    """Return a line without its end. ASCII: whatever a name holds, it is one line and shows as what it is."""
    return json.dumps({name: value for name, value in asdict(line).items() if value}, separators=(",", ":")).encode()


def decode_line(data: bytes) -> Line:
    """Parse a line. Raise ``ValueError`` if it is none."""
    try:
        value: dict[str, Any] = json.loads(data)
        # A later version may tell more; what this one does not know is part of the digest all the same.
        known = {entry.name: value[entry.name] for entry in fields(Line) if entry.name in value}
        return msgspec.convert(known, Line)
    except (ValueError, TypeError, AttributeError, RecursionError, msgspec.ValidationError):
        raise ValueError("not a line of an audit") from None


def encode_latest(chain: str) -> bytes:
    """Return the object that names the chain which was begun last."""
    return encode_checksummed({"chain": chain})


def decode_latest(data: bytes) -> str:
    """Return the chain which was begun last. Raise ``ValueError``."""
    chain = decode_checksummed(data).get("chain")
    if not isinstance(chain, str):
        raise ValueError("it names no chain")
    return chain


def compute_digest(data: bytes) -> str:
    """Return the digest by which the next line names this one."""
    return hashlib.sha256(data).hexdigest()


def format_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
