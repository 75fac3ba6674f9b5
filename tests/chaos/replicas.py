"""Several gateways as in production: processes of their own, one PostgreSQL, one Redis, and what is
needed to ask all of them and to look at their common books."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import select

import migrations
from telemetry.database import open_engine
from telemetry.tables import ChargeLineRow, RequestRow
from tests import services
from tests.e2e.served import Served, serve

ENVIRONMENT = {
    "ADMIN_KEY": "admin-chaos-0123456789abcdef0123",
    "PEPPER": "pepper-of-chaos-0123456789abcdef",
}
CONFIG = """
[server]
admin_key = "env:ADMIN_KEY"
key_pepper = "env:PEPPER"
[store]
database = "{database}"
redis = "{redis}"
data_dir = "data"
[[backends]]
name = "b"
kind = "scripted"
price = {{ input = "1", output = "2" }}
script = {{ output_tokens = 4, first_token_s = {first_token_s} }}
[[routes]]
model = "m"
targets = [{{ backend = "b" }}]
"""


class Tenant(Struct, frozen=True):
    """A tenant and the key of its requests."""

    id: str
    key: str


class Replicas:
    """What is common to all: the admin API of the first, the database, Redis."""

    def __init__(self, servers: list[Served], database: str, redis: services.Redis) -> None:
        self.servers = servers
        self.redis = redis
        self._database = database
        self._admin = httpx.Client(
            base_url=self.urls[0],
            headers={"authorization": f"Bearer {ENVIRONMENT['ADMIN_KEY']}"},
            timeout=30,
        )

    def close(self) -> None:
        self._admin.close()

    @property
    def urls(self) -> list[str]:
        return [server.base_url.removesuffix("/v1") for server in self.servers]

    def admin(self, method: str, path: str, **body: Any) -> Any:
        answer = self._admin.request(method, f"/admin/v1/{path}", json=body)
        assert answer.status_code < 300, answer.text
        return answer.json()

    def tenant(self, name: str) -> Tenant:
        made = self.admin("POST", "tenants", name=name)
        issued = self.admin("POST", f"tenants/{made['id']}/keys", name="k")
        return Tenant(made["id"], issued["key"])

    def metric(self, name: str, **labels: str) -> list[float]:
        """A sample of each replica that matches."""
        found = []
        for url in self.urls:
            text = httpx.get(f"{url}/metrics", timeout=30).text
            found.append(
                sum(
                    sample.value
                    for family in text_string_to_metric_families(text)
                    for sample in family.samples
                    if sample.name == name and labels.items() <= sample.labels.items()
                )
            )
        return found

    async def books(self, tenant_id: str) -> tuple[int, int]:
        """What the ledger has of a tenant: requests that were answered, and nano-dollars."""
        engine = open_engine(self._database)
        async with engine.connect() as db:
            served = await db.execute(
                select(RequestRow.request_id).where(
                    RequestRow.tenant_id == tenant_id, RequestRow.outcome == "ok"
                )
            )
            amounts = await db.execute(
                select(ChargeLineRow.amount).where(ChargeLineRow.tenant_id == tenant_id)
            )
            count = len(served.all())
            cost = sum((amount for (amount,) in amounts), Decimal(0))
        await engine.dispose()
        return count, int(cost * 10**9)


@contextlib.contextmanager
def replicas(
    folder: Path, number: int, *, first_token_s: float = 0.05, more: str = ""
) -> Iterator[Replicas]:
    """So many gateways, ready. `more`: tables of their config."""
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(services.postgres())
        redis = stack.enter_context(services.redis())
        migrations.upgrade(database)
        config = CONFIG.format(database=database, redis=redis.url, first_token_s=first_token_s)
        contexts = [
            serve(folder / f"r{n}", config=config + more, env=ENVIRONMENT) for n in range(number)
        ]
        with ThreadPoolExecutor(number) as pool:
            starts = [pool.submit(context.__enter__) for context in contexts]
        for start, context in zip(starts, contexts, strict=True):
            if start.exception() is None:
                stack.push(context.__exit__)
        servers = [start.result() for start in starts]
        world = Replicas(servers, database, redis)
        stack.callback(world.close)
        yield world
