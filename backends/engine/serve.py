"""One engine process from start to exit: listen, load, serve, drain.

`serve` is what the command line and the gateway's supervisor start. It listens before it loads,
so that a taken port is known at once and `/health` answers 503 meanwhile; it ends with status 2
and one clear line for whatever the operator can mend.
"""

import asyncio
import errno
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path

import uvicorn
from msgspec import Struct, structs

from backends.engine import chat, memory, tokenizer
from backends.engine.engine import Engine
from backends.engine.errors import ListenFailed, StartFailed
from backends.engine.fleet import Built, Fleet, Served
from backends.engine.kv import BLOCK_TOKENS
from backends.engine.native.library import Toolchain
from backends.engine.native.packing import Dtype
from backends.engine.progress import Loading
from backends.engine.server import EngineApp, ServedModel
from backends.engine.shape import pool_blocks, read_shape
from backends.engine.spans import Emit, discard, exporting
from backends.engine.swap import file_in
from backends.engine.tokenizer import Tokenizer
from backends.engine.turns import SharedRunner, Turns
from backends.engine.types import Runner
from backends.engine.weights import BUNDLED_NAME, Weights, open_weights, pooling_of
from backends.engine.wire import Limits, Parser
from backends.settings import EngineSettings, Speculative
from telemetry import logs
from telemetry.clock import Clock, SystemClock
from telemetry.tracing import FileSink, OtlpSink, SpanExport

DRAIN_S = 30.0
_PARENT_POLL_S = 0.25


class Listen(Struct, frozen=True, kw_only=True):
    """Where to listen: a Unix socket, or host and port (0: any free one)."""

    host: str = "127.0.0.1"
    port: int = 8090
    uds: Path | None = None


class Telemetry(Struct, frozen=True, kw_only=True):
    """Where spans go: to a collector (OTLP/HTTP base), or as JSON lines into a file, or nowhere.
    How log lines look, and whether /metrics has vLLM's names beside ours."""

    otlp_endpoint: str | None = None
    spans_file: Path | None = None
    service_name: str = "meterline-engine"
    log_format: logs.LogFormat = "auto"
    vllm_metrics: bool = False


def prepare_environment(environment: dict[str, str] | os._Environ[str]) -> None:
    """Before torch is imported: idle compute threads sleep instead of spinning. Spinning ones
    collapse when cores are shared: a step of 0.05 s was seen to take seconds."""
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where the user's caches are, by the XDG convention."""
    base = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "meterline"


def physical_cores(cpuinfo: str, available: set[int]) -> int:
    """Distinct cores among the processors that this process may use."""
    cores: set[tuple[str, str]] = set()
    for block in cpuinfo.split("\n\n"):
        facts: Mapping[str, str] = {
            key.strip(): value.strip()
            for key, _, value in (line.partition(":") for line in block.splitlines())
        }
        if facts.get("processor", "").isdigit() and int(facts["processor"]) in available:
            core = facts.get("core id", facts["processor"])
            cores.add((facts.get("physical id", "0"), core))
    return max(1, len(cores) or len(available))


def build(
    settings: EngineSettings,
    *,
    clock: Clock | None = None,
    emit: Emit = discard,
    vllm_metrics: bool = False,
    cache: Path | None = None,
    available_bytes: Callable[[], int | None] = memory.available_bytes,
    served_as: str | None = None,
    turns: Turns | None = None,
) -> Built:
    """Check the model's files and compose the engine. Raises StartFailed; takes no torch. Compiled
    kernels are kept in `cache`. `served_as`: its public name; default: from the file. With `turns`
    its steps take theirs."""
    clock = clock or SystemClock()
    speculative = settings.speculative
    cache = cache or Path.home() / ".cache" / "meterline"
    file = open_weights(settings.model)
    shape = read_shape(file)
    words = tokenizer.from_weights(file)
    template = chat.from_weights(file, words)
    dtype = _dtype(settings)
    draft = _draft_file(speculative, words)
    memory_gb = settings.kv_memory_gb
    if draft is not None:  # both keep as many tokens
        of_both = shape.kv_token_bytes + read_shape(draft).kv_token_bytes
        memory_gb *= shape.kv_token_bytes / of_both
    blocks = pool_blocks(shape, memory_gb)
    name = served_as or public_name(settings.model)
    if settings.device != "cuda":
        found = memory.need(
            file,
            shape,
            dtype=dtype,
            is_torch=settings.kernels == "torch",
            pool_bytes=blocks * BLOCK_TOKENS * shape.kv_token_bytes,
        )
        memory.check(found, available_bytes(), name=name)
    loading = Loading(settings.name, clock)
    context = min(shape.context, blocks * BLOCK_TOKENS)
    loaded: list[Runner] = []

    def load() -> Runner:
        runner = _load(file, draft, words, blocks, settings, dtype, cache, loading)
        loaded.append(runner)
        if turns is None:
            return runner
        waited = partial(engine.step_clock.mark, "idle")
        return SharedRunner(runner, turns, name, waited=waited)

    def release() -> None:
        app.close()
        while loaded:
            loaded.pop().close()

    engine = Engine(
        load=load,
        tokenizer=words,
        clock=clock,
        emit=emit,
        max_batch_size=settings.max_batch_size,
        max_batch_tokens=settings.max_batch_tokens,
        prefix_cache=settings.prefix_cache,
        step_target_s=settings.step_target_s,
        swap_memory_bytes=int(settings.swap_memory_gb * 1e9),
        swap_file_bytes=int(settings.swap_file_gb * 1e9),
        open_swap_file=file_in(_swap_folder(settings)),
        max_drafts=0 if speculative.method == "off" else speculative.max_tokens,
    )
    model = ServedModel(
        name=name,
        fingerprint=f"fp_{file.digest[:12]}",
        context=context,
        created=int(file.path.stat().st_mtime),
    )
    family = None if settings.tool_calls == "auto" else settings.tool_calls
    limits = Limits(model=name, context=context, dimensions=shape.hidden, pooling=pooling_of(file))
    parser = Parser(words, template, limits, family=family)
    app = EngineApp(engine, parser, words, model, clock, vllm_metrics=vllm_metrics, loading=loading)
    return Built(engine, app, release)


def build_fleet(
    settings: EngineSettings,
    *,
    is_private: bool,
    drain_s: float = DRAIN_S,
    clock: Clock | None = None,
    emit: Emit = discard,
    vllm_metrics: bool = False,
    cache: Path | None = None,
) -> Fleet:
    """The engine's own model and its further ones, not started. Raises StartFailed."""
    clock = clock or SystemClock()
    turns = Turns()
    share_gb = settings.kv_memory_gb / (1 + len(settings.models))
    name = public_name(settings.model)
    served = [(name, structs.replace(settings, kv_memory_gb=share_gb))]
    for more in settings.models:
        changed = structs.replace(
            settings,
            model=more.model,
            dtype=more.dtype,
            weights=more.weights,
            kv_memory_gb=more.kv_memory_gb or share_gb,
        )
        served.append((more.name, changed))
    names = [name for name, _ in served]
    if len(set(names)) < len(names):
        raise StartFailed(f"models need different names: {', '.join(names)}")

    def make(name: str, one: EngineSettings, model: str) -> Built:
        return build(
            structs.replace(one, model=model),
            clock=clock,
            emit=emit,
            vllm_metrics=vllm_metrics,
            cache=cache,
            served_as=name,
            turns=turns,
        )

    return Fleet(
        [Served(name, one.model, partial(make, name, one)) for name, one in served],
        clock,
        turns,
        is_private=is_private,
        when_asleep=settings.when_asleep,
        drain_s=drain_s,
    )


def public_name(model: str) -> str:
    return BUNDLED_NAME if model == BUNDLED_NAME else Path(model).stem


def _swap_folder(settings: EngineSettings) -> Path | None:
    """Raises StartFailed for one that cannot be written: better now than at the first swap."""
    folder = None if settings.swap_folder is None else Path(settings.swap_folder)
    if settings.swap_file_gb and folder is not None and not os.access(folder, os.W_OK | os.X_OK):
        raise StartFailed(f"swap_folder = {folder}: no such folder, or it cannot be written")
    return folder


def serve(
    settings: EngineSettings,
    listen: Listen,
    *,
    telemetry: Telemetry | None = None,
    on_ready: Callable[[str], None] | None = None,
    drain_s: float = DRAIN_S,
    exit_with_parent: bool = False,
) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. `on_ready` gets the address, once the model
    is loaded and the next request will be answered. With `exit_with_parent` it also ends, at once,
    when the process that started it is gone: an engine left behind by a killed gateway would keep
    the socket."""
    parent = os.getppid() if exit_with_parent else None
    prepare_environment(os.environ)
    told = telemetry or Telemetry()
    logs.configure(fmt=told.log_format)
    spans = _open_spans(told)
    try:
        emit = discard if spans is None else exporting(spans)
        fleet = build_fleet(
            settings,
            is_private=listen.uds is not None,
            drain_s=drain_s,
            emit=emit,
            vllm_metrics=told.vllm_metrics,
            cache=cache_folder(os.environ),
        )
        bound = _bind(listen)
    except StartFailed as error:
        return _refuse(error.message)
    try:
        return asyncio.run(_run(fleet, bound, on_ready or (lambda _: None), drain_s, parent))
    finally:
        bound.close()
        if listen.uds is not None:
            listen.uds.unlink(missing_ok=True)
        if spans is not None:
            spans.close()


def _open_spans(telemetry: Telemetry) -> SpanExport | None:
    if telemetry.otlp_endpoint is not None:
        sink: OtlpSink | FileSink = OtlpSink(telemetry.otlp_endpoint)
    elif telemetry.spans_file is not None:
        sink = FileSink(telemetry.spans_file)
    else:
        return None
    return SpanExport(sink, service_name=telemetry.service_name, service_version=_version())


def _version() -> str:
    try:
        return metadata.version("meterline")
    except metadata.PackageNotFoundError:  # run from a checkout
        return "0"


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: the drain comes first."""

    def install_signal_handlers(self) -> None:
        return


async def _run(
    fleet: Fleet,
    bound: socket.socket,
    on_ready: Callable[[str], None],
    drain_s: float,
    parent: int | None,
) -> int:
    config = uvicorn.Config(
        fleet, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )  # fmt: skip
    server = _Server(config)
    told_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_stop.set)
    serving = asyncio.create_task(server._serve([bound]))
    fleet.start()
    status = 0
    stopping = asyncio.create_task(told_to_stop.wait())
    orphaned = asyncio.create_task(_until_orphaned(parent, told_to_stop))
    loading = asyncio.create_task(fleet.loaded())
    await asyncio.wait({stopping, loading, serving}, return_when=asyncio.FIRST_COMPLETED)
    if loading.done() and loading.exception() is None:
        on_ready(_address(bound))
        ended = asyncio.create_task(fleet.ended())
        await asyncio.wait({stopping, ended, serving}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            status = 1  # a defect; the traceback is in the log, the supervisor starts a new one
        ended.cancel()
        await fleet.drain(0.0 if orphaned.done() else drain_s)
    elif loading.done():
        status = _refuse(_load_problem(loading.exception()))
    for task in (loading, stopping, orphaned):
        task.cancel()
    server.should_exit = True
    await serving
    await fleet.close()
    return status


async def _until_orphaned(parent: int | None, told_to_stop: asyncio.Event) -> None:
    """Returns when another process has become our parent; never, without one to watch."""
    if parent is None:
        await asyncio.Event().wait()
    while os.getppid() == parent:  # noqa: ASYNC110  # nothing tells a process this; it must look
        await asyncio.sleep(_PARENT_POLL_S)
    told_to_stop.set()


def _dtype(settings: EngineSettings) -> Dtype:
    """Of the CPU's decoders."""
    if settings.device == "cuda":
        if settings.weights != "file":
            raise StartFailed(f"weights = {settings.weights} needs a CPU: device = cpu")
        return "auto"
    if settings.dtype == "bfloat16":
        raise StartFailed("dtype = bfloat16: a CPU without it is slow at it; use auto")
    if settings.weights == "file":
        return settings.dtype
    if settings.dtype != "auto":
        raise StartFailed(
            f"weights = {settings.weights} and dtype = {settings.dtype} exclude each other"
        )
    return settings.weights


def _draft_file(speculative: Speculative, words: Tokenizer) -> Weights | None:
    """Raises StartFailed for a model that speaks of other tokens."""
    if speculative.method != "draft_model":
        return None
    if speculative.draft_model is None:
        raise StartFailed("speculative.method = draft_model needs speculative.draft_model")
    file = open_weights(speculative.draft_model)
    theirs = tokenizer.from_weights(file)
    same = theirs.size == words.size and all(
        theirs.token_bytes(token) == words.token_bytes(token) for token in range(words.size)
    )
    if not same:
        raise StartFailed(f"{file.path}: the draft model has another vocabulary than the model")
    return file


def _load(
    file: Weights,
    draft: Weights | None,
    words: Tokenizer,
    blocks: int,
    settings: EngineSettings,
    dtype: Dtype,
    cache: Path,
    loading: Loading,
) -> Runner:
    # Imported here and not above: torch takes seconds, and only the engine thread needs it.
    if settings.device == "cuda":
        return _load_on_gpu(file, blocks, settings)
    from backends.engine.draft import DraftModel
    from backends.engine.runner import CpuRunner

    runner = CpuRunner(
        file,
        kv_blocks=blocks,
        threads=settings.threads or default_threads(),
        dtype=dtype,
        kernels=settings.kernels,
        tools=Toolchain.of_this_machine(cache),
        progress=loading.at,
    )
    sys.stderr.write(f"meterline engine: {settings.name} computes with {runner.summary}\n")
    if draft is not None:
        second = CpuRunner(
            draft,
            kv_blocks=blocks,
            threads=settings.threads or default_threads(),
            dtype=settings.speculative.draft_dtype,
            kernels=settings.kernels,
            tools=Toolchain.of_this_machine(cache),
        )
        runner.drafter = DraftModel(second.decoder, second.facts, words)
        sys.stderr.write(f"meterline engine: {settings.name} drafts with {second.summary}\n")
    return runner


def _load_on_gpu(file: Weights, blocks: int, settings: EngineSettings) -> Runner:
    import torch

    from backends.engine.gpu.runner import open_on

    if not torch.cuda.is_available():
        raise StartFailed("device = cuda: torch sees no GPU here; use auto")
    named = "bfloat16" if settings.dtype == "auto" else settings.dtype
    runner = open_on(file, "cuda", getattr(torch, named), kv_blocks=blocks)
    sys.stderr.write(f"meterline engine: {settings.name} computes with {runner.summary}\n")
    return runner


def _load_problem(error: BaseException | None) -> str:
    match error:
        case StartFailed():
            return error.message
        case MemoryError():
            return "not enough memory for the weights and the KV pool: lower kv_memory_gb"
        case ImportError():
            return f"the engine needs its extra packages ({error}): pip install meterline[engine]"
        case _:
            return f"loading the model failed: {type(error).__name__}: {error}"


def default_threads() -> int:
    info = Path("/proc/cpuinfo")
    available = os.sched_getaffinity(0)
    return physical_cores(info.read_text() if info.exists() else "", available)


def _bind(listen: Listen) -> socket.socket:
    if listen.uds is not None:
        return _bind_unix(listen.uds)
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((listen.host, listen.port))
        bound.listen(1024)
    except OSError as error:
        bound.close()
        reason = "in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise ListenFailed(f"{listen.host}:{listen.port} cannot be used: {reason}") from error
    return bound


def _bind_unix(path: Path) -> socket.socket:
    """A socket file that nobody answers on is left over from a crash and is replaced."""
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise ListenFailed(f"{path} exists and is not a socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise ListenFailed(f"{path} is in use by another process")
        path.unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(str(path))
        path.chmod(0o600)
        bound.listen(1024)
    except OSError as error:
        bound.close()
        raise ListenFailed(f"{path} cannot be used: {error.strerror or error}") from error
    return bound


def _address(bound: socket.socket) -> str:
    if bound.family == socket.AF_UNIX:
        return f"unix://{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def _refuse(message: str) -> int:
    sys.stderr.write(f"meterline engine: {message}\n")
    return 2
