"""`meterline limit` and `meterline budget`: set, list, remove, and in the audit log."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from sqlalchemy import select

import migrations
from gateway.commands import Store
from gateway.commands.budget import budget
from gateway.commands.limit import limit
from gateway.commands.tenant import tenant
from gateway.tenant_tables import AuditRow
from telemetry.database import open_engine


def run(url: str, group: Any, *arguments: str) -> Result:
    store = Store(database=url, pepper=bytes(range(32)))
    return CliRunner().invoke(group, list(arguments), obj=lambda _: store)


def test_limits_and_budgets_by_command(database_url: str, tmp_path: Path) -> None:
    """What is set is listed, setting it again replaces it, and what is removed is gone."""
    migrations.upgrade(database_url)
    assert run(database_url, tenant, "create", "acme").exit_code == 0
    for amount in ("60", "90"):
        made = run(
            database_url,
            limit,
            "set",
            "acme",
            "requests",
            amount,
            "--per",
            "1m",
            "--format",
            "json",
        )
        assert made.exit_code == 0, made.output
    spent = run(
        database_url,
        limit,
        "set",
        "acme",
        "spend",
        "$2.50",
        "--per",
        "1h",
        "--user",
        "*",
        "--strict",
    )
    assert spent.exit_code == 0, spent.output
    listed = json.loads(run(database_url, limit, "list", "acme", "--format", "json").output)
    assert [(x["counts"], float(x["amount"]), x["per_s"], x["scope"]) for x in listed] == [
        ("requests", 90, 60, "tenant"),
        ("spend", 2.5, 3600, "user"),
    ]
    assert run(database_url, limit, "rm", listed[0]["id"]).exit_code == 0
    assert run(database_url, limit, "rm", listed[0]["id"]).exit_code == 1

    rolling = run(
        database_url, budget, "set", "acme", "20", "--window", "rolling:24h", "--mode", "throttle"
    )
    assert rolling.exit_code == 0, rolling.output
    assert "rolling" in run(database_url, budget, "list").output
    for arguments, said in (
        (("set", "acme", "20", "--zone", "Mars/Base"), "IANA"),
        (("set", "acme", "-3"), "No such option"),
        (("set", "acme", "20", "--window", "fortnight"), "rolling:24h"),
        (("set", "acme", "0.0000001"), "smaller than one request"),
        (("set", "acme", "1", "--key", "*", "--route", "m"), "name one of"),
        (("set", "acme", "much"), "not a number"),
    ):
        refused = run(database_url, budget, *arguments)
        assert refused.exit_code == 2, refused.output
        assert said in refused.output
        assert "Traceback" not in refused.output


async def test_changes_are_in_the_audit_log(database_url: str) -> None:
    """Each act with who, what was before and what is after."""
    from decimal import Decimal

    from gateway.budgets import Allowances
    from gateway.keys import KeyRing
    from gateway.tenants import Tenants
    from telemetry.clock import SystemClock

    await migrations.upgrade_url(database_url)
    engine = open_engine(database_url)
    tenants = Tenants(engine, KeyRing(bytes(range(32))), SystemClock())
    await tenants.create_tenant("acme", actor="t")
    made = Allowances(tenants)
    for amount in (5, 7):
        one = await made.set_budget("acme", Decimal(amount), actor="ann")
    await made.remove_budget(one.id, actor="bob")
    async with engine.connect() as db:
        rows = (await db.execute(select(AuditRow.__table__).order_by(AuditRow.id))).all()
    acts = [
        (row.actor, row.action, row.before and row.before["amount_usd"], row.after is None)
        for row in rows[1:]
    ]
    assert [act[:2] for act in acts] == [
        ("ann", "budget.set"),
        ("ann", "budget.set"),
        ("bob", "budget.remove"),
    ]
    assert [act[2] for act in acts] == [None, "5", "7"]
    assert [act[3] for act in acts] == [False, False, True]
    await engine.dispose()
