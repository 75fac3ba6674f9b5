"""The step loop with a device side made of Python: every job ends once, and fails alone."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import BinaryIO

import pytest
from typing_extensions import override

from backends.engine.engine import Engine, State, Stream
from backends.engine.errors import ModelMissing, NotReady, Overloaded, TooLate
from backends.engine.guided import Constraint, Guides
from backends.engine.spans import Emit, PhaseSpan, discard
from backends.engine.swap import file_in
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import (
    Cancelled,
    Delta,
    Done,
    Failed,
    FinishReason,
    JobRequest,
    Output,
    Row,
    Runner,
    Sampling,
    StepResult,
    TokenChoice,
)
from telemetry import genai
from telemetry.clock import Clock, SystemClock
from tests.fakes.engine import FakeRunner, Remembers, follows

WARM_UP = 0  # the job id of the steps before the first request
END = 2  # <|im_end|> of the tiny vocabulary
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@asynccontextmanager
async def running(
    words: Tokenizer,
    runner: Runner,
    *,
    emit: Emit = discard,
    max_jobs: int = 64,
    max_drafts: int = 0,
    clock: Clock | None = None,
) -> AsyncIterator[Engine]:
    engine = Engine(
        load=lambda: runner, tokenizer=words, clock=clock or SystemClock(), emit=emit,
        max_batch_size=4, max_batch_tokens=64, max_jobs=max_jobs, max_drafts=max_drafts,
    )  # fmt: skip
    engine.start()
    await engine.loaded()
    try:
        yield engine
    finally:
        await engine.close()


async def outputs(stream: Stream, *, timeout_s: float = 10) -> list[Output]:
    async with asyncio.timeout(timeout_s):
        result: list[Output] = []
        while not result or isinstance(result[-1], Delta):
            result += await stream.next()
        return result


def spell(words: Tokenizer, text: str) -> Callable[[Row], TokenChoice]:
    """A model that spells the text and ends."""
    tokens = [*words.encode(text), END]
    return lambda row: TokenChoice(tokens[row.sequence.n_output])


def request(words: Tokenizer, prompt: str = "Hi", **changes: object) -> JobRequest:
    fields: dict[str, object] = {
        "prompts": (tuple(words.encode(prompt)),), "max_tokens": (50,), **changes,
    }  # fmt: skip
    return JobRequest(**fields)  # type: ignore[arg-type]  # checked by the Struct's callers


def text_of(news: list[Output]) -> str:
    return "".join(output.text for output in news if isinstance(output, Delta))


async def test_a_job_streams_its_text_and_ends_once(words: Tokenizer) -> None:
    """Text arrives in deltas, the last one with its reason, then Done with the exact counts."""
    async with running(words, FakeRunner(spell(words, "a día"))) as engine:
        news = await outputs(engine.submit(request(words)))
        assert text_of(news) == "a día"
        last, done = news[-2:]
        assert isinstance(last, Delta)
        assert last.finish is FinishReason.STOP
        assert isinstance(done, Done)
        assert done.usage.prompt_tokens == 2
        assert done.usage.completion_tokens == len(words.encode("a día")) + 1


async def test_charges_of_all_jobs_are_the_time_of_all_steps(words: Tokenizer) -> None:
    """Σ device_us over jobs = Σ steps, and steps + load + warm-up + idle = wall, exactly."""
    async with running(words, FakeRunner(spell(words, "some words here"))) as engine:
        streams = [engine.submit(request(words, n=2)) for _ in range(5)]
        ends = [(await outputs(stream))[-1] for stream in streams]
        charged = 0
        for end in ends:
            assert isinstance(end, Done)
            charged += sum(end.usage.device_us.values())
        phases = engine.step_clock.by_phase_us
        assert charged == phases["prefill"] + phases["decode"] + phases["mixed"]
        assert charged == sum(engine.stats.charged_us.values())
    assert sum(engine.step_clock.by_phase_us.values()) == engine.step_clock.wall_us


async def test_a_prompt_is_found_again_by_its_tenant_only(words: Tokenizer) -> None:
    """The same prompt of the same tenant reports cached tokens and costs no second prefill; of
    another tenant, none. What was looked up is counted once per prompt, choices or not."""
    prompt = tuple(range(5, 205))
    runner = FakeRunner(spell(words, "ok"), kv_blocks=16)
    async with running(words, runner) as engine:
        cached = []
        for salt in ("ada", "ada", "bob"):
            asked = request(words, prompts=(prompt,), cache_salt=salt, n=2)
            done = (await outputs(engine.submit(asked)))[-1]
            assert isinstance(done, Done)
            assert done.usage.prompt_tokens == 200
            cached.append(done.usage.cached_tokens)
        assert cached == [0, 192, 0]
        assert (engine.stats.prefix_queried, engine.stats.prefix_hit) == (600, 192)
    assert len(runner.copies) == 3


async def test_a_stop_string_cuts_and_ends(words: Tokenizer) -> None:
    """The text ends before the stop string, also when its tokens arrive one by one."""
    async with running(words, FakeRunner(spell(words, "one two three"))) as engine:
        news = await outputs(engine.submit(request(words, stop=("two",))))
    assert text_of(news) == "one "
    assert [o.finish for o in news if isinstance(o, Delta)][-1] is FinishReason.STOP


@pytest.mark.parametrize(
    ("stop", "shown"), [((), "aé12"), (("1",), "aé"), (("2",), "aé1"), (("12",), "aé")]
)
async def test_logprobs_go_with_the_text_that_is_sent(
    words: Tokenizer, stop: tuple[str, ...], shown: str
) -> None:
    """A token that a stop string cuts off is not in the logprobs either; half characters are."""
    spelled = spell(words, "aé12")
    runner = FakeRunner(lambda row: TokenChoice(spelled(row).token, -0.5))
    async with running(words, runner) as engine:
        news = await outputs(engine.submit(request(words, stop=stop)))
    tokens = [c.token for output in news if isinstance(output, Delta) for c in output.choices]
    assert text_of(news) == shown
    assert b"".join(map(words.token_bytes, tokens)).decode() == shown


async def test_held_text_comes_out_at_the_limit(words: Tokenizer) -> None:
    """What looked like the start of a stop string is sent when max_tokens ends the text."""
    async with running(words, FakeRunner(spell(words, "abcd"))) as engine:
        news = await outputs(engine.submit(request(words, stop=("bcx",), max_tokens=(3,))))
    assert text_of(news) == "abc"
    assert [o.finish for o in news if isinstance(o, Delta)][-1] is FinishReason.LENGTH


async def test_end_tokens_can_be_ignored(words: Tokenizer) -> None:
    """With ignore_eos the text goes on to its limit."""
    async with running(words, FakeRunner(lambda row: TokenChoice(END))) as engine:
        news = await outputs(engine.submit(request(words, ignore_eos=True, max_tokens=(7,))))
    assert isinstance(news[-1], Done)
    assert news[-1].usage.completion_tokens == 7


async def test_cancel_frees_blocks_within_a_step(words: Tokenizer) -> None:
    """A cancelled job ends as Cancelled, its blocks are free and it computes no further step."""
    begun, gate = threading.Event(), threading.Event()

    def slow(row: Row) -> TokenChoice:
        if row.sequence.n_output == 3:
            begun.set()
            gate.wait(5)
        return TokenChoice(20)

    runner = FakeRunner(slow)
    async with running(words, runner) as engine:
        stream = engine.submit(request(words))
        await asyncio.to_thread(begun.wait, 5)
        stream.cancel()
        steps = len(runner.steps)
        gate.set()
        news = await outputs(stream)
        assert isinstance(news[-1], Cancelled)
        assert engine.pool is not None
        assert engine.pool.used == 0
        assert len(runner.steps) == steps
        stream.cancel()  # after the end it does nothing
        assert isinstance((await outputs(engine.submit(request(words, max_tokens=(2,)))))[-1], Done)


async def test_a_waiting_job_can_be_cancelled(words: Tokenizer) -> None:
    """Cancelling works in the queue too, and such a job has a queue span and no other."""
    spans: list[list[PhaseSpan]] = []
    begun, gate = threading.Event(), threading.Event()

    def slow(row: Row) -> TokenChoice:
        if row.sequence.job.job_id != WARM_UP:
            begun.set()
            gate.wait(5)
        return TokenChoice(20)

    async with running(
        words, FakeRunner(slow, kv_blocks=1), emit=lambda _, made: spans.append(made)
    ) as engine:
        first = engine.submit(request(words, max_tokens=(1,)))
        await asyncio.to_thread(begun.wait, 5)
        second = engine.submit(request(words))
        second.cancel()
        gate.set()
        assert isinstance((await outputs(second))[-1], Cancelled)
        assert isinstance((await outputs(first))[-1], Done)
    assert sorted([span.name for span in made] for made in spans) == [
        ["queue"],
        ["queue", "prefill", "decode", "sampling"],
    ]


async def test_told_to_finish_a_running_job_says_what_it_computed(words: Tokenizer) -> None:
    """Open choices end as cancelled, with the text that was held back; Done counts the tokens."""
    begun, gate = threading.Event(), threading.Event()
    tokens = words.encode("abcdef")

    def slow(row: Row) -> TokenChoice:
        if row.sequence.job.job_id != WARM_UP and row.sequence.n_output == 3:
            begun.set()
            gate.wait(5)
        return TokenChoice(END if row.sequence.index == 1 else tokens[row.sequence.n_output])

    runner = FakeRunner(slow)
    async with running(words, runner) as engine:
        stream = engine.submit(request(words, n=2, stop=("dx",)))
        await asyncio.to_thread(begun.wait, 5)
        stream.finish()
        stream.finish()
        gate.set()
        news = await outputs(stream)
        *deltas, done = news
        assert isinstance(done, Done)
        assert text_of(news) == "abcd"
        finishes = {d.index: d.finish for d in deltas if isinstance(d, Delta) and d.finish}
        assert finishes == {0: FinishReason.CANCELLED, 1: FinishReason.STOP}
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (2, 4 + 1)
        assert sum(done.usage.device_us.values()) == sum(engine.stats.charged_us.values())
        assert engine.stats.jobs == {"cancelled": 1}
        assert engine.pool is not None
        assert engine.pool.used == 0
        stream.finish()  # after the end it does nothing


async def test_told_to_finish_in_prefill_and_in_the_queue(words: Tokenizer) -> None:
    """A prompt counts as far as it was computed, and not at all if it still waited."""
    begun, gate = threading.Event(), threading.Event()

    class Slow(FakeRunner):
        @override
        def run(self, rows: Sequence[Row]) -> StepResult:
            if rows[0].sequence.job.job_id != WARM_UP and rows[0].start == 64:
                begun.set()
                gate.wait(5)
            return super().run(rows)

    async with running(words, Slow(lambda row: TokenChoice(20), kv_blocks=5)) as engine:
        first = engine.submit(request(words, prompts=((20,) * 250,), max_tokens=(9,)))
        await asyncio.to_thread(begun.wait, 5)
        second = engine.submit(request(words))
        first.finish()
        second.finish()
        gate.set()
        for stream, prompt_tokens in ((first, 128), (second, 0)):
            [delta, done] = await outputs(stream)
            assert isinstance(delta, Delta)
            assert (delta.text, delta.finish) == ("", FinishReason.CANCELLED)
            assert isinstance(done, Done)
            usage = done.usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (prompt_tokens, 0)
            assert min(usage.queue_s, usage.prefill_s) >= 0
            assert usage.decode_s == 0
        assert done.usage.device_us == {}
        assert engine.pool is not None
        assert engine.pool.used == 0


async def test_a_guide_ends_the_text_and_fails_alone(words: Tokenizer) -> None:
    """Where nothing may follow the choice stops, without an end token; a token that the grammar
    does not take fails that request and no other."""
    guide = await Guides(words).guide(Constraint("regex", "ab", "x"))
    tokens = words.encode("abc")

    def choose(row: Row) -> TokenChoice:
        is_good = row.sequence.job.request.seed == 1
        return TokenChoice(tokens[row.sequence.n_output + (not is_good)])

    async with running(words, FakeRunner(choose)) as engine:
        good, bad = (engine.submit(request(words, guide=guide, seed=s)) for s in (1, 2))
        news = await outputs(good)
        assert text_of(news) == "ab"
        assert [o.finish for o in news if isinstance(o, Delta)][-1] is FinishReason.STOP
        assert isinstance(news[-1], Done)
        assert news[-1].usage.completion_tokens == 2
        [failed] = await outputs(bad)
        assert isinstance(failed, Failed)
        assert "guided" in failed.message


async def test_a_failing_row_fails_alone(words: Tokenizer) -> None:
    """One sequence with broken numbers fails; its neighbour in the same steps ends well."""

    def choose(row: Row) -> TokenChoice | Exception:
        if row.sequence.job.request.seed == 13 and row.sequence.n_output == 2:
            return ArithmeticError("not finite")
        return TokenChoice(20)

    async with running(words, FakeRunner(choose)) as engine:
        bad, good = (engine.submit(request(words, seed=s, max_tokens=(9,))) for s in (13, 1))
        assert isinstance((await outputs(bad))[-1], Failed)
        assert isinstance((await outputs(good))[-1], Done)
        assert engine.pool is not None
        assert engine.pool.used == 0


async def test_a_step_that_raises_fails_only_its_culprit(words: Tokenizer) -> None:
    """When the device raises for a batch, rows are repeated alone and the engine lives."""

    class Broken(FakeRunner):
        @override
        def run(self, rows: Sequence[Row]) -> StepResult:
            if any(row.sequence.job.request.seed == 13 for row in rows):
                raise RuntimeError("device fault")
            return super().run(rows)

    async with running(words, Broken(spell(words, "fine"))) as engine:
        bad, good = (engine.submit(request(words, seed=seed)) for seed in (13, 1))
        assert isinstance((await outputs(bad))[-1], Failed)
        assert text_of(await outputs(good)) == "fine"
        assert engine.state is State.READY


async def test_spans_carry_the_caller_and_tile_the_request(words: Tokenizer) -> None:
    """queue, prefill and decode follow each other without a gap, under the given traceparent."""
    seen: list[tuple[str | None, list[PhaseSpan]]] = []
    async with running(
        words,
        FakeRunner(spell(words, "some text")),
        emit=lambda parent, made: seen.append((parent, made)),
    ) as engine:
        done = (await outputs(engine.submit(request(words, traceparent=TRACEPARENT))))[-1]
    assert isinstance(done, Done)
    [(parent, [queue, prefill, decode, sampling])] = seen
    assert parent == TRACEPARENT
    assert (queue.end_ns, prefill.end_ns) == (prefill.start_ns, decode.start_ns)
    assert (decode.end_ns - decode.start_ns) / 1e9 == pytest.approx(done.usage.decode_s)
    assert decode.attributes["gen_ai.usage.output_tokens"] == done.usage.completion_tokens
    assert sampling.attributes["meterline.aggregated"] is True


async def test_a_broken_span_exporter_harms_nobody(words: Tokenizer) -> None:
    """An emit that raises is logged; the job ends as it would."""

    def broken(parent: str | None, spans: list[PhaseSpan]) -> None:
        raise RuntimeError("collector on fire")

    async with running(words, FakeRunner(spell(words, "x")), emit=broken) as engine:
        assert isinstance((await outputs(engine.submit(request(words))))[-1], Done)


async def test_too_many_jobs_are_refused_at_once(words: Tokenizer) -> None:
    """Beyond max_jobs a submit is refused, and works again when one has ended."""
    gate = threading.Event()

    def slow(row: Row) -> TokenChoice:
        if row.sequence.job.job_id != WARM_UP:
            gate.wait(5)
        return TokenChoice(END)

    async with running(words, FakeRunner(slow), max_jobs=1) as engine:
        stream = engine.submit(request(words))
        with pytest.raises(Overloaded):
            engine.submit(request(words))
        gate.set()
        await outputs(stream)
        await outputs(engine.submit(request(words)))


async def test_drain_finishes_what_runs_and_takes_nothing_new(words: Tokenizer) -> None:
    """While draining, running jobs end well and new ones are refused."""
    async with running(words, FakeRunner(spell(words, "last words"))) as engine:
        stream = engine.submit(request(words))
        draining = asyncio.create_task(engine.drain(5))
        await asyncio.sleep(0)
        with pytest.raises(NotReady):
            engine.submit(request(words))
        assert text_of(await outputs(stream)) == "last words"
        await draining


async def test_drain_fails_what_does_not_finish(words: Tokenizer) -> None:
    """After the deadline the rest gets its terminal event: Failed."""
    async with running(words, FakeRunner(lambda row: TokenChoice(20))) as engine:
        long = request(words, prompts=((20,),), max_tokens=(500,))
        stream = engine.submit(long)
        await engine.drain(0.0)
        assert isinstance((await outputs(stream))[-1], Failed | Done)


async def test_a_model_that_cannot_load_says_so(words: Tokenizer) -> None:
    """What loading raises comes out of `loaded`, and submits are refused."""

    def load() -> Runner:
        raise ModelMissing("no such file")

    engine = Engine(load=load, tokenizer=words, clock=SystemClock(), emit=discard)
    engine.start()
    with pytest.raises(ModelMissing):
        await engine.loaded()
    with pytest.raises(NotReady):
        engine.submit(request(words))
    await engine.close()


async def test_random_lives_end_once_and_leak_nothing(words: Tokenizer) -> None:
    """Forty jobs in a tiny pool, some cancelled at random moments: one terminal event each."""
    async with running(words, FakeRunner(lambda row: TokenChoice(20), kv_blocks=3)) as engine:
        streams = [
            engine.submit(
                request(words, prompts=((20,) * (1 + i * 3),), max_tokens=(1 + i,), priority=i % 3)
            )
            for i in range(40)
        ]
        for i, stream in enumerate(streams):
            if i % 4 == 0:
                await asyncio.sleep(0.001)
                stream.cancel()
        for stream in streams:
            news = await outputs(stream)
            assert sum(isinstance(o, Done | Failed | Cancelled) for o in news) == 1
            assert not isinstance(news[-1], Failed)
        assert engine.pool is not None
        assert engine.pool.used == 0
        engine.pool.check()


def text_after(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(follows(tokens))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("way", ["memory", "file", "none", "file lost"])
async def test_preempted_jobs_say_the_same(words: Tokenizer, way: str) -> None:
    """A pool too small for all: whatever becomes of the blocks of those that give way, each says
    what it would have said alone, tells of its preemptions, and all its time adds up."""
    runner = Remembers(kv_blocks=7)
    files: list[BinaryIO] = []

    def open_file() -> BinaryIO:
        files.append(file_in(None)())
        if way == "file lost":
            files[-1].close()
        return files[-1]

    spans: list[PhaseSpan] = []
    engine = Engine(
        load=lambda: runner, tokenizer=words, clock=SystemClock(), max_batch_size=4,
        emit=lambda _, news: spans.extend(news),
        swap_memory_bytes=256 * 8 if way == "memory" else 0,
        swap_file_bytes=256 * 8 if "file" in way else 0, open_swap_file=open_file,
    )  # fmt: skip
    engine.start()
    await engine.loaded()
    assert engine.swap is None or way != "none"
    # Computing again is made dear, so that whatever swap there is gets used.
    engine.pace.token_s.seconds = 10.0
    engine.pace.stepped = lambda *_: None  # type: ignore[method-assign]  # and it stays so
    prompts = [tuple(range(5 + 3 * i, 65 + 3 * i)) for i in range(4)]
    streams = [
        engine.submit(
            request(words, prompts=(prompt,), max_tokens=(90,), ignore_eos=True,
                    sampling=Sampling(logprobs=0, temperature=0.0))
        )
        for prompt in prompts
    ]  # fmt: skip
    preempted = 0
    for prompt, stream in zip(prompts, streams, strict=True):
        news = await outputs(stream)
        said = [c.token for output in news if isinstance(output, Delta) for c in output.choices]
        assert said == text_after(prompt, 90)
        done = news[-1]
        assert isinstance(done, Done)
        preempted += done.usage.preemptions
        assert done.usage.kv_block_s > 0
    assert preempted == engine.stats.preemptions > 0
    away = [span for span in spans if span.name in ("preempted", "swapped")]
    assert len(away) == preempted
    kinds = {span.name for span in away}
    assert kinds == ({"swapped"} if way in ("memory", "file") else {"preempted"})
    if way in ("memory", "file"):
        assert engine.swap is not None
        assert engine.swap.used == 0
        assert engine.swap.loaded > 2
        assert engine.stats.tokens["recompute"] == 0
        assert engine.stats.kv_block_us["swap"] > 0
    else:
        assert engine.stats.tokens["recompute"] > 0
    await engine.close()
    assert all(file.closed for file in files)


async def test_block_seconds_are_the_used_blocks_over_time(words: Tokenizer) -> None:
    """Shared blocks in equal parts: what all jobs held is what was used, to the last microsecond
    of the counters."""
    runner = FakeRunner(spell(words, "some words here"), kv_blocks=32)
    held = []

    def emit(_: str | None, spans: list[PhaseSpan]) -> None:
        held.extend(
            s.attributes[genai.ENGINE_KV_BLOCK_SECONDS] for s in spans if s.name == "decode"
        )

    async with running(words, runner, emit=emit) as engine:
        prompt = tuple(range(5, 205))
        for _ in range(2):
            asked = [request(words, prompts=(prompt,), n=2, cache_salt="ada") for _ in range(3)]
            for stream in [engine.submit(a) for a in asked]:
                await outputs(stream)
        assert sum(map(float, held)) == pytest.approx(engine.stats.kv_block_us["pool"] / 1e6)
        assert engine.stats.kv_block_us["pool"] > 0


async def test_what_would_come_too_late_is_refused(words: Tokenizer) -> None:
    """With a queue ahead whose pace is known, a request whose deadline is nearer is refused at
    once with the time after which it may fit; one with more time is taken."""
    go = threading.Event()
    spelled = spell(words, "x")

    def hold(row: Row) -> TokenChoice:
        if row.sequence.job.job_id != WARM_UP:
            go.wait(30)
        return spelled(row)

    async with running(words, FakeRunner(hold)) as engine:
        assert engine.expected_first_token_s(request(words)) < 1
        engine.submit(request(words), deadline_s=1.0)
        engine.pace.prompt_s.seconds = 0.5
        with pytest.raises(TooLate) as refused:
            engine.submit(request(words, prompts=((5,) * 20,)), deadline_s=5.0)
        assert 5 <= refused.value.retry_after_s <= 10
        assert engine.stats.too_late == 1
        go.set()
        late = engine.submit(request(words, prompts=((5,) * 20,)), deadline_s=50.0)
        assert isinstance((await outputs(late))[-1], Done)


async def test_a_step_that_is_repeated_draws_the_same(words: Tokenizer) -> None:
    """When one sequence breaks a whole step, its neighbours draw the numbers they would have."""
    draws: list[int] = []

    class Breaks(FakeRunner):
        @override
        def run(self, rows: Sequence[Row]) -> StepResult:
            for row in rows:
                if row.needs_token:
                    row.sequence.draws += 1
            if len(rows) > 1 or any(row.sequence.n_output == 2 for row in rows):
                raise ValueError("broken")
            draws.extend(row.sequence.draws for row in rows if row.needs_token)
            return super().run(rows)

    async with running(words, Breaks(spell(words, "a"))) as engine:
        draws.clear()
        streams = [engine.submit(request(words)) for _ in range(3)]
        ends = [(await outputs(stream))[-1] for stream in streams]
    assert all(isinstance(end, Done) for end in ends)
    assert sorted(draws) == [1, 1, 1, 2, 2, 2]
