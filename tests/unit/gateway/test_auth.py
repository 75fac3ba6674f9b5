"""Credentials, callers and the admin, with a key store in memory."""

import asyncio
import logging
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.auth import (
    AMBIGUOUS,
    EXPIRED,
    MISSING,
    REVOKED,
    SUSPENDED,
    WRONG,
    Admin,
    AdminKeyInvalid,
    Auth,
    AuthSettings,
    Credential,
    read_credential,
)
from gateway.errors import Forbidden, StoreUnavailable, Unauthenticated
from gateway.keys import KEY, KeyRing, MintedKey, mint_admin_key
from gateway.tenants import Identity
from telemetry.ids import KeyId, TenantId
from tests.fakes.clock import FakeClock
from tests.fakes.identity import FakeIdentityStore

RING = KeyRing(bytes(range(32)))
NOW = datetime.fromtimestamp(1_800_000_000, UTC)  # FakeClock's
SLOW_POLL = AuthSettings(poll_s=0.9)


def identity_of(minted: MintedKey, **facts: object) -> Identity:
    identity = Identity(
        key_id=KeyId("k"),
        public_id=minted.public_id,
        secret_hmac=minted.digest,
        tenant_id=TenantId("t"),
        tenant_name="acme",
        tenant_state="active",
        model_allow=None,
        expires_at=None,
        revoked_at=None,
        grace_until=None,
    )
    return msgspec.structs.replace(identity, **facts)


class Desk:
    """One Auth over one fake store, and a key."""

    def __init__(self, settings: AuthSettings = SLOW_POLL, **facts: object) -> None:
        self.clock = FakeClock()
        self.store = FakeIdentityStore()
        self.minted = RING.mint()
        self.credential = Credential(self.minted.secret.reveal())
        self.store.put(identity_of(self.minted, **facts))
        self.auth = Auth(self.store, RING, self.clock, settings)


def headers(*pairs: tuple[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in pairs]


# ----------------------------------------------------------------------------------- credentials


@pytest.mark.parametrize(
    "pairs",
    [
        [("authorization", "Bearer k-1")],
        [("authorization", "bearer   k-1 ")],
        [("x-api-key", "k-1")],
        [("api-key", "k-1")],
        [("authorization", "Bearer k-1"), ("x-api-key", "k-1"), ("api-key", "k-1")],
        [("authorization", "Bearer "), ("x-api-key", "k-1")],
        [("authorization", "Basic dXNlcjpwdw=="), ("x-api-key", "k-1")],
        [("x-api-key", ""), ("authorization", "Bearer k-1")],
        [("cookie", "a=b"), ("api-key", "k-1"), ("host", "x")],
    ],
)
def test_the_key_is_found_where_clients_put_it(pairs: list[tuple[str, str]]) -> None:
    """Bearer, x-api-key and api-key carry the key; an empty one is none."""
    assert read_credential(headers(*pairs)).text == "k-1"


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], MISSING),
        ([("authorization", "")], MISSING),
        ([("authorization", "Bearer")], MISSING),
        ([("authorization", "Basic dXNlcjpwdw==")], MISSING),
        ([("authorization", "k-1")], MISSING),
        ([("authorization", "Bearer k-1"), ("x-api-key", "k-2")], AMBIGUOUS),
        ([("authorization", "Bearer k-1"), ("authorization", "Bearer k-2")], AMBIGUOUS),
        ([("x-api-key", "k" * 513)], WRONG),
        ([("authorization", "Bearer " + "k" * 513)], WRONG),
        ([("x-api-key", "k\u00e9y")], WRONG),
    ],
)
def test_no_key_or_several_or_none_that_could_be_one(
    pairs: list[tuple[str, str]], message: str
) -> None:
    """Nothing, too much, too long and non-ASCII credentials are refused, saying what to send."""
    with pytest.raises(Unauthenticated) as caught:
        read_credential(headers(*pairs))
    assert caught.value.message == message


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"authorization", b"x-api-key", b"api-key", b"other"]), st.binary()
        ),
        max_size=4,
    )
)
def test_any_bytes_give_a_bounded_ascii_credential_or_a_401(
    pairs: list[tuple[bytes, bytes]],
) -> None:
    """Arbitrary header bytes never raise anything else."""
    try:
        text = read_credential(pairs).text
    except Unauthenticated:
        return
    assert 0 < len(text) <= 512
    assert text.isascii()


def test_a_credential_does_not_show_itself() -> None:
    """Logging a credential logs no key."""
    credential = Credential("sk-ml-canary")
    shown = f"{credential} {credential!r} {credential.__rich_repr__()!r}"
    assert "canary" not in shown


# ---------------------------------------------------------------------------------------- callers


async def test_a_key_identifies_its_caller() -> None:
    """The right key gives tenant, key and what it may use."""
    desk = Desk(model_allow=["assistant", "small-*"])
    async with desk.auth as auth:
        caller = await auth.identify(desk.credential)
    assert (caller.tenant_id, caller.tenant, caller.key_id) == ("t", "acme", "k")
    assert caller.may_use("assistant")
    assert caller.may_use("small-2")
    assert not caller.may_use("large")


async def test_a_key_without_a_list_may_use_all() -> None:
    """Absent means no restriction."""
    desk = Desk()
    async with desk.auth as auth:
        assert (await auth.identify(desk.credential)).may_use("anything")


GOOD = RING.mint().secret.reveal()


@given(
    st.one_of(
        st.text(),
        st.from_regex(KEY),
        st.from_regex(KEY, fullmatch=True),
        st.builds(lambda a, b: a + GOOD + b, st.text(max_size=3), st.text(max_size=3)),
    )
)
@example(GOOD + "\n")
@example("\n" + GOOD)
@example(GOOD.replace("sk-ml-", "SK-ML-"))
@example("' OR 1=1 --")
@example("")
async def test_nothing_but_a_key_of_our_making_reaches_the_store(text: str) -> None:
    """Whatever is sent, the store is asked only for ids that match the grammar and the tag."""
    store = FakeIdentityStore()
    async with Auth(store, RING, FakeClock(), SLOW_POLL) as auth:
        with pytest.raises(Unauthenticated) as caught:
            await auth.identify(Credential(text))
    assert caught.value.message == WRONG
    match = KEY.fullmatch(text)
    if match is None or not RING.made(match[1]):
        assert store.asked == []
    else:
        assert store.asked == [match[1]]


async def test_unknown_id_and_wrong_secret_get_the_same_answer() -> None:
    """Nobody learns from the message whether a public id exists."""
    desk = Desk()
    wrong = f"sk-ml-{desk.minted.public_id}-{'A' * 40}"
    stranger = RING.mint().secret.reveal()
    async with desk.auth as auth:
        messages = set()
        for text in (wrong, stranger, wrong, stranger, "sk-ml-nonsense"):
            with pytest.raises(Unauthenticated) as caught:
                await auth.identify(Credential(text))
            messages.add(caught.value.message)
        await auth.identify(desk.credential)
    assert messages == {WRONG}


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"revoked_at": NOW}, REVOKED),
        ({"tenant_state": "suspended"}, SUSPENDED),
        ({"tenant_state": "deleted"}, REVOKED),
        ({"expires_at": NOW}, EXPIRED),
        ({"grace_until": NOW, "expires_at": NOW + timedelta(days=1)}, EXPIRED),
        ({"expires_at": NOW, "grace_until": NOW + timedelta(days=1)}, EXPIRED),
    ],
)
async def test_why_a_key_is_refused_is_told_to_its_holder_only(
    facts: dict[str, object], message: str
) -> None:
    """With the right secret the reason is given; with a wrong one it is not."""
    desk = Desk(**facts)
    async with desk.auth as auth:
        with pytest.raises(Unauthenticated) as caught:
            await auth.identify(desk.credential)
        with pytest.raises(Unauthenticated) as guessed:
            await auth.identify(Credential(f"sk-ml-{desk.minted.public_id}-{'A' * 40}"))
    assert caught.value.message == message
    assert guessed.value.message == WRONG


async def test_a_remembered_key_expires_on_time() -> None:
    """Expiry needs no look-up and no change in the store."""
    desk = Desk(expires_at=NOW + timedelta(seconds=10))
    async with desk.auth as auth:
        desk.clock.advance(9.999999)
        await auth.identify(desk.credential)
        desk.clock.advance(0.000001)
        with pytest.raises(Unauthenticated, match="expired"):
            await auth.identify(desk.credential)
    assert len(desk.store.asked) == 1


# ------------------------------------------------------------------------- the memory in between


async def test_a_hundred_first_requests_ask_once() -> None:
    """Concurrent requests with the same unknown key share one question."""
    desk = Desk()
    async with desk.auth as auth:
        desk.store.delay_s = 0.01
        callers = await asyncio.gather(*(auth.identify(desk.credential) for _ in range(100)))
    assert len(desk.store.asked) == 1
    assert {caller.key_id for caller in callers} == {"k"}


async def test_a_hit_does_not_wait() -> None:
    """A remembered key is identified without giving up the event loop once."""
    desk = Desk()
    async with desk.auth as auth:
        await auth.identify(desk.credential)
        step = auth.identify(desk.credential)
        with pytest.raises(StopIteration) as finished:
            step.send(None)
    assert finished.value.value.key_id == "k"
    assert len(desk.store.asked) == 1


async def test_the_first_of_many_may_leave() -> None:
    """When the request that asks is cancelled, another one asks and all others get the answer."""
    desk = Desk()
    async with desk.auth as auth:
        desk.store.delay_s = 0.02
        first, *others = [asyncio.create_task(auth.identify(desk.credential)) for _ in range(10)]
        await asyncio.sleep(0.005)
        first.cancel()
        callers = await asyncio.gather(*others)
    assert first.cancelled()
    assert len(callers) == 9
    assert len(desk.store.asked) == 2


async def test_a_waiting_request_may_leave() -> None:
    """Cancelling one that waits does not disturb the one that asks."""
    desk = Desk()
    async with desk.auth as auth:
        desk.store.delay_s = 0.02
        first, second = [asyncio.create_task(auth.identify(desk.credential)) for _ in range(2)]
        await asyncio.sleep(0.005)
        second.cancel()
        assert (await first).key_id == "k"
    assert second.cancelled()


async def test_a_change_is_seen_at_the_next_poll_and_only_that_key_is_asked_again() -> None:
    """A revoked key is refused after the poll; others stay remembered."""
    desk = Desk(AuthSettings(poll_s=0.01))
    other = RING.mint()
    desk.store.put(identity_of(other, key_id=KeyId("other")))
    async with desk.auth as auth:
        await auth.identify(desk.credential)
        await auth.identify(Credential(other.secret.reveal()))
        desk.store.put(identity_of(desk.minted, revoked_at=NOW))
        async with asyncio.timeout(5):
            while not await refused(auth, desk.credential):
                await asyncio.sleep(0.005)
        await auth.identify(Credential(other.secret.reveal()))
    assert desk.store.asked == [desk.minted.public_id, other.public_id, desk.minted.public_id]


async def refused(auth: Auth, credential: Credential) -> bool:
    try:
        await auth.identify(credential)
    except Unauthenticated:
        return True
    return False


async def test_an_answer_older_than_a_change_is_not_remembered() -> None:
    """A slow question that began before a revocation and ended after the poll leaves nothing."""
    desk = Desk()
    async with desk.auth as auth:
        desk.store.delay_s = 0.03
        slow = asyncio.create_task(auth.identify(desk.credential))
        await asyncio.sleep(0.005)
        desk.store.delay_s = 0
        desk.store.put(identity_of(desk.minted, revoked_at=NOW))
        await auth.refresh()
        assert (await slow).key_id == "k"  # it asked before the change
        assert await refused(auth, desk.credential)


@pytest.mark.parametrize("how", ["too many", "rewound"])
async def test_when_changes_cannot_be_listed_all_is_forgotten(how: str) -> None:
    """After too many changes, or in a restored database, every key is asked for again."""
    desk = Desk()
    async with desk.auth as auth:
        await auth.identify(desk.credential)
        desk.store.too_many = how == "too many"
        desk.store.number += 1 if how == "too many" else -1
        await auth.refresh()
        await auth.identify(desk.credential)
    assert len(desk.store.asked) == 2


async def test_keys_remembered_are_bounded_and_the_idlest_goes() -> None:
    """Beyond `max_keys` the key that was not used longest is forgotten."""
    desk = Desk(AuthSettings(poll_s=0.9, max_keys=2))
    second, third = RING.mint(), RING.mint()
    desk.store.put(identity_of(second))
    desk.store.put(identity_of(third))
    async with desk.auth as auth:
        await auth.identify(desk.credential)
        await auth.identify(Credential(second.secret.reveal()))
        await auth.identify(desk.credential)
        await auth.identify(Credential(third.secret.reveal()))
        desk.store.asked.clear()
        await auth.identify(desk.credential)
        assert desk.store.asked == []
        await auth.identify(Credential(second.secret.reveal()))
        assert desk.store.asked == [second.public_id]


async def test_keys_that_do_not_exist_are_remembered_and_bounded() -> None:
    """An id without a row is asked for once, until newer ones push it out or it is created."""
    desk = Desk(AuthSettings(poll_s=0.9, max_unknown=2))
    strangers = [RING.mint() for _ in range(3)]
    async with desk.auth as auth:
        for minted in (strangers[0], strangers[0], strangers[1], strangers[2], strangers[0]):
            assert await refused(auth, Credential(minted.secret.reveal()))
        asked = [minted.public_id for minted in (*strangers, strangers[0])]
        assert desk.store.asked == asked
        desk.store.put(identity_of(strangers[0]))
        await auth.refresh()
        await auth.identify(Credential(strangers[0].secret.reveal()))


# ------------------------------------------------------------------------------ the store is gone


async def test_known_keys_outlive_the_store_for_a_bounded_time() -> None:
    """Known keys go on for `offline_s`, unknown ones answer 503, and invented ones stay 401."""
    desk = Desk(AuthSettings(poll_s=0.9, offline_s=60))
    async with desk.auth as auth:
        await auth.identify(desk.credential)
        desk.store.gone = True
        await auth.refresh()
        assert auth.is_offline
        desk.clock.advance(60)
        await auth.identify(desk.credential)
        with pytest.raises(StoreUnavailable):
            await auth.identify(Credential(RING.mint().secret.reveal()))
        assert await refused(auth, Credential(f"sk-ml-{'a' * 18}-{'b' * 40}"))
        desk.clock.advance(0.001)
        with pytest.raises(StoreUnavailable):
            await auth.identify(desk.credential)
        desk.store.gone = False
        await auth.refresh()
        assert not auth.is_offline
        await auth.identify(desk.credential)
    assert len(desk.store.asked) == 1


async def test_what_was_revoked_during_the_outage_is_seen_after_it() -> None:
    """The first poll that succeeds brings all changes since the last one that did."""
    desk = Desk()
    async with desk.auth as auth:
        await auth.identify(desk.credential)
        desk.store.gone = True
        await auth.refresh()
        desk.store.put(identity_of(desk.minted, revoked_at=NOW))
        await auth.identify(desk.credential)
        desk.store.gone = False
        await auth.refresh()
        assert await refused(auth, desk.credential)


async def test_all_who_wait_hear_that_the_store_went() -> None:
    """A question that fails, fails for all who share it; nothing is remembered of it."""
    desk = Desk(AuthSettings(poll_s=0.9, query_timeout_s=0.02))
    async with desk.auth as auth:
        desk.store.delay_s = 1
        answers = await asyncio.gather(
            *(auth.identify(desk.credential) for _ in range(5)), return_exceptions=True
        )
        assert [type(answer) for answer in answers] == [StoreUnavailable] * 5
        assert len(desk.store.asked) == 1
        desk.store.delay_s = 0
        await auth.identify(desk.credential)


async def test_an_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Going and coming back are one line each, however long it lasts."""
    desk = Desk()
    desk.store.gone = True
    with caplog.at_level(logging.INFO, logger="gateway.auth"):
        async with desk.auth as auth:
            await auth.refresh()
            await auth.refresh()
            desk.store.gone = False
            await auth.refresh()
            await auth.refresh()
    assert [record.message for record in caplog.records] == ["key store gone", "key store back"]


async def test_an_auth_that_never_polled_trusts_nothing() -> None:
    """Before the first answer of the store, keys are not accepted."""
    desk = Desk()
    with pytest.raises(StoreUnavailable):
        await desk.auth.identify(desk.credential)


# ------------------------------------------------------------------------------------------ admin


def test_the_admin_key_opens_and_nothing_else() -> None:
    """Only the exact key passes; a tenant's key never does."""
    key = mint_admin_key().reveal()
    admin = Admin(key)
    admin.check(Credential(key))
    for text in (key[:-1], key + "x", key.lower(), GOOD, "x"):
        with pytest.raises(Unauthenticated) as caught:
            admin.check(Credential(text))
        assert key not in caught.value.message


async def test_the_admin_key_is_no_tenants_key() -> None:
    """On a tenant's route the admin key is an incorrect key."""
    desk = Desk()
    async with desk.auth as auth:
        assert await refused(auth, Credential(mint_admin_key().reveal()))
    assert desk.store.asked == []


@pytest.mark.parametrize("key", ["", "short", "k" * 15, "k\u00e9y" * 10, GOOD])
def test_a_poor_admin_key_is_refused_at_start(key: str) -> None:
    """Short, non-ASCII and tenant-like admin keys are mistakes in the config."""
    with pytest.raises(AdminKeyInvalid) as caught:
        Admin(key)
    assert key == "" or key not in str(caught.value)


def test_admin_does_not_hold_the_key() -> None:
    """Dumping the object shows a hash."""
    key = mint_admin_key().reveal()
    assert key not in repr(vars(Admin(key)))


# ------------------------------------------------------------------------- addresses and scopes


async def test_a_key_bound_to_addresses_is_refused_from_elsewhere() -> None:
    """By the socket, or by what a trusted proxy says; from an unknown place too."""
    settings = AuthSettings(poll_s=0.9, trusted_proxies=("10.0.0.0/8",))
    desk = Desk(settings, ip_allow=["203.0.113.0/24", "2001:db8::/32"])
    text = desk.minted.secret.reveal()
    async with desk.auth as auth:
        for peer, forwarded in (
            ("203.0.113.9", ()),
            ("2001:db8::9", ()),
            ("10.0.0.1", ("203.0.113.9",)),
        ):
            assert await auth.identify(Credential(text, peer, forwarded))
        for peer, forwarded in (
            ("192.0.2.1", ()),
            ("192.0.2.1", ("203.0.113.9",)),
            ("10.0.0.1", ("203.0.113.9, 192.0.2.1",)),
            (None, ()),
        ):
            with pytest.raises(Unauthenticated) as caught:
                await auth.identify(Credential(text, peer, forwarded))
            assert caught.value.code == "ip_not_authorized"


async def test_a_key_with_an_empty_list_of_addresses_is_never_taken() -> None:
    """None allowed is not the same as no list."""
    desk = Desk(SLOW_POLL, ip_allow=[])
    async with desk.auth as auth:
        with pytest.raises(Unauthenticated):
            await auth.identify(Credential(desk.minted.secret.reveal(), "203.0.113.9"))


async def test_scopes_and_targets_reach_the_caller() -> None:
    """What is not listed is refused with its name; without a list all is allowed."""
    desk = Desk(SLOW_POLL, scopes=["chat"], target_allow=["local/*", "openai/gpt-4o"])
    async with desk.auth as auth:
        caller = await auth.identify(Credential(desk.minted.secret.reveal()))
    caller.require("chat")
    with pytest.raises(Forbidden, match="`models`"):
        caller.require("models")
    assert caller.may_reach("local", "any")
    assert caller.may_reach("openai", "gpt-4o")
    assert not caller.may_reach("openai", "gpt-4o-mini")
    everything = msgspec.structs.replace(caller, scopes=None, target_allow=None)
    everything.require("models")
    assert everything.may_reach("openai", "gpt-4o-mini")


def test_read_credential_carries_where_it_came_from() -> None:
    """The socket's other end, and each `x-forwarded-for` in its order."""
    headers = [
        (b"authorization", b"Bearer k"),
        (b"x-forwarded-for", b"192.0.2.1"),
        (b"x-forwarded-for", b"192.0.2.2"),
    ]
    found = read_credential(headers, ("203.0.113.9", 4711))
    assert (found.peer, found.forwarded) == ("203.0.113.9", ("192.0.2.1", "192.0.2.2"))


# ------------------------------------------------------------------------------ rotated peppers


async def test_a_key_of_an_older_pepper_is_taken_and_hashed_anew() -> None:
    """It works at once, and after the next poll the store has it under the newest pepper."""
    desk = Desk(AuthSettings(poll_s=0.02))
    newer = KeyRing(bytes(reversed(range(32))), bytes(range(32)))
    text = desk.minted.secret.reveal()
    async with Auth(desk.store, newer, desk.clock, AuthSettings(poll_s=0.02)) as auth:
        assert await auth.identify(Credential(text))
        async with asyncio.timeout(10):
            while desk.store._identities[desk.minted.public_id].secret_hmac == desk.minted.digest:
                await asyncio.sleep(0.005)
        assert await auth.identify(Credential(text))
        with pytest.raises(Unauthenticated):
            await auth.identify(Credential(text[:-1] + ("a" if text[-1] != "a" else "b")))
    known = desk.store._identities[desk.minted.public_id]
    assert known.secret_hmac == newer.digest(text)


async def test_a_key_whose_pepper_is_gone_needs_a_look_up_that_is_paced() -> None:
    """Once hashed anew it outlives its pepper, if foreign ids may be asked for; a flood of them
    costs so many look-ups a second and no more."""
    desk = Desk()
    only = KeyRing(bytes(reversed(range(32))))
    text = desk.minted.secret.reveal()
    known = desk.store._identities[desk.minted.public_id]
    desk.store.put(msgspec.structs.replace(known, secret_hmac=only.digest(text)))
    async with Auth(desk.store, only, desk.clock, SLOW_POLL) as auth:
        with pytest.raises(Unauthenticated):
            await auth.identify(Credential(text))
    assert desk.store.asked == []
    settings = AuthSettings(poll_s=0.9, foreign_ids_per_s=2)
    async with Auth(desk.store, only, desk.clock, settings) as auth:
        assert await auth.identify(Credential(text))
        for _ in range(20):
            with pytest.raises(Unauthenticated):
                await auth.identify(Credential(RING.mint().secret.reveal()))
    assert len(desk.store.asked) == 2
