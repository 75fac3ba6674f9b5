"""`meterline tenant …`: who the gateway serves. Parses and prints; `Tenants` decides."""

from collections.abc import Callable
from typing import ParamSpec

import click
from msgspec import UNSET

from gateway.commands import (
    BadInput,
    Format,
    Session,
    every,
    parse_labels,
    print_item,
    print_items,
    with_format,
    with_session,
)
from gateway.tenants import MAX_PAGE, TenantChange

P = ParamSpec("P")
COLUMNS = (
    "id",
    "path",
    "kind",
    "effective_state",
    "cost_centre",
    "currency",
    "created_at",
    "labels",
)


def with_facts(command: Callable[P, None]) -> Callable[P, None]:
    """The options of what a tenant is."""
    for option in (
        click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Repeatable."),
        click.option("--currency", metavar="CODE", help="In which it is billed, such as EUR."),
        click.option("--cost-centre", metavar="TEXT", help="Where it is booked."),
        click.option("--kind", metavar="WORD", help="organisation, team, project, …"),
    ):
        command = option(command)
    return command


@click.group(name="tenant")
def tenant() -> None:
    """Create, list, move, suspend and delete tenants. They form a tree; a TENANT is named by its
    id, its path (acme/search), or its name where no other tenant has it.

    \b
    Example:
      meterline tenant create acme --kind organisation --cost-centre 4711
      meterline tenant create search --under acme --kind team
      meterline key create acme/search --name production
    """


@tenant.command()
@click.argument("name")
@click.option("--under", metavar="TENANT", help="The tenant above it; without: at the top.")
@with_facts
@with_format
@with_session
def create(
    session: Session,
    name: str,
    under: str | None,
    kind: str | None,
    cost_centre: str | None,
    currency: str | None,
    labels: tuple[str, ...],
    form: Format,
) -> None:
    """Create the tenant NAME.

    \b
    Example:
      meterline tenant create acme --cost-centre 4711 --currency EUR --label stage=trial
      meterline tenant create search --under acme --kind team
    """
    facts = parse_labels(labels, "--label")
    made = session.run(
        lambda tenants: tenants.create_tenant(
            name,
            facts,
            parent=under,
            kind=kind,
            cost_centre=cost_centre,
            currency=currency,
            actor=session.actor,
        )
    )
    print_item(made, form)


@tenant.command()
@click.argument("tenant")
@click.option("--name", help="A new name.")
@with_facts
@with_format
@with_session
def change(
    session: Session,
    tenant: str,
    name: str | None,
    kind: str | None,
    cost_centre: str | None,
    currency: str | None,
    labels: tuple[str, ...],
    form: Format,
) -> None:
    """Rename TENANT or change its facts; an empty value takes one away. Labels are replaced.

    \b
    Example:
      meterline tenant change acme/search --name retrieval --cost-centre ''
    """
    asked = TenantChange(
        name=UNSET if name is None else name,
        kind=UNSET if kind is None else kind or None,
        cost_centre=UNSET if cost_centre is None else cost_centre or None,
        currency=UNSET if currency is None else currency or None,
        labels=parse_labels(labels, "--label") if labels else UNSET,
    )
    done = session.run(lambda tenants: tenants.change_tenant(tenant, asked, actor=session.actor))
    print_item(done, form)


@tenant.command()
@click.argument("tenant")
@click.option("--under", metavar="TENANT", help="The new tenant above it.")
@click.option("--to-top", is_flag=True, help="No tenant above it any more.")
@with_format
@with_session
def move(session: Session, tenant: str, under: str | None, to_top: bool, form: Format) -> None:
    """Move TENANT, with all below it. From then on its new ancestors' limits and budgets bind.

    \b
    Example:
      meterline tenant move acme/search --under acme/research
    """
    if (under is None) != to_top:
        raise BadInput("name the new place: --under TENANT or --to-top")
    asked = TenantChange(parent=under)
    done = session.run(lambda tenants: tenants.change_tenant(tenant, asked, actor=session.actor))
    print_item(done, form)


@tenant.command(name="list")
@click.option("--below", metavar="TENANT", help="Only this one and all below it.")
@with_format
@with_session
def list_(session: Session, below: str | None, form: Format) -> None:
    """List all tenants, deleted ones too.

    \b
    Example:
      meterline tenant list --below acme --format json
    """
    found = session.run(
        lambda tenants: every(
            lambda after: tenants.tenants(after=after, limit=MAX_PAGE, below=below)
        )
    )
    print_items(found, COLUMNS, form)


@tenant.command()
@click.argument("tenant")
@with_format
@with_session
def show(session: Session, tenant: str, form: Format) -> None:
    """Show one TENANT, by name or id.

    \b
    Example:
      meterline tenant show acme
    """
    print_item(session.run(lambda tenants: tenants.tenant(tenant)), form)


@tenant.command()
@click.argument("tenant")
@with_format
@with_session
def suspend(session: Session, tenant: str, form: Format) -> None:
    """Refuse all keys of TENANT and of all below it, within a second, until it is resumed.

    \b
    Example:
      meterline tenant suspend acme
    """
    moved = session.run(lambda tenants: tenants.suspend_tenant(tenant, actor=session.actor))
    print_item(moved, form)


@tenant.command()
@click.argument("tenant")
@with_format
@with_session
def resume(session: Session, tenant: str, form: Format) -> None:
    """Accept the keys of a suspended TENANT again.

    \b
    Example:
      meterline tenant resume acme
    """
    moved = session.run(lambda tenants: tenants.resume_tenant(tenant, actor=session.actor))
    print_item(moved, form)


@tenant.command()
@click.argument("tenant")
@with_format
@with_session
def delete(session: Session, tenant: str, form: Format) -> None:
    """Delete TENANT and revoke its keys, for good. Its usage stays in the ledger.

    \b
    Example:
      meterline tenant delete acme
    """
    moved = session.run(lambda tenants: tenants.delete_tenant(tenant, actor=session.actor))
    print_item(moved, form)
