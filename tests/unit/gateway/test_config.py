"""Reading `meterline.toml`: everything wrong with it, at once, with the path and what to do."""

from decimal import Decimal
from pathlib import Path

import msgspec
import pytest

from gateway import config_reference
from gateway.config import Config, ConfigInvalid, embedded, load, masked, parse, resolve

GOOD = b"""
[server]
port = 9000
[[backends]]
name = "big"
kind = "openai"
base_url = "https://api.example.com/v1"
api_key = "env:BIG_KEY"
price = { input = 0.1, output = "0.123456789" }
[[engines]]
name = "small"
gpu = { rate_per_hour = 2, count = 2 }
[[routes]]
model = "assistant"
targets = [{ backend = "small", model = "m", weight = 3 }, { backend = "big" }]
"""


def test_a_good_file_is_read_whole() -> None:
    """Values keep their types; decimal prices never pass through a float."""
    config = parse(GOOD)
    assert config.server.port == 9000
    assert config.backends[0].price is not None
    assert config.backends[0].price.input == Decimal("0.1")
    assert config.backends[0].price.output == Decimal("0.123456789")
    assert config.engines[0].gpu.rate_per_hour == 2
    assert config.routes[0].targets[1].model is None


def test_three_mistakes_give_three_lines() -> None:
    """A typo, a wrong type and a missing backend are all reported in one go."""
    with pytest.raises(ConfigInvalid) as caught:
        parse(
            b"[server]\nprot = 1\nmax_body_mb = 'x'\n"
            b"[[routes]]\nmodel = 'm'\ntargets = [{backend = 'gone'}]\n"
        )
    assert caught.value.problems == [
        "server.prot: unknown key, did you mean `port`?",
        "server.max_body_mb: expected `int`, got `str`",
        "routes[0].targets[0].backend: no backend or engine named `gone`",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = ", "not valid TOML"),
        ("nonsense = 1", "nonsense: unknown key"),
        ("server = 3", "server: expected a table"),
        ("backends = 3", "backends: expected a list of tables"),
        ("[[backends]]\nname = 'a'", "backends[0].kind: missing"),
        ("[[backends]]\nname = 'A b'\nkind = 'scripted'", "backends[0].name: expected `str`"),
        ("[[backends]]\nname = 'a'\nkind = 'openai'", "backends[0].base_url: missing"),
        (
            "[[backends]]\nname = 'a'\nkind = 'openai'\nbase_url = 'ftp://x'",
            "backends[0].base_url: must start with",
        ),
        (
            "[[backends]]\nname = 'a'\nkind = 'openai'\nbase_url = 'http://x'\napi_key = 'sk-1'",
            "backends[0].api_key: write a reference",
        ),
        (
            "[[backends]]\nname = 'a'\nkind = 'openai'\nbase_url = 'http://x'\n"
            "script = {output_tokens = 1}",
            "backends[0].script: only for kind",
        ),
        (
            "[[backends]]\nname = 'a'\nkind = 'scripted'\n[[engines]]\nname = 'a'",
            "engines[0].name: `a` is used twice",
        ),
        ("[[routes]]\nmodel = 'm'\ntargets = []", "routes[0].targets: at least one"),
        (
            "[[backends]]\nname='a'\nkind='scripted'\n"
            "[[routes]]\nmodel='m'\ntargets=[{backend='a', weight=0}]",
            "routes[0].targets: every weight is 0",
        ),
        (
            "[[backends]]\nname='a'\nkind='scripted'\n"
            "[[routes]]\nmodel='m'\ntargets=[{backend='a'}]\n"
            "[[routes]]\nmodel='m'\ntargets=[{backend='a'}]",
            "routes[1].model: `m` is routed twice",
        ),
        ("[server]\nhost = '0.0.0.0'", "server.admin_key: needed when listening beyond loopback"),
        ("[server]\nadmin_key = 'hunter2'", "server.admin_key: write a reference"),
        ("[telemetry]\nsampling = 1.5", "telemetry.sampling: expected `float` <= 1.0"),
        ("[[engines]]\nname = 'a'\nthreads = 0", "engines[0].threads: expected `int` >= 1"),
    ],
)
def test_each_mistake_is_named_by_its_path(text: str, problem: str) -> None:
    """One line, beginning with the path, that says what is wrong."""
    with pytest.raises(ConfigInvalid) as caught:
        parse(text.encode())
    assert any(line.startswith(problem) for line in caught.value.problems), caught.value.problems


def test_a_secret_in_the_file_is_not_repeated() -> None:
    """The refusal of a literal secret does not print it."""
    with pytest.raises(ConfigInvalid) as caught:
        parse(b"[server]\nadmin_key = 'hunter2-canary'")
    assert "hunter2-canary" not in str(caught.value)


def test_references_are_resolved_and_named_when_they_fail(tmp_path: Path) -> None:
    """env: and file: give the secret; a failing one names the reference, not the content."""
    secret = tmp_path / "s"
    secret.write_text("top\n")
    assert resolve(f"file:{secret}", {}) == "top"
    assert resolve("env:A", {"A": "b"}) == "b"
    assert resolve("postgresql://x", {}) == "postgresql://x"
    for reference in ("env:MISSING", f"file:{tmp_path}/none"):
        with pytest.raises(ConfigInvalid) as caught:
            resolve(reference, {})
        assert reference in str(caught.value)
    secret.write_text("")
    with pytest.raises(ConfigInvalid, match="empty"):
        resolve(f"file:{secret}", {})


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    """The path and the reason, nothing else."""
    with pytest.raises(ConfigInvalid) as caught:
        load(tmp_path / "none.toml")
    assert caught.value.problems == [
        f"{tmp_path}/none.toml: cannot be read: No such file or directory"
    ]


def test_printing_masks_the_database_password() -> None:
    """The effective config can be shown to anyone."""
    config = parse(b"[store]\ndatabase = 'postgresql+asyncpg://me:s3cret@db/x'")
    shown = msgspec.json.encode(masked(config)).decode()
    assert "s3cret" not in shown
    assert "me:***@db/x" in shown


def test_the_embedded_config_is_valid_when_written_as_a_file() -> None:
    """What runs without a file obeys the rules of a file."""
    data = msgspec.to_builtins(embedded(), builtin_types=(Decimal,))
    assert msgspec.convert(data, Config) == embedded()


def test_every_key_has_a_description_in_the_reference() -> None:
    """No row of the reference ends in an empty cell."""
    empty = [line for line in config_reference.markdown().splitlines() if line.endswith("|  |")]
    assert empty == []
