"""Tool calls in the text of every family, however the text is cut."""

import itertools
import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.engine.toolcalls import (
    CallArguments,
    CallBegan,
    CallParser,
    Family,
    arguments_parser,
    array_parser,
    parser_of,
)

NAMES = frozenset({"weather", "add", "web.find"})
FAMILIES: dict[str, Callable[[], CallParser]] = {
    "hermes": lambda: parser_of("hermes", NAMES),
    "llama3_json": lambda: parser_of("llama3_json", NAMES),
    "mistral": lambda: parser_of("mistral", NAMES),
    "pythonic": lambda: parser_of("pythonic", NAMES),
    "array": array_parser,
    "alone": lambda: arguments_parser("add"),
}


def found(parser: CallParser, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
    """Content, and the calls with their arguments, of a text fed in these pieces."""
    content, calls = "", list[tuple[str, str]]()
    for piece in [p for text in pieces for p in parser.feed(text)] + parser.end():
        match piece:
            case str():
                content += piece
            case CallBegan(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + text)
    return content, calls


ARGS = '{"city": "São \\"P\\" {]", "n": [1, {"x": null}]}'
W = ("weather", ARGS)
CASES: list[tuple[Family, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Text < with [marks] {and} more. ", "Text < with [marks] {and} more. ", []),
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {ARGS}}}\n</tool_call>', "", [W]),
    (
        "hermes",
        f'Let me see.\n\n<tool_call>{{"arguments": {ARGS}, "name": "weather"}}</tool_call>\n'
        '<tool_call>\n{"name": "add"}\n</tool_call>\n\nDone.',
        "Let me see.Done.",
        [W, ("add", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}', "", [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "x', "", [("add", '{"a": "x')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call> ok', "ok",
     [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
     [("add", '{"a": 1}')]),
    ("hermes", "<tool_call>add(1)</tool_call>", "<tool_call>add(1)</tool_call>", []),
    ("hermes", '<tool_call>{"nam', '<tool_call>{"nam', []),
    ("hermes", "a <tool_cal", "a <tool_cal", []),
    ("hermes", '{"name": "add", "arguments": {}}', '{"name": "add", "arguments": {}}', []),
    ("llama3_json", f'{{"name": "weather", "parameters": {ARGS}}}', "", [W]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "add", "parameters": {}}; '
     f'{{"name": "weather", "parameters": {ARGS}}}', "", [("add", "{}"), W]),
    ("llama3_json", ' {"name": "nobody", "parameters": {}}',
     ' {"name": "nobody", "parameters": {}}', []),
    ("llama3_json", '{"city": "Rome"}', '{"city": "Rome"}', []),
    ("llama3_json", "The {sum} is 3.", "The {sum} is 3.", []),
    ("llama3_json", "", "", []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGS}}}, '
     '{"name": "add", "arguments": {}}]', "", [W, ("add", "{}")]),
    ("mistral", f"Sure. [TOOL_CALLS]weather[ARGS]{ARGS}[TOOL_CALLS]add[CALL_ID]a1[ARGS]{{}}",
     "Sure.", [W, ("add", "{}")]),
    ("mistral", "[TOOL_CALLS] is a marker", "[TOOL_CALLS] is a marker", []),
    ("mistral", "[1, 2]", "[1, 2]", []),
    ("pythonic", '[weather(city="São \\"P\\" )", n=[1, {"x": None}]), web.find(q=\'a, b\')]', "",
     [("weather", '{"city": "São \\"P\\" )", "n": [1, {"x": null}]}'),
      ("web.find", '{"q": "a, b"}')]),
    ("pythonic", "[1, 2, 3] is a list", "[1, 2, 3] is a list", []),
    ("pythonic", "[other(x=1)]", "[other(x=1)]", []),
    ("pythonic", "[add(x=open('f'))]", "[add(x=open('f'))]", []),
    ("pythonic", "[add(1)]", "[add(1)]", []),
    ("pythonic", "Hello [add()]", "Hello [add()]", []),
    ("pythonic", '[add(x="', '[add(x="', []),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_each_family(family: Family, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    """Content and calls of one text; the same when it comes character by character."""
    assert found(parser_of(family, NAMES), text) == (content, calls)
    assert found(parser_of(family, NAMES), *text) == (content, calls)


def test_forced_forms() -> None:
    """A bare array of calls, and the arguments of a call whose name was given."""
    assert found(array_parser(), f'[{{"name": "weather", "parameters": {ARGS}}}]') == ("", [W])
    assert found(arguments_parser("weather"), *ARGS) == ("", [W])
    assert found(arguments_parser("weather")) == ("", [("weather", "")])


def test_a_call_is_told_while_it_grows() -> None:
    """The name as soon as it is known, the arguments piece by piece, nothing before its time."""
    parser = parser_of("hermes", NAMES)
    assert parser.feed("Hm.<tool") == ["Hm."]
    assert parser.feed('_call>\n{"name": "ad') == []
    assert parser.feed('d", "arguments": {"a') == [CallBegan(0, "add"), CallArguments(0, '{"a')]
    assert parser.feed('": 1}') == [CallArguments(0, '": 1}')]
    assert parser.feed("}\n</tool_call>") == []
    assert parser.end() == []


FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "[", "]", "{", "}",
     '{"name": "add", "arguments": ', '{"name": "weather", "parameters": {"a": "}"}}', "add(x=1)",
     '"', "\\", ",", ";", " ", "\n", "add", "ü", "<", "text", '"name"', ":", "(", ")", "'"]
)  # fmt: skip


@settings(deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    fragments=st.lists(FRAGMENTS, max_size=12),
    cuts=st.lists(st.integers(0, 200), max_size=10),
)
def test_cuts_make_no_difference(family: str, fragments: list[str], cuts: list[int]) -> None:
    """Any text, cut anywhere, gives what it gives in one piece; content is never made up."""
    text = "".join(fragments)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    whole = found(FAMILIES[family](), text)
    assert found(FAMILIES[family](), *pieces) == whole
    content, calls = whole
    if not calls:
        assert content == text
    position = 0
    for character in content:
        position = text.index(character, position) + 1


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1), st.text() | st.integers() | st.none(), max_size=4))
def test_arguments_survive(arguments: dict[str, object]) -> None:
    """What a model writes as arguments is what the client gets, in every family that is JSON."""
    written = json.dumps(arguments, ensure_ascii=False)
    call = f'{{"name": "add", "arguments": {written}}}'
    for family, text in [
        ("hermes", f"<tool_call>{call}</tool_call>"),
        ("llama3_json", call),
        ("mistral", f"[TOOL_CALLS][{call}]"),
        ("array", f"[{call}]"),
    ]:
        assert found(FAMILIES[family](), text) == ("", [("add", written)])
