"""A warm export passes so many of our modules and no more: who follows it through the code has to read that many."""

from __future__ import annotations

from benchmarks.modules import count

MOST_OUTSIDE = 57
MOST_TOGETHER = 84
"""Raise them only for what a plain memory needs; what is asked for by settings is passed by those who set it."""


def test_a_warm_export_passes_few_modules() -> None:
    found = count()
    outside, inside = set(found["outside"]), set(found["inside"])
    assert "sidecar/engine/exports/steps.py" in outside, "nothing was counted"
    assert "sidecar/program/capture/export.py" in inside, "nothing was counted in the sandbox"
    assert len(outside) <= MOST_OUTSIDE, sorted(outside)
    assert len(outside | inside) <= MOST_TOGETHER, sorted(outside | inside)
