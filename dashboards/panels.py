"""The house's panels: one look, units from the query, never without a description.

A panel that shows nothing says "No traffic" instead of an empty graph. Colours mean something:
green is served, red is our failure, blue is money.
"""

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.promql import Query

SOURCE = models.DataSourceRef(type_val="prometheus", uid="$datasource")
NO_VALUE = "No traffic"

OUTCOME_COLOURS: Mapping[str, str] = {
    "ok": "green",
    "client_error": "yellow",
    "rate_limited": "orange",
    "client_disconnect": "purple",
    "upstream_error": "red",
    "timeout": "dark-red",
    "truncated": "semi-dark-red",
    "internal_error": "light-red",
}

Series = tuple[Query, str]  # what is drawn, and its legend


def lines(
    title: str,
    description: str,
    *series: Series,
    width: int = 12,
    is_stacked: bool = False,
    has_exemplars: bool = False,
    colours: Mapping[str, str] = {},
) -> timeseries.Panel:
    """Curves over time. All series of a panel have one unit."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(_one_unit(series))
        .height(8)
        .span(width)
        .min(0)
        .no_value(NO_VALUE)
        .line_width(1)
        .fill_opacity(30 if is_stacked else 8)
        .show_points(common_models.VisibilityMode.NEVER)
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.TABLE)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["mean", "max", "lastNotNull"])
        )
    )
    if is_stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    for name, colour in colours.items():
        fixed = models.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})
        panel = panel.override_by_name(name, [fixed])
    for no, (query, legend) in enumerate(series):
        panel = panel.with_target(_target(no, query, legend).exemplar(has_exemplars))
    return panel


def number(
    title: str,
    description: str,
    query: Query,
    *,
    width: int = 4,
    is_bad_from: float | None = None,
    colour: str = "green",
    decimals: int | None = None,
) -> stat.Panel:
    """One number with its recent course. `is_bad_from`: red from there on."""
    steps = [models.Threshold(value=None, color=colour)]
    if is_bad_from is not None:
        steps.append(models.Threshold(value=is_bad_from, color="red"))
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(query.unit)
        .height(4)
        .span(width)
        .no_value(NO_VALUE)
        .color_mode(common_models.BigValueColorMode.VALUE)
        .graph_mode(common_models.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        .with_target(_target(0, query, ""))
    )
    return panel if decimals is None else panel.decimals(decimals)


def spread(title: str, description: str, query: Query, *, width: int = 12) -> heatmap.Panel:
    """A histogram over time: where the mass is, not only a quantile of it."""
    return (
        heatmap.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .height(8)
        .span(width)
        .no_value(NO_VALUE)
        .unit(query.unit)
        .calculate(False)
        .with_target(_target(0, query, "{{le}}").format(PromQueryFormat.HEATMAP))
    )


def _target(no: int, query: Query, legend: str) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .expr(query.expr)
        .legend_format(legend)
        .datasource(SOURCE)
        .ref_id(chr(ord("A") + no))
        .range()
    )


def _one_unit(series: Sequence[Series]) -> str:
    units = {query.unit for query, _ in series}
    if len(units) != 1:
        raise ValueError(f"one panel, one unit, not {sorted(units)}")
    return units.pop()
