"""`OpenAICompatible` over real sockets, against upstreams that behave and many that do not."""

import asyncio
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from backends import egress
from backends.base import (
    BackendAuth,
    BackendError,
    BackendFailed,
    BackendProtocol,
    BackendRateLimited,
    BackendRefused,
    BackendTimeout,
    BackendTruncated,
    BackendUnavailable,
    Chunk,
    Timeouts,
    Whole,
)
from backends.openai_compat import OpenAICompatible
from backends.settings import BackendSettings
from telemetry.usage import Usage, UsageSource
from telemetry.usage import from_openai as normalise
from tests.fakes.client import RecordingClient
from tests.fakes.requests import ask, asking, begin, final_of, text_of
from tests.fakes.upstream import (
    CUT,
    END,
    GOOD,
    STALL,
    USAGE_CHUNK,
    VARIANTS,
    Pause,
    Step,
    Upstream,
    delta,
    event,
    head,
    misbehaving,
    piece,
    whole,
)
from tests.services import free_port

KEY = "sk-canary-5f1d"


@asynccontextmanager
async def backend_to(base_url: str, **changes: Any) -> AsyncIterator[OpenAICompatible]:
    """A backend with a key of its own, allowed to reach loopback."""
    settings = BackendSettings(name="up", kind="openai", base_url=base_url, allow_private=True)
    client = egress.pool(base_url, allow_private=True, max_connections=4)
    backend = OpenAICompatible(settings, KEY, client, normalise=normalise, **changes)
    try:
        yield backend
    finally:
        await backend.aclose()


@asynccontextmanager
async def served(steps: Sequence[Step], **changes: Any) -> AsyncIterator[OpenAICompatible]:
    """A backend in front of an upstream that plays these steps."""
    async with Upstream(steps) as upstream, backend_to(upstream.base_url, **changes) as backend:
        yield backend


async def failure_of(steps: Sequence[Step], *, stream: bool = True, **changes: Any) -> BackendError:
    """The error that one attempt ends with; asserts that it carries no secret."""
    async with Upstream(steps) as upstream, backend_to(upstream.base_url, **changes) as backend:
        with pytest.raises(BackendError) as caught:
            await ask(backend, asking(stream=stream, timeouts=IMPATIENT))
        for secret in (KEY, upstream.base_url, str(upstream.port)):
            assert secret not in repr(caught.value.__dict__) + str(caught.value)
        return caught.value


IMPATIENT = Timeouts(connect_s=1.0, first_token_s=0.4, inter_token_s=0.3, total_s=3.0)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("good")])
async def test_every_good_framing_gives_the_same_answer(variant: str) -> None:
    """However the stream is framed and cut, the client gets the same chunks and the same end."""
    async with misbehaving(variant) as upstream, backend_to(upstream.base_url) as backend:
        events = await ask(backend, asking())
    chunks = [chunk for chunk in events if isinstance(chunk, Chunk)]
    assert text_of(events) == "Hello"
    assert [chunk.content_bytes for chunk in chunks] == [0, 3, 2, 0]
    final = final_of(events)
    assert final.usage == Usage(in_uncached_text=3, out_text=2)
    assert final.usage_source is UsageSource.REPORTED
    assert final.finish_reasons == ("stop",)
    assert final.answered_model == "m"
    assert final.usage_chunk is not None and event(final.usage_chunk) == event(USAGE_CHUNK)


async def test_chunks_are_forwarded_byte_for_byte() -> None:
    """Odd spacing, float spellings, unknown fields and non-ASCII text come out as they went in."""
    odd = (
        '{ "choices" : [ {"index":0,"delta":{"content":"é😀"},"x":1.50e0} ], "zzz": null }'.encode()
    )
    steps = (head(), piece(event(odd)), piece(event(delta(None, finish="stop"))), END)
    async with served(steps) as backend:
        events = await ask(backend, asking())
    assert events[0] == Chunk(odd, 6)


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("cut", BackendTruncated),
        ("cut in an event", BackendTruncated),
        ("ends in an event", BackendTruncated),
        ("ends without finish", BackendTruncated),
        ("DONE without finish", BackendTruncated),
        ("one of two choices", BackendTruncated),
        ("empty stream", BackendTruncated),
        ("reset", BackendTruncated),
        ("half close", BackendTruncated),
        ("garbage", BackendProtocol),
        ("garbage chunk", BackendTruncated),
        ("error event", BackendFailed),
        ("huge event", BackendProtocol),
        ("stall", BackendTimeout),
        ("stall before", BackendTimeout),
        ("only comments", BackendTimeout),
        ("silent", BackendTimeout),
        ("closes at once", BackendFailed),
        ("resets at once", BackendFailed),
        ("not HTTP", BackendFailed),
        ("redirect", BackendProtocol),
        ("error under 200", BackendFailed),
        ("html", BackendProtocol),
        ("gzip", BackendProtocol),
        ("huge headers", BackendFailed),
    ],
)
async def test_every_misbehaviour_has_its_error(variant: str, kind: type[BackendError]) -> None:
    """A stream never lies: what is not complete never ends in Final."""
    error = await failure_of(VARIANTS[variant], max_event_bytes=1 << 20)
    assert type(error) is kind


def test_every_variant_is_tried() -> None:
    """No misbehaviour of the fake goes untested here."""
    marks = test_every_misbehaviour_has_its_error.pytestmark  # type: ignore[attr-defined]  # set by pytest
    tried = {variant for variant, _ in marks[0].args[1]}
    assert tried == {name for name in VARIANTS if not name.startswith("good")}


@pytest.mark.parametrize(
    ("variant", "phase"),
    [
        ("silent", "first_token"),
        ("stall before", "first_token"),
        ("only comments", "first_token"),
        ("stall", "inter_token"),
    ],
)
async def test_timeouts_name_their_phase(variant: str, phase: str) -> None:
    """A role chunk or a comment is no first token; silence after a token is between tokens."""
    error = await failure_of(VARIANTS[variant])
    assert isinstance(error, BackendTimeout)
    assert error.phase == phase


async def test_a_slow_drip_meets_the_total() -> None:
    """Tokens that keep coming do not outlast the total."""
    drip = [step for _ in range(100) for step in (piece(event(delta("a"))), Pause(0.05))]
    async with served((head(), *drip)) as backend:
        with pytest.raises(BackendTimeout) as caught:
            await ask(backend, asking(timeouts=Timeouts(inter_token_s=5, total_s=0.3)))
    assert caught.value.phase == "total"


async def test_a_slow_reader_is_not_a_slow_upstream() -> None:
    """Time that the consumer takes between chunks does not count as silence between tokens."""
    async with served((*GOOD[:-1], Pause(0.05), END)) as backend:
        timeouts = Timeouts(first_token_s=5, inter_token_s=0.2, total_s=10)
        count = 0
        async for _ in backend.chat(asking(timeouts=timeouts)):
            count += 1
            await asyncio.sleep(0.25)
    assert count == 5


async def test_a_whole_answer_waits_for_the_total_alone() -> None:
    """The first byte of a whole answer comes when all of it is generated."""
    answer = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}
    async with served((Pause(0.3), *whole(answer))) as backend:
        timeouts = Timeouts(first_token_s=0.1, inter_token_s=0.1, total_s=5)
        events = await ask(backend, asking(stream=False, timeouts=timeouts))
    assert text_of(events) == "hi"
    error = await failure_of((STALL,), stream=False)
    assert isinstance(error, BackendTimeout) and error.phase == "total"


async def test_a_whole_answer_is_forwarded_byte_for_byte() -> None:
    """With its usage, model and id read from a copy."""
    body = (
        b'{ "id":"chatcmpl-9", "model":"m-2024", "choices":[{"index":0,"message":'
        b'{"content":"hi"},"finish_reason":"stop"}], "usage":{"prompt_tokens":3,'
        b'"completion_tokens":1}, "x": 1.0e0 }'
    )
    async with served(whole(body)) as backend:
        first, final = await ask(backend, asking(stream=False))
    assert first == Whole(body, 2)
    final = final_of([final])
    assert final.answered_model == "m-2024"
    assert final.provider_request_id == "chatcmpl-9"
    assert final.usage == Usage(in_uncached_text=3, out_text=1)


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        pytest.param(whole({"error": {"message": "m", "code": 400}}), BackendRefused, id="error"),
        pytest.param(whole(b"hello", 200, "text/plain"), BackendProtocol, id="text"),
        pytest.param(whole({"object": "list"}), BackendProtocol, id="no choices"),
        pytest.param(GOOD, BackendProtocol, id="a stream"),
        pytest.param(
            (head(200, "application/json"), piece(b'{"cho'), CUT), BackendTruncated, id="cut"
        ),
        pytest.param(
            (head(200, "application/json"), *[piece(b" " * 65_536)] * 40, END),
            BackendProtocol,
            id="too large",
        ),
        pytest.param(
            whole({"choices": [{"index": 0, "message": {"content": "a"}}]}),
            BackendTruncated,
            id="unfinished",
        ),
    ],
)
async def test_whole_answers_that_are_none(steps: Sequence[Step], kind: type[BackendError]) -> None:
    """A 200 is believed only when its body is an answer."""
    assert type(await failure_of(steps, stream=False, max_answer_bytes=1 << 20)) is kind


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BackendRefused),
        (401, BackendAuth),
        (403, BackendAuth),
        (404, BackendRefused),
        (429, BackendRateLimited),
        (500, BackendFailed),
        (503, BackendFailed),
    ],
)
async def test_statuses(status: int, kind: type[BackendError], stream: bool) -> None:
    """Streamed or whole, a status means the same, and a refusal passes the upstream's object on."""
    body = {"error": {"message": f"no {KEY} here", "type": "t", "param": "p", "code": "c"}}
    error = await failure_of(whole(body, status), stream=stream)
    assert type(error) is kind
    assert error.status == status
    if isinstance(error, BackendRefused):
        assert (error.message, error.error_type, error.param) == ("no … here", "t", "p")


async def test_retry_after_reaches_the_dispatcher() -> None:
    """Milliseconds win over seconds."""
    steps = (head(429, "application/json", retry_after="9", retry_after_ms="1250"), END)
    assert (await failure_of(steps)).retry_after_s == 1.25


async def test_an_error_body_that_never_ends_does_not_hold_us() -> None:
    """The status is known without it."""
    began = time.monotonic()
    error = await failure_of((head(500, "application/json"), piece(b"{"), STALL))
    assert type(error) is BackendFailed
    assert time.monotonic() - began < 3.0


async def test_only_these_headers_go_up() -> None:
    """Our credential, what describes the body, the trace and the request id: nothing else."""
    async with Upstream(GOOD) as upstream, backend_to(upstream.base_url) as backend:
        await ask(backend, asking(traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01"))
    headers = upstream.received[0].headers
    assert set(headers) == {
        "accept",
        "accept-encoding",
        "authorization",
        "content-length",
        "content-type",
        "host",
        "traceparent",
        "user-agent",
        "x-request-id",
    }
    assert headers["authorization"] == f"Bearer {KEY}"
    assert headers["x-request-id"] == "req-1"
    assert headers["user-agent"].startswith("meterline/")
    assert upstream.received[0].path == "/v1/chat/completions"


async def test_the_trace_stays_from_third_parties() -> None:
    """A backend that is not ours and not on a private network gets no traceparent."""
    settings = BackendSettings(name="up", kind="openai", base_url="https://api.example/v1")
    client = RecordingClient()
    backend = OpenAICompatible(settings, None, client, normalise=normalise)
    with pytest.raises(BackendFailed):
        await ask(backend, asking(traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01"))
    await backend.aclose()
    names = {name for name, _ in client.seen[0].headers}
    assert names.isdisjoint({b"traceparent", b"authorization"})


async def test_cookies_are_not_kept() -> None:
    """What an upstream sets for one tenant's request is not sent with the next one's."""
    steps = (head(set_cookie="session=1; Path=/"), *GOOD[1:])
    async with Upstream(steps) as upstream, backend_to(upstream.base_url) as backend:
        await ask(backend, asking())
        await ask(backend, asking())
    assert len(upstream.received) == 2
    assert "cookie" not in upstream.received[1].headers


async def test_connections_are_used_again() -> None:
    """After a complete stream and after an error with a body."""
    async with Upstream(GOOD) as upstream, backend_to(upstream.base_url) as backend:
        for _ in range(3):
            await ask(backend, asking())
        assert upstream.connections == 1


async def test_an_open_end_after_done_delays_little() -> None:
    """A server that keeps the connection open after [DONE] has still ended its answer."""
    began = time.monotonic()
    async with (
        misbehaving("good, stays open") as upstream,
        backend_to(upstream.base_url) as backend,
    ):
        await ask(backend, asking())
    assert time.monotonic() - began < 1.5


async def test_closing_the_iterator_cancels_upstream_at_once() -> None:
    """The upstream sees the connection end within 100 ms."""
    async with misbehaving("stall") as upstream, backend_to(upstream.base_url) as backend:
        events = begin(backend, asking())
        await anext(events)
        closed = time.monotonic()
        await events.aclose()
        async with asyncio.timeout(2):
            while upstream.gone_at is None:
                await asyncio.sleep(0.005)
    assert upstream.gone_at - closed < 0.1


@pytest.mark.parametrize("variant", ["silent", "stall"])
async def test_cancelling_the_task_cancels_upstream_at_once(variant: str) -> None:
    """Before the first byte and in the middle alike."""
    async with misbehaving(variant) as upstream, backend_to(upstream.base_url) as backend:
        task = asyncio.create_task(ask(backend, asking()))
        await asyncio.sleep(0.15)
        cancelled = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(2):
            while upstream.gone_at is None:
                await asyncio.sleep(0.005)
    assert upstream.gone_at - cancelled < 0.1


async def test_refused_and_unresolvable_connections() -> None:
    """No connection is BackendUnavailable, and says no address."""
    port = free_port()
    for base_url in (f"http://127.0.0.1:{port}/v1", "http://no-such-host.invalid/v1"):
        async with backend_to(base_url) as backend:
            with pytest.raises(BackendUnavailable) as caught:
                await ask(backend, asking())
            assert str(port) not in str(caught.value)
            assert not await backend.is_ready()


async def test_a_full_pool_is_a_connect_timeout() -> None:
    """With every connection busy, the next attempt waits for one no longer than connect_s."""
    async with misbehaving("stall") as upstream, backend_to(upstream.base_url) as backend:
        busy = [begin(backend, asking()) for _ in range(4)]
        for events in busy:
            await anext(events)
        with pytest.raises(BackendTimeout) as caught:
            await ask(backend, asking(timeouts=Timeouts(connect_s=0.2)))
        assert caught.value.phase == "connect"
        for events in busy:
            await events.aclose()


async def test_an_internal_address_is_refused_unless_allowed() -> None:
    """Deny by default, before any byte is sent."""
    async with Upstream(GOOD) as upstream:
        for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]"):
            settings = BackendSettings(
                name="up", kind="openai", base_url=f"http://{host}:{upstream.port}/v1"
            )
            backend = OpenAICompatible(
                settings, KEY, egress.pool(settings.base_url or ""), normalise=normalise
            )
            with pytest.raises(BackendUnavailable, match="internal address"):
                await ask(backend, asking())
            await backend.aclose()
        assert upstream.connections == 0


async def test_a_unix_socket_is_reached(tmp_path: Path) -> None:
    """`unix:///path` speaks to the socket, under /v1, and asks an engine for its health."""
    upstream = Upstream(GOOD)
    server = await asyncio.start_unix_server(upstream._serve, tmp_path / "e.sock")
    async with server, backend_to(f"unix://{tmp_path}/e.sock", is_engine=True) as backend:
        request = asking(cache_salt="salt", priority=3)
        events = await ask(backend, request)
        assert await backend.is_ready()
    assert text_of(events) == "Hello"
    assert final_of(events).usage_source is UsageSource.ENGINE
    assert upstream.received[0].path == "/v1/chat/completions"
    assert b'"cache_salt":"salt"' in upstream.received[0].body
    deadline_s = min(request.timeouts.first_token_s, request.timeouts.total_s)
    assert upstream.received[0].headers["x-meterline-deadline-ms"] == f"{deadline_s * 1000:.0f}"
    assert upstream.received[1].path == "/health"


async def test_a_certificate_of_nobody_is_refused(tmp_path: Path) -> None:
    """TLS is verified, and cannot be switched off."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-keyout", tmp_path / "k.pem", "-out", tmp_path / "c.pem", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "c.pem", tmp_path / "k.pem")
    upstream = Upstream(GOOD)
    server = await asyncio.start_server(upstream._serve, "127.0.0.1", 0, ssl=context)
    base_url = f"https://localhost:{server.sockets[0].getsockname()[1]}/v1"
    settings = BackendSettings(name="up", kind="openai", base_url=base_url, allow_private=True)
    trusting = ssl.create_default_context(cafile=str(tmp_path / "c.pem"))
    async with server:
        stranger = OpenAICompatible(
            settings, KEY, egress.pool(base_url, allow_private=True), normalise=normalise
        )
        with pytest.raises(BackendUnavailable):
            await ask(stranger, asking())
        await stranger.aclose()
        friend = OpenAICompatible(
            settings,
            KEY,
            egress.pool(base_url, allow_private=True, ssl_context=trusting),
            normalise=normalise,
        )
        assert text_of(await ask(friend, asking())) == "Hello"
        await friend.aclose()
    assert len(upstream.received) == 1


async def test_is_ready_asks_with_our_key() -> None:
    """A list of models answers, another status does not."""
    async with Upstream(whole({"data": []})) as upstream, backend_to(upstream.base_url) as backend:
        assert await backend.is_ready()
    assert upstream.received[0].path == "/v1/models"
    assert upstream.received[0].headers["authorization"] == f"Bearer {KEY}"
    async with served(whole({}, 401)) as backend:
        assert not await backend.is_ready()
