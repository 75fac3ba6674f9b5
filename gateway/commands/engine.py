"""`meterline engine …`: hands over to the engine's own program, which is another process and the
only one that loads torch."""

import os
import sys
from typing import Any

import click

_PASSED_ON: dict[str, Any] = {
    "context_settings": {"ignore_unknown_options": True, "help_option_names": []},
    "add_help_option": False,
}


@click.group()
def engine() -> None:
    """Run an engine by itself, on this machine or another; routes reach it as a backend.

    \b
    Example:
      meterline engine serve --model smollm2-135m-instruct --port 8090
      meterline engine info
      meterline engine bench --quick
    """


@engine.command(**_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(arguments: tuple[str, ...]) -> None:
    """Serve one model over the OpenAI API (`--help` lists the options).

    \b
    Example:
      meterline engine serve --model ./model.gguf --port 8090
    """
    _become("backends.engine", *arguments)


@engine.command(**_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def info(arguments: tuple[str, ...]) -> None:
    """Say what a model would be computed with here: kernels and why, memory, limits.

    \b
    Example:
      meterline engine info --model ./model.gguf --json
    """
    _become("backends.engine.bench", "info", *arguments)


@engine.command(**_PASSED_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure prefill and decode rates, each beside what this machine allows at most.

    \b
    Example:
      meterline engine bench --quick --json
    """
    _become("backends.engine.bench", "bench", *arguments)


def _become(module: str, *arguments: str) -> None:
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606
