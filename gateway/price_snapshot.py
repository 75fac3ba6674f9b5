"""The price book over a restart: a file beside the data, for when the database is gone just then.

Prices are no secret, but they are money: the file is believed only if this installation's pepper
signed it. Must not know what a price is for.
"""

import logging
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from gateway.keys import KeyRing
from gateway.snapshot import signature_of
from telemetry.pricing import Book, Price, PriceBook

log = logging.getLogger(__name__)


class _Saved(Struct, frozen=True, kw_only=True):
    name: str
    version: int
    published_ns: int
    prices: dict[str, list[Price]]


class _File(Struct, frozen=True, kw_only=True):
    catalogues: list[_Saved]
    agreements: list[_Saved]


_decoder = msgspec.json.Decoder(_File)


class PriceSnapshot:
    """One file."""

    def __init__(self, path: Path, ring: KeyRing) -> None:
        self._path = path
        self._ring = ring

    def write(self, book: PriceBook) -> None:
        """Decodes every price: not for an event loop. Raises OSError."""
        content = _File(
            catalogues=[_saved(one) for one in book.catalogues],
            agreements=[_saved(one) for one in book.agreements],
        )
        data = msgspec.json.encode(content)
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        draft.write_bytes(signature_of(self._ring, data) + b"\n" + data)
        draft.replace(self._path)

    def read(self) -> PriceBook | None:
        """None where there is none that can be believed."""
        try:
            signature, _, data = self._path.read_bytes().partition(b"\n")
        except OSError:
            return None
        if signature != signature_of(self._ring, data):
            log.warning("price_snapshot_not_ours", extra={"path": str(self._path)})
            return None
        try:
            found = _decoder.decode(data)
        except (msgspec.DecodeError, ValueError):
            return None  # of another version of the gateway
        return PriceBook(
            catalogues=[_book(one) for one in found.catalogues],
            agreements=[_book(one) for one in found.agreements],
        )


def _saved(book: Book) -> _Saved:
    return _Saved(
        name=book.name,
        version=book.version,
        published_ns=book.published_ns,
        prices={provider: list(book.of(provider)) for provider in book.prices},
    )


def _book(saved: _Saved) -> Book:
    return Book(
        name=saved.name,
        version=saved.version,
        published_ns=saved.published_ns,
        prices=dict(saved.prices),
    )
