"""`meterline key …`: the API keys of tenants. Parses and prints; `Tenants` decides.

The only output that holds a secret is that of `create` and `rotate`, on stdout."""

from collections.abc import Callable
from datetime import datetime
from typing import ParamSpec

import click
from msgspec import UNSET, UnsetType

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
from gateway.keys import SCOPES
from gateway.tenants import MAX_PAGE, IssuedKey, KeyChange

P = ParamSpec("P")

COLUMNS = (
    "id",
    "public_id",
    "tenant",
    "name",
    "state",
    "expires_at",
    "grace_until",
    "model_allow",
    "target_allow",
    "scopes",
    "ip_allow",
)


def with_bounds(command: Callable[P, None]) -> Callable[P, None]:
    """The options of what a key is narrowed to; each a list with commas."""
    for option in (
        click.option("--from", "ip_allow", metavar="CIDRS", help="Networks it may be used from."),
        click.option("--scopes", metavar="NAMES", help=f"What it may do: {', '.join(SCOPES)}."),
        click.option(
            "--targets",
            metavar="NAMES",
            help="Where its requests may go: BACKEND/MODEL; `local/*` is all of that backend.",
        ),
        click.option(
            "--models",
            metavar="NAMES",
            help="Models it may ask for, separated by commas; `small-*` is all that start with "
            "small-. Default: all.",
        ),
    ):
        command = option(command)
    return command


def _list(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


@click.group(name="key")
def key() -> None:
    """Create, list, change, rotate and revoke API keys.

    \b
    Example:
      meterline key create acme --name production --models 'assistant,small-*' --expires 90d
    """


@key.command()
@click.argument("tenant")
@click.option("--name", default="", help="What the key is for.")
@with_bounds
@click.option("--expires", metavar="WHEN", help="90d, 12h, or a date such as 2030-01-31 (UTC).")
@with_format
@with_session
def create(
    session: Session,
    tenant: str,
    name: str,
    models: str | None,
    targets: str | None,
    scopes: str | None,
    ip_allow: str | None,
    expires: str | None,
    form: Format,
) -> None:
    """Create a key for TENANT (name or id). Its secret is shown once, now.

    \b
    Example:
      meterline key create acme --name production --models 'assistant,small-*' --expires 90d
      meterline key create acme/search --scopes chat,models --from 203.0.113.0/24,2001:db8::/32
    """
    expires_at = (
        None if expires is None else parse_expiry(expires, session.clock.now_ns(), "--expires")
    )
    issued = session.run(
        lambda tenants: tenants.create_key(
            tenant,
            name=name,
            model_allow=_list(models),
            target_allow=_list(targets),
            scopes=_list(scopes),
            ip_allow=_list(ip_allow),
            expires_at=expires_at,
            actor=session.actor,
        )
    )
    _print_issued(issued, form)


@key.command()
@click.argument("key")
@click.option("--name", help="What the key is for.")
@with_bounds
@click.option("--expires", metavar="WHEN", help="90d, 12h, a date, or `never`.")
@with_format
@with_session
def change(
    session: Session,
    key: str,
    name: str | None,
    models: str | None,
    targets: str | None,
    scopes: str | None,
    ip_allow: str | None,
    expires: str | None,
    form: Format,
) -> None:
    """Change what KEY (id or public id) may do; `all` as a list lifts that bound.

    \b
    Example:
      meterline key change 3kTq8hZr0WnBx1aYc9 --from all --scopes chat,embeddings
    """
    until: datetime | UnsetType | None = UNSET
    if expires is not None:
        now_ns = session.clock.now_ns()
        until = None if expires == "never" else parse_expiry(expires, now_ns, "--expires")
    asked = KeyChange(
        name=UNSET if name is None else name,
        model_allow=_changed(models),
        target_allow=_changed(targets),
        scopes=_changed(scopes),
        ip_allow=_changed(ip_allow),
        expires_at=until,
    )
    done = session.run(lambda tenants: tenants.change_key(key, asked, actor=session.actor))
    print_item(done, form)


def _changed(text: str | None) -> list[str] | UnsetType | None:
    if text is None:
        return UNSET
    return None if text.strip() == "all" else _list(text)


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
