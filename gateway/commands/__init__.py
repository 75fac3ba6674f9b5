"""What the subcommands of `meterline` share: where the store comes from, how facts are printed,
what an error looks like.

A command works on the database itself; no server need run. The root group puts a `StoreOpener` into
`click`'s context object: it reads the config file that `--config` names and says where the store
is. Invariant: a user's mistake is one line on stderr and an exit code (1: the answer is no,
2: bad input or no store), never a traceback.
"""

import asyncio
import functools
import getpass
import json
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeVar

import click
import msgspec
from msgspec import Struct

from gateway.admins import Admins
from gateway.config import REFERENCE_RULE, ConfigInvalid, resolve
from gateway.errors import Conflict, Forbidden, GatewayError, NotFound, Unauthenticated
from gateway.keys import KeyRing, PepperInvalid, open_pepper
from gateway.roles import Act, Principal
from gateway.tenants import Key, Page, Tenant, Tenants
from telemetry.clock import Clock, SystemClock
from telemetry.database import DatabaseUrlInvalid
from telemetry.money import plain

T = TypeVar("T")
P = ParamSpec("P")
Item = TypeVar("Item", Tenant, Key)
Format = Literal["table", "json"]

DURATION: Final = re.compile(r"([0-9]{1,6})(s|m|h|d)")
UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


class Store(Struct, frozen=True, kw_only=True):
    """Where tenants and keys are."""

    database: str
    pepper: Path | bytes  # the file `key-pepper`, or what a secret reference resolved to
    older: tuple[bytes, ...] = ()  # earlier peppers

    __repr__ = object.__repr__


StoreOpener = Callable[[Path], Store]


class Refused(click.ClickException):
    """The answer is no."""

    exit_code = 1


class BadInput(click.ClickException):
    """The question cannot be asked."""

    exit_code = 2


class Limited(Struct, frozen=True, kw_only=True):
    """A command that is to do no more than an administrator's key may."""

    key: str
    area: str
    act: Act

    __repr__ = object.__repr__

    async def principal(self, admins: Admins, clock: Clock) -> Principal:
        """Raises Unauthenticated, Forbidden."""
        now = datetime.fromtimestamp(clock.now_ns() / 1e9, UTC)
        principal = await admins.identify(self.key, now)
        principal.require(self.area, self.act)
        if self.area == "audit":
            principal.require_all()
        return principal


class Session:
    """One command's access to the store."""

    def __init__(
        self, store: Store, *, actor: str, clock: Clock, limited: Limited | None = None
    ) -> None:
        self.actor = actor
        self.clock = clock
        self._store = store
        self._limited = limited

    def run(self, work: Callable[[Tenants], Awaitable[T]]) -> T:
        """The result of `work` on an open store, which is closed afterwards."""
        return self.administer(lambda tenants, _: work(tenants))

    def administer(self, work: Callable[[Tenants, Admins], Awaitable[T]]) -> T:
        """As `run`, with administrators' keys and the audit log."""

        async def opened() -> T:
            pepper = self._store.pepper
            newest = open_pepper(pepper) if isinstance(pepper, Path) else pepper
            ring = KeyRing(newest, *self._store.older)
            tenants = Tenants.open(self._store.database, ring, self.clock)
            try:
                admins = Admins(tenants, ring)
                if self._limited is None:
                    return await work(tenants, admins)
                seen = tenants.seen_by(await self._limited.principal(admins, self.clock))
                return await work(seen, Admins(seen, ring))
            finally:
                await tenants.close()

        try:
            return asyncio.run(opened())
        except (NotFound, Conflict, Forbidden, Unauthenticated) as error:
            raise Refused(error.message) from error
        except GatewayError as error:
            raise BadInput(error.message) from error
        except (PepperInvalid, DatabaseUrlInvalid) as error:
            raise BadInput(str(error)) from error
        except OSError as error:
            raise BadInput(f"{error.filename or 'data folder'}: {error.strerror}") from error


def with_session(
    command: Callable[Concatenate[Session, P], None],
) -> Callable[P, None]:
    """Adds `--config` and `--as`, and passes the open session first. What a command is about, and
    whether it only reads, are its group's and its own name."""

    @click.option(
        "--as",
        "as_admin",
        metavar="REF",
        help="Do no more than this administrator's key may: env:NAME or file:PATH.",
    )
    @click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        default=Path("meterline.toml"),
        show_default=True,
        help="The gateway's config file.",
    )
    @click.pass_obj
    @functools.wraps(command)
    def wrapped(opener: StoreOpener, /, *args: P.args, **kwargs: P.kwargs) -> None:
        config = kwargs.pop("config")
        assert isinstance(config, Path)
        as_admin = kwargs.pop("as_admin")
        limited = None if as_admin is None else _limited(str(as_admin))
        session = Session(
            opener(config), actor=f"cli:{_user()}", clock=SystemClock(), limited=limited
        )
        command(session, *args, **kwargs)

    return wrapped


def _limited(reference: str) -> Limited:
    try:
        key = resolve(reference, os.environ)
    except ConfigInvalid as error:
        raise BadInput(f"--as: {error}") from error
    if key == reference:
        raise BadInput(f"--as: {REFERENCE_RULE}")
    context = click.get_current_context()
    assert context.parent is not None
    area = context.parent.info_name or ""
    is_reading = context.info_name in ("list", "show")
    return Limited(
        key=key,
        area=area if area == "audit" else f"{area}s",
        act="read" if is_reading else "write",
    )


def with_format(command: Callable[P, None]) -> Callable[P, None]:
    return click.option(
        "--format",
        "form",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="How to print the facts.",
    )(command)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"


async def every(page: Callable[[str | None], Awaitable[Page[Item]]]) -> list[Item]:
    """All items of all pages."""
    items: list[Item] = []
    while True:
        got = await page(items[-1].id if items else None)
        items += got.items
        if not got.has_more:
            return items


def print_items(items: Sequence[Struct], columns: Sequence[str], form: Format) -> None:
    """A JSON array with all fields, or a table of these columns."""
    if form == "json":
        click.echo(json.dumps([msgspec.to_builtins(item) for item in items], indent=2))
        return
    rows = [[_cell(getattr(item, column)) for column in columns] for item in items]
    for line in aligned([[column.upper() for column in columns], *rows]):
        click.echo(line)


def print_item(item: Struct, form: Format, **more: str) -> None:
    """A JSON object with all fields, or a line for each."""
    facts = {**msgspec.to_builtins(item), **more}
    if form == "json":
        click.echo(json.dumps(facts, indent=2))
        return
    cells = {field: getattr(item, field) for field in item.__struct_fields__} | more
    for line in aligned([[field, _cell(value)] for field, value in cells.items()]):
        click.echo(line)


def parse_duration(text: str, option: str) -> timedelta:
    """`90d`, `24h`, `15m`, `30s`; plain 0 too."""
    if text == "0":
        return timedelta(0)
    match = DURATION.fullmatch(text)
    if match is None:
        raise BadInput(f"{option}: {text!r} is not a duration; write 30s, 15m, 24h or 90d")
    return timedelta(**{UNITS[match[2]]: int(match[1])})


def parse_expiry(text: str, now_ns: int, option: str) -> datetime:
    """A duration from now, or an ISO date or time; UTC unless it says otherwise."""
    if DURATION.fullmatch(text):
        now = datetime.fromtimestamp(now_ns // 1_000_000_000, UTC)
        try:
            return now + parse_duration(text, option)
        except OverflowError:
            raise BadInput(f"{option}: {text!r} is too far away") from None
    try:
        return parse_time(text, option)
    except BadInput:
        raise BadInput(
            f"{option}: {text!r} is neither a duration (90d) nor a date (2030-01-31)"
        ) from None


def parse_time(text: str, option: str) -> datetime:
    """An ISO date or time; UTC unless it says otherwise."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise BadInput(f"{option}: {text!r} is no date or time, such as 2030-01-31") from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def parse_labels(pairs: Iterable[str], option: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator:
            raise BadInput(f"{option}: {pair!r} is not KEY=VALUE")
        if key in labels:
            raise BadInput(f"{option}: {key!r} is given twice")
        labels[key] = value
    return labels


def subject_of(given: Mapping[str, str | None]) -> tuple[str, str | None]:
    """The one scope that was named, and its subject; `*` is each of its kind."""
    named = [(scope, subject) for scope, subject in given.items() if subject is not None]
    if len(named) > 1:
        raise BadInput("name one of " + ", ".join(f"--{scope}" for scope in given))
    if not named:
        return "tenant", None
    scope, subject = named[0]
    return scope, None if subject == "*" else subject


def parse_amount(text: str, option: str) -> Decimal:
    try:
        amount = Decimal(text.removeprefix("$"))
    except InvalidOperation:
        raise BadInput(f"{option}: {text!r} is not a number") from None
    return amount


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case Decimal():
            return plain(value)
        case datetime():
            return value.strftime("%Y-%m-%d %H:%M:%SZ")
        case dict():
            return ",".join(f"{key}={text}" for key, text in sorted(value.items())) or "-"
        case list():
            return ",".join(value) or "(none)"
        case _:
            return str(value) or "-"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines in columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
