"""Inspect what is in a sandbox, with one command that changes nothing there."""

from __future__ import annotations

from collections.abc import Sequence

from sidecar.engine.core import CountedSandbox, Engine
from sidecar.engine.sandbox.delivery import build_rules
from sidecar.engine.sandbox.dialogue import Asking, ask
from sidecar.engine.sandbox.presence import connect
from sidecar.errors import ProgramFailed
from sidecar.format.protocol import Amount, LookAnswer, LookQuestion, SeenRoot
from sidecar.layouts import choose_layouts
from sidecar.policy.limits import Limits
from sidecar.ports import Sandbox
from sidecar.program.sqlite.backup import SIZEABLE

MOSTLY_FREE = 0.5


def sum_tiers(root: SeenRoot) -> Amount:
    """Return what an export would take of a root."""
    amounts = root.tiers.values()
    return Amount(sum(each.files for each in amounts), sum(each.bytes for each in amounts))


def advise(root: SeenRoot) -> list[str]:
    """Return sentences about what a person should know or do about a root."""
    words = [f"{root.name}: an export would be refused: {root.problem}"] if root.problem else []
    for row in root.databases:
        if row.bytes >= SIZEABLE and row.free_bytes > row.bytes * MOSTLY_FREE:
            share = f"{row.path} is mostly free pages ({row.free_bytes / row.bytes:.0%} of it)"
            wait = f" once nobody has it open ({', '.join(root.workers)})" if root.workers else ""
            words.append(f"{share}: run VACUUM on it{wait}, and exports get that much smaller.")
    return words


async def inspect_sandbox(
    engine: Engine, sandbox: Sandbox, layouts: Sequence[str], projects: Sequence[str] | None
) -> list[SeenRoot]:
    """Return the roots of these layouts (of all, if none is named) that are in a sandbox. Raise a ``SidecarError``."""
    question = LookQuestion(
        memory="",
        snapshot="",
        layouts=[layout.name for layout in choose_layouts(layouts, engine.layouts)],
        projects=None if projects is None else list(projects),
    )
    counted = CountedSandbox(sandbox, engine.progress, engine.may_use_folder)
    await connect(counted)
    how = Asking(timeout=engine.timing.command, rules=build_rules(engine.layouts.values()))
    answer, _ = await ask(counted, question, LookAnswer, how)
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
    totals = [sum_tiers(root) for root in roots]
    have = {"bytes": sum(total.bytes for total in totals), "files": sum(total.files for total in totals)}
    return [
        f"{have[key] * 100 // most} % of limits.{key} is used: {have[key]:,} of {most:,}."
        for key in have
        if have[key] >= (most := getattr(limits, key)) * limits.warn_at
    ]
