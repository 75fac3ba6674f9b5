"""What an API key is: its grammar, how one is made, how one is recognised, what it allows.

A key reads `sk-ml-PUBLICID-SECRET`. The public id is 12 random characters and a 6-character tag of
them under the server's pepper, so an id that this installation never made is refused without a
database look-up: a flood of invented keys costs the database nothing. The secret has 238 random
bits and is stored only as HMAC-SHA256 under the pepper, so a copy of the database opens nothing.

Pure but for `open_pepper`. Knows no HTTP and no database. Invariant: no `repr`, log line or error
of anything in here holds a secret.
"""

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Final, get_args

from msgspec import Struct

from telemetry.record import Surface
from telemetry.redaction import Secret

ALPHABET: Final = string.digits + string.ascii_letters  # base 62: 5.95 bits a character
RANDOM_ID_CHARS: Final = 12
TAG_CHARS: Final = 6  # 36 bits: forging one takes 3e10 requests, and wins one look-up
SECRET_CHARS: Final = 40
PEPPER_BYTES: Final = 32
PREFIX: Final = "sk-ml-"
ADMIN_PREFIX: Final = "sk-ml-admin-"  # never matches KEY: the two scopes cannot be confused

PUBLIC_ID: Final = re.compile(rf"[0-9A-Za-z]{{{RANDOM_ID_CHARS + TAG_CHARS}}}")
KEY: Final = re.compile(rf"sk-ml-({PUBLIC_ID.pattern})-[0-9A-Za-z]{{{SECRET_CHARS}}}")
SCOPES: Final = (*get_args(Surface), "models")  # what a key may be narrowed to
ADMIN_KEY: Final = re.compile(rf"{ADMIN_PREFIX}({PUBLIC_ID.pattern})-[0-9A-Za-z]{{{SECRET_CHARS}}}")
MODEL_PATTERN: Final = re.compile(r"[^\s*\x00-\x1f\x7f]{1,255}\*?|\*")

_BLOCK = 64  # bytes; SHA-256, FIPS 180-4
_INNER = bytes(b ^ 0x36 for b in range(256))  # RFC 2104, section 2
_OUTER = bytes(b ^ 0x5C for b in range(256))


class PepperInvalid(ValueError):
    """The pepper cannot be used; the message says what to do."""


class MintedKey(Struct, frozen=True, kw_only=True):
    """A new key: what is stored (`public_id`, `digest`) and what is shown once."""

    public_id: str
    digest: bytes
    secret: Secret


class _Pepper:
    """HMAC with its two key blocks hashed once: 40 % less time than hmac.digest per request."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, pepper: bytes) -> None:
        if len(pepper) != PEPPER_BYTES:
            raise PepperInvalid(f"the key pepper must be {PEPPER_BYTES} bytes, not {len(pepper)}")
        padded = pepper.ljust(_BLOCK, b"\0")
        self._inner = hashlib.sha256(padded.translate(_INNER))
        self._outer = hashlib.sha256(padded.translate(_OUTER))

    def digest(self, text: str) -> bytes:
        inner = self._inner.copy()
        inner.update(text.encode("ascii"))
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.digest()


class KeyRing:
    """Makes keys under the newest pepper, and recognises those of every pepper listed."""

    def __init__(self, pepper: bytes, *older: bytes) -> None:
        self._newest = _Pepper(pepper)
        self._older = tuple(_Pepper(one) for one in older)

    def digest(self, text: str) -> bytes:
        """HMAC-SHA256 of ASCII text under the newest pepper."""
        return self._newest.digest(text)

    def is_match(self, text: str, digest: bytes) -> bool:
        """Whether the digest is this text's, under any pepper, newest first. Constant time for
        each."""
        return hmac.compare_digest(digest, self._newest.digest(text)) or any(
            hmac.compare_digest(digest, old.digest(text)) for old in self._older
        )

    def mint(self, prefix: str = PREFIX) -> MintedKey:
        public_id = _random_text(RANDOM_ID_CHARS)
        public_id += self._tag(public_id)
        text = f"{prefix}{public_id}-{_random_text(SECRET_CHARS)}"
        return MintedKey(public_id=public_id, digest=self.digest(text), secret=Secret(text))

    def made(self, public_id: str) -> bool:
        """Whether this public id can have been made under one of the peppers."""
        random_id, tag = public_id[:RANDOM_ID_CHARS], public_id[RANDOM_ID_CHARS:]
        return any(
            hmac.compare_digest(_tag(pepper, random_id), tag)
            for pepper in (self._newest, *self._older)
        )

    def fingerprint(self) -> bytes:
        """Tells one pepper from another and gives neither away. Stored beside the keys, so that a
        lost or swapped pepper is an error at start and not a 401 for everybody."""
        return self.digest("pepper-check")

    def knows(self, fingerprint: bytes) -> bool:
        """Whether the fingerprint is that of one of the peppers."""
        return self.is_match("pepper-check", fingerprint)

    def _tag(self, random_id: str) -> str:
        return _tag(self._newest, random_id)


def _tag(pepper: _Pepper, random_id: str) -> str:
    number = int.from_bytes(pepper.digest(f"id:{random_id}")[:8], "big")
    return _base62(number, TAG_CHARS)


class ModelAllow:
    """Which models a key may ask for: names, and `prefix*` patterns. None allowed when empty;
    a key without a list (None where one of these stands) may ask for all."""

    __slots__ = ("_names", "_prefixes")

    def __init__(self, patterns: Iterable[str]) -> None:
        texts = list(patterns)
        self._names = frozenset(text for text in texts if not text.endswith("*"))
        self._prefixes = tuple(text[:-1] for text in texts if text.endswith("*"))

    def allows(self, model: str) -> bool:
        return model in self._names or model.startswith(self._prefixes)


def mint_admin_key() -> Secret:
    """An admin key for a first start. Kept by whoever reads it, never in the database."""
    return Secret(ADMIN_PREFIX + _random_text(SECRET_CHARS))


def open_pepper(path: Path) -> bytes:
    """The pepper in this file; makes one (mode 0600) where there is no file.

    Two processes that start at once end up with the same one, and none ever reads half of it: the
    file appears whole, by a hard link of a finished one."""
    with contextlib.suppress(FileNotFoundError):
        return read_pepper(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(PEPPER_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return read_pepper(path)


def read_pepper(path: Path) -> bytes:
    pepper = path.read_bytes()
    if len(pepper) != PEPPER_BYTES:
        raise PepperInvalid(
            f"{path} holds {len(pepper)} bytes and must hold {PEPPER_BYTES}: restore it, or no key "
            "made with it is recognised"
        )
    return pepper


def _random_text(chars: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(chars))


def _base62(number: int, chars: int) -> str:
    text = ""
    for _ in range(chars):
        number, digit = divmod(number, len(ALPHABET))
        text += ALPHABET[digit]
    return text
