"""`meterline engine …`: hands over to the engine's own program, which is another process and the
only one that loads torch."""

import os
import sys

import click


@click.group()
def engine() -> None:
    """Run an engine by itself, on this machine or another; routes reach it as a backend.

    \b
    Example:
      meterline engine serve --model smollm2-135m-instruct --port 8090
    """


@engine.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(arguments: tuple[str, ...]) -> None:
    """Serve one model over the OpenAI API (`--help` lists the options).

    \b
    Example:
      meterline engine serve --model ./model.gguf --port 8090
    """
    os.execv(sys.executable, [sys.executable, "-m", "backends.engine", *arguments])  # noqa: S606
