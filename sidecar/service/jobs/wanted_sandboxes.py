"""The job of wanted sandboxes: each memory with a ``[[start]]`` in the config has a living one, or it is said that it has none.

It creates nothing while a sandbox of the memory is looked after, whoever attached it, nor while one is paused: that one
can come back. Of several services one creates, by compare-and-swap of the memory's ``WantedState``; one that dies
half way is followed by another, which goes on under the same key. Every request to a provider is counted before it is sent.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import structlog

from sidecar.audit.lines import build_own_call
from sidecar.engine import RestoreRequest
from sidecar.errors import SidecarError, SwapLost
from sidecar.models.answers import Event, MissingSandbox
from sidecar.service.attachments.attachment import Attachment, CareOptions
from sidecar.service.attachments.keeper import Keeper
from sidecar.service.core import Sidecar
from sidecar.service.jobs.scheduler import Jobs
from sidecar.service.operations import Locks
from sidecar.service.settings import Start
from sidecar.service.starts import StartRequest, Starts
from sidecar.service.wanted_sandboxes import HeldState, WantedState, settle

HOUR = 3600.0
LONGEST_PAUSE = 900.0
"""The longest pause between two creations that fail, where the budget allows more."""
SOON = 0.5
"""Seconds after which it is looked again when a sandbox was found gone."""


class WantedJob:
    """Keeps a living sandbox for each of these memories."""

    def __init__(self, starts: Starts, keeper: Keeper, sidecar: Sidecar, jobs: Jobs, tables: Sequence[Start]) -> None:
        self._starts, self._keeper, self._sidecar, self._jobs = starts, keeper, sidecar, jobs
        self._tables = {table.memory: table for table in tables}
        self._begun: set[str] = set()
        """Memories whose table was compared with what the store knows."""
        self._missing: dict[str, MissingSandbox] = {}
        self._turns = Locks()
        self._log = structlog.get_logger("sidecar")
        sidecar.wanted = self

    def start(self) -> None:
        for memory, table in self._tables.items():
            self._jobs.every(f"wanted {memory}", table.check_every, self.look, memory, first=0)
        if self._tables:
            self._sidecar.events.subscribe(self._on_event)

    @property
    def missing(self) -> list[MissingSandbox]:
        """The memories that have no living sandbox, as this service sees it."""
        return [self._missing[memory] for memory in sorted(self._missing)]

    def _on_event(self, event: Event) -> None:
        """Look at once when a sandbox was found gone elsewhere."""
        if event.type in ("sandbox.lost", "sandbox.ended") and event.memory in self._tables:
            self._jobs.run_once(f"wanted soon {event.memory}", SOON, self.look, event.memory)

    async def look(self, memory: str) -> None:
        """Create a sandbox for a memory, if it has none and may have one now."""
        async with self._turns.held(memory):
            if self._sidecar.operations.stopping:
                return
            table = self._tables[memory]
            held = await self._read_state(table)
            if held is None:
                return  # another service is at it
            if held.state.stopped:
                self._missing.pop(memory, None)
                return
            living = await self._find_living(held.state)
            if living:
                self._missing.pop(memory, None)
                if held.state.sandbox != living or held.state.since or held.state.attempt:
                    await self._note(memory, living, held)
                return
            await self._create_if_allowed(table, held)

    async def _read_state(self, table: Start) -> HeldState | None:
        """Return what is known about a memory. A table that has changed since begins afresh, once for each service that
        starts with it; its budget does not. ``None`` if another service was faster."""
        held = await self._starts.wanted.read(table.memory)
        digest = _compute_digest(table)
        try:
            if held is None:
                held = await self._starts.wanted.write(WantedState(table.memory, digest), None)
            elif held.state.table != digest and table.memory not in self._begun:
                fresh = replace(settle(held.state, held.state.sandbox), table=digest, stopped=False)
                held = await self._starts.wanted.write(fresh, held)
        except SwapLost:
            return None
        self._begun.add(table.memory)
        return held

    async def _find_living(self, state: WantedState) -> str:
        """Return a sandbox of the memory that lives; empty if it has none for certain."""
        seen = [one for one in self._keeper.list_known() if one.memory == state.memory and one.looked_after]
        if seen and (living := await self._choose_living(seen)):
            return living
        # What was listed last may be seconds old: before one is created, the store is asked.
        rows = [one for one in await self._keeper.find_all() if one.memory == state.memory]
        if living := await self._choose_living([one for one in rows if one.looked_after]):
            return living
        over = {one.sandbox for one in rows}
        if state.sandbox and state.sandbox not in over and not await self._is_gone(state.memory, state.sandbox):
            return state.sandbox  # its caller detached it; it is the caller's now, and still the memory's sandbox
        return ""

    async def _choose_living(self, rows: Sequence[Attachment]) -> str:
        """Return the first sandbox that lives. Those that other services look after are asked for by them."""
        ours = {one.place for one in self._keeper.looked_after}
        for one in rows:
            if one.place not in ours or not await self._is_gone(*one.place):
                return one.sandbox
        return ""

    async def _is_gone(self, memory: str, ref: str) -> bool:
        """Whether a sandbox is gone for certain."""
        try:
            return await self._starts.is_gone(memory, ref)
        except SidecarError as problem:
            self._log.warning("cannot see whether it lives", memory=memory, sandbox=ref, **problem.as_dict())
            return False

    async def _create_if_allowed(self, table: Start, held: HeldState) -> None:
        """Create a sandbox, unless another service does, or it is too early, or the budget is used up."""
        state, now = held.state, time.time()
        if state.attempt and state.instance in await self._starts.list_others():
            return
        since, recent = state.since or now, [moment for moment in state.creations if moment > now - HOUR]
        if now < state.not_before:
            self._report(table, replace(state, since=since), again=True)
            return
        try:
            if len(recent) >= table.budget:
                words = f"{len(recent)} sandboxes were created for it within an hour, which is its budget."
                over = replace(state, creations=recent, since=since, problem=words, not_before=min(recent) + HOUR)
                held = await self._starts.wanted.write(over, held)
                self._report(table, held.state)
                return
            begun = replace(
                state,
                attempt=state.attempt or secrets.token_hex(16),
                instance=self._keeper.lease.instance,
                creations=[*recent, now],
                since=since,
            )
            held = await self._starts.wanted.write(begun, held)
        except SwapLost:
            return  # another service is at it
        await self._create(table, held)

    async def _create(self, table: Start, held: HeldState) -> None:
        state = held.state
        self._sidecar.trail.add(build_own_call("start", memory=table.memory), f"on {table.on}")
        try:
            answer = await self._starts.create_attached(build_request(table), f"wanted {state.attempt}")
        except SidecarError as problem:
            pause = min(table.backoff * 2 ** min(state.failures, 30), LONGEST_PAUSE)
            failed = replace(
                state,
                instance="",
                failures=state.failures + 1,
                not_before=time.time() + pause,
                problem=f"{problem.code}: {problem.message}",
            )
            try:
                await self._starts.wanted.write(failed, held)
            except SwapLost:
                return  # it was stopped, or another service took it over
            self._report(table, failed)
            return
        await self._note(table.memory, answer.attachment.sandbox, held)
        self._missing.pop(table.memory, None)
        seconds = round(time.time() - state.since, 1)
        about = {"memory": table.memory, "sandbox": answer.attachment.sandbox}
        self._log.warning("a wanted sandbox was created", **about, missing_seconds=seconds)
        snapshot = answer.restored.snapshot if answer.restored else None
        self._sidecar.events.publish("sandbox.started", **about, snapshot=snapshot, missing_seconds=seconds)

    async def _note(self, memory: str, sandbox: str, held: HeldState) -> None:
        """Note which sandbox a memory has. One that was created while the memory was stopped is stopped too."""
        try:
            await self._starts.wanted.write(settle(held.state, sandbox), held)
        except SwapLost:
            now = await self._starts.wanted.read(memory)
            if now is not None and now.state.stopped:
                await self._starts.stop(memory, sandbox, discard=True)

    def _report(self, table: Start, state: WantedState, *, again: bool = False) -> None:
        """Say that a wanted sandbox is missing: as a new event for each new problem, and in the log each time."""
        at = _format_time(state.not_before) if state.not_before else ""
        told = MissingSandbox(
            memory=table.memory, on=table.on, since=_format_time(state.since), problem=state.problem, next=at
        )
        before = self._missing.get(table.memory)
        self._missing[table.memory] = told
        if again and before is not None:
            return
        about: dict[str, Any] = {"problem": state.problem, "next": at, "failures": state.failures}
        self._log.critical("a wanted sandbox is missing", memory=table.memory, on=table.on, **about)
        self._sidecar.events.publish(
            "sandbox.missing",
            before is not None and before.problem == told.problem,
            memory=table.memory,
            on=table.on,
            since=told.since,
            **about,
        )


def build_request(table: Start) -> StartRequest:
    """Return what is asked for when a sandbox is created for a table of the config."""
    provider, _, template = table.on.partition(":")
    projects = None if table.projects is None else tuple(table.projects)
    return StartRequest(
        provider=provider,
        template=template,
        metadata=table.metadata,
        timeout=table.timeout,
        restore=RestoreRequest(memory=table.memory, projects=projects, must_exist=table.must_exist, announce=True),
        care=CareOptions(
            layouts=table.layouts,
            projects=table.projects,
            checkpoint_every=table.checkpoint_every,
            user=table.user,
            lasting=True,
        ),
    )


def _compute_digest(table: Start) -> str:
    return hashlib.sha256(json.dumps(asdict(table), sort_keys=True).encode()).hexdigest()


def _format_time(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")
