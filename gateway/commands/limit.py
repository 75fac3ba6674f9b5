"""`meterline limit …`: limits of tenants, keys, users, routes and models. `Allowances` decides."""

from typing import get_args

import click
import msgspec

from gateway.allowances import Counts, Scope
from gateway.budgets import Allowances
from gateway.commands import (
    Format,
    Session,
    parse_amount,
    parse_duration,
    print_item,
    subject_of,
    with_format,
    with_session,
)
from gateway.commands.allowance import add_list_and_remove

COLUMNS = ("id", "tenant_id", "scope", "subject", "counts", "amount", "per_s", "strict")
KINDS = [kind.replace("_", "-") for kind in get_args(Counts)]


@click.group(name="limit")
def limit() -> None:
    """Set, list and remove limits. 0 allows none; a limit that is not there allows all.

    \b
    Example:
      meterline limit set acme requests 600 --per 1m
      meterline limit set acme concurrency 4 --user '*'
    """


@limit.command(name="set")
@click.argument("tenant")
@click.argument("counts", type=click.Choice(KINDS))
@click.argument("amount")
@click.option("--per", metavar="TIME", help="The period: 1s, 1m, 1h, 1d. None for concurrency.")
@click.option("--key", metavar="KEY", help="Of this key (id or public id); '*' is each key.")
@click.option("--user", metavar="USER", help="Of this end user; '*' is each of them.")
@click.option("--route", metavar="MODEL", help="Of this model that clients ask for; '*': each.")
@click.option("--model", metavar="MODEL", help="Of this model of a backend; '*': each.")
@click.option("--strict", is_flag=True, help="Refuse while the shared counters are away.")
@with_format
@with_session
def set_(
    session: Session,
    tenant: str,
    counts: str,
    amount: str,
    per: str | None,
    key: str | None,
    user: str | None,
    route: str | None,
    model: str | None,
    strict: bool,
    form: Format,
) -> None:
    """Set what TENANT (or one of its keys, users, routes, models) may use: AMOUNT of COUNTS.

    \b
    Example:
      meterline limit set acme tokens 100000 --per 1m --key '*'
      meterline limit set acme spend 5.00 --per 1h --user '*'
    """
    scope, subject = subject_of({"key": key, "user": user, "route": route, "model": model})
    per_s = None if per is None else round(parse_duration(per, "--per").total_seconds())
    made = session.run(
        lambda tenants: Allowances(tenants).set_limit(
            tenant,
            msgspec.convert(counts.replace("-", "_"), Counts),
            parse_amount(amount, "AMOUNT"),
            per_s=per_s,
            scope=msgspec.convert(scope, Scope),
            subject=subject,
            strict=strict,
            actor=session.actor,
        )
    )
    print_item(made, form)


add_list_and_remove(
    limit,
    COLUMNS,
    found=lambda allowances, tenant: allowances.limits(tenant),
    removed=lambda allowances, one_id, actor: allowances.remove_limit(one_id, actor=actor),
    then="it allows all",
)
