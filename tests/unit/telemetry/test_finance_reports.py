"""Savings, waste, bridges, forecasts, statements, journals and FOCUS: exact, and adding up."""

import csv
import io
import json
import re
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.money import amount, total
from telemetry.pricing import Book, Price, PriceBook
from telemetry.reports import focus
from telemetry.reports.chargeback import HourlySum
from telemetry.reports.counterfactual import savings, what_if
from telemetry.reports.forecast import forecast, forecast_sheet
from telemetry.reports.meters import MeterSum, as_hourly, base_meter
from telemetry.reports.period import parse_period
from telemetry.reports.sheet import sheet_csv, sheet_json, sheet_text
from telemetry.reports.statement import Residual, journal, journal_csv, statement_html
from telemetry.reports.variance import bridge, facts
from telemetry.reports.waste import waste

HOUR = datetime(2026, 11, 3, 9, tzinfo=UTC)
NOVEMBER = parse_period("2026-11-01", "2026-12-01")


def row(
    meter: str = "Input Tokens", quantity: int = 1_000_000, price: str | None = "2", **more: Any
) -> MeterSum:
    unit_price = None if price is None else Decimal(price)
    facts: dict[str, Any] = {
        "hour": HOUR,
        "charge_hour": HOUR,
        "tenant_id": "t1",
        "backend": "api",
        "provider": "openai",
        "model": "big",
        "price_id": "" if price is None else f"list@1/{meter}",
        "lines": 1,
    }
    unit = more.get("unit", 1_000_000)
    return MeterSum(
        meter=meter,
        quantity=quantity,
        unit_price=unit_price,
        amount=Decimal(0) if unit_price is None else amount(quantity, unit_price, unit),
        unpriced_lines=int(price is None),
        **{**facts, **more},
    )


def book(*prices: tuple[str, str, str, str]) -> PriceBook:
    """(model, meter, tier, price) of openai."""
    made = [
        Price(
            price_id=f"list@1/{place}",
            provider="openai",
            model=model,
            match="equals",
            priority=0,
            meter=meter,
            min_input_tokens=0,
            unit=1_000_000,
            unit_price=Decimal(price),
            service_tier=tier,
        )
        for place, (model, meter, tier, price) in enumerate(prices)
    ]
    return PriceBook([Book(name="list", version=1, published_ns=0, prices={"openai": made})])


LIST = book(
    ("big", "Input Tokens", "", "2"),
    ("big", "Input Tokens", "batch", "1"),
    ("big", "Output Tokens", "", "8"),
    ("small", "Input Tokens", "", "0.2"),
    ("small", "Output Tokens", "", "0.8"),
)


def test_savings_are_what_the_standard_price_would_have_been_beyond_what_was_paid() -> None:
    """A read saves, a write costs, a batch saves; an unknown price is counted, not guessed."""
    sheet = savings(
        [
            row("Cache Read Input Tokens", 1_000_000, "0.5"),
            row("Cache Write Input Tokens", 1_000_000, "2.5"),
            row("Input Tokens", 3_000_000, "1", service_tier="batch"),
            row("Input Tokens", 9_000_000),
            row("Cache Read Input Tokens", 5, "1", model="unknown"),
        ],
        LIST,
    )
    saved = {(line[0], line[2]): (line[6], line[8]) for line in sheet.rows}
    assert saved == {
        ("cache read", "big"): (Decimal("1.5"), 0),
        ("cache write", "big"): (Decimal("-0.5"), 0),
        ("tier batch", "big"): (Decimal(3), 0),
        ("cache read", "unknown"): (Decimal(0), 1),
    }
    assert sheet.totals[0][6] == Decimal(4)


def test_what_if_re_rates_the_same_tokens() -> None:
    """A million in and out at another list price; device time has no token price and stays out."""
    sheet = what_if(
        [row(), row("Output Tokens", 1_000_000, "8"), row("GPU Decode", 5, "1")],
        LIST,
        "openai",
        "small",
    )
    (line,) = sheet.rows
    assert line[2:6] == (2_000_000, Decimal(10), Decimal(1), Decimal(-9))


def test_waste_is_named_by_its_reason() -> None:
    """Only lines that served nobody, the dearest first."""
    sheet = waste(
        [
            row(),
            row(waste="failed attempt"),
            row("Output Tokens", 1_000_000, "8", waste="client left"),
            row("GPU Recompute", 2_000_000, "0.5", waste="recompute", backend="local"),
        ],
        [],
        NOVEMBER,
    )
    assert [(line[0], line[4]) for line in sheet.rows] == [
        ("client left", Decimal(8)),
        ("failed attempt", Decimal(2)),
        ("recompute", Decimal(1)),
    ]
    assert sheet.rows[2][3] == Decimal(2)
    assert sheet.totals[0][4] == Decimal(11)


def hours(requests: int, model: str = "big") -> HourlySum:
    return HourlySum(hour=HOUR, provider="openai", model=model, requests=requests)


@pytest.mark.parametrize(
    ("after", "requests", "term", "change"),
    [
        ([row(quantity=4_000_000)], 20, "volume", "4"),
        ([row(quantity=4_000_000)], 10, "length", "4"),
        ([row(price="3")], 10, "price", "2"),
        ([row(), row(waste="hedge")], 10, "waste", "2"),
    ],
    ids=["twice the requests", "twice the prompt", "a dearer price", "a lost hedge"],
)
def test_one_cause_is_one_term(
    after: list[MeterSum], requests: int, term: str, change: str
) -> None:
    """Where one factor changes and nothing else does, all of the change stands there."""
    before = [row(quantity=2_000_000)]
    if term in ("price", "waste"):
        after = [row(quantity=2_000_000, price=after[0].unit_price and f"{after[0].unit_price}")]
        after += [row(waste="hedge")] if term == "waste" else []
    found = bridge(facts(before, [hours(10)], "USD"), facts(after, [hours(requests)], "USD"), "USD")
    expected = dict.fromkeys(found.terms, Decimal(0)) | {term: Decimal(change)}
    assert found.terms == expected


cells = st.lists(
    st.tuples(
        st.sampled_from(["big", "small", "new"]),
        st.sampled_from(["Input Tokens", "Output Tokens", "Cache Read Input Tokens"]),
        st.integers(0, 10**9),
        st.decimals("0", "99", places=9),
        st.sampled_from(["", "", "hedge"]),
    ),
    max_size=6,
)
requests = st.dictionaries(st.sampled_from(["big", "small", "new"]), st.integers(0, 1000))


@given(cells, requests, cells, requests)
def test_the_terms_always_sum_to_the_change(
    one: list[Any], one_requests: dict[str, int], two: list[Any], two_requests: dict[str, int]
) -> None:
    """To the last of fifteen digits, also for models that came, went or had no request."""

    def period(found: list[Any], counts: dict[str, int]) -> tuple[list[MeterSum], list[HourlySum]]:
        return (
            [row(meter, n, f"{price:f}", model=m, waste=w) for m, meter, n, price, w in found],
            [hours(count, model) for model, count in counts.items()],
        )

    before, after = period(one, one_requests), period(two, two_requests)
    found = bridge(facts(*before, "USD"), facts(*after, "USD"), "USD")
    assert total([found.before, *found.terms.values()]) == found.after
    assert found.after == total([sum_of.amount for sum_of in after[0]])


def test_a_forecast_of_a_weekly_rhythm_is_exact_and_says_so() -> None:
    """Four weeks of a pattern: the rest of the month follows it, and the error on the past is 0."""
    first = date(2026, 11, 1)
    history = {first - timedelta(days=28 - n): Decimal(n % 7) for n in range(38)}
    found = forecast(history, first=first, today=date(2026, 11, 11), until=date(2026, 12, 1))
    assert found is not None
    rest = sum(n % 7 for n in range(38, 58))
    assert (found.actual, found.days_left) == (Decimal(sum(n % 7 for n in range(28, 38))), 20)
    assert found.expected == found.low == found.high == found.actual + rest
    assert (found.error, found.method) == (Decimal("0.00"), "last week's weekday")


def test_a_forecast_needs_days_to_learn_from() -> None:
    """A week and a day; less is said to be too little."""
    day = date(2026, 11, 1)
    short = forecast({day: Decimal(3)}, first=day, today=date(2026, 11, 3), until=date(2026, 12, 1))
    assert short is None
    assert "USD: fewer than 8 days" in forecast_sheet({"USD": None}).notes[-1]


@given(st.lists(st.decimals(0, 1000, places=2), min_size=9, max_size=60))
def test_a_forecast_is_never_below_what_is_spent(costs: list[Decimal]) -> None:
    """low ≤ expected ≤ high, and low is at least the actual cost of the month so far."""
    first = date(2026, 10, 1)
    today = first + timedelta(days=len(costs))
    history = {first + timedelta(days=n): cost for n, cost in enumerate(costs)}
    found = forecast(history, first=first, today=today, until=today + timedelta(days=5))
    assert found is not None
    assert found.actual - Decimal("0.01") < found.low <= found.expected <= found.high


def test_a_statement_says_what_is_due_and_cannot_be_scripted() -> None:
    """Exact lines, corrections apart, one rounded total, names escaped."""
    text = statement_html(
        [
            row(quantity=1_234_567, model="<script>"),
            row(quantity=500_000, charge_hour=HOUR - timedelta(days=20)),
            row(price=None),
        ],
        tenant="Acme <&>",
        tenant_id="t1",
        period=NOVEMBER,
        proof="ab12",
    )
    assert "<script>" not in text and "&lt;script&gt;" in text and "Acme &lt;&amp;&gt;" in text
    assert "Corrections of earlier months" in text
    assert "3.469134 USD" in text and "3.47 USD" in text
    assert "1 lines without a price" in text and "manifest ab12" in text
    empty = statement_html([], tenant="a", tenant_id="t", period=NOVEMBER, proof=None)
    assert "Nothing was used." in empty and "0.00 USD" in empty and "open" in empty


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(-(10**8), 10**8)),
        max_size=12,
    )
)
def test_a_journal_balances_to_the_cent(uses: list[tuple[str, str, int]]) -> None:
    """Debits equal credits for each provider, and each cost centre is within a cent of exact."""
    rows = [row(quantity=n, tenant_id=tenant, provider=p) for tenant, p, n in uses]
    residuals = [Residual(provider="x", amount=Decimal("0.005"), currency="USD")]
    entries = journal(rows, residuals, period=NOVEMBER, tenant_names={"a": "Acme"})
    for provider in "xy":
        mine = [entry for entry in entries if entry.reference.startswith(f"{provider} ")]
        assert sum(e.debit - e.credit for e in mine) == 0
        assert all(min(e.debit, e.credit) == 0 for e in mine)
        payable = sum(e.credit - e.debit for e in mine if e.account == f"payable:{provider}")
        exact = total([r.amount for r in rows if r.provider == provider])
        exact += Decimal("0.005") if provider == "x" else 0
        assert abs(payable - exact) <= Decimal("0.005")
    lines = list(csv.reader(io.StringIO(journal_csv(entries))))
    assert len(lines) == len(entries) + 1
    assert {line[0] for line in lines[1:]} <= {"2026-11-30"}


def test_sums_by_meter_feed_a_chargeback() -> None:
    """Tokens by the kind of meter, and a meter charged twice is still that meter."""
    assert base_meter("Input Tokens (2)") == "Input Tokens"
    assert base_meter("Strange (meter)") == "Strange (meter)"
    cached = as_hourly(row("Cache Read Input Tokens (2)", 7))
    assert (cached.meter, cached.input_tokens, cached.cached_tokens) == (
        "Cache Read Input Tokens",
        7,
        7,
    )
    assert as_hourly(row("GPU Decode", 9)).device_us == 9


def test_a_sheet_looks_the_same_in_every_form() -> None:
    """Exact figures in text, CSV and JSON; nothing in a name can run."""
    sheet = waste([row(waste="hedge", backend="=cmd()")], [], NOVEMBER)
    assert "hedge" in sheet_text(sheet) and "2" in sheet_text(sheet)
    assert "'=cmd()" in sheet_csv(sheet)
    assert json.loads(sheet_json(sheet))["rows"][0]["cost"] == "2"
    assert "nothing in this period" in sheet_text(waste([], [], NOVEMBER))


# --- FOCUS 1.2: the rules of the specification that our rows can break

MANDATORY = (
    *("BilledCost", "BillingAccountId", "BillingCurrency", "BillingPeriodEnd"),
    *("BillingPeriodStart", "ChargeCategory", "ChargeDescription", "ChargePeriodEnd"),
    *("ChargePeriodStart", "ContractedCost", "EffectiveCost", "InvoiceIssuerName", "ListCost"),
    *("PricingQuantity", "PricingUnit", "ProviderName", "PublisherName", "ServiceCategory"),
    *("ServiceName", "SkuId", "SkuPriceId", "SubAccountId", "Tags"),
)
DATES = ("BillingPeriodEnd", "BillingPeriodStart", "ChargePeriodEnd", "ChargePeriodStart")
SUBCATEGORIES = {"AI and Machine Learning": {"Generative AI"}, "Compute": {"Other (Compute)"}}
USES = [
    row(quantity=1_234_567),
    row("Cache Read Input Tokens", 77, "0.123456789", key_id="k1", asked_model="assistant"),
    row("Output Tokens", 5, "8", service_tier="batch", waste="failed attempt"),
    row("GPU Prefill", 1_500_001, "0.000694444", backend="local", provider="meterline.engine"),
    row("Requests", 3, "0.01", unit=1),
    row(quantity=-50, charge_hour=HOUR - timedelta(days=30)),
    row(price=None),
    row(quantity=0),
]


def exported(uses: list[MeterSum]) -> tuple[list[dict[str, str]], dict[str, Any]]:
    done = focus.export(
        uses,
        account="acct",
        tenant_names={"t1": "=Acme"},
        list_prices={"list@1/Input Tokens": Decimal("2.5")},
        start=NOVEMBER.start,
        end=NOVEMBER.end,
    )
    return list(csv.DictReader(io.StringIO(done.csv))), json.loads(done.manifest)


def test_focus_rows_keep_the_rules_of_the_specification() -> None:
    """Columns, nullability, dates, enums, formats, and price x quantity = cost, exactly."""
    rows, manifest = exported(USES)
    assert len(rows) == manifest["rows"] == 6
    assert manifest["charge_lines_without_a_price_left_out"] == 1
    assert list(rows[0]) == [*focus.COLUMNS, *focus.CUSTOM]
    assert list(focus.COLUMNS) == sorted(focus.COLUMNS)
    for found in rows:
        assert all(found[name] for name in MANDATORY)
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:00:00Z", found[name]) for name in DATES)
        assert found["BillingPeriodStart"][8:] == "01T00:00:00Z"
        assert found["ChargePeriodStart"] < found["ChargePeriodEnd"]
        assert found["ChargeClass"] in ("", "Correction")
        assert found["ServiceSubcategory"] in SUBCATEGORIES[found["ServiceCategory"]]
        quantity = Decimal(found["PricingQuantity"])
        for price, cost in (
            ("ContractedUnitPrice", "ContractedCost"),
            ("ListUnitPrice", "ListCost"),
        ):
            assert Decimal(found[price]) * quantity == Decimal(found[cost])
        assert found["BilledCost"] == found["EffectiveCost"] == found["ContractedCost"]
        details = json.loads(found["SkuPriceDetails"])
        assert all(name.startswith("x_") for name in details)
        assert json.loads(found["Tags"]) == {}
        assert "E" not in found["BilledCost"]
        assert found["SubAccountName"] == "'=Acme"


def test_focus_says_what_a_row_is() -> None:
    """Units by kind of meter; a late charge is a correction in the month that books it."""
    rows, manifest = exported(USES)
    by_meter = {found["SkuMeter"]: found for found in rows if not found["ChargeClass"]}
    units = {meter: (f["ConsumedUnit"], f["PricingUnit"]) for meter, f in by_meter.items()}
    assert units == {
        "Input Tokens": ("Tokens", "1000000 Tokens"),
        "Cache Read Input Tokens": ("Tokens", "1000000 Tokens"),
        "Output Tokens": ("Tokens", "1000000 Tokens"),
        "GPU Prefill": ("Seconds", "Seconds"),
        "Requests": ("Requests", "Requests"),
    }
    assert by_meter["GPU Prefill"]["ConsumedQuantity"] == "1.500001"
    assert by_meter["Input Tokens"]["ListUnitPrice"] == "2.5"
    late = next(found for found in rows if found["ChargeClass"] == "Correction")
    assert late["ChargePeriodStart"] == "2026-10-04T09:00:00Z"
    assert late["BillingPeriodStart"] == "2026-11-01T00:00:00Z"
    assert manifest["sums"]["USD"]["BilledCost"] == f"{total([u.amount for u in USES]):f}".rstrip(
        "0"
    )


def test_focus_is_the_same_file_whatever_the_order_of_the_rows() -> None:
    """Exports regenerate byte for byte; the manifest holds the hash."""
    assert exported(USES) == exported(USES[::-1])
