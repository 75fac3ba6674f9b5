"""How long a client says that it waits, from its headers. Pure.

What the SDKs send: `x-stainless-timeout` is the whole call; `x-stainless-read-timeout` is the
longest silence, which for an answer in one piece is the same. `x-request-timeout` is the common
name of others. Invariant: a value that makes no sense is as if it was not sent."""

from collections.abc import Iterable
from typing import Final

_TOTAL: Final = frozenset({b"x-request-timeout", b"x-stainless-timeout"})
_SILENCE: Final = b"x-stainless-read-timeout"
LEAST_S: Final = 0.05
_MARGIN: Final = 0.05  # of it, at most MARGIN_S: the client should get our answer before it leaves
MARGIN_S: Final = 0.5


def client_timeout_s(headers: Iterable[tuple[bytes, bytes]], *, stream: bool) -> float | None:
    """The seconds that are ours to answer in; None: the client did not say. `headers` as ASGI
    gives them. Of several, the shortest."""
    found: float | None = None
    for name, value in headers:
        if name in _TOTAL or (name == _SILENCE and not stream):
            seconds = _seconds(value)
            if seconds is not None and (found is None or seconds < found):
                found = seconds
    if found is None:
        return None
    return max(found - min(found * _MARGIN, MARGIN_S), LEAST_S)


def _seconds(value: bytes) -> float | None:
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if 0 < seconds < 1e9 else None
