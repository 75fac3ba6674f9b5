"""How backends and engines are described in `meterline.toml`. Values as written; secrets are
references (`env:NAME`, `file:PATH`) that the gateway's runtime resolves."""

from decimal import Decimal
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from backends.base import Timeouts
from telemetry.record import Surface

BackendKind = Literal["openai", "anthropic", "scripted", "engine"]


class Gpu(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the hardware behind a backend costs, for backends that are owned and not bought."""

    rate_per_hour: Annotated[
        Decimal, Meta(description="US dollars for one device (GPU, or CPU host) for one hour.")
    ]
    count: Annotated[int, Meta(ge=1, description="Devices that one engine occupies.")] = 1


class TokenPrice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices agreed for a backend, US dollars per 1 M tokens; they win over published lists."""

    input: Annotated[Decimal, Meta(description="Per 1 M uncached input tokens.")]
    output: Annotated[Decimal, Meta(description="Per 1 M output tokens.")]
    cached_input: Annotated[
        Decimal | None, Meta(description="Per 1 M cached input tokens; default: as input.")
    ] = None


class Script(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the `scripted` backend plays: fixed latencies, tokens and failures. For demos, tests,
    benches: it needs no network, no weights and no key."""

    first_token_s: Annotated[float, Meta(ge=0, description="Seconds to the first token.")] = 0.0
    inter_token_s: Annotated[float, Meta(ge=0, description="Seconds between tokens.")] = 0.0
    output_tokens: Annotated[int, Meta(ge=0, description="Tokens generated per choice.")] = 16
    text: Annotated[str, Meta(description="Words it repeats; one word is one token.")] = (
        "the quick brown fox jumps over the lazy dog"
    )
    fail: Annotated[
        Literal[
            "never",
            "refuse",
            "500",
            "429",
            "401",
            "stall",
            "cut",
            "garbage",
            "error_event",
            "error_200",
        ],
        Meta(description="How it fails, on each request that `fail_every` selects."),
    ] = "never"
    fail_after: Annotated[
        int, Meta(ge=0, description="Tokens sent before a stall, cut, garbage or error event.")
    ] = 2
    fail_every: Annotated[int, Meta(ge=1, description="Every n-th request fails.")] = 1
    report_usage: Annotated[bool, Meta(description="false: answers carry no usage.")] = True
    books: Annotated[
        str | None,
        Meta(description="File to which it appends each token it generates, for audits."),
    ] = None


class Discovery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the addresses behind `base_url` come from. Its scheme, path and host name stay: the
    name is what TLS checks and the Host header says. Each address is checked as any other."""

    kind: Annotated[
        Literal["dns", "srv", "kubernetes"],
        Meta(
            description="dns: A and AAAA records. srv: SRV records. kubernetes: the "
            "EndpointSlices of a Service, watched at the API server."
        ),
    ]
    name: Annotated[
        str | None,
        Meta(description="DNS name, or the Service. Absent: the host of base_url (dns only)."),
    ] = None
    namespace: Annotated[
        str | None, Meta(description="Of the Service. Absent: the one we run in.")
    ] = None
    port: Annotated[
        int | str | None,
        Meta(
            description="Port number, or the name of a port of the Service. Absent: the port of "
            "base_url for dns; the first port of the Service."
        ),
    ] = None
    every_s: Annotated[
        float,
        Meta(gt=0, description="Longest time between two DNS look-ups; a shorter TTL is kept."),
    ] = 30.0
    nameservers: Annotated[
        tuple[str, ...],
        Meta(description="ADDRESS or ADDRESS:PORT to ask instead of the system's resolvers."),
    ] = ()
    api_url: Annotated[str, Meta(description="The Kubernetes API server.")] = (
        "https://kubernetes.default.svc"
    )
    account_dir: Annotated[
        str, Meta(description="Folder of the service account: token, ca.crt, namespace.")
    ] = "/var/run/secrets/kubernetes.io/serviceaccount"


class Probe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ask each server now and then whether it is ready, and leave it out while it is not."""

    every_s: Annotated[float, Meta(gt=0, description="Seconds between two, with jitter.")] = 5.0
    timeout_s: Annotated[float, Meta(gt=0, description="A longer one has failed.")] = 2.0
    path: Annotated[
        Annotated[str, Meta(pattern="^/")] | None,
        Meta(
            description="Path on the server that answers 200 when it is ready. Absent: /health of "
            "our engine, /v1/models of others, which also tries our key.",
        ),
    ] = None
    failures: Annotated[int, Meta(ge=1, description="In a row: it is down.")] = 3
    successes: Annotated[int, Meta(ge=1, description="In a row: it is up again.")] = 2
    load_path: Annotated[
        Annotated[str, Meta(pattern="^/")] | None,
        Meta(
            description="Path of the server's own metrics: /metrics of vLLM, SGLang, TGI, "
            "llama.cpp or our engine, /get_load of SGLang. What waits there counts as load.",
        ),
    ] = None


class Dialect(Struct, frozen=True, kw_only=True):
    """What a backend understands as it is, and how the rest is said to it."""

    speaks: frozenset[Surface] = frozenset({"chat", "completions", "embeddings"})
    limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"  # of a chat
    max_tokens: int = 4096  # where a limit must be said and the client gave none


class BackendSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[backends]]` table."""

    name: Annotated[
        str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$", description="Name used by routes.")
    ]
    kind: Annotated[
        BackendKind,
        Meta(
            description="openai: any OpenAI-compatible server. anthropic: any server with its "
            "messages API. engine: ours."
        ),
    ]
    base_url: Annotated[
        str | None,
        Meta(description="Up to and including /v1. unix:///path.sock for a local socket."),
    ] = None
    urls: Annotated[
        tuple[str, ...],
        Meta(
            description="Several servers of the same models, each with circuits of its own; "
            "requests go to the one with the fewest in flight. Instead of base_url."
        ),
    ] = ()
    discovery: Annotated[
        Discovery | None, Meta(description="Find the addresses behind base_url, and follow them.")
    ] = None
    api_key: Annotated[str | None, Meta(description="env:NAME or file:PATH, never the key.")] = None
    api_keys: Annotated[
        tuple[str, ...],
        Meta(
            description="Several keys, as references: the load is shared, one that is refused or "
            "at its limit is left out for a while. Instead of api_key."
        ),
    ] = ()
    provider: Annotated[
        str | None,
        Meta(description="Whose price list applies, e.g. openai, groq. Default: from the kind."),
    ] = None
    probe: Annotated[Probe | None, Meta(description="Absent: only requests show health.")] = None
    warm_up_s: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds in which a server that is new or back gets a growing share.",
        ),
    ] = 0.0
    surfaces: Annotated[
        tuple[Surface, ...] | None,
        Meta(
            description="The APIs that it has itself, e.g. responses; the others are translated. "
            "Absent: chat, completions and embeddings; for kind anthropic messages and "
            "count_tokens."
        ),
    ] = None
    default_max_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="Output limit that is sent to an Anthropic model when the client of "
            "another API gave none: there it must be said.",
        ),
    ] = 4096
    timeouts: Timeouts = Timeouts()
    max_concurrency: Annotated[
        int, Meta(ge=1, le=10_000, description="Connections to each server of it at most.")
    ] = 256
    http2: Annotated[
        bool,
        Meta(
            description="Many requests on one connection: HTTP/2 if the server agrees in the TLS "
            "handshake, else HTTP/1.1; over http:// without asking."
        ),
    ] = False
    allow_private: Annotated[
        bool,
        Meta(description="Allow base_url to resolve to a private or loopback address."),
    ] = False
    price: Annotated[TokenPrice | None, Meta(description="Prices of bought tokens.")] = None
    gpu: Annotated[Gpu | None, Meta(description="Cost of owned hardware behind it.")] = None
    script: Annotated[Script | None, Meta(description="For kind scripted.")] = None


class Speculative(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Guessing tokens ahead and checking several in one step. The text does not change by it."""

    method: Annotated[
        Literal["off", "prompt_lookup", "draft_model"],
        Meta(
            description="prompt_lookup: what followed the last tokens earlier in the same text. "
            "draft_model: what a second, faster model says. Either rests while its guesses fail. "
            "Only with native kernels."
        ),
    ] = "prompt_lookup"
    max_tokens: Annotated[int, Meta(ge=1, le=16, description="Guesses in a step at most.")] = 6
    draft_model: Annotated[
        str | None,
        Meta(
            description="For draft_model: a model with the same vocabulary, by name or path. The "
            "same one with other numbers (dtype = float32 here, auto there) will do."
        ),
    ] = None
    draft_dtype: Annotated[
        Literal["auto", "float32", "float16"], Meta(description="As dtype, of the draft model.")
    ] = "auto"


class EngineModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[engines.models]]` table: a further model in the same process. Steps take turns, each
    model has its own KV pool and queue."""

    name: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$", description="Its public name.")
    ]
    model: Annotated[str, Meta(description="As the engine's own `model`.")]
    dtype: Annotated[
        Literal["auto", "float32", "float16"], Meta(description="As the engine's own.")
    ] = "auto"
    weights: Annotated[
        Literal["file", "int8", "int4"], Meta(description="As the engine's own.")
    ] = "file"
    kv_memory_gb: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Gigabytes of its KV pool; default: an equal part of the engine's."),
    ] = None


class EngineSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[engines]]` table: an engine that `meterline serve` starts and supervises.

    It is reachable in routes as the backend of the same name."""

    name: Annotated[
        str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$", description="Name used by routes.")
    ]
    model: Annotated[
        str,
        Meta(
            description="`smollm2-135m-instruct` (bundled), or the path of a GGUF file or of a "
            "folder with config.json, safetensors and tokenizer.json."
        ),
    ] = "smollm2-135m-instruct"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(
            description="Where it runs. auto: on the CPU. cuda needs a torch with CUDA; that path "
            "is tested without a GPU and unmeasured on one."
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Meta(
            description="auto: on a CPU 4- and 8-bit weights stay as the file has them. "
            "float32: the exact numbers of the file's weights, slower."
        ),
    ] = "auto"
    weights: Annotated[
        Literal["file", "int8", "int4"],
        Meta(
            description="How weights lie in memory. file: as dtype says. int8, int4: rounded in "
            "groups of 32, the head to 8 bits at most; a quarter or less of the memory of fp32 for "
            "some quality. Only with native kernels."
        ),
    ] = "file"
    kernels: Annotated[
        Literal["auto", "native", "torch"],
        Meta(
            description="native: C++ compiled for this CPU at the first start, then cached. "
            "auto: native if it can be built and measures faster, else torch."
        ),
    ] = "auto"
    prefix_cache: Annotated[
        bool, Meta(description="Keep computed prompts and reuse them within a tenant.")
    ] = True
    kv_memory_gb: Annotated[
        float, Meta(gt=0, description="Memory of the KV block pool, gigabytes.")
    ] = 0.5
    models: Annotated[
        list[EngineModel], Meta(description="Further models in the same process.")
    ] = field(default_factory=list)
    when_asleep: Annotated[
        Literal["refuse", "wake"],
        Meta(
            description="A request for a model that was put to sleep: 503 with Retry-After, or "
            "wake it and wait."
        ),
    ] = "refuse"
    swap_memory_gb: Annotated[
        float,
        Meta(
            ge=0,
            description="Memory for KV blocks of preempted sequences, gigabytes, taken when "
            "needed. 0 with swap_file_gb = 0: they are computed again.",
        ),
    ] = 0.25
    swap_file_gb: Annotated[
        float,
        Meta(ge=0, description="The same in a file, once that memory is full. 0: no file."),
    ] = 0.0
    swap_folder: Annotated[
        str | None,
        Meta(description="Folder of that file, which has no name there and ends with the engine."),
    ] = None
    max_batch_size: Annotated[int, Meta(ge=1, le=512, description="Sequences in a step.")] = 16
    max_batch_tokens: Annotated[
        int, Meta(ge=64, description="New tokens in a step, prompt chunks included.")
    ] = 512
    step_target_s: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that a step should take while answers are being generated: a long "
            "prompt beside them is computed in chunks that fit (of 64 tokens at least).",
        ),
    ] = 0.25
    speculative: Speculative = Speculative()
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="CPU threads; default: physical cores."),
    ] = None
    tool_calls: Annotated[
        Literal["auto", "hermes", "llama3_json", "mistral", "pythonic"],
        Meta(description="How the model writes tool calls; auto: as its chat template says."),
    ] = "auto"
    gpu: Gpu = field(default_factory=lambda: Gpu(rate_per_hour=Decimal("0.10")))
