"""`meterline backend …`: take backends or single servers out of service and back. `Drains` decides.
Works on the database; every running replica obeys within a second."""

import click

from gateway.commands import Format, Session, print_item, print_items, with_format, with_session
from gateway.drains import Drains

COLUMNS = ("backend", "endpoint", "since")


@click.group(name="backend")
def backend() -> None:
    """Drain and resume backends. What runs there ends by itself; nothing new goes there.

    \b
    Example:
      meterline backend drain vllm --server 10.0.0.7:8000
      meterline backend list
      meterline backend resume vllm --server 10.0.0.7:8000
    """


@backend.command(name="drain")
@click.argument("name")
@click.option("--server", default="", metavar="HOST:PORT", help="Only this one of its servers.")
@with_format
@with_session
def drain(session: Session, name: str, server: str, form: Format) -> None:
    """Take NAME, or one of its servers, out of service.

    \b
    Example:
      meterline backend drain vllm
    """
    made = session.run(lambda tenants: Drains(tenants).drain(name, server, actor=session.actor))
    print_item(made, form)


@backend.command(name="resume")
@click.argument("name")
@click.option("--server", default="", metavar="HOST:PORT", help="Only this one of its servers.")
@with_session
def resume(session: Session, name: str, server: str) -> None:
    """Put NAME, or one of its servers, back into service. Exit 1: it was not out of it.

    \b
    Example:
      meterline backend resume vllm
    """
    ended = session.run(lambda tenants: Drains(tenants).resume(name, server, actor=session.actor))
    if ended is None:
        raise click.exceptions.Exit(1)


@backend.command(name="list")
@with_format
@with_session
def list_(session: Session, form: Format) -> None:
    """What is out of service.

    \b
    Example:
      meterline backend list --format json
    """
    print_items(session.run(lambda tenants: Drains(tenants).all()), COLUMNS, form)
