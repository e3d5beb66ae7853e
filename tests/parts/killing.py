"""Kills a service at a chosen request to a provider."""

from __future__ import annotations

import pytest

from emulators import Fault
from emulators.calls import Step
from tests.parts.providers import Emulator
from tests.parts.services import Service


class Killer:
    """Kills a service at its n-th request to its provider since it was armed: as one that is still carried out, or as one that
    never got there."""

    def __init__(self, server: Emulator, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
        self._service = service
        self._take = server.faults.take
        self.seen: list[Step] = []
        self._at, self._arrives = -1, True
        monkeypatch.setattr(server.faults, "take", self.take)

    def arm(self, at: int, *, arrives: bool) -> None:
        self.seen, self._at, self._arrives = [], at, arrives

    @property
    def fired(self) -> bool:
        return self._at < 0

    def take(self, step: Step) -> Fault | None:
        self.seen.append(step)
        if len(self.seen) - 1 != self._at:
            return self._take(step)
        self._service.kill()
        self._at = -1
        return None if self._arrives else Fault(step, "refuse")
