"""What a client may send, and the 400 with a path for all that it may not."""

import json
from typing import Any

import pytest

from backends.engine import chat
from backends.engine.errors import RequestInvalid
from backends.engine.gguf import GgufFile
from backends.engine.tokenizer import Tokenizer
from backends.engine.wire import Limits, Parser

HI = [{"role": "user", "content": "Hi"}]


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}},
                       "$defs": {"n": {"type": "integer"}}},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def parser(file: GgufFile, words: Tokenizer) -> Parser:
    return Parser(words, chat.from_gguf(file, words), Limits(model="tiny", context=600))


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", **fields}).encode()


CHAT_MISTAKES = [
    ({"messages": []}, "messages"),
    ({}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [*HI, {"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[1].content[0]"),
    ({"messages": HI, "temperature": 2.1}, "temperature"),
    ({"messages": HI, "temperature": -1}, "temperature"),
    ({"messages": HI, "temperature": "hot"}, "temperature"),
    ({"messages": HI, "top_p": 1.5}, "top_p"),
    ({"messages": HI, "top_k": -2}, "top_k"),
    ({"messages": HI, "min_p": 2}, "min_p"),
    ({"messages": HI, "n": 0}, "n"),
    ({"messages": HI, "n": 1000}, "n"),
    ({"messages": HI, "max_tokens": 0}, "max_tokens"),
    ({"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens"),
    ({"messages": HI, "max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
    ({"messages": HI, "presence_penalty": 3}, "presence_penalty"),
    ({"messages": HI, "repetition_penalty": 0}, "repetition_penalty"),
    ({"messages": HI, "logit_bias": {"99999": 1}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"cat": 1}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ({"messages": HI, "logit_bias": {"5": 101}}, "logit_bias[...]"),
    ({"messages": HI, "top_logprobs": 3}, "top_logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HI, "logprobs": 3}, "logprobs"),
    ({"messages": HI, "stop": [""]}, "stop"),
    ({"messages": HI, "stop": ["x"] * 17}, "stop"),
    ({"messages": HI, "seed": 1.5}, "seed"),
    ({"messages": HI, "stream": "yes"}, "stream"),
    ({"messages": HI, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": HI, "tools": [{}]}, "tools[0].type"),
    ({"messages": HI, "tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"messages": HI, "tools": [{"type": "function", "function": {"name": "a b"}}]},
     "tools[0].function.name"),
    ({"messages": HI, "tools": [ADD, ADD]}, "tools"),
    ({"messages": HI, "tools": [ADD], "tool_choice": "maybe"}, "tool_choice"),
    ({"messages": HI, "tool_choice": "required"}, "tool_choice"),
    ({"messages": HI, "tools": [ADD], "tool_choice": {"type": "function", "function":
     {"name": "sub"}}}, "tool_choice.function.name"),
    ({"messages": HI, "tools": [ADD], "response_format": {"type": "json_object"}}, "tools"),
    ({"messages": HI, "functions": [{"name": "f"}]}, "functions"),
    ({"messages": [*HI, {"role": "assistant", "tool_calls": [
        {"id": "1", "function": {"name": "add", "arguments": "[1"}}]}]},
     "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [
        {"id": "1", "function": {"name": "add", "arguments": "{}"}}]}]},
     "messages[0].tool_calls"),
    ({"messages": HI, "response_format": {"type": "xml"}}, "response_format.type"),
    ({"messages": HI, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
     "response_format.json_schema.name"),
    ({"messages": HI, "guided_choice": []}, "guided_choice"),
    ({"messages": HI, "guided_choice": ["a", ""]}, "guided_choice"),
    ({"messages": HI, "guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"messages": HI, "guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"messages": HI, "cache_salt": ""}, "cache_salt"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), CHAT_MISTAKES, ids=lambda value: str(value)[-60:])
def test_mistakes_in_chat_name_their_field(
    parser: Parser, fields: dict[str, Any], param: str
) -> None:
    """Every mistake is a RequestInvalid with the path of the field."""
    with pytest.raises(RequestInvalid) as caught:
        parser.chat(body(**fields), traceparent=None)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [5, "x"]}, "prompt"),
        ({"prompt": ["x", [5]]}, None),
        ({"prompt": [5, -1]}, "prompt"),
        ({"prompt": [5, 999_999]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": ["x"] * 60, "n": 3}, "n"),
        ({"prompt": "x", "logprobs": 6}, "logprobs"),
        (
            {"prompt": "x", "structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs.regex",
        ),
        ({"prompt": "x", "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3, "n": 4}, "best_of"),
        ({"prompt": "x", "best_of": 3, "stream": True}, "best_of"),
    ],
    ids=str,
)
def test_mistakes_in_completions_name_their_field(
    parser: Parser, fields: dict[str, Any], param: str | None
) -> None:
    """The same for completions; a mix of texts and ids, each valid, is accepted."""
    if param is None:
        assert len(parser.completion(body(**fields), traceparent=None).job.prompts) == 2
        return
    with pytest.raises(RequestInvalid) as caught:
        parser.completion(body(**fields), traceparent=None)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"model": "tiny", "messages": "\xff"}',
     b'{"model": "tiny", "temperature": NaN, "messages": []}', b"[" * 100_000,
     b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}'],
    ids=["empty", "cut", "list", "text", "utf-16", "not-utf-8", "nan", "deep", "surrogate"],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(parser: Parser, data: bytes) -> None:
    """Bodies that are not JSON, or not an object, are a 400 too."""
    with pytest.raises(RequestInvalid) as caught:
        parser.chat(data, traceparent=None)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("choice", "is_forced"),
    [(None, False), ("auto", False), ("none", None), ("required", True),
     ({"type": "function", "function": {"name": "add"}}, True)],
    ids=["default", "auto", "none", "required", "named"],
)  # fmt: skip
def test_tools_and_their_choice(parser: Parser, choice: Any, is_forced: bool | None) -> None:
    """auto leaves the model free, none keeps the tools out of the prompt, the others are guided
    by the tool's own schema, with its definitions at the root."""
    bare = parser.chat(body(messages=HI), traceparent=None)
    ask = parser.chat(body(messages=HI, tools=[ADD], tool_choice=choice, max_tokens=5),
                      traceparent=None)  # fmt: skip
    assert (ask.tools is None) == (is_forced is None)
    assert (ask.job.prompts == bare.job.prompts) == (is_forced is None)
    assert (ask.constraint is not None) == bool(is_forced)
    assert ask.job.sampling.is_guided == bool(is_forced)
    if ask.constraint is not None:
        schema = json.loads(ask.constraint.text)
        assert schema["$defs"] == {"n": {"type": "integer"}}


def test_tokens_of_a_text_and_of_messages(parser: Parser, words: Tokenizer) -> None:
    """What a request would begin with; and back to the same text, special tokens included."""
    given = parser.tokenize(body(prompt="the día", return_token_strs=True))
    assert given.tokens == words.encode("the día")
    assert (given.count, given.max_model_len) == (len(given.tokens), 600)
    assert given.token_strs is not None
    assert given.token_strs[0] == "the"
    assert parser.detokenize(body(tokens=given.tokens)).prompt == "the día"
    asked = parser.chat(body(messages=HI, max_tokens=1), traceparent=None)
    chat_tokens = parser.tokenize(json.dumps({"messages": HI}).encode()).tokens
    assert tuple(chat_tokens) == asked.job.prompts[0]
    assert parser.detokenize(body(tokens=chat_tokens)).prompt.startswith("<|im_start|>user\nHi")
    offered = parser.tokenize(body(messages=HI, tools=[ADD]))
    assert offered.count > len(chat_tokens)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({}, "prompt"), ({"prompt": "x", "messages": HI}, "prompt"), ({"model": "no"}, "model"),
     ({"messages": []}, "messages"), ({"prompt": "x" * 10_000_000}, "prompt")],
    ids=["nothing", "both", "model", "empty", "long"],
)  # fmt: skip
def test_mistakes_in_tokenize(parser: Parser, fields: dict[str, Any], param: str) -> None:
    """Each names its field."""
    with pytest.raises(RequestInvalid) as caught:
        parser.tokenize(json.dumps(fields).encode())
    assert caught.value.param == param


@pytest.mark.parametrize("tokens", [[-1], [99_999], [5] * 601], ids=["negative", "large", "many"])
def test_mistakes_in_detokenize(parser: Parser, tokens: list[int]) -> None:
    """Ids outside the vocabulary, and more than a context holds."""
    with pytest.raises(RequestInvalid) as caught:
        parser.detokenize(body(tokens=tokens))
    assert caught.value.param == "tokens"


def test_another_model_is_not_found(parser: Parser) -> None:
    """A model that is not served here is a 404 model_not_found."""
    with pytest.raises(RequestInvalid) as caught:
        parser.chat(json.dumps({"model": "gpt-9", "messages": HI}).encode(), traceparent=None)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


@pytest.mark.parametrize(
    "fields",
    [{"prompt": [5] * 600}, {"prompt": [5] * 500, "max_tokens": 101}, {"prompt": "x" * 10_000_000}],
    ids=["prompt", "prompt-and-answer", "ten-megabytes"],
)
def test_what_exceeds_the_context_is_said_so(parser: Parser, fields: dict[str, Any]) -> None:
    """Prompt and answer must fit; the code is the one that frameworks look for."""
    with pytest.raises(RequestInvalid) as caught:
        parser.completion(body(**fields), traceparent=None)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_defaults_and_nulls(parser: Parser) -> None:
    """Absent and null mean the same: temperature 1, all tokens, the rest of the context."""
    ask = parser.completion(
        body(prompt=[5] * 6, temperature=None, max_tokens=None, stop=None, n=None),
        traceparent="00-a",
    )
    assert ask.job.max_tokens == (594,)
    assert (ask.job.sampling.temperature, ask.job.n, ask.job.stop) == (1.0, 1, ())
    assert ask.job.traceparent == "00-a"
    assert (ask.stream, ask.logprobs) == (False, None)


def test_everything_at_once(parser: Parser) -> None:
    """All supported fields arrive where they belong; unknown ones are ignored."""
    ask = parser.chat(
        body(
            messages=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            ],
            stream=True, stream_options={"include_usage": True}, max_completion_tokens=5,
            temperature=0, top_p=0.5, top_k=-1, min_p=0.1, n=2, seed=-3, stop="x", ignore_eos=True,
            logit_bias={"7": -5}, logprobs=True, top_logprobs=2, priority=4, cache_salt="s",
            presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.1, user="u", tools=[],
            response_format={"type": "text"}, unknown={"x": 1},
        ),
        traceparent=None,
    )  # fmt: skip
    job, sampling = ask.job, ask.job.sampling
    assert (ask.stream, ask.include_usage, ask.logprobs) == (True, True, 2)
    assert (job.n, job.seed, job.stop, job.ignore_eos, job.priority) == (2, -3, ("x",), True, 4)
    assert job.max_tokens == (5,)
    assert sampling.is_greedy
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0, 0.1)
    assert sampling.logit_bias == ((7, -5.0),)
    assert sampling.presence_penalty == -sampling.frequency_penalty == 1.0
    assert sampling.repetition_penalty == 1.1
