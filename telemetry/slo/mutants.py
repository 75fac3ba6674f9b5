"""Rules with one thing wrong each, to see that the generated tests notice.

A mutant is what a slip of the pen would make: a matcher left out, a threshold doubled, a condition
dropped. A set of tests that lets one of them pass proves nothing about that part of the rule.
"""

import re
from collections.abc import Iterable, Sequence
from decimal import Decimal

import msgspec
from msgspec import Struct

from telemetry.slo.burn import literal
from telemetry.slo.rules import ABSENT, Alert, Group, Record

_MATCHER = re.compile(r'(?<=[{,])\w+=~?"(?:[^"\\]|\\.)*",?')
_LIMIT = re.compile(r"(?<=[<>] )[0-9.]+$", re.MULTILINE)
_ALSO = re.compile(r"^ *and .*$", re.MULTILINE)
_OWN = ("slo=", "percentile=")  # which objective: there is one in a file, nothing to tell apart


class Mutant(Struct, frozen=True, kw_only=True):
    """Rules with one thing wrong, and what it is. Only those rules that the wrong one reads, and
    for a record those that read it: what else there is does not change."""

    wrong: str
    groups: tuple[Group, ...]

    @property
    def outputs(self) -> frozenset[str]:
        """Names of the records and alerts that are left."""
        return frozenset(_name(rule) for group in self.groups for rule in group.rules)


def mutants(groups: Sequence[Group]) -> Iterable[Mutant]:
    """All mutants of a rule file."""
    for at, group in enumerate(groups):
        for place, rule in enumerate(group.rules):
            for what, expr in _spoiled(rule):
                changed = msgspec.structs.replace(rule, expr=expr)
                rules = (*group.rules[:place], changed, *group.rules[place + 1 :])
                spoiled = msgspec.structs.replace(group, rules=rules)
                yield Mutant(
                    wrong=f"{_name(rule)}: {what}",
                    groups=_around((*groups[:at], spoiled, *groups[at + 1 :]), changed),
                )


def _around(groups: Sequence[Group], changed: Record | Alert) -> tuple[Group, ...]:
    every = [rule for group in groups for rule in group.rules]
    wanted: list[Record | Alert] = [changed]
    if isinstance(changed, Record):
        wanted += [r for r in every if isinstance(r, Record) and _reads(r, changed)]
    for rule in wanted:  # grows while it is walked
        wanted += [r for r in every if _reads(rule, r) and r not in wanted]
    kept = [
        msgspec.structs.replace(group, rules=tuple(r for r in group.rules if r in wanted))
        for group in groups
    ]
    return tuple(group for group in kept if group.rules)


def _reads(rule: Record | Alert, other: Record | Alert) -> bool:
    return isinstance(other, Record) and re.search(rf"{other.record}\b", rule.expr) is not None


def _name(rule: Record | Alert) -> str:
    return rule.record if isinstance(rule, Record) else rule.alert


def _spoiled(rule: Record | Alert) -> Iterable[tuple[str, str]]:
    expr = rule.expr
    if isinstance(rule, Record):
        # Every use at once: a selector that is written twice is one fact.
        for matcher in sorted({m[0].rstrip(",") for m in _MATCHER.finditer(expr)}):
            if not matcher.startswith(_OWN):
                yield f"without {matcher}", _without(expr, matcher)
        return
    if rule.alert == ABSENT:
        yield "whether targets are up or not", expr.partition(" and on ()")[0]
        return
    for found in _LIMIT.finditer(expr):
        doubled = literal(Decimal(found[0]) * 2)
        if rule.expr[found.start() - 2] == "<":
            doubled = literal(Decimal(found[0]) / 4)
        yield f"{found[0]} as {doubled}", expr[: found.start()] + doubled + expr[found.end() :]
    for found in _ALSO.finditer(expr):
        yield f"without `{found[0].strip()}`", expr[: found.start()] + expr[found.end() :]


def _without(expr: str, matcher: str) -> str:
    return expr.replace(f"{matcher},", "").replace(f",{matcher}", "").replace(matcher, "")
