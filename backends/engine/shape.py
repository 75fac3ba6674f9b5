"""The figures of a model, read from its file or its folder and checked. No torch.

A model that this decoder would get wrong is refused here, never computed wrongly.
"""

import math

from msgspec import Struct

from backends.engine.errors import StartFailed, WeightsInvalid
from backends.engine.folder import Config, ModelFolder, RopeParameters
from backends.engine.gguf import GgufFile
from backends.engine.kv import BLOCK_TOKENS
from backends.engine.rope import Rope
from backends.engine.weights import Weights

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
_STILL_EVERY = 4  # of SmolLM3's layers, one in so many does not rotate
_MOST = 1 << 24  # of any figure


class ModelShape(Struct, frozen=True, kw_only=True):
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope: Rope
    norm_epsilon: float
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_head_norm: bool = False  # queries and keys are normalised per head
    is_paired: bool = False  # rows of q and k lie in pairs (x0, x_{D/2}, x1, …)
    still_layers: frozenset[int] = frozenset()  # layers without rotation

    @property
    def kv_token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * 4  # fp32

    @property
    def body_params(self) -> int:
        attention_rows = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * self.hidden * (attention_rows + 3 * self.feed_forward)

    @property
    def head_params(self) -> int:
        return self.hidden * self.vocab


def read_shape(weights: Weights) -> ModelShape:
    """Raises WeightsInvalid for an architecture that this decoder would get wrong."""
    shape = _from_config(weights) if isinstance(weights, ModelFolder) else _from_gguf(weights)
    figures = (
        shape.layers, shape.hidden, shape.feed_forward, shape.heads, shape.kv_heads,
        shape.head_dim, shape.vocab, shape.context,
    )  # fmt: skip
    if not all(1 <= figure < _MOST for figure in figures):
        raise WeightsInvalid(weights.path, f"impossible figures: {figures}")
    if shape.heads % shape.kv_heads or shape.head_dim % 2:
        raise WeightsInvalid(weights.path, "attention heads of an impossible shape")
    if not (math.isfinite(shape.norm_epsilon) and shape.norm_epsilon >= 0):
        raise WeightsInvalid(weights.path, f"a norm's epsilon of {shape.norm_epsilon}")
    if shape.rope.divisors and len(shape.rope.divisors) != shape.head_dim // 2:
        raise WeightsInvalid(weights.path, "a divisor for each pair of a head is needed")
    if problem := shape.rope.problem:
        raise WeightsInvalid(weights.path, problem)
    return shape


def _from_gguf(file: GgufFile) -> ModelShape:
    family = file.text("general.architecture")
    if family not in FAMILIES:
        raise WeightsInvalid(
            file.path, f"architecture `{family}` is not supported ({', '.join(FAMILIES)} are)"
        )
    heads = file.integer(f"{family}.attention.head_count")
    hidden = file.integer(f"{family}.embedding_length")
    if heads < 1 or (f"{family}.attention.key_length" not in file.metadata and hidden % heads):
        raise WeightsInvalid(file.path, f"{hidden} values do not divide over {heads} heads")
    layers = file.integer(f"{family}.block_count")
    size = file.integer(f"{family}.attention.key_length", hidden // heads)
    if file.integer(f"{family}.rope.dimension_count", size) != size:
        raise WeightsInvalid(file.path, "heads that rotate in part are not supported")
    if file.kind("blk.0.ffn_gate_inp.weight") is not None:
        raise WeightsInvalid(file.path, "mixtures of experts are not supported")
    context = file.integer(f"{family}.context_length")
    window = file.integer(f"{family}.attention.sliding_window", 0)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        feed_forward=file.integer(f"{family}.feed_forward_length"),
        heads=heads,
        kv_heads=file.integer(f"{family}.attention.head_count_kv", heads),
        head_dim=size,
        vocab=len(file.texts("tokenizer.ggml.tokens")),
        context=min(context, window) if window else context,
        rope=_gguf_rope(file, family),
        norm_epsilon=file.number(f"{family}.attention.layer_norm_rms_epsilon"),
        has_qkv_bias=family == "qwen2" or file.kind("blk.0.attn_q.bias") is not None,
        has_output_bias=file.kind("blk.0.attn_output.bias") is not None,
        has_head_norm=family == "qwen3",
        # llama.cpp's converter lays out these families for its own rotary kernel.
        is_paired=family in ("llama", "mistral", "smollm3"),
        still_layers=_still(layers) if family == "smollm3" else frozenset(),
    )


def _gguf_rope(file: GgufFile, family: str) -> Rope:
    base = file.number(f"{family}.rope.freq_base", 10_000.0)
    if file.kind("rope_freqs.weight") is not None:  # llama3's scaling, ready-made
        divisors = file.tensor("rope_freqs.weight")
        return Rope(base=base, divisors=tuple(map(float, divisors.reshape(-1))))
    scaling = file.text(f"{family}.rope.scaling.type", "none")
    factor = file.number(
        f"{family}.rope.scaling.factor", file.number(f"{family}.rope.scale_linear", 1.0)
    )
    match scaling:
        case "none":
            return Rope(base=base)
        case "linear":
            return Rope(base=base, scaling="linear", factor=factor)
        case "yarn":
            context = file.integer(f"{family}.rope.scaling.original_context_length", 0)
            return Rope(base=base, scaling="yarn", factor=factor, original_context=context)
        case _:
            raise WeightsInvalid(
                file.path, f"rotary scaling `{scaling}` is not supported (linear and yarn are)"
            )


def _from_config(folder: ModelFolder) -> ModelShape:
    config = folder.config
    path = folder.path / "config.json"
    if config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise WeightsInvalid(
            path, f"model_type `{config.model_type[:40]}` is not supported ({known} are)"
        )
    if config.hidden_act not in ("silu", "swish"):
        raise WeightsInvalid(path, f"hidden_act `{config.hidden_act[:40]}` is not supported (silu)")
    if config.mlp_bias or folder.kind("blk.0.ffn_gate.bias") is not None:
        raise WeightsInvalid(path, "mlp_bias is not supported")
    heads, hidden = config.num_attention_heads, config.hidden_size
    if heads < 1 or (config.head_dim is None and hidden % heads):
        raise WeightsInvalid(path, f"{hidden} values do not divide over {heads} heads")
    family, layers = config.model_type, config.num_hidden_layers
    context = config.max_position_embeddings
    if config.sliding_window is not None and _slides(config):
        context = min(context, config.sliding_window)  # within the window it is plain attention
    rotates = config.no_rope_layers  # 1: it rotates, in spite of the name
    still = frozenset(at for at, does in enumerate(rotates or ()) if not does)
    if family == "smollm3" and rotates is None:
        still = _still(layers)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        feed_forward=config.intermediate_size,
        heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_dim=config.head_dim or hidden // heads,
        vocab=config.vocab_size,
        context=context,
        rope=_config_rope(folder),
        norm_epsilon=config.rms_norm_eps,
        has_qkv_bias=family == "qwen2" or config.attention_bias,
        has_output_bias=config.attention_bias and family != "qwen2",
        has_head_norm=family == "qwen3",
        still_layers=still if family == "smollm3" else frozenset(),
    )


def _slides(config: Config) -> bool:
    if config.model_type == "mistral":
        return config.use_sliding_window is not False
    return config.use_sliding_window is True


def _still(layers: int) -> frozenset[int]:
    return frozenset(range(_STILL_EVERY - 1, layers, _STILL_EVERY))


def _config_rope(folder: ModelFolder) -> Rope:
    config = folder.config
    given = config.rope_parameters or config.rope_scaling or RopeParameters()
    scaling = given.rope_type or given.type or "default"
    part = given.partial_rotary_factor or config.partial_rotary_factor
    path = folder.path / "config.json"
    if part not in (None, 1.0):
        raise WeightsInvalid(path, "heads that rotate in part are not supported")
    base = given.rope_theta or config.rope_theta or 10_000.0
    original = given.original_max_position_embeddings or config.max_position_embeddings
    factor = 1.0 if given.factor is None else given.factor
    match scaling:
        case "default":
            return Rope(base=base)
        case "linear":
            return Rope(base=base, scaling="linear", factor=factor)
        case "llama3":
            low, high = given.low_freq_factor, given.high_freq_factor
            if given.factor is None or low is None or high is None:
                raise WeightsInvalid(path, "rotary scaling llama3 needs its three factors")
            return Rope(
                base=base, scaling="llama3", factor=factor, original_context=original,
                low_factor=low, high_factor=high,
            )  # fmt: skip
        case "yarn":
            if given.factor is None:
                factor = config.max_position_embeddings / original
            return Rope(
                base=base,
                scaling="yarn",
                factor=factor,
                original_context=original,
                beta_fast=given.beta_fast or 32.0,
                beta_slow=given.beta_slow or 1.0,
                truncates=given.truncate is not False,
                attention_factor=_attention_factor(given, factor),
            )
        case other:
            raise WeightsInvalid(
                path,
                f"rotary scaling `{other[:40]}` is not supported (linear, llama3 and yarn are)",
            )


def _attention_factor(given: RopeParameters, factor: float) -> float | None:
    if given.attention_factor is not None:
        return given.attention_factor
    if given.mscale and given.mscale_all_dim and factor > 1:
        log = 0.1 * math.log(factor)
        return (log * given.mscale + 1) / (log * given.mscale_all_dim + 1)
    return None


def pool_blocks(shape: ModelShape, memory_gb: float) -> int:
    """How many blocks of KV fit into that memory. Raises StartFailed if none does."""
    block_bytes = shape.kv_token_bytes * BLOCK_TOKENS
    blocks = int(memory_gb * 1e9) // block_bytes
    if blocks < 1:
        raise StartFailed(
            f"kv_memory_gb = {memory_gb}: one block of this model takes {block_bytes / 1e9:.4f}"
        )
    return blocks
