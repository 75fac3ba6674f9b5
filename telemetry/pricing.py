"""What an attempt costs: one pure function over a snapshot of the published price books.

It knows nothing of databases, clocks or tenants: the same attempt and the same books always give
the same lines. Every non-zero bucket becomes one line and no line is rounded. A price that is not
known gives a line without amount ("unpriced"), never a zero.

Which price applies is decided by when the attempt started. Prices agreed for a backend (the book
of the config) win over published lists; of those, the model that answered is looked up first and
the model that was asked for second. A meter without a price of its own takes the price of the
meter it falls back to, and the line names that price: cache reads and writes, audio, images,
video and documents fall back to input, reasoning, audio and images out to output. A service tier
(batch, flex, priority) that a book does not price is charged at the standard price.

Time on owned hardware is priced per GPU-second: rate per hour x devices / 3600, rounded half up to
9 decimals when the book is published. What that rounding leaves against the bill (at most 1.8e-6
dollars a GPU-hour) is a matter of reconciliation, never of a request.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from enum import StrEnum

from msgspec import Struct

from telemetry.money import EXACT, PRICE_SCALE, amount
from telemetry.record import Attempt, Charge
from telemetry.timings import DeviceTime
from telemetry.usage import Usage

MILLION = 1_000_000
DAY_NS = 86_400 * 10**9


class Meter(StrEnum):
    """What a line counts. The value is what invoices and exports show."""

    INPUT = "Input Tokens"
    CACHE_READ = "Cache Read Input Tokens"
    CACHE_WRITE = "Cache Write Input Tokens"
    CACHE_WRITE_1H = "Cache Write 1h Input Tokens"
    AUDIO_INPUT = "Audio Input Tokens"
    IMAGE_INPUT = "Image Input Tokens"
    VIDEO_INPUT = "Video Input Tokens"
    DOCUMENT_INPUT = "Document Input Tokens"
    OUTPUT = "Output Tokens"
    REASONING = "Reasoning Output Tokens"
    AUDIO_OUTPUT = "Audio Output Tokens"
    IMAGE_OUTPUT = "Image Output Tokens"
    REQUESTS = "Requests"
    GPU_TIME = "GPU Time"  # a price only; its lines say which phase
    GPU_PREFILL = "GPU Prefill"
    GPU_DECODE = "GPU Decode"
    GPU_SAMPLING = "GPU Sampling"
    GPU_RECOMPUTE = "GPU Recompute"
    GPU_SPEC_REJECTED = "GPU Rejected Speculation"
    UNMETERED = "Unmetered Answer"  # content was sent and nobody counted it: always unpriced


BUCKET_METERS: tuple[tuple[str, Meter], ...] = (
    ("in_uncached_text", Meter.INPUT),
    ("in_cached_read", Meter.CACHE_READ),
    ("in_cache_write_5m", Meter.CACHE_WRITE),
    ("in_cache_write_1h", Meter.CACHE_WRITE_1H),
    ("in_audio", Meter.AUDIO_INPUT),
    ("in_image", Meter.IMAGE_INPUT),
    ("in_video", Meter.VIDEO_INPUT),
    ("in_document", Meter.DOCUMENT_INPUT),
    ("out_text", Meter.OUTPUT),
    ("out_reasoning", Meter.REASONING),
    ("out_audio", Meter.AUDIO_OUTPUT),
    ("out_image", Meter.IMAGE_OUTPUT),
)

DEVICE_METERS: tuple[tuple[str, Meter], ...] = (
    ("prefill", Meter.GPU_PREFILL),
    ("decode", Meter.GPU_DECODE),
    ("sampling", Meter.GPU_SAMPLING),
    ("recompute", Meter.GPU_RECOMPUTE),
    ("spec_rejected", Meter.GPU_SPEC_REJECTED),
)

FALLBACKS: dict[Meter, tuple[Meter, ...]] = {
    Meter.CACHE_READ: (Meter.INPUT,),
    Meter.CACHE_WRITE: (Meter.INPUT,),
    Meter.CACHE_WRITE_1H: (Meter.CACHE_WRITE, Meter.INPUT),
    Meter.AUDIO_INPUT: (Meter.INPUT,),
    Meter.IMAGE_INPUT: (Meter.INPUT,),
    Meter.VIDEO_INPUT: (Meter.INPUT,),
    Meter.DOCUMENT_INPUT: (Meter.INPUT,),
    Meter.REASONING: (Meter.OUTPUT,),
    Meter.AUDIO_OUTPUT: (Meter.OUTPUT,),
    Meter.IMAGE_OUTPUT: (Meter.OUTPUT,),
}

# gen_ai.provider.name (OpenTelemetry GenAI conventions) → the name in published price lists.
LIST_NAMES = {
    "aws.bedrock": "aws",
    "azure.ai.inference": "azure",
    "azure.ai.openai": "azure",
    "gcp.gemini": "google",
    "gcp.gen_ai": "google",
    "gcp.vertex_ai": "google",
    "mistral_ai": "mistral",
    "moonshot_ai": "moonshotai",
    "x_ai": "x-ai",
    "xai": "x-ai",
}


# What providers call the tier that everybody gets: its prices are those without a tier.
STANDARD_TIERS = frozenset({"", "auto", "default", "standard", "on_demand", "scale"})


def standard_tier(name: str | None) -> str:
    """A service tier as price lists spell it; empty for the standard one."""
    tier = (name or "").strip().lower()
    return "" if tier in STANDARD_TIERS else tier


class Price(Struct, frozen=True, kw_only=True, gc=False):
    """One dated price of one meter, as published."""

    price_id: str
    provider: str  # a list's provider, or "@name" for one backend of the config
    model: str  # a name or a pattern, by `match`; lower case
    match: str  # equals | starts_with | ends_with | contains | regex | any
    priority: int  # lower wins: the place of the model in its list
    meter: str
    min_input_tokens: int  # applies from this many input tokens on, to the whole request (cliff)
    unit: int
    unit_price: Decimal
    currency: str = "USD"
    service_tier: str = ""  # "": standard
    effective_from_ns: int | None = None  # None: always
    effective_to_ns: int | None = None  # exclusive

    def holds_at(self, at_ns: int) -> bool:
        return (self.effective_from_ns is None or self.effective_from_ns <= at_ns) and (
            self.effective_to_ns is None or at_ns < self.effective_to_ns
        )


class Book(Struct, frozen=True, kw_only=True):
    """One published version of one list. `prices` are by provider, and may be decoded only when
    the provider is first asked for."""

    name: str
    version: int
    published_ns: int
    prices: dict[str, Sequence[Price] | Callable[[], Sequence[Price]]]

    @property
    def label(self) -> str:
        return f"{self.name}@{self.version}"

    def of(self, provider: str) -> Sequence[Price]:
        prices = self.prices.get(provider, ())
        return prices() if callable(prices) else prices


class Sheet(Struct, frozen=True, kw_only=True):
    """The prices of one model at one time. Tiers of a meter come highest first."""

    book: str
    tiers: dict[str, tuple[Price, ...]]

    def price(self, meter: Meter, input_tokens: int, service_tier: str = "") -> Price | None:
        """The meter's own price, else that of the first meter it falls back to; of each, the price
        of the service tier, else the standard one."""
        for name in (meter, *FALLBACKS.get(meter, ())):
            prices = self.tiers.get(name, ())
            for tier in (service_tier, "") if service_tier else ("",):
                for price in prices:
                    if price.service_tier == tier and price.min_input_tokens <= input_tokens:
                        return price
        return None


class PriceBook:
    """A snapshot of what is published. Its facts never change; look-ups are remembered.

    `agreements` are the versions of the config's book: at any time the newest one published by
    then holds, for the backends that it names. `catalogues` are tried in order."""

    def __init__(self, catalogues: Sequence[Book] = (), agreements: Sequence[Book] = ()) -> None:
        self.catalogues = tuple(catalogues)
        self.agreements = tuple(sorted(agreements, key=lambda book: book.published_ns))
        self._agreed_from = [book.published_ns for book in self.agreements]
        self._matchers: dict[tuple[str, str], _Matcher] = {}
        self._found: dict[tuple[str, str, int], Sheet | None] = {}

    def agreed(self, backend: str, at_ns: int) -> Sheet | None:
        """The prices agreed for one backend, or None."""
        index = bisect_right(self._agreed_from, at_ns) - 1
        if index < 0:
            return None
        book = self.agreements[index]
        key = (book.label, backend, at_ns // DAY_NS)
        try:
            return self._found[key]
        except KeyError:
            pass
        prices = book.of(f"@{backend}")
        sheet = _sheet(book.label, prices, at_ns)
        if not any(_changes_inside(price, at_ns) for price in prices):
            self._found[key] = sheet
        return sheet

    def listed(self, provider: str, model: str, at_ns: int) -> Sheet | None:
        """The published prices of a model, or None. Remembered per day; days on which a price of
        the model changes are looked up each time."""
        key = (provider, model, at_ns // DAY_NS)
        try:
            return self._found[key]
        except KeyError:
            pass
        sheet, is_stable = self._look_up(provider, model, at_ns)
        if is_stable:
            if len(self._found) >= 4096:  # made-up model names must not fill the memory
                self._found.clear()
            self._found[key] = sheet
        return sheet

    def _look_up(self, provider: str, model: str, at_ns: int) -> tuple[Sheet | None, bool]:
        is_stable = True
        for book in self.catalogues:
            name = provider if provider in book.prices else LIST_NAMES.get(provider, provider)
            matcher = self._matchers.get((book.label, name))
            if matcher is None:
                matcher = self._matchers[book.label, name] = _Matcher(book.of(name))
            prices = matcher.find(model)
            is_stable = is_stable and not any(_changes_inside(price, at_ns) for price in prices)
            sheet = _sheet(book.label, prices, at_ns)
            if sheet is not None:
                return sheet, is_stable
        return None, is_stable


def rate(attempt: Attempt, book: PriceBook) -> tuple[Charge, ...]:
    """The cost of one attempt, in lines. Nothing used gives no line."""
    agreed = book.agreed(attempt.backend, attempt.started_ns)
    device = attempt.timings.device_us if attempt.timings is not None else None
    gpu = agreed.price(Meter.GPU_TIME, 0) if agreed is not None else None
    if agreed is not None and gpu is not None and device is not None:
        return tuple(_device_lines(device, gpu, agreed.book))
    if attempt.usage is None:
        return () if attempt.first_token_ns is None else (_unpriced(Meter.UNMETERED, 1, 1),)
    sheet = agreed if agreed is not None else _listed(attempt, book)
    return tuple(_token_lines(attempt.usage, sheet, standard_tier(attempt.service_tier)))


def gpu_second(rate_per_hour: Decimal, count: int) -> Decimal:
    """Dollars per GPU-second of `count` devices, at 9 decimals, rounded half up."""
    per_hour = EXACT.multiply(rate_per_hour, Decimal(count))
    return (per_hour / Decimal(3600)).quantize(PRICE_SCALE, rounding=ROUND_HALF_UP)


def matches(match: str, pattern: str, model: str) -> bool:
    """Whether a pattern of a price list means this (lower-case) model name."""
    match match:
        case "equals":
            return model == pattern
        case "starts_with":
            return model.startswith(pattern)
        case "ends_with":
            return model.endswith(pattern)
        case "contains":
            return pattern in model
        case "regex":
            return re.search(pattern, model) is not None
        case "any":
            return True
        case _:
            raise ValueError(f"unknown match {match!r}")


def _listed(attempt: Attempt, book: PriceBook) -> Sheet | None:
    for model in (attempt.answered_model, attempt.model):
        if model:
            sheet = book.listed(attempt.provider, model, attempt.started_ns)
            if sheet is not None:
                return sheet
    return None


def _token_lines(usage: Usage, sheet: Sheet | None, tier: str) -> Iterator[Charge]:
    input_tokens = usage.input_tokens
    for bucket, meter in BUCKET_METERS:
        quantity = getattr(usage, bucket)
        if not quantity:
            continue
        price = sheet.price(meter, input_tokens, tier) if sheet is not None else None
        if sheet is None or price is None:
            yield _unpriced(meter, quantity, MILLION)
        else:
            yield _line(meter, quantity, price, sheet.book)
    if sheet is not None:
        price = sheet.price(Meter.REQUESTS, input_tokens, tier)
        if price is not None:
            yield _line(Meter.REQUESTS, 1, price, sheet.book)


def _device_lines(device: DeviceTime, price: Price, book: str) -> Iterator[Charge]:
    for phase, meter in DEVICE_METERS:
        quantity = getattr(device, phase)
        if quantity:
            yield _line(meter, quantity, price, book)


def _line(meter: Meter, quantity: int, price: Price, book: str) -> Charge:
    return Charge(
        meter=meter.value,
        quantity=quantity,
        unit=price.unit,
        unit_price=price.unit_price,
        amount=amount(quantity, price.unit_price, price.unit),
        currency=price.currency,
        price_id=price.price_id,
        book=book,
    )


def _unpriced(meter: Meter, quantity: int, unit: int) -> Charge:
    return Charge(meter=meter.value, quantity=quantity, unit=unit, unit_price=None, amount=None)


def _sheet(book: str, prices: Iterable[Price], at_ns: int) -> Sheet | None:
    tiers: dict[str, list[Price]] = {}
    for price in prices:
        if price.holds_at(at_ns):
            tiers.setdefault(price.meter, []).append(price)
    if not tiers:
        return None
    for found in tiers.values():
        found.sort(key=lambda price: -price.min_input_tokens)
    return Sheet(book=book, tiers={meter: tuple(found) for meter, found in tiers.items()})


def _changes_inside(price: Price, at_ns: int) -> bool:
    start = at_ns // DAY_NS * DAY_NS
    return any(
        edge is not None and start < edge < start + DAY_NS
        for edge in (price.effective_from_ns, price.effective_to_ns)
    )


class _Matcher:
    """Finds a model among the prices of one provider in one book. Names are a dict look-up;
    patterns are tried in order of priority, and only those that would win over the name."""

    def __init__(self, prices: Iterable[Price]) -> None:
        groups: dict[tuple[int, str, str], list[Price]] = {}
        for price in prices:
            groups.setdefault((price.priority, price.match, price.model), []).append(price)
        self._names: dict[str, tuple[int, tuple[Price, ...]]] = {}
        self._patterns: list[tuple[int, str, str, tuple[Price, ...]]] = []
        for (priority, match, pattern), group in sorted(groups.items(), key=lambda item: item[0]):
            if match == "equals":
                self._names.setdefault(pattern, (priority, tuple(group)))
            else:
                self._patterns.append((priority, match, pattern, tuple(group)))

    def find(self, model: str) -> tuple[Price, ...]:
        name = model.lower()
        found = self._find(name)
        if not found:
            dashed = _dashed_date(name)
            if dashed != name:
                found = self._find(dashed)
        return found

    def _find(self, name: str) -> tuple[Price, ...]:
        best, found = self._names.get(name, (None, ()))
        for priority, match, pattern, group in self._patterns:
            if best is not None and priority >= best:
                break
            if matches(match, pattern, name):
                return group
        return found


_COMPACT_DATE = re.compile(r"(?<!\d)(20\d{2})(\d{2})(\d{2})(?!\d)")


def _dashed_date(model: str) -> str:
    """`name-20251211` as `name-2025-12-11`: routers and vendors write the same release both ways,
    and lists know one of them."""

    def dashed(found: "re.Match[str]") -> str:
        try:
            return date(int(found[1]), int(found[2]), int(found[3])).isoformat()
        except ValueError:
            return found[0]

    return _COMPACT_DATE.sub(dashed, model)
