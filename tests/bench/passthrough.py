"""The least that a Python proxy can be: one ASGI function and httpx, no key check, no ledger. The
gateway's cost is told as a ratio to it. `python -m tests.bench.passthrough PORT UPSTREAM_PORT`"""

import sys
from typing import Any

import httpx
import uvicorn


class Passthrough:
    """Forwards the body, whole or streamed."""

    def __init__(self, upstream: int) -> None:
        self._url = f"http://127.0.0.1:{upstream}/v1/chat/completions"
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=1000, max_keepalive_connections=1000),
            timeout=60,
            trust_env=False,
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", self._url, content=body, headers=headers) as answer:
            kind = answer.headers["content-type"].encode()
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
            )
            async for part in answer.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


if __name__ == "__main__":
    uvicorn.run(
        Passthrough(int(sys.argv[2])),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        lifespan="off",
        log_level="warning",
        access_log=False,
    )
