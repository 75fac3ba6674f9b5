"""The objectives as a person writes them, in YAML, and everything that can be wrong with them.

`parse` reads a file and checks it against the metric registry, so that nothing which compiles can
be dead on arrival: a metric that nobody emits, a label value that cannot occur, a latency threshold
between two bucket bounds, an alert that cannot fire. All problems are reported at once, each with
the path of its field and what would be right.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Final, Literal

import msgspec
from msgspec import Struct, field
from typing_extensions import override

from telemetry.metrics import REGISTRY, Kind, Label, Metric
from telemetry.slo.burn import DAY, duration, impossible, seconds, windows

VERSION: Final = "meterline/slo/v1"
TARGET_LABELS: Final = frozenset({"job", "instance"})  # what Prometheus itself puts on a series
Severity = Literal["page", "ticket"]
Values = str | list[str]

_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_SELECTOR = re.compile(r"\s*([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{(.*)\})?\s*", re.DOTALL)
_MATCHER = re.compile(r'\s*([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPE = re.compile(r"\\(.)")
_PERIOD_MIN_S, _PERIOD_MAX_S = 7 * DAY, 90 * DAY


class SloInvalid(ValueError):
    """What is wrong with a declaration: one line each, with the field's path."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


# --- As written -----------------------------------------------------------------------------------


class Availability(Struct, frozen=True, forbid_unknown_fields=True):
    """Bad events by the values of one or more labels of a counter."""

    metric: str
    bad: dict[str, Values]
    match: dict[str, Values] = {}


class Latency(Struct, frozen=True, forbid_unknown_fields=True):
    """Good events are those at or below a bucket bound of a histogram."""

    metric: str
    threshold: str
    match: dict[str, Values] = {}


class Ratio(Struct, frozen=True, forbid_unknown_fields=True):
    """Good of total, each a selector on a counter: `name{label="value"}`."""

    good: str
    total: str


class Threshold(Struct, frozen=True, forbid_unknown_fields=True):
    """Good moments are those in which an expression holds: `expr op value`."""

    expr: str
    op: Literal["<", "<=", ">", ">="]
    value: str


class Sli(Struct, frozen=True, forbid_unknown_fields=True):
    """What is measured: exactly one of the four."""

    availability: Availability | None = None
    latency: Latency | None = None
    ratio: Ratio | None = None
    threshold: Threshold | None = None


class SmallN(Struct, frozen=True, forbid_unknown_fields=True):
    """The alert for objectives with so few events that burn rates say nothing."""

    window: str = "6h"
    ratio: str = "0.5"
    min_events: int = 3


class LowTraffic(Struct, frozen=True, forbid_unknown_fields=True):
    """How many bad events in the long window a burn alert needs at least."""

    min_bad: int = 5
    expected_events_per_hour: str | None = None
    small_n: SmallN | None = field(default=None, name="small_n_alert")


class Alerts(Struct, frozen=True, forbid_unknown_fields=True):
    """Who is told, and how long an alert stays after its condition went."""

    owner: str = "oncall"
    keep_firing_for: str = "10m"
    runbook: str | None = None


class Slo(Struct, frozen=True, forbid_unknown_fields=True):
    """One objective."""

    name: str
    sli: Sli
    objective: str  # percent, a decimal in quotes: "99.5"
    window: str = "30d"
    description: str = ""
    group_by: list[str] = []
    low_traffic: LowTraffic = LowTraffic()
    alerts: Alerts = Alerts()

    @property
    def objective_percent(self) -> Decimal:
        return Decimal(self.objective)

    @property
    def period_s(self) -> int:
        return seconds(self.window)


class Percentile(Struct, frozen=True, forbid_unknown_fields=True):
    """An alert on a percentile of a histogram, for each value of some labels."""

    name: str
    metric: str
    quantile: str
    threshold: str
    by: list[str] = []
    match: dict[str, Values] = {}
    window: str = "10m"
    hold: str = field(default="5m", name="for")
    min_events: int = 20
    severity: Severity = "ticket"
    owner: str = "oncall"


class SloFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A file of objectives. Example: deploy/slo.yaml."""

    version: str
    service: str = "meterline"
    job: str = "meterline.*"  # the scrape jobs of the gateways, a regular expression
    scrape_interval: str = "15s"
    labels: dict[str, str] = {}
    runbooks: str = "docs/runbooks"  # where the pages are, a folder or a URL
    slos: list[Slo] = []
    percentiles: list[Percentile] = []


# --- Selectors ------------------------------------------------------------------------------------


class Matcher(Struct, frozen=True):
    label: str
    op: str
    value: str


class Selector(Struct, frozen=True):
    """An instant vector selector of PromQL."""

    series: str
    matchers: tuple[Matcher, ...] = ()

    @override
    def __str__(self) -> str:
        if not self.matchers:
            return self.series
        chosen = ",".join(f"{m.label}{m.op}{_quoted(m.value)}" for m in self.matchers)
        return f"{self.series}{{{chosen}}}"

    def over(self, window_s: int) -> str:
        """As a range: `name{…}[5m]`."""
        return f"{self}[{duration(window_s)}]"

    def where(self, more: Mapping[str, Values]) -> "Selector":
        """The same, with more matchers."""
        return Selector(self.series, (*self.matchers, *matchers(more)))


def matchers(wanted: Mapping[str, Values]) -> tuple[Matcher, ...]:
    """Label values as matchers: one value is equality, several an alternation."""
    return tuple(
        Matcher(label, "=", values)
        if isinstance(values, str)
        else Matcher(label, "=", values[0])
        if len(values) == 1
        else Matcher(label, "=~", "|".join(re.escape(value) for value in values))
        for label, values in wanted.items()
    )


def selector(text: str) -> Selector:
    """`name{label="value",…}` read. ValueError: it is something else, such as a function call."""
    whole = _SELECTOR.fullmatch(text)
    if whole is None:
        raise ValueError(f'{text!r} is not a selector such as name{{label="value"}}')
    found, rest = [], whole[2] or ""
    at = 0
    while rest[at:].strip():
        one = _MATCHER.match(rest, at)
        if one is None:
            raise ValueError(f"{text!r}: cannot read the matchers from {rest[at:]!r}")
        found.append(Matcher(one[1], one[2], _ESCAPE.sub(_unescaped, one[3])))
        at = one.end()
    return Selector(whole[1], tuple(found))


def _unescaped(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


# --- Reading --------------------------------------------------------------------------------------


def parse(text: str | bytes, registry: Mapping[str, Metric] = REGISTRY) -> SloFile:
    """A checked declaration. SloInvalid: with every problem found."""
    try:
        found = msgspec.yaml.decode(text, type=SloFile)
    except msgspec.ValidationError as error:
        raise SloInvalid([_placed(str(error))]) from error
    except msgspec.DecodeError as error:
        raise SloInvalid([f"not YAML: {' '.join(str(error).split())}"]) from error
    problems = list(check(found, registry))
    if problems:
        raise SloInvalid(problems)
    return found


def _placed(message: str) -> str:
    text, _, path = message.partition(" - at `$")
    return f"{path.rstrip('`').lstrip('.')}: {text}" if path else text


def check(file: SloFile, registry: Mapping[str, Metric]) -> Iterable[str]:
    """What is wrong, one line each."""
    if file.version != VERSION:
        yield f"version: {file.version!r} is not known; write {VERSION}"
    scrape_s = 0
    try:
        scrape_s = seconds(file.scrape_interval)
    except ValueError as error:
        yield f"scrape_interval: {error}"
    for label in file.labels:
        if _LABEL.fullmatch(label) is None:
            yield f"labels.{label}: not a label name"
    for kind, names in (
        ("slos", [slo.name for slo in file.slos]),
        ("percentiles", [one.name for one in file.percentiles]),
    ):
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"{kind}: {name!r} is declared twice"
    for at, slo in enumerate(file.slos):
        for problem in _slo(slo, scrape_s, registry):
            yield f"slos[{at}] ({slo.name}).{problem}"
    for at, one in enumerate(file.percentiles):
        for problem in _percentile(one, scrape_s, registry):
            yield f"percentiles[{at}] ({one.name}).{problem}"


def _slo(slo: Slo, scrape_s: int, registry: Mapping[str, Metric]) -> Iterable[str]:
    if _NAME.fullmatch(slo.name) is None:
        yield f"name: {slo.name!r}: small letters, digits and hyphens, a letter first"
    objective = _decimal(slo.objective)
    if objective is None or not 0 < objective < 100:
        yield f'objective: {slo.objective!r} is not a percentage between 0 and 100, such as "99.5"'
        objective = None
    period_s = _length(slo.window)
    if period_s is None or not _PERIOD_MIN_S <= period_s <= _PERIOD_MAX_S:
        yield f"window: {slo.window!r} is not a period from 7d to 90d"
    elif objective is not None:
        for window in impossible(windows(period_s), objective):
            yield (
                f"objective: the alert on {duration(window.long_s)} at burn rate "
                f"{window.factor} would need an error ratio of 1 or more and can never fire; "
                f"raise the objective above {100 - 100 / window.factor:.4g}, or shorten the window"
            )
    if scrape_s and scrape_s * 4 > 300:
        yield "scrape_interval: the 5m window needs four scrapes; scrape at least each 75s"
    if _length(slo.alerts.keep_firing_for) is None:
        yield f"alerts.keep_firing_for: {slo.alerts.keep_firing_for!r} is not a time such as 10m"
    yield from _low_traffic(slo.low_traffic)
    yield from _sli(slo, registry)


def _low_traffic(guard: LowTraffic) -> Iterable[str]:
    if guard.min_bad < 1:
        yield "low_traffic.min_bad: must be 1 or more"
    expected = guard.expected_events_per_hour
    if expected is not None:
        rate = _decimal(expected)
        if rate is None or rate <= 0:
            yield f"low_traffic.expected_events_per_hour: {expected!r} is not a number above 0"
        elif guard.min_bad > rate:
            yield (
                f"low_traffic.min_bad: at {expected} events per hour the page window of 1h can "
                f"never hold {guard.min_bad} bad ones; lower it, or rely on small_n_alert"
            )
    if guard.small_n is not None:
        length = _length(guard.small_n.window)
        if length not in (30 * 60, 3_600, 7_200, 21_600, 86_400):
            yield "low_traffic.small_n_alert.window: one of 30m, 1h, 2h, 6h, 1d"
        ratio = _decimal(guard.small_n.ratio)
        if ratio is None or not 0 < ratio <= 1:
            yield 'low_traffic.small_n_alert.ratio: a share above 0 and up to 1, such as "0.5"'
        if guard.small_n.min_events < 1:
            yield "low_traffic.small_n_alert.min_events: must be 1 or more"


def _sli(slo: Slo, registry: Mapping[str, Metric]) -> Iterable[str]:
    sli = slo.sli
    given = [kind for kind in (sli.availability, sli.latency, sli.ratio, sli.threshold) if kind]
    if len(given) != 1:
        yield "sli: give exactly one of availability, latency, ratio, threshold"
        return
    grouped: list[Metric] = []
    if sli.availability is not None:
        metric = registry.get(sli.availability.metric)
        if metric is None or metric.kind is not Kind.COUNTER:
            said = _unknown(sli.availability.metric, registry, "counter")
            yield f"sli.availability.metric: {said}"
            return
        grouped.append(metric)
        yield from _values("sli.availability.match", metric, sli.availability.match)
        yield from _values("sli.availability.bad", metric, sli.availability.bad)
        if not sli.availability.bad:
            yield "sli.availability.bad: name the label values that are bad"
    elif sli.latency is not None:
        metric = registry.get(sli.latency.metric)
        if metric is None or metric.kind is not Kind.HISTOGRAM:
            yield f"sli.latency.metric: {_unknown(sli.latency.metric, registry, 'histogram')}"
            return
        grouped.append(metric)
        yield from _values("sli.latency.match", metric, sli.latency.match)
        yield from _bound("sli.latency.threshold", metric, sli.latency.threshold)
    elif sli.ratio is not None:
        for side, text in (("good", sli.ratio.good), ("total", sli.ratio.total)):
            where = f"sli.ratio.{side}"
            try:
                chosen = selector(text)
            except ValueError as error:
                yield f"{where}: {error}"
                continue
            metric = _owner(chosen.series, registry)
            if metric is None or metric.kind not in (Kind.COUNTER, Kind.HISTOGRAM):
                yield f"{where}: {_unknown(chosen.series, registry, 'counter')}"
                continue
            grouped.append(metric)
            yield from _selected(where, metric, chosen)
    elif sli.threshold is not None:
        yield from _threshold(sli.threshold, registry)
        if slo.group_by:
            yield "group_by: a threshold is one series; group inside its expression"
        return
    for label in slo.group_by:
        for metric in grouped:
            yield from _groups("group_by", metric, label)


def _threshold(sli: Threshold, registry: Mapping[str, Metric]) -> Iterable[str]:
    if _decimal(sli.value) is None:
        yield f"sli.threshold.value: {sli.value!r} is not a number"
    named = set(re.findall(r"\bmeterline_[a-z0-9_]+", sli.expr))
    if not named:
        yield "sli.threshold.expr: names no metric of meterline"
    for name in sorted(named):
        if _owner(name, registry) is None:
            yield f"sli.threshold.expr: {_unknown(name, registry, 'metric')}"


def _percentile(one: Percentile, scrape_s: int, registry: Mapping[str, Metric]) -> Iterable[str]:
    if _NAME.fullmatch(one.name) is None:
        yield f"name: {one.name!r}: small letters, digits and hyphens, a letter first"
    quantile = _decimal(one.quantile)
    if quantile is None or not 0 < quantile < 1:
        yield f'quantile: {one.quantile!r} is not between 0 and 1, such as "0.95"'
    window_s = _length(one.window)
    if window_s is None:
        yield f"window: {one.window!r} is not a duration such as 10m"
    elif scrape_s * 4 > window_s:
        yield f"window: {one.window} holds fewer than four scrapes of {duration(scrape_s)}"
    if _length(one.hold) is None:
        yield f"for: {one.hold!r} is not a duration such as 5m"
    if one.min_events < 1:
        yield "min_events: must be 1 or more"
    metric = registry.get(one.metric)
    if metric is None or metric.kind is not Kind.HISTOGRAM:
        yield f"metric: {_unknown(one.metric, registry, 'histogram')}"
        return
    yield from _values("match", metric, one.match)
    yield from _bound("threshold", metric, one.threshold)
    if bound(one.threshold) == Decimal(str(metric.buckets[-1])):
        yield (
            f"threshold: {one.threshold} is the last bucket of {one.metric}, and no percentile is "
            f"ever above it; take {metric.buckets[-2]:g}s or less"
        )
    for label in one.by:
        yield from _groups("by", metric, label)


def _values(where: str, metric: Metric, wanted: Mapping[str, Values]) -> Iterable[str]:
    for label, values in wanted.items():
        listed = [values] if isinstance(values, str) else values
        if not listed:
            yield f"{where}.{label}: the list is empty"
        yield from _allowed(f"{where}.{label}", metric, label, listed)


def _selected(where: str, metric: Metric, chosen: Selector) -> Iterable[str]:
    for one in chosen.matchers:
        if one.label == "le" and chosen.series == metric.bucket:
            yield from _bound(f"{where}.le", metric, one.value)
        else:
            listed = one.value.split("|") if one.op in ("=~", "!~") else [one.value]
            yield from _allowed(f"{where}.{one.label}", metric, one.label, listed)


def _allowed(where: str, metric: Metric, label: str, values: Iterable[str]) -> Iterable[str]:
    if label in TARGET_LABELS:
        return
    declared = _declared(metric, label)
    if declared is None:
        yield f"{where}: {metric.name} has no such label; it has {', '.join(metric.label_names)}"
        return
    for value in values:
        if declared.values and value not in declared.values:
            yield f"{where}: {value!r} cannot occur; the values are {', '.join(declared.values)}"


def _groups(where: str, metric: Metric, label: str) -> Iterable[str]:
    declared = _declared(metric, label)
    if declared is None:
        known = ", ".join(metric.label_names)
        yield f"{where}: {metric.name} has no label {label!r}; it has {known}"
    elif not declared.values and declared.cap is None:
        yield f"{where}: {label!r} has no bound; group by a label with a list or a cap"


def _bound(where: str, metric: Metric, text: str) -> Iterable[str]:
    value = bound(text)
    if value is None:
        yield f"{where}: {text!r} is not a time such as 1.5s or 250ms"
    elif value not in {Decimal(str(bucket)) for bucket in metric.buckets}:
        near = sorted(metric.buckets, key=lambda bucket: abs(Decimal(str(bucket)) - value))[:2]
        close = " or ".join(f"{bucket:g}s" for bucket in sorted(near))
        yield f"{where}: {text} is no bucket bound of {metric.name}; take {close}"


def bound(text: str) -> Decimal | None:
    """`1.5s`, `250ms` or plain seconds; None: something else."""
    if text.endswith("ms"):
        value = _decimal(text[:-2])
        return None if value is None else value / 1000
    return _decimal(text.removesuffix("s"))


def _declared(metric: Metric, label: str) -> Label | None:
    return next((one for one in metric.labels if one.name == label), None)


def _owner(series: str, registry: Mapping[str, Metric]) -> Metric | None:
    return next((metric for metric in registry.values() if series in metric.series), None)


def _unknown(name: str, registry: Mapping[str, Metric], wanted: str) -> str:
    known = registry.get(name)
    if known is not None:
        return f"{name} is a {known.kind}; this needs a {wanted}"
    return f"nothing emits {name!r}; docs/reference/metrics.md lists what there is"


def _decimal(text: str) -> Decimal | None:
    try:
        found = Decimal(text)
    except InvalidOperation:
        return None
    return found if found.is_finite() else None


def _length(text: str) -> int | None:
    try:
        return seconds(text)
    except ValueError:
        return None
