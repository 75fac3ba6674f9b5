"""From tables to backends."""

import subprocess
import sys
from pathlib import Path

import pytest

from backends.openai_compat import EngineServer, OpenAICompatible
from backends.registry import build, build_engine
from backends.scripted import Scripted
from backends.settings import BackendSettings, EngineSettings, Script
from tests.fakes.requests import ask, asking, final_of


@pytest.mark.parametrize(
    ("settings", "kind", "provider"),
    [
        (
            BackendSettings(name="a", kind="openai", base_url="https://api.example/v1"),
            OpenAICompatible,
            "openai",
        ),
        (
            BackendSettings(
                name="a", kind="openai", base_url="https://api.example/v1", provider="groq"
            ),
            OpenAICompatible,
            "groq",
        ),
        (
            BackendSettings(name="a", kind="engine", base_url="unix:///run/e.sock"),
            EngineServer,
            "meterline.engine",
        ),
        (BackendSettings(name="a", kind="scripted", script=Script()), Scripted, "scripted"),
        (BackendSettings(name="a", kind="scripted"), Scripted, "scripted"),
        (BackendSettings(name="a", kind="scripted", provider="openai"), Scripted, "openai"),
    ],
)
async def test_each_kind(settings: BackendSettings, kind: type, provider: str) -> None:
    """The kind decides the class, the table may name whose prices apply."""
    backend = build(settings, ("sk-1",))
    assert type(backend) is kind
    assert (backend.name, backend.provider) == ("a", provider)
    await backend.aclose()


@pytest.mark.parametrize("base_url", [None, "ftp://x", "https://u:p@x/v1"])
def test_a_table_that_cannot_work(base_url: str | None) -> None:
    """The mistake is named when the backend is built, not at the first request."""
    with pytest.raises(ValueError, match="base_url"):
        build(BackendSettings(name="a", kind="openai", base_url=base_url), ())


async def test_a_scripted_backend_works_as_built() -> None:
    """Built from its table alone, it answers."""
    backend = build(BackendSettings(name="a", kind="scripted"), ())
    assert final_of(await ask(backend, asking())).finish_reasons == ("stop",)
    await backend.aclose()


async def test_an_engine_is_built_with_its_process(tmp_path: Path) -> None:
    """Not started: who builds a runtime decides when."""
    backend = build_engine(EngineSettings(name="small"), tmp_path / "e.sock")
    assert (backend.name, backend.provider) == ("small", "meterline.engine")
    assert backend.process.state.phase == "starting"
    assert not await backend.is_ready()
    await backend.aclose()
    assert backend.process.state.phase == "stopped"


def test_building_backends_imports_no_torch() -> None:
    """The gateway's process stays small whatever kinds are configured."""
    code = (
        "import sys, backends.registry, backends.supervisor, backends.scripted;"
        "heavy = {'torch', 'uvicorn', 'litestar', 'sqlalchemy'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
