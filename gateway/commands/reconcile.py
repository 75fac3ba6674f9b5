"""`meterline reconcile`: hold the ledger against its own laws."""

import sys
from pathlib import Path

import click
import msgspec

from gateway.commands import Format, with_format
from gateway.commands.books import OpenBooks, with_books
from gateway.commands.files import config_option
from telemetry.clock import SystemClock
from telemetry.ledger.conservation import Law
from telemetry.ledger.reconcile import reconcile as check_laws


@click.command()
@config_option
@with_format
def reconcile(config: Path, form: Format) -> None:
    """Check every conservation law of the ledger; exit code 1 if one is broken.

    \b
    Example:
      meterline reconcile
    """

    async def checked(found: OpenBooks) -> list[Law]:
        return await check_laws(found.engine, found.config.wal_dir, clock=SystemClock())

    laws = with_books(config, checked)
    if form == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(laws)).decode())
    else:
        for law in laws:
            click.echo(law.line)
    if not all(law.holds for law in laws):
        sys.exit(1)
