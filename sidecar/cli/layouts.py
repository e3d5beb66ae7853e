"""``layouts``: which files count as memory; and the report of what an export of a sandbox would take."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sidecar.cli.result import Result, Table, format_size
from sidecar.engine import Engine
from sidecar.engine.sandbox.inspection import advise, sum_tiers
from sidecar.format.protocol import SeenRoot
from sidecar.host.text import format_count
from sidecar.layouts import Layout, RootSpec, choose_layouts

SHOWN = 12


async def run_layouts(engine: Engine, args: argparse.Namespace) -> Result:
    """Run ``layouts``: list the layouts, with details of those named."""
    layouts = choose_layouts(args.names, engine.layouts)
    table = Table(
        ("LAYOUT", "WHERE", "DATABASES", "OPTIONS"),
        [
            (
                layout.name,
                "; ".join(_describe_place(root) for root in layout.roots),
                ", ".join(layout.databases),
                ", ".join(f"{name} (on)" if name in layout.chosen else name for name in layout.options),
            )
            for layout in layouts
        ],
    )
    details = [line for layout in layouts for line in _describe_layout(layout)] if args.names else []
    return Result({"layouts": [_build_document(layout) for layout in layouts]}, [table, *details])


def _describe_place(root: RootSpec) -> str:
    if root.project:
        return f"{root.below}/ in each project" if root.below else "each project"
    return " or ".join([*(f"${name}" for name in root.env), *root.paths]) + (
        f", in {root.below}/" if root.below else ""
    )


def _describe_layout(layout: Layout) -> list[str]:
    rows = {
        "keeps": layout.keep,
        "databases": layout.databases,
        "never": layout.never,
        "secrets": layout.secrets,
        "rotating": layout.rotating,
        "filtered": layout.filters,
        **{tier: patterns for tier, patterns in asdict(layout.tiers).items() if patterns},
        "together": [" + ".join(coupled.paths) for coupled in layout.coupled],
        "options": [f"{name}: {option.about}" for name, option in layout.options.items()],
    }
    return ["", layout.name, *(f"  {name}: {', '.join(values)}" for name, values in rows.items() if values)]


def _build_document(layout: Layout) -> dict[str, Any]:
    options = {
        name: {"about": option.about, "keep": option.keep, "on": name in layout.chosen}
        for name, option in layout.options.items()
    }
    kept = (
        "name",
        "roots",
        "keep",
        "databases",
        "never",
        "secrets",
        "careful",
        "rotating",
        "filters",
        "tiers",
        "coupled",
        "pointers",
    )
    document = asdict(layout)
    return {**{name: document[name] for name in kept}, "options": options}


def describe_roots(roots: Sequence[SeenRoot]) -> list[str | Table]:
    """Describe for people what an export of a sandbox would take."""
    if not roots:
        return ["No memory of any known layout was found there."]
    words: list[str | Table] = [
        Table(
            ("LAYOUT", "FOLDER", "FILES", "BYTES", "HOT", "WARM", "COLD", "REBUILDABLE"),
            [
                (
                    f"{root.layout} {root.version}".strip(),
                    root.folder,
                    f"{sum_tiers(root).files:,}",
                    format_size(sum_tiers(root).bytes),
                    *(format_size(root.tiers[tier].bytes) for tier in ("hot", "warm", "cold", "rebuildable")),
                )
                for root in roots
            ],
        )
    ]
    for root in roots:
        for row in root.databases:
            log = f", {format_size(row.log_bytes)} in its log" if row.log_bytes else ""
            words.append(f"{row.path}: {format_size(row.bytes)}, {format_size(row.free_bytes)} of it free pages{log}")
        words += [f"{root.name}: {process} has it open" for process in root.workers]
        if root.reasons:
            counts = ", ".join(f"{format_count(count, 'path')} {reason}" for reason, count in root.reasons.items())
            shown = ", ".join(f"{skip.path} ({skip.reason})" for skip in root.skipped[:SHOWN])
            words.append(f"{root.name}: left out {counts}. {shown}{' …' if len(root.skipped) > SHOWN else ''}")
        words += advise(root)
    return words


def build_roots_document(roots: Sequence[SeenRoot]) -> list[dict[str, Any]]:
    """Return the roots of a sandbox for JSON output."""
    return [{**asdict(root), "total": asdict(sum_tiers(root)), "advice": advise(root)} for root in roots]
