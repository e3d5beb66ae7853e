"""Metrics for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sidecar.models.answers import Event
from sidecar.service.event_types import ACCEPTED, DELETED

SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


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
        self._newest = Gauge(
            "memory_sidecar_newest_snapshot_age_seconds",
            "Since a memory's head was made, by this service or another; what others do is seen within ten minutes",
            ["memory"],
            registry=self.registry,
        )
        self._saved = Gauge(
            "memory_sidecar_saved_age_seconds",
            "Since this service last saw a memory saved: the head had all that its sandbox had",
            ["memory"],
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
        self._made: dict[str, float] = {}
        self._seen: dict[str, float] = {}

    def count(self, event: Event) -> None:
        """Update the metrics from an event."""
        if event.type == "sandbox.lost":
            self._lost.inc()
        if event.type == "sandbox.started":
            self._started.inc()
        if event.type == "sandbox.missing":
            self._failed_starts.inc()
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
            self._made[event.memory] = at

    def count_refusal(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def newest(self, made: Mapping[str, datetime]) -> None:
        """Set when each memory's head was made, from the store. Memories that are not in the store any more are
        removed."""
        for memory in self._made.keys() - made.keys():
            self._forget(memory)
        self._made = {memory: moment.timestamp() for memory, moment in made.items()}

    def _forget(self, memory: str) -> None:
        """Remove the gauges of a memory."""
        for known, shown in ((self._made, self._newest), (self._seen, self._saved)):
            if known.pop(memory, None) is not None:
                with suppress(KeyError):  # not rendered yet
                    shown.remove(memory)

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
        for known, shown in ((self._made, self._newest), (self._seen, self._saved)):
            for memory, moment in known.items():
                shown.labels(memory).set(max(0.0, time.time() - moment))
        return generate_latest(self.registry)
