"""`meterline engine info` and `meterline engine bench`: what an engine is on this machine, and what
it reaches beside what the machine could reach at most, measured in the same run.

Every rate is that of a whole engine, from submitted requests to their last tokens, without HTTP.
The best of a few rounds is taken: other processes only ever make it slower. With `--one-core` all
seconds are CPU seconds of a process with one compute thread, which others hardly disturb.
"""

import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import click
import msgspec
from msgspec import Struct

from backends.engine import roofline, tokenizer
from backends.engine.engine import Engine
from backends.engine.errors import StartFailed
from backends.engine.gguf import GgufFile
from backends.engine.kv import BLOCK_TOKENS
from backends.engine.native.library import Toolchain
from backends.engine.roofline import Machine
from backends.engine.runner import CpuRunner
from backends.engine.serve import cache_folder, default_threads, prepare_environment
from backends.engine.shape import pool_blocks, read_shape
from backends.engine.spans import discard
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import Delta, Done, JobRequest, Row, Sampling, StepResult
from backends.engine.weights import BUNDLED_NAME, open_weights
from telemetry.clock import SystemClock

OUTPUT = 48
PROMPT = 40
KV_BLOCKS = 200
PROSE = """
The harbour wakes before the town does. At four the first lamps come on along the quay, and the
men who unload the night boats stand with their hands around paper cups and say little. By five
the ice has been shovelled, the crates are stacked by weight and by owner, and somebody has begun
to argue about the price of mackerel. A clerk walks between the rows with a board and a pencil; he
writes down what each boat has brought, how much of it was sold, and to whom, and what was left.
Nobody likes him, and nobody would land a single crate without him, because on the first of the
month his columns decide what everyone is paid. He has never once been wrong by more than a box.
"""
CODE = """
def area_of_square(side):
    return side * side


def area_of_circle(radius):
    return 3.14 * radius * radius


def area_of_rectangle(width, height):
    return width * height


def area_of_triangle("""

Request = tuple[Sequence[int], int]  # prompt, tokens to generate
Found = TypeVar("Found")


class Figure(Struct, frozen=True):
    """One measured number. `limit`: what the machine allows at most, where that is known."""

    what: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def of_limit(self) -> int | None:
        return None if self.limit is None else round(100 * self.value / self.limit)


class Timed:
    """What one request saw."""

    def __init__(self) -> None:
        self.first_s = 0.0
        self.tokens = 0
        self.text = ""


class Run(Struct, frozen=True):
    """All requests of one measurement."""

    took_s: float
    seen: list[Timed]

    def decode_rate(self, output: int) -> float:
        """Of one request alone: tokens a second after the first."""
        return (output - 1) / (self.took_s - self.seen[0].first_s)

    @property
    def first_p50_s(self) -> float:
        return statistics.median(one.first_s for one in self.seen)


class Rig:
    """One model; an engine around it for each measurement."""

    def __init__(
        self, runner: CpuRunner, words: Tokenizer, *, rounds: int = 3, by_cpu: bool = False
    ) -> None:
        """`by_cpu`: seconds are those of the process, not those of the wall."""
        self.now = time.process_time if by_cpu else time.perf_counter
        self.runner = runner
        self.words = words
        self.rounds = rounds
        self.texts = words.encode(PROSE + CODE) * 8

    def prompt(self, number: int, count: int) -> list[int]:
        """One that begins unlike the others."""
        at = (number * 37) % 250
        text = (self.texts * (1 + count // len(self.texts) + 1))[at : at + count - 1]
        return [number + 20, *text]

    def measure(
        self,
        requests: Sequence[Request],
        *,
        groups: int | None = None,
        prefix_cache: bool = False,
        max_drafts: int = 0,
        first: Sequence[int] | None = None,
        rounds: int | None = None,
    ) -> Run:
        """All at once, or in groups of that size, each begun when the one before has ended.
        `first` is asked before the clock starts."""

        async def go() -> Run:
            engine = Engine(
                load=lambda: self.runner, tokenizer=self.words, clock=SystemClock(), emit=discard,
                prefix_cache=prefix_cache, max_drafts=max_drafts,
            )  # fmt: skip
            engine.start()
            await engine.loaded()
            if first is not None:
                await _ask(engine, first, 1, self.now)
            started = self.now()
            size = groups or len(requests)
            seen: list[Timed] = []
            for at in range(0, len(requests), size):
                group = requests[at : at + size]
                seen += await asyncio.gather(
                    *(_ask(engine, p, count, self.now) for p, count in group)
                )
            took_s = self.now() - started
            await engine.close()
            return Run(took_s, seen)

        runs = [asyncio.run(go()) for _ in range(rounds or self.rounds)]
        return min(runs, key=lambda found: found.took_s)


async def _ask(
    engine: Engine, prompt: Sequence[int], output: int, now: Callable[[], float]
) -> Timed:
    """Greedy, to its length."""
    seen = Timed()
    started = now()
    stream = engine.submit(
        JobRequest(
            prompts=(tuple(prompt),), max_tokens=(output,), ignore_eos=True,
            sampling=Sampling(temperature=0.0),
        )
    )  # fmt: skip
    while True:
        for news in await stream.next():
            match news:
                case Delta():
                    seen.text += news.text
                    seen.first_s = seen.first_s or now() - started
                case Done(usage):
                    seen.tokens = usage.completion_tokens
                    seen.first_s = seen.first_s or now() - started
                    return seen
                case _:
                    raise RuntimeError(str(news))


# ── the measurements ──────────────────────────────────────────────────────────────────────────


def basics(rig: Rig, machine: Machine) -> list[Figure]:
    """Prefill, first token, decode at 1, 8 and 16."""
    facts = rig.runner.facts
    took_s = rig.measure([(rig.prompt(1, 512), 1)]).took_s
    limit = roofline.prefill_limit(machine, facts, 512)
    found = [Figure("prefill of 512", 512 / took_s, "tok/s", limit)]
    took_s = rig.measure([(rig.prompt(2, PROMPT), 1)]).took_s
    found.append(Figure(f"first token after {PROMPT}", took_s * 1e3, "ms"))
    for batch in (1, 8, 16):
        requests = [(rig.prompt(i, PROMPT), OUTPUT) for i in range(batch)]
        rate = batch * OUTPUT / rig.measure(requests).took_s
        limit = roofline.served_limit(machine, facts, batch, PROMPT, OUTPUT)
        found.append(Figure(f"{batch} at once, {PROMPT}+{OUTPUT}", rate, "out tok/s", limit))
    return found


def mixed_requests(rig: Rig, count: int = 32) -> list[Request]:
    """Lengths spread as in logs of chats: many short answers and a few long ones."""
    rng = random.Random(7)  # noqa: S311  # the same lengths everywhere
    return [
        (
            rig.prompt(i, min(300, max(16, round(rng.lognormvariate(4.2, 0.8))))),
            min(160, max(4, round(rng.lognormvariate(3.2, 0.9)))),
        )
        for i in range(count)
    ]


def padded(requests: Sequence[Request], size: int) -> list[Request]:
    """What a static batch computes: every prompt padded to the group's longest, every answer
    computed until the longest is done."""
    result: list[Request] = []
    for at in range(0, len(requests), size):
        group = requests[at : at + size]
        longest = max(len(prompt) for prompt, _ in group)
        output = max(count for _, count in group)
        result += [([*prompt, *[1] * (longest - len(prompt))], output) for prompt, _ in group]
    return result


def mixed(rig: Rig, machine: Machine, *, with_static: bool = True) -> list[Figure]:
    requests = mixed_requests(rig)
    wanted = sum(count for _, count in requests)
    run = rig.measure(requests)
    mean = sum(len(prompt) for prompt, _ in requests) / len(requests)
    limit = roofline.served_limit(machine, rig.runner.facts, 16, mean, wanted / len(requests))
    found = [
        Figure("32 mixed, continuous", wanted / run.took_s, "out tok/s", limit),
        Figure("32 mixed, continuous, first token p50", run.first_p50_s * 1e3, "ms"),
    ]
    if with_static:
        run = rig.measure(padded(requests, 16), groups=16, rounds=1)
        name = "32 mixed, static batches of 16"
        found.append(Figure(name, wanted / run.took_s, "out tok/s", limit))
    return found


def shared_prefix(rig: Rig) -> list[Figure]:
    shared = list(rig.texts[:400])
    requests = [([*shared, *rig.prompt(i, 20)], 32) for i in range(16)]
    found = []
    for name, is_kept in (("without reuse", False), ("with reuse", True)):
        run = rig.measure(requests, prefix_cache=is_kept, first=shared, rounds=2)
        rate = 16 * 32 / run.took_s
        found.append(Figure(f"16 sharing 400 tokens, {name}", rate, "out tok/s"))
        first_ms = run.first_p50_s * 1e3
        found.append(Figure(f"16 sharing 400, {name}, first token p50", first_ms, "ms"))
    return found


def guessing(rig: Rig, *, max_drafts: int = 6, output: int = 96) -> list[Figure]:
    prose = rig.words.encode(PROSE)
    cases = {
        "verbatim": prose[:150] + prose[:30],
        "code": rig.words.encode(CODE),
        "free text": prose[:60],
    }
    found = []
    for name, prompt in cases.items():
        texts = set()
        for how, drafts in (("off", 0), ("on", max_drafts)):
            run = rig.measure([(prompt, output)], max_drafts=drafts, rounds=2)
            texts.add(run.seen[0].text)
            found.append(Figure(f"guessing {how}, {name}", run.decode_rate(output), "out tok/s"))
        assert len(texts) == 1, "guesses must not change a text"
    return found


def overhead(rig: Rig) -> list[Figure]:
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
        rig.measure([(rig.prompt(i, PROMPT), OUTPUT) for i in range(16)])
    finally:
        rig.runner.run = run_step  # type: ignore[method-assign]  # as it was
    gaps = [b[0] - a[1] for a, b in pairwise(stamps) if a[2] == b[2] == 16]
    steps = [end - start for start, end, rows in stamps if rows == 16]
    return [
        Figure("step of 16, in the runner", statistics.median(steps) * 1e3, "ms"),
        Figure("step of 16, around it", statistics.median(gaps) * 1e3, "ms"),
    ]


# ── the commands ──────────────────────────────────────────────────────────────────────────────


class Chosen(Struct, frozen=True, kw_only=True):
    """From the command line; as the settings of the same names."""

    model: str = BUNDLED_NAME
    kernels: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    kv_memory_gb: float = 0.5
    one_core: bool = False


def threads_of(chosen: Chosen) -> int:
    return 1 if chosen.one_core else chosen.threads or default_threads()


def open_runner(file: GgufFile, chosen: Chosen, kv_blocks: int) -> CpuRunner:
    return CpuRunner(
        file, kv_blocks=kv_blocks, threads=threads_of(chosen),
        dtype=chosen.dtype, kernels=chosen.kernels,  # type: ignore[arg-type]  # click checked them
        tools=Toolchain.of_this_machine(cache_folder(os.environ)),
    )  # fmt: skip


def info_of(chosen: Chosen) -> dict[str, Any]:
    """The model, what it would be computed with, and what this machine allows."""
    file = open_weights(chosen.model)
    shape = read_shape(file)
    blocks = pool_blocks(shape, chosen.kv_memory_gb)
    threads = threads_of(chosen)
    runner = open_runner(file, chosen, blocks)
    machine = roofline.measure(threads)
    facts = runner.facts
    params = facts.body_params + facts.head_params
    return {
        "model": {
            "file": str(file.path),
            "parameters": params,
            "layers": shape.layers,
            "hidden": shape.hidden,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "vocabulary": shape.vocab,
            "context": shape.context,
        },
        "computes_with": {
            "kernels": runner.summary,
            "identity": facts.identity,
            "is_strict": facts.is_strict,
        },
        "memory": {
            "weights_mb": round(params * facts.weight_bytes / 1e6, 1),
            "kv_pool_mb": round(blocks * BLOCK_TOKENS * facts.kv_token_bytes / 1e6, 1),
            "kv_blocks": blocks,
            "kv_tokens": blocks * BLOCK_TOKENS,
            "kv_bytes_per_token": facts.kv_token_bytes,
        },
        "machine": {
            "threads": threads,
            "read_gb_s": round(machine.bytes_s / 1e9, 1),
            "fp32_gflop_s": round(machine.flops_s / 1e9, 1),
        },
        "limits_tok_s": {
            "prefill_512": round(roofline.prefill_limit(machine, facts, 512)),
            **{
                f"decode_{batch}_context_200": round(
                    roofline.decode_limit(machine, facts, batch=batch, context=200)
                )
                for batch in (1, 8, 16)
            },
        },
    }


def figures_of(
    chosen: Chosen, *, quick: bool, told: Callable[[Figure], None] = lambda figure: None
) -> list[Figure]:
    """Measure; `told` hears of each as it comes."""
    file = open_weights(chosen.model)
    words = tokenizer.from_gguf(file)
    runner = open_runner(file, chosen, KV_BLOCKS)
    machine = roofline.measure(threads_of(chosen))
    rig = Rig(runner, words, rounds=1 if quick else 3, by_cpu=chosen.one_core)
    parts: list[Callable[[], list[Figure]]] = [
        lambda: [
            Figure("memory read", machine.bytes_s / 1e9, "GB/s"),
            Figure("fp32 products", machine.flops_s / 1e9, "GFLOP/s"),
        ],
        lambda: basics(rig, machine),
        lambda: overhead(rig),
    ]
    if not quick:
        parts += [
            lambda: mixed(rig, machine),
            lambda: shared_prefix(rig),
            lambda: guessing(rig),
        ]
    found: list[Figure] = []
    for part in parts:
        for figure in part():
            told(figure)
            found.append(figure)
    return found


def _options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        (
            click.option("--model", default=BUNDLED_NAME, show_default=True),
            click.option(
                "--kernels", default="auto", type=click.Choice(["auto", "native", "torch"])
            ),
            click.option(
                "--dtype", default="auto", type=click.Choice(["auto", "float32", "float16"])
            ),
            click.option("--threads", type=click.IntRange(min=1), help="Default: physical cores."),
            click.option("--kv-memory-gb", default=0.5, type=click.FloatRange(0, min_open=True)),
            click.option("--json", "as_json", is_flag=True, help="For programs."),
        )
    ):
        command = option(command)
    return command


@click.group()
def main() -> None:
    """What an engine is and does on this machine."""


@main.command()
@_options
def info(*, as_json: bool, **given: Any) -> None:
    """Model, kernels, memory plan and the limits of this machine."""
    found = _or_refuse(lambda: info_of(Chosen(**given)))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    for title, facts in found.items():
        click.echo(title.replace("_", " "))
        for name, value in facts.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            shown = f"{value:,}" if is_number else value
            click.echo(f"  {name.replace('_', ' '):24} {shown}")


@main.command()
@_options
@click.option("--quick", is_flag=True, help="One round, the basic rows.")
@click.option("--one-core", is_flag=True, help="One thread, and its CPU seconds.")
def bench(*, as_json: bool, quick: bool, **given: Any) -> None:
    """Measure rates, each beside what this machine allows."""

    def told(figure: Figure) -> None:
        if not as_json:
            share = "" if figure.of_limit is None else f"{figure.of_limit} % of the limit"
            click.echo(f"{figure.what:44} {figure.value:10,.1f} {figure.unit:14} {share}")

    found = _or_refuse(lambda: figures_of(Chosen(**given), quick=quick, told=told))
    if as_json:
        rows = [
            {"what": f.what, "value": round(f.value, 2), "unit": f.unit, "of_limit": f.of_limit}
            for f in found
        ]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)))


def _or_refuse(work: Callable[[], Found]) -> Found:
    prepare_environment(os.environ)
    try:
        return work()
    except StartFailed as error:
        sys.stderr.write(f"meterline engine: {error.message}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
