"""Ledger: is every request recorded once, and can the figures be trusted?"""

from grafana_foundation_sdk.builders import dashboard

from dashboards.frame import frame
from dashboards.panels import lines, number
from dashboards.promql import age, gauge, increase, largest, quantile, rate, ratio
from telemetry import metrics as m


def ledger() -> dashboard.Dashboard:
    """Conservation, write-ahead log, rollups, usage quality, telemetry's own losses."""
    built = frame(
        "meterline-ledger",
        "Meterline / Ledger",
        "Is every request recorded once, and can the figures be trusted?",
        [(m.REQUESTS, "model"), (m.REQUESTS, "provider")],
    )
    return _quality(_log(_laws(built)))


def _laws(built: dashboard.Dashboard) -> dashboard.Dashboard:
    swept = ratio(increase(m.SWEPT, window="1h"), increase(m.ADMITTED, window="1h"))
    return (
        built.with_row(dashboard.Row("Is anything missing?"))
        .with_panel(
            number(
                "Largest residual",
                m.CONSERVATION_RESIDUAL.help,
                largest(m.CONSERVATION_RESIDUAL),
                is_bad_from=1,
            )
        )
        .with_panel(number("Open intents", m.INTENTS_OPEN.help, gauge(m.INTENTS_OPEN)))
        .with_panel(number("Swept of admitted", m.SWEPT.help, swept, is_bad_from=0.01, decimals=2))
        .with_panel(
            number(
                "Oldest record pending",
                m.WAL_OLDEST_PENDING.help,
                age(m.WAL_OLDEST_PENDING),
                is_bad_from=120,
            )
        )
        .with_panel(
            number("Hours to roll up", m.DIRTY_HOURS.help, gauge(m.DIRTY_HOURS), is_bad_from=24)
        )
        .with_panel(
            number(
                "Unpriced, last hour",
                m.UNPRICED_USAGE.help,
                increase(m.UNPRICED_USAGE, window="1h"),
                is_bad_from=1,
            )
        )
        .with_panel(
            lines(
                "Admitted, settled, swept",
                "Each admitted request is settled or swept: the curves of the first two lie on "
                "each other.",
                (rate(m.ADMITTED), "admitted"),
                (rate(m.SETTLED), "settled"),
                (rate(m.SWEPT), "swept"),
            )
        )
        .with_panel(
            lines(
                "Residual of each law",
                m.CONSERVATION_RESIDUAL.help,
                (gauge(m.CONSERVATION_RESIDUAL, by=["law"], how="max"), "{{law}}"),
            )
        )
    )


def _log(built: dashboard.Dashboard) -> dashboard.Dashboard:
    commits = [(quantile(q, m.WAL_FSYNC), f"p{q * 100:g}") for q in (0.5, 0.99)]
    return (
        built.with_row(dashboard.Row("Does the log reach the database?"))
        .with_panel(
            lines(
                "Records",
                f"{m.WAL_APPENDED.help} {m.WAL_SHIPPED.help}",
                (rate(m.WAL_APPENDED), "appended"),
                (rate(m.WAL_SHIPPED), "shipped"),
            )
        )
        .with_panel(
            lines(
                "Pending",
                m.WAL_PENDING_BYTES.help,
                (gauge(m.WAL_PENDING_BYTES, by=["node"]), "{{node}}"),
            )
        )
        .with_panel(lines("Group commit", m.WAL_FSYNC.help, *commits))
        .with_panel(lines("Rollup lag", m.ROLLUP_LAG.help, (gauge(m.ROLLUP_LAG, how="max"), "lag")))
    )


def _quality(built: dashboard.Dashboard) -> dashboard.Dashboard:
    sources = rate(m.TOKENS, by=["usage_source"], window="15m")
    doubts = [
        (increase(m.UNPRICED_USAGE, window="1h"), "unpriced"),
        (increase(m.AMBIGUOUS_USAGE, window="1h"), "ambiguous"),
    ]
    return (
        built.with_row(dashboard.Row("Can the figures be trusted?"))
        .with_panel(
            lines(
                "Tokens by who counted",
                m.TOKENS.help,
                (sources, "{{usage_source}}"),
                is_stacked=True,
            )
        )
        .with_panel(
            lines(
                "Doubtful usage per hour",
                f"{m.UNPRICED_USAGE.help} {m.AMBIGUOUS_USAGE.help}",
                *doubts,
            )
        )
        .with_panel(
            lines(
                "Conflicting usage per hour",
                m.USAGE_CONFLICTS.help,
                (increase(m.USAGE_CONFLICTS, by=["provider"], window="1h"), "{{provider}}"),
            )
        )
        .with_panel(
            lines(
                "Folded labels",
                m.LABEL_FOLDS.help,
                (rate(m.LABEL_FOLDS, by=["label"]), "{{label}}"),
            )
        )
        .with_panel(
            lines(
                "Spans",
                f"{m.SPANS_EXPORTED.help} {m.SPANS_DROPPED.help}",
                (rate(m.SPANS_EXPORTED), "exported"),
                (rate(m.SPANS_DROPPED, by=["reason"]), "dropped: {{reason}}"),
                width=24,
            )
        )
    )
