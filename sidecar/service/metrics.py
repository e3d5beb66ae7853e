"""Metrics for Prometheus."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sidecar.host.values import dataclass
from sidecar.ids import build_memory_key
from sidecar.models.answers import Event
from sidecar.service.event_types import ACCEPTED, DELETED

HOUR, DAY = 3600.0, 86_400.0
AGES = (60.0, 300.0, 900.0, HOUR, 6 * HOUR, DAY, 7 * DAY, 30 * DAY, float("inf"))
SIZES = (1e5, 1e6, 1e7, 1e8, 1e9, 1e10, float("inf"))
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(frozen=True, slots=True)
class Standing:
    """How a memory stands in the store, as a listing shows it."""

    written: float
    """When its head was written, in seconds since the epoch."""
    bytes: int
    """What it needs there."""


class Metrics:
    """Counts events, and keeps gauges on memories and operations."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._operations = Counter(
            "memory_sidecar_operations", "Exports and restores by outcome", ["kind", "outcome"], registry=self.registry
        )
        self._seconds = Histogram(
            "memory_sidecar_operation_seconds",
            "From the request to the receipt",
            ["kind"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._spared = Counter(
            "memory_sidecar_restores_spared",
            "Restores that left a sandbox as it was, or kept what no snapshot had: kept, saved_first, set_aside",
            ["how"],
            registry=self.registry,
        )
        self._stored = Counter(
            "memory_sidecar_stored_bytes", "Bytes that exports added to the store", registry=self.registry
        )
        self._ages = Gauge(
            "memory_sidecar_memories_by_age",
            "Memories whose head was written at most so many seconds ago, by whichever service; seen within ten minutes, or"
            " longer in a store of very many objects",
            ["up_to"],
            registry=self.registry,
        )
        self._oldest = Gauge(
            "memory_sidecar_oldest_head_age_seconds",
            "Since the head was written that is the oldest of all; GET /v1/memories?order=oldest names them",
            registry=self.registry,
        )
        self._saved_ages = Gauge(
            "memory_sidecar_memories_by_saved_age",
            "Memories that this service saw saved at most so many seconds ago: the head had all that their sandbox had",
            ["up_to"],
            registry=self.registry,
        )
        self._sizes = Gauge(
            "memory_sidecar_memories_by_size",
            "Memories that need at most so many bytes in the store; GET /v1/memories?order=largest names the largest",
            ["up_to"],
            registry=self.registry,
        )
        self._running = Gauge(
            "memory_sidecar_operations_running", "Exports and restores under way", registry=self.registry
        )
        self._waiting = Gauge(
            "memory_sidecar_operations_waiting", "Exports and restores in the queue", registry=self.registry
        )
        self._attached = Gauge("memory_sidecar_attachments", "Sandboxes looked after", registry=self.registry)
        self._at_risk = Gauge(
            "memory_sidecar_attachments_at_risk",
            "Attached sandboxes that are lost or overdue, or whose last export failed or did not become the head",
            registry=self.registry,
        )
        self._pending = Gauge(
            "memory_sidecar_attachments_pending",
            "Those among them whose last export is kept, and waits for a review",
            registry=self.registry,
        )
        self._missing = Gauge(
            "memory_sidecar_sandboxes_missing",
            "Memories that are to have a living sandbox ([[start]]) and have none",
            registry=self.registry,
        )
        self._started = Counter(
            "memory_sidecar_sandboxes_started",
            "Sandboxes that were created because a memory is to have one",
            registry=self.registry,
        )
        self._failed_starts = Counter(
            "memory_sidecar_sandboxes_not_started",
            "Attempts to create such a sandbox that failed, or that the budget did not allow",
            registry=self.registry,
        )
        self._noticed = Counter(
            "memory_sidecar_sandboxes_noticed",
            "Sandboxes that name their memory ([[watch]]): complete, empty or kept; reader; refused; failed (each attempt)",
            ["outcome"],
            registry=self.registry,
        )
        self._listings = Counter(
            "memory_sidecar_listings",
            "Requests for a list of a provider's sandboxes ([[watch]])",
            registry=self.registry,
        )
        self._hooks = Counter(
            "memory_sidecar_hooks",
            "Webhooks of providers: accepted; ignored, since they came before or are about no sandbox; refused",
            ["outcome"],
            registry=self.registry,
        )
        self._lost = Counter(
            "memory_sidecar_sandboxes_lost", "Sandboxes that ended within a conversation", registry=self.registry
        )
        self._ended = Counter(
            "memory_sidecar_sandboxes_ended", "Sandboxes that ended after their export", registry=self.registry
        )
        self._forgotten = Counter(
            "memory_sidecar_snapshots_forgotten", "Snapshots that retention rules let go", registry=self.registry
        )
        self._accepted = Counter(
            "memory_sidecar_accepted",
            "Snapshots that became the head although guards objected: they came repeatedly, or a person accepted them",
            ["reason", "by"],
            registry=self.registry,
        )
        self._drills = Counter(
            "memory_sidecar_drills",
            "Snapshots brought back into a scratch sandbox",
            ["outcome"],
            registry=self.registry,
        )
        self._drilled = Gauge(
            "memory_sidecar_last_good_drill_timestamp_seconds",
            "When this service last brought a snapshot back whole",
            registry=self.registry,
        )
        self._refused = Counter(
            "memory_sidecar_refused_calls",
            "Calls refused for want of a valid token (401) or of the right (403), or because the token calls too often (429)",
            ["status"],
            registry=self.registry,
        )
        self._known: dict[str, Standing] = {}
        """By folder in the store."""
        self._seen: dict[str, float] = {}

    def count(self, event: Event) -> None:
        """Update the metrics from an event."""
        if event.type == "sandbox.lost":
            self._lost.inc()
        if event.type == "sandbox.started":
            self._started.inc()
        if event.type == "sandbox.missing":
            self._failed_starts.inc()
        if event.type == "sandbox.noticed":
            self._noticed.labels("reader" if event.details.get("reader") else event.details.get("outcome", "")).inc()
        if event.type == "sandbox.not-restored":
            self._noticed.labels("failed" if event.details.get("failures") else "refused").inc()
        if event.type == "sandbox.ended":
            self._ended.inc()
        if event.type == "retention.forgot":
            self._forgotten.inc(int(event.details.get("snapshots", 0)))
        if event.type == DELETED:
            self._forget(event.memory)
        if event.type == ACCEPTED:
            for reason in event.details.get("reasons", ()):
                self._accepted.labels(reason, event.details.get("by", "")).inc()
        kind, _, outcome = event.type.partition(".")
        if kind == "drill":
            self._drills.labels(outcome).inc()
            if outcome == "passed":
                self._drilled.set(datetime.fromisoformat(event.at).timestamp())
        if kind not in ("export", "restore"):
            return
        self._operations.labels(kind, outcome).inc()
        self._seconds.labels(kind).observe(float(event.details.get("seconds", 0)))
        for how in ("kept", "saved_first", "set_aside"):
            if event.details.get(how):
                self._spared.labels(how).inc()
        self._stored.inc(int(event.details.get("packed_bytes", 0)))
        at = datetime.fromisoformat(event.at).timestamp()
        if kind == "export" and event.details.get("saved"):
            self._seen[event.memory] = at
        if kind == "export" and outcome == "committed":
            folder = build_memory_key(event.memory)
            before = self._known.get(folder, Standing(0.0, 0))
            self._known[folder] = Standing(at, before.bytes + int(event.details.get("packed_bytes", 0)))

    def count_listing(self) -> None:
        self._listings.inc()

    def count_hook(self, outcome: str) -> None:
        self._hooks.labels(outcome).inc()

    def count_refusal(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    @property
    def standings(self) -> Mapping[str, Standing]:
        """How the memories stand, by their folders in the store."""
        return self._known

    def rank(self, order: str) -> list[str]:
        """Return the folders of all memories, the "oldest" or the "largest" first."""
        if order == "oldest":
            return sorted(self._known, key=lambda folder: self._known[folder].written)
        return sorted(self._known, key=lambda folder: -self._known[folder].bytes)

    def update(self, standings: Mapping[str, Standing]) -> None:
        """Set how all memories stand, from a listing of the store."""
        self._known = dict(standings)

    def _forget(self, memory: str) -> None:
        self._known.pop(build_memory_key(memory), None)
        self._seen.pop(memory, None)

    def text(
        self, *, running: int, waiting: int, attached: int, at_risk: int, missing: int = 0, pending: int = 0
    ) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self._attached.set(attached)
        self._at_risk.set(at_risk)
        self._pending.set(pending)
        self._missing.set(missing)
        self._running.set(running)
        self._waiting.set(waiting)
        now = time.time()
        ages = [now - one.written for one in self._known.values()]
        _set_distribution(self._ages, AGES, ages)
        _set_distribution(self._saved_ages, AGES, [now - moment for moment in self._seen.values()])
        _set_distribution(self._sizes, SIZES, [one.bytes for one in self._known.values()])
        self._oldest.set(max(0.0, *ages, 0.0))
        return generate_latest(self.registry)


def _set_distribution(gauge: Gauge, bounds: Sequence[float], values: Iterable[float]) -> None:
    """Set how many of these values are at most as large as each bound."""
    ordered = sorted(values)
    for bound in bounds:
        gauge.labels(f"{bound:g}" if bound < float("inf") else "+Inf").set(bisect_right(ordered, bound))
