"""Server-sent events, read incrementally and without I/O (WHATWG HTML, 9.2.6).

Bytes go in as they arrive, whole events come out. It knows nothing of JSON, of HTTP, or of who
sends. Invariant: the events depend on the bytes alone, never on how the network cut them.
"""

from msgspec import Struct

_BOM = b"\xef\xbb\xbf"
_PREFIX = b"data: "
_SEPARATOR = b"\n\ndata: "


class EventTooLarge(ValueError):
    """An event, or a line that has not ended yet, is larger than the limit."""


class ServerEvent(Struct, frozen=True, gc=False):
    """One dispatched event. `data` holds the bytes as they came; only a line end inside it
    (several `data` lines) is always a single LF."""

    data: bytes
    event: str = "message"
    id: str = ""


class SSEParser:
    """One stream's parser. After `end` or `EventTooLarge` it must not be fed again."""

    def __init__(self, *, max_event_bytes: int = 8 * 1024 * 1024) -> None:
        self._max_event_bytes = max_event_bytes
        self._at_start = True
        self._start = b""  # held back while it may be the beginning of a byte order mark
        self._after_cr = False  # the last byte was CR: an LF that follows belongs to it
        self._partial: list[bytes] = []  # pieces of a line whose end has not been seen
        self._partial_bytes = 0
        self._data: list[bytes] = []  # `data` lines of the event that is being read
        self._data_bytes = 0
        self._event = ""
        self._id = ""

    def feed(self, chunk: bytes) -> list[ServerEvent]:
        """The events that `chunk` completes, in order. Raises EventTooLarge."""
        if (
            chunk.startswith(_PREFIX)
            and chunk.endswith(b"\n\n")
            and not self._partial
            and not self._data
            and not self._event
            and not self._start
            and len(chunk) <= self._max_event_bytes
            and b"\r" not in chunk
        ):
            lines = chunk.count(b"\n")
            if lines == 2 and not self._id:  # one event, as streams are when nobody is behind
                self._at_start = self._after_cr = False
                return [ServerEvent(chunk[6:-2])]
            payloads = chunk[6:-2].split(_SEPARATOR)
            if lines == 2 * len(payloads):  # each event is one `data` line
                self._at_start = self._after_cr = False
                if self._id:
                    return [ServerEvent(data, "message", self._id) for data in payloads]
                return [ServerEvent(data) for data in payloads]
        return self._feed_lines(chunk)

    def end(self) -> list[ServerEvent]:
        """The stream has ended: the event that had not been closed by a blank line, if any. It
        may have been cut in the middle; only its reader can tell."""
        events: list[ServerEvent] = []
        if self._partial:
            self._line(b"".join(self._partial), events)
            self._partial.clear()
        self._dispatch(events)
        return events

    def _feed_lines(self, chunk: bytes) -> list[ServerEvent]:
        if self._at_start:
            chunk = self._start + chunk
            if len(chunk) < len(_BOM) and _BOM.startswith(chunk):
                self._start = chunk
                return []
            self._start = b""
            self._at_start = False
            chunk = chunk.removeprefix(_BOM)
        events: list[ServerEvent] = []
        if not chunk:
            return events
        ends_in_cr = chunk.endswith(b"\r")
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._after_cr = ends_in_cr
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines, newline, rest = chunk.rpartition(b"\n")
        if newline:
            if self._partial:
                lines = b"".join((*self._partial, lines))
                self._partial.clear()
                self._partial_bytes = 0
            for line in lines.split(b"\n"):
                self._line(line, events)
        if rest:
            self._partial.append(rest)
            self._partial_bytes += len(rest)
            if self._partial_bytes + self._data_bytes > self._max_event_bytes:
                raise EventTooLarge(f"an event is larger than {self._max_event_bytes} bytes")
        return events

    def _line(self, line: bytes, events: list[ServerEvent]) -> None:
        if not line:
            self._dispatch(events)
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._data_bytes += len(value) + 1
            if self._data_bytes > self._max_event_bytes:
                raise EventTooLarge(f"an event is larger than {self._max_event_bytes} bytes")
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")
        elif name == b"id" and b"\0" not in value:
            self._id = value.decode("utf-8", "replace")
        # Comments have an empty name; `retry` and unknown fields mean nothing to us.

    def _dispatch(self, events: list[ServerEvent]) -> None:
        if self._data:
            # The standard joins lines by a line end. What is in events here is JSON, where a line
            # end can only be white space, and an event with one cannot be sent on as one line.
            data = b" ".join(self._data)
            events.append(ServerEvent(data, self._event or "message", self._id))
            self._data.clear()
            self._data_bytes = 0
        self._event = ""
