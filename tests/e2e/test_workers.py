"""Several workers under one parent: replaced under load without a failed request, killed without
touching each other's, and gone when their parent is."""

import asyncio
import contextlib
import itertools
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from backends.settings import Script
from tests.e2e.served import Served, serve
from tests.e2e.streams import (
    Entry,
    Stream,
    check_laws,
    client_of,
    config_for,
    ledger_of,
    until,
    upstreams,
    wait_for,
)
from tests.e2e.test_start import ROUTED, refused, start

ADMITTED = re.compile(r'meterline_admitted_total\{node="([^"]+)"\}')
STREAMS = 50
TOKENS = 40


def workers_of(served: Served) -> list[int]:
    """Process ids of the parent's children."""
    pid = served.process.pid
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(int(child) for child in found)


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def targets_of(served: Served) -> list[str]:
    """Where each worker's metrics are."""
    groups = httpx.get(f"{served.base_url.removesuffix('/v1')}/metrics/targets").json()
    return [group["targets"][0] for group in groups]


def both_up(served: Served) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return all(
            httpx.get(f"http://{target}/readyz", timeout=2).status_code == 200
            for target in targets_of(served)
        )
    return False


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two workers for all tests of this module, before a backend that takes its time."""
    script = Script(output_tokens=TOKENS, inter_token_s=0.1)
    with upstreams(script) as (playing, steady):
        config = config_for(playing, steady).replace("[server]", "[server]\nworkers = 2")
        config += '[[routes]]\nmodel = "limited"\ntargets = [{ backend = "steady" }]\n'
        with serve(tmp_path_factory.mktemp("workers"), config=config) as running:
            wait_for(lambda: both_up(running), 60)
            yield running


def settled(served: Served, streams: list[Stream]) -> dict[str, Entry]:
    """What the ledger says of these, once it has all of them and the books hold."""
    asked = {str(stream.request_id) for stream in streams}
    wait_for(lambda: asked <= set(ledger_of(served.folder)), 60)
    check_laws(served)
    return {name: entry for name, entry in ledger_of(served.folder).items() if name in asked}


@pytest.mark.timeout(180)
def test_one_limit_and_metrics_of_each(served: Served) -> None:
    """Without Redis the parent counts for all: a limit of five is five, whoever answers. Each
    worker has its own scrape target, and the shared port has none."""
    targets = targets_of(served)
    assert len(set(targets)) == 2
    set_to = ("limit", "set", "default", "requests", "5", "--per", "1m", "--route", "limited")
    assert served.run(*set_to).returncode == 0
    counted: dict[int, list[str]] = {200: [], 429: []}
    for target in itertools.cycle(targets):
        answer = httpx.post(
            f"http://{target}/v1/chat/completions",
            json={"model": "limited", "messages": [{"role": "user", "content": "hi"}]},
            headers={"authorization": f"Bearer {served.key}"},
            timeout=20,
        )
        if answer.headers.get("x-ratelimit-limit-requests") == "5":  # both have heard of it
            counted[answer.status_code].append(target)
        if set(counted[429]) == set(targets):
            break
    assert len(counted[200]) == 5
    shared = httpx.get(f"{served.base_url.removesuffix('/v1')}/metrics")
    assert shared.status_code == 404
    assert "/metrics/targets" in shared.json()["error"]["message"]
    pages = [httpx.get(f"http://{target}/metrics").text for target in targets]
    nodes = {node for page in pages for node in ADMITTED.findall(page)}
    assert len(nodes) == 2
    written = (served.folder / "meterline-data" / "scrape-targets.json").read_text()
    assert all(target in written for target in targets)


@pytest.mark.timeout(180)
async def test_rolling_restart(served: Served) -> None:
    """SIGHUP replaces both workers under fifty streams that never stop coming: none fails, none is
    cut, and each is in the ledger once with its own tokens."""
    before = workers_of(served)
    done: list[Stream] = []
    rolled = asyncio.Event()
    async with client_of(served, served.key) as client:

        async def keep_asking() -> None:
            while not rolled.is_set():
                stream = Stream(limit=10)
                await stream.run(client)
                done.append(stream)

        asking = [asyncio.create_task(keep_asking()) for _ in range(STREAMS)]
        await until(lambda: len(done) >= STREAMS)
        served.process.send_signal(signal.SIGHUP)
        await until(lambda: "rolling_restart_done" in served.output, 90)
        await until(lambda: not any(is_running(pid) for pid in before), 60)
        rolled.set()
        await asyncio.gather(*asking)
    after = workers_of(served)
    assert len(before) == len(after) == 2
    assert not set(before) & set(after)
    ledger = settled(served, done)
    assert [stream for stream in done if not stream.is_done or stream.content != 10] == []
    assert len(ledger) == len(done)
    assert {(entry.outcome, entry.output) for entry in ledger.values()} == {("ok", 10)}
    assert len({entry.record["node"] for entry in ledger.values()}) >= 2


@pytest.mark.timeout(180)
async def test_one_worker_is_killed(served: Served) -> None:
    """SIGKILL of one of two workers: the other's streams go on to their end, its own end without
    [DONE]; each is settled once, a successor takes its place, and the books hold."""
    streams = [Stream(limit=TOKENS) for _ in range(STREAMS)]
    async with client_of(served, served.key) as client:
        running = [asyncio.create_task(stream.run(client)) for stream in streams]
        await until(lambda: all(stream.content > 5 for stream in streams))
        victim, other = workers_of(served)
        os.kill(victim, signal.SIGKILL)
        await asyncio.gather(*running)
        late = Stream(limit=5, model="steady")
        await late.run(client)
        assert late.is_done
    wait_for(lambda: len(set(workers_of(served)) - {victim}) == 2, 60)
    assert other in workers_of(served)
    ledger = settled(served, streams)
    failed = [stream for stream in streams if not stream.is_done]
    assert 0 < len(failed) < STREAMS
    for stream in streams:
        entry = ledger[str(stream.request_id)]
        if stream.is_done:
            assert (entry.outcome, entry.output) == ("ok", TOKENS)
        else:
            assert entry.outcome == "abandoned"
            assert entry.output >= stream.content


@pytest.mark.timeout(120)
def test_no_worker_outlives_its_parent(served: Served) -> None:
    """When the parent is killed its workers see the line end, drain, and are gone."""
    workers = workers_of(served)
    served.process.kill()
    served.process.wait()
    wait_for(lambda: not any(is_running(pid) for pid in workers), 60)


@pytest.mark.timeout(60)
def test_a_worker_that_cannot_start(tmp_path: Path) -> None:
    """What is wrong is the first worker's one line, and the command ends with its exit code."""
    config = f'[server]\nworkers = 2\n[store]\ndatabase = "sqlite:////proc/no/m.db"\n{ROUTED}'
    refused(start(tmp_path, config), "database")
