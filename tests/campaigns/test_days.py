"""Random days of a conductor: nothing is lost on the everyday path, and whatever is lost is called lost.

Each is repeated alone by its number: ``pytest -m "slow or not slow" tests/campaigns/test_days.py -k "this_process and 17"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.parts.conductor_days import Day
from tests.parts.forked_program import Forks, forks
from tests.parts.mortals import InProcesses, InThisProcess, make_mortal, quiet_logs
from tests.parts.providers import Provider
from tests.parts.services import TOKEN

STEPS, STEPS_ELSEWHERE, STEPS_OF_PROCESSES = 16, 9, 8
QUICK_STEPS = 8
QUICK_DAYS = 3


@pytest.fixture(scope="session")
def program() -> Iterator[Forks]:
    with forks() as made:
        yield made


def days(first: int, last: int, quick: int) -> list[object]:
    """The numbers of days, of which the first few are in the default run."""
    return [pytest.param(seed, marks=() if seed < first + quick else pytest.mark.slow) for seed in range(first, last)]


@pytest.mark.parametrize("seed", days(0, 240, QUICK_DAYS))
def test_a_day_in_this_process(
    seed: int,
    tmp_path: Path,
    provider_of: Callable[[str], Provider],
    program: Forks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEMORY_SIDECAR_TOKEN", TOKEN)
    make_mortal(monkeypatch, program)
    with quiet_logs(tmp_path / "log"):
        Day(seed, tmp_path, InThisProcess(), provider_of("local")).live(QUICK_STEPS if seed < QUICK_DAYS else STEPS)


@pytest.mark.parametrize("name", ["e2b", "daytona"])
@pytest.mark.parametrize("seed", days(300, 315, 0))
def test_a_day_at_a_provider(
    seed: int,
    name: str,
    tmp_path: Path,
    provider_of: Callable[[str], Provider],
    program: Forks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEMORY_SIDECAR_TOKEN", TOKEN)
    make_mortal(monkeypatch, program)
    with quiet_logs(tmp_path / "log"):
        Day(seed, tmp_path, InThisProcess(), provider_of(name)).live(STEPS_ELSEWHERE)


@pytest.mark.parametrize("seed", days(400, 430, 1))
def test_a_day_of_processes(
    seed: int, tmp_path: Path, provider_of: Callable[[str], Provider], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMORY_SIDECAR_TOKEN", TOKEN)
    Day(seed, tmp_path, InProcesses(tmp_path), provider_of("local")).live(4 if seed == 400 else STEPS_OF_PROCESSES)
