"""What the clients' time-out headers mean."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.client_timeouts import LEAST_S, client_timeout_s


@pytest.mark.parametrize(
    ("headers", "whole", "streamed"),
    [
        ([], None, None),
        ([(b"x-stainless-timeout", b"10")], 9.5, 9.5),
        ([(b"x-request-timeout", b"100")], 99.5, 99.5),
        ([(b"x-stainless-read-timeout", b"600")], 599.5, None),
        ([(b"x-stainless-timeout", b"20"), (b"x-request-timeout", b"10")], 9.5, 9.5),
        ([(b"x-stainless-timeout", b"0.001")], LEAST_S, LEAST_S),
        ([(b"x-stainless-timeout", b"None")], None, None),
        ([(b"x-stainless-timeout", b"-1")], None, None),
        ([(b"x-stainless-timeout", b"nan")], None, None),
        ([(b"x-stainless-timeout", b"inf")], None, None),
    ],
)
def test_headers(
    headers: list[tuple[bytes, bytes]], whole: float | None, streamed: float | None
) -> None:
    """The shortest counts, a little less than it, and nonsense is as if it was not there."""
    assert client_timeout_s(headers, stream=False) == whole
    assert client_timeout_s(headers, stream=True) == streamed


@given(st.binary(max_size=40))
def test_any_value_is_survived(value: bytes) -> None:
    """Whatever a client puts there."""
    seconds = client_timeout_s([(b"x-request-timeout", value)], stream=True)
    assert seconds is None or LEAST_S <= seconds < 1e9
