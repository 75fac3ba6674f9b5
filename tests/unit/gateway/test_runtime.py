"""Taking up a new config: whole or not at all, and what was replaced is given back."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from backends.base import ChatRequest, Event
from backends.settings import BackendSettings
from gateway.config import Config, ConfigInvalid, parse
from gateway.runtime import ConfigWatcher, RuntimeHolder
from telemetry.clock import SystemClock


class Fake:
    """A backend that only remembers whether it was closed."""

    provider = "fake"

    def __init__(self, settings: BackendSettings, keys: Sequence[str]) -> None:
        if settings.base_url == "http://bad":
            raise ValueError("a bad one")
        self.name = settings.name
        self.keys = keys
        self.closed = 0

    async def chat(self, request: ChatRequest, /) -> AsyncIterator[Event]:
        for event in ():
            yield event

    async def is_ready(self) -> bool:
        return True

    async def aclose(self) -> None:
        self.closed += 1


def described(*backends: tuple[str, str]) -> str:
    """A config with these backends (name, base URL), and a route `m` to the first."""
    tables = "".join(
        f'[[backends]]\nname = "{name}"\nkind = "openai"\nbase_url = "{url}"\n'
        for name, url in backends
    )
    first = backends[0][0]
    return f'{tables}[[routes]]\nmodel = "m"\ntargets = [{{ backend = "{first}" }}]\n'


def holder_of(text: str, built: list[Fake]) -> RuntimeHolder:
    def build(settings: BackendSettings, keys: Sequence[str]) -> Fake:
        built.append(Fake(settings, keys))
        return built[-1]

    return RuntimeHolder(
        parse(text.encode()),
        engines={},
        build=build,
        environment={},
        salt_key=b"salt",
        clock=SystemClock(),
    )


async def test_unchanged_backends_are_kept() -> None:
    """A reload keeps the connections of what did not change, and builds only what did."""
    built: list[Fake] = []
    holder = holder_of(described(("a", "http://a"), ("b", "http://b")), built)
    holder.reload(parse(described(("a", "http://a"), ("b", "http://c")).encode()))
    assert [fake.name for fake in built] == ["a", "b", "b"]
    assert holder.current.upstreams["a"].backend is built[0]
    assert holder.current.upstreams["b"].backend is built[2]
    await holder.aclose()


async def test_replaced_backends_are_closed_at_the_end() -> None:
    """What a reload replaced is kept for requests that began with it, and closed once, at the
    latest when the gateway stops."""
    built: list[Fake] = []
    holder = holder_of(described(("a", "http://a")), built)
    holder.reload(parse(described(("a", "http://b")).encode()))
    await asyncio.sleep(0)
    assert [fake.closed for fake in built] == [0, 0]
    await holder.aclose()
    assert [fake.closed for fake in built] == [1, 1]


async def test_a_config_that_cannot_be_built_changes_nothing() -> None:
    """When one backend cannot be built the old runtime stays, whole, and the reason is given."""
    built: list[Fake] = []
    holder = holder_of(described(("a", "http://a")), built)
    before = holder.current
    with pytest.raises(ConfigInvalid, match="a bad one"):
        holder.reload(parse(described(("a", "http://b"), ("b", "http://bad")).encode()))
    assert holder.current is before
    assert built[0].closed == 0
    await holder.aclose()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


async def test_watcher_survives_what_fails_after_a_reload(tmp_path: Path) -> None:
    """If prices cannot be published the config is in force all the same; it is tried again until it
    succeeds, and the next change is still seen."""
    path = tmp_path / "meterline.toml"
    path.write_text(described(("a", "http://a")))
    holder = holder_of(path.read_text(), [])
    published: list[Config] = []
    failures = 2

    async def publish(config: Config) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError("the database is away")
        published.append(config)

    watcher = ConfigWatcher(path, holder, after=publish, every_s=0.01)
    watching = asyncio.create_task(watcher.run())
    await asyncio.sleep(0)
    path.write_text(described(("b", "http://b")))
    await until(lambda: "b" in holder.current.upstreams)
    await until(lambda: len(published) == 1)
    path.write_text(described(("longer", "http://c")))
    await until(lambda: len(published) == 2)
    assert published[-1] == holder.current.config
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await holder.aclose()


async def test_options_of_the_command_line_hold_for_a_reload(tmp_path: Path) -> None:
    """What the command line changed is changed again in a reloaded file, so that it is no change
    that needs a restart."""
    path = tmp_path / "meterline.toml"
    path.write_text(described(("a", "http://a")))

    def adapt(config: Config) -> Config:
        return parse(f"[server]\nport = 9\n{path.read_text()}".encode()) if config else config

    holder = holder_of(f"[server]\nport = 9\n{path.read_text()}", [])
    path.write_text(described(("b", "http://b")))
    await ConfigWatcher(path, holder).reload()
    assert (holder.reloads, holder.reload_failures) == (0, 1)
    await ConfigWatcher(path, holder, adapt=adapt).reload()
    assert (holder.reloads, holder.reload_failures) == (1, 1)
    assert "b" in holder.current.upstreams
    await holder.aclose()
