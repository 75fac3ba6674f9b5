"""The figures of a model, read from its file's metadata and checked. No torch."""

from msgspec import Struct

from backends.engine.errors import StartFailed, WeightsInvalid
from backends.engine.gguf import GgufFile
from backends.engine.kv import BLOCK_TOKENS


class ModelShape(Struct, frozen=True, kw_only=True):
    """The figures in the file's metadata."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_base: float
    norm_epsilon: float

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


def read_shape(file: GgufFile) -> ModelShape:
    """Raises WeightsInvalid for an architecture that this decoder would get wrong."""
    architecture = file.text("general.architecture")
    if architecture != "llama":
        raise WeightsInvalid(
            file.path, f"architecture `{architecture}` is not supported (llama is)"
        )
    if "rope_freqs.weight" in file.tensors or "llama.rope.scaling.type" in file.metadata:
        raise WeightsInvalid(file.path, "scaled rotary embeddings are not supported")
    heads = file.integer("llama.attention.head_count")
    hidden = file.integer("llama.embedding_length")
    if heads < 1 or hidden % heads:
        raise WeightsInvalid(file.path, f"{hidden} values do not divide over {heads} heads")
    shape = ModelShape(
        layers=file.integer("llama.block_count"),
        hidden=hidden,
        feed_forward=file.integer("llama.feed_forward_length"),
        heads=heads,
        kv_heads=file.integer("llama.attention.head_count_kv", heads),
        head_dim=file.integer("llama.attention.key_length", hidden // heads),
        vocab=len(file.texts("tokenizer.ggml.tokens")),
        context=file.integer("llama.context_length"),
        rope_base=file.number("llama.rope.freq_base", 10_000.0),
        norm_epsilon=file.number("llama.attention.layer_norm_rms_epsilon"),
    )
    if shape.kv_heads < 1 or heads % shape.kv_heads or shape.head_dim % 2:
        raise WeightsInvalid(file.path, "attention heads of an impossible shape")
    return shape


def pool_blocks(shape: ModelShape, memory_gb: float) -> int:
    """How many blocks of KV fit into that memory. Raises StartFailed if none does."""
    block_bytes = shape.kv_token_bytes * BLOCK_TOKENS
    blocks = int(memory_gb * 1e9) // block_bytes
    if blocks < 1:
        raise StartFailed(
            f"kv_memory_gb = {memory_gb}: one block of this model takes {block_bytes / 1e9:.4f}"
        )
    return blocks
