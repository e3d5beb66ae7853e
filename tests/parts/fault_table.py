"""The table of faults: what came of each, at each step, at each provider."""

from __future__ import annotations

from collections.abc import Iterable

Row = list[object]
"""Provider, verb, step, trouble, whether it went on, outcome."""


def table_of(rows: Iterable[Row]) -> list[str]:
    found: dict[tuple[str, str, str], dict[tuple[str, bool], str]] = {}
    for provider, verb, step, trouble, always, said in rows:
        found.setdefault((str(verb), str(step), str(trouble)), {})[str(provider), bool(always)] = str(said)
    columns = [("e2b", False), ("e2b", True), ("daytona", False), ("daytona", True)]
    heads = [
        "operation",
        "step",
        "fault",
        *(f"{name}, {'every time' if always else 'once'}" for name, always in columns),
    ]
    lines = [heads, *([*key, *(said.get(column, "") for column in columns)] for key, said in sorted(found.items()))]
    widths = [max(len(line[number]) for line in lines) for number in range(len(heads))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
