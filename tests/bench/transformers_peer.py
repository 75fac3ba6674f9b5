"""Our own dequantised tensors in Hugging Face's LlamaForCausalLM, fp32: the same weights exactly.

Its GGUF tokenizer ignores the file's pre-tokenizer, so only token ids go in and out.
"""

from typing import Any

import numpy as np
import torch

from backends.engine.gguf import GgufFile
from backends.engine.native.model import unpermuted
from backends.engine.shape import read_shape

_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def load(file: GgufFile) -> Any:
    """A LlamaForCausalLM."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = read_shape(file)
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, max_position_embeddings=shape.context,
        rms_norm_eps=shape.norm_epsilon, rope_theta=shape.rope_base,
        head_dim=shape.head_dim, tie_word_embeddings="output.weight" not in file.tensors,
    )  # fmt: skip
    state: dict[str, torch.Tensor] = {}
    for name in file.tensors:
        value = file.tensor(name)
        parts = name.split(".")
        match parts:
            case ["token_embd", _]:
                key = "model.embed_tokens.weight"
            case ["output_norm", _]:
                key = "model.norm.weight"
            case ["output", _]:
                key = "lm_head.weight"
            case [_, number, kind, _]:
                key = f"model.layers.{number}.{_NAMES[kind]}.weight"
                if kind == "attn_q":
                    value = unpermuted(value, shape.heads)
                if kind == "attn_k":
                    value = unpermuted(value, shape.kv_heads)
            case _:
                raise ValueError(f"no place for {name}")
        state[key] = torch.from_numpy(np.array(value))
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=True)
    return model.float().eval()
