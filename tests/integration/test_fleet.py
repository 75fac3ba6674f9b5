"""Several servers and several keys behind one backend, through a whole gateway."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from backends.base import BackendUnavailable
from backends.fleet import Fleet, Place, Server, places_of
from backends.registry import build
from backends.settings import BackendSettings, Script
from gateway.health import State
from gateway.routing import Candidate, Target, least_loaded
from telemetry.record import Outcome, RequestRecord
from tests.fakes.gateway import Harness, backend, route, running, scripted
from tests.fakes.upstream import STALL, Upstream, whole
from tests.services import free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANSWER = whole(
    {
        "choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """One gateway for the module, with two keys in its environment's files."""
    folder = tmp_path_factory.mktemp("gateway")
    for number in (1, 2):
        (folder / f"key{number}").write_text(f"upstream-canary-key-{number}")
    async with running(folder, tables=backend("b", "http://127.0.0.1:1/v1")) as harness:
        yield harness


def table(gateway: Harness, *urls: str, keys: int = 0, more: str = "") -> str:
    """One backend with these servers, and a route to it."""
    text = backend("b", "x", more=f"urls = {list(urls)}\n{more}").replace('base_url = "x"\n', "")
    if keys:
        names = [f"file:{gateway.config_path.parent}/key{one}" for one in range(1, keys + 1)]
        text = text.replace('api_key = "env:UPSTREAM_KEY"', f"api_keys = {names}")
    return text + route("m", "b")


async def ask(gateway: Harness) -> httpx.Response:
    """One whole request."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    return await gateway.client.post("/v1/chat/completions", json=body, headers=gateway.auth)


async def last(gateway: Harness, count: int = 1) -> list[RequestRecord]:
    """The newest records."""
    return (await gateway.next_settled(len(gateway.settled)))[-count:]


def state(gateway: Harness, fault: str, *, endpoint: str = "", key: str = "") -> State:
    """A circuit of the backend."""
    health = gateway.service.gateway.runtimes.health
    return health.state(Target("b", "m", 1, endpoint=endpoint, key=key), fault)  # type: ignore[arg-type]


async def test_a_dead_server_is_left_alone_and_the_other_answers(gateway: Harness) -> None:
    """Within one request, without a second backend; its circuit opens and the other's does not."""
    dead = f"127.0.0.1:{free_port()}"
    async with Upstream(ANSWER) as alive:
        gateway.configure(
            table(gateway, f"http://{dead}/v1", alive.base_url)
            + "[health]\nfailures = 1\nopen_s = 60\nopen_max_s = 60\n"
        )
        answers = [await ask(gateway) for _ in range(12)]
    assert {answer.status_code for answer in answers} == {200}
    records = await last(gateway, 12)
    tries = [[(one.endpoint, one.reason) for one in record.attempts] for record in records]
    good = f"127.0.0.1:{alive.port}"
    assert [(dead, "primary"), (good, "retry")] in tries
    assert tries.count([(dead, "primary"), (good, "retry")]) == 1  # then nobody asks it
    assert state(gateway, "endpoint", endpoint=dead) is State.OPEN
    assert state(gateway, "endpoint", endpoint=good) is State.CLOSED


async def test_requests_spread_over_the_servers(gateway: Harness) -> None:
    """The one with the fewest in flight is next, so that running requests are shared evenly."""
    async with (
        scripted(Script(output_tokens=1, first_token_s=0.3)) as (one, first),
        scripted(Script(output_tokens=1, first_token_s=0.3)) as (two, second),
    ):
        gateway.configure(table(gateway, f"{one.base_url}/v1", f"{two.base_url}/v1"))
        answers = await asyncio.gather(*(ask(gateway) for _ in range(10)))
        assert {answer.status_code for answer in answers} == {200}
        assert [len(first.player.books.entries), len(second.player.books.entries)] == [5, 5]
    upstream = gateway.service.gateway.runtimes.current.upstreams["b"]
    assert [member.server.in_flight for member in upstream.members] == [0, 0]


@pytest.mark.parametrize(("status", "fault"), [(401, "credential"), (429, "limit")])
async def test_a_key_that_is_refused_is_rotated(gateway: Harness, status: int, fault: str) -> None:
    """The other key answers the same request; the first one is left out for a while, on each
    server of the backend. No key is in what the client sees."""

    class Picky(Upstream):
        """Takes the second key only."""

        async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
            self.steps = list(ANSWER)
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(size)
            if b"canary-key-1" in head:
                error = b'{"error":{"message":"m","type":"t"}}'
                writer.write(
                    b"HTTP/1.1 %d No\r\ncontent-type: application/json\r\nretry-after: 30\r\n"
                    b"content-length: %d\r\n\r\n%s" % (status, len(error), error)
                )
            else:
                for step in self.steps:
                    assert isinstance(step, bytes)
                    writer.write(step)
            await writer.drain()
            return True

    async with Picky(()) as one, Picky(()) as two:
        gateway.configure(table(gateway, one.base_url, two.base_url, keys=2))
        answers = [await ask(gateway) for _ in range(8)]
    assert {answer.status_code for answer in answers} == {200}
    assert "canary" not in "".join(f"{answer.headers}{answer.text}" for answer in answers)
    records = await last(gateway, 8)
    assert max(len(record.attempts) for record in records) == 2
    assert sum(len(record.attempts) for record in records) == 9
    for port in (one.port, two.port):
        endpoint = f"127.0.0.1:{port}"
        assert state(gateway, fault, endpoint=endpoint, key="1") is State.OPEN
        assert state(gateway, fault, endpoint=endpoint, key="2") is State.CLOSED


async def test_one_request_tries_a_few_servers_and_no_more(gateway: Harness) -> None:
    """Many dead servers are no loop: three tries, then the client hears of it."""
    dead = [f"http://127.0.0.1:{free_port()}/v1" for _ in range(6)]
    gateway.configure(table(gateway, *dead))
    assert (await ask(gateway)).status_code == 502
    (record,) = await last(gateway)
    assert [one.outcome for one in record.attempts] == [Outcome.UPSTREAM_ERROR] * 3
    assert len({one.endpoint for one in record.attempts}) == 3


async def test_attempts_bound_the_servers_too(gateway: Harness) -> None:
    """`attempts` of a route counts tries of all servers, keys and targets together."""
    dead = [f"http://127.0.0.1:{free_port()}/v1" for _ in range(6)]
    gateway.configure(table(gateway, *dead) + "attempts = 2\n")
    assert (await ask(gateway)).status_code == 502
    assert len((await last(gateway))[0].attempts) == 2


async def test_discovered_addresses_are_checked() -> None:
    """An internal address that DNS hands out is no server unless the operator allows it; one that
    is no longer named gets nothing new, and is closed when it has nothing left."""
    built: list[Place] = []

    def members(place: Place) -> list[Fleet]:
        built.append(place)
        return [Fleet("inner", "p", members)]

    fleet = Fleet("b", "p", members, base_url="https://llm.example/v1")
    fleet.found([("169.254.169.254", 443), ("93.184.216.34", 443), ("::ffff:10.0.0.1", 443)])
    assert [server.name for server in fleet.servers] == ["93.184.216.34:443"]
    assert fleet.refused == 2
    version, (old,) = fleet.version, fleet.servers
    old.in_flight = 1
    fleet.found([("93.184.216.35", 443)])
    assert [server.name for server in fleet.servers] == ["93.184.216.35:443"]
    assert fleet.version == version + 1
    assert old.is_gone
    fleet.found([("93.184.216.35", 443)])
    assert fleet.version == version + 1  # nothing changed
    assert len(built) == 2
    fleet.found([])
    assert not fleet.members
    with pytest.raises(BackendUnavailable):
        async for _ in fleet.chat(None):  # type: ignore[arg-type]
            raise AssertionError
    await fleet.aclose()


async def test_an_address_stands_for_the_name(tmp_path: Path) -> None:
    """The connection goes to the address that was found, and the Host header says the name."""
    async with Upstream(ANSWER) as upstream:
        settings = BackendSettings(
            name="b", kind="openai", base_url="http://vllm.test:8000/v1", allow_private=True,
            urls=("http://unused",),
        )  # fmt: skip
        fleet = build(settings, ("k",))
        assert isinstance(fleet, Fleet)
        fleet._set(
            [Place("x", "http://vllm.test:8000/v1", ("127.0.0.1", upstream.port))], is_first=True
        )
        assert await fleet.is_ready()
        await fleet.aclose()
        assert upstream.received[0].headers["host"] == "vllm.test:8000"


async def test_a_backend_without_a_server_says_when_to_come_again(gateway: Harness) -> None:
    """Discovery has found nothing yet: 503 with Retry-After, and no attempt is counted."""
    port = free_port()
    followed = f'discovery = {{ kind = "dns", nameservers = ["127.0.0.1:{port}"] }}'
    text = backend("b", "http://vllm.test:8000/v1", more=followed) + route("m", "b")
    gateway.configure(text)
    answer = await ask(gateway)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert (await last(gateway))[0].attempts == []


async def test_a_stalling_server_does_not_hold_its_place(gateway: Harness) -> None:
    """A client that leaves frees what it had in flight."""
    async with Upstream((STALL,)) as upstream:
        gateway.configure(table(gateway, upstream.base_url, f"http://127.0.0.1:{free_port()}/v1"))
        with pytest.raises(httpx.ReadTimeout):
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            while not upstream.received:
                await gateway.client.post(
                    "/v1/chat/completions", json=body, headers=gateway.auth, timeout=0.3
                )
        members = gateway.service.gateway.runtimes.current.upstreams["b"].members
        async with asyncio.timeout(5):
            while any(member.server.in_flight for member in members):
                await asyncio.sleep(0.01)


# --- pure -------------------------------------------------------------------------------------


async def test_servers_are_named_by_host_and_port() -> None:
    """And by more only where that is taken."""
    urls = ["http://a:1/v1", "http://b:1/v1", "http://b:1/other/v1"]
    assert [place.name for place in places_of(urls)] == ["a:1", "b:1/v1", "b:1/other/v1"]


async def test_the_least_loaded_is_chosen() -> None:
    """What warms up counts as fuller than it is; equals are told apart by the dice."""
    assert least_loaded([Candidate(3), Candidate(1), Candidate(2)], 0.5) == 1
    assert least_loaded([Candidate(0, 0.1), Candidate(5)], 0.5) == 1
    assert {least_loaded([Candidate(1), Candidate(1)], dice / 10) for dice in range(11)} == {0, 1}


async def test_a_new_server_warms_up() -> None:
    """Its share grows from a tenth to the whole."""
    server = Server("a", warm_up_s=10)
    server.warms_up_from(100)
    shares = [server.warmth(now) for now in (100, 105, 109, 110, 200)]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(0.1)
    assert shares[-1] == 1.0
