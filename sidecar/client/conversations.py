"""A conversation: restore before it, export after it, whatever happens in between. All of it but the I/O."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from sidecar.client import calls
from sidecar.client.problems import NotRestored, NotSaved
from sidecar.client.wire import Call
from sidecar.errors import SidecarError
from sidecar.receipts import ExportOutcome, ExportReceipt, RestoreOutcome, RestoreReceipt

LOG = logging.getLogger("sidecar.client")
BEHIND = (
    "Nothing was new in %s, but the head of %s has moved on to %s meanwhile: restore into it again before going on."
)


@dataclass(frozen=True, slots=True)
class ConversationPlan:
    """Restore a memory before a conversation and export it after, also when the conversation fails.

    In between the service looks after the sandbox: it exports it every ``checkpoint_every`` seconds (as the service is set,
    unless given), before its provider ends it, and when the service or this process is told to end. SIGTERM ends the
    conversation first and then the process, with exit code 143, where nothing else was arranged for it.

    Raise ``NotRestored`` at the start when the restore is incomplete, unless ``require_restore`` is False; and
    ``NotSaved`` at the end when the head did not move. When the conversation itself failed, what it failed with is
    raised, with a note about the memory if that was not saved.
    """

    memory: str
    _: KW_ONLY
    sandbox: str
    conversation: str = ""
    label: str = ""
    layouts: Sequence[str] = ()
    projects: Sequence[str] | None = None
    snapshot: str = "latest"
    mode: Literal["replace", "seed"] = "replace"
    wake: bool = False
    user: str = ""
    require_restore: bool = True
    must_exist: bool = False
    checkpoint_every: float | None = None

    def before(self) -> Call[RestoreReceipt]:
        return calls.restore(
            self.memory,
            sandbox=self.sandbox,
            snapshot=self.snapshot,
            mode=self.mode,
            projects=self.projects,
            conversation=self.conversation,
            must_exist=self.must_exist,
            wake=self.wake,
            user=self.user,
            layouts=self.layouts,
            checkpoint_every=self.checkpoint_every,
        )

    def after(self) -> Call[ExportReceipt]:
        return calls.export(
            self.memory,
            sandbox=self.sandbox,
            conversation=self.conversation,
            label=self.label,
            layouts=self.layouts,
            projects=self.projects,
            wake=self.wake,
            user=self.user,
        )


class ConversationState:
    """How a conversation went: ``restored`` before it, ``exported`` and whether it is ``saved`` once it has ended."""

    def __init__(self, plan: ConversationPlan) -> None:
        self._plan = plan
        self.memory = plan.memory
        self.sandbox = plan.sandbox
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
        """Raise ``NotRestored`` when the agent would begin without its memory."""
        self._restored = receipt
        for warning in receipt.warnings:
            LOG.warning("Restore of %s: %s", self.memory, warning)
        if receipt.outcome is RestoreOutcome.INCOMPLETE and self._plan.require_restore:
            raise NotRestored(receipt)

    def _end(self, receipt: ExportReceipt, trouble: BaseException | None) -> None:
        """Raise ``NotSaved`` when the head did not move; note it on ``trouble`` if there is any already."""
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
        # Into the log too: what ends a process, such as SystemExit, shows no notes.
        LOG.warning("The memory was not saved: %s [%s]", problem.message, problem.code)
        if trouble is None:
            raise problem
        trouble.add_note(
            f"Besides, the memory was not saved: {problem.message} [{problem.code}] {problem.hint}".rstrip()
        )
