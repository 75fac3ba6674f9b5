"""What a request really took, read from its settled record. Pure; must not know stores or prices.

All attempts count together: what failed halfway was used too. A limit on a model counts only what
that model took.
"""

from decimal import ROUND_CEILING, Decimal

from msgspec import Struct

from gateway.allowances import NANO
from telemetry.record import RequestRecord


class Used(Struct, frozen=True, kw_only=True):
    """What one or more attempts really took."""

    input_tokens: int = 0
    output_tokens: int = 0
    spend_nano: int = 0

    def __add__(self, other: "Used") -> "Used":
        return Used(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            spend_nano=self.spend_nano + other.spend_nano,
        )

    def of(self, counts: str) -> int:
        """The amount of one thing that limits count."""
        match counts:
            case "input_tokens":
                return self.input_tokens
            case "output_tokens":
                return self.output_tokens
            case "tokens":
                return self.input_tokens + self.output_tokens
            case "spend":
                return self.spend_nano
            case _:
                return 1


class Taken(Struct, frozen=True, kw_only=True):
    """What a request really took, in all and of each model that it asked."""

    total: Used
    models: dict[str, Used]

    def of(self, counts: str, *, model: str | None = None) -> int:
        """A model that was not asked took nothing."""
        return (self.total if model is None else self.models.get(model, Used())).of(counts)


def taken_by(record: RequestRecord) -> Taken:
    total = Used()
    models: dict[str, Used] = {}
    for attempt in record.attempts:
        cost = sum(
            (c.amount for c in attempt.charges if c.amount is not None and c.currency == "USD"),
            Decimal(0),
        )
        usage = attempt.usage
        used = Used(
            input_tokens=0 if usage is None else usage.input_tokens,
            output_tokens=0 if usage is None else usage.output_tokens,
            spend_nano=int((cost * NANO).to_integral_value(ROUND_CEILING)),
        )
        total += used
        models[attempt.model] = models.get(attempt.model, Used()) + used
    return Taken(total=total, models=models)
