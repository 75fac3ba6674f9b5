"""One API said in another: a request of a surface that a backend does not have itself.

`ask` is the door. What a backend speaks goes to it untouched, byte for byte; the rest passes one
translator: messages over chat, chat over messages, responses over chat (and so, by both, over
messages). A translator is a pure state machine of one request: bodies and events in, bodies and
events out. Invariants: events depend on the upstream's events alone, never on how the network cut
them; what cannot be said in the other API is refused and never left out silently, but for the
hints that docs/reference/surfaces.md lists; usage is the backend's, shown in the other's terms.
"""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

from msgspec import structs

from backends import wire
from backends.base import (
    Backend,
    BackendCannot,
    BackendProtocol,
    BackendRefused,
    ChatRequest,
    Chunk,
    Event,
    Whole,
)
from backends.settings import Dialect
from backends.translate import chat_over_messages, messages_over_chat, responses_over_chat
from backends.translate.common import Translator, Untranslatable
from backends.translate.counting import CountLocally
from telemetry.record import Surface

# surface → what it is said in, best first
_WAYS: Final[dict[Surface, tuple[tuple[Surface, type[Translator]], ...]]] = {
    "chat": (("messages", chat_over_messages.ChatOverMessages),),
    "messages": (("chat", messages_over_chat.MessagesOverChat),),
    "responses": (("chat", responses_over_chat.ResponsesOverChat),),
}


def is_asked(request: ChatRequest, dialect: Dialect) -> bool:
    """Whether the backend itself answers this request. A count of tokens may be ours."""
    return request.surface != "count_tokens" or "count_tokens" in dialect.speaks


def _reaches(surface: Surface, dialect: Dialect) -> bool:
    """Whether what a translator makes gets to the backend: chat may be said in messages, messages
    not again in chat."""
    return surface in dialect.speaks or (surface == "chat" and "messages" in dialect.speaks)


def ask(backend: Backend, dialect: Dialect, request: ChatRequest) -> AsyncIterator[Event]:
    """Start the attempt, as `Backend.chat` does."""
    surface = request.surface
    if surface in dialect.speaks:
        previous = request.previous
        if previous is None or previous.backend == backend.name:
            return backend.chat(request)
        return _said(backend, dialect, request, responses_over_chat.WithItems(request, dialect))
    if surface == "count_tokens":
        return _counted(backend, request)
    for other, kind in _WAYS.get(surface, ()):
        if _reaches(other, dialect):
            return _said(backend, dialect, request, kind(request, dialect))
    return _refused(backend, surface)


async def _said(
    backend: Backend, dialect: Dialect, request: ChatRequest, translator: Translator
) -> AsyncGenerator[Event, None]:
    try:
        body = translator.body()
    except Untranslatable as error:
        raise BackendCannot(
            error.message,
            backend=backend.name,
            status=400,
            param=error.param,
            error_code="unsupported_parameter",
        ) from None
    except wire.MALFORMED as error:
        raise BackendRefused(
            f"Invalid value: {wire.reason(error)}.", backend=backend.name, status=400
        ) from None
    asked = structs.replace(
        request, surface=translator.target, body=body, previous=None, vendor_headers=()
    )
    whole: Whole | None = None
    events = ask(backend, dialect, asked)
    async with contextlib.aclosing(events) as inner:  # type: ignore[type-var]  # a generator
        async for event in inner:
            try:
                if isinstance(event, Chunk):
                    made: list[Event] = translator.chunk(event)
                elif isinstance(event, Whole):
                    whole, made = event, []
                elif whole is not None:
                    made = translator.whole(whole, event)
                else:
                    made = translator.final(event)
            except (*wire.MALFORMED, Untranslatable) as error:
                raise BackendProtocol(
                    "the upstream's answer cannot be translated", backend=backend.name
                ) from error
            for one in made:
                yield one


async def _counted(backend: Backend, request: ChatRequest) -> AsyncGenerator[Event, None]:
    for event in CountLocally(request).events():
        yield event


async def _refused(backend: Backend, surface: Surface) -> AsyncGenerator[Event, None]:
    raise BackendCannot(
        f"The backend of this model does not do {surface}.",
        backend=backend.name,
        status=400,
        error_code="unsupported_parameter",
    )
    yield
