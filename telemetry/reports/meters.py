"""Sums by meter and price: what savings, waste, statements and exports are made of. Pure."""

from datetime import datetime
from decimal import Decimal

from msgspec import Struct

from telemetry.pricing import BUCKET_METERS, DEVICE_METERS, Meter
from telemetry.reports.chargeback import HourlySum

INPUT_METERS = frozenset(m.value for name, m in BUCKET_METERS if name.startswith("in_"))
OUTPUT_METERS = frozenset(m.value for name, m in BUCKET_METERS if name.startswith("out_"))
TOKEN_METERS = INPUT_METERS | OUTPUT_METERS
GPU_METERS = frozenset(meter.value for _, meter in DEVICE_METERS)


class MeterSum(Struct, frozen=True, kw_only=True):
    """One row of rollup_meter. `hour` is when it was booked, `charge_hour` when it was used."""

    hour: datetime
    charge_hour: datetime
    tenant_id: str = ""
    key_id: str = ""
    asked_model: str = ""
    backend: str = ""
    provider: str = ""
    model: str = ""
    service_tier: str = ""
    meter: str = ""
    price_id: str = ""
    waste: str = ""
    currency: str = "USD"
    unit: int = 1_000_000
    unit_price: Decimal | None = None
    quantity: int = 0
    amount: Decimal = Decimal(0)
    lines: int = 0
    unpriced_lines: int = 0

    @property
    def is_correction(self) -> bool:
        """Whether it is booked in another month than the one in which it was used."""
        return (self.hour.year, self.hour.month) != (self.charge_hour.year, self.charge_hour.month)


def base_meter(meter: str) -> str:
    """The meter of a line: a meter that was charged twice in one attempt is numbered."""
    name, _, number = meter.rpartition(" (")
    return name if name and number[:-1].isdigit() else meter


def as_hourly(row: MeterSum) -> HourlySum:
    """For a chargeback by meter: tokens and device time by the kind of meter, no requests."""
    meter = base_meter(row.meter)
    is_input = meter in INPUT_METERS
    return HourlySum(
        hour=row.hour,
        tenant_id=row.tenant_id,
        key_id=row.key_id,
        asked_model=row.asked_model,
        backend=row.backend,
        provider=row.provider,
        model=row.model,
        currency=row.currency,
        input_tokens=row.quantity if is_input else 0,
        cached_tokens=row.quantity if meter == Meter.CACHE_READ else 0,
        output_tokens=row.quantity if meter in OUTPUT_METERS else 0,
        device_us=row.quantity if meter in GPU_METERS else 0,
        amount=row.amount,
        unpriced_lines=row.unpriced_lines,
        meter=meter,
        service_tier=row.service_tier,
        waste=row.waste,
    )
