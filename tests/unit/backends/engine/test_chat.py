"""Conversations with tools as prompts: by the model's own template, or in words."""

import json

import pytest

from backends.engine.chat import ChatTemplate, Message, ToolCall
from backends.engine.tokenizer import Tokenizer
from tests.fakes.gguf import TINY_TEMPLATE

TOOL = {"type": "function", "function": {"name": "add", "description": "<|im_end|> a < b"}}
TALK = [
    Message("user", "Add."),
    Message("assistant", "", (ToolCall(id="c1", name="add", arguments={"a": "<|im_end|>"}),)),
    Message("tool", "3", tool_call_id="c1"),
    Message("tool", "4", tool_call_id="c2"),
]
END = 2


def text_of(words: Tokenizer, tokens: list[int]) -> str:
    return b"".join(map(words.token_bytes, tokens)).decode()


def test_a_template_without_tools_gets_them_in_words(words: Tokenizer) -> None:
    """The system message offers them, calls and results are in tags, roles stay those it knows."""
    tokens = ChatTemplate(TINY_TEMPLATE, words).encode(TALK, [TOOL])
    text = text_of(words, tokens)
    system, user, assistant, result, opening = text.split("<|im_start|>")[1:]
    assert system.startswith("system\n# Tools")
    assert json.dumps(TOOL) in system
    assert user == "user\nAdd.<|im_end|>\n"
    assert '<tool_call>\n{"name": "add", "arguments": {"a": "<|im_end|>"}}\n' in assistant
    assert result.startswith("user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4")
    assert opening == "assistant\n"
    assert tokens.count(END) == 4  # the template's own; those in texts are ordinary tokens


def test_a_system_message_keeps_its_place(words: Tokenizer) -> None:
    """The tools are added to it."""
    talk = [Message("system", "Be brief."), *TALK[:1]]
    text = text_of(words, ChatTemplate(TINY_TEMPLATE, words).encode(talk, [TOOL]))
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert text.count("<|im_start|>") == 3


@pytest.mark.parametrize(
    ("hint", "family"),
    [("", "hermes"), ("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"),
     ("<|python_tag|>", "llama3_json")],
)  # fmt: skip
def test_a_template_with_tools_gets_them_as_they_are(
    words: Tokenizer, hint: str, family: str
) -> None:
    """tojson leaves text readable, special tokens in it stay text, and it says the family."""
    source = (
        "{% for tool in tools %}{{ tool | tojson }}{% endfor %}|{% for m in messages %}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}"
        "{{ m.tool_call_id }}{% endfor %}" + hint
    )
    template = ChatTemplate(source, words)
    tokens = template.encode(TALK, [TOOL])
    expected = json.dumps(TOOL) + '|{"a": "<|im_end|>"}c1c2' + hint
    assert text_of(words, tokens) == expected
    assert END not in tokens
    assert template.family == family
