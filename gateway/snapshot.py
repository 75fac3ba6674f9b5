"""Known keys over a restart: a file beside the data, for when the database is gone just then.

Must not know what a key may do. Invariants: the file holds HMACs and never a key, is readable by
its owner only, appears whole, and is believed only if this installation's pepper signed it. How old
it may be is for whoever reads it to say.
"""

import hashlib
import logging
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from gateway.keys import KeyRing
from gateway.tenants import Identity

log = logging.getLogger(__name__)

MAX_BYTES = 256_000_000


class Remembered(Struct, frozen=True, kw_only=True):
    """What was known, and when the database last agreed."""

    version: int | None
    synced_ns: int  # Unix time
    keys: list[Identity]

    __repr__ = object.__repr__


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Remembered)


class KeySnapshot:
    """One file."""

    def __init__(self, path: Path, ring: KeyRing) -> None:
        self._path = path
        self._ring = ring

    def write(self, content: Remembered) -> None:
        """Raises OSError."""
        data = _encoder.encode(content)
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(signature_of(self._ring, data) + b"\n" + data)
        draft.replace(self._path)

    def read(self) -> Remembered | None:
        """None where there is none that can be believed."""
        try:
            if self._path.stat().st_size > MAX_BYTES:
                return None
            signature, _, data = self._path.read_bytes().partition(b"\n")
        except OSError:
            return None
        if not self._ring.is_match(_signed(data), _bytes(signature)):
            log.warning("key_snapshot_not_ours", extra={"path": str(self._path)})
            return None
        try:
            return _decoder.decode(data)
        except (msgspec.DecodeError, ValueError):
            return None  # of another version of the gateway


def signature_of(ring: KeyRing, data: bytes) -> bytes:
    """Under the newest pepper."""
    return ring.digest(_signed(data)).hex().encode()


def _signed(data: bytes) -> str:
    return f"key-snapshot:{hashlib.sha256(data).hexdigest()}"


def _bytes(text: bytes) -> bytes:
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return b""
