"""PromQL from metric declarations, so that no expression can name what does not exist.

A `Query` carries the unit of its result, which follows from the metric's unit and what is done to
it. A label that the metric lacks is a KeyError while the dashboards are built. `where` gives labels
their matchers, operator included: `{"outcome": '="ok"'}`.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from telemetry.metrics import Kind, Metric

INTERVAL = "$__rate_interval"

_UNITS = {
    "seconds": "s",
    "dollars": "currencyUSD",
    "bytes": "bytes",
    "ratio": "percentunit",
    "timestamp": "dateTimeFromNow",
}
_RATES = {"requests": "reqps", "seconds": "percentunit", "bytes": "Bps"}
_VARIABLES = ("model", "provider", "route")  # those that a dashboard filters by, where they exist


class Query(Struct, frozen=True):
    """An expression and the Grafana unit of its values."""

    expr: str
    unit: str

    def times(self, factor: str, unit: str) -> "Query":
        """Scaled, and thereby in another unit."""
        return Query(f"{self.expr} * {factor}", unit)


def gauge(
    metric: Metric, *, by: Sequence[str] = (), how: str = "sum", where: Mapping[str, str] = {}
) -> Query:
    """The gauge's value, aggregated over what is not in `by`."""
    assert metric.kind in (Kind.GAUGE, Kind.INFO)
    return Query(_by(how, metric, by, _select(metric, metric.name, where)), _unit(metric))


def rate(
    metric: Metric, *, by: Sequence[str] = (), window: str = INTERVAL, where: Mapping[str, str] = {}
) -> Query:
    """The counter's rise per second."""
    assert metric.kind is Kind.COUNTER
    expr = f"rate({_select(metric, metric.name, where)}[{window}])"
    return Query(_by("sum", metric, by, expr), _RATES.get(metric.unit, "cps"))


def increase(
    metric: Metric, *, by: Sequence[str] = (), window: str, where: Mapping[str, str] = {}
) -> Query:
    """The counter's rise over the window."""
    assert metric.kind is Kind.COUNTER
    expr = f"increase({_select(metric, metric.name, where)}[{window}])"
    return Query(_by("sum", metric, by, expr), _unit(metric))


def quantile(
    q: float, metric: Metric, *, by: Sequence[str] = (), where: Mapping[str, str] = {}
) -> Query:
    """The histogram's q-quantile, interpolated within a bucket."""
    assert metric.kind is Kind.HISTOGRAM
    expr = f"rate({_select(metric, metric.bucket, where)}[{INTERVAL}])"
    return Query(
        f"histogram_quantile({q:g}, {_by('sum', metric, ('le', *by), expr)})", _unit(metric)
    )


def buckets(metric: Metric, *, where: Mapping[str, str] = {}) -> Query:
    """The increase of each bucket, for a heatmap."""
    assert metric.kind is Kind.HISTOGRAM
    expr = f"increase({_select(metric, metric.bucket, where)}[{INTERVAL}])"
    return Query(_by("sum", metric, ("le",), expr), _unit(metric))


def ratio(part: Query, whole: Query) -> Query:
    """Part of whole; no value, rather than NaN, where there is no traffic."""
    return Query(f"{part.expr} / ({whole.expr} > 0)", "percentunit")


def largest(metric: Metric) -> Query:
    """The gauge's value furthest from zero, as a positive number."""
    return Query(f"max(abs({_select(metric, metric.name, {})}))", _unit(metric))


def age(metric: Metric, *, by: Sequence[str] = ()) -> Query:
    """Seconds since a gauge that is a time stamp."""
    assert metric.unit == "timestamp"
    return Query(_by("max", metric, by, f"time() - {_select(metric, metric.name, {})}"), "s")


def _select(metric: Metric, series: str, where: Mapping[str, str]) -> str:
    matchers = {name: f'=~"${name}"' for name in _VARIABLES if name in metric.label_names}
    matchers.update(where)
    for name in matchers:
        metric.label(name)
    inside = ",".join(f"{name}{matcher}" for name, matcher in sorted(matchers.items()))
    return f"{series}{{{inside}}}" if inside else series


def _by(how: str, metric: Metric, by: Sequence[str], expr: str) -> str:
    for name in by:
        if name not in ("le", "instance"):
            metric.label(name)
    grouping = f" by ({', '.join(by)}) " if by else ""
    return f"{how}{grouping}({expr})"


def _unit(metric: Metric) -> str:
    return _UNITS.get(metric.unit, "short")
