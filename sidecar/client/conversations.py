"""A conversation: restore before it, export after it, whatever happens in between. Everything but the I/O."""

from __future__ import annotations

import logging

from sidecar.client.problems import NotRestored, NotSaved
from sidecar.client.wire import Call, build_keyed_call
from sidecar.errors import SidecarError
from sidecar.host.values import dataclass
from sidecar.models.requests import ExportBody, RestoreBody
from sidecar.receipts import ExportOutcome, ExportReceipt, RestoreOutcome, RestoreReceipt

LOG = logging.getLogger("sidecar.client")
BEHIND = (
    "Nothing was new in %s, but the head of %s has moved on to %s meanwhile: restore into it again before going on."
)


@dataclass(frozen=True, slots=True)
class ConversationPlan:
    """What is sent before and after a conversation."""

    memory: str
    restore: RestoreBody
    export: ExportBody
    require_restore: bool

    def before(self) -> Call[RestoreReceipt]:
        """Return the call that restores the memory."""
        return build_keyed_call("restores", self.memory, self.restore, None, RestoreReceipt)

    def after(self) -> Call[ExportReceipt]:
        """Return the call that exports the memory."""
        return build_keyed_call("exports", self.memory, self.export, None, ExportReceipt)


class ConversationState:
    """The results of a conversation: ``restored`` before it, ``exported`` and ``saved`` once it has ended."""

    def __init__(self, plan: ConversationPlan) -> None:
        self._plan = plan
        self.memory = plan.memory
        self.sandbox = plan.restore.sandbox or ""
        self._restored: RestoreReceipt | None = None
        self.exported: ExportReceipt | None = None

    @property
    def restored(self) -> RestoreReceipt:
        assert self._restored is not None, "the conversation has not begun"
        return self._restored

    @property
    def saved(self) -> bool:
        """Whether the head has what the conversation left in the sandbox."""
        return self.exported is not None and self.exported.is_saved

    def _begin(self, receipt: RestoreReceipt) -> None:
        """Raise ``NotRestored`` if the agent would begin without its memory."""
        self._restored = receipt
        for warning in receipt.warnings:
            LOG.warning("Restore of %s: %s", self.memory, warning)
        if receipt.outcome is RestoreOutcome.INCOMPLETE and self._plan.require_restore:
            raise NotRestored(receipt)

    def _end(self, receipt: ExportReceipt, trouble: BaseException | None) -> None:
        """Raise ``NotSaved`` if the head did not move; if the conversation failed with ``trouble``, add a note to that
        instead."""
        self.exported = receipt
        for warning in receipt.warnings:
            LOG.warning("Export of %s: %s", self.memory, warning)
        if receipt.is_saved:
            return
        if receipt.outcome is ExportOutcome.UNCHANGED:
            LOG.warning(BEHIND, self.sandbox, self.memory, receipt.head)
        else:
            self._tell(NotSaved(receipt), trouble)

    def _tell(self, problem: SidecarError, trouble: BaseException | None) -> None:
        """Raise ``problem``, or add it as a note to ``trouble``, with which the conversation failed."""
        # Logged too: the notes of an exception that ends the process, such as SystemExit, are not shown.
        LOG.warning("The memory was not saved: %s [%s]", problem.message, problem.code)
        if trouble is None:
            raise problem
        trouble.add_note(
            f"Besides, the memory was not saved: {problem.message} [{problem.code}] {problem.hint}".rstrip()
        )
