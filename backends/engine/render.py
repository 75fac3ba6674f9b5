"""From the engine's outputs to OpenAI's response bodies, whole and chunk by chunk.

Every chunk of an answer has the same id, created, model and fingerprint; the role is in a choice's
first delta only; finish_reason is null until its end; usage is in a chunk of its own, and only if
it was asked for.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from backends.engine.tokenizer import Tokenizer
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


class ChoiceMessage(Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatDelta(Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class Choice(Struct, frozen=True, kw_only=True):
    """Of either surface, whole or a chunk: exactly one of message, delta and text is there."""

    index: int
    message: ChoiceMessage | UnsetType = UNSET
    delta: ChatDelta | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: Json = None
    finish_reason: FinishReason | None = None


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

    def chunks(self, delta: Delta) -> list[bytes]:
        """One delta as the JSON of one to three events: role, text, finish."""
        index = delta.index
        if not self._is_chat:
            return [self._completion_chunk(delta)]
        events = []
        if index not in self._opened:
            self._opened.add(index)
            opening = ChatDelta(role="assistant", content="")
            events.append(self._chunk(Choice(index=index, delta=opening)))
        if delta.text or delta.choices:
            text = ChatDelta(content=delta.text)
            logprobs = self._logprobs(index, delta.choices)
            events.append(self._chunk(Choice(index=index, delta=text, logprobs=logprobs)))
        if delta.finish is not None:
            last = Choice(index=index, delta=ChatDelta(), finish_reason=delta.finish)
            events.append(self._chunk(last))
        return events

    def usage_chunk(self, usage: JobUsage) -> bytes:
        return msgspec.json.encode(self._body([], "chunk", usage=_usage(usage)))

    def whole(self, deltas: Sequence[Delta], usage: JobUsage) -> bytes:
        merged = [_merged(group) for group in _by_choice(deltas)]
        choices = [
            Choice(
                index=delta.index,
                message=ChoiceMessage(delta.text) if self._is_chat else UNSET,
                text=UNSET if self._is_chat else delta.text,
                logprobs=self._logprobs(delta.index, delta.choices),
                finish_reason=delta.finish,
            )
            for delta in merged
        ]
        return msgspec.json.encode(self._body(choices, "whole", usage=_usage(usage)))

    def _completion_chunk(self, delta: Delta) -> bytes:
        logprobs = self._logprobs(delta.index, delta.choices)
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
                {_text(self._tokenizer.token_bytes(b.token)): b.logprob for b in choice.best}
                for choice in choices
            ],
            "text_offset": offsets,
        }


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _by_choice(deltas: Sequence[Delta]) -> list[list[Delta]]:
    groups: dict[int, list[Delta]] = {}
    for delta in deltas:
        groups.setdefault(delta.index, []).append(delta)
    return [groups[index] for index in sorted(groups)]


def _merged(deltas: Sequence[Delta]) -> Delta:
    return Delta(
        index=deltas[0].index,
        text="".join(delta.text for delta in deltas),
        choices=tuple(choice for delta in deltas for choice in delta.choices),
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
