"""The shared counters on a real Redis: the script is the arithmetic, and outages stay bounded."""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from gateway.limits import RedisStore, StoreGone, arithmetic
from gateway.limits.arithmetic import MINUTE_US, Demand, Kind, Spent, TenantState, Verdict
from gateway.limits.redis_store import SCRIPT
from gateway.limits.wire import connect
from tests import services

LEASE_US = 60_000_000
HOUR_US = 3_600_000_000
TIME_LINE = "local clock = redis.call('TIME')"


@pytest.fixture(scope="module")
def redis() -> Iterator[services.Redis]:
    """One server for the module; each test has tenants of its own."""
    with services.redis() as server:
        yield server


@pytest.fixture
async def store(redis: services.Redis) -> AsyncIterator[RedisStore]:
    """An open store on it."""
    async with RedisStore(redis.url, node="one", budget_s=1.0) as opened:
        assert opened.is_up
        yield opened


def window(limit: int, key: str = "w") -> Demand:
    """Requests per minute."""
    return Demand(key, Kind.WINDOW, limit, 1, MINUTE_US)


def budget(limit: int, amount: int, key: str = "m") -> Demand:
    """A lifetime budget."""
    return Demand(key, Kind.BUDGET, limit, amount)


def nothing_spent(key: str = "m", period_us: int = 0) -> Spent:
    """The ledger's word on a new budget."""
    return Spent(key=key, period_us=period_us, window_us=0, before=0, cut=0, slots={})


@pytest.mark.parametrize("seed", range(6))
async def test_the_script_is_the_arithmetic(redis: services.Redis, seed: int) -> None:
    """Any sequence of steps gives the same verdicts, waits and counters on the server (with its
    clock held by the test) as in process."""
    script = SCRIPT.replace(TIME_LINE, "local clock = { tonumber(ARGV[#ARGV]), 0 }")
    script = script.replace("clock[1] * 1000000 + clock[2]", "clock[1]")
    script = script.replace("for i = 4, #ARGV do", "for i = 4, #ARGV - 1 do")
    script = script.replace("for i = 3, #ARGV do", "for i = 3, #ARGV - 1 do")
    script = script.replace("for i = 6, #ARGV, 2 do", "for i = 6, #ARGV - 1, 2 do")
    assert "TIME" not in script
    connection = await connect(redis.url, lost=lambda: None, connect_s=5)
    sha = await connection.call("SCRIPT", "LOAD", script)
    dice = random.Random(seed)
    state, now = TenantState(), 1_800_000_000_000_000 + seed
    prefix = f"d:{{{seed}}}:"
    alive: list[tuple[str, tuple[Demand, ...]]] = []

    async def run(keys: list[str], *arguments: object) -> list[int]:
        named = [f"{prefix}{key}" for key in ("h", "d", *keys)]
        return await connection.call("EVALSHA", sha, len(named), *named, *arguments, now)  # type: ignore[arg-type, no-any-return]  # whatever the step takes

    for number in range(250):
        now += dice.choice([0, 1, 1000, 777_777, 20_000_000, 90_000_000])
        match dice.choice(["admit"] * 5 + ["settle"] * 3 + ["extend", "renew", "rebase"]):
            case "admit":
                demands = _some_demands(dice, now)
                flat = [
                    part
                    for d in demands
                    for part in (int(d.kind), d.limit, d.amount, d.period_us, d.window_us)
                ]
                reply = await run([d.key for d in demands], "admit", f"h{number}", LEASE_US, *flat)
                expected = arithmetic.admit(state, now, f"h{number}", LEASE_US, demands)
                assert _reply(expected) == reply
                if expected.admitted:
                    alive.append((f"h{number}", demands))
            case "settle" if alive:
                hold_id, demands = dice.choice(alive)
                amounts = [dice.choice([0, d.amount, d.amount * 3]) for d in demands]
                ended = now - dice.choice([0, MINUTE_US])
                settled = arithmetic.settle(state, now, hold_id, amounts, ended)
                assert await run([], "settle", hold_id, ended, *amounts) == int(settled)
            case "extend" if alive:
                hold_id, demands = dice.choice(alive)
                more = [dice.choice([0, d.amount, d.amount * 8]) for d in demands]
                found = arithmetic.extend(state, now, hold_id, more)
                expected_ = -1 if found is None else int(found)
                assert await run([], "extend", hold_id, *more) == expected_
            case "renew" if alive:
                ids = [hold_id for hold_id, _ in dice.sample(alive, min(3, len(alive)))]
                arithmetic.renew(state, now, ids, LEASE_US)
                await run([], "renew", LEASE_US, *ids)
            case "rebase":
                spent = _some_spend(dice, now)
                arithmetic.rebase(state, spent)
                flat = [part for item in spent.slots.items() for part in item]
                arguments = (spent.period_us, spent.window_us, spent.before, spent.cut, *flat)
                await run([spent.key], "rebase", *arguments)
    for key in ("m", "r"):
        arithmetic.expire(state, now)
        found = state.budget(key)
        assert found is not None
        assert (await run([key], "state"))[1:] == [found.spent, found.held]
    connection.close()


def _some_demands(dice: random.Random, now: int) -> tuple[Demand, ...]:
    day = 86_400_000_000
    choices = [
        Demand("w", Kind.WINDOW, dice.choice([0, 3, 8]), 1, MINUTE_US),
        Demand("w2", Kind.WINDOW, 1000, 1, HOUR_US),
        Demand("b", Kind.BUCKET, dice.choice([1000, 2000]), dice.randint(1, 900), MINUTE_US),
        Demand("s", Kind.BUCKET, 5 * 10**9, dice.randint(1, 10**9), HOUR_US),
        Demand("c", Kind.CONCURRENCY, 4, 1),
        Demand("m", Kind.BUDGET, 10**6, dice.randint(1, 10**5), 0, now // day * day),
        Demand("r", Kind.BUDGET, 10**6, dice.randint(1, 10**5), HOUR_US),
    ]
    return tuple(dice.sample(choices, dice.randint(1, len(choices))))


def _some_spend(dice: random.Random, now: int) -> Spent:
    day = 86_400_000_000
    if dice.random() < 0.5:
        minute = now // MINUTE_US
        slots = {minute - back: dice.randint(0, 10**5) for back in (0, 1, 4)}
        return Spent(
            key="m", period_us=0, window_us=now // day * day, before=7, cut=minute - 2, slots=slots
        )
    slot = now // (HOUR_US // 60)
    slots = {slot - back: dice.randint(0, 10**5) for back in (0, 3, 30)}
    return Spent(key="r", period_us=HOUR_US, window_us=0, before=0, cut=slot - 9, slots=slots)


def _reply(verdict: Verdict) -> list[int]:
    if verdict.cold:
        return [-1, verdict.now_us, *verdict.cold]
    rooms = [part for room in verdict.rooms for part in (room.remaining, room.reset_us)]
    return [int(verdict.admitted), verdict.now_us, verdict.binding, verdict.wait_us, *rooms]


async def test_two_hundred_at_once_with_room_for_seven(
    redis: services.Redis, store: RedisStore
) -> None:
    """Over two replicas, seven of 200 get in by requests, and seven by money."""
    async with RedisStore(redis.url, node="two", budget_s=5.0) as other:
        await store.rebase("p2", nothing_spent())
        for tenant, demand in (("p1", window(7)), ("p2", budget(7_000, 1_000))):
            verdicts = await asyncio.gather(
                *(
                    (store, other)[number % 2].admit(tenant, f"h{number}", LEASE_US, (demand,))
                    for number in range(200)
                )
            )
            assert sum(verdict.admitted for verdict in verdicts) == 7


async def test_a_paused_server_costs_at_most_the_budget(redis: services.Redis) -> None:
    """While it is paused, whoever waits is told within the 50 ms, whoever comes later at once; when
    it goes on, what was settled meanwhile and what was admitted unheard is put right."""
    async with RedisStore(redis.url, node="three", budget_s=0.05) as store:
        assert (await store.admit("q", "before", LEASE_US, (window(9), _place()))).admitted
        redis.signal(signal.SIGSTOP)
        try:
            waits = await asyncio.gather(*(_refused(store, f"in-{n}") for n in range(20)))
            late = await _refused(store, "late")
            store.settle("q", "before", [1, 1], 0)
            for number in range(20):
                store.settle("q", f"in-{number}", [1, 1], 0)
        finally:
            redis.signal(signal.SIGCONT)
        assert max(waits) < 0.3  # 50 ms, on a busy machine
        assert late < 0.01
        await _until(lambda: store.is_up and not store.backlog)
        assert await store.holds("q") == 0
        assert store.outages == 1


async def test_a_restarted_server_has_forgotten_and_asks_the_ledger() -> None:
    """After a restart a budget is cold again: nobody spends it before the ledger was read."""
    with services.redis() as server:
        async with RedisStore(server.url, node="four", budget_s=0.5) as store:
            assert (await store.admit("r", "1", LEASE_US, (budget(9, 3),))).cold == (0,)
            await store.rebase("r", nothing_spent())
            assert (await store.admit("r", "1", LEASE_US, (budget(9, 3),))).admitted
            server.kill()
            with pytest.raises(StoreGone):
                await store.admit("r", "2", LEASE_US, (budget(9, 3),))
            server.start()
            await _until(lambda: store.is_up)
            assert (await store.admit("r", "3", LEASE_US, (budget(9, 3),))).cold == (0,)


async def test_a_server_that_is_not_there_at_start(redis: services.Redis) -> None:
    """The gateway starts, refuses to wait, and has no slice until all replicas have counted it."""
    async with RedisStore(f"redis://127.0.0.1:{services.free_port()}", node="five") as store:
        assert not store.is_up
        assert store.replicas is None
        with pytest.raises(StoreGone):
            await store.admit("s", "1", LEASE_US, (window(9),))


async def test_a_password_is_sent_and_a_wrong_one_is_an_outage() -> None:
    """`redis://:password@host` works; without it the store is away, not crashed."""
    with services.redis() as server:
        connection = await connect(server.url, lost=lambda: None)
        await connection.call("CONFIG", "SET", "requirepass", "secret")
        connection.close()
        url = f"redis://:secret@127.0.0.1:{server.port}/3"
        async with RedisStore(url, node="six") as store:
            assert store.is_up
        async with RedisStore(server.url, node="seven") as store:
            assert not store.is_up


async def _refused(store: RedisStore, hold_id: str) -> float:
    began = time.perf_counter()
    with pytest.raises(StoreGone):
        await store.admit("q", hold_id, LEASE_US, (window(9), _place()))
    return time.perf_counter() - began


def _place() -> Demand:
    return Demand("c", Kind.CONCURRENCY, 50, 1)


async def _until(condition: object) -> None:
    deadline = time.monotonic() + 10
    while not condition():  # type: ignore[operator]  # a function without arguments
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_process_that_slept_is_no_outage(redis: services.Redis) -> None:
    """Replies that came while this process did not run are read, however late it is: nobody is
    refused, and no hold is left behind for one that the server admitted."""
    async with RedisStore(redis.url, node="sleeper", budget_s=0.05) as store:
        asked = [
            asyncio.ensure_future(
                store.admit("z", f"h{n}", LEASE_US, (window(7),), within_s=within)
            )
            for n, within in enumerate([None, 0.02] * 5)
        ]
        await asyncio.sleep(0)  # they are sent
        time.sleep(0.3)  # the process sleeps, not only the test
        verdicts = await asyncio.gather(*asked)
        assert sum(verdict.admitted for verdict in verdicts) == 7
        assert store.outages == 0
