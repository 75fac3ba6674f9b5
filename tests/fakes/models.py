"""Small random models of every family, saved by `transformers` as their makers save them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from backends.engine.folder import ModelFolder
from backends.engine.shape import read_shape

VOCAB = 320
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.2,
    "max_position_embeddings": 256, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip


def _rope(kind: str, **more: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **more}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": _rope("default")}),
    "llama3": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": _rope(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        },
    ),
    "llama-biased": (
        "Llama",
        {"attention_bias": True, "rope_parameters": _rope("linear", factor=2.0)},
    ),
    "qwen2": ("Qwen2", {"rope_parameters": _rope("default"), "tie_word_embeddings": True}),
    "qwen3": (
        "Qwen3",
        {
            "hidden_size": 96,  # not heads × head size, as in its small ones
            "rope_parameters": _rope("yarn", factor=4.0, original_max_position_embeddings=64),
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "rope_parameters": _rope("default")}),
}  # fmt: skip


def save_model(folder: Path, family: str, *, shard_bytes: int | None = None, seed: int = 0) -> Any:
    """The model that was saved there."""
    name, changes = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**_SIZES | changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start as ones and biases as zeros: neither would show
                parameter.add_(0.2 * torch.randn_like(parameter))
    more = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.save_pretrained(folder, **more)
    return model


def save_tokenizer(folder: Path, *, digits: int = 3) -> Any:
    """A byte-level BPE with Llama 3's pattern, or Qwen2's (`digits` = 1), trained on a little."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,"
        f"{digits}}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    words = tokenizers.Tokenizer(models.BPE(ignore_merges=digits == 3))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    words.train_from_iterator(["the cat sat on the mat in 2024, and the hat too"] * 3, trainer)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|im_end|>", bos_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    made.add_tokens(["<think>"])
    made.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    made.save_pretrained(folder)
    return made


def write_as_gguf(folder: ModelFolder, path: Path, *, kind: str = "F32") -> Path:
    """The same model as llama.cpp's converter would write it, matrices in `kind`."""
    shape, config = read_shape(folder), folder.config
    family = config.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_rope_freq_base(shape.rope.base)
    if shape.rope.scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(shape.rope.scaling))
        writer.add_rope_scaling_factor(shape.rope.factor)
        writer.add_rope_scaling_orig_ctx_len(shape.rope.original_context)
    writer.add_token_list([f"t{n}" for n in range(shape.vocab)])
    names = ["token_embd.weight", "output_norm.weight", "output.weight"]
    parts = [
        "attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm",
        "attn_k_norm", "ffn_gate", "ffn_up", "ffn_down",
    ]  # fmt: skip
    for number in range(shape.layers):
        names += [f"blk.{number}.{part}.{what}" for part in parts for what in ("weight", "bias")]
    number = gguf.GGMLQuantizationType[kind]
    for name in names:
        if folder.kind(name) is None:
            continue
        values = folder.tensor(name)
        if family in ("llama", "smollm3") and name.split(".")[-2] in ("attn_q", "attn_k"):
            heads = shape.heads if ".attn_q." in name else shape.kv_heads
            values = _paired(values, heads)
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, number), raw_dtype=number)
    if shape.rope.scaling == "llama3":
        from backends.engine.rope import Rope, frequencies

        plain = frequencies(Rope(base=shape.rope.base), shape.head_dim)
        writer.add_tensor("rope_freqs.weight", plain / frequencies(shape.rope, shape.head_dim))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _paired(values: np.ndarray, heads: int) -> np.ndarray:
    """The converter's `permute`."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
