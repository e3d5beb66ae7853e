"""Why a sandbox is not saved after an export, and what to do about it. Saved means that the head has everything the
sandbox has."""

from __future__ import annotations

from sidecar.errors import SidecarError
from sidecar.host.values import dataclass
from sidecar.policy.limits import EMPTY, REASONS
from sidecar.policy.review import PENDING
from sidecar.receipts import ExportOutcome, ExportReceipt

LIMIT = "limit-"


@dataclass(frozen=True, slots=True)
class SaveProblem:
    """Why a sandbox is not saved."""

    kind: str
    """Stays the same as long as the problem does: an outcome with the reason's code, or an error's code."""
    message: str
    hint: str = ""

    @property
    def words(self) -> str:
        return f"{self.kind}: {self.message}"


def find_save_problem(receipt: ExportReceipt) -> SaveProblem | None:
    """Return why the sandbox's memory is not saved; ``None`` if it is, or if there is no memory and never was."""
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
    return SaveProblem(kind, reason.headline if reason else "No reason was given.", _advise(receipt, code))


def build_save_problem(problem: SidecarError) -> SaveProblem:
    """Return the problem for an export that failed with an error."""
    return SaveProblem(problem.code, problem.message, problem.hint)


def _advise(receipt: ExportReceipt, code: str) -> str:
    """Return what a person can do about an export that is not the head."""
    if code.startswith(LIMIT):
        return "Raise the limit in the config's [limits], or make the memory smaller. Nothing was kept; the sandbox has it."
    if code == PENDING:
        return (
            f"It is kept as {receipt.snapshot}, and waits: `memory-sidecar accept {receipt.memory} {receipt.snapshot}` makes it"
            " the head, `decline` keeps it from ever becoming it."
        )
    advice = []
    if receipt.snapshot is not None and not receipt.may_be_accepted:
        return f"It is kept as {receipt.snapshot}. The decision stays: to go on from the head, restore it into this sandbox."
    if receipt.snapshot is not None:
        head = f" {receipt.head}" if receipt.head else ""
        advice += [
            f"It is kept as {receipt.snapshot}: `memory-sidecar diff {receipt.memory}{head} {receipt.snapshot}` shows what is"
            f" different, `memory-sidecar accept {receipt.memory} {receipt.snapshot}` makes it the head."
        ]
    if code in REASONS:
        advice += [f"An export with --allow {code} lets it be."]
    return " ".join(advice) or "Nothing was kept; the sandbox has it."
