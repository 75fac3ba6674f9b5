"""Whether a chargeback says the same as the requests that it sums. Pure; for tests and audits."""

from collections.abc import Iterable
from decimal import Decimal

from telemetry.money import EXACT, plain
from telemetry.reports.chargeback import Chargeback
from telemetry.reports.explain import Story


def totals_equal(report: Chargeback, stories: Iterable[Story]) -> bool:
    """Whether the totals of the report equal the sum over the stories, to the last digit.

    The stories must be those of the requests whose attempts started in the report's period."""
    return not differences(report, stories)


def differences(report: Chargeback, stories: Iterable[Story]) -> tuple[str, ...]:
    """Each figure in which they differ, in words. Also holds the report against its own lines.

    Requests that reached no backend have no attempt and no cost; chargeback does not count them.
    """
    told = [story for story in stories if story.attempts]
    expected: dict[str, int] = {
        "requests": len(told),
        "attempts": sum(len(story.attempts) for story in told),
        "input_tokens": sum(story.input_tokens for story in told),
        "cached_tokens": sum(story.cached_tokens for story in told),
        "output_tokens": sum(story.output_tokens for story in told),
        "device_us": sum(story.device_us for story in told),
        "unpriced_lines": sum(story.unpriced_lines for story in told),
    }
    found: list[str] = []
    for name, value in expected.items():
        for what, lines in (("totals", report.totals), ("lines", report.lines)):
            summed = sum(getattr(line, name) for line in lines)
            if summed != value:
                found.append(f"{name}: {what} say {summed}, the requests {value}")
    costs: dict[str, Decimal] = {}
    for story in told:
        for cost in story.costs:
            costs[cost.currency] = EXACT.add(costs.get(cost.currency, Decimal(0)), cost.amount)
    currencies = {*costs, *(line.currency for line in (*report.totals, *report.lines))}
    for currency in sorted(currencies):
        value_due = costs.get(currency, Decimal(0))
        for what, lines in (("totals", report.totals), ("lines", report.lines)):
            summed_cost = Decimal(0)
            for line in lines:
                if line.currency == currency:
                    summed_cost = EXACT.add(summed_cost, line.cost)
            if summed_cost != value_due:
                found.append(
                    f"{currency}: {what} say {plain(summed_cost)}, the requests {plain(value_due)}"
                )
    return tuple(found)
