"""Where the counters' server is: at an address, wherever Sentinel says, or on the node of a Cluster
that has the tenant's slot.

    redis://…, rediss://…, unix://…                         one server
    redis+sentinel://user:password@h1:26379,h2:26379/NAME/0  whichever is the primary of NAME now
    redis+cluster://user:password@h1:7000,h2:7001            a Cluster; any of its nodes

redis-py asks Sentinel and reads the Cluster's map; the calls themselves go over `wire`. Must not
know steps or counters. Invariant: an address is only ever that of a primary, as far as those who
were asked know; that it is one is checked on the connection.
"""

from collections.abc import Sequence
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from msgspec import Struct
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.sentinel import Sentinel
from redis.exceptions import RedisError

from gateway.limits.store import StoreGone

SENTINEL: Final = "redis+sentinel"
CLUSTER: Final = "redis+cluster"
SCHEMES: Final = ("redis", "rediss", "unix", SENTINEL, CLUSTER)
SENTINEL_PORT: Final = 26379
NODE_PORT: Final = 6379
ASK_S: Final = 1.0
SLOTS: Final = 16384

Address = tuple[str, int]


class Place(Struct, frozen=True):
    """A URL, read. `hosts`: sentinels, or nodes; none for a plain URL."""

    url: str
    scheme: str
    hosts: tuple[Address, ...] = ()
    username: str | None = None
    password: str | None = None
    service: str = ""  # of Sentinel
    db: int = 0

    def url_of(self, address: Address) -> str:
        """The plain URL of one server, with our credentials."""
        who = ""
        if self.password is not None:
            who = f"{quote(self.username or '', safe='')}:{quote(self.password, safe='')}@"
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        return f"redis://{who}{host}:{address[1]}/{self.db}"


def place_of(url: str) -> Place:
    """Raises ValueError with what is wrong; no part of the URL is in it."""
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise ValueError("must start with " + ", ".join(f"{one}://" for one in SCHEMES))
    if scheme not in (SENTINEL, CLUSTER):
        return Place(url, scheme)
    parts = urlsplit(url)
    who, _, where = parts.netloc.rpartition("@")
    username, _, password = who.partition(":")
    hosts = tuple(_address(one, SENTINEL_PORT if scheme == SENTINEL else NODE_PORT)
                  for one in where.split(",") if one)  # fmt: skip
    if not hosts:
        raise ValueError("name at least one host")
    service, _, db = parts.path.strip("/").partition("/")
    if scheme == SENTINEL and not service:
        raise ValueError("name the service that Sentinel watches: redis+sentinel://HOST/NAME")
    if scheme == CLUSTER and service:
        raise ValueError("a Cluster has no databases: leave the path out")
    if db and not db.isdigit():
        raise ValueError("the database is a number")
    return Place(
        url,
        scheme,
        hosts,
        unquote(username) or None,
        unquote(password) if who else None,
        service,
        int(db or 0),
    )


def _address(text: str, default: int) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(default)
    if not port.isdigit() or not host:
        raise ValueError("write hosts as HOST:PORT, with commas between them")
    return host.strip("[]"), int(port)


async def primary_of(place: Place) -> str:
    """The URL of the server to ask now. Raises StoreGone."""
    if place.scheme != SENTINEL:
        return place.url
    sentinel = Sentinel(  # type: ignore[no-untyped-call]  # redis-py has no types there
        place.hosts, socket_timeout=ASK_S, socket_connect_timeout=ASK_S
    )
    try:
        address = await sentinel.discover_master(place.service)
    except (RedisError, OSError) as error:
        raise StoreGone(type(error).__name__) from error
    finally:
        for one in sentinel.sentinels:
            await one.aclose()
    return place.url_of((str(address[0]), int(address[1])))


async def slots_of(place: Place) -> Sequence[Address | None]:
    """The primary of each slot, as the Cluster says now. Raises StoreGone."""
    cluster = RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in place.hosts],
        username=place.username,
        password=place.password,
        require_full_coverage=False,
        socket_timeout=ASK_S,
        socket_connect_timeout=ASK_S,
    )
    try:
        await cluster.initialize()  # type: ignore[unused-awaitable]  # itself, and ready
        found: list[Address | None] = [None] * SLOTS
        for slot, nodes in cluster.nodes_manager.slots_cache.items():
            found[slot] = (str(nodes[0].host), int(nodes[0].port))
    except (RedisError, OSError) as error:
        raise StoreGone(type(error).__name__) from error
    finally:
        await cluster.aclose()
    return found
