"""A gateway that is started again while its PostgreSQL is gone."""

import asyncio
from pathlib import Path

import httpx
import pytest
from sqlalchemy import func, select

import migrations
from gateway.app import StartupError, open_service
from gateway.auth import Credential
from gateway.config import load
from telemetry.database import open_engine
from telemetry.tables import RequestRow
from tests import services
from tests.fakes.gateway import ADMIN_KEY, ENVIRONMENT, Server

CHAT = {"model": "assistant", "messages": [{"role": "user", "content": "hi"}]}


def config_at(folder: Path, url: str) -> Path:
    path = folder / "meterline.toml"
    path.write_text(
        '[server]\nport = 0\nadmin_key = "env:ADMIN_KEY"\n'
        f'[store]\ndata_dir = "{folder / "data"}"\ndatabase = "{url}"\n'
        "[auth]\npoll_s = 0.05\n"
        '[[backends]]\nname = "played"\nkind = "scripted"\nprice = { input = "1", output = "2" }\n'
        '[[routes]]\nmodel = "assistant"\ntargets = [{ backend = "played" }]\n'
    )
    return path


async def test_known_keys_are_served_after_a_restart_without_the_database(tmp_path: Path) -> None:
    """With the key and the prices of before: served, priced, recorded in the log; an unknown key
    and an administrator are told to try again. Without what was known it does not start."""
    with services.postgres() as url:
        await migrations.upgrade_url(url)
        path = config_at(tmp_path, url)
        async with open_service(load(path), environment=ENVIRONMENT) as service:
            await service.tenants.create_tenant("acme", actor="t")
            known = (await service.tenants.create_key("acme", actor="t")).secret.reveal()
            other = (await service.tenants.create_key("acme", actor="t")).secret.reveal()
            async with Server(service.app) as front, httpx.AsyncClient() as client:
                ask = {"headers": {"authorization": f"Bearer {known}"}, "json": CHAT}
                chat = f"{front.base_url}/v1/chat/completions"
                assert (await client.post(chat, **ask)).status_code == 200  # type: ignore[arg-type]  # by name
            snapshot = tmp_path / "data" / "key-snapshot"
            async with asyncio.timeout(20):
                while not snapshot.exists() or b'"keys":[]' in snapshot.read_bytes():
                    # A look-up is forgotten once, when the poll hears of the key's creation.
                    await service.gateway.auth.identify(Credential(known))
                    await asyncio.sleep(0.05)
        engine = open_engine(url)
        async with engine.connect() as db:
            assert await db.scalar(select(func.count()).select_from(RequestRow)) == 1
        await engine.dispose()

    async with (
        open_service(load(path), environment=ENVIRONMENT) as service,
        Server(service.app) as front,
        httpx.AsyncClient(timeout=20) as client,
    ):
        chat = f"{front.base_url}/v1/chat/completions"
        answer = await client.post(chat, **ask)  # type: ignore[arg-type]  # by name
        assert answer.status_code == 200, answer.text
        assert float(answer.headers["x-meterline-cost-usd"]) > 0
        headers = {"authorization": f"Bearer {other}"}
        assert (await client.post(chat, headers=headers, json=CHAT)).status_code == 503
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        tenants = f"{front.base_url}/admin/v1/tenants"
        assert (await client.get(tenants, headers=headers)).status_code == 503

    snapshot.unlink()
    with pytest.raises(StartupError, match="database"):
        async with open_service(load(path), environment=ENVIRONMENT):
            pass
