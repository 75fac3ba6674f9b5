"""`meterline admin …`: keys of administrators and their roles. Parses and prints; `Admins` decides.

These commands work on the database itself: whoever may run them is the owner of all of it."""

import click

from gateway.commands import (
    Format,
    Session,
    parse_expiry,
    print_item,
    print_items,
    with_format,
    with_session,
)
from gateway.roles import ROLES

COLUMNS = ("id", "public_id", "name", "role", "tenant_id", "expires_at", "revoked_at")


@click.group(name="admin")
def admin() -> None:
    """Create, list and revoke the keys of administrators.

    \b
    Example:
      meterline admin create ann --role billing
      meterline admin create bob --role member --tenant acme/search --expires 90d
    """


@admin.command()
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), required=True, help="What it may do.")
@click.option("--tenant", metavar="TENANT", help="Only for it and what is below it.")
@click.option("--expires", metavar="WHEN", help="90d, 12h, or a date such as 2030-01-31 (UTC).")
@with_format
@with_session
def create(
    session: Session,
    name: str,
    role: str,
    tenant: str | None,
    expires: str | None,
    form: Format,
) -> None:
    """Create a key for the administrator NAME. Its secret is shown once, now.

    \b
    Example:
      meterline admin create bob --role member --tenant acme/search --expires 90d
    """
    until = None if expires is None else parse_expiry(expires, session.clock.now_ns(), "--expires")
    made = session.administer(
        lambda _, admins: admins.create(
            name, role, tenant=tenant, expires_at=until, actor=session.actor
        )
    )
    print_item(made.key, form, key=made.secret.reveal())
    click.echo("Keep the key now: it cannot be shown again.", err=True)


@admin.command(name="list")
@with_format
@with_session
def list_(session: Session, form: Format) -> None:
    """List administrators' keys, revoked ones too; never their secrets.

    \b
    Example:
      meterline admin list --format json
    """
    print_items(session.administer(lambda _, admins: admins.keys()), COLUMNS, form)


@admin.command()
@click.argument("key")
@with_format
@with_session
def revoke(session: Session, key: str, form: Format) -> None:
    """Refuse KEY (id or public id) from now on, for good.

    \b
    Example:
      meterline admin revoke 3kTq8hZr0WnBx1aYc9
    """
    print_item(session.administer(lambda _, admins: admins.revoke(key, actor=session.actor)), form)
