"""Why the head does not have what a sandbox had after an export of it, and what to do. Saved means that the head has it."""

from __future__ import annotations

from dataclasses import dataclass

from sidecar.errors import SidecarError
from sidecar.policy.limits import EMPTY, REASONS
from sidecar.receipts import ExportOutcome, ExportReceipt

LIMIT = "limit-"


@dataclass(frozen=True, slots=True)
class SaveProblem:
    kind: str
    """The same for as long as it is the same trouble: an outcome with the reason's code, or an error's code."""
    message: str
    hint: str = ""

    @property
    def words(self) -> str:
        return f"{self.kind}: {self.message}"


def find_save_problem(receipt: ExportReceipt) -> SaveProblem | None:
    """What keeps the sandbox's memory from being saved; ``None`` when it is, or when there is none and never was."""
    if receipt.is_saved:
        return None
    reason = receipt.reason
    if reason is not None and reason.code == EMPTY and receipt.head is None:
        return None
    if receipt.outcome is ExportOutcome.UNCHANGED:
        return SaveProblem(
            "behind",
            f"Nothing is new in the sandbox, but the head has moved on to {receipt.head} since it was restored.",
            "Restore into it again before going on: what grows out of an earlier head is kept beside the present one.",
        )
    code = reason.code if reason else receipt.outcome.value
    kind = receipt.outcome.value if code == receipt.outcome.value else f"{receipt.outcome.value} ({code})"
    return SaveProblem(kind, reason.message if reason else "No reason was given.", _advise(receipt, code))


def build_save_problem(problem: SidecarError) -> SaveProblem:
    """The same for an export that failed."""
    return SaveProblem(problem.code, problem.message, problem.hint)


def _advise(receipt: ExportReceipt, code: str) -> str:
    if code.startswith(LIMIT):
        return "Raise the limit in the config's [limits], or make the memory smaller. Nothing was kept; the sandbox has it."
    advice = []
    if receipt.snapshot is not None:
        head = f" {receipt.head}" if receipt.head else ""
        advice += [
            f"It is kept as {receipt.snapshot}: `memory-sidecar diff {receipt.memory}{head} {receipt.snapshot}` shows what is"
            f" different, `memory-sidecar accept {receipt.memory} {receipt.snapshot}` makes it the head."
        ]
    if code in REASONS:
        advice += [f"An export with --allow {code} lets it be."]
    return " ".join(advice) or "Nothing was kept; the sandbox has it."
