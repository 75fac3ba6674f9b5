"""Every span attribute name we emit, and where it comes from. Nothing else may be on a span.

`gen_ai.*`: OpenTelemetry semantic conventions for generative AI, kept by us because the package
`opentelemetry-semantic-conventions` marks all of its own as deprecated (they moved to
https://github.com/open-telemetry/semantic-conventions-genai, docs/gen-ai/gen-ai-spans.md).
`http.*`, `url.*`, `error.*`: https://opentelemetry.io/docs/specs/semconv/http/http-spans/.
`meterline.*`: ours. Content of prompts and answers has no name here, so it cannot be exported.
"""

from typing import Final

# gen_ai spans: https://github.com/open-telemetry/semantic-conventions-genai gen-ai-spans.md
OPERATION_NAME: Final = "gen_ai.operation.name"  # chat, text_completion
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_STREAM: Final = "gen_ai.request.stream"  # only when streaming
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"  # s, when streaming
USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"  # cached ones included
USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"  # reasoning included
USAGE_CACHE_READ: Final = "gen_ai.usage.cache_read.input_tokens"  # of the input
USAGE_CACHE_CREATION: Final = "gen_ai.usage.cache_creation.input_tokens"  # of the input
USAGE_REASONING: Final = "gen_ai.usage.reasoning.output_tokens"  # of the output
OPENAI_RESPONSE_SERVICE_TIER: Final = "openai.response.service_tier"

# What vLLM puts on its `llm_request` span, so that its consumers read our engine too.
LATENCY_IN_QUEUE: Final = "gen_ai.latency.time_in_queue"
LATENCY_IN_PREFILL: Final = "gen_ai.latency.time_in_model_prefill"
LATENCY_IN_DECODE: Final = "gen_ai.latency.time_in_model_decode"

# The event at the first content of an attempt.
EVENT_FIRST_CHUNK: Final = "gen_ai.first_chunk"

# HTTP server spans: https://opentelemetry.io/docs/specs/semconv/http/http-spans/
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
URL_PATH: Final = "url.path"
ERROR_TYPE: Final = "error.type"  # low cardinality: timeout, 429, client_disconnect, ...

# Resource attributes: https://opentelemetry.io/docs/specs/semconv/resource/
SERVICE_NAME: Final = "service.name"
SERVICE_VERSION: Final = "service.version"
SERVICE_INSTANCE_ID: Final = "service.instance.id"

# Ours.
REQUEST_ID: Final = "meterline.request_id"
CLIENT_REQUEST_ID: Final = "meterline.client_request_id"
TENANT_ID: Final = "meterline.tenant_id"
KEY_ID: Final = "meterline.key_id"  # the public half
ASKED_MODEL: Final = "meterline.asked_model"
DEGRADED: Final = "meterline.degraded"
STREAM: Final = "meterline.stream"
OUTCOME: Final = "meterline.outcome"
ERROR_CODE: Final = "meterline.error.code"
ATTEMPTS: Final = "meterline.attempts"
STREAM_CHUNKS: Final = "meterline.stream.chunks"
STREAM_BYTES: Final = "meterline.stream.bytes"
ATTEMPT_NO: Final = "meterline.attempt.no"
ATTEMPT_REASON: Final = "meterline.attempt.reason"
BACKEND: Final = "meterline.backend"
ENDPOINT: Final = "meterline.endpoint"
PROVIDER_REQUEST_ID: Final = "meterline.provider.request_id"
USAGE_SOURCE: Final = "meterline.usage.source"
USAGE_QUALITY: Final = "meterline.usage.quality"
COST_AMOUNT: Final = "meterline.cost.amount"  # decimal string, exact
COST_CURRENCY: Final = "meterline.cost.currency"
COST_PRICE_IDS: Final = "meterline.cost.price_ids"
COST_UNPRICED: Final = "meterline.cost.unpriced"  # true: no amount, never a zero one
DEVICE_MICROSECONDS: Final = "meterline.device_us"
PREEMPTIONS: Final = "meterline.preemptions"

# Ours, on the engine's own spans.
ENGINE_TOKENS: Final = "meterline.tokens"
ENGINE_CACHED_TOKENS: Final = "meterline.cached_tokens"
ENGINE_BATCH_MEAN: Final = "meterline.batch.mean"
ENGINE_KV_BLOCK_SECONDS: Final = "meterline.kv_block_seconds"
ENGINE_AGGREGATED: Final = "meterline.aggregated"  # as long as all its parts together

RESOURCE: Final = frozenset({SERVICE_NAME, SERVICE_VERSION, SERVICE_INSTANCE_ID})

ALLOWED: Final = (
    frozenset(
        value
        for name, value in globals().items()
        if name.isupper() and isinstance(value, str) and name != "EVENT_FIRST_CHUNK"
    )
    - RESOURCE
)
