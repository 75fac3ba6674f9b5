"""The device side of the engine on a GPU: weights onto the device, steps, samples.

Greedy tokens are chosen on the device; a row that is sampled comes to the host, where the same
sampler as everywhere draws. Not strict: which kernels a product takes depends on how many rows
there are, so guesses (`spec.py`) stay off and nothing is promised to the bit.
"""

from collections.abc import Sequence

import numpy as np
import torch
from msgspec import structs

from backends.engine.errors import StartFailed
from backends.engine.gpu.decoder import DeviceDecoder, Layer, Parameters
from backends.engine.layout import arranged
from backends.engine.runner import facts_of, step_of
from backends.engine.shape import read_shape
from backends.engine.types import Drafter, Row, StepResult
from backends.engine.weights import Weights


class DeviceRunner:
    """One model. Used by one thread."""

    def __init__(self, decoder: DeviceDecoder, *, kv_blocks: int, digest: str) -> None:
        self.decoder = decoder
        self.read_block, self.write_block = decoder.read_block, decoder.write_block
        self.drafter: Drafter | None = None
        formats = str(decoder.dtype).removeprefix("torch.")
        facts = facts_of(digest, decoder, kv_blocks, decoder.device.type)
        self.facts = structs.replace(  # the pool is of the same type as the weights
            facts,
            identity=f"{digest}/{decoder.device.type}/{formats}/kv-{formats}",
            kv_token_bytes=facts.kv_token_bytes * decoder.dtype.itemsize // 4,
        )
        self.summary = f"{decoder.device} in {formats}, attention: {decoder.summary}"

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.decoder.copy_block(source, target)

    def close(self) -> None:
        """Its memory is freed with its tensors."""

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> StepResult:
        return step_of(self.decoder, rows)


def open_on(file: Weights, device: str, dtype: torch.dtype, *, kv_blocks: int) -> DeviceRunner:
    """Raises StartFailed where there is no such device, or too little memory on it."""
    if device == "cuda" and not torch.cuda.is_available():
        raise StartFailed("device = cuda: this torch sees no GPU; use cpu or auto")
    shape = read_shape(file)
    has_more = shape.has_qkv_bias or shape.has_output_bias or shape.has_head_norm
    if has_more or shape.still_layers:
        raise StartFailed(
            "device = cuda computes models of Llama's plain form only: biases, norms of heads and "
            "layers without rotation need device = cpu"
        )
    try:
        parameters = _parameters(file, torch.device(device), dtype)
        decoder = DeviceDecoder(shape, parameters, kv_blocks=kv_blocks)
    except torch.OutOfMemoryError as error:
        raise StartFailed(
            "the GPU has too little memory for the weights and the KV pool: lower kv_memory_gb"
        ) from error
    return DeviceRunner(decoder, kv_blocks=kv_blocks, digest=file.digest)


def _parameters(file: Weights, device: torch.device, dtype: torch.dtype) -> Parameters:
    shape = read_shape(file)

    def read(name: str, heads: int | None = None) -> torch.Tensor:
        values = file.tensor(name)
        if heads is not None:
            values = arranged(values, shape, heads)
        return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

    def layer(number: int) -> Layer:
        prefix = f"blk.{number}"
        return Layer(
            attention_norm=read(f"{prefix}.attn_norm.weight"),
            qkv=torch.cat([
                read(f"{prefix}.attn_q.weight", shape.heads),
                read(f"{prefix}.attn_k.weight", shape.kv_heads),
                read(f"{prefix}.attn_v.weight"),
            ]),
            output=read(f"{prefix}.attn_output.weight"),
            feed_norm=read(f"{prefix}.ffn_norm.weight"),
            gate_up=torch.cat([
                read(f"{prefix}.ffn_gate.weight"), read(f"{prefix}.ffn_up.weight")
            ]),
            down=read(f"{prefix}.ffn_down.weight"),
        )  # fmt: skip

    table = read("token_embd.weight")
    head = table if file.kind("output.weight") is None else read("output.weight")
    return Parameters(
        table, [layer(i) for i in range(shape.layers)], read("output_norm.weight"), head
    )
