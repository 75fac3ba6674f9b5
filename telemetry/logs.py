"""Logs: one event a line on stderr, JSON for machines or aligned text for a terminal.

An event is a name and fields, `log.warning("fallback", extra={"attempt": 2})`; ids of the request
come by themselves. No content of prompts or answers, no secret: secrets are a type that does not
show itself, and every finished line passes `mask` as the last net. An event that repeats is cut to
so many a minute, so that an outage never becomes a flood. All loggers, libraries' too, end here.
"""

import contextlib
import logging
import sys
import traceback
from collections import OrderedDict
from contextvars import ContextVar
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal, TextIO

import msgspec
from msgspec import Struct
from typing_extensions import override

from telemetry.money import plain
from telemetry.record import FAILURES, RequestRecord
from telemetry.redaction import Secret, mask

__all__ = ["Ids", "LogFormat", "Secret", "bind", "configure", "log_request", "request_fields"]

LogFormat = Literal["auto", "json", "console"]

request_log = logging.getLogger("meterline.request")

MAX_TEXT = 256  # characters of a text that a client chose
REPEATS_PER_MINUTE = 10

# Loggers whose own handlers or chatter are not wanted: level at which they still speak.
_LIBRARIES = {
    "uvicorn": logging.INFO,
    "uvicorn.error": logging.INFO,
    "uvicorn.access": logging.WARNING,  # our own request line says more
    "litestar": logging.WARNING,
    "sqlalchemy": logging.WARNING,
    "alembic": logging.WARNING,
    "httpx": logging.WARNING,
    "httpcore": logging.WARNING,
    "asyncio": logging.WARNING,
    "opentelemetry": logging.CRITICAL,  # SpanExport reports and counts what is lost
    "urllib3": logging.ERROR,
}


class Ids(Struct, frozen=True):
    """What ties a line to its request."""

    request_id: str
    trace_id: str
    span_id: str


_ids: ContextVar[Ids | None] = ContextVar("meterline_ids", default=None)


def bind(ids: Ids | None) -> None:
    """Put these ids on every line that this task, and the tasks it starts, will log."""
    _ids.set(ids)


def configure(
    level: str = "INFO", fmt: LogFormat = "auto", stream: TextIO | None = None
) -> logging.Handler:
    """Route all logging of the process to `stream` (stderr). May be called again."""
    target = sys.stderr if stream is None else stream
    if fmt == "auto":
        fmt = "console" if target.isatty() else "json"
    handler = logging.StreamHandler(target)
    handler.setFormatter(JsonFormatter() if fmt == "json" else ConsoleFormatter(target.isatty()))
    handler.addFilter(RepeatFilter(REPEATS_PER_MINUTE))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name, least in _LIBRARIES.items():
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
        library.setLevel(max(least, root.level))
    logging.captureWarnings(True)
    return handler


# --- One request, one line ------------------------------------------------------------------------


def log_request(record: RequestRecord) -> None:
    """The line of a settled request: its facts, never its content."""
    level = logging.WARNING if record.outcome in FAILURES else logging.INFO
    if request_log.isEnabledFor(level):
        # Not `request_log.log`: it walks the stack for a file and line that no line of ours shows.
        line = logging.LogRecord(request_log.name, level, "", 0, "request", None, None)
        line.__dict__.update(request_fields(record))
        request_log.handle(line)


def request_fields(record: RequestRecord) -> dict[str, Any]:
    """What the line says. Absent facts are left out."""
    last = record.served or (record.attempts[-1] if record.attempts else None)
    usages = [attempt.usage for attempt in record.attempts if attempt.usage is not None]
    cost = record.cost if record.charges else None
    ended_ns = record.ended_ns
    first_ns = None if last is None else last.first_token_ns
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "span_id": record.span_id,
        "tenant_id": record.tenant_id,
        "key_id": record.key_id,
        "surface": record.surface,
        "stream": record.stream,
        "asked_model": None if record.asked_model is None else record.asked_model[:MAX_TEXT],
        "model": None if last is None else last.model,
        "backend": None if last is None else last.backend,
        "attempts": len(record.attempts),
        "outcome": None if record.outcome is None else record.outcome.value,
        "status": record.status,
        "error_code": record.error_code,
        "duration_ms": None if ended_ns is None else _ms(ended_ns - record.opened_ns),
        "first_token_ms": None if first_ns is None else _ms(first_ns - record.opened_ns),
        "input_tokens": sum(usage.input_tokens for usage in usages) if usages else None,
        "output_tokens": sum(usage.output_tokens for usage in usages) if usages else None,
        "cost": None if cost is None else plain(cost),
        "currency": None if cost is None else record.charges[0].currency,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)


# --- Formatters -----------------------------------------------------------------------------------

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_OWN = ("request_id", "trace_id", "span_id")


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Ids first, then what was given as `extra`."""
    given = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
    ids = _ids.get()
    fields: dict[str, Any] = {}
    for name in _OWN:
        value = given.pop(name, None) or (None if ids is None else getattr(ids, name))
        if value is not None:
            fields[name] = value
    given.pop("color_message", None)  # uvicorn's copy of its message
    return {**fields, **given}


class JsonFormatter(logging.Formatter):
    """ts, level, logger, event, ids, fields, and `exc` with the traceback."""

    def __init__(self) -> None:
        super().__init__()
        self._encoder = msgspec.json.Encoder(enc_hook=_as_text, decimal_format="string")

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": _timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        fields = fields_of(record)
        if record.name == request_log.name:  # one a request: its fields are of plain types
            line.update(fields)
            with contextlib.suppress(UnicodeEncodeError):
                return mask(self._encoder.encode(line).decode())
        for name, value in fields.items():
            line[name if name not in line else f"{name}_"] = _plain(value)
        if record.exc_info is not None and record.exc_info[0] is not None:
            line["exc"] = _utf8("".join(traceback.format_exception(*record.exc_info)))
        line["event"] = _utf8(line["event"])
        return mask(self._encoder.encode(line).decode())


_RED, _YELLOW = "\x1b[31m", "\x1b[33m"
_COLOURS = {logging.WARNING: _YELLOW, logging.ERROR: _RED, logging.CRITICAL: _RED}


class ConsoleFormatter(logging.Formatter):
    """`12:00:01.250 INFO  gateway.app  listening  url=http://…`, coloured on a terminal."""

    def __init__(self, coloured: bool) -> None:
        super().__init__()
        self._coloured = coloured

    @override
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        level = f"{record.levelname:<8}"
        if self._coloured:
            level = f"{_COLOURS.get(record.levelno, '')}{level}\x1b[0m"
        fields = "  ".join(f"{name}={value}" for name, value in fields_of(record).items())
        line = f"{time} {level} {record.name}  {_one_line(record.getMessage())}"
        if fields:
            line += f"  {_one_line(fields)}"
        if record.exc_info is not None and record.exc_info[0] is not None:
            line += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return mask(line)


class RepeatFilter(logging.Filter):
    """At most `per_minute` warnings and errors of one event; the next one let through says how
    many were `suppressed`. Events are told apart by logger and unformatted message."""

    _REMEMBERED = 1024  # events at a time; the oldest is forgotten

    def __init__(self, per_minute: int) -> None:
        super().__init__()
        self._per_minute = per_minute
        self._windows: OrderedDict[tuple[str, str], list[float]] = OrderedDict()

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or record.name == request_log.name:
            return True
        key = (record.name, str(record.msg))
        window = self._windows.pop(key, None) or [record.created, 0, 0]
        self._windows[key] = window  # most recently seen last
        if len(self._windows) > self._REMEMBERED:
            self._windows.popitem(last=False)
        if record.created - window[0] >= 60:
            window[0], window[1] = record.created, 0
        window[1] += 1
        if window[1] > self._per_minute:
            window[2] += 1
            return False
        if window[2]:
            record.suppressed = int(window[2])
            window[2] = 0
        return True


def _timestamp(created: float) -> str:
    text = datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _as_text(value: object) -> str:
    return str(value)


def _plain(value: object) -> object:
    if isinstance(value, str):
        return _utf8(value)
    if isinstance(value, bool | int | float | Decimal | None):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    return _utf8(str(value))


def _utf8(text: str) -> str:
    """Lone surrogates (from undecodable bytes) would end the line's encoding with an error."""
    return text.encode("utf-8", "backslashreplace").decode()


def _one_line(text: str) -> str:
    return text.replace("\r", "\\r").replace("\n", "\\n").replace("\x1b", "\\x1b")
