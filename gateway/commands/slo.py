"""`meterline slo …`: objectives into rules, alerts, their tests and runbooks."""

from collections.abc import Sequence
from pathlib import Path

import click

from gateway.commands import BadInput, Refused
from telemetry.slo import promtool, proofs, rules
from telemetry.slo.bundle import compiled, differences
from telemetry.slo.bundle import write as write_files
from telemetry.slo.declaration import SloFile, SloInvalid, parse
from telemetry.slo.openslo import exported, imported, written
from telemetry.slo.promtool import PromtoolMissing

_file = click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
_team = click.option("--team", "teams", multiple=True, help="A team with receivers of its own.")


@click.group()
def slo() -> None:
    """Service level objectives: Prometheus rules and their tests from one declaration.

    \b
    Example:
      meterline slo compile slo.yaml --out prometheus
      meterline slo test slo.yaml
    """


@slo.command(name="compile")
@_file
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="The folder for rules, tests, runbooks and alertmanager.yaml.",
)
@click.option(
    "--runbooks",
    "pages",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder for runbooks; default: runbooks in --out.",
)
@click.option("--check", "is_check", is_flag=True, help="Write nothing; exit 1 if out of date.")
@_team
def compile_command(
    file: Path, out: Path, pages: Path | None, is_check: bool, teams: Sequence[str]
) -> None:
    """Write rules, alerts, promtool tests, runbooks and Alertmanager's config.

    Runbooks that exist are kept: they are yours to write in.

    \b
    Example:
      meterline slo compile slo.yaml --out prometheus
      meterline slo compile slo.yaml --out prometheus --check
    """
    files = compiled(_read(file), teams=teams)
    if is_check:
        changed = differences(files, out, pages)
        if changed:
            raise Refused(
                f"not up to date: {', '.join(changed)}; run `meterline slo compile {file} "
                f"--out {out}`"
            )
        return
    try:
        changed = write_files(files, out, pages)
    except OSError as error:
        raise BadInput(f"{error.filename or out}: {error.strerror}") from error
    click.echo(f"{len(files)} files in {out}, {len(changed)} of them written.")


@slo.command(name="test")
@_file
@click.option(
    "--mutations", "with_mutants", is_flag=True, help="Also spoil each rule and see it noticed."
)
def test_command(file: Path, with_mutants: bool) -> None:
    """Run the generated tests with promtool, which comes with Prometheus.

    With --mutations each rule is spoiled in turn (a matcher left out, a threshold doubled, a
    condition dropped), and a test must notice: minutes, not seconds.

    \b
    Example:
      meterline slo test slo.yaml
    """
    found = _read(file)
    try:
        tool = promtool.find()
    except PromtoolMissing as error:
        raise BadInput(str(error)) from error
    verdict = promtool.check(compiled(found), tool)
    if not verdict.passed:
        raise Refused(verdict.said)
    click.echo(f"{len(found.slos)} objectives, {len(found.percentiles)} percentiles: tests pass.")
    if with_mutants:
        _spoil(found, tool)


def _spoil(found: SloFile, tool: str) -> None:
    missed = []
    for one in found.slos:
        left, tried = promtool.survivors(rules.groups(one, found), proofs.cases(one, found), tool)
        click.echo(f"{one.name}: {tried - len(left)} of {tried} mutants noticed.")
        missed += [f"{one.name}: {what}" for what in left]
    if missed:
        raise Refused("not noticed: " + "; ".join(missed))


@slo.command(name="export")
@_file
def export_command(file: Path) -> None:
    """Print the objectives as OpenSLO v1 documents.

    \b
    Example:
      meterline slo export slo.yaml > openslo.yaml
    """
    click.echo(exported(_read(file)), nl=False)


@slo.command(name="import")
@_file
def import_command(file: Path) -> None:
    """Print OpenSLO v1 documents as a declaration of ours.

    \b
    Example:
      meterline slo import openslo.yaml > slo.yaml
    """
    try:
        click.echo(written(imported(_text(file))), nl=False)
    except SloInvalid as error:
        raise _refusal(file, error) from error


def _read(file: Path) -> SloFile:
    try:
        return parse(_text(file))
    except SloInvalid as error:
        raise _refusal(file, error) from error


def _refusal(file: Path, error: SloInvalid) -> BadInput:
    return BadInput("\n".join(f"{file}: {problem}" for problem in error.problems))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{file}: not UTF-8 text") from error
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}") from error
