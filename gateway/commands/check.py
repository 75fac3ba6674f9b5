"""`meterline check FILE`: every problem at once, or the effective config."""

import os
from pathlib import Path

import click
import msgspec

from gateway.commands import Format, with_format
from gateway.commands.files import ConfigRefused
from gateway.config import ConfigInvalid, check_references, load, masked


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default="meterline.toml")
@with_format
def check(file: Path, form: Format) -> None:
    """Check FILE: one line for each problem and exit code 2, or the effective config.

    \b
    Example:
      meterline check meterline.toml
    """
    try:
        config = load(file)
        check_references(config, os.environ)
    except ConfigInvalid as error:
        raise ConfigRefused(error.problems) from error
    facts = masked(config)
    if form == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(facts)).decode())
        return
    for line in _lines(facts, ""):
        click.echo(line)


def _lines(value: object, path: str) -> list[str]:
    """`server.port = 8080`, one line for each value."""
    match value:
        case dict():
            return [
                line
                for key, inner in value.items()
                for line in _lines(inner, f"{path}.{key}" if path else str(key))
            ]
        case list() | tuple():
            return [
                line
                for index, inner in enumerate(value)
                for line in _lines(inner, f"{path}[{index}]")
            ]
        case None:
            return []
        case _:
            return [f"{path} = {msgspec.json.encode(value).decode()}"]
