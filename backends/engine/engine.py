"""One engine: a thread that computes step after step, and an asyncio front that never blocks it.

The front hands jobs and cancels to the thread over one queue; the thread hands outputs back once
per step. Every accepted job gets exactly one terminal event (`Done`, `Failed` or `Cancelled`), and
its blocks are free before that event is sent. A job that fails, fails alone. No torch here.
"""

import asyncio
import itertools
import logging
import queue
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import BinaryIO, Literal

from msgspec import Struct, structs

from backends.engine.account import (
    CostModel,
    StepClock,
    calibrate,
    charge,
    decode_step_s,
    draft_price,
    prompt_room,
    wall_phase,
)
from backends.engine.errors import NotReady, Overloaded, RequestFailed, StartFailed, TooLate
from backends.engine.kv import BLOCK_TOKENS, BlockPool, blocks_for, chain_root
from backends.engine.scheduler import Scheduler
from backends.engine.seeds import lane_seed
from backends.engine.spans import Emit, phase_spans
from backends.engine.spec import Pace, Proposer
from backends.engine.stops import StopMatcher
from backends.engine.swap import Rate, SwapSpace
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import (
    Away,
    Cancelled,
    Clocks,
    Delta,
    Done,
    Drafter,
    Failed,
    FinishReason,
    Job,
    JobRequest,
    JobUsage,
    ModelFacts,
    Outcome,
    Output,
    Pooled,
    Row,
    Runner,
    StepResult,
    TokenChoice,
    Vector,
)
from backends.engine.types import (
    Sequence as Choice,
)
from telemetry.clock import Clock
from telemetry.money import split

log = logging.getLogger(__name__)

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_WARMUP_TOKENS = 64
_IDLE_MARK_S = 1.0
_FEW_TOKENS = 16  # of a prompt: they say little about what one takes


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    CLOSED = "closed"


class Stats:
    """Counters of the engine thread. Others may read them at any time, and only read."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()  # by phase
        self.charged_us: Counter[str] = Counter()  # by phase; its sum is that of all steps
        self.batch_sizes = [0] * (len(BATCH_BUCKETS) + 1)
        self.batch_size_sum = 0
        self.preemptions = 0
        self.too_late = 0  # refused: their first token would have come after their deadline
        self.kv_block_us: Counter[str] = Counter()  # pool and swap: blocks times time held
        self.prefix_queried = 0  # prompt tokens looked up in the cache, once per prompt
        self.prefix_hit = 0
        self.drafted = 0
        self.accepted = 0
        self.jobs: Counter[str] = Counter()  # by how they ended
        self.generated = 0  # tokens drawn
        self.finishes: Counter[str] = Counter()  # choices by finish reason


class Stream:
    """The front's end of one job. Used on the event loop only."""

    def __init__(self, job: Job, send: Callable[["_Command"], None]) -> None:
        self._job = job
        self._send = send
        self._outputs: list[Output] = []
        self._arrived = asyncio.Event()
        self._is_over = False

    async def next(self) -> list[Output]:
        """All that came since the last call: a slow reader gets fewer, larger deliveries. The
        last one ends with the terminal event."""
        await self._arrived.wait()
        outputs, self._outputs = self._outputs, []
        if not self._is_over:
            self._arrived.clear()
        return outputs

    def cancel(self) -> None:
        """Stop within one step and say nothing more. After the terminal event it does nothing."""
        if not self._is_over:
            self._send(_Cancel(self._job))

    def finish(self) -> None:
        """Stop within one step as if all were said: open choices end as `cancelled`, and `Done`
        tells what was computed. After the terminal event it does nothing."""
        if not self._is_over:
            self._send(_Finish(self._job))

    def push(self, outputs: Sequence[Output]) -> None:
        self._outputs += outputs
        self._is_over |= isinstance(outputs[-1], Done | Failed | Cancelled)
        self._arrived.set()


class Tempo:
    """How fast it goes, measured as it goes. Written by the engine thread, read by the front."""

    def __init__(self, token_s: float) -> None:
        self.token_s = Rate(token_s)  # charged for one prompt token
        self.prompt_s = Rate(token_s)  # wall time of one, beside whatever else is computed
        self.place_s = Rate(0.0)  # between two that end, while others wait for their place
        self._freed_ns: int | None = None

    def stepped(self, step_us: int, prefill_us: int, tokens: int) -> None:
        if tokens >= _FEW_TOKENS:
            self.token_s.saw(prefill_us / 1e6, tokens)
            self.prompt_s.saw(step_us / 1e6, tokens)

    def freed(self, now_ns: int, *, is_awaited: bool) -> None:
        """A place in the batch is free."""
        if is_awaited and self._freed_ns is not None:
            self.place_s.saw((now_ns - self._freed_ns) / 1e9, 1)
        self._freed_ns = now_ns if is_awaited else None


class _Add(Struct, frozen=True):
    job: Job
    stream: Stream


class _Cancel(Struct, frozen=True):
    job: Job


class _Finish(Struct, frozen=True):
    job: Job


class _Abort(Struct, frozen=True):
    message: str


class _Stop(Struct, frozen=True):
    pass


_Command = _Add | _Cancel | _Finish | _Abort | _Stop


class Engine:
    """`load` runs on the engine thread and returns the device side."""

    def __init__(
        self,
        *,
        load: Callable[[], Runner],
        tokenizer: Tokenizer,
        clock: Clock,
        emit: Emit,
        max_batch_size: int = 16,
        max_batch_tokens: int = 512,
        max_jobs: int = 1024,
        prefix_cache: bool = True,
        max_drafts: int = 0,
        step_target_s: float = 0.25,
        swap_memory_bytes: int = 0,
        swap_file_bytes: int = 0,
        open_swap_file: Callable[[], BinaryIO] = tempfile.TemporaryFile,
    ) -> None:
        self._swap_memory_bytes = swap_memory_bytes
        self._swap_file_bytes = swap_file_bytes
        self._open_swap_file = open_swap_file
        self._load = load
        self._tokenizer = tokenizer
        self._clock = clock
        self._emit = emit
        self._max_batch_size = max_batch_size
        self._max_batch_tokens = max_batch_tokens
        self._max_jobs = max_jobs
        self._prefix_cache = prefix_cache
        self._max_drafts = max_drafts
        self._step_target_s = step_target_s
        self._has_drafter = False
        self._epoch_ns = clock.now_ns() - clock.monotonic_ns()
        self._ids = itertools.count(1)
        self._arrivals = itertools.count(1)
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._accepted = 0  # jobs without a terminal event yet; of the front
        self._loop: asyncio.AbstractEventLoop | None = None
        self._settled = asyncio.Event()  # no longer loading
        self._is_empty = asyncio.Event()  # no job is open; only `drain` waits for it
        self._ended = asyncio.Event()  # the thread is over
        self._scheduler: Scheduler | None = None
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self.state = State.LOADING
        self.failure: BaseException | None = None
        self.facts: ModelFacts | None = None
        self.pace = Tempo(0.0)
        self.swap: SwapSpace | None = None
        self.step_clock = StepClock(clock)
        self.stats = Stats()

    # ── the front: event loop ────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Begin loading. Call once, on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def loaded(self) -> None:
        """Wait for the model. Raises what loading raised."""
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure

    async def ended(self) -> None:
        """Wait until the thread is over, which only `close` or a defect brings about."""
        await self._ended.wait()

    def submit(self, request: JobRequest, *, deadline_s: float | None = None) -> Stream:
        """Accept a validated request. Raises NotReady, Overloaded, or TooLate if its first token
        is not to be expected within `deadline_s`."""
        if self.state is not State.READY:
            raise NotReady(f"the engine is {self.state}")
        if self._accepted >= self._max_jobs:
            raise Overloaded(f"{self._accepted} requests are already waiting or running")
        if deadline_s is not None:
            expected_s = self.expected_first_token_s(request)
            if expected_s > deadline_s:
                self.stats.too_late += 1
                raise TooLate(expected_s, deadline_s)
        job = Job(next(self._ids), request, self.now_ns())
        stream = Stream(job, self._commands.put)
        self._accepted += 1
        self._commands.put(_Add(job, stream))
        return stream

    def expected_first_token_s(self, request: JobRequest) -> float:
        """From who is ahead and how fast it has gone lately. What its prompt may find in the cache
        does not count, nor what those ahead may cancel: it errs towards late."""
        scheduler = self._scheduler
        if scheduler is None:
            return 0.0
        waiting, running = list(scheduler.waiting), list(scheduler.running)
        ahead = [s for s in waiting if s.priority <= request.priority]
        places = scheduler.max_batch_size - sum(s.priority <= request.priority for s in running)
        tokens = sum(map(len, request.prompts)) + sum(s.n_pending for s in ahead)
        tokens += sum(s.n_pending for s in running if not s.is_decoding)
        missing = max(0, len(ahead) + 1 - places)
        pace = self.pace
        return missing * pace.place_s.seconds + tokens * pace.prompt_s.seconds

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, let what runs finish, and fail what is left after `timeout_s`."""
        if self.state is State.READY:
            self.state = State.DRAINING
        if self._accepted:
            self._is_empty.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_empty.wait(), timeout_s)
        self._commands.put(_Abort("the engine is shutting down"))

    async def close(self) -> None:
        """End the thread. Jobs still open fail."""
        self._commands.put(_Stop())
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    @property
    def running(self) -> int:
        return len(self._scheduler.running) if self._scheduler else 0

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting) if self._scheduler else 0

    @property
    def waiting_tokens(self) -> int:
        return self._scheduler.waiting_tokens if self._scheduler else 0

    @property
    def pool(self) -> BlockPool | None:
        return self._scheduler.pool if self._scheduler else None

    def _deliver(self, outputs: list[tuple[Stream, list[Output]]]) -> None:
        for stream, news in outputs:
            stream.push(news)
            self._accepted -= isinstance(news[-1], Done | Failed | Cancelled)
        if self._accepted == 0:
            self._is_empty.set()

    # ── the engine thread ────────────────────────────────────────────────────────────────────

    def _main(self) -> None:
        try:
            runner = self._load()
            self.step_clock.mark("load")
            pool = BlockPool(runner.facts.kv_blocks)
            costs = self._warm_up(runner, pool)
            swap = self._swap_space(runner)
            self.step_clock.mark("warmup")
        except Exception as error:  # noqa: BLE001  # whatever it is, `loaded()` raises it
            self.failure = error
            self.state = State.FAILED
            self._post(self._settled.set)
            self._refuse_queued()
            return
        self.facts = runner.facts
        self.pace = Tempo(costs.body_token_s)
        self.swap = swap
        self._has_drafter = runner.drafter is not None
        self._scheduler = Scheduler(
            pool,
            max_batch_size=self._max_batch_size,
            max_batch_tokens=self._max_batch_tokens,
            draft_price=lambda decodes: _guess_price(decodes, costs, runner.drafter),
            drafter=runner.drafter,
            prompt_room=lambda decodes: prompt_room(decodes, costs, self._step_target_s),
            compute_s=lambda tokens: tokens * self.pace.token_s.seconds,
            swap=swap,
        )
        if self.state is State.LOADING:
            self.state = State.READY
        self._post(self._settled.set)
        loop = _StepLoop(self, runner, self._scheduler, costs)
        try:
            while self._take_commands(loop):
                loop.step()
            self.state = State.CLOSED
        except Exception as error:  # a defect of ours: end every job, then the process
            log.exception("the engine thread ended")
            self.failure = error
            self.state = State.FAILED
            loop.abort("the engine failed")
        if swap is not None:
            swap.close()
        self._refuse_queued()

    def _refuse_queued(self) -> None:
        """The thread is over: what was accepted and not yet taken still gets its end."""
        with suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if isinstance(command, _Add):
                    self.post_outputs([(command.stream, [Failed("the engine has ended")])])
        self._post(self._ended.set)

    def _take_commands(self, loop: "_StepLoop") -> bool:
        """All that came in; wait for something if there is nothing to compute."""
        while True:
            try:
                if loop.has_work:
                    command = self._commands.get_nowait()
                else:
                    command = self._commands.get(timeout=_IDLE_MARK_S)
            except queue.Empty:
                if loop.has_work:
                    return True
                loop.idle()
                continue
            if not loop.has_work:
                loop.idle()
            match command:
                case _Add(job, stream):
                    loop.add(job, stream)
                case _Cancel(job):
                    loop.cancel(job)
                case _Finish(job):
                    loop.finish(job)
                case _Abort(message):
                    loop.abort(message)
                case _Stop():
                    loop.abort("the engine is shutting down")
                    return False

    def _warm_up(self, runner: Runner, pool: BlockPool) -> CostModel:
        """First calls are slow; and what they take calibrates the cost model."""
        job = Job(0, JobRequest(prompts=((0,),), max_tokens=(1,)), 0)
        sequence = self.choice(job, 0, [0] * _WARMUP_TOKENS, max_tokens=1)
        blocks = pool.allocate(blocks_for(_WARMUP_TOKENS))
        assert blocks is not None, "the pool is new"
        sequence.blocks = blocks
        last, prompt = Row(sequence, _WARMUP_TOKENS - 1, 1), Row(sequence, 0, _WARMUP_TOKENS)
        runner.run([prompt])
        runner.run([last])
        many_s = self._timed_s(lambda: runner.run([prompt]))
        one_s = min(self._timed_s(lambda: runner.run([last])) for _ in range(2))
        sampling_ns = runner.run([last]).sampling_ns
        pool.release(sequence.blocks)
        return calibrate(
            runner.facts,
            one_token_s=one_s,
            many_tokens_s=many_s,
            many=_WARMUP_TOKENS,
            sampling_s=sampling_ns / 1e9,
        )

    def _swap_space(self, runner: Runner) -> SwapSpace | None:
        block_bytes = runner.facts.kv_token_bytes * BLOCK_TOKENS
        memory, file = self._swap_memory_bytes // block_bytes, self._swap_file_bytes // block_bytes
        if memory + file == 0:
            return None
        space = SwapSpace(
            runner, clock=self._clock, block_bytes=block_bytes, memory_blocks=memory,
            file_blocks=file, open_file=self._open_swap_file,
        )  # fmt: skip
        space.measure(0)
        return space

    def _timed_s(self, work: Callable[[], object]) -> float:
        started_ns = self._clock.monotonic_ns()
        work()
        return max(1, self._clock.monotonic_ns() - started_ns) / 1e9

    def choice(
        self,
        job: Job,
        index: int,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        leader: Choice | None = None,
    ) -> Choice:
        request = job.request
        root = None
        is_scored = request.sampling.prompt_logprobs is not None  # it computes all of its prompt
        is_whole = is_scored or request.pooling is not None
        if self.facts is not None and self._prefix_cache and not is_whole:
            # The weights of this process never change: epoch 0.
            root = chain_root(model=self.facts.identity, epoch=0, salt=request.cache_salt)
        return Choice(
            job,
            index,
            prompt,
            arrival=next(self._arrivals),
            max_tokens=max_tokens,
            seed=lane_seed(request.seed, index),
            decoder=self._tokenizer.decoder(request.shown),
            stops=StopMatcher(request.stop),
            root=root,
            leader=None if is_scored else leader,
            proposer=self._proposer(request),
        )

    def _proposer(self, request: JobRequest) -> Proposer | Pace | None:
        """Only where checking several tokens at once gives the same numbers as one by one."""
        is_strict = self.facts is not None and self.facts.is_strict
        if not (self._max_drafts and is_strict and request.pooling is None):
            return None
        return Pace(self._max_drafts) if self._has_drafter else Proposer(self._max_drafts)

    def is_end(self, token: int) -> bool:
        return token in self._tokenizer.end_tokens

    def post_outputs(self, outputs: list[tuple[Stream, list[Output]]]) -> None:
        if outputs:
            self._post(lambda: self._deliver(outputs))

    def emit_spans(self, job: Job) -> None:
        try:
            self._emit(job.request.traceparent, phase_spans(job))
        except Exception:  # a plug-in: its failure is not the job's
            log.exception("emitting spans failed")

    def _post(self, call: Callable[[], None]) -> None:
        assert self._loop is not None, "started before the thread was"
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            log.info("the event loop is gone: an output has nobody to go to")

    def now_ns(self) -> int:
        """Since the epoch, from the monotonic clock: differences are true."""
        return self._epoch_ns + self._clock.monotonic_ns()


Ending = Literal["done", "failed", "cancelled"]


class _StepLoop:
    """The engine thread's own state: who is computing, and what goes out after this step."""

    def __init__(
        self, engine: Engine, runner: Runner, scheduler: Scheduler, costs: CostModel
    ) -> None:
        self._engine = engine
        self._runner = runner
        self._scheduler = scheduler
        self._costs = costs
        self._streams: dict[int, Stream] = {}
        self._jobs: dict[int, Job] = {}
        self._outbox: dict[int, list[Output]] = {}
        self._step = 0

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def idle(self) -> None:
        self._engine.step_clock.mark("idle")
        self._scheduler.pool.check()
        assert self._scheduler.pool.used == 0, "blocks leaked"
        swap = self._engine.swap
        assert swap is None or swap.used == 0, "swapped blocks leaked"

    def add(self, job: Job, stream: Stream) -> None:
        request = job.request
        for index in range(len(request.prompts) * request.n):
            prompt = index // request.n
            leader = job.sequences[prompt * request.n] if index % request.n else None
            choice = self._engine.choice(
                job,
                index,
                request.prompts[prompt],
                max_tokens=request.max_tokens[prompt],
                leader=leader,
            )
            job.sequences.append(choice)
        job.open_choices = len(job.sequences)
        self._jobs[job.job_id] = job
        self._streams[job.job_id] = stream
        try:
            for choice in job.sequences:
                self._scheduler.add(choice)
        except ValueError as error:
            self._end(job, Failed(str(error)), "failed")
            self._flush()

    def cancel(self, job: Job) -> None:
        if job.job_id in self._jobs:
            self._end(job, Cancelled(), "cancelled")
            self._flush()

    def finish(self, job: Job) -> None:
        """End it where it stands, and account for what was computed."""
        if job.job_id not in self._jobs:
            return
        for sequence in job.sequences:
            if sequence.finish is None:
                self._close(sequence, FinishReason.CANCELLED, text="")
        job.clocks.finished_ns = self._engine.now_ns()
        self._end(job, Done(_usage(job)), "cancelled")
        self._flush()

    def abort(self, message: str) -> None:
        for job in list(self._jobs.values()):
            self._end(job, Failed(message), "failed")
        self._flush()

    def step(self) -> None:
        """One step: plan, compute, charge, commit, send."""
        plan = self._scheduler.plan()
        self._engine.stats.preemptions += len(plan.preempted)
        assert plan.rows, "there are jobs, so somebody can advance"
        now_ns = self._engine.now_ns() if plan.admitted or plan.preempted else 0
        for choice in plan.preempted:
            choice.left_ns = now_ns
            choice.left_as = "preempted" if choice.saved is None else "swapped"
        for choice in plan.admitted:
            clocks = choice.job.clocks
            _returned(choice, now_ns)
            clocks.admitted_ns = clocks.admitted_ns or now_ns
            if choice.high_water == 0 and choice.leader is None and choice.root is not None:
                self._engine.stats.prefix_queried += choice.n_prompt
                self._engine.stats.prefix_hit += choice.cached_tokens
        if plan.copies:
            self._runner.copy_blocks(plan.copies)
        drawn = [row.sequence.draws for row in plan.rows]
        result = self._run(plan.rows, drawn)
        self._step += 1
        step_us = self._engine.step_clock.mark(wall_phase(plan.rows))
        self._charge(step_us, plan.rows, result)
        for row, outcome in zip(plan.rows, result.choices, strict=True):
            try:
                self._commit(row, outcome)
            except Exception as error:
                log.exception("job %d failed", row.sequence.job.job_id)
                message = getattr(error, "message", f"failed: {type(error).__name__}")
                self._end(row.sequence.job, Failed(message), "failed")
        self._flush()

    def _run(self, rows: list[Row], drawn: list[int]) -> StepResult:
        """A step that fails as a whole is repeated row by row, with the same random numbers, so
        that only the culprit fails."""
        try:
            return self._runner.run(rows)
        except Exception as error:
            log.exception("a step of %d sequences failed", len(rows))
            if len(rows) == 1:
                return StepResult([RequestFailed(f"the step failed: {type(error).__name__}")], 0)
        for row, draws in zip(rows, drawn, strict=True):
            row.sequence.draws = draws
        parts = [self._run([row], []) for row in rows]
        return StepResult(
            [choice for part in parts for choice in part.choices],
            sum(part.sampling_ns for part in parts),
        )

    def _charge(self, step_us: int, rows: list[Row], result: StepResult) -> None:
        stats = self._engine.stats
        at = next((i for i, size in enumerate(BATCH_BUCKETS) if len(rows) <= size), -1)
        stats.batch_sizes[at] += 1
        stats.batch_size_sum += len(rows)
        rejected = list(map(_rejected, rows, result.choices))
        charges = charge(step_us, rows, self._costs, rejected)
        prefill_us = prefill_tokens = 0
        self._hold(step_us)
        for row, parts, wrong in zip(rows, charges, rejected, strict=True):
            clocks = row.sequence.job.clocks
            for phase, part_us in parts.items():
                clocks.device_us[phase] = clocks.device_us.get(phase, 0) + part_us
                stats.charged_us[phase] += part_us
            self._scheduler.shares.charge(row.sequence, sum(parts.values()))
            if "prefill" in parts:
                prefill_us += parts["prefill"]
                prefill_tokens += row.count
            stats.tokens[row.phase] += row.count - wrong
            if row.drafts:
                came_true = len(row.drafts) - wrong
                row.sequence.job.drafted += len(row.drafts)
                row.sequence.job.accepted += came_true
                stats.drafted += len(row.drafts)
                stats.accepted += came_true
                if row.sequence.proposer is not None:
                    row.sequence.proposer.learn(len(row.drafts), came_true)
            if clocks.seen_step != self._step:
                clocks.seen_step = self._step
                clocks.steps += 1
                clocks.neighbours += len(rows)
                clocks.sampling_ns += result.sampling_ns
        self._engine.pace.stepped(step_us, prefill_us, prefill_tokens)

    def _hold(self, step_us: int) -> None:
        """Blocks times time, to who held them in this step; a shared block in equal parts. Blocks
        in swap space are counted apart: they are no place that anybody else could use."""
        scheduler, stats = self._scheduler, self._engine.stats
        pool = scheduler.pool
        weights = [round(1e6 * pool.share_of(s.blocks)) for s in scheduler.running]
        whole = pool.used * step_us
        stats.kv_block_us["pool"] += whole
        for sequence, part in zip(scheduler.running, split(whole, weights), strict=True):
            sequence.job.clocks.kv_block_us += part
        if self._engine.swap is not None and self._engine.swap.used:
            for sequence in scheduler.waiting:
                if sequence.saved is not None:
                    part = len(sequence.saved.places) * step_us
                    sequence.job.clocks.swapped_block_us += part
                    stats.kv_block_us["swap"] += part

    def _commit(self, row: Row, choice: Outcome) -> None:
        sequence = row.sequence
        if sequence.job.job_id not in self._jobs:
            return  # another choice of the same job failed in this step
        match choice:
            case None:
                if row.needs_token:
                    raise RequestFailed("the step gave no token where one was due")
                self._scheduler.computed(sequence, row.context)
            case TokenChoice():
                self._scheduler.computed(sequence, row.context)
                self._accept(sequence, choice)
            case tuple():
                for number, confirmed in enumerate(choice):
                    self._scheduler.computed(sequence, row.start + 1 + number)
                    self._accept(sequence, confirmed)
                    if sequence.finish is not None:
                        break  # a stop: what was guessed beyond it is not said
            case Pooled(values):
                self._scheduler.computed(sequence, row.context)
                self._embedded(sequence, values)
            case Exception():
                self._scheduler.distrust(sequence)
                message = getattr(choice, "message", None) or str(choice)
                log.error("job %d failed: %s", sequence.job.job_id, message)
                self._end(sequence.job, Failed(message), "failed")

    def _accept(self, sequence: Choice, choice: TokenChoice) -> None:
        job = sequence.job
        now_ns = self._engine.now_ns()
        job.clocks.first_token_ns = job.clocks.first_token_ns or now_ns
        job.clocks.last_token_ns = now_ns
        sequence.append(choice.token)
        self._engine.stats.generated += 1
        is_end = self._engine.is_end(choice.token) and not job.request.ignore_eos
        finish = None
        text = ""
        if is_end:
            finish = FinishReason.STOP
        else:
            sequence.entries.add(choice)
            text = sequence.text_of(choice.token)
            if sequence.is_complete:
                finish = FinishReason.STOP
            elif sequence.n_output >= sequence.max_tokens:
                finish = FinishReason.LENGTH
        if sequence.stops.matched is not None:
            finish = FinishReason.STOP
        if finish is not None:
            self._close(sequence, finish, text=text)
            self._engine.pace.freed(now_ns, is_awaited=bool(self._scheduler.waiting))
            self._scheduler.remove(sequence)
            job.open_choices -= 1
            if job.open_choices == 0:
                job.clocks.finished_ns = now_ns
                self._end(job, Done(_usage(job)), "done")
            return
        entries = sequence.entries.released(len(text), is_cut=False, is_last=False)
        if text or entries:
            self._say(sequence, Delta(index=sequence.index, text=text, choices=entries))

    def _embedded(self, sequence: Choice, values: list[float]) -> None:
        """A text is a vector now, and needs its keys and values no more."""
        job = sequence.job
        sequence.finish = FinishReason.STOP
        self._say(sequence, Vector(sequence.index, values))
        self._scheduler.remove(sequence)
        job.open_choices -= 1
        if job.open_choices == 0:
            job.clocks.finished_ns = self._engine.now_ns()
            self._end(job, Done(_usage(job)), "done")

    def _close(self, sequence: Choice, finish: FinishReason, *, text: str) -> None:
        """The last delta of a choice: `text` and what was held back."""
        if sequence.stops.matched is None:
            text += sequence.last_text()
        is_cut = sequence.stops.matched is not None
        sequence.finish = FinishReason.STOP if is_cut else finish
        self._engine.stats.finishes[sequence.finish.value] += 1
        entries = sequence.entries.released(len(text), is_cut=is_cut, is_last=True)
        self._say(
            sequence,
            Delta(index=sequence.index, text=text, choices=entries, finish=sequence.finish),
        )

    def _say(self, sequence: Choice, output: Delta | Vector) -> None:
        is_due = sequence.scores is not None and not sequence.is_scored_told
        if is_due and isinstance(output, Delta):
            sequence.is_scored_told = True
            output = structs.replace(output, prompt=tuple(sequence.scores or ()))
        self._outbox.setdefault(sequence.job.job_id, []).append(output)

    def _end(self, job: Job, terminal: Done | Failed | Cancelled, ending: Ending) -> None:
        """Blocks first, then the word that it is over."""
        for sequence in job.sequences:
            _returned(sequence, self._engine.now_ns())
            self._scheduler.remove(sequence)
        job.clocks.finished_ns = job.clocks.finished_ns or self._engine.now_ns()
        self._engine.stats.jobs[ending] += 1
        self._outbox.setdefault(job.job_id, []).append(terminal)
        self._engine.emit_spans(job)
        del self._jobs[job.job_id]

    def _flush(self) -> None:
        outputs = []
        for job_id, news in self._outbox.items():
            stream = self._streams[job_id] if job_id in self._jobs else self._streams.pop(job_id)
            outputs.append((stream, news))
        self._outbox.clear()
        self._engine.post_outputs(outputs)


def _returned(sequence: Choice, now_ns: int) -> None:
    """It waits no longer, if it was preempted at all."""
    if sequence.left_ns:
        sequence.job.clocks.away.append(Away(sequence.left_as, sequence.left_ns, now_ns))
        sequence.left_ns = 0


def _guess_price(decodes: int, costs: CostModel, drafter: Drafter | None) -> float:
    """Of a guess, drafted and checked, as a part of a step without any."""
    price = draft_price(decodes, costs)
    if drafter is None:
        return price
    return price + drafter.guess_s(decodes) / decode_step_s(decodes, costs)


def _rejected(row: Row, choice: Outcome) -> int:
    """Drafts that did not come true. Of a row that failed, all."""
    confirmed = len(choice) - 1 if isinstance(choice, tuple) else 0
    return len(row.drafts) - confirmed


def _usage(job: Job) -> JobUsage:
    """What was computed: all of it for a job that ended well, less for one that was stopped."""
    clocks: Clocks = job.clocks
    admitted_ns = clocks.admitted_ns or clocks.finished_ns
    first_ns = clocks.first_token_ns or clocks.finished_ns
    return JobUsage(
        prompt_tokens=sum(
            max(
                min(sequence.high_water, sequence.n_prompt)
                for sequence in job.sequences[at : at + job.request.n]
            )
            for at in range(0, len(job.sequences), job.request.n)
        ),
        completion_tokens=sum(sequence.n_output for sequence in job.sequences),
        cached_tokens=job.cached_tokens,
        queue_s=(admitted_ns - clocks.arrived_ns) / 1e9,
        prefill_s=(first_ns - admitted_ns) / 1e9,
        decode_s=max(0, clocks.last_token_ns - first_ns) / 1e9,
        sampling_s=clocks.sampling_ns / 1e9,
        preemptions=job.preemptions,
        kv_block_s=clocks.kv_block_us / 1e6,
        drafted=job.drafted,
        accepted=job.accepted,
        device_us=dict(clocks.device_us),
    )


__all__ = ["BATCH_BUCKETS", "Engine", "StartFailed", "State", "Stats", "Stream"]
