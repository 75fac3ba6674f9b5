"""Every metric of the product, declared once: name, type, unit, labels, buckets, help.

From the declarations come the instruments (on a registry that is passed in, never a global one),
`docs/reference/metrics.md`, and the names that dashboards and rules import: a renamed metric breaks
its panels at import. Values derive from the `RequestRecord`, so that metrics, spans and ledger can
be reconciled. Labels are bounded: from a closed list, or capped and then folded into `other`; they
never hold a key, a tenant, a user or text that a client chose.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from operator import attrgetter
from pathlib import Path

import click
from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client import Metric as Family
from prometheus_client.exposition import generate_latest as render_text
from prometheus_client.openmetrics.exposition import generate_latest as render_openmetrics
from prometheus_client.registry import Collector
from typing_extensions import override

from telemetry.record import FAILURES, SURFACE_PATHS, Attempt, Outcome, RequestRecord
from telemetry.usage import BUCKETS, UsageQuality, UsageSource

log = logging.getLogger("meterline.metrics")

OTHER = "other"  # what capped label values fold into
NONE = "none"  # no backend was asked
TEXT_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Instrument = Counter | Gauge | Histogram


class Kind(StrEnum):
    """What a metric is. An info metric is a gauge that is always 1 and speaks by its labels."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


class Label(Struct, frozen=True):
    """A dimension. Either `values` is the closed list, or `cap` is how many different values one
    process emits before it folds the rest into `other`. Neither: an info label, set by us."""

    name: str
    values: tuple[str, ...] = ()
    cap: int | None = None


class Metric(Struct, frozen=True, kw_only=True):
    """One declaration."""

    name: str
    kind: Kind
    unit: str  # requests, seconds, tokens, dollars, bytes, ratio, …: what one means
    help: str  # for times: from which instant to which
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    buckets_why: str = ""

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    @property
    def bucket(self) -> str:
        return f"{self.name}_bucket"

    @property
    def sum(self) -> str:
        return f"{self.name}_sum"

    @property
    def count(self) -> str:
        return f"{self.name}_count"

    @property
    def series(self) -> tuple[str, ...]:
        """The names that a scrape shows."""
        if self.kind is Kind.HISTOGRAM:
            return (self.bucket, self.sum, self.count)
        return (self.name,)

    def label(self, name: str) -> Label:
        """The label of that name. KeyError: this metric does not have it."""
        for label in self.labels:
            if label.name == name:
                return label
        raise KeyError(f"{self.name} has no label {name}")


# --- Labels ---------------------------------------------------------------------------------------

MODEL = Label("model", cap=200)  # the model that a backend was asked for; `none` if none was
PROVIDER = Label("provider", cap=30)
NODE = Label("node", cap=50)
ROUTE = Label("route", values=tuple(SURFACE_PATHS))
STREAM = Label("stream", values=("true", "false"))
OUTCOME = Label("outcome", values=tuple(Outcome))
COUNTS_AGAINST_SLO = Label("counts_against_slo", values=("true", "false"))
BACKEND = Label("backend", cap=50)
FAULT = Label("fault", values=("endpoint", "credential", "limit"))
REASON = Label("reason", values=("primary", "retry", "fallback", "hedge"))
TOKEN_TYPE = Label("token_type", values=BUCKETS)
USAGE_SOURCE = Label("usage_source", values=tuple(UsageSource))
INPUT_CLASS = Label("input_class", values=("0-1k", "1k-4k", "4k-16k", "16k-64k", "64k+"))
COMPONENT = Label(
    "component",
    values=(
        *("input", "cached", "cache_write", "output", "reasoning", "media"),
        *("gpu_prefill", "gpu_decode", "waste", OTHER),
    ),
)
ENGINE_PHASE = Label(
    "phase", values=("prefill", "decode", "mixed", "load", "warmup", "idle")
)  # of the step clock: their sum is the engine's wall time

CHARGED_PHASE = Label(
    "phase", values=("prefill", "decode", "sampling", "recompute", "spec_rejected")
)

LIMIT_SCOPE = Label("scope", values=("tenant", "key", "user", "route", "model"))
COUNTED = Label(
    "counted",
    values=(
        *("requests", "input_tokens", "output_tokens", "tokens"),
        *("concurrency", "spend", "budget"),
    ),
)

# Refusals for cause and the caller's own hang-ups say nothing about the service.
NOT_AGAINST_SLO = frozenset(
    {
        Outcome.CLIENT_ERROR,
        Outcome.RATE_LIMITED,
        Outcome.BUDGET_REFUSED,
        Outcome.CLIENT_DISCONNECT,
    }
)
assert not NOT_AGAINST_SLO & FAILURES

# --- Buckets, seconds -----------------------------------------------------------------------------

_DURATION = (
    *(0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0),
    *(120.0, 180.0, 300.0, 420.0, 600.0, 900.0, 1800.0),
)
_DURATION_WHY = (
    "the OpenTelemetry list ends at 82 s; reasoning models, and retries under a 600 s timeout, "
    "need 1800 s"
)
_TTFT = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0),
    *(2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0),
)
_TTFT_WHY = (
    "gen_ai.server.time_to_first_token from 5 ms, with the thresholds that SLOs use (1.5 s, 2 s) "
    "and up to 120 s, since a queue can be longer than the 10 s at which that list ends"
)
_TPOT = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5),
)
_TPOT_WHY = "gen_ai.server.time_per_output_token, refined below 30 ms where fast engines live"
_QUEUE = (
    *(0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0),
)
_QUEUE_WHY = "0 is a bound of its own: not queued at all. 600 s is the default total timeout"
_OVERHEAD = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
_OVERHEAD_WHY = "from half a millisecond: the gateway's own work is meant to stay in the first four"
_FSYNC = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)
_FSYNC_WHY = "100 µs is a fast NVMe, 10 ms a disk, above 50 ms admissions feel it"
_STORE_WAIT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
_STORE_WAIT_WHY = "half a millisecond is a local Redis, 50 ms all that a request waits"
_BATCH = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
_BATCH_WHY = "powers of two up to the largest batch that a config may ask for"

# --- Declarations ---------------------------------------------------------------------------------


def _counter(name: str, unit: str, text: str, *labels: Label) -> Metric:
    return Metric(name=name, kind=Kind.COUNTER, unit=unit, help=text, labels=labels)


def _gauge(name: str, unit: str, text: str, *labels: Label) -> Metric:
    return Metric(name=name, kind=Kind.GAUGE, unit=unit, help=text, labels=labels)


def _info(name: str, text: str, *labels: str) -> Metric:
    info_labels = tuple(Label(label) for label in labels)
    return Metric(name=name, kind=Kind.INFO, unit="info", help=text, labels=info_labels)


def _histogram(
    name: str, unit: str, text: str, buckets: tuple[float, ...], why: str, *labels: Label
) -> Metric:
    return Metric(
        name=name,
        kind=Kind.HISTOGRAM,
        unit=unit,
        help=text,
        labels=labels,
        buckets=buckets,
        buckets_why=why,
    )


REQUESTS = _counter(
    "meterline_requests_total",
    "requests",
    "Settled requests by how they ended. counts_against_slo is false for refusals for cause "
    "(client_error, rate_limited, budget_refused) and for client_disconnect.",
    *(ROUTE, MODEL, PROVIDER, STREAM, OUTCOME, COUNTS_AGAINST_SLO),
)
REQUEST_DURATION = _histogram(
    "meterline_request_duration_seconds",
    "seconds",
    "From the first byte of the request read to its settlement, after the last byte was handed to "
    "the client's socket. Requests closed by the sweeper are not in it.",
    *(_DURATION, _DURATION_WHY, ROUTE, MODEL, PROVIDER),
)
OVERHEAD = _histogram(
    "meterline_overhead_seconds",
    "seconds",
    "The gateway's own share of the duration: from the first byte read to the start of the first "
    "attempt, plus from the end of the last attempt to settlement. Pauses between attempts are "
    "the backends' time. Only requests that reached a backend.",
    *(_OVERHEAD, _OVERHEAD_WHY, ROUTE, MODEL, PROVIDER),
)
QUEUE_WAIT = _histogram(
    "meterline_queue_wait_seconds",
    "seconds",
    "From the backend accepting the request to its first step on it, as the backend itself "
    "reports it. Backends that do not report it are not in it.",
    *(_QUEUE, _QUEUE_WHY, MODEL, PROVIDER),
)
TIME_TO_FIRST_TOKEN = _histogram(
    "meterline_time_to_first_token_seconds",
    "seconds",
    "Streams only: from the first byte of the request read to the first content event from the "
    "attempt that was served. input_class is by input tokens (1k = 1,000).",
    *(_TTFT, _TTFT_WHY, MODEL, PROVIDER, INPUT_CLASS),
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "meterline_time_per_output_token_seconds",
    "seconds",
    "Complete streams of two or more tokens: mean per request, from the first content event to "
    "the end of the attempt, divided by output tokens - 1.",
    *(_TPOT, _TPOT_WHY, MODEL, PROVIDER),
)
IN_FLIGHT = _gauge(
    "meterline_in_flight_requests",
    "requests",
    "Requests read and not yet settled.",
    ROUTE,
)
OPEN_STREAMS = _gauge(
    "meterline_open_streams",
    "streams",
    "Streamed answers of which the first byte is sent and the last is not.",
    ROUTE,
)
ATTEMPTS = _counter(
    "meterline_attempts_total",
    "attempts",
    "Tries at a backend, by why they were made and how they ended.",
    *(PROVIDER, MODEL, REASON, OUTCOME),
)
CIRCUIT_STATE = _gauge(
    "meterline_circuit_state",
    "state",
    "Whether a backend may be asked: 0 closed, 1 half open (one request tries it), 2 open. fault: "
    "endpoint (failures, timeouts), credential (ours is refused), limit (one of its models is at "
    "its rate limit).",
    *(BACKEND, FAULT),
)
CIRCUIT_OPENED = _counter(
    "meterline_circuit_opened_total",
    "times",
    "Times that a circuit opened.",
    *(BACKEND, FAULT),
)
HEDGES = _counter(
    "meterline_hedges_total",
    "requests",
    "Second attempts beside a slow first one: won (it answered), lost (the first one did after "
    "all), failed (both did), no_budget (not sent: hedges had their share of tokens).",
    Label("result", values=("won", "lost", "failed", "no_budget")),
)
STREAM_DISCONNECTS = _counter(
    "meterline_stream_disconnects_total",
    "streams",
    "Streams that the client left before their end. policy: what became of the upstream call.",
    Label("policy", values=("abort",)),
    Label("before_first_token", values=("true", "false")),
)
TOKENS = _counter(
    "meterline_tokens_total",
    "tokens",
    "Tokens of all attempts in disjoint buckets: their sum is what was read and written. "
    "usage_source says who counted.",
    *(MODEL, PROVIDER, TOKEN_TYPE, USAGE_SOURCE),
)
COST = _counter(
    "meterline_cost_dollars_total",
    "dollars",
    "Cost of all attempts as priced at settlement, in floating point for graphs; the ledger has "
    "the exact figures. Unpriced usage is not in it, see meterline_unpriced_usage_total.",
    *(MODEL, PROVIDER, COMPONENT),
)
UNPRICED_USAGE = _counter(
    "meterline_unpriced_usage_total",
    "attempts",
    "Attempts with usage for which no price is known: their cost is missing, not zero.",
    *(PROVIDER, MODEL),
)
AMBIGUOUS_USAGE = _counter(
    "meterline_ambiguous_usage_total",
    "attempts",
    "Attempts whose usage report could not be cut into disjoint buckets without a guess.",
    *(PROVIDER, MODEL),
)
USAGE_CONFLICTS = _counter(
    "meterline_usage_conflicts_total",
    "events",
    "Usage events that reached the ledger twice with different content; the first is kept.",
    *(PROVIDER, MODEL),
)
LIMIT_REFUSALS = _counter(
    "meterline_limit_refusals_total",
    "requests",
    "Requests refused with 429 by a limit or a budget of ours; the one that frees last counts.",
    *(LIMIT_SCOPE, COUNTED),
)
LIMITS_DEGRADED = _gauge(
    "meterline_limits_degraded",
    "boolean",
    "1 while the shared counters are away and this process spends its slice of each limit.",
)
LIMIT_HOLDS = _gauge(
    "meterline_limit_holds",
    "requests",
    "Requests that hold a reservation on their limits: admitted, not yet settled.",
)
SLICE_ADMITTED = _counter(
    "meterline_limit_slice_admitted_total",
    "requests",
    "Requests admitted by this process's slice while the shared counters were away.",
)
STORE_WAIT = _histogram(
    "meterline_limits_store_wait_seconds",
    "seconds",
    "How long a request waited for the shared counters, all its questions together.",
    *(_STORE_WAIT, _STORE_WAIT_WHY),
)
BUDGET_OVERRUNS = _counter(
    "meterline_budget_overruns_total",
    "budgets",
    "Soft budgets that were overrun, once per budget and window.",
)
BUDGET_DOWNGRADES = _counter(
    "meterline_budget_downgrades_total",
    "requests",
    "Requests that a spent budget of mode downgrade sent to a cheaper model.",
)
STREAMS_CUT = _counter(
    "meterline_budget_streams_ended_total",
    "requests",
    "Streams without max_tokens that ended because no budget held more of them.",
)
ADMITTED = _counter(
    "meterline_admitted_total",
    "requests",
    "Intents written to the log: each is settled or swept exactly once.",
    NODE,
)
SETTLED = _counter(
    "meterline_settled_total",
    "requests",
    "Requests settled by the process that served them.",
    NODE,
)
SWEPT = _counter(
    "meterline_swept_total",
    "requests",
    "Requests that nobody settled (a crash): closed by the sweeper as abandoned, estimated.",
    NODE,
)
INTENTS_OPEN = _gauge(
    "meterline_intents_open",
    "requests",
    "Intents of this process that are neither settled nor swept.",
    NODE,
)
WAL_APPENDED = _counter(
    "meterline_wal_appended_records_total",
    "records",
    "Records appended to the write-ahead log.",
    NODE,
)
WAL_SHIPPED = _counter(
    "meterline_wal_shipped_records_total",
    "records",
    "Records of the write-ahead log that are in the database.",
    NODE,
)
WAL_PENDING_BYTES = _gauge(
    "meterline_wal_pending_bytes",
    "bytes",
    "Bytes of the write-ahead log that are not yet in the database.",
    NODE,
)
WAL_OLDEST_PENDING = _gauge(
    "meterline_wal_oldest_pending_timestamp_seconds",
    "timestamp",
    "When the oldest record that is not yet in the database was written, Unix time; the present "
    "when none is pending.",
    NODE,
)
WAL_FSYNC = _histogram(
    "meterline_wal_fsync_seconds",
    "seconds",
    "One group commit of the write-ahead log: from the write to the return of fsync.",
    *(_FSYNC, _FSYNC_WHY, NODE),
)
CONSERVATION_RESIDUAL = _gauge(
    "meterline_conservation_residual",
    "count",
    "What is left over in each conservation law; anything but 0 is an accounting error. requests: "
    "admitted - settled - swept - open; wal: records appended - shipped - pending; rollup: events "
    "and charges - their rollups.",
    Label("law", values=("requests", "wal", "rollup")),
)
DIRTY_HOURS = _gauge(
    "meterline_dirty_hours",
    "hours",
    "Hours with events that are newer than their rollup.",
)
ROLLUP_LAG = _gauge(
    "meterline_rollup_lag_seconds",
    "seconds",
    "From the arrival of the oldest event that is not rolled up to now; 0 when there is none.",
)
LABEL_FOLDS = _counter(
    "meterline_label_folds_total",
    "observations",
    "Observations whose label value was beyond the cap and was folded into `other`.",
    Label("label", values=("model", "provider", "node")),
)
UNAUTHENTICATED = _counter(
    "meterline_unauthenticated_requests_total",
    "requests",
    "Requests refused before anyone was identified.",
    Label("reason", values=("missing", "ambiguous", "wrong", "expired", "revoked", "suspended")),
)
CONFIG_RELOADS = _counter(
    "meterline_config_reloads_total",
    "reloads",
    "Reloads of the configuration file; rejected: the former one stays in force.",
    Label("result", values=("applied", "rejected")),
)
OBSERVER_ERRORS = _counter(
    "meterline_observer_errors_total",
    "errors",
    "Failures while recording what happened. The request itself is not touched by them.",
    Label("kind", values=("metrics", "spans", "log", "gauge")),
)
SPANS_EXPORTED = _counter(
    "meterline_spans_exported_total",
    "spans",
    "Spans that their destination has accepted.",
)
SPANS_DROPPED = _counter(
    "meterline_spans_dropped_total",
    "spans",
    "Spans lost: queue_full (the destination is slower than the traffic), export_failed, shutdown.",
    Label("reason", values=("queue_full", "export_failed", "shutdown")),
)
BUILD_INFO = _info(
    "meterline_build_info",
    "Always 1; which version runs, on which Python.",
    *("version", "python"),
)
PRICE_BOOK_INFO = _info(
    "meterline_price_book_info",
    "Always 1 for each price book in force.",
    *("book", "version", "sha"),
)

GATEWAY: tuple[Metric, ...] = (
    *(REQUESTS, REQUEST_DURATION, OVERHEAD, QUEUE_WAIT),
    *(TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN, IN_FLIGHT, OPEN_STREAMS, ATTEMPTS),
    *(CIRCUIT_STATE, CIRCUIT_OPENED, HEDGES),
    *(LIMIT_REFUSALS, LIMITS_DEGRADED, LIMIT_HOLDS, SLICE_ADMITTED, BUDGET_OVERRUNS),
    *(STORE_WAIT, BUDGET_DOWNGRADES, STREAMS_CUT),
    *(STREAM_DISCONNECTS, UNAUTHENTICATED, TOKENS, COST, UNPRICED_USAGE),
    *(AMBIGUOUS_USAGE, USAGE_CONFLICTS, ADMITTED, SETTLED, SWEPT, INTENTS_OPEN),
    *(WAL_APPENDED, WAL_SHIPPED, WAL_PENDING_BYTES, WAL_OLDEST_PENDING, WAL_FSYNC),
    *(CONSERVATION_RESIDUAL, DIRTY_HOURS, ROLLUP_LAG, LABEL_FOLDS, CONFIG_RELOADS),
    *(OBSERVER_ERRORS, SPANS_EXPORTED, SPANS_DROPPED, BUILD_INFO, PRICE_BOOK_INFO),
)

ENGINE_STEP_SECONDS = _counter(
    "meterline_engine_step_seconds_total",
    "seconds",
    "The engine's wall time by what it was spent on; the phases add up to the time since start. "
    "mixed: a step with both prompt and generated tokens.",
    *(MODEL, ENGINE_PHASE),
)
ENGINE_CHARGED_SECONDS = _counter(
    "meterline_engine_charged_seconds_total",
    "seconds",
    "Step time charged to requests; the phases add up to the time of all steps. recompute and "
    "spec_rejected are work that no token of an answer came from.",
    *(MODEL, CHARGED_PHASE),
)
ENGINE_REQUESTS = _counter(
    "meterline_engine_requests_total",
    "requests",
    "Requests that the engine is done with, by how they ended.",
    *(MODEL, Label("ending", values=("done", "failed", "cancelled"))),
)
ENGINE_TOKENS = _counter(
    "meterline_engine_tokens_total",
    "tokens",
    "Tokens computed: prefill is prompt tokens, decode is generated ones that were fed back, "
    "recompute is both again after a preemption.",
    *(MODEL, Label("phase", values=("prefill", "decode", "recompute"))),
)
ENGINE_BATCH_SIZE = _histogram(
    "meterline_engine_batch_size",
    "sequences",
    "Sequences in one step.",
    *(_BATCH, _BATCH_WHY, MODEL),
)
ENGINE_RUNNING = _gauge(
    "meterline_engine_running_requests", "requests", "Sequences that hold KV blocks.", MODEL
)
ENGINE_WAITING = _gauge(
    "meterline_engine_waiting_requests", "requests", "Sequences accepted and not started.", MODEL
)
ENGINE_WAITING_TOKENS = _gauge(
    "meterline_engine_waiting_tokens", "tokens", "Prompt tokens of the waiting sequences.", MODEL
)
ENGINE_KV_USAGE = _gauge(
    "meterline_engine_kv_cache_usage_ratio",
    "ratio",
    "KV blocks that sequences hold, of all, 0 to 1.",
    MODEL,
)
ENGINE_PREEMPTIONS = _counter(
    "meterline_engine_preemptions_total",
    "preemptions",
    "Sequences that lost their KV blocks to others: swapped out, or computed again.",
    MODEL,
)
ENGINE_SWAPPED_BLOCKS = _counter(
    "meterline_engine_swapped_blocks_total",
    "blocks",
    "KV blocks of preempted sequences that were moved out to memory or file, and back in.",
    *(MODEL, Label("direction", values=("out", "in"))),
)
ENGINE_SWAP_USED = _gauge(
    "meterline_engine_swap_blocks", "blocks", "KV blocks that wait in swap space.", MODEL
)
ENGINE_SWAP_LOST = _counter(
    "meterline_engine_swap_lost_total",
    "sequences",
    "Swapped sequences whose blocks came back damaged or not at all; they were computed again.",
    MODEL,
)
ENGINE_KV_BLOCK_SECONDS = _counter(
    "meterline_engine_kv_block_seconds_total",
    "block-seconds",
    "KV blocks that requests held, times how long; pool: adds up to the used blocks over time.",
    *(MODEL, Label("tier", values=("pool", "swap"))),
)
ENGINE_TOO_LATE = _counter(
    "meterline_engine_too_late_total",
    "requests",
    "Requests refused because their first token was expected after their deadline.",
    MODEL,
)
ENGINE_PREFIX_QUERIES = _counter(
    "meterline_engine_prefix_cache_queries_tokens_total",
    "tokens",
    "Prompt tokens whose keys and values were looked up, once per prompt.",
    MODEL,
)
ENGINE_PREFIX_HITS = _counter(
    "meterline_engine_prefix_cache_hits_tokens_total",
    "tokens",
    "Prompt tokens that an earlier request of the same tenant had computed.",
    MODEL,
)
ENGINE_SPEC_DRAFTED = _counter(
    "meterline_engine_spec_drafted_tokens_total",
    "tokens",
    "Tokens guessed ahead and checked.",
    MODEL,
)
ENGINE_SPEC_ACCEPTED = _counter(
    "meterline_engine_spec_accepted_tokens_total",
    "tokens",
    "Guessed tokens that came true: answer tokens that took no step of their own.",
    MODEL,
)
ENGINE: tuple[Metric, ...] = (
    *(ENGINE_STEP_SECONDS, ENGINE_CHARGED_SECONDS, ENGINE_TOKENS, ENGINE_REQUESTS),
    *(ENGINE_BATCH_SIZE, ENGINE_RUNNING, ENGINE_WAITING, ENGINE_WAITING_TOKENS),
    *(ENGINE_KV_USAGE, ENGINE_PREEMPTIONS, ENGINE_PREFIX_QUERIES, ENGINE_PREFIX_HITS),
    *(ENGINE_SWAPPED_BLOCKS, ENGINE_SWAP_USED, ENGINE_SWAP_LOST, ENGINE_KV_BLOCK_SECONDS),
    ENGINE_TOO_LATE,
    *(ENGINE_SPEC_DRAFTED, ENGINE_SPEC_ACCEPTED),
)

REGISTRY: Mapping[str, Metric] = {metric.name: metric for metric in (*GATEWAY, *ENGINE)}

# --- Instruments ----------------------------------------------------------------------------------


def instrument(metric: Metric, registry: CollectorRegistry) -> Instrument:
    """The prometheus_client object of one declaration, registered."""
    match metric.kind:
        case Kind.COUNTER:
            return Counter(metric.name, metric.help, metric.label_names, registry=registry)
        case Kind.HISTOGRAM:
            return Histogram(
                metric.name,
                metric.help,
                metric.label_names,
                buckets=metric.buckets,
                registry=registry,
            )
        case Kind.GAUGE | Kind.INFO:
            return Gauge(metric.name, metric.help, metric.label_names, registry=registry)


def instruments(
    declarations: Iterable[Metric], registry: CollectorRegistry
) -> dict[str, Instrument]:
    """All of them, by name. What a process other than the gateway (the engine) starts from."""
    return {metric.name: instrument(metric, registry) for metric in declarations}


def render(registry: CollectorRegistry, *, openmetrics: bool) -> bytes:
    """One scrape, in the format of Prometheus 0.0.4 or of OpenMetrics 1.0 (with exemplars)."""
    collector = _WithoutCreated(registry)
    if not openmetrics:
        return render_text(collector)
    return bytes(render_openmetrics(collector))  # type: ignore[no-untyped-call]  # library


class _WithoutCreated(Collector):
    """A registry without its `_created` samples: one more series per histogram and counter that
    nothing of ours reads. The library's own switch is a global one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    @override
    def collect(self) -> Iterable[Family]:
        for family in self._registry.collect():
            kept = [sample for sample in family.samples if not sample.name.endswith("_created")]
            if kept:
                clean = Family(family.name, family.documentation, family.type, family.unit)
                clean.samples = kept
                yield clean


# --- From the record ------------------------------------------------------------------------------


def input_class(tokens: int) -> str:
    """The size class of a prompt; one threshold for all sizes would mean nothing."""
    if tokens < 1_000:
        return "0-1k"
    if tokens < 4_000:
        return "1k-4k"
    if tokens < 16_000:
        return "4k-16k"
    return "16k-64k" if tokens < 64_000 else "64k+"


def overhead_ns(record: RequestRecord) -> int | None:
    """The gateway's own time of a settled request: all that is not between the start of its first
    and the end of its last attempt. None if no backend was asked.

    A pause between two attempts is the backends' time: it is their failure that caused it. An
    attempt that nobody closed lasts to the end of the request."""
    if not record.attempts or record.ended_ns is None:
        return None
    ended_ns = record.ended_ns
    first = min(attempt.started_ns for attempt in record.attempts)
    last = max(
        ended_ns if attempt.ended_ns is None else attempt.ended_ns for attempt in record.attempts
    )
    waited = min(last, ended_ns) - max(first, record.opened_ns)
    return max(ended_ns - record.opened_ns - max(waited, 0), 0)


def is_unpriced(attempt: Attempt) -> bool:
    """Whether some of the attempt's usage has no price: an unpriced line, or no line at all."""
    if attempt.charges:
        return any(charge.amount is None for charge in attempt.charges)
    return attempt.usage is not None and attempt.usage.total_tokens > 0


# Meter names as priced lines carry them.
_COMPONENTS: Mapping[str, str] = {
    "Input Tokens": "input",
    "Cache Read Input Tokens": "cached",
    "Cache Write Input Tokens": "cache_write",
    "Cache Write 1h Input Tokens": "cache_write",
    "Audio Input Tokens": "media",
    "Image Input Tokens": "media",
    "Video Input Tokens": "media",
    "Document Input Tokens": "media",
    "Output Tokens": "output",
    "Reasoning Output Tokens": "reasoning",
    "Audio Output Tokens": "media",
    "Image Output Tokens": "media",
    "GPU Prefill": "gpu_prefill",
    "GPU Decode": "gpu_decode",
    "GPU Sampling": "gpu_decode",
    "GPU Recompute": "waste",
    "GPU Rejected Speculation": "waste",
}


def component(meter: str) -> str:
    """The cost component that a priced line belongs to."""
    return _COMPONENTS.get(meter, OTHER)


_Key = tuple[str, ...]
_bucket_values = attrgetter(*BUCKETS)


class Metrics:
    """The gateway's instruments. Safe to call from any thread; nothing here awaits.

    Counters and histograms exist from the start. A gauge exists once something sets or watches
    it: what nobody measures in this process is absent from the scrape, not zero.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        max_models: int = 200,
        node: str = "local",
    ) -> None:
        self.registry = registry
        self.node = node
        eager = [m for m in GATEWAY if m.kind in (Kind.COUNTER, Kind.HISTOGRAM)]
        self._instruments = instruments(eager, registry)
        self._caps: dict[str, int] = {
            label.name: label.cap
            for metric in GATEWAY
            for label in metric.labels
            if label.cap is not None
        }
        self._caps["model"] = max_models
        self._seen: dict[str, set[str]] = {name: {NONE, OTHER} for name in self._caps}
        self._children: dict[tuple[object, ...], Instrument] = {}
        self._watched: list[tuple[Metric, Mapping[str, str], Callable[[], float]]] = []
        self._totals: list[float] = []  # of the watched ones, at the last reading
        self._requests: dict[_Key, tuple[Counter, Histogram, Histogram]] = {}
        self._counters: dict[_Key, Counter] = {}
        self._histograms: dict[_Key, Histogram] = {}
        self._initialise()

    # -- any metric --

    def child(self, metric: Metric, /, **labels: str) -> Instrument:
        """The instrument at these label values, cached. ValueError: a value off its closed list.

        Keep it where it is used often: `streams = metrics.child(OPEN_STREAMS, route="chat")`."""
        key = (metric.name, *labels.items())
        known = self._children.get(key)
        if known is not None:
            return known
        if set(labels) != set(metric.label_names):
            raise ValueError(f"{metric.name} takes the labels {metric.label_names}")
        values = [self._checked(label, labels[label.name]) for label in metric.labels]
        parent = self._instrument(metric)
        made = parent.labels(*values) if values else parent
        if OTHER not in values:  # what is folded must be counted each time
            self._children[key] = made
        return made

    def add(self, metric: Metric, amount: float = 1, /, **labels: str) -> None:
        """Count on a counter, or move a gauge."""
        found = self.child(metric, **labels)
        assert isinstance(found, Counter | Gauge)
        found.inc(amount)

    def set(self, metric: Metric, value: float, /, **labels: str) -> None:
        found = self.child(metric, **labels)
        assert isinstance(found, Gauge)
        found.set(value)

    def measure(self, metric: Metric, value: float, /, **labels: str) -> None:
        """One observation of a histogram."""
        found = self.child(metric, **labels)
        assert isinstance(found, Histogram)
        found.observe(value)

    def info(self, metric: Metric, *labels: Mapping[str, str]) -> None:
        """What an info metric says from now on, one series for each set of labels."""
        assert metric.kind is Kind.INFO
        found = self._instrument(metric)
        found.clear()
        for one in labels:
            child = found.labels(**one)
            assert isinstance(child, Gauge)
            child.set(1)

    def watch(self, metric: Metric | str, read: Callable[[], float], /, **labels: str) -> None:
        """Call `read` at each scrape: the value of a gauge, or the running total of a counter
        that is kept elsewhere. A `read` that raises gives NaN and is counted, and the scrape
        goes on."""
        declared = REGISTRY[metric] if isinstance(metric, str) else metric
        if declared.kind not in (Kind.GAUGE, Kind.COUNTER):
            raise ValueError(f"{declared.name} is a {declared.kind}, which cannot be watched")
        self.child(declared, **labels)
        self._watched.append((declared, labels, read))
        self._totals.append(0.0)

    def expect(self, targets: Iterable[tuple[str, str]]) -> None:
        """Make the series that alerts need for these (provider, model) pairs at zero: a rate over
        a series that first appears at 1 is 0."""
        for provider_name, model_name in targets:
            provider = self._folded("provider", provider_name)
            model = self._folded("model", model_name)
            for metric in (UNPRICED_USAGE, AMBIGUOUS_USAGE, USAGE_CONFLICTS):
                self.child(metric, provider=provider, model=model)
            for route in ROUTE.values:
                for stream in STREAM.values:
                    for outcome in (Outcome.OK, *FAILURES):
                        self._request(route, model, provider, stream, outcome)

    def render(self, *, openmetrics: bool) -> bytes:
        """One scrape."""
        self._read_watched()
        return render(self.registry, openmetrics=openmetrics)

    # -- one settled request --

    def observe(self, record: RequestRecord) -> None:
        """All that one settled request adds. Called once per record, after settlement."""
        outcome, ended_ns = record.outcome, record.ended_ns
        assert outcome is not None
        assert ended_ns is not None
        served = record.served
        asked = served or (record.attempts[-1] if record.attempts else None)
        model = NONE if asked is None else self._folded("model", asked.model)
        provider = NONE if asked is None else self._folded("provider", asked.provider)
        stream = "true" if record.stream else "false"
        exemplar = {"trace_id": record.trace_id} if record.keeps_trace else None
        requests, duration, overhead = self._request(
            record.surface, model, provider, stream, outcome
        )
        requests.inc()
        closed = SWEPT if outcome is Outcome.ABANDONED else SETTLED
        self._cached_counter(closed, self._folded("node", record.node)).inc()
        for attempt in record.attempts:
            self._observe_attempt(attempt, outcome)
        if outcome is Outcome.ABANDONED:
            return  # its times are the sweeper's
        duration.observe((ended_ns - record.opened_ns) / 1e9, exemplar)
        own_ns = overhead_ns(record)
        if own_ns is not None:
            overhead.observe(own_ns / 1e9)
        if outcome is Outcome.CLIENT_DISCONNECT and record.stream:
            before = "true" if served is None else "false"
            self.add(STREAM_DISCONNECTS, policy="abort", before_first_token=before)
        if served is not None:
            self._observe_served(record, served, model, provider, exemplar)

    def _observe_attempt(self, attempt: Attempt, outcome: Outcome) -> None:
        model = self._folded("model", attempt.model)
        provider = self._folded("provider", attempt.provider)
        ended = (attempt.outcome or outcome)._value_
        self._cached_counter(ATTEMPTS, provider, model, attempt.reason, ended).inc()
        usage = attempt.usage
        if usage is not None:
            source = attempt.usage_source._value_
            for bucket, tokens in zip(BUCKETS, _bucket_values(usage), strict=True):
                if tokens:
                    self._cached_counter(TOKENS, model, provider, bucket, source).inc(tokens)
            if attempt.usage_quality is UsageQuality.AMBIGUOUS:
                self.add(AMBIGUOUS_USAGE, provider=provider, model=model)
        for charge in attempt.charges:
            if charge.amount:
                part = component(charge.meter)
                self._cached_counter(COST, model, provider, part).inc(float(charge.amount))
        if is_unpriced(attempt):
            self.add(UNPRICED_USAGE, provider=provider, model=model)

    def _observe_served(
        self,
        record: RequestRecord,
        served: Attempt,
        model: str,
        provider: str,
        exemplar: dict[str, str] | None,
    ) -> None:
        usage, first_ns, ended_ns = served.usage, served.first_token_ns, served.ended_ns
        if served.timings is not None and served.timings.queue_s is not None:
            self._cached_histogram(QUEUE_WAIT, model, provider).observe(served.timings.queue_s)
        if not record.stream or first_ns is None:
            return
        size = input_class(record.input_estimate if usage is None else usage.input_tokens)
        ttft = self._cached_histogram(TIME_TO_FIRST_TOKEN, model, provider, size)
        ttft.observe((first_ns - record.opened_ns) / 1e9, exemplar)
        if served.outcome is not Outcome.OK or usage is None or ended_ns is None:
            return
        intervals = usage.output_tokens - 1
        if intervals > 0:
            tpot = self._cached_histogram(TIME_PER_OUTPUT_TOKEN, model, provider)
            tpot.observe((ended_ns - first_ns) / intervals / 1e9)

    # -- cached children: a look-up in the library costs more than the observation --

    def _request(
        self, route: str, model: str, provider: str, stream: str, outcome: Outcome
    ) -> tuple[Counter, Histogram, Histogram]:
        key: _Key = (route, model, provider, stream, outcome._value_)
        found = self._requests.get(key)
        if found is None:
            against = "false" if outcome in NOT_AGAINST_SLO else "true"
            found = (
                self._cached_counter(REQUESTS, *key, against),
                self._cached_histogram(REQUEST_DURATION, route, model, provider),
                self._cached_histogram(OVERHEAD, route, model, provider),
            )
            self._requests[key] = found
        return found

    def _cached_counter(self, metric: Metric, *values: str) -> Counter:
        key = (metric.name, *values)
        found = self._counters.get(key)
        if found is None:
            made = self._instruments[metric.name].labels(*values)
            assert isinstance(made, Counter)
            found = self._counters[key] = made
        return found

    def _cached_histogram(self, metric: Metric, *values: str) -> Histogram:
        key = (metric.name, *values)
        found = self._histograms.get(key)
        if found is None:
            made = self._instruments[metric.name].labels(*values)
            assert isinstance(made, Histogram)
            found = self._histograms[key] = made
        return found

    def _instrument(self, metric: Metric) -> Instrument:
        found = self._instruments.get(metric.name)
        if found is None:
            found = self._instruments[metric.name] = instrument(metric, self.registry)
        return found

    # -- labels --

    def _checked(self, label: Label, value: str) -> str:
        if label.cap is not None:
            return self._folded(label.name, value)
        if label.values and value not in label.values:
            raise ValueError(f"{value!r} is not a value of the label {label.name}")
        return value

    def _folded(self, label: str, value: str) -> str:
        """The value, or `other` once the cap is reached."""
        seen = self._seen[label]
        if value in seen:
            return value
        if len(seen) < self._caps[label] + 2:  # `none` and `other` are free
            seen.add(value)
            return value
        self.add(LABEL_FOLDS, label=label)
        return OTHER

    def _initialise(self) -> None:
        """Series that alerts and rates need from the first scrape on, at zero."""
        for metric in (ADMITTED, SETTLED, SWEPT):
            self.child(metric, node=self.node)
        closed = (UNAUTHENTICATED, CONFIG_RELOADS, OBSERVER_ERRORS, SPANS_DROPPED, LABEL_FOLDS)
        for metric in closed:
            (label,) = metric.labels
            for value in label.values:
                self.child(metric, **{label.name: value})
        for before in ("true", "false"):
            self.child(STREAM_DISCONNECTS, policy="abort", before_first_token=before)

    def _read_watched(self) -> None:
        for index, (metric, labels, read) in enumerate(self._watched):
            try:
                value = float(read())
            except Exception:
                log.warning("gauge_failed", extra={"metric": metric.name}, exc_info=True)
                self.add(OBSERVER_ERRORS, kind="gauge")
                value = float("nan")
            if metric.kind is Kind.GAUGE:
                self.set(metric, value, **labels)
            elif value > self._totals[index]:
                self.add(metric, value - self._totals[index], **labels)
                self._totals[index] = value


# --- docs/reference/metrics.md --------------------------------------------------------------------

DOCUMENT = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"


def document() -> str:
    """The reference page."""
    parts = [
        "# Metrics\n",
        "Generated by `python -m telemetry.metrics --write`; do not edit. "
        "Each metric is declared once, in `telemetry/metrics.py`.\n",
        "`GET /metrics` gives the Prometheus text format, or OpenMetrics with exemplars "
        "(`trace_id`) if asked for. A label is either from a closed list or capped: beyond the "
        "cap, values are folded into `other` and counted in `meterline_label_folds_total`. "
        "`model` is what a backend was asked for, `none` if no backend was asked.\n",
        "## Gateway\n",
        *_sections(GATEWAY),
        "## Engine\n",
        "Each engine process has a `/metrics` of its own.\n",
        *_sections(ENGINE),
    ]
    return "\n".join(parts)


def _sections(metrics: Sequence[Metric]) -> list[str]:
    lines: list[str] = []
    for metric in metrics:
        lines.append(f"### `{metric.name}`\n")
        lines.append(f"{metric.kind}, {metric.unit}. {metric.help}\n")
        if metric.labels:
            lines.append("| label | values |\n|---|---|")
            lines.append("\n".join(_label_row(label) for label in metric.labels) + "\n")
        if metric.buckets:
            bounds = " ".join(f"{bound:g}" for bound in metric.buckets)
            lines.append(f"Buckets: {bounds} ({metric.buckets_why}).\n")
    return lines


def _label_row(label: Label) -> str:
    if label.values:
        values = ", ".join(f"`{value}`" for value in label.values)
    elif label.cap is not None:
        values = f"at most {label.cap}, then `{OTHER}`"
    else:
        values = "one at a time"
    return f"| {label.name} | {values} |"


@click.command()
@click.option("--write", "mode", flag_value="write", help="Write docs/reference/metrics.md.")
@click.option("--check", "mode", flag_value="check", help="Exit 1 if it is not up to date.")
def main(mode: str | None) -> None:
    """Print, write or check the reference page of the metrics."""
    if mode == "write":
        DOCUMENT.parent.mkdir(parents=True, exist_ok=True)
        DOCUMENT.write_text(document(), encoding="utf-8")
    elif mode == "check":
        if not DOCUMENT.exists() or DOCUMENT.read_text(encoding="utf-8") != document():
            click.echo(f"{DOCUMENT.name} is not up to date: --write", err=True)
            sys.exit(1)
    else:
        click.echo(document())


if __name__ == "__main__":
    main()
