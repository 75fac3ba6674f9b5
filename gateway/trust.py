"""Whom the gateway believes: the `[auth]` table, and the address that a request really came from.

Pure. Must not know keys, tokens or headers' origin beyond what it is given. Invariant: an address
from a header is believed only as far as every hop between it and us is a trusted proxy.
"""

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta, Struct

from gateway.errors import BadRequest
from gateway.roles import Role

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

MAX_NETWORKS: Final = 100
MAX_HOPS: Final = 32


Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]


class IssuerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An identity provider whose signed tokens (JWT) are taken instead of API keys."""

    issuer: Annotated[str, Meta(min_length=1, description="Its name: exactly the `iss` claim.")]
    audience: Annotated[
        tuple[str, ...], Meta(min_length=1, description="Names of us; `aud` must hold one of them.")
    ]
    jwks_url: Annotated[
        str, Meta(description="Where its public keys are, https. Never taken from a token.")
    ]
    allow_private: Annotated[
        bool, Meta(description="The URL may be http and lead to an internal address.")
    ] = False
    algorithms: Annotated[
        tuple[Algorithm, ...], Meta(min_length=1, description="Signatures that are taken.")
    ] = ("RS256", "ES256", "EdDSA")
    leeway_s: Annotated[int, Meta(ge=0, le=300, description="Seconds that clocks may differ.")] = 30
    tenant_claim: Annotated[
        str, Meta(min_length=1, description="The claim that says which tenant; dots go deeper.")
    ] = "tenant"
    tenants: Annotated[
        dict[str, str],
        Meta(
            description="Claim value → tenant (id or path). Empty: the value is the tenant's id or "
            "path itself."
        ),
    ] = {}
    within: Annotated[
        str | None,
        Meta(description="Tenant (id or path): tokens for others than it and below are refused."),
    ] = None
    subject_claim: Annotated[
        str, Meta(min_length=1, description="Who asks: stands for the key in limits and ledger.")
    ] = "sub"
    scope_claim: Annotated[
        str | None,
        Meta(description="The claim with scopes, a list or a text with spaces. Absent: all."),
    ] = None
    scope_prefix: Annotated[
        str, Meta(description="Scopes that begin so are ours, the rest is left alone.")
    ] = ""
    role_claim: Annotated[
        str | None,
        Meta(
            description="The claim with roles for the admin API, a list or one. Absent: this "
            "issuer's tokens do not open it. A role holds for the token's tenant and below."
        ),
    ] = None
    roles: Annotated[
        dict[str, Role], Meta(description="Claim value → role. Values that are not here are none.")
    ] = {}
    keys_age_s: Annotated[
        float, Meta(gt=0, description="Seconds until the public keys are fetched again.")
    ] = 300.0
    keys_offline_s: Annotated[
        float, Meta(ge=0, description="Seconds that they go on while they cannot be fetched.")
    ] = 86_400.0
    timeout_s: Annotated[float, Meta(gt=0, description="Seconds that one fetch may take.")] = 5.0


class AuthSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may ask, and how keys are remembered between look-ups."""

    poll_s: Annotated[
        float, Meta(gt=0, le=0.9, description="Seconds between two questions for changed keys.")
    ] = 0.5
    offline_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds that known keys go on while the database is gone, over restarts "
            "too.",
        ),
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
    foreign_ids_per_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Look-ups a second of keys that were made under a pepper which is listed "
            "no more. 0: such keys are refused, and an invented key never reaches the database.",
        ),
    ] = 0.0
    trusted_proxies: Annotated[
        tuple[str, ...],
        Meta(
            description="Networks (CIDR) of our own proxies: `x-forwarded-for` is believed as far "
            "as it passed through these. Empty: never."
        ),
    ] = ()
    issuers: Annotated[
        tuple[IssuerSettings, ...], Meta(description="Identity providers, each with another name.")
    ] = ()


def issuer_problems(issuers: Sequence[IssuerSettings]) -> list[str]:
    """What the types cannot say, each with its path and what to do."""
    problems = []
    names = [one.issuer for one in issuers]
    for place, one in enumerate(issuers):
        where = f"auth.issuers[{place}]"
        if one.issuer in names[:place]:
            problems.append(f"{where}.issuer: `{one.issuer}` is listed twice")
        schemes = ("https://", "http://") if one.allow_private else ("https://",)
        if not one.jwks_url.startswith(schemes):
            problems.append(
                f"{where}.jwks_url: must start with https:// (http:// only with allow_private)"
            )
        if one.roles and one.role_claim is None:
            problems.append(f"{where}.role_claim: missing, `roles` needs it")
        if "*" in one.audience or "" in one.audience:
            problems.append(f"{where}.audience: name us exactly; there are no patterns")
    return problems


def networks(texts: Sequence[str], path: str) -> tuple[Network, ...]:
    """Raises BadRequest with the field's path and what to do."""
    if len(texts) > MAX_NETWORKS:
        raise BadRequest(f"At most {MAX_NETWORKS} networks; write wider ones.", param=path)
    found = []
    for place, text in enumerate(texts):
        where = f"{path}[{place}]"
        try:
            found.append(ip_network(text))
        except ValueError:
            raise BadRequest(_what_is_wrong(text), param=where) from None
    return tuple(found)


def _what_is_wrong(text: str) -> str:
    try:
        meant = ip_network(text, strict=False)
    except ValueError:
        return (
            "Write an address or a network as CIDR, such as 203.0.113.0/24, 2001:db8::/32 or "
            "198.51.100.7."
        )
    return f"This has bits set beyond its prefix; did you mean {meant}?"


def within(address: Address | None, allowed: Sequence[Network]) -> bool:
    """Whether the address is in one of these. An unknown address is in none."""
    return address is not None and any(
        address.version == network.version and address in network for network in allowed
    )


def client_address(
    peer: str | None, forwarded: Sequence[str], trusted: Sequence[Network]
) -> Address | None:
    """Who asked: the socket's peer, or the last address of `x-forwarded-for` that is not one of our
    proxies. None where that cannot be told."""
    address = _address(peer) if peer else None
    hops = [hop for header in forwarded for hop in header.split(",")]
    for hop in reversed(hops[-MAX_HOPS:]):
        if not within(address, trusted):
            break
        address = _address(hop.strip())
    return address


@lru_cache(maxsize=10_000)
def _address(text: str) -> Address | None:
    """`1.2.3.4`, `1.2.3.4:5`, `2001:db8::1`, `[2001:db8::1]:5`; IPv4 in IPv6 is IPv4."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
