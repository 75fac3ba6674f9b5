"""Secrets: a type that does not show itself, and the last net under everything that is written.

The type is the rule; `mask` is for what slipped past it (an exception's text, a library's log).
"""

import hmac
import re
from typing import Final, NoReturn

from typing_extensions import override

MASK: Final = "***"

_CREDENTIALS = re.compile(
    r"(?P<key>\bsk-(?:ml-|ant-|proj-)?)[A-Za-z0-9_\-]{6,}"
    r"|(?P<bearer>\b[Bb][Ee][Aa][Rr][Ee][Rr]\s+)[A-Za-z0-9._~+/\-]{4,}=*"
    r"|(?P<token>\beyJ)[A-Za-z0-9_\-]{6,}(?:\.[A-Za-z0-9_\-]*){1,2}"
    r"|(?P<scheme>://[^\s:/@\"\\]{0,128}:)[^\s/@\"\\]{1,512}(?=@)"
)


def mask(text: str) -> str:
    """The text without what looks like a key, a bearer token or the password of a URL."""
    if (
        "sk-" not in text
        and "://" not in text
        and "eyJ" not in text
        and "bearer" not in text.lower()
    ):
        return text  # a search for each alternative at each place costs 30 times as much
    return _CREDENTIALS.sub(_masked, text)


def _masked(match: re.Match[str]) -> str:
    kept = match["key"] or match["bearer"] or match["token"] or match["scheme"]
    return f"{kept}{MASK}"


class Secret:
    """A string that prints as `***`. Only `reveal` gives it away, so that its uses can be found."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    @override
    def __repr__(self) -> str:
        return f"Secret({MASK})"

    @override
    def __str__(self) -> str:
        return MASK

    @override
    def __format__(self, spec: str) -> str:
        return format(MASK, spec)

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._value.encode(), other._value.encode())

    @override
    def __hash__(self) -> int:
        return hash(("Secret", self._value))

    @override
    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret is not serialised")
