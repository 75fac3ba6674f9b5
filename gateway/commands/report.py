"""`meterline report …`: what was used, by whom, what it cost, and what to make of it."""

import functools
import shutil
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import click

from gateway.commands import BadInput
from gateway.commands.books import OpenBooks, with_books
from gateway.commands.files import config_option
from gateway.commands.periods import parse_month, parse_report_period
from telemetry.capacity.allocation import POLICIES, IdlePolicy
from telemetry.closing.months import closed_list, residuals_of
from telemetry.reports.chargeback import Chargeback, GroupingInvalid, dimensions
from telemetry.reports.desk import Basis, Desk, PriceUnknown, SheetName
from telemetry.reports.focus import Export, export
from telemetry.reports.period import Period
from telemetry.reports.query import list_prices, meter_sums
from telemetry.reports.render import chargeback_csv, chargeback_json, chargeback_table
from telemetry.reports.sheet import Sheet, sheet_csv, sheet_json, sheet_text
from telemetry.reports.statement import journal, journal_csv, statement_html

Form = Literal["table", "csv", "json"]


@click.group()
def report() -> None:
    """What was used, by whom, and what it cost.

    \b
    Example:
      meterline report chargeback --by tenant,model
      meterline report capacity
    """


def over_a_period(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that every report over a period takes."""

    @config_option
    @click.option("--from", "start", help="First day or hour; default: the first of this month.")
    @click.option("--to", "end", help="Day or hour after the last; default: tomorrow.")
    @click.option("--tz", "zone", default="UTC", show_default=True, help="Whose midnights.")
    @click.option("--format", "form", type=click.Choice(["table", "csv", "json"]), default="table")
    @click.option(
        "--out", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file."
    )
    @functools.wraps(command)
    def wrapped(start: str | None, end: str | None, zone: str, **more: Any) -> None:
        command(period=parse_report_period(start, end, zone), **more)

    decorated: Callable[..., None] = wrapped
    return decorated


def with_idle_policy(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that say who pays for idle hardware."""

    @click.option(
        "--idle-policy",
        type=click.Choice(POLICIES),
        default="keep",
        show_default=True,
        help="Who pays for idle hardware, on the full basis.",
    )
    @click.option(
        "--entitlement",
        "entitlements",
        multiple=True,
        metavar="TENANT=WEIGHT",
        help="For proportional-entitlement: a tenant's id or name, and its whole-number weight.",
    )
    @functools.wraps(command)
    def wrapped(**more: Any) -> None:
        command(**more)

    return wrapped


@report.command(name="chargeback")
@click.option("--by", default="tenant,model", show_default=True, help="Dimensions, with commas.")
@click.option(
    "--basis",
    type=click.Choice(["usage", "full"]),
    default="usage",
    show_default=True,
    help="usage: as it was settled. full: owned hardware at its bill, idle included.",
)
@with_idle_policy
@over_a_period
def chargeback_command(
    config: Path,
    period: Period,
    by: str,
    basis: Basis,
    idle_policy: IdlePolicy,
    entitlements: Sequence[str],
    form: Form,
    out: Path | None,
) -> None:
    """Tokens, device time and exact cost, and the cost per million tokens.

    \b
    Example:
      meterline report chargeback --from 2026-11-01 --to 2026-12-01 --by tenant,model
      meterline report chargeback --by level-1,cost-centre
      meterline report chargeback --by tenant,day --format csv --out november.csv
      meterline report chargeback --basis full --idle-policy proportional-used
    """

    async def made(found: OpenBooks) -> Chargeback:
        names = await found.tenant_names()
        return await desk_of(found).chargeback(
            period,
            dimensions(by),
            basis=basis,
            policy=idle_policy,
            entitlements=parse_entitlements(entitlements, names),
        )

    try:
        result = with_books(config, made)
    except GroupingInvalid as error:
        raise BadInput(str(error)) from error
    if form == "csv":
        text = chargeback_csv(result)
    elif form == "json":
        text = chargeback_json(result)
    else:
        color = out is None and sys.stdout.isatty()
        text = chargeback_table(result, width=_width(), color=color)
    write(text, out)


@report.command(name="capacity")
@over_a_period
def capacity_command(config: Path, period: Period, form: Form, out: Path | None) -> None:
    """Owned hardware: how much time there was, how it was used, and what a million tokens cost.

    \b
    Example:
      meterline report capacity --from 2026-11-01 --to 2026-12-01
    """
    show(with_books(config, lambda found: _sheet(found, "capacity", period)), form, out)


def desk_of(found: OpenBooks) -> Desk:
    return Desk(found.engine, found.tenant_names, found.tenant_places)


async def _sheet(found: OpenBooks, name: SheetName, period: Period) -> Sheet:
    return await desk_of(found).sheet(name, period, today=datetime.now(UTC).date())


def parse_entitlements(texts: Sequence[str], names: dict[str, str]) -> dict[str, int]:
    """`TENANT=WEIGHT` by tenant id; a name stands for the tenant that has it."""
    by_name = {name: tenant_id for tenant_id, name in names.items()}
    found: dict[str, int] = {}
    for text in texts:
        tenant, separator, weight = text.rpartition("=")
        tenant_id = tenant if tenant in names else by_name.get(tenant)
        if not separator or not weight.isdecimal() or len(weight) > 12:
            raise BadInput(f"--entitlement {text!r}: write TENANT=WEIGHT, a whole number")
        if tenant_id is None:
            raise BadInput(f"--entitlement {text!r}: no tenant has this id or name")
        found[tenant_id] = int(weight)
    return found


def show(sheet: Sheet, form: Form, out: Path | None) -> None:
    """Write a sheet in the form that was asked for."""
    if form == "csv":
        text = sheet_csv(sheet)
    elif form == "json":
        text = sheet_json(sheet)
    else:
        text = sheet_text(sheet, width=_width())
    write(text, out)


def write(text: str, out: Path | None) -> None:
    """To the file, else to stdout."""
    if out is None:
        click.echo(text, nl=False)
        return
    try:
        out.write_text(text)
    except OSError as error:
        raise BadInput(f"--out {out}: {error.strerror}") from error


def _width() -> int:
    return shutil.get_terminal_size((120, 40)).columns


@report.command(name="savings")
@over_a_period
def savings_command(config: Path, period: Period, form: Form, out: Path | None) -> None:
    """What caches and cheaper service tiers saved. Beside the cost, never taken off it.

    \b
    Example:
      meterline report savings --from 2026-11-01 --to 2026-12-01
    """
    show(with_books(config, lambda found: _sheet(found, "savings", period)), form, out)


@report.command(name="waste")
@over_a_period
def waste_command(config: Path, period: Period, form: Form, out: Path | None) -> None:
    """What was paid and served nobody: failed attempts, hedges, clients that left, idle hardware.

    \b
    Example:
      meterline report waste --from 2026-11-01 --to 2026-12-01
    """
    show(with_books(config, lambda found: _sheet(found, "waste", period)), form, out)


@report.command(name="whatif")
@click.option("--as", "other", required=True, metavar="PROVIDER/MODEL", help="At whose prices.")
@over_a_period
def whatif_command(config: Path, period: Period, other: str, form: Form, out: Path | None) -> None:
    """What the same tokens would have cost as another model.

    \b
    Example:
      meterline report whatif --as openai/gpt-4o-mini --from 2026-11-01 --to 2026-12-01
    """
    provider, separator, model = other.partition("/")
    if not separator or not model:
        raise BadInput(f"--as {other!r}: write PROVIDER/MODEL, like openai/gpt-4o-mini")

    try:
        sheet = with_books(config, lambda found: desk_of(found).what_if(period, provider, model))
    except PriceUnknown as error:
        raise BadInput(f"--as {other}: {error}: see meterline price list") from error
    show(sheet, form, out)


@report.command(name="variance")
@click.option("--before", help="First day of the period before; default: as long, just before.")
@over_a_period
def variance_command(
    config: Path, period: Period, before: str | None, form: Form, out: Path | None
) -> None:
    """Why the cost changed against an earlier period of the same length: terms that sum to it.

    \b
    Example:
      meterline report variance --from 2026-11-01 --to 2026-11-08
    """
    length = period.end - period.start
    if before is None:
        earlier = Period(period.start - length, period.start, period.zone)
    else:
        first = parse_report_period(before, period.end.isoformat(), period.zone).start
        earlier = Period(first, first + length, period.zone)

    show(with_books(config, lambda found: desk_of(found).variance(earlier, period)), form, out)


@report.command(name="forecast")
@over_a_period
def forecast_command(config: Path, period: Period, form: Form, out: Path | None) -> None:
    """Where the month will end, with the error that the method had on the past.

    It learns from the month up to today, or up to --to if that is earlier, and the 90 days before
    it; it runs to the end of that month.

    \b
    Example:
      meterline report forecast
    """
    show(with_books(config, lambda found: _sheet(found, "forecast", period)), form, out)


@report.command(name="statement")
@click.option("--tenant", required=True, help="Id or name.")
@click.option("--month", required=True, help="Like 2026-11, UTC.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file.")
@config_option
def statement_command(config: Path, tenant: str, month: str, out: Path | None) -> None:
    """A tenant's month as an HTML page that prints to a clean PDF.

    \b
    Example:
      meterline report statement --tenant acme --month 2026-11 --out acme.html
    """
    period = parse_month(month)

    async def made(found: OpenBooks) -> str:
        names = await found.tenant_names()
        tenant_id = next((key for key, name in names.items() if tenant in (key, name)), None)
        if tenant_id is None:
            raise BadInput(f"--tenant {tenant!r}: no tenant has this id or name")
        rows = await meter_sums(found.engine, period)
        closed = {one.month: one.sha256 for one in await closed_list(found.engine)}
        return statement_html(
            (row for row in rows if row.tenant_id == tenant_id),
            tenant=names[tenant_id],
            tenant_id=tenant_id,
            period=period,
            proof=closed.get(month),
        )

    write(with_books(config, made), out)


@report.command(name="journal")
@click.option("--month", required=True, help="Like 2026-11, UTC.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file.")
@config_option
def journal_command(config: Path, month: str, out: Path | None) -> None:
    """The month as balanced entries for accounting, CSV: by tenant against each provider.

    \b
    Example:
      meterline report journal --month 2026-11 --out november.csv
    """
    period = parse_month(month)

    async def made(found: OpenBooks) -> str:
        rows = await meter_sums(found.engine, period)
        residuals = await residuals_of(found.engine, month)
        names = await found.tenant_names()
        return journal_csv(journal(rows, residuals, period=period, tenant_names=names))

    write(with_books(config, made), out)


@report.command(name="focus")
@click.option("--account", default="meterline", show_default=True, help="BillingAccountId.")
@click.option("--from", "start", help="First day or hour; default: the first of this month.")
@click.option("--to", "end", help="Day or hour after the last; default: tomorrow.")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The CSV; the manifest goes beside it, as FILE.manifest.json.",
)
@config_option
def focus_command(
    config: Path, account: str, start: str | None, end: str | None, out: Path
) -> None:
    """The period as FOCUS 1.2 CostAndUsage rows, hourly, with a manifest of rows, sums and hash.

    \b
    Example:
      meterline report focus --from 2026-11-01 --to 2026-12-01 --out november-focus.csv
    """
    period = parse_report_period(start, end)

    async def made(found: OpenBooks) -> Export:
        rows = await meter_sums(found.engine, period)
        return export(
            rows,
            account=account,
            tenant_names=await found.tenant_names(),
            list_prices=await list_prices(found.engine, {row.price_id for row in rows}),
            start=period.start,
            end=period.end,
        )

    done = with_books(config, made)
    write(done.csv, out)
    write(done.manifest, out.with_name(f"{out.name}.manifest.json"))
    click.echo(f"{done.rows} rows in {out}, {done.left_out} charge lines without a price left out")
