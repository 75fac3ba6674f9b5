"""The grammar of keys, how they are recognised, and what they allow."""

import hmac
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.keys import (
    ALPHABET,
    KEY,
    MODEL_PATTERN,
    KeyRing,
    ModelAllow,
    PepperInvalid,
    mint_admin_key,
    open_pepper,
)

PEPPER = bytes(range(32))
RING = KeyRing(PEPPER)


def test_a_minted_key_is_well_formed_and_recognised() -> None:
    """A new key matches the grammar, carries its public id, and was made by this ring."""
    minted = RING.mint()
    match = KEY.fullmatch(minted.secret.reveal())
    assert match is not None
    assert match[1] == minted.public_id
    assert RING.made(minted.public_id)


def test_no_two_keys_are_alike() -> None:
    """Public ids and secrets are drawn anew each time."""
    minted = [RING.mint() for _ in range(200)]
    assert len({key.public_id for key in minted}) == 200
    assert len({key.secret.reveal() for key in minted}) == 200


@given(st.binary(min_size=32, max_size=32), st.text(st.characters(max_codepoint=127)))
def test_the_digest_is_hmac_sha256(pepper: bytes, text: str) -> None:
    """The precomputed form equals the standard library's HMAC for any pepper and text."""
    assert KeyRing(pepper).digest(text) == hmac.digest(pepper, text.encode(), "sha256")


def test_another_pepper_does_not_know_the_key() -> None:
    """Neither id nor digest of a key mean anything under another pepper."""
    other = KeyRing(bytes(32))
    minted = RING.mint()
    assert not other.made(minted.public_id)
    assert other.digest(minted.secret.reveal()) != minted.digest
    assert other.fingerprint() != RING.fingerprint()


@given(st.text(ALPHABET, min_size=18, max_size=18))
def test_an_invented_public_id_is_not_ours(public_id: str) -> None:
    """Ids that were not minted here fail their tag (a hit has odds of 1 in 5.7e10)."""
    assert not RING.made(public_id)


@pytest.mark.parametrize("place", range(18))
def test_any_changed_character_breaks_the_public_id(place: int) -> None:
    """The tag covers each character of the id."""
    public_id = RING.mint().public_id
    changed = ALPHABET[(ALPHABET.index(public_id[place]) + 1) % 62]
    assert not RING.made(public_id[:place] + changed + public_id[place + 1 :])


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_pepper_of_another_size_is_refused(size: int) -> None:
    """A short pepper is a mistake, not a weaker one."""
    with pytest.raises(PepperInvalid, match="32 bytes"):
        KeyRing(bytes(size))


def test_secrets_do_not_show_in_repr() -> None:
    """Printing what holds a secret, or a pepper, prints neither."""
    minted = RING.mint()
    shown = f"{minted!r} {minted} {minted.secret!r} {minted.secret} {RING!r} {vars(RING)!r}"
    assert minted.secret.reveal()[-40:] not in shown
    assert repr(PEPPER) not in shown


def test_the_admin_key_is_never_a_tenants_key() -> None:
    """The two grammars share no text."""
    assert KEY.fullmatch(mint_admin_key().reveal()) is None


@pytest.mark.parametrize(
    ("patterns", "model", "allowed"),
    [
        (["assistant"], "assistant", True),
        (["assistant"], "assistant-2", False),
        (["assistant"], "Assistant", False),
        (["small-*"], "small-1", True),
        (["small-*"], "small-", True),
        (["small-*"], "small", False),
        (["a", "b*"], "bc", True),
        (["*"], "anything", True),
        ([], "anything", False),
        ([], "", False),
    ],
)
def test_models_are_allowed_by_name_or_prefix(
    patterns: list[str], model: str, allowed: bool
) -> None:
    """A name allows itself, `prefix*` all that start so, and an empty list nothing."""
    assert ModelAllow(patterns).allows(model) is allowed


@pytest.mark.parametrize(
    "text", ["", " ", "a b", "a*b", "**", "a**", "*a", "a\n", "a\x00", "a" * 257]
)
def test_what_is_no_model_pattern(text: str) -> None:
    """Patterns are refused that could not match what they seem to."""
    assert MODEL_PATTERN.fullmatch(text) is None


def test_a_pepper_is_made_once_for_the_owner_only(tmp_path: Path) -> None:
    """The first caller makes the file with mode 0600, the next one reads it."""
    path = tmp_path / "data" / "key-pepper"
    pepper = open_pepper(path)
    assert len(pepper) == 32
    assert open_pepper(path) == pepper
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_race_for_the_pepper_has_one_winner(tmp_path: Path) -> None:
    """Processes that start together agree on the pepper."""
    with ThreadPoolExecutor(8) as pool:
        peppers = list(pool.map(open_pepper, [tmp_path / "key-pepper"] * 16))
    assert len(set(peppers)) == 1


def test_a_damaged_pepper_is_an_error(tmp_path: Path) -> None:
    """A short file is not replaced: that would refuse every key in the database."""
    path = tmp_path / "key-pepper"
    path.write_bytes(b"short")
    with pytest.raises(PepperInvalid, match="restore it"):
        open_pepper(path)
    assert path.read_bytes() == b"short"
