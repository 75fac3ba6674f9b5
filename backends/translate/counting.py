"""`count_tokens` where the backend has no such route: an estimate by size, which says so. Pure."""

from collections.abc import Iterator
from typing import Final

from backends import base
from backends.base import ChatRequest, Event, Whole
from backends.translate.common import BYTES_PER_TOKEN, encode
from telemetry.usage import Usage, UsageSource

ESTIMATED: Final = "estimated"


class CountLocally:
    """One request's count. Nothing is sent to the backend, and nothing is billed."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request

    def events(self) -> Iterator[Event]:
        tokens = -(-len(self._request.body) // BYTES_PER_TOKEN)
        data = encode({"input_tokens": tokens, "meterline": {"source": ESTIMATED}})
        yield Whole(data, len(data))
        yield base.Final(
            usage=Usage(),
            usage_source=UsageSource.ESTIMATED,
            answered_model=self._request.model,
        )
