"""The registry's rules, and that one record moves the metrics by exactly what it says."""

import time
from decimal import Decimal

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from telemetry import metrics as m
from telemetry.pricing import Meter
from telemetry.record import FAILURES, DeviceTime, Outcome, RequestRecord
from telemetry.usage import BUCKETS, Usage, UsageQuality
from tests.fakes import records

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def metrics() -> m.Metrics:
    return m.Metrics(CollectorRegistry(), node="node-a")


def samples(metrics: m.Metrics) -> Samples:
    """Everything a scrape shows."""
    text = metrics.render(openmetrics=False).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_families(text)
        for sample in family.samples
    }


def total(found: Samples, name: str, **labels: str) -> float:
    """The sum over all series of that name with these labels."""
    return sum(
        value
        for (series, pairs), value in found.items()
        if series == name and labels.items() <= dict(pairs).items()
    )


# --- the registry ---


def test_names_follow_the_prometheus_rules() -> None:
    """Prefix, base unit and `_total` are where Prometheus' naming practice wants them."""
    for metric in m.REGISTRY.values():
        assert metric.name.startswith("meterline_")
        assert metric.name.endswith("_total") == (metric.kind is m.Kind.COUNTER)
        assert metric.name.endswith("_info") == (metric.kind is m.Kind.INFO)
        if metric.unit in ("seconds", "dollars", "bytes", "tokens", "ratio"):
            stem = metric.name.removesuffix("_total")
            assert stem.endswith(metric.unit), metric.name
        if metric.kind is not m.Kind.INFO and metric is not m.LABEL_FOLDS:  # "label" is its subject
            assert not set(metric.label_names) & set(metric.name.split("_")), metric.name


def test_each_metric_is_declared_once_and_listed() -> None:
    """Every declaration of the module is in the gateway's or the engine's list."""
    declared = {value.name for value in vars(m).values() if isinstance(value, m.Metric)}
    assert declared == set(m.REGISTRY)
    for group in (m.GATEWAY, m.ENGINE):
        assert len({metric.name for metric in group}) == len(group)


def test_labels_are_bounded_and_hold_no_identity() -> None:
    """Each label has a closed list or a cap; only info metrics speak freely."""
    for metric in m.REGISTRY.values():
        for label in metric.labels:
            assert label.values or label.cap or metric.kind is m.Kind.INFO, metric.name
            assert label.name not in ("tenant", "tenant_id", "key", "key_id", "user")


def test_buckets_ascend_and_say_why() -> None:
    """A histogram has ascending bounds and a reason for them; nothing else has any."""
    for metric in m.REGISTRY.values():
        assert bool(metric.buckets) == (metric.kind is m.Kind.HISTOGRAM)
        assert bool(metric.buckets_why) == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_closed_lists_cover_the_vocabulary() -> None:
    """The labels made from enums have every value of them."""
    assert set(m.OUTCOME.values) == {outcome.value for outcome in Outcome}
    assert m.TOKEN_TYPE.values == BUCKETS
    assert m.CHARGED_PHASE.values == tuple(field.name for field in structs.fields(DeviceTime))


def test_an_unknown_meter_is_other() -> None:
    """A meter that nobody declared costs what it costs, under `other`."""
    assert m.component("Requests") == "other"


@pytest.mark.parametrize(
    ("meter", "expected"),
    [
        ("Input Tokens", "input"),
        ("Cache Read Input Tokens", "cached"),
        ("Cache Write 1h Input Tokens", "cache_write"),
        ("Reasoning Output Tokens", "reasoning"),
        ("GPU Sampling", "gpu_decode"),
        ("GPU Recompute", "waste"),
    ],
)
def test_meters_belong_to_components(meter: str, expected: str) -> None:
    """A priced line is counted under the component that its meter names."""
    assert m.component(meter) == expected
    assert expected in m.COMPONENT.values


def test_every_meter_has_a_component_and_no_other_name_has_one() -> None:
    """The names are copied, because metrics must not import prices: they must stay equal."""
    unclassed = {Meter.REQUESTS, Meter.GPU_TIME, Meter.UNMETERED}
    assert {meter for meter in Meter if m.component(meter) == m.OTHER} == unclassed
    assert set(m._COMPONENTS) == {meter.value for meter in Meter} - unclassed


def test_instruments_are_made_as_declared() -> None:
    """Another process (the engine) gets one instrument per declaration, of the right kind."""
    registry = CollectorRegistry()
    made = m.instruments(m.ENGINE, registry)
    assert set(made) == {metric.name for metric in m.ENGINE}
    steps = made[m.ENGINE_STEP_SECONDS.name]
    assert isinstance(steps, Counter)
    steps.labels(model="smol", phase="decode").inc(2)
    assert isinstance(made[m.ENGINE_BATCH_SIZE.name], Histogram)
    assert isinstance(made[m.ENGINE_RUNNING.name], Gauge)
    text = m.render(registry, openmetrics=False).decode()
    assert 'meterline_engine_step_seconds_total{model="smol",phase="decode"} 2.0' in text


def test_the_reference_page_is_current() -> None:
    """docs/reference/metrics.md is what the declarations say."""
    assert CliRunner().invoke(m.main, ["--check"]).exit_code == 0


def test_the_reference_page_names_every_metric_and_label() -> None:
    """The generated page leaves nothing out."""
    page = m.document()
    for metric in m.REGISTRY.values():
        assert f"### `{metric.name}`" in page
        assert metric.help in page


def test_a_stale_reference_page_is_refused(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--check exits 1 on a page that differs, and --write mends it."""
    page = m.Path(str(tmp_path)) / "reference" / "metrics.md"
    monkeypatch.setattr(m, "DOCUMENT", page)
    assert CliRunner().invoke(m.main, ["--check"]).exit_code == 1
    assert CliRunner().invoke(m.main, ["--write"]).exit_code == 0
    assert CliRunner().invoke(m.main, ["--check"]).exit_code == 0


# --- one record ---


@pytest.mark.parametrize("name", records.EXITS)
def test_a_record_moves_the_metrics_by_what_it_says(metrics: m.Metrics, name: str) -> None:
    """Requests, attempts, tokens and dollars of the scrape equal the record's, on every exit."""
    record = records.EXITS[name]()
    metrics.observe(record)
    found = samples(metrics)
    assert total(found, m.REQUESTS.name) == 1
    assert total(found, m.REQUESTS.name, outcome=str(record.outcome)) == 1
    assert total(found, m.ATTEMPTS.name) == len(record.attempts)
    usages = [one.usage for one in record.attempts if one.usage is not None]
    assert total(found, m.TOKENS.name) == sum(usage.total_tokens for usage in usages)
    for bucket in BUCKETS:
        expected = sum(getattr(usage, bucket) for usage in usages)
        assert total(found, m.TOKENS.name, token_type=bucket) == expected
    assert record.cost is not None
    assert total(found, m.COST.name) == pytest.approx(float(record.cost), abs=1e-15)
    is_swept = record.outcome is Outcome.ABANDONED
    assert total(found, m.SWEPT.name, node="node-a") == is_swept
    assert total(found, m.SETTLED.name, node="node-a") == (not is_swept)
    assert total(found, m.REQUEST_DURATION.count) == (not is_swept)


def test_observing_twice_counts_twice(metrics: m.Metrics) -> None:
    """The cached children are the same series."""
    for _ in range(2):
        metrics.observe(records.record(records.attempt()))
    assert total(samples(metrics), m.REQUESTS.name) == 2
    assert total(samples(metrics), m.TOKENS.name) == 2 * records.USAGE.total_tokens


buckets = st.builds(Usage, **{bucket: st.integers(0, 10**9) for bucket in BUCKETS})


@given(st.lists(buckets, max_size=4))
def test_tokens_of_many_attempts_add_up(usages: list[Usage]) -> None:
    """However many attempts a request took, the counter rises by the sum of their buckets."""
    metrics = m.Metrics(CollectorRegistry())
    tries = [records.attempt(no, usage=usage) for no, usage in enumerate(usages, 1)]
    metrics.observe(records.record(*tries))
    expected = sum(usage.total_tokens for usage in usages)
    assert total(samples(metrics), m.TOKENS.name) == expected


@pytest.mark.parametrize("outcome", list(Outcome))
def test_what_counts_against_the_slo(metrics: m.Metrics, outcome: Outcome) -> None:
    """Refusals for cause and the client's own hang-ups do not; all failures of ours do."""
    metrics.observe(records.record(outcome=outcome))
    counted = total(samples(metrics), m.REQUESTS.name, counts_against_slo="true")
    assert counted == (outcome not in m.NOT_AGAINST_SLO)
    assert counted or outcome not in FAILURES


def test_a_request_that_reached_no_backend_has_no_model(metrics: m.Metrics) -> None:
    """What a client wrote as the model never becomes a label before a backend was chosen."""
    record = records.refused()
    record.asked_model = "let-me-in-" * 20
    metrics.observe(record)
    assert total(samples(metrics), m.REQUESTS.name, model="none", provider="none") == 1
    assert b"let-me-in" not in metrics.render(openmetrics=True)


def test_times_are_taken_between_the_declared_instants(metrics: m.Metrics) -> None:
    """Duration, first token, time per token and overhead of a plain stream, to the nanosecond."""
    metrics.observe(records.record(records.attempt()))
    found = samples(metrics)
    assert total(found, m.REQUEST_DURATION.sum) == pytest.approx(1.106)
    assert total(found, m.TIME_TO_FIRST_TOKEN.sum, input_class="0-1k") == pytest.approx(0.104)
    assert total(found, m.TIME_PER_OUTPUT_TOKEN.sum) == pytest.approx(1.0 / 25)
    assert total(found, m.OVERHEAD.sum) == pytest.approx(0.006)


def test_whole_answers_have_no_first_token_time(metrics: m.Metrics) -> None:
    """Time to first token and per token mean something for streams only."""
    metrics.observe(records.whole())
    found = samples(metrics)
    assert total(found, m.TIME_TO_FIRST_TOKEN.count) == 0
    assert total(found, m.TIME_PER_OUTPUT_TOKEN.count) == 0


def test_queue_wait_is_what_the_backend_reports(metrics: m.Metrics) -> None:
    """Nothing is observed for backends that say nothing of their queue."""
    metrics.observe(records.record(records.attempt()))
    assert total(samples(metrics), m.QUEUE_WAIT.count) == 0
    metrics.observe(records.fell_back())
    found = samples(metrics)
    assert total(found, m.QUEUE_WAIT.sum, provider="meterline.engine") == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("record", "expected_ms"),
    [
        pytest.param(records.record(records.attempt()), 6, id="before and after one attempt"),
        pytest.param(records.failed_upstream(), 6, id="a pause between attempts is not ours"),
        pytest.param(records.broke(), 4, id="an open attempt lasts to the end"),
        pytest.param(
            records.record(records.attempt(ended=5000)), 4, id="an attempt drained after the end"
        ),
        pytest.param(
            records.record(records.attempt(started=-50)), 2, id="a clock that stepped back"
        ),
    ],
)
def test_overhead_is_what_is_not_the_backends(record: RequestRecord, expected_ms: float) -> None:
    """Overhead is the time before the first attempt and after the last one."""
    assert m.overhead_ns(record) == expected_ms * records.MS


def test_a_refused_request_has_no_overhead() -> None:
    """There is no backend's time to subtract: the duration says it all."""
    assert m.overhead_ns(records.refused()) is None


times = st.integers(0, 2_000)


@given(st.lists(st.tuples(times, st.none() | times), max_size=5), times)
def test_overhead_is_never_negative_nor_more_than_the_whole(
    spans: list[tuple[int, int | None]], ended: int
) -> None:
    """Whatever the stamps, 0 <= overhead <= duration."""
    tries = [
        records.attempt(no, started=start, ended=end) for no, (start, end) in enumerate(spans, 1)
    ]
    own_ns = m.overhead_ns(records.record(*tries, ended_ns=records.at(ended)))
    assert own_ns is None if not spans else 0 <= own_ns <= ended * records.MS


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        *((0, "0-1k"), (999, "0-1k"), (1_000, "1k-4k"), (3_999, "1k-4k"), (4_000, "4k-16k")),
        *((15_999, "4k-16k"), (16_000, "16k-64k"), (63_999, "16k-64k"), (64_000, "64k+")),
    ],
)
def test_input_classes(tokens: int, expected: str) -> None:
    """A bound belongs to the class above it."""
    assert m.input_class(tokens) == expected
    assert expected in m.INPUT_CLASS.values


def test_unpriced_usage_is_counted_and_costs_nothing(metrics: m.Metrics) -> None:
    """One line without a price: the attempt is unpriced, and the rest still counts."""
    tried = records.attempt()
    tried.charges = (
        records.charge("Input Tokens", 90, "2"),
        records.charge("Output Tokens", 26, None),
    )
    metrics.observe(records.record(tried))
    found = samples(metrics)
    assert total(found, m.UNPRICED_USAGE.name, provider="openai", model="gpt-4o") == 1
    assert total(found, m.COST.name) == pytest.approx(float(Decimal("0.00018")))


def test_usage_that_nobody_priced_is_unpriced(metrics: m.Metrics) -> None:
    """Tokens without any charge line are an accounting hole, not a free request."""
    metrics.observe(records.record(records.attempt(charges=())))
    assert total(samples(metrics), m.UNPRICED_USAGE.name) == 1


def test_ambiguous_usage_is_counted(metrics: m.Metrics) -> None:
    """A usage report that needed a guess is visible."""
    metrics.observe(records.record(records.attempt(usage_quality=UsageQuality.AMBIGUOUS)))
    assert total(samples(metrics), m.AMBIGUOUS_USAGE.name) == 1


@pytest.mark.parametrize(
    ("record", "before"), [(records.left_early(), "true"), (records.left_late(), "false")]
)
def test_disconnects_say_whether_anything_had_been_sent(
    metrics: m.Metrics, record: RequestRecord, before: str
) -> None:
    """A stream left by its client counts once, by whether it had begun."""
    metrics.observe(record)
    found = samples(metrics)
    assert total(found, m.STREAM_DISCONNECTS.name, before_first_token=before) == 1
    assert total(found, m.STREAM_DISCONNECTS.name) == 1


def test_the_sweepers_times_are_not_the_requests(metrics: m.Metrics) -> None:
    """An abandoned request has tokens and an outcome, and no durations."""
    metrics.observe(records.abandoned())
    found = samples(metrics)
    assert total(found, m.REQUEST_DURATION.count) == 0
    assert total(found, m.TIME_TO_FIRST_TOKEN.count) == 0


# --- labels ---


def test_models_beyond_the_cap_fold_and_are_counted() -> None:
    """The n+1st model is `other`; known ones keep their own series."""
    metrics = m.Metrics(CollectorRegistry(), max_models=2)
    for model in ("a", "b", "c", "d", "a"):
        metrics.observe(records.record(records.attempt(model=model)))
    found = samples(metrics)
    models = {dict(pairs)["model"] for name, pairs in found if name == m.REQUESTS.name}
    assert models == {"a", "b", "other"}
    assert total(found, m.REQUESTS.name, model="a") == 2
    assert total(found, m.REQUESTS.name, model="other") == 2
    assert total(found, m.LABEL_FOLDS.name, label="model") == 4  # request and attempt, twice


def test_a_value_off_the_closed_list_is_refused(metrics: m.Metrics) -> None:
    """A label value that nobody declared is a defect, and raises."""
    with pytest.raises(ValueError, match="not a value"):
        metrics.add(m.CONFIG_RELOADS, result="maybe")
    with pytest.raises(ValueError, match="takes the labels"):
        metrics.add(m.CONFIG_RELOADS, outcome="applied")
    with pytest.raises(ValueError, match="takes the labels"):
        metrics.add(m.ADMITTED)


def test_label_order_does_not_matter(metrics: m.Metrics) -> None:
    """Keyword order of labels is free, also once the child is cached."""
    metrics.add(m.USAGE_CONFLICTS, provider="openai", model="gpt")
    metrics.add(m.USAGE_CONFLICTS, model="gpt", provider="openai")
    metrics.add(m.USAGE_CONFLICTS, provider="gpt", model="openai")
    found = samples(metrics)
    assert total(found, m.USAGE_CONFLICTS.name, provider="openai", model="gpt") == 2
    assert total(found, m.USAGE_CONFLICTS.name, provider="gpt", model="openai") == 1


def test_expected_targets_start_at_zero(metrics: m.Metrics) -> None:
    """Alerts on rates need their series before the first event."""
    metrics.expect([("openai", "gpt-4o")])
    found = samples(metrics)
    for name in (m.UNPRICED_USAGE.name, m.USAGE_CONFLICTS.name, m.AMBIGUOUS_USAGE.name):
        series = (name, (("model", "gpt-4o"), ("provider", "openai")))
        assert found[series] == 0
    assert total(found, m.REQUESTS.name) == 0
    outcomes = {dict(pairs)["outcome"] for name, pairs in found if name == m.REQUESTS.name}
    assert outcomes == {"ok", *FAILURES}


# --- gauges ---


def test_a_gauge_that_nobody_measures_is_absent(metrics: m.Metrics) -> None:
    """Zero is a statement: a process without a ledger worker makes none about rollups."""
    assert m.ROLLUP_LAG.name not in metrics.render(openmetrics=False).decode()
    metrics.set(m.ROLLUP_LAG, 0)
    assert total(samples(metrics), m.ROLLUP_LAG.name) == 0
    assert m.ROLLUP_LAG.name in metrics.render(openmetrics=False).decode()


def test_gauges_move_both_ways(metrics: m.Metrics) -> None:
    """In-flight goes up and down through its child."""
    child = metrics.child(m.IN_FLIGHT, route="chat")
    assert isinstance(child, Gauge)
    child.inc()
    child.inc()
    child.dec()
    assert total(samples(metrics), m.IN_FLIGHT.name, route="chat") == 1


def test_watched_values_are_read_at_each_scrape(metrics: m.Metrics) -> None:
    """A gauge follows its source; a counter rises by what its source has gained."""
    source = {"open": 3.0, "appended": 10.0}
    metrics.watch(m.INTENTS_OPEN, lambda: source["open"], node="node-a")
    metrics.watch(m.WAL_APPENDED.name, lambda: source["appended"], node="node-a")
    assert total(samples(metrics), m.INTENTS_OPEN.name) == 3
    source.update(open=1.0, appended=12.0)
    found = samples(metrics)
    assert total(found, m.INTENTS_OPEN.name) == 1
    assert total(found, m.WAL_APPENDED.name) == 12


def test_a_broken_source_does_not_end_the_scrape(metrics: m.Metrics) -> None:
    """A callback that raises gives NaN for its gauge, is counted, and the rest is served."""

    def broken() -> float:
        raise RuntimeError("no")

    metrics.watch(m.DIRTY_HOURS, broken)
    found = samples(metrics)
    assert found[(m.DIRTY_HOURS.name, ())] != found[(m.DIRTY_HOURS.name, ())]
    assert total(samples(metrics), m.OBSERVER_ERRORS.name, kind="gauge") == 2


def test_histograms_cannot_be_watched(metrics: m.Metrics) -> None:
    """Only values with a present state can."""
    with pytest.raises(ValueError, match="cannot be watched"):
        metrics.watch(m.WAL_FSYNC, lambda: 0, node="a")


def test_info_replaces_what_it_said(metrics: m.Metrics) -> None:
    """After a new price book there is no series of the old one."""
    metrics.info(m.PRICE_BOOK_INFO, {"book": "seed", "version": "1", "sha": "a"})
    metrics.info(m.PRICE_BOOK_INFO, {"book": "seed", "version": "2", "sha": "b"})
    found = samples(metrics)
    assert total(found, m.PRICE_BOOK_INFO.name, version="2") == 1
    assert total(found, m.PRICE_BOOK_INFO.name) == 1


# --- the scrape ---


def test_openmetrics_parses_and_carries_exemplars(metrics: m.Metrics) -> None:
    """The OpenMetrics text is well-formed; kept traces are exemplars of duration and TTFT."""
    metrics.observe(records.record(records.attempt()))
    text = metrics.render(openmetrics=True).decode()
    exemplars = {
        sample.name: sample.exemplar.labels
        for family in open_families(text)
        for sample in family.samples
        if sample.exemplar
    }
    trace = {"trace_id": records.TRACE_ID}
    assert exemplars == {m.REQUEST_DURATION.bucket: trace, m.TIME_TO_FIRST_TOKEN.bucket: trace}
    assert text.endswith("# EOF\n")


def test_a_dropped_trace_is_no_exemplar(metrics: m.Metrics) -> None:
    """An exemplar leads to a trace that exists."""
    metrics.observe(records.record(records.attempt(), sampled=False))
    assert records.TRACE_ID not in metrics.render(openmetrics=True).decode()


def test_no_created_series(metrics: m.Metrics) -> None:
    """Nothing of ours reads `_created`, so no scrape pays for it."""
    metrics.observe(records.record(records.attempt()))
    for openmetrics in (True, False):
        assert b"_created" not in metrics.render(openmetrics=openmetrics)


def test_everything_scraped_is_declared(metrics: m.Metrics) -> None:
    """No series without a declaration, and no label that the declaration does not have."""
    for make in records.EXITS.values():
        metrics.observe(make())
    known = {name: metric for metric in m.GATEWAY for name in metric.series}
    for name, pairs in samples(metrics):
        assert name in known
        assert {label for label, _ in pairs} - {"le"} == set(known[name].label_names)


def test_identities_never_reach_a_label(metrics: m.Metrics) -> None:
    """Tenant, key and what the client wrote are not in the scrape."""
    canary = "CANARY7f3a"
    for make in records.EXITS.values():
        record = make()
        for name in ("request_id", "tenant_id", "key_id", "asked_model", "client_request_id"):
            setattr(record, name, canary)
        metrics.observe(record)
    assert canary not in metrics.render(openmetrics=True).decode()


def test_observing_is_cheap(metrics: m.Metrics) -> None:
    """A settled stream costs tens of microseconds at most, of the event loop's CPU time."""
    record = records.record(records.attempt())
    metrics.observe(record)
    best_s = 1.0
    for _ in range(20):
        begun = time.process_time()
        for _ in range(100):
            metrics.observe(record)
        best_s = min(best_s, (time.process_time() - begun) / 100)
    assert best_s < 100e-6
