"""An engine that another process keeps alive: the workers of one machine share their parent's.

Seen from a worker it is what `supervisor.EngineProcess` is to its owner: ready or not, and waited
for. It starts and stops nothing. Invariant: `is_ready` is at most `check_s` old.
"""

import asyncio
import contextlib
from pathlib import Path

import httpx

from backends import egress
from backends.supervisor import EngineState, Patience

HEALTH_S = 5.0


class AttendedEngine:
    """Ask its health, in the background from `start` to `aclose`."""

    def __init__(self, name: str, socket_path: Path, *, patience: Patience | None = None) -> None:
        self.name = name
        self._socket_path = socket_path
        self._patience = patience or Patience()
        self._state = EngineState(phase="starting")
        self._changed = asyncio.Condition()
        self._asking: asyncio.Task[None] | None = None

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def is_ready(self) -> bool:
        return self._state.phase == "ready"

    async def start(self) -> None:
        self._asking = asyncio.create_task(self._ask(), name=f"engine {self.name}")

    async def wait_checked(self, timeout_s: float) -> bool:
        """True: whoever started it has waited for its check."""
        return True

    async def wait_ready(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.is_ready)
        return self.is_ready

    async def aclose(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
            self._asking = None

    async def _ask(self) -> None:
        base_url = f"{egress.UNIX_SCHEME}{self._socket_path}"
        was_ready = False
        async with egress.client(base_url, max_connections=1) as client:
            while True:
                is_ready = await _is_healthy(client)
                if is_ready:
                    await self._become(EngineState(phase="ready"))
                elif was_ready or self._state.phase != "starting":
                    await self._become(EngineState(phase="restarting"))
                was_ready = was_ready or is_ready
                await asyncio.sleep(self._patience.check_s if is_ready else self._patience.poll_s)

    async def _become(self, state: EngineState) -> None:
        if state != self._state:
            async with self._changed:
                self._state = state
                self._changed.notify_all()


async def _is_healthy(client: httpx.AsyncClient) -> bool:
    try:
        async with asyncio.timeout(HEALTH_S):
            response = await client.get(f"http://{egress.UNIX_HOST}/health")
    except (httpx.HTTPError, TimeoutError):
        return False
    return response.status_code == 200
