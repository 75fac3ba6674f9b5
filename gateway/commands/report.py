"""`meterline report …`: the ledger's sums, grouped."""

import shutil
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import click

from gateway.commands import BadInput
from gateway.commands.books import OpenBooks, with_books
from gateway.commands.files import config_option
from telemetry.reports.chargeback import Chargeback, GroupingInvalid, chargeback, dimensions
from telemetry.reports.period import PeriodInvalid, parse_period
from telemetry.reports.query import hourly_sums, pending_hours
from telemetry.reports.render import chargeback_csv, chargeback_json, chargeback_table

Form = Literal["table", "csv", "json"]


@click.group()
def report() -> None:
    """What was used, by whom, and what it cost.

    \b
    Example:
      meterline report chargeback --by tenant,model
    """


@report.command(name="chargeback")
@config_option
@click.option("--from", "start", help="First day or hour; default: the first of this month.")
@click.option("--to", "end", help="Day or hour after the last; default: tomorrow.")
@click.option("--by", default="tenant,model", show_default=True, help="Dimensions, with commas.")
@click.option("--tz", "zone", default="UTC", show_default=True, help="Whose midnights.")
@click.option("--format", "form", type=click.Choice(["table", "csv", "json"]), default="table")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file.")
def chargeback_command(
    config: Path,
    start: str | None,
    end: str | None,
    by: str,
    zone: str,
    form: Form,
    out: Path | None,
) -> None:
    """Tokens, device time and exact cost, and the cost per million tokens.

    \b
    Example:
      meterline report chargeback --from 2026-11-01 --to 2026-12-01 --by tenant,model
      meterline report chargeback --by tenant,day --format csv --out november.csv
    """
    today = datetime.now(UTC).date()
    try:
        groups = dimensions(by)
        period = parse_period(
            start or today.replace(day=1).isoformat(),
            end or (today + timedelta(days=1)).isoformat(),
            zone,
        )
    except (GroupingInvalid, PeriodInvalid) as error:
        raise BadInput(str(error)) from error

    async def made(found: OpenBooks) -> Chargeback:
        return chargeback(
            await hourly_sums(found.engine, period),
            by=groups,
            period=period,
            tenant_names=await found.tenant_names(),
            pending_hours=await pending_hours(found.engine, period),
        )

    result = with_books(config, made)
    terminal = out is None and sys.stdout.isatty()
    if form == "csv":
        text = chargeback_csv(result)
    elif form == "json":
        text = chargeback_json(result)
    else:
        width = shutil.get_terminal_size((120, 40)).columns
        text = chargeback_table(result, width=width, color=terminal)
    if out is None:
        click.echo(text, nl=False)
        return
    try:
        out.write_text(text)
    except OSError as error:
        raise BadInput(f"--out {out}: {error.strerror}") from error
