"""What a request will take, before it is made: tokens by what was learned from settled requests of
the same model, money by the price book.

Pure but for its memory: the observations. Must not know limits. The input estimate is the mean
tokens per byte plus three mean deviations, never more than one token per byte (no byte-level
vocabulary has less than a byte per token); before anything was learned, a token per three bytes.
"""

from collections import OrderedDict
from decimal import ROUND_CEILING, Decimal
from math import ceil, log2

from gateway.allowances import NANO
from telemetry.pricing import Meter, PriceBook, Sheet
from telemetry.record import RequestRecord
from telemetry.usage import UsageSource

FIRST_TOKENS_PER_BYTE = 1 / 3
TOKENS_PER_IMAGE = 1_600  # the dearest common rule: a large image in tiles of high detail
LEARN = 1 / 16  # weight of a new observation
ENOUGH = 20  # answers before their percentile is trusted
MAX_MODELS = 1_000
_INPUT_METERS = (Meter.INPUT, Meter.CACHE_WRITE, Meter.CACHE_WRITE_1H, Meter.DOCUMENT_INPUT)


class _Seen:
    __slots__ = ("count", "deviation", "mean", "outputs")

    def __init__(self) -> None:
        self.count = 0
        self.mean = FIRST_TOKENS_PER_BYTE
        self.deviation = 0.0
        self.outputs = [0] * 130  # answers by size, five buckets per power of two


class Estimator:
    """Learns from each settled record; remembers a bounded number of models, the last used."""

    def __init__(self, first_output_tokens: int) -> None:
        self._first_output_tokens = first_output_tokens
        self._models: OrderedDict[str, _Seen] = OrderedDict()
        self._device_nano: dict[tuple[str, str], float] = {}  # per token, on owned hardware

    def input_tokens(self, model: str, text_bytes: int, images: int) -> int:
        seen = self._models.get(model)
        rate = FIRST_TOKENS_PER_BYTE
        if seen is not None and seen.count:
            rate = min(1.0, seen.mean + 3 * seen.deviation)
        return ceil(text_bytes * rate) + images * TOKENS_PER_IMAGE

    def output_tokens(self, model: str, choices: int) -> int:
        """The 95th percentile of what the model's answers took, for each choice."""
        seen = self._models.get(model)
        if seen is None or sum(seen.outputs) < ENOUGH:
            return self._first_output_tokens * choices
        left = sum(seen.outputs) * 0.05
        for size in range(len(seen.outputs) - 1, -1, -1):
            left -= seen.outputs[size]
            if left < 0:
                return ceil(2 ** ((size + 1) / 5)) * choices
        return self._first_output_tokens * choices

    def learn(self, record: RequestRecord, text_bytes: int, images: int, choices: int) -> None:
        served = record.served
        if served is None or served.usage is None or record.asked_model is None:
            return
        self._learn_device(record)
        if not served.usage.total_tokens:
            return  # a count of tokens, which is free
        if served.usage_source not in (UsageSource.REPORTED, UsageSource.ENGINE):
            return
        seen = self._models.get(record.asked_model)
        if seen is None:
            seen = self._models[record.asked_model] = _Seen()
            if len(self._models) > MAX_MODELS:
                self._models.popitem(last=False)
        if text_bytes and not images:
            rate = served.usage.input_tokens / text_bytes
            if seen.count == 0:
                seen.mean = rate
                seen.deviation = rate / 4
            else:
                seen.deviation += LEARN * (abs(rate - seen.mean) - seen.deviation)
                seen.mean += LEARN * (rate - seen.mean)
            seen.count += 1
        tokens = max(1, served.usage.output_tokens // choices)
        size = min(len(seen.outputs) - 1, int(5 * log2(tokens)))
        seen.outputs[size] += 1
        if sum(seen.outputs) > 10_000:
            seen.outputs = [number // 2 for number in seen.outputs]

    def _learn_device(self, record: RequestRecord) -> None:
        for attempt in record.attempts:
            cost = sum((charge.amount or Decimal(0) for charge in attempt.charges), Decimal(0))
            tokens = 0 if attempt.usage is None else attempt.usage.total_tokens
            if cost and tokens:
                key = (attempt.backend, attempt.model)
                new = float(cost) * NANO / tokens
                old = self._device_nano.get(key, new)
                self._device_nano[key] = max(new, old + LEARN * (new - old))

    def money_nano(
        self,
        book: PriceBook,
        *,
        backend: str,
        provider: str,
        model: str,
        input_tokens: int,
        output_tokens: int,
        now_ns: int,
    ) -> int | None:
        """The most it can cost there, in nano-dollars: all input at the dearest input price, all
        output at the dearest output price. None: no price is known and none was learned."""
        sheet = book.agreed(backend, now_ns) or book.listed(provider, model, now_ns)
        if sheet is not None and Meter.INPUT in sheet.tiers:
            return _dearest(sheet, input_tokens, output_tokens)
        learned = self._device_nano.get((backend, model))
        return None if learned is None else ceil(learned * (input_tokens + output_tokens))


def _dearest(sheet: Sheet, input_tokens: int, output_tokens: int) -> int:
    read = _highest(sheet, _INPUT_METERS, input_tokens)
    written = _highest(sheet, (Meter.OUTPUT, Meter.REASONING), input_tokens)
    fixed = sheet.price(Meter.REQUESTS, input_tokens)
    total = read * input_tokens + written * output_tokens
    if fixed is not None:
        total += fixed.unit_price / fixed.unit
    return int((total * NANO).to_integral_value(ROUND_CEILING))


def _highest(sheet: Sheet, meters: tuple[Meter, ...], input_tokens: int) -> Decimal:
    prices = [sheet.price(meter, input_tokens) for meter in meters]
    return max((p.unit_price / p.unit for p in prices if p is not None), default=Decimal(0))
