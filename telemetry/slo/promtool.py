"""`promtool`, the judge of rules and of their tests: it comes with Prometheus.

Nothing here decides anything: files are written into a folder of their own, the program is run, and
what it says is handed back.
"""

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct

from telemetry.slo.bundle import rule_file, test_file
from telemetry.slo.mutants import Mutant, mutants
from telemetry.slo.proofs import Case
from telemetry.slo.rules import Group

_LIMIT_S = 600
_AT_ONCE = 2


class PromtoolMissing(RuntimeError):
    """There is no promtool to be found."""


class Verdict(Struct, frozen=True):
    """Whether it passed, and what promtool said."""

    passed: bool
    said: str


def find(name: str = "promtool") -> str:
    """Where it is. PromtoolMissing: it is not installed."""
    found = shutil.which(name)
    if found is None:
        raise PromtoolMissing(f"{name} is not installed; it comes with Prometheus")
    return found


def check(files: Mapping[str, str], tool: str) -> Verdict:
    """Rules and tests of a bundle: the rules are read, then each test file is run."""
    with tempfile.TemporaryDirectory(prefix="meterline-slo-") as name:
        folder = Path(name)
        for path, text in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        rules = sorted(path for path in files if path.startswith("rules/"))
        tests = sorted(path for path in files if path.startswith("tests/"))
        verdict = _run([tool, "check", "rules", *rules], folder)
        if not verdict.passed or not tests:
            return verdict
        return _run([tool, "test", "rules", *tests], folder)


def survivors(groups: Sequence[Group], cases: Sequence[Case], tool: str) -> tuple[list[str], int]:
    """The mutants of these rules that no test notices, and how many mutants there are. The cases
    are tried one by one, the quick ones first, until one fails."""
    ordered = sorted(cases, key=lambda case: case.evaluated_s)

    def is_noticed(mutant: Mutant) -> bool:
        return any(_notices(case, mutant, tool) for case in ordered)

    every = list(mutants(groups))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        noticed = list(pool.map(is_noticed, every))
    left = [one.wrong for one, seen in zip(every, noticed, strict=True) if not seen]
    return left, len(every)


def _notices(case: Case, mutant: Mutant, tool: str) -> bool:
    asked = tuple(one for one in case.expected if one.subject in mutant.outputs)
    if not asked:
        return False
    narrowed = msgspec.structs.replace(case, expected=asked)
    with tempfile.TemporaryDirectory(prefix="meterline-slo-") as name:
        folder = Path(name)
        (folder / "rules.yaml").write_text(rule_file(mutant.groups), encoding="utf-8")
        text = test_file("rules.yaml", [narrowed], mutant.groups)
        (folder / "test.yaml").write_text(text, encoding="utf-8")
        return not _run([tool, "test", "rules", "test.yaml"], folder).passed


def _run(command: list[str], folder: Path) -> Verdict:
    done = subprocess.run(  # noqa: S603  # a list of ours, no shell
        command, cwd=folder, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    return Verdict(done.returncode == 0, (done.stdout + done.stderr).strip())
