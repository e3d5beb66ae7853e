"""What a command of the sidecar brings into a sandbox, for tests that look at it or run its program in another way."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple


class Sent(NamedTuple):
    """What a command brings, as its program gets it. What is in an uploaded file is left out."""

    nonce: str
    request: bytes
    rules: bytes
    package: bytes


ARGUMENTS = re.compile(
    r"' (?P<nonce>[0-9a-f]{16}) \S+ (?P<text>\S+) (?P<pieces>\d+) (?P<first>\d+) (?P<second>\d+) \S+ \d+ </dev/null\n"
)


def sent_by(command: str, environment: Mapping[str, str] | None = None) -> Sent | None:
    """What a command of ours brings; ``None`` for another command."""
    found = ARGUMENTS.search(command)
    if found is None:
        return None
    pieces = [(environment or {}).get(f"MEMORY_SIDECAR_{number}", "") for number in range(int(found["pieces"]))]
    sent = base64.b64decode(found["text"].strip("'")) + base64.b64decode("".join(pieces))
    first, second = int(found["first"]), int(found["second"])
    parts = [zlib.decompress(part) if part else b"" for part in (sent[:first], sent[first:second], sent[second:])]
    return Sent(found["nonce"], *parts)


def request_in(command: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The request a command brings: its question, with what is to be done ("": a file says it) and the nonce."""
    sent = sent_by(command, environment)
    assert sent is not None, "a command without a request"
    request: dict[str, Any] = json.loads(sent.request or '{"do": "", "question": {}}')
    return {"do": request["do"], "nonce": sent.nonce, **request["question"]}
