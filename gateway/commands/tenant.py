"""`meterline tenant …`: who the gateway serves. Parses and prints; `Tenants` decides."""

import click

from gateway.commands import (
    Format,
    Session,
    every,
    parse_labels,
    print_item,
    print_items,
    with_format,
    with_session,
)
from gateway.tenants import MAX_PAGE

COLUMNS = ("id", "name", "state", "created_at", "labels")


@click.group(name="tenant")
def tenant() -> None:
    """Create, list, suspend and delete tenants.

    \b
    Example:
      meterline tenant create acme --label cost-centre=4711
      meterline key create acme --name production
    """


@tenant.command()
@click.argument("name")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="May be repeated.")
@with_format
@with_session
def create(session: Session, name: str, labels: tuple[str, ...], form: Format) -> None:
    """Create the tenant NAME.

    \b
    Example:
      meterline tenant create acme --label cost-centre=4711 --label stage=trial
    """
    facts = parse_labels(labels, "--label")
    made = session.run(lambda tenants: tenants.create_tenant(name, facts, actor=session.actor))
    print_item(made, form)


@tenant.command(name="list")
@with_format
@with_session
def list_(session: Session, form: Format) -> None:
    """List all tenants, deleted ones too.

    \b
    Example:
      meterline tenant list --format json
    """
    found = session.run(
        lambda tenants: every(lambda after: tenants.tenants(after=after, limit=MAX_PAGE))
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
    """Refuse all keys of TENANT, within a second, until it is resumed.

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
