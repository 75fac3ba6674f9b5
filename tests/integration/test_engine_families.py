"""Every family beside `transformers`, on small random models that it saved itself."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from backends.engine import chat, tokenizer
from backends.engine.chat import Message
from backends.engine.errors import WeightsInvalid
from backends.engine.folder import ModelFolder
from backends.engine.gguf import GgufFile
from backends.engine.model import Model
from backends.engine.native.library import Toolchain, load
from backends.engine.native.model import NativeModel
from backends.engine.runner import CpuRunner
from backends.engine.serve import cache_folder
from backends.engine.stops import StopMatcher
from backends.engine.types import Job, JobRequest, Pooled, Row, Sequence
from backends.engine.weights import Pooling, Weights
from tests.fakes.models import FAMILIES, VOCAB, save_model, save_tokenizer, write_as_gguf

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
TOKENS = 40
GREEDY = 8
TEXTS = [
    "the cat sat", "In 2024 the hat's 12345 mats — naïve, 日本 🙂\n\n  and  too \t\r\n", "", "I'LL",
]  # fmt: skip


class Decoder(Protocol):
    def logits(self, rows: list[Row]) -> tuple[Any, Any]: ...


class Silent:
    """A sequence's text, which nobody reads here."""

    def feed(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def choice(tokens: list[int]) -> Sequence:
    request = JobRequest(prompts=(tuple(tokens),), max_tokens=(GREEDY,))
    made = Sequence(
        Job(1, request, 0), 0, tokens, arrival=1, max_tokens=GREEDY, seed=0,
        decoder=Silent(), stops=StopMatcher(()),  # type: ignore[arg-type]  # has what is used
    )  # fmt: skip
    made.blocks = [2, 0]
    return made


def all_logits(decoder: Decoder, tokens: list[int]) -> np.ndarray:
    """Of every position: all but the first token as guesses."""
    logits, _ = decoder.logits([Row(choice(tokens[:1]), 0, len(tokens), tuple(tokens[1:]))])
    return np.asarray(torch.as_tensor(logits).numpy().copy())


def greedy(decoder: Decoder, tokens: list[int]) -> list[int]:
    made = choice(tokens)
    for _ in range(GREEDY):
        logits, _ = decoder.logits([Row(made, made.n_computed, made.n_pending)])
        made.n_computed = len(made.tokens)
        made.append(int(torch.as_tensor(logits)[-1].argmax()))
    return made.tokens[len(tokens) :]


def decoders(weights: Weights) -> Iterator[tuple[str, Decoder]]:
    """Both, with nothing rounded."""
    yield "torch", Model(weights, kv_blocks=3)
    library = load(Toolchain.of_this_machine(cache_folder(os.environ)))
    native = NativeModel(weights, library, kv_blocks=3, threads=1, dtype="float32")
    yield "native", native
    native.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_and_file_equal_transformers(tmp_path: Path, family: str) -> None:
    """Logits of all positions to rounding and greedy text exactly, from the folder (whole or in
    shards) and from the same model as a GGUF file, with both decoders."""
    theirs = save_model(
        tmp_path / "model", family, shard_bytes=60_000 if family == "qwen3" else None
    )
    tokens = torch.randint(0, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = theirs(tokens).logits[0].numpy()
        said = theirs.generate(
            tokens, max_new_tokens=GREEDY, do_sample=False, eos_token_id=None, pad_token_id=0,
            attention_mask=torch.ones_like(tokens),
        )[0, TOKENS:].tolist()  # fmt: skip
    ids = tokens[0].tolist()
    folder = ModelFolder(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists() is (family == "qwen3")
    sources: list[Weights] = [folder]
    if family != "llama-biased":  # llama.cpp's converter writes no such file
        sources.append(GgufFile(write_as_gguf(folder, tmp_path / "model.gguf")))
    for weights in sources:
        for name, decoder in decoders(weights):
            found = all_logits(decoder, ids)
            assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max(), (name, weights)
            assert greedy(decoder, ids) == said, (name, weights)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_equal_transformers(tmp_path: Path, pooling: Pooling) -> None:
    """A text's vector is the mean of the last states, or the last one, of length 1, whatever the
    chunks; both decoders agree with `transformers`."""
    theirs = save_model(tmp_path, "qwen3")
    tokens = torch.randint(0, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        states = theirs.model(tokens).last_hidden_state[0]
    pooled = states.mean(0) if pooling == "mean" else states[-1]
    expected = (pooled / pooled.norm()).numpy()
    request = JobRequest(prompts=((),), max_tokens=(0,), pooling=pooling)
    for kernels, dtype in (("torch", "auto"), ("native", "float32")):
        runner = CpuRunner(
            ModelFolder(tmp_path), kv_blocks=3, threads=1, kernels=kernels, dtype=dtype,  # type: ignore[arg-type]  # Literals
            tools=Toolchain.of_this_machine(cache_folder(os.environ)),
        )  # fmt: skip
        found = set()
        for chunk in (7, TOKENS):
            made = choice(tokens[0].tolist())
            made.job.request = request
            outcome: Any = None
            for start in range(0, TOKENS, chunk):
                row = Row(made, start, min(chunk, TOKENS - start))
                [outcome] = runner.run([row]).choices
            assert isinstance(outcome, Pooled)
            assert np.abs(np.array(outcome.values) - expected).max() < 1e-5
            found.add(tuple(outcome.values))
        if kernels == "native":
            assert len(found) == 1, "chunks change nothing"


@pytest.mark.parametrize("digits", [1, 3], ids=["qwen2", "llama3"])
def test_tokens_and_templates_equal_transformers(tmp_path: Path, digits: int) -> None:
    """tokenizer.json gives the tokens that `transformers` gives, a template the same prompt, and
    what a user writes is never a special token."""
    save_model(tmp_path, "llama")
    theirs = save_tokenizer(tmp_path, digits=digits)
    folder = ModelFolder(tmp_path)
    words = tokenizer.from_folder(folder)
    for text in TEXTS:
        assert words.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert words.decode(words.encode(text)) == text
    template = chat.from_weights(folder, words)
    assert template is not None
    said = [{"role": "user", "content": TEXTS[1]}]
    expected = theirs.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    assert template.encode([Message("user", TEXTS[1])]) == expected
    assert words.special_token("<|im_end|>") not in words.encode("<|im_end|>")
    think = words.special_token("<think>")
    assert think is not None
    assert words.decode([think]) == "<think>"  # a template's word, and said aloud
    assert words.end_tokens == {0, 2}
    assert words.size == VOCAB
    assert words.decode([VOCAB - 1]) == ""  # the model has more rows than the tokenizer words


@pytest.mark.parametrize("digits", [1, 3], ids=["qwen2", "llama-bpe"])
def test_a_gguf_vocabulary_gives_the_same_tokens(tmp_path: Path, digits: int) -> None:
    """The pre-tokenizers that GGUF files name split as the folder's own pattern does."""
    from tests.fakes.gguf import write_gguf

    save_model(tmp_path, "llama")
    theirs = save_tokenizer(tmp_path, digits=digits)
    ids = theirs.get_vocab()
    vocabulary = sorted(ids, key=ids.__getitem__)
    import json

    merges = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]
    path = write_gguf(
        tmp_path / "w.gguf",
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2" if digits == 1 else "llama-bpe",
            "tokenizer.ggml.tokens": vocabulary,
            "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(vocabulary) - 3),
            "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        },
        {},
    )
    words = tokenizer.from_gguf(GgufFile(path))
    for text in TEXTS:
        assert words.encode(text) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma"}, "model_type `gemma` is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_attention_heads": 3, "head_dim": None}, "do not divide"),
        ({"num_key_value_heads": 3}, "impossible shape"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "three factors"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.0}}, "above 0"),
        ({"partial_rotary_factor": 0.5}, "rotate in part"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 1 << 40}, "impossible figures"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "3 bits"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_folder_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """A config that this decoder does not honour is an error that names it."""
    import json

    from backends.engine.shape import read_shape

    save_model(tmp_path, "llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(WeightsInvalid, match=message):
        read_shape(ModelFolder(tmp_path))
