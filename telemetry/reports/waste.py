"""What was paid and served nobody, by reason. Pure.

Failed attempts, hedges that lost, answers whose client had left, requests that failed in the end,
prompts that the engine had to compute twice, speculation that was rejected, and idle hardware. They
are part of the cost, not beside it: this report only says which part.
"""

from collections import defaultdict
from collections.abc import Iterable
from decimal import Decimal

from telemetry.capacity.allocation import Allocation
from telemetry.money import EXACT
from telemetry.reports.meters import GPU_METERS, TOKEN_METERS, MeterSum, base_meter
from telemetry.reports.period import Period
from telemetry.reports.sheet import Sheet


def waste(rows: Iterable[MeterSum], allocations: Iterable[Allocation], period: Period) -> Sheet:
    """By reason and backend, the dearest first."""
    money: dict[tuple[str, str, str], Decimal] = defaultdict(Decimal)
    tokens: dict[tuple[str, str, str], int] = defaultdict(int)
    time_us: dict[tuple[str, str, str], int] = defaultdict(int)
    for row in rows:
        if not row.waste:
            continue
        key = (row.waste, row.backend, row.currency)
        money[key] = EXACT.add(money[key], row.amount)
        meter = base_meter(row.meter)
        tokens[key] += row.quantity if meter in TOKEN_METERS else 0
        time_us[key] += row.quantity if meter in GPU_METERS else 0
    for found in allocations:
        for share in found.shares:
            if share.bucket != "used" and period.start <= share.hour < period.end:
                key = (f"{share.bucket} hardware", share.backend, "USD")
                money[key] = EXACT.add(money[key], share.amount)
                time_us[key] += share.us
    keys = sorted(money, key=lambda key: (-money[key], key))
    totals: dict[str, Decimal] = defaultdict(Decimal)
    for key in keys:
        totals[key[2]] = EXACT.add(totals[key[2]], money[key])
    return Sheet(
        title=f"Paid for nothing that was served, {period.day(period.start)} on",
        columns=("reason", "backend", "tokens", "device s", "cost", "currency"),
        rows=tuple(
            (key[0], key[1], tokens[key], _seconds(time_us[key]), money[key], key[2])
            for key in keys
        ),
        totals=tuple(
            ("Total", "", None, None, amount, currency)
            for currency, amount in sorted(totals.items())
        ),
        notes=(
            "What a client that left had been sent was delivered; it is listed so that you decide.",
        ),
    )


def _seconds(us: int) -> Decimal:
    return Decimal(us).scaleb(-6)
