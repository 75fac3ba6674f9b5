"""From dashboard functions to committed JSON, and the check that the two agree."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.engine import engine
from dashboards.ledger import ledger
from dashboards.overview import overview

GENERATED = Path(__file__).parent / "generated"
DASHBOARDS: Mapping[str, Callable[[], dashboard.Dashboard]] = {
    "overview": overview,
    "engine": engine,
    "ledger": ledger,
}


def rendered() -> dict[str, str]:
    """File name to JSON, the same bytes on every run."""
    return {
        f"{name}.json": json.dumps(make().build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
        for name, make in DASHBOARDS.items()
    }


def write(folder: Path = GENERATED) -> None:
    """Write all dashboards, and remove files that no dashboard makes any more."""
    files = rendered()
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.json"):
        if stale.name not in files:
            stale.unlink()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def differences(folder: Path = GENERATED) -> list[str]:
    """Names of files that are missing, stale or not what the code makes now."""
    files = rendered()
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    return sorted(
        name for name in files.keys() | found.keys() if files.get(name) != found.get(name)
    )
