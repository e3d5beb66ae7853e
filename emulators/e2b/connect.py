"""The Connect protocol in JSON, as far as the daemon speaks it."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING

from emulators.sandboxes import User
from emulators.server import Refused
from emulators.wire import Request

if TYPE_CHECKING:
    from emulators.e2b.control import E2BSandbox

STATUS = {
    "invalid_argument": 400,
    "failed_precondition": 400,
    "unauthenticated": 401,
    "permission_denied": 403,
    "not_found": 404,
    "already_exists": 409,
    "internal": 500,
    "unimplemented": 501,
}

END = 0x02


def refusal(code: str, message: str) -> Refused:
    """The error that answers a call."""
    return Refused(STATUS[code], {"code": code, "message": message})


def caller(request: Request, sandbox: E2BSandbox) -> User:
    """The user in whose name a call is made: ``Authorization: Basic``, a name without a password."""
    name = ""
    if (given := request.header("Authorization")).startswith("Basic "):
        name = base64.b64decode(given.removeprefix("Basic ")).decode("utf-8", "replace").partition(":")[0]
    user = sandbox.user_named(name)
    if user is None:
        raise refusal("unauthenticated", f"invalid username: '{name}'")
    return user


def envelope(message: Mapping[str, object], flags: int = 0) -> bytes:
    """One message of a stream."""
    data = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


def unwrapped(body: bytes) -> dict[str, object]:
    """The one message of a request that opens a stream; anything else is an empty one."""
    try:
        (length,) = struct.unpack(">I", body[1:5])
        message = json.loads(body[5 : 5 + length])
    except (struct.error, ValueError):
        return {}
    return message if isinstance(message, dict) else {}
