"""A model folder as Hugging Face lays it out: config.json, safetensors, tokenizer.json.

Offers the same tensors under the same names as a GGUF file does, so that nothing after it needs to
know which it was. Matrices quantised by GPTQ or AWQ come out dequantised.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from backends.engine import packed4
from backends.engine.errors import WeightsInvalid
from backends.engine.quants import Array, Raw
from backends.engine.safetensors import Shards

_NAMES = {
    "token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_KINDS = {"F32": "F32", "F16": "F16", "BF16": "BF16"}


class RopeParameters(Struct, frozen=True):
    """As transformers 5 writes them; before it `rope_scaling`, with the theta beside it."""

    rope_type: str | None = None
    type: str | None = None  # of old files
    rope_theta: float | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    partial_rotary_factor: float | None = None


class Config(Struct, frozen=True, kw_only=True):
    """What we need of config.json."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None
    partial_rotary_factor: float | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    no_rope_layers: list[int] | None = None
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None
    quantization_config: packed4.Settings | None = None


class GenerationConfig(Struct, frozen=True):
    eos_token_id: int | list[int] | None = None


class PoolingConfig(Struct, frozen=True):
    """Of sentence-transformers."""

    pooling_mode_lasttoken: bool = False


class AddedToken(Struct, frozen=True):
    content: str


class TokenizerConfig(Struct, frozen=True):
    """`chat_template`: a text, or several under names."""

    chat_template: str | list[dict[str, str]] | None = None
    bos_token: str | AddedToken | None = None
    eos_token: str | AddedToken | None = None
    add_bos_token: bool | None = None


class ModelFolder:
    """An open folder. `config` is read and the tensors' places are checked from the start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Config = self._json("config.json", Config)
        self._shards = Shards(path)
        self._settings = self.config.quantization_config
        if self._settings is not None and (problem := self._settings.problem):
            raise WeightsInvalid(path / "config.json", f"quantization_config: {problem}")
        is_base = "embed_tokens.weight" in self._shards  # saved without its head
        self._prefix = "" if is_base else "model."
        if not (is_base or self.config.tie_word_embeddings or self.kind("output.weight")):
            raise WeightsInvalid(path, "missing", tensor="lm_head.weight")

    @cached_property
    def digest(self) -> str:
        return self._shards.digest((self.path / "config.json").read_bytes())

    @cached_property
    def weight_bytes(self) -> int:
        """Of the files."""
        return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))

    def kind(self, name: str) -> str | None:
        """The kind of a tensor's numbers; None: it is not there."""
        theirs = self._named(name)
        if theirs is None:
            return None
        if theirs in self._shards:
            return _KINDS.get(self._shards.entry(theirs).dtype, "F32")
        return "F16" if self._is_packed(theirs) else None

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Array:
        """As fp32. `shape`, where given, is what the model needs."""
        theirs = self._named(name) or name
        if theirs not in self._shards and self._is_packed(theirs):
            assert self._settings is not None
            base = theirs.removesuffix(".weight")
            values = packed4.matrix(self._shards, base, self._settings)
        else:
            values = self._shards.floats(theirs)
        if shape is not None and values.shape != shape:
            raise self._shards.invalid(theirs, f"shape {values.shape}, not {shape}")
        return values

    def blocks(self, name: str, shape: tuple[int, int]) -> tuple[str, Raw]:
        raise AssertionError("no tensor of a folder is of a block kind")

    def rows(self, name: str, shape: tuple[int, int]) -> Callable[[Sequence[int]], Array]:
        """Rows of a matrix, converted when asked for."""
        theirs = self._named(name) or name
        if theirs not in self._shards:
            raise self._shards.invalid(theirs, "missing")
        if self._shards.entry(theirs).shape != shape:
            raise self._shards.invalid(
                theirs, f"shape {self._shards.entry(theirs).shape}, not {shape}"
            )
        return lambda numbers: self._shards.rows(theirs, list(numbers))

    @cached_property
    def tokenizer_config(self) -> TokenizerConfig:
        name = "tokenizer_config.json"
        if not (self.path / name).exists():
            return TokenizerConfig()
        config: TokenizerConfig = self._json(name, TokenizerConfig)
        return config

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Of config.json and generation_config.json."""
        name = "generation_config.json"
        found = [self.config.eos_token_id]
        if (self.path / name).exists():
            found.append(self._json(name, GenerationConfig).eos_token_id)
        ends: set[int] = set()
        for item in found:
            ends |= set(item if isinstance(item, list) else [] if item is None else [item])
        return frozenset(ends)

    @cached_property
    def pools_last(self) -> bool:
        """Whether sentence-transformers would take the last state for a text's vector."""
        name = "1_Pooling/config.json"
        if not (self.path / name).exists():
            return False
        config: PoolingConfig = self._json(name, PoolingConfig)
        return config.pooling_mode_lasttoken

    @property
    def chat_template(self) -> str | None:
        path = self.path / "chat_template.jinja"
        if path.exists():
            return path.read_text()
        template = self.tokenizer_config.chat_template
        if isinstance(template, list):
            by_name: Mapping[str, str] = {
                item.get("name", ""): item.get("template", "") for item in template
            }
            return by_name.get("default")
        return template

    def _json(self, name: str, shape: type[Any]) -> Any:
        path = self.path / name
        try:
            return msgspec.json.decode(path.read_bytes(), type=shape)
        except OSError as error:
            raise WeightsInvalid(path, f"cannot be read: {error.strerror}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise WeightsInvalid(path, str(error)) from error

    def _is_packed(self, theirs: str) -> bool:
        return (
            self._settings is not None
            and theirs.endswith(".weight")
            and theirs.removesuffix("weight") + "qweight" in self._shards
        )

    def _named(self, name: str) -> str | None:
        """Hugging Face's name for a tensor of GGUF's naming; None: this model has no such."""
        parts = name.split(".")
        if name == "output.weight":
            return None if self.config.tie_word_embeddings else "lm_head.weight"
        if parts[0] == "blk" and len(parts) == 4 and parts[2] in _NAMES:
            return f"{self._prefix}layers.{parts[1]}.{_NAMES[parts[2]]}.{parts[3]}"
        if len(parts) == 2 and parts[0] in _NAMES:
            return f"{self._prefix}{_NAMES[parts[0]]}.{parts[1]}"
        return None
