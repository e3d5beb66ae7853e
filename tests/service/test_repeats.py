"""What is logged again and again is counted, and nothing is counted away."""

from __future__ import annotations

import logging

import pytest

from sidecar.service import logs
from sidecar.service.logs import KINDS, REST, LogThrottle

pytestmark = pytest.mark.usefixtures("forked_programs")


def test_a_few_of_a_kind_pass_in_a_minute_and_the_rest_is_counted() -> None:
    now = 0.0
    repeats = LogThrottle(most=3, seconds=60, clock=lambda: now)
    assert [repeats.may_pass("a") for _ in range(10)] == [True] * 3 + [False] * 7
    assert repeats.may_pass("b")
    assert repeats.take_counts() == []
    now = 61.0
    assert repeats.take_counts() == [("a", 7)]
    assert repeats.take_counts() == []
    assert repeats.may_pass("a")
    assert [repeats.may_pass("a") for _ in range(5)].count(False) == 3
    assert repeats.take_counts(all_of_them=True) == [("a", 3)]


def test_kinds_without_end_do_not_fill_the_memory() -> None:
    repeats = LogThrottle(most=1, seconds=60, clock=lambda: 0.0)
    passed = [repeats.may_pass(f"kind {number}") for number in range(KINDS + 500)]
    assert passed.count(True) == KINDS + 1
    assert repeats.take_counts(all_of_them=True) == [(REST, 499)]


def test_two_errors_under_one_message_are_both_seen() -> None:
    def record(problem: type[Exception]) -> logging.LogRecord:
        try:
            raise problem("x")
        except Exception as raised:
            told = (type(raised), raised, raised.__traceback__)
            return logging.LogRecord("some.library", logging.ERROR, "", 0, "Exception in application %s", ("x",), told)

    passed = [logs._may_pass(record(kind)) for kind in (*[KeyError] * 9, OSError, KeyError)]
    assert passed == [True] * 3 + [False] * 6 + [True, False]
    logs._repeats.take_counts(all_of_them=True)
