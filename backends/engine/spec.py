"""Whether and how far to guess the next tokens of a sequence, so that one step confirms several.

Guesses come from the sequence's own text (`Proposer`: where the last tokens occurred before, what
followed them then may follow now) or from a second model (`draft.py`, at the `Pace` found here).
The check is exact: at each guess the sampler chooses as it would have without one, with the same
random number, and the first choice that differs ends the run. So the text, sampled or greedy, is
the same with and without guesses, whoever made them. No torch.

Guesses that fail cost device time, so both watch how many came true and stop guessing while it
does not pay, with a fresh try after a pause that grows.
"""

from collections.abc import Sequence

NGRAMS = (4, 3, 2)  # the longest is looked up first
_MEMORY = 0.7  # of the share of guesses that came true
_FADING = 0.85  # of what was learnt, a guess
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 128  # steps


class Proposer:
    """Of one sequence. `most`: guesses at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = min(3, most)
        self._places: dict[tuple[int, ...], tuple[int, int]] = {}  # after it: last and before
        self._indexed = 0
        self._share = 0.6  # of guesses that came true, lately
        self._pause = 0
        self._next_pause = _FIRST_PAUSE

    def propose(self, tokens: Sequence[int], limit: int, price: float) -> tuple[int, ...]:
        """Guesses at what follows `tokens`, at most `limit`. `price`: what checking one costs,
        as a part of what a step costs this sequence without any."""
        self._index(tokens)
        if self._pause > 0:
            self._pause -= 1
            return ()
        if self._share < price:
            self._rest(price)
            return ()
        limit = min(limit, self._length)
        for size in NGRAMS:
            place = self._places.get(tuple(tokens[-size:])) if len(tokens) > size else None
            if place is None:
                continue
            last, before = place
            start = last if last < len(tokens) else before  # the end itself is no precedent
            if start:
                guesses: list[int] = []
                for at in range(start, start + limit):  # past the end: what was guessed itself
                    guesses.append(tokens[at] if at < len(tokens) else guesses[at - len(tokens)])
                return tuple(guesses)
        return ()

    def learn(self, guessed: int, came_true: int) -> None:
        """How the last proposal went."""
        self._share = _MEMORY * self._share + (1 - _MEMORY) * came_true / guessed
        if came_true == guessed:
            self._length = min(self._most, self._length * 2)
            self._next_pause = _FIRST_PAUSE
        else:
            self._length = max(1, came_true + 1)

    def _rest(self, price: float) -> None:
        self._pause = self._next_pause
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
        self._share = min(0.9, max(self._share, price + 0.05))  # one more try after it
        self._length = 1

    def _index(self, tokens: Sequence[int]) -> None:
        for end in range(self._indexed + 1, len(tokens) + 1):
            for size in NGRAMS:
                if end >= size:
                    key = tuple(tokens[end - size : end])
                    last, _ = self._places.get(key, (0, 0))
                    self._places[key] = (end, last)
        self._indexed = len(tokens)


class Pace:
    """How many tokens a second model should guess for one sequence, by how often it was right."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._right, self._tried = 3.0, 4.0  # guesses, fading
        self._pause = 0
        self._next_pause = _FIRST_PAUSE

    def wanted(self, limit: int, price: float) -> int:
        """At most `limit`. `price`: what one guess costs, drafted and checked, as a part of a step
        without any."""
        if self._pause > 0:
            self._pause -= 1
            return 0
        chance = self._right / self._tried
        best, best_gain = 0, 1.0
        expected = 1.0  # tokens of a step: one, and each guess if all before it came true
        for count in range(1, self._most + 1):
            expected += chance**count
            gain = expected / (1 + count * price)
            if gain > best_gain:
                best, best_gain = count, gain
        if best == 0:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
            self._right, self._tried = min(0.9, price + 0.1), 1.0  # one more try after it
        return min(best, limit)

    def learn(self, guessed: int, came_true: int) -> None:
        """How the last guesses went. Those behind the first wrong one were not put to the test."""
        tried = min(guessed, came_true + 1)
        kept = _FADING**tried
        self._right = kept * self._right + came_true
        self._tried = kept * self._tried + tried
        if came_true == guessed:
            self._next_pause = _FIRST_PAUSE
