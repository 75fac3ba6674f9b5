"""The ledger as FOCUS 1.2 (FinOps Open Cost and Usage Specification), CostAndUsage. Pure.

https://focus.finops.org/focus-specification/v1-2/. One row per hour, tenant, key, model, tier,
meter and price. Invariant: unit price x pricing quantity = cost in every row, exactly, and the sum
of BilledCost is the chargeback of the period. A charge without a known price has no cost that FOCUS
could carry: such rows are left out and counted in the manifest, never written as zero. What FOCUS
1.2 has no column for is written as `x_` columns after its own.
"""

import csv
import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

from msgspec import Struct

from telemetry.money import EXACT, amount, plain
from telemetry.pricing import Meter
from telemetry.reports.meters import (
    GPU_METERS,
    INPUT_METERS,
    TOKEN_METERS,
    MeterSum,
    base_meter,
)
from telemetry.reports.render import inert

VERSION = "1.2"
COLUMNS = (
    *("AvailabilityZone", "BilledCost", "BillingAccountId", "BillingAccountName"),
    *("BillingAccountType", "BillingCurrency", "BillingPeriodEnd", "BillingPeriodStart"),
    *("CapacityReservationId", "CapacityReservationStatus", "ChargeCategory", "ChargeClass"),
    *("ChargeDescription", "ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart"),
    *("CommitmentDiscountCategory", "CommitmentDiscountId", "CommitmentDiscountName"),
    *("CommitmentDiscountQuantity", "CommitmentDiscountStatus", "CommitmentDiscountType"),
    *("CommitmentDiscountUnit", "ConsumedQuantity", "ConsumedUnit", "ContractedCost"),
    *("ContractedUnitPrice", "EffectiveCost", "InvoiceId", "InvoiceIssuerName", "ListCost"),
    *("ListUnitPrice", "PricingCategory", "PricingCurrency"),
    *("PricingCurrencyContractedUnitPrice", "PricingCurrencyEffectiveCost"),
    *("PricingCurrencyListUnitPrice", "PricingQuantity", "PricingUnit", "ProviderName"),
    *("PublisherName", "RegionId", "RegionName", "ResourceId", "ResourceName", "ResourceType"),
    *("ServiceCategory", "ServiceName", "ServiceSubcategory", "SkuId", "SkuMeter"),
    *("SkuPriceDetails", "SkuPriceId", "SubAccountId", "SubAccountName", "SubAccountType", "Tags"),
)
CUSTOM = (
    *("x_BackendName", "x_CredentialId", "x_ModelId", "x_RequestedModel", "x_ServiceTier"),
    *("x_Waste", "x_ChargeLines"),
)
_COSTS = ("BilledCost", "EffectiveCost", "ContractedCost", "ListCost")
_HOUR = timedelta(hours=1)
_UNITS = {1: "Requests", 1_000: "1000 Requests", 1_000_000: "1000000 Requests"}

Row = dict[str, str]


class Export(Struct, frozen=True, kw_only=True):
    """A file and its manifest."""

    csv: str
    manifest: str
    rows: int
    left_out: int


def export(
    sums: Iterable[MeterSum],
    *,
    account: str,
    tenant_names: Mapping[str, str],
    list_prices: Mapping[str, Decimal],
    start: datetime,
    end: datetime,
) -> Export:
    """The sums of a period. `list_prices`: by price id, where the public price is another."""
    rows: list[Row] = []
    left_out = 0
    totals: dict[str, dict[str, Decimal]] = defaultdict(lambda: dict.fromkeys(_COSTS, Decimal(0)))
    for found in sorted(sums, key=_order):
        if found.unit_price is None:
            left_out += found.lines
            continue
        if not found.quantity and not found.amount:
            continue  # reversed to nothing within its own hour
        row = focus_row(found, account, tenant_names, list_prices.get(found.price_id))
        rows.append(row)
        for name in _COSTS:
            sums_of = totals[row["BillingCurrency"]]
            sums_of[name] = EXACT.add(sums_of[name], Decimal(row[name]))
    text = _csv(rows)
    manifest = {
        "dataset": "CostAndUsage",
        "focus_version": VERSION,
        "period": {"start": _iso(start), "end": _iso(end)},
        "rows": len(rows),
        "sums": {
            currency: {name: plain(total) for name, total in costs.items()}
            for currency, costs in sorted(totals.items())
        },
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "charge_lines_without_a_price_left_out": left_out,
    }
    return Export(
        csv=text,
        manifest=json.dumps(manifest, indent=2) + "\n",
        rows=len(rows),
        left_out=left_out,
    )


def focus_row(
    found: MeterSum, account: str, tenant_names: Mapping[str, str], list_price: Decimal | None
) -> Row:
    """One row, every column as text; absent values are empty."""
    assert found.unit_price is not None
    meter = base_meter(found.meter)
    is_owned = meter in GPU_METERS
    listed = found.unit_price if list_price is None else list_price
    month = found.hour.astimezone(UTC).replace(day=1, hour=0)
    following = (month + timedelta(days=32)).replace(day=1)
    consumed, consumed_unit, pricing_unit = _measure(meter, found)
    cost = plain(found.amount)
    provider = found.provider or "unknown"
    tier = f"/{found.service_tier}" if found.service_tier else ""
    sku = f"{provider}/{found.model}/{meter}{tier}"
    return {
        **dict.fromkeys((*COLUMNS, *CUSTOM), ""),
        "BilledCost": cost,
        "EffectiveCost": cost,
        "ContractedCost": cost,
        "ListCost": plain(amount(found.quantity, listed, found.unit)),
        "BillingAccountId": account,
        "BillingAccountName": account,
        "BillingAccountType": "Meterline",
        "BillingCurrency": found.currency,
        "BillingPeriodStart": _iso(month),
        "BillingPeriodEnd": _iso(following),
        "ChargeCategory": "Usage",
        "ChargeClass": "Correction" if found.is_correction else "",
        "ChargeDescription": f"{found.model} {meter}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _iso(found.charge_hour),
        "ChargePeriodEnd": _iso(found.charge_hour + _HOUR),
        "ConsumedQuantity": consumed,
        "ConsumedUnit": consumed_unit,
        "PricingQuantity": plain(_divided(found.quantity, found.unit)),
        "PricingUnit": pricing_unit,
        "PricingCategory": "Standard",
        "ContractedUnitPrice": plain(found.unit_price),
        "ListUnitPrice": plain(listed),
        "InvoiceIssuerName": provider,
        "ProviderName": provider,
        "PublisherName": provider,
        "ResourceId": found.backend,
        "ResourceName": found.backend,
        "ResourceType": "Engine" if is_owned else "Endpoint",
        "ServiceCategory": "Compute" if is_owned else "AI and Machine Learning",
        "ServiceName": "Owned inference" if is_owned else "Model inference",
        "ServiceSubcategory": "Other (Compute)" if is_owned else "Generative AI",
        "SkuId": sku,
        "SkuMeter": meter,
        "SkuPriceDetails": _details(found, meter),
        "SkuPriceId": found.price_id or sku,
        "SubAccountId": found.tenant_id or "nobody",
        "SubAccountName": tenant_names.get(found.tenant_id, found.tenant_id) or "nobody",
        "SubAccountType": "Tenant",
        "Tags": "{}",
        "x_BackendName": found.backend,
        "x_CredentialId": found.key_id,
        "x_ModelId": found.model,
        "x_RequestedModel": found.asked_model,
        "x_ServiceTier": found.service_tier or "standard",
        "x_Waste": found.waste,
        "x_ChargeLines": str(found.lines),
    }


def _measure(meter: str, found: MeterSum) -> tuple[str, str, str]:
    """Consumed quantity and unit, and the unit that the price is for."""
    if meter in GPU_METERS:
        return plain(_divided(found.quantity, 1_000_000)), "Seconds", "Seconds"
    if meter in TOKEN_METERS:
        unit = "Tokens" if found.unit == 1 else f"{found.unit} Tokens"
        return str(found.quantity), "Tokens", unit
    return str(found.quantity), "Requests", _UNITS.get(found.unit, f"{found.unit} Requests")


def _divided(quantity: int, unit: int) -> Decimal:
    return EXACT.divide(Decimal(quantity), Decimal(unit))


def _details(found: MeterSum, meter: str) -> str:
    """FOCUS 1.2 knows no keys of models: unknown ones must begin with x_."""
    details: dict[str, Any] = {"x_ModelId": found.model}
    if meter in TOKEN_METERS:
        is_input = meter in INPUT_METERS
        details["x_TokenDirection"] = "Input" if is_input else "Output"
        if meter == Meter.CACHE_READ:
            details["x_TokenCacheAction"] = "Read"
        elif meter in (Meter.CACHE_WRITE, Meter.CACHE_WRITE_1H):
            details["x_TokenCacheAction"] = "Write"
        elif meter == Meter.INPUT:
            details["x_TokenCacheAction"] = "Uncached"
    return json.dumps(details, sort_keys=True)


def _order(found: MeterSum) -> tuple[Any, ...]:
    return (
        *(found.hour, found.charge_hour, found.tenant_id, found.key_id, found.asked_model),
        *(found.backend, found.provider, found.model, found.service_tier, found.meter),
        *(found.price_id, found.waste, found.currency),
    )


_FREE_TEXT = ("ChargeDescription", "SubAccountName", "x_ModelId", "x_RequestedModel", "SkuId")


def _csv(rows: Iterable[Row]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = (*COLUMNS, *CUSTOM)
    writer.writerow(names)
    for row in rows:
        writer.writerow([inert(row[n]) if n in _FREE_TEXT else row[n] for n in names])
    return out.getvalue()


def _iso(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


__all__ = ["COLUMNS", "CUSTOM", "VERSION", "Export", "export", "focus_row"]
