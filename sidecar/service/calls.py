"""The call that is being answered: who asks and from where, and what of it the audit is to tell."""

from __future__ import annotations

from contextvars import ContextVar

from sidecar.audit.lines import Call, Caller
from sidecar.audit.trail import Record
from sidecar.host.values import dataclass

DONE = "ok"
"""The outcome of a call that says no more than that it succeeded."""
REPEATED = "repeated"
"""The outcome of a call that was made before: nothing was done again."""


@dataclass(slots=True)
class CurrentCall:
    """One request from a caller."""

    caller: Caller
    source: str
    request: str
    what: str = ""
    record: Record | None = None
    """``None`` until it is known what is asked for, and for what the audit does not tell of."""
    operations: int = 0
    """How many exports or restores were started for it. Each has a record of its own."""
    outcome: str = ""
    """A word on what came of it, such as the code of a problem."""

    def build_call(self, what: str, *, memory: str, snapshot: str = "", sandbox: str = "") -> Call:
        """Return what is asked for, in the name of whoever asks."""
        return Call(
            caller=self.caller,
            what=what,
            source=self.source,
            request=self.request,
            memory=memory,
            snapshot=snapshot,
            sandbox=sandbox,
        )

    async def end(self, status: int) -> None:
        """Record what came of it, unless its operation does."""
        if self.record is not None and (self.record.intended or not self.operations):
            await self.record.end(self.outcome or (DONE if status < 400 else f"http-{status}"), status)


_current: ContextVar[CurrentCall | None] = ContextVar("current_call", default=None)


def get_current_call() -> CurrentCall | None:
    """Return the call that is being answered; ``None`` in what the service does by itself."""
    return _current.get()


def set_current_call(call: CurrentCall | None) -> None:
    """Set the call that this task, and what it starts, answers; ``None``: the service does it by itself."""
    _current.set(call)


def note_outcome(outcome: str) -> None:
    """Note a word on what came of the current call."""
    if (current := _current.get()) is not None:
        current.outcome = outcome


def note_subject(*, memory: str = "", also: str = "", snapshot: str = "") -> None:
    """Note which memory and snapshot the current call turns out to be about."""
    if (current := _current.get()) is not None and current.record is not None:
        current.record.note(memory=memory, also=also, snapshot=snapshot)
