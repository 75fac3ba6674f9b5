"""A runbook per alert, in Markdown.

Those of platform alerts say what to look at; that of an objective is a stub that says what is
measured and how to see it: a team writes the rest, and what it wrote is never overwritten.
"""

from telemetry.slo import platform
from telemetry.slo.burn import duration, windows
from telemetry.slo.declaration import Percentile, Slo, SloFile
from telemetry.slo.rules import PERCENTILE, events, good_moment


def pages(file: SloFile) -> dict[str, str]:
    """File name to text."""
    found = {f"{slo.name}.md": _objective(slo) for slo in file.slos}
    found |= {f"{one.name}.md": _percentile(one) for one in file.percentiles}
    found |= {f"{platform.slug(one.name)}.md": _platform(one) for one in platform.alerts(file.job)}
    return found


def _objective(slo: Slo) -> str:
    counted = events(slo)
    if counted is None:
        assert slo.sli.threshold is not None
        measured = f"A moment is good while\n\n```promql\n{good_moment(slo.sli.threshold)}\n```\n"
    else:
        side = "Bad" if counted.bad is not None else "Good"
        part = counted.bad or counted.good
        measured = (
            f"All events:\n\n```promql\n{counted.total}\n```\n\n{side} ones:\n\n"
            f"```promql\n{part}\n```\n"
        )
    rates = "\n".join(
        f"| {w.severity} | {duration(w.long_s)} and {duration(w.short_s)} | {w.factor} |"
        for w in windows(slo.period_s)
    )
    return (
        f"# {slo.name}\n\n{slo.description.strip() or 'An objective of the gateway.'}\n\n"
        f"Objective: {slo.objective} % over {slo.window}.\n\n## What is measured\n\n{measured}\n"
        f"## When it alerts\n\n| severity | windows | burn rate above |\n|---|---|---|\n{rates}\n\n"
        "## What to look at\n\n"
        f'1. How fast: `slo:current_burn_rate:ratio{{slo="{slo.name}"}}`; what is left: '
        f'`slo:period_error_budget_remaining:ratio{{slo="{slo.name}"}}`.\n'
        "2. Which part: the dashboard *Overview*, by model and provider; then one slow or failed "
        "request from an exemplar, by `meterline explain REQUEST_ID`.\n"
        "3. Since when: deployments, config reloads (`meterline_config_reloads_total`), circuits "
        "(`meterline_circuit_state`).\n"
    )


def _percentile(one: Percentile) -> str:
    return (
        f"# {one.name}\n\nThe {one.quantile} quantile of `{one.metric}` over {one.window} is above "
        f"{one.threshold} for {one.hold}, for one of: {', '.join(one.by) or 'all traffic'}.\n\n"
        f'## What to look at\n\n1. `{PERCENTILE}{{percentile="{one.name}"}}`: for which of them, '
        "since when.\n2. Our own share: `meterline_overhead_seconds`; waiting at the engine: "
        "`meterline_queue_wait_seconds`.\n3. One slow request from an exemplar: "
        "`meterline explain REQUEST_ID` shows where its time went.\n"
    )


def _platform(one: platform.PlatformAlert) -> str:
    steps = "\n".join(f"{at}. {step}" for at, step in enumerate(one.do, 1))
    return (
        f"# {one.name}\n\n{one.means}\n\n```promql\n{one.expr}\n```\n\n"
        f"Severity: {one.severity}{f', after {one.hold}' if one.hold else ''}.\n\n"
        f"## What to do\n\n{steps}\n"
    )
