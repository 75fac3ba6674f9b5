"""One replica's Auth as a process: asks for one key again and again, and says whenever the answer
changes, with the time.

`python -m tests.fakes.auth_replica DATABASE_URL` with the key on stdin."""

import asyncio
import sys
import time

from gateway.auth import Auth, Credential
from gateway.errors import Unauthenticated
from gateway.keys import KeyRing
from gateway.tenants import Tenants
from telemetry.clock import SystemClock

PEPPER = bytes(range(32))


async def main(url: str, key: str) -> None:
    ring = KeyRing(PEPPER)
    tenants = Tenants.open(url, ring, SystemClock())
    last = None
    async with Auth(tenants, ring, SystemClock()) as auth:
        while last != "refused":
            try:
                await auth.identify(Credential(key))
                answer = "taken"
            except Unauthenticated:
                answer = "refused"
            if answer != last:
                sys.stdout.write(f"{answer} {time.time()}\n")
                sys.stdout.flush()
                last = answer
            await asyncio.sleep(0.005)
    await tenants.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.stdin.readline().strip()))
