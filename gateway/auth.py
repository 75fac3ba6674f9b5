"""Who is asking: the credential in the headers, the Caller behind a key, and the admin.

Must not know SQL, HTTP statuses or what the caller wants. Invariants: nothing but a well-formed key
of our own making reaches the store; every request compares an HMAC in constant time, also for a
key that does not exist; a change to a key or tenant is obeyed within `poll_s` plus one query on
every replica; with the store gone, keys that are known here go on for `offline_s` and no longer.

A hit in the cache never waits. The store is asked once per unknown key, however many requests
bring it at once, and one number per `poll_s` tells whether anything changed.
"""

import asyncio
import hashlib
import hmac
import logging
from collections import OrderedDict
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final, Protocol, Self

from msgspec import Struct
from msgspec.structs import replace
from typing_extensions import override

from gateway.admins import WRONG as WRONG_ADMIN
from gateway.admins import Admins
from gateway.allowances import Budget, Limit
from gateway.errors import Forbidden, NotFound, StoreUnavailable, Unauthenticated
from gateway.keys import ADMIN_KEY, KEY, KeyRing, ModelAllow
from gateway.roles import Principal
from gateway.snapshot import KeySnapshot, Remembered
from gateway.tenants import Ancestor, Identity
from gateway.tokens import MAX_TOKEN_CHARS, NO_TENANT, Claims, Tokens, is_token
from gateway.trust import AuthSettings, Network, client_address, networks, within
from telemetry.clock import Clock
from telemetry.ids import KeyId, TenantId

log = logging.getLogger(__name__)

MAX_CREDENTIAL_CHARS: Final = 512  # of keys; tokens may be longer
MIN_ADMIN_KEY_CHARS: Final = 16

MISSING: Final = "No API key given. Send it as `Authorization: Bearer sk-ml-…`."
AMBIGUOUS: Final = "Several different API keys given. Send one, as `Authorization: Bearer sk-ml-…`."
WRONG: Final = "Incorrect API key given. Check it, or ask your administrator for a new one."
REVOKED: Final = "This API key is revoked. Ask your administrator for a new one."
EXPIRED: Final = "This API key has expired. Ask your administrator for a new one."
SUSPENDED: Final = "The account of this API key is suspended. Ask your administrator."
NO_ROLE: Final = "The bearer token has no role here."

ADDRESS: Final = "This API key may not be used from your address. Ask your administrator."

_SAVE_EVERY_NS: Final = 30_000_000_000
_NEVER: Final = 1 << 63  # nanoseconds; the year 2262


class Credential(Struct, frozen=True, gc=False):
    """What the client sent as its key, and where from. Not yet checked, never shown."""

    text: str
    peer: str | None = None  # the socket's other end
    forwarded: tuple[str, ...] = ()  # `x-forwarded-for`, as it came

    @override
    def __repr__(self) -> str:
        return "Credential(…)"

    @override
    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return []


class Caller(Struct, frozen=True, kw_only=True):
    """Who asks, as far as every later stage needs to know."""

    tenant_id: TenantId
    tenant: str
    key_id: KeyId
    model_allow: ModelAllow | None  # None: all
    limits: tuple[Limit, ...] = ()  # of the tenant; which of them apply is decided at admission
    budgets: tuple[Budget, ...] = ()
    ancestors: tuple[Ancestor, ...] = ()  # nearest first; the limits and budgets of each bind too
    target_allow: ModelAllow | None = None  # of BACKEND/MODEL; None: all
    scopes: frozenset[str] | None = None  # None: all

    def may_use(self, model: str) -> bool:
        return self.model_allow is None or self.model_allow.allows(model)

    def may_reach(self, backend: str, model: str) -> bool:
        return self.target_allow is None or self.target_allow.allows(f"{backend}/{model}")

    def require(self, scope: str) -> None:
        """Raises Forbidden unless the key's scopes have this one."""
        if self.scopes is not None and scope not in self.scopes:
            raise Forbidden(
                f"This API key may not be used for `{scope}`. Use another key, or ask your "
                "administrator to add the scope.",
                code="insufficient_scope",
            )


class IdentityStore(Protocol):
    """What `Tenants` answers. Raises StoreUnavailable only."""

    async def identity(self, public_id: str) -> Identity | None: ...

    async def version(self) -> int: ...

    async def changed_since(self, version: int) -> list[str] | None: ...

    async def rehash(self, public_id: str, old: bytes, new: bytes) -> None: ...

    async def tenant_identity(self, ref: str) -> Identity | None: ...


def read_credential(
    headers: Iterable[tuple[bytes, bytes]], client: tuple[str, int] | None = None
) -> Credential:
    """The one key in ASGI headers (names in lower case). OpenAI clients send `authorization`,
    Anthropic's `x-api-key`, Azure's `api-key`; the same key twice is one key. `client`: as ASGI
    gives it; without it a key that is bound to addresses is refused."""
    found: str | None = None
    forwarded: list[str] = []
    for name, value in headers:
        if name == b"authorization":
            text = _bearer(value)
        elif name in (b"x-api-key", b"api-key"):
            text = _text(value)
        elif name == b"x-forwarded-for":
            forwarded.append(value.decode("latin-1"))
            continue
        else:
            continue
        if found is not None and text and text != found:
            raise Unauthenticated(AMBIGUOUS)
        found = text or found
    if found is None:
        raise Unauthenticated(MISSING)
    return Credential(found, None if client is None else client[0], tuple(forwarded))


def _bearer(value: bytes) -> str:
    """The token; nothing for another scheme or for a key without `Bearer` before it."""
    scheme, _, token = _text(value).partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _text(value: bytes) -> str:
    most = MAX_TOKEN_CHARS if b"eyJ" in value[:16] else MAX_CREDENTIAL_CHARS
    if len(value) > most or not value.isascii():
        raise Unauthenticated(WRONG)
    return value.decode("ascii").strip()


class _Known(Struct, frozen=True, kw_only=True):
    """What is remembered of one public id: that there is no such key, too (`caller` None)."""

    digest: bytes
    caller: Caller | None
    identity: Identity | None = None  # as the store told it, for the snapshot
    ip_allow: tuple[Network, ...] | None = None  # None: from anywhere
    refusal: str | None = None  # told only to whoever has the secret
    ends_ns: int = _NEVER  # expiry or end of grace, Unix time

    __repr__ = object.__repr__


class Auth:
    """Turns credentials into Callers. Use as an async context manager: it polls while open.

    async with Auth(tenants, ring, clock, settings) as auth:
        caller = await auth.identify(read_credential(scope["headers"]))
    """

    def __init__(
        self,
        store: IdentityStore,
        ring: KeyRing,
        clock: Clock,
        settings: AuthSettings | None = None,
        *,
        snapshot: KeySnapshot | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        """`snapshot`: where known keys are kept over a restart. `tokens`: of the issuers in the
        settings."""
        self._store = store
        self._ring = ring
        self._clock = clock
        self._settings = settings or AuthSettings()
        self._offline_ns = round(self._settings.offline_s * 1e9)
        self._keys: OrderedDict[str, _Known] = OrderedDict()
        self._unknown: OrderedDict[str, None] = OrderedDict()
        self._flights: dict[str, asyncio.Future[_Known | StoreUnavailable | None]] = {}
        self._nobody = _Known(digest=ring.digest("no such key"), caller=None)
        self._version: int | None = None  # of the store, when last asked
        self._synced_ns = clock.monotonic_ns()
        self._is_offline: bool | None = None  # None: not asked yet
        self._poller: asyncio.Task[None] | None = None
        self._trusted = networks(self._settings.trusted_proxies, "auth.trusted_proxies")
        self._stale: dict[str, tuple[bytes, bytes]] = {}  # keys whose HMAC is of an older pepper
        self._tokens = tokens or Tokens(self._settings.issuers, clock)
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # of tokens
        self._bearers: OrderedDict[
            tuple[str, str, frozenset[str] | None], tuple[Identity, Caller]
        ] = OrderedDict()
        self._snapshot = snapshot
        self._saved: tuple[int | None, int] | None = None  # version and keys of the last snapshot
        self._save_after_ns = 0
        self._foreign = Pace(clock, self._settings.foreign_ids_per_s)

    async def __aenter__(self) -> Self:
        await self.refresh()
        if self.is_offline:
            self._restore()
        self._poller = asyncio.create_task(self._poll(), name="auth-poll")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._poller is not None
        self._poller.cancel()
        await asyncio.wait([self._poller])
        await self._tokens.close()

    @property
    def is_offline(self) -> bool:
        """The store did not answer when last asked; known keys go on for now. For /readyz."""
        return self._is_offline is not False

    @property
    def synced_age_s(self) -> float:
        """Seconds since the store last said what had changed."""
        return (self._clock.monotonic_ns() - self._synced_ns) / 1e9

    async def identify(self, credential: Credential) -> Caller:
        """Raises Unauthenticated, or StoreUnavailable when the store is needed and gone."""
        text = credential.text
        match = KEY.fullmatch(text)
        if match is None:
            if self._tokens and is_token(text):
                return await self._by_token(await self._tokens.verify(text))
            raise Unauthenticated(WRONG)
        public_id = match[1]
        known = self._keys.get(public_id)
        if known is None:
            known = await self._look_up(public_id)
        elif self._clock.monotonic_ns() - self._synced_ns > self._offline_ns:
            raise StoreUnavailable("API keys cannot be checked right now; try again.")
        else:
            self._keys.move_to_end(public_id)
        digest = self._ring.digest(text)
        if not hmac.compare_digest(known.digest, digest):
            if not self._ring.is_match(text, known.digest):
                raise Unauthenticated(WRONG)
            self._stale[public_id] = (known.digest, digest)
        if known.caller is None:
            raise Unauthenticated(WRONG)
        if known.refusal is not None:
            raise Unauthenticated(known.refusal)
        if self._clock.now_ns() >= known.ends_ns:
            raise Unauthenticated(EXPIRED)
        if known.ip_allow is not None:
            address = client_address(credential.peer, credential.forwarded, self._trusted)
            if not within(address, known.ip_allow):
                raise Unauthenticated(ADDRESS, code="ip_not_authorized")
        return known.caller

    async def principal(self, text: str) -> Principal:
        """The administrator behind a token. Raises Unauthenticated, StoreUnavailable."""
        claims = await self._tokens.verify(text)
        if claims.role is None:
            raise Unauthenticated(NO_ROLE)
        caller = await self._by_token(claims)
        return Principal(
            name=f"token:{claims.subject}", role=claims.role, tenant_id=caller.tenant_id
        )

    @property
    def takes_tokens(self) -> bool:
        return bool(self._tokens)

    async def _by_token(self, claims: Claims) -> Caller:
        """The caller behind a verified token: its tenant as the store knows it now."""
        tenant = await self._tenant(claims.tenant)
        within = claims.issuer.within
        if tenant is None or (within is not None and not _is_within(tenant, within)):
            raise Unauthenticated(NO_TENANT)
        refusal = _refusal(tenant)
        if refusal is not None:
            raise Unauthenticated(SUSPENDED if refusal == SUSPENDED else NO_TENANT)
        who = (claims.subject, claims.tenant, claims.scopes)
        known = self._bearers.get(who)
        if known is not None and known[0] is tenant:
            return known[1]
        caller = replace(_caller(tenant), key_id=KeyId(claims.subject), scopes=claims.scopes)
        self._bearers[who] = (tenant, caller)
        if len(self._bearers) > self._settings.max_keys:
            self._bearers.popitem(last=False)
        return caller

    async def _tenant(self, ref: str) -> Identity | None:
        """Remembered until anything changes in the store; while it is gone, as keys are."""
        known = self._tenants.get(ref)
        is_old = self._clock.monotonic_ns() - self._synced_ns > self._offline_ns
        if known is not None and known.version == self._version and not is_old:
            return known.identity
        if self.is_offline:
            raise StoreUnavailable("This token's tenant cannot be checked right now; try again.")
        version = self._version
        try:
            async with asyncio.timeout(self._settings.query_timeout_s):
                identity = await self._store.tenant_identity(ref)
        except TimeoutError:
            raise StoreUnavailable(
                "This token's tenant cannot be checked right now; try again."
            ) from None
        self._tenants[ref] = _Tenant(version=version, identity=identity)
        if len(self._tenants) > self._settings.max_unknown:
            self._tenants.popitem(last=False)
        return identity

    async def refresh(self) -> None:
        """Ask the store what changed, and forget that. Never raises for a store that is gone."""
        asked_ns = self._clock.monotonic_ns()
        try:
            async with asyncio.timeout(self._settings.query_timeout_s):
                version = await self._store.version()
                if self._version is not None and version != self._version:
                    # After a restore the number may be lower: then nothing here can be trusted.
                    rewound = version < self._version
                    changed = None if rewound else await self._store.changed_since(self._version)
                    self._forget(changed)
        except (StoreUnavailable, TimeoutError) as error:
            if self._is_offline is not True:  # once per outage
                log.warning("key store gone", extra={"reason": str(error) or "timeout"})
            self._is_offline = True
            return
        if self._is_offline is True:
            log.warning("key store back", extra={"gone_s": round(self.synced_age_s, 3)})
        self._version = version
        self._synced_ns = asked_ns
        self._is_offline = False

    def _forget(self, public_ids: list[str] | None) -> None:
        if public_ids is None:
            self._keys.clear()
            self._unknown.clear()
            return
        for public_id in public_ids:
            self._keys.pop(public_id, None)
            self._unknown.pop(public_id, None)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._settings.poll_s)
            try:
                await self.refresh()
                await self._rehash()
                await self._save()
            except Exception:  # the loop outlives its bugs; `_synced_ns` bounds what that can cost
                log.exception("key poll failed")
                self._is_offline = True

    async def _rehash(self) -> None:
        """Keys that were used, and whose HMAC is of an older pepper: keep them under the newest."""
        while self._stale and not self.is_offline:
            public_id, (old, new) = self._stale.popitem()
            try:
                async with asyncio.timeout(self._settings.query_timeout_s):
                    await self._store.rehash(public_id, old, new)
            except (StoreUnavailable, NotFound, TimeoutError):
                return  # it is used again, or nobody needs it

    async def _save(self) -> None:
        """Keep what is known over a restart, when it changed or every so often."""
        began_ns = self._clock.monotonic_ns()
        if self._snapshot is None or self.is_offline or began_ns < self._save_after_ns:
            return
        minute = began_ns // _SAVE_EVERY_NS
        state = (self._version, len(self._keys) + (minute << 32))
        if state == self._saved:
            return
        self._saved = state
        age_ns = self._clock.monotonic_ns() - self._synced_ns
        content = Remembered(
            version=self._version,
            synced_ns=self._clock.now_ns() - age_ns,
            keys=[known.identity for known in self._keys.values() if known.identity is not None],
        )
        try:
            await asyncio.to_thread(self._snapshot.write, content)
        except OSError as error:
            log.warning("key_snapshot_failed", extra={"reason": type(error).__name__})
        # Whatever it takes, it takes a fiftieth of the time at most.
        took_ns = self._clock.monotonic_ns() - began_ns
        self._save_after_ns = began_ns + 50 * took_ns

    def _restore(self) -> None:
        """Begin with the keys of before the restart, as old as they are."""
        content = None if self._snapshot is None else self._snapshot.read()
        if content is None:
            return
        age_ns = self._clock.now_ns() - content.synced_ns
        if not 0 <= age_ns <= self._offline_ns:
            log.warning("key_snapshot_too_old", extra={"age_s": round(age_ns / 1e9)})
            return
        self._version = content.version
        self._synced_ns = self._clock.monotonic_ns() - age_ns
        for identity in content.keys:
            self._remember(identity.public_id, _known(identity))
        log.warning("keys_from_snapshot", extra={"keys": len(content.keys)})

    async def _look_up(self, public_id: str) -> _Known:
        """What the store knows of this id. One question at a time per id; whoever comes meanwhile
        shares the answer, and asks anew only if the one who asked was cancelled."""
        if public_id in self._unknown:
            return self._nobody
        if not self._ring.made(public_id) and not self._foreign.may():
            return self._nobody
        while (flight := self._flights.get(public_id)) is not None:
            answer = await asyncio.shield(flight)
            if isinstance(answer, StoreUnavailable):
                raise StoreUnavailable(answer.message)
            if answer is not None:
                return answer
        flight = self._flights[public_id] = asyncio.get_running_loop().create_future()
        try:
            known = await self._ask(public_id)
        except StoreUnavailable as error:
            flight.set_result(error)
            raise
        else:
            flight.set_result(known)
            return known
        finally:
            del self._flights[public_id]
            if not flight.done():  # cancelled
                flight.set_result(None)

    async def _ask(self, public_id: str) -> _Known:
        if self.is_offline:  # the poll finds out when it is back; requests need not queue for it
            raise StoreUnavailable("This API key cannot be checked right now; try again.")
        version = self._version
        try:
            async with asyncio.timeout(self._settings.query_timeout_s):
                identity = await self._store.identity(public_id)
        except TimeoutError:
            raise StoreUnavailable("This API key cannot be checked right now; try again.") from None
        known = self._nobody if identity is None else _known(identity)
        if version == self._version:  # else the answer may be older than what was just forgotten
            self._remember(public_id, known)
        return known

    def _remember(self, public_id: str, known: _Known) -> None:
        if known is self._nobody:
            self._unknown[public_id] = None
            if len(self._unknown) > self._settings.max_unknown:
                self._unknown.popitem(last=False)
            return
        self._keys[public_id] = known
        if len(self._keys) > self._settings.max_keys:
            self._keys.popitem(last=False)


class _Tenant(Struct, frozen=True, kw_only=True):
    """A tenant that a token named, as of one version of the store."""

    version: int | None
    identity: Identity | None


def _is_within(tenant: Identity, ref: str) -> bool:
    """Whether it is this tenant (id or path from the top), or below it."""
    chain = [(above.tenant_id, above.tenant) for above in reversed(tenant.ancestors)]
    chain.append((tenant.tenant_id, tenant.tenant_name))
    paths = ["/".join(name for _, name in chain[: end + 1]) for end in range(len(chain))]
    return ref in paths or ref in [tenant_id for tenant_id, _ in chain]


def _refusal(identity: Identity) -> str | None:
    states = {identity.tenant_state, *(above.state for above in identity.ancestors)}
    if identity.revoked_at is not None or "deleted" in states:
        return REVOKED
    return SUSPENDED if "suspended" in states else None


def _caller(identity: Identity) -> Caller:
    return Caller(
        tenant_id=identity.tenant_id,
        tenant=identity.tenant_name,
        key_id=identity.key_id,
        model_allow=_allow(identity.model_allow),
        target_allow=_allow(identity.target_allow),
        scopes=None if identity.scopes is None else frozenset(identity.scopes),
        limits=identity.limits,
        budgets=identity.budgets,
        ancestors=identity.ancestors,
    )


def _known(identity: Identity) -> _Known:
    ends = [at for at in (identity.expires_at, identity.grace_until) if at is not None]
    return _Known(
        digest=identity.secret_hmac,
        identity=identity,
        ip_allow=None if identity.ip_allow is None else networks(identity.ip_allow, "ip_allow"),
        caller=_caller(identity),
        refusal=_refusal(identity),
        ends_ns=min(round(at.timestamp() * 1e9) for at in ends) if ends else _NEVER,
    )


def _allow(patterns: list[str] | None) -> ModelAllow | None:
    return None if patterns is None else ModelAllow(patterns)


class Pace:
    """So many a second at most, a second's worth at once; 0: none."""

    def __init__(self, clock: Clock, per_s: float) -> None:
        self._clock = clock
        self._per_s = per_s
        self._left = per_s
        self._at_ns = clock.monotonic_ns()

    def may(self) -> bool:
        now_ns = self._clock.monotonic_ns()
        most = max(1.0, self._per_s) if self._per_s else 0.0
        self._left = min(most, self._left + (now_ns - self._at_ns) * self._per_s / 1e9)
        self._at_ns = now_ns
        if self._left < 1:
            return False
        self._left -= 1
        return True


class AdminKeyInvalid(ValueError):
    """The configured admin key cannot be used; the message says why."""


class Admin:
    """Recognises administrators: by the configured admin key, of which it holds a hash only; by the
    keys in the database, and by tokens with a role."""

    def __init__(
        self,
        admin_key: str,
        *,
        admins: Admins | None = None,
        auth: Auth | None = None,
        clock: Clock | None = None,
    ) -> None:
        if len(admin_key) < MIN_ADMIN_KEY_CHARS or not admin_key.isascii():
            raise AdminKeyInvalid(
                f"the admin key must be at least {MIN_ADMIN_KEY_CHARS} ASCII characters"
            )
        if KEY.fullmatch(admin_key):
            raise AdminKeyInvalid("a tenant's key cannot be the admin key")
        self._sha256 = _sha256(admin_key)
        self._admins = admins
        self._auth = auth
        self._clock = clock

    def check(self, credential: Credential) -> None:
        """Raises Unauthenticated unless this is the configured admin key. Hashed first, so that the
        time tells nothing about length or content."""
        if not hmac.compare_digest(_sha256(credential.text), self._sha256):
            raise Unauthenticated(WRONG_ADMIN)

    async def identify(self, credential: Credential) -> Principal:
        """Raises Unauthenticated, or StoreUnavailable when the database is needed and gone."""
        text = credential.text
        if hmac.compare_digest(_sha256(text), self._sha256):
            return Principal(name="admin", role="owner")
        if self._admins is not None and self._clock is not None and ADMIN_KEY.fullmatch(text):
            now = datetime.fromtimestamp(self._clock.now_ns() / 1e9, UTC)
            return await self._admins.identify(text, now)
        if self._auth is not None and self._auth.takes_tokens and is_token(text):
            return await self._auth.principal(text)
        raise Unauthenticated(WRONG_ADMIN)


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode("ascii")).digest()
