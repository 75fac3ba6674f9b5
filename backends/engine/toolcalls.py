"""Tool calls found in the text of an answer, as it grows.

Each parser is a generator that is handed one character after the other, so it cannot see how the
text was cut into tokens or chunks. It holds back what may turn out to be a call and nothing else;
text that looked like a call and is none comes out as content, unchanged. The arguments of a call
go out as they are generated.

Families: `hermes` (also Qwen) `<tool_call>{…}</tool_call>`; `llama3_json`, the whole answer is
`{"name": …, "parameters": {…}}`, several split by `;`; `mistral`, `[TOOL_CALLS]` and a JSON array
or `name[ARGS]{…}`; `pythonic`, the whole answer is `[name(key=value), …]`. Two more belong to
forced calls, whose form a grammar guarantees: a bare JSON array, and the arguments alone.
"""

import ast
import json
import re
from collections.abc import Callable, Generator
from typing import Any, Final, Literal

from msgspec import Struct

Family = Literal["hermes", "llama3_json", "mistral", "pythonic"]

MARKERS: Final = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
)

_SPACE: Final = " \t\r\n"
_JSON_BARE: Final = frozenset(_SPACE + ":,-+.0123456789eEtrufalsn")  # outside of strings, brackets
_ARGUMENT_KEYS: Final = ("arguments", "parameters")
_CALL_KEYS: Final = ("name", "type", "id", *_ARGUMENT_KEYS)
_MAX_HEADER: Final = 200
_HEADER: Final = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*")


class CallBegan(Struct, frozen=True):
    """The `index`-th call of this answer."""

    index: int
    name: str


class CallArguments(Struct, frozen=True):
    """A piece of its arguments, which are JSON."""

    index: int
    text: str


Piece = str | CallBegan | CallArguments  # a str is content

_Script = Generator[None, str, None]  # is sent a character, or "" at the end
_Write = Callable[["_Text", "_Out"], _Script]


class CallParser:
    """One choice's text to content and calls."""

    def __init__(self, write: _Write) -> None:
        self._out = _Out()
        self._script = write(_Text(), self._out)
        next(self._script)

    def feed(self, text: str) -> list[Piece]:
        for character in text:
            self._script.send(character)
        return self._out.taken()

    def end(self) -> list[Piece]:
        """What was held back, now that nothing follows."""
        try:
            self._script.send("")
        except StopIteration:
            return self._out.taken()
        raise AssertionError("a script ends where the text does")


def parser_of(family: Family, names: frozenset[str]) -> CallParser:
    """`names`: the tools on offer. Where no marker says what is a call, a name must be one."""
    match family:
        case "hermes":
            return CallParser(_hermes)
        case "mistral":
            return CallParser(_mistral)
        case "llama3_json":
            return CallParser(lambda text, out: _llama3(text, out, names))
        case "pythonic":
            return CallParser(lambda text, out: _pythonic(text, out, names))


def array_parser() -> CallParser:
    return CallParser(_bare_array)


def arguments_parser(name: str) -> CallParser:
    """All text is the arguments of one call."""
    return CallParser(lambda text, out: _arguments_alone(text, out, name))


# --- what scripts are made of -----------------------------------------------------------------


class _Text:
    """The characters to come. What was read too far can be put back."""

    def __init__(self) -> None:
        self._back = ""
        self._is_over = False

    def next(self) -> Generator[None, str, str]:
        """The next character; "" at the end, again and again."""
        if self._back:
            character, self._back = self._back[0], self._back[1:]
            return character
        if self._is_over:
            return ""
        character = yield
        self._is_over = not character
        return character

    def put_back(self, text: str) -> None:
        self._back = text + self._back


class _Out:
    """Pieces found, neighbours joined. White space around calls belongs to nobody."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self.is_after_call = False

    def say(self, text: str) -> None:
        if self.is_after_call:
            text = text.lstrip(_SPACE)
        if not text:
            return
        self.is_after_call = False
        if self._pieces and isinstance(self._pieces[-1], str):
            self._pieces[-1] += text
        else:
            self._pieces.append(text)

    def began(self, index: int, name: str) -> None:
        self.is_after_call = True
        self._pieces.append(CallBegan(index, name))

    def arguments(self, index: int, text: str) -> None:
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, CallArguments) and last.index == index:
            self._pieces[-1] = CallArguments(index, last.text + text)
        elif text:
            self._pieces.append(CallArguments(index, text))

    def taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces


def _content(text: _Text, out: _Out, marker: str) -> Generator[None, str, str | None]:
    """Content up to the marker. What is held back: the marker and white space before it. None: the
    end came first."""
    held = ""
    while character := (yield from text.next()):
        held += character
        if held.endswith(marker):
            said = held[: -len(marker)].rstrip(_SPACE)
            out.say(said)
            return held[len(said) :]
        safe = held[: len(held) - _overlap(held, marker)].rstrip(_SPACE)
        out.say(safe)
        held = held[len(safe) :]
    out.say(held)
    return None


def _overlap(text: str, marker: str) -> int:
    """The longest suffix of `text` that may become the marker."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


def _plain(text: _Text, out: _Out, said: str) -> _Script:
    """Everything that is left, and what was held back before it."""
    out.say(said)
    while character := (yield from text.next()):
        out.say(character)


def _spaces(text: _Text, also: str = "") -> Generator[None, str, str]:
    """White space, and characters that count as such."""
    seen = ""
    while (character := (yield from text.next())) and character in _SPACE + also:
        seen += character
    text.put_back(character)
    return seen


def _literal(text: _Text, wanted: str) -> Generator[None, str, bool]:
    """Whether exactly this comes next. It is taken if so, and nothing is if not."""
    seen = ""
    for character in wanted:
        found = yield from text.next()
        seen += found
        if found != character:
            text.put_back(seen)
            return False
    return True


class _Call:
    """One `{"name": …, "arguments": {…}}` as it grows.

    It is over at its closing bracket, and bad at the first character that cannot be JSON or once
    it cannot be a call any more."""

    def __init__(self, index: int, out: _Out, names: frozenset[str] | None) -> None:
        self._index = index
        self._out = out
        self._names = names  # None: a marker has said that it is a call
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._string = ""  # the last one, with its quotes
        self._key: str | None = None  # whose value is being read
        self._value = ""
        self._name: str | None = None
        self._arguments = ""  # not sent yet
        self.raw = ""
        self.has_begun = self.has_arguments = self.is_over = self.is_bad = False

    def take(self, character: str) -> bool:
        """False: it is not part of it."""
        if not self._fits(character):
            self.is_bad = True
            return False
        self.raw += character
        if self._key is not None and (self._value or character not in _SPACE):
            self._value += character
        self._follow(character)
        if self._is_sending(character):
            self._arguments += character
        self._tell()
        return True

    def _fits(self, character: str) -> bool:
        if not self._depth:
            return character == "{" or (character in _SPACE and not self.raw.strip())
        return self._in_string or character in '"{}[]' or character in _JSON_BARE

    def _follow(self, character: str) -> None:
        if self._in_string:
            self._string += character
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
                if self._depth == 1 and self._key == "name" and self._value == self._string:
                    self._named(_text_of(self._string))
        elif character == '"':
            self._in_string, self._string = True, '"'
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if not self._depth:
                self._value_ended(self._value[:-1])
                self.is_over = True
        elif self._depth == 1 and character == ":" and self._key is None:
            self._key = _text_of(self._string)
            self.is_bad |= self._names is not None and self._key not in _CALL_KEYS
        elif self._depth == 1 and character == ",":
            self._value_ended(self._value[:-1])

    def _is_sending(self, character: str) -> bool:
        """Whether this character is of an arguments object, which goes out as it grows."""
        if self._key not in _ARGUMENT_KEYS or self.has_arguments:
            return False
        if not self._value.startswith("{"):
            return False
        if self._depth == 1 and character == "}" and not self._in_string:
            self.has_arguments = True
        return True

    def _named(self, name: str | None) -> None:
        self._name = name
        self.is_bad |= not name or (self._names is not None and name not in self._names)

    def _value_ended(self, value: str) -> None:
        if self._key in _ARGUMENT_KEYS and not self.has_arguments:
            # A text with JSON in it, as some models write, or no object at all.
            self._arguments = _text_of(value.strip()) or value.strip()
            self.has_arguments = True
        self._key, self._value = None, ""

    def _tell(self) -> None:
        if self.is_bad or self._name is None:
            return
        if not self.has_begun:
            self.has_begun = True
            self._out.began(self._index, self._name)
        if self.is_over and not self.has_arguments:
            self._arguments = "{}"
        self._out.arguments(self._index, self._arguments)
        self._arguments = ""


def _text_of(literal: str) -> str | None:
    try:
        value = json.loads(literal, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _call(
    text: _Text, out: _Out, index: int, names: frozenset[str] | None = None, given_name: str = ""
) -> Generator[None, str, _Call]:
    """Read one call. `given_name`: only its arguments are in the text."""
    call = _Call(index, out, names)
    if given_name:
        for character in f'{{"name": {json.dumps(given_name)}, "arguments": ':
            call.take(character)
    while not (call.is_over or call.is_bad):
        character = yield from text.next()
        if not character:
            break
        if not call.take(character):
            text.put_back(character)
        elif given_name and call.has_arguments:
            call.take("}")
    return call


# --- the families -----------------------------------------------------------------------------


def _hermes(text: _Text, out: _Out) -> _Script:
    index = 0
    while (held := (yield from _content(text, out, "<tool_call>"))) is not None:
        call = yield from _call(text, out, index)
        if not call.has_begun:
            out.say(held + call.raw)
            continue
        index += 1
        space = yield from _spaces(text)
        if not (yield from _literal(text, "</tool_call>")):
            text.put_back(space)


def _llama3(text: _Text, out: _Out, names: frozenset[str]) -> _Script:
    index = 0
    held = yield from _spaces(text)
    if (yield from _literal(text, "<|python_tag|>")):
        held += "<|python_tag|>" + (yield from _spaces(text))
    while True:
        call = yield from _call(text, out, index, names)
        if not call.has_begun:
            yield from _plain(text, out, held + call.raw)
            return
        index += 1
        held = yield from _spaces(text, also=";")


def _mistral(text: _Text, out: _Out) -> _Script:
    index = 0
    while (held := (yield from _content(text, out, "[TOOL_CALLS]"))) is not None:
        held += yield from _spaces(text)
        if (yield from _literal(text, "[")):
            index = yield from _array(text, out, index, held + "[")
            continue
        header = ""
        while len(header) < _MAX_HEADER and (character := (yield from text.next())):
            if character == "{":
                text.put_back(character)
                break
            header += character
        else:
            out.say(held + header)
            continue
        named = _HEADER.fullmatch(header)
        if named is None:
            out.say(held + header)
            continue
        yield from _call(text, out, index, given_name=named[1])
        index += 1


def _array(text: _Text, out: _Out, index: int, held: str) -> Generator[None, str, int]:
    """Calls up to the closing bracket; how many there are now. `held` is said if it has none."""
    while True:
        held += yield from _spaces(text, also=",")
        if (yield from _literal(text, "]")):
            out.say(held + "]" if "[" in held else "")
            return index
        call = yield from _call(text, out, index)
        if not call.has_begun:
            out.say(held + call.raw)
            return index
        held = ""
        index += 1
        if not call.is_over:
            return index


def _bare_array(text: _Text, out: _Out) -> _Script:
    held = yield from _spaces(text)
    if (yield from _literal(text, "[")):
        yield from _array(text, out, 0, held + "[")
        held = ""
    yield from _plain(text, out, held)


def _arguments_alone(text: _Text, out: _Out, name: str) -> _Script:
    character = yield from text.next()
    out.began(0, name)
    while character:
        out.arguments(0, character)
        character = yield from text.next()


def _pythonic(text: _Text, out: _Out, names: frozenset[str]) -> _Script:
    held = yield from _spaces(text)
    if not (yield from _literal(text, "[")):
        yield from _plain(text, out, held)
        return
    held += "["
    index = 0
    while True:
        source = yield from _python_call(text)
        call = _python_call_of(source.strip(_SPACE + ","), names)
        if call is None:
            is_end = source.strip(_SPACE + ",") == "]" and index > 0
            yield from _plain(text, out, "" if is_end else held + source)
            return
        name, arguments = call
        out.began(index, name)
        out.arguments(index, arguments)
        held = ""
        index += 1


def _python_call(text: _Text) -> Generator[None, str, str]:
    """Up to the bracket that closes a call, or to where it cannot be one."""
    source, depth, quote, is_escaped = "", 0, "", False
    while character := (yield from text.next()):
        source += character
        if quote:
            if is_escaped:
                is_escaped = False
            elif character == "\\":
                is_escaped = True
            elif character == quote:
                quote = ""
        elif depth and character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth <= 0:
                break
        elif not depth and not (character.isalnum() or character in "_.," + _SPACE):
            break
    return source


def _python_call_of(source: str, names: frozenset[str]) -> tuple[str, str] | None:
    """Name and arguments as JSON, or None if this is no call of a tool."""
    try:
        node = ast.parse(source, mode="eval").body
        if not isinstance(node, ast.Call) or node.args:
            return None
        name = ast.unparse(node.func)
        values: dict[str, Any] = {
            str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords
        }
        arguments = json.dumps(values, ensure_ascii=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return (name, arguments) if name in names else None
