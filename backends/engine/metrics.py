"""The engine's own metrics, read from its counters at scrape time so that they cannot drift.

Names: FinOps catalogue, prefix `meterline_engine_`. Seconds are microsecond counts divided at the
last moment: the sum of step_seconds over its phases is the engine's wall time.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from typing_extensions import override

from backends.engine.engine import BATCH_BUCKETS, Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class EngineMetrics(Collector):
    """A registry with one collector: this engine."""

    def __init__(self, engine: Engine, *, model: str) -> None:
        self._engine = engine
        self._model = model
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    @override
    def collect(self) -> Iterator[Metric]:
        engine, stats = self._engine, self._engine.stats
        yield self._counter(
            "meterline_engine_step_seconds",
            "Wall time since the engine started, by what it was doing.",
            {phase: us / 1e6 for phase, us in engine.step_clock.by_phase_us.items()},
        )
        yield self._counter(
            "meterline_engine_charged_seconds",
            "Step time charged to requests, by phase; sums to the time of all steps.",
            {phase: us / 1e6 for phase, us in sorted(stats.charged_us.items())},
        )
        yield self._counter(
            "meterline_engine_tokens",
            "Tokens computed, by phase.",
            dict(sorted(stats.tokens.items())),
        )
        yield self._counter(
            "meterline_engine_requests",
            "Requests that ended, by how: done, failed, cancelled.",
            dict(sorted(stats.jobs.items())),
            label="ending",
        )
        yield self._batch_size()
        yield self._plain(
            "preemptions",
            "Sequences that gave their blocks back and were computed again.",
            stats.preemptions,
        )
        yield self._plain(
            "prefix_cache_queries_tokens", "Prompt tokens looked up.", stats.prefix_queried
        )
        yield self._plain(
            "prefix_cache_hits_tokens", "Prompt tokens found, not computed.", stats.prefix_hit
        )
        pool = engine.pool
        yield self._gauge("running_requests", "Sequences in the running batch.", engine.running)
        yield self._gauge("waiting_requests", "Sequences that wait for a place.", engine.waiting)
        yield self._gauge(
            "waiting_tokens", "Tokens of waiting sequences to compute.", engine.waiting_tokens
        )
        yield self._gauge(
            "kv_cache_usage_ratio",
            "Blocks of the KV pool that are held.",
            pool.used / pool.total if pool else 0.0,
        )

    def _counter(
        self, name: str, text: str, values: dict[str, float], *, label: str = "phase"
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=["model", label])
        for phase, value in values.items():
            family.add_metric([self._model, phase], value)
        return family

    def _plain(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"meterline_engine_{name}", text, labels=["model"])
        family.add_metric([self._model], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"meterline_engine_{name}", text, labels=["model"])
        family.add_metric([self._model], value)
        return family

    def _batch_size(self) -> HistogramMetricFamily:
        stats = self._engine.stats
        buckets, so_far = [], 0
        for edge, count in zip([*map(str, BATCH_BUCKETS), "+Inf"], stats.batch_sizes, strict=True):
            so_far += count
            buckets.append((edge, so_far))
        family = HistogramMetricFamily(
            "meterline_engine_batch_size", "Sequences per step.", labels=["model"]
        )
        family.add_metric([self._model], buckets, stats.batch_size_sum)
        return family
