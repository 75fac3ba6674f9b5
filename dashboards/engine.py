"""Engine: where does the device's time go, and what holds requests back?"""

from grafana_foundation_sdk.builders import dashboard

from dashboards.frame import frame
from dashboards.panels import lines, number, spread
from dashboards.promql import buckets, gauge, increase, quantile, rate, ratio
from telemetry import metrics as m


def engine() -> dashboard.Dashboard:
    """Step time, batches, queue and KV cache of our own engines."""
    built = frame(
        "meterline-engine",
        "Meterline / Engine",
        "Where does the device's time go, and what holds requests back?",
        [(m.ENGINE_STEP_SECONDS, "model")],
    )
    return _memory(_work(_now(built)))


def _now(built: dashboard.Dashboard) -> dashboard.Dashboard:
    idle = rate(m.ENGINE_STEP_SECONDS, where={"phase": '="idle"'})
    lost = rate(m.ENGINE_CHARGED_SECONDS, where={"phase": '=~"recompute|spec_rejected"'})
    charged = rate(m.ENGINE_CHARGED_SECONDS)
    generated = rate(m.ENGINE_TOKENS, where={"phase": '="decode"'})
    return (
        built.with_row(dashboard.Row("Is it busy?"))
        .with_panel(number("Running", m.ENGINE_RUNNING.help, gauge(m.ENGINE_RUNNING)))
        .with_panel(
            number("Waiting", m.ENGINE_WAITING.help, gauge(m.ENGINE_WAITING), is_bad_from=32)
        )
        .with_panel(number("Tokens generated per second", m.ENGINE_TOKENS.help, generated))
        .with_panel(
            number("Idle", "Share of the wall time.", ratio(idle, rate(m.ENGINE_STEP_SECONDS)))
        )
        .with_panel(
            number(
                "KV cache in use",
                m.ENGINE_KV_USAGE.help,
                gauge(m.ENGINE_KV_USAGE, how="max"),
                is_bad_from=0.95,
            )
        )
        .with_panel(number("Work lost", m.ENGINE_CHARGED_SECONDS.help, ratio(lost, charged)))
    )


def _work(built: dashboard.Dashboard) -> dashboard.Dashboard:
    steps = rate(m.ENGINE_STEP_SECONDS, by=["phase"])
    tokens = rate(m.ENGINE_TOKENS, by=["phase"])
    sizes = [(quantile(q, m.ENGINE_BATCH_SIZE), f"p{q * 100:g}") for q in (0.5, 0.95)]
    return (
        built.with_row(dashboard.Row("Where does its time go?"))
        .with_panel(
            lines(
                "Step time by phase",
                f"{m.ENGINE_STEP_SECONDS.help} Each engine adds 100 %.",
                (steps, "{{phase}}"),
                is_stacked=True,
            )
        )
        .with_panel(
            lines(
                "Tokens computed",
                m.ENGINE_TOKENS.help,
                (tokens, "{{phase}}"),
            )
        )
        .with_panel(lines("Batch size", m.ENGINE_BATCH_SIZE.help, *sizes))
        .with_panel(
            spread("Batch size, spread", m.ENGINE_BATCH_SIZE.help, buckets(m.ENGINE_BATCH_SIZE))
        )
        .with_panel(
            lines(
                "Charged time by phase",
                m.ENGINE_CHARGED_SECONDS.help,
                (rate(m.ENGINE_CHARGED_SECONDS, by=["phase"]), "{{phase}}"),
                is_stacked=True,
            )
        )
        .with_panel(
            lines(
                "Requests by ending",
                m.ENGINE_REQUESTS.help,
                (rate(m.ENGINE_REQUESTS, by=["ending"]), "{{ending}}"),
                is_stacked=True,
            )
        )
    )


def _memory(built: dashboard.Dashboard) -> dashboard.Dashboard:
    return (
        built.with_row(dashboard.Row("What holds requests back?"))
        .with_panel(
            lines(
                "Requests",
                f"{m.ENGINE_RUNNING.help} {m.ENGINE_WAITING.help}",
                (gauge(m.ENGINE_RUNNING), "running"),
                (gauge(m.ENGINE_WAITING), "waiting"),
            )
        )
        .with_panel(
            lines(
                "Prompt tokens waiting",
                m.ENGINE_WAITING_TOKENS.help,
                (gauge(m.ENGINE_WAITING_TOKENS), "tokens"),
            )
        )
        .with_panel(
            lines(
                "KV cache in use",
                m.ENGINE_KV_USAGE.help,
                (gauge(m.ENGINE_KV_USAGE, by=["instance"], how="max"), "{{instance}}"),
            )
        )
        .with_panel(
            lines(
                "Preemptions",
                m.ENGINE_PREEMPTIONS.help,
                (rate(m.ENGINE_PREEMPTIONS, by=["model"]), "{{model}}"),
            )
        )
        .with_panel(
            lines(
                "KV blocks swapped",
                m.ENGINE_SWAPPED_BLOCKS.help,
                (rate(m.ENGINE_SWAPPED_BLOCKS, by=["direction"]), "{{direction}}"),
            )
        )
        .with_panel(
            lines(
                "KV blocks in swap space",
                m.ENGINE_SWAP_USED.help,
                (gauge(m.ENGINE_SWAP_USED, by=["instance"], how="max"), "{{instance}}"),
            )
        )
        .with_panel(
            lines(
                "Swapped sequences that were lost",
                m.ENGINE_SWAP_LOST.help,
                (increase(m.ENGINE_SWAP_LOST, by=["model"], window="5m"), "{{model}}"),
            )
        )
        .with_panel(
            lines(
                "KV blocks held, mean",
                m.ENGINE_KV_BLOCK_SECONDS.help,
                (rate(m.ENGINE_KV_BLOCK_SECONDS, by=["tier"]), "{{tier}}"),
            )
        )
        .with_panel(
            lines(
                "Refused as too late",
                m.ENGINE_TOO_LATE.help,
                (increase(m.ENGINE_TOO_LATE, by=["model"], window="5m"), "{{model}}"),
            )
        )
        .with_panel(
            number(
                "Prompt tokens from the prefix cache",
                m.ENGINE_PREFIX_HITS.help,
                ratio(rate(m.ENGINE_PREFIX_HITS), rate(m.ENGINE_PREFIX_QUERIES)),
            )
        )
        .with_panel(
            number(
                "Guessed tokens that held",
                m.ENGINE_SPEC_ACCEPTED.help,
                ratio(rate(m.ENGINE_SPEC_ACCEPTED), rate(m.ENGINE_SPEC_DRAFTED)),
            )
        )
    )
