"""What the engine said as OpenAI bodies: the best of several, echoes, and calls with logprobs."""

import json
from typing import Any

import pytest

from backends.engine.render import Renderer
from backends.engine.tokenizer import Tokenizer
from backends.engine.tools import ToolUse
from backends.engine.types import Delta, FinishReason, JobUsage, TokenChoice
from backends.engine.wire import Surface

USAGE = JobUsage(
    prompt_tokens=2, completion_tokens=8, queue_s=0, prefill_s=0, decode_s=0, sampling_s=0,
    preemptions=0,
)  # fmt: skip


def renderer(words: Tokenizer, surface: Surface, **options: Any) -> Renderer:
    return Renderer(
        surface, words, answer_id="1", created=1, model="tiny", fingerprint="fp",
        include_usage=False, **{"has_logprobs": False, **options},
    )  # fmt: skip


def said(index: int, text: str, *logprobs: float) -> Delta:
    choices = tuple(TokenChoice(20, value) for value in logprobs)
    return Delta(index=index, text=text, choices=choices, finish=FinishReason.LENGTH)


def test_the_likeliest_of_several_are_shown(words: Tokenizer) -> None:
    """best_of 4, n 2: the two with the best mean, under the indices 0 and 1 of their prompt; all
    are in the usage, and logprobs that nobody asked for stay out."""
    texts = ["bad", "best", "good", "none"] * 2
    means = [(-9.0, -9.0), (-1.0,), (-1.5, -1.1, -1.3), ()] * 2
    deltas = [said(i, text, *mean) for i, (text, mean) in enumerate(zip(texts, means, strict=True))]
    made = renderer(words, "completions", choices_per_prompt=4, best=2, echoes=["A ", "B "])
    body = json.loads(made.whole(deltas, USAGE))
    shown = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert shown == [(0, "A best"), (1, "A good"), (2, "B best"), (3, "B good")]
    assert [choice["logprobs"] for choice in body["choices"]] == [None] * 4
    assert body["usage"]["completion_tokens"] == 8


def test_an_echo_comes_once(words: Tokenizer) -> None:
    """Streamed, the prompt stands before the first text of each of its choices."""
    made = renderer(words, "completions", choices_per_prompt=2, echoes=["A ", "B "])
    texts = ["", "", "", ""]
    for index, text in [(0, "x"), (3, "y"), (0, "z"), (1, ""), (2, "w")]:
        for data in made.chunks(Delta(index=index, text=text)):
            [choice] = json.loads(data)["choices"]
            texts[choice["index"]] += choice["text"]
    assert texts == ["A xz", "A ", "B w", "B y"]


@pytest.mark.parametrize("is_parallel", [True, False])
def test_streamed_calls_lose_no_logprob(words: Tokenizer, is_parallel: bool) -> None:
    """Tokens whose text is held back are told with the next piece; without parallel calls only
    the first one is passed on; the finish reason is tool_calls."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    text = f"Ok. {call}{call}"
    use = ToolUse(tools=(), names=frozenset({"add"}), family="hermes", is_parallel=is_parallel)
    made = renderer(words, "chat", tools=use, has_logprobs=True)
    tokens = words.encode(text)
    chunks = []
    for at, token in enumerate(tokens):
        finish = FinishReason.STOP if at == len(tokens) - 1 else None
        chunks += made.chunks(
            Delta(
                index=0, text=words.token_bytes(token).decode(),
                choices=(TokenChoice(token, -1.0),), finish=finish,
            )
        )  # fmt: skip
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Ok."
    fragments = [part for choice in choices for part in choice["delta"].get("tool_calls", ())]
    begun = [part for part in fragments if "id" in part]
    assert [part["function"]["name"] for part in begun] == ["add"] * (1 + is_parallel)
    arguments = ["", ""]
    for part in fragments:
        arguments[part["index"]] += part["function"]["arguments"]
    assert arguments == ['{"a": 1}', '{"a": 1}' if is_parallel else ""]
    entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert "".join(entry["token"] for entry in entries) == text
    assert choices[-1]["finish_reason"] == "tool_calls"
    whole = json.loads(
        renderer(words, "chat", tools=use).whole(
            [Delta(index=0, text=text, finish=FinishReason.STOP)], USAGE
        )
    )["choices"][0]
    assert whole["message"]["content"] == "Ok."
    assert len(whole["message"]["tool_calls"]) == 1 + is_parallel
    assert whole["finish_reason"] == "tool_calls"
