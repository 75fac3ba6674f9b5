"""The counters of several workers of one machine, kept in their parent: exact without a server.

`CounterServer` answers on a Unix socket from a `MemoryStore`; `CounterClient` is the `Store` of a
worker. Calls of one connection are answered in their order, and all of one turn of the loop leave
in one write. A frame is a length (4 bytes) and one msgpack message. Whoever can open the socket can
count, so its folder must be private. Invariant: every call that waits for an answer gets it or
StoreGone within `budget_s`.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import msgspec
from msgspec import Struct
from typing_extensions import override

from gateway.limits.arithmetic import BudgetState, Demand, Spent, Verdict
from gateway.limits.store import MemoryStore, StoreGone

log = logging.getLogger(__name__)

MAX_FRAME = 16 << 20
Answer = TypeVar("Answer")


class Admit(Struct, frozen=True, tag=1, array_like=True):
    tenant: str
    hold_id: str
    lease_us: int
    demands: tuple[Demand, ...]


class Settle(Struct, frozen=True, tag=2, array_like=True):
    """Is not answered."""

    tenant: str
    hold_id: str
    actual: tuple[int, ...]
    ended_us: int


class Renew(Struct, frozen=True, tag=3, array_like=True):
    tenant: str
    hold_ids: tuple[str, ...]
    lease_us: int


class Rebase(Struct, frozen=True, tag=4, array_like=True):
    tenant: str
    spent: Spent


class AskBudget(Struct, frozen=True, tag=5, array_like=True):
    tenant: str
    key: str


Message = Admit | Settle | Renew | Rebase | AskBudget

_encoder = msgspec.msgpack.Encoder()
_messages = msgspec.msgpack.Decoder(Message)
_verdicts = msgspec.msgpack.Decoder(Verdict)
_budgets = msgspec.msgpack.Decoder(BudgetState | None)
_nothing = msgspec.msgpack.Decoder(None)


class _Frames(asyncio.Protocol):
    """Both ends: frames in, frames out, one write per turn of the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def got(self, frame: memoryview) -> None:
        raise AssertionError("each end has its own")

    def put(self, message: Any) -> None:
        if not self._unsent:
            self._loop.call_soon(self._flush)
        data = _encoder.encode(message)
        self._unsent.append(len(data).to_bytes(4, "big"))
        self._unsent.append(data)

    def _flush(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._unsent))
        self._unsent = []

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its type

    @override
    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        view, at = memoryview(data), 0
        while len(data) - at >= 4:
            size = int.from_bytes(view[at : at + 4], "big")
            if size > MAX_FRAME:
                self.close()
                return
            if len(data) - at - 4 < size:
                break
            self.got(view[at + 4 : at + 4 + size])
            at += 4 + size
        self._rest = data[at:]

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class _Served(_Frames):
    """The parent's end of one worker's connection."""

    def __init__(self, store: MemoryStore, server: "CounterServer") -> None:
        super().__init__()
        self._store = store
        self._server = server

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.joined(self)

    @override
    def got(self, frame: memoryview) -> None:
        try:
            message = _messages.decode(frame)
        except msgspec.MsgspecError:  # a worker of another version: it spends its slice
            log.error("counters: a message is not understood")
            self.close()
            return
        store = self._store
        match message:
            case Admit(tenant, hold_id, lease_us, demands):
                self.put(store.try_admit(tenant, hold_id, lease_us, demands))
            case Settle(tenant, hold_id, actual, ended_us):
                store.settle(tenant, hold_id, actual, ended_us)
            case Renew(tenant, hold_ids, lease_us):
                for hold_id in hold_ids:
                    store.try_renew(tenant, hold_id, lease_us)
                self.put(None)
            case Rebase(tenant, spent):
                store.try_rebase(tenant, spent)
                self.put(None)
            case AskBudget(tenant, key):
                self.put(store.try_budget(tenant, key))

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._server.left(self)


class CounterServer:
    """Enter it: it listens at `path` until it is left."""

    def __init__(self, store: MemoryStore, path: Path) -> None:
        self._store = store
        self._path = path
        self._known: set[_Served] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Served(self._store, self), self._path)
        return self

    def joined(self, connection: _Served) -> None:
        self._known.add(connection)

    def left(self, connection: _Served) -> None:
        self._known.discard(connection)

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for connection in tuple(self._known):
            connection.close()
        await self._server.wait_closed()


class _Asking(_Frames):
    """A worker's end."""

    def __init__(self, lost: Callable[[], None]) -> None:
        super().__init__()
        self.waiting: deque[asyncio.Future[bytes]] = deque()
        self.is_open = True
        self._lost = lost

    def ask(self, message: Message) -> "asyncio.Future[bytes]":
        future: asyncio.Future[bytes] = self._loop.create_future()
        self.waiting.append(future)
        self.put(message)
        return future

    @override
    def got(self, frame: memoryview) -> None:
        future = self.waiting.popleft()
        if not future.done():
            future.set_result(bytes(frame))

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        for future in self.waiting:
            if not future.done():
                future.set_exception(StoreGone("the parent is gone", was_sent=True))
        self.waiting.clear()
        self._lost()


class CounterClient:
    """The counters that this worker shares with its siblings. Enter it. When the parent is gone it
    stays gone: then this process is about to stop, and each worker spends its slice."""

    def __init__(self, path: Path, *, budget_s: float) -> None:
        self.is_up = False
        self._path = path
        self._budget_s = budget_s
        self._connection: _Asking | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        _, self._connection = await loop.create_unix_connection(
            lambda: _Asking(self._was_lost), str(self._path)
        )
        self.is_up = True
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._connection is not None:
            await asyncio.sleep(0)  # what was settled in this turn is sent
            self._connection.close()

    def _was_lost(self) -> None:
        self.is_up = False

    async def admit(
        self, tenant: str, hold_id: str, lease_us: int, demands: Sequence[Demand]
    ) -> Verdict:
        message = Admit(tenant, hold_id, lease_us, tuple(demands))
        return await self._ask(message, _verdicts)

    def settle(self, tenant: str, hold_id: str, actual: Sequence[int], ended_us: int) -> None:
        if self.is_up and self._connection is not None:
            self._connection.put(Settle(tenant, hold_id, tuple(actual), ended_us))

    async def renew(self, tenant: str, hold_ids: Sequence[str], lease_us: int) -> None:
        await self._ask(Renew(tenant, tuple(hold_ids), lease_us), _nothing)

    async def rebase(self, tenant: str, spent: Spent) -> None:
        await self._ask(Rebase(tenant, spent), _nothing)

    async def budget(self, tenant: str, key: str) -> BudgetState | None:
        return await self._ask(AskBudget(tenant, key), _budgets)

    async def _ask(self, message: Message, decoder: "msgspec.msgpack.Decoder[Answer]") -> Answer:
        connection = self._connection
        if connection is None or not self.is_up:
            raise StoreGone("the parent is gone")
        future = connection.ask(message)
        try:
            async with asyncio.timeout(self._budget_s):
                return decoder.decode(await future)
        except TimeoutError:
            raise StoreGone("the parent is slow", was_sent=True) from None
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                future.cancel()


__all__ = ["CounterClient", "CounterServer"]
