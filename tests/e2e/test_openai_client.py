"""What a developer does: the real `openai` client against the packaged command with the real model.
Whatever is asked, there is one ledger record of it, with the right tokens and the right cost."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from telemetry.database import open_engine
from telemetry.reports.query import explain_record
from telemetry.reports.render import story_json
from tests.e2e.served import Served, serve

pytestmark = pytest.mark.model

MODEL = "assistant"
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
RATE = Decimal("0.000027778")  # $0.10 an hour, per second, at nine decimals


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One gateway with the bundled model for all tests of this module."""
    with serve(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    """The client as documented: only `base_url` and key differ from the real API."""
    with OpenAI(base_url=served.base_url, api_key=served.key, max_retries=0) as made:
        yield made


def story(served: Served, request_id: str) -> dict[str, Any]:
    """`meterline explain`, once the request has reached the database."""
    deadline = time.monotonic() + 20
    while True:
        told = served.run("explain", request_id, "--format", "json")
        if told.returncode == 0:
            facts: dict[str, Any] = json.loads(told.stdout)
            if facts["is_settled"]:
                return facts
        assert time.monotonic() < deadline, told.stderr
        time.sleep(0.3)


async def read_stories(served: Served, request_ids: list[str]) -> list[dict[str, Any]]:
    """What `explain` would print for each, without fifty processes."""
    engine = open_engine(f"sqlite:///{served.folder}/meterline-data/meterline.db")
    told: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(30):
            for request_id in request_ids:
                found = await explain_record(engine, request_id)
                while found is None or not found.is_settled:
                    await asyncio.sleep(0.1)
                    found = await explain_record(engine, request_id)
                told.append(json.loads(story_json(found)))
    finally:
        await engine.dispose()
    return told


def tokens(facts: dict[str, Any]) -> tuple[int, int]:
    """(input, output) of the one attempt."""
    (attempt,) = facts["attempts"]
    counts = {count["bucket"]: count["tokens"] for count in attempt["tokens"]}
    return (
        sum(n for bucket, n in counts.items() if bucket.startswith("in_")),
        sum(n for bucket, n in counts.items() if bucket.startswith("out_")),
    )


def cost(facts: dict[str, Any]) -> Decimal:
    """The sum of its charges."""
    return sum((Decimal(one["amount"]) for one in facts["costs"]), Decimal(0))


def test_a_whole_answer_is_right_and_billed(served: Served, client: OpenAI) -> None:
    """Sensible English, the usage, and a cost that is device time × rate to the last digit."""
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=40
    )
    answer = raw.parse()
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    facts = story(served, raw.headers["x-request-id"])
    assert tokens(facts) == (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    device = answer.usage.model_extra["meterline"]["device_us"]  # type: ignore[index]  # ours
    assert cost(facts) == sum(device.values()) * RATE / 1_000_000
    assert Decimal(raw.headers["x-meterline-cost-usd"]) == cost(facts)
    assert facts["outcome"] == "ok"
    assert raw.headers["x-meterline-backend"] == "local"


def test_a_streamed_answer_equals_the_whole_one(served: Served, client: OpenAI) -> None:
    """Greedy text is the same streamed; the usage chunk comes last and is what is billed."""
    whole = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=40
    )
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=FRANCE,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, roles, finish = "", None, 0, []
    for chunk in raw.parse():
        if chunk.usage is not None:
            assert chunk.choices == []
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            roles += choice.delta.role is not None
            finish += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert roles == 1
    assert finish == [whole.choices[0].finish_reason]
    assert usage is not None
    facts = story(served, raw.headers["x-request-id"])
    assert tokens(facts) == (usage.prompt_tokens, usage.completion_tokens)
    assert facts["stream"] is True


def test_usage_is_not_sent_to_who_did_not_ask(served: Served, client: OpenAI) -> None:
    """The stream has no usage chunk, and the ledger has the usage all the same."""
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=8, stream=True
    )
    assert all(chunk.choices and chunk.usage is None for chunk in raw.parse())
    assert tokens(story(served, raw.headers["x-request-id"]))[1] == 8


def test_stop_cuts_exactly(client: OpenAI) -> None:
    """The text ends before the stop string, with finish reason `stop`."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Count from one to ten in digits: 1, 2, 3,"}],
        temperature=0,
        max_tokens=60,
        stop=[" 6"],
    )
    text = answer.choices[0].message.content or ""
    assert " 6" not in text
    assert answer.choices[0].finish_reason == "stop"


def test_two_choices_are_two_answers_and_one_record(served: Served, client: OpenAI) -> None:
    """n = 2: both choices finish; the prompt is counted once, the outputs together."""
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=FRANCE, n=2, max_tokens=6, temperature=1, seed=5
    )
    answer = raw.parse()
    assert sorted(choice.index for choice in answer.choices) == [0, 1]
    assert all(choice.finish_reason for choice in answer.choices)
    assert answer.usage is not None
    facts = story(served, raw.headers["x-request-id"])
    assert tokens(facts) == (answer.usage.prompt_tokens, answer.usage.completion_tokens)


def test_logprobs_have_the_shape_of_the_real_api(client: OpenAI) -> None:
    """One entry a token, the chosen one among the top, none above zero."""
    answer = client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for entry in logprobs.content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.token == entry.top_logprobs[0].token


def test_a_seed_gives_the_same_text_twice(client: OpenAI) -> None:
    """Sampled at temperature 1, and repeatable."""

    def text(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model=MODEL, messages=FRANCE, temperature=1, seed=seed, max_tokens=20
        )
        return answer.choices[0].message.content

    assert text(42) == text(42)
    assert len({text(seed) for seed in range(3)}) > 1


def test_text_completions_work_too(served: Served, client: OpenAI) -> None:
    """`/v1/completions` with the same client, recorded as its own surface."""
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt="The capital of France is", max_tokens=5, temperature=0
    )
    assert "Paris" in raw.parse().choices[0].text
    assert story(served, raw.headers["x-request-id"])["surface"] == "completions"


def test_models_are_listed(client: OpenAI) -> None:
    """The routes of the config, by list and by name."""
    assert [model.id for model in client.models.list()] == ["assistant", "smollm2-135m-instruct"]
    assert client.models.retrieve("assistant").id == "assistant"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing/like-it")


def refused(served: Served, error: openai.APIStatusError) -> dict[str, Any]:
    """The story of a refused request: it has no attempt and cost nothing."""
    facts = story(served, error.response.headers["x-request-id"])
    assert facts["outcome"] == "client_error"
    assert facts["costs"] == []
    return facts


def test_an_invalid_key_is_refused_and_recorded(served: Served) -> None:
    """401 invalid_api_key, one record of nobody."""
    with (
        OpenAI(base_url=served.base_url, api_key="sk-ml-nonsense", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        stranger.chat.completions.create(model=MODEL, messages=FRANCE)
    assert caught.value.code == "invalid_api_key"
    facts = refused(served, caught.value)
    assert facts["tenant_id"] is None
    assert facts["attempts"] == []


def test_an_unknown_model_is_refused_and_recorded(served: Served, client: OpenAI) -> None:
    """404 model_not_found, with what was asked for in the record."""
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-17", messages=FRANCE)
    assert caught.value.code == "model_not_found"
    facts = refused(served, caught.value)
    assert facts["asked_model"] == "gpt-17"
    assert facts["tenant_name"] == "default"


def test_too_long_a_prompt_is_refused_and_recorded(served: Served, client: OpenAI) -> None:
    """400 context_length_exceeded, which frameworks key on."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 9000}]
        )
    assert caught.value.code == "context_length_exceeded"
    refused(served, caught.value)


def test_a_wrong_field_is_named_by_its_path(served: Served, client: OpenAI) -> None:
    """400 with `param`."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=FRANCE, extra_body={"max_tokens": "many"}
        )
    assert caught.value.param == "max_tokens"
    refused(served, caught.value)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_is_billed_for_what_was_generated(
    served: Served, client: OpenAI, streamed: bool
) -> None:
    """One record, `client_disconnect`; the engine's own count, and its device time is charged."""
    long: list[Any] = [{"role": "user", "content": "Tell a very long story about the sea."}]
    if streamed:
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=long, temperature=0, max_tokens=400, stream=True
        )
        stream = raw.parse()
        seen = sum(1 for _, chunk in zip(range(6), stream, strict=False) if chunk.choices)
        stream.close()
        facts = story(served, raw.headers["x-request-id"])
        assert 1 <= seen <= tokens(facts)[1] < 400
    else:
        before = served.output.count('"client_disconnect"')
        patient = {"x-stainless-timeout": "600", "x-stainless-read-timeout": "600"}
        with pytest.raises(openai.APITimeoutError):  # it says that it waits, and leaves
            client.with_options(timeout=2).chat.completions.create(
                model=MODEL, messages=long, temperature=0, max_tokens=400, extra_headers=patient
            )
        deadline = time.monotonic() + 20
        while served.output.count('"client_disconnect"') == before:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        ids = re.findall(r'"request_id":"([^"]+)"[^\n]*"client_disconnect"', served.output)
        facts = story(served, ids[-1])
        assert 1 <= tokens(facts)[1] < 400
    (attempt,) = facts["attempts"]
    assert facts["outcome"] == "client_disconnect"
    assert attempt["usage_source"] == "engine"
    device = {share["phase"]: share["device_us"] for share in attempt["device"]}
    assert device["prefill"] > 0
    assert device["decode"] > 0
    assert cost(facts) == sum(device.values()) * RATE / 1_000_000


def test_embeddings_are_paid_by_the_engines_time(served: Served, client: OpenAI) -> None:
    """As any other work of the engine: its prefill, not a price per token that nobody set."""
    raw = client.embeddings.with_raw_response.create(model=MODEL, input=["a cat", "a kitten"])
    facts = story(served, raw.headers["x-request-id"])
    (attempt,) = facts["attempts"]
    device = {share["phase"]: share["device_us"] for share in attempt["device"]}
    assert device["prefill"] > 0
    assert cost(facts) == sum(device.values()) * RATE / 1_000_000


def test_chargeback_is_the_sum_of_the_stories(served: Served) -> None:
    """50 requests of 3 tenants: the report by tenant and model equals Σ explain, exactly."""
    keys = []
    for name in ("ada", "bob", "eve"):
        assert served.run("tenant", "create", name).returncode == 0
        made = served.run("key", "create", name, "--format", "json")
        keys.append(json.loads(made.stdout)["key"])

    def ask(number: int) -> str:
        with OpenAI(base_url=served.base_url, api_key=keys[number % 3], max_retries=0) as one:
            raw = one.chat.completions.with_raw_response.create(
                model=MODEL if number % 2 else "smollm2-135m-instruct",
                messages=[{"role": "user", "content": f"Say the number {number}."}],
                max_tokens=1 + number % 4,
                temperature=0,
            )
        return str(raw.headers["x-request-id"])

    with ThreadPoolExecutor(8) as pool:  # so that the engine batches them
        wanted = list(pool.map(ask, range(50)))
    stories = asyncio.run(read_stories(served, wanted))
    deadline = time.monotonic() + 30
    while True:
        printed = served.run(
            *("report", "chargeback", "--by", "tenant,model", "--format", "json"),
            *("--from", "2026-01-01"),
        ).stdout
        lines = [
            line
            for line in json.loads(printed)["lines"]
            if line["tenant_name"] in ("ada", "bob", "eve")
        ]
        if sum(line["requests"] for line in lines) == 50:
            break
        assert time.monotonic() < deadline, printed
        time.sleep(0.5)
    assert sum((Decimal(line["cost"]) for line in lines), Decimal(0)) == sum(
        (cost(facts) for facts in stories), Decimal(0)
    )
    assert sum(line["input_tokens"] for line in lines) == sum(tokens(one)[0] for one in stories)
    assert sum(line["output_tokens"] for line in lines) == sum(tokens(one)[1] for one in stories)
    assert served.run("reconcile").returncode == 0


def test_metrics_and_ledger_tell_the_same(served: Served, tmp_path: Path) -> None:
    """The scrape parses, counts what was served, and holds no key."""
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    text = httpx.get(served.base_url.replace("/v1", "/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    answered = sum(
        sample.value
        for sample in families["meterline_requests"].samples
        if sample.labels.get("outcome") == "ok"
    )
    assert answered >= 50
    assert "sk-ml" not in text
    assert "sk-ml" not in served.output.split("try it", 1)[1].split("\n", 1)[1]


# --- the other surfaces, translated for the engine --------------------------------------------

WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a place.",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def claude(served: Served) -> Iterator[Anthropic]:
    """Anthropic's client as documented: only `base_url` and key differ from the real API."""
    base_url = served.base_url.removesuffix("/v1")
    with Anthropic(base_url=base_url, api_key=served.key, max_retries=0) as made:
        yield made


def test_anthropics_client_against_the_engine(served: Served, claude: Anthropic) -> None:
    """Messages whole and streamed are the same sensible text, and are billed to the token."""
    ask: Any = {"model": MODEL, "messages": FRANCE, "max_tokens": 40}
    ask["extra_body"] = {"temperature": 0}
    raw = claude.messages.with_raw_response.create(**ask)
    answer = raw.parse()
    assert "Paris" in answer.content[0].text
    assert answer.stop_reason == "end_turn"
    facts = story(served, raw.headers["x-request-id"])
    read = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert tokens(facts) == (read, answer.usage.output_tokens)
    assert facts["outcome"] == "ok"
    assert facts["surface"] == "messages"
    with claude.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].text == answer.content[0].text
    assert streamed.usage.output_tokens == answer.usage.output_tokens
    counted = claude.messages.count_tokens(model=MODEL, messages=FRANCE)
    assert counted.input_tokens > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_anthropics_tools_against_the_engine(claude: Anthropic, stream: bool) -> None:
    """A tool that must be called is called, with arguments that fit its schema, and its result is
    read."""
    turns: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]
    ask: Any = {"model": MODEL, "tools": [WEATHER], "max_tokens": 60}
    ask["extra_body"] = {"temperature": 0}
    ask["tool_choice"] = {"type": "tool", "name": "weather"}
    if stream:
        with claude.messages.stream(messages=turns, **ask) as running:
            answer: Any = running.get_final_message()
    else:
        answer = claude.messages.create(messages=turns, **ask)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use"
    assert call.input["place"] in ("Oslo", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is sunny."}
    turns += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    ask["tool_choice"] = {"type": "none"}
    said = claude.messages.create(messages=turns, **ask)
    assert said.content[0].type == "text"


def test_responses_against_the_engine(served: Served, client: OpenAI) -> None:
    """Responses whole and streamed are the same text, are billed to the token, and can be gone on
    from."""
    question = "What is the capital of France?"
    ask: Any = {"model": MODEL, "input": question, "temperature": 0, "max_output_tokens": 40}
    raw = client.responses.with_raw_response.create(**ask)
    answer = raw.parse()
    assert "Paris" in answer.output_text
    assert answer.usage is not None
    facts = story(served, raw.headers["x-request-id"])
    assert tokens(facts) == (answer.usage.input_tokens, answer.usage.output_tokens)
    events = list(client.responses.create(stream=True, **ask))
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == answer.output_text
    ask["input"] = "Say it again."
    following = client.responses.create(previous_response_id=answer.id, **ask)
    assert following.usage is not None
    assert following.usage.input_tokens > answer.usage.input_tokens
