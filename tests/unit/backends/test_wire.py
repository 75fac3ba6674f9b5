"""The OpenAI wire: what is sent, what is read, and what an error means."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import (
    BackendAuth,
    BackendError,
    BackendFailed,
    BackendProtocol,
    BackendRateLimited,
    BackendRefused,
    BackendTooLate,
    BackendTruncated,
    ChatRequest,
    Timeouts,
)
from backends.wire import (
    AnswerReader,
    error_in_answer,
    error_of_status,
    label,
    retry_after_s,
    upstream_body,
)
from telemetry.record import DeviceTime, Timings
from telemetry.usage import Usage, UsageSource, from_engine
from telemetry.usage import from_openai as normalise


def asked(body: bytes, **changes: Any) -> ChatRequest:
    """A request for model `m` with this body."""
    fields: dict[str, Any] = {
        "surface": "chat",
        "model": "m",
        "body": body,
        "stream": False,
        "timeouts": Timeouts(),
        "request_id": "r1",
    }
    return ChatRequest(**{**fields, **changes})


def sent(body: bytes, *, is_engine: bool = False, **changes: Any) -> bytes:
    """What goes upstream for it."""
    return upstream_body(asked(body, **changes), is_engine=is_engine, backend="b")


def reader(**changes: Any) -> AnswerReader:
    """A reader of OpenAI's family."""
    return AnswerReader(**{"backend": "b", "normalise": normalise, **changes})


def chunk(**fields: Any) -> bytes:
    """A chunk's JSON."""
    return json.dumps({"id": "c1", "model": "m-2", **fields}).encode()


def choice(index: int = 0, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    """A choice of a chunk."""
    return {"index": index, "delta": delta, "finish_reason": finish}


# --- bodies


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[]}',
        b' { "model" : "m" ,\n"messages": [ {"a" : 1.10} ], "seed": 12345678901234567890123 } \n',
        b'{"model":"m","stream":false,"x":{"model":"other"}}',
        b'{"messages":[{"content":"say \\"model\\":1"}],"model":"m"}',
    ],
)
def test_a_body_that_fits_is_sent_byte_for_byte(body: bytes) -> None:
    """Nothing changes, white space included, when model and stream are right."""
    assert sent(body) == body


def test_only_the_model_is_replaced() -> None:
    """Floats, big integers, key order and unknown fields survive a renamed model."""
    body = b'{"a":1.50,"model":"alias","big":123456789012345678901234567890,"z":[1,  2.0e0]}'
    assert sent(body) == body.replace(b'"alias"', b'"m"')


def test_a_stream_always_asks_for_usage() -> None:
    """`include_usage` is added, other stream options stay."""
    body = b'{"model":"m","stream":true}'
    assert sent(body, stream=True) == body[:-1] + b',"stream_options":{"include_usage":true}}'
    body = b'{"model":"m","stream":true,"stream_options":{"include_obfuscation":false}}'
    assert json.loads(sent(body, stream=True))["stream_options"] == {
        "include_obfuscation": False,
        "include_usage": True,
    }
    body = b'{"model":"m","stream":true,"stream_options":{"include_usage": true}}'
    assert sent(body, stream=True) == body


@pytest.mark.parametrize("options", [b"null", b"{}", b'{"include_usage":false}'])
def test_usage_is_asked_for_though_the_client_did_not(options: bytes) -> None:
    """Null, empty and false stream options all become true upstream."""
    body = b'{"model":"m","stream":true,"stream_options":' + options + b"}"
    assert json.loads(sent(body, stream=True))["stream_options"] == {"include_usage": True}


def test_ill_typed_stream_options_are_left_for_the_upstream() -> None:
    """It will say what is wrong with them better than we can."""
    body = b'{"model":"m","stream":true,"stream_options":7}'
    assert sent(body, stream=True) == body


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"evil","model":"m","n":1}',
        b'{"mod\\u0065l":"evil","model":"m","n":1}',
        b'{"model":"m", "n": 1, "n":1}',
    ],
)
def test_of_a_key_given_twice_only_the_last_goes_upstream(body: bytes) -> None:
    """What we checked is what the upstream reads, whichever of the two it would have taken."""
    assert sent(body) == b'{"model":"m","n":1}'


def test_the_engine_gets_salt_and_priority_from_us_alone() -> None:
    """A client's own values are overwritten or dropped; other servers see them untouched."""
    body = b'{"model":"m","cache_salt":"theirs","priority":99}'
    assert sent(body, is_engine=True, cache_salt="ours", priority=2) == (
        b'{"model":"m","cache_salt":"ours","priority":2}'
    )
    assert sent(body, is_engine=True) == b'{"model":"m"}'
    # Another server may know the field too: a salt that the client chose is never passed on.
    assert sent(body, cache_salt="ours") == b'{"model":"m","cache_salt":"ours","priority":99}'


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"a":' + b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    """Malformed bodies end in our error tree, however they are malformed."""
    with pytest.raises(BackendRefused):
        sent(body)


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(max_size=6), _json, max_size=6),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n\t", " : ")]),
    st.booleans(),
)
def test_any_body_survives(
    fields: dict[str, Any], separators: tuple[str, str], is_ascii: bool
) -> None:
    """Whatever else stands in a body arrives as it was; unescaped bodies arrive byte for byte."""
    fields = {**fields, "model": "m"}
    fields.pop("stream", None)
    body = json.dumps(fields, separators=separators, ensure_ascii=is_ascii).encode()
    arrived = sent(body)
    assert json.loads(arrived) == fields
    assert arrived == body or "\\" in body.decode() or "\x7f" in body.decode()


# --- answers


def test_chunks_pass_unchanged_and_are_counted() -> None:
    """Content, reasoning, refusal, tool arguments and completion text count as UTF-8 bytes."""
    follow = reader()
    cases: list[tuple[Any, int]] = [
        (choice(role="assistant", content=""), 0),
        (choice(content="héllo"), 6),
        (choice(reasoning_content="abc"), 3),
        (choice(reasoning_content="abc", reasoning="abc"), 3),
        (choice(refusal="no"), 2),
        (choice(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": '{"a"'}}]), 4),
        (choice(tool_calls=[{"index": 0, "function": {"arguments": {"a": 1}}}]), 0),
        (choice(content=[{"type": "text", "text": "abcd"}]), 4),
        ({"index": 0, "text": "abc", "finish_reason": None}, 3),
        ({"index": 0, "delta": None, "finish_reason": None}, 0),
    ]
    for value, expected in cases:
        data = chunk(choices=[value])
        seen = follow.chunk(data)
        assert seen is not None
        assert seen.data is data
        assert seen.content_bytes == expected, value


def test_a_usage_chunk_is_kept_and_not_forwarded() -> None:
    """It goes to the end, with its bytes, for clients who asked for it."""
    follow = reader()
    follow.chunk(chunk(choices=[choice(finish="stop")]))
    data = chunk(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2})
    assert follow.chunk(data) is None
    final = follow.final(provider_request_id="req-9")
    assert final.usage == Usage(in_uncached_text=3, out_text=2)
    assert final.usage_source is UsageSource.REPORTED
    assert final.usage_chunk == data
    assert final.answered_model == "m-2"
    assert final.provider_request_id == "req-9"
    assert final.finish_reasons == ("stop",)


def test_of_cumulative_usage_the_last_counts() -> None:
    """Usage in chunks with choices is forwarded and recorded; a null does not erase it."""
    follow = reader()
    for tokens in (1, 2):
        usage = {"prompt_tokens": 3, "completion_tokens": tokens}
        assert follow.chunk(chunk(choices=[choice(content="a")], usage=usage)) is not None
    assert follow.chunk(chunk(choices=[choice(finish="length")], usage=None)) is not None
    final = follow.final()
    assert final.usage == Usage(in_uncached_text=3, out_text=2)
    assert final.usage_chunk is None
    assert final.provider_request_id == "c1"


def test_empty_choices_without_usage_are_forwarded() -> None:
    """Some servers send such a chunk first; it is the client's to see."""
    assert reader().chunk(chunk(choices=[], prompt_filter_results=[])) is not None


def test_each_choice_that_appeared_must_finish() -> None:
    """One of two is not enough; the order of reasons is by index."""
    follow = reader()
    follow.chunk(chunk(choices=[choice(1, content="a")]))
    follow.chunk(chunk(choices=[choice(0, content="a")]))
    follow.chunk(chunk(choices=[choice(1, finish="length")]))
    with pytest.raises(BackendTruncated):
        follow.final()
    follow.chunk(chunk(choices=[choice(0, finish="stop")]))
    assert follow.final().finish_reasons == ("stop", "length")


def test_an_answer_without_any_choice_is_truncated() -> None:
    """`[DONE]` alone is no answer."""
    with pytest.raises(BackendTruncated):
        reader().final()


def test_a_null_reason_after_the_end_does_not_reopen_a_choice() -> None:
    """A late chunk for a finished choice leaves it finished."""
    follow = reader()
    follow.chunk(chunk(choices=[choice(finish="stop")]))
    follow.chunk(chunk(choices=[choice()]))
    assert follow.is_finished


def test_without_usage_there_is_none() -> None:
    """Absent usage is said to be absent, not zero."""
    follow = reader()
    follow.chunk(chunk(choices=[choice(finish="stop")]))
    final = follow.final()
    assert final.usage is None
    assert final.usage_source is UsageSource.NONE


def test_usage_that_makes_no_sense_is_none() -> None:
    """A broken report is not billed as zero tokens, and does not fail a complete answer."""
    follow = reader()
    follow.chunk(chunk(choices=[choice(finish="stop")], usage={"tokens": "many"}))
    final = follow.final()
    assert (final.usage, final.usage_source) == (None, UsageSource.NONE)


def test_a_whole_answer_is_kept_and_counted() -> None:
    """The body is forwarded as it is; content of all choices counts."""
    follow = reader()
    data = chunk(
        choices=[
            {"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"},
            {"index": 1, "message": {"content": None}, "finish_reason": "tool_calls"},
        ],
        usage={"prompt_tokens": 1, "completion_tokens": 1},
        service_tier="flex",
    )
    seen = follow.whole(data)
    assert (seen.data, seen.content_bytes) == (data, 2)
    final = follow.final()
    assert final.finish_reasons == ("stop", "tool_calls")
    assert final.service_tier == "flex"


METERED = {
    "prompt_tokens": 1,
    "completion_tokens": 1,
    "meterline": {
        "queue_s": 0.5,
        "prefill_s": 1.0,
        "decode_s": 2.0,
        "sampling_s": 0.25,
        "cached_tokens": 0,
        "preemptions": 1,
        "device_us": {"prefill": 7, "decode": 5},
        "spec": {"drafted": 0, "accepted": 0},
    },
}


@pytest.mark.parametrize("source", [UsageSource.ENGINE, UsageSource.REPORTED])
def test_times_are_taken_from_our_engine_only(source: UsageSource) -> None:
    """A stranger's `meterline` object is not believed."""
    follow = reader(usage_source=source, normalise=from_engine)
    follow.chunk(chunk(choices=[choice(finish="stop")], usage=METERED))
    expected = Timings(
        queue_s=0.5,
        prefill_s=1.0,
        decode_s=2.0,
        sampling_s=0.25,
        cached_tokens=0,
        preemptions=1,
        device_us=DeviceTime(prefill=7, decode=5),
    )
    assert follow.final().timings == (expected if source is UsageSource.ENGINE else None)


@pytest.mark.parametrize(
    "data",
    [b"", b"garbage", b"[1]", b"7", b'{"choices":7}', b'{"choices":[{"index":"a"}]}', b"\xff"],
)
def test_what_is_no_chunk_is_a_protocol_error(data: bytes) -> None:
    """Anything else than an object with sensible choices."""
    with pytest.raises(BackendProtocol):
        reader().chunk(data)


def test_nesting_beyond_all_bounds_is_a_protocol_error() -> None:
    """A hostile upstream cannot raise RecursionError in us."""
    deep = b'{"choices":[],"usage":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(BackendProtocol):
        reader().chunk(deep)


def test_endless_choices_are_a_protocol_error() -> None:
    """The bookkeeping of choices is bounded."""
    follow = reader()
    with pytest.raises(BackendProtocol):
        for index in range(2_000):
            follow.chunk(chunk(choices=[choice(index)]))


@given(st.binary(max_size=60) | _json.map(lambda value: json.dumps(value).encode()))
def test_any_data_ends_in_our_error_tree(data: bytes) -> None:
    """Whatever an upstream sends, only BackendError comes out."""
    for read in (reader().chunk, reader().whole):
        try:
            read(data)
        except BackendError as error:
            assert error.backend == "b"


# --- errors


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BackendRefused),
        (401, BackendAuth),
        (402, BackendAuth),
        (403, BackendAuth),
        (404, BackendRefused),
        (405, BackendProtocol),
        (408, BackendFailed),
        (409, BackendFailed),
        (413, BackendRefused),
        (422, BackendRefused),
        (429, BackendRateLimited),
        (500, BackendFailed),
        (503, BackendFailed),
        (529, BackendFailed),
        (206, BackendProtocol),
    ],
)
def test_statuses(status: int, kind: type[BackendError]) -> None:
    """Each status means one kind of failure, and its number is kept."""
    body = b'{"error":{"message":"m","type":"t","param":"p","code":"c"}}'
    error = error_of_status(status, body, backend="b", retry_after_s=2.0)
    assert type(error) is kind
    assert error.status == status
    if kind in (BackendRateLimited, BackendFailed):
        assert error.retry_after_s == 2.0
    if isinstance(error, BackendRefused):
        assert (error.message, error.error_type) == ("m", "t")
        assert (error.param, error.error_code) == ("p", "c")


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_refusal_without_error_object_is_not_the_callers_fault(status: int) -> None:
    """An HTML page under 404 says that base_url is wrong, not the request."""
    assert type(error_of_status(status, b"<html>", backend="b")) is BackendProtocol


def test_413_needs_no_error_object() -> None:
    """A proxy says it in HTML, and means the request all the same."""
    assert type(error_of_status(413, b"<html>", backend="b")) is BackendRefused


def test_a_refusal_is_cut_and_scrubbed() -> None:
    """Message and fields are bounded, printable, and without our secrets."""
    body = json.dumps(
        {
            "error": {
                "message": "key sk-1 " + "x" * 9_000,
                "type": "t\n" * 500,
                "code": "sk-1",
                "a": 1,
            }
        }
    ).encode()
    error = error_of_status(400, body, backend="b", scrub=lambda text: text.replace("sk-1", "…"))
    assert isinstance(error, BackendRefused)
    assert len(error.message) == 1_000
    assert len(error.error_type) <= 200
    assert "\n" not in error.error_type
    assert "sk-1" not in f"{error.message}{error.error_code}"


def test_too_late_is_not_a_rate_limit() -> None:
    """Our engine's word that it is too busy for this deadline is told apart from a limit."""
    body = b'{"error":{"message":"m","type":"rate_limit_error","code":"deadline_unreachable"}}'
    error = error_of_status(429, body, backend="b", retry_after_s=3.0)
    assert type(error) is BackendTooLate
    assert (error.status, error.retry_after_s) == (429, 3.0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "m", "type": "server_error", "code": "x"}, BackendFailed),
        ({"message": "m", "code": 500}, BackendFailed),
        ({"message": "m", "code": 400}, BackendRefused),
        ({"message": "m", "code": "context_length_exceeded"}, BackendRefused),
        ({"message": "m", "type": "invalid_request_error", "code": "x"}, BackendRefused),
        ({"message": "m", "type": "BadRequestError", "code": 400}, BackendRefused),
        ({"message": "m", "code": "429"}, BackendRateLimited),
        ({"message": "m", "code": "rate_limit_exceeded"}, BackendRateLimited),
        ({"message": "m", "type": "insufficient_quota"}, BackendRateLimited),
        ({"message": "m", "code": "invalid_api_key"}, BackendAuth),
        ("just words", BackendFailed),
        (7, BackendFailed),
    ],
)
def test_errors_inside_a_200(error: Any, kind: type[BackendError]) -> None:
    """Code, then type, stand for the status that was not sent."""
    data = json.dumps({"error": error}).encode()
    assert type(error_in_answer(data, backend="b")) is kind
    with pytest.raises(kind):
        reader().chunk(data)


def test_a_servers_own_error_shape() -> None:
    """The object at the top level, as vLLM sends it."""
    body = b'{"object":"error","message":"too long","type":"BadRequestError","code":400}'
    error = error_of_status(400, body, backend="b")
    assert isinstance(error, BackendRefused)
    assert error.message == "too long"


@pytest.mark.parametrize(
    ("ms", "seconds", "expected"),
    [
        (None, None, None),
        ("1500", "9", 1.5),
        (None, "2", 2.0),
        ("x", "2", 2.0),
        (None, "Thu, 01 Jan 1970 00:01:00 GMT", 50.0),
        (None, "Thu, 01 Jan 1970 00:00:01 GMT", None),
        (None, "soon", None),
        (None, "-1", None),
        (None, "nan", None),
        (None, "inf", 86_400.0),
        (None, "999999999", 86_400.0),
    ],
)
def test_retry_after(ms: str | None, seconds: str | None, expected: float | None) -> None:
    """Milliseconds first, then seconds or a date; nonsense and the past are no hint."""
    assert retry_after_s(retry_after_ms=ms, retry_after=seconds, now_s=10.0) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [("a", "a"), ("", None), (None, None), (7, "7"), (True, None), ("a\x00b\n", "ab"), ([], None)],
)
def test_labels(value: object, expected: str | None) -> None:
    """Foreign names are bounded and printable."""
    assert label(value) == expected
    assert len(label("x" * 999) or "") == 200


def test_the_encoder_keeps_what_it_is_given() -> None:
    """The property the whole module rests on: Raw values are copied, not re-encoded."""
    fields = msgspec.json.decode(b'{"a": 1.0e0 }', type=dict[str, msgspec.Raw])
    assert msgspec.json.encode(fields) == b'{"a":1.0e0}'
