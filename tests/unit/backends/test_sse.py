"""The SSE parser: the specification's cases, and any chunking against a naive reference."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.sse import EventTooLarge, ServerEvent, SSEParser


def parse(*chunks: bytes, limit: int = 1 << 20) -> list[ServerEvent]:
    """All events of a stream that arrives in these chunks."""
    parser = SSEParser(max_event_bytes=limit)
    return [event for chunk in chunks for event in parser.feed(chunk)] + parser.end()


def reference(stream: bytes) -> list[ServerEvent]:
    """The specification line by line, over the whole stream at once."""
    stream = stream.removeprefix(b"\xef\xbb\xbf")
    lines: list[bytes] = []
    current = bytearray()
    position = 0
    while position < len(stream):
        byte = stream[position : position + 1]
        if byte in (b"\r", b"\n"):
            if byte == b"\r" and stream[position + 1 : position + 2] == b"\n":
                position += 1
            lines.append(bytes(current))
            current.clear()
        else:
            current += byte
        position += 1
    if current:
        lines.append(bytes(current))
    lines.append(b"")  # the end closes what is open
    events: list[ServerEvent] = []
    data: list[bytes] = []
    name = last_id = ""
    for line in lines:
        if line == b"":
            if data:
                events.append(ServerEvent(b" ".join(data), name or "message", last_id))
            data, name = [], ""
            continue
        field, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode(errors="replace")
        elif field == b"id" and b"\0" not in value:
            last_id = value.decode(errors="replace")
    return events


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        pytest.param(b"data: a\n\n", [b"a"], id="one"),
        pytest.param(b"data: a\n\ndata: b\n\n", [b"a", b"b"], id="two in one read"),
        pytest.param(b"data:a\n\n", [b"a"], id="no space"),
        pytest.param(b"data:  a\n\n", [b" a"], id="only one space is removed"),
        pytest.param(b"data: a\ndata: b\n\n", [b"a b"], id="several lines"),
        pytest.param(b"data\n\n", [b""], id="field without colon"),
        pytest.param(b"data: \n\n", [b""], id="empty data"),
        pytest.param(b": ping\n\ndata: a\n\n", [b"a"], id="comment"),
        pytest.param(b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"], id="CRLF"),
        pytest.param(b"data: a\r\rdata: b\r\r", [b"a", b"b"], id="CR"),
        pytest.param(b"data: a\r\n\ndata: b\n\r\n", [b"a", b"b"], id="mixed line ends"),
        pytest.param(b"\xef\xbb\xbfdata: a\n\n", [b"a"], id="byte order mark"),
        pytest.param(b"foo: x\nretry: 5\ndata: a\n\n", [b"a"], id="unknown fields"),
        pytest.param(b"data: a\n", [b"a"], id="no blank line at the end"),
        pytest.param(b"data: a", [b"a"], id="no line end at the end"),
        pytest.param(b"\n\n\n", [], id="blank lines alone"),
        pytest.param(b"", [], id="nothing"),
        pytest.param("data: é–😀\n\n".encode(), ["é–😀".encode()], id="UTF-8"),
        pytest.param(b"data: \xff\xfe\n\n", [b"\xff\xfe"], id="not UTF-8, kept"),
    ],
)
def test_data_of_each_framing(stream: bytes, expected: list[bytes]) -> None:
    """Each framing that the specification allows gives the same data, read whole or by bytes."""
    assert [event.data for event in parse(stream)] == expected
    assert parse(*(bytes([byte]) for byte in stream)) == parse(stream) == reference(stream)


def test_event_and_id_fields() -> None:
    """`event` names one event, `id` stays until the next one, an id with NUL is ignored."""
    events = parse(b"event: error\nid: 7\ndata: a\n\ndata: b\n\nid: x\0y\ndata: c\n\n")
    assert events == [
        ServerEvent(b"a", "error", "7"),
        ServerEvent(b"b", "message", "7"),
        ServerEvent(b"c", "message", "7"),
    ]


def test_an_event_name_does_not_outlive_its_event() -> None:
    """A name without data is dropped at the blank line."""
    assert parse(b"event: error\n\ndata: a\n\n") == [ServerEvent(b"a")]


@pytest.mark.parametrize("size", [1, 7, 64])
def test_an_event_beyond_the_limit_is_refused(size: int) -> None:
    """The limit holds for a line that never ends and for many short lines alike."""
    endless = b"data: " + b"x" * 300
    chunks = [endless[i : i + size] for i in range(0, len(endless), size)]
    with pytest.raises(EventTooLarge):
        parse(*chunks, limit=200)
    with pytest.raises(EventTooLarge):
        parse(*[b"data: 12345678\n"] * 40, limit=200)


def test_many_small_events_are_not_one_large_one() -> None:
    """The limit is per event, also when one read holds many."""
    assert len(parse(b"data: 12345678\n\n" * 100, limit=64)) == 100


_line = st.sampled_from(
    [b"data: ", b"data:", b"data", b": c", b"event: e", b"id: 1", b"id: a\0", b"x: y", b"", b""]
)
_text = st.text(max_size=6).map(lambda text: text.encode("utf-8", "surrogatepass"))
_end = st.sampled_from([b"\n", b"\r", b"\r\n", b"\n\n", b"\n\n"])
_streams = st.builds(
    lambda bom, lines: bom + b"".join(a + b + c for a, b, c in lines),
    st.sampled_from([b"", b"\xef\xbb\xbf", b"\xef\xbb"]),
    st.lists(st.tuples(_line, _text, _end), max_size=12),
)


@given(_streams, st.lists(st.integers(min_value=0, max_value=200), max_size=20))
def test_any_chunking_equals_the_reference(stream: bytes, cuts: list[int]) -> None:
    """Whatever the bytes and wherever they are cut, the events are the reference's."""
    points = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    chunks = [stream[a:b] for a, b in pairwise(points)]
    assert parse(*chunks) == reference(stream)


@given(st.binary(max_size=80), st.integers(min_value=1, max_value=9))
def test_any_bytes_equal_the_reference(stream: bytes, size: int) -> None:
    """Garbage is parsed as the specification says, and never raises."""
    assert parse(*(stream[i : i + size] for i in range(0, len(stream), size))) == reference(stream)
