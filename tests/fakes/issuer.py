"""An identity provider with real keys: signs tokens, and serves its key set as an httpx would."""

import json
from collections.abc import Mapping
from typing import Any, Final

import httpx
import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from gateway.trust import IssuerSettings

NAME: Final = "https://id.example"
AUDIENCE: Final = "meterline"
_RSA: Final = [rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2)]


class Issuer:
    """`signed` gives a token; `keys` is what it publishes, `fetch` how it is asked."""

    def __init__(self, name: str = NAME) -> None:
        self.name = name
        self.private: dict[str, Any] = {
            "rsa-1": _RSA[0],
            "ec-1": ec.generate_private_key(ec.SECP256R1()),
            "ed-1": ed25519.Ed25519PrivateKey.generate(),
        }
        self.hidden: set[str] = set()
        self.defaults: dict[str, Any] = {}
        self.fetches = 0
        self.down = False
        self.raw: bytes | None = None

    def rotate(self) -> None:
        """A new key beside the old ones; it must be fetched to be known."""
        self.private["rsa-2"] = _RSA[1]

    def jwks(self) -> bytes:
        algorithms = {"rsa": "RS256", "ec": "ES256", "ed": "EdDSA"}
        keys = []
        for kid, private in self.private.items():
            if kid not in self.hidden:
                algorithm = jwt.get_algorithm_by_name(algorithms[kid.split("-")[0]])
                public = json.loads(algorithm.to_jwk(private.public_key()))
                keys.append({**public, "kid": kid, "use": "sig"})
        return json.dumps({"keys": keys}).encode()

    async def fetch(self, _: IssuerSettings) -> bytes:
        self.fetches += 1
        if self.down:
            raise httpx.ConnectError("no connection")
        return self.jwks() if self.raw is None else self.raw

    def public_pem(self, kid: str) -> bytes:
        pem: bytes = (
            self.private[kid]
            .public_key()
            .public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )
        return pem

    def claims(self, now_s: float, **changed: Any) -> dict[str, Any]:
        """Of a token that is right, but for what is changed; None takes a claim out."""
        claims = {
            "iss": self.name,
            "aud": AUDIENCE,
            "sub": "ann",
            "tenant": "acme",
            "iat": int(now_s),
            "nbf": int(now_s),
            "exp": int(now_s) + 300,
            **self.defaults,
            **changed,
        }
        return {name: value for name, value in claims.items() if value is not None}

    def signed(
        self,
        now_s: float,
        *,
        kid: str = "rsa-1",
        algorithm: str = "RS256",
        header: Mapping[str, Any] | None = None,
        **changed: Any,
    ) -> str:
        return jwt.encode(
            self.claims(now_s, **changed),
            self.private[kid],
            algorithm=algorithm,
            headers={"kid": kid, **(header or {})},
        )

    def settings(self, **changed: Any) -> IssuerSettings:
        return IssuerSettings(
            **{
                "issuer": self.name,
                "audience": (AUDIENCE,),
                "jwks_url": f"{self.name}/keys",
                **changed,
            }
        )
