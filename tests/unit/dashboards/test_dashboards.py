"""Dashboards that cannot be empty: all names in them are declared, the committed files are current.

Each check is a function of the registry, so that a test can take a metric or a label away from it
and see the check fail.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from msgspec import structs

from dashboards import build, promql
from dashboards.__main__ import main
from dashboards.panels import lines
from telemetry import metrics as m

SERIES = {name: metric for metric in m.REGISTRY.values() for name in metric.series}
FILES = {name: json.loads(text) for name, text in build.rendered().items()}
UNITS = {
    "s",
    "reqps",
    "cps",
    "Bps",
    "short",
    "percentunit",
    "currencyUSD",
    "bytes",
    "dateTimeFromNow",
}

_SELECTOR = re.compile(r"(meterline_[a-z0-9_]+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'([a-z_]+)(=~|!~|!=|=)"([^"]*)"')
_GROUPING = re.compile(r"by \(([^)]*)\)")


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            yield panel
        yield from (inner for inner in panel.get("panels") or [])


def expressions() -> list[tuple[str, str]]:
    """Every (panel, expression) of every dashboard."""
    return [
        (f"{name}: {panel['title']}", target["expr"])
        for name, dashboard in FILES.items()
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]


def problems(expr: str, series: Mapping[str, m.Metric]) -> list[str]:
    """What in the expression is not declared: series, labels, label values, groupings."""
    found = []
    used = []
    for name, inside in _SELECTOR.findall(expr):
        metric = series.get(name)
        if metric is None:
            found.append(f"no series {name}")
            continue
        used.append(metric)
        for label, operator, value in _MATCHER.findall(inside):
            if label not in metric.label_names:
                found.append(f"{name} has no label {label}")
            elif not _can_match(metric.label(label), operator, value):
                found.append(f"{name}: {label}{operator}{value} matches nothing")
    for grouping in _GROUPING.findall(expr):
        labels = {label for metric in used for label in metric.label_names} | {"le", "instance"}
        found += [f"nothing has the label {one}" for one in set(grouping.split(", ")) - labels]
    return found


def _can_match(label: m.Label, operator: str, value: str) -> bool:
    if value.startswith("$") or not label.values:
        return True
    if "~" not in operator:
        return value in label.values
    if "*" not in value:
        return set(value.split("|")) <= set(label.values)
    return any(re.fullmatch(value, one) for one in label.values)


@pytest.mark.parametrize(("panel", "expr"), expressions(), ids=lambda value: value[:60])
def test_every_name_in_an_expression_is_declared(panel: str, expr: str) -> None:
    """Series, matched labels, matched values and groupings all exist in the registry."""
    assert _SELECTOR.search(expr), panel
    assert problems(expr, SERIES) == [], panel


def shown() -> list[m.Metric]:
    """The metrics that some panel shows."""
    names = {name for _, expr in expressions() for name, _ in _SELECTOR.findall(expr)}
    return [metric for metric in m.REGISTRY.values() if names & set(metric.series)]


@pytest.mark.parametrize("metric", shown(), ids=lambda metric: metric.name)
def test_a_renamed_metric_is_noticed(metric: m.Metric) -> None:
    """Mutation: with the metric under another name, each expression that uses it fails."""
    renamed = {name: one for name, one in SERIES.items() if one is not metric}
    for _, expr in expressions():
        uses = any(SERIES[name] is metric for name, _ in _SELECTOR.findall(expr))
        assert bool(problems(expr, renamed)) == uses


@pytest.mark.parametrize("metric", shown(), ids=lambda metric: metric.name)
def test_a_renamed_label_is_noticed(metric: m.Metric) -> None:
    """Mutation: with its labels under other names, each expression that names one fails."""
    mutant = structs.replace(
        metric, labels=tuple(m.Label(f"x_{one.name}") for one in metric.labels)
    )
    series = {name: mutant if one is metric else one for name, one in SERIES.items()}
    for _, expr in expressions():
        selected = [inside for name, inside in _SELECTOR.findall(expr) if SERIES[name] is metric]
        named = {label for inside in selected for label, _, _ in _MATCHER.findall(inside)}
        assert bool(problems(expr, series)) >= bool(named)


def test_most_metrics_are_on_a_dashboard() -> None:
    """What is measured is shown; the rest are facts for joins and for other dashboards."""
    unseen = {metric.name for metric in m.REGISTRY.values()} - {one.name for one in shown()}
    infos = {one.name for one in m.REGISTRY.values() if one.kind is m.Kind.INFO}
    assert unseen == infos


@pytest.mark.parametrize(("panel", "expr"), expressions(), ids=lambda value: value[:60])
def test_expressions_are_well_formed(panel: str, expr: str) -> None:
    """Brackets balance, counters are under rate or increase, gauges never are."""
    for opening, closing in ("()", "[]", "{}"):
        assert expr.count(opening) == expr.count(closing), panel
    for found in _SELECTOR.finditer(expr):
        metric = SERIES[found[1]]
        before, after = expr[: found.start()], expr[found.end() :]
        is_ranged = before.endswith(("rate(", "increase(")) and after.startswith("[")
        assert is_ranged == (metric.kind in (m.Kind.COUNTER, m.Kind.HISTOGRAM)), panel


def test_the_committed_files_are_current() -> None:
    """`python -m dashboards build --check` passes, and `build` is the same on every run."""
    assert build.differences() == []
    assert build.rendered() == build.rendered()
    assert CliRunner().invoke(main, ["build", "--check"]).exit_code == 0


def test_differences_are_named(tmp_path: Path) -> None:
    """A stale, a missing and a surplus file are each reported, and `write` mends all three."""
    build.write(tmp_path)
    (tmp_path / "engine.json").write_text("{}")
    (tmp_path / "ledger.json").unlink()
    (tmp_path / "old.json").write_text("{}")
    assert build.differences(tmp_path) == ["engine.json", "ledger.json", "old.json"]
    build.write(tmp_path)
    assert build.differences(tmp_path) == []


@pytest.mark.parametrize("name", FILES)
def test_files_are_dashboards_of_the_schema(name: str) -> None:
    """Grafana's own schema reads the file and writes it back unchanged."""
    again = json.dumps(Dashboard.from_json(FILES[name]), cls=JSONEncoder, indent=2, sort_keys=True)
    assert json.loads(again) == FILES[name]


def test_uids_are_stable_and_apart() -> None:
    """Links and bookmarks survive a rebuild."""
    uids = {name: dashboard["uid"] for name, dashboard in FILES.items()}
    assert uids == {
        "overview.json": "meterline-overview",
        "engine.json": "meterline-engine",
        "ledger.json": "meterline-ledger",
    }


@pytest.mark.parametrize("name", FILES)
def test_each_panel_explains_itself(name: str) -> None:
    """Title, description, unit and a word for no data; panels do not overlap."""
    taken: set[tuple[int, int]] = set()
    for panel in panels(FILES[name]):
        defaults = panel["fieldConfig"]["defaults"]
        assert panel["title"]
        assert len(panel["description"]) > 10
        assert defaults["unit"] in UNITS
        assert defaults["noValue"]
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("name", FILES)
def test_variables_ask_for_labels_that_exist(name: str) -> None:
    """Each variable's query names a declared series and label, and each `$variable` is defined."""
    variables = FILES[name]["templating"]["list"]
    for variable in variables:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"])
            assert found is not None
            assert found[2] in SERIES[found[1]].label_names
    defined = {variable["name"] for variable in variables}
    text = json.dumps(FILES[name])
    used = set(re.findall(r"\$([a-z]\w*)", text))
    assert used <= defined


def test_a_label_that_the_metric_lacks_stops_the_build() -> None:
    """Grouping or matching by an unknown label is an error, not an empty graph."""
    with pytest.raises(KeyError):
        promql.rate(m.REQUESTS, by=["tenant"])
    with pytest.raises(KeyError):
        promql.rate(m.ADMITTED, where={"model": '="x"'})


def test_units_follow_from_the_query() -> None:
    """What is done to a metric decides the unit of the panel."""
    assert promql.rate(m.REQUESTS).unit == "reqps"
    assert promql.increase(m.COST, window="1h").unit == "currencyUSD"
    assert promql.quantile(0.95, m.OVERHEAD).unit == "s"
    assert promql.rate(m.ENGINE_STEP_SECONDS).unit == "percentunit"
    assert promql.gauge(m.WAL_PENDING_BYTES).unit == "bytes"
    assert promql.age(m.WAL_OLDEST_PENDING).unit == "s"
    assert promql.ratio(promql.rate(m.SWEPT), promql.rate(m.ADMITTED)).unit == "percentunit"


def test_one_panel_has_one_unit() -> None:
    """Seconds and dollars do not share an axis."""
    with pytest.raises(ValueError, match="one unit"):
        lines(
            "x",
            "y",
            (promql.quantile(0.5, m.OVERHEAD), "a"),
            (promql.increase(m.COST, window="1h"), "b"),
        )
