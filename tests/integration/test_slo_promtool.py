"""The generated rules under Prometheus' own judge, and the judge under suspicion."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.__main__ import main
from telemetry.slo import promtool, proofs, rules
from telemetry.slo.bundle import compiled
from telemetry.slo.declaration import SloFile, parse

STOCK = Path(__file__).parents[2] / "deploy" / "slo.yaml"

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool comes with the Debian package prometheus"
)


@pytest.fixture(scope="module")
def stock() -> SloFile:
    """What we ship."""
    return parse(STOCK.read_text())


@pytest.mark.parametrize(
    "part", ["percentiles", "platform", "chat-availability", "ttft-1k-4k", "ledger-freshness"]
)
def test_generated_tests_pass(stock: SloFile, part: str) -> None:
    """promtool reads the rules, and each alert comes when it must and not otherwise."""
    files = {path: text for path, text in compiled(stock).items() if part in path}
    verdict = promtool.check(files, promtool.find())
    assert verdict.passed, verdict.said


def test_every_slip_of_the_pen_is_noticed(stock: SloFile) -> None:
    """Each rule of an objective with one thing wrong fails at least one generated test: a matcher
    left out, a threshold doubled, a condition dropped."""
    slo = next(one for one in stock.slos if one.name == "chat-availability")
    left, tried = promtool.survivors(
        rules.groups(slo, stock), proofs.cases(slo, stock), promtool.find()
    )
    assert left == []
    assert tried > 30


def test_the_command_compiles_and_refuses(tmp_path: Path) -> None:
    """One line and exit code 2 for a mistake; files for a declaration that is right."""
    run = CliRunner().invoke
    done = run(main, ["slo", "compile", str(STOCK), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "rules" / "platform.yaml").exists()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(STOCK.read_text().replace("1.5s", "1.6s"))
    refused = run(main, ["slo", "compile", str(wrong), "--out", str(tmp_path)])
    assert refused.exit_code == 2
    assert "no bucket bound" in refused.output
    assert "Traceback" not in refused.output
