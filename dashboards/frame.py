"""What all dashboards share: identity, variables, time range, links between them."""

from collections.abc import Sequence

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from dashboards.panels import SOURCE
from telemetry.metrics import Metric

TAG = "meterline"


def frame(
    uid: str, title: str, description: str, filters: Sequence[tuple[Metric, str]]
) -> dashboard.Dashboard:
    """An empty dashboard that can be filtered by each (metric, label): the values on offer are
    those that the metric has."""
    built = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .readonly()
        .time("now-3h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        .link(
            dashboard.DashboardLink("Meterline")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
    )
    for metric, label in filters:
        built = built.with_variable(_filter(metric, label))
    return built


def _filter(metric: Metric, label: str) -> dashboard.QueryVariable:
    metric.label(label)
    return (
        dashboard.QueryVariable(label)
        .label(label.capitalize())
        .datasource(SOURCE)
        .query(f"label_values({metric.series[0]}, {label})")
        .definition(f"label_values({metric.series[0]}, {label})")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(text="All", value="$__all", selected=True))
    )
