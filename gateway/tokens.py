"""Signed tokens (JWT, RFC 7519) of identity providers, instead of API keys.

Which keys verify a token is the config's to say, never the token's: its `alg` must be one of the
issuer's list and fit the type of the public key (RFC 8725, 3.1), its `kid` only picks among keys
that the issuer's own URL gave. Must not know tenants or limits. Invariants: no symmetric algorithm
and no `none` exist here; an unknown `kid` costs at most one fetch per `REFETCH_S`; without the
issuer's URL its keys go on for `keys_offline_s` and no longer; no error or log holds a token.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import jwt
import msgspec
from msgspec import Struct

from backends import egress
from gateway.errors import StoreUnavailable, Unauthenticated
from gateway.roles import ROLES, Role
from gateway.trust import IssuerSettings
from telemetry.clock import Clock

log = logging.getLogger(__name__)

MAX_TOKEN_CHARS: Final = 8192
MAX_KEYS_BYTES: Final = 512_000
MAX_KEYS: Final = 200
MAX_REMEMBERED: Final = 20_000
REFETCH_S: Final = 10.0  # between two fetches for the sake of a token
SUBJECT_CHARS: Final = 24

NO_ISSUER: Final = "The bearer token is of an issuer that is not trusted here."
MALFORMED: Final = "The bearer token is malformed."
ALGORITHM: Final = "The bearer token is signed with an algorithm that is not accepted."
UNKNOWN_KEY: Final = "The bearer token is signed with a key that its issuer does not publish."
SIGNATURE: Final = "The bearer token's signature is wrong."
AUDIENCE: Final = "The bearer token is meant for another audience."
TOO_LATE: Final = "The bearer token has expired. Get a new one."
NOT_YET: Final = "The bearer token is not valid yet."
CLAIMS: Final = "The bearer token lacks a claim that is needed here."
NO_TENANT: Final = "The bearer token names no tenant that it may act for."
REASONS: Final = (
    NO_ISSUER, MALFORMED, ALGORITHM, UNKNOWN_KEY, SIGNATURE, AUDIENCE, TOO_LATE, NOT_YET,
    CLAIMS, NO_TENANT,
)  # fmt: skip

_KEY_TYPES: Final = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
_CURVES: Final = {"ES256": "P-256", "ES384": "P-384", "ES512": "P-521"}

Fetch = Callable[[IssuerSettings], Awaitable[bytes]]
Json = Any


class Claims(Struct, frozen=True, kw_only=True):
    """What a verified token says, as far as we ask."""

    issuer: IssuerSettings
    subject: str  # opaque: a hash of issuer and subject
    tenant: str  # id or path
    scopes: frozenset[str] | None  # None: all
    role: Role | None  # for the admin API
    ends_ns: int  # Unix time, leeway included


def is_token(text: str) -> bool:
    """Whether a credential looks like one: three parts, the first of them a JSON object."""
    return text.startswith("eyJ") and text.count(".") == 2


async def fetch_keys(issuer: IssuerSettings) -> bytes:
    """The issuer's key set, by the rules for every connection out: addresses checked after look-up,
    no redirects. Raises httpx.HTTPError."""
    url = urlsplit(issuer.jwks_url)
    async with egress.client(
        f"{url.scheme}://{url.netloc}", allow_private=issuer.allow_private
    ) as client:
        request = client.stream(
            "GET",
            issuer.jwks_url,
            headers={"accept": "application/json"},
            timeout=issuer.timeout_s,
        )
        async with request as answer:
            if answer.status_code != 200:
                raise httpx.HTTPError(f"status {answer.status_code}")
            data = b""
            async for part in answer.aiter_bytes():
                data += part
                if len(data) > MAX_KEYS_BYTES:
                    raise httpx.HTTPError("too long")
            return data


class _KeySet:
    """The public keys of one issuer."""

    def __init__(self, issuer: IssuerSettings, clock: Clock, fetch: Fetch) -> None:
        self.issuer = issuer
        self._clock = clock
        self._fetch = fetch
        self._keys: list[dict[str, Json]] = []
        self._fetched_ns: int | None = None
        self._tried_ns: int | None = None
        self._fetching: asyncio.Task[None] | None = None

    async def find(self, kid: str | None, algorithm: str) -> dict[str, Json]:
        """The key for a token's header. Raises Unauthenticated, or StoreUnavailable when the keys
        cannot be had."""
        age_s = self._age_s()
        if age_s is None or age_s > self.issuer.keys_offline_s:
            await self._refresh()
        elif age_s > self.issuer.keys_age_s:
            self._start()  # the ones we have go on meanwhile
        key = self._pick(kid, algorithm)
        if key is None:
            await self._refresh()
            key = self._pick(kid, algorithm)
        age_s = self._age_s()
        if age_s is None or age_s > self.issuer.keys_offline_s:
            raise StoreUnavailable("Bearer tokens cannot be checked right now; try again.")
        if key is None:
            raise Unauthenticated(UNKNOWN_KEY)
        return key

    async def close(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait([self._fetching])

    def _age_s(self) -> float | None:
        if self._fetched_ns is None:
            return None
        return (self._clock.monotonic_ns() - self._fetched_ns) / 1e9

    async def _refresh(self) -> None:
        """Fetch once, for whoever waits; not again within `REFETCH_S`."""
        if self._start() is not None:
            assert self._fetching is not None
            await asyncio.shield(self._fetching)

    def _start(self) -> "asyncio.Task[None] | None":
        if self._fetching is None or self._fetching.done():
            now_ns = self._clock.monotonic_ns()
            if self._tried_ns is not None and now_ns - self._tried_ns < REFETCH_S * 1e9:
                return None
            self._tried_ns = now_ns
            self._fetching = asyncio.create_task(self._load(), name="jwks")
        return self._fetching

    async def _load(self) -> None:
        try:
            async with asyncio.timeout(self.issuer.timeout_s):
                data = await self._fetch(self.issuer)
            found = msgspec.json.decode(data)["keys"][:MAX_KEYS]
            keys = [key for key in found if key.get("use", "sig") == "sig"]
        except (httpx.HTTPError, TimeoutError, OSError, ValueError, KeyError) as error:
            self._complain(error)
        except (TypeError, AttributeError) as error:  # JSON of another shape
            self._complain(error)
        else:
            self._keys = keys
            self._fetched_ns = self._clock.monotonic_ns()

    def _complain(self, error: Exception) -> None:
        log.warning(
            "jwks_unreachable",
            extra={"issuer": self.issuer.issuer, "reason": type(error).__name__},
        )

    def _pick(self, kid: str | None, algorithm: str) -> dict[str, Json] | None:
        fitting = [key for key in self._keys if _fits(key, algorithm)]
        if kid is None:  # a set with one fitting key needs no name for it
            return fitting[0] if len(fitting) == 1 else None
        return next((key for key in fitting if key.get("kid") == kid), None)


def _fits(key: Mapping[str, Json], algorithm: str) -> bool:
    """A key is for one kind of signature: an RSA key is never a shared secret."""
    return (
        key.get("kty") == _KEY_TYPES.get(algorithm[:2])
        and key.get("alg", algorithm) == algorithm
        and key.get("crv", _CURVES.get(algorithm)) == _CURVES.get(algorithm, key.get("crv"))
    )


class Tokens:
    """Verifies tokens of the configured issuers. What was verified is remembered until it ends."""

    def __init__(
        self, issuers: Sequence[IssuerSettings], clock: Clock, fetch: Fetch = fetch_keys
    ) -> None:
        self._clock = clock
        self._sets = {one.issuer: _KeySet(one, clock, fetch) for one in issuers}
        self._verified: OrderedDict[bytes, Claims] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._sets)

    async def close(self) -> None:
        for known in self._sets.values():
            await known.close()

    async def verify(self, text: str) -> Claims:
        """Raises Unauthenticated, or StoreUnavailable."""
        digest = hashlib.sha256(text.encode("ascii")).digest()
        claims = self._verified.get(digest)
        if claims is None:
            claims = await self._verify(text)
            self._verified[digest] = claims
            if len(self._verified) > MAX_REMEMBERED:
                self._verified.popitem(last=False)
        elif self._clock.now_ns() >= claims.ends_ns:
            del self._verified[digest]
            raise Unauthenticated(TOO_LATE)
        return claims

    async def _verify(self, text: str) -> Claims:
        try:
            header = jwt.get_unverified_header(text)
            unverified = jwt.decode(text, options={"verify_signature": False})
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            raise Unauthenticated(MALFORMED) from None
        known = self._sets.get(str(unverified.get("iss")))
        if known is None:
            raise Unauthenticated(NO_ISSUER)
        issuer, algorithm = known.issuer, header.get("alg")
        if algorithm not in issuer.algorithms or "crit" in header:
            raise Unauthenticated(ALGORITHM)
        kid = header.get("kid")
        key = await known.find(kid if isinstance(kid, str) else None, algorithm)
        return self._claims(issuer, _decode(text, key, algorithm, issuer))

    def _claims(self, issuer: IssuerSettings, claims: Mapping[str, Json]) -> Claims:
        now_s = self._clock.now_ns() / 1e9
        leeway_s = issuer.leeway_s
        ends_s = _time(claims, "exp")
        if ends_s is None:
            raise Unauthenticated(CLAIMS)
        if now_s >= ends_s + leeway_s:
            raise Unauthenticated(TOO_LATE)
        if any(now_s < (_time(claims, name) or 0) - leeway_s for name in ("nbf", "iat")):
            raise Unauthenticated(NOT_YET)
        tenant = _claim(claims, issuer.tenant_claim)
        if issuer.tenants:
            tenant = issuer.tenants.get(tenant) if isinstance(tenant, str) else None
        subject = _claim(claims, issuer.subject_claim)
        if not isinstance(tenant, str) or not tenant:
            raise Unauthenticated(NO_TENANT)
        if not isinstance(subject, str) or not subject:
            raise Unauthenticated(CLAIMS)
        who = hashlib.sha256(f"{issuer.issuer}\n{subject}".encode()).hexdigest()
        return Claims(
            issuer=issuer,
            subject=f"jwt-{who[:SUBJECT_CHARS]}",
            tenant=tenant,
            scopes=_scopes(issuer, claims),
            role=_role(issuer, claims),
            ends_ns=round((ends_s + leeway_s) * 1e9),
        )


def _decode(
    text: str, key: Mapping[str, Json], algorithm: str, issuer: IssuerSettings
) -> dict[str, Json]:
    """The claims, if signature, issuer and audience are right. Times are checked by our clock."""
    options: Any = {
        "verify_exp": False,
        "verify_nbf": False,
        "verify_iat": False,
        "require": ["exp", "iss", "aud"],
    }
    try:
        claims: dict[str, Json] = jwt.decode(
            text,
            jwt.PyJWK(dict(key), algorithm=algorithm),
            algorithms=[algorithm],
            issuer=issuer.issuer,
            audience=list(issuer.audience),
            options=options,
        )
    except jwt.InvalidAudienceError:
        raise Unauthenticated(AUDIENCE) from None
    except jwt.MissingRequiredClaimError:
        raise Unauthenticated(CLAIMS) from None
    except jwt.InvalidIssuerError:
        raise Unauthenticated(NO_ISSUER) from None
    except (jwt.PyJWTError, ValueError, TypeError):
        raise Unauthenticated(SIGNATURE) from None
    return claims


def _time(claims: Mapping[str, Json], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e11:
        raise Unauthenticated(MALFORMED)
    return float(value)


def _claim(claims: Mapping[str, Json], path: str) -> Json:
    """`tenant`, or `meterline.tenant` for what is inside another; a name with dots goes first."""
    if path in claims:
        return claims[path]
    value: Json = claims
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _scopes(issuer: IssuerSettings, claims: Mapping[str, Json]) -> frozenset[str] | None:
    if issuer.scope_claim is None:
        return None
    value = _claim(claims, issuer.scope_claim)
    listed = value.split() if isinstance(value, str) else value
    if not isinstance(listed, list):
        return frozenset()
    prefix = issuer.scope_prefix
    return frozenset(
        scope.removeprefix(prefix)
        for scope in listed
        if isinstance(scope, str) and scope.startswith(prefix)
    )


def _role(issuer: IssuerSettings, claims: Mapping[str, Json]) -> Role | None:
    """The most powerful of those that the token has."""
    if issuer.role_claim is None:
        return None
    value = _claim(claims, issuer.role_claim)
    listed = value if isinstance(value, list) else [value]
    found = {issuer.roles.get(one) for one in listed if isinstance(one, str)}
    return next((role for role in ROLES if role in found), None)


__all__ = ["Claims", "Tokens", "fetch_keys", "is_token"]
