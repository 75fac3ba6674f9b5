"""`meterline.toml`, as written. Reading it finds every problem at once; building what it describes
is `runtime.py`'s work. Secrets stay references here, so a `Config` may be printed.

A key that is not below is an error: a setting that nothing enforces is worse than none.
"""

import difflib
import tomllib
import types
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from backends.settings import BackendSettings, EngineSettings
from gateway.allowances import BudgetSettings, LimitSettings, check_budget, check_limit
from gateway.errors import BadRequest
from telemetry.settings import TelemetrySettings

Json = Any


class ConfigInvalid(Exception):
    """The file cannot be used. `problems` holds one line for each mistake, all of them."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class ServerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the gateway listens. Changing these needs a restart."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="TCP port; 0 picks a free one.")] = 8080
    workers: Annotated[
        int,
        Meta(ge=1, le=64, description="Processes that share the port, for machines with cores."),
    ] = 1
    worker_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="With several workers: the first of as many further ports in a row, one a "
            "worker, where each one's /metrics is; 0 picks free ones. /metrics/targets lists them.",
        ),
    ] = 0
    max_body_mb: Annotated[
        int, Meta(ge=1, le=1024, description="Largest request body, megabytes (10^6 bytes).")
    ] = 32
    body_timeout_s: Annotated[
        float,
        Meta(gt=0, description="Seconds that a request's body may take, and one more per 16 KB."),
    ] = 30.0
    admin_key: Annotated[
        str | None,
        Meta(
            description="Secret reference (env:NAME or file:PATH) of the admin key. Absent: one is "
            "made at first start, on loopback only."
        ),
    ] = None
    key_pepper: Annotated[
        str | None,
        Meta(
            description="Secret reference of the pepper that API keys are hashed with. All "
            "replicas need the same. Absent: kept in a file in the data folder."
        ),
    ] = None
    request_timeout_s: Annotated[
        float, Meta(gt=0, description="Longest life of a request, seconds, all attempts included.")
    ] = 600.0
    idempotency_ttl_s: Annotated[
        float, Meta(gt=0, description="Seconds that the answer to an Idempotency-Key is kept.")
    ] = 3600.0
    idempotency_mb: Annotated[
        int, Meta(ge=1, description="Megabytes of such answers that a process keeps at most.")
    ] = 64
    ping_s: Annotated[
        float,
        Meta(ge=0, description="Silent seconds in a stream until a comment is sent; 0: never."),
    ] = 15.0
    drain_s: Annotated[
        float, Meta(ge=0, description="Seconds that running streams get to finish at shutdown.")
    ] = 30.0


class StoreSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where tenants, keys and the ledger are kept. Changing these needs a restart."""

    data_dir: Annotated[
        str, Meta(description="Folder of the embedded database, logs and local secrets.")
    ] = "meterline-data"
    database: Annotated[
        str | None,
        Meta(
            description="sqlite:///FILE or postgresql+asyncpg://…, or a secret reference to it. "
            "Absent: SQLite in data_dir."
        ),
    ] = None
    wal_dir: Annotated[
        str | None,
        Meta(description="Folder of the write-ahead log, on a local disk. Absent: in data_dir."),
    ] = None
    redis: Annotated[
        str | None,
        Meta(
            description="redis://, rediss:// or unix:// URL of the counters that all replicas "
            "share, or a secret reference to it. Absent: counted in this process."
        ),
    ] = None


Need = Literal["tools", "json_schema", "json_object", "logprobs", "n", "embeddings", "completions"]


class TargetSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One place where a route's requests can go."""

    backend: Annotated[str, Meta(description="Name of a backend or an engine.")]
    model: Annotated[
        str | None, Meta(description="Name of the model there. Absent: the route's own.")
    ] = None
    weight: Annotated[
        int, Meta(ge=0, le=1_000_000, description="Share of first attempts; 0: only a fallback.")
    ] = 1
    lacks: Annotated[
        tuple[Need, ...],
        Meta(description="What this model cannot do there: such requests do not go to it."),
    ] = ()


class RouteSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What clients ask for, and where it goes: first by weight, then the others in order."""

    model: Annotated[str, Meta(min_length=1, max_length=256, description="Model clients name.")]
    targets: Annotated[tuple[TargetSettings, ...], Meta(min_length=1, description="At least one.")]
    attempts: Annotated[
        Annotated[int, Meta(ge=1, le=10)] | None,
        Meta(
            description="Tries per request at most, all targets together. More than there are "
            "targets: those that may have recovered are asked again, after a pause. Absent: each "
            "target once."
        ),
    ] = None


class HealthSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a failing backend is left alone, and for how long."""

    failures: Annotated[
        int, Meta(ge=1, description="Failures in a row after which a backend is left alone.")
    ] = 5
    open_s: Annotated[
        float, Meta(gt=0, description="Seconds until one request tries it again.")
    ] = 1.0
    open_max_s: Annotated[
        float, Meta(gt=0, description="Each failed try doubles the seconds, up to these.")
    ] = 15.0
    credential_s: Annotated[
        float, Meta(gt=0, description="Seconds that a refused credential is not used.")
    ] = 30.0
    limit_s: Annotated[
        float, Meta(gt=0, description="Seconds after a 429 that does not say when to come again.")
    ] = 1.0


class ResponseSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long and how much of `/v1/responses` is kept for `previous_response_id`."""

    keep_days: Annotated[
        float, Meta(gt=0, le=3650, description="Days that a stored response can be used.")
    ] = 30.0
    tenant_mb: Annotated[
        int,
        Meta(ge=0, description="Megabytes kept for one tenant; the oldest go first. 0: none."),
    ] = 64


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    server: ServerSettings = ServerSettings()
    store: StoreSettings = StoreSettings()
    backends: tuple[BackendSettings, ...] = ()
    engines: tuple[EngineSettings, ...] = ()
    routes: tuple[RouteSettings, ...] = ()
    health: HealthSettings = HealthSettings()
    limits: LimitSettings = LimitSettings()
    budgets: BudgetSettings = BudgetSettings()
    responses: ResponseSettings = ResponseSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @property
    def database_url(self) -> str:
        """As written, or the embedded SQLite. May be a secret reference."""
        return self.store.database or f"sqlite:///{Path(self.store.data_dir) / 'meterline.db'}"

    @property
    def wal_dir(self) -> Path:
        return Path(self.store.wal_dir or Path(self.store.data_dir) / "wal")


BUNDLED_MODEL = "smollm2-135m-instruct"
_SERVER_SECRETS = ("admin_key", "key_pepper")
COLD = ("server", "store", "engines", "telemetry")  # tables that only a restart can change


def embedded() -> Config:
    """What `meterline serve` runs without a file: the bundled model on the bundled engine."""
    target = TargetSettings(backend="local", model=BUNDLED_MODEL)
    return Config(
        engines=(EngineSettings(name="local", model=BUNDLED_MODEL),),
        routes=(
            RouteSettings(model="assistant", targets=(target,)),
            RouteSettings(model=BUNDLED_MODEL, targets=(target,)),
        ),
    )


def load(path: Path) -> Config:
    """Read the file, or raise ConfigInvalid with every problem in it."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigInvalid([f"{path}: cannot be read: {error.strerror}"]) from None
    return parse(text)


def parse(text: bytes) -> Config:
    """The config of a file's bytes. Problems of form and of meaning come in one list."""
    try:
        data = tomllib.loads(text.decode(), parse_float=Decimal)
    except UnicodeDecodeError:
        raise ConfigInvalid(["not UTF-8 text"]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigInvalid([f"not valid TOML: {error}"]) from None
    problems = list(_shape_problems(Config, data, ""))
    if problems:
        raise ConfigInvalid(problems + _reference_problems(data))
    config = msgspec.convert(data, Config)
    problems = _meaning_problems(config)
    if problems:
        raise ConfigInvalid(problems)
    return config


def _shape_problems(kind: Any, value: Json, path: str) -> Iterator[str]:
    """One line for each unknown key, missing key and wrong value below `path`."""
    kind, metas = _without_annotations(kind)
    if isinstance(kind, type) and issubclass(kind, Struct):
        if not isinstance(value, dict):
            yield f"{path}: expected a table"
            return
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        for key in value:
            if key not in fields:
                near = difflib.get_close_matches(key, fields, n=1)
                hint = f", did you mean `{near[0]}`?" if near else ""
                yield f"{_join(path, key)}: unknown key{hint}"
        for name, field in fields.items():
            if name in value:
                yield from _shape_problems(field.type, value[name], _join(path, name))
            elif field.required:
                yield f"{_join(path, name)}: missing"
    elif get_origin(kind) is tuple and _is_struct(get_args(kind)[0]):
        if not isinstance(value, list):
            yield f"{path}: expected a list of tables"
            return
        for index, item in enumerate(value):
            yield from _shape_problems(get_args(kind)[0], item, f"{path}[{index}]")
        if not value and any(meta.min_length for meta in metas):
            yield f"{path}: at least one is needed"
    else:
        full = Annotated[(kind, *metas)] if metas else kind
        try:
            msgspec.convert(value, full)
        except msgspec.ValidationError as error:
            yield f"{path}: {_plain_message(error)}"


def _meaning_problems(config: Config) -> list[str]:
    """What the types cannot say: names that exist, names that differ, what a kind needs."""
    problems: list[str] = []
    names: set[str] = set()
    named = [(f"backends[{i}]", item.name) for i, item in enumerate(config.backends)]
    named += [(f"engines[{i}]", item.name) for i, item in enumerate(config.engines)]
    for where, name in named:
        if name in names:
            problems.append(f"{where}.name: `{name}` is used twice")
        names.add(name)
    for index, backend in enumerate(config.backends):
        where = f"backends[{index}]"
        if backend.kind in ("openai", "anthropic", "engine"):
            if backend.base_url is None:
                problems.append(f"{where}.base_url: missing, kind `{backend.kind}` needs it")
            elif not backend.base_url.startswith(("http://", "https://", "unix://")):
                problems.append(f"{where}.base_url: must start with http://, https:// or unix://")
        if backend.surfaces is not None and not backend.surfaces:
            problems.append(f"{where}.surfaces: at least one is needed")
        if backend.script is not None and backend.kind != "scripted":
            problems.append(f"{where}.script: only for kind `scripted`")
        if backend.api_key is not None and not is_reference(backend.api_key):
            problems.append(f"{where}.api_key: {REFERENCE_RULE}")
        if backend.price is not None and backend.gpu is not None:
            problems.append(f"{where}: either price (bought) or gpu (owned), not both")
    models: set[str] = set()
    for index, route in enumerate(config.routes):
        if route.model in models:
            problems.append(f"routes[{index}].model: `{route.model}` is routed twice")
        models.add(route.model)
        for place, target in enumerate(route.targets):
            if target.backend not in names:
                near = difflib.get_close_matches(target.backend, names, n=1)
                hint = f", did you mean `{near[0]}`?" if near else ""
                problems.append(
                    f"routes[{index}].targets[{place}].backend: "
                    f"no backend or engine named `{target.backend}`{hint}"
                )
        if all(target.weight == 0 for target in route.targets):
            problems.append(f"routes[{index}].targets: every weight is 0, so none is ever first")
    problems += _allowance_problems(config)
    redis = config.store.redis
    if redis and not is_reference(redis) and not redis.startswith(REDIS_SCHEMES):
        problems.append("store.redis: must start with redis://, rediss:// or unix://")
    for key in _SERVER_SECRETS:
        value = getattr(config.server, key)
        if value is not None and not is_reference(value):
            problems.append(f"server.{key}: {REFERENCE_RULE}")
    if config.server.admin_key is None and not is_loopback(config.server.host):
        problems.append(
            "server.admin_key: needed when listening beyond loopback "
            f"(host is {config.server.host}); set env:NAME or file:PATH"
        )
    return problems


def _allowance_problems(config: Config) -> list[str]:
    problems: list[str] = []
    for name in ("tenant", "key", "user"):
        dollars = getattr(config.limits, name).dollars_per_hour
        if dollars is not None:
            try:
                check_limit("tenant", None, "spend", dollars, 3600)
            except BadRequest as error:
                problems.append(f"limits.{name}.dollars_per_hour: {error.message}")
    for name in ("tenant_usd", "key_usd"):
        amount = getattr(config.budgets, name)
        try:
            check_budget("tenant", None, amount or Decimal(0), "month", None, config.budgets.zone)
        except BadRequest as error:
            key = "zone" if error.param == "zone" else name
            problems.append(f"budgets.{key}: {error.message}")
    return list(dict.fromkeys(problems))


def _reference_problems(data: Mapping[str, Json]) -> list[str]:
    """Route targets can be checked for existence even while other parts are malformed."""
    try:
        named = {str(item["name"]) for key in ("backends", "engines") for item in data.get(key, ())}
        targets = [
            (f"routes[{i}].targets[{j}].backend", str(target["backend"]))
            for i, route in enumerate(data.get("routes", ()))
            for j, target in enumerate(route.get("targets", ()))
            if "backend" in target
        ]
    except (TypeError, KeyError, AttributeError):
        return []  # too malformed to say; the shape problems already cover it
    return [
        f"{path}: no backend or engine named `{name}`"
        for path, name in targets
        if name not in named
    ]


REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
REFERENCE_RULE = "write a reference (env:NAME or file:PATH), never the secret itself"


def is_reference(value: str) -> bool:
    return value.startswith(("env:", "file:"))


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def resolve(reference: str, environment: Mapping[str, str]) -> str:
    """The secret behind `env:NAME` or `file:PATH`; anything else is returned as it is.

    Raises ConfigInvalid naming the reference, never what it holds."""
    kind, _, name = reference.partition(":")
    if kind == "env":
        if not environment.get(name):
            raise ConfigInvalid([f"{reference}: the environment variable is not set"])
        return environment[name]
    if kind == "file":
        try:
            secret = Path(name).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise ConfigInvalid([f"{reference}: cannot be read: {reason}"]) from None
        if not secret:
            raise ConfigInvalid([f"{reference}: the file is empty"])
        return secret
    return reference


def check_references(config: Config, environment: Mapping[str, str]) -> None:
    """Resolve every secret once, before anything is done. Raises ConfigInvalid with a line for
    each that cannot be had."""
    references = [(f"backends[{i}].api_key", b.api_key) for i, b in enumerate(config.backends)]
    references += [(f"server.{key}", getattr(config.server, key)) for key in _SERVER_SECRETS]
    references += [(f"store.{key}", getattr(config.store, key)) for key in ("database", "redis")]
    problems: list[str] = []
    for path, reference in references:
        try:
            if reference is not None:
                resolve(reference, environment)
        except ConfigInvalid as error:
            problems += [f"{path}: {line}" for line in error.problems]
    if problems:
        raise ConfigInvalid(problems)


def _without_annotations(kind: Any) -> tuple[Any, list[Meta]]:
    """The bare type and its msgspec metadata; `X | None` of a Struct is that Struct."""
    metas: list[Meta] = []
    if get_origin(kind) is Annotated:
        kind, *rest = get_args(kind)
        metas = [meta for meta in rest if isinstance(meta, Meta)]
    if get_origin(kind) in (Union, types.UnionType):
        present = [arg for arg in get_args(kind) if arg is not type(None)]
        if len(present) == 1 and _is_struct(present[0]):
            kind = present[0]
    return kind, metas


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _plain_message(error: msgspec.ValidationError) -> str:
    text = str(error).split(" - at ")[0]
    return text[:1].lower() + text[1:]


def masked(config: Config) -> dict[str, Json]:
    """The effective config for printing: passwords inside URLs are masked, references are not
    secrets."""
    data: dict[str, Json] = msgspec.to_builtins(config, str_keys=True)
    for key in ("database", "redis"):
        url = getattr(config.store, key)
        if url and "@" in url and not is_reference(url):
            head, _, tail = url.rpartition("@")
            scheme, _, user = head.partition("://")
            data["store"][key] = f"{scheme}://{user.split(':')[0]}:***@{tail}"
    return data
