"""The well-formed end of a stream that we end: its last chunks, as the model would have written
them.

Pure: the JSON of the stream so far goes in, the JSON that ends it comes out. Must not know why. A
client that knows nothing of us sees an answer that reached its length, which it did; the field
`meterline` says more to those who look.
"""

from typing import Any, Final

import msgspec

from telemetry.record import Surface
from telemetry.usage import Usage

HEAD: Final = ("id", "object", "created", "model", "system_fingerprint")
FINISHED: Final = b'"finish_reason":"'
LENGTH: Final = "length"


class Ending:
    """Shown every chunk; makes the last ones."""

    def __init__(self, surface: Surface, choices: int) -> None:
        self._surface = surface
        self._open = set(range(choices))
        self._last = b"{}"

    def saw(self, data: bytes) -> None:
        self._last = data
        if len(self._open) > 1 and FINISHED in data.replace(b" ", b""):
            for choice in msgspec.json.decode(data).get("choices", ()):
                if choice.get("finish_reason") is not None:
                    self._open.discard(choice.get("index", 0))

    def final_chunk(self, code: str, message: str) -> bytes:
        """`finish_reason` "length" for each choice that has none."""
        choices = [self._choice(index) for index in sorted(self._open)]
        ended = {"ended_by": code, "message": message}
        return msgspec.json.encode({**self._head(), "choices": choices, "meterline": ended})

    def usage_chunk(self, usage: Usage) -> bytes:
        tokens = {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.total_tokens,
        }
        return msgspec.json.encode({**self._head(), "choices": [], "usage": tokens})

    def _choice(self, index: int) -> dict[str, Any]:
        rest: dict[str, Any] = {"delta": {}} if self._surface == "chat" else {"text": ""}
        return {"index": index, **rest, "logprobs": None, "finish_reason": LENGTH}

    def _head(self) -> dict[str, Any]:
        last = msgspec.json.decode(self._last)
        return {name: last[name] for name in HEAD if name in last}
