"""What a client may send that no client should, over a real socket: each is a clear 4xx in the
shape of every other error, in bounded memory, and the next request is served as ever."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import brotli
import pytest
import pytest_asyncio
import zstandard

from gateway.api import bodies
from gateway.api.protocol import Protocol
from gateway.errors import BadRequest, BodyTooLarge
from tests.fakes.gateway import Harness, error_of, route, running

MESSAGES = '"messages":[{"role":"user","content":"hi"}]'
GOOD = f'{{"model":"m",{MESSAGES}}}'.encode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """A gateway whose backend answers with four tokens; bodies of at most 1 MB, in 0.5 s."""
    tables = '[[backends]]\nname = "s"\nkind = "scripted"\nscript = { output_tokens = 4 }\n'
    folder = tmp_path_factory.mktemp("bad")
    async with running(
        folder, server="body_timeout_s = 0.5", tables=tables + route("m", "s")
    ) as it:
        yield it


in_loop = pytest.mark.asyncio(loop_scope="module")


async def raw(gateway: Harness, data: bytes, *rest: bytes, pause_s: float = 0) -> tuple[int, str]:
    """Status and body of the answer to these bytes, and whatever follows them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.port)
    writer.write(data)
    writing = asyncio.create_task(_drip(writer, rest, pause_s))
    try:
        async with asyncio.timeout(20):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
            return int(head.split(" ")[1]), (await reader.readexactly(length)).decode()
    finally:
        writing.cancel()
        writer.close()


async def _drip(writer: asyncio.StreamWriter, parts: tuple[bytes, ...], pause_s: float) -> None:
    for part in parts:
        await asyncio.sleep(pause_s)
        writer.write(part)


def request(gateway: Harness, length: int, *headers: str, key: str | None = None) -> bytes:
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: x",
        f"authorization: Bearer {key or gateway.key}",
        "content-type: application/json",
        f"content-length: {length}",
        *headers,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def post(gateway: Harness, body: bytes, **headers: str) -> tuple[int, str, dict[str, str]]:
    named = {"content-type": "application/json", **gateway.auth}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await gateway.client.post("/v1/chat/completions", content=body, headers=named)
    return answer.status_code, answer.text, dict(answer.headers)


async def is_unharmed(gateway: Harness) -> None:
    """The next request is served, nothing is open, and the books hold."""
    status, _, _ = await post(gateway, GOOD)
    assert status == 200
    async with asyncio.timeout(10):
        while gateway.service.gateway.ledger.in_flight:
            await asyncio.sleep(0.005)


def bomb(encoding: str, size: int = 100_000_000) -> bytes:
    """A few bytes that become `size`."""
    piece = bytes(1_000_000)
    if encoding == "br":
        packer = brotli.Compressor(quality=5)
        return b"".join(packer.process(piece) for _ in range(size // len(piece))) + packer.finish()
    if encoding == "zstd":
        return zstandard.ZstdCompressor(level=1).compress(bytes(size))
    wbits = {"gzip": 31, "deflate": 15}[encoding]
    deflater = zlib.compressobj(9, wbits=wbits)
    return b"".join(deflater.compress(piece) for _ in range(size // len(piece))) + deflater.flush()


PACKERS = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.compress,
}


@in_loop
@pytest.mark.parametrize("encoding", list(PACKERS))
async def test_compressed_bodies(gateway: Harness, encoding: str) -> None:
    """The four encodings of the web are read, in one piece or several members and frames."""
    pack = PACKERS[encoding]
    assert (await post(gateway, pack(GOOD), content_encoding=encoding))[0] == 200
    if encoding in ("gzip", "zstd"):
        twice = pack(GOOD[:10]) + pack(GOOD[10:])
        assert (await post(gateway, twice, content_encoding=encoding))[0] == 200


@in_loop
async def test_deflate_without_a_header(gateway: Harness) -> None:
    """As many clients send it, whatever the standard says."""
    deflater = zlib.compressobj(wbits=-15)
    packed = deflater.compress(GOOD) + deflater.flush()
    assert (await post(gateway, packed, content_encoding="deflate"))[0] == 200


@in_loop
@pytest.mark.parametrize("encoding", list(PACKERS))
async def test_bombs(gateway: Harness, encoding: str) -> None:
    """A hundred megabytes in a few: refused as soon as the limit is passed."""
    packed = bomb(encoding)
    assert len(packed) < 1_000_000
    status, text, _ = await post(gateway, packed, content_encoding=encoding)
    assert (status, error_of(text)["code"]) == (413, "request_too_large")
    await is_unharmed(gateway)


@pytest.mark.parametrize("encoding", list(PACKERS))
def test_a_bomb_is_never_whole(encoding: str) -> None:
    """What is made of it before it is refused is little more than the limit."""
    sizes: list[int] = []

    def counted(parts: Iterator[bytes]) -> Iterator[bytes]:
        for part in parts:
            sizes.append(len(part))
            yield part

    decode = bodies._DECODERS[encoding.encode()]
    packed = bomb(encoding)
    with pytest.raises(BodyTooLarge):
        bodies.decompress(packed, encoding.encode(), 1_000_000)
    for _ in counted(decode(packed)):
        if sum(sizes) > 1_000_000:
            break
    assert sum(sizes) < 1_000_000 + 256 // 4 * 131_072  # a feed of zstd; the others stay far below


@pytest.mark.parametrize("encoding", list(PACKERS))
def test_what_is_not_in_that_encoding(encoding: str) -> None:
    """Garbage and what is cut off are refused, in whatever place it is cut."""
    packed = PACKERS[encoding](GOOD * 50)
    for broken in (b"garbage", *(packed[:size] for size in range(1, len(packed), 7))):
        with pytest.raises(BadRequest) as refused:
            bodies.decompress(broken, encoding.encode(), 1_000_000)
        assert refused.value.code == "invalid_encoding"


NESTED = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"metadata":%s}'
REFUSED: dict[str, tuple[bytes, int, str]] = {
    "nested 1,000 deep": (NESTED % (b"[" * 100_000 + b"]" * 100_000), 400, "invalid_json"),
    "nested objects": (NESTED % (b'{"a":' * 50_000 + b"1" + b"}" * 50_000), 400, "invalid_json"),
    "10,000 messages": (
        json.dumps(
            {"model": "m", "messages": [{"role": "user", "content": "x"}] * 10_000}
        ).encode(),
        400,
        "array_above_max_length",
    ),
    "model twice": (f'{{"model":"m","model":"n",{MESSAGES}}}'.encode(), 400, "duplicate_field"),
    "model twice, disguised": (
        f'{{"model":"m","mod\\u0065l":"n",{MESSAGES}}}'.encode(),
        400,
        "duplicate_field",
    ),
    "limit twice": (
        f'{{"model":"m","max_tokens":1,"max_tokens":9,{MESSAGES}}}'.encode(),
        400,
        "duplicate_field",
    ),
    "NaN": (f'{{"model":"m","temperature":NaN,{MESSAGES}}}'.encode(), 400, "invalid_json"),
    "NaN, unread": (
        f'{{"model":"m","x":NaN,{MESSAGES}}}'.encode(),
        400,
        "invalid_json",
    ),
    "Infinity": (f'{{"model":"m","top_p":-Infinity,{MESSAGES}}}'.encode(), 400, "invalid_json"),
    "lone surrogate": (
        b'{"model":"m","messages":[{"role":"user","content":"\\ud83d"}]}',
        400,
        "invalid_json",
    ),
    "not UTF-8": (GOOD.replace(b"hi", b"h\xff"), 400, "invalid_json"),
    "a huge number": (GOOD[:-1] + b',"n":' + b"9" * 5_000 + b"}", 400, "invalid_type"),
    "trailing bytes": (GOOD + b"{}", 400, "invalid_json"),
    "nothing": (b"", 400, "invalid_json"),
    "null bytes": (b"\0" * 1000, 400, "invalid_json"),
}


@in_loop
@pytest.mark.parametrize("name", list(REFUSED))
async def test_bodies_that_are_none(gateway: Harness, name: str) -> None:
    """Each is told what is wrong with it, with the headers of every answer."""
    body, status, code = REFUSED[name]
    found, text, headers = await post(gateway, body)
    assert (found, error_of(text)["code"]) == (status, code), text
    assert headers["x-should-retry"] == "false"
    assert headers["x-request-id"]
    assert int(headers["openai-processing-ms"]) >= 0
    await is_unharmed(gateway)


@in_loop
@pytest.mark.parametrize(
    "media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
async def test_wrong_content_type(gateway: Harness, media: str) -> None:
    """Only JSON is JSON."""
    status, text, _ = await post(gateway, GOOD, content_type=media)
    assert (status, error_of(text)["code"]) == (415, "unsupported_media_type")


@in_loop
async def test_headers_of_64_kb(gateway: Harness) -> None:
    """In one write or many, one header or a thousand, finished or not."""
    one = f"x-filler: {'y' * 70_000}"
    many = [f"x-filler-{number}: {'y' * 60}" for number in range(1_000)]
    for lines in ([one], many):
        status, text = await raw(gateway, request(gateway, 0, *lines))
        assert (status, error_of(text)["code"]) == (431, "headers_too_large")
    endless = request(gateway, 0, "x-filler: ")[:-4]
    status, text = await raw(gateway, endless, *([b"y" * 10_000] * 7), pause_s=0.002)
    assert (status, error_of(text)["code"]) == (431, "headers_too_large")
    await is_unharmed(gateway)


@in_loop
async def test_headers_below_64_kb(gateway: Harness) -> None:
    """Long ones are served, and a large body in the same write is not taken for a head."""
    data = request(gateway, len(GOOD), f"x-filler: {'y' * 60_000}") + GOOD
    assert (await raw(gateway, data))[0] == 200
    big = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 900_000}]})
    assert (await raw(gateway, request(gateway, len(big)) + big.encode()))[0] == 200


@in_loop
async def test_slow_bodies(gateway: Harness) -> None:
    """A body that comes a byte at a time is not waited for; one that flows is."""
    data = request(gateway, 100)
    status, text = await raw(gateway, data, *([b"{"] * 60), pause_s=0.02)
    assert (status, error_of(text)["code"]) == (408, "request_timeout")
    await is_unharmed(gateway)
    content = "x" * 200_000
    big = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    parts = [big[start : start + 20_000] for start in range(0, len(big), 20_000)]
    assert (await raw(gateway, request(gateway, len(big)), *parts, pause_s=0.1))[0] == 200


@in_loop
async def test_slow_heads(gateway: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a connection that says nothing nor one that never ends its head is kept."""
    monkeypatch.setattr(Protocol, "head_s", 0.2)
    for said in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"):
        status, text = await raw(gateway, said)
        assert (status, error_of(text)["code"]) == (408, "request_timeout")


@in_loop
async def test_what_is_not_http(gateway: Harness) -> None:
    """An error in the shape of the others, and the end of the connection."""
    status, text = await raw(gateway, b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
    assert (status, error_of(text)["code"]) == (400, "invalid_request")


@in_loop
async def test_a_large_body_of_nobody_is_not_kept(gateway: Harness) -> None:
    """Beyond a megabyte a body is read only for a key that is known; who has none hears that."""
    settings = gateway.service.gateway.runtimes.current.config.server
    assert settings.max_body_mb == 1
    seen: list[str] = []

    async def admit() -> None:
        seen.append("asked")
        raise BadRequest("no")

    async def receive() -> dict[str, object]:
        seen.append("read")
        return {"type": "http.request", "body": b"x" * 400_000, "more_body": True}

    headers = {b"content-length": b"5000000"}
    with pytest.raises(BadRequest):
        await bodies.read(headers, receive, 10_000_000, 5, admit)  # type: ignore[arg-type]
    assert seen[:2] == ["asked", "read"]  # and what is read is thrown away
    seen.clear()
    with pytest.raises(BadRequest):
        await bodies.read({}, receive, 10_000_000, 5, admit)  # type: ignore[arg-type]
    assert seen[:4] == ["read", "read", "read", "asked"]
    status, text = await raw(
        gateway, request(gateway, len(GOOD), key="sk-ml-unknown-unknown") + GOOD
    )
    assert (status, error_of(text)["code"]) == (401, "invalid_api_key")


@in_loop
async def test_64_mb(tmp_path: Path) -> None:
    """A body of 64 MB goes through, and what the gateway holds of it is the body, twice at most:
    as it came, and put together."""
    tables = '[[backends]]\nname = "s"\nkind = "scripted"\nscript = { output_tokens = 1 }\n'
    server = "max_body_mb = 70"
    async with running(tmp_path, server=server, tables=tables + route("m", "s")) as gateway:
        body = b'{"model":"m","messages":[{"role":"user","content":"%s"}]}' % (b"x" * 64_000_000)
        assert (await post(gateway, body))[0] == 200
