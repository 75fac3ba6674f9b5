"""`meterline explain REQUEST_ID`: one request's story."""

import shutil
import sys
from pathlib import Path

import click

from gateway.commands import Format, Refused, with_format
from gateway.commands.books import OpenBooks, with_books
from gateway.commands.files import config_option
from telemetry.reports.explain import Story
from telemetry.reports.query import explain_record
from telemetry.reports.render import story_json, story_text


@click.command()
@click.argument("request_id")
@config_option
@with_format
def explain(request_id: str, config: Path, form: Format) -> None:
    """Who asked, what was decided, where the time went, and what each part cost.

    REQUEST_ID is the x-request-id of the answer.

    \b
    Example:
      meterline explain 01a22ec7-87bf-7e0b-bc48-5970dcd845b7
    """

    async def told(found: OpenBooks) -> Story | None:
        return await explain_record(found.engine, request_id, await found.tenant_names())

    story = with_books(config, told)
    if story is None:
        raise Refused(
            f"no request {request_id[:80]} in the ledger; one that just ended takes a second"
        )
    if form == "json":
        click.echo(story_json(story), nl=False)
        return
    click.echo(
        story_text(
            story,
            width=shutil.get_terminal_size((100, 40)).columns,
            color=sys.stdout.isatty(),
            ascii_only="utf" not in (sys.stdout.encoding or "").lower(),
        ),
        nl=False,
    )
