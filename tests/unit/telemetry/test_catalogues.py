"""Price lists from files: exact, complete, and honest about what they could not carry over."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.books import Entry
from telemetry.catalogues import ListInvalid, from_csv, from_litellm, with_tiers
from telemetry.pricing import Meter

LITELLM = """{
 "sample_spec": {"input_cost_per_token": 0.1, "litellm_provider": "x"},
 "gpt-5": {"litellm_provider": "openai", "mode": "chat",
   "input_cost_per_token": 2.5e-06, "output_cost_per_token": 1e-05,
   "input_cost_per_token_batches": 1.25e-06, "input_cost_per_token_flex": 1.25e-06,
   "cache_read_input_token_cost_priority": 5e-07,
   "input_cost_per_token_above_272k_tokens_priority": 1e-05,
   "cache_creation_input_token_cost_above_1hr_above_200k_tokens": 1.2e-05,
   "output_cost_per_second": 0.1, "supports_vision": true},
 "gemini/gemini-9": {"litellm_provider": "gemini", "input_cost_per_token": 0,
   "output_cost_per_token": 2.99999e-12, "input_cost_per_request": 0.035},
 "broken": {"litellm_provider": "openai", "input_cost_per_token": "free"}
}"""


def _by_key(entries: tuple[Entry, ...]) -> dict[tuple[str, str, str, int], Decimal]:
    return {(e.model, e.meter, e.service_tier, e.min_input_tokens): e.unit_price for e in entries}


def test_litellm_keys_are_taken_apart_exactly() -> None:
    """Meter, threshold and tier come from the key; the price is the decimal of the text."""
    catalogue = from_litellm(LITELLM)
    assert _by_key(catalogue.entries) == {
        ("gpt-5", "Input Tokens", "", 0): Decimal("2.5"),
        ("gpt-5", "Output Tokens", "", 0): Decimal("10"),
        ("gpt-5", "Input Tokens", "batch", 0): Decimal("1.25"),
        ("gpt-5", "Input Tokens", "flex", 0): Decimal("1.25"),
        ("gpt-5", "Cache Read Input Tokens", "priority", 0): Decimal("0.5"),
        ("gpt-5", "Input Tokens", "priority", 272_001): Decimal("10"),
        ("gpt-5", "Cache Write 1h Input Tokens", "", 200_001): Decimal("12"),
        ("gemini-9", "Input Tokens", "", 0): Decimal(0),
        ("gemini-9", "Output Tokens", "", 0): Decimal("0.000003"),
        ("gemini-9", "Requests", "", 0): Decimal("0.035"),
    }
    assert {entry.provider for entry in catalogue.entries} == {"openai", "google"}
    (rounded,) = catalogue.quantised
    assert "is stored as 0.000003" in rounded
    assert catalogue.skipped == {
        "output_cost_per_second": 1,
        "input_cost_per_token: not a number": 1,
    }


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"m": {"mode": "chat"}}'])
def test_what_is_no_litellm_map_is_refused(text: str) -> None:
    """An empty book must never be made by a wrong file."""
    with pytest.raises(ListInvalid):
        from_litellm(text)


def test_a_csv_says_everything_a_price_can_be() -> None:
    """Optional columns have the defaults of the command's help."""
    (first, second) = from_csv(
        "provider,model,meter,unit_price,list_unit_price,service_tier,match,effective_from\n"
        "openai,GPT-5,input tokens,2.4,2.5,,,2026-11-01\n"
        "openai,gpt-5,Output Tokens,9,,Flex,starts_with,\n"
    ).entries
    assert (first.model, first.match, first.unit) == ("gpt-5", "equals", 1_000_000)
    assert (first.unit_price, first.list_unit_price) == (Decimal("2.4"), Decimal("2.5"))
    assert first.effective_from is not None
    assert first.effective_from.isoformat() == "2026-11-01T00:00:00+00:00"
    assert (second.service_tier, second.match) == ("flex", "starts_with")
    assert second.list_unit_price is None


def test_every_wrong_line_of_a_csv_is_named() -> None:
    """One run shows everything that is to be mended."""
    with pytest.raises(ListInvalid) as caught:
        from_csv(
            "provider,model,meter,unit_price,unit,effective_from,effective_to\n"
            "openai,m,Coffee,1,,,\n"
            "openai,m,Input Tokens,cheap,,,\n"
            "openai,m,Input Tokens,-1,,,\n"
            "openai,m,Input Tokens,1,7,,\n"
            "openai,m,Input Tokens,1,,2026-11-02,2026-11-01\n"
            "openai,m,Input Tokens,1,,,\n"
            "openai,m,Input Tokens,2,,2026-12-01,\n"
            "openai,m\n"
        )
    problems = caught.value.problems
    assert [problem.partition(":")[0] for problem in problems[:-1]] == [
        *(f"line {number}" for number in (2, 3, 4, 5, 6, 9)),
    ]
    assert "hold at the same time" in problems[-1]


def test_a_csv_without_its_columns_is_refused() -> None:
    """Also one with a column that nobody would read."""
    with pytest.raises(ListInvalid, match="column unit_price is missing; unknown column price"):
        from_csv("provider,model,meter,price\n")


def test_tiers_are_materialised_and_never_replace_what_the_list_says() -> None:
    """batch=0.5 halves the standard price, at nine decimals, only where no batch price is."""
    catalogue = from_csv(
        "provider,model,meter,unit_price,service_tier\n"
        "p,m,Input Tokens,0.000000003,\np,m,Output Tokens,8,\np,m,Output Tokens,3,batch\n"
        "p,m,Requests,1,\n"
    )
    tiered = with_tiers(catalogue, {"batch": Decimal("0.5")})
    batch = {e.meter: e.unit_price for e in tiered.entries if e.service_tier == "batch"}
    assert batch == {
        Meter.INPUT: Decimal("0.000000002"),  # half up, and reported
        Meter.OUTPUT: Decimal(3),
    }
    assert len(tiered.quantised) == 1
    assert len(tiered.entries) == 5


@given(st.text(max_size=200))
def test_no_text_breaks_the_readers(text: str) -> None:
    """Whatever a file holds: a list, or ListInvalid."""
    for read in (from_csv, from_litellm):
        try:
            assert read(text).entries
        except ListInvalid as error:
            assert error.problems
