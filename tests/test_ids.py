"""Names: checked once, and keys that can never lead out of the store."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.errors import BadMemoryId
from sidecar.ids import Keys, check_memory_id, is_snapshot_id, memory_key, new_snapshot_id, snapshot_time


@pytest.mark.parametrize(
    "bad", ["", ".", "..", "../x", "a/../b", "/a", "a/", "a//b", " ", "a/ /b", "a\nb", "a\0b", "x" * 201, "\ud800"]
)
def test_ids_that_are_refused(bad: str) -> None:
    with pytest.raises(BadMemoryId):
        check_memory_id(bad)


@pytest.mark.parametrize(
    "good", ["conductor", "acme/agent-7", "🦊", "Ünï côde", "a" * 200, "..a", "CON", "a.b_c-d", "%2e%2e"]
)
def test_ids_that_are_accepted_make_safe_keys(good: str) -> None:
    key = memory_key(good)
    assert "/" not in key
    assert key not in (".", "..")
    assert len(key.encode()) < 128
    assert key == key.lower()


@given(st.text(min_size=1, max_size=200), st.text(min_size=1, max_size=200))
def test_different_ids_never_share_a_key(one: str, other: str) -> None:
    try:
        keys = memory_key(one), memory_key(other)
    except BadMemoryId:
        return
    assert (keys[0] == keys[1]) == (one == other)
    assert all(part not in ("", ".", "..") for part in Keys.of(one).head.split("/"))


def test_snapshot_ids_sort_by_time_even_when_the_clock_goes_back() -> None:
    now = datetime(2026, 11, 16, 10, 0, tzinfo=UTC)
    first = new_snapshot_id(now)
    second = new_snapshot_id(now - timedelta(hours=1), after=first)
    assert second > first
    assert snapshot_time(first) == now


def test_nothing_comes_after_the_last_moment_there_is() -> None:
    now = datetime(2026, 11, 16, 10, 0, tzinfo=UTC)
    assert snapshot_time(new_snapshot_id(now, after="99991231T235959999Z-ffffffff")) == now


@pytest.mark.parametrize("text", ["20261399T000000000Z-00000000", "20260230T000000000Z-00000000", "2026", ""])
def test_an_id_holds_a_time_that_there_is(text: str) -> None:
    assert not is_snapshot_id(text)
