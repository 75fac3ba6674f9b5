"""Addresses that come and go: DNS records and a Kubernetes Service, against servers of the test."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.discovery import Address, Dns, EndpointSlices, Slice, addresses_of, source, spoken
from backends.settings import Discovery
from tests.fakes.dns_server import FakeDns
from tests.fakes.gateway import Server


class Heard:
    """What a source told."""

    def __init__(self) -> None:
        self.lists: list[Sequence[Address]] = []

    def __call__(self, addresses: Sequence[Address]) -> None:
        self.lists.append(addresses)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition; the test's own limit ends what never comes."""
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def following(found: Any, heard: Heard) -> AsyncIterator[None]:
    """The source runs as long as the scope."""
    task = asyncio.create_task(found.run(heard))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# --- DNS --------------------------------------------------------------------------------------


async def test_both_families_of_a_name() -> None:
    """A and AAAA records together, each with the port of the URL."""
    records = {("vllm.test.", "A"): ["10.0.0.2", "10.0.0.1"], ("vllm.test.", "AAAA"): ["fd00::1"]}
    async with FakeDns(records) as server:
        settings = Discovery(kind="dns", nameservers=(server.address,))
        found = source(settings, "http://vllm.test:8000/v1")
        assert isinstance(found, Dns)
        addresses, ttl_s = await found.look_up()
    assert addresses == [("10.0.0.1", 8000), ("10.0.0.2", 8000), ("fd00::1", 8000)]
    assert ttl_s == 1
    assert spoken(addresses[2]) == "[fd00::1]:8000"


async def test_srv_records_bring_their_ports() -> None:
    """Targets of the best priority, each looked up; the others are for when those are gone."""
    records = {
        ("_llm._tcp.test.", "SRV"): ["0 5 8001 a.test.", "0 5 8002 b.test.", "9 5 8003 c.test."],
        ("a.test.", "A"): ["10.0.0.1"],
        ("b.test.", "A"): ["10.0.0.2"],
        ("c.test.", "A"): ["10.0.0.3"],
    }
    async with FakeDns(records) as server:
        settings = Discovery(kind="srv", name="_llm._tcp.test", nameservers=(server.address,))
        found = source(settings, "https://llm.example/v1")
        assert isinstance(found, Dns)
        assert (await found.look_up())[0] == [("10.0.0.1", 8001), ("10.0.0.2", 8002)]


async def test_a_name_is_followed_and_a_failure_changes_nothing() -> None:
    """A new record is told once its TTL is over; while DNS fails the last list holds."""
    async with FakeDns({("vllm.test.", "A"): ["10.0.0.1"]}) as server:
        heard = Heard()
        settings = Discovery(kind="dns", every_s=0.05, nameservers=(server.address,))
        found = source(settings, "http://vllm.test:8000/v1")
        async with following(found, heard):
            await until(lambda: len(heard.lists) == 1)
            server.is_broken = True
            await until(lambda: found.failures > 0)
            told = len(heard.lists)
            server.records[("vllm.test.", "A")] = ["10.0.0.9"]
            server.is_broken = False
            await until(lambda: len(heard.lists) > told)
    assert heard.lists[0] == [("10.0.0.1", 8000)]
    assert heard.lists[-1] == [("10.0.0.9", 8000)]


# --- Kubernetes -------------------------------------------------------------------------------


def slice_(name: str, *addresses: str, ready: bool | None = True, version: str = "1") -> Any:
    """An EndpointSlice as the API writes it."""
    return {
        "metadata": {"name": name, "resourceVersion": version, "labels": {}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [one], "conditions": {"ready": ready}} for one in addresses],
        "ports": [{"name": "metrics", "port": 9}, {"name": "http", "port": 8000}],
    }


class ApiServer:
    """The list and the watch of one Service."""

    def __init__(self) -> None:
        self.items = [slice_("s-1", "10.0.0.1")]
        self.events: asyncio.Queue[Any] = asyncio.Queue()  # None ends the watch
        self.asked: list[tuple[str, str, str]] = []  # path, query, authorization

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        query = scope["query_string"].decode()
        headers = dict(scope["headers"])
        self.asked.append((scope["path"], query, headers[b"authorization"].decode()))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if "watch=1" not in query:
            body = {"metadata": {"resourceVersion": "7"}, "items": self.items}
            await send({"type": "http.response.body", "body": json.dumps(body).encode()})
            return
        while (event := await self.events.get()) is not None:
            line = json.dumps(event).encode() + b"\n"
            for part in (line[:9], line[9:]):  # a line may come in pieces
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """The folder of a service account."""
    (tmp_path / "token").write_text("sa-token-1")
    (tmp_path / "namespace").write_text("prod")
    return tmp_path


async def test_a_service_is_listed_and_watched(account: Path) -> None:
    """Each change is told at once; a broken watch goes on from the last version; the token is read
    anew each time; a version that was forgotten means a new list."""
    api, heard = ApiServer(), Heard()
    async with Server(api, grace_s=1) as server:
        settings = Discovery(
            kind="kubernetes",
            name="vllm",
            port="http",
            api_url=server.base_url,
            account_dir=str(account),
        )
        found = source(settings, "http://vllm.prod.svc:8000/v1")
        assert isinstance(found, EndpointSlices)
        async with following(found, heard):
            await until(lambda: len(heard.lists) == 1)
            await api.events.put({"type": "ADDED", "object": slice_("s-2", "10.0.0.2")})
            await until(lambda: len(heard.lists) == 2)
            gone = slice_("s-1", "10.0.0.1", version="11")
            await api.events.put({"type": "DELETED", "object": gone})
            await until(lambda: len(heard.lists) == 3)
            (account / "token").write_text("sa-token-2")
            await api.events.put(None)
            await until(lambda: len(api.asked) == 3)
            api.items = [slice_("s-3", "10.0.0.3")]
            await api.events.put({"type": "ERROR", "object": {"code": 410}})
            await until(lambda: len(heard.lists) == 4)
            await api.events.put(None)
    assert heard.lists == [
        [("10.0.0.1", 8000)],
        [("10.0.0.1", 8000), ("10.0.0.2", 8000)],
        [("10.0.0.2", 8000)],
        [("10.0.0.3", 8000)],
    ]
    path, query, token = api.asked[0]
    assert path == "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"
    assert "kubernetes.io%2Fservice-name%3Dvllm" in query
    assert token == "Bearer sa-token-1"
    assert "resourceVersion=11" in api.asked[2][1]
    assert api.asked[2][2] == "Bearer sa-token-2"


@pytest.mark.parametrize(
    ("ready", "port", "expected"),
    [
        (True, "http", [("10.0.0.1", 8000)]),
        (None, "http", [("10.0.0.1", 8000)]),
        (False, "http", []),
        (True, None, [("10.0.0.1", 9)]),
        (True, 1234, [("10.0.0.1", 1234)]),
        (True, "nothing", []),
    ],
)
def test_which_endpoints_count(
    ready: bool | None, port: int | str | None, expected: list[Address]
) -> None:
    """Ready ones, or those that do not say; at the port of that name, or the first."""
    one = msgspec.convert(slice_("s", "10.0.0.1", ready=ready), Slice)
    assert addresses_of({"s": one}, port) == expected
