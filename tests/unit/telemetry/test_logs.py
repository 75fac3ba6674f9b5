"""Lines that machines can read, that hold no secret, and that do not flood."""

import io
import json
import logging
import pickle
import sys
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry import logs
from telemetry.logs import Ids, Secret
from telemetry.record import FAILURES
from telemetry.redaction import mask
from tests.fakes import records

CANARY = "sk-ml-k1-CANARY7f3aCANARY7f3a"


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Put the process's logging back as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    known = {name: logging.getLogger(name) for name in logging.root.manager.loggerDict}
    before = {
        name: (one.level, one.propagate, list(one.handlers), one.disabled)
        for name, one in known.items()
    }
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, (was, propagate, own, disabled) in before.items():
        one = known[name]
        one.setLevel(was)
        one.propagate, one.handlers[:], one.disabled = propagate, own, disabled
    logs.bind(None)


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_json_with_ids_and_fields(stream: io.StringIO) -> None:
    """ts, level, logger, event, the bound ids and the fields, in that order."""
    logs.configure("info", "json", stream)
    logs.bind(Ids("r1", "t1", "s1"))
    logging.getLogger("gateway.dispatch").info("fallback", extra={"attempt": 2, "backend": "b"})
    (line,) = lines(stream)
    assert line.pop("ts").endswith("Z")
    assert list(line.items()) == [
        *(("level", "info"), ("logger", "gateway.dispatch"), ("event", "fallback")),
        *(("request_id", "r1"), ("trace_id", "t1"), ("span_id", "s1")),
        *(("attempt", 2), ("backend", "b")),
    ]


def test_levels_below_the_configured_one_are_silent(stream: io.StringIO) -> None:
    """`configure` sets the least level of everything, libraries included."""
    logs.configure("WARNING", "json", stream)
    logging.getLogger("gateway").info("hidden")
    logging.getLogger("uvicorn.error").info("hidden")
    logging.getLogger("gateway").warning("shown")
    assert [line["event"] for line in lines(stream)] == ["shown"]


@pytest.mark.parametrize("name", ["uvicorn", "uvicorn.error", "litestar", "sqlalchemy.engine"])
def test_libraries_log_through_it(stream: io.StringIO, name: str) -> None:
    """Their own handlers are gone and their warnings are our lines."""
    other = io.StringIO()
    logging.getLogger(name.split(".")[0]).addHandler(logging.StreamHandler(other))
    logs.configure("INFO", "json", stream)
    logging.getLogger(name).warning("Started %s", "up")
    assert [line["event"] for line in lines(stream)] == ["Started up"]
    assert other.getvalue() == ""


def test_configuring_twice_does_not_double_lines(stream: io.StringIO) -> None:
    """A reload replaces the handler."""
    logs.configure("INFO", "json", io.StringIO())
    logs.configure("INFO", "json", stream)
    logging.getLogger("gateway").info("once")
    assert len(lines(stream)) == 1


def test_an_exception_is_one_line_with_its_traceback(stream: io.StringIO) -> None:
    """`exc` has the traceback; the line stays one line."""
    logs.configure("INFO", "json", stream)
    try:
        raise ValueError("broken\nin two")
    except ValueError:
        logging.getLogger("gateway").exception("failed")
    (line,) = lines(stream)
    assert line["event"] == "failed"
    assert "ValueError: broken" in line["exc"]


def test_a_field_may_not_replace_what_the_line_is(stream: io.StringIO) -> None:
    """A field called `level` is kept beside the level."""
    logs.configure("INFO", "json", stream)
    logging.getLogger("gateway").info("rung", extra={"level": "degraded", "event": "x"})
    (line,) = lines(stream)
    assert (line["level"], line["level_"], line["event"]) == ("info", "degraded", "rung")


json_text = st.text(st.characters(codec=None), max_size=60)


@given(json_text, json_text)
def test_any_text_gives_one_parsable_line(event: str, value: str) -> None:
    """Control characters, surrogates, quotes, key-like text: still one JSON object a line."""
    formatter = logs.JsonFormatter()
    record = logging.makeLogRecord({"msg": event, "levelname": "INFO", "name": "n", "given": value})
    line = formatter.format(record)
    assert "\n" not in line
    assert json.loads(line)["level"] == "info"
    line.encode()


def test_values_of_any_type_are_written(stream: io.StringIO) -> None:
    """Money as exact text, collections as arrays, the rest by its own text."""
    logs.configure("INFO", "json", stream)
    fields = {"cost": Decimal("0.10"), "names": ("a", "b"), "thing": object, "none": None}
    logging.getLogger("gateway").info("x", extra=fields)
    (line,) = lines(stream)
    assert line["cost"] == "0.10"
    assert line["names"] == ["a", "b"]
    assert line["thing"] == "<class 'object'>"


# --- for people ---


def test_a_terminal_gets_text() -> None:
    """`auto` writes aligned, coloured text where someone is looking."""
    terminal = Terminal()
    logs.configure("INFO", "auto", terminal)
    logging.getLogger("gateway.app").warning("listening", extra={"url": "http://127.0.0.1:8080"})
    text = terminal.getvalue()
    assert "gateway.app  listening  url=http://127.0.0.1:8080" in text
    assert "\x1b[33mWARNING" in text


def test_elsewhere_it_is_json(stream: io.StringIO) -> None:
    """`auto` writes JSON into a pipe."""
    logs.configure("INFO", "auto", stream)
    logging.getLogger("gateway").info("x")
    assert lines(stream)[0]["event"] == "x"


def test_text_cannot_be_forged() -> None:
    """A field cannot start a line of its own or send the terminal commands."""
    record = logging.makeLogRecord({"msg": "x", "levelname": "INFO", "given": "a\nFAKE \x1b[2J"})
    line = logs.ConsoleFormatter(False).format(record)
    assert "\n" not in line
    assert "\x1b" not in line


# --- one line per request ---


@pytest.mark.parametrize("name", records.EXITS)
def test_each_request_is_one_line(stream: io.StringIO, name: str) -> None:
    """Every exit: one line with its outcome, a warning if the failure is ours."""
    logs.configure("INFO", "json", stream)
    record = records.EXITS[name]()
    logs.log_request(record)
    (line,) = lines(stream)
    assert line["event"] == "request"
    assert line["outcome"] == record.outcome
    assert line["level"] == ("warning" if record.outcome in FAILURES else "info")
    assert (line["request_id"], line["trace_id"]) == (record.request_id, record.trace_id)


def test_the_line_has_the_records_figures(stream: io.StringIO) -> None:
    """Tokens, exact cost and times are the record's own."""
    fields = logs.request_fields(records.record(records.attempt()))
    expected = {
        "tenant_id": "acme",
        "key_id": "k1",
        "asked_model": "assistant",
        "model": "gpt-4o",
        "backend": "openai-eu",
        "status": 200,
        "duration_ms": 1106.0,
        "first_token_ms": 104.0,
        "input_tokens": 100,
        "output_tokens": 26,
        "cost": "0.0004975",
        "currency": "USD",
    }
    assert expected.items() <= fields.items()


def test_absent_facts_are_left_out() -> None:
    """A refused request has no model, tokens or cost, rather than empty ones."""
    fields = logs.request_fields(records.refused())
    assert not {"model", "backend", "cost", "input_tokens", "tenant_id"} & fields.keys()


# --- secrets ---


def test_a_secret_does_not_show_itself() -> None:
    """Not by str, repr, format, fields of a log line, or pickling; only by `reveal`."""
    secret = Secret(CANARY)
    record = logging.makeLogRecord(
        {"msg": "x %s", "args": (secret,), "key": secret, "all": [secret]}
    )
    shown = [
        *(str(secret), repr(secret), f"{secret}", f"{secret:>40}", f"{secret!r}"),
        *(logs.JsonFormatter().format(record), logs.ConsoleFormatter(False).format(record)),
    ]
    assert "CANARY" not in "".join(shown)
    assert secret.reveal() == CANARY
    with pytest.raises(TypeError):
        pickle.dumps(secret)


def test_secrets_compare_by_value() -> None:
    """Two of the same value are equal; a string is not a secret."""
    assert Secret("a") == Secret("a")
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a")}) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("key sk-ml-k1-abcdefgh0123 end", "key sk-ml-*** end"),
        ("sk-ant-api03-abcdef_ghi", "sk-ant-***"),
        ("sk-proj-abcdefghi", "sk-proj-***"),
        ("sk-abcdefghijkl", "sk-***"),
        ("Authorization: Bearer eyJhbGciOi.x-y_z==", "Authorization: Bearer ***"),
        ("authorization: bearer   abcd1234", "authorization: bearer   ***"),
        ("postgresql+asyncpg://u:p4ss@db:5432/x", "postgresql+asyncpg://u:***@db:5432/x"),
        ("redis://:hunter2@cache", "redis://:***@cache"),
        ("http://127.0.0.1:8080/v1@x", "http://127.0.0.1:8080/v1@x"),
        ("a risk-free task-force, Bearer of news", "a risk-free task-force, Bearer of news"),
    ],
)
def test_masking(text: str, expected: str) -> None:
    """Credentials go, what only resembles them stays."""
    assert mask(text) == expected


def test_masking_is_linear() -> None:
    """A megabyte of key-like text does not stop the process."""
    for text in ("a" * 10**6, "sk-" * 300_000, "://" * 300_000, "Bearer " * 100_000):
        assert len(mask(text)) <= len(text)


@pytest.mark.parametrize("fmt", ["json", "console"])
def test_a_planted_key_is_in_no_line(stream: io.StringIO, fmt: logs.LogFormat) -> None:
    """Not from a message, an argument, a field, a nested value, an exception or a request."""
    logs.configure("INFO", fmt, stream)
    log = logging.getLogger("gateway")
    log.info("got %s", CANARY)
    log.info("x", extra={"header": f"Bearer {CANARY}", "list": [CANARY], "map": {"k": CANARY}})
    try:
        raise RuntimeError(f"refused {CANARY}")
    except RuntimeError:
        log.exception("failed")
    logs.log_request(records.record(records.attempt(), asked_model=CANARY, error_code=CANARY))
    assert "7f3a" not in stream.getvalue()
    assert "***" in stream.getvalue()


# --- floods ---


def warn(at_s: float, event: str = "store_down", name: str = "gateway") -> logging.LogRecord:
    record = logging.makeLogRecord({"msg": event, "levelno": logging.WARNING, "name": name})
    record.created = at_s
    return record


def test_an_event_that_repeats_is_cut_and_counted() -> None:
    """n a minute pass; the first one of the next minute says how many did not."""
    repeats = logs.RepeatFilter(3)
    passed = [repeats.filter(warn(1000 + i)) for i in range(10)]
    assert passed == [True] * 3 + [False] * 7
    later = warn(1061)
    assert repeats.filter(later)
    assert later.__dict__["suppressed"] == 7
    again = warn(1062)
    assert repeats.filter(again)
    assert "suppressed" not in again.__dict__


def test_events_are_limited_apart() -> None:
    """Another event, or the same of another logger, has its own allowance."""
    repeats = logs.RepeatFilter(1)
    assert repeats.filter(warn(0))
    assert not repeats.filter(warn(1))
    assert repeats.filter(warn(1, event="other"))
    assert repeats.filter(warn(1, name="backends"))


def test_information_and_request_lines_are_never_cut() -> None:
    """One line per request stays one line per request, failures included."""
    repeats = logs.RepeatFilter(1)
    info = logging.makeLogRecord({"msg": "x", "levelno": logging.INFO, "name": "gateway"})
    assert all(repeats.filter(info) for _ in range(5))
    assert all(repeats.filter(warn(1, "request", "meterline.request")) for _ in range(5))


def test_the_filters_memory_is_bounded() -> None:
    """Events with ever new text do not grow it."""
    repeats = logs.RepeatFilter(1)
    for no in range(5000):
        repeats.filter(warn(1, event=f"failed {no}"))
    assert sys.getsizeof(repeats._windows) < 200_000
    assert len(repeats._windows) <= 1024
