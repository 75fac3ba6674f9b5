"""Reports and stories as text for terminals, CSV and JSON. Pure: values in, one string out.

Money is printed in full, never rounded; where a rounded figure helps it stands beside, after `≈`.
In JSON and CSV money is a string without exponent. Whatever came from a client (model names, keys)
is freed of control characters before it reaches a terminal, and of formulas before a spreadsheet.
"""

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import msgspec
from msgspec import Struct, structs
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

from telemetry.money import plain
from telemetry.record import Charge
from telemetry.reports.chargeback import NAMED, TIMES, Chargeback, Dimension, Line
from telemetry.reports.explain import AttemptStory, Phase, Story

MIN_WIDTH, MAX_WIDTH = 80, 120


def chargeback_table(report: Chargeback, *, width: int = 100, color: bool = False) -> str:
    """The report as a table. Columns that say nothing are left out; what does not fit into the
    width is left out by name, or shortened with an ellipsis, but never a figure."""
    width = max(width, MIN_WIDTH)
    rows = [*report.lines, *report.totals]
    columns = _shown_columns(rows)
    labels = [_labels(report, line) for line in report.lines]
    hidden: list[str] = []
    for name in _DISPENSABLE:
        if _width(report, columns, labels) <= width:
            break
        if any(column.title == name for column in columns):
            columns = [column for column in columns if column.title != name]
            hidden.append(name)
    fair = _fair_label(report, columns, labels, width)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for dimension in report.by:
        table.add_column(dimension, no_wrap=True)
    if not report.by:
        table.add_column("", no_wrap=True)
    cells = {column.title: column.cells(rows) for column in columns}
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for index in range(len(rows)):
        is_total = index >= len(report.lines)
        names = (
            ["Total", *[""] * (max(len(report.by), 1) - 1)]
            if is_total
            else [
                label if dimension in TIMES else _shortened(label, fair)
                for dimension, label in zip(report.by, labels[index], strict=True)
            ]
            or ["all"]
        )
        if index == len(report.lines):
            table.add_section()
        table.add_row(
            *(Text(name) for name in names),
            *(Text(cells[column.title][index]) for column in columns),
            style="bold" if is_total else None,
        )
    return _text(table, width=max(width, 400), color=color) + "".join(
        f"{textwrap.fill(note, width)}\n" for note in _notes(report, hidden)
    )


def chargeback_csv(report: Chargeback) -> str:
    """One row a line, no totals row, so that a spreadsheet may add up what it filters."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    fields = [_flat(report, line) for line in report.lines]
    header = list(_flat(report, report.totals[0]))
    writer.writerow(["period_start", "period_end", *header])
    start, end = report.period.start.isoformat(), report.period.end.isoformat()
    for field in fields:
        writer.writerow([start, end, *(inert(field[name]) for name in header)])
    return out.getvalue()


def chargeback_json(report: Chargeback) -> str:
    """The whole report, money as strings."""
    return to_json(
        {
            "period": {
                "start": report.period.start.isoformat(),
                "end": report.period.end.isoformat(),
                "time_zone": report.period.zone,
            },
            "by": list(report.by),
            "lines": [_flat(report, line) for line in report.lines],
            "totals": [
                {
                    name: value
                    for name, value in _flat(report, line).items()
                    if name not in _group_fields(report)
                }
                for line in report.totals
            ],
            "pending_hours": report.pending_hours,
        }
    )


def story_json(story: Story) -> str:
    """The whole story, money as strings."""
    return to_json(story)


def story_text(
    story: Story, *, width: int = 100, color: bool = False, ascii_only: bool = False
) -> str:
    """The story for a terminal: facts, decisions, waterfall, tokens and cost."""
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    parts = [
        _facts(story, width, color),
        _section("Decisions", _wrapped(story.decisions, width), width, color),
        _waterfall(story, width, color, ascii_only),
        *(_tokens(attempt, width, color) for attempt in story.attempts),
        _cost(story, width, color),
    ]
    text = "\n".join(part for part in parts if part)
    return text.translate(_ASCII) if ascii_only else text


# --- the chargeback's columns


class _Column(Struct, frozen=True):
    title: str
    value: Callable[[Line], Any]
    show: Callable[[Any], str]
    is_optional: Callable[[Line], bool] | None = None  # shown only if some line says so
    is_aligned: bool = False

    def is_shown(self, lines: Iterable[Line]) -> bool:
        return self.is_optional is None or any(self.is_optional(line) for line in lines)

    def cells(self, lines: Sequence[Line]) -> list[str]:
        texts = [self.show(self.value(line)) for line in lines]
        return _at_the_point(texts) if self.is_aligned else texts


def _count(value: int | Decimal | None) -> str:
    return f"{value or 0:,}"


def _seconds(value: int | Decimal | None) -> str:
    return f"{Decimal(value or 0) / 1_000_000:,.3f}"


def _money(value: int | Decimal | None) -> str:
    return "–" if value is None else plain(Decimal(value))


def _rate(value: int | Decimal | None) -> str:
    return "–" if value is None else f"{value:,.6f}"


_COLUMNS = (
    _Column("requests", lambda line: line.requests, _count, lambda line: line.requests > 0),
    _Column(
        "attempts",
        lambda line: line.attempts,
        _count,
        lambda line: line.attempts != line.requests,
    ),
    _Column("input", lambda line: line.input_tokens, _count),
    _Column("cached", lambda line: line.cached_tokens, _count, lambda line: line.cached_tokens > 0),
    _Column("output", lambda line: line.output_tokens, _count),
    _Column("device s", lambda line: line.device_us, _seconds, lambda line: line.device_us > 0),
    _Column("cost", lambda line: line.cost, _money, is_aligned=True),
    _Column("per 1M", lambda line: line.cost_per_million_tokens, _rate),
    _Column("per 1M out", lambda line: line.cost_per_million_output_tokens, _rate),
    _Column(
        "unpriced",
        lambda line: line.unpriced_lines,
        _count,
        lambda line: line.unpriced_lines > 0,
    ),
)
_CURRENCY = _Column("currency", lambda line: line.currency, str)


def _shown_columns(lines: Sequence[Line]) -> list[_Column]:
    """The columns that say something. One currency stands in a heading, several in a column."""
    columns = [column for column in _COLUMNS if column.is_shown(lines)]
    currencies = {line.currency for line in lines}
    place = next(place for place, column in enumerate(columns) if column.title == "cost")
    if len(currencies) == 1:
        columns[place] = structs.replace(columns[place], title=f"cost {currencies.pop()}")
    else:
        columns.insert(place + 1, _CURRENCY)
    return columns


_DISPENSABLE = ("attempts", "per 1M out", "device s", "cached", "unpriced")  # first goes first
_DECENT_LABEL = 14  # cells a name gets before the columns above are kept
_LEAST_LABEL = 8  # cells a name keeps at least; times are never shortened


def _at_the_point(texts: list[str]) -> list[str]:
    """Fill decimals up with zeros, so that right-aligned figures meet at the point."""
    places = max((len(text.partition(".")[2]) for text in texts), default=0)

    def filled(text: str) -> str:
        whole, _, part = text.partition(".")
        return f"{whole}.{part:0<{places}}" if places and text != "–" else text

    return [filled(text) for text in texts]


def _figures_width(report: Chargeback, columns: Sequence[_Column]) -> int:
    rows = [*report.lines, *report.totals]
    gaps = 2 * (len(columns) - 1)
    return gaps + sum(
        max(len(column.title), *(len(cell) for cell in column.cells(rows))) for column in columns
    )


def _widest(report: Chargeback, labels: list[list[str]]) -> list[int]:
    """Cells that each dimension would like."""
    return [
        max(cell_len(dimension), _LEAST_LABEL, *(cell_len(row[place]) for row in labels), 0)
        for place, dimension in enumerate(report.by)
    ]


def _width(report: Chargeback, columns: Sequence[_Column], labels: list[list[str]]) -> int:
    """How wide the table is with names that can still be told apart."""
    names = [
        widest if dimension in TIMES else min(widest, _DECENT_LABEL)
        for dimension, widest in zip(report.by, _widest(report, labels), strict=True)
    ]
    return _figures_width(report, columns) + sum(names) + 2 * max(len(names), 1)


def _fair_label(
    report: Chargeback, columns: Sequence[_Column], labels: list[list[str]], width: int
) -> int:
    """The longest that a label may be. Short columns leave their room to long ones."""
    room = width - _figures_width(report, columns) - 2 * max(len(report.by), 1)
    longest: list[int] = []
    for dimension, widest in zip(report.by, _widest(report, labels), strict=True):
        if dimension in TIMES:
            room -= widest
        else:
            longest.append(widest)
    fair = _LEAST_LABEL
    while fair < 256 and sum(min(one, fair + 1) for one in longest) <= room:
        fair += 1
    return fair


def _labels(report: Chargeback, line: Line) -> list[str]:
    return [
        _label(report, dimension, value)
        for dimension, value in zip(report.by, line.group, strict=True)
    ]


def _label(report: Chargeback, dimension: Dimension, value: str) -> str:
    if not value:
        return "(nobody)" if dimension in (*NAMED, "key") else "(none)"
    if dimension in NAMED:
        value = report.tenant_names.get(value, value)
    return clean(value)


def _notes(report: Chargeback, hidden: Sequence[str]) -> Iterable[str]:
    zone = report.period.zone
    yield ""
    yield (
        f"From {report.period.hour(report.period.start)} up to, not including, "
        f"{report.period.hour(report.period.end)} ({zone})."
    )
    yield "Input and output in tokens; per 1M: the cost per million tokens of both, rounded."
    for line in report.totals:
        rounded = _rounded(line.cost, line.currency)
        if rounded:
            yield f"Total {rounded}."
    unpriced = sum(line.unpriced_lines for line in report.totals)
    if unpriced:
        yield (
            f"Not in the cost: {_plural(unpriced, 'line')} without a known price; "
            "cost per token is left out there."
        )
    if report.pending_hours:
        hours = _plural(report.pending_hours, "hour")
        yield f"Not summed up yet: {hours} of the period; the figures will grow."
    if hidden:
        yield f"Left out for width: {', '.join(hidden)} (see --format csv)."


def _group_fields(report: Chargeback) -> list[str]:
    names: list[str] = []
    for dimension in report.by:
        field = dimension.replace("-", "_")
        names.append(field)
        if dimension in NAMED:
            names.append(f"{field}_name")
    return names


def _flat(report: Chargeback, line: Line) -> dict[str, Any]:
    """A line as fields. Money and quotients of it are strings."""
    groups: dict[str, Any] = {}
    for dimension, value in zip(report.by, line.group, strict=True):
        field = dimension.replace("-", "_")
        groups[field] = value
        if dimension in NAMED:
            groups[f"{field}_name"] = report.tenant_names.get(value)
    per_million, per_output = line.cost_per_million_tokens, line.cost_per_million_output_tokens
    return {
        **groups,
        "requests": line.requests,
        "attempts": line.attempts,
        "input_tokens": line.input_tokens,
        "cached_tokens": line.cached_tokens,
        "output_tokens": line.output_tokens,
        "device_seconds": plain(Decimal(line.device_us).scaleb(-6)),
        "cost": plain(line.cost),
        "currency": line.currency,
        "cost_per_million_tokens": None if per_million is None else plain(per_million),
        "cost_per_million_output_tokens": None if per_output is None else plain(per_output),
        "unpriced_lines": line.unpriced_lines,
    }


# --- the story's parts


def _wrapped(texts: Iterable[str], width: int) -> list[str]:
    lines: list[str] = []
    for text in texts:
        lines += textwrap.wrap(clean(text), width, initial_indent="  ", subsequent_indent="      ")
    return lines


def _facts(story: Story, width: int, color: bool) -> str:
    tenant = story.tenant_name or story.tenant_id or "nobody was identified"
    if story.tenant_name is not None:
        tenant += f" ({story.tenant_id})"
    who = tenant if story.key_id is None else f"{tenant}, key {story.key_id}"
    asked = story.asked_model or "(no model)"
    if story.backend is not None:
        asked += f" → {story.routed_model} at {story.backend}"
        if story.answered_model and story.answered_model != story.routed_model:
            asked += f" → {story.answered_model}"
    status = f", HTTP {story.status}" if story.status is not None else ""
    code = f", {story.error_code}" if story.error_code else ""
    how = f"streamed in {_plural(story.content_chunks, 'chunk')}" if story.stream else "whole"
    sent = f"{_plural(story.content_bytes, 'byte')} of content"
    at = story.opened_at.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    pairs = [
        ("outcome", f"{story.summary}{status}{code}"),
        ("who", who),
        ("model", asked),
        ("when", f"{at} UTC, took {_duration(story.duration_us)}"),
        ("answer", f"{story.surface}, {how}, {sent}"),
        ("trace", f"{story.trace_id}, node {story.node}"),
    ]
    if story.client_request_id:
        pairs.append(("client id", story.client_request_id))
    lines = [f"  {name:<10}{_shortened(clean(text), width - 12)}" for name, text in pairs]
    return _section(f"Request {clean(story.request_id)}", lines, width, color)


def _waterfall(story: Story, width: int, color: bool, ascii_only: bool) -> str:
    names = 28
    room = width - names - 24
    whole = max(
        story.duration_us, *(phase.start_us + phase.duration_us for phase in story.phases), 1
    )
    lines = [f"  {'':<{names}}{'':<{room}}{'from':>10}{'took':>12}"]
    for phase in story.phases:
        label = "  " * phase.depth + clean(phase.name) + (" ~" if phase.is_placed else "")
        bar = _bar(phase, whole, room, ascii_only)
        lines.append(
            f"  {set_cell_size(_shortened(label, names - 1), names)}{bar}"
            f"{_duration(phase.start_us):>10}{_duration(phase.duration_us):>12}"
        )
    if any(phase.is_placed for phase in story.phases):
        lines.append(
            "  ~ durations from the engine, drawn one after the other; sampling is in decode"
        )
    return _section("Where the time went", lines, width, color)


def _bar(phase: Phase, whole: int, room: int, ascii_only: bool) -> str:
    """A bar of eighths of cells; at least one eighth, so that nothing is invisible."""
    start = min(phase.start_us * room // whole, room - 1)
    eighths = phase.duration_us * room * 8 // whole
    full, rest = divmod(eighths, 8)
    full = min(full, room - start)
    if ascii_only:
        blocks = "#" * full or "|"
    else:
        part = " ▏▎▍▌▋▊▉"[rest] if rest and full < room - start else ""
        blocks = "█" * full + part or "▏"
    return f"{'':<{start}}{blocks}".ljust(room)[:room]


def _tokens(attempt: AttemptStory, width: int, color: bool) -> str:
    if not attempt.tokens and not attempt.device:
        return ""
    rows = [(count.meter, f"{count.tokens:,}", "tokens") for count in attempt.tokens]
    rows += [(share.meter, f"{share.device_us:,}", "µs") for share in attempt.device]
    wide = max(len(quantity) for _, quantity, _ in rows)
    lines = [f"  {meter:<30}{quantity:>{wide}} {unit}" for meter, quantity, unit in rows]
    cached = f" ({attempt.cached_tokens:,} cached)" if attempt.cached_tokens else ""
    lines.append(
        f"  in {attempt.input_tokens:,}{cached}, out {attempt.output_tokens:,}; "
        f"{attempt.counted_by}"
    )
    title = f"Attempt {attempt.attempt_no} at {attempt.backend}: what it took"
    return _section(clean(title), lines, width, color)


def _cost(story: Story, width: int, color: bool) -> str:
    charges = [
        (attempt.attempt_no, charge) for attempt in story.attempts for charge in attempt.charges
    ]
    if not charges:
        return _section("Cost", ["  nothing was charged"], width, color)
    prices = _at_the_point([_money(charge.unit_price) for _, charge in charges])
    totals = [plain(cost.amount) for cost in story.costs]
    amounts = _at_the_point([*(_money(charge.amount) for _, charge in charges), *totals])
    table = _cost_table(story, charges, prices, amounts, has_price_column=True)
    text = _text(table, width=400, color=color).rstrip("\n")
    if max(cell_len(Text.from_ansi(line).plain) for line in text.split("\n")) > width:
        table = _cost_table(story, charges, prices, amounts, has_price_column=False)
        text = _text(table, width=400, color=color).rstrip("\n")
    lines = text.split("\n")
    if story.unpriced_lines:
        lines.append(f"  not in the total: {_plural(story.unpriced_lines, 'unpriced line')}")
    return _section("Cost", lines, width, color)


def _cost_table(
    story: Story,
    charges: Sequence[tuple[int, Charge]],
    prices: Sequence[str],
    amounts: Sequence[str],
    *,
    has_price_column: bool,
) -> Table:
    """The lines of the cost. Without room for a column, each price's name goes below its line."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column("  meter", no_wrap=True)
    for title in ("quantity", "unit price", "amount"):
        table.add_column(title, justify="right", no_wrap=True)
    if has_price_column:
        table.add_column("price", no_wrap=True)
    for place, (number, charge) in enumerate(charges):
        quantity_unit, price_unit = _units(charge)
        prefix = f"{number}. " if len(story.attempts) > 1 else ""
        price_id = clean(charge.price_id or "no price is known")
        row = [
            f"  {prefix}{clean(charge.meter)}",
            f"{charge.quantity:,}{quantity_unit}",
            f"{prices[place]}{price_unit}",
            "unpriced" if charge.amount is None else f"{amounts[place]} {charge.currency}",
        ]
        if has_price_column:
            table.add_row(*map(Text, [*row, price_id]))
        else:
            table.add_row(*map(Text, row))
            table.add_row(Text(f"    {price_id}"), style="dim")
    for cost, amount in zip(story.costs, amounts[len(charges) :], strict=True):
        rounded = _rounded(cost.amount, cost.currency)
        row = ["  total", "", "", f"{amount} {cost.currency}"]
        if has_price_column:
            table.add_row(*map(Text, [*row, rounded]), style="bold")
        else:
            table.add_row(*map(Text, [f"  total {rounded}".rstrip(), *row[1:]]), style="bold")
    return table


def _units(charge: Charge) -> tuple[str, str]:
    """What the quantity counts, and what the price is for."""
    if charge.meter.startswith("GPU "):
        return " µs", " /s"
    if charge.unit == 1_000_000:
        return "", " /1M"
    return "", f" /{charge.unit:,}" if charge.unit > 1 else ""


def _rounded(amount: Decimal, currency: str) -> str:
    """Two significant figures, for reading beside the exact amount."""
    if not amount:
        return ""
    digits = amount.adjusted()
    places = max(2, 1 - digits)
    rounded = amount.quantize(Decimal(1).scaleb(-places), rounding=ROUND_HALF_UP)
    return "" if rounded == amount else f"≈ {plain(rounded)} {currency}"


# --- shared


_ASCII = str.maketrans({"→": "->", "–": "-", "µ": "u", "≈": "~", "─": "-", "…": ".", "·": "-"})


def _section(title: str, lines: Iterable[str], width: int, color: bool) -> str:
    body = "\n".join(lines)
    if not body:
        return ""
    title = _shortened(title, width - 4)
    head = f"\x1b[1m{title}\x1b[0m" if color else title
    rule = "─" * max(width - cell_len(title) - 1, 3)
    return f"{head} {rule}\n{body}\n"


def _duration(us: int) -> str:
    if us < 1000:
        return f"{us} µs"
    if us < 1_000_000:
        return f"{us / 1000:.1f} ms"
    return f"{us / 1_000_000:,.3f} s"


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def clean(text: str) -> str:
    """Text that cannot steer a terminal: every unprintable character becomes a mark."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "�" for c in text)


def _shortened(text: str, cells: int) -> str:
    return text if cell_len(text) <= cells else set_cell_size(text, cells - 1).rstrip() + "…"


def inert(value: Any) -> Any:
    """A CSV field that no spreadsheet runs as a formula (OWASP, CSV injection)."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return "" if value is None else value


def _text(table: Table, *, width: int, color: bool) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        color_system="standard" if color else None,
        force_terminal=color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    console.print(table)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def to_json(value: Any) -> str:
    plain_values = _without_decimals(msgspec.to_builtins(value, builtin_types=(Decimal,)))
    return msgspec.json.format(msgspec.json.encode(plain_values), indent=2).decode() + "\n"


def _without_decimals(value: Any) -> Any:
    match value:
        case Decimal():
            return plain(value)
        case dict():
            return {key: _without_decimals(item) for key, item in value.items()}
        case list() | tuple():
            return [_without_decimals(item) for item in value]
        case _:
            return value
