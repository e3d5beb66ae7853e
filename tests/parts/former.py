"""As it was before: what an earlier version let through, so that a test can see what a later one makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from sidecar import ids
from sidecar.engine import heads
from sidecar.store import repository


@contextmanager
def former_ids() -> Iterator[None]:
    """Any id that could be a key was an id for a new memory."""
    with (
        mock.patch.object(repository, "check_new_memory_id", ids.check_memory_id),
        mock.patch.object(heads, "check_new_memory_id", ids.check_memory_id),
    ):
        yield
