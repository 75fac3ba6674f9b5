"""Which addresses stand behind a backend's name: DNS records, or the endpoints of a Kubernetes
Service.

A source tells each new list to whoever listens and knows nothing of requests, health or which of
the addresses may be reached: `egress` checks them. Invariants: a look-up that fails changes
nothing, the last list holds and the failure is counted; an empty answer is an answer.
"""

import asyncio
import logging
import random
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import quote, urlsplit

import dns.asyncresolver
import dns.exception
import dns.rdatatype
import dns.resolver
import httpx
import msgspec
from msgspec import Struct

from backends import egress
from backends.settings import Discovery

log = logging.getLogger(__name__)

Address = tuple[str, int]  # an IP address, and a port
Told = Callable[[Sequence[Address]], None]

SHORTEST_S: Final = 1.0  # between two look-ups, whatever the TTL says
LOOKUP_S: Final = 5.0
FIRST_PAUSE_S: Final = 0.5  # after a failure; doubles
LONGEST_PAUSE_S: Final = 30.0
AGAIN_S: Final = 0.1  # between two watches, so that a server that ends each at once is no loop
LIST_S: Final = 10.0
WATCH_S: Final = 300  # the API server ends a watch after so long, and it is begun anew
MAX_LINE_BYTES: Final = 8 * 1024 * 1024


class Source(Protocol):
    """Finds addresses until it is cancelled. Counters: `found` (lists told), `failures`."""

    found: int
    failures: int

    async def run(self, told: Told) -> None: ...


def source(settings: Discovery, base_url: str) -> Source:
    """The source that a `discovery` table describes."""
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    match settings.kind:
        case "kubernetes":
            return EndpointSlices(settings)
        case "srv":
            return Dns(settings, settings.name or host, None)
        case "dns":
            number = settings.port if isinstance(settings.port, int) else port
            return Dns(settings, settings.name or host, number)


# --- DNS --------------------------------------------------------------------------------------


class Dns:
    """A and AAAA records of a name, or the targets of its SRV records if `port` is None. Looked up
    again when the shortest TTL is over, at the latest after `every_s`, with jitter."""

    def __init__(self, settings: Discovery, name: str, port: int | None) -> None:
        self.found = 0
        self.failures = 0
        self._name = name
        self._port = port
        self._every_s = settings.every_s
        self._resolver = _resolver(settings.nameservers)

    async def run(self, told: Told) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                addresses, ttl_s = await self.look_up()
            except (dns.exception.DNSException, OSError) as error:
                self.failures += 1
                log.warning("discovery_failed", extra={"reason": type(error).__name__})
                await asyncio.sleep(_jittered(pause_s))
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
                continue
            pause_s = FIRST_PAUSE_S
            self.found += 1
            told(addresses)
            await asyncio.sleep(_jittered(min(max(ttl_s, SHORTEST_S), self._every_s)))

    async def look_up(self) -> tuple[Sequence[Address], float]:
        """The addresses now, and for how many seconds they hold."""
        if self._port is not None:
            return await self._addresses(self._name, self._port)
        answer = await self._resolver.resolve(self._name, "SRV", lifetime=LOOKUP_S)
        best = min(record.priority for record in answer)
        targets = [
            (record.target.to_text(), record.port) for record in answer if record.priority == best
        ]
        found: list[Address] = []
        ttl_s: float = answer.rrset.ttl if answer.rrset is not None else SHORTEST_S
        for lookup in await asyncio.gather(*(self._addresses(*target) for target in targets)):
            found += lookup[0]
            ttl_s = min(ttl_s, lookup[1])
        return sorted(set(found)), ttl_s

    async def _addresses(self, name: str, port: int) -> tuple[Sequence[Address], float]:
        """Both families. A name that has one of them has the other one's absence as an answer."""
        answers = await asyncio.gather(
            *(
                self._resolver.resolve(name, family, lifetime=LOOKUP_S)
                for family in (dns.rdatatype.A, dns.rdatatype.AAAA)
            ),
            return_exceptions=True,
        )
        found: list[Address] = []
        ttls: list[float] = []
        for answer in answers:
            if isinstance(answer, dns.resolver.NoAnswer | dns.resolver.NXDOMAIN):
                continue
            if isinstance(answer, BaseException):
                raise answer
            found += [(record.address, port) for record in answer]
            if answer.rrset is not None:
                ttls.append(answer.rrset.ttl)
        return sorted(set(found)), min(ttls, default=SHORTEST_S)


def _resolver(nameservers: Sequence[str]) -> dns.asyncresolver.Resolver:
    if not nameservers:
        return dns.asyncresolver.Resolver()
    made = dns.asyncresolver.Resolver(configure=False)
    made.nameservers = [server.rsplit(":", 1)[0].strip("[]") for server in nameservers]
    ports = {int(server.rsplit(":", 1)[1]) for server in nameservers if ":" in server}
    made.port = next(iter(ports), 53)
    return made


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(0.9, 1.1)  # noqa: S311  (so that replicas do not ask at once)


# --- Kubernetes -------------------------------------------------------------------------------


class _Conditions(Struct, frozen=True):
    ready: bool | None = None  # null counts as ready, says the API


class _Endpoint(Struct, frozen=True):
    addresses: tuple[str, ...] = ()
    conditions: _Conditions | None = None


class _Port(Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class _Metadata(Struct, frozen=True):
    name: str = ""
    resourceVersion: str = ""  # noqa: N815  (the API's name)


class Slice(Struct, frozen=True):
    """What we read of an EndpointSlice (discovery.k8s.io/v1)."""

    metadata: _Metadata = _Metadata()
    addressType: str = "IPv4"  # noqa: N815
    endpoints: tuple[_Endpoint, ...] | None = None
    ports: tuple[_Port, ...] | None = None


class _SliceList(Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    items: tuple[Slice, ...] = ()


class _WatchEvent(Struct, frozen=True):
    type: str
    object: msgspec.Raw


class WatchEnded(Exception):
    """The API server wants the list to be read anew (410 Gone, or an error event)."""


def addresses_of(slices: Mapping[str, Slice], port: int | str | None) -> Sequence[Address]:
    """The ready addresses of a Service's slices, at the port of that name or number."""
    found: set[Address] = set()
    for one in slices.values():
        number = _port_of(one, port)
        if number is None or one.addressType == "FQDN":
            continue
        for endpoint in one.endpoints or ():
            if endpoint.conditions is None or endpoint.conditions.ready is not False:
                found.update((address, number) for address in endpoint.addresses)
    return sorted(found)


def _port_of(one: Slice, port: int | str | None) -> int | None:
    if isinstance(port, int):
        return port
    for known in one.ports or ():
        if port is None or known.name == port:
            return known.port
    return None


class EndpointSlices:
    """The endpoints of a Service: listed once, then watched. When the watch breaks it goes on from
    the last version seen; when the API server has forgotten that one, from a new list."""

    def __init__(self, settings: Discovery) -> None:
        self.found = 0
        self.failures = 0
        self._settings = settings
        self._account = Path(settings.account_dir)
        self._slices: dict[str, Slice] = {}
        self._version = ""

    async def run(self, told: Told) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with self._client() as client:
                    await self._list(client)
                    self._tell(told)
                    pause_s = FIRST_PAUSE_S
                    while True:
                        await self._watch(client, told)
                        await asyncio.sleep(_jittered(AGAIN_S))
            except WatchEnded:
                await asyncio.sleep(_jittered(AGAIN_S))  # no failure: the next list follows
            except (httpx.HTTPError, OSError, msgspec.MsgspecError, TimeoutError) as error:
                self.failures += 1
                log.warning("discovery_failed", extra={"reason": type(error).__name__})
                await asyncio.sleep(_jittered(pause_s))
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    def _tell(self, told: Told) -> None:
        self.found += 1
        told(addresses_of(self._slices, self._settings.port))

    async def _list(self, client: httpx.AsyncClient) -> None:
        answer = await client.get(self._url(), headers=self._headers(), timeout=LIST_S)
        answer.raise_for_status()
        listed = msgspec.json.decode(answer.content, type=_SliceList)
        self._slices = {one.metadata.name: one for one in listed.items}
        self._version = listed.metadata.resourceVersion

    async def _watch(self, client: httpx.AsyncClient, told: Told) -> None:
        """One watch, to its end. Raises WatchEnded when the list must be read anew."""
        url = self._url(
            f"&watch=1&allowWatchBookmarks=true&timeoutSeconds={WATCH_S}"
            f"&resourceVersion={quote(self._version, safe='')}"
        )
        async with client.stream(
            "GET", url, headers=self._headers(), timeout=WATCH_S + LIST_S
        ) as answer:
            if answer.status_code == 410:
                raise WatchEnded
            answer.raise_for_status()
            async for line in _lines(answer):
                event = msgspec.json.decode(line, type=_WatchEvent)
                if event.type == "ERROR":
                    raise WatchEnded
                changed = msgspec.json.decode(event.object, type=Slice)
                self._version = changed.metadata.resourceVersion or self._version
                if event.type == "BOOKMARK":
                    continue
                if event.type == "DELETED":
                    self._slices.pop(changed.metadata.name, None)
                else:
                    self._slices[changed.metadata.name] = changed
                self._tell(told)

    def _url(self, more: str = "") -> str:
        settings = self._settings
        namespace = settings.namespace or self._read("namespace") or "default"
        service = quote(settings.name or "", safe="")
        return (
            f"{settings.api_url.rstrip('/')}/apis/discovery.k8s.io/v1/namespaces/"
            f"{quote(namespace, safe='')}/endpointslices"
            f"?labelSelector=kubernetes.io%2Fservice-name%3D{service}{more}"
        )

    def _headers(self) -> dict[str, str]:
        """The token is read each time: the kubelet replaces it while we run."""
        headers = {"accept": "application/json"}
        token = self._read("token")
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        return headers

    def _read(self, name: str) -> str | None:
        try:
            return (self._account / name).read_text().strip() or None
        except (OSError, UnicodeDecodeError):
            return None

    def _client(self) -> httpx.AsyncClient:
        """The API server is the operator's choice and inside, so its address is not checked."""
        context: ssl.SSLContext | None = None
        authority = self._account / "ca.crt"
        if self._settings.api_url.startswith("https://") and authority.exists():
            context = ssl.create_default_context(cafile=str(authority))
        parts = urlsplit(self._settings.api_url)
        return egress.client(
            f"{parts.scheme}://{parts.netloc}", allow_private=True, ssl_context=context
        )


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a body, each at most MAX_LINE_BYTES; what is not ended by one is no line."""
    rest = b""
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise httpx.RemoteProtocolError("a line without an end")
        for line in lines:
            if line.strip():
                yield line


def spoken(address: Address) -> str:
    """An address as a name for people: `10.0.0.1:8000`, `[fd00::1]:8000`."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
