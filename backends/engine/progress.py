"""How far loading is: a bar for people, lines for logs, a number for whoever asks.

Written by the loading thread, read by any other. The bar is only drawn on a terminal; elsewhere a
line is written now and then, and nothing at all where loading is over at once.
"""

import sys
from typing import TYPE_CHECKING, TextIO

from telemetry.clock import Clock

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_FIRST_LINE_S = 2.0
_LINE_S = 5.0


class Loading:
    """`percent` is that of the weights read and laid out."""

    def __init__(self, name: str, clock: Clock, *, out: TextIO | None = None) -> None:
        self._name = name
        self._clock = clock
        self._out = sys.stderr if out is None else out
        self._said_ns = clock.monotonic_ns() + round((_FIRST_LINE_S - _LINE_S) * 1e9)
        self._bar: tuple[Progress, TaskID] | None = None
        self.percent = 0

    def at(self, part: float) -> None:
        """From 0 to 1; 1 ends it."""
        self.percent = min(100, int(part * 100))
        if self._out.isatty():
            self._draw(part)
            return
        now_ns = self._clock.monotonic_ns()
        if part < 1 and now_ns - self._said_ns >= _LINE_S * 1e9:
            self._said_ns = now_ns
            self._out.write(f"meterline engine: {self._name} is loading, {self.percent} %\n")
            self._out.flush()

    def _draw(self, part: float) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            bar = Progress(console=Console(file=self._out), transient=True)
            self._bar = bar, bar.add_task(f"loading {self._name}", total=1.0)
            bar.start()
        bar, task = self._bar
        bar.update(task, completed=part)
        if part >= 1:
            bar.stop()
            self._bar = None
