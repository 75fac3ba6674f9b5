"""Alertmanager's config: who hears of what, and what is not said twice.

Pages and tickets go to receivers of their own, by team if the alerts carry one. A page of an
objective silences its tickets; a target that is down silences what only it could tell. Receivers
are webhooks: the URLs come from files, so that the config holds no secret.
"""

from collections.abc import Sequence
from typing import Any

from telemetry.slo.rules import ABSENT, BUDGET_LOW, PAGE, SMALL_N, TICKET

CREDENTIALS = "/etc/alertmanager/secrets"


def config(teams: Sequence[str] = (), secrets: str = CREDENTIALS) -> dict[str, Any]:
    """The config, as YAML values. One receiver a severity, and one more for each team's pages and
    tickets; the URL of each is read from `secrets`/RECEIVER."""
    names = [
        severity if not team else f"{severity}-{team}"
        for team in ("", *teams)
        for severity in ("page", "ticket")
    ]
    return {
        "route": {
            "receiver": "ticket",
            "group_by": ["alertname", "service", "slo"],
            "group_wait": "15s",
            "group_interval": "1m",
            "repeat_interval": "4h",
            "routes": [
                *(
                    {
                        "receiver": f"{severity}-{team}",
                        "matchers": [f'severity="{severity}"', f'team="{team}"'],
                    }
                    for team in teams
                    for severity in ("page", "ticket")
                ),
                {"receiver": "page", "matchers": ['severity="page"'], "repeat_interval": "1h"},
            ],
        },
        "inhibit_rules": [
            {
                "source_matchers": [f'alertname="{PAGE}"'],
                "target_matchers": [f'alertname=~"{TICKET}|{SMALL_N}|{BUDGET_LOW}"'],
                "equal": ["service", "slo"],
            },
            {
                "source_matchers": ['alertname="MeterlineTargetDown"'],
                "target_matchers": [f'alertname=~"{ABSENT}|MeterlineEngineStalled"'],
                "equal": ["service"],
            },
        ],
        "receivers": [
            {
                "name": name,
                "webhook_configs": [{"url_file": f"{secrets}/{name}", "send_resolved": True}],
            }
            for name in names
        ],
    }
