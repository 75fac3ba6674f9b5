"""Exact money: products, sums, splits and the refusal of floats and rounding."""

from decimal import Decimal, FloatOperation, Inexact

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.money import AMOUNT_SCALE, EXACT, amount, plain, split, total

prices = st.integers(0, 10**14).map(lambda n: Decimal(n).scaleb(-9))
quantities = st.integers(0, 10**12)


@given(quantities, prices)
def test_tokens_times_price_is_exact_at_scale_15(quantity: int, price: Decimal) -> None:
    """No count of tokens at a 9-decimal price ever needs rounding."""
    result = amount(quantity, price, 1_000_000)
    assert result == result.quantize(AMOUNT_SCALE, context=EXACT)
    assert result * 1_000_000 == price * quantity


@given(quantities, quantities, prices)
def test_amounts_are_additive(first: int, second: int, price: Decimal) -> None:
    """The cost of two counts is the cost of their sum, to the last digit."""
    parts = [amount(first, price, 1_000_000), amount(second, price, 1_000_000)]
    assert total(parts) == amount(first + second, price, 1_000_000)


def test_rounding_is_refused() -> None:
    """A division that does not come out even raises instead of rounding."""
    with pytest.raises(Inexact):
        amount(1, Decimal(1), 3)


def test_a_float_is_refused() -> None:
    """A float in a money comparison raises."""
    with pytest.raises(FloatOperation):
        EXACT.create_decimal(0.1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("0", "0"),
        ("-0.000", "0"),
        ("1E+3", "1000"),
        ("1.500", "1.5"),
        ("0.000000000000001", "0.000000000000001"),
        ("1E-15", "0.000000000000001"),
        ("100", "100"),
        ("-2.50", "-2.5"),
    ],
)
def test_plain_is_canonical(value: str, text: str) -> None:
    """One amount has one text, without exponent or trailing zeros."""
    assert plain(Decimal(value)) == text


@given(st.integers(0, 10**18), st.lists(st.integers(0, 10**9), min_size=1, max_size=30))
def test_parts_of_a_split_sum_to_the_whole(whole: int, weights: list[int]) -> None:
    """Largest remainder: nothing vanishes, and no part is off by a unit or more."""
    parts = split(whole, weights)
    assert sum(parts) == whole
    base = sum(weights)
    if base:
        assert all(
            abs(part * base - whole * weight) < base
            for part, weight in zip(parts, weights, strict=True)
        )


def test_splitting_among_nobody_is_refused() -> None:
    """An amount with nobody to take it is an error, not a loss."""
    with pytest.raises(ValueError, match="nothing to split"):
        split(5, [])
