"""Guided decoding: only tokens that keep the text within a JSON schema, a regular expression or a
grammar may be drawn.

`llguidance` does the work and is imported at the first use. Compiling happens in a thread of its
own, bounded in size and time, so that a schema that explodes is a 400 of that request and no step
waits for it. A `Guide` belongs to one sequence and has exactly the state of its tokens: reading the
mask changes nothing, a token is consumed when it is appended, and `rollback` takes tokens back.
"""

import asyncio
import functools
import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct

from backends.engine.errors import RequestInvalid
from backends.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CHARS: Final = 200_000  # of a schema, expression or grammar
MAX_MESSAGE_CHARS: Final = 300
COMPILE_S: Final = 5.0
COMPILERS: Final = 2  # threads; a runaway keeps one until it gives up
KEPT: Final = 64  # compiled ones

# As `json.dumps` writes it: a model that may choose its white space may also never stop with it.
_JSON_STYLE: Final[Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


class Constraint(Struct, frozen=True):
    """What the answer must match. `param` is the field it came from."""

    kind: Literal["json", "regex", "grammar"]
    text: str
    param: str


def choice(options: Sequence[str], param: str) -> Constraint:
    """Exactly one of these texts."""
    quoted = (json.dumps(option, ensure_ascii=False) for option in options)
    return Constraint("grammar", f"start: {' | '.join(quoted)}", param)


class GuideFailed(ValueError):
    """The grammar became too complex while it was followed: this request fails, and no other."""

    def __init__(self, detail: str) -> None:
        self.message = f"guided decoding failed: {_first_line(detail)}"
        super().__init__(self.message)


class Guide:
    """Where one sequence stands in its grammar. Used by the engine thread alone."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher

    def fork(self) -> "Guide":
        """Another one in the same state."""
        return Guide(self._matcher.deep_copy())

    def allowed(self) -> bytes:
        """One byte a token of the vocabulary, 0 for those that must not come next."""
        mask = self._matcher.compute_logit_bias()
        if self._matcher.is_error():
            raise GuideFailed(self._matcher.get_error())
        return mask

    def advance(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise GuideFailed(self._matcher.get_error())

    def rollback(self, tokens: int) -> None:
        """Take the last ones back."""
        if tokens and not self._matcher.rollback(tokens):
            raise GuideFailed(self._matcher.get_error())

    @property
    def is_over(self) -> bool:
        """Whether nothing but an end token may follow."""
        return self._matcher.is_stopped()


class Guides:
    """Compiles constraints for one vocabulary. Used on the event loop."""

    def __init__(self, tokenizer: Tokenizer, *, compile_s: float = COMPILE_S) -> None:
        self._tokenizer = tokenizer
        self._compile_s = compile_s
        self._threads = ThreadPoolExecutor(COMPILERS, thread_name_prefix="guided")
        self._kept: OrderedDict[tuple[str, str], Guide] = OrderedDict()

    async def guide(self, constraint: Constraint) -> Guide:
        """A guide at its start. RequestInvalid says what is wrong with the constraint."""
        if len(constraint.text) > MAX_CHARS:
            raise RequestInvalid(f"longer than {MAX_CHARS} characters", param=constraint.param)
        key = (constraint.kind, constraint.text)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key].fork()
        compiling = asyncio.get_running_loop().run_in_executor(
            self._threads, self._compiled, constraint
        )
        try:
            made = await asyncio.wait_for(compiling, self._compile_s)
        except TimeoutError:
            raise RequestInvalid(
                f"too complex: it could not be compiled within {self._compile_s:g} s",
                param=constraint.param,
            ) from None
        self._kept[key] = made
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return made.fork()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, constraint: Constraint) -> Guide:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise RequestInvalid(
                "this engine was installed without guided decoding (package llguidance)",
                param=constraint.param,
            ) from error
        try:
            matcher = LLMatcher(self._vocabulary, _grammar(constraint), log_level=0)
        except ValueError as error:
            raise RequestInvalid(_first_line(str(error)), param=constraint.param) from error
        if not matcher.is_error():
            matcher.compute_logit_bias()  # the first one builds the lexer: better here than later
        if matcher.is_error():
            raise RequestInvalid(_first_line(matcher.get_error()), param=constraint.param)
        return Guide(matcher)

    @functools.cached_property
    def _vocabulary(self) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        words = _Vocabulary(self._tokenizer)
        return LLTokenizer(TokenizerWrapper(words), eos_token=sorted(self._tokenizer.end_tokens))


class _Vocabulary:
    """The tokenizer as llguidance wants to see one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.end_tokens)
        self.bos_token_id = tokenizer.bos
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.size)]
        self.special_token_ids = sorted(tokenizer.special)

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", "replace"))


def _grammar(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    match constraint.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(constraint.text, defaults=_JSON_STYLE)
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.text)
        case "grammar" if "::=" in constraint.text:  # GBNF, as llama.cpp and vLLM take it
            from llguidance.gbnf_to_lark import gbnf_to_lark

            return LLMatcher.grammar_from_lark(gbnf_to_lark(constraint.text))
        case "grammar":
            return LLMatcher.grammar_from_lark(constraint.text)


def _first_line(text: str) -> str:
    return " ".join(text.split("<state>")[0].split())[:MAX_MESSAGE_CHARS]
