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
from typing import Annotated, Any, Final, Protocol, Self

from msgspec import Meta, Struct
from typing_extensions import override

from gateway.allowances import Budget, Limit
from gateway.errors import StoreUnavailable, Unauthenticated
from gateway.keys import KEY, KeyRing, ModelAllow
from gateway.tenants import Ancestor, Identity
from telemetry.clock import Clock
from telemetry.ids import KeyId, TenantId

log = logging.getLogger(__name__)

MAX_CREDENTIAL_CHARS: Final = 512
MIN_ADMIN_KEY_CHARS: Final = 16

MISSING: Final = "No API key given. Send it as `Authorization: Bearer sk-ml-…`."
AMBIGUOUS: Final = "Several different API keys given. Send one, as `Authorization: Bearer sk-ml-…`."
WRONG: Final = "Incorrect API key given. Check it, or ask your administrator for a new one."
REVOKED: Final = "This API key is revoked. Ask your administrator for a new one."
EXPIRED: Final = "This API key has expired. Ask your administrator for a new one."
SUSPENDED: Final = "The account of this API key is suspended. Ask your administrator."
WRONG_ADMIN: Final = "Incorrect admin key given. Tenant keys do not open the admin API."

_NEVER: Final = 1 << 63  # nanoseconds; the year 2262


class AuthSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How keys are remembered between look-ups."""

    poll_s: Annotated[
        float, Meta(gt=0, le=0.9, description="Seconds between two questions for changed keys.")
    ] = 0.5
    offline_s: Annotated[
        float,
        Meta(ge=0, description="Seconds that known keys go on while the database is gone."),
    ] = 900.0
    query_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds that one question to the database may take.")
    ] = 2.0
    max_keys: Annotated[int, Meta(ge=1, description="Keys remembered; the idlest go first.")] = (
        50_000
    )
    max_unknown: Annotated[
        int, Meta(ge=1, description="Keys that do not exist and are remembered as such.")
    ] = 1_000


class Credential(Struct, frozen=True, gc=False):
    """What the client sent as its key. Not yet checked, never shown."""

    text: str

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

    def may_use(self, model: str) -> bool:
        return self.model_allow is None or self.model_allow.allows(model)


class IdentityStore(Protocol):
    """What `Tenants` answers. Raises StoreUnavailable only."""

    async def identity(self, public_id: str) -> Identity | None: ...

    async def version(self) -> int: ...

    async def changed_since(self, version: int) -> list[str] | None: ...


def read_credential(headers: Iterable[tuple[bytes, bytes]]) -> Credential:
    """The one key in ASGI headers (names in lower case). OpenAI clients send `authorization`,
    Anthropic's `x-api-key`, Azure's `api-key`; the same key twice is one key."""
    found: str | None = None
    for name, value in headers:
        if name == b"authorization":
            text = _bearer(value)
        elif name in (b"x-api-key", b"api-key"):
            text = _text(value)
        else:
            continue
        if found is not None and text and text != found:
            raise Unauthenticated(AMBIGUOUS)
        found = text or found
    if found is None:
        raise Unauthenticated(MISSING)
    return Credential(found)


def _bearer(value: bytes) -> str:
    """The token; nothing for another scheme or for a key without `Bearer` before it."""
    scheme, _, token = _text(value).partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _text(value: bytes) -> str:
    if len(value) > MAX_CREDENTIAL_CHARS or not value.isascii():
        raise Unauthenticated(WRONG)
    return value.decode("ascii").strip()


class _Known(Struct, frozen=True, kw_only=True):
    """What is remembered of one public id: that there is no such key, too (`caller` None)."""

    digest: bytes
    caller: Caller | None
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
    ) -> None:
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

    async def __aenter__(self) -> Self:
        await self.refresh()
        self._poller = asyncio.create_task(self._poll(), name="auth-poll")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._poller is not None
        self._poller.cancel()
        await asyncio.wait([self._poller])

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
            raise Unauthenticated(WRONG)
        public_id = match[1]
        known = self._keys.get(public_id)
        if known is None:
            known = await self._look_up(public_id)
        elif self._clock.monotonic_ns() - self._synced_ns > self._offline_ns:
            raise StoreUnavailable("API keys cannot be checked right now; try again.")
        else:
            self._keys.move_to_end(public_id)
        if not hmac.compare_digest(known.digest, self._ring.digest(text)) or known.caller is None:
            raise Unauthenticated(WRONG)
        if known.refusal is not None:
            raise Unauthenticated(known.refusal)
        if self._clock.now_ns() >= known.ends_ns:
            raise Unauthenticated(EXPIRED)
        return known.caller

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
            except Exception:  # the loop outlives its bugs; `_synced_ns` bounds what that can cost
                log.exception("key poll failed")
                self._is_offline = True

    async def _look_up(self, public_id: str) -> _Known:
        """What the store knows of this id. One question at a time per id; whoever comes meanwhile
        shares the answer, and asks anew only if the one who asked was cancelled."""
        if not self._ring.made(public_id) or public_id in self._unknown:
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


def _known(identity: Identity) -> _Known:
    ends = [at for at in (identity.expires_at, identity.grace_until) if at is not None]
    states = {identity.tenant_state, *(above.state for above in identity.ancestors)}
    refusal = None
    if identity.revoked_at is not None or "deleted" in states:
        refusal = REVOKED
    elif "suspended" in states:
        refusal = SUSPENDED
    return _Known(
        digest=identity.secret_hmac,
        caller=Caller(
            tenant_id=identity.tenant_id,
            tenant=identity.tenant_name,
            key_id=identity.key_id,
            model_allow=None if identity.model_allow is None else ModelAllow(identity.model_allow),
            limits=identity.limits,
            budgets=identity.budgets,
            ancestors=identity.ancestors,
        ),
        refusal=refusal,
        ends_ns=min(round(at.timestamp() * 1e9) for at in ends) if ends else _NEVER,
    )


class AdminKeyInvalid(ValueError):
    """The configured admin key cannot be used; the message says why."""


class Admin:
    """Holds what is needed to recognise the admin key, and not the key."""

    def __init__(self, admin_key: str) -> None:
        if len(admin_key) < MIN_ADMIN_KEY_CHARS or not admin_key.isascii():
            raise AdminKeyInvalid(
                f"the admin key must be at least {MIN_ADMIN_KEY_CHARS} ASCII characters"
            )
        if KEY.fullmatch(admin_key):
            raise AdminKeyInvalid("a tenant's key cannot be the admin key")
        self._sha256 = _sha256(admin_key)

    def check(self, credential: Credential) -> None:
        """Raises Unauthenticated unless this is the admin key. Hashed first, so that the time
        tells nothing about length or content."""
        if not hmac.compare_digest(_sha256(credential.text), self._sha256):
            raise Unauthenticated(WRONG_ADMIN)


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode("ascii")).digest()
