"""The way out: pooled connections to one configured upstream, and the check of where they go.

An operator's host is resolved here, every address of it is checked, and the socket is opened to
the address that was checked, so that a name cannot be re-pointed at the inside between the check
and the connection. Unix sockets are the operator's own and exempt. TLS is always verified,
redirects, proxies from the environment and cookies do not exist.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

import httpcore
import httpx
from typing_extensions import override

UNIX_SCHEME: Final = "unix://"
UNIX_HOST: Final = "localhost"  # what the Host header says to a server on a Unix socket
KEEPALIVE_S: Final = 15.0

_SOCKET_OPTIONS: Final = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]

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


def client(
    *,
    socket_path: str | None = None,
    allow_private: bool = False,
    max_connections: int = 256,
    ssl_context: ssl.SSLContext | None = None,
) -> httpx.AsyncClient:
    """A client whose every connection goes through the check, or to one Unix socket."""
    if ssl_context is None and socket_path is None:
        ssl_context = httpx.create_ssl_context()  # honours SSL_CERT_FILE: companies have own CAs
    return httpx.AsyncClient(
        transport=EgressTransport(
            socket_path=socket_path,
            allow_private=allow_private,
            max_connections=max_connections,
            ssl_context=ssl_context,
        ),
        trust_env=False,
        follow_redirects=False,
    )


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Opens sockets to checked addresses only."""

    def __init__(
        self, *, allow_private: bool, network: httpcore.AsyncNetworkBackend | None = None
    ) -> None:
        self._allow_private = allow_private
        self._network = network or httpcore.AnyIOBackend()

    @override
    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Tries each address of the host within one `timeout`, and names none of them."""
        failure: Exception = httpcore.ConnectError("no connection")
        try:
            async with asyncio.timeout(timeout):
                addresses = await self._resolve(host, port)
                # A share each, so that one address that swallows packets leaves time for the next.
                share_s = None if timeout is None else timeout / len(addresses)
                for address in addresses:
                    try:
                        return await self._network.connect_tcp(
                            address, port, share_s, local_address, socket_options
                        )
                    except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                        failure = error
        except TimeoutError as error:
            raise httpcore.ConnectTimeout("no connection in time") from error
        raise failure

    @override
    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return await self._network.connect_unix_socket(path, timeout)

    @override
    async def sleep(self, seconds: float) -> None:
        await self._network.sleep(seconds)

    async def _resolve(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore.ConnectError("the host cannot be resolved") from error
        addresses = list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
        if not addresses:
            raise httpcore.ConnectError("the host has no address")
        if not self._allow_private and any(map(is_internal, addresses)):
            raise EgressRefused("the host resolves to an internal address")
        return addresses


class EgressTransport(httpx.AsyncBaseTransport):
    """httpcore's pool behind httpx's interface, over the checked network."""

    def __init__(
        self,
        *,
        socket_path: str | None = None,
        allow_private: bool = False,
        max_connections: int = 256,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl_context,
            max_connections=max_connections,
            max_keepalive_connections=max_connections,
            keepalive_expiry=KEEPALIVE_S,
            uds=socket_path,
            network_backend=CheckedNetwork(allow_private=allow_private),
            socket_options=None if socket_path else _SOCKET_OPTIONS,
        )

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        with _mapping_httpcore_errors():
            response = await self._pool.handle_async_request(
                httpcore.Request(
                    method=request.method,
                    url=httpcore.URL(
                        scheme=url.raw_scheme,
                        host=url.raw_host,
                        port=url.port,
                        target=url.raw_path,
                    ),
                    headers=request.headers.raw,
                    content=request.stream,
                    extensions=request.extensions,
                )
            )
        return httpx.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_Body(response),
            extensions=response.extensions,
        )

    @override
    async def aclose(self) -> None:
        await self._pool.aclose()

    @override
    async def __aenter__(self) -> Self:
        return self

    @override
    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(self, response: httpcore.Response) -> None:
        self._response = response

    @override
    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _mapping_httpcore_errors():
            async for piece in self._response.aiter_stream():
                yield piece

    @override
    async def aclose(self) -> None:
        with _mapping_httpcore_errors():
            await self._response.aclose()


# httpcore's leaves have the names of httpx's; a test asserts that each is here.
HTTPX_OF_HTTPCORE: Final[dict[type[Exception], type[httpx.TransportError]]] = {
    httpcore.ConnectTimeout: httpx.ConnectTimeout,
    httpcore.ReadTimeout: httpx.ReadTimeout,
    httpcore.WriteTimeout: httpx.WriteTimeout,
    httpcore.PoolTimeout: httpx.PoolTimeout,
    httpcore.TimeoutException: httpx.TimeoutException,
    httpcore.ConnectError: httpx.ConnectError,
    httpcore.ReadError: httpx.ReadError,
    httpcore.WriteError: httpx.WriteError,
    httpcore.NetworkError: httpx.NetworkError,
    httpcore.ProxyError: httpx.ProxyError,
    httpcore.UnsupportedProtocol: httpx.UnsupportedProtocol,
    httpcore.LocalProtocolError: httpx.LocalProtocolError,
    httpcore.RemoteProtocolError: httpx.RemoteProtocolError,
    httpcore.ProtocolError: httpx.ProtocolError,
}


@contextmanager
def _mapping_httpcore_errors() -> Iterator[None]:
    try:
        yield
    except tuple(HTTPX_OF_HTTPCORE) as error:
        for known in type(error).__mro__:
            if known in HTTPX_OF_HTTPCORE:
                raise HTTPX_OF_HTTPCORE[known](str(error)) from error
        raise
