"""The watch: notices sandboxes that name their memory, by listing them and by their provider's webhooks, and has each
taken in once.

Of several services one lists. What a webhook tells is looked at by the service that gets it. Both lead to ``Arrivals``,
where the store decides which service acts. Nothing is woken: a paused sandbox is left as it is until it runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict

import structlog

from sidecar.errors import MemoryNotWatched, SandboxGone, SidecarError
from sidecar.models.answers import Event, NoticedSandbox
from sidecar.ports import CHANGING, RUNNING, ListedSandbox
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.calls import set_current_call
from sidecar.service.core import Sidecar
from sidecar.service.event_types import DELETED
from sidecar.service.jobs.scheduler import Jobs
from sidecar.service.operations import Locks
from sidecar.service.settings import Watch
from sidecar.service.starts import Starts
from sidecar.service.watch.arrivals import BUSY, OVER, SOON, WHEN_LISTED, Arrivals, Verdict
from sidecar.service.watch.listing import Listing
from sidecar.service.watch.notifications import Notifications
from sidecar.service.watch.records import FAILED, READING, ListingClaim, Notice
from sidecar.service.watch.selection import Named, find_memory

PACE_SECONDS, LEAST_SECONDS = 1.1, 1.0
"""Between two listings, of whichever provider: fewer than one a second, also where one was late."""
CLEANING_SECONDS = 600.0
LONGEST_PAUSE = 60.0
"""The longest pause after listings that failed."""
MOST_WAITING = 10_000
"""How many sandboxes may wait to be looked at. What webhooks tell beyond that is left to the listing."""
MOST_SETTLED = 100_000
MOST_TRIES = 10
"""How often it is asked about one sandbox in vain, until it is listed or its provider tells of it again."""
MOST_SHOWN = 200
LISTING, WEBHOOK = "listing", "webhook"
REFUSED = "refused"


class _Provider:
    """One provider that is watched."""

    def __init__(self, name: str, tables: Sequence[Watch], listing: Listing, claim: ListingClaim) -> None:
        self.name, self.tables, self.listing, self.claim = name, tables, listing, claim
        self.every = min((table.list_every for table in tables if table.list_every), default=0.0)
        self.hooks = Notifications(name, [os.environ.get(table.secret_env, "") for table in tables])
        self.due = 0.0
        self.cleaned = time.monotonic()
        self.failures = 0
        self.problem = ""
        """The code of why it could not be listed."""
        self.claimed, self.claim_due = False, 0.0


class Watcher:
    """Watches providers for sandboxes that name their memory."""

    def __init__(self, starts: Starts, keeper: Keeper, sidecar: Sidecar, jobs: Jobs, tables: Sequence[Watch]) -> None:
        self._sidecar, self._keeper, self._starts, self._jobs = sidecar, keeper, starts, jobs
        self._arrivals = Arrivals(sidecar, keeper, starts)
        self._providers = {name: self._open(name, tables) for name in dict.fromkeys(one.provider for one in tables)}
        self._settled: dict[str, str] = {}
        """Sandboxes about which nothing is left to do, with the memory that they named."""
        self._waiting: dict[str, Named | None] = {}
        """Sandboxes that are to be looked at; ``None``: the provider is asked first what they name."""
        self._busy: set[str] = set()
        """Sandboxes that are being looked at."""
        self._tries: dict[str, int] = {}
        """How often it was tried in vain to see about a sandbox."""
        self._shown: dict[str, NoticedSandbox] = {}
        self._listed = 0.0
        self._turns = Locks()
        self._few = asyncio.Semaphore(2 * sidecar.settings.concurrency)
        self._log = structlog.get_logger("sidecar")
        sidecar.watcher = self

    def _open(self, name: str, tables: Sequence[Watch]) -> _Provider:
        own = [table for table in tables if table.provider == name]
        digest = hashlib.sha256(json.dumps([asdict(one) for one in own], sort_keys=True).encode()).hexdigest()
        claim = ListingClaim(self._sidecar.engine.repository.store, self._keeper.lease, digest)
        return _Provider(name, own, Listing(self._starts.open_provider(name)), claim)

    def start(self) -> None:
        if any(one.every for one in self._providers.values()):
            self._jobs.every("watch", PACE_SECONDS, self.list_one, first=0)
        if self._providers:
            self._sidecar.events.subscribe(self._on_event)

    @property
    def noticed(self) -> list[NoticedSandbox]:
        """Sandboxes that name a memory and are not looked after, as far as this service saw: readers, and those that were
        refused or could not be restored into."""
        return list(self._shown.values())[-MOST_SHOWN:]

    @property
    def problem(self) -> str:
        """Which providers cannot be listed, and why; empty if all can."""
        return ", ".join(f"{one.name}: {one.problem}" for one in self._providers.values() if one.problem)

    def find_hooks(self, provider: str) -> Notifications | None:
        """Return the webhooks of a provider; ``None`` if none are expected."""
        found = self._providers.get(provider)
        return found.hooks if found is not None and found.hooks.expected else None

    def look_soon(self, ref: str) -> None:
        """Look at a sandbox that something happened to."""
        if len(self._waiting) < MOST_WAITING:
            self._plan(ref, None, 0)

    async def find_notice(self, ref: str) -> Notice | None:
        """Return what the store knows about a sandbox. Raise a ``SidecarError``."""
        held = await self._arrivals.notices.read(ref)
        return held.record if held is not None else None

    def _on_event(self, event: Event) -> None:
        if event.type == DELETED:
            self._jobs.run_once(f"writer of {event.memory}", 0, self._arrivals.writers.remove, event.memory)

    # By listing

    async def list_one(self) -> None:
        """List a page of the provider whose turn it is, if any."""
        now = time.monotonic()
        due = [one for one in self._providers.values() if one.every and (one.due <= now or one.listing.walking)]
        if not due or self._sidecar.operations.stopping or now - self._listed < LEAST_SECONDS:
            return
        provider = min(due, key=lambda one: one.due)
        provider.due = now + provider.every
        if not await self._is_lister(provider, now):
            return
        self._listed = time.monotonic()
        self._sidecar.metrics.count_listing()
        try:
            found, whole = await provider.listing.list_next()
        except SidecarError as problem:
            self._note_failure(provider, problem)
            return
        if provider.problem:
            self._log.warning("sandboxes are listed again", provider=provider.name)
        provider.problem, provider.failures = "", 0
        for sandbox in found:
            self._consider(provider, sandbox)
        if whole:
            await self._end_walk(provider, {one.ref for one in found})

    async def _is_lister(self, provider: _Provider, now: float) -> bool:
        if now >= provider.claim_due:
            provider.claimed, provider.claim_due = False, now + self._keeper.lease.renew_every
            provider.claimed = await provider.claim.take()
        return provider.claimed and self._keeper.lease.held

    def _note_failure(self, provider: _Provider, problem: SidecarError) -> None:
        """Say that a provider cannot be listed, once for each new reason, and ask more and more rarely."""
        provider.failures += 1
        provider.due = time.monotonic() + min(provider.every * 2.0 ** min(provider.failures, 30), LONGEST_PAUSE)
        if provider.problem != problem.code:
            self._log.error("sandboxes cannot be listed", provider=provider.name, **problem.as_dict())
        provider.problem = problem.code

    def _consider(self, provider: _Provider, sandbox: ListedSandbox) -> None:
        """Plan to take in a listed sandbox, if it names a memory and is not settled."""
        named = self._find_named(provider, sandbox, LISTING)
        if named is None or self._settled.get(sandbox.ref) == named.memory:
            return
        if sandbox.state != RUNNING or sandbox.ref in self._waiting or sandbox.ref in self._busy:
            return  # one that is starting, or asleep, is listed again
        self._plan(sandbox.ref, named, 0)

    def _find_named(self, provider: _Provider, sandbox: ListedSandbox, via: str) -> Named | None:
        """Return which memory a sandbox is to have; ``None`` if none. What is refused is said once."""
        try:
            return find_memory(provider.tables, sandbox)
        except MemoryNotWatched as problem:
            if self._settled.get(sandbox.ref) != problem.message:
                self._settled[sandbox.ref] = problem.message
                self._log.warning("a sandbox names a memory that it may not have", **problem.as_dict())
                self._sidecar.events.publish(
                    "sandbox.not-restored", sandbox=sandbox.ref, via=via, failures=0, error=problem.as_dict()
                )
                self._show(sandbox.ref, "", REFUSED, problem.message, problem.hint)
            return None

    async def _end_walk(self, provider: _Provider, found: set[str]) -> None:
        """After all sandboxes were listed: see which are gone, and forget them."""
        for ref in provider.listing.gone:
            self._settled.pop(ref, None)
            self._shown.pop(ref, None)
        for attachment in self._keeper.looked_after:
            if attachment.sandbox in provider.listing.gone:
                self.look_soon(attachment.sandbox)
        now = time.monotonic()
        if now - provider.cleaned > CLEANING_SECONDS:
            provider.cleaned = now
            # By the store's clock, which may differ from this machine's.
            before = time.time() - CLEANING_SECONDS
            await self._arrivals.notices.remove_others(provider.name, provider.listing.known, before)

    # One sandbox

    def _plan(self, ref: str, named: Named | None, seconds: float) -> None:
        self._waiting[ref] = named
        self._jobs.run_once(f"notice {ref}", seconds, self._look, ref)

    async def _look(self, ref: str) -> None:
        set_current_call(None)  # it may have been planned while a webhook was answered
        async with self._turns.held(ref), self._few:
            if self._sidecar.operations.stopping or ref not in self._waiting:
                return
            named = self._waiting.pop(ref)
            via = LISTING if named is not None else WEBHOOK
            self._busy.add(ref)
            try:
                named = named or await self._ask(ref)
                verdict = await self._arrivals.take_in(named, via) if named is not None else None
                self._tries.pop(ref, None)
            except SidecarError as problem:
                verdict = self._put_off(ref, problem)
            finally:
                self._busy.discard(ref)
            if verdict is None:
                return
            self._note(ref, named, verdict)
            if verdict.seconds is not None and ref not in self._waiting:
                self._plan(ref, named, verdict.seconds)

    def _put_off(self, ref: str, problem: SidecarError) -> Verdict:
        """After the provider or the store did not say about a sandbox: plan when to ask again, more and more rarely."""
        tries = self._tries[ref] = self._tries.get(ref, 0) + 1
        if tries == 1:
            self._log.warning("cannot see what a sandbox is to have", sandbox=ref, **problem.as_dict())
        if tries > MOST_TRIES:
            del self._tries[ref]
            return WHEN_LISTED
        return Verdict(seconds=min(BUSY * 2.0 ** (tries - 1), LONGEST_PAUSE))

    async def _ask(self, ref: str) -> Named | None:
        """Ask the provider about a sandbox. Return which memory it is to have; ``None`` if none now."""
        provider = self._providers[ref.partition(":")[0]]
        sandbox = await self._starts.open_provider(provider.name).look(ref)
        if sandbox is None:
            self._settled.pop(ref, None)
            self._shown.pop(ref, None)
            await self._arrivals.forget(ref, SandboxGone(f"{ref} is gone: its provider does not know it (any more)."))
            return None
        if sandbox.state == CHANGING:
            self._plan(ref, None, SOON)
        if sandbox.state != RUNNING:
            return None
        named = self._find_named(provider, sandbox, WEBHOOK)
        return None if named is None or self._settled.get(ref) == named.memory else named

    def _note(self, ref: str, named: Named | None, verdict: Verdict) -> None:
        notice = verdict.notice
        if verdict.over and named is not None:
            if len(self._settled) >= MOST_SETTLED:
                self._settled.clear()  # the store knows them
            self._settled[ref] = named.memory
        if notice is not None and (notice.state in (READING, FAILED) or (notice.problem and notice.state not in OVER)):
            self._show(ref, notice.memory, notice.state, notice.problem, notice.hint)
        else:
            self._shown.pop(ref, None)

    def _show(self, ref: str, memory: str, state: str, problem: str, hint: str) -> None:
        self._shown.pop(ref, None)
        self._shown[ref] = NoticedSandbox(memory=memory, sandbox=ref, state=state, problem=problem, hint=hint)
        while len(self._shown) > MOST_SHOWN:
            del self._shown[next(iter(self._shown))]
