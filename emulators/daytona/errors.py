"""Errors as Daytona says them."""

from __future__ import annotations

from emulators.server import Refused

API = "DAYTONA_API"
DAEMON = "DAYTONA_DAEMON"
PROXY = "DAYTONA_PROXY"


def refusal(status: int, message: str, *, code: str, source: str = API) -> Refused:
    """A request that is answered with an error of one of Daytona's services."""
    return Refused(status, {"statusCode": status, "message": message, "code": code, "source": source})


def unauthorized() -> Refused:
    return Refused(401, {"statusCode": 401, "message": "Invalid credentials"})
