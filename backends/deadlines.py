"""The four timeouts of one attempt, kept in one place and told apart by their phase.

It says until when the next piece may be waited for, and knows nothing of what is in it: the reader
of the answer says when content came. Time that the consumer takes between two pieces is not the
upstream's and does not count, except against the total.
"""

import asyncio

from backends.base import BackendTimeout, Phase, Timeouts

_WORDS: dict[Phase, str] = {
    "connect": "no connection to the upstream within {:g} s",
    "first_token": "no first token from the upstream within {:g} s",
    "inter_token": "the upstream's stream stood still for {:g} s",
    "total": "the upstream's answer was not complete within {:g} s",
}


def timed_out(timeouts: Timeouts, phase: Phase, *, backend: str) -> BackendTimeout:
    """The error of one phase, in words that name its limit."""
    seconds: float = getattr(timeouts, f"{phase}_s")
    return BackendTimeout(_WORDS[phase].format(seconds), backend=backend, phase=phase)


class Deadlines:
    """Starts with the attempt. `is_stream` false: a whole answer has one wait, the total."""

    def __init__(self, timeouts: Timeouts, *, backend: str, is_stream: bool) -> None:
        self._timeouts = timeouts
        self._backend = backend
        self._clock = asyncio.get_running_loop().time
        now = self._clock()
        self._total = now + timeouts.total_s
        self._phase: Phase = "total"
        self.at = self._total  # of the loop's clock
        if is_stream:
            self._set("first_token", now + timeouts.first_token_s)

    def progressed(self, *, has_content: bool) -> None:
        """An event came. Only content ends the wait for the first token. Raises BackendTimeout
        where the total is over: nobody waits in a stream that never pauses."""
        now = self._clock()
        if now >= self._total:
            self._set("total", self._total)
            raise self.expired()
        if has_content or self._phase == "inter_token":
            self._set("inter_token", now + self._timeouts.inter_token_s)

    def check(self) -> None:
        """Raise BackendTimeout if the time is over: for what came without being waited for."""
        if self._clock() >= self.at:
            raise self.expired()

    def expired(self) -> BackendTimeout:
        """The error of the phase whose time has just run out."""
        return timed_out(self._timeouts, self._phase, backend=self._backend)

    def _set(self, phase: Phase, at: float) -> None:
        """The total is over all: whichever comes first."""
        if at < self._total:
            self._phase, self.at = phase, at
        else:
            self._phase, self.at = "total", self._total
