"""From a declaration to recording rules and alerts.

For each objective: bad and total events over each window, their ratio, the budget of the period,
and the alerts on them. Invariants: no traffic gives no series, never NaN and never 0 % errors; a
counter of bad events that nobody has incremented yet counts as 0; a number in a rule is the exact
decimal of the declaration. Records are named level:metric:operation, as Prometheus asks for.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Final

from msgspec import Struct

from telemetry.metrics import REGISTRY, Metric
from telemetry.slo import burn
from telemetry.slo.burn import WINDOWS_S, Window, duration, literal
from telemetry.slo.declaration import (
    Matcher,
    Percentile,
    Selector,
    Slo,
    SloFile,
    Threshold,
    bound,
    matchers,
    selector,
)

PAGE, TICKET, SMALL_N = "SLOBurnRatePage", "SLOBurnRateTicket", "SLOSmallNFailing"
ABSENT, BUDGET_LOW = "SLOTelemetryAbsent", "SLOBudgetLow"
PERCENTILE_HIGH = "LatencyPercentileHigh"
GOOD_MOMENT: Final = "slo:sli_good:bool"
PERCENTILE: Final = "slo:percentile:seconds"
PERCENTILE_EVENTS: Final = "slo:percentile_events:increase"
PERIOD_INTERVAL_S: Final = 300
_BURN_ALERTS = {"page": PAGE, "ticket": TICKET}
_LOW: Final = Decimal("0.25")


class Record(Struct, frozen=True, kw_only=True):
    """A recording rule."""

    record: str
    expr: str
    labels: Mapping[str, str] = {}


class Alert(Struct, frozen=True, kw_only=True):
    """An alerting rule. Durations as Prometheus writes them."""

    alert: str
    expr: str
    hold: str | None = None  # `for`
    keep_firing_for: str | None = None
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}


class Group(Struct, frozen=True, kw_only=True):
    """Rules that are evaluated in this order, each seeing what those before it recorded."""

    name: str
    rules: tuple[Record | Alert, ...]
    interval: str | None = None


class Events(Struct, frozen=True, kw_only=True):
    """The selectors of an objective on counters: total, and either its bad or its good part."""

    total: Selector
    bad: Selector | None = None
    good: Selector | None = None


def events(slo: Slo, registry: Mapping[str, Metric] = REGISTRY) -> Events | None:
    """What is counted; None for a threshold, whose events are moments."""
    sli = slo.sli
    if sli.availability is not None:
        total = Selector(sli.availability.metric, matchers(sli.availability.match))
        return Events(total=total, bad=total.where(sli.availability.bad))
    if sli.latency is not None:
        metric = registry[sli.latency.metric]
        chosen = matchers(sli.latency.match)
        le = Matcher("le", "=", bucket_label(sli.latency.threshold))
        return Events(
            total=Selector(metric.count, chosen), good=Selector(metric.bucket, (*chosen, le))
        )
    if sli.ratio is not None:
        return Events(total=selector(sli.ratio.total), good=selector(sli.ratio.good))
    return None


def bucket_label(threshold: str) -> str:
    """The value of `le` for a threshold, as the exposition writes it: 1.5, 2.0."""
    value = bound(threshold)
    assert value is not None, "checked when the declaration was read"
    return repr(float(value))


# --- One objective --------------------------------------------------------------------------------


def signal(slo: Slo, file: SloFile) -> Group | None:
    """The rule that judges each moment of a threshold objective; None for the other kinds. With
    several series a moment is good when it is so for each."""
    if slo.sli.threshold is None:
        return None
    judged = Record(
        record=GOOD_MOMENT, expr=good_moment(slo.sli.threshold), labels=identity(slo, file)
    )
    return Group(name=f"slo-{slo.name}-signal", rules=(judged,))


def good_moment(sli: Threshold) -> str:
    return f"min(({sli.expr}) {sli.op}bool {literal(Decimal(sli.value))})"


def groups(slo: Slo, file: SloFile) -> tuple[Group, ...]:
    """All rules of an objective but its signal: burn rates and their alerts, and the period."""
    name = identity(slo, file)
    counted: list[Record] = []
    for window_s in WINDOWS_S:
        counted += _window(slo, name, window_s)
    alerts = [*_burn_alerts(slo, file), *_small_n(slo, file), _absent(slo, file)]
    return (
        Group(name=f"slo-{slo.name}", rules=(*counted, *alerts)),
        Group(
            name=f"slo-{slo.name}-period",
            interval=duration(PERIOD_INTERVAL_S),
            rules=(*_period(slo, name), _budget_low(slo, file)),
        ),
    )


def identity(slo: Slo, file: SloFile) -> dict[str, str]:
    """The labels on everything of an objective."""
    return {**file.labels, "service": file.service, "slo": slo.name}


def _window(slo: Slo, name: Mapping[str, str], window_s: int) -> list[Record]:
    span = duration(window_s)
    bad, total = f"slo:sli_bad:increase{span}", f"slo:sli_events:increase{span}"
    mine = _mine(slo)
    return [
        Record(record=bad, expr=_bad(slo, window_s), labels=name),
        Record(record=total, expr=_total(slo, window_s), labels=name),
        Record(
            record=f"slo:sli_error:ratio_rate{span}",
            expr=f"{bad}{mine} / ({total}{mine} > 0)",
            labels=name,
        ),
    ]


def _total(slo: Slo, window_s: int) -> str:
    counted = events(slo)
    if counted is None:
        return f"count_over_time({GOOD_MOMENT}{_mine(slo)}[{duration(window_s)}])"
    return f"{_sum(slo)}(increase({counted.total.over(window_s)}))"


def _bad(slo: Slo, window_s: int) -> str:
    counted = events(slo)
    total = _total(slo, window_s)
    if counted is None:
        return f"{total} - sum_over_time({GOOD_MOMENT}{_mine(slo)}[{duration(window_s)}])"
    if counted.bad is not None:
        return f"{_sum(slo)}(increase({counted.bad.over(window_s)})) or {total} * 0"
    assert counted.good is not None
    good = f"{_sum(slo)}(increase({counted.good.over(window_s)}))"
    return f"clamp_min({total} - ({good} or {total} * 0), 0)"


def _sum(slo: Slo) -> str:
    return f"sum by ({', '.join(slo.group_by)}) " if slo.group_by else "sum"


def _mine(slo: Slo) -> str:
    return f'{{slo="{slo.name}"}}'


def _burn_alerts(slo: Slo, file: SloFile) -> list[Alert]:
    pairs = burn.windows(slo.period_s)
    made = []
    for severity, alert in _BURN_ALERTS.items():
        chosen = [window for window in pairs if window.severity == severity]
        if slo.sli.threshold is not None and severity == "ticket":
            # Moments come at a constant rate; then the wider pair holds whenever the other does.
            chosen = chosen[-1:]
        made.append(
            Alert(
                alert=alert,
                expr="\nor\n".join(f"(\n{_burning(slo, window)}\n)" for window in chosen),
                keep_firing_for=slo.alerts.keep_firing_for,
                labels=_routing(slo, file, severity),
                annotations=_notes(
                    slo,
                    file,
                    f"{slo.name} is burning its error budget too fast",
                    f"{{{{ $value | humanizePercentage }}}} of events are bad; the objective is "
                    f"{slo.objective} % over {slo.window}. {_spent(chosen)}",
                ),
            )
        )
    return made


def _burning(slo: Slo, window: Window) -> str:
    limit = literal(burn.threshold(window, slo.objective_percent))
    mine, long, short = _mine(slo), duration(window.long_s), duration(window.short_s)
    lines = [
        f"  slo:sli_error:ratio_rate{long}{mine} > {limit}",
        f"  and slo:sli_error:ratio_rate{short}{mine} > {limit}",
    ]
    if slo.sli.threshold is None:
        lines.append(
            f"  and slo:sli_bad:increase{long}{mine} > {_at_least(slo.low_traffic.min_bad)}"
        )
    return "\n".join(lines)


def _at_least(count: int) -> str:
    """`increase` extrapolates, so that 5 events may read 4.98 or 5.02."""
    return literal(count - Decimal("0.5"))


def _spent(chosen: Sequence[Window]) -> str:
    rates = " or ".join(f"{window.factor}x over {duration(window.long_s)}" for window in chosen)
    return f"Fires at a burn rate of {rates}."


def _small_n(slo: Slo, file: SloFile) -> list[Alert]:
    small = slo.low_traffic.small_n
    if small is None or slo.sli.threshold is not None:
        return []
    mine = _mine(slo)
    return [
        Alert(
            alert=SMALL_N,
            expr=(
                f"slo:sli_error:ratio_rate{small.window}{mine} >= {literal(Decimal(small.ratio))}\n"
                f"and slo:sli_bad:increase{small.window}{mine} > {_at_least(small.min_events)}"
            ),
            keep_firing_for=slo.alerts.keep_firing_for,
            labels=_routing(slo, file, "ticket"),
            annotations=_notes(
                slo,
                file,
                f"{slo.name} fails most of its few events",
                f"{{{{ $value | humanizePercentage }}}} of the events of the last {small.window} "
                "are bad. Traffic may be too low for the burn rate alerts.",
            ),
        )
    ]


def _absent(slo: Slo, file: SloFile) -> Alert:
    counted = events(slo)
    watched = f"{GOOD_MOMENT}{_mine(slo)}" if counted is None else str(counted.total)
    return Alert(
        alert=ABSENT,
        # A target that is down is another alert's business.
        expr=f'absent({watched}) and on () (max(up{{job=~"{file.job}"}}) == 1)',
        hold="10m",
        labels=_routing(slo, file, "ticket"),
        annotations=_notes(
            slo,
            file,
            f"{slo.name} is not measured",
            "Gateways are up, but the series of this objective are absent: it cannot alert.",
        ),
    )


def _period(slo: Slo, name: Mapping[str, str]) -> list[Record]:
    mine, span = _mine(slo), duration(slo.period_s)
    spare = literal(burn.budget(slo.objective_percent))
    return [
        Record(
            record="slo:objective:ratio",
            expr=f"vector({literal(slo.objective_percent / 100)})",
            labels=name,
        ),
        Record(record="slo:error_budget:ratio", expr=f"vector({spare})", labels=name),
        Record(
            record="slo:time_period:days",
            expr=f"vector({literal(Decimal(slo.period_s) / burn.DAY)})",
            labels=name,
        ),
        Record(
            record="slo:period_error:ratio",
            # Events, not a mean of ratios: a busy hour weighs more than an idle one.
            expr=(
                f"sum_over_time(slo:sli_bad:increase5m{mine}[{span}]) / "
                f"(sum_over_time(slo:sli_events:increase5m{mine}[{span}]) > 0)"
            ),
            labels=name,
        ),
        Record(
            record="slo:period_error_budget_remaining:ratio",
            expr=f"1 - slo:period_error:ratio{mine} / {spare}",
            labels=name,
        ),
        Record(
            record="slo:current_burn_rate:ratio",
            expr=f"slo:sli_error:ratio_rate1h{mine} / {spare}",
            labels=name,
        ),
    ]


def _budget_low(slo: Slo, file: SloFile) -> Alert:
    return Alert(
        alert=BUDGET_LOW,
        expr=f"slo:period_error_budget_remaining:ratio{_mine(slo)} < {literal(_LOW)}",
        hold="15m",
        labels=_routing(slo, file, "ticket"),
        annotations=_notes(
            slo,
            file,
            f"{slo.name} has little error budget left",
            f"{{{{ $value | humanizePercentage }}}} of the budget of {slo.window} is left.",
        ),
    )


def _routing(slo: Slo, file: SloFile, severity: str) -> dict[str, str]:
    return {**identity(slo, file), "severity": severity, "owner": slo.alerts.owner}


def _notes(slo: Slo, file: SloFile, summary: str, description: str) -> dict[str, str]:
    page = slo.alerts.runbook or f"{file.runbooks.rstrip('/')}/{slo.name}.md"
    return {"summary": summary, "description": description, "runbook_url": page}


# --- Percentiles ----------------------------------------------------------------------------------


def percentile_group(file: SloFile, registry: Mapping[str, Metric] = REGISTRY) -> Group | None:
    """Percentiles over the wanted labels, and the alerts on them; None when none is declared."""
    if not file.percentiles:
        return None
    rules: list[Record | Alert] = []
    for one in file.percentiles:
        rules += _percentile(one, file, registry[one.metric])
    return Group(name="percentiles", rules=tuple(rules))


def _percentile(one: Percentile, file: SloFile, metric: Metric) -> list[Record | Alert]:
    labels = {**file.labels, "service": file.service, "percentile": one.name}
    chosen = matchers(one.match)
    bucket = Selector(metric.bucket, chosen).over(burn.seconds(one.window))
    count = Selector(metric.count, chosen).over(burn.seconds(one.window))
    by = f"sum by ({', '.join(one.by)}) " if one.by else "sum"
    mine = f'{{percentile="{one.name}"}}'
    limit = bound(one.threshold)
    assert limit is not None, "checked when the declaration was read"
    return [
        Record(
            record=PERCENTILE,
            expr=(
                f"histogram_quantile({literal(Decimal(one.quantile))}, "
                f"sum by ({', '.join(['le', *one.by])}) (rate({bucket})))"
            ),
            labels=labels,
        ),
        Record(record=PERCENTILE_EVENTS, expr=f"{by}(increase({count}))", labels=labels),
        Alert(
            alert=PERCENTILE_HIGH,
            expr=(
                f"{PERCENTILE}{mine} > {literal(limit)}\n"
                f"and {PERCENTILE_EVENTS}{mine} > {_at_least(one.min_events)}"
            ),
            hold=one.hold,
            labels={**labels, "severity": one.severity, "owner": one.owner},
            annotations={
                "summary": f"{one.name} is above {one.threshold}",
                "description": (
                    f"The {one.quantile} quantile of {one.metric} over {one.window} is "
                    "{{ $value | humanizeDuration }}"
                    + "".join(f", {label} {{{{ $labels.{label} }}}}" for label in one.by)
                    + "."
                ),
                "runbook_url": f"{file.runbooks.rstrip('/')}/{one.name}.md",
            },
        ),
    ]
