"""The laws that the ledger must keep, as a pure function over what was counted.

Nothing here reads a database or a file: `reconcile` gathers the facts, and a test can make any of
them false. Each law names the rows that break it.
"""

from decimal import Decimal

from msgspec import Struct


class Law(Struct, frozen=True, kw_only=True):
    """One equation. `offenders` names what breaks it, bounded to the first twenty."""

    name: str
    says: str
    left: str
    right: str
    holds: bool
    offenders: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        mark = "ok" if self.holds else "BROKEN"
        names = "" if not self.offenders else ": " + ", ".join(self.offenders)
        return f"{mark:6} {self.name:20} {self.left} = {self.right}  ({self.says}){names}"


class NodeFacts(Struct, frozen=True, kw_only=True):
    """One node's log beside its cursor. `appended` counts what its newest segment's header and
    frames say, `pending` what stands behind the cursor."""

    node: str
    appended: int
    shipped: int
    pending: int


class Facts(Struct, frozen=True, kw_only=True):
    """What was counted, in one consistent read of the database."""

    nodes: tuple[NodeFacts, ...]
    admitted: int  # sums over all cursors
    settled: int
    refused: int
    swept: int
    open_intents: int
    requests: int  # rows
    conflicts: tuple[str, ...]  # request ids
    overdue: tuple[str, ...]  # open intents long past their deadline
    dirty_hours: int
    events: dict[str, int]  # tokens, attempts, … summed over events
    rollups: dict[str, int]  # the same, summed over roll-ups
    event_money: dict[str, Decimal]  # by currency
    rollup_money: dict[str, Decimal]
    hours_off: tuple[str, ...]  # hours whose roll-up differs from its events
    requests_off: tuple[str, ...]  # requests whose rows differ from their own record
    corrections_off: tuple[str, ...] = ()  # charge lines that correct what is not there


_SHOWN = 20


def laws(facts: Facts) -> list[Law]:
    """Every law, kept or broken, in the order of a request's life."""
    served = facts.settled - facts.refused - facts.swept
    found = [
        _law(
            "intents",
            "admitted = settled + swept + open",
            facts.admitted,
            served + facts.swept + facts.open_intents,
        ),
        _law(
            "requests",
            "settlements shipped = rows of gateway_request",
            facts.settled,
            facts.requests,
        ),
        *(
            _law(
                f"log {node.node}",
                "records appended = shipped + pending",
                node.appended,
                node.shipped + node.pending,
            )
            for node in facts.nodes
        ),
        _law(
            "records",
            "requests whose events and charges differ from their record",
            len(facts.requests_off),
            0,
            facts.requests_off,
        ),
        _law(
            "corrections",
            "reversals that do not mirror exactly one line",
            len(facts.corrections_off),
            0,
            facts.corrections_off,
        ),
    ]
    if facts.dirty_hours == 0:  # else the roll-ups are known to be behind: no law yet
        found.append(
            _law(
                "hours",
                "hours that differ from their events",
                len(facts.hours_off),
                0,
                facts.hours_off,
            )
        )
        found += [
            _law(
                f"rollup {name}",
                "sum over events = sum over roll-ups",
                value,
                facts.rollups.get(name, 0),
            )
            for name, value in sorted(facts.events.items())
        ]
        found += [
            _law(
                f"rollup {currency}",
                "sum over charges = sum over roll-ups",
                facts.event_money.get(currency, Decimal(0)),
                facts.rollup_money.get(currency, Decimal(0)),
            )
            for currency in sorted({*facts.event_money, *facts.rollup_money})
        ]
    found += [
        _law(
            "conflicts",
            "requests reported twice with other facts",
            len(facts.conflicts),
            0,
            facts.conflicts,
        ),
        _law(
            "overdue",
            "open requests long past their deadline",
            len(facts.overdue),
            0,
            facts.overdue,
        ),
    ]
    return found


def _law(
    name: str,
    says: str,
    left: int | Decimal,
    right: int | Decimal,
    offenders: tuple[str, ...] = (),
) -> Law:
    return Law(
        name=name,
        says=says,
        left=f"{left:f}" if isinstance(left, Decimal) else str(left),
        right=f"{right:f}" if isinstance(right, Decimal) else str(right),
        holds=left == right,
        offenders=offenders[:_SHOWN],
    )
