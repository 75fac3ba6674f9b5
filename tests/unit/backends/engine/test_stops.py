"""Stop strings, however the text is cut into pieces."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from backends.engine.stops import StopMatcher

letters = st.text("ab\n", max_size=30)
stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(edges)]


@given(text=letters, stops=stop_lists, cuts=st.lists(st.integers(0, 60), max_size=10))
def test_any_chunking_gives_the_same_text(text: str, stops: list[str], cuts: list[int]) -> None:
    """What comes out ends where the stream first completes a stop string, for any chunking."""
    matcher = StopMatcher(stops)
    out = ""
    seen = ""
    for piece in pieces_of(text, cuts):
        if matcher.matched is None:
            seen += piece
        out += matcher.feed(piece)
    if matcher.matched is None:
        out += matcher.flush()
        assert out == text
        assert not any(stop in text for stop in stops)
    else:
        assert out == seen[: min(seen.find(s) for s in stops if s in seen)]


@given(text=letters, stops=stop_lists)
def test_one_character_at_a_time_cuts_at_the_first_completed_stop(
    text: str, stops: list[str]
) -> None:
    """Per character, the cut is at the stop string that completes first (the longest of those)."""
    matcher = StopMatcher(stops)
    out = "".join(matcher.feed(character) for character in text)
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if not ends:
        assert out + matcher.flush() == text
        return
    first = min(ends)
    longest = max(len(s) for s in stops if text[:first].endswith(s))
    assert out == text[: first - longest]


@given(text=letters, stops=stop_lists)
def test_only_a_true_candidate_is_held_back(text: str, stops: list[str]) -> None:
    """After each piece, what is held is a proper prefix of a stop string, and nothing longer."""
    matcher = StopMatcher(stops)
    out = matcher.feed(text)
    if matcher.matched is None:
        held = text[len(out) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_nothing_comes_after_a_match() -> None:
    """Text after a stop string is dropped, for good."""
    matcher = StopMatcher(["END"])
    assert matcher.feed("one EN") == "one "
    assert matcher.feed("D two") == ""
    assert matcher.feed("three") == ""
    assert (matcher.matched, matcher.flush()) == ("END", "")
