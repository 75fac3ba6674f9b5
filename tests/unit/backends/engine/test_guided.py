"""Guided decoding: whatever the model prefers, the text matches; and what cannot be is a 400."""

import asyncio
import json
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.engine import guided
from backends.engine.errors import RequestInvalid
from backends.engine.guided import Constraint, GuideFailed, Guides
from backends.engine.sampler import sample
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import Sampling, Sequence
from tests.fakes.engine import sequence

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Ōsaka"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "wet": {"type": "boolean"},
    },
    "required": ["city", "days", "wet"],
    "additionalProperties": False,
}


def json_constraint(schema: Any) -> Constraint:
    return Constraint("json", json.dumps(schema), "x")


def guided_sequence(words: Tokenizer, constraint: Constraint, seed: int = 0) -> Sequence:
    """A sequence under this constraint, as the engine would make it."""
    made = sequence(words, [5], sampling=Sampling(is_guided=True), seed=seed)
    made.guide = asyncio.run(Guides(words).guide(constraint))
    return made


def spoken(words: Tokenizer, one: Sequence, seed: int, limit: int = 400) -> str:
    """What a model of random taste says until nothing may follow."""
    taste = torch.Generator().manual_seed(seed)
    assert one.guide is not None
    while not one.guide.is_over and one.n_output < limit:
        token = sample(torch.randn(words.size, generator=taste), one).token
        one.append(token)
        if token in words.end_tokens:
            break
    return words.decode(one.tokens[1:])


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**31))
def test_any_model_keeps_to_the_schema(words: Tokenizer, seed: int) -> None:
    """Random logits give valid JSON with the right keys, types, bounds and characters."""
    text = spoken(words, guided_sequence(words, json_constraint(SCHEMA), seed), seed)
    value = json.loads(text)
    assert list(value) == ["city", "days", "wet"]
    assert value["city"] in ("Paris", "Rome", "Ōsaka")
    assert 1 <= value["days"] <= 30
    assert isinstance(value["wet"], bool)
    assert text == json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (Constraint("regex", "(ab|c){3}[0-9]", "x"), "(ab|c){3}[0-9]"),
        (Constraint("grammar", 'start: "x" start | "y"', "x"), "x*y"),
        (Constraint("grammar", 'root ::= "yes" | "no" x\nx ::= [a-c]', "x"), "yes|no[a-c]"),
        (guided.choice(['say "hi"', "Ōsaka\n", "a|b"], "x"), 'say "hi"|Ōsaka\n|a\\|b'),
    ],
    ids=["regex", "lark", "gbnf", "choice"],
)
def test_other_constraints(words: Tokenizer, constraint: Constraint, pattern: str) -> None:
    """A regular expression, two kinds of grammar and a choice of texts, matched in full."""
    for seed in range(5):
        text = spoken(words, guided_sequence(words, constraint, seed), seed)
        assert re.fullmatch(pattern, text), text


def test_a_mask_can_be_read_again_and_tokens_taken_back(words: Tokenizer) -> None:
    """Reading changes nothing, a fork goes its own way, and rollback restores the very state."""
    guide = asyncio.run(Guides(words).guide(json_constraint(SCHEMA)))
    start = guide.allowed()
    assert guide.allowed() == start
    tokens = words.encode('{"city": "Rome')
    masks = []
    for token in tokens:
        masks.append(guide.allowed())
        guide.advance(token)
    fork = guide.fork()
    guide.rollback(3)
    assert guide.allowed() == masks[-3]
    guide.rollback(len(tokens) - 3)
    assert guide.allowed() == start
    for token in words.encode('", "days": 7, "wet": true}'):
        assert fork.allowed()[token]
        fork.advance(token)
    assert fork.is_over
    with pytest.raises(GuideFailed):
        guide.advance(words.encode("x")[0])


def test_logprobs_are_of_the_model_not_of_the_mask(words: Tokenizer) -> None:
    """They are finite for forbidden tokens too, so that they can be shown as JSON."""
    one = guided_sequence(words, Constraint("regex", "a", "x"))
    one.job.request = type(one.job.request)(
        prompts=((5,),), max_tokens=(3,), sampling=Sampling(temperature=0, logprobs=2)
    )
    logits = torch.zeros(words.size)
    logits[words.encode("b")[0]] = 9.0
    made = sample(logits, one)
    assert made.token == words.encode("a")[0]
    assert made.best[0].token == words.encode("b")[0]
    assert made.logprob is not None
    assert -20 < made.logprob < -8


EXPLODING = {"enum": [str(i) * 20 for i in range(20_000)]}


@pytest.mark.parametrize(
    "constraint",
    [
        json_constraint({"type": "what"}),
        json_constraint(EXPLODING),
        json_constraint({"$ref": "#/$defs/none"}),
        Constraint("json", "{", "x"),
        Constraint("regex", "(", "x"),
        Constraint("grammar", "start: nobody", "x"),
        Constraint("grammar", "", "x"),
    ],
    ids=["type", "size", "reference", "no-json", "regex", "name", "empty"],
)
async def test_what_cannot_be_compiled_is_the_requests_own_fault(
    words: Tokenizer, constraint: Constraint
) -> None:
    """A RequestInvalid with the field and one short line; the next request is served."""
    guides = Guides(words)
    with pytest.raises(RequestInvalid) as caught:
        await guides.guide(constraint)
    assert (caught.value.status, caught.value.param) == (400, "x")
    assert 0 < len(caught.value.message) <= guided.MAX_MESSAGE_CHARS
    assert "\n" not in caught.value.message
    assert (await guides.guide(Constraint("regex", "ok", "x"))).allowed()
    guides.close()


async def test_compiling_is_bounded_in_time(words: Tokenizer) -> None:
    """What takes longer than the limit is refused, and the event loop was never blocked."""
    guides = Guides(words, compile_s=0.0001)
    with pytest.raises(RequestInvalid, match="too complex"):
        await guides.guide(json_constraint({"enum": [str(i) for i in range(9_000)]}))
    guides.close()
