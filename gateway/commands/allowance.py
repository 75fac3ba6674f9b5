"""What `meterline limit` and `meterline budget` do alike: list and remove. `Allowances` decides."""

from collections.abc import Awaitable, Callable, Sequence

import click
from msgspec import Struct

from gateway.budgets import Allowances
from gateway.commands import (
    Format,
    Session,
    print_item,
    print_items,
    with_format,
    with_session,
)

EXAMPLE_ID = "019370e0-0000-7000-8000-000000000000"


def add_list_and_remove(
    group: click.Group,
    columns: Sequence[str],
    *,
    found: Callable[[Allowances, str | None], Awaitable[Sequence[Struct]]],
    removed: Callable[[Allowances, str, str], Awaitable[Struct]],
    then: str,
) -> None:
    """`then`: what follows when one is removed."""
    name = group.name

    @group.command(
        name="list",
        help=f"List the {name}s of TENANT, or all.\n\n"
        f"\b\nExample:\n  meterline {name} list acme --format json",
    )
    @click.argument("tenant", required=False)
    @with_format
    @with_session
    def list_(session: Session, tenant: str | None, form: Format) -> None:
        items = session.run(lambda tenants: found(Allowances(tenants), tenant))
        print_items(items, columns, form)

    @group.command(
        name="rm",
        help=f"Remove the {name} ID: then {then}.\n\n"
        f"\b\nExample:\n  meterline {name} rm {EXAMPLE_ID}",
    )
    @click.argument("one_id", metavar="ID")
    @with_format
    @with_session
    def remove(session: Session, one_id: str, form: Format) -> None:
        gone = session.run(lambda tenants: removed(Allowances(tenants), one_id, session.actor))
        print_item(gone, form)
