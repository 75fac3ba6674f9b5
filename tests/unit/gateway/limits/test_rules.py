"""Which limits apply to a request, and what it asks of each."""

from decimal import Decimal
from typing import Any

from gateway.allowances import Budget, BudgetSettings, Limit, LimitDefaults, LimitSettings
from gateway.auth import Caller
from gateway.limits.arithmetic import MOST
from gateway.limits.rules import Rules, Wanted
from gateway.limits.taken import Taken, Used
from gateway.limits.words import duration
from gateway.tenants import Ancestor
from telemetry.ids import KeyId, TenantId


def limit(scope: Any, subject: str | None, amount: int, counts: Any = "requests") -> Limit:
    return Limit(
        id=f"{scope}{subject}{amount}",
        tenant_id="t",
        scope=scope,
        subject=subject,
        counts=counts,
        amount=Decimal(amount),
        per_s=60,
        strict=False,
    )


def rules(*limits: Limit, settings: LimitSettings | None = None) -> Rules:
    caller = Caller(
        tenant_id=TenantId("t"), tenant="acme", key_id=KeyId("k"), model_allow=None, limits=limits
    )
    return Rules(caller, settings or LimitSettings(), BudgetSettings())


def wanted(**more: Any) -> Wanted:
    facts: dict[str, Any] = {
        "user": None,
        "route": "m",
        "models": ("m",),
        "input_tokens": 100,
        "output_tokens": 900,
        "is_bounded": True,
        "spend_nano": 5,
    }
    return Wanted(**(facts | more))


def test_own_goes_before_each_and_each_before_the_default() -> None:
    """One limit of a kind and period applies per scope: the most particular one."""
    settings = LimitSettings(key=LimitDefaults(requests_per_minute=1, concurrency=9))
    each, own = limit("key", None, 2), limit("key", "k", 3)
    for limits, expected in (((), [1, 9]), ((each,), [2, 9]), ((each, own), [3, 9])):
        found = rules(*limits, settings=settings).of(None, "m", ("m",)).rules
        assert sorted(rule.limit for rule in found) == expected
    other = rules(limit("key", "someone-else", 4)).of(None, "m", ("m",)).rules
    assert other == ()


def test_users_routes_and_models_have_counters_of_their_own() -> None:
    """Users are counted apart, who names none is one user, and all models of the plan count."""
    made = rules(limit("user", None, 5), limit("model", None, 6), limit("route", "m", 7))
    keys = {
        user: tuple(rule.key for rule in made.of(user, "m", ("a", "b")).rules)
        for user in ("u1", "u2", None)
    }
    assert len(set(keys.values())) == 3
    assert all(len(found) == 4 for found in keys.values())
    assert len(made.of("u1", "other", ("a",)).rules) == 2


def test_levels_of_a_tree_have_counters_of_their_own_in_one_slot() -> None:
    """Limits of a tenant and of those above apply together; two teams share the counter of what is
    above them and not their own; the config's defaults are the lowest level's."""
    top = Ancestor(tenant_id=TenantId("org"), tenant="org", limits=(limit("tenant", None, 9),))
    found = {}
    for team in ("a", "b"):
        caller = Caller(
            tenant_id=TenantId(team),
            tenant=team,
            key_id=KeyId("k"),
            model_allow=None,
            limits=(limit("tenant", None, 5),),
            ancestors=(top,),
        )
        made = Rules(caller, LimitSettings(tenant=LimitDefaults(concurrency=3)), BudgetSettings())
        assert made.root == "org"
        found[team] = made.of(None, "m", ("m",)).rules
        assert [rule.limit for rule in found[team]] == [5, 3, 9]
        assert [rule.owner for rule in found[team]] == [team, team, "org"]
        assert [rule.is_above for rule in found[team]] == [False, False, True]
    shared = {rule.key for rule in found["a"]} & {rule.key for rule in found["b"]}
    assert shared == {found["a"][2].key}


def test_an_estimate_is_cut_to_fit_and_a_promise_is_not() -> None:
    """Without max_tokens a request never asks for more than the whole bucket."""
    (rule,) = rules(limit("tenant", None, 500, "tokens")).of(None, "m", ("m",)).rules
    assert rule.demand(wanted()).amount == 1000
    assert rule.demand(wanted(is_bounded=False)).amount == 500


def test_a_model_that_was_not_asked_took_nothing() -> None:
    """What was held for a fallback comes back whole."""
    used = Used(input_tokens=10, output_tokens=5, spend_nano=7)
    taken = Taken(total=used, models={"a": used})
    made = rules(limit("model", None, 100, "tokens"), limit("model", None, 100, "spend"))
    amounts = [(rule.subject, rule.actual(taken)) for rule in made.of(None, "m", ("a", "b")).rules]
    assert sorted(amounts) == [("a", 7), ("a", 15), ("b", 0), ("b", 0)]


def test_a_soft_budget_counts_and_never_refuses() -> None:
    """Its demand is without limit; its key is that of the hard one, so the sum is the same."""
    soft, hard = (
        Budget(
            id="b",
            tenant_id="t",
            scope="tenant",
            subject=None,
            amount_usd=Decimal(1),
            window="lifetime",
            hours=None,
            zone="UTC",
            mode=mode,  # type: ignore[arg-type]  # one of the modes
            strict=False,
        )
        for mode in ("soft", "hard")
    )
    found = []
    for budget in (soft, hard):
        caller = Caller(
            tenant_id=TenantId("t"),
            tenant="a",
            key_id=KeyId("k"),
            model_allow=None,
            budgets=(budget,),
        )
        (rule,) = Rules(caller, LimitSettings(), BudgetSettings()).of(None, "m", ()).rules
        found.append(rule.demand(wanted()))
    assert [demand.limit for demand in found] == [MOST, 10**9]
    assert found[0].key == found[1].key


def test_durations_are_written_as_go_does() -> None:
    """As OpenAI's headers: `12ms`, `1s`, `6m0s`."""
    shown = [duration(us) for us in (0, 12_000, 1_000_000, 1_500_000, 360_000_000, 3_600_000_000)]
    assert shown == ["0ms", "12ms", "1s", "1.5s", "6m0s", "1h0m0s"]
