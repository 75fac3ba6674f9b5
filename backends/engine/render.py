"""From the engine's outputs to OpenAI's response bodies, whole and chunk by chunk.

Every chunk of an answer has the same id, created, model and fingerprint; the role is in a choice's
first delta only; finish_reason is null until its end; usage is in a chunk of its own, and only if
it was asked for. A tool call has its id and name in its first delta and arguments in all of them.
"""

import math
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType, field, structs

from backends.engine.tokenizer import Tokenizer
from backends.engine.toolcalls import CallArguments, CallBegan, CallParser, Piece
from backends.engine.tools import ToolUse
from backends.engine.types import Delta, FinishReason, JobUsage, TokenChoice
from backends.engine.wire import Surface

Json = Any


class PromptDetails(Struct, frozen=True):
    cached_tokens: int = 0


class DeviceUs(Struct, frozen=True, kw_only=True):
    prefill: int = 0
    decode: int = 0
    sampling: int = 0
    recompute: int = 0
    spec_rejected: int = 0


class Speculation(Struct, frozen=True):
    drafted: int = 0
    accepted: int = 0


class Meter(Struct, frozen=True, kw_only=True):
    """The timing extension."""

    queue_s: float
    prefill_s: float
    decode_s: float
    sampling_s: float
    cached_tokens: int
    preemptions: int
    device_us: DeviceUs
    spec: Speculation = Speculation()


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()
    meterline: Meter


class Function(Struct, frozen=True):
    name: str | UnsetType
    arguments: str


class ToolCall(Struct, frozen=True, kw_only=True):
    """Whole, or a delta, which has its place in `index`."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function


class ChoiceMessage(Struct, frozen=True):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Choice(Struct, frozen=True, kw_only=True):
    """Of either surface, whole or a chunk: exactly one of message, delta and text is there."""

    index: int
    message: ChoiceMessage | UnsetType = UNSET
    delta: ChatDelta | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: Json = None
    finish_reason: str | None = None


class Body(Struct, frozen=True, kw_only=True):
    """Of either surface, whole or a chunk."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice] = field(default_factory=list)
    usage: Usage | UnsetType | None = UNSET


class Renderer:
    """One answer's."""

    def __init__(
        self,
        surface: Surface,
        tokenizer: Tokenizer,
        *,
        answer_id: str,
        created: int,
        model: str,
        fingerprint: str,
        include_usage: bool,
        has_logprobs: bool,
        tools: ToolUse | None = None,
        choices_per_prompt: int = 1,
        echoes: Sequence[str] | None = None,
        best: int | None = None,
    ) -> None:
        self._is_chat = surface == "chat"
        self._tokenizer = tokenizer
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{answer_id}"
        self._created = created
        self._model = model
        self._fingerprint = fingerprint
        self._usage_elsewhere: UnsetType | None = None if include_usage else UNSET
        self._has_logprobs = has_logprobs
        self._offsets: dict[int, int] = {}  # characters sent, by choice
        self._opened: set[int] = set()
        self._per_prompt = choices_per_prompt
        self._echoes = echoes
        self._best = best
        self._tools = tools
        self._parsers: dict[int, CallParser] = {}
        self._calling: set[int] = set()  # choices that have called a tool
        self._untold: dict[int, tuple[TokenChoice, ...]] = {}  # tokens whose text is held back

    def chunks(self, delta: Delta) -> list[bytes]:
        """One delta as the JSON of events: role, text, tool calls, finish."""
        index = delta.index
        if not self._is_chat:
            if index not in self._opened:
                self._opened.add(index)
                delta = structs.replace(delta, text=self._echo(index) + delta.text)
            return [self._completion_chunk(delta)]
        events = []
        if index not in self._opened:
            self._opened.add(index)
            opening = ChatDelta(role="assistant", content="")
            events.append(self._chunk(Choice(index=index, delta=opening)))
        entries = self._untold.pop(index, ()) + delta.choices
        said = self._said(delta)
        if not said and entries and delta.finish is None and self._tools is not None:
            self._untold[index] = entries
        elif entries and not said:
            said = [ChatDelta(content="")]
        for part in said:
            logprobs = self._logprobs(index, entries)
            events.append(self._chunk(Choice(index=index, delta=part, logprobs=logprobs)))
            entries = ()
        if delta.finish is not None:
            finish = self._finish(index, delta.finish)
            events.append(self._chunk(Choice(index=index, delta=ChatDelta(), finish_reason=finish)))
        return events

    def _said(self, delta: Delta) -> list[ChatDelta]:
        if self._tools is None:
            return [ChatDelta(content=delta.text)] if delta.text else []
        said = []
        for piece in self._pieces(delta):
            match piece:
                case str():
                    said.append(ChatDelta(content=piece))
                case CallBegan(at, name):
                    function = Function(name, "")
                    call = ToolCall(index=at, id=_call_id(), type="function", function=function)
                    said.append(ChatDelta(tool_calls=[call]))
                case CallArguments(at, text):
                    call = ToolCall(index=at, function=Function(UNSET, text))
                    said.append(ChatDelta(tool_calls=[call]))
        return said

    def _pieces(self, delta: Delta) -> list[Piece]:
        """Content and calls in this text; with parallel calls off, the first call alone."""
        tools = self._tools
        assert tools is not None
        if delta.index not in self._parsers:
            self._parsers[delta.index] = tools.parser()
        parser = self._parsers[delta.index]
        pieces = parser.feed(delta.text)
        if delta.finish is not None:
            pieces += parser.end()
        if not tools.is_parallel:
            pieces = [piece for piece in pieces if isinstance(piece, str) or piece.index == 0]
        if any(isinstance(piece, CallBegan) for piece in pieces):
            self._calling.add(delta.index)
        return pieces

    def _finish(self, index: int, finish: FinishReason) -> str:
        """As the real API: `tool_calls`, but `stop` where the function was named."""
        is_forced = self._tools is not None and self._tools.forced is not None
        if index in self._calling and finish is FinishReason.STOP and not is_forced:
            return "tool_calls"
        return finish.value

    def _message(self, delta: Delta) -> ChoiceMessage:
        """All of one choice."""
        if self._tools is None:
            return ChoiceMessage(delta.text)
        content = ""
        names: list[str] = []
        arguments: list[str] = []
        for piece in self._pieces(delta):
            match piece:
                case str():
                    content += piece
                case CallBegan(_, name):
                    names.append(name)
                    arguments.append("")
                case CallArguments(at, text):
                    arguments[at] += text
        if not names:
            return ChoiceMessage(content)
        calls = [
            ToolCall(id=_call_id(), type="function", function=Function(name, text))
            for name, text in zip(names, arguments, strict=True)
        ]
        return ChoiceMessage(content or None, tool_calls=calls)

    def usage_chunk(self, usage: JobUsage) -> bytes:
        return msgspec.json.encode(self._body([], "chunk", usage=_usage(usage)))

    def whole(self, deltas: Sequence[Delta], usage: JobUsage) -> bytes:
        merged = [_merged(group) for group in _by_choice(deltas)]
        if self._best is not None:
            merged = self._likeliest(merged, self._best)
        choices = [
            Choice(
                index=delta.index,
                message=self._message(delta) if self._is_chat else UNSET,
                text=UNSET if self._is_chat else self._echo(delta.index) + delta.text,
                logprobs=self._logprobs(delta.index, self._prompt_entries(delta) + delta.choices),
                finish_reason=delta.finish and self._finish(delta.index, delta.finish),
            )
            for delta in merged
        ]
        return msgspec.json.encode(self._body(choices, "whole", usage=_usage(usage)))

    def _echo(self, index: int) -> str:
        return "" if self._echoes is None else self._echoes[index // self._per_prompt]

    def _likeliest(self, deltas: list[Delta], count: int) -> list[Delta]:
        """The `count` best of each prompt by mean log-probability, under new indices."""
        shown: list[Delta] = []
        for first in range(0, len(deltas), self._per_prompt):
            ranked = sorted(deltas[first : first + self._per_prompt], key=_unlikeliness)[:count]
            shown += [
                structs.replace(delta, index=len(shown) + rank) for rank, delta in enumerate(ranked)
            ]
        self._per_prompt = count
        return shown

    def _completion_chunk(self, delta: Delta) -> bytes:
        entries = self._prompt_entries(delta) + delta.choices
        logprobs = self._logprobs(delta.index, entries)
        return self._chunk(
            Choice(
                index=delta.index, text=delta.text, logprobs=logprobs, finish_reason=delta.finish
            )
        )

    def _chunk(self, choice: Choice) -> bytes:
        return msgspec.json.encode(self._body([choice], "chunk", usage=self._usage_elsewhere))

    def _body(self, choices: list[Choice], kind: str, *, usage: Usage | UnsetType | None) -> Body:
        names = {"whole": "chat.completion", "chunk": "chat.completion.chunk"}
        return Body(
            id=self._id,
            object=names[kind] if self._is_chat else "text_completion",
            created=self._created,
            model=self._model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage,
        )

    def _logprobs(self, index: int, choices: Sequence[TokenChoice]) -> Json:
        if not self._has_logprobs:
            return None
        if self._is_chat:
            return {"content": [self._chat_entry(choice) for choice in choices], "refusal": None}
        return self._completion_logprobs(index, choices)

    def _prompt_entries(self, delta: Delta) -> tuple[TokenChoice, ...]:
        """Those of the echoed text: a begin token that we put before it is not part of it."""
        prompt = delta.prompt
        bos = self._tokenizer.bos
        if prompt and bos is not None and prompt[0].token == bos:
            is_said = self._echo(delta.index).startswith(_text(self._tokenizer.token_bytes(bos)))
            return prompt if is_said else prompt[1:]
        return prompt

    def _chat_entry(self, choice: TokenChoice) -> Json:
        best = [self._chat_token(item.token, item.logprob) for item in choice.best]
        return self._chat_token(choice.token, choice.logprob) | {"top_logprobs": best}

    def _chat_token(self, token: int, logprob: float | None) -> dict[str, Json]:
        data = self._tokenizer.token_bytes(token)
        return {"token": _text(data), "logprob": logprob, "bytes": list(data)}

    def _completion_logprobs(self, index: int, choices: Sequence[TokenChoice]) -> Json:
        offsets = []
        for choice in choices:
            at = self._offsets.get(index, 0)
            offsets.append(at)
            self._offsets[index] = at + len(_text(self._tokenizer.token_bytes(choice.token)))
        return {
            "tokens": [_text(self._tokenizer.token_bytes(choice.token)) for choice in choices],
            "token_logprobs": [choice.logprob for choice in choices],
            "top_logprobs": [
                None
                if choice.logprob is None
                else {_text(self._tokenizer.token_bytes(b.token)): b.logprob for b in choice.best}
                for choice in choices
            ],
            "text_offset": offsets,
        }


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _by_choice(deltas: Sequence[Delta]) -> list[list[Delta]]:
    groups: dict[int, list[Delta]] = {}
    for delta in deltas:
        groups.setdefault(delta.index, []).append(delta)
    return [groups[index] for index in sorted(groups)]


def _unlikeliness(delta: Delta) -> float:
    values = [choice.logprob for choice in delta.choices if choice.logprob is not None]
    return -sum(values) / len(values) if values else math.inf


def _merged(deltas: Sequence[Delta]) -> Delta:
    return Delta(
        index=deltas[0].index,
        text="".join(delta.text for delta in deltas),
        choices=tuple(choice for delta in deltas for choice in delta.choices),
        prompt=deltas[0].prompt,
        finish=deltas[-1].finish,
    )


def _usage(usage: JobUsage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptDetails(usage.cached_tokens),
        meterline=Meter(
            queue_s=usage.queue_s,
            prefill_s=usage.prefill_s,
            decode_s=usage.decode_s,
            sampling_s=usage.sampling_s,
            cached_tokens=usage.cached_tokens,
            preemptions=usage.preemptions,
            device_us=DeviceUs(**usage.device_us),
            spec=Speculation(usage.drafted, usage.accepted),
        ),
    )
