"""A record is settled once, whatever happens around it."""

import itertools
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import pytest

from telemetry.ledger import Ledger, OpenRecord, WalUnavailable, WriteAheadLog
from telemetry.ledger.entries import record_from_json, unpack_intent, unpack_settlement
from telemetry.ledger.frames import Kind
from telemetry.ledger.progress import read_slots
from telemetry.ledger.wal import START
from telemetry.record import Attempt, Charge, Outcome, RequestRecord
from telemetry.usage import UsageSource
from tests.fakes.clock import FakeClock
from tests.fakes.ledger import TRACE, FillingDisk, admit, cost, open_log, rate, refuse, serve


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def wal(tmp_path: Path, clock: FakeClock) -> Iterator[WriteAheadLog]:
    log = open_log(tmp_path, clock)
    yield log
    log.close()


@pytest.fixture
def ledger(wal: WriteAheadLog, clock: FakeClock) -> Ledger:
    return Ledger(wal=wal, rate=rate, clock=clock)


def _settled(wal: WriteAheadLog) -> list[RequestRecord]:
    wal.sync()
    return [
        record_from_json(unpack_settlement(frame.payload).record)
        for frame in wal.records_from(START)
        if frame.kind == Kind.SETTLEMENT
    ]


def test_a_served_request_is_one_intent_and_one_settlement(
    wal: WriteAheadLog, ledger: Ledger
) -> None:
    """The settlement holds usage and exact charges, and the counters balance."""
    served = serve(ledger, tokens_in=7, tokens_out=3)
    (data,) = _settled(wal)
    kinds = [frame.kind for frame in wal.records_from(START)]
    assert kinds == [Kind.INTENT, Kind.ATTEMPTS, Kind.SETTLEMENT]
    assert data.request_id == served.data.request_id
    assert data.cost == cost(7, 3) == Decimal("0.00000285")
    assert (ledger.opened, ledger.admitted, ledger.settled, ledger.in_flight) == (1, 1, 1, 0)


def test_a_refused_request_is_one_settlement_without_an_intent(
    wal: WriteAheadLog, ledger: Ledger
) -> None:
    """A bad key leaves a record too."""
    refuse(ledger)
    wal.sync()
    (frame,) = wal.records_from(START)
    assert frame.kind == Kind.SETTLEMENT
    assert not unpack_settlement(frame.payload).admitted
    assert (ledger.opened, ledger.admitted, ledger.settled) == (1, 0, 1)


STEPS: dict[str, Callable[[OpenRecord], object]] = {
    "intend": lambda record: record.intend(),
    "attempt": lambda record: record.attempt(
        backend="b", provider="scripted", model="m", reason="primary"
    ),
    "chunk": lambda record: record.saw_chunk(4),
    "close": lambda record: record.close(outcome=Outcome.OK, status=200),
    "close again": lambda record: record.close(outcome=Outcome.INTERNAL_ERROR, status=500),
}


def test_every_order_of_calls_gives_exactly_one_settlement(
    wal: WriteAheadLog, ledger: Ledger
) -> None:
    """All 120 orders of intend, attempt, chunk and two closes: one settlement each, of the first
    close."""
    expected: list[Outcome] = []
    for order in itertools.permutations(STEPS):
        record = ledger.open(surface="chat", trace=TRACE, deadline_s=1)
        first = min("close", "close again", key=order.index)
        for step in order:
            if step == "intend" and record.is_closed:
                with pytest.raises(WalUnavailable, match="settled already"):
                    record.intend()
            else:
                STEPS[step](record)
        expected.append(Outcome.OK if first == "close" else Outcome.INTERNAL_ERROR)
    assert [data.outcome for data in _settled(wal)] == expected
    assert ledger.settled == ledger.opened == 120
    assert ledger.admitted == 40
    assert ledger.in_flight == wal.outstanding == 0


def test_closing_ends_and_rates_each_attempt(wal: WriteAheadLog, ledger: Ledger) -> None:
    """A retry that failed and one that was cut: both ended, the cut one estimated and charged."""
    record = admit(ledger, tokens_in=11)
    record.data.attempts[0].outcome = Outcome.UPSTREAM_ERROR
    record.data.attempts[0].ended_ns = record.now_ns()
    record.attempt(backend="c", provider="scripted", model="m", reason="retry")
    for _ in range(5):
        record.saw_chunk(4)
    record.close(outcome=Outcome.TRUNCATED, status=200, error_code="upstream_truncated")
    (data,) = _settled(wal)
    failed, cut = data.attempts
    assert (failed.outcome, failed.usage, failed.charges) == (Outcome.UPSTREAM_ERROR, None, ())
    assert cut.outcome == Outcome.TRUNCATED
    assert cut.ended_ns is not None
    assert cut.usage is not None
    assert (cut.usage.input_tokens, cut.usage.output_tokens) == (11, 5)
    assert cut.usage_source == UsageSource.ESTIMATED
    assert data.cost == cost(11, 5)


def test_text_of_other_providers_is_estimated_from_bytes(
    wal: WriteAheadLog, ledger: Ledger
) -> None:
    """Four bytes are a token where chunks are not, never more than the client allowed."""
    for limit in (None, 2):
        record = admit(ledger, provider="openai")
        record.data.output_limit = limit
        record.saw_chunk(9)
        record.close(outcome=Outcome.CLIENT_DISCONNECT, status=200)
    usages = [data.attempts[0].usage for data in _settled(wal)]
    assert [usage.output_tokens for usage in usages if usage is not None] == [3, 2]


def test_an_observer_that_fails_loses_nothing(wal: WriteAheadLog, clock: FakeClock) -> None:
    """The settlement is on the log before anybody looks, and the other observers still do."""
    seen: list[str] = []

    def broken(data: RequestRecord) -> None:
        raise RuntimeError("metrics are down")

    ledger = Ledger(
        wal=wal, rate=rate, clock=clock, observers=[broken, lambda d: seen.append(d.request_id)]
    )
    record = serve(ledger)
    assert [data.request_id for data in _settled(wal)] == seen == [record.data.request_id]
    assert ledger.observer_errors == 1


def test_a_failing_rate_is_an_unpriced_line(wal: WriteAheadLog, clock: FakeClock) -> None:
    """A defect in pricing is never a silent zero and never loses the settlement."""

    def broken(attempt: Attempt) -> tuple[Charge, ...]:
        raise KeyError("book")

    ledger = Ledger(wal=wal, rate=broken, clock=clock)
    serve(ledger)
    (data,) = _settled(wal)
    assert data.cost is None
    assert [charge.quantity for charge in data.charges] == [10]
    assert ledger.rate_errors == 1


def test_what_others_send_never_breaks_a_settlement(wal: WriteAheadLog, ledger: Ledger) -> None:
    """Lone surrogates, giant names and numbers beyond 64 bits are mended, not fatal."""
    record = admit(ledger)
    record.data.asked_model = "m" * 100_000
    attempt = record.data.attempts[0]
    attempt.answered_model = "bad \ud800 text"
    attempt.http_status = 2**80
    record.close(outcome=Outcome.OK, status=200)
    (data,) = _settled(wal)
    assert data.asked_model is not None
    assert len(data.asked_model) == 256
    assert data.attempts[0].answered_model == "bad ? text"


def test_time_inside_a_request_never_steps(ledger: Ledger, clock: FakeClock) -> None:
    """Stages are measured on the monotonic clock from the opening on."""
    record = ledger.open(surface="chat", trace=TRACE, deadline_s=1)
    with record.stage("auth"):
        clock.advance(0.25)
    with pytest.raises(ValueError, match="stop"), record.stage("admit"):
        raise ValueError("stop")
    auth, stopped = record.data.stages
    assert auth.end_ns - auth.start_ns == 250_000_000
    assert stopped.start_ns == auth.end_ns == record.now_ns()


def test_the_intent_says_what_a_crash_would_be_billed_by(
    wal: WriteAheadLog, ledger: Ledger
) -> None:
    """Tenant, key, model and estimate are in the log before anything happens upstream."""
    record = admit(ledger, tenant="acme", tokens_in=99)
    wal.sync()
    intent = unpack_intent(wal.records_from(START)[0].payload)
    data = record_from_json(intent.record)
    assert (data.tenant_id, data.asked_model, data.input_estimate) == ("acme", "assistant", 99)
    assert intent.boot == wal.boot
    record.close(outcome=Outcome.OK, status=200)


def test_progress_is_where_a_dead_process_leaves_it(
    tmp_path: Path, wal: WriteAheadLog, ledger: Ledger
) -> None:
    """Every counted chunk is in the slot file at once, and a settled request's slot is free."""
    record, other = admit(ledger), admit(ledger)
    for _ in range(3):
        record.saw_chunk(5)
    other.close(outcome=Outcome.OK, status=200)
    (path,) = wal.folder.glob("progress-*.slots")
    slots = read_slots(path)
    assert set(slots) == {record.data.request_id}
    slot = slots[record.data.request_id]
    assert (slot.attempt_no, slot.chunks, slot.content_bytes) == (1, 3, 15)
    record.close(outcome=Outcome.OK, status=200)
    assert read_slots(path) == {}
    ledger.close()
    assert not path.exists()


def test_slots_grow_with_the_number_of_open_requests(wal: WriteAheadLog, ledger: Ledger) -> None:
    """More open requests than one file holds get another file."""
    records = [admit(ledger) for _ in range(2100)]
    records[-1].saw_chunk(4)
    paths = sorted(wal.folder.glob("progress-*.slots"))
    assert [len(read_slots(path)) for path in paths] == [2048, 52]
    for record in records:
        record.close(outcome=Outcome.OK, status=200)
    assert ledger.in_flight == 0
    ledger.close()


def test_nothing_is_admitted_without_room(tmp_path: Path, clock: FakeClock) -> None:
    """A full disk refuses the intent, and the refusal is itself settled."""
    disk = FillingDisk()
    wal = open_log(tmp_path, clock, disk=disk)
    ledger = Ledger(wal=wal, rate=rate, clock=clock)
    disk.may_allocate = False
    record = ledger.open(surface="chat", trace=TRACE, deadline_s=1)
    with pytest.raises(WalUnavailable):
        record.intend()
    record.close(outcome=Outcome.INTERNAL_ERROR, status=503, error_code="ledger_unavailable")
    assert ledger.admitted == 0
    assert (ledger.settled, wal.waiting) == (1, 1)
    disk.may_allocate = True
    deadline = time.monotonic() + 5
    while wal.waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [data.error_code for data in _settled(wal)] == ["ledger_unavailable"]
    wal.close()


def test_a_forgotten_record_is_closed_after_its_deadline(
    wal: WriteAheadLog, ledger: Ledger, clock: FakeClock
) -> None:
    """In-flight records past deadline and grace are settled as abandoned, younger ones are not."""
    forgotten = admit(ledger)
    clock.advance(100)
    young = admit(ledger)
    assert ledger.expire(grace_s=30) == 1
    assert forgotten.is_closed
    assert not young.is_closed
    (data,) = _settled(wal)
    assert data.outcome == Outcome.ABANDONED
    young.close(outcome=Outcome.OK, status=200)
