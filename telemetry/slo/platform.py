"""Alerts that no objective covers: an account that does not add up, a log that is not shipped, a
backend that is down. Written by hand, each with the series under which it must fire and those under
which it must not, so that they are tested like the generated ones.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from telemetry.metrics import (
    ADMITTED,
    BUDGET_OVERRUNS,
    CIRCUIT_STATE,
    CONFIG_RELOADS,
    CONSERVATION_RESIDUAL,
    ENGINE_STEP_SECONDS,
    ENGINE_WAITING,
    IN_FLIGHT,
    LABEL_FOLDS,
    LIMITS_DEGRADED,
    OBSERVER_ERRORS,
    OPEN_STREAMS,
    REQUEST_DURATION,
    ROLLUP_LAG,
    SPANS_DROPPED,
    SWEPT,
    UNPRICED_USAGE,
    USAGE_CONFLICTS,
    WAL_OLDEST_PENDING,
)
from telemetry.slo.burn import MINUTE
from telemetry.slo.declaration import SloFile
from telemetry.slo.proofs import Case, Firing
from telemetry.slo.rules import Alert, Group

_LAST_BUCKET: Final = repr(REQUEST_DURATION.buckets[-1])
_DURATION, _COUNT = REQUEST_DURATION.bucket, REQUEST_DURATION.count
_WORKING: Final = f'{ENGINE_STEP_SECONDS.name}{{phase=~"prefill|decode|mixed"}}'


class PlatformAlert(Struct, frozen=True, kw_only=True):
    """An alert, what to do about it, and its proof: (series, values a minute apart) that make it
    fire after `fires_at_min`, and others that never do."""

    name: str
    expr: str
    severity: str
    summary: str
    means: str  # what is wrong when it fires
    do: tuple[str, ...]  # what to look at and to do, in order
    fires: Mapping[str, str]
    silent: Mapping[str, str]
    fires_at_min: int = 30
    hold: str | None = None


def alerts(job: str) -> tuple[PlatformAlert, ...]:
    """All of them, for the scrape jobs that the regular expression `job` matches."""
    return (_down(job), *_ALERTS)


def group(file: SloFile) -> Group:
    """The rules."""
    return Group(
        name="platform",
        rules=tuple(
            Alert(
                alert=one.name,
                expr=one.expr,
                hold=one.hold,
                labels={
                    **file.labels,
                    "service": file.service,
                    "severity": one.severity,
                    "owner": "oncall",
                },
                annotations={
                    "summary": one.summary,
                    "description": one.means,
                    "runbook_url": f"{file.runbooks.rstrip('/')}/{slug(one.name)}.md",
                },
            )
            for one in alerts(file.job)
        ),
    )


def cases(job: str) -> list[Case]:
    """Their tests."""
    made = []
    for one in alerts(job):
        about = f'alertname="{one.name}"'
        for played, fires in ((one.fires, True), (one.silent, False)):
            at = one.fires_at_min * MINUTE
            expected = (Firing(at, one.name, fires, about),)
            made.append(
                Case(
                    name=f"{one.name}: {'fires' if fires else 'stays silent'}",
                    interval_s=MINUTE,
                    series=tuple(played.items()),
                    expected=expected,
                )
            )
    return made


def slug(alert: str) -> str:
    """MeterlineWalStuck → meterline-wal-stuck, the name of its runbook."""
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in alert).lstrip("-")


def _down(job: str) -> PlatformAlert:
    return PlatformAlert(
        name="MeterlineTargetDown",
        expr=f'up{{job=~"{job}"}} == 0',
        hold="5m",
        severity="page",
        summary="{{ $labels.instance }} cannot be scraped",
        means="Prometheus cannot reach a Meterline process: it is down, or its port is.",
        do=(
            "Look whether the process runs and what it logged last.",
            "`GET /healthz` tells whether the instance is alive, `/readyz` what it waits for.",
            "A request that it had admitted is settled by the sweeper of another replica.",
        ),
        fires={'up{job="meterline",instance="a"}': "0+0x60"},
        silent={'up{job="meterline",instance="a"}': "1+0x60", 'up{job="else"}': "0+0x60"},
    )


_ALERTS: Final = (
    PlatformAlert(
        name="MeterlineUnpricedUsage",
        expr=f"sum by (provider, model) (increase({UNPRICED_USAGE.name}[15m])) > 0",
        severity="ticket",
        summary="{{ $labels.model }} of {{ $labels.provider }} is used and has no price",
        means="Usage is booked without a cost: reports are too low until a price is published.",
        do=(
            "`meterline price import` a list that has the model, or add its rows to a CSV book.",
            "`meterline price diff`, then `meterline price publish`.",
            "`meterline price rerate`, then with `--apply`: the past gets its price.",
        ),
        fires={f'{UNPRICED_USAGE.name}{{provider="p",model="m"}}': "0+1x60"},
        silent={f'{UNPRICED_USAGE.name}{{provider="p",model="m"}}': "7+0x60"},
    ),
    PlatformAlert(
        name="MeterlineConservationBroken",
        expr=f"abs({CONSERVATION_RESIDUAL.name}) > 0",
        hold="5m",
        severity="page",
        summary="The ledger's law `{{ $labels.law }}` leaves {{ $value }} over",
        means="Requests, records or roll-ups do not add up: something was lost or counted twice.",
        do=(
            "`meterline reconcile` names the rows.",
            "Do not close the month before it prints 0 for each account.",
            "Keep the write-ahead log of the node: it holds what the database should.",
        ),
        fires={f'{CONSERVATION_RESIDUAL.name}{{law="wal"}}': "-1+0x60"},
        silent={f'{CONSERVATION_RESIDUAL.name}{{law="wal"}}': "0+0x60"},
    ),
    PlatformAlert(
        name="MeterlineWalStuck",
        expr=f"time() - {WAL_OLDEST_PENDING.name} > 120",
        hold="2m",
        severity="page",
        summary="{{ $labels.node }} has not shipped its log for {{ $value | humanizeDuration }}",
        means=(
            "Settled requests are safe in the log on disk, but not yet in the database: reports "
            "and budgets lag, and the disk fills."
        ),
        do=(
            "Is the database reachable from the node? `/readyz` says so.",
            "Is the disk full? The gateway refuses requests that it cannot record.",
            "Nothing is lost while the log folder is kept; shipping goes on by itself.",
        ),
        fires={f'{WAL_OLDEST_PENDING.name}{{node="n"}}': "0+0x60"},
        silent={f'{WAL_OLDEST_PENDING.name}{{node="n"}}': "0+60x60"},
    ),
    PlatformAlert(
        name="MeterlineSweptRatioHigh",
        expr=(f"sum(increase({SWEPT.name}[1h])) / (sum(increase({ADMITTED.name}[1h])) > 0) > 0.01"),
        severity="ticket",
        summary="{{ $value | humanizePercentage }} of requests were closed by the sweeper",
        means="Processes die with requests open: their usage is an estimate, not a report.",
        do=(
            "Look for restarts: kills for memory, node drains shorter than the longest stream.",
            "Give SIGTERM more time: the drain waits for open streams.",
        ),
        fires={
            f'{SWEPT.name}{{node="n"}}': "0+2x60",
            f'{ADMITTED.name}{{node="n"}}': "0+100x60",
        },
        silent={
            f'{SWEPT.name}{{node="n"}}': "0+0.5x60",
            f'{ADMITTED.name}{{node="n"}}': "0+100x60",
        },
    ),
    PlatformAlert(
        name="MeterlineUsageConflict",
        expr=f"sum by (provider, model) (increase({USAGE_CONFLICTS.name}[15m])) > 0",
        severity="ticket",
        summary="Usage of {{ $labels.model }} reached the ledger twice with different content",
        means="The first one is kept. Two writers share a node's name, or a log was copied.",
        do=(
            "Look for two processes with the same `[telemetry] node` or the same data folder.",
            "`meterline explain` on the requests in the gateway's log shows both.",
        ),
        fires={f'{USAGE_CONFLICTS.name}{{provider="p",model="m"}}': "0+1x60"},
        silent={f'{USAGE_CONFLICTS.name}{{provider="p",model="m"}}': "3+0x60"},
    ),
    PlatformAlert(
        name="MeterlineHistogramOverflow",
        expr=(
            f'1 - sum(rate({_DURATION}{{le="{_LAST_BUCKET}"}}[1h])) / (sum(rate({_COUNT}[1h])) > 0)'
            " > 0.01"
        ),
        severity="ticket",
        summary="{{ $value | humanizePercentage }} of requests last longer than any bucket",
        means="Percentiles above the last bucket are guesses.",
        do=("Which route? `sum by (route) (rate(…_count[1h]))` beside its last bucket.",),
        fires={
            f'{_DURATION}{{le="{_LAST_BUCKET}"}}': "0+90x60",
            _COUNT: "0+100x60",
        },
        silent={
            f'{_DURATION}{{le="{_LAST_BUCKET}"}}': "0+100x60",
            _COUNT: "0+100x60",
        },
    ),
    PlatformAlert(
        name="MeterlineLabelFolding",
        expr=f"sum by (label) (increase({LABEL_FOLDS.name}[15m])) > 0",
        severity="ticket",
        summary="More values of `{{ $labels.label }}` than the cap: the rest is in `other`",
        means="Graphs by this label are incomplete; the ledger is not.",
        do=("Fewer models in the routes, or a higher `[telemetry] max_models`.",),
        fires={f'{LABEL_FOLDS.name}{{label="model"}}': "0+1x60"},
        silent={f'{LABEL_FOLDS.name}{{label="model"}}': "9+0x60"},
    ),
    PlatformAlert(
        name="MeterlineCircuitOpen",
        expr=f"max by (backend, fault) ({CIRCUIT_STATE.name}) == 2",
        hold="5m",
        severity="ticket",
        summary="The circuit of {{ $labels.backend }} is open ({{ $labels.fault }})",
        means="A backend is not asked since it keeps failing. Routes with a fallback use it.",
        do=(
            "fault=credential: our key is refused. Check its reference and the provider's account.",
            "fault=limit: one of its models is at its rate limit. Ask for more, or spread.",
            "fault=endpoint: failures or time-outs. The log names the last error.",
        ),
        fires={f'{CIRCUIT_STATE.name}{{backend="b",fault="endpoint"}}': "2+0x60"},
        silent={f'{CIRCUIT_STATE.name}{{backend="b",fault="endpoint"}}': "1+0x60"},
    ),
    PlatformAlert(
        name="MeterlineLimitsDegraded",
        expr=f"max({LIMITS_DEGRADED.name}) == 1",
        hold="5m",
        severity="ticket",
        summary="Shared counters are away: replicas spend their slices of the limits",
        means=(
            "Limits and budgets hold within the stated bound (docs/reference/bounds.md), but "
            "requests may be refused that the whole limit would allow."
        ),
        do=("Is Redis up, and reachable within 50 ms from each replica? It recovers by itself.",),
        fires={LIMITS_DEGRADED.name: "1+0x60"},
        silent={LIMITS_DEGRADED.name: "0+0x60"},
    ),
    PlatformAlert(
        name="MeterlineBudgetOverrun",
        expr=f"sum(increase({BUDGET_OVERRUNS.name}[15m])) > 0",
        severity="ticket",
        summary="A soft budget was overrun",
        means="Requests go on: the budget only tells. The gateway's log names it.",
        do=("`meterline budget list` shows what is left, `meterline report` what it went to.",),
        fires={BUDGET_OVERRUNS.name: "0+1x60"},
        silent={BUDGET_OVERRUNS.name: "4+0x60"},
    ),
    PlatformAlert(
        name="MeterlineStreamLeak",
        expr=f"sum by (instance) ({OPEN_STREAMS.name}) > sum by (instance) ({IN_FLIGHT.name})",
        hold="10m",
        severity="ticket",
        summary="{{ $labels.instance }} counts more open streams than requests",
        means="A stream was not closed in the books: a defect of the gateway.",
        do=("Restart the instance (it drains), and report it with the log.",),
        fires={
            f'{OPEN_STREAMS.name}{{instance="a"}}': "3+0x60",
            f'{IN_FLIGHT.name}{{instance="a"}}': "2+0x60",
        },
        silent={
            f'{OPEN_STREAMS.name}{{instance="a"}}': "3+0x60",
            f'{IN_FLIGHT.name}{{instance="a"}}': "3+0x60",
        },
    ),
    PlatformAlert(
        name="MeterlineRollupLag",
        expr=f"max({ROLLUP_LAG.name}) > 900",
        hold="5m",
        severity="ticket",
        summary="Roll-ups are {{ $value | humanizeDuration }} behind",
        means="Reports from sums lag; the events themselves are in the database.",
        do=("Does a ledger worker run? Its log says what the database answers.",),
        fires={ROLLUP_LAG.name: "1000+0x60"},
        silent={ROLLUP_LAG.name: "900+0x60"},
    ),
    PlatformAlert(
        name="MeterlineEngineStalled",
        expr=(
            f"sum by (instance, model) ({ENGINE_WAITING.name}) > 0\n"
            f"and sum by (instance, model) (increase({_WORKING}[5m])) == 0"
        ),
        hold="5m",
        severity="page",
        summary="The engine of {{ $labels.model }} has requests waiting and does nothing",
        means="Requests wait, and no step is computed.",
        do=(
            "The engine's log lines are in the gateway's log; its last one says what it does.",
            "Restart the gateway: it drains, and starts the engine anew.",
        ),
        fires={
            f'{ENGINE_WAITING.name}{{instance="a",model="m"}}': "2+0x60",
            f'{ENGINE_STEP_SECONDS.name}{{instance="a",model="m",phase="decode"}}': "9+0x60",
            f'{ENGINE_STEP_SECONDS.name}{{instance="a",model="m",phase="idle"}}': "0+60x60",
        },
        silent={
            f'{ENGINE_WAITING.name}{{instance="a",model="m"}}': "2+0x60",
            f'{ENGINE_STEP_SECONDS.name}{{instance="a",model="m",phase="decode"}}': "0+50x60",
        },
    ),
    PlatformAlert(
        name="MeterlineObserverErrors",
        expr=(
            f"sum(increase({OBSERVER_ERRORS.name}[15m])) > 0\n"
            f"or sum(increase({SPANS_DROPPED.name}[15m])) > 0"
        ),
        severity="ticket",
        summary="Metrics, spans or log lines are being lost",
        means="What is observed is incomplete; requests and their settlement are not touched.",
        do=(
            "Spans: is the OTLP endpoint reachable, and as fast as the traffic?",
            "The gateway's log has the errors, at a limited rate.",
        ),
        fires={f'{SPANS_DROPPED.name}{{reason="queue_full"}}': "0+1x60"},
        silent={
            f'{SPANS_DROPPED.name}{{reason="queue_full"}}': "5+0x60",
            f'{OBSERVER_ERRORS.name}{{kind="spans"}}': "1+0x60",
        },
    ),
    PlatformAlert(
        name="MeterlineConfigRejected",
        expr=f'sum by (instance) (increase({CONFIG_RELOADS.name}{{result="rejected"}}[15m])) > 0',
        severity="ticket",
        summary="{{ $labels.instance }} rejected a changed config file",
        means="The former one stays in force. A restart would fail.",
        do=("`meterline check FILE` names every mistake.",),
        fires={f'{CONFIG_RELOADS.name}{{instance="a",result="rejected"}}': "0+1x60"},
        silent={f'{CONFIG_RELOADS.name}{{instance="a",result="applied"}}': "0+1x60"},
    ),
)
