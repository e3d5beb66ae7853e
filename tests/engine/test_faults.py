"""Every trouble, at every step of an export and of a restore, at both providers.

Either the operation ends well after a few retries, or it fails with an error of ours, the head is where it was, the
sandbox's memory is as it was, and nothing of ours stays in it. ``make faults`` prints the table of all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parts.faulty import Case, cases, outcome

DEFAULT = ("cut half way", "truncated cleanly", "file shrunk while read")
"""One of each kind of trouble, once: the rest is for `make faults`."""


def _marked(case: Case) -> object:
    slow = case.always or case.trouble not in DEFAULT or (case.provider == "daytona" and case.trouble != DEFAULT[0])
    return pytest.param(case, id=str(case), marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("case", [_marked(case) for case in cases()])
async def test_trouble_ends_well_or_leaves_everything_as_it_was(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: pytest.FixtureRequest
) -> None:
    said = await outcome(case, tmp_path, monkeypatch)
    record_property("fault", [case.provider, case.verb, case.step, case.trouble, case.always, said])  # type: ignore[operator]
