"""`meterline report …`: what was used, by whom, what it cost, and what to make of it."""

import functools
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from gateway.commands import BadInput
from gateway.commands.books import OpenBooks, with_books
from gateway.commands.files import config_option
from gateway.commands.periods import parse_report_period
from telemetry.capacity.allocation import POLICIES, IdlePolicy
from telemetry.reports.chargeback import (
    METER_DIMENSIONS,
    Chargeback,
    GroupingInvalid,
    chargeback,
    dimensions,
)
from telemetry.reports.full_cost import capacity_sheet, engine_costs, full_basis
from telemetry.reports.meters import as_hourly
from telemetry.reports.period import Period
from telemetry.reports.query import allocations, hourly_sums, meter_sums, pending_hours
from telemetry.reports.render import chargeback_csv, chargeback_json, chargeback_table
from telemetry.reports.sheet import Sheet, sheet_csv, sheet_json, sheet_text

Form = Literal["table", "csv", "json"]
Basis = Literal["usage", "full"]


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
      meterline report chargeback --by tenant,day --format csv --out november.csv
      meterline report chargeback --basis full --idle-policy proportional-used
    """
    try:
        groups = dimensions(by)
    except GroupingInvalid as error:
        raise BadInput(str(error)) from error
    is_by_meter = any(name in METER_DIMENSIONS for name in groups)
    if is_by_meter and basis == "full":
        raise BadInput("--basis full has no meters, since idle time has none: use --basis usage")

    async def made(found: OpenBooks) -> Chargeback:
        names = await found.tenant_names()
        if is_by_meter:
            sums = [as_hourly(row) for row in await meter_sums(found.engine, period)]
        else:
            sums = await hourly_sums(found.engine, period)
        if basis == "full":
            split = await allocations(
                found.engine,
                period,
                policy=idle_policy,
                entitlements=parse_entitlements(entitlements, names),
            )
            sums = full_basis(sums, split)
        return chargeback(
            sums,
            by=groups,
            period=period,
            tenant_names=names,
            pending_hours=await pending_hours(found.engine, period),
        )

    result = with_books(config, made)
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

    async def made(found: OpenBooks) -> Sheet:
        sums = await hourly_sums(found.engine, period)
        split = await allocations(found.engine, period, policy="keep")
        return capacity_sheet(engine_costs(sums, split, period), period)

    show(with_books(config, made), form, out)


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
