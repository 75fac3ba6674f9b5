"""Money is Decimal from the price list to the report. A float anywhere in it is an error."""

from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Clamped, Context, Decimal, FloatOperation, Inexact

# A price per 1 M tokens has at most 9 decimals and token counts are integers, so a product
# divided by 1 M has at most 15 decimals: exact, never rounded. `Inexact` traps the exception.
EXACT = Context(prec=50, rounding=ROUND_HALF_UP, traps=[Clamped, FloatOperation, Inexact])

PRICE_SCALE = Decimal("1e-9")  # a unit price is stored with 9 decimals
AMOUNT_SCALE = Decimal("1e-15")  # an amount with 15


def amount(quantity: int, unit_price: Decimal, unit: int) -> Decimal:
    """`quantity` at `unit_price` per `unit`. Raises decimal.Inexact rather than round."""
    return EXACT.divide(EXACT.multiply(Decimal(quantity), unit_price), Decimal(unit))


def total(amounts: Sequence[Decimal]) -> Decimal:
    """The exact sum."""
    result = Decimal(0)
    for value in amounts:
        result = EXACT.add(result, value)
    return result


def plain(value: Decimal) -> str:
    """The canonical text of an amount: no exponent, no trailing zeros, `0` for zero."""
    text = format(value, "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def split(whole: int, weights: Sequence[int]) -> list[int]:
    """Split an integer amount by weight so that the parts sum to it (largest remainder).

    Ties go to the earlier part. All weights zero: everything goes to the first part, since an
    amount must never vanish."""
    if not weights:
        raise ValueError("nothing to split among")
    base = sum(weights)
    if base == 0:
        return [whole] + [0] * (len(weights) - 1)
    parts = [whole * w // base for w in weights]
    order = sorted(range(len(weights)), key=lambda i: (-(whole * weights[i] % base), i))
    for i in order[: whole - sum(parts)]:
        parts[i] += 1
    return parts


__all__ = ["AMOUNT_SCALE", "EXACT", "PRICE_SCALE", "amount", "plain", "split", "total"]
