"""What stands between an export and the head beside guards and limits: checks of one's own, and a person's review.

Neither is ever passed by repetition or by force: a check that fails is put right, or the config is, or a person accepts
the snapshot; what waits for a review is accepted or declined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from pathlib import Path

from sidecar.errors import BadConfig
from sidecar.format.patterns import compile_patterns
from sidecar.host.sections import format_setting
from sidecar.host.values import dataclass
from sidecar.policy.validation import check_reachable, find_mistake

CHECK_FAILED, DECLINED, PENDING = "check-failed", "declined", "pending"
REVIEW_REASONS = (CHECK_FAILED, DECLINED, PENDING)
"""Reasons for which an export is not the head although no guard objects. None of them can be allowed."""
LONGEST_TIMEOUT = 3600.0
LONGEST_NAME = 100
MOST_CHECKS = 50
ALL = "**"


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """Which memories a person looks at before they change."""

    required: list[str] = field(default_factory=list)
    """Patterns of memories ("acme/*") whose exports wait until somebody accepts them."""

    def covers(self, memory: str) -> bool:
        """Return whether the exports of a memory wait for a review."""
        return bool(self.required) and compile_patterns(self.required).match(memory) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCheck:
    """A command that looks at a snapshot before it becomes the head."""

    command: list[str]
    """The program and its arguments; no shell. It gets what changed on stdin (as `diff --json` has it), and runs in a
    folder with the snapshot's files. Anything but exit code 0 keeps the snapshot from becoming the head."""
    timeout: float = 60.0
    """Seconds after which it is ended, and has failed."""
    memories: list[str] = field(default_factory=lambda: [ALL])
    """Patterns of the memories that it is for."""
    name: str = ""
    """What receipts call it. Default: the name of the program."""

    @property
    def title(self) -> str:
        return self.name or Path(self.command[0]).name

    def covers(self, memory: str) -> bool:
        """Return whether the check is for this memory."""
        return compile_patterns(self.memories).match(memory) is not None


def check_review(review: Review) -> Review:
    """Return the settings. Raise ``BadConfig`` for a pattern that no memory matches."""
    _check_patterns(review.required, ("review", "required"))
    return review


def check_export_check(check: ExportCheck, at: tuple[str | int, ...]) -> ExportCheck:
    """Return one of [[checks]]. Raise ``BadConfig`` if it could never run."""
    if not check.command or not all(check.command) or any("\0" in word for word in check.command):
        hint = 'Write command = ["/usr/local/bin/check-memory", "--strict"].'
        raise BadConfig(
            "A check's command must be a list of a program and its arguments.", hint=hint, at=(*at, "command")
        )
    if not 0 < check.timeout <= LONGEST_TIMEOUT:
        message = f"A check's timeout must be above 0 and at most {LONGEST_TIMEOUT:.0f} seconds."
        raise BadConfig(message, hint="Write timeout = 60.", at=(*at, "timeout"))
    if not check.memories:
        raise BadConfig("A check's memories is empty: it would never run.", hint="Leave it out.", at=(*at, "memories"))
    _check_patterns(check.memories, (*at, "memories"))
    if len(check.name) > LONGEST_NAME:
        message = f"A check's name may have at most {LONGEST_NAME} characters."
        raise BadConfig(message, at=(*at, "name"))
    return check


def check_distinct(checks: Sequence[ExportCheck]) -> None:
    """Raise ``BadConfig`` if there are too many checks, or two have the same name: a receipt could not tell which failed."""
    if len(checks) > MOST_CHECKS:
        raise BadConfig(f"There are {len(checks)} [[checks]]; {MOST_CHECKS} are the most.", at=("checks",))
    for place, check in enumerate(checks):
        if any(check.title == other.title for other in checks[:place]):
            message = f"Two [[checks]] are called {check.title!r}."
            raise BadConfig(message, hint="Give one another name.", at=("checks", place))


def _check_patterns(patterns: Sequence[str], at: tuple[str | int, ...]) -> None:
    """Raise ``BadConfig`` for a pattern that no memory matches."""
    for pattern in patterns:
        if mistake := find_mistake(pattern):
            raise BadConfig(f"{format_setting(at)} has {pattern!r}, which is no pattern: {mistake}.", at=at)
        try:
            check_reachable([pattern], (str(at[0]),))
        except BadConfig:
            raise BadConfig(f"{format_setting(at)} has {pattern!r}, which no memory matches.", at=at) from None
