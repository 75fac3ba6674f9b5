"""Overview: are users served well, and what does it cost?"""

from grafana_foundation_sdk.builders import dashboard

from dashboards.frame import frame
from dashboards.panels import OUTCOME_COLOURS, lines, number, spread
from dashboards.promql import Query, buckets, gauge, increase, quantile, rate, ratio
from telemetry import metrics as m
from telemetry.record import FAILURES

_FAILED = {"outcome": f'=~"{"|".join(sorted(FAILURES))}"'}
_COUNTS = {"counts_against_slo": '="true"'}
_OUTPUT = {"token_type": '=~"out_.*"'}
_REACHED = {"provider": '!="none"'}


def overview() -> dashboard.Dashboard:
    """Traffic, latency, tokens and cost of the gateway."""
    built = frame(
        "meterline-overview",
        "Meterline / Overview",
        "Are users served well, and what does it cost?",
        [(m.REQUESTS, "model"), (m.REQUESTS, "provider"), (m.REQUESTS, "route")],
    )
    return _backends(_cost(_latency(_traffic(built))))


def _traffic(built: dashboard.Dashboard) -> dashboard.Dashboard:
    failed = rate(m.REQUESTS, where=_FAILED)
    counted = rate(m.REQUESTS, where=_COUNTS)
    hourly_cost = rate(m.COST, window="1h").times("3600", "currencyUSD")
    return (
        built.with_row(dashboard.Row("Are users served?"))
        .with_panel(
            number("Requests", f"Settled requests per second. {m.REQUESTS.help}", rate(m.REQUESTS))
        )
        .with_panel(
            number(
                "Error ratio",
                "Requests that failed on our side of the wire, of those that count against the "
                "SLO. Refusals for cause and hang-ups of the client are not in it.",
                ratio(failed, counted),
                is_bad_from=0.01,
                decimals=2,
            )
        )
        .with_panel(
            number(
                "Time to first token, p95",
                m.TIME_TO_FIRST_TOKEN.help,
                quantile(0.95, m.TIME_TO_FIRST_TOKEN),
                is_bad_from=2,
            )
        )
        .with_panel(number("In flight", m.IN_FLIGHT.help, gauge(m.IN_FLIGHT)))
        .with_panel(number("Open streams", m.OPEN_STREAMS.help, gauge(m.OPEN_STREAMS)))
        .with_panel(
            number(
                "Cost per hour",
                f"At the last hour's pace. {m.COST.help}",
                hourly_cost,
                colour="blue",
            )
        )
        .with_panel(
            lines(
                "Requests by outcome",
                m.REQUESTS.help,
                (rate(m.REQUESTS, by=["outcome"]), "{{outcome}}"),
                is_stacked=True,
                colours=OUTCOME_COLOURS,
            )
        )
        .with_panel(
            lines(
                "Refused by a limit or a budget",
                m.LIMIT_REFUSALS.help,
                (rate(m.LIMIT_REFUSALS, by=["scope", "counted"]), "{{scope}} {{counted}}"),
                is_stacked=True,
            )
        )
        .with_panel(
            lines(
                "Refused before anyone was identified",
                m.UNAUTHENTICATED.help,
                (rate(m.UNAUTHENTICATED, by=["reason"]), "{{reason}}"),
                is_stacked=True,
            )
        )
        .with_panel(
            number(
                "Replicas without the shared counters",
                m.LIMITS_DEGRADED.help,
                gauge(m.LIMITS_DEGRADED),
                width=6,
                is_bad_from=1,
            )
        )
        .with_panel(
            number("Admitted by slices", m.SLICE_ADMITTED.help, rate(m.SLICE_ADMITTED), width=6)
        )
        .with_panel(number("Open holds", m.LIMIT_HOLDS.help, gauge(m.LIMIT_HOLDS), width=6))
        .with_panel(
            number(
                "Soft budgets overrun, 24 h",
                m.BUDGET_OVERRUNS.help,
                increase(m.BUDGET_OVERRUNS, window="24h"),
                width=6,
                is_bad_from=1,
            )
        )
        .with_panel(
            lines(
                "Budgets that go on with less",
                f"{m.BUDGET_DOWNGRADES.help} {m.STREAMS_CUT.help}",
                (rate(m.BUDGET_DOWNGRADES), "to a cheaper model"),
                (rate(m.STREAMS_CUT), "streams ended"),
            )
        )
        .with_panel(
            lines("Wait for the shared counters", m.STORE_WAIT.help, *_quantiles(m.STORE_WAIT))
        )
    )


def _quantiles(metric: m.Metric) -> list[tuple[Query, str]]:
    return [(quantile(q, metric), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)]


def _latency(built: dashboard.Dashboard) -> dashboard.Dashboard:
    by_class = quantile(0.95, m.TIME_TO_FIRST_TOKEN, by=["input_class"])
    return (
        built.with_row(dashboard.Row("How long do they wait, and for whom?"))
        .with_panel(
            lines(
                "Time to first token",
                m.TIME_TO_FIRST_TOKEN.help,
                *_quantiles(m.TIME_TO_FIRST_TOKEN),
                has_exemplars=True,
            )
        )
        .with_panel(
            lines(
                "Time to first token by prompt size, p95",
                m.TIME_TO_FIRST_TOKEN.help,
                (by_class, "{{input_class}}"),
            )
        )
        .with_panel(
            spread("Request duration", m.REQUEST_DURATION.help, buckets(m.REQUEST_DURATION))
        )
        .with_panel(
            lines(
                "Time per output token",
                m.TIME_PER_OUTPUT_TOKEN.help,
                *_quantiles(m.TIME_PER_OUTPUT_TOKEN),
            )
        )
        .with_panel(lines("The gateway's own time", m.OVERHEAD.help, *_quantiles(m.OVERHEAD)))
        .with_panel(lines("Queue at the backend", m.QUEUE_WAIT.help, *_quantiles(m.QUEUE_WAIT)))
    )


def _cost(built: dashboard.Dashboard) -> dashboard.Dashboard:
    spent = increase(m.COST, by=["model"], window="1h")
    written = increase(m.TOKENS, by=["model"], window="1h", where=_OUTPUT)
    per_million = Query(f"{spent.expr} / ({written.expr} > 0) * 1e6", "currencyUSD")
    hourly = rate(m.COST, by=["model"], window="1h").times("3600", "currencyUSD")
    parts = rate(m.COST, by=["component"], window="1h").times("3600", "currencyUSD")
    return (
        built.with_row(dashboard.Row("What does it cost?"))
        .with_panel(
            lines("Cost per hour by model", m.COST.help, (hourly, "{{model}}"), is_stacked=True)
        )
        .with_panel(
            lines(
                "Cost per hour by component", m.COST.help, (parts, "{{component}}"), is_stacked=True
            )
        )
        .with_panel(
            lines(
                "Tokens",
                m.TOKENS.help,
                (rate(m.TOKENS, by=["token_type"]), "{{token_type}}"),
                is_stacked=True,
            )
        )
        .with_panel(
            lines(
                "Cost per million output tokens",
                "All cost of the last hour, input included, over the output tokens of the hour.",
                (per_million, "{{model}}"),
            )
        )
    )


def _backends(built: dashboard.Dashboard) -> dashboard.Dashboard:
    tries = Query(ratio(rate(m.ATTEMPTS), rate(m.REQUESTS, where=_REACHED)).expr, "short")
    hung_up = rate(m.STREAM_DISCONNECTS, by=["before_first_token"])
    return (
        built.with_row(dashboard.Row("What do the backends do?"))
        .with_panel(
            lines(
                "Attempts by outcome",
                m.ATTEMPTS.help,
                (rate(m.ATTEMPTS, by=["provider", "outcome"]), "{{provider}} {{outcome}}"),
            )
        )
        .with_panel(
            lines(
                "Attempts per request",
                "1 is no retry at all. Hedges, retries and fallbacks add to it.",
                (tries, "attempts"),
            )
        )
        .with_panel(
            lines(
                "Backends left alone",
                m.CIRCUIT_STATE.help,
                (
                    gauge(m.CIRCUIT_STATE, by=["backend", "fault"], how="max"),
                    "{{backend}} {{fault}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Circuits that opened",
                m.CIRCUIT_OPENED.help,
                (
                    increase(m.CIRCUIT_OPENED, by=["backend", "fault"], window="5m"),
                    "{{backend}} {{fault}}",
                ),
            )
        )
        .with_panel(
            lines(
                "Hedges",
                m.HEDGES.help,
                (increase(m.HEDGES, by=["result"], window="5m"), "{{result}}"),
            )
        )
        .with_panel(
            lines(
                "Streams left by the client",
                m.STREAM_DISCONNECTS.help,
                (hung_up, "before first token: {{before_first_token}}"),
            )
        )
        .with_panel(
            lines(
                "Configuration reloads and recording errors",
                f"{m.CONFIG_RELOADS.help} {m.OBSERVER_ERRORS.help}",
                (increase(m.CONFIG_RELOADS, by=["result"], window="5m"), "reload {{result}}"),
                (increase(m.OBSERVER_ERRORS, by=["kind"], window="5m"), "error {{kind}}"),
            )
        )
    )
