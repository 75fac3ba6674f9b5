"""The engine's scrape against the declarations that dashboards and documents are made from."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from backends.engine.engine import Engine
from backends.engine.metrics import EngineMetrics
from backends.engine.tokenizer import Tokenizer
from backends.engine.types import Done, JobRequest, TokenChoice
from telemetry import metrics as declared
from telemetry.clock import SystemClock
from telemetry.metrics import Kind
from tests.fakes.engine import FakeRunner


async def test_a_scrape_is_what_is_declared(words: Tokenizer) -> None:
    """Each declared metric is there with its type, help, labels, label values and buckets, and
    nothing else is; the names that vLLM has come with a switch, with the same counts."""
    engine = Engine(
        load=lambda: FakeRunner(lambda row: TokenChoice(20)),
        tokenizer=words, clock=SystemClock(), emit=lambda parent, spans: None,
    )  # fmt: skip
    engine.start()
    await engine.loaded()
    stream = engine.submit(JobRequest(prompts=((20, 21),), max_tokens=(3,)))
    async with asyncio.timeout(10):
        while not isinstance((await stream.next())[-1], Done):
            pass
    text = EngineMetrics(engine, model="tiny").text().decode()
    more = EngineMetrics(engine, model="tiny", with_vllm_names=True).text().decode()
    await engine.close()
    assert "vllm:" not in text
    for line in (
        'vllm:num_requests_running{model_name="tiny"} 0.0',
        'vllm:prompt_tokens_total{model_name="tiny"} 2.0',
        'vllm:generation_tokens_total{model_name="tiny"} 3.0',
        'vllm:request_success_total{finished_reason="length",model_name="tiny"} 1.0',
        'vllm:kv_cache_usage_perc{model_name="tiny"} 0.0',
    ):
        assert line in more.splitlines()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families.keys() == {metric.name.removesuffix("_total") for metric in declared.ENGINE}
    for metric in declared.ENGINE:
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind.value, metric.help)
        for sample in family.samples:
            labels = dict(sample.labels)
            edge = labels.pop("le", None)
            assert labels.keys() == set(metric.label_names)
            assert labels.pop("model") == "tiny"
            assert edge is None or float(edge) in (*metric.buckets, float("inf"))
        for label in metric.labels[1:]:
            shown = {sample.labels[label.name] for sample in family.samples}
            assert shown == set(label.values)
        if metric.kind is Kind.HISTOGRAM:
            assert len(family.samples) == len(metric.buckets) + 3  # +Inf, count and sum
    [requests] = [
        s.value
        for s in families["meterline_engine_requests"].samples
        if s.labels["ending"] == "done"
    ]
    assert requests == 1
