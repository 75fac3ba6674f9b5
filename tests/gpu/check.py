"""The GPU path on a GPU, in one go: `python -m tests.gpu.check all` prints one JSON list a part.

    kernels   Triton's kernels against gathered attention, several shapes and types
    graphs    a small model's greedy tokens with whole-step graphs and without
    smollm2   the bundled model, decode at batch 1 and 64, beside the limits of the memory bus
    qwen3     random weights of Qwen3-0.6B's shape, 256 sequences of 100 to 1,024 tokens in and out

`--device cpu` runs what can be run without one (kernels under TRITON_INTERPRET=1, a model of a few
layers), to see that the script works; its rates mean nothing.
"""

import asyncio
import functools
import json
import random
import sys
import time
from typing import Any

import click
import torch

from backends.engine import tokenizer
from backends.engine.engine import Engine
from backends.engine.gpu.attention import by_triton, choose, largest_error
from backends.engine.gpu.decoder import DeviceDecoder, random_parameters
from backends.engine.gpu.runner import DeviceRunner, open_on
from backends.engine.kv import BLOCK_TOKENS, blocks_for
from backends.engine.roofline import Machine, decode_limit, prefill_limit
from backends.engine.rope import Rope
from backends.engine.shape import ModelShape
from backends.engine.spans import discard
from backends.engine.stops import StopMatcher
from backends.engine.types import Done, Job, JobRequest, Row, Sampling, Sequence
from backends.engine.weights import BUNDLED_NAME, open_weights
from telemetry.clock import SystemClock

Rows = list[dict[str, Any]]


def kernels(device: torch.device) -> Rows:
    dtypes = [torch.float32, torch.float16]
    if device.type == "cuda":
        dtypes.append(torch.bfloat16)
    shapes = [(9, 3, 64), (16, 8, 128), (4, 4, 32), (6, 2, 48)]
    if device.type == "cpu":
        shapes = [(9, 3, 64), (4, 4, 32), (6, 2, 48)]  # the interpreter is slow
    rows = []
    for heads, kv_heads, size in shapes:
        for dtype in dtypes:
            shape = {"heads": heads, "kv_heads": kv_heads, "size": size, "dtype": dtype}
            _, used = choose(device=device, **shape)  # type: ignore[arg-type]  # as named
            found: dict[str, Any] = {**shape, "dtype": str(dtype)[6:], "used": used}
            if used.startswith("Triton"):
                found["error"] = largest_error(by_triton, heads, kv_heads, size, dtype, device)
            rows.append(found)
            if device.type == "cpu" and size != 64:
                break
    return rows


def machine_of(device: torch.device) -> Machine:
    """Bytes a second of a large sum, FLOP/s of a large product, in bf16."""
    size = 2**30 if device.type == "cuda" else 2**24
    numbers = torch.ones(size, dtype=torch.bfloat16, device=device)
    square = torch.ones(8192 if device.type == "cuda" else 256, device=device).bfloat16()
    square = square.expand(len(square), -1).contiguous()
    sum_s = _best_s(lambda: numbers.sum(), device)
    product_s = _best_s(lambda: square @ square, device)
    return Machine(2 * size / sum_s, 2 * len(square) ** 3 / product_s)


def _best_s(work: Any, device: torch.device, times: int = 5) -> float:
    took = []
    for _ in range(times):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        took.append(time.perf_counter() - started)
    return min(took)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@functools.cache
def _words() -> tokenizer.Tokenizer:
    return tokenizer.from_weights(open_weights(BUNDLED_NAME))


def _sequence(number: int, tokens: list[int], blocks: list[int]) -> Sequence:
    words = _words()
    request = JobRequest(
        prompts=(tuple(tokens),), max_tokens=(1,), sampling=Sampling(temperature=0.0)
    )
    made = Sequence(
        Job(number, request, 0), 0, tokens, arrival=number, max_tokens=1, seed=0,
        decoder=words.decoder(), stops=StopMatcher(()),
    )  # fmt: skip
    made.blocks = blocks
    return made


def graphs(device: torch.device) -> Rows:
    """Where there are no graphs, plain steps are compared with themselves."""
    runner = open_on(open_weights(BUNDLED_NAME), device.type, torch.float32, kv_blocks=64)
    told = []
    for is_on in (True, False):
        if not is_on:
            runner.decoder._graphs = None
        prompt = list(range(300, 400))
        sequences = [
            _sequence(i, [i + 20, *prompt], [3 * i, 3 * i + 1, 3 * i + 2]) for i in range(3)
        ]
        runner.run([Row(s, 0, len(s.tokens)) for s in sequences])
        for _ in range(24 if device.type == "cuda" else 2):
            rows = [Row(s, len(s.tokens) - 1, 1) for s in sequences]
            for s, token in zip(sequences, runner.decoder.logits(rows)[1], strict=True):
                s.append(token)
        told.append([s.tokens for s in sequences])
    return [{"same_tokens": told[0] == told[1], "attention": runner.decoder.summary}]


def smollm2(device: torch.device) -> Rows:
    machine = machine_of(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    runner = open_on(open_weights(BUNDLED_NAME), device.type, dtype, kv_blocks=64 * 8)
    rows = []
    for batch in (1, 64) if device.type == "cuda" else (1,):
        sequences = [
            _sequence(i, list(range(20, 220)), [4 * i + j for j in range(4)]) for i in range(batch)
        ]
        step = [Row(s, 199, 1) for s in sequences]
        runner.run(step)
        took_s = _best_s(lambda: runner.run(step), device, times=50)  # noqa: B023  # called at once
        limit = decode_limit(machine, runner.facts, batch=batch, context=200)
        rows.append(_row(f"SmolLM2 decode at {batch}, context 200", batch / took_s, limit))
    return rows


QWEN3 = ModelShape(
    layers=28, hidden=1024, feed_forward=3072, heads=16, kv_heads=8, head_dim=128, vocab=151_936,
    context=4096, rope=Rope(base=1_000_000.0), norm_epsilon=1e-6,
)  # fmt: skip


def qwen3(device: torch.device) -> Rows:
    """The workload of nano-vllm's benchmark, through the whole engine."""
    is_cuda = device.type == "cuda"
    shape = QWEN3 if is_cuda else ModelShape(
        layers=2, hidden=64, feed_forward=128, heads=4, kv_heads=2, head_dim=32, vocab=300,
        context=4096, rope=Rope(base=1e6), norm_epsilon=1e-6,
    )  # fmt: skip
    count, most = (256, 1024) if is_cuda else (4, 24)
    least = 100 if is_cuda else 4
    rng = random.Random(0)
    requests = [
        (
            [rng.randrange(shape.vocab - 1) for _ in range(rng.randint(least, most))],
            rng.randint(least, most),
        )
        for _ in range(count)
    ]
    blocks = sum(blocks_for(len(p) + n) for p, n in requests) + count
    machine = machine_of(device)
    dtype = torch.bfloat16 if is_cuda else torch.float32
    parameters = random_parameters(shape, device=device, dtype=dtype)
    decoder = DeviceDecoder(shape, parameters, kv_blocks=blocks)
    runner = DeviceRunner(decoder, kv_blocks=blocks, digest="random")
    words = _words()

    async def go() -> float:
        engine = Engine(
            load=lambda: runner, tokenizer=words, clock=SystemClock(), emit=discard,
            max_batch_size=count, max_batch_tokens=8192, prefix_cache=False,
        )  # fmt: skip
        engine.start()
        await engine.loaded()
        started = time.perf_counter()

        async def ask(prompt: list[int], output: int) -> None:
            stream = engine.submit(
                JobRequest(
                    prompts=(tuple(prompt),), max_tokens=(output,), ignore_eos=True,
                    sampling=Sampling(temperature=0.0),
                )
            )  # fmt: skip
            while not isinstance((await stream.next())[-1], Done):
                pass

        await asyncio.gather(*(ask(prompt, output) for prompt, output in requests))
        took_s = time.perf_counter() - started
        await engine.close()
        return took_s

    took_s = asyncio.run(go())
    tokens = sum(output for _, output in requests)
    facts = runner.facts
    read = sum(n * len(p) + n * n / 2 for p, n in requests) * facts.kv_token_bytes
    weights = (
        max(n for _, n in requests) * (facts.body_params + facts.head_params) * facts.weight_bytes
    )
    prefill_s = sum(len(p) / prefill_limit(machine, facts, len(p)) for p, _ in requests)
    limit = tokens / ((read + weights) / machine.bytes_s + prefill_s)
    pool_gb = blocks * BLOCK_TOKENS * facts.kv_token_bytes / 1e9
    return [
        _row(f"{count} sequences of {least}-{most} in and out", tokens / took_s, limit)
        | {"attention": decoder.summary, "kv_pool_gb": round(pool_gb, 1)}
    ]


def _row(what: str, rate: float, limit: float) -> dict[str, Any]:
    share = round(100 * rate / limit, 1)
    return {"what": what, "tok_s": round(rate, 1), "limit_tok_s": round(limit, 1), "percent": share}


PARTS = {"kernels": kernels, "graphs": graphs, "smollm2": smollm2, "qwen3": qwen3}


@click.command()
@click.argument("part", type=click.Choice([*PARTS, "all"]))
@click.option("--device", default="cuda", type=click.Choice(["cuda", "cpu"]))
def main(part: str, device: str) -> None:
    """Run one part or all."""
    for name in PARTS if part == "all" else [part]:
        rows = PARTS[name](torch.device(device))
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
