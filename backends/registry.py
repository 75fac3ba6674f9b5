"""From a `[[backends]]` or `[[engines]]` table to a backend: the one place that knows the kinds.

Modules of a kind are imported when it is first built. An engine is reached as any OpenAI server
is, over a socket, so nothing here imports torch. Invariant: what is built holds connections of
its own and gives them back in `aclose`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from backends import egress
from backends.base import Backend
from backends.settings import BackendKind, BackendSettings, Dialect, EngineSettings
from backends.transport import Client
from telemetry import usage
from telemetry.record import Surface

if TYPE_CHECKING:
    from backends.openai_compat import EngineServer
    from backends.supervisor import EngineTelemetry, Supervised

ENGINE_PROVIDER: Final = "meterline.engine"


Factory = Callable[[BackendSettings, str | None], Backend]


def build(settings: BackendSettings, api_key: str | None) -> Backend:
    """The backend of one `[[backends]]` table; `api_key` is the secret its reference resolves to.
    ValueError says what is wrong with the table."""
    return _FACTORIES[settings.kind](settings, api_key)


def provider_of(settings: BackendSettings) -> str:
    """Whose answers these are, in traces and price lists."""
    return settings.provider or _PROVIDERS[settings.kind]


def dialect(settings: BackendSettings) -> Dialect:
    """What this backend understands. OpenAI itself refuses `max_tokens` for its newer models, and
    many of the servers that speak its API know nothing else."""
    own = _SPEAKS.get(settings.kind) if settings.surfaces is None else frozenset(settings.surfaces)
    is_openai = provider_of(settings) == _PROVIDERS["openai"]
    return Dialect(
        speaks=Dialect().speaks if own is None else own,
        limit_field="max_completion_tokens" if is_openai else "max_tokens",
        max_tokens=settings.default_max_tokens,
    )


def build_engine(
    settings: EngineSettings, socket_path: Path, telemetry: "EngineTelemetry | None" = None
) -> "Supervised":
    """The backend of one `[[engines]]` table with its child process, not started yet: call
    `process.start()`. `telemetry`: where the child's spans go; None: nowhere."""
    from backends.supervisor import EngineProcess, Supervised

    process = EngineProcess(settings, socket_path, telemetry=telemetry)
    return Supervised(_on_socket(settings, socket_path), process)


def attend_engine(settings: EngineSettings, socket_path: Path) -> "Supervised":
    """The backend of one `[[engines]]` table whose process belongs to our parent."""
    from backends.attended import AttendedEngine
    from backends.supervisor import Supervised

    return Supervised(_on_socket(settings, socket_path), AttendedEngine(settings.name, socket_path))


def _on_socket(settings: EngineSettings, socket_path: Path) -> "EngineServer":
    described = BackendSettings(
        name=settings.name,
        kind="engine",
        base_url=f"{egress.UNIX_SCHEME}{socket_path}",
        gpu=settings.gpu,
    )
    return _engine(described, None)


def _openai(settings: BackendSettings, api_key: str | None) -> Backend:
    from backends.openai_compat import OpenAICompatible

    return OpenAICompatible(
        settings,
        api_key,
        _client(settings),
        normalise=usage.from_openai,
        provider=provider_of(settings),
    )


def _anthropic(settings: BackendSettings, api_key: str | None) -> Backend:
    from backends.anthropic import Anthropic

    return Anthropic(settings, api_key, _client(settings), provider=provider_of(settings))


def _engine(settings: BackendSettings, api_key: str | None) -> "EngineServer":
    from backends.openai_compat import EngineServer

    return EngineServer(
        settings,
        api_key,
        _client(settings),
        normalise=usage.from_engine,
        provider=provider_of(settings),
    )


def _scripted(settings: BackendSettings, _: str | None) -> Backend:
    from backends.scripted import Scripted

    return Scripted(settings, normalise=usage.from_openai)


def _client(settings: BackendSettings) -> Client:
    if settings.base_url is None:
        raise ValueError(f"backend {settings.name} needs a base_url")
    return egress.pool(
        settings.base_url,
        allow_private=settings.allow_private,
        max_connections=settings.max_concurrency,
    )


_PROVIDERS: Final[dict[BackendKind, str]] = {
    "openai": "openai",
    "anthropic": "anthropic",
    "engine": ENGINE_PROVIDER,
    "scripted": "scripted",
}
_SPEAKS: Final[dict[BackendKind, frozenset[Surface]]] = {
    "anthropic": frozenset({"messages", "count_tokens"}),
}
_FACTORIES: Final[dict[BackendKind, Factory]] = {
    "openai": _openai,
    "anthropic": _anthropic,
    "engine": _engine,
    "scripted": _scripted,
}
