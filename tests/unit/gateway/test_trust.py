"""Networks as they are written, and whose word on an address is believed."""

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadRequest
from gateway.trust import client_address, networks, within

PROXIES = networks(["10.0.0.0/8", "fd00::/8"], "p")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("10.0.0.1/8", "did you mean 10.0.0.0/8"),
        ("2001:db8::1/32", "did you mean 2001:db8::/32"),
        ("10.0.0.0/33", "as CIDR"),
        ("office", "as CIDR"),
        ("", "as CIDR"),
    ],
)
def test_what_is_no_network_is_refused_with_its_place(text: str, told: str) -> None:
    """The message says what to write instead."""
    with pytest.raises(BadRequest, match=told) as caught:
        networks(["192.0.2.0/24", text], "ip_allow")
    assert caught.value.param == "ip_allow[1]"


def test_a_list_of_networks_is_bounded() -> None:
    """A hundred, and no more."""
    with pytest.raises(BadRequest) as caught:
        networks(["192.0.2.1"] * 101, "ip_allow")
    assert caught.value.param == "ip_allow"


@pytest.mark.parametrize(
    ("peer", "forwarded", "expected"),
    [
        ("203.0.113.9", [], "203.0.113.9"),
        ("203.0.113.9", ["198.51.100.7"], "203.0.113.9"),  # a stranger's word is not believed
        ("10.1.2.3", ["198.51.100.7"], "198.51.100.7"),
        ("10.1.2.3", ["192.0.2.1, 198.51.100.7"], "198.51.100.7"),  # what the client wrote itself
        ("10.1.2.3", ["198.51.100.7, 10.9.9.9"], "198.51.100.7"),
        ("10.1.2.3", ["198.51.100.7", "10.9.9.9"], "198.51.100.7"),
        ("10.1.2.3", ["10.9.9.9"], "10.9.9.9"),
        ("10.1.2.3", ["unknown"], None),
        ("10.1.2.3", [""], None),
        ("10.1.2.3", ["198.51.100.7:4711"], "198.51.100.7"),
        ("10.1.2.3", ["[2001:db8::7]:4711"], "2001:db8::7"),
        ("::ffff:10.1.2.3", ["2001:db8::7"], "2001:db8::7"),
        ("fd00::1", ["::ffff:198.51.100.7"], "198.51.100.7"),
        (None, ["198.51.100.7"], None),
    ],
)
def test_an_address_is_believed_as_far_as_our_proxies_say_it(
    peer: str | None, forwarded: list[str], expected: str | None
) -> None:
    """From the socket backwards, until the first hop that is not ours."""
    found = client_address(peer, forwarded, PROXIES)
    assert found == (None if expected is None else ip_address(expected))


@given(st.lists(st.ip_addresses().map(str), max_size=40), st.ip_addresses())
def test_a_header_never_speaks_for_a_stranger(hops: list[str], peer: object) -> None:
    """Whatever the header says, without a trusted peer the answer is the peer."""
    address = ip_address(str(peer))
    if not within(client_address(str(peer), [], []), PROXIES):
        mapped = getattr(address, "ipv4_mapped", None)
        assert client_address(str(peer), hops, PROXIES) == (mapped or address)
