"""`meterline migrate`: bring the database to the tables of this version."""

import asyncio
import os
from pathlib import Path

import click
from sqlalchemy.exc import SQLAlchemyError

import migrations
from gateway.commands import BadInput
from gateway.commands.files import ConfigRefused, config_option, read_config
from gateway.config import ConfigInvalid, resolve
from telemetry.database import DatabaseUrlInvalid


@click.command()
@config_option
def migrate(config: Path) -> None:
    """Create or update the tables. Safe to run again, and from several places at once.

    \b
    Example:
      meterline migrate --config meterline.toml
    """
    settings, _ = read_config(config)
    try:
        url = resolve(settings.database_url, os.environ)
        asyncio.run(migrations.upgrade_url(url))
    except ConfigInvalid as error:
        raise ConfigRefused(error.problems) from error
    except DatabaseUrlInvalid as error:
        raise BadInput(str(error)) from error
    except (SQLAlchemyError, OSError) as error:
        raise BadInput(
            f"the database cannot be used ({type(error).__name__}): check [store] database"
        ) from error
    click.echo(f"the database is at version {migrations.current_head()}")
