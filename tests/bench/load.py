"""A load generator that costs little itself: raw sockets, one request after another on each."""

import asyncio
import re
import time
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

_LEFT = re.compile(rb"t=(\d+);")
TICKS_PER_S = 100  # USER_HZ


class Load(Struct, frozen=True, kw_only=True):
    """What one run saw."""

    requests: int
    seconds: float
    cpu_us: float  # of the process under test, per request
    p50_ms: float
    p99_ms: float
    events: int = 0  # streamed events received


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def request(
    port: int,
    key: str,
    *,
    stream: bool,
    model: str = "bench",
    headers: Mapping[str, str] | None = None,
    marks: str = "",
) -> bytes:
    """The bytes of one request with a 4 KB body, keep-alive. `marks`: further fields."""
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    padding = "word " * 760
    body = (
        f'{{"model":"{model}","stream":{str(stream).lower()},"max_tokens":64,{marks}"messages":['
        f'{{"role":"user","content":"{padding}"}}]}}'
    ).encode()
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
        f"authorization: Bearer {key}\r\n{more}content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


async def run(
    port: int,
    key: str,
    pid: int,
    *,
    connections: int,
    seconds: float,
    stream: bool,
    headers: Mapping[str, str] | None = None,
) -> Load:
    """Ask over `connections` sockets until the time is up."""
    payload = request(port, key, stream=stream, headers=headers)
    latencies: list[float] = []
    events = 0
    stop_at = time.perf_counter() + seconds
    before, began = cpu_seconds(pid), time.perf_counter()

    async def one() -> None:
        nonlocal events
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < stop_at:
            start = time.perf_counter()
            writer.write(payload)
            seen = await _answer(reader)
            events += seen  # not across the await: the others count too
            latencies.append(time.perf_counter() - start)
        writer.close()

    await asyncio.gather(*(one() for _ in range(connections)))
    took = time.perf_counter() - began
    used = cpu_seconds(pid) - before
    latencies.sort()
    count = len(latencies)
    return Load(
        requests=count,
        seconds=took,
        cpu_us=used / count * 1e6,
        p50_ms=latencies[count // 2] * 1e3,
        p99_ms=latencies[min(count - 1, count * 99 // 100)] * 1e3,
        events=events,
    )


async def _answer(reader: asyncio.StreamReader) -> int:
    """Read one answer to its end; the number of events in it."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head[:15]:
        raise RuntimeError(head.decode(errors="replace"))
    lower = head.lower()
    at = lower.find(b"content-length:")
    if at >= 0:
        await reader.readexactly(int(lower[at + 15 :].split(b"\r\n", 1)[0]))
        return 0
    events = 0
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        data = await reader.readexactly(size + 2)
        events += data.count(b"data: ")
        if size == 0:
            return events


def resident_mb(pid: int) -> float:
    """Memory that is a process's own or shared, each page counted in part."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


class Paced(Struct, frozen=True, kw_only=True):
    """What paced streams saw: chunks, and by how much each was later than it was sent."""

    streams: int
    chunks: int
    lost: int
    late_p50_ms: float
    late_p99_ms: float


async def paced(
    port: int, key: str, *, streams: int, chunks: int, headers: Mapping[str, str] | None = None
) -> Paced:
    """So many streams at once, each one answer of `chunks` chunks with their time of leaving."""
    payload = request(port, key, stream=True, headers=headers, marks='"metadata":{"pace":"paced"},')
    late: list[float] = []
    lost = 0

    async def one() -> None:
        nonlocal lost
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(payload)
        seen, rest = 0, b""
        try:
            while data := await reader.read(65_536):
                now = time.monotonic_ns()
                rest += data
                end = 0
                for mark in _LEFT.finditer(rest):
                    late.append((now - int(mark[1])) / 1e6)
                    seen += 1
                    end = mark.end()
                if b"[DONE]" in rest:
                    break
                rest = rest[max(end, len(rest) - 200) :]
        except OSError:
            pass
        lost += chunks - seen
        writer.close()

    async with asyncio.timeout(120):
        await asyncio.gather(*(one() for _ in range(streams)))
    late.sort()
    count = len(late) or 1
    return Paced(
        streams=streams,
        chunks=len(late),
        lost=lost,
        late_p50_ms=late[count // 2] if late else 0.0,
        late_p99_ms=late[min(count - 1, count * 99 // 100)] if late else 0.0,
    )
