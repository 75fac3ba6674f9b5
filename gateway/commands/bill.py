"""`meterline bill …`: what providers bill, beside what was rated."""

import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from gateway.commands import BadInput
from gateway.commands.books import OpenBooks, with_books
from gateway.commands.files import config_option
from gateway.commands.report import Form, over_a_period, show
from telemetry.closing.bills import FORMATS, BillFormat, BillInvalid, Difference, read_bill
from telemetry.closing.months import bill_differences, import_bill
from telemetry.money import EXACT
from telemetry.reports.period import Period
from telemetry.reports.sheet import Sheet

_SHOWN = 40


@click.group()
def bill() -> None:
    """Bills of providers: import them, and compare them with what was rated.

    \b
    Example:
      meterline bill import openai costs.json --provider openai
      meterline bill compare --from 2026-11-01 --to 2026-12-01
    """


@bill.command(name="import")
@click.argument("format_name", metavar="FORMAT", type=click.Choice(FORMATS))
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--provider", required=True, help="As in the reports, e.g. openai.")
@config_option
def import_command(format_name: BillFormat, file: Path, provider: str, config: Path) -> None:
    """Keep a bill. The same file twice is kept once.

    focus reads a FOCUS CSV, openai the JSON of GET /v1/organization/costs, anthropic that of
    GET /v1/organizations/cost_report, csv the columns day and amount and optionally model, meter,
    quantity, currency.

    \b
    Example:
      meterline bill import csv november.csv --provider mistral
    """
    try:
        content = file.read_bytes()
        lines = read_bill(format_name, content.decode("utf-8-sig"))
    except BillInvalid as error:
        raise BadInput("\n".join(error.problems[:_SHOWN])) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise BadInput(f"{file}: {reason}") from error

    async def kept(found: OpenBooks) -> bool:
        return await import_bill(
            found.engine,
            provider=provider,
            form=format_name,
            source=file.name,
            content=content,
            lines=lines,
            now=datetime.now(UTC),
        )

    if not with_books(config, kept):
        click.echo("this file is there already: nothing to do")
        return
    total: dict[str, object] = {}
    for line in lines:
        total[line.currency] = EXACT.add(total.get(line.currency, 0), line.amount)  # type: ignore[arg-type]  # 0 or a Decimal
    sums = ", ".join(f"{amount:f} {currency}" for currency, amount in sorted(total.items()))
    days = sorted({line.day for line in lines})
    click.echo(f"{len(lines)} lines of {provider} from {days[0]} to {days[-1]}: {sums}")


@bill.command(name="compare")
@click.option("--all", "show_all", is_flag=True, help="Also what agrees.")
@over_a_period
def compare_command(
    config: Path, period: Period, show_all: bool, form: Form, out: Path | None
) -> None:
    """Each day, model and meter in which a bill and our ratings differ, with a suspected cause.

    Exit code 1 if any does.

    \b
    Example:
      meterline bill compare --from 2026-11-01 --to 2026-12-01
    """

    async def compared(found: OpenBooks) -> list[Difference]:
        async with found.engine.connect() as db:
            return await bill_differences(db, period.start, period.end)

    found = with_books(config, compared)
    show(comparison(found, show_all=show_all), form, out)
    if any(difference.residual for difference in found):
        sys.exit(1)


def comparison(found: list[Difference], *, show_all: bool) -> Sheet:
    """The differences as a sheet; the totals are of all days that a bill names."""
    totals = []
    for currency in sorted({difference.currency for difference in found}):
        of = [difference for difference in found if difference.currency == currency]
        rated, billed = EXACT.create_decimal(0), EXACT.create_decimal(0)
        for difference in of:
            rated = EXACT.add(rated, difference.rated)
            billed = EXACT.add(billed, difference.billed)
        residual = EXACT.subtract(billed, rated)
        totals.append(("Total", "", "", "", None, None, rated, billed, residual, currency, ""))
    return Sheet(
        title="Bills beside what was rated",
        columns=(
            *("provider", "day", "model", "meter", "rated quantity", "billed quantity"),
            *("rated", "billed", "residual", "currency", "cause"),
        ),
        rows=tuple(
            (
                *(d.provider, d.day.isoformat(), d.model, d.meter),
                *(d.rated_quantity, d.billed_quantity, d.rated, d.billed, d.residual),
                *(d.currency, d.cause),
            )
            for d in found
            if show_all or d.residual
        ),
        totals=tuple(totals),
        notes=("The cause is a guess from the figures; days without a bill are left out.",),
    )
