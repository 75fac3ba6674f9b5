"""`meterline audit …`: what administrators did. Parses and prints; `Admins` decides."""

import click

from gateway.commands import (
    Format,
    Session,
    parse_time,
    print_items,
    with_format,
    with_session,
)

COLUMNS = ("id", "at", "actor", "action", "object", "request_id")


@click.group(name="audit")
def audit() -> None:
    """Read the audit log, which nothing can change.

    \b
    Example:
      meterline audit list --action 'key.*' --from 2026-12-01
    """


@audit.command(name="list")
@click.option("--actor", metavar="WHO", help="admin, admin:NAME, cli:USER; `admin:*` is a start.")
@click.option("--action", metavar="WHAT", help="tenant.create, key.revoke; `key.*` is a start.")
@click.option("--object", "of", metavar="OBJECT", help="key/ID, tenant/ID; `budget/*` is a start.")
@click.option("--from", "since", metavar="WHEN", help="Not before this date or time (UTC).")
@click.option("--to", "until", metavar="WHEN", help="Before this date or time (UTC).")
@click.option("--before", type=int, metavar="ID", help="Older than this line.")
@click.option("--limit", type=int, default=100, show_default=True, help="Lines, 1 to 1000.")
@with_format
@with_session
def list_(
    session: Session,
    actor: str | None,
    action: str | None,
    of: str | None,
    since: str | None,
    until: str | None,
    before: int | None,
    limit: int,
    form: Format,
) -> None:
    """List acts, the newest first; as JSON with what was there before and after.

    \b
    Example:
      meterline audit list --actor 'admin:*' --action 'budget.*' --format json
    """
    page = session.administer(
        lambda _, admins: admins.audit(
            before=before,
            limit=limit,
            actor=actor,
            action=action,
            of=of,
            since=None if since is None else parse_time(since, "--from"),
            until=None if until is None else parse_time(until, "--to"),
        )
    )
    print_items(page.items, COLUMNS, form)
    if page.has_more:
        click.echo(f"Older ones follow: --before {page.items[-1].id}", err=True)
