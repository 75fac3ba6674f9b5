"""Killed and told to stop: after `kill -9` under load every request is in the ledger once, with the
tokens that the upstream's own books say; after SIGTERM nothing is lost at all."""

import asyncio
import json
import random
import signal
import time
from pathlib import Path

import pytest

from backends.settings import Script
from tests.e2e.served import serve
from tests.e2e.streams import (
    Stream,
    check_laws,
    client_of,
    config_for,
    ledger_of,
    until,
    upstreams,
    wait_for,
)

STREAMS = 20
IN_FLIGHT_TOKENS = 64  # in sockets and buffers when the gateway died, for one stream


@pytest.mark.timeout(120)
async def test_kill_when_all_was_read(tmp_path: Path) -> None:
    """Streams stand still after some tokens when the gateway is killed. After a restart each is in
    the ledger once, and its tokens are exactly the upstream's; served ones keep their exact count.
    """
    with upstreams(Script(output_tokens=50, fail="stall", fail_after=50)) as (playing, steady):
        config, key = config_for(playing, steady), ""
        standing: list[Stream] = []
        done: list[Stream] = []
        for _ in range(2):
            with serve(tmp_path, config=config) as served:
                key = key or served.key
                async with client_of(served, key) as client:
                    now = [Stream(limit=1 + number % 7) for number in range(STREAMS)]
                    running = [asyncio.create_task(stream.run(client)) for stream in now]
                    finished = [Stream(limit=5, model="steady") for _ in range(3)]
                    await asyncio.gather(*(stream.run(client) for stream in finished))
                    await until(lambda now=now: all(s.content == s.limit for s in now))
                    served.process.kill()
                    served.process.wait()
                    await asyncio.gather(*running)
                standing += now
                done += finished
        with serve(tmp_path, config=config) as served:
            wait_for(lambda: len(ledger_of(tmp_path)) == len(standing) + len(done))
            ledger = ledger_of(tmp_path)
            books = playing.books()
            check_laws(served)
    assert all(stream.is_done for stream in done)
    assert not any(stream.is_done for stream in standing)
    assert {stream.request_id for stream in (*standing, *done)} == set(ledger)
    assert {stream.request_id for stream in standing} == set(books)
    for stream in standing:
        entry = ledger[str(stream.request_id)]
        assert (entry.outcome, entry.status, entry.attempts) == ("abandoned", None, 1)
        assert entry.source == "estimated"
        assert entry.output == stream.limit == books[str(stream.request_id)]["generated"]
    for stream in done:
        entry = ledger[str(stream.request_id)]
        assert (entry.outcome, entry.output, entry.source) == ("ok", 5, "reported")


@pytest.mark.timeout(150)
async def test_kill_in_full_flow(tmp_path: Path) -> None:
    """The gateway is killed three times at random points while tokens flow. No request is missing,
    none is there twice, and a swept one differs from the upstream's books only by what was still
    in the sockets."""
    dice = random.Random(20260730)
    steady_done: list[Stream] = []
    seen: list[Stream] = []
    with upstreams(Script(output_tokens=100_000, inter_token_s=0.004)) as (playing, steady):
        config, key = config_for(playing, steady), ""
        for _ in range(3):
            with serve(tmp_path, config=config) as served:
                key = key or served.key
                async with client_of(served, key) as client:
                    streams = [Stream(limit=dice.choice((5, 20, 100_000))) for _ in range(STREAMS)]
                    running = [asyncio.create_task(stream.run(client)) for stream in streams]
                    finished = [Stream(limit=5, model="steady") for _ in range(2)]
                    await asyncio.gather(*(stream.run(client) for stream in finished))
                    at = dice.randrange(1, 40)
                    await until(
                        lambda streams=streams, at=at: max(s.content for s in streams) >= at
                    )
                    served.process.kill()
                    served.process.wait()
                    await asyncio.gather(*running)
                seen += streams
                steady_done += finished
        with serve(tmp_path, config=config) as served:
            books = playing.books()
            wait_for(lambda: set(books) <= set(ledger_of(tmp_path)))
            ledger = ledger_of(tmp_path)
            check_laws(served)
    assert sum(1 for stream in seen if stream.request_id) > STREAMS
    for stream in (*seen, *steady_done):
        if stream.request_id is not None:
            entry = ledger[stream.request_id]
            assert entry.output >= stream.content
            if stream.is_done:
                assert entry.outcome == "ok"
                assert (entry.output, entry.source) == (stream.limit, "reported")
    for request_id, entry in ledger.items():
        if request_id not in books:  # never reached this upstream
            assert entry.output in (0, 5)
        elif entry.outcome == "abandoned":
            generated = books[request_id]["generated"]
            assert 0 <= generated - entry.output <= IN_FLIGHT_TOKENS
        else:
            assert entry.output == books[request_id]["generated"]
    assert {entry.outcome for entry in ledger.values()} == {"ok", "abandoned"}


@pytest.mark.timeout(90)
async def test_sigterm_lets_streams_finish(tmp_path: Path) -> None:
    """At SIGTERM readiness fails, new requests are told to go elsewhere, running streams finish,
    the process ends with 0, and all of it is in the database without another start."""
    script = Script(output_tokens=40, inter_token_s=0.04)
    with (
        upstreams(script) as (playing, steady),
        serve(tmp_path, config=config_for(playing, steady)) as served,
    ):
        async with client_of(served, served.key) as client:
            streams = [Stream(limit=40) for _ in range(STREAMS)]
            running = [asyncio.create_task(stream.run(client)) for stream in streams]
            await until(lambda: all(stream.content >= 2 for stream in streams))
            served.process.send_signal(signal.SIGTERM)
            root = served.base_url.removesuffix("/v1")
            while (ready := await client.get(f"{root}/readyz")).status_code == 200:
                await asyncio.sleep(0.005)
            assert ready.status_code == 503
            assert ready.json()["draining"] is True
            assert (await client.get(f"{root}/livez")).status_code == 200
            late = Stream(limit=5, model="steady")
            await late.run(client)
            assert late.status == 503
            await asyncio.gather(*running)
        assert served.process.wait(20) == 0
        assert "Traceback" not in served.output
    assert all(stream.is_done and stream.content == 40 for stream in streams)
    ledger = ledger_of(tmp_path)
    assert set(ledger) == {late.request_id, *(stream.request_id for stream in streams)}
    assert ledger[str(late.request_id)].record["error_code"] == "shutting_down"
    for stream in streams:
        entry = ledger[str(stream.request_id)]
        assert (entry.outcome, entry.output, entry.source) == ("ok", 40, "reported")


@pytest.mark.timeout(90)
async def test_sigterm_ends_what_does_not_finish(tmp_path: Path) -> None:
    """Streams that outlast the grace end with an error event and no [DONE], and are billed for
    what was read."""
    with upstreams(Script(output_tokens=50, fail="stall", fail_after=50)) as (playing, steady):
        with serve(tmp_path, config=config_for(playing, steady, drain_s=0.5)) as served:
            async with client_of(served, served.key) as client:
                streams = [Stream(limit=1 + number % 5) for number in range(STREAMS)]
                running = [asyncio.create_task(stream.run(client)) for stream in streams]
                await until(lambda: all(stream.content == stream.limit for stream in streams))
                began = time.monotonic()
                served.process.send_signal(signal.SIGTERM)
                await asyncio.gather(*running)
            assert served.process.wait(20) == 0
            assert time.monotonic() - began < 6
            assert "Traceback" not in served.output, served.output[-6000:]
            check_laws(served)
        books = playing.books()
    ledger = ledger_of(tmp_path)
    assert set(ledger) == {stream.request_id for stream in streams} == set(books)
    for stream in streams:
        assert json.loads(stream.last)["error"]["code"] == "shutting_down"
        entry = ledger[str(stream.request_id)]
        assert (entry.outcome, entry.status) == ("truncated", 200)
        assert entry.output == stream.limit == books[str(stream.request_id)]["generated"]
