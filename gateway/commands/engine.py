"""`meterline engine …`: hands over to the engine's own program, which is another process and the
only one that loads torch."""

import os
import sys

import click


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def engine(arguments: tuple[str, ...]) -> None:
    """Run an engine by itself: serve, info.

    \b
    Example:
      meterline engine serve --model smollm2-135m-instruct --port 8100
    """
    os.execv(sys.executable, [sys.executable, "-m", "backends.engine", *arguments])  # noqa: S606
