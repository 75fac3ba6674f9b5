"""The engine's own metrics, read from its counters at scrape time so that they cannot drift.

What there is to see is declared in `telemetry.metrics`, once; here is only where each number comes
from. Every series of a closed label list exists from the start, at zero, so that a rate sees the
first event. Seconds are microsecond counts divided at the last moment: the sum of step_seconds over
its phases is the engine's wall time.

For scrapers and autoscalers that were made for vLLM there are its names too, where the meaning is
the same: an addition by switch, never a second count.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from typing_extensions import override

from backends.engine.engine import BATCH_BUCKETS, Engine
from telemetry import metrics as declared
from telemetry.metrics import Kind, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

assert declared.ENGINE_BATCH_SIZE.buckets == BATCH_BUCKETS, "counted as they are declared"


class EngineMetrics(Collector):
    """A registry with one collector: this engine."""

    def __init__(self, engine: Engine, *, model: str, with_vllm_names: bool = False) -> None:
        self._engine = engine
        self._with_vllm_names = with_vllm_names
        self._model = model
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    @override
    def collect(self) -> Iterator[Family]:
        for metric, read in _READS.items():
            yield self._family(metric, read(self._engine))
        yield self._batch_size()
        if self._with_vllm_names:
            yield from self._vllm()

    def _vllm(self) -> Iterator[Family]:
        """https://docs.vllm.ai/en/latest/usage/metrics/, names and labels as there."""
        engine, stats = self._engine, self._engine.stats
        label = ["model_name"]
        for name, text, value in (
            ("num_requests_running", "Sequences that hold KV blocks.", float(engine.running)),
            ("num_requests_waiting", "Sequences not started.", float(engine.waiting)),
            ("kv_cache_usage_perc", "KV blocks in use, 0 to 1.", _kv_usage(engine)),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=label)
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, count in (
            ("prompt_tokens", "Prompt tokens computed.", stats.tokens["prefill"]),
            ("generation_tokens", "Tokens generated.", stats.generated),
            ("num_preemptions", "Sequences that lost their KV blocks.", stats.preemptions),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=label)
            counter.add_metric([self._model], count)
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success", "Finished choices.", labels=[*label, "finished_reason"]
        )
        for theirs, ours in (("stop", "stop"), ("length", "length"), ("abort", "cancelled")):
            success.add_metric([self._model, theirs], stats.finishes[ours])
        yield success

    def _family(self, metric: Metric, value: "float | Mapping[str, float]") -> Family:
        """A number, or one for each value of the label beside `model`."""
        make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family: CounterMetricFamily | GaugeMetricFamily = make(
            metric.name, metric.help, labels=metric.label_names
        )
        if not isinstance(value, Mapping):
            family.add_metric([self._model], value)
            return family
        _, label = metric.labels
        unknown = value.keys() - set(label.values)
        assert not unknown, f"{metric.name} does not declare {unknown}"
        for name in label.values:
            family.add_metric([self._model, name], value.get(name, 0.0))
        return family

    def _batch_size(self) -> HistogramMetricFamily:
        metric, stats = declared.ENGINE_BATCH_SIZE, self._engine.stats
        edges = [*map(floatToGoString, metric.buckets), "+Inf"]
        counts = accumulate(stats.batch_sizes)
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.label_names)
        family.add_metric(
            [self._model], list(zip(edges, counts, strict=True)), stats.batch_size_sum
        )
        return family


def _seconds(microseconds: Mapping[str, int]) -> dict[str, float]:
    return {str(phase): us / 1e6 for phase, us in microseconds.items()}


def _kv_usage(engine: Engine) -> float:
    pool = engine.pool
    return pool.used / pool.total if pool else 0.0


_READS: dict[Metric, Callable[[Engine], float | Mapping[str, float]]] = {
    declared.ENGINE_STEP_SECONDS: lambda e: _seconds(e.step_clock.by_phase_us),  # type: ignore[arg-type]  # its keys are a Literal
    declared.ENGINE_CHARGED_SECONDS: lambda e: _seconds(dict(e.stats.charged_us)),
    declared.ENGINE_TOKENS: lambda e: dict(e.stats.tokens),
    declared.ENGINE_REQUESTS: lambda e: dict(e.stats.jobs),
    declared.ENGINE_RUNNING: lambda e: e.running,
    declared.ENGINE_WAITING: lambda e: e.waiting,
    declared.ENGINE_WAITING_TOKENS: lambda e: e.waiting_tokens,
    declared.ENGINE_KV_USAGE: _kv_usage,
    declared.ENGINE_PREEMPTIONS: lambda e: e.stats.preemptions,
    declared.ENGINE_SWAPPED_BLOCKS: lambda e: {
        "out": e.swap.saved if e.swap else 0,
        "in": e.swap.loaded if e.swap else 0,
    },
    declared.ENGINE_SWAP_USED: lambda e: e.swap.used if e.swap else 0,
    declared.ENGINE_SWAP_LOST: lambda e: e.swap.lost if e.swap else 0,
    declared.ENGINE_KV_BLOCK_SECONDS: lambda e: _seconds(dict(e.stats.kv_block_us)),
    declared.ENGINE_TOO_LATE: lambda e: e.stats.too_late,
    declared.ENGINE_PREFIX_QUERIES: lambda e: e.stats.prefix_queried,
    declared.ENGINE_SPEC_DRAFTED: lambda e: e.stats.drafted,
    declared.ENGINE_SPEC_ACCEPTED: lambda e: e.stats.accepted,
    declared.ENGINE_PREFIX_HITS: lambda e: e.stats.prefix_hit,
}
