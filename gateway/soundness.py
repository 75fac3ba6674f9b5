"""What a body must be before a field of it is read: UTF-8, and the same to whoever reads it.

JSON does not say which of two equal keys counts. We read one, a backend might read the other, and
then what was allowed, priced and limited is not what runs: so the fields that decide those may be
there once only. Everything else is the backend's to judge. Pure; makes no copy of the body.
"""

import codecs
import json
from typing import Any

from gateway.errors import BadRequest

DECIDING = frozenset(
    {
        *("model", "stream", "n", "best_of", "user", "safety_identifier", "service_tier"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens"),
    }
)
_QUOTED = tuple(f'"{name}"'.encode() for name in sorted(DECIDING))
_PIECE = 1 << 20


def check(body: bytes) -> None:
    """Raises BadRequest. A body that is not JSON at all is for its decoder to refuse."""
    if not body.isascii():
        _check_utf8(body)
    # Two spellings of one key: twice the same bytes, or one of them with an escaped letter.
    if b"\\u00" in body or any(body.count(quoted) > 1 for quoted in _QUOTED):
        _check_keys(body)


def _check_utf8(body: bytes) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    start = 0
    try:
        for start in range(0, len(body), _PIECE):
            decoder.decode(body[start : start + _PIECE], start + _PIECE >= len(body))
    except UnicodeDecodeError as error:
        at = start - len(decoder.getstate()[0]) + error.start
        raise BadRequest(
            f"The request body is not valid UTF-8 (byte {max(at, 0)}).", code="invalid_json"
        ) from None


class _Top(list[tuple[str, Any]]):
    """The pairs of an object."""


def _check_keys(body: bytes) -> None:
    try:
        pairs = json.loads(body, object_pairs_hook=_Top)
    except (ValueError, RecursionError):
        return
    if not isinstance(pairs, _Top):
        return
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen and name in DECIDING:
            raise BadRequest(
                f"'{name}' is in the body twice: say it once.", param=name, code="duplicate_field"
            )
        seen.add(name)
