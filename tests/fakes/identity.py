"""A key store in memory that counts its questions and can be slow or gone."""

import asyncio

import msgspec

from gateway.errors import StoreUnavailable
from gateway.tenants import Identity


class FakeIdentityStore:
    """Implements `gateway.auth.IdentityStore`. `put` is a committed write."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.gone = False
        self.delay_s = 0.0
        self.too_many = False
        self.number = 0
        self._identities: dict[str, Identity] = {}
        self._changed: dict[str, int] = {}

    def put(self, identity: Identity) -> None:
        self.number += 1
        self._identities[identity.public_id] = identity
        self._changed[identity.public_id] = self.number

    async def identity(self, public_id: str) -> Identity | None:
        self.asked.append(public_id)
        found = self._identities.get(public_id)  # as of the start, like a query's snapshot
        await self._answer()
        return found

    async def version(self) -> int:
        await self._answer()
        return self.number

    async def changed_since(self, version: int) -> list[str] | None:
        await self._answer()
        if self.too_many:
            return None
        return [key for key, number in self._changed.items() if number > version]

    async def tenant_identity(self, ref: str) -> Identity | None:
        await self._answer()
        known = (x for x in self._identities.values() if ref in (x.tenant_id, x.tenant_name))
        return next(known, None)

    async def rehash(self, public_id: str, old: bytes, new: bytes) -> None:
        await self._answer()
        known = self._identities[public_id]
        assert known.secret_hmac == old
        self.put(msgspec.structs.replace(known, secret_hmac=new))

    async def _answer(self) -> None:
        if self.gone:
            raise StoreUnavailable("gone")
        await asyncio.sleep(self.delay_s)
