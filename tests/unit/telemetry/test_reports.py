"""Chargeback, explain and their rendering: exact, readable, harmless, and in agreement."""

import csv
import io
import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from rich.cells import cell_len

from telemetry.ids import KeyId, RequestId, TenantId
from telemetry.money import EXACT
from telemetry.record import (
    Attempt,
    Charge,
    DeviceTime,
    Outcome,
    RequestRecord,
    Stage,
    Timings,
)
from telemetry.reports.agreement import differences, totals_equal
from telemetry.reports.chargeback import (
    DIMENSIONS,
    GroupingInvalid,
    HourlySum,
    Line,
    TenantPlace,
    chargeback,
    dimensions,
)
from telemetry.reports.explain import tell
from telemetry.reports.period import Period, PeriodInvalid, parse_period
from telemetry.reports.render import (
    chargeback_csv,
    chargeback_json,
    chargeback_table,
    story_json,
    story_text,
)
from telemetry.usage import Usage, UsageQuality, UsageSource

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
NOON_NS = 1_796_040_000 * 10**9
MS = 10**6
DAY = parse_period("2026-11-30", "2026-12-01")


def charge(meter: str, quantity: int, amount: str | None, **facts: Any) -> Charge:
    """A line of a cost."""
    return Charge(
        meter=meter,
        quantity=quantity,
        unit=1_000_000,
        unit_price=None if amount is None else Decimal("0.000027778"),
        amount=None if amount is None else Decimal(amount),
        price_id=None if amount is None else "config@1/00000",
        book=None if amount is None else "config@1",
        **facts,
    )


def attempt(**facts: Any) -> Attempt:
    """An attempt of our engine that answered."""
    defaults: dict[str, Any] = {
        "attempt_no": 1,
        "reason": "primary",
        "backend": "local",
        "provider": "meterline.engine",
        "model": "smollm2",
        "span_id": "1" * 16,
        "started_ns": NOON_NS + 10 * MS,
        "first_token_ns": NOON_NS + 60 * MS,
        "ended_ns": NOON_NS + 400 * MS,
        "outcome": Outcome.OK,
        "finish_reasons": ("stop",),
        "usage": Usage(in_uncached_text=32, in_cached_read=16, out_text=20),
        "usage_source": UsageSource.ENGINE,
        "timings": Timings(
            queue_s=0.005,
            prefill_s=0.045,
            decode_s=0.34,
            sampling_s=0.02,
            device_us=DeviceTime(prefill=12_000, decode=240_000),
        ),
        "charges": (
            charge("GPU Prefill", 12_000, "0.000000333336"),
            charge("GPU Decode", 240_000, "0.00000666672"),
        ),
    }
    return Attempt(**{**defaults, **facts})


def record(**facts: Any) -> RequestRecord:
    """A streamed request that was answered."""
    defaults: dict[str, Any] = {
        "request_id": RequestId("0192f0aa-7c11-7d6a-9b2e-0a1b2c3d4e5f"),
        "node": "gw-1",
        "surface": "chat",
        "opened_ns": NOON_NS,
        "deadline_ns": NOON_NS + 10**12,
        "trace_id": "a" * 32,
        "span_id": "b" * 16,
        "tenant_id": TenantId("tn_1"),
        "key_id": KeyId("k1"),
        "asked_model": "assistant",
        "stream": True,
        "stages": [
            Stage("auth", NOON_NS, NOON_NS + MS),
            Stage("settle", NOON_NS + 400 * MS, NOON_NS + 401 * MS),
        ],
        "attempts": [attempt()],
        "chunks": 20,
        "content_bytes": 85,
        "ended_ns": NOON_NS + 401 * MS,
        "outcome": Outcome.OK,
        "status": 200,
    }
    return RequestRecord(**{**defaults, **facts})


def hourly(**facts: Any) -> HourlySum:
    """One hour of tenant tn_1."""
    defaults: dict[str, Any] = {
        "hour": NOON,
        "tenant_id": "tn_1",
        "model": "m",
        "requests": 2,
        "attempts": 3,
        "input_tokens": 600_000,
        "cached_tokens": 100_000,
        "output_tokens": 400_000,
        "device_us": 1_500_000,
        "amount": Decimal("0.123456789012345"),
    }
    return HourlySum(**{**defaults, **facts})


# --- periods


@pytest.mark.parametrize(
    ("start", "end", "zone", "expected"),
    [
        ("2026-11-01", "2026-12-01", "UTC", ("2026-11-01T00:00", "2026-12-01T00:00")),
        ("2026-11-01", "2026-11-02", "Europe/Madrid", ("2026-10-31T23:00", "2026-11-01T23:00")),
        ("2026-03-29", "2026-03-30", "Europe/Madrid", ("2026-03-28T23:00", "2026-03-29T22:00")),
        ("2026-11-01T06:00", "2026-11-01T07:00", "UTC", ("2026-11-01T06:00", "2026-11-01T07:00")),
        (
            "2026-11-01T06:00-05:00",
            "2026-11-01T12:00Z",
            "Europe/Madrid",
            ("2026-11-01T11:00", "2026-11-01T12:00"),
        ),
    ],
)
def test_a_period_is_half_open_and_utc(
    start: str, end: str, zone: str, expected: tuple[str, str]
) -> None:
    """A zone says where midnight is; a day of a clock change has 23 or 25 hours."""
    period = parse_period(start, end, zone)
    assert period.start == datetime.fromisoformat(f"{expected[0]}+00:00")
    assert period.end == datetime.fromisoformat(f"{expected[1]}+00:00")


@pytest.mark.parametrize(
    ("start", "end", "zone", "message"),
    [
        ("yesterday", "2026-11-02", "UTC", "--from 'yesterday' is not a date"),
        ("2026-11-01", "2026-13-01", "UTC", "--to '2026-13-01' is not a date"),
        ("2026-11-02", "2026-11-02", "UTC", "the period is empty"),
        ("2026-11-02T00:30", "2026-11-03", "UTC", "whole UTC hours"),
        ("2026-11-01", "2026-11-02", "Mars/Olympus", "unknown time zone"),
        ("2026-11-01", "2026-11-02", "../etc", "unknown time zone"),
        ("2026-11-01", "2026-11-02", "Asia/Kolkata", "whole UTC hours"),
        ("2026-11-01T00:00Z", "2026-11-02T00:00Z", "Asia/Kolkata", "off UTC"),
    ],
)
def test_a_bad_period_says_what_to_write(start: str, end: str, zone: str, message: str) -> None:
    """One clear line for each mistake."""
    with pytest.raises(PeriodInvalid, match=message):
        parse_period(start, end, zone)


# --- chargeback


def test_costs_add_up_exactly_and_quotients_are_rounded() -> None:
    """Sums keep every digit; cost per million is cost over all tokens, at six decimals."""
    report = chargeback([hourly(), hourly(key_id="k2")], by=("tenant",), period=DAY)
    (line,) = report.lines
    assert line.cost == Decimal("0.246913578024690")
    assert (line.requests, line.attempts, line.device_us) == (4, 6, 3_000_000)
    assert line.cost_per_million_tokens == Decimal("0.123457")
    assert line.cost_per_million_output_tokens == Decimal("0.308642")
    assert report.totals == (structs.replace(line, group=("",)),)


def test_only_hours_of_the_period_count() -> None:
    """The start is inside, the end is not."""
    hours = [DAY.start - timedelta(hours=1), DAY.start, DAY.end - timedelta(hours=1), DAY.end]
    report = chargeback([hourly(hour=hour) for hour in hours], by=("hour",), period=DAY)
    assert [line.group[0] for line in report.lines] == [
        "2026-11-30T00:00+00:00",
        "2026-11-30T23:00+00:00",
    ]


def test_the_zone_shifts_days_and_nothing_else() -> None:
    """The same hours fall on other days; the totals are the same."""
    period = parse_period("2026-11-30T00:00Z", "2026-12-01T00:00Z", "America/New_York")
    sums = [hourly(hour=DAY.start + timedelta(hours=n)) for n in range(24)]
    here = chargeback(sums, by=("day",), period=DAY)
    there = chargeback(sums, by=("day", "month"), period=period)
    assert [line.group for line in there.lines] == [
        ("2026-11-29", "2026-11"),
        ("2026-11-30", "2026-11"),
    ]
    assert [line.requests for line in there.lines] == [10, 38]
    assert here.totals[0].cost == there.totals[0].cost


def test_an_unpriced_line_leaves_no_cost_per_token() -> None:
    """A quotient over tokens that have no price would be too low; there is none."""
    (line,) = chargeback([hourly(unpriced_lines=1)], by=("tenant",), period=DAY).lines
    assert line.cost_per_million_tokens is None
    assert line.cost_per_million_output_tokens is None


def test_no_tokens_have_no_cost_per_token() -> None:
    """Division by no tokens is no figure."""
    empty = Line(group=(), currency="USD")
    assert empty.cost_per_million_tokens is None


def test_currencies_are_never_added_together() -> None:
    """Each currency has its lines and its total."""
    report = chargeback([hourly(), hourly(currency="EUR")], by=("tenant",), period=DAY)
    assert [line.currency for line in report.lines] == ["EUR", "USD"]
    assert [line.currency for line in report.totals] == ["EUR", "USD"]


def test_the_dearest_comes_first_and_time_before_all() -> None:
    """Without time, by cost; with time, in order of time."""
    sums = [hourly(model="cheap", amount=Decimal(1)), hourly(model="dear", amount=Decimal(2))]
    sums.append(hourly(model="early", hour=DAY.start, amount=Decimal(0)))
    by_cost = chargeback(sums, by=("model",), period=DAY)
    by_time = chargeback(sums, by=("model", "hour"), period=DAY)
    assert [line.group[0] for line in by_cost.lines] == ["dear", "cheap", "early"]
    assert [line.group[0] for line in by_time.lines] == ["early", "dear", "cheap"]


def test_dimensions_are_checked() -> None:
    """Spaces and repeats are forgiven, unknown names are not."""
    assert dimensions("tenant, model,tenant") == ("tenant", "model")
    with pytest.raises(GroupingInvalid, match=r"cannot group by 'team'.*asked-model"):
        dimensions("tenant,team")


sums_of_hours = st.lists(
    st.builds(
        HourlySum,
        hour=st.integers(0, 23).map(lambda n: DAY.start + timedelta(hours=n)),
        tenant_id=st.sampled_from(["", "a", "b"]),
        model=st.sampled_from(["m", "n"]),
        backend=st.sampled_from(["x", "y"]),
        currency=st.sampled_from(["USD", "EUR"]),
        requests=st.integers(0, 10**6),
        output_tokens=st.integers(0, 10**12),
        amount=st.integers(0, 10**24).map(lambda n: Decimal(n).scaleb(-15)),
    ),
    max_size=20,
)


@given(sums_of_hours, st.lists(st.sampled_from(DIMENSIONS), unique=True, max_size=4))
def test_lines_sum_to_the_totals_in_any_grouping(sums: list[HourlySum], by: list[Any]) -> None:
    """Whatever the dimensions: lines, totals and hours are the same money to the last digit."""
    report = chargeback(sums, by=by, period=DAY)
    for currency in ("USD", "EUR"):
        expected = Decimal(0)
        for row in sums:
            expected = EXACT.add(expected, row.amount if row.currency == currency else Decimal(0))
        for lines in (report.lines, report.totals):
            found = Decimal(0)
            for line in lines:
                found = EXACT.add(found, line.cost if line.currency == currency else Decimal(0))
            assert found == expected
    assert sum(line.requests for line in report.lines) == sum(row.requests for row in sums)


def test_costs_add_up_at_every_level_of_the_tree() -> None:
    """A level's line is all below it; who stands above the level stands for itself, and nobody for
    nobody. Cost centres cut across."""
    places = {
        "o": TenantPlace(ids=("o",)),
        "a": TenantPlace(ids=("o", "a"), cost_centre="1"),
        "b": TenantPlace(ids=("o", "b", "b1"), cost_centre="2"),
        "x": TenantPlace(ids=("x",), cost_centre="1"),
    }
    sums = [
        HourlySum(hour=NOON, tenant_id=tenant, amount=Decimal(amount), requests=1)
        for tenant, amount in (("o", 1), ("a", 2), ("b", 4), ("x", 8), ("", 16))
    ]

    def grouped(by: str) -> dict[str, Decimal]:
        report = chargeback(sums, by=dimensions(by), period=DAY, places=places)
        return {line.group[0]: line.cost for line in report.lines}

    assert grouped("level-1") == {"o": 7, "x": 8, "": 16}
    assert grouped("level-2") == {"o": 1, "a": 2, "b": 4, "x": 8, "": 16}
    assert grouped("level-3") == {"o": 1, "a": 2, "b1": 4, "x": 8, "": 16}
    assert grouped("cost-centre") == {"1": 10, "2": 4, "": 17}
    named = chargeback(
        sums, by=dimensions("level-1"), period=DAY, places=places, tenant_names={"o": "Org"}
    )
    assert "level_1,level_1_name," in chargeback_csv(named)
    assert "o,Org," in chargeback_csv(named)


# --- rendering of a chargeback


def report_of(*sums: HourlySum, **facts: Any) -> Any:
    """A report by tenant and model."""
    names = {"tn_1": "acme"}
    return chargeback(
        sums, **{"by": ("tenant", "model"), "period": DAY, "tenant_names": names, **facts}
    )


def test_the_table_shows_names_full_money_and_the_total() -> None:
    """Tenants by name, money with all its digits, and a rounded total beside it."""
    text = chargeback_table(report_of(hourly(), hourly(tenant_id="", model="")))
    assert "acme" in text and "(nobody)" in text and "(none)" in text
    assert "0.123456789012345" in text
    assert "0.246913578024690" in text
    assert "Total ≈ 0.25 USD." in text
    assert "From 2026-11-30T00:00+00:00 up to, not including, 2026-12-01T00:00+00:00" in text


def test_the_table_says_what_is_missing() -> None:
    """Unpriced lines, hours to come and columns left out are all named."""
    text = chargeback_table(report_of(hourly(unpriced_lines=2), pending_hours=1), width=80)
    assert "Not in the cost: 2 lines without a known price" in text
    assert "Not summed up yet: 1 hour of the period" in text
    assert "Left out for width: attempts" in text


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_table_fits_its_width(width: int) -> None:
    """Long names are shortened, figures never; columns meet at the right edge."""
    long = hourly(tenant_id="t" * 70, model="組織/" + "m" * 90)
    text = chargeback_table(report_of(hourly(), long, hourly(model="day")), width=width)
    table = text.split("\nFrom")[0].rstrip().splitlines()
    assert max(cell_len(line) for line in table) <= width
    assert "…" in text
    assert text.count("0.123456789012345") == 3


def test_days_are_never_shortened() -> None:
    """A shortened date would be another date."""
    text = chargeback_table(report_of(hourly(model="m" * 99), by=("hour", "model")), width=80)
    assert "2026-11-30T12:00+00:00" in text


def test_an_empty_report_is_a_table_with_a_zero_total() -> None:
    """No requests is an answer, not an error."""
    text = chargeback_table(report_of())
    assert "cost USD" in text and "Total" in text
    assert "≈" not in text
    assert json.loads(chargeback_json(report_of()))["lines"] == []


def test_several_currencies_have_a_column() -> None:
    """Which currency a cost is in is never left to guess."""
    text = chargeback_table(report_of(hourly(), hourly(currency="EUR")))
    assert "currency" in text
    assert text.count("EUR") == 2 + 1  # line, total and the rounded total
    assert text.count("USD") == 2 + 1


def test_json_has_money_as_strings() -> None:
    """Totals and lines carry exact strings and the tenant's name."""
    data = json.loads(chargeback_json(report_of(hourly())))
    (line,) = data["lines"]
    assert line["tenant"] == "tn_1" and line["tenant_name"] == "acme" and line["model"] == "m"
    assert line["cost"] == "0.123456789012345"
    assert line["cost_per_million_tokens"] == "0.123457"
    assert line["device_seconds"] == "1.5"
    assert data["totals"][0]["cost"] == line["cost"]
    assert "tenant" not in data["totals"][0]


def test_csv_has_a_row_a_line_and_runs_nothing() -> None:
    """Money is exact, small money has no exponent, names that look like formulas are inert."""
    tiny = hourly(amount=Decimal("1E-15"), model="=cmd()", unpriced_lines=1)
    rows = list(csv.DictReader(io.StringIO(chargeback_csv(report_of(tiny)))))
    (row,) = rows
    assert row["cost"] == "0.000000000000001"
    assert row["model"] == "'=cmd()"
    assert row["cost_per_million_tokens"] == ""
    assert row["period_start"] == "2026-11-30T00:00:00+00:00"


# --- explain


def test_a_story_has_the_facts_of_its_record() -> None:
    """Who, what, when, how long, how many tokens, and what it cost."""
    story = tell(record(), {"tn_1": "acme"})
    assert (story.tenant_name, story.key_id, story.backend) == ("acme", "k1", "local")
    assert (story.opened_at, story.duration_us) == (NOON, 401_000)
    assert (story.input_tokens, story.cached_tokens, story.output_tokens) == (48, 16, 20)
    assert story.device_us == 252_000
    assert [(cost.currency, cost.amount) for cost in story.costs] == [
        ("USD", Decimal("0.000007000056"))
    ]


def test_the_waterfall_has_stages_attempts_and_engine_phases() -> None:
    """Stamped phases are where they were; the engine's are laid out inside the attempt."""
    phases = {phase.name: phase for phase in tell(record()).phases}
    assert list(phases) == [
        "request",
        "auth",
        "attempt 1 local",
        "queue",
        "prefill",
        "decode",
        "sampling",
        "stream",
        "settle",
    ]
    assert (phases["queue"].start_us, phases["queue"].duration_us) == (10_000, 5_000)
    assert (phases["prefill"].start_us, phases["decode"].start_us) == (15_000, 60_000)
    assert (phases["stream"].start_us, phases["stream"].duration_us) == (60_000, 340_000)
    assert [name for name, phase in phases.items() if phase.is_placed] == [
        "queue",
        "prefill",
        "decode",
        "sampling",
    ]


def test_a_backend_without_timings_shows_its_first_token() -> None:
    """What is not reported is not guessed."""
    story = tell(record(attempts=[attempt(timings=None, charges=())], stream=False))
    assert [phase.name for phase in story.phases if phase.depth == 2] == ["first token", "answer"]
    assert "nothing was charged" in story_text(story)


def test_all_attempts_are_told_and_paid() -> None:
    """A failed attempt and its fallback: both in order, costs of both in the sum."""
    failed = attempt(
        backend="first",
        ended_ns=NOON_NS + 8 * MS,
        started_ns=NOON_NS + 2 * MS,
        first_token_ns=None,
        outcome=Outcome.UPSTREAM_ERROR,
        http_status=503,
        error_code="upstream_failed",
        usage=None,
        usage_source=UsageSource.NONE,
        timings=None,
        charges=(charge("Output Tokens", 4, None),),
    )
    served = attempt(attempt_no=2, reason="fallback", answered_model="smollm2-v2")
    story = tell(record(attempts=[failed, served]))
    assert story.decisions == (
        "attempt 1, primary: first as smollm2 → failed: upstream error, HTTP 503, upstream_failed",
        "attempt 2, fallback: local as smollm2 → stop",
        "answered by smollm2-v2, which is the model that is priced",
    )
    assert (story.backend, story.answered_model, story.unpriced_lines) == (
        "local",
        "smollm2-v2",
        1,
    )
    text = story_text(story)
    assert "1. Output Tokens" in text and "2. GPU Decode" in text
    assert "not in the total: 1 unpriced line" in text
    assert "no price is known" in text


def test_a_refused_request_is_told() -> None:
    """No attempt, no cost, and why."""
    refused = record(
        attempts=[],
        stages=[],
        tenant_id=None,
        key_id=None,
        outcome=Outcome.CLIENT_ERROR,
        status=401,
        error_code="invalid_api_key",
        stream=False,
    )
    text = story_text(tell(refused))
    assert "refused: the request is wrong, HTTP 401, invalid_api_key" in text
    assert "nobody was identified" in text
    assert "no backend was asked (invalid_api_key)" in text
    assert "nothing was charged" in text


def test_an_open_request_is_told_so_far() -> None:
    """Before settlement the story ends with what is known."""
    running = attempt(ended_ns=None, outcome=None, usage=None, charges=(), timings=None)
    story = tell(record(outcome=None, ended_ns=None, status=None, attempts=[running]))
    assert not story.is_settled
    assert story.duration_us == 401_000
    assert "still open" in story_text(story)
    assert "not ended" in story_text(story)


def test_who_counted_is_said() -> None:
    """Estimates and ambiguous reports are not passed off as exact."""
    estimated = attempt(
        usage_source=UsageSource.ESTIMATED, usage_quality=UsageQuality.AMBIGUOUS, charges=()
    )
    text = story_text(tell(record(attempts=[estimated])))
    assert "in 48 (16 cached), out 20; estimated by the gateway, split ambiguous" in text


@pytest.mark.parametrize("width", [40, 80, 100, 120, 300])
@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_story_fits_between_80_and_120_columns(width: int, outcome: Outcome) -> None:
    """Whatever the terminal and the outcome: no line is longer, and every bar is in its lane."""
    odd = attempt(
        backend="b" * 60,
        model="m" * 200,
        started_ns=NOON_NS - 5,
        ended_ns=NOON_NS + 900 * MS,
        outcome=outcome,
        error_code="e" * 60,
        charges=(charge("Cache Write 1h Input Tokens", 10**9, "27.778"), charge("x", 1, None)),
    )
    text = story_text(tell(record(attempts=[odd], outcome=outcome)), width=width)
    limit = min(max(width, 80), 120)
    assert max(cell_len(line) for line in text.splitlines()) <= limit


def test_the_exact_total_stands_beside_a_rounded_one() -> None:
    """Full precision, with something to read."""
    text = story_text(tell(record()))
    assert "0.000007000056 USD" in text
    assert "≈ 0.000007 USD" in text


def test_text_of_clients_cannot_steer_the_terminal() -> None:
    """Escape sequences in a model name are shown as marks, in stories and tables."""
    evil = "m\x1b[2J\x07\n"
    story = story_text(tell(record(asked_model=evil)))
    table = chargeback_table(report_of(hourly(model=evil)))
    for text in (story, table):
        assert "\x1b" not in text and "\x07" not in text
        assert "�" in text


def test_ascii_is_ascii() -> None:
    """A terminal without Unicode gets bars of #."""
    text = story_text(tell(record()), ascii_only=True)
    assert text.isascii()
    assert "####" in text


def test_color_is_added_only_when_asked() -> None:
    """Bold titles and totals on a terminal, plain text elsewhere."""
    assert "\x1b[1m" in story_text(tell(record()), color=True)
    assert "\x1b[" in chargeback_table(report_of(hourly()), color=True)
    assert "\x1b" not in story_text(tell(record()))


def test_the_story_as_json_has_everything() -> None:
    """Money as strings, phases and lines included."""
    data = json.loads(story_json(tell(record(), {"tn_1": "acme"})))
    assert data["costs"] == [{"currency": "USD", "amount": "0.000007000056"}]
    assert data["attempts"][0]["charges"][1]["amount"] == "0.00000666672"
    assert data["opened_at"] == "2026-11-30T12:00:00Z"
    assert len(data["phases"]) == 9


# --- agreement


def rolled_up(*records: RequestRecord) -> list[HourlySum]:
    """The hourly sums of records, written here once more and in the plainest way."""
    rows: list[HourlySum] = []
    for one in records:
        final = one.served or (one.attempts[-1] if one.attempts else None)
        for each in one.attempts:
            usage = each.usage or Usage()
            device = each.timings.device_us if each.timings else None
            amounts = [line.amount for line in each.charges]
            cost = Decimal(0)
            for amount in amounts:
                cost = EXACT.add(cost, amount or Decimal(0))
            rows.append(
                HourlySum(
                    hour=NOON,
                    tenant_id=one.tenant_id or "",
                    model=each.answered_model or each.model,
                    requests=int(each is final),
                    attempts=1,
                    input_tokens=usage.input_tokens,
                    cached_tokens=usage.in_cached_read,
                    output_tokens=usage.output_tokens,
                    device_us=device.total if device else 0,
                    amount=cost,
                    unpriced_lines=amounts.count(None),
                )
            )
    return rows


def test_chargeback_equals_the_sum_of_the_stories() -> None:
    """Totals over all requests are the sum over `explain` of each, to the last digit."""
    records = [
        record(),
        record(tenant_id=TenantId("tn_2"), attempts=[attempt(), attempt(attempt_no=2)]),
        record(attempts=[attempt(charges=(charge("Output Tokens", 1, None),))]),
        record(attempts=[], outcome=Outcome.CLIENT_ERROR),
    ]
    report = chargeback(rolled_up(*records), by=("tenant", "model"), period=DAY)
    assert differences(report, map(tell, records)) == ()
    assert totals_equal(report, map(tell, records))


def test_a_difference_in_the_last_digit_is_found() -> None:
    """One unit at scale 15, one token or one request too many: each is named."""
    rows = rolled_up(record())
    changed = structs.replace(
        rows[0],
        amount=EXACT.add(rows[0].amount, Decimal("1e-15")),
        output_tokens=rows[0].output_tokens + 1,
    )
    report = chargeback([changed], by=("tenant",), period=DAY)
    found = differences(report, [tell(record())])
    assert not totals_equal(report, [tell(record())])
    assert "output_tokens: totals say 21, the requests 20" in found
    assert "USD: lines say 0.000007000056001, the requests 0.000007000056" in found


def test_a_line_that_grouping_lost_is_found() -> None:
    """Totals that no longer equal their lines are a difference too."""
    report = chargeback(rolled_up(record()), by=("tenant",), period=DAY)
    broken = structs.replace(report, lines=())
    assert any(text.startswith("requests: lines") for text in differences(broken, [tell(record())]))


def test_periods_name_days_and_months_in_their_zone() -> None:
    """An hour before midnight UTC is the next day further east."""
    period = Period(DAY.start, DAY.end, "Asia/Tokyo")
    assert period.day(NOON + timedelta(hours=11)) == "2026-12-01"
    assert period.month(NOON + timedelta(hours=11)) == "2026-12"
    assert period.hour(NOON) == "2026-11-30T21:00+09:00"
