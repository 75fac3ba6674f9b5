"""The engine without HTTP: prefill, decode at 1, 8 and 16, mixed requests, shared prefixes, static
against continuous batching, guessing on and off; beside transformers and llama.cpp where they are
installed. Every rate stands beside the limit that this machine sets in the same run.

The smallest of a few rounds is taken: other processes only ever make it slower.
"""

import asyncio
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from backends.engine import tokenizer
from backends.engine.engine import Engine
from backends.engine.gguf import GgufFile
from backends.engine.kv import blocks_for
from backends.engine.native.library import Toolchain
from backends.engine.runner import CpuRunner
from backends.engine.serve import cache_folder, default_threads, prepare_environment
from backends.engine.spans import discard
from backends.engine.stops import StopMatcher
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import Delta, Done, Job, JobRequest, Row, Sampling, StepResult
from backends.engine.types import Sequence as Choice
from backends.engine.weights import BUNDLED_NAME, open_weights
from telemetry.clock import SystemClock
from tests.bench import roofline
from tests.bench.report import Table

ROUNDS = 3
OUTPUT = 48
PROMPT = 40
KV_BLOCKS = 170
DATA = Path(__file__).parents[1] / "data"


class Timed:
    """What one request saw."""

    def __init__(self) -> None:
        self.first_s = 0.0
        self.tokens = 0


async def ask(engine: Engine, prompt: Sequence[int], output: int) -> Timed:
    """Greedy, to its length."""
    seen = Timed()
    started = time.perf_counter()
    request = JobRequest(
        prompts=(tuple(prompt),), max_tokens=(output,), ignore_eos=True,
        sampling=Sampling(temperature=0.0),
    )  # fmt: skip
    stream = engine.submit(request)
    while True:
        for news in await stream.next():
            match news:
                case Delta():
                    seen.first_s = seen.first_s or time.perf_counter() - started
                case Done(usage):
                    seen.tokens = usage.completion_tokens
                    seen.first_s = seen.first_s or time.perf_counter() - started
                    return seen
                case _:
                    raise RuntimeError(str(news))


class _Rows(Table):
    """A row may have no limit to stand beside. Shown as they come: all take minutes."""

    def add(self, *cells: object) -> None:
        super().add(*cells, *[""] * (len(self.columns) - len(cells)))
        sys.stderr.write(" | ".join(map(str, cells)) + "\n")


class Rig:
    """One runner; an engine around it for each measurement."""

    def __init__(
        self,
        file: GgufFile,
        words: Tokenizer,
        *,
        kernels: str,
        dtype: str,
        threads: int | None = None,
    ) -> None:
        self.words = words
        self.runner = CpuRunner(
            file, kv_blocks=KV_BLOCKS, threads=threads or default_threads(),
            dtype=dtype, kernels=kernels,  # type: ignore[arg-type]  # Literals
            tools=Toolchain.of_this_machine(cache_folder(os.environ)),
        )  # fmt: skip
        self.name = "torch float32" if kernels == "torch" else f"compiled {dtype}"

    def measure(
        self,
        requests: Sequence[tuple[Sequence[int], int]],
        *,
        groups: int | None = None,
        prefix_cache: bool = False,
        max_drafts: int = 0,
        first: Sequence[int] | None = None,
    ) -> tuple[float, list[Timed]]:
        """Seconds, and what each saw: all at once, or in static groups of that size, each begun
        when the one before has ended. `first` is asked before the clock starts."""

        async def go() -> tuple[float, list[Timed]]:
            engine = Engine(
                load=lambda: self.runner, tokenizer=self.words, clock=SystemClock(), emit=discard,
                prefix_cache=prefix_cache, max_drafts=max_drafts,
            )  # fmt: skip
            engine.start()
            await engine.loaded()
            if first is not None:
                await ask(engine, first, 1)
            started = time.perf_counter()
            size = groups or len(requests)
            seen: list[Timed] = []
            for at in range(0, len(requests), size):
                group = requests[at : at + size]
                seen += await asyncio.gather(*(ask(engine, p, count) for p, count in group))
            took = time.perf_counter() - started
            await engine.close()
            return took, seen

        return min((asyncio.run(go()) for _ in range(ROUNDS)), key=lambda found: found[0])


def _loading(table: _Rows) -> None:
    """In a fresh process, the second of two: the file is in the page cache then."""
    for _ in range(2):
        child = subprocess.run(
            [sys.executable, "-m", "tests.bench.loading"], capture_output=True, check=True
        )
        found = json.loads(child.stdout)
    table.add("load, file to first step", "compiled auto", round(found["load_s"], 2), "s")
    table.add("imports before it", "torch", round(found["import_s"], 2), "s")
    table.add("resident, KV pool untouched", "compiled auto", round(found["empty_gb"], 2), "GB")
    table.add("resident, KV pool of 0.5 GB full", "compiled auto", round(found["full_gb"], 2), "GB")


def run() -> Table:
    prepare_environment(os.environ)
    file = open_weights(BUNDLED_NAME)
    words = tokenizer.from_gguf(file)
    machine = roofline.measure(default_threads())
    table = _Rows("engine", ["what", "with", "value", "unit", "of the limit, %"])
    table.add("memory read", "this machine", round(machine.bytes_s / 1e9, 1), "GB/s")
    table.add("fp32 products", "this machine", round(machine.flops_s / 1e9, 1), "GFLOP/s")
    _loading(table)
    texts = _texts(words)
    _one_core(table, file, words, texts)
    for kernels, dtype in (("native", "auto"), ("native", "float32"), ("torch", "float32")):
        rig = Rig(file, words, kernels=kernels, dtype=dtype)
        _basics(table, rig, machine, texts)
        if dtype == "auto":
            _mixed(table, rig, texts)
            _shared_prefix(table, rig, texts)
            _guessing(table, rig, texts)
            _overhead(table, rig, texts)
    if importlib.util.find_spec("llama_cpp"):
        _llama_cpp(table, file.path, texts)
    if importlib.util.find_spec("transformers"):
        _transformers(table, file.path, texts)
    return table


def _one_core(table: _Rows, file: GgufFile, words: Tokenizer, texts: Sequence[int]) -> None:
    """The decoders alone on one thread, in its CPU time: what others do at the same time hardly
    shows here."""
    for kernels, dtype in (("native", "auto"), ("native", "float32"), ("torch", "float32")):
        rig = Rig(file, words, kernels=kernels, dtype=dtype, threads=1)
        pool = iter(range(KV_BLOCKS))

        def row(number: int, start: int, count: int, pool: Iterator[int] = pool) -> Row:
            prompt = _some(texts, number, start + count)
            request = JobRequest(
                prompts=(tuple(prompt),), max_tokens=(1,), sampling=Sampling(temperature=0.0)
            )
            sequence = Choice(
                Job(number, request, 0), 0, prompt, arrival=number, max_tokens=1, seed=0,
                decoder=words.decoder(), stops=StopMatcher(()),
            )  # fmt: skip
            sequence.blocks = [next(pool) for _ in range(blocks_for(start + count))]
            return Row(sequence, start, count)

        prompt = row(99, 0, 512)
        rate = round(512 / _cpu_s(rig, [prompt]), 1)
        table.add("one core: prefill of 512", rig.name, rate, "tok/CPU-s")
        rows = [row(i, 199, 1) for i in range(16)]
        for batch in (1, 8, 16):
            took_ms = round(_cpu_s(rig, rows[:batch]) * 1e3, 1)
            table.add(f"one core: step of {batch}, context 200", rig.name, took_ms, "CPU-ms")


def _cpu_s(rig: Rig, rows: Sequence[Row]) -> float:
    took = []
    for _ in range(ROUNDS + 2):
        started = time.thread_time()
        rig.runner.run(rows)
        took.append(time.thread_time() - started)
    return min(took)


def _texts(words: Tokenizer) -> list[int]:
    """Some thousand tokens of prose and code, always the same."""
    text = (DATA / "quality" / "harbour.txt").read_text()
    text += (DATA / "golden" / "make_tokenizer.py").read_text()
    return words.encode(text) * 8


def _some(texts: Sequence[int], number: int, count: int) -> list[int]:
    """A prompt that begins unlike the others."""
    at = (number * 37) % 700
    return [number + 20, *texts[at : at + count - 1]]


def _rate(requests: Sequence[tuple[Sequence[int], int]], took_s: float) -> float:
    return round(sum(count for _, count in requests) / took_s, 1)


def _basics(table: _Rows, rig: Rig, machine: roofline.Machine, texts: Sequence[int]) -> None:
    facts = rig.runner.facts
    took, _ = rig.measure([(_some(texts, 1, 512), 1)])
    limit = roofline.prefill_limit(machine, facts, 512)
    table.add(
        "prefill of 512", rig.name, round(512 / took, 1), "tok/s", _percent(512 / took, limit)
    )
    took, _ = rig.measure([(_some(texts, 2, PROMPT), 1)])
    table.add(f"first token after {PROMPT}", rig.name, round(took * 1e3, 1), "ms")
    for batch in (1, 8, 16):
        requests = [(_some(texts, i, PROMPT), OUTPUT) for i in range(batch)]
        took, _ = rig.measure(requests)
        rate = _rate(requests, took)
        limit = roofline.decode_limit(machine, facts, batch=batch, context=PROMPT + OUTPUT / 2)
        table.add(
            f"{batch} at once, {PROMPT}+{OUTPUT}",
            rig.name,
            rate,
            "out tok/s",
            _percent(rate, limit),
        )


def _mixed(table: _Rows, rig: Rig, texts: Sequence[int]) -> None:
    rng = random.Random(7)
    for count in (16, 32):
        requests = [
            (_some(texts, i, rng.randrange(16, 300)), rng.randrange(8, 120)) for i in range(count)
        ]
        for name, groups in (("continuous", None), ("static batches of 16", 16)):
            if groups == count:
                continue
            took, seen = rig.measure(requests, groups=groups)
            first = statistics.median(one.first_s for one in seen)
            table.add(f"{count} mixed, {name}", rig.name, _rate(requests, took), "out tok/s")
            table.add(
                f"{count} mixed, {name}, first token p50", rig.name, round(first * 1e3), "ms", ""
            )


def _shared_prefix(table: _Rows, rig: Rig, texts: Sequence[int]) -> None:
    shared = list(texts[:400])
    requests = [([*shared, *_some(texts, i, 20)], 32) for i in range(16)]
    for name, is_kept in (("without reuse", False), ("with reuse", True)):
        took, seen = rig.measure(requests, prefix_cache=is_kept, first=shared)
        first = statistics.median(one.first_s for one in seen)
        table.add(
            f"16 sharing 400 tokens, {name}", rig.name, _rate(requests, took), "out tok/s", ""
        )
        table.add(
            f"16 sharing 400, {name}, first token p50", rig.name, round(first * 1e3), "ms", ""
        )


def _guessing(table: _Rows, rig: Rig, texts: Sequence[int]) -> None:
    prose = list(texts[:150])
    code = rig.words.encode(
        "def area_of_square(side):\n    return side * side\n\n\ndef area_of_circle(radius):\n"
        "    return 3.14 * radius * radius\n\n\ndef area_of_rectangle(width, height):\n"
        "    return width * height\n\n\ndef area_of_triangle("
    )
    cases = {"verbatim": prose + prose[:30], "code": code, "free text": prose[:60]}
    for name, prompt in cases.items():
        rates = []
        for drafts in (0, 6):
            took, _ = rig.measure([(prompt, 100)], max_drafts=drafts)
            rates.append(100 / took)
        table.add(f"guessing off, {name}", rig.name, round(rates[0], 1), "out tok/s")
        table.add(f"guessing on, {name}", rig.name, round(rates[1], 1), "out tok/s")


def _overhead(table: _Rows, rig: Rig, texts: Sequence[int]) -> None:
    """What passes between two steps of 16: everything but the runner."""
    stamps: list[tuple[float, float, int]] = []
    run_step = rig.runner.run

    def timed(rows: Sequence[Row]) -> StepResult:
        started = time.perf_counter()
        result = run_step(rows)
        stamps.append((started, time.perf_counter(), len(rows)))
        return result

    rig.runner.run = timed  # type: ignore[method-assign]  # put back below
    try:
        rig.measure([(_some(texts, i, PROMPT), OUTPUT) for i in range(16)])
    finally:
        rig.runner.run = run_step  # type: ignore[method-assign]  # as it was
    gaps = [b[0] - a[1] for a, b in pairwise(stamps) if a[2] == b[2] == 16]
    steps = [end - start for start, end, rows in stamps if rows == 16]
    table.add("step of 16, in the runner", rig.name, _ms(steps), "ms")
    table.add("step of 16, around it", rig.name, _ms(gaps), "ms")


def _ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 2)


def _llama_cpp(table: _Rows, path: Path, texts: Sequence[int]) -> None:
    """One sequence; its Python binding has no continuous batching to measure."""
    from llama_cpp import Llama

    model = Llama(
        str(path), n_ctx=1024, n_threads=default_threads(), n_threads_batch=default_threads(),
        n_batch=512, verbose=False,
    )  # fmt: skip

    def best(work) -> float:  # type: ignore[no-untyped-def]  # a closure
        took = []
        for _ in range(ROUNDS):
            model.reset()
            started = time.perf_counter()
            work()
            took.append(time.perf_counter() - started)
        return min(took)

    took = best(lambda: model.eval(_some(texts, 1, 512)))
    table.add("prefill of 512", "llama.cpp", round(512 / took, 1), "tok/s")

    def decode() -> None:
        model.eval(_some(texts, 2, PROMPT))
        for _ in range(OUTPUT):
            model.eval([model.sample(temp=0.0)])

    table.add(
        f"1 at once, {PROMPT}+{OUTPUT}",
        "llama.cpp",
        round(OUTPUT / best(decode), 1),
        "out tok/s",
        "",
    )


def _transformers(table: _Rows, path: Path, texts: Sequence[int]) -> None:
    """Static batches in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(default_threads())
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    for batch in (1, 8, 16):
        ids = torch.tensor([_some(texts, i, PROMPT) for i in range(batch)])
        started = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=OUTPUT,
            max_new_tokens=OUTPUT, pad_token_id=0,
        )  # fmt: skip
        rate = batch * OUTPUT / (time.perf_counter() - started)
        table.add(
            f"{batch} at once, {PROMPT}+{OUTPUT}", "transformers", round(rate, 1), "out tok/s", ""
        )


def _percent(rate: float, limit: float) -> int:
    return round(100 * rate / limit)
