"""The way out: pooled connections to one configured upstream, and the check of where they go.

An operator's host is resolved here, every address of it is checked, and the socket is opened to
the address that was checked, so that a name cannot be re-pointed at the inside between the check
and the connection. Unix sockets are the operator's own and exempt. TLS is always verified,
redirects, proxies from the environment and cookies do not exist.
"""

import asyncio
import functools
import ipaddress
import itertools
import socket
import ssl
from asyncio.staggered import staggered_race
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import httpx
from typing_extensions import override

from backends.http2 import Http2Pool
from backends.transport import Answer, Origin, Pool, Request

UNIX_SCHEME: Final = "unix://"
UNIX_HOST: Final = "localhost"  # what the Host header says to a server on a Unix socket
NEXT_ADDRESS_S: Final = 0.25  # head start of an address before the next one (RFC 8305, 5)
_FOREVER_S: Final = 365 * 86_400.0

# Internal by use, though Python's ipaddress calls them global or neither: carrier-grade NAT
# (RFC 6598) and the IPv6 forms that embed an IPv4 address are unwrapped below.
_SHARED: Final = ipaddress.ip_network("100.64.0.0/10")
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


class EgressRefused(httpx.ConnectError):
    """The host resolves to an address that this backend may not reach."""


def is_internal(address: str) -> bool:
    """Whether an address is not one of the public Internet. A zone (`fe80::1%eth0`) is internal."""
    if "%" in address:
        return True
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip.sixtofour is not None:
            ip = ip.sixtofour
        elif ip in _NAT64:
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
    if isinstance(ip, ipaddress.IPv4Address) and ip in _SHARED:
        return True
    return not ip.is_global or ip.is_multicast


def split_base_url(base_url: str) -> tuple[str, str | None]:
    """(`http` base URL, path of the Unix socket or None). A socket's base is `/v1`."""
    if base_url.startswith(UNIX_SCHEME):
        path = base_url.removeprefix(UNIX_SCHEME)
        if not path.startswith("/"):
            raise ValueError("a Unix socket is written unix:///absolute/path")
        return f"http://{UNIX_HOST}/v1", path
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("base_url must begin with http://, https:// or unix://")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "base_url may hold a host and a path, but no credential, query or fragment"
        )
    return base_url.rstrip("/"), None


# --- connections ------------------------------------------------------------------------------

# family, and the address as `socket.connect` takes it
Made = TypeVar("Made", bound=asyncio.BaseProtocol)
Address = tuple[int, Any]
OpenSocket = Callable[[Address], Awaitable[socket.socket]]


async def open_socket(address: Address) -> socket.socket:
    """A connected TCP socket."""
    family, where = address
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setblocking(False)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        await asyncio.get_running_loop().sock_connect(found, where)
    except BaseException:
        found.close()
        raise
    return found


class Dialer:
    """Opens connections to checked addresses only. The name is looked up for each connection.

    `address`: an IP address and port that discovery found for the origin's name. It is checked as
    one that was looked up, and the name stays what TLS verifies."""

    def __init__(
        self,
        *,
        allow_private: bool,
        open_socket: OpenSocket = open_socket,
        address: tuple[str, int] | None = None,
    ) -> None:
        self._allow_private = allow_private
        self._open_socket = open_socket
        self._address = address

    async def __call__(self, origin: Origin, new: Callable[[], Made], /) -> Made:
        """An open connection. Raises httpx.ConnectError, which names no address."""
        loop = asyncio.get_running_loop()
        try:
            if origin.socket_path is not None:
                _, made = await loop.create_unix_connection(new, origin.socket_path)
                return made
            found = await self.connect(*(self._address or (origin.host, origin.port)))
            try:
                _, made = await loop.create_connection(
                    new,
                    sock=found,
                    ssl=origin.ssl_context,
                    server_hostname=None if origin.ssl_context is None else origin.host,
                )
            except BaseException:
                found.close()
                raise
        except OSError:
            raise httpx.ConnectError("no connection") from None
        return made

    async def connect(self, host: str, port: int) -> socket.socket:
        """A socket to the first address of the host that answers (RFC 8305)."""
        addresses = await self._resolve(host, port)
        if len(addresses) == 1:
            return await self._open_socket(addresses[0])
        found: socket.socket | None
        found, _, _ = await staggered_race(
            [functools.partial(self._open_socket, address) for address in addresses],
            NEXT_ADDRESS_S,
        )
        if found is None:
            raise httpx.ConnectError("no address of the host answers")
        return found

    async def _resolve(self, host: str, port: int) -> Sequence[Address]:
        loop = asyncio.get_running_loop()
        try:
            infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise httpx.ConnectError("the host cannot be resolved") from None
        addresses = list(dict.fromkeys((family, where) for family, _, _, _, where in infos))
        if not addresses:
            raise httpx.ConnectError("the host has no address")
        if not self._allow_private and any(is_internal(str(where[0])) for _, where in addresses):
            raise EgressRefused("the host resolves to an internal address")
        return _interleaved(addresses)


def _interleaved(addresses: Sequence[Address]) -> Sequence[Address]:
    """The two families in turn, as the resolver's first one begins (RFC 8305, 4)."""
    first = [address for address in addresses if address[0] == addresses[0][0]]
    others = [address for address in addresses if address[0] != addresses[0][0]]
    pairs = itertools.zip_longest(first, others)
    return [address for pair in pairs for address in pair if address is not None]


def pool(
    base_url: str,
    *,
    allow_private: bool = False,
    max_connections: int = 256,
    ssl_context: ssl.SSLContext | None = None,
    address: tuple[str, int] | None = None,
) -> Pool:
    """Connections to the server of a `base_url`, each through the check or to its Unix socket.
    `address`: which of its addresses, if one was chosen."""
    text, socket_path = split_base_url(base_url)
    url = httpx.URL(text)
    is_tls = url.scheme == "https"
    return Pool(
        Origin(
            host=url.raw_host.decode("ascii"),
            port=url.port or (443 if is_tls else 80),
            ssl_context=_tls(ssl_context) if is_tls else None,
            socket_path=socket_path,
        ),
        Dialer(allow_private=allow_private, address=address),
        max_connections=max_connections,
    )


def http2_pool(
    base_url: str,
    *,
    allow_private: bool = False,
    max_connections: int = 256,
    ssl_context: ssl.SSLContext | None = None,
    address: tuple[str, int] | None = None,
) -> Http2Pool:
    """As `pool`, with many requests on a connection; `max_connections` requests at a time."""
    text, socket_path = split_base_url(base_url)
    url = httpx.URL(text)
    is_tls = url.scheme == "https"

    def over_http1() -> Pool:
        return pool(
            base_url,
            allow_private=allow_private,
            max_connections=max_connections,
            ssl_context=ssl_context,
            address=address,
        )

    return Http2Pool(
        Origin(
            host=url.raw_host.decode("ascii"),
            port=url.port or (443 if is_tls else 80),
            ssl_context=_tls(ssl_context, "h2", "http/1.1") if is_tls else None,
            socket_path=socket_path,
        ),
        url.netloc.decode("ascii"),
        Dialer(allow_private=allow_private, address=address),
        fallback=over_http1,
        max_requests=max_connections,
    )


def _tls(context: ssl.SSLContext | None, *protocols: str) -> ssl.SSLContext:
    if context is None:
        context = httpx.create_ssl_context()  # honours SSL_CERT_FILE: companies have own CAs
    context.set_alpn_protocols(list(protocols) or ["http/1.1"])
    return context


# --- behind httpx's interface -----------------------------------------------------------------


def client(
    base_url: str,
    *,
    allow_private: bool = False,
    max_connections: int = 256,
    ssl_context: ssl.SSLContext | None = None,
) -> httpx.AsyncClient:
    """An httpx client over `pool`, for whatever is no hot path. It reaches that server alone."""
    made = pool(
        base_url,
        allow_private=allow_private,
        max_connections=max_connections,
        ssl_context=ssl_context,
    )
    url, _ = split_base_url(base_url)
    return httpx.AsyncClient(
        transport=EgressTransport(made, httpx.URL(url)), trust_env=False, follow_redirects=False
    )


class EgressTransport(httpx.AsyncBaseTransport):
    """One server's pool behind httpx's interface."""

    def __init__(self, pool: Pool, base_url: httpx.URL) -> None:
        self._pool = pool
        self._netloc = base_url.scheme, base_url.netloc

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        if (url.scheme, url.netloc) != self._netloc:
            raise httpx.UnsupportedProtocol("this client reaches one server, and another was asked")
        limits = request.extensions.get("timeout", {})
        read_s = limits.get("read") or _FOREVER_S
        loop = asyncio.get_running_loop()
        try:
            answer = await self._pool.send(
                Request(
                    method=request.method.encode("ascii"),
                    target=url.raw_path,
                    headers=[
                        (name, value)
                        for name, value in request.headers.raw
                        if name.lower() not in (b"content-length", b"transfer-encoding")
                    ],
                    body=await request.aread(),
                    connect_s=limits.get("connect"),
                ),
                until=loop.time() + read_s,
            )
        except TimeoutError:
            raise httpx.ReadTimeout("no answer in time") from None
        return httpx.Response(
            answer.status, headers=list(answer.headers.items()), stream=_Body(answer, read_s)
        )

    @override
    async def aclose(self) -> None:
        await self._pool.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(self, answer: Answer, read_s: float) -> None:
        self._answer = answer
        self._read_s = read_s

    @override
    async def __aiter__(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        try:
            while piece := await self._answer.read(loop.time() + self._read_s):
                yield piece
        except TimeoutError:
            raise httpx.ReadTimeout("the answer stood still") from None

    @override
    async def aclose(self) -> None:
        self._answer.close()
