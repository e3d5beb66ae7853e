"""Figures of the index for Prometheus, where there is one."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge


class IndexMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._success = Gauge(
            "memory_sidecar_index_last_success_timestamp_seconds",
            "When this service last found or made what can be searched up to date",
            registry=registry,
        )
        self._behind = Gauge(
            "memory_sidecar_index_behind",
            "Memories that have changed and cannot be searched as they are now",
            registry=registry,
        )
        self._failures = Counter(
            "memory_sidecar_index_failures", "Attempts to bring it up to date that failed", registry=registry
        )
        self._written = Counter("memory_sidecar_index_records_written", "Records written", registry=registry)
        self._removed = Counter("memory_sidecar_index_records_removed", "Records removed", registry=registry)

    def behind(self, memories: int) -> None:
        self._behind.set(memories)

    def count_failure(self) -> None:
        self._failures.inc()

    def written(self, written: int, removed: int) -> None:
        self._written.inc(written)
        self._removed.inc(removed)

    def note_success(self) -> None:
        self._success.set(time.time())
