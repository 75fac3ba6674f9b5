"""`meterline key …`: the API keys of tenants. Parses and prints; `Tenants` decides.

The only output that holds a secret is that of `create` and `rotate`, on stdout."""

import click

from gateway.commands import (
    Format,
    Session,
    every,
    parse_duration,
    parse_expiry,
    print_item,
    print_items,
    with_format,
    with_session,
)
from gateway.tenants import MAX_PAGE, IssuedKey

COLUMNS = ("id", "public_id", "tenant_id", "name", "state", "expires_at", "model_allow")


@click.group(name="key")
def key() -> None:
    """Create, list, rotate and revoke API keys.

    \b
    Example:
      meterline key create acme --name production --models 'assistant,small-*' --expires 90d
    """


@key.command()
@click.argument("tenant")
@click.option("--name", default="", help="What the key is for.")
@click.option(
    "--models",
    metavar="NAMES",
    help="Models it may ask for, separated by commas; `small-*` is all that start with small-. "
    "Default: all.",
)
@click.option("--expires", metavar="WHEN", help="90d, 12h, or a date such as 2030-01-31 (UTC).")
@with_format
@with_session
def create(
    session: Session,
    tenant: str,
    name: str,
    models: str | None,
    expires: str | None,
    form: Format,
) -> None:
    """Create a key for TENANT (name or id). Its secret is shown once, now.

    \b
    Example:
      meterline key create acme --name production --models 'assistant,small-*' --expires 90d
    """
    model_allow = None if models is None else [m.strip() for m in models.split(",") if m.strip()]
    expires_at = (
        None if expires is None else parse_expiry(expires, session.clock.now_ns(), "--expires")
    )
    issued = session.run(
        lambda tenants: tenants.create_key(
            tenant,
            name=name,
            model_allow=model_allow,
            expires_at=expires_at,
            actor=session.actor,
        )
    )
    _print_issued(issued, form)


@key.command(name="list")
@click.argument("tenant", required=False)
@with_format
@with_session
def list_(session: Session, tenant: str | None, form: Format) -> None:
    """List the keys of TENANT, or all; never their secrets.

    \b
    Example:
      meterline key list acme --format json
    """
    found = session.run(
        lambda tenants: every(lambda after: tenants.keys(tenant, after=after, limit=MAX_PAGE))
    )
    print_items(found, COLUMNS, form)


@key.command()
@click.argument("key")
@click.option(
    "--grace",
    default="0",
    show_default=True,
    metavar="TIME",
    help="How long the old key still works, such as 24h.",
)
@with_format
@with_session
def rotate(session: Session, key: str, grace: str, form: Format) -> None:
    """Replace KEY (id or public id) by a new one. The new secret is shown once, now.

    \b
    Example:
      meterline key rotate 3kTq8hZr0WnBx1aYc9 --grace 24h
    """
    period = parse_duration(grace, "--grace")
    issued = session.run(lambda tenants: tenants.rotate_key(key, period, actor=session.actor))
    _print_issued(issued, form)


@key.command()
@click.argument("key")
@with_format
@with_session
def revoke(session: Session, key: str, form: Format) -> None:
    """Refuse KEY (id or public id) from now on, for good.

    \b
    Example:
      meterline key revoke 3kTq8hZr0WnBx1aYc9
    """
    revoked = session.run(lambda tenants: tenants.revoke_key(key, actor=session.actor))
    print_item(revoked, form)


def _print_issued(issued: IssuedKey, form: Format) -> None:
    print_item(issued.key, form, key=issued.secret.reveal())
    click.echo("Keep the key now: it cannot be shown again.", err=True)
