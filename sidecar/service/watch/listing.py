"""Walks through what a provider lists: the newest sandboxes again and again, all of them now and then, a page at a time.

The SDKs cannot ask for sandboxes that have a certain key in their metadata, only for one value of it. So all are listed, the
newest first, and what is new is picked out here. In a burst, and every ``WALK_SECONDS``, the pages after the first are
read too, by turns with the first.
"""

from __future__ import annotations

import time

from sidecar.ports import ListedSandbox, SandboxProvider

WALK_SECONDS = 60.0


class Listing:
    """The sandboxes of one provider, as they were listed."""

    def __init__(self, provider: SandboxProvider) -> None:
        self._provider = provider
        self._seen: dict[str, int] = {}
        """Each sandbox, with the number of the walk that it was listed in last."""
        self._walk = 1
        self._cursor = ""
        """Where the walk goes on; empty: none is under way."""
        self._newest_next = True
        self._walked = float("-inf")
        self.gone: set[str] = set()
        """What the last walk did not find, and an earlier one had."""

    @property
    def walking(self) -> bool:
        return bool(self._cursor)

    @property
    def known(self) -> set[str]:
        """What exists, as far as was listed."""
        return set(self._seen)

    async def list_next(self) -> tuple[list[ListedSandbox], bool]:
        """Send one request. Return the sandboxes of that page, and whether all were listed with it since the last walk:
        then ``gone`` says which are not there any more."""
        walked = bool(self._cursor) and not self._newest_next
        page = await self._provider.list(self._cursor if walked else "")
        found = list(page.sandboxes)
        burst = bool(found) and not any(one.ref in self._seen for one in found)
        for one in found:
            self._seen[one.ref] = self._walk
        self._newest_next = walked
        if walked:
            self._cursor = page.next
        elif not self._cursor and page.next and (burst or time.monotonic() - self._walked > WALK_SECONDS):
            self._cursor, self._newest_next = page.next, False
        whole = not page.next and (walked or not self._cursor)
        if whole:
            self._end_walk()
        return found, whole

    def _end_walk(self) -> None:
        """Forget what was not listed in this walk or the one before: what is created or ends meanwhile moves the pages,
        so one walk may miss a sandbox."""
        self.gone = {ref for ref, walk in self._seen.items() if walk < self._walk - 1}
        for ref in self.gone:
            del self._seen[ref]
        self._walk += 1
        self._walked = time.monotonic()
