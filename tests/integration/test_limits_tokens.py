"""Prompts counted with the bundled model's own tokenizer, in a process without torch."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backends.engine.tokenizer import from_gguf
from backends.engine.weights import open_weights
from backends.tokens import EXACT_CHARS, TokenCounter, exported
from gateway.limits.prompt import OF_MESSAGE, OF_TEMPLATE, prompt_of

BUNDLED = "smollm2-135m-instruct"
TEXTS = ("Hello, world!", "naïve café — 12345 日本語", "<|im_end|> is text\n\n\tdef f(x):", "")


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> TokenCounter:
    """Exported by a child process, as at a gateway's start."""
    folder = tmp_path_factory.mktemp("tokenizers")
    found = asyncio.run(exported(BUNDLED, folder))
    assert found is not None
    assert len(list(folder.iterdir())) == 1
    return found


def test_it_counts_as_the_engine_does(counter: TokenCounter) -> None:
    """Every text has the engine's own number of tokens."""
    engine = from_gguf(open_weights(BUNDLED))
    for text in TEXTS:
        assert counter.count([text]) == len(engine.encode(text))
    assert counter.count(TEXTS) == sum(len(engine.encode(text)) for text in TEXTS)


def test_long_texts_take_a_bounded_time(counter: TokenCounter) -> None:
    """A text a hundred times as long costs no more than a long one, and is not underestimated."""
    text = "The quick brown fox jumps over the lazy dog. " * 400
    exact = counter.count([text[:EXACT_CHARS]])
    began = time.process_time()
    estimate = counter.count([text * 100])
    assert time.process_time() - began < 1
    truth = exact * len(text * 100) / EXACT_CHARS
    assert truth <= estimate <= truth * 1.2


def test_a_model_that_is_not_there_is_estimated(tmp_path: Path) -> None:
    """No tokenizer, a log line, and no exception."""
    assert asyncio.run(exported(str(tmp_path / "none.gguf"), tmp_path)) is None


def test_counting_needs_no_torch() -> None:
    """What the gateway imports for it has no torch in it."""
    code = "import sys, backends.tokens, tokenizers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_text_of_a_prompt_is_found() -> None:
    """Messages, parts, tools and calls; ids count as they are; other surfaces are not known."""
    body = {
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "image_url"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "three"}]},
        ],
        "tools": [{"name": "four"}],
    }
    found = prompt_of("chat", json.dumps(body).encode())
    assert found is not None
    assert found.texts[:2] == ("one", "two")
    assert "three" in found.texts[2]
    assert "four" in found.texts[3]
    assert found.extra == OF_TEMPLATE + 3 * OF_MESSAGE
    for prompt, texts, extra in (("a", ("a",), 1), (["a", "b"], ("a", "b"), 2), ([5, 6], (), 2),
                                 ([[5], [6, 7]], (), 3)):  # fmt: skip
        found = prompt_of("completions", json.dumps({"prompt": prompt}).encode())
        assert found is not None
        assert (found.texts, found.extra) == (texts, extra)
    assert prompt_of("embeddings", b"{}") is None
