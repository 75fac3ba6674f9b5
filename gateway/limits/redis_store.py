"""The counters on a Redis server that all replicas share: one script call for each step.

Knows the script and the connection; not callers or prices. Invariants: while the server is away no
request waits for it (`StoreGone` at once), one task per process tries to come back, with growing,
random pauses; what could not be settled is settled first when it is back, and twice is once.
"""

import asyncio
import contextlib
import functools
import hashlib
import itertools
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Self

import hiredis

from gateway.limits.arithmetic import BudgetState, Demand, Room, Spent, Verdict
from gateway.limits.store import StoreGone
from gateway.limits.topology import place_of, primary_of
from gateway.limits.wire import Argument, Connection, connect

log = logging.getLogger(__name__)

SCRIPT: Final = (Path(__file__).parent / "limits.lua").read_text()
SHA: Final = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
REPLICAS: Final = "ml:replicas"
MAX_BACKLOG: Final = 100_000
CATCH_UP: Final = 500  # settlements at a time, after an outage
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
REMEMBERED_S: Final = 3600


class RedisStore:
    """Use as an async context manager. `is_up` says whether the last word was good; counters:
    `outages`, `timeouts`, `dropped` (settlements that did not fit the backlog: their holds end by
    their lease)."""

    def __init__(
        self,
        url: str,
        *,
        node: str,
        budget_s: float = 0.05,
        heartbeat_s: float = 5.0,
        on_recovered: Callable[[], None] | None = None,
        on_trouble: Callable[[], None] | None = None,
        replicas_key: str = REPLICAS,
    ) -> None:
        """`url`: of one server, or of the Sentinels that know it (`topology`)."""
        self.replicas_key = replicas_key
        self._on_trouble = on_trouble
        self.is_up = False
        self.outages = 0
        self.dropped = 0
        self.replicas: int | None = None  # None: never granted a slice
        self._place = place_of(url)
        self._node = node
        self._budget_s = budget_s
        self._heartbeat_s = heartbeat_s
        self.on_recovered = on_recovered
        self._connection: Connection | None = None
        self._backlog: OrderedDict[tuple[str, str], tuple[Argument, ...]] = OrderedDict()
        self._lost = asyncio.Event()
        self._opened = 0.0  # when this connection was
        self._settled_s = 2 * heartbeat_s + 2 * LONGEST_PAUSE_S
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except StoreGone as error:
            log.warning("limit store gone", extra={"reason": str(error)})
            self.outages += 1
        self._task = asyncio.create_task(self._keep(), name="limits-redis")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._connection is not None and self._connection.is_open:
            with contextlib.suppress(StoreGone, hiredis.ReplyError):
                await self._connection.call("ZREM", self.replicas_key, self._node)
            self.is_up = False  # first: this is no outage
            self._connection.close()

    @property
    def backlog(self) -> int:
        """Settlements that the server has not heard of yet."""
        return len(self._backlog)

    # -- steps

    async def admit(
        self,
        tenant: str,
        hold_id: str,
        lease_us: int,
        demands: Sequence[Demand],
        *,
        within_s: float | None = None,
    ) -> Verdict:
        """Raises StoreGone within the budget. If it `was_sent`, the server may have admitted all
        the same, and `settle` must be called."""
        connection = self._connection
        if not self.is_up or connection is None:
            raise StoreGone
        prefix = f"ml:{{{tenant}}}:"
        head = (*_head(prefix, [demand.key for demand in demands]), "admit", hold_id, lease_us)
        reply = await connection.ask((*head, *_flat(demands)), within_s=within_s)
        if isinstance(reply, Exception):
            raise self._failed(reply)
        return _verdict(reply)

    def settle(self, tenant: str, hold_id: str, actual: Sequence[int], ended_us: int) -> None:
        command = (*_head(f"ml:{{{tenant}}}:", ()), "settle", hold_id, ended_us, *actual)
        self.send((tenant, hold_id), command)

    def take_backlog(self) -> list[tuple[tuple[str, str], tuple[Argument, ...]]]:
        """What the server has not heard, for another one that has its tenants now."""
        items, self._backlog = list(self._backlog.items()), OrderedDict()
        return items

    def send(self, about: tuple[str, str], command: tuple[Argument, ...]) -> None:
        if self.is_up and self._connection is not None:
            receive = functools.partial(self._settled, about, command)
            self._connection.send(command, receive)
        else:
            self._keep_for_later(about, command)

    def _settled(
        self, about: tuple[str, str], command: tuple[Argument, ...], reply: object
    ) -> None:
        if isinstance(reply, StoreGone):
            self._keep_for_later(about, command)
        elif isinstance(reply, Exception):
            self._failed(reply)
            self._keep_for_later(about, command)

    def _keep_for_later(self, about: tuple[str, str], command: tuple[Argument, ...]) -> None:
        self._backlog[about] = command
        if len(self._backlog) > MAX_BACKLOG:
            self._backlog.popitem(last=False)
            self.dropped += 1

    async def renew(self, tenant: str, hold_ids: Sequence[str], lease_us: int) -> None:
        await self._call(_head(f"ml:{{{tenant}}}:", ()), "renew", lease_us, *hold_ids)

    async def extend(self, tenant: str, hold_id: str, more: Sequence[int]) -> bool | None:
        answer = await self._call(_head(f"ml:{{{tenant}}}:", ()), "extend", hold_id, *more)
        return None if answer < 0 else bool(answer)

    async def rebase(self, tenant: str, spent: Spent) -> None:
        flat = [part for item in spent.slots.items() for part in item]
        await self._call(
            _head(f"ml:{{{tenant}}}:", (spent.key,)),
            "rebase", spent.period_us, spent.window_us, spent.before, spent.cut, *flat,
        )  # fmt: skip

    async def budget(self, tenant: str, key: str) -> BudgetState | None:
        _, spent, held = await self._call(_head(f"ml:{{{tenant}}}:", (key,)), "state")
        return BudgetState(spent, held)

    async def holds(self, tenant: str) -> int:
        """Open holds of a tenant, over all replicas."""
        found = await self._call(_head(f"ml:{{{tenant}}}:", ("-",)), "state")
        return int(found[0])

    async def _call(self, head: Iterable[Argument], *rest: Argument) -> Any:
        connection = self._connection
        if not self.is_up or connection is None:
            raise StoreGone
        reply = await connection.ask((*head, *rest))
        if isinstance(reply, Exception):
            raise self._failed(reply)
        return reply

    def _failed(self, error: Exception) -> StoreGone:
        """A server that answers with an error (read-only, loading, script flushed) is away too."""
        if not isinstance(error, StoreGone):
            log.warning("limit store failed", extra={"reason": str(error)[:100]})
            if self._connection is not None:
                self._connection.close()
            return StoreGone(was_sent=True)
        return error

    # -- coming and going

    def _was_lost(self) -> None:
        if self.is_up:
            self.outages += 1
            log.warning("limit store gone", extra={"hint": "each replica spends its slice"})
        self.is_up = False
        self._lost.set()
        self._say_trouble()

    def _say_trouble(self) -> None:
        if self._on_trouble is not None:
            self._on_trouble()

    async def _open(self) -> None:
        self._lost.clear()
        connection = await connect(await primary_of(self._place), lost=self._was_lost)
        try:
            self._opened = asyncio.get_running_loop().time()
            if (await connection.call("ROLE"))[0] != b"master":
                raise StoreGone("not a primary")
            await connection.call("SCRIPT", "LOAD", SCRIPT)
            await self._register(connection)
            while self._backlog:
                await self._catch_up(connection)
            connection.has_budget(self._budget_s)
        except (StoreGone, hiredis.ReplyError) as error:
            connection.close()
            raise StoreGone(str(error)[:100] or type(error).__name__) from error
        self._connection = connection
        self.is_up = True

    async def _catch_up(self, connection: Connection) -> None:
        """Tell the server of settlements that it has not heard of, the oldest first."""
        batch = list(itertools.islice(self._backlog.items(), CATCH_UP))
        replies = await asyncio.gather(*(connection.ask(command) for _, command in batch))
        for (about, command), reply in zip(batch, replies, strict=True):
            if isinstance(reply, Exception):
                raise reply
            if self._backlog.get(about) is command:
                del self._backlog[about]

    async def _register(self, connection: Connection) -> None:
        """Be counted, and count. The number may only fall when everybody who lives has had the time
        to register on this server, and nobody has a slice before all others have counted it. Who
        went without a word is counted for an hour, since it may be spending its slice."""
        seconds, _ = await connection.call("TIME")
        now = int(seconds)
        await connection.call("ZADD", self.replicas_key, now + REMEMBERED_S, self._node)
        await connection.call("ZREMRANGEBYSCORE", self.replicas_key, "-inf", now)
        count = int(await connection.call("ZCARD", self.replicas_key))
        if asyncio.get_running_loop().time() - self._opened >= self._settled_s:
            self.replicas = max(1, count)
        elif self.replicas is not None:
            self.replicas = max(self.replicas, count)

    async def _keep(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            if self.is_up and self._connection is not None:
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        await self._lost.wait()
                except TimeoutError:
                    await self._beat(self._connection)
                continue
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311  # jitter
            try:
                await self._open()
            except StoreGone:
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
                self._say_trouble()
                continue
            except Exception:  # the loop outlives its bugs; requests go on within slices
                log.exception("limit store: reconnecting failed")
                pause_s = LONGEST_PAUSE_S
                continue
            pause_s = FIRST_PAUSE_S
            log.warning("limit store back", extra={"backlog": len(self._backlog)})
            if self.on_recovered is not None:
                self.on_recovered()

    async def _beat(self, connection: Connection) -> None:
        try:
            await self._register(connection)
        except (StoreGone, hiredis.ReplyError) as error:
            self._failed(error)


@functools.lru_cache(maxsize=50_000)
def _bucket(prefix: str, key: str) -> bytes:
    return f"{prefix}{key}".encode()


def _head(prefix: str, keys: Sequence[str]) -> tuple[Argument, ...]:
    named = [_bucket(prefix, key) for key in keys]
    return ("EVALSHA", SHA, 2 + len(keys), _bucket(prefix, "h"), _bucket(prefix, "d"), *named)


def _flat(demands: Sequence[Demand]) -> list[int]:
    flat: list[int] = []
    for demand in demands:
        flat += (
            int(demand.kind),
            demand.limit,
            demand.amount,
            demand.period_us,
            demand.window_us,
        )
    return flat


def _verdict(reply: list[int]) -> Verdict:
    if reply[0] == -1:
        return Verdict(False, cold=tuple(reply[2:]), now_us=reply[1])
    rooms = tuple([Room(reply[i], reply[i + 1]) for i in range(4, len(reply), 2)])
    return Verdict(reply[0] == 1, rooms, reply[2], reply[3], now_us=reply[1])
