"""One connection to Redis on which all calls of a loop share their writes and reads.

Commands are answered in their order, so a reply belongs to the oldest call that waits. redis-py
takes a connection per call and an await per reply, which costs more than the whole admission
(docs/adr/0014); the URL grammar is still redis-py's. Invariant: every callback is called exactly
once, with a reply or with StoreGone; no call waits longer than `budget_s` before that.
"""

import asyncio
import functools
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis
from redis.asyncio.connection import parse_url
from typing_extensions import override

from gateway.limits.store import StoreGone

Argument = str | int | float | bytes | memoryview
Reply = Any  # what hiredis makes of it
Receive = Callable[[Reply], None]  # StoreGone and hiredis.ReplyError come as values

CONNECT_S = 1.0
GRACE_S = 0.005  # of the budget: for a last look at the socket


class Connection(asyncio.Protocol):
    """Use from one event loop. `lost` is called once, when it can no longer be used."""

    def __init__(self, budget_s: float, lost: Callable[[], None]) -> None:
        self.is_open = False
        self._is_late = False
        self._loop = asyncio.get_running_loop()
        self._budget_s = budget_s
        self._lost = lost
        self._reader = hiredis.Reader()
        self._waiting: deque[tuple[float, Receive]] = deque()
        self._unsent: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def send(self, command: Sequence[Argument], receive: Receive) -> None:
        """Queue one command; all of one turn of the loop leave in one write."""
        if not self.is_open:
            receive(StoreGone())
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
        packed = hiredis.pack_command(tuple(command))  # type: ignore[arg-type]  # stub: one item
        self._unsent.append(packed)
        due = self._loop.time() + self._budget_s - GRACE_S
        self._waiting.append((due, receive))
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._check)

    async def call(self, *command: Argument) -> Reply:
        """One command and its reply. Raises StoreGone, hiredis.ReplyError."""
        reply = await self.ask(command)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def ask(
        self, command: Sequence[Argument], *, within_s: float | None = None
    ) -> "asyncio.Future[Reply]":
        """`within_s`: give up on this one sooner than the budget; the connection stays."""
        future: asyncio.Future[Reply] = self._loop.create_future()
        self.send(command, functools.partial(_resolve, future))
        if within_s is not None and within_s < self._budget_s:
            # Twice: if it was this process that slept, the reply is there to be read.
            late = functools.partial(self._loop.call_later, GRACE_S, _give_up, future)
            timer = self._loop.call_later(max(0.0, within_s - GRACE_S), late)
            future.add_done_callback(lambda _: timer.cancel())
        return future

    def has_budget(self, budget_s: float) -> None:
        """From now on: how long a call may wait."""
        self._budget_s = budget_s
        if self._timer is not None:  # it was set for the old one
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Now; whoever waits gets StoreGone."""
        if self._transport is not None:
            self._transport.abort()
        self._end()

    # -- what the loop calls

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no instance of it
        self.is_open = True

    @override
    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        waiting = self._waiting
        try:
            reply = self._reader.gets()
            while reply is not False:
                if not waiting:
                    break
                waiting.popleft()[1](reply)
                reply = self._reader.gets()
        except hiredis.ProtocolError:
            self.close()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _flush(self) -> None:
        if self.is_open and self._transport is not None:
            self._transport.write(b"".join(self._unsent))
        self._unsent = []

    def _check(self) -> None:
        """The oldest call is out of time: then so is everything behind it, and a late reply must
        not be taken for another call's."""
        self._timer = None
        if not self._waiting:
            self._is_late = False
            return
        due = self._waiting[0][0]
        now = self._loop.time()
        if now < due:
            self._is_late = False
            self._timer = self._loop.call_at(due, self._check)
        elif not self._is_late:  # if it was this process that slept, the reply is there to be read
            self._is_late = True
            self._timer = self._loop.call_later(GRACE_S, self._check)
        else:
            self.close()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        was_open, self.is_open = self.is_open, False
        waiting, self._waiting = self._waiting, deque()
        for _, receive in waiting:
            receive(StoreGone(was_sent=True))
        if was_open:
            self._lost()


def _resolve(future: "asyncio.Future[Reply]", reply: Reply) -> None:
    if not future.done():
        future.set_result(reply)


def _give_up(future: "asyncio.Future[Reply]") -> None:
    _resolve(future, StoreGone(was_sent=True))


async def connect(
    url: str, *, lost: Callable[[], None], connect_s: float = CONNECT_S
) -> Connection:
    """Open, authenticate, select. Raises StoreGone, whatever the reason. Until `has_budget` says
    how long a call may wait, it may take as long as connecting."""
    options = parse_url(url)
    loop = asyncio.get_running_loop()
    connection = Connection(connect_s, lost)
    try:
        async with asyncio.timeout(connect_s):
            if "path" in options:
                await loop.create_unix_connection(lambda: connection, options["path"])
            else:
                await loop.create_connection(
                    lambda: connection,
                    options.get("host", "localhost"),
                    options.get("port", 6379),
                    ssl=_tls(options) if url.startswith("rediss://") else None,
                )
            if options.get("password"):
                user = [options["username"]] if options.get("username") else []
                await connection.call("AUTH", *user, options["password"])
            if options.get("db"):
                await connection.call("SELECT", int(options["db"]))
            await connection.call("PING")
    except (OSError, TimeoutError, hiredis.ReplyError) as error:
        connection.close()
        raise StoreGone(type(error).__name__) from error
    return connection


def _tls(options: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
    if options.get("ssl_certfile"):
        context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    return context
