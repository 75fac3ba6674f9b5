"""Tests of the generated rules for `promtool test rules`, generated from the same declaration.

A rule that nobody has seen fire is a hope. Each objective is played through: health, errors just
above and just below each burn rate, recovery, a counter that restarts, one error in little traffic,
everything failing in little traffic, no series, no target. The tests know what the windows and
their factors *mean* (when an alert must come), not how the rules are written, so that a rule with
another factor, window or matcher breaks at least one of them. Next to each objective's events runs
a decoy, all of it bad, that its matchers must keep out.
"""

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Final

from msgspec import Struct

from telemetry.metrics import REGISTRY, Metric
from telemetry.slo import burn
from telemetry.slo.burn import DAY, HOUR, MINUTE, Window
from telemetry.slo.declaration import Matcher, Percentile, Selector, Slo, SloFile
from telemetry.slo.rules import (
    ABSENT,
    BUDGET_LOW,
    GOOD_MOMENT,
    PAGE,
    PERCENTILE_HIGH,
    SMALL_N,
    TICKET,
    bucket_label,
    events,
    identity,
)

_BUSY: Final = 600_000  # events a minute
_QUIET: Final = Fraction(1, 20)  # one in twenty minutes
EVALUATED_S: Final = 2 * MINUTE
DAYS_EVALUATED_S: Final = 20 * MINUTE  # tests that play days would take minutes otherwise
_DAYS_SCRAPED_S: Final = 2 * MINUTE


class Stretch(Struct, frozen=True):
    """So long, so many events a minute, this share of them bad."""

    length_s: int
    per_minute: Fraction
    bad: Fraction = Fraction(0)


class Firing(Struct, frozen=True):
    """Whether an alert is firing at a time after the start, as `promtool` is asked."""

    at_s: int
    alert: str
    is_firing: bool
    about: str  # the matcher that finds it: slo="…"

    @property
    def subject(self) -> str:
        """The rule that it is about."""
        return self.alert

    def rendered(self) -> dict[str, object]:
        asked = f'ALERTS{{alertname="{self.alert}",alertstate="firing",{self.about}}}'
        return {
            "expr": f"count({asked}) or vector(0)",
            "eval_time": f"{self.at_s // MINUTE}m",
            "exp_samples": [{"labels": "{}", "value": int(self.is_firing)}],
        }


class Reading(Struct, frozen=True):
    """What a recorded ratio must be at a time after the start, in millionths."""

    at_s: int
    record: str
    millionths: int
    about: str

    @property
    def subject(self) -> str:
        """The rule that it is about."""
        return self.record

    def rendered(self) -> dict[str, object]:
        return {
            "expr": f"sum(round({self.record}{{{self.about}}} * 1000000))",
            "eval_time": f"{self.at_s // MINUTE}m",
            "exp_samples": [{"labels": "{}", "value": self.millionths}],
        }


class Case(Struct, frozen=True, kw_only=True):
    """One test: what is scraped, which alerts fire when, and what is recorded."""

    name: str
    interval_s: int
    evaluated_s: int = EVALUATED_S  # promtool takes it by file, not by test
    series: tuple[tuple[str, str], ...]
    expected: tuple[Firing | Reading, ...]

    def rendered(self) -> dict[str, object]:
        return {
            "name": self.name,
            "interval": burn.duration(self.interval_s),
            "input_series": [{"series": name, "values": values} for name, values in self.series],
            "promql_expr_test": [one.rendered() for one in self.expected],
        }


# --- Series ---------------------------------------------------------------------------------------


def counter(stretches: Sequence[tuple[int, Fraction]], interval_s: int) -> str:
    """A running total in promtool's notation: (seconds, growth per minute) one after another."""
    total, parts = Fraction(0), ["0"]
    for length_s, per_minute in stretches:
        samples = length_s // interval_s
        # promtool adds the step again and again: only what a float holds exactly does not end in
        # a tiny fall, which reads as a restart.
        step = Fraction(round(per_minute * interval_s / MINUTE * 1024), 1024)
        if samples:
            parts.append(f"{_number(total + step)}+{_number(step)}x{samples - 1}")
        total += step * samples
    return " ".join(parts)


def gauge(stretches: Sequence[tuple[int, Fraction]], interval_s: int) -> str:
    """A level in promtool's notation: (seconds, value) one after another."""
    return " ".join(
        f"{_number(value)}+0x{length_s // interval_s - 1}" for length_s, value in stretches
    )


def _number(value: Fraction) -> str:
    """Twelve decimals: all of a step's, which are ten."""
    exact = Decimal(value.numerator) / Decimal(value.denominator)
    return f"{exact:.12f}".rstrip("0").rstrip(".")


class Played(Struct, frozen=True, kw_only=True):
    """The series that good and bad events of an objective count on, and those of its decoy."""

    good: tuple[str, ...]
    bad: tuple[str, ...]
    all: tuple[str, ...] = ()  # counts both: a histogram's count and its widest bucket
    decoy: tuple[str, ...] = ()

    def series(self, stretches: Sequence[Stretch], interval_s: int) -> tuple[tuple[str, str], ...]:
        good = [(s.length_s, s.per_minute * (1 - s.bad)) for s in stretches]
        bad = [(s.length_s, s.per_minute * s.bad / max(len(self.bad), 1)) for s in stretches]
        both = [(s.length_s, s.per_minute) for s in stretches]
        lines = [(name, counter(good, interval_s)) for name in self.good]
        if any(s.bad for s in stretches):
            lines += [(name, counter(bad, interval_s)) for name in self.bad]
        lines += [(name, counter(both, interval_s)) for name in self.all]
        noise = [(s.length_s, Fraction(_BUSY)) for s in stretches]
        lines += [(name, counter(noise, interval_s)) for name in self.decoy]
        return tuple(lines)


def played(slo: Slo, registry: Mapping[str, Metric] = REGISTRY) -> Played:
    """The series of an objective on counters."""
    counted = events(slo, registry)
    assert counted is not None
    sli = slo.sli
    if sli.latency is not None:
        return _histogram(registry[sli.latency.metric], sli.latency.match, sli.latency.threshold)
    metric = next(m for m in registry.values() if counted.total.series in m.series)
    inside = _inside(counted.total, metric)
    if sli.availability is not None:
        bad = sli.availability.bad
        spoiled = [
            {**inside, label: value}
            for label, values in bad.items()
            for value in ([values] if isinstance(values, str) else values)
        ]
        for one in spoiled:
            for label, values in bad.items():
                one.setdefault(label, values if isinstance(values, str) else values[0])
        fine = {**inside, **{label: _other(metric, label, bad[label]) for label in bad}}
        outside = [spoiled[0] | _off(off, inside) for off in _outsides(counted.total, metric)]
        name = metric.name
        return Played(
            good=(_series(name, fine),),
            bad=tuple(_series(name, one) for one in spoiled),
            decoy=tuple(_series(name, one) for one in outside),
        )
    assert counted.good is not None
    good_inside = {**inside, **_inside(counted.good, metric)}
    bad_inside = dict(inside)
    for matcher in counted.good.matchers:
        if matcher not in counted.total.matchers:
            bad_inside[matcher.label] = _outside_value(matcher, metric)
    return Played(
        good=(_series(counted.good.series, good_inside),),
        bad=(_series(counted.total.series, bad_inside),),
        decoy=tuple(
            _series(counted.total.series, {**bad_inside, **_off(one, inside)})
            for one in _outsides(counted.total, metric)
        ),
    )


def _histogram(
    metric: Metric,
    match: Mapping[str, str | list[str]],
    threshold: str,
    grouped: Mapping[str, str] | None = None,
) -> Played:
    chosen = Selector(metric.name).where(match)
    inside = {**(grouped or {}), **_inside(chosen, metric)}
    good = bucket_label(threshold)
    wider = [repr(bound) for bound in metric.buckets if bound > float(good)][:1]

    def slow(labels: Mapping[str, str]) -> list[str]:
        buckets = [_series(metric.bucket, {**labels, "le": le}) for le in (*wider, "+Inf")]
        return [*buckets, _series(metric.count, labels)]

    decoys = [{**inside, **_off(one, inside)} for one in _outsides(chosen, metric)]
    return Played(
        good=(_series(metric.bucket, {**inside, "le": good}),),
        bad=(),
        all=tuple(slow(inside)),
        decoy=tuple(line for labels in decoys for line in slow(labels)),
    )


def _series(name: str, labels: Mapping[str, str]) -> str:
    return str(Selector(name, tuple(Matcher(k, "=", v) for k, v in sorted(labels.items()))))


def _inside(chosen: Selector, metric: Metric) -> dict[str, str]:
    """Labels that the matchers take."""
    taken = {}
    for one in chosen.matchers:
        if one.op in ("=", "=~"):
            taken[one.label] = one.value.split("|")[0].replace("\\", "")
        else:
            taken[one.label] = _other(metric, one.label, one.value.split("|"))
    return taken


def _outsides(chosen: Selector, metric: Metric) -> list[dict[str, str]]:
    """For each matcher: a label value that it alone refuses."""
    return [{one.label: _outside_value(one, metric)} for one in chosen.matchers]


def _outside_value(one: Matcher, metric: Metric) -> str:
    if one.op in ("!=", "!~"):
        return one.value.split("|")[0]
    return _other(metric, one.label, [value.replace("\\", "") for value in one.value.split("|")])


def _off(one: Mapping[str, str], inside: Mapping[str, str]) -> dict[str, str]:
    return {**{k: v for k, v in inside.items() if k not in one}, **one}


def _other(metric: Metric, label: str, values: str | Sequence[str]) -> str:
    """A value that the label may have and that is not one of these."""
    known = next((one.values for one in metric.labels if one.name == label), ())
    return next((value for value in known if value not in _listed(values)), "something-else")


def _listed(values: str | Sequence[str]) -> Sequence[str]:
    return [values] if isinstance(values, str) else values


# --- Objectives -----------------------------------------------------------------------------------


def cases(slo: Slo, file: SloFile, registry: Mapping[str, Metric] = REGISTRY) -> list[Case]:
    """All tests of an objective."""
    found = _Objective(slo, file, registry)
    quiet = [] if slo.sli.threshold else [*found.low_traffic(), *found.guarded(), found.restarted()]
    return [*found.healthy(), *found.pages(), *found.tickets(), *quiet, *found.telemetry()]


class _Objective:
    """The tests of one objective. Bad shares are written in multiples of its error budget."""

    def __init__(self, slo: Slo, file: SloFile, registry: Mapping[str, Metric]) -> None:
        self.slo = slo
        self.budget = Fraction(burn.budget(slo.objective_percent))
        self.fast, self.slow, self.day, self.days = burn.windows(slo.period_s)
        self.about = f'slo="{slo.name}"'
        self.name = identity(slo, file)
        self.kept_s = burn.seconds(slo.alerts.keep_firing_for)
        self.up = Selector("up").where({"job": "meterline"})
        self.played = None if slo.sli.threshold else played(slo, registry)

    def case(
        self,
        name: str,
        stretches: Sequence[Stretch],
        expected: Iterable[tuple[int, str, bool]],
        *,
        is_days: bool = False,
        readings: Iterable[Reading] = (),
    ) -> Case:
        interval_s = _DAYS_SCRAPED_S if is_days else MINUTE
        length_s = sum(stretch.length_s for stretch in stretches)
        series = [(str(self.up), f"1+0x{length_s // interval_s}")]
        if self.played is not None:
            series += self.played.series(stretches, interval_s)
        else:
            moments = [(s.length_s, 1 - s.bad) for s in stretches]
            series.append((_series(GOOD_MOMENT, self.name), gauge(moments, interval_s)))
        return Case(
            name=f"{self.slo.name}: {name}",
            interval_s=interval_s,
            evaluated_s=DAYS_EVALUATED_S if is_days else EVALUATED_S,
            series=tuple(series),
            expected=(
                # Asked when rules are evaluated: an alert is seen for five minutes after that.
                *(
                    Firing(_evaluated(at, is_days=is_days), alert, fires, self.about)
                    for at, alert, fires in expected
                ),
                *readings,
            ),
        )

    def readings(self, at_s: int, windows_s: Iterable[int], bad: Fraction) -> list[Reading]:
        """The ratio over each window, after this share was bad for long enough."""
        return [
            Reading(
                at_s,
                f"slo:sli_error:ratio_rate{burn.duration(window_s)}",
                round(bad * 1_000_000),
                self.about,
            )
            for window_s in windows_s
        ]

    def busy(self, length_s: int, burned: Fraction | int = 0, times: int = 1) -> Stretch:
        return Stretch(length_s, Fraction(_BUSY * times), min(burned * self.budget, Fraction(1)))

    def healthy(self) -> list[Case]:
        end_s = 7 * HOUR
        silent = [(at, name, False) for at in (HOUR, end_s) for name in (PAGE, TICKET, SMALL_N)]
        silent += [(end_s, ABSENT, False), (end_s, BUDGET_LOW, False)]
        burned = Fraction(self.days.factor) / 2
        ratio = burned * self.budget
        hours = [window_s for window_s in burn.WINDOWS_S if window_s <= 6 * HOUR]
        return [
            self.case("nothing is bad, and no such series exists", [self.busy(end_s)], silent),
            self.case(
                "half of the burn rate that anyone is told of",
                [self.busy(end_s, burned)],
                silent,
                readings=[
                    *self.readings(end_s, hours, ratio),
                    Reading(end_s, "slo:period_error:ratio", round(ratio * 1_000_000), self.about),
                    Reading(
                        end_s, "slo:current_burn_rate:ratio", round(burned * 1_000_000), self.about
                    ),
                ],
            ),
        ]

    def pages(self) -> list[Case]:
        fast, slow = Fraction(self.fast.factor), Fraction(self.slow.factor)
        rate = min(Fraction(11, 10) * fast, 1 / self.budget)
        comes_s = _reached_s(self.fast, rate)
        hot = min(7 * fast, 1 / self.budget)
        burned_s = _minutes(_reached_s(self.fast, hot) * Fraction(11, 10)) + 3 * MINUTE
        steady_s = _reached_s(self.slow, 2 * slow)
        before = self.busy(6 * HOUR)
        over = 6 * HOUR + burned_s
        later = 6 * HOUR + _minutes(steady_s * Fraction(105, 100)) + 2 * MINUTE
        return [
            self.case(
                "just above the fast burn rate pages in time",
                [before, self.busy(2 * HOUR, rate)],
                [
                    (6 * HOUR + _minutes(comes_s * Fraction(95, 100)) - 2 * MINUTE, PAGE, False),
                    (6 * HOUR + _minutes(comes_s * Fraction(105, 100)) + 2 * MINUTE, PAGE, True),
                ],
            ),
            self.case(
                "a short fire pages, and clears soon after",
                [before, self.busy(burned_s, hot), self.busy(HOUR)],
                [
                    (over, PAGE, True),
                    (over + self.fast.short_s + self.kept_s + 5 * MINUTE, PAGE, False),
                ],
            ),
            self.case(
                "above the slow burn rate pages in time, and clears",
                [before, self.busy(later - 6 * HOUR, 2 * slow), self.busy(2 * HOUR)],
                [
                    (6 * HOUR + _minutes(steady_s * Fraction(95, 100)) - 2 * MINUTE, PAGE, False),
                    (later, PAGE, True),
                    (later + self.slow.short_s + self.kept_s + 5 * MINUTE, PAGE, False),
                ],
            ),
            self.case(
                "below the slow burn rate never pages",
                [before, self.busy(8 * HOUR, Fraction(9, 10) * slow)],
                [(6 * HOUR + h * HOUR, PAGE, False) for h in (1, 4, 8)],
            ),
        ]

    def tickets(self) -> list[Case]:
        day, days = Fraction(self.day.factor), Fraction(self.days.factor)
        rate = Fraction(3, 2) * days
        comes_s = _reached_s(self.days, rate)
        slack_s = 2 * DAYS_EVALUATED_S
        over = 3 * DAY + _minutes(comes_s * Fraction(102, 100)) + slack_s
        cleared = over + self.days.short_s + self.kept_s + slack_s
        made = [
            self.case(
                "a slow leak becomes a ticket in time, and clears",
                [self.busy(3 * DAY), self.busy(over - 3 * DAY, rate), self.busy(10 * HOUR)],
                [
                    (3 * DAY + _minutes(comes_s * Fraction(98, 100)) - slack_s, TICKET, False),
                    (over, TICKET, True),
                    (over, PAGE, False),
                    (cleared, TICKET, False),
                ],
                is_days=True,
            ),
            self.case(
                "within the budget there is no ticket, but the budget runs low",
                [self.busy(4 * DAY, Fraction(9, 10) * days)],
                [(3 * DAY, TICKET, False), (4 * DAY, TICKET, False), (4 * DAY, BUDGET_LOW, True)],
                is_days=True,
                readings=self.readings(
                    4 * DAY,
                    [window_s for window_s in burn.WINDOWS_S if window_s > 6 * HOUR],
                    Fraction(9, 10) * days * self.budget,
                ),
            ),
        ]
        if self.slo.sli.threshold is None:
            # After ten times the traffic the three-day ratio stays low; only the day's can tell.
            told = 4 * DAY + HOUR
            leak = self.busy(told - 3 * DAY, Fraction(5, 3) * day)
            made.append(
                self.case(
                    "a leak after a fall in traffic becomes a ticket, and clears",
                    [self.busy(3 * DAY, times=10), leak, self.busy(5 * HOUR)],
                    [
                        (3 * DAY, TICKET, False),
                        (told, TICKET, True),
                        (told + self.day.short_s + self.kept_s + slack_s, TICKET, False),
                    ],
                    is_days=True,
                )
            )
        return made

    def low_traffic(self) -> list[Case]:
        small = self.slo.low_traffic.small_n
        few = self.slo.low_traffic.min_bad - 1
        made = []
        if few:
            end_s = 6 * HOUR + 10 * MINUTE
            lonely = [
                Stretch(6 * HOUR, _QUIET),
                Stretch(10 * MINUTE, Fraction(few, 20), Fraction(1)),
                Stretch(30 * MINUTE, _QUIET),
            ]
            quiet = [(end_s + 2 * MINUTE, name, False) for name in (PAGE, TICKET)]
            made.append(self.case("a few errors in little traffic alert nobody", lonely, quiet))
        if small is not None:
            needed = Fraction(small.min_events + 1)
            hours = burn.seconds(small.window)
            failing = [Stretch(hours, needed * MINUTE / hours, Fraction(1))]
            made.append(
                self.case(
                    "everything fails in little traffic: a ticket",
                    [*failing, *failing],
                    [(2 * hours, SMALL_N, True)],
                )
            )
            thin = [Stretch(hours, Fraction(small.min_events - 1) * MINUTE / hours, Fraction(1))]
            made.append(
                self.case(
                    "fewer failures than that: nothing",
                    [*thin, *thin],
                    [(2 * hours, SMALL_N, False)],
                )
            )
        return made

    def guarded(self) -> list[Case]:
        """Little traffic with a few more bad events than a burn alert asks for: for each pair of
        windows a course that this pair alone tells of."""
        needed = self.slo.low_traffic.min_bad
        if needed < 2:
            return []  # no room between one bad event and none
        bad = Fraction(5, 4) * needed
        hourly = bad / self.budget / HOUR * MINUTE  # events a minute at which an hour's burn is 1

        def course(name: str, alert: str, stretches: list[Stretch], *, is_days: bool) -> Case:
            end_s = sum(one.length_s for one in stretches)
            slack_s = 2 * (DAYS_EVALUATED_S if is_days else EVALUATED_S)
            quiet = Stretch(slack_s, stretches[-1].per_minute)
            return self.case(
                f"enough bad events in little traffic, {name}",
                [*stretches, quiet],
                [(end_s, alert, True)],
                is_days=is_days,
            )

        def burning(length_s: int, rate: Fraction, burned: Fraction) -> Stretch:
            return Stretch(length_s, rate, min(burned * self.budget, Fraction(1)))

        fast, slow = Fraction(self.fast.factor), Fraction(self.slow.factor)
        day, days = Fraction(self.day.factor), Fraction(self.days.factor)
        hot, warm = fast * Fraction(7, 5), slow * Fraction(7, 2)
        leak, drip = day * Fraction(5, 3), days * 2
        return [
            course(
                "in an hour",
                PAGE,
                [Stretch(6 * HOUR, hourly / hot), burning(HOUR, hourly / hot, hot)],
                is_days=False,
            ),
            course(
                "in two hours",
                PAGE,
                [Stretch(6 * HOUR, hourly / warm / 2), burning(2 * HOUR, hourly / warm / 2, warm)],
                is_days=False,
            ),
            course(
                "in a day",
                TICKET,
                [
                    Stretch(2 * DAY, hourly / leak / 24 * 20),
                    burning(DAY, hourly / leak / 24, leak),
                ],
                is_days=True,
            ),
            course(
                "in three days", TICKET, [burning(3 * DAY, hourly / drip / 72, drip)], is_days=True
            ),
        ]

    def restarted(self) -> Case:
        assert self.played is not None
        first = self.played.series([self.busy(3 * HOUR)], MINUTE)
        series = [(name, f"{values} {values}") for name, values in first]
        asked = (3 * HOUR + 6 * MINUTE, 6 * HOUR)
        return Case(
            name=f"{self.slo.name}: a restart of the counters is no error",
            interval_s=MINUTE,
            series=tuple(series),
            expected=tuple(
                Firing(at, alert, False, self.about) for at in asked for alert in (PAGE, TICKET)
            ),
        )

    def telemetry(self) -> list[Case]:
        return [
            Case(
                name=f"{self.slo.name}: {name}",
                interval_s=MINUTE,
                series=((str(self.up), f"{up}+0x30"),),
                expected=(
                    Firing(8 * MINUTE, ABSENT, False, self.about),
                    Firing(12 * MINUTE, ABSENT, fires, self.about),
                ),
            )
            for name, up, fires in (
                ("gateways are up but the series are absent", 1, True),
                ("the gateways are down, which is another alert", 0, False),
            )
        ]


def _reached_s(window: Window, burned: Fraction) -> Fraction:
    """How long a burn rate takes to reach the window's factor after a clean history, seconds."""
    return window.long_s * Fraction(window.factor) / burned


def _evaluated(at_s: int, *, is_days: bool) -> int:
    every_s = DAYS_EVALUATED_S if is_days else EVALUATED_S
    return -(-at_s // every_s) * every_s


def _minutes(length_s: Fraction) -> int:
    return round(length_s / MINUTE) * MINUTE


# --- Percentiles ----------------------------------------------------------------------------------


def percentile_cases(one: Percentile, registry: Mapping[str, Metric] = REGISTRY) -> list[Case]:
    """All tests of an alert on a percentile."""
    metric = registry[one.metric]
    found = _histogram(metric, one.match, one.threshold, _grouped(one, metric))
    window_s, hold_s = burn.seconds(one.window), burn.seconds(one.hold)
    slow = 1 - Fraction(Decimal(one.quantile))
    about = f'percentile="{one.name}"'
    before, after = 2 * window_s, 2 * window_s + hold_s
    small = Fraction(one.min_events) * MINUTE / window_s / 2

    def case(name: str, stretches: list[Stretch], expected: list[tuple[int, bool]]) -> Case:
        return Case(
            name=f"{one.name}: {name}",
            interval_s=MINUTE,
            series=found.series(stretches, MINUTE),
            expected=tuple(Firing(at, PERCENTILE_HIGH, fires, about) for at, fires in expected),
        )

    busy = Fraction(_BUSY)
    return [
        case(
            "as many slow ones as the percentile allows",
            [Stretch(before + after, busy, slow * Fraction(9, 10))],
            [(before, False), (before + after, False)],
        ),
        case(
            "twice as many: the alert comes after its hold, and goes",
            [
                Stretch(before, busy),
                Stretch(after, busy, min(2 * slow, Fraction(1))),
                Stretch(before, busy),
            ],
            [
                (before + hold_s - MINUTE, False),
                (before + after, True),
                (before + after + window_s + 2 * MINUTE, False),
            ],
        ),
        case(
            "all slow, but too few to say so",
            [Stretch(before + after, small, Fraction(1))],
            [(before + after, False)],
        ),
    ]


def _grouped(one: Percentile, metric: Metric) -> dict[str, str]:
    """A value for each label that the percentile is grouped by."""
    return {label: _other(metric, label, ()) for label in one.by if label not in one.match}
