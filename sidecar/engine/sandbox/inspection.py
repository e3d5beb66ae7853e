"""Inspect what is in a sandbox, with one command that changes nothing there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from sidecar.engine.core import CountedSandbox, Engine
from sidecar.engine.sandbox.dialogue import Count, ProgramAnswer, ask
from sidecar.engine.sandbox.presence import connect
from sidecar.errors import ProgramFailed
from sidecar.layouts import choose_layouts, list_other_roots
from sidecar.policy.limits import Limits
from sidecar.ports import Sandbox
from sidecar.program.sqlite.backup import SIZEABLE
from sidecar.receipts import Skip

MOSTLY_FREE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """A number of files and their bytes."""

    files: Count = 0
    bytes: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenDatabase:
    """A database in a sandbox: its size, and how much of it is free pages or log."""

    path: str
    place: str
    bytes: Count
    free_bytes: Count = 0
    log_bytes: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenSet:
    """Files that are kept or dropped together, and their tier."""

    tier: str
    paths: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRoot:
    """A root as it is in a sandbox: what an export would take of it, and what not."""

    name: str
    layout: str
    folder: str
    tiers: dict[str, Amount]
    version: str = ""
    """The version of the program whose memory it is."""
    sets: list[SeenSet] = field(default_factory=list)
    databases: list[SeenDatabase] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)
    """Processes that have a database open."""
    keyed: dict[str, str] = field(default_factory=dict)
    skipped: list[Skip] = field(default_factory=list)
    skipped_more: Count = 0
    reasons: dict[str, Count] = field(default_factory=dict)
    problem: str = ""
    """Why an export would be refused."""

    @property
    def total(self) -> Amount:
        amounts = self.tiers.values()
        return Amount(files=sum(each.files for each in amounts), bytes=sum(each.bytes for each in amounts))

    @property
    def advice(self) -> list[str]:
        """Sentences about what a person should know or do."""
        words = [f"{self.name}: an export would be refused: {self.problem}"] if self.problem else []
        for row in self.databases:
            if row.bytes >= SIZEABLE and row.free_bytes > row.bytes * MOSTLY_FREE:
                share = f"{row.path} is mostly free pages ({row.free_bytes / row.bytes:.0%} of it)"
                wait = f" once nobody has it open ({', '.join(self.workers)})" if self.workers else ""
                words.append(f"{share}: run VACUUM on it{wait}, and exports get that much smaller.")
        return words


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAnswer(ProgramAnswer):
    """The answer to an inspection."""

    statuses: ClassVar[frozenset[str]] = frozenset({"looked", "no-python", "error"})

    projects: list[str] = field(default_factory=list)
    found: list[SeenRoot] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    """Limits that the search for projects has reached."""


async def inspect_sandbox(
    engine: Engine, sandbox: Sandbox, layouts: Sequence[str], projects: Sequence[str] | None
) -> list[SeenRoot]:
    """Return the roots of these layouts (of all, if none is named) that are in a sandbox. Raise a ``SidecarError``."""
    question = {
        "do": "look",
        "memory": "",
        "snapshot": "",
        "layouts": [layout.for_sandbox() for layout in choose_layouts(layouts, engine.layouts)],
        "projects": None if projects is None else list(projects),
        "elsewhere": list_other_roots(choose_layouts(layouts, engine.layouts), engine.layouts),
    }
    counted = CountedSandbox(sandbox, engine.progress)
    await connect(counted)
    answer, _ = await ask(counted, question, LookAnswer, timeout=engine.timing.command)
    if answer.status == "no-python":
        raise ProgramFailed(
            "There is no python3 in this sandbox to look with.",
            code="no-python",
            hint="Exports and restores work all the same, by sh and tar.",
        )
    if answer.warnings:
        raise ProgramFailed(" ".join(answer.warnings), code="project-missing", hint="Name folders that are there.")
    return answer.found


def describe_near_totals(roots: Sequence[SeenRoot], limits: Limits) -> list[str]:
    """Return a warning for each limit that all roots together come near to, or exceed."""
    have = {"bytes": sum(root.total.bytes for root in roots), "files": sum(root.total.files for root in roots)}
    return [
        f"{have[key] * 100 // most} % of limits.{key} is used: {have[key]:,} of {most:,}."
        for key in have
        if have[key] >= (most := getattr(limits, key)) * limits.warn_at
    ]
