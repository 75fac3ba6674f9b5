"""The engine as a process, over a real socket, with the real `openai` client and real weights."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.gguf import tiny_llama

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
MODEL = "smollm2-135m-instruct"
PARIS: Any = [{"role": "user", "content": "What is the capital of France?"}]


def start(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "backends.engine", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def address_of(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if "ready at " in line:
            return line.split("ready at ")[1].strip()
    raise AssertionError(f"the engine ended with {process.wait()}")


def stop(process: "subprocess.Popen[str]") -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(60)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of one engine for all tests here, ended by SIGTERM with status 0."""
    process = start("--port", "0", "--kv-memory-gb", "0.2")
    try:
        yield address_of(process)
    finally:
        assert stop(process) == 0


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as made:
        yield made


def gauge(url: str, name: str) -> float:
    text = httpx.get(url.removesuffix("/v1") + "/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


async def until(what: Any, *, within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not what():  # it polls another process
            await asyncio.sleep(0.05)


def test_a_whole_answer_is_sensible_and_metered(client: openai.OpenAI) -> None:
    """A chat answer is English, with exact usage and the timing extension inside it."""
    answer = client.chat.completions.create(
        model=MODEL, messages=PARIS, max_tokens=20, temperature=0
    )
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    [choice] = answer.choices
    assert choice.message.content == "The capital of France is Paris."
    assert choice.finish_reason == "stop"
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (37, 8, 45)
    meter = usage.model_dump()["meterline"]
    assert set(meter) == {
        "queue_s", "prefill_s", "decode_s", "sampling_s", "cached_tokens", "preemptions",
        "device_us", "spec",
    }  # fmt: skip
    assert set(meter["device_us"]) == {
        "prefill", "decode", "sampling", "recompute", "spec_rejected"
    }  # fmt: skip
    assert meter["device_us"]["prefill"] > 0
    assert meter["device_us"]["decode"] > 0


def test_a_stream_has_the_shape_of_the_real_api(client: openai.OpenAI) -> None:
    """Role in the first delta only, one id, finish at the end, usage in a chunk of its own."""
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=PARIS, max_tokens=20, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    *body, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 8
    assert "meterline" in last.usage.model_dump()
    assert all(chunk.usage is None for chunk in body)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    roles = [chunk.choices[0].delta.role for chunk in body]
    assert roles == ["assistant"] + [None] * (len(body) - 1)
    finishes = [chunk.choices[0].finish_reason for chunk in body]
    assert finishes == [None] * (len(body) - 1) + ["stop"]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in body)
    assert text == "The capital of France is Paris."


def test_the_wire_has_one_event_per_line_and_done(url: str) -> None:
    """Raw framing: `data: {json}`, a blank line, and [DONE] last; no usage key unless asked."""
    body = {"model": MODEL, "messages": PARIS, "max_tokens": 3, "stream": True}
    response = httpx.post(f"{url}/chat/completions", json=body, timeout=60)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all("usage" not in json.loads(event.removeprefix("data: ")) for event in events[:-2])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_stop_strings_cut_exactly(client: openai.OpenAI, stream: bool) -> None:
    """The answer ends right before the stop string, in both forms."""
    arguments: dict[str, Any] = {
        "model": MODEL, "messages": PARIS, "max_tokens": 20, "temperature": 0, "stop": ["e is P"],
    }  # fmt: skip
    if stream:
        chunks = list(client.chat.completions.create(stream=True, **arguments))
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
    else:
        text = client.chat.completions.create(**arguments).choices[0].message.content
    assert text == "The capital of Franc"


def test_n_choices_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    """n=2 gives two texts under their index; the same seed gives both again, streamed or whole."""
    arguments: dict[str, Any] = {
        "model": MODEL, "n": 2, "seed": 42, "max_tokens": 12, "temperature": 1.2,
        "messages": [{"role": "user", "content": "Tell me a story."}],
    }  # fmt: skip
    first = client.chat.completions.create(**arguments)
    assert [choice.index for choice in first.choices] == [0, 1]
    texts = [choice.message.content for choice in first.choices]
    assert texts[0] != texts[1]
    assert first.usage is not None
    assert first.usage.completion_tokens <= 24
    streamed = ["", ""]
    for chunk in client.chat.completions.create(stream=True, **arguments):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_chat_logprobs(client: openai.OpenAI) -> None:
    """One entry per token, its text and bytes, and the best alternatives in order."""
    answer = client.chat.completions.create(
        model=MODEL, messages=PARIS, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        assert bytes(entry.bytes or []).decode() == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy
        best = [alternative.logprob for alternative in entry.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert len(best) == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_schema_shapes_the_answer(client: openai.OpenAI, stream: bool) -> None:
    """Strict structured output: JSON of that schema, ending by itself, in both forms."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    arguments: dict[str, Any] = {
        "model": MODEL, "messages": PARIS, "max_tokens": 60, "temperature": 0, "response_format":
        {"type": "json_schema", "json_schema": {"name": "c", "strict": True, "schema": schema}},
    }  # fmt: skip
    if stream:
        chunks = list(client.chat.completions.create(stream=True, **arguments))
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        finish = chunks[-1].choices[0].finish_reason
    else:
        choice = client.chat.completions.create(**arguments).choices[0]
        text, finish = choice.message.content, choice.finish_reason
    assert finish == "stop"
    value = json.loads(text)
    assert value["city"] == "Paris"
    assert isinstance(value["people"], int)


def test_other_guides_and_their_errors(client: openai.OpenAI) -> None:
    """guided_choice as vLLM takes it; a schema that is none is a 400 that names its field."""
    one = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=9, temperature=0,
        extra_body={"guided_choice": [" Rome", " Paris", " Berlin"]},
    )  # fmt: skip
    assert one.choices[0].text == " Paris"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="x", extra_body={"guided_regex": "("})
    assert refused.value.param == "guided_regex"


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(
    ("choice", "finish"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"]
)
def test_a_forced_tool_call(client: openai.OpenAI, choice: Any, finish: str) -> None:
    """Its arguments fit the tool's schema; streamed fragments make the same call; the result goes
    back and is answered in text."""
    asked: Any = [{"role": "user", "content": "How is the weather in Rome?"}]
    arguments: Any = {
        "model": MODEL, "messages": asked, "tools": [WEATHER], "tool_choice": choice,
        "parallel_tool_calls": False, "max_tokens": 60, "temperature": 0,
    }  # fmt: skip
    answer = client.chat.completions.create(**arguments).choices[0]
    assert answer.finish_reason == finish
    assert answer.message.content is None
    [call] = answer.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    given = json.loads(call.function.arguments)
    assert given["city"] == "Rome"
    assert isinstance(given["days"], int)

    chunks = list(client.chat.completions.create(stream=True, **arguments))
    assert chunks[-1].choices[0].finish_reason == finish
    fragments = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    first, *rest = fragments
    assert first.id is not None
    assert first.function is not None
    assert first.function.name == "get_weather"
    assert all(f.id is None and f.index == 0 for f in rest)
    assert len(rest) > 2
    streamed = "".join(f.function.arguments or "" for f in fragments if f.function)
    assert streamed == call.function.arguments

    told = client.chat.completions.create(
        model=MODEL, max_tokens=20, temperature=0, tools=[WEATHER],
        messages=[
            *asked,
            answer.message,  # type: ignore[list-item]  # the SDK takes its own answers back
            {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 31 degrees."},
        ],
    )  # fmt: skip
    assert told.choices[0].message.content


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    """Prompts × n choices in order, with the completions form of logprobs."""
    answer = client.completions.create(
        model=MODEL, prompt=["The capital of Italy is", "1, 2, 3,"], n=2, max_tokens=4,
        temperature=0, logprobs=2,
    )  # fmt: skip
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert "Rome" in answer.choices[0].text
    assert answer.choices[0].text == answer.choices[1].text
    logprobs = answer.choices[2].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == answer.choices[2].text
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0
    assert all(len(best) == 2 for best in logprobs.top_logprobs or [])


def test_errors_are_what_the_client_expects(client: openai.OpenAI) -> None:
    """Too long, unknown model and bad values are the SDK's own exceptions, with code and param."""
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 9_000}]
        )
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=PARIS)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(model=MODEL, messages=PARIS, temperature=9)
    assert hot.value.param == "temperature"


def test_an_answer_that_would_come_too_late_is_refused(client: openai.OpenAI) -> None:
    """429 with Retry-After, in OpenAI's shape; with time enough the same request is answered, and
    a deadline that is none is ignored."""
    late = client.with_options(default_headers={"x-meterline-deadline-ms": "1"})
    with pytest.raises(openai.RateLimitError) as refused:
        late.chat.completions.create(model=MODEL, messages=PARIS, max_tokens=2)
    assert refused.value.code == "deadline_unreachable"
    assert refused.value.type == "rate_limit_error"
    assert refused.value.response.headers["retry-after"] == "1"
    for fine in ("60000", "soon", "-1"):
        early = client.with_options(default_headers={"x-meterline-deadline-ms": fine})
        answer = early.chat.completions.create(model=MODEL, messages=PARIS, max_tokens=2)
        assert answer.choices[0].finish_reason == "length"


def test_other_routes(url: str, client: openai.OpenAI) -> None:
    """Models are listed and found; unknown paths and methods answer in the error shape."""
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "meterline"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    root = url.removesuffix("/v1")
    assert httpx.get(f"{root}/health").json() == {"status": "ready", "model": MODEL}
    tokens = httpx.post(f"{root}/tokenize", json={"prompt": "Hello there"}).json()["tokens"]
    assert httpx.post(f"{root}/detokenize", json={"tokens": tokens}).json() == {
        "prompt": "Hello there"
    }
    assert httpx.post(f"{root}/tokenize", json={}).status_code == 400
    for method, path, status in [
        ("GET", "/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/tokenize", 405),
    ]:
        response = httpx.request(method, root + path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_over_the_limit_is_413(url: str) -> None:
    """33 MiB are refused before anything is parsed."""
    response = httpx.post(f"{url}/completions", content=b" " * (33 << 20), timeout=60)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_leaves_frees_its_blocks(url: str, stream: bool) -> None:
    """Whether streamed or whole: the connection closes, the job is cancelled, blocks are free."""
    cancelled = 'meterline_engine_requests_total{ending="cancelled"'
    before = gauge(url, cancelled)
    body = {
        "model": MODEL, "messages": PARIS, "max_tokens": 3_000, "ignore_eos": True,
        "stream": stream,
    }  # fmt: skip
    async with httpx.AsyncClient(timeout=60) as http:
        asking = asyncio.create_task(_read_a_little(http, f"{url}/chat/completions", body))
        await until(lambda: gauge(url, "meterline_engine_kv_cache_usage_ratio") > 0)
        if not stream:
            asking.cancel()
        await asyncio.wait({asking})
    await until(lambda: gauge(url, cancelled) == before + 1)
    assert gauge(url, "meterline_engine_kv_cache_usage_ratio") == 0
    assert gauge(url, "meterline_engine_running_requests") == 0


async def _read_a_little(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
    async with http.stream("POST", url, json=body) as response:
        async for _ in response.aiter_bytes():
            return


async def test_requests_share_steps(url: str) -> None:
    """Four at once run in one batch, and each answer is the one it gets alone."""
    body = {"model": MODEL, "messages": PARIS, "max_tokens": 8, "temperature": 0}
    async with httpx.AsyncClient(timeout=120) as http:
        answers = await asyncio.gather(
            *(http.post(f"{url}/chat/completions", json=body) for _ in range(4))
        )
    texts = {a.json()["choices"][0]["message"]["content"] for a in answers}
    assert texts == {"The capital of France is Paris."}
    steps_up_to_1 = gauge(url, 'meterline_engine_batch_size_bucket{le="1.0"')
    assert gauge(url, "meterline_engine_batch_size_count") > steps_up_to_1


def test_time_adds_up_in_the_metrics(url: str) -> None:
    """What requests were charged is the time of all steps, to the microsecond."""
    step = 'meterline_engine_step_seconds_total{model="smollm2-135m-instruct",phase='
    steps = sum(gauge(url, f'{step}"{phase}"') for phase in ("prefill", "decode", "mixed"))
    charged = gauge(url, "meterline_engine_charged_seconds_total")
    assert charged == pytest.approx(steps, abs=5e-7)
    assert charged > 0


# What the operator can mend: one line, status 2.


def refused(*arguments: str) -> str:
    process = start(*arguments)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2, errors
    [line] = errors.splitlines()
    assert line.startswith("meterline engine: ")
    return line


def test_a_taken_port_is_one_line(url: str) -> None:
    """A second engine on the same port says that it is in use."""
    port = url.removesuffix("/v1").rsplit(":", 1)[1]
    assert f"127.0.0.1:{port} cannot be used: in use" in refused("--port", port)


def test_a_name_that_routes_could_not_use_is_one_line() -> None:
    """A value that the settings type forbids names its field."""
    assert "`$.name`" in refused("--name", "Bad Name")


def test_a_missing_or_damaged_model_is_one_line(tmp_path: Path) -> None:
    """A path that is not there, a file that is none, a truncated one and one with a hole."""
    assert "no such model" in refused("--model", str(tmp_path / "no.gguf"))
    text = tmp_path / "text.gguf"
    text.write_text("hello, I am not a model\n" * 10)
    assert "not a GGUF file" in refused("--model", str(text))
    cut = tiny_llama(tmp_path / "cut.gguf")
    cut.write_bytes(cut.read_bytes()[:-40])
    line = refused("--model", str(cut))
    assert "blk.1.ffn_down.weight" in line
    assert "truncated" in line


def test_a_unix_socket_left_by_a_crash_is_replaced(tmp_path: Path) -> None:
    """A dead socket file does not stop a start; a live one does; it is gone after the end."""
    path = tmp_path / "e.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    model = tiny_llama(tmp_path / "tiny.gguf")
    process = start("--uds", str(path), "--model", str(model))
    try:
        assert address_of(process) == f"unix://{path}"
        assert "in use" in refused("--uds", str(path), "--model", str(model))
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as http:
            body = {"model": "tiny", "prompt": "a", "max_tokens": 5, "ignore_eos": True}
            answer = http.post("http://engine/v1/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] == 5
    finally:
        assert stop(process) == 0
    assert not path.exists()


def test_sigterm_lets_a_stream_finish(tmp_path: Path) -> None:
    """A running stream ends with [DONE] after SIGTERM, and the process with 0."""
    path = tmp_path / "e.sock"
    model = tiny_llama(tmp_path / "tiny.gguf", context=8_000)
    process = start("--uds", str(path), "--model", str(model))
    address_of(process)
    body = {"model": "tiny", "prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=60) as http,
        http.stream("POST", "http://engine/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        os.kill(process.pid, signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait(60) == 0
    process.communicate()


def test_health_is_503_while_loading(tmp_path: Path) -> None:
    """The socket answers before the model is there, and says so."""
    path = tmp_path / "e.sock"
    process = start("--uds", str(path), "--model", str(tiny_llama(tmp_path / "tiny.gguf")))
    try:
        seen = [health(path)]
        while seen[-1] != (200, "ready"):
            time.sleep(0.01)
            seen.append(health(path))
        assert seen[0] == (503, "loading")
    finally:
        assert stop(process) == 0


def health(path: Path) -> tuple[int, str]:
    """What /health says, as soon as something listens there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                break
        time.sleep(0.01)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=60) as http:
        response = http.get("http://engine/health")
    return response.status_code, response.json()["status"]


def test_an_engine_does_not_outlive_its_parent(tmp_path: Path) -> None:
    """With --exit-with-parent, a parent killed with -9 takes the engine and its socket along."""
    path = tmp_path / "e.sock"
    model = tiny_llama(tmp_path / "tiny.gguf")
    arguments = ["--uds", str(path), "--model", str(model), "--exit-with-parent"]
    code = (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'backends.engine', *sys.argv[1:]])"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=Path(__file__).parents[2]
    )
    assert health(path)[0] in (200, 503)
    parent.kill()
    parent.wait(10)
    deadline = time.monotonic() + 60
    while path.exists():
        assert time.monotonic() < deadline, "the engine outlived its parent"
        time.sleep(0.05)


def test_texts_become_vectors(client: openai.OpenAI) -> None:
    """Embeddings have the real API's shape in both encodings, length 1, usage of the prompts only,
    and lie closer for texts that mean the same."""
    texts = ["a cat sat on the mat", "a kitten sat on a rug", "SELECT sum(x) FROM bills"]
    answer = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert [item.index for item in answer.data] == [0, 1, 2]
    cat, kitten, bill = (item.embedding for item in answer.data)
    assert sum(value * value for value in cat) == pytest.approx(1.0, abs=1e-5)

    def alike(left: list[float], right: list[float]) -> float:
        return sum(a * b for a, b in zip(left, right, strict=True))

    assert alike(cat, kitten) > alike(cat, bill)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 15
    meter = answer.usage.model_dump()["meterline"]
    assert meter["device_us"]["prefill"] > 0
    assert meter["device_us"]["decode"] == meter["device_us"]["sampling"] == 0
    times = answer.usage.to_dict()["meterline"]
    assert isinstance(times, dict)
    assert all(0 <= times[part] < 60 for part in ("queue_s", "prefill_s", "decode_s"))
    packed = client.embeddings.create(model=MODEL, input=texts[0], encoding_format="base64")
    same = client.embeddings.create(model=MODEL, input=texts[0])  # the client unpacks it
    assert same.data[0].embedding == pytest.approx(cat, abs=1e-5)
    assert isinstance(packed.data[0].embedding, str)
    short = client.embeddings.create(model=MODEL, input=texts[0], dimensions=64)
    assert len(short.data[0].embedding) == 64
    assert alike(short.data[0].embedding, short.data[0].embedding) == pytest.approx(1.0, abs=1e-5)
    for wrong in ({"input": []}, {"input": [""]}, {"input": [[1 << 20]]}, {"dimensions": 577}):
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(**{"model": MODEL, "input": "a", **wrong})  # type: ignore[arg-type]  # wrong on purpose


def test_a_private_socket_serves_two_models_and_swaps_one(tmp_path: Path) -> None:
    """The process as the gateway starts it: a further model, the admin's routes on the Unix socket,
    a drain at the end."""
    one, two = (tiny_llama(tmp_path / f"{name}.gguf", seed=n) for n, name in enumerate("ab"))
    path = tmp_path / "engine.sock"
    also = json.dumps({"name": "second", "model": str(two)})
    process = start("--uds", str(path), "--model", str(one), "--also", also, "--kernels", "torch",
                    "--kv-memory-gb", "0.01")  # fmt: skip
    try:
        assert address_of(process) == f"unix://{path}"
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://engine", timeout=60) as client:
            body = {"model": "second", "prompt": "the", "max_tokens": 3, "temperature": 0}
            assert client.post("/v1/completions", json=body).json()["model"] == "second"
            swapped = client.post("/admin/models/second/swap", json={"model": str(one)}).json()
            assert (swapped["version"], swapped["state"]) == (2, "ready")
            assert client.post("/v1/completions", json=body).status_code == 200
            assert client.get("/health").json()["models"] == {"a": "ready", "second": "ready"}
    finally:
        assert stop(process) == 0
