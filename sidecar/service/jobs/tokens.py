"""Look at the named tokens now and then: sandboxes that the holder of one attached are looked after until they are
detached, also when the token is no longer good, and that is said."""

from __future__ import annotations

import structlog

from sidecar.errors import BadConfig
from sidecar.service.access.callers import Callers
from sidecar.service.attachments.attachment import Attachment
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.core import Sidecar
from sidecar.service.jobs.scheduler import Jobs

EVERY = 10.0
NOTE = (
    "The token {by}, by which it was attached, is revoked or has expired: the service goes on looking after it, by its own"
    " right, until it is detached."
)


class TokenJob:
    """Tells of attachments whose token is no longer good, and of a file of tokens that cannot be used."""

    def __init__(self, sidecar: Sidecar, keeper: Keeper, callers: Callers, jobs: Jobs) -> None:
        self._sidecar = sidecar
        self._keeper = keeper
        self._callers = callers
        self._jobs = jobs
        self._log = structlog.get_logger("sidecar")

    def start(self) -> None:
        self._sidecar.find_named = self._callers.find_named
        self._callers.on_problem = self._publish_problem
        self._jobs.every("look at tokens", EVERY, self.look)

    async def look(self) -> None:
        """Read the tokens again if they have changed, and compare the attachments of this service with them."""
        self._callers.reload()
        for attachment in self._keeper.looked_after:
            note = self._describe(attachment)
            if note == attachment.note:
                continue
            await self._keeper.set_note(attachment.place, note)
            if note:
                about = {"memory": attachment.memory, "sandbox": attachment.sandbox}
                self._log.warning("looked after although its token is no longer good", caller=attachment.by, **about)
                self._sidecar.events.publish("attachment.token-ended", **about, by=attachment.by, note=note)

    def _describe(self, attachment: Attachment) -> str:
        """Return the note for an attachment: empty unless a named token that is no longer good attached it."""
        if not attachment.by:
            return ""
        holder = self._callers.find_named(attachment.by)
        good = holder is not None and holder.covers(attachment.memory)
        return "" if good else NOTE.format(by=attachment.by)

    def _publish_problem(self, problem: BadConfig) -> None:
        self._sidecar.events.publish("access.tokens-refused", error=problem.as_dict())
