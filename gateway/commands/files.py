"""The config file, as every command takes it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from typing_extensions import override

import migrations
from gateway.commands import BadInput, Store
from gateway.config import Config, ConfigInvalid, embedded, load, resolve
from gateway.secrets import peppers
from telemetry.database import DatabaseUrlInvalid, async_url

DEFAULT = Path("meterline.toml")

config_option: Callable[[Any], Any] = click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    default=DEFAULT,
    show_default=True,
    help="The config file. Without one: the bundled model, data in ./meterline-data.",
)


def read_config(path: Path) -> tuple[Config, Path | None]:
    """The file's config, or the embedded one if no file was named and none is there."""
    if path == DEFAULT and not path.exists():
        return embedded(), None
    try:
        return load(path), path
    except ConfigInvalid as error:
        raise ConfigRefused(error.problems) from error


class ConfigRefused(BadInput):
    """One line on stderr for each problem."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))

    @override
    def show(self, file: Any = None) -> None:
        for line in self.message.splitlines():
            click.echo(line, err=True)


def database_url(config: Config) -> str:
    """The resolved URL, with the embedded database brought up to date."""
    try:
        url = resolve(config.database_url, os.environ)
        if async_url(url).startswith("sqlite"):
            migrations.upgrade(url)
    except (ConfigInvalid, DatabaseUrlInvalid) as error:
        raise BadInput(str(error)) from error
    except OSError as error:
        raise BadInput(f"{error.filename or 'the data folder'}: {error.strerror}") from error
    return url


def open_store(path: Path) -> Store:
    """Where tenants and keys are, for the commands that work on them."""
    config, _ = read_config(path)
    try:
        newest, *older = peppers(config, os.environ)
        return Store(database=database_url(config), pepper=newest, older=tuple(older))
    except ConfigInvalid as error:
        raise ConfigRefused(error.problems) from error
