"""A writer of small GGUF files, so that the reader is tested against bytes we know."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from backends.engine.gguf import GgufFile

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8}
ALIGNMENT = 32


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: object) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<Ii", 5, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(
                _text(str(item)) for item in value
            )
        case [int(), *_]:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    raise TypeError(value)


def write_gguf(
    path: Path,
    metadata: Mapping[str, object],
    tensors: Mapping[str, tuple[str, Sequence[int], bytes]],
) -> Path:
    """`tensors`: name -> (type, row-major shape, raw bytes)."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += _text(key) + _value(value)
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        header += _text(name) + struct.pack("<I", len(shape))
        header += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        header += struct.pack("<IQ", TYPES[kind], len(data))
        data += raw + b"\0" * (-len(raw) % ALIGNMENT)
    header += b"\0" * (-len(header) % ALIGNMENT)
    path.write_bytes(header + data)
    return path


def f32(values: np.ndarray) -> tuple[str, Sequence[int], bytes]:
    return ("F32", values.shape, values.astype("<f4").tobytes())


BYTE_LEVEL = [chr(c) for c in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]] + [
    chr(256 + i) for i in range(68)
]
"""One token per byte, in GPT-2's printable alphabet."""

TINY_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_llama(
    path: Path,
    *,
    layers: int = 2,
    context: int = 256,
    seed: int = 0,
    head_dim: int = 8,
    extra_tokens: Sequence[str] = (),
) -> Path:
    """A random model of a few thousand parameters with a byte-level vocabulary."""
    rng = np.random.default_rng(seed)
    vocabulary = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTE_LEVEL, "Ġa", "th", "the"]
    vocabulary += extra_tokens
    hidden, feed_forward, heads, kv_heads = 32, 64, 4, 2
    size = head_dim

    def random(*shape: int) -> tuple[str, Sequence[int], bytes]:
        return f32(rng.normal(0, 0.2, shape))

    tensors = {
        "token_embd.weight": random(len(vocabulary), hidden),
        "output_norm.weight": f32(np.ones(hidden)),
    }
    for number in range(layers):
        tensors |= {
            f"blk.{number}.attn_norm.weight": f32(np.ones(hidden)),
            f"blk.{number}.ffn_norm.weight": f32(np.ones(hidden)),
            f"blk.{number}.attn_q.weight": random(heads * size, hidden),
            f"blk.{number}.attn_k.weight": random(kv_heads * size, hidden),
            f"blk.{number}.attn_v.weight": random(kv_heads * size, hidden),
            f"blk.{number}.attn_output.weight": random(hidden, heads * size),
            f"blk.{number}.ffn_gate.weight": random(feed_forward, hidden),
            f"blk.{number}.ffn_up.weight": random(feed_forward, hidden),
            f"blk.{number}.ffn_down.weight": random(hidden, feed_forward),
        }
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": layers,
        "llama.context_length": context,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": feed_forward,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.attention.key_length": size,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(vocabulary) - 3),
        "tokenizer.ggml.merges": ["Ġ a", "t h", "th e"],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TINY_TEMPLATE,
    }
    return write_gguf(path, metadata, tensors)


def deeper(file: GgufFile, path: Path, *, times: int) -> Path:
    """The same model with so many times its layers: the further ones are copies whose outputs are
    zero, so that they cost what a layer costs and add nothing."""
    layers = file.integer("llama.block_count")

    def raw(name: str) -> tuple[str, Sequence[int], bytes]:
        kind = file.tensors[name].kind
        shape = file.tensors[name].shape
        if kind == "F32":
            return (kind, shape, file.tensor(name).astype("<f4").tobytes())
        return (kind, shape, file.blocks(name, shape)[1].tobytes())

    tensors = {name: raw(name) for name in file.tensors}
    for number in range(layers, times * layers):
        for name in [n for n in file.tensors if n.startswith(f"blk.{number % layers}.")]:
            kind, shape, data = tensors[name]
            if name.endswith(("attn_output.weight", "ffn_down.weight")):
                data = bytes(len(data))
            tensors[f"blk.{number}.{name.split('.', 2)[2]}"] = (kind, shape, data)
    metadata = {**file.metadata, "llama.block_count": times * layers}
    return write_gguf(path, metadata, tensors)
