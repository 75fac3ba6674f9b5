"""Which addresses may be reached, and how a base URL is read."""

import asyncio
import socket
from typing import Any

import httpcore
import pytest

from backends.egress import CheckedNetwork, EgressRefused, is_internal, split_base_url


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "198.18.0.1",
        "240.0.0.1",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fd00::1",
        "ff02::1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "2002:0a00:0001::1",
        "64:ff9b::10.0.0.1",
        "2001:db8::1",
    ],
)
def test_internal_addresses(address: str) -> None:
    """Private, loopback, link-local, shared, multicast, and IPv4 dressed as IPv6."""
    assert is_internal(address)


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "64:ff9b::8.8.8.8"],
)
def test_public_addresses(address: str) -> None:
    """Addresses of the public Internet pass."""
    assert not is_internal(address)


@pytest.mark.parametrize(
    ("base_url", "expected"),
    [
        ("https://api.example/v1", ("https://api.example/v1", None)),
        ("https://api.example/v1/", ("https://api.example/v1", None)),
        ("unix:///run/e.sock", ("http://localhost/v1", "/run/e.sock")),
    ],
)
def test_base_urls(base_url: str, expected: tuple[str, str | None]) -> None:
    """TCP as written, a Unix socket under /v1."""
    assert split_base_url(base_url) == expected


@pytest.mark.parametrize(
    "base_url",
    [
        "",
        "api.example/v1",
        "ftp://api.example",
        "http://",
        "unix://relative.sock",
        "https://user:pw@api.example/v1",
        "https://api.example/v1?key=1",
        "https://api.example/v1#x",
    ],
)
def test_bad_base_urls(base_url: str) -> None:
    """What cannot be meant is refused, without repeating what may be a credential."""
    with pytest.raises(ValueError, match=r"base_url|unix://") as caught:
        split_base_url(base_url)
    assert "pw" not in str(caught.value)


class _Names:
    """getaddrinfo of a name server that we control; answers one list after the other."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)

    async def __call__(self, host: str, port: int, **_: Any) -> list[Any]:
        addresses = self.answers.pop(0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in addresses]


class _Sockets(httpcore.AsyncNetworkBackend):
    """Records where sockets would have been opened; some addresses do not answer."""

    def __init__(self, *dead: str) -> None:
        self.dead = dead
        self.opened: list[str] = []

    async def connect_tcp(self, host: str, *_: Any, **__: Any) -> httpcore.AsyncNetworkStream:
        self.opened.append(host)
        if host in self.dead:
            raise httpcore.ConnectError("dead")
        return httpcore.AsyncMockStream([])


async def _network(
    monkeypatch: pytest.MonkeyPatch, names: _Names, sockets: _Sockets, **options: bool
) -> CheckedNetwork:
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names)
    return CheckedNetwork(**{"allow_private": False, **options}, network=sockets)


async def test_the_socket_goes_to_the_address_that_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name that is re-pointed after the check is not looked up again."""
    sockets = _Sockets()
    names = _Names(["8.8.8.8"], ["127.0.0.1"])
    network = await _network(monkeypatch, names, sockets)
    await network.connect_tcp("api.example", 443)
    assert sockets.opened == ["8.8.8.8"]
    with pytest.raises(EgressRefused):
        await network.connect_tcp("api.example", 443)
    assert sockets.opened == ["8.8.8.8"]


async def test_one_internal_address_among_many_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves to both is refused whole: no luck of order decides."""
    sockets = _Sockets()
    network = await _network(monkeypatch, _Names(["8.8.8.8", "10.0.0.1"]), sockets)
    with pytest.raises(EgressRefused):
        await network.connect_tcp("api.example", 443)
    assert sockets.opened == []


async def test_the_next_address_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """One dead address of several does not make the host unreachable."""
    sockets = _Sockets("8.8.8.8")
    network = await _network(monkeypatch, _Names(["8.8.8.8", "1.1.1.1"]), sockets)
    await network.connect_tcp("api.example", 443, timeout=1.0)
    assert sockets.opened == ["8.8.8.8", "1.1.1.1"]


async def test_all_addresses_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last failure is the host's."""
    network = await _network(monkeypatch, _Names(["8.8.8.8"], []), _Sockets("8.8.8.8"))
    for _ in range(2):
        with pytest.raises(httpcore.ConnectError):
            await network.connect_tcp("api.example", 443)


async def test_private_hosts_by_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator may allow a backend on an own network."""
    sockets = _Sockets()
    network = await _network(monkeypatch, _Names(["10.0.0.1"]), sockets, allow_private=True)
    await network.connect_tcp("vllm.internal", 8000)
    assert sockets.opened == ["10.0.0.1"]
