"""Four kinds of bills, read exactly, and a cause for each difference."""

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.closing.bills import FORMATS, BillFormat, BillInvalid, BillLine, compare, read_bill
from telemetry.reports.meters import MeterSum

DAY = date(2026, 11, 3)
OPENAI = """{"object": "page", "data": [{"object": "bucket", "start_time": 1793664000,
 "end_time": 1793750400, "results": [
  {"object": "organization.costs.result", "amount": {"value": 0.06, "currency": "usd"},
   "line_item": "gpt-4o-2024-08-06, input", "project_id": null},
  {"amount": {"value": 0.12345678901234568, "currency": "usd"},
   "line_item": "gpt-4o-2024-08-06, cached input"},
  {"amount": {"value": 1e-05, "currency": "usd"}, "line_item": null}]}]}"""
ANTHROPIC = """{"data": [{"starting_at": "2026-11-03T00:00:00Z",
 "ending_at": "2026-11-04T00:00:00Z", "results": [
  {"currency": "USD", "amount": "123.45", "model": "claude-sonnet-4-20250514",
   "token_type": "cache_creation.ephemeral_1h_input_tokens", "cost_type": "tokens"},
  {"currency": "USD", "amount": "7", "model": null, "token_type": null,
   "cost_type": "web_search"}]}], "has_more": false}"""
FOCUS = """BilledCost,BillingCurrency,ChargePeriodStart,SkuMeter,\
ConsumedQuantity,ConsumedUnit,x_ModelId
1.25,USD,2026-11-03T23:00:00Z,Input Tokens,500000,Tokens,gpt-4o
0.5,USD,2026-11-03T02:00:00+03:00,GPU Time,2.5,Hours,
"""
PLAIN = "day,amount,model,meter,quantity\n2026-11-03,2.50,M,Input Tokens,1000000\n"


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (
            "openai",
            OPENAI,
            [
                (DAY, "0.06", "gpt-4o-2024-08-06", "Input Tokens", None),
                (DAY, "0.123456789012346", "gpt-4o-2024-08-06", "Cache Read Input Tokens", None),
                (DAY, "0.00001", "", "", None),
            ],
        ),
        (
            "anthropic",
            ANTHROPIC,
            [
                (DAY, "1.2345", "claude-sonnet-4-20250514", "Cache Write 1h Input Tokens", None),
                (DAY, "0.07", "", "", None),
            ],
        ),
        (
            "focus",
            FOCUS,
            [
                (DAY, "1.25", "gpt-4o", "Input Tokens", 500_000),
                (DAY - timedelta(days=1), "0.5", "", "GPU Time", None),
            ],
        ),
        ("csv", PLAIN, [(DAY, "2.5", "m", "Input Tokens", 1_000_000)]),
    ],
    ids=["openai", "anthropic in cents", "focus", "plain"],
)
def test_each_format_is_read_exactly(
    form: BillFormat, text: str, expected: list[tuple[date, str, str, str, int | None]]
) -> None:
    """Days are UTC, amounts decimals of the text, what is not said stays empty."""
    assert [
        (line.day, line.amount, line.model, line.meter, line.quantity)
        for line in read_bill(form, text)
    ] == [(day, Decimal(amount), *rest) for day, amount, *rest in expected]


@given(st.text(max_size=100), st.sampled_from(FORMATS))
def test_no_text_breaks_the_readers(text: str, form: BillFormat) -> None:
    """Whatever a file holds: lines, or BillInvalid."""
    try:
        assert read_bill(form, text)
    except BillInvalid as error:
        assert error.problems


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("openai", '{"data": [{"results": []}]}'),
        ("openai", '{"data": [{"start_time": 1, "results": [{"amount": 3}]}]}'),
        ("anthropic", '{"data": [{"starting_at": "2026-11-03", "results": [{"amount": "x"}]}]}'),
        ("anthropic", '{"data": [{"starting_at": "noon", "results": [{"amount": "1"}]}]}'),
        ("csv", "day,amount\n2026-11-03,NaN\n"),
        ("csv", "day,amount\nnever,1\n"),
        ("focus", "BilledCost\n1\n"),
    ],
)
def test_a_broken_bill_is_refused_whole(form: BillFormat, text: str) -> None:
    """Half a bill would look like a difference."""
    with pytest.raises(BillInvalid):
        read_bill(form, text)


def rated(
    amount: str, *, quantity: int = 100, day: date = DAY, model: str = "m", unpriced: int = 0
) -> MeterSum:
    hour = datetime(day.year, day.month, day.day, 9, tzinfo=UTC)
    return MeterSum(
        hour=hour,
        charge_hour=hour,
        provider="openai",
        model=model,
        meter="Input Tokens",
        quantity=quantity,
        amount=Decimal(amount),
        unpriced_lines=unpriced,
    )


def billed(
    amount: str, *, quantity: int | None = None, day: date = DAY, model: str = "m"
) -> BillLine:
    return BillLine(
        day=day, amount=Decimal(amount), model=model, meter="Input Tokens", quantity=quantity
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "cause"),
    [
        ([rated("5")], [billed("5")], ""),
        ([rated("5")], [billed("5.004")], "rounding"),
        ([rated("5", unpriced=2)], [billed("9")], "no price here for 2 lines"),
        ([], [billed("9")], "not through this gateway"),
        ([rated("9")], [billed("0")], "not on the bill"),
        ([rated("5")], [billed("6", quantity=100)], "another price"),
        ([rated("5")], [billed("6", quantity=120)], "other usage"),
        ([rated("5")], [billed("6")], "other usage, or another price"),
        (
            [rated("5"), rated("7", day=DAY + timedelta(days=1))],
            [billed("6"), billed("6", day=DAY + timedelta(days=1))],
            "another day's start: the next day has the opposite",
        ),
    ],
)
def test_a_cause_is_suspected(ours: list[MeterSum], theirs: list[BillLine], cause: str) -> None:
    """From the figures alone: which of the usual reasons fits."""
    assert {found.cause for found in compare("openai", theirs, ours)} == {cause}


def test_a_bill_without_models_is_compared_by_the_day() -> None:
    """The finest level that all lines of a day have; other providers' usage stays out."""
    other = MeterSum(
        hour=rated("1").hour, charge_hour=rated("1").hour, provider="x", amount=Decimal(99)
    )
    lines = [BillLine(day=DAY, amount=Decimal(7)), billed("1")]
    (found,) = compare("openai", lines, [rated("5"), rated("2.5", model="n"), other])
    assert (found.model, found.meter, found.rated_quantity) == ("", "", None)
    assert (found.rated, found.billed, found.residual) == (
        Decimal("7.5"),
        Decimal(8),
        Decimal("0.5"),
    )


@given(
    st.lists(st.decimals(-9, 9, places=6), min_size=1, max_size=6),
    st.lists(st.decimals(0, 9, places=15), max_size=6),
)
def test_residuals_sum_to_the_difference_of_the_totals(
    theirs: list[Decimal], ours: list[Decimal]
) -> None:
    """Nothing is lost between the cells."""
    lines = [billed(str(amount), model=f"m{n % 3}") for n, amount in enumerate(theirs)]
    rows = [rated(str(amount), model=f"m{n % 4}") for n, amount in enumerate(ours)]
    found = compare("openai", lines, rows)
    assert sum(difference.residual for difference in found) == sum(theirs) - sum(ours)
