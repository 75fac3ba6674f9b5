"""The text of a request that a model reads, for counting it. Pure.

Must not know tokenizers. A surface that is not here is estimated by its bytes.
"""

from typing import Any, Final

import msgspec
from msgspec import Struct

MAX_BODY: Final = 1_000_000  # of a larger one the bytes say enough
OF_MESSAGE: Final = 8  # tokens that a chat template adds for each message, and more
OF_TEMPLATE: Final = 32  # and once: a system prompt of its own


class _Message(Struct):
    content: Any = None
    tool_calls: Any = None


class _Body(Struct):
    messages: list[_Message] = []
    tools: msgspec.Raw = msgspec.Raw()
    prompt: Any = None


class Prompt(Struct, frozen=True):
    texts: tuple[str, ...]
    extra: int = 0  # tokens besides: of the template, or given as ids


_DECODER: Final = msgspec.json.Decoder(_Body)


def prompt_of(surface: str, body: bytes) -> Prompt | None:
    """None: it cannot be said. The body has been checked before."""
    if surface not in ("chat", "completions") or len(body) > MAX_BODY:
        return None
    try:
        read = _DECODER.decode(body)
    except msgspec.MsgspecError:
        return None
    if surface == "completions":
        return _of_prompt(read.prompt)
    texts: list[str] = []
    for message in read.messages:
        if isinstance(message.content, str):
            texts.append(message.content)
        elif isinstance(message.content, list):
            texts += [str(part["text"]) for part in message.content if "text" in part]
        if message.tool_calls:
            texts.append(msgspec.json.encode(message.tool_calls).decode())
    tools = bytes(read.tools)
    if tools:
        texts.append(tools.decode())
    return Prompt(tuple(texts), OF_TEMPLATE + OF_MESSAGE * len(read.messages))


def _of_prompt(prompt: Any) -> Prompt | None:
    match prompt:
        case str():
            return Prompt((prompt,), 1)
        case [str(), *_]:
            return Prompt(tuple(map(str, prompt)), len(prompt))
        case [int(), *_]:
            return Prompt((), len(prompt))
        case [list(), *_]:
            return Prompt((), sum(map(len, prompt)))
        case _:
            return None
