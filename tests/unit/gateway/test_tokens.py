"""Signed tokens, really signed: what is taken, and everything that must not be."""

import base64
import hashlib
import hmac
import json
import logging
from typing import Any

import httpx
import msgspec
import pytest

from gateway import tokens as said
from gateway.auth import SUSPENDED, Auth, AuthSettings, Credential, read_credential
from gateway.errors import StoreUnavailable, Unauthenticated
from gateway.keys import KeyRing
from gateway.tenants import Ancestor, Identity
from gateway.tokens import Tokens
from gateway.trust import IssuerSettings, issuer_problems
from telemetry.ids import TenantId
from telemetry.redaction import mask
from tests.fakes.clock import FakeClock
from tests.fakes.gateway import Server
from tests.fakes.identity import FakeIdentityStore
from tests.fakes.issuer import Issuer
from tests.unit.gateway.test_auth import identity_of

RING = KeyRing(bytes(range(32)))


class Scene:
    """An issuer, a store with the tenant acme, and the Auth between."""

    def __init__(self, **settings: Any) -> None:
        self.clock = FakeClock()
        self.issuer = Issuer()
        self.store = FakeIdentityStore()
        self.put()
        self.settings = AuthSettings(poll_s=0.9, issuers=(self.issuer.settings(**settings),))

    def put(self, **facts: object) -> Identity:
        identity = identity_of(RING.mint(), **facts)
        self.store._identities.clear()
        self.store.put(identity)
        return identity

    @property
    def now_s(self) -> float:
        return self.clock.now_ns() / 1e9

    def auth(self) -> Auth:
        tokens = Tokens(self.settings.issuers, self.clock, self.issuer.fetch)
        return Auth(self.store, RING, self.clock, self.settings, tokens=tokens)

    def signed(self, **more: Any) -> Credential:
        return Credential(self.issuer.signed(self.now_s, **more))


def part(content: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()


@pytest.mark.parametrize(
    ("kid", "algorithm"), [("rsa-1", "RS256"), ("ec-1", "ES256"), ("ed-1", "EdDSA")]
)
async def test_a_right_token_is_its_tenants(kid: str, algorithm: str) -> None:
    """By each kind of key; the caller is the tenant, and one subject is always one key id."""
    scene = Scene()
    async with scene.auth() as auth:
        caller = await auth.identify(scene.signed(kid=kid, algorithm=algorithm))
        again = await auth.identify(scene.signed(kid=kid, algorithm=algorithm, jti="2"))
        other = await auth.identify(scene.signed(kid=kid, algorithm=algorithm, sub="bob"))
    assert (caller.tenant, caller.scopes) == ("acme", None)
    assert again is caller
    assert other.key_id != caller.key_id
    assert "ann" not in caller.key_id and len(caller.key_id) <= 36
    assert scene.issuer.fetches == 1


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "issuer": ({"iss": "https://evil.example"}, said.NO_ISSUER),
    "no issuer": ({"iss": None}, said.NO_ISSUER),
    "audience": ({"aud": "other"}, said.AUDIENCE),
    "no audience": ({"aud": None}, said.CLAIMS),
    "expired": ({"exp": 1_799_999_960}, said.TOO_LATE),
    "no expiry": ({"exp": None}, said.CLAIMS),
    "expiry as text": ({"exp": "soon"}, said.MALFORMED),
    "not yet": ({"nbf": 1_800_000_060}, said.NOT_YET),
    "from the future": ({"iat": 1_800_000_060}, said.NOT_YET),
    "unknown kid": ({"header": {"kid": "nobody"}}, said.UNKNOWN_KEY),
    "kid of another type": ({"header": {"kid": "ec-1"}}, said.UNKNOWN_KEY),
    "kid of another key": ({"kid": "rsa-2", "header": {"kid": "rsa-1"}}, said.SIGNATURE),
    "algorithm not listed": ({"algorithm": "RS512"}, said.ALGORITHM),
    "critical header": ({"header": {"crit": ["b64"], "b64": True}}, said.MALFORMED),
    "no tenant": ({"tenant": None}, said.NO_TENANT),
    "unknown tenant": ({"tenant": "globex"}, said.NO_TENANT),
    "tenant of a list": ({"tenant": ["acme"]}, said.NO_TENANT),
    "no subject": ({"sub": None}, said.CLAIMS),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_token_is_refused(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """401 with its reason; neither the message nor any log line holds the token."""
    changed, reason = WRONG[case]
    scene = Scene()
    scene.issuer.rotate()
    scene.issuer.hidden.add("rsa-2")
    token = scene.issuer.signed(scene.now_s, **changed)
    with caplog.at_level(logging.DEBUG):
        async with scene.auth() as auth:
            with pytest.raises(Unauthenticated) as caught:
                await auth.identify(Credential(token))
    assert caught.value.message == reason
    assert caught.value.status == 401
    assert token not in caplog.text and token not in repr(caught.value)
    assert token.split(".")[2] not in caplog.text


async def test_a_token_without_a_signature_is_refused() -> None:
    """`none` in any spelling, with or without something in the signature's place."""
    scene = Scene()
    claims = part(scene.issuer.claims(scene.now_s))
    async with scene.auth() as auth:
        for name in ("none", "None", "NONE", "nOnE"):
            for signature in ("", "AAAA"):
                token = f"{part({'alg': name, 'kid': 'rsa-1'})}.{claims}.{signature}"
                with pytest.raises(Unauthenticated):
                    await auth.identify(Credential(token))


async def test_a_public_key_is_never_a_shared_secret() -> None:
    """HS256 with the issuer's public key as the secret: refused, in every form of that key."""
    scene = Scene()
    head = part({"alg": "HS256", "kid": "rsa-1", "typ": "JWT"})
    signed = f"{head}.{part(scene.issuer.claims(scene.now_s))}"
    pem = scene.issuer.public_pem("rsa-1")
    (jwk,) = [k for k in json.loads(scene.issuer.jwks())["keys"] if k["kid"] == "rsa-1"]
    async with scene.auth() as auth:
        for secret in (pem, pem.strip(), json.dumps(jwk).encode(), jwk["n"].encode()):
            digest = hmac.new(secret, signed.encode(), hashlib.sha256).digest()
            token = f"{signed}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"
            with pytest.raises(Unauthenticated) as caught:
                await auth.identify(Credential(token))
            assert caught.value.message == said.ALGORITHM


@pytest.mark.parametrize("index", [0, 1, 2])
async def test_a_changed_token_is_refused(index: int) -> None:
    """Any part changed after signing."""
    scene = Scene()
    parts = scene.issuer.signed(scene.now_s).split(".")
    parts[index] = parts[index][:-4] + ("AAAA" if parts[index][-4:] != "AAAA" else "BBBB")
    async with scene.auth() as auth:
        with pytest.raises(Unauthenticated):
            await auth.identify(Credential(".".join(parts)))


@pytest.mark.parametrize("text", ["eyJ..", "eyJhIjoxfQ.eyJhIjoxfQ.", "eyJ.eyJ.eyJ", "eyJ\x00.a.b"])
async def test_what_is_no_token_is_refused(text: str) -> None:
    """Whatever looks like one and is none."""
    scene = Scene()
    async with scene.auth() as auth:
        with pytest.raises(Unauthenticated):
            await auth.identify(Credential(text))
    assert scene.issuer.fetches == 0


async def test_clocks_may_differ_by_the_leeway() -> None:
    """Thirty seconds either way, and a token that was taken is refused once it has ended."""
    scene = Scene()
    async with scene.auth() as auth:
        assert await auth.identify(scene.signed(nbf=int(scene.now_s) + 29))
        credential = scene.signed(exp=int(scene.now_s) - 29)
        assert await auth.identify(credential)
        scene.clock.advance(2)
        with pytest.raises(Unauthenticated) as caught:
            await auth.identify(credential)
    assert caught.value.message == said.TOO_LATE


async def test_a_new_key_of_the_issuer_is_fetched_once() -> None:
    """An unknown kid asks the issuer at most every ten seconds, so a flood of them asks once."""
    scene = Scene()
    async with scene.auth() as auth:
        assert await auth.identify(scene.signed())
        scene.issuer.rotate()
        scene.clock.advance(11)
        assert await auth.identify(scene.signed(kid="rsa-2"))
        assert scene.issuer.fetches == 2
        for place in range(20):
            with pytest.raises(Unauthenticated):
                await auth.identify(scene.signed(header={"kid": f"k{place}"}))
        assert scene.issuer.fetches == 2


async def test_known_keys_go_on_while_the_issuer_is_away_and_no_longer() -> None:
    """For the time in the settings; then tokens cannot be checked, and that is a 503."""
    scene = Scene(keys_age_s=60.0, keys_offline_s=600.0)
    async with scene.auth() as auth:
        assert await auth.identify(scene.signed())
        scene.issuer.down = True
        scene.clock.advance(590)
        await auth.refresh()
        assert await auth.identify(scene.signed(jti="2"))
        scene.clock.advance(20)
        await auth.refresh()
        with pytest.raises(StoreUnavailable):
            await auth.identify(scene.signed(jti="3"))
        scene.issuer.down = False
        scene.clock.advance(11)
        assert await auth.identify(scene.signed(jti="4"))


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"keys": 7}', b'{"keys": [7]}', b"<html>"])
async def test_a_key_set_that_is_none_is_an_outage(raw: bytes) -> None:
    """What the issuer answers may be anything."""
    scene = Scene()
    scene.issuer.raw = raw
    async with scene.auth() as auth:
        with pytest.raises((StoreUnavailable, Unauthenticated)):
            await auth.identify(scene.signed())


async def test_claims_are_mapped_to_tenants_and_scopes() -> None:
    """By a table of values, from inside other claims; scopes of others are left alone."""
    scene = Scene(
        tenant_claim="meterline.group",
        tenants={"grp-7": "acme"},
        scope_claim="scope",
        scope_prefix="meterline:",
    )
    async with scene.auth() as auth:
        caller = await auth.identify(
            scene.signed(
                tenant=None, meterline={"group": "grp-7"}, scope="openid meterline:chat other"
            )
        )
        assert caller.scopes == {"chat"}
        none = await auth.identify(scene.signed(tenant=None, meterline={"group": "grp-7"}))
        assert none.scopes == frozenset()
        for changed in ({"meterline": {"group": "acme"}}, {"meterline": "grp-7"}):
            with pytest.raises(Unauthenticated):
                await auth.identify(scene.signed(tenant=None, **changed))


async def test_an_issuer_is_kept_to_its_part_of_the_tree() -> None:
    """Tokens for a tenant outside of `within` are refused, whatever they claim."""
    above = Ancestor(tenant_id=TenantId("o"), tenant="org")
    for within, is_in in (("org", True), ("org/acme", True), ("t", True), ("o", True),
                          ("acme", False), ("other", False)):  # fmt: skip
        scene = Scene(within=within)
        scene.put(ancestors=(above,))
        async with scene.auth() as auth:
            if is_in:
                assert await auth.identify(scene.signed())
            else:
                with pytest.raises(Unauthenticated):
                    await auth.identify(scene.signed())


async def test_a_suspended_tenants_tokens_are_refused_within_a_poll() -> None:
    """A change in the store reaches tokens as it reaches keys."""
    scene = Scene()
    async with scene.auth() as auth:
        assert await auth.identify(scene.signed())
        above = Ancestor(tenant_id=TenantId("o"), tenant="org", state="suspended")
        scene.put(ancestors=(above,))
        await auth.refresh()
        with pytest.raises(Unauthenticated) as caught:
            await auth.identify(scene.signed())
        assert caught.value.message == SUSPENDED
        scene.put()
        await auth.refresh()
        assert await auth.identify(scene.signed())
        scene.store.gone = True
        await auth.refresh()
        assert await auth.identify(scene.signed())  # known: goes on
        with pytest.raises(StoreUnavailable):
            await auth.identify(scene.signed(tenant="globex"))


async def test_without_issuers_no_token_is_taken() -> None:
    """A token is then a wrong key like any other."""
    scene = Scene()
    async with Auth(scene.store, RING, scene.clock, AuthSettings(poll_s=0.9)) as auth:
        with pytest.raises(Unauthenticated):
            await auth.identify(scene.signed())


def test_a_long_token_is_read_and_a_longer_one_is_not() -> None:
    """Tokens may have 8192 characters."""
    fine = [(b"authorization", b"Bearer eyJ" + b"a" * 8000)]
    assert len(read_credential(fine).text) == 8003
    with pytest.raises(Unauthenticated):
        read_credential([(b"authorization", b"Bearer eyJ" + b"a" * 9000)])


def test_tokens_are_masked_wherever_they_slip_into_text() -> None:
    """Header, claims and signature."""
    token = Issuer().signed(1_800_000_000)
    masked = mask(f"could not decode {token} of ann")
    assert all(piece not in masked for piece in token.split("."))
    assert masked == "could not decode eyJ*** of ann"


def test_contradictory_issuers_are_refused_with_their_path() -> None:
    """A name twice, a plain URL, an audience that is a pattern."""
    right = Issuer().settings()
    wrong = [
        right,
        right,
        msgspec.structs.replace(right, issuer="b", jwks_url="http://x/keys", audience=("*",)),
    ]
    assert [line.split(":")[0] for line in issuer_problems(wrong)] == [
        "auth.issuers[1].issuer",
        "auth.issuers[2].jwks_url",
        "auth.issuers[2].audience",
    ]


async def test_the_address_of_the_keys_obeys_the_rules_for_connections_out() -> None:
    """No internal address unless it is allowed, no redirect, nothing without end."""
    answers: dict[str, tuple[int, list[tuple[bytes, bytes]], bytes]] = {
        "/keys": (200, [], b'{"keys": []}'),
        "/moved": (302, [(b"location", b"/keys")], b""),
        "/long": (200, [], b"a" * 600_000),
    }

    async def provider(scope: Any, receive: Any, send: Any) -> None:
        status, head, body = answers[scope["path"]]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": body})

    async with Server(provider, grace_s=1) as server:

        def at(path: str, *, allow_private: bool = True) -> IssuerSettings:
            url = f"{server.base_url}{path}"
            return Issuer().settings(jwks_url=url, allow_private=allow_private)

        assert await said.fetch_keys(at("/keys")) == b'{"keys": []}'
        with pytest.raises(httpx.HTTPError, match="internal address"):
            await said.fetch_keys(at("/keys", allow_private=False))
        with pytest.raises(httpx.HTTPError, match="302"):
            await said.fetch_keys(at("/moved"))
        with pytest.raises(httpx.HTTPError, match="too long"):
            await said.fetch_keys(at("/long"))
