"""Price lists from files, as entries of a book: LiteLLM's map and our own CSV. Pure.

LiteLLM's map names a price by mangling: `input_cost_per_token_above_272k_tokens_priority` is meter,
threshold and service tier in one key. Numbers are read as decimals from their text, not as floats:
2.5e-06 a token is 2.5 per million exactly. A price with more than nine decimals per million is
rounded half up, and said so. What has no meter here (seconds, pages) is left out and counted.
The CSV is checked whole: every wrong line is named, and prices that overlap in time are refused.
"""

import csv
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from msgspec import Struct, structs

from telemetry.books import Catalogue, Entry, Notes
from telemetry.money import EXACT
from telemetry.pricing import MILLION, Meter, standard_tier

TIERS = {"batches": "batch", "flex": "flex", "priority": "priority"}

_METERS = {
    "input_cost_per_token": Meter.INPUT,
    "output_cost_per_token": Meter.OUTPUT,
    "cache_read_input_token_cost": Meter.CACHE_READ,
    "cache_creation_input_token_cost": Meter.CACHE_WRITE,
    "cache_creation_input_token_cost_above_1hr": Meter.CACHE_WRITE_1H,
    "input_cost_per_audio_token": Meter.AUDIO_INPUT,
    "input_cost_per_image_token": Meter.IMAGE_INPUT,
    "output_cost_per_audio_token": Meter.AUDIO_OUTPUT,
    "output_cost_per_image_token": Meter.IMAGE_OUTPUT,
    "output_cost_per_reasoning_token": Meter.REASONING,
    "input_cost_per_request": Meter.REQUESTS,
}
# `litellm_provider` → the provider's name in our lists, where they differ.
_PROVIDERS = {
    "bedrock": "aws",
    "bedrock_converse": "aws",
    "cohere_chat": "cohere",
    "fireworks_ai": "fireworks",
    "gemini": "google",
    "together_ai": "together",
    "xai": "x-ai",
}
_KEY = re.compile(
    r"(?P<base>.+?)(?:_above_(?P<k>\d+)k_tokens)?(?:_(?P<tier>batches|flex|priority))?"
)
_COLUMNS = ("provider", "model", "meter", "unit_price")
_OPTIONAL = (
    *("match", "service_tier", "min_input_tokens", "unit", "list_unit_price", "currency"),
    *("effective_from", "effective_to"),
)
_MATCHES = ("equals", "starts_with", "ends_with", "contains", "regex", "any")


class ListInvalid(ValueError):
    """The file is no such price list. `problems`: one line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def from_litellm(text: str) -> Catalogue:
    """The entries of `model_prices_and_context_window.json`, or of any file in its format."""
    try:
        data = json.loads(text, parse_float=Decimal)
    except ValueError as error:
        raise ListInvalid([f"not JSON: {error}"]) from None
    if not isinstance(data, dict):
        raise ListInvalid(["not a map of models"])
    notes = Notes()
    entries: dict[tuple[str, str, str, str, int], Entry] = {}
    for name, facts in data.items():
        if name == "sample_spec" or not isinstance(facts, dict):
            continue
        for entry in _litellm_entries(name, facts, notes):
            key = (
                *(entry.provider, entry.model, entry.meter, entry.service_tier),
                entry.min_input_tokens,
            )
            if key in entries and entries[key].unit_price != entry.unit_price:
                notes.skipped["named twice with different prices: the first one stands"] += 1
            entries.setdefault(key, entry)
    if not entries:
        raise ListInvalid(["no model in it has a price per token"])
    return Catalogue(
        entries=tuple(entries[key] for key in sorted(entries)),
        quantised=tuple(notes.quantised),
        skipped=dict(notes.skipped),
    )


def from_csv(text: str) -> Catalogue:
    """The entries of a CSV with a header: provider, model, meter, unit_price, and optionally
    match, service_tier, min_input_tokens, unit, list_unit_price, currency, effective_from and
    effective_to. Prices are per 1,000,000 unless `unit` says otherwise."""
    reader = csv.DictReader(io.StringIO(text))
    try:
        header = [name.strip() for name in reader.fieldnames or ()]
    except csv.Error as error:
        raise ListInvalid([f"not a CSV: {error}"]) from None
    missing = [name for name in _COLUMNS if name not in header]
    unknown = [name for name in header if name not in (*_COLUMNS, *_OPTIONAL)]
    if missing or unknown:
        raise ListInvalid(
            [f"column {name} is missing" for name in missing]
            + [f"unknown column {name}" for name in unknown]
        )
    notes = Notes()
    entries: list[Entry] = []
    problems: list[str] = []
    for row in _rows_of(reader):
        where = f"line {reader.line_num}"
        try:
            entries.append(_csv_entry(row, len(entries), notes, where))
        except (ValueError, InvalidOperation) as error:
            problems.append(f"{where}: {str(error) or 'not a number'}")
    problems += overlaps(entries)
    if not entries and not problems:
        problems.append("there is no price in it")
    if problems:
        raise ListInvalid(problems)
    return Catalogue(entries=tuple(entries), quantised=tuple(notes.quantised))


def _rows_of(reader: "csv.DictReader[str]") -> Iterator[dict[str, Any]]:
    try:
        yield from reader
    except csv.Error as error:
        raise ListInvalid([f"line {reader.line_num}: not a CSV: {error}"]) from None


def with_tiers(catalogue: Catalogue, factors: Mapping[str, Decimal]) -> Catalogue:
    """The list with the prices of further service tiers, each a factor of the standard price
    (batch=0.5). What the list itself says of a tier stands."""
    known = {_identity(entry) for entry in catalogue.entries}
    notes = Notes()
    notes.quantised.extend(catalogue.quantised)
    added: list[Entry] = []
    for tier, factor in sorted(factors.items()):
        for entry in catalogue.entries:
            if entry.service_tier or entry.meter in (Meter.REQUESTS, Meter.GPU_TIME):
                continue
            price = EXACT.multiply(entry.unit_price, factor)
            where = f"{entry.provider}/{entry.model} {entry.meter} {tier}"
            cheaper = structs.replace(
                entry, service_tier=tier, unit_price=notes.quantise(price, where)
            )
            if _identity(cheaper) not in known:
                added.append(cheaper)
    return structs.replace(
        catalogue, entries=(*catalogue.entries, *added), quantised=tuple(notes.quantised)
    )


def overlaps(entries: Iterable[Entry]) -> list[str]:
    """Prices of the same thing that hold at the same time."""
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault(_identity(entry)[:-1], []).append(entry)
    problems = []
    for group in groups.values():
        ordered = sorted(group, key=lambda entry: entry.effective_from or _EVER)
        for first, second in itertools.pairwise(ordered):
            if first.effective_to is None or (second.effective_from or _EVER) < first.effective_to:
                problems.append(
                    f"{first.provider} {first.model} {first.meter} {first.service_tier}".rstrip()
                    + ": two prices hold at the same time"
                )
    return problems


_EVER = datetime.min.replace(tzinfo=UTC)


def _identity(entry: Entry) -> tuple[Any, ...]:
    return (
        *(entry.provider, entry.model, entry.match, entry.meter, entry.service_tier),
        *(entry.min_input_tokens, entry.effective_from),
    )


class _Named(Struct, frozen=True):
    """A key of LiteLLM's map, taken apart."""

    meter: Meter
    service_tier: str
    min_input_tokens: int


def _named(key: str) -> _Named | None:
    if key in _METERS:
        return _Named(_METERS[key], "", 0)
    match = _KEY.fullmatch(key)
    if match is None or match["base"] not in _METERS:
        return None
    # "above 272k" means from the next token on, for the whole request
    above = int(match["k"]) * 1000 + 1 if match["k"] else 0
    return _Named(_METERS[match["base"]], TIERS.get(match["tier"] or "", ""), above)


def _litellm_entries(name: str, facts: Mapping[str, Any], notes: Notes) -> Iterator[Entry]:
    listed = str(facts.get("litellm_provider") or name.partition("/")[0])
    is_vertex = listed.startswith("vertex_ai")
    provider = "google" if is_vertex else _PROVIDERS.get(listed, listed)
    model = name.removeprefix(f"{listed}/").removeprefix("vertex_ai/").lower()
    for key, value in facts.items():
        named = _named(key)
        if named is None:
            if "cost" in key:
                notes.skipped[key] += 1
            continue
        if isinstance(value, bool) or not isinstance(value, int | Decimal):
            notes.skipped[f"{key}: not a number"] += value is not None
            continue
        unit = 1 if named.meter is Meter.REQUESTS else MILLION
        price = EXACT.multiply(Decimal(value), Decimal(unit))
        if price < 0 or len(model) > 256 or len(provider) > 64:
            notes.skipped[f"{key}: out of range"] += 1
            continue
        yield Entry(
            provider=provider,
            model=model,
            match="equals",
            priority=0,
            meter=named.meter.value,
            min_input_tokens=named.min_input_tokens,
            unit=unit,
            unit_price=notes.quantise(price, f"{name} {key}"),
            service_tier=named.service_tier,
        )


_BY_NAME = {meter.value.lower(): meter for meter in Meter}


def _csv_entry(row: dict[str, Any], place: int, notes: Notes, where: str) -> Entry:
    cells = {(name or "").strip(): (value or "").strip() for name, value in row.items() if name}
    if None in row or any(value is None for value in row.values()):
        raise ValueError("another number of cells than the header")
    meter = _BY_NAME.get(cells["meter"].lower())
    if meter is None or meter is Meter.UNMETERED:
        raise ValueError(f"unknown meter {cells['meter']!r}: use a name like Input Tokens")
    match = cells.get("match") or ("equals" if cells["model"] else "any")
    if match not in _MATCHES:
        raise ValueError(f"unknown match {match!r}: use any of {', '.join(_MATCHES)}")
    if match == "regex":
        try:
            re.compile(cells["model"])
        except re.error as error:
            raise ValueError(f"model is no regular expression: {error}") from None
    if not cells["provider"] or len(cells["provider"]) > 64 or len(cells["model"]) > 256:
        raise ValueError("provider is missing, or a name is too long")
    listed = cells.get("list_unit_price")
    currency = (cells.get("currency") or "USD").upper()
    if not re.fullmatch(r"[A-Z]{3}", currency):
        raise ValueError(f"currency {currency!r} is no three-letter code")
    unit = int(cells.get("unit") or (1 if meter is Meter.REQUESTS else MILLION))
    if unit not in _UNITS:
        raise ValueError(f"unit {unit}: use a power of ten up to 1000000; then amounts are exact")
    start, end = _instant(cells.get("effective_from")), _instant(cells.get("effective_to"))
    if start is not None and end is not None and end <= start:
        raise ValueError("effective_to is not after effective_from")
    return Entry(
        provider=cells["provider"],
        model=cells["model"] if match == "regex" else cells["model"].lower(),
        match=match,
        priority=place if match != "equals" else 0,
        meter=meter.value,
        min_input_tokens=_whole(cells.get("min_input_tokens") or "0"),
        unit=unit,
        unit_price=notes.quantise(_price(cells["unit_price"]), where),
        effective_from=start,
        effective_to=end,
        currency=currency,
        service_tier=standard_tier(cells.get("service_tier")),
        list_unit_price=notes.quantise(_price(listed), where) if listed else None,
    )


_UNITS = tuple(10**power for power in range(7))


def _price(text: str) -> Decimal:
    try:
        price = Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text!r} is not a price") from None
    if not price.is_finite() or price < 0 or price >= Decimal("1e12"):
        raise ValueError(f"{text!r} is not a price")
    return price


def _whole(text: str) -> int:
    if not re.fullmatch(r"\d{1,12}", text):
        raise ValueError(f"min_input_tokens {text!r} is not a number of tokens")
    return int(text)


def _instant(text: str | None) -> datetime | None:
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a date: write 2026-11-01") from None
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


__all__ = ["ListInvalid", "from_csv", "from_litellm", "overlaps", "with_tiers"]
