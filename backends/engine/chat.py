"""Messages and tools to tokens, by the chat template that came with the model.

The template runs sandboxed; what users wrote, in messages, tools and calls alike, is data in it and
can neither be code nor become a special token. A template that knows no tools gets them as text:
the system message says how to call them and calls and their results become ordinary messages.
"""

import json
import secrets
from collections.abc import Sequence
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct, structs

from backends.engine.errors import RequestInvalid, WeightsInvalid
from backends.engine.folder import AddedToken, ModelFolder
from backends.engine.gguf import GgufFile
from backends.engine.tokenizer import Tokenizer
from backends.engine.toolcalls import Family
from backends.engine.weights import Weights

# The wording that Qwen2.5 and the Hermes models were trained on; others follow it too.
_TOOLS_INTRO = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TOOLS_OUTRO = """
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


class ToolCall(Struct, frozen=True, kw_only=True):
    """A call that the assistant made earlier."""

    id: str
    name: str
    arguments: dict[str, Any]


class Message(Struct, frozen=True):
    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None  # of role tool: whose result this is
    name: str | None = None


Tool = dict[str, Any]  # as the request has it: {"type": "function", "function": {…}}


class _TemplateRefusal(Exception):
    """The template called `raise_exception`: it does not take these messages."""


class ChatTemplate:
    """A compiled template bound to its tokenizer."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, bos: str = "", eos: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(source)
        self._takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        self.family = _family(source) if self._takes_tools else "hermes"
        self._tokenizer = tokenizer
        self._words = {"bos_token": bos, "eos_token": eos}

    def encode(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int]:
        """The prompt that asks for the assistant's next turn."""
        sentinel = f"\ue000{secrets.token_hex(8)}\ue001"
        if not self._takes_tools:
            messages, tools = _in_words(messages, tools), ()
        given = {"messages": [_as_template_sees(message) for message in messages]}
        if tools:
            given["tools"] = list(tools)
        try:
            text = self._template.render(
                self._shielded(given, sentinel), add_generation_prompt=True, **self._words
            )
        except (_TemplateRefusal, jinja2.TemplateError) as error:
            raise RequestInvalid(
                f"the model's chat template does not take these messages: {error}",
                param="messages",
            ) from error
        return self._tokenizer.encode_template(text, sentinel=sentinel)

    def _shielded(self, value: Any, sentinel: str) -> Any:
        match value:
            case str():
                return self._tokenizer.shield(value, sentinel=sentinel)
            case list():
                return [self._shielded(item, sentinel) for item in value]
            case dict():
                return {
                    self._shielded(key, sentinel): self._shielded(item, sentinel)
                    for key, item in value.items()
                }
            case _:
                return value


def _as_template_sees(message: Message) -> dict[str, Any]:
    """The keys that templates look for. Absent ones are undefined there."""
    seen: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        seen["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    for key in ("tool_call_id", "name"):
        if (value := getattr(message, key)) is not None:
            seen[key] = value
    return seen


def _in_words(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The same conversation without anything but roles and contents."""
    result: list[Message] = []
    for message in messages:
        if message.role == "tool":
            said = f"<tool_response>\n{message.content}\n</tool_response>"
            if result and result[-1].role == "user" and result[-1].content.endswith("_response>"):
                said = f"{result.pop().content}\n{said}"
            result.append(Message("user", said))
            continue
        parts = [message.content] if message.content else []
        for call in message.tool_calls:
            made = _to_json({"name": call.name, "arguments": call.arguments})
            parts.append(f"<tool_call>\n{made}\n</tool_call>")
        result.append(Message(message.role, "\n".join(parts)))
    if tools:
        said = _TOOLS_INTRO + "\n".join(map(_to_json, tools)) + _TOOLS_OUTRO
        if result and result[0].role == "system":
            said = f"{result[0].content}\n\n{said}"
            result[0] = structs.replace(result[0], content=said)
        else:
            result.insert(0, Message("system", said))
    return result


def _family(source: str) -> Family:
    """How a model with this template writes its calls."""
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<tool_call>" in source:
        return "hermes"
    return "llama3_json" if "<|python_tag|>" in source or "ipython" in source else "hermes"


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """As `transformers` has it in templates: no HTML escapes, and text stays readable."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: Any) -> None:
    raise _TemplateRefusal(str(message))


def from_weights(weights: Weights, tokenizer: Tokenizer) -> ChatTemplate | None:
    """None: a base model without a template, which serves completions only."""
    if isinstance(weights, ModelFolder):
        return from_folder(weights, tokenizer)
    return from_gguf(weights, tokenizer)


def from_folder(folder: ModelFolder, tokenizer: Tokenizer) -> ChatTemplate | None:
    source = folder.chat_template
    if source is None:
        return None
    config = folder.tokenizer_config

    def word(token: str | AddedToken | None) -> str:
        return token.content if isinstance(token, AddedToken) else token or ""

    try:
        return ChatTemplate(
            source, tokenizer, bos=word(config.bos_token), eos=word(config.eos_token)
        )
    except jinja2.TemplateError as error:
        raise WeightsInvalid(folder.path, f"chat template: {error}") from error


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
