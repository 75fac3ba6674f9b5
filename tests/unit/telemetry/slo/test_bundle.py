"""The files that a declaration becomes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from telemetry.slo.bundle import compiled, differences, write
from telemetry.slo.declaration import SloFile, parse

ROOT = Path(__file__).parents[4]
STOCK = ROOT / "deploy" / "slo.yaml"
RUNBOOKS = ROOT / "docs" / "runbooks"


@pytest.fixture(scope="module")
def stock() -> SloFile:
    """What we ship."""
    return parse(STOCK.read_text())


def rules(files: dict[str, str]) -> list[dict[str, Any]]:
    """All rules of a bundle."""
    return [
        rule
        for path, text in files.items()
        if path.startswith("rules/")
        for group in msgspec.yaml.decode(text)["groups"]
        for rule in group["rules"]
    ]


def test_each_alert_has_a_runbook_that_exists(stock: SloFile) -> None:
    """A link in an alert at night must not be dead."""
    files = compiled(stock)
    alerts = [rule for rule in rules(files) if "alert" in rule]
    assert alerts
    for rule in alerts:
        page = rule["annotations"]["runbook_url"].rpartition("/")[2]
        assert f"runbooks/{page}" in files, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["labels"]["service"] == stock.service


def test_the_same_declaration_gives_the_same_bytes(stock: SloFile) -> None:
    """Otherwise a check for drift would cry wolf."""
    assert compiled(stock) == compiled(parse(STOCK.read_text()))


def test_a_runbook_that_someone_wrote_in_is_kept(stock: SloFile, tmp_path: Path) -> None:
    """Stubs are a start; what people add is theirs. Rules that are gone are removed."""
    files = compiled(stock)
    write(files, tmp_path)
    page = tmp_path / "runbooks" / "chat-availability.md"
    page.write_text("Call Ada first.\n")
    stale = tmp_path / "rules" / "slo-old.yaml"
    stale.write_text((tmp_path / "rules" / "platform.yaml").read_text())
    mine = tmp_path / "rules" / "mine.yaml"
    mine.write_text("groups: []\n")
    assert write(files, tmp_path) == []
    assert page.read_text() == "Call Ada first.\n"
    assert not stale.exists()
    assert mine.exists()
    assert differences(files, tmp_path) == []
    (tmp_path / "rules" / "platform.yaml").write_text("groups: []\n")
    assert differences(files, tmp_path) == ["rules/platform.yaml"]


def test_what_is_shipped_is_what_the_declaration_gives(stock: SloFile) -> None:
    """deploy/prometheus is generated: `make check` fails when it was edited or forgotten."""
    assert differences(compiled(stock), STOCK.parent / "prometheus", RUNBOOKS) == []


def test_teams_get_receivers_of_their_own(stock: SloFile) -> None:
    """Pages and tickets of a team go to that team; all others to the common two."""
    config = msgspec.yaml.decode(compiled(stock, teams=["search"])["alertmanager.yaml"])
    assert [one["name"] for one in config["receivers"]] == [
        *("page", "ticket", "page-search", "ticket-search")
    ]
    assert config["route"]["routes"][0] == {
        "receiver": "page-search",
        "matchers": ['severity="page"', 'team="search"'],
    }
