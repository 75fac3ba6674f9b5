"""The device side of the engine on a CPU: loads weights, computes steps, samples.

With `engine.py` on the other side of the `Runner` protocol: this file knows torch and nothing of
requests' lives, that one the reverse. Two decoders do the same work: the compiled step of
`native`, where it can be built and measures faster, and the torch one.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from backends.engine.embed import Pool
from backends.engine.errors import RequestFailed, StartFailed
from backends.engine.guided import GuideFailed
from backends.engine.model import Model, PackedLinear
from backends.engine.native.library import Library, Toolchain, Unavailable, load
from backends.engine.native.model import NativeModel, check_shape, weight_struct
from backends.engine.native.packing import Dtype, Part, pack
from backends.engine.sampler import sample, score
from backends.engine.shape import ModelShape, read_shape
from backends.engine.types import (
    Drafter,
    ModelFacts,
    Outcome,
    Pooled,
    Row,
    StepResult,
    TokenChoice,
)
from backends.engine.weights import Weights

Kernels = Literal["auto", "native", "torch"]


class Decoder(Protocol):
    """Weights and the KV pool of one model."""

    shape: ModelShape
    weight_bytes: int

    def logits(self, rows: Sequence[Row]) -> tuple[torch.Tensor, list[int] | None]:
        """(rows that a sample is due for, V), and their best ids if it knows them (-1: the row
        holds something that is no number)."""
        ...

    def states(self, tokens: range) -> NDArray[np.float32]:
        """What the head would read of those tokens of the last step."""
        ...

    def copy_block(self, source: int, target: int) -> None: ...

    def read_block(self, block: int) -> memoryview: ...

    def write_block(self, block: int, data: memoryview) -> None: ...


class CpuRunner:
    """One model. Used by one thread. `summary` says what it computes with and why."""

    def __init__(
        self,
        file: Weights,
        *,
        kv_blocks: int,
        threads: int,
        dtype: Dtype = "auto",
        kernels: Kernels = "torch",
        tools: Toolchain | None = None,
        progress: Callable[[float], None] = lambda part: None,
    ) -> None:
        library, reason = _library(file, kernels, dtype, tools)
        self.decoder: Decoder
        if library is None:
            if dtype not in ("auto", "float32"):
                raise StartFailed(f"{dtype} weights need the compiled kernels: {reason}")
            torch.set_num_threads(threads)
            self.decoder = Model(file, kv_blocks=kv_blocks, progress=progress)
            formats = "float32"
        else:
            torch.set_num_threads(1)  # it only samples
            native = NativeModel(
                file, library, kv_blocks=kv_blocks, threads=threads, dtype=dtype, progress=progress
            )
            self.decoder = _Native(native)
            formats = "+".join(native.formats)
        name = "torch" if library is None else "compiled"
        self.summary = f"{name} kernels, {formats} weights, {threads} threads ({reason})"
        self.facts = facts_of(file.digest, self.decoder, kv_blocks, f"{name}/{formats}")
        self.read_block, self.write_block = self.decoder.read_block, self.decoder.write_block
        self.drafter: Drafter | None = None

    def close(self) -> None:
        """Give threads and memory back. It computes no more."""
        if isinstance(self.decoder, _Native):
            self.decoder.close()

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.decoder.copy_block(source, target)

    @torch.inference_mode()
    def run(self, rows: Sequence[Row]) -> StepResult:
        return step_of(self.decoder, rows)


def step_of(decoder: Decoder, rows: Sequence[Row]) -> StepResult:
    """Compute the rows and choose what is due."""
    logits, known = decoder.logits(rows)
    best: Sequence[int | None] = [None] * len(logits) if known is None else known
    started_ns = time.perf_counter_ns()
    choices: list[Outcome] = []
    at = token = 0
    for row in rows:
        mine = range(at, at + row.logits_rows)
        at = mine.stop
        tokens = range(token, token + row.count)
        token = tokens.stop
        if row.sequence.job.request.pooling is not None:
            choices.append(_pooled(decoder, row, tokens))
        elif row.is_scored:
            choices.append(_scored(logits, row, mine))
        elif row.drafts:
            choices.append(_confirmed(logits, best, row, mine))
        elif row.needs_token:
            choices.append(sampled(logits[mine[0]], row, best[mine[0]]))
        else:
            choices.append(None)
    return StepResult(choices, time.perf_counter_ns() - started_ns)


class _Native:
    """The compiled decoder as a `Decoder`: its arrays as tensors, without a copy."""

    def __init__(self, model: NativeModel) -> None:
        self._model = model
        self.shape = model.shape
        self.weight_bytes = model.weight_bytes
        self.copy_block = model.copy_block
        self.states = model.states
        self.close = model.close
        self.read_block, self.write_block = model.read_block, model.write_block

    def logits(self, rows: Sequence[Row]) -> tuple[torch.Tensor, list[int] | None]:
        logits, best = self._model.logits(rows)
        return torch.from_numpy(logits), best


def _library(
    file: Weights, kernels: Kernels, dtype: Dtype, tools: Toolchain | None
) -> tuple[Library | None, str]:
    """The compiled functions if they are to be used, and why or why not."""
    if kernels == "torch":
        return None, "as set"
    try:
        check_shape(read_shape(file))
        if tools is None:
            raise Unavailable("no place to build in")
        library = load(tools)
        if kernels == "native":
            return library, "as set"
        return _faster(file, library, dtype)
    except Unavailable as error:
        if kernels == "native":
            raise StartFailed(f"kernels = native: {error}") from error
        return None, str(error)


def _faster(file: Weights, library: Library, dtype: Dtype) -> tuple[Library | None, str]:
    """Measure one layer's widest matrix both ways on one thread: eight single rows and a chunk of
    64, about what a step of prompts and a few of answers ask for."""
    shape = read_shape(file)
    names = [f"blk.0.{name}.weight" for name in ("ffn_gate", "ffn_up")]
    size = (shape.feed_forward, shape.hidden)
    packed = pack(file, [Part(name, size) for name in names], dtype)
    weight = weight_struct(packed)
    linear = PackedLinear(np.concatenate([file.tensor(name, size) for name in names]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    took_us: dict[str, float] = {"compiled": 0.0, "torch": 0.0}
    for count, times in ((1, 8), (64, 1)):
        x = torch.randn(count, shape.hidden, generator=torch.Generator().manual_seed(1))
        y = torch.empty(count, packed.rows)
        pointer = ctypes.byref(weight)
        compiled = _best_us(lambda: library.linear(pointer, x.data_ptr(), count, y.data_ptr()))  # noqa: B023  # called at once
        took_us["compiled"] += times * compiled
        took_us["torch"] += times * _best_us(lambda: linear(x))  # noqa: B023  # called at once
    torch.set_num_threads(threads)
    measured = ", ".join(f"{name} {us:,.0f} µs" for name, us in took_us.items())
    chosen = library if took_us["compiled"] <= took_us["torch"] else None
    return chosen, f"measured on one matrix: {measured}"


def _best_us(work: Callable[[], object]) -> float:
    took = []
    for _ in range(5):
        started_ns = time.perf_counter_ns()
        work()
        took.append((time.perf_counter_ns() - started_ns) / 1e3)
    return min(took)


def _pooled(decoder: Decoder, row: Row, tokens: range) -> Outcome:
    """Sum up a text's states; after a preemption, from its beginning."""
    sequence = row.sequence
    how = sequence.job.request.pooling
    assert how is not None, "only such rows come here"
    if row.start == 0:
        sequence.pool = Pool(how)
    sequence.pool.add(decoder.states(tokens))
    if not row.ends_text:
        return None
    values = sequence.pool.result()
    return RequestFailed("the text's states are no numbers") if values is None else Pooled(values)


def sampled(logits: torch.Tensor, row: Row, best: int | None) -> TokenChoice | Exception:
    sampling = row.sequence.job.request.sampling
    if best is not None and best >= 0 and sampling.takes_best:
        return TokenChoice(best)
    try:
        return sample(logits.cpu(), row.sequence)
    except (ArithmeticError, RuntimeError, IndexError, ValueError) as error:
        return error  # this sequence fails; its neighbours do not


def _scored(logits: torch.Tensor, row: Row, mine: range) -> Outcome:
    """Note how likely the prompt's next tokens were; at its end, choose one."""
    sequence = row.sequence
    count = sequence.job.request.sampling.prompt_logprobs
    assert count is not None and sequence.scores is not None, "only such rows come here"
    first = len(sequence.scores) - 1  # after a preemption some are known
    known = sequence.tokens[max(row.start, first) + 1 : min(row.context + 1, sequence.n_prompt)]
    begin = mine.start + max(row.start, first) - row.start
    try:
        sequence.scores += score(logits[begin : begin + len(known)].cpu(), known, count)
    except (ArithmeticError, RuntimeError, ValueError) as error:
        return error
    return sampled(logits[mine[-1]], row, None) if row.needs_token else None


def _confirmed(
    logits: torch.Tensor, best: Sequence[int | None], row: Row, mine: range
) -> tuple[TokenChoice, ...] | Exception:
    """Choose token after token, as long as the choice is what was guessed."""
    confirmed: list[TokenChoice] = []
    failure: Exception | None = None
    assumed = 0  # appended for the next choice to see, and taken back
    for at, draft in zip(mine, (*row.drafts, None), strict=True):
        choice = sampled(logits[at], row, best[at])
        if isinstance(choice, Exception):
            failure = choice  # with some confirmed it fails in the next step, at its own turn
            break
        confirmed.append(choice)
        if choice.token != draft:
            break
        try:
            row.sequence.append(choice.token)
        except GuideFailed as error:
            failure = error
            break
        assumed += 1
        if row.sequence.is_complete:
            break
    row.sequence.unsay(assumed)
    if confirmed:
        return tuple(confirmed)
    assert failure is not None, "the first one was chosen or failed"
    return failure


def facts_of(digest: str, decoder: Decoder, kv_blocks: int, formats: str) -> ModelFacts:
    """`digest` names the weights, `formats` how they are computed with."""
    shape = decoder.shape
    return ModelFacts(
        identity=f"{digest}/{formats}/kv-float32",
        body_params=shape.body_params,
        head_params=shape.head_params,
        weight_bytes=decoder.weight_bytes / (shape.body_params + shape.head_params),
        layers=shape.layers,
        heads=shape.heads,
        head_dim=shape.head_dim,
        vocab=shape.vocab,
        kv_token_bytes=shape.kv_token_bytes,
        kv_blocks=kv_blocks,
        is_strict=isinstance(decoder, _Native),
    )
