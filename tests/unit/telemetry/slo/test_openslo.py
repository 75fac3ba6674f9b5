"""OpenSLO in and out."""

from pathlib import Path

import msgspec
import pytest

from telemetry.slo.declaration import SloInvalid, parse
from telemetry.slo.openslo import exported, imported, written

STOCK = Path(__file__).parents[4] / "deploy" / "slo.yaml"

FOREIGN = """
apiVersion: openslo/v1
kind: SLO
metadata: {name: chat}
spec:
  service: gateway
  indicator:
    metadata: {name: chat}
    spec:
      ratioMetric:
        counter: true
        bad:
          metricSource:
            type: Prometheus
            spec:
              query: 'meterline_requests_total{route="chat",outcome=~"timeout|internal_error"}'
        total:
          metricSource:
            type: Prometheus
            spec: {query: 'meterline_requests_total{route="chat"}'}
  timeWindow: [{duration: 28d, isRolling: true}]
  budgetingMethod: Occurrences
  objectives: [{target: 0.995}]
"""


def test_an_export_reads_back_as_the_same_objectives() -> None:
    """Nothing that we declare is lost on the way out and in."""
    stock = parse(STOCK.read_text())
    assert imported(exported(stock)).slos == stock.slos


def test_an_import_is_written_as_a_file_of_ours() -> None:
    """What was imported can be kept as a declaration, and means the same."""
    found = imported(FOREIGN)
    assert parse(written(found)).slos == found.slos
    slo = found.slos[0]
    assert (slo.name, slo.objective, slo.window) == ("chat", "99.5", "28d")
    assert slo.sli.availability is not None
    assert slo.sli.availability.bad == {"outcome": ["timeout", "internal_error"]}
    assert slo.sli.availability.match == {"route": "chat"}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("kind: SLO", "kind: AlertPolicy", "only SLO is read"),
        ("openslo/v1", "openslo/v2", "not an openslo/v1 document"),
        ("counter: true", "counter: false", "counter must be true"),
        ("isRolling: true", "isRolling: false", "one rolling window"),
        ("[{target: 0.995}]", "[{target: 0.9}, {target: 0.8}]", "exactly one objective"),
        ("type: Prometheus", "type: Datadog", "only Prometheus"),
        ("meterline_requests_total", "http_requests_total", "nothing emits"),
        ("  indicator:", "  indicatorRef: x\n  other:", "must be inline"),
    ],
)
def test_what_cannot_be_carried_over_is_refused(old: str, new: str, said: str) -> None:
    """An import never drops silently what it does not understand."""
    with pytest.raises(SloInvalid) as refused:
        imported(FOREIGN.replace(old, new))
    assert said in "\n".join(refused.value.problems)


def test_exported_documents_are_plain_openslo() -> None:
    """Without our annotation an availability export still means the same."""
    documents = [
        msgspec.yaml.decode(one) for one in exported(parse(STOCK.read_text())).split("---\n")
    ]
    first = documents[0]
    del first["metadata"]["annotations"]
    found = imported(msgspec.yaml.encode(first).decode()).slos[0]
    stock = parse(STOCK.read_text()).slos[0]
    assert (found.sli, found.objective, found.window) == (stock.sli, stock.objective, stock.window)
