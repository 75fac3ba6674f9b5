"""Tenants and keys on SQLite and PostgreSQL, with replicas of Auth watching the same database."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, event, inspect, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth import Auth, AuthSettings, Credential
from gateway.budgets import Allowances
from gateway.errors import BadRequest, Conflict, NotFound, StoreUnavailable, Unauthenticated
from gateway.keys import KeyRing
from gateway.responses import StoredResponseRow
from gateway.tenant_tables import AuditRow, KeyRow, TenantBase
from gateway.tenants import IssuedKey, Key, KeyChange, Tenant, TenantChange, Tenants
from telemetry.clock import SystemClock
from telemetry.database import open_engine
from tests import services
from tests.fakes.clock import FakeClock

RING = KeyRing(bytes(range(32)))


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = open_engine(database_url)
    async with engine.begin() as db:
        await db.run_sync(TenantBase.metadata.create_all)
    yield engine
    await engine.dispose()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def tenants(engine: AsyncEngine, clock: FakeClock) -> Tenants:
    return Tenants(engine, RING, clock)


@contextlib.contextmanager
def statements(engine: AsyncEngine) -> Iterator[list[str]]:
    """The SQL that runs meanwhile."""
    seen: list[str] = []

    def listen(_c: object, _cursor: object, statement: str, *_: object) -> None:
        seen.append(statement)

    event.listen(engine.sync_engine, "before_cursor_execute", listen)
    try:
        yield seen
    finally:
        event.remove(engine.sync_engine, "before_cursor_execute", listen)


async def audit(engine: AsyncEngine) -> list[tuple[str, str, str]]:
    async with engine.connect() as db:
        rows = await db.execute(
            select(AuditRow.actor, AuditRow.action, AuditRow.object).order_by(AuditRow.id)
        )
        return [tuple(row) for row in rows]


def credential(issued: IssuedKey) -> Credential:
    return Credential(issued.secret.reveal())


async def refused(auth: Auth, issued: IssuedKey) -> bool:
    try:
        await auth.identify(credential(issued))
    except Unauthenticated:
        return True
    return False


# ---------------------------------------------------------------------------------------- schema


async def test_the_migration_makes_what_the_models_say(database_url: str) -> None:
    """The revisions up equal the models, triggers and first row included; down leaves nothing."""
    import importlib

    names = (
        *("0001_tenants", "0003_limits", "0005_responses", "0006_drains"),
        *("0008_tenant_tree", "0008b_key_bounds", "0008c_admins", "0009_budget_downgrade"),
    )
    revisions = [importlib.import_module(f"migrations.versions.{name}") for name in names]
    engine = open_engine(database_url)
    assert StoredResponseRow.__tablename__ in TenantBase.metadata.tables

    def run(connection: Connection, step: Callable[[], None]) -> None:
        with Operations.context(MigrationContext.configure(connection)):
            step()

    def differences(connection: Connection) -> list[object]:
        return compare_metadata(MigrationContext.configure(connection), TenantBase.metadata)

    async with engine.begin() as db:
        for revision in revisions:
            await db.run_sync(run, revision.upgrade)
    async with engine.begin() as db:
        assert await db.run_sync(differences) == []
    made = Tenants(engine, RING, FakeClock())
    await made.create_tenant("acme", actor="t")
    for change in ("UPDATE audit_log SET actor = 'x'", "DELETE FROM audit_log"):
        with pytest.raises(DBAPIError, match="append-only"):
            async with engine.begin() as db:
                await db.execute(text(change))
    async with engine.begin() as db:
        for revision in reversed(revisions):
            await db.run_sync(run, revision.downgrade)
        assert await db.run_sync(lambda c: inspect(c).get_table_names()) == []
    await engine.dispose()


async def test_the_audit_log_cannot_be_changed(tenants: Tenants, engine: AsyncEngine) -> None:
    """The database itself refuses to update or delete what was recorded."""
    await tenants.create_tenant("acme", actor="admin")
    for change in ("UPDATE audit_log SET actor = 'x'", "DELETE FROM audit_log"):
        with pytest.raises(DBAPIError, match="append-only"):
            async with engine.begin() as db:
                await db.execute(text(change))
    assert len(await audit(engine)) == 1


# --------------------------------------------------------------------------------------- tenants


async def test_a_tenant_lives_is_suspended_resumed_and_deleted(
    tenants: Tenants, engine: AsyncEngine
) -> None:
    """Each act shows in the state and once in the audit log; repeating one changes nothing."""
    made = await tenants.create_tenant("acme", {"cost-centre": "4711"}, actor="ann")
    assert made.state == "active"
    assert made.labels == {"cost-centre": "4711"}
    assert await tenants.tenant("acme") == await tenants.tenant(made.id) == made
    for _ in range(2):
        assert (await tenants.suspend_tenant("acme", actor="bob")).state == "suspended"
    assert (await tenants.resume_tenant("acme", actor="bob")).state == "active"
    for _ in range(2):
        assert (await tenants.delete_tenant(made.id, actor="bob")).state == "deleted"
    with pytest.raises(Conflict, match="deleted"):
        await tenants.resume_tenant(made.id, actor="bob")
    with pytest.raises(NotFound):
        await tenants.tenant("acme")
    of = f"tenant/{made.id}"
    assert await audit(engine) == [
        ("ann", "tenant.create", of),
        ("bob", "tenant.suspend", of),
        ("bob", "tenant.resume", of),
        ("bob", "tenant.delete", of),
    ]


async def test_a_name_is_taken_until_its_tenant_is_deleted(
    tenants: Tenants, engine: AsyncEngine
) -> None:
    """A second tenant of the same name is a conflict and leaves no trace; after deletion it is
    another tenant."""
    first = await tenants.create_tenant("acme", actor="t")
    with pytest.raises(Conflict) as caught:
        await tenants.create_tenant("acme", actor="t")
    assert caught.value.param == "name"
    assert len(await audit(engine)) == 1
    await tenants.delete_tenant("acme", actor="t")
    second = await tenants.create_tenant("acme", actor="t")
    assert second.id != first.id
    assert (await tenants.tenant("acme")).id == second.id


async def test_many_write_at_once(tenants: Tenants, engine: AsyncEngine) -> None:
    """Concurrent writers all succeed or conflict by name, and count every write."""
    names = [f"t{place % 15}" for place in range(30)]
    answers = await asyncio.gather(
        *(tenants.create_tenant(name, actor="t") for name in names), return_exceptions=True
    )
    assert sum(isinstance(answer, Tenant) for answer in answers) == 15
    assert sum(isinstance(answer, Conflict) for answer in answers) == 15
    assert await tenants.version() == len(await audit(engine)) == 15


@pytest.mark.parametrize(
    ("name", "labels", "param"),
    [
        ("", {}, "name"),
        (" acme", {}, "name"),
        ("acme ", {}, "name"),
        ("a\nb", {}, "name"),
        ("a\x00b", {}, "name"),
        ("a/b", {}, "name"),
        ("x" * 65, {}, "name"),
        ("018f0000-0000-7000-8000-000000000000", {}, "name"),
        ("acme", {"Bad Key": "x"}, "labels"),
        ("acme", {"k": "x" * 257}, "labels.k"),
        ("acme", {"k": "a\nb"}, "labels.k"),
        ("acme", {f"k{place}": "" for place in range(33)}, "labels"),
    ],
)
async def test_what_is_no_name_or_label_is_refused_with_its_path(
    name: str, labels: dict[str, str], param: str, sqlite_url: str
) -> None:
    """Bad input is refused before the database is touched."""
    tenants = Tenants.open(sqlite_url, RING, FakeClock())
    with pytest.raises(BadRequest) as caught:
        await tenants.create_tenant(name, labels, actor="t")
    await tenants.close()
    assert caught.value.param == param


async def test_pages_hold_each_tenant_once(tenants: Tenants, clock: FakeClock) -> None:
    """Following the cursor gives every tenant, oldest first, and ends."""
    made = []
    for place in range(7):
        clock.advance(0.01)
        made.append((await tenants.create_tenant(f"t{place}", actor="t")).id)
    seen: list[str] = []
    while True:
        page = await tenants.tenants(after=seen[-1] if seen else None, limit=3)
        seen += [item.id for item in page.items]
        if not page.has_more:
            break
    assert seen == made
    for after, limit, param in (("x", 3, "after"), (None, 0, "limit"), (None, 101, "limit")):
        with pytest.raises(BadRequest) as caught:
            await tenants.tenants(after=after, limit=limit)
        assert caught.value.param == param


# ------------------------------------------------------------------------------------------ tree


async def test_tenants_form_a_tree_and_are_found_by_path(tenants: Tenants) -> None:
    """A name is unique at its place only; a path or an id names each, a lone name where it is
    clear."""
    acme = await tenants.create_tenant("acme", kind="organisation", currency="EUR", actor="t")
    team = await tenants.create_tenant("search", parent="acme", cost_centre="4711", actor="t")
    deep = await tenants.create_tenant("ranking", parent="acme/search", actor="t")
    await tenants.create_tenant("globex", actor="t")
    other = await tenants.create_tenant("search", parent="globex", actor="t")
    assert (deep.path, deep.parent_id) == ("acme/search/ranking", team.id)
    assert await tenants.tenant("ranking") == await tenants.tenant("acme/search/ranking") == deep
    with pytest.raises(BadRequest, match="Several tenants are named search"):
        await tenants.tenant("search")
    assert (await tenants.tenant("globex/search")).id == other.id
    with pytest.raises(Conflict) as caught:
        await tenants.create_tenant("search", parent=acme.id, actor="t")
    assert caught.value.param == "name"
    assert set(await tenants.subtree("acme")) == {acme.id, team.id, deep.id}
    page = await tenants.tenants(below="acme/search")
    assert {item.path for item in page.items} == {"acme/search", "acme/search/ranking"}
    place = (await tenants.places())[deep.id]
    assert (place.path, place.cost_centre, place.currency) == (deep.path, "4711", "EUR")


async def test_a_move_takes_all_below_along_and_never_makes_a_circle(
    tenants: Tenants, engine: AsyncEngine
) -> None:
    """Under itself, or under what is below it: refused with the field and what to do."""
    for name, parent in (("a", None), ("b", "a"), ("c", "a/b"), ("x", None)):
        await tenants.create_tenant(name, parent=parent, actor="t")
    for under in ("a", "a/b/c"):
        with pytest.raises(BadRequest, match="would be a circle") as caught:
            await tenants.change_tenant("a", TenantChange(parent=under), actor="t")
        assert caught.value.param == "parent"
    with pytest.raises(NotFound) as missing:
        await tenants.change_tenant("a", TenantChange(parent="nowhere"), actor="t")
    assert missing.value.param == "parent"
    moved = await tenants.change_tenant("a/b", TenantChange(parent="x"), actor="t")
    assert moved.path == "x/b"
    assert (await tenants.tenant("c")).path == "x/b/c"
    assert (await tenants.change_tenant("x/b", TenantChange(parent=None), actor="t")).path == "b"
    assert [line[1] for line in await audit(engine)][4:] == ["tenant.move", "tenant.move"]
    same = await tenants.change_tenant("b", TenantChange(name="b"), actor="t")
    assert (same.path, await tenants.version()) == ("b", 6 + 1)


async def test_two_moves_at_once_make_no_circle(tenants: Tenants) -> None:
    """a under b and b under a, together: one of them is refused."""
    await tenants.create_tenant("a", actor="t")
    await tenants.create_tenant("b", actor="t")
    answers = await asyncio.gather(
        tenants.change_tenant("a", TenantChange(parent="b"), actor="t"),
        tenants.change_tenant("b", TenantChange(parent="a"), actor="t"),
        return_exceptions=True,
    )
    assert sorted(type(answer).__name__ for answer in answers) == ["BadRequest", "Tenant"]


async def test_the_tree_is_bounded_in_depth(tenants: Tenants) -> None:
    """Sixteen tenants in a chain and no more, by creation or by moving a subtree."""
    above: str | None = None
    for place in range(16):
        above = (await tenants.create_tenant(f"t{place}", parent=above, actor="t")).id
    with pytest.raises(BadRequest, match="16 tenants deep"):
        await tenants.create_tenant("t16", parent=above, actor="t")
    await tenants.create_tenant("top", actor="t")
    with pytest.raises(BadRequest) as caught:
        await tenants.change_tenant("t0", TenantChange(parent="top"), actor="t")
    assert caught.value.param == "parent"
    assert (await tenants.tenant("t0")).path == "t0"


async def test_suspending_a_tenant_suspends_all_below_it(tenants: Tenants) -> None:
    """A running replica refuses a key far below within a poll, and takes it again after; what was
    suspended itself stays so, and who has living tenants below is not deleted."""
    await tenants.create_tenant("acme", actor="t")
    await tenants.create_tenant("search", parent="acme", actor="t")
    await tenants.create_tenant("ranking", parent="acme/search", actor="t")
    issued = await tenants.create_key("acme/search/ranking", actor="t")
    async with Auth(tenants, RING, SystemClock(), AuthSettings(poll_s=0.9)) as auth:
        caller = await auth.identify(credential(issued))
        assert [above.tenant for above in caller.ancestors] == ["search", "acme"]
        await tenants.suspend_tenant("acme", actor="t")
        await auth.refresh()
        assert await refused(auth, issued)
        below = await tenants.tenant("ranking")
        assert (below.state, below.effective_state) == ("active", "suspended")
        await tenants.suspend_tenant("acme/search", actor="t")
        await tenants.resume_tenant("acme", actor="t")
        await auth.refresh()
        assert await refused(auth, issued)
        await tenants.resume_tenant("acme/search", actor="t")
        await auth.refresh()
        assert not await refused(auth, issued)
    with pytest.raises(Conflict, match="below this one"):
        await tenants.delete_tenant("acme/search", actor="t")
    assert (await tenants.tenant("acme/search")).state == "active"


async def test_a_callers_ancestors_carry_their_limits_and_budgets(tenants: Tenants) -> None:
    """Nearest first; a change far above reaches the key within a poll."""
    allowances = Allowances(tenants)
    await tenants.create_tenant("acme", actor="t")
    await tenants.create_tenant("search", parent="acme", actor="t")
    issued = await tenants.create_key("acme/search", actor="t")
    await allowances.set_budget("acme", Decimal(5), actor="t")
    async with Auth(tenants, RING, SystemClock(), AuthSettings(poll_s=0.9)) as auth:
        (above,) = (await auth.identify(credential(issued))).ancestors
        assert [budget.amount_usd for budget in above.budgets] == [Decimal(5)]
        await allowances.set_limit("acme", "requests", Decimal(7), per_s=60, actor="t")
        await auth.refresh()
        (above,) = (await auth.identify(credential(issued))).ancestors
        assert [limit.amount for limit in above.limits] == [Decimal(7)]


@pytest.mark.parametrize(
    ("facts", "param"),
    [
        ({"kind": "Team One"}, "kind"),
        ({"cost_centre": ""}, "cost_centre"),
        ({"cost_centre": "a\nb"}, "cost_centre"),
        ({"currency": "euro"}, "currency"),
        ({"currency": "EU"}, "currency"),
    ],
)
async def test_what_is_no_fact_is_refused_with_its_path(
    facts: dict[str, str], param: str, sqlite_url: str
) -> None:
    """Bad input is refused before the database is touched, at creation and at a change."""
    tenants = Tenants.open(sqlite_url, RING, FakeClock())
    with pytest.raises(BadRequest) as caught:
        await tenants.create_tenant("acme", actor="t", **facts)  # type: ignore[arg-type]  # by name
    assert caught.value.param == param
    with pytest.raises(BadRequest) as again:
        await tenants.change_tenant("acme", TenantChange(**facts), actor="t")  # type: ignore[arg-type]  # by name
    await tenants.close()
    assert again.value.param == param


# ------------------------------------------------------------------------------------------ keys


async def test_a_key_is_stored_without_its_secret(tenants: Tenants, engine: AsyncEngine) -> None:
    """No column of any table holds the secret, and no list shows secret or HMAC."""
    await tenants.create_tenant("acme", actor="t")
    issued = await tenants.create_key("acme", name="prod", actor="t")
    secret = issued.secret.reveal().rsplit("-", 1)[1]
    stored = ""
    async with engine.connect() as db:
        for table in TenantBase.metadata.sorted_tables:
            stored += repr([tuple(row) for row in await db.execute(select(table))])
        digest = (await db.execute(select(KeyRow.secret_hmac))).scalar_one()
    assert issued.key.public_id in stored
    assert secret not in stored
    assert digest == RING.digest(issued.secret.reveal())
    page = await tenants.keys("acme")
    assert page.items == [issued.key]
    shown = f"{page!r} {issued!r} {await tenants.identity(issued.key.public_id)!r}"
    assert secret not in shown
    assert repr(digest) not in shown


async def test_a_key_is_found_by_what_people_have_at_hand(tenants: Tenants) -> None:
    """Id, public id, the start of the key and the key itself all name it."""
    await tenants.create_tenant("acme", actor="t")
    issued = await tenants.create_key("acme", actor="t")
    public_id = issued.key.public_id
    for ref in (issued.key.id, public_id, f"sk-ml-{public_id}", issued.secret.reveal()):
        assert await tenants.key(ref) == issued.key
    for ref in ("", "nothing", "sk-ml-", "\x00", "é", "018f0000-0000-7000-8000-000000000000"):
        with pytest.raises(NotFound):
            await tenants.key(ref)


async def test_a_rotated_key_works_until_its_grace_ends(
    tenants: Tenants, engine: AsyncEngine, clock: FakeClock
) -> None:
    """Old and new both work during the grace, then only the new one, with the same rights."""
    await tenants.create_tenant("acme", actor="t")
    life = timedelta(days=90)
    old = await tenants.create_key(
        "acme", name="prod", model_allow=["a*"], expires_at=now(clock) + life, actor="t"
    )
    clock.advance(timedelta(days=80).total_seconds())
    new = await tenants.rotate_key(old.key.id, timedelta(hours=1), actor="t")
    assert (new.key.name, new.key.model_allow) == ("prod", ["a*"])
    assert new.key.expires_at == now(clock) + life
    async with Auth(tenants, RING, clock) as auth:
        before = await auth.identify(credential(old))
        after = await auth.identify(credential(new))
        assert before.tenant_id == after.tenant_id
        assert before.key_id != after.key_id
        assert (await tenants.key(old.key.id)).state == "rotated"
        clock.advance(3600)
        await auth.refresh()  # an hour without a poll would be an outage
        assert await refused(auth, old)
        assert not await refused(auth, new)
    shown = await tenants.key(old.key.id)
    assert (shown.state, shown.rotated_to) == ("expired", new.key.id)
    with pytest.raises(Conflict, match="expired"):
        await tenants.rotate_key(old.key.id, timedelta(0), actor="t")
    assert [action for _, action, _ in await audit(engine)] == [
        "tenant.create",
        "key.create",
        "key.create",
        "key.rotate",
    ]


async def test_a_key_is_rotated_once(tenants: Tenants) -> None:
    """Of concurrent rotations one wins, the others are told the successor."""
    await tenants.create_tenant("acme", actor="t")
    old = await tenants.create_key("acme", actor="t")
    answers = await asyncio.gather(
        *(tenants.rotate_key(old.key.id, timedelta(hours=1), actor="t") for _ in range(5)),
        return_exceptions=True,
    )
    (won,) = [answer for answer in answers if isinstance(answer, IssuedKey)]
    lost = [answer for answer in answers if isinstance(answer, Conflict)]
    assert len(lost) == 4
    assert all(won.key.id in answer.message for answer in lost)
    assert len((await tenants.keys("acme")).items) == 2


@pytest.mark.parametrize("grace", [timedelta(seconds=-1), timedelta(days=91)])
async def test_an_absurd_grace_is_refused(tenants: Tenants, grace: timedelta) -> None:
    """A negative or endless grace period names its field."""
    with pytest.raises(BadRequest) as caught:
        await tenants.rotate_key("x", grace, actor="t")
    assert caught.value.param == "grace_s"


async def test_a_deleted_tenants_keys_are_revoked(tenants: Tenants, engine: AsyncEngine) -> None:
    """Deletion revokes each key once, in the same transaction, and no new one can be made."""
    made = await tenants.create_tenant("acme", actor="t")
    first = await tenants.create_key(made.id, actor="t")
    second = await tenants.create_key(made.id, actor="t")
    await tenants.revoke_key(first.key.id, actor="t")
    await tenants.delete_tenant(made.id, actor="t")
    assert [key.state for key in (await tenants.keys(made.id)).items] == ["revoked"] * 2
    with pytest.raises(Conflict):
        await tenants.create_key(made.id, actor="t")
    with pytest.raises(Conflict):
        await tenants.rotate_key(second.key.id, timedelta(0), actor="t")
    with pytest.raises(Conflict):
        await tenants.change_key(second.key.id, KeyChange(name="x"), actor="t")
    actions = [action for _, action, _ in await audit(engine)]
    assert actions.count("key.revoke") == 2
    assert actions[-1] == "tenant.delete"


async def test_a_change_touches_what_it_names(tenants: Tenants, clock: FakeClock) -> None:
    """UNSET leaves a field, None lifts its restriction, and the audit log has both states."""
    await tenants.create_tenant("acme", actor="t")
    ends = now(clock) + timedelta(days=1)
    key = (await tenants.create_key("acme", model_allow=["a"], expires_at=ends, actor="t")).key
    renamed = await tenants.change_key(key.id, KeyChange(name="batch"), actor="t")
    assert renamed == replace(key, name="batch")
    freed = await tenants.change_key(
        key.id, KeyChange(model_allow=None, expires_at=None), actor="t"
    )
    assert freed == replace(renamed, model_allow=None, expires_at=None)
    closed = await tenants.change_key(key.id, KeyChange(model_allow=[]), actor="t")
    assert closed.model_allow == []
    identity = await tenants.identity(key.public_id)
    assert identity is not None
    assert identity.model_allow == []


@pytest.mark.parametrize(
    ("facts", "param"),
    [
        ({"name": "x" * 101}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"model_allow": ["ok", "b*d"]}, "model_allow[1]"),
        ({"model_allow": [""]}, "model_allow[0]"),
        ({"model_allow": ["m"] * 101}, "model_allow"),
        ({"expires_at": datetime(2030, 1, 1)}, "expires_at"),  # noqa: DTZ001 — what is tested
        ({"expires_at": datetime(2001, 1, 1, tzinfo=UTC)}, "expires_at"),
        ({"expires_at": datetime(9999, 12, 31, tzinfo=UTC)}, "expires_at"),
    ],
)
async def test_what_is_no_key_is_refused_with_its_path(
    facts: dict[str, object], param: str, sqlite_url: str
) -> None:
    """Creating and changing refuse the same things, before the database is touched."""
    tenants = Tenants.open(sqlite_url, RING, FakeClock())
    attempts: list[Awaitable[object]] = [
        tenants.create_key("acme", actor="t", **facts),
        tenants.change_key("k", KeyChange(**facts), actor="t"),
    ]
    for attempt in attempts:
        with pytest.raises(BadRequest) as caught:
            await attempt
        assert caught.value.param == param
    await tenants.close()


async def test_another_pepper_is_noticed(tenants: Tenants, engine: AsyncEngine) -> None:
    """With the wrong pepper nothing is issued, and the start-up check says what to do."""
    await tenants.create_tenant("acme", actor="t")
    other = Tenants(engine, KeyRing(bytes(32)), FakeClock())
    await other.verify_pepper()  # no key yet: any pepper will do
    await tenants.create_key("acme", actor="t")
    await tenants.verify_pepper()
    with pytest.raises(Conflict, match="restore it"):
        await other.verify_pepper()
    with pytest.raises(Conflict, match="restore it"):
        await other.create_key("acme", actor="t")


# -------------------------------------------------------------------------------------- replicas


@pytest.mark.parametrize("act", ["revoke", "suspend", "delete", "rotate at once", "narrow"])
async def test_a_second_replica_obeys_within_a_second(database_url: str, act: str) -> None:
    """What one process writes, another one that already knows the key obeys within 1 s."""
    here, there = open_engine(database_url), open_engine(database_url)
    async with here.begin() as db:
        await db.run_sync(TenantBase.metadata.create_all)
    clock = SystemClock()
    writer, reader = Tenants(here, RING, clock), Tenants(there, RING, clock)
    await writer.create_tenant("acme", actor="t")
    issued = await writer.create_key("acme", actor="t")
    acts: dict[str, Callable[[], Awaitable[object]]] = {
        "revoke": lambda: writer.revoke_key(issued.key.id, actor="t"),
        "suspend": lambda: writer.suspend_tenant("acme", actor="t"),
        "delete": lambda: writer.delete_tenant("acme", actor="t"),
        "rotate at once": lambda: writer.rotate_key(issued.key.id, timedelta(0), actor="t"),
        "narrow": lambda: writer.change_key(issued.key.id, KeyChange(model_allow=[]), actor="t"),
    }
    async with Auth(reader, RING, clock) as auth:
        assert (await auth.identify(credential(issued))).may_use("m")
        await acts[act]()
        began = time.monotonic()
        async with asyncio.timeout(5):
            while await usable(auth, issued):
                await asyncio.sleep(0.01)
        assert time.monotonic() - began < 1.0
    await here.dispose()
    await there.dispose()


async def usable(auth: Auth, issued: IssuedKey) -> bool:
    try:
        return (await auth.identify(credential(issued))).may_use("m")
    except Unauthenticated:
        return False


async def test_a_hundred_first_requests_are_one_query(
    tenants: Tenants, engine: AsyncEngine, clock: FakeClock
) -> None:
    """A hundred concurrent first requests of a key are one look-up, and later ones none."""
    await tenants.create_tenant("acme", actor="t")
    issued = await tenants.create_key("acme", actor="t")
    async with Auth(tenants, RING, clock, AuthSettings(poll_s=0.9)) as auth:
        with statements(engine) as seen:
            await asyncio.gather(*(auth.identify(credential(issued)) for _ in range(100)))
            assert len([sql for sql in seen if "public_id" in sql]) == 1
            await asyncio.gather(*(auth.identify(credential(issued)) for _ in range(100)))
            invented = Credential(f"sk-ml-{'a' * 18}-{'b' * 40}")
            with pytest.raises(Unauthenticated):
                await auth.identify(invented)
            assert len([sql for sql in seen if "public_id" in sql]) == 1


async def test_known_keys_outlive_a_killed_database() -> None:
    """With PostgreSQL gone: known keys go on, unknown ones and admin writes answer 503, quickly."""
    with services.postgres() as url:
        engine = open_engine(url)
        async with engine.begin() as db:
            await db.run_sync(TenantBase.metadata.create_all)
            folder = (await db.execute(text("SHOW data_directory"))).scalar_one()
        pid = int((Path(folder) / "postmaster.pid").read_text().split()[0])
        tenants = Tenants(engine, RING, SystemClock())
        await tenants.create_tenant("acme", actor="t")
        known = await tenants.create_key("acme", actor="t")
        unknown = await tenants.create_key("acme", actor="t")
        async with Auth(tenants, RING, SystemClock()) as auth:
            await auth.identify(credential(known))
            os.kill(pid, signal.SIGQUIT)  # PostgreSQL's immediate shutdown, as after a crash
            began = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await auth.identify(credential(unknown))
            with pytest.raises(StoreUnavailable):
                await tenants.create_tenant("other", actor="t")
            with pytest.raises(StoreUnavailable):
                await tenants.tenants()
            assert time.monotonic() - began < 5
            await auth.refresh()
            assert auth.is_offline
            assert (await auth.identify(credential(known))).tenant == "acme"
        await engine.dispose()


async def test_a_database_that_is_not_there_or_empty_says_what_to_do(
    database_url: str, postgres_server: str
) -> None:
    """No tables: migrate. No such database or no server: it cannot be reached."""
    for url, hint in (
        (database_url, "meterline migrate"),
        (postgres_server.rsplit("/", 1)[0] + "/nowhere", "cannot be reached"),
        (f"postgresql://postgres@127.0.0.1:{services.free_port()}/x", "cannot be reached"),
    ):
        tenants = Tenants.open(url, RING, FakeClock())
        with pytest.raises(StoreUnavailable, match=hint):
            await tenants.tenants()
        with pytest.raises(StoreUnavailable, match=hint):
            await tenants.create_tenant("acme", actor="t")
        await tenants.close()


def now(clock: FakeClock) -> datetime:
    return datetime.fromtimestamp(clock.now_ns() / 1e9, UTC)


def replace(key: Key, **facts: object) -> Key:
    import msgspec

    return msgspec.structs.replace(key, **facts)


async def test_a_revoked_key_stops_in_every_process_within_a_second(
    tenants: Tenants, database_url: str
) -> None:
    """Two processes that have the key in use refuse it within a second of the revocation, on the
    clock that they share. A machine that is too busy to poll gets another two tries."""
    await tenants.create_tenant("acme", actor="t")
    for last_try in (False, False, True):
        issued = await tenants.create_key("acme", actor="t")
        replicas = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.fakes.auth_replica", database_url),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            for _ in range(2)
        ]
        for replica in replicas:
            assert replica.stdin is not None and replica.stdout is not None
            replica.stdin.write(issued.secret.reveal().encode() + b"\n")
            await replica.stdin.drain()
            assert (await replica.stdout.readline()).startswith(b"taken")
        await tenants.revoke_key(issued.key.id, actor="t")
        revoked = time.time()
        late = []
        for replica in replicas:
            out, _ = await asyncio.wait_for(replica.communicate(), 60)
            answer, at = out.decode().split()
            assert answer == "refused"
            late.append(float(at) - revoked)
        if max(late) <= 1.0 or last_try:
            break
    assert max(late) <= 1.0


async def test_a_rotated_pepper_leaves_every_key_working(
    engine: AsyncEngine, clock: FakeClock
) -> None:
    """A key of the older pepper works beside a new one, and its row is hashed anew when used; a
    ring without the older pepper is refused as long as the database may need it."""
    old = Tenants(engine, RING, clock)
    await old.create_tenant("acme", actor="t")
    first = await old.create_key("acme", actor="t")
    newer = KeyRing(bytes(reversed(range(32))), bytes(range(32)))
    rotated = Tenants(engine, newer, clock)
    await rotated.verify_pepper()
    second = await rotated.create_key("acme", actor="t")
    async with Auth(rotated, newer, SystemClock(), AuthSettings(poll_s=0.02)) as auth:
        assert not await refused(auth, first)
        assert not await refused(auth, second)
        async with asyncio.timeout(20):
            while ("gateway", "key.rehash", f"key/{first.key.id}") not in await audit(engine):
                await asyncio.sleep(0.01)
        assert not await refused(auth, first)
    alone = Tenants(engine, KeyRing(bytes(reversed(range(32)))), clock)
    await alone.verify_pepper()  # what was made last was made under it
    with pytest.raises(Conflict, match="pepper"):
        await Tenants(engine, KeyRing(bytes(32)), clock).verify_pepper()


@pytest.mark.parametrize(
    ("bounds", "param"),
    [
        ({"scopes": ["chat", "dance"]}, "scopes[1]"),
        ({"ip_allow": ["203.0.113.0/24", "203.0.113.1/24"]}, "ip_allow[1]"),
        ({"ip_allow": ["office"]}, "ip_allow[0]"),
        ({"target_allow": ["a b"]}, "target_allow[0]"),
    ],
)
async def test_what_is_no_bound_is_refused_with_its_path(
    bounds: dict[str, list[str]], param: str, sqlite_url: str
) -> None:
    """At creation and at a change, before the database is touched."""
    tenants = Tenants.open(sqlite_url, RING, FakeClock())
    with pytest.raises(BadRequest) as caught:
        await tenants.create_key("acme", actor="t", **bounds)  # type: ignore[arg-type]  # by name
    assert caught.value.param == param
    with pytest.raises(BadRequest) as again:
        await tenants.change_key("k", KeyChange(**bounds), actor="t")  # type: ignore[arg-type]  # by name
    await tenants.close()
    assert again.value.param == param


async def test_a_rotated_key_keeps_its_bounds(tenants: Tenants) -> None:
    """And both are listed, with their tenant's path and the time that the old one has left."""
    await tenants.create_tenant("acme", actor="t")
    await tenants.create_tenant("search", parent="acme", actor="t")
    bounds = {"scopes": ["chat"], "ip_allow": ["192.0.2.0/24"], "target_allow": ["local/*"]}
    first = await tenants.create_key("acme/search", actor="t", **bounds)  # type: ignore[arg-type]  # by name
    second = await tenants.rotate_key(first.key.id, timedelta(hours=1), actor="t")
    old, new = sorted((await tenants.keys("search")).items, key=lambda key: key.state != "rotated")
    assert (old.state, new.state) == ("rotated", "active")
    assert old.grace_until is not None and new.id == second.key.id
    for key in (old, new):
        assert key.tenant == "acme/search"
        assert {name: getattr(key, name) for name in bounds} == bounds
