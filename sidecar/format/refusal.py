"""The one exception the in-sandbox program raises on purpose."""

from __future__ import annotations


class Refusal(Exception):
    """It could not, or should not, go on: a stable code for the sidecar and a sentence for a person."""

    def __init__(self, code: str, message: str, retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retryable = retryable
