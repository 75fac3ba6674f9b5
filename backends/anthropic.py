"""Any server that speaks Anthropic's messages API: the vendor, and what is compatible with it.

The bytes are carried by the same code that carries OpenAI's (`openai_compat`), so time-outs, limits
and what is never shown are the same; `readers.MessagesReader` reads its events. Only the credential
and the version header differ. Requests of other APIs arrive here translated (`translate`).
"""

from typing import Final

from msgspec import structs
from typing_extensions import override

from backends.base import ChatRequest
from backends.openai_compat import OpenAICompatible
from backends.settings import BackendSettings
from backends.transport import Client, Header, Request
from telemetry.clock import Clock
from telemetry.usage import from_anthropic

VERSION: Final = (b"anthropic-version", b"2023-06-01")  # where the client says none


class Anthropic(OpenAICompatible):
    """One upstream with `x-api-key` and `anthropic-version`."""

    def __init__(
        self,
        settings: BackendSettings,
        api_key: str | None,
        client: Client,
        *,
        provider: str = "anthropic",
        clock: Clock | None = None,
    ) -> None:
        super().__init__(
            settings, api_key, client, normalise=from_anthropic, provider=provider, clock=clock
        )
        self._headers_ready = [*self._headers_whole, VERSION]

    @override
    def _credential(self, api_key: str) -> Header:
        return b"x-api-key", api_key.encode()

    @override
    def _request(self, request: ChatRequest, body: bytes) -> Request:
        made = super()._request(request, body)
        if any(name == VERSION[0] for name, _ in request.vendor_headers):
            return made
        return structs.replace(made, headers=[*made.headers, VERSION])
