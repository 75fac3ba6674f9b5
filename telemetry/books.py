"""Price books in the database: published once, immutable, read into a `PriceBook`.

Two books are kept by themselves. "genai-prices" holds the public lists of the installed package of
that name (MIT), turned into our rows once per version of the package; "config" holds what
`meterline.toml` says about agreed prices and owned hardware, a new version whenever that changes.
An operator may import others (`telemetry.catalogues`). They start as drafts, which price nothing
until they are published. A published row is never updated or deleted: a correction is a new
version. Books of an operator's own are asked first, in order of their names, then LiteLLM's map,
then genai-prices. Importing the package costs half a second and is avoided when its version is
already in the database.

Of the public lists, time-of-day prices are not modelled: where a model has them, the dearer price
of each meter applies at all hours, and the seed reports the model. Units other than tokens and
requests (audio hours, pages, searches) are left out and counted.
"""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, time
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from importlib.metadata import version as installed_version
from typing import Any, Protocol

from msgspec import Struct, structs
from sqlalchemy import Connection, event, func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.orm import Mapper, ORMExecuteState, Session

from telemetry.money import PRICE_SCALE, plain
from telemetry.pricing import MILLION, Book, Meter, Price, PriceBook, gpu_second
from telemetry.tables import PriceBookRow, PriceRow

log = logging.getLogger(__name__)

CATALOGUE = "genai-prices"
CONFIG = "config"
LITELLM = "litellm"
DRAFT, PUBLISHED = "draft", "published"
CONVERTER = 1  # raise it when the same package would be turned into other rows

_METERS = {
    "input_mtok": Meter.INPUT,
    "cache_read_mtok": Meter.CACHE_READ,
    "cache_write_mtok": Meter.CACHE_WRITE,
    "cache_write_5m_mtok": Meter.CACHE_WRITE,
    "cache_write_1h_mtok": Meter.CACHE_WRITE_1H,
    "input_audio_mtok": Meter.AUDIO_INPUT,
    "input_image_mtok": Meter.IMAGE_INPUT,
    "input_video_mtok": Meter.VIDEO_INPUT,
    "output_mtok": Meter.OUTPUT,
    "output_reasoning_mtok": Meter.REASONING,
    "output_audio_mtok": Meter.AUDIO_OUTPUT,
    "output_image_mtok": Meter.IMAGE_OUTPUT,
    "requests_kcount": Meter.REQUESTS,
}
_PATTERN_LIMIT = 256  # the column's width
_LISTS = (LITELLM, CATALOGUE)
_HEADS: Any = PriceBookRow.__table__


class BookUnknown(LookupError):
    """There is no such book or version; the message names what there is."""


class BookRefused(ValueError):
    """The book cannot be published; the message says why."""


class PublishedBookImmutable(Exception):
    """Someone tried to change a published price. Publish a new version instead."""


class TokenPriceLike(Protocol):
    """Prices per 1 M tokens as `[[backends]] price` has them."""

    @property
    def input(self) -> Decimal: ...
    @property
    def output(self) -> Decimal: ...
    @property
    def cached_input(self) -> Decimal | None: ...


class GpuLike(Protocol):
    """Owned hardware as `[[backends]] gpu` and `[[engines]] gpu` have it."""

    @property
    def rate_per_hour(self) -> Decimal: ...
    @property
    def count(self) -> int: ...


class BackendPrices(Struct, frozen=True):
    """One backend's price facts of the config."""

    name: str
    provider: str
    price: TokenPriceLike | None = None
    gpu: GpuLike | None = None


class Entry(Struct, frozen=True, kw_only=True, gc=False):
    """A price before it is published: `Price` without the ids that publishing gives."""

    provider: str
    model: str
    match: str
    priority: int
    meter: str
    min_input_tokens: int
    unit: int
    unit_price: Decimal
    effective_from: datetime | None = None
    effective_to: datetime | None = None
    currency: str = "USD"
    service_tier: str = ""
    list_unit_price: Decimal | None = None


class Catalogue(Struct, frozen=True, kw_only=True):
    """The public lists as entries, and what could not be carried over one to one."""

    entries: tuple[Entry, ...]
    quantised: tuple[str, ...] = ()  # prices with more than 9 decimals, rounded half up
    time_of_day: tuple[str, ...] = ()  # models whose dearer price applies at all hours
    skipped: dict[str, int] = {}  # what was left out → how often


class Head(Struct, frozen=True, kw_only=True):
    """What a book says about itself."""

    label: str  # name@version
    name: str
    version: int
    status: str
    published_at: datetime  # of a draft: when it was imported
    source: str
    prices: int


class Change(Struct, frozen=True, kw_only=True):
    """One price that two books do not agree on; None: the book does not have it."""

    provider: str
    model: str
    meter: str
    service_tier: str
    min_input_tokens: int
    effective_from: datetime | None
    before: Decimal | None
    after: Decimal | None


class Published(Struct, frozen=True, kw_only=True):
    """What publishing did. `is_new` false: the book already said so."""

    label: str
    is_new: bool
    prices: int = 0
    added: int = 0
    removed: int = 0
    changed: int = 0
    examples: tuple[str, ...] = ()
    quantised: tuple[str, ...] = ()
    time_of_day: tuple[str, ...] = ()
    skipped: dict[str, int] = {}


async def seed_from_genai_prices(db: AsyncEngine, now: datetime) -> Published:
    """Publish the installed package's lists, unless the newest version already holds them."""
    source = f"{CATALOGUE} {installed_version('genai-prices')}, converter {CONVERTER}"
    newest = await _newest(db, CATALOGUE)
    if newest is not None and newest.source == source:
        return Published(label=f"{CATALOGUE}@{newest.version}", is_new=False)
    catalogue = catalogue_of_genai_prices()
    published = await publish(db, CATALOGUE, catalogue.entries, source=source, now=now)
    report = structs.replace(
        published,
        quantised=catalogue.quantised,
        time_of_day=catalogue.time_of_day,
        skipped=catalogue.skipped,
    )
    if report.is_new:
        log.info(
            "price book published",
            extra={
                "book": report.label,
                "prices": report.prices,
                "quantised": len(report.quantised),
                "time_of_day": len(report.time_of_day),
            },
        )
    return report


async def publish_config_prices(
    db: AsyncEngine, backends: Iterable[BackendPrices], now: datetime
) -> Published | None:
    """Publish what the config says of prices and hardware, effective from `now`. None: it says
    nothing and never has."""
    notes = Notes()
    entries = [entry for backend in backends for entry in _config_entries(backend, notes)]
    entries.sort(key=lambda entry: (entry.provider, entry.meter))
    newest = await _newest(db, CONFIG)
    if not entries and newest is None:
        return None
    published = await publish(db, CONFIG, entries, source="meterline.toml", now=now)
    return structs.replace(published, quantised=tuple(notes.quantised))


async def publish(
    db: AsyncEngine, name: str, entries: Sequence[Entry], *, source: str, now: datetime
) -> Published:
    """Add a version of a book, in one transaction, unless its newest version says the same.
    When two processes publish at once, one of them wins and both return its version."""
    return await _add(db, name, entries, source=source, now=now, status=PUBLISHED)


async def draft(
    db: AsyncEngine, name: str, entries: Sequence[Entry], *, source: str, now: datetime
) -> Published:
    """Add a version that prices nothing until `publish_draft`. The counts compare it with the
    newest published version."""
    return await _add(db, name, entries, source=source, now=now, status=DRAFT)


async def publish_draft(db: AsyncEngine, label: str, now: datetime) -> Head:
    """From now on the draft prices what is settled. Raises BookUnknown, BookRefused."""
    head = await find(db, label)
    if head.status != DRAFT:
        raise BookRefused(f"{head.label} is published already")
    newest = await _newest(db, head.name)
    if newest is not None and newest.version > head.version:
        raise BookRefused(
            f"{head.name}@{newest.version} was published after {head.label} was imported: "
            "import again to see what differs"
        )
    async with db.begin() as connection:
        changed = await connection.execute(
            update(_HEADS)
            .where(_HEADS.c.book_id == head.label, _HEADS.c.status == DRAFT)
            .values(status=PUBLISHED, published_at=now)
        )
        if changed.rowcount != 1:
            raise BookRefused(f"{head.label} was published by somebody else just now")
    return structs.replace(head, status=PUBLISHED, published_at=now)


async def heads(db: AsyncEngine) -> list[Head]:
    """Every version of every book, newest of each name first."""
    counts = (
        select(PriceRow.book_id, func.count().label("prices")).group_by(PriceRow.book_id).subquery()
    )
    statement = select(_HEADS, func.coalesce(counts.c.prices, 0).label("prices")).join(
        counts, counts.c.book_id == _HEADS.c.book_id, isouter=True
    )
    async with db.connect() as connection:
        rows = (await connection.execute(statement)).all()
    found = [
        Head(
            label=row.book_id,
            name=row.name,
            version=row.version,
            status=row.status,
            published_at=row.published_at,
            source=row.source,
            prices=row.prices,
        )
        for row in rows
    ]
    return sorted(found, key=lambda head: (head.name, -head.version))


async def find(db: AsyncEngine, label: str) -> Head:
    """`name@3`, or `name` for its newest published version. Raises BookUnknown."""
    name, _, version = label.partition("@")
    of_name = [head for head in await heads(db) if head.name == name]
    for head in of_name:
        if str(head.version) == version or (not version and head.status == PUBLISHED):
            return head
    have = ", ".join(head.label for head in of_name[:5]) or "no version of it"
    raise BookUnknown(f"no price book {label}: there is {have}")


async def entries_of(db: AsyncEngine, head: Head) -> list[Entry]:
    """The prices of one version."""
    return await _entries(db, head.label)


async def _add(
    db: AsyncEngine,
    name: str,
    entries: Sequence[Entry],
    *,
    source: str,
    now: datetime,
    status: str,
) -> Published:
    digest = _sha256(entries)
    for _ in range(3):
        # Read first: whoever publishes between the two reads is seen by the second one, and
        # whoever publishes after it takes this number, so that the insert below fails.
        number = 1 + await _last_version(db, name)
        newest = await _newest(db, name)
        if newest is not None and newest.sha256 == digest:
            return Published(label=f"{name}@{newest.version}", is_new=False)
        if status == DRAFT and (same := await _draft_of(db, name, digest)) is not None:
            return Published(label=same, is_new=False)
        try:
            async with db.begin() as connection:
                await connection.execute(
                    insert(PriceBookRow).values(
                        book_id=f"{name}@{number}",
                        name=name,
                        version=number,
                        published_at=now,
                        source=source,
                        sha256=digest,
                        status=status,
                    )
                )
                if entries:
                    await connection.execute(insert(PriceRow), _rows(name, number, entries))
        except IntegrityError:
            continue
        old = [] if newest is None else await _entries(db, newest.book_id)
        return _difference(f"{name}@{number}", old, entries)
    raise RuntimeError(f"price book {name!r} could not be published: others keep publishing it")


async def published_count(db: AsyncEngine) -> int:
    """How many versions are published. It only grows: whoever sees it change loads again."""
    async with db.connect() as connection:
        found = await connection.scalar(
            select(func.count()).select_from(_HEADS).where(_HEADS.c.status == PUBLISHED)
        )
        return int(found or 0)


async def load(db: AsyncEngine) -> PriceBook:
    """Read the newest published version of each list, and every version of the config's book,
    since each attempt is priced by the one that held when it started."""
    async with db.connect() as connection:
        found = (await connection.execute(select(_HEADS).where(_HEADS.c.status == PUBLISHED))).all()
        newest = {head.name: head.version for head in sorted(found, key=lambda head: head.version)}
        wanted = [
            head for head in found if head.name == CONFIG or head.version == newest[head.name]
        ]
        books = [await _book(connection, head) for head in sorted(wanted, key=_precedence)]
    return PriceBook(
        catalogues=[book for book in books if book.name != CONFIG],
        agreements=[book for book in books if book.name == CONFIG],
    )


async def load_with(db: AsyncEngine, label: str) -> PriceBook:
    """As `load`, with one version of one book in force before the other lists: what re-rating asks.
    A draft may be asked too. Prices agreed in the config go on winning over every list; a version
    of the config's own book is in force at all times."""
    head = await find(db, label)
    current = await load(db)
    async with db.connect() as connection:
        row = (await connection.execute(select(_HEADS).where(_HEADS.c.book_id == head.label))).one()
        chosen = await _book(connection, row)
    if head.name == CONFIG:
        always = structs.replace(chosen, published_ns=0)
        return PriceBook(catalogues=current.catalogues, agreements=[always])
    others = [book for book in current.catalogues if book.name != head.name]
    return PriceBook(catalogues=[chosen, *others], agreements=current.agreements)


async def _book(connection: AsyncConnection, head: Any) -> Book:
    columns = (
        PriceRow.price_id,
        PriceRow.provider,
        PriceRow.model,
        PriceRow.match,
        PriceRow.priority,
        PriceRow.meter,
        PriceRow.min_input_tokens,
        PriceRow.unit,
        PriceRow.unit_price,
        PriceRow.currency,
        PriceRow.effective_from,
        PriceRow.effective_to,
        PriceRow.service_tier,
    )
    rows = await connection.execute(
        select(*columns).where(PriceRow.book_id == head.book_id).order_by(PriceRow.price_id)
    )
    by_provider: dict[str, list[Any]] = {}
    for row in rows.all():
        by_provider.setdefault(row[1], []).append(row)
    return Book(
        name=head.name,
        version=head.version,
        published_ns=_ns(head.published_at),
        prices={provider: partial(_prices, found) for provider, found in by_provider.items()},
    )


def _precedence(head: Any) -> tuple[int, str]:
    """An operator's own books are asked before the public lists."""
    return ((LITELLM, CATALOGUE).index(head.name) + 1 if head.name in _LISTS else 0), head.name


def catalogue_of_genai_prices() -> Catalogue:
    """Convert the installed package's data. Imports it: half a second."""
    from genai_prices.data import providers

    by_id = {provider.id: provider for provider in providers}
    entries: list[Entry] = []
    notes = Notes()
    for provider in providers:
        models = list(provider.models)
        # A provider that resells others' models: its own list first, then theirs, as the package
        # looks them up. Materialised, so that a stored book needs no second rule.
        for other in provider.fallback_model_providers or ():
            models.extend(by_id[other].models if other in by_id else ())
        for priority, model in enumerate(models):
            clauses = list(_clauses(model.match, notes, f"{provider.id}/{model.id}"))
            for start, end, prices in _periods(model, notes, f"{provider.id}/{model.id}"):
                for key, value in prices.items():
                    for first_token, price in _tiers(value):
                        unit_price = notes.quantise(price, f"{provider.id}/{model.id} {key}")
                        for match, pattern in clauses:
                            entries.append(
                                Entry(
                                    provider=provider.id,
                                    model=pattern,
                                    match=match,
                                    priority=priority,
                                    meter=_METERS[key].value,
                                    min_input_tokens=first_token,
                                    unit=1000 if key == "requests_kcount" else MILLION,
                                    unit_price=unit_price,
                                    effective_from=start,
                                    effective_to=end,
                                )
                            )
    return Catalogue(
        entries=tuple(entries),
        quantised=tuple(dict.fromkeys(notes.quantised)),
        time_of_day=tuple(dict.fromkeys(notes.time_of_day)),
        skipped=dict(notes.skipped),
    )


class Notes:
    """What the conversion could not carry over."""

    def __init__(self) -> None:
        self.quantised: list[str] = []
        self.time_of_day: list[str] = []
        self.skipped: Counter[str] = Counter()

    def quantise(self, price: Decimal, where: str) -> Decimal:
        rounded = price.quantize(PRICE_SCALE, rounding=ROUND_HALF_UP)
        if rounded != price:
            self.quantised.append(f"{where}: {price} is stored as {plain(rounded)}")
        return rounded


def _clauses(match: Any, notes: Notes, where: str) -> Iterator[tuple[str, str]]:
    """A match rule as (match, pattern) pairs, any of which suffices."""
    kind = type(match).__name__
    if kind == "ClauseOr":
        for inner in match.or_:
            yield from _clauses(inner, notes, where)
        return
    pattern: str
    if kind == "ClauseAnd":
        name, pattern = "regex", "".join(f"(?=.*(?:{_regex(inner)}))" for inner in match.and_)
        pattern = f"^{pattern}"
    elif kind == "ClauseRegex":
        name, pattern = "regex", match.regex
    else:
        name = {
            "ClauseEquals": "equals",
            "ClauseStartsWith": "starts_with",
            "ClauseEndsWith": "ends_with",
            "ClauseContains": "contains",
        }[kind]
        pattern = str(getattr(match, name)).lower()
    if len(pattern) > _PATTERN_LIMIT:
        notes.skipped[f"pattern too long: {where}"] += 1
        return
    yield name, pattern


def _regex(match: Any) -> str:
    """A rule as one regular expression over the lower-case name, for rules that must all hold."""
    kind = type(match).__name__
    if kind == "ClauseOr":
        return "|".join(f"(?:{_regex(inner)})" for inner in match.or_)
    if kind == "ClauseAnd":
        return "^" + "".join(f"(?=.*(?:{_regex(inner)}))" for inner in match.and_)
    if kind == "ClauseRegex":
        return str(match.regex)
    if kind == "ClauseEquals":
        return f"^{re.escape(match.equals.lower())}$"
    if kind == "ClauseStartsWith":
        return f"^{re.escape(match.starts_with.lower())}"
    if kind == "ClauseEndsWith":
        return f"{re.escape(match.ends_with.lower())}$"
    return re.escape(str(match.contains).lower())


def _periods(
    model: Any, notes: Notes, where: str
) -> Iterator[tuple[datetime | None, datetime | None, dict[str, Any]]]:
    """The prices of a model as periods that follow each other without gap or overlap."""
    if not isinstance(model.prices, list):
        yield None, None, _known(model.prices, notes)
        return
    starts = sorted(
        {c.constraint.start_date for c in model.prices if hasattr(c.constraint, "start_date")}
    )
    edges: list[date | None] = [None, *starts]
    periods: list[tuple[date | None, dict[str, Any]]] = []
    for edge in edges:
        prices = _known_at(model, edge, notes, where)
        if not periods or periods[-1][1] != prices:
            periods.append((edge, prices))
    for index, (edge, prices) in enumerate(periods):
        end = periods[index + 1][0] if index + 1 < len(periods) else None
        yield _midnight(edge), _midnight(end), prices


def _known_at(model: Any, day: date | None, notes: Notes, where: str) -> dict[str, Any]:
    """The prices that hold on a day: the last condition that is met; the dearer of it and any
    time-of-day price that would take precedence at some hour."""
    base: dict[str, Any] | None = None
    hourly: list[dict[str, Any]] = []
    for condition in reversed(model.prices):
        constraint = condition.constraint
        if hasattr(constraint, "start_time"):
            notes.time_of_day.append(where)
            hourly.append(_known(condition.prices, notes))
            continue
        if constraint is None or (day is not None and day >= constraint.start_date):
            base = _known(condition.prices, notes)
            break
    if base is None:  # nothing applies yet: the first price, as the package does
        base = _known(model.prices[0].prices, notes)
    for prices in hourly:
        for key, value in prices.items():
            if key not in base or _ceiling(value) > _ceiling(base[key]):
                base = {**base, key: value}
    return base


def _known(prices: Any, notes: Notes) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for key, value in vars(prices).items():
        if value is None or key.startswith("_"):
            continue
        if key in _METERS:
            known[key] = value
        else:
            notes.skipped[key] += 1
    if "cache_write_5m_mtok" in known:
        known.pop("cache_write_mtok", None)
    return known


def _tiers(value: Any) -> list[tuple[int, Decimal]]:
    """(from how many input tokens, price). The package's tier starts above `start`."""
    if isinstance(value, Decimal):
        return [(0, value)]
    return [(0, value.base), *((tier.start + 1, tier.price) for tier in value.tiers)]


def _ceiling(value: Any) -> Decimal:
    return max(price for _, price in _tiers(value))


def _config_entries(backend: BackendPrices, notes: Notes) -> Iterator[Entry]:
    prices: list[tuple[Meter, Decimal]] = []
    if backend.price is not None:
        prices += [(Meter.INPUT, backend.price.input), (Meter.OUTPUT, backend.price.output)]
        if backend.price.cached_input is not None:
            prices.append((Meter.CACHE_READ, backend.price.cached_input))
    if backend.gpu is not None:
        second = gpu_second(backend.gpu.rate_per_hour, backend.gpu.count)
        prices.append((Meter.GPU_TIME, second))
    for meter, price in prices:
        yield Entry(
            provider=f"@{backend.name}",
            model="",
            match="any",
            priority=0,
            meter=meter.value,
            min_input_tokens=0,
            unit=MILLION,
            unit_price=notes.quantise(price, f"backend {backend.name}, {meter.value}"),
        )


def _rows(name: str, number: int, entries: Sequence[Entry]) -> list[dict[str, Any]]:
    return [
        {
            "price_id": f"{name}@{number}/{index:05d}",
            "book_id": f"{name}@{number}",
            **structs.asdict(entry),
        }
        for index, entry in enumerate(entries)
    ]


def _sha256(entries: Iterable[Entry]) -> str:
    digest = hashlib.sha256()
    for entry in entries:
        # What came later is left out where it says nothing, so that older digests still hold.
        fields = structs.astuple(entry)
        if not entry.service_tier and entry.list_unit_price is None:
            fields = fields[:-2]
        # plain text with separators that no field contains, so that the digest of equal prices is
        # equal on any machine and release
        digest.update("\x1f".join(map(str, fields)).encode())
        digest.update(b"\x1e")
    return digest.hexdigest()


async def _newest(db: AsyncEngine, name: str) -> PriceBookRow | Any | None:
    async with db.connect() as connection:
        found = await connection.execute(
            select(PriceBookRow.__table__)
            .where(PriceBookRow.name == name, PriceBookRow.status == PUBLISHED)
            .order_by(PriceBookRow.version.desc())
            .limit(1)
        )
        return found.first()


async def _draft_of(db: AsyncEngine, name: str, digest: str) -> str | None:
    """The draft that says just this, if it may still be published."""
    newest = await _newest(db, name)
    async with db.connect() as connection:
        found: str | None = await connection.scalar(
            select(PriceBookRow.book_id)
            .where(
                PriceBookRow.name == name,
                PriceBookRow.sha256 == digest,
                PriceBookRow.status == DRAFT,
                PriceBookRow.version > (0 if newest is None else newest.version),
            )
            .limit(1)
        )
        return found


async def _last_version(db: AsyncEngine, name: str) -> int:
    """The highest number given, drafts included."""
    async with db.connect() as connection:
        found = await connection.scalar(
            select(func.max(PriceBookRow.version)).where(PriceBookRow.name == name)
        )
        return int(found or 0)


async def _entries(db: AsyncEngine, book_id: str) -> list[Entry]:
    columns = [getattr(PriceRow, field) for field in Entry.__struct_fields__]
    async with db.connect() as connection:
        rows = await connection.execute(select(*columns).where(PriceRow.book_id == book_id))
        return [Entry(**row._mapping) for row in rows.all()]


def changes(old: Iterable[Entry], new: Iterable[Entry]) -> list[Change]:
    """Each price that came, went or changed, ordered by provider and model."""

    def keyed(entries: Iterable[Entry]) -> dict[tuple[Any, ...], Entry]:
        return {
            (
                *(e.provider, e.model, e.match, e.meter, e.service_tier, e.min_input_tokens),
                e.effective_from,
            ): e
            for e in entries
        }

    before, after = keyed(old), keyed(new)
    found = []
    for key in sorted({*before, *after}, key=str):
        was, now = before.get(key), after.get(key)
        if was is not None and now is not None and was.unit_price == now.unit_price:
            continue
        entry = now or was
        assert entry is not None
        found.append(
            Change(
                provider=entry.provider,
                model=entry.model,
                meter=entry.meter,
                service_tier=entry.service_tier,
                min_input_tokens=entry.min_input_tokens,
                effective_from=entry.effective_from,
                before=None if was is None else was.unit_price,
                after=None if now is None else now.unit_price,
            )
        )
    return found


def _difference(label: str, old: Iterable[Entry], new: Sequence[Entry]) -> Published:
    """Counts of prices that came, went and changed, with a few examples to read."""
    found = changes(old, new)
    changed = [c for c in found if c.before is not None and c.after is not None]
    return Published(
        label=label,
        is_new=True,
        prices=len(new),
        added=sum(c.before is None for c in found),
        removed=sum(c.after is None for c in found),
        changed=len(changed),
        examples=tuple(
            f"{c.provider} {c.model} {c.meter}: "
            f"{plain(c.before or Decimal(0))} → {plain(c.after or Decimal(0))}"
            for c in changed[:20]
        ),
    )


def _prices(rows: Iterable[Any]) -> list[Price]:
    return [
        Price(
            price_id=row[0],
            provider=row[1],
            model=row[2],
            match=row[3],
            priority=row[4],
            meter=row[5],
            min_input_tokens=row[6],
            unit=row[7],
            unit_price=row[8],
            currency=row[9],
            effective_from_ns=None if row[10] is None else _ns(row[10]),
            effective_to_ns=None if row[11] is None else _ns(row[11]),
            service_tier=row[12],
        )
        for row in rows
    ]


def _ns(at: datetime) -> int:
    delta = at - datetime(1970, 1, 1, tzinfo=UTC)
    return ((delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds) * 1000


def _midnight(day: date | None) -> datetime | None:
    return None if day is None else datetime.combine(day, time(), tzinfo=UTC)


def _refuse_change(_mapper: Mapper[Any], _connection: Connection, row: Any) -> None:
    raise PublishedBookImmutable(
        f"{type(row).__name__}: published prices are never changed; publish a new version"
    )


def _refuse_bulk_change(state: ORMExecuteState) -> None:
    if (state.is_update or state.is_delete) and any(
        mapper.class_ in (PriceBookRow, PriceRow) for mapper in state.all_mappers
    ):
        raise PublishedBookImmutable("published prices are never changed; publish a new version")


for _row_class in (PriceBookRow, PriceRow):
    event.listen(_row_class, "before_update", _refuse_change)
    event.listen(_row_class, "before_delete", _refuse_change)
event.listen(Session, "do_orm_execute", _refuse_bulk_change)
