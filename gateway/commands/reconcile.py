"""`meterline reconcile`: hold the ledger against its own laws, and closed months against theirs."""

import sys
from pathlib import Path

import click
import msgspec

from gateway.commands import Format, with_format
from gateway.commands.books import OpenBooks, with_books
from gateway.commands.files import config_option
from gateway.commands.periods import parse_month
from telemetry.clock import SystemClock
from telemetry.closing.months import closed_list, verify_month
from telemetry.ledger.conservation import Law
from telemetry.ledger.reconcile import reconcile as check_laws


@click.command()
@click.option("--month", help="Prove this closed month only; default: every closed month.")
@config_option
@with_format
def reconcile(month: str | None, config: Path, form: Format) -> None:
    """Check every conservation law of the ledger, and that closed months are as they were closed.

    Exit code 1 if a law is broken or a closed month does not add up; what breaks it is named.

    \b
    Example:
      meterline reconcile
      meterline reconcile --month 2026-11
    """
    if month is not None:
        parse_month(month)

    async def checked(found: OpenBooks) -> list[Law]:
        laws = await check_laws(found.engine, found.config.wal_dir, clock=SystemClock())
        return [*laws, *await closed_months(found, month)]

    laws = with_books(config, checked)
    if form == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(laws)).decode())
    else:
        for law in laws:
            click.echo(law.line)
        if month is not None and not any(law.name == f"closed {month}" for law in laws):
            click.echo(f"{month} is not closed: meterline period close {month}")
    if not all(law.holds for law in laws):
        sys.exit(1)


async def closed_months(found: OpenBooks, month: str | None) -> list[Law]:
    """A law for each closed month: its manifest, made again, has its hash."""
    laws = []
    async with found.engine.connect() as db:
        for closed in await closed_list(found.engine):
            if month not in (None, closed.month):
                continue
            wrong = await verify_month(db, closed.month)
            laws.append(
                Law(
                    name=f"closed {closed.month}",
                    says="parts that are not as they were closed",
                    left=str(len(wrong)),
                    right="0",
                    holds=not wrong,
                    offenders=tuple(wrong[:20]),
                )
            )
    return laws
