"""Stop strings across any chunking: cut exactly at the match, hold back only what may become one.

The text fed in and the text given out differ only by a held suffix that is a proper prefix of a
stop string. A character is never held longer than that is true.
"""

from collections.abc import Sequence


class StopMatcher:
    """One choice's text. After a match nothing more comes out."""

    __slots__ = ("_held", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What is safe to send now."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        first = min(
            ((at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0),
            default=None,
        )
        if first is not None:
            self._held = ""
            self.matched = first[2]
            return text[: first[0]]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """The held suffix, once it is known that nothing follows it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
