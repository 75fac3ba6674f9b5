"""Faults of device, sampler, tokenizer and swap file: each fails its own request at most, nothing
leaks, the engine lives. The device is made of Python, and its blocks hold the tokens themselves, so
that a block in the wrong place or not written fails the test."""

import asyncio
import os
import random
from typing import BinaryIO

from typing_extensions import override

from backends.engine.engine import Engine, State, Stream
from backends.engine.spans import PhaseSpan
from backends.engine.swap import Rate, file_in
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import (
    Delta,
    Done,
    Failed,
    JobRequest,
    Output,
    Row,
    Sampling,
    StepResult,
    TokenChoice,
)
from telemetry.clock import SystemClock
from tests.fakes.engine import Remembers, follows

BLOCKS = 10


class Dear(Rate):
    """Computing again always takes longer than moving."""

    @property
    def seconds(self) -> float:  # type: ignore[override]  # read-only
        return 10.0

    @seconds.setter
    def seconds(self, value: float) -> None:
        pass


async def to_the_end(stream: Stream, rng: random.Random, *, may_leave: bool) -> list[Output]:
    """All outputs; a client that may leave cancels or stops at some time, or reads slowly."""
    leaves_after = rng.randrange(6) if may_leave else -1
    result: list[Output] = []
    async with asyncio.timeout(120):
        while not result or isinstance(result[-1], Delta):
            if len(result) >= leaves_after >= 0:
                leaves_after = -1
                (stream.cancel if rng.random() < 0.6 else stream.finish)()
            result += await stream.next()
    await asyncio.sleep(0)
    assert not stream._outputs, "nothing comes after the terminal event"
    return result


class Faulty(Remembers):
    """Goes wrong where it is told to, for the job with the unlucky prompt."""

    def __init__(self) -> None:
        super().__init__(kv_blocks=BLOCKS)
        self.fault = ""
        self.files: list[BinaryIO] = []  # of the swap space

    def is_unlucky(self, row: Row) -> bool:
        return row.sequence.tokens[0] == UNLUCKY and row.sequence.n_output >= 1

    @override
    def choose(self, row: Row) -> TokenChoice | Exception:
        if self.is_unlucky(row):
            match self.fault:
                case "not finite":
                    return ArithmeticError("the model produced numbers that are not finite")
                case "impossible token":
                    return TokenChoice(10**6)
                case "sampler":
                    raise KeyError("sampler")
                case "no answer":
                    return None  # type: ignore[return-value]  # it is the fault
        return super().choose(row)

    @override
    def run(self, rows: "list[Row]") -> StepResult:  # type: ignore[override]  # a list it is
        if any(map(self.is_unlucky, rows)):
            match self.fault:
                case "worker":
                    raise RuntimeError("a worker died")
                case "memory":
                    raise MemoryError
        for file in self.files:
            if file.closed or os.fstat(file.fileno()).st_size == 0:
                continue
            match self.fault:
                case "damaged":
                    size = os.fstat(file.fileno()).st_size
                    os.pwrite(file.fileno(), bytes(range(size % 256, 256)) * (size // 256), 0)
                case "truncated":
                    os.ftruncate(file.fileno(), 0)
                case "gone":
                    file.close()
        return super().run(rows)


UNLUCKY = 9


async def test_a_fault_fails_its_request_alone(words: Tokenizer) -> None:
    """Ten faults, one after the other, beside a neighbour that must not notice: the request fails
    or, where nothing is lost but time, is right all the same; the engine goes on."""
    runner = Faulty()
    fault = ""

    def open_file() -> BinaryIO:
        runner.files.append(file_in(None)())
        return runner.files[-1]

    def emit(_: str | None, spans: list[PhaseSpan]) -> None:
        if fault == "spans":
            raise ValueError("no collector")

    engine = Engine(
        load=lambda: runner, tokenizer=words, clock=SystemClock(), emit=emit,
        max_batch_size=4, max_batch_tokens=128, swap_file_bytes=256 * 12, open_swap_file=open_file,
    )  # fmt: skip
    engine.start()
    await engine.loaded()
    engine.pace.token_s = Dear(0.0)

    async def ask(first: int, *, priority: int = 0, output: int = 30, stop: str = "") -> Output:
        prompt = (first, *range(20, 100))
        stream = engine.submit(
            JobRequest(
                prompts=(prompt,), max_tokens=(output,), ignore_eos=True, priority=priority,
                sampling=Sampling(temperature=0.0, logprobs=0), stop=(stop,) if stop else (),
            )
        )  # fmt: skip
        news = await to_the_end(stream, random.Random(1), may_leave=False)
        said = [c.token for o in news if isinstance(o, Delta) for c in o.choices]
        tokens = list(prompt)
        while len(tokens) < len(prompt) + len(said):
            tokens.append(follows(tokens))
        assert said == tokens[len(prompt) :]
        return news[-1]

    for name in ("not finite", "impossible token", "sampler", "no answer", "worker", "memory"):
        runner.fault = name
        unlucky, neighbour = await asyncio.gather(ask(UNLUCKY), ask(8))
        assert isinstance(unlucky, Failed), name
        assert isinstance(neighbour, Done), name
        assert engine.state is State.READY
    runner.fault = ""
    fault = "spans"
    assert isinstance(await ask(UNLUCKY), Done)
    fault = ""
    # Swap: six sequences of four blocks do not fit into ten.
    assert engine.swap is not None
    for name in ("fine", "damaged", "truncated", "gone"):
        lost, saved = engine.swap.lost, engine.swap.saved
        runner.fault = name
        ends = await asyncio.gather(*(ask(10 + i, output=120) for i in range(4)))
        assert all(isinstance(end, Done) for end in ends), name
        assert (engine.swap.lost > lost) == (name in ("damaged", "truncated", "gone")), name
        assert engine.swap.saved > saved
        assert engine.swap.used == 0
    runner.fault = ""
    assert isinstance(await ask(8), Done)
    assert engine.state is State.READY
    assert engine.pool is not None
    engine.pool.check()
    assert engine.pool.used == 0
    assert engine.stats.jobs["failed"] == 6
    await engine.close()
    assert all(file.closed for file in runner.files)
