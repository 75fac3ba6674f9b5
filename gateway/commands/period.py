"""`meterline period …`: close a month, once."""

from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec

from gateway.commands import Format, Refused, aligned, with_format
from gateway.commands.books import OpenBooks, with_books
from gateway.commands.files import config_option
from gateway.commands.periods import parse_month
from telemetry.closing.months import Closed, CloseRefused, close_month, closed_list


@click.group()
def period() -> None:
    """Billing months, UTC: close them in order, and list what is closed.

    \b
    Example:
      meterline period close 2026-11
    """


@period.command(name="close")
@click.argument("month")
@config_option
@with_format
def close_command(month: str, config: Path, form: Format) -> None:
    """Post what the bills say beyond what was rated, and close the month. It cannot be undone.

    What arrives later is booked later, as a correction; the figures of the month stay. `meterline
    reconcile --month` proves it at any time.

    \b
    Example:
      meterline period close 2026-11
    """
    parse_month(month)

    async def closed(found: OpenBooks) -> Closed:
        return await close_month(found.engine, month, datetime.now(UTC))

    try:
        done = with_books(config, closed)
    except CloseRefused as error:
        raise Refused(str(error)) from error
    if form == "json":
        click.echo(msgspec.json.encode(done).decode())
        return
    click.echo(f"{done.month} is closed: {done.postings} residuals posted, manifest {done.sha256}")


@period.command(name="list")
@config_option
@with_format
def list_command(config: Path, form: Format) -> None:
    """The closed months, and the hash of each one's manifest.

    \b
    Example:
      meterline period list
    """
    found = with_books(config, lambda books: closed_list(books.engine))
    if form == "json":
        click.echo(msgspec.json.encode(found).decode())
        return
    rows = [[c.month, f"{c.closed_at:%Y-%m-%d %H:%M}", c.sha256] for c in found]
    for line in aligned([["month", "closed at", "manifest"], *rows]):
        click.echo(line)
