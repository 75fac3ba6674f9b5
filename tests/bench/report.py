"""Bench tables: printed with the machine's facts, and written to bench-results/*.json."""

import os
import platform
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table as RichTable

RESULTS = Path("bench-results")


class Table:
    """Rows of one benchmark."""

    def __init__(self, name: str, columns: list[str]) -> None:
        self.name = name
        self.columns = columns
        self.rows: list[list[Any]] = []

    def add(self, *cells: Any) -> None:
        self.rows.append(list(cells))

    def show(self) -> None:
        """Print, and write the JSON."""
        shown = RichTable(*self.columns, title=self.name)
        for row in self.rows:
            shown.add_row(*(f"{cell:,}" if isinstance(cell, int | float) else cell for cell in row))
        Console().print(shown)
        RESULTS.mkdir(exist_ok=True)
        facts = {
            "machine": machine(),
            "columns": self.columns,
            "rows": self.rows,
        }
        (RESULTS / f"{self.name}.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(facts)) + b"\n"
        )


def machine() -> str:
    """What the numbers were taken on."""
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    load = os.getloadavg()[0]
    return f"{model}, {os.cpu_count()} CPUs, Python {platform.python_version()}, load {load:.1f}"
