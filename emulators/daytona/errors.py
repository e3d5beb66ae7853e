"""Errors as Daytona says them."""

from __future__ import annotations

import time

from emulators.server import Refused
from emulators.values import moment

API = "DAYTONA_API"
PROXY = "DAYTONA_PROXY"


def complaint(status: int, message: str, *, code: str) -> Refused:
    """An error of the daemon in a sandbox: it does not say that it is one of the daemon's, but when and of what."""
    return Refused(status, {"statusCode": status, "message": message, "code": code, "timestamp": moment(time.time())})


def speechless(status: int) -> Refused:
    """An error of the daemon's file calls: a status, and nothing else."""
    return Refused(status, None)


def refusal(status: int, message: str, *, code: str, source: str = API) -> Refused:
    """A request that is answered with an error of one of Daytona's services."""
    return Refused(status, {"statusCode": status, "message": message, "code": code, "source": source})


def unauthorized() -> Refused:
    return Refused(401, {"statusCode": 401, "message": "Invalid credentials"})
