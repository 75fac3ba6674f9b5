"""Which addresses may be reached, and how a base URL is read."""

import asyncio
import socket
from typing import Any, cast

import httpx
import pytest

from backends.egress import Address, Dialer, EgressRefused, is_internal, split_base_url
from backends.transport import Connection, Origin


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
        return [
            (socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port))
            for a in addresses
        ]


class _Sockets:
    """Records where sockets would have been opened; some addresses refuse, some never answer."""

    def __init__(self, *dead: str, silent: str = "") -> None:
        self.dead = dead
        self.silent = silent
        self.opened: list[str] = []

    async def __call__(self, address: Address) -> socket.socket:
        host = address[1][0]
        self.opened.append(host)
        if host in self.dead:
            raise ConnectionRefusedError("dead")
        if host == self.silent:
            await asyncio.sleep(3600)
        return _NOTHING


_NOTHING = cast("socket.socket", object())


def _dialer(
    monkeypatch: pytest.MonkeyPatch,
    names: _Names,
    sockets: _Sockets,
    *,
    allow_private: bool = False,
) -> Dialer:
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names)
    return Dialer(allow_private=allow_private, open_socket=sockets)


async def test_the_socket_goes_to_the_address_that_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name that is re-pointed after the check is not looked up again."""
    sockets = _Sockets()
    dialer = _dialer(monkeypatch, _Names(["8.8.8.8"], ["127.0.0.1"]), sockets)
    await dialer.connect("api.example", 443)
    assert sockets.opened == ["8.8.8.8"]
    with pytest.raises(EgressRefused):
        await dialer.connect("api.example", 443)
    assert sockets.opened == ["8.8.8.8"]


async def test_one_internal_address_among_many_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves to both is refused whole: no luck of order decides."""
    sockets = _Sockets()
    dialer = _dialer(monkeypatch, _Names(["8.8.8.8", "10.0.0.1"]), sockets)
    with pytest.raises(EgressRefused):
        await dialer.connect("api.example", 443)
    assert sockets.opened == []


async def test_the_next_address_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """One dead address of several does not make the host unreachable."""
    sockets = _Sockets("8.8.8.8")
    dialer = _dialer(monkeypatch, _Names(["8.8.8.8", "1.1.1.1"]), sockets)
    assert await dialer.connect("api.example", 443) is _NOTHING
    assert sockets.opened == ["8.8.8.8", "1.1.1.1"]


async def test_an_address_that_swallows_packets_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one starts a quarter of a second later, and the first to answer wins."""
    sockets = _Sockets(silent="8.8.8.8")
    dialer = _dialer(monkeypatch, _Names(["8.8.8.8", "1.1.1.1"]), sockets)
    async with asyncio.timeout(2):
        assert await dialer.connect("api.example", 443) is _NOTHING
    assert sockets.opened == ["8.8.8.8", "1.1.1.1"]


async def test_the_families_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken IPv6 does not hold all of IPv4 back."""
    addresses = ["2606:4700::1", "2606:4700::2", "8.8.8.8"]
    sockets = _Sockets(*addresses)
    dialer = _dialer(monkeypatch, _Names(addresses), sockets)
    with pytest.raises(httpx.ConnectError):
        await dialer.connect("api.example", 443)
    assert sockets.opened == ["2606:4700::1", "8.8.8.8", "2606:4700::2"]


async def test_all_addresses_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure names no address."""
    dialer = _dialer(monkeypatch, _Names(["8.8.8.8"], []), _Sockets("8.8.8.8"))
    origin = Origin(host="api.example", port=443)
    for _ in range(2):
        with pytest.raises(httpx.ConnectError) as caught:
            await dialer(origin, lambda: Connection(print))
        assert "8.8.8.8" not in str(caught.value)


async def test_private_hosts_by_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator may allow a backend on an own network."""
    sockets = _Sockets()
    dialer = _dialer(monkeypatch, _Names(["10.0.0.1"]), sockets, allow_private=True)
    await dialer.connect("vllm.internal", 8000)
    assert sockets.opened == ["10.0.0.1"]
