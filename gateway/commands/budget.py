"""`meterline budget …`: money that tenants, keys and routes may spend. `Allowances` decides."""

from typing import get_args

import click
import msgspec

from gateway.allowances import BudgetScope, Mode, WindowKind
from gateway.budgets import Allowances
from gateway.commands import (
    BadInput,
    Format,
    Session,
    parse_amount,
    print_item,
    subject_of,
    with_format,
    with_session,
)
from gateway.commands.allowance import add_list_and_remove

COLUMNS = (
    "id",
    "tenant_id",
    "scope",
    "subject",
    "amount_usd",
    "window",
    "hours",
    "zone",
    "mode",
    "downgrade_to",
)


@click.group(name="budget")
def budget() -> None:
    """Set, list and remove budgets, in US dollars.

    \b
    Example:
      meterline budget set acme 500 --window month --zone Europe/Berlin
      meterline budget set acme 20 --window rolling:24h --key '*' --mode throttle
    """


@budget.command(name="set")
@click.argument("tenant")
@click.argument("amount")
@click.option(
    "--window",
    default="month",
    show_default=True,
    metavar="WINDOW",
    help="hour, day, week, month, lifetime, or rolling:24h.",
)
@click.option("--zone", default="UTC", show_default=True, help="IANA zone in which windows begin.")
@click.option(
    "--mode",
    type=click.Choice(get_args(Mode)),
    default="hard",
    show_default=True,
    help="When spent. hard: refuse; soft: alert; throttle: go on slowly; downgrade: go on with a "
    "cheaper model.",
)
@click.option(
    "--downgrade-to", metavar="MODEL", help="The route that answers then; default: the route's own."
)
@click.option("--key", metavar="KEY", help="Of this key (id or public id); '*' is each key.")
@click.option("--route", metavar="MODEL", help="Of this model that clients ask for; '*': each.")
@click.option("--strict", is_flag=True, help="Refuse while the shared counters are away.")
@with_format
@with_session
def set_(
    session: Session,
    tenant: str,
    amount: str,
    window: str,
    zone: str,
    mode: Mode,
    downgrade_to: str | None,
    key: str | None,
    route: str | None,
    strict: bool,
    form: Format,
) -> None:
    """Set what TENANT (or one of its keys or routes) may spend: AMOUNT dollars per window.

    \b
    Example:
      meterline budget set acme 500 --window month --zone Europe/Berlin
      meterline budget set acme 50 --window day --mode downgrade --downgrade-to small
    """
    scope, subject = subject_of({"key": key, "route": route})
    kind, hours = _window(window)
    made = session.run(
        lambda tenants: Allowances(tenants).set_budget(
            tenant,
            parse_amount(amount, "AMOUNT"),
            window=kind,
            hours=hours,
            zone=zone,
            mode=mode,
            downgrade_to=downgrade_to,
            scope=msgspec.convert(scope, BudgetScope),
            subject=subject,
            strict=strict,
            actor=session.actor,
        )
    )
    print_item(made, form)


def _window(text: str) -> tuple[WindowKind, int | None]:
    kind, _, length = text.partition(":")
    if kind not in get_args(WindowKind) or (length and kind != "rolling"):
        raise BadInput(
            f"--window: {text!r} is none of hour, day, week, month, lifetime, rolling:24h"
        )
    if kind != "rolling":
        return kind, None  # type: ignore[return-value]  # checked above
    if not (length.endswith("h") and length[:-1].isdigit()):
        raise BadInput("--window: write the hours of a rolling window, as rolling:24h")
    return "rolling", int(length[:-1])


add_list_and_remove(
    budget,
    COLUMNS,
    found=lambda allowances, tenant: allowances.budgets(tenant),
    removed=lambda allowances, one_id, actor: allowances.remove_budget(one_id, actor=actor),
    then="nothing bounds what it bounded",
)
