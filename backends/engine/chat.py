"""Messages to tokens, by the chat template that came with the model.

The template runs sandboxed; what users wrote is data in it and can neither be code nor become a
special token.
"""

import secrets
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct

from backends.engine.errors import RequestInvalid, WeightsInvalid
from backends.engine.gguf import GgufFile
from backends.engine.tokenizer import Tokenizer


class Message(Struct, frozen=True):
    role: str
    content: str


class _TemplateRefusal(Exception):
    """The template called `raise_exception`: it does not take these messages."""


class ChatTemplate:
    """A compiled template bound to its tokenizer."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, bos: str = "", eos: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(source)
        self._tokenizer = tokenizer
        self._words = {"bos_token": bos, "eos_token": eos}

    def encode(self, messages: list[Message]) -> list[int]:
        """The prompt that asks for the assistant's next turn."""
        sentinel = f"\ue000{secrets.token_hex(8)}\ue001"
        shielded = [
            {
                "role": message.role,
                "content": self._tokenizer.shield(message.content, sentinel=sentinel),
            }
            for message in messages
        ]
        try:
            text = self._template.render(
                messages=shielded, add_generation_prompt=True, **self._words
            )
        except (_TemplateRefusal, jinja2.TemplateError) as error:
            raise RequestInvalid(
                f"the model's chat template does not take these messages: {error}",
                param="messages",
            ) from error
        return self._tokenizer.encode_template(text, sentinel=sentinel)


def _refuse(message: Any) -> None:
    raise _TemplateRefusal(str(message))


def from_gguf(file: GgufFile, tokenizer: Tokenizer) -> ChatTemplate | None:
    """None: a base model without a template, which serves completions only."""
    if "tokenizer.chat_template" not in file.metadata:
        return None
    vocabulary = file.texts("tokenizer.ggml.tokens")

    def word(key: str) -> str:
        token = file.integer(f"tokenizer.ggml.{key}", -1)
        return vocabulary[token] if 0 <= token < len(vocabulary) else ""

    try:
        return ChatTemplate(
            file.text("tokenizer.chat_template"),
            tokenizer,
            bos=word("bos_token_id"),
            eos=word("eos_token_id"),
        )
    except jinja2.TemplateError as error:
        raise WeightsInvalid(file.path, f"chat template: {error}") from error
