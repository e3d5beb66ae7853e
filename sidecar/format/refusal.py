"""The one exception that the in-sandbox program raises on purpose."""

from __future__ import annotations


class Refusal(Exception):
    """The program could not or should not continue. It has a stable code for the sidecar and a sentence for people."""

    def __init__(self, code: str, message: str, retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retryable = retryable
