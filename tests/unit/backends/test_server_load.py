"""What inference servers say of their load, from samples of their own metrics pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.server_load import Load, load_of

VLLM = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen3-8B"} 3.0
vllm:num_requests_running{engine="1",model_name="Qwen/Qwen3-8B"} 4.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="Qwen/Qwen3-8B"} 2.0
vllm:num_requests_waiting{engine="1",model_name="Qwen/Qwen3-8B"} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="Qwen/Qwen3-8B"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="Qwen/Qwen3-8B"} 0.7143
vllm:prompt_tokens_total{engine="0",model_name="Qwen/Qwen3-8B"} 9321.0
"""
VLLM_OLD = VLLM.replace(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
SGLANG = b"""\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="meta-llama/Llama-3.1-8B-Instruct",tp_rank="0"} 162.0
# HELP sglang:token_usage The token usage.
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="meta-llama/Llama-3.1-8B-Instruct",tp_rank="0"} 0.28
# HELP sglang:num_queue_reqs The number of requests in the waiting queue.
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="meta-llama/Llama-3.1-8B-Instruct",tp_rank="0"} 2826.0
"""
TGI = b"""\
# TYPE tgi_queue_size gauge
tgi_queue_size 4

# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 12
# TYPE tgi_request_duration histogram
tgi_request_duration_bucket{le="0.1"} 0
"""
LLAMA_CPP = b"""\
# HELP llamacpp:kv_cache_usage_ratio KV-cache usage. 1 means 100 percent usage.
# TYPE llamacpp:kv_cache_usage_ratio gauge
llamacpp:kv_cache_usage_ratio 0.5
# HELP llamacpp:requests_processing Number of requests processing.
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 1
# HELP llamacpp:requests_deferred Number of requests deferred.
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 6
"""
OURS = b"""\
meterline_engine_running_requests{model="m"} 2.0
meterline_engine_waiting_requests{model="m"} 1.0
meterline_engine_kv_cache_usage_ratio{model="m"} 0.125
"""
GET_LOAD = b"""\
[{"rid": null, "dp_rank": 0, "num_reqs": 12, "num_waiting_reqs": 4, "num_tokens": 100},
 {"rid": null, "dp_rank": 1, "num_reqs": 3, "num_waiting_reqs": 0, "num_tokens": 7}]
"""


@pytest.mark.parametrize(
    ("text", "load"),
    [
        (VLLM, Load(7, 2, 0.7143)),
        (VLLM_OLD, Load(7, 2, 0.7143)),
        (SGLANG, Load(162, 2826, 0.28)),
        (TGI, Load(12, 4, None)),
        (LLAMA_CPP, Load(1, 6, 0.5)),
        (OURS, Load(2, 1, 0.125)),
        (GET_LOAD, Load(11, 4, None)),
        (b"go_goroutines 3\n", None),
        (b"", None),
        (b"vllm:num_requests_running{} NaN\n", None),
        (b"[]", None),
        (b'{"error": "x"}', None),
    ],
    ids=[
        *("vllm", "vllm, older", "sglang", "tgi", "llama.cpp", "ours", "get_load"),
        *("another", "empty", "not a number", "no ranks", "an object"),
    ],
)
def test_each_server(text: bytes, load: Load | None) -> None:
    """Ranks and models add up, the fullest cache counts, and what is not said is not guessed."""
    assert load_of(text) == load


@given(st.binary(max_size=400))
def test_any_page_is_survived(text: bytes) -> None:
    """Whatever a server answers under that path."""
    found = load_of(text)
    assert found is None or found.requests >= 0
