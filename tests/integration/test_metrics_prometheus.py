"""The scrape over HTTP, read by Prometheus' own parsers and, where installed, its own linter."""

import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from telemetry import metrics as m
from tests.fakes import records


@pytest.fixture
def metrics() -> m.Metrics:
    """A gateway's metrics after one request of each kind, with every gauge in use."""
    made = m.Metrics(CollectorRegistry(), node="node-a")
    made.expect([("openai", "gpt-4o")])
    made.info(m.BUILD_INFO, {"version": "0.1.0", "python": "3.11"})
    made.info(m.PRICE_BOOK_INFO, {"book": "seed", "version": "1", "sha": "abc"})
    for metric in m.GATEWAY:
        labels = {one.name: one.values[0] if one.values else "node-a" for one in metric.labels}
        if metric.kind is m.Kind.GAUGE:
            made.set(metric, 0, **labels)
        elif metric.kind is m.Kind.COUNTER and metric not in (m.SETTLED, m.SWEPT):
            made.add(metric, 0, **labels)  # each has a series
    for metric in (m.WAL_APPENDED, m.WAL_SHIPPED):
        made.watch(metric, lambda: 24.0, node="node-a")
    made.measure(m.WAL_FSYNC, 0.002, node="node-a")
    for make in records.EXITS.values():
        made.observe(make())
    return made


@pytest.fixture
def url(metrics: m.Metrics) -> Iterator[str]:
    """An HTTP server that answers as `/metrics` does, by what is asked for."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            openmetrics = "openmetrics" in self.headers.get("accept", "")
            body = metrics.render(openmetrics=openmetrics)
            kind = m.OPENMETRICS_CONTENT_TYPE if openmetrics else m.TEXT_CONTENT_TYPE
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    thread.join()
    server.server_close()


def scrape(url: str, accept: str) -> str:
    request = urllib.request.Request(url, headers={"accept": accept})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return str(answer.read().decode())


def test_both_formats_say_the_same(url: str) -> None:
    """Each declared metric is in both formats, with its type, help and equal values."""
    text = {family.name: family for family in text_families(scrape(url, "text/plain"))}
    wanted = "application/openmetrics-text; version=1.0.0"
    opened = {family.name: family for family in open_families(scrape(url, wanted))}
    assert text.keys() == opened.keys()
    for metric in m.GATEWAY:
        name = metric.name.removesuffix("_total")
        kind = "gauge" if metric.kind is m.Kind.INFO else str(metric.kind)
        assert (text[name].type, opened[name].type) == (kind, kind)
        assert text[name].documentation == metric.help
        plain = [(one.name, one.labels, one.value) for one in text[name].samples]
        assert plain == [(one.name, one.labels, one.value) for one in opened[name].samples]


def test_the_scrape_adds_up(url: str) -> None:
    """Requests by outcome, settled and swept all tell of the same number of requests."""
    families = {family.name: family for family in text_families(scrape(url, "text/plain"))}

    def total(metric: m.Metric) -> float:
        samples = families[metric.name.removesuffix("_total")].samples
        return sum(one.value for one in samples if one.name == metric.name)

    assert total(m.REQUESTS) == len(records.EXITS)
    assert total(m.SETTLED) + total(m.SWEPT) == len(records.EXITS)
    charges = [make().cost for make in records.EXITS.values()]
    assert total(m.COST) == pytest.approx(float(sum(one for one in charges if one is not None)))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_has_no_complaint(metrics: m.Metrics) -> None:
    """Prometheus' own linter accepts names, types and help."""
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=metrics.render(openmetrics=False),
        capture_output=True,
        check=False,
    )
    complaints = checked.stderr.decode().splitlines()
    # It takes the word for a duration; it is a count of clock hours.
    assert [line for line in complaints if not line.startswith("meterline_dirty_hours ")] == []
