"""`meterline price …`: price books, what differs between them, and pricing again by another one."""

import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Literal, TypeVar

import click
import msgspec

from gateway.commands import BadInput, Format, Refused, aligned, with_format
from gateway.commands.books import OpenBooks, with_books
from gateway.commands.files import config_option
from gateway.commands.periods import parse_report_period
from telemetry import books
from telemetry.books import BookRefused, BookUnknown, Catalogue, Change, Entry, Head, Published
from telemetry.catalogues import ListInvalid, from_csv, from_litellm, with_tiers
from telemetry.clock import SystemClock
from telemetry.ledger.rerate import Rerating
from telemetry.ledger.rerate import rerate as rerate_lines
from telemetry.ledger.rollups import roll_up_dirty
from telemetry.money import plain

T = TypeVar("T")
Source = Literal["genai-prices", "litellm", "csv"]
_SHOWN = 40


@click.group()
def price() -> None:
    """Price books: import a draft, look what differs, publish it.

    \b
    Example:
      meterline price import csv prices.csv --name contract
      meterline price diff contract contract@2
      meterline price publish contract@2
    """


@price.command(name="import")
@click.argument("source", type=click.Choice(["genai-prices", "litellm", "csv"]))
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), required=False)
@click.option("--name", help="Of the book; default: litellm, genai-prices, or the file's name.")
@click.option("--tier", "tiers", multiple=True, metavar="NAME=FACTOR", help="E.g. batch=0.5.")
@click.option("--publish", "at_once", is_flag=True, help="Publish it at once.")
@config_option
@with_format
def import_command(
    source: Source,
    file: Path | None,
    name: str | None,
    tiers: Sequence[str],
    at_once: bool,
    config: Path,
    form: Format,
) -> None:
    """Read a price list as a draft, and say what differs from what is published.

    genai-prices is the list of the installed package; litellm reads a file in the format of
    LiteLLM's model_prices_and_context_window.json; csv has the columns provider, model, meter and
    unit_price (per million), and optionally match, service_tier, min_input_tokens, unit,
    list_unit_price, currency, effective_from, effective_to.

    \b
    Example:
      meterline price import litellm model_prices_and_context_window.json
      meterline price import csv prices.csv --name contract --tier batch=0.5
    """
    factors = _factors(tiers)
    try:
        catalogue = with_tiers(_read(source, file), factors)
    except ListInvalid as error:
        raise BadInput("\n".join(error.problems[:_SHOWN])) from error
    book = _name(source, file, name)
    described = source if file is None else f"{source} {file.name}"

    async def imported(found: OpenBooks) -> tuple[Published, bool]:
        now = _now()
        done = await books.draft(found.engine, book, catalogue.entries, source=described, now=now)
        head = await books.find(found.engine, done.label)
        if at_once and head.status == books.DRAFT:
            head = await books.publish_draft(found.engine, done.label, now)
        return done, head.status == books.PUBLISHED

    done, is_published = _asked(config, imported)
    if form == "json":
        _json(
            {
                "label": done.label,
                "is_new": done.is_new,
                "is_published": is_published,
                "prices": done.prices,
                "added": done.added,
                "removed": done.removed,
                "changed": done.changed,
                "quantised": catalogue.quantised,
                "time_of_day": catalogue.time_of_day,
                "skipped": catalogue.skipped,
            }
        )
        return
    _say_import(done, catalogue, is_published=is_published)


@price.command(name="list")
@click.argument("label", required=False)
@click.option("--provider", help="Only this provider's prices.")
@click.option("--model", help="Only models whose name contains this.")
@config_option
@with_format
def list_command(
    label: str | None, provider: str | None, model: str | None, config: Path, form: Format
) -> None:
    """The books there are; with LABEL (name or name@version) the prices in one of them.

    \b
    Example:
      meterline price list
      meterline price list genai-prices --provider openai --model gpt-4o
    """
    if label is None:
        heads = with_books(config, lambda found: books.heads(found.engine))
        if form == "json":
            _json(heads)
            return
        _table(
            ["book", "status", "since", "prices", "source"],
            [
                [h.label, h.status, f"{h.published_at:%Y-%m-%d %H:%M}", str(h.prices), h.source]
                for h in heads
            ],
        )
        return

    async def read(found: OpenBooks) -> list[Entry]:
        return await books.entries_of(found.engine, await books.find(found.engine, label))

    entries = [
        entry
        for entry in _asked(config, read)
        if (provider is None or entry.provider == provider)
        and (model is None or model.lower() in entry.model)
    ]
    entries.sort(key=lambda e: (e.provider, e.model, e.meter, e.service_tier, e.min_input_tokens))
    if form == "json":
        _json(entries)
        return
    _table(
        ["provider", "model", "meter", "tier", "from tokens", "price", "per", "from", "until"],
        [_entry_cells(entry) for entry in entries],
    )


@price.command(name="diff")
@click.argument("old")
@click.argument("new")
@config_option
@with_format
def diff_command(old: str, new: str, config: Path, form: Format) -> None:
    """Every price in which two books differ; exit code 1 if any does.

    \b
    Example:
      meterline price diff genai-prices genai-prices@7
    """

    async def compared(found: OpenBooks) -> list[Change]:
        first, second = [await books.find(found.engine, label) for label in (old, new)]
        return books.changes(
            await books.entries_of(found.engine, first),
            await books.entries_of(found.engine, second),
        )

    changes = _asked(config, compared)
    if form == "json":
        _json(changes)
    else:
        _table(
            ["provider", "model", "meter", "tier", "before", "after"],
            [
                [c.provider, c.model, c.meter, c.service_tier, _maybe(c.before), _maybe(c.after)]
                for c in changes
            ],
        )
    if changes:
        sys.exit(1)


@price.command(name="publish")
@click.argument("label")
@config_option
@with_format
def publish_command(label: str, config: Path, form: Format) -> None:
    """Let a draft price what is settled from now on. Running gateways take it up in a minute.

    \b
    Example:
      meterline price publish contract@2
    """

    async def published(found: OpenBooks) -> Head:
        try:
            return await books.publish_draft(found.engine, label, _now())
        except BookRefused as error:
            raise Refused(str(error)) from error

    head = _asked(config, published)
    if form == "json":
        _json(head)
        return
    click.echo(f"{head.label} is published: {head.prices} prices")


@price.command(name="rerate")
@click.option("--from", "start", required=True, help="First day or hour.")
@click.option("--to", "end", required=True, help="Day or hour after the last.")
@click.option("--book", help="Before other lists; the config's agreed prices still win.")
@click.option("--dry-run/--apply", "is_dry", default=True, help="Show, or do it.")
@config_option
@with_format
def rerate_command(
    start: str, end: str, book: str | None, is_dry: bool, config: Path, form: Format
) -> None:
    """Price again what was settled: what changes by tenant, model and meter.

    With --apply, each line that changes is reversed and stands again at its new price; in a closed
    month as a correction that is booked now. Doing it twice changes nothing.

    \b
    Example:
      meterline price rerate --from 2026-11-01 --to 2026-12-01 --book contract@2
      meterline price rerate --from 2026-11-01 --to 2026-12-01 --apply
    """
    period = parse_report_period(start, end, "UTC")

    async def rated(found: OpenBooks) -> tuple[Rerating, dict[str, str]]:
        engine = found.engine
        by = await (books.load(engine) if book is None else books.load_with(engine, book))
        done = await rerate_lines(
            engine,
            by,
            start=period.start,
            end=period.end,
            now_ns=SystemClock().now_ns(),
            apply=not is_dry,
        )
        await roll_up_dirty(engine)
        return done, await found.tenant_names()

    done, names = _asked(config, rated)
    if form == "json":
        _json(done)
        return
    _table(
        ["tenant", "model", "meter", "lines", "before", "after", "difference", "unpriced"],
        [
            [
                names.get(c.tenant_id, c.tenant_id) or "(nobody)",
                c.model,
                c.meter,
                str(c.lines),
                f"{plain(c.before)} {c.currency}",
                f"{plain(c.after)} {c.currency}",
                plain(c.difference),
                f"{c.unpriced_before} → {c.unpriced_after}",
            ]
            for c in done.changes
        ],
    )
    doing = "changed" if done.is_applied else "would change"
    lines = sum(change.lines for change in done.changes)
    click.echo(f"{done.events} attempts looked at, {lines} lines {doing}.")
    if done.corrections:
        click.echo(f"{done.corrections} lines are corrections of closed months, booked now.")


def _asked(config: Path, work: Callable[[OpenBooks], Awaitable[T]]) -> T:
    """What `work` finds out; a book that is not there is bad input."""
    try:
        return with_books(config, work)
    except BookUnknown as error:
        raise BadInput(str(error)) from error


def _factors(tiers: Sequence[str]) -> dict[str, Decimal]:
    factors: dict[str, Decimal] = {}
    for text in tiers:
        name, separator, value = text.partition("=")
        try:
            factor = Decimal(value)
        except InvalidOperation:
            factor = Decimal("NaN")
        if not separator or not name or not factor.is_finite() or not 0 <= factor <= 100:
            raise BadInput(f"--tier {text!r}: write a name and a factor, like batch=0.5")
        factors[name.lower()] = factor
    return factors


def _read(source: Source, file: Path | None) -> Catalogue:
    if source == "genai-prices":
        if file is not None:
            raise BadInput("genai-prices is read from the installed package: name no file")
        return books.catalogue_of_genai_prices()
    if file is None:
        raise BadInput(f"{source}: name the file to read")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise BadInput(f"{file}: {reason}") from error
    return from_litellm(text) if source == "litellm" else from_csv(text)


def _name(source: Source, file: Path | None, name: str | None) -> str:
    if source == "csv":
        assert file is not None
        chosen = name or file.stem
    else:
        chosen = name or source
    kept = {books.CONFIG} | ({books.CATALOGUE} if source != "genai-prices" else set())
    if chosen in kept or not chosen.replace("-", "").replace("_", "").isalnum():
        raise BadInput(f"--name {chosen!r}: use letters, digits, - and _; config is kept for us")
    if len(chosen) > 24:
        raise BadInput(f"--name {chosen!r}: 24 characters at most")
    return chosen


def _say_import(done: Published, catalogue: Catalogue, *, is_published: bool) -> None:
    if not done.is_new:
        state = "published" if is_published else "a draft"
        click.echo(f"{done.label} ({state}) says the same already: nothing to do")
        return
    click.echo(
        f"{done.label} is {'published' if is_published else 'a draft'}: {done.prices} prices, "
        f"{done.added} new, {done.changed} changed, {done.removed} gone"
    )
    for line in done.examples:
        click.echo(f"  {line}")
    for what, lines in (
        ("rounded to nine decimals", catalogue.quantised),
        ("priced by the hour of the day: the dearer price holds all day", catalogue.time_of_day),
    ):
        if lines:
            click.echo(f"{len(lines)} {what}:")
            for line in lines[:5]:
                click.echo(f"  {line}")
    if catalogue.skipped:
        total = sum(catalogue.skipped.values())
        worst = sorted(catalogue.skipped.items(), key=lambda item: -item[1])[:5]
        click.echo(f"{total} left out: " + ", ".join(f"{name} ({n})" for name, n in worst))
    if not is_published:
        click.echo(f"publish it: meterline price publish {done.label}")


def _entry_cells(entry: Entry) -> list[str]:
    return [
        entry.provider,
        entry.model if entry.match == "equals" else f"{entry.match} {entry.model}".rstrip(),
        entry.meter,
        entry.service_tier,
        str(entry.min_input_tokens) if entry.min_input_tokens else "",
        f"{plain(entry.unit_price)} {entry.currency}",
        f"{entry.unit:,}",
        f"{entry.effective_from:%Y-%m-%d}" if entry.effective_from else "",
        f"{entry.effective_to:%Y-%m-%d}" if entry.effective_to else "",
    ]


def _maybe(value: Decimal | None) -> str:
    return "–" if value is None else plain(value)


def _now() -> datetime:
    return datetime.fromtimestamp(SystemClock().now_ns() / 1e9, UTC)


def _json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value)).decode())


def _table(header: list[str], rows: list[list[str]]) -> None:
    for line in aligned([header, *rows]):
        click.echo(line)
