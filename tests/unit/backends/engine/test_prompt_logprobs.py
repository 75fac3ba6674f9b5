"""How likely the prompt was: `echo` with `logprobs` on the completions surface."""

import json

import pytest
import torch

from backends.engine.gguf import GgufFile
from backends.engine.model import Model
from backends.engine.runner import CpuRunner
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import Delta, Done, JobRequest, Row, Sampling, TokenChoice
from backends.engine.wire import Limits, Parser
from tests.fakes.engine import sequence
from tests.unit.backends.engine.test_engine import outputs, running
from tests.unit.backends.engine.test_render import USAGE, renderer, said


async def test_each_token_of_the_prompt_is_scored(file: GgufFile, words: Tokenizer) -> None:
    """In chunks, beside other prompts, with several choices and a warm prefix cache: the
    log-probabilities of a plain pass over the whole prompt, the first token without one; and the
    answer is the same as without asking."""
    prompt = words.encode("the thing of the sea " * 5)
    mine = sequence(words, [*prompt, 0])
    mine.blocks = [0, 1, 2]
    rows = [Row(mine, 0, len(prompt) + 1, (*prompt[1:], 0))]
    model = Model(file, kv_blocks=3)
    mine.tokens = prompt[:1]
    expected = torch.log_softmax(model.logits(rows)[0], dim=-1)
    async with running(words, CpuRunner(file, kv_blocks=16, threads=1)) as engine:

        def asked(scores: int | None, n: int = 1) -> JobRequest:
            return JobRequest(
                prompts=(tuple(prompt), tuple(prompt[:30])), max_tokens=(3, 3), n=n, seed=4,
                ignore_eos=True,
                sampling=Sampling(temperature=1.0, prompt_logprobs=scores, logprobs=scores),
            )  # fmt: skip

        plain = await outputs(engine.submit(asked(None, 2)))
        news = await outputs(engine.submit(asked(2, 2)))
        assert isinstance(news[-1], Done)
        assert news[-1].usage.prompt_tokens == len(prompt) + 30
    texts = [
        ["".join(d.text for d in n if isinstance(d, Delta) and d.index == i) for i in range(4)]
        for n in (plain, news)
    ]
    assert texts[0] == texts[1]
    told = [delta for delta in news if isinstance(delta, Delta) and delta.prompt]
    assert sorted(delta.index for delta in told) == [0, 1, 2, 3]
    for delta in told:
        scored = delta.prompt
        assert [choice.token for choice in scored] == prompt[: len(scored)]
        assert len(scored) == (len(prompt) if delta.index < 2 else 30)
        assert scored[0].logprob is None
        for at, choice in enumerate(scored[1:]):
            assert choice.logprob == pytest.approx(float(expected[at, choice.token]), abs=1e-4)
            assert choice.best[0].logprob == pytest.approx(float(expected[at].max()), abs=1e-4)


def test_the_echo_has_the_prompts_logprobs(words: Tokenizer) -> None:
    """Tokens, log-probabilities and offsets of prompt and answer in one list, whole and streamed;
    the first has neither probability nor alternatives."""
    prompt = (TokenChoice(words.encode("A")[0]), TokenChoice(words.encode("b")[0], -2.0))
    delta = Delta(index=0, text="c", prompt=prompt, choices=said(0, "c", -1.0).choices)
    made = [
        renderer(words, "completions", echoes=["Ab"], has_logprobs=True).whole([delta], USAGE),
        renderer(words, "completions", echoes=["Ab"], has_logprobs=True).chunks(delta)[0],
    ]
    for data in made:
        [choice] = json.loads(data)["choices"]
        assert choice["text"] == "Abc"
        assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -1.0]
        assert choice["logprobs"]["tokens"][:2] == ["A", "b"]
        assert choice["logprobs"]["top_logprobs"][0] is None
        assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_echo_with_logprobs_asks_for_scores(words: Tokenizer) -> None:
    """Both fields together score the prompt; either alone does not."""
    parser = Parser(words, None, Limits(model="tiny", context=100))
    for fields, expected in (({"echo": True, "logprobs": 3}, 3), ({"logprobs": 3}, None)):
        body = {"model": "tiny", "prompt": "a b", **fields}
        ask = parser.completion(json.dumps(body).encode(), traceparent=None)
        assert ask.job.sampling.prompt_logprobs == expected
