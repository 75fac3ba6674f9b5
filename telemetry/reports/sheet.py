"""A report as a sheet: columns, rows, totals and notes; and the sheet as text, CSV and JSON. Pure.

Reports decide what stands in a sheet, this module how it looks. Money is printed in full, as in all
reports; names that came from a client cannot steer a terminal nor run in a spreadsheet.
"""

import csv
import io
import textwrap
from decimal import Decimal

from msgspec import Struct

from telemetry.reports.render import clean, inert, to_json

Cell = str | int | Decimal | None


class Sheet(Struct, frozen=True, kw_only=True):
    """`columns` name the cells of each row; in CSV and JSON with underscores for spaces."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    totals: tuple[tuple[Cell, ...], ...] = ()
    notes: tuple[str, ...] = ()


def sheet_text(sheet: Sheet, *, width: int = 100) -> str:
    """For a terminal: figures to the right, totals below a rule."""
    body = [[_shown(cell) for cell in row] for row in (*sheet.rows, *sheet.totals)]
    if not body:
        return f"{sheet.title}\n\nnothing in this period\n"
    cells = [list(sheet.columns), *body]
    widths = [max(len(row[place]) for row in cells) for place in range(len(sheet.columns))]
    is_figure = [
        all(not isinstance(row[place], str) for row in sheet.rows)
        for place in range(len(sheet.columns))
    ]
    lines = [
        "  ".join(
            text.rjust(wide) if right else text.ljust(wide)
            for text, wide, right in zip(row, widths, is_figure, strict=True)
        ).rstrip()
        for row in cells
    ]
    rule = "─" * max(len(line) for line in lines)
    lines.insert(1, rule)
    if sheet.totals:
        lines.insert(2 + len(sheet.rows), rule)
    notes = [textwrap.fill(note, width) for note in sheet.notes]
    return "\n".join([sheet.title, "", *lines, *([""] if notes else []), *notes, ""])


def sheet_csv(sheet: Sheet) -> str:
    """One line a row, without totals, so that a spreadsheet may add up what it filters."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_keys(sheet))
    for row in sheet.rows:
        writer.writerow([inert(_flat(cell)) for cell in row])
    return out.getvalue()


def sheet_json(sheet: Sheet) -> str:
    """Everything, money as strings."""
    keys = _keys(sheet)
    return to_json(
        {
            "title": sheet.title,
            "rows": [dict(zip(keys, row, strict=True)) for row in sheet.rows],
            "totals": [dict(zip(keys, row, strict=True)) for row in sheet.totals],
            "notes": list(sheet.notes),
        }
    )


def _keys(sheet: Sheet) -> list[str]:
    return [name.replace(" ", "_") for name in sheet.columns]


def _shown(cell: Cell) -> str:
    match cell:
        case None:
            return "–"
        case str():
            return clean(cell)
        case int():
            return f"{cell:,}"
        case Decimal():
            return f"{cell:,f}"


def _flat(cell: Cell) -> str | int | None:
    return f"{cell:f}" if isinstance(cell, Decimal) else cell
