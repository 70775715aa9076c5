"""Counters, gauges and histograms in Prometheus' text format. One registry for each server: nothing is global."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_SECONDS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)
_FROM_STATUS = {
    "running": "Requests in the running batch",
    "waiting": "Requests that wait for admission",
    "held": "Requests that a pause holds",
    "number": "Commit number of the weights served",
    "num_blocks": "KV blocks",
    "num_free_blocks": "KV blocks that are free",
    "num_steps": "Steps since the start",
    "num_sampled_tokens": "Tokens sampled since the start",
    "num_reprefilled_tokens": "Tokens computed again since the start, after a commit or a preemption",
}
"""Keys of the engine's status that become gauges, read at each scrape."""


class ServerMetrics:
    """What one server counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        with_registry: dict[str, Any] = {"registry": self.registry}
        self.http_requests = Counter(
            "midstream_http_requests", "HTTP requests answered", ["route", "status"], **with_registry
        )
        self.http_seconds = Histogram(
            "midstream_http_request_seconds",
            "Time to the end of the answer",
            ["route"],
            buckets=_SECONDS,
            **with_registry,
        )
        self.started = Counter("midstream_generations_started", "Prompts handed to the engine", **with_registry)
        self.finished = Counter(
            "midstream_generations_finished", "Completions ended, by finish reason", ["reason"], **with_registry
        )
        self.reattached = Counter(
            "midstream_requests_reattached", "Requests served by a running or stored one", **with_registry
        )
        self.vanished = Counter(
            "midstream_requests_vanished", "Requests aborted because their client left", **with_registry
        )
        self.prompt_tokens = Counter("midstream_prompt_tokens", "Prompt tokens of finished requests", **with_registry)
        self.output_tokens = Counter("midstream_output_tokens", "Output tokens of finished requests", **with_registry)
        self._gauges = {
            key: Gauge(f"midstream_engine_{key}", text, **with_registry) for key, text in _FROM_STATUS.items()
        }
        self._paused = Gauge("midstream_engine_paused", "1 from the start of a pause to resume", **with_registry)
        self._up = Gauge("midstream_engine_up", "1 while the engine lives", **with_registry)

    def text(self, status: Mapping[str, Any] | None) -> bytes:
        """The exposition; ``status`` is the engine's, None where it is dead."""
        self._up.set(status is not None)
        for key, gauge in self._gauges.items():
            value = (status or {}).get(key)
            if isinstance(value, (int, float)):
                gauge.set(value)
        if status is not None:
            self._paused.set(status.get("state") in ("pausing", "paused"))
        return generate_latest(self.registry)
