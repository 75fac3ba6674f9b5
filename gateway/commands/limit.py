"""`meterline limit …`: limits of tenants, keys, users, routes and models. `Allowances` decides."""

from typing import get_args

import click
import msgspec

from gateway.allowances import Counts, Limit, Scope
from gateway.budgets import Allowances
from gateway.commands import (
    Format,
    Session,
    parse_amount,
    parse_duration,
    print_item,
    print_items,
    subject_of,
    with_format,
    with_session,
)

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


@limit.command(name="list")
@click.argument("tenant", required=False)
@with_format
@with_session
def list_(session: Session, tenant: str | None, form: Format) -> None:
    """List the limits of TENANT, or all.

    \b
    Example:
      meterline limit list acme --format json
    """
    found: list[Limit] = session.run(lambda tenants: Allowances(tenants).limits(tenant))
    print_items(found, COLUMNS, form)


@limit.command(name="rm")
@click.argument("limit_id", metavar="ID")
@with_format
@with_session
def remove(session: Session, limit_id: str, form: Format) -> None:
    """Remove the limit ID: then it allows all.

    \b
    Example:
      meterline limit rm 019370e0-0000-7000-8000-000000000000
    """
    gone = session.run(
        lambda tenants: Allowances(tenants).remove_limit(limit_id, actor=session.actor)
    )
    print_item(gone, form)
