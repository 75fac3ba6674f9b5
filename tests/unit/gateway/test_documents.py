"""The documents say what the code does: examples load, every code and module is described."""

import re
from pathlib import Path

from backends import base
from backends.base import BackendError
from gateway import config_reference, errors
from gateway.config import load
from gateway.errors import GatewayError

ROOT = Path(__file__).parents[3]


def _leaves(kind: type) -> list[type]:
    return [kind] + [leaf for child in kind.__subclasses__() for leaf in _leaves(child)]


def test_every_error_code_is_described() -> None:
    """docs/reference/errors.md has a row for each code that a client can see."""
    page = (ROOT / "docs/reference/errors.md").read_text()
    assert errors and base  # both trees are loaded
    codes = {leaf.code for leaf in _leaves(GatewayError)} | {
        leaf.code for leaf in _leaves(BackendError)
    }
    assert [code for code in sorted(codes) if f"`{code}`" not in page] == []


def test_the_example_config_is_valid() -> None:
    """What we tell operators to start from has no mistake in it."""
    config = load(ROOT / "deploy/meterline.example.toml")
    assert {route.model for route in config.routes} == {"assistant", "small"}


def test_the_config_reference_is_current() -> None:
    """The generated page and schema are those of the types."""
    assert (ROOT / config_reference.MARKDOWN).read_text() == config_reference.markdown()
    assert (ROOT / config_reference.SCHEMA).read_text() == config_reference.schema()


def test_every_module_is_on_the_map() -> None:
    """A newcomer finds each module of the first level in docs/architecture.md."""
    page = (ROOT / "docs/architecture.md").read_text()
    missing = [
        f"{room}/{path.name}"
        for room in ("gateway", "backends", "telemetry")
        for path in (ROOT / room).glob("*.py")
        if path.name != "__init__.py" and f"`{path.name}`" not in page
    ]
    assert missing == []


def test_links_between_documents_resolve() -> None:
    """No relative link of README or docs points to nothing."""
    broken = [
        f"{page.name}: {target}"
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []
