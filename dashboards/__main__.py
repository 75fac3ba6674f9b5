"""`python -m dashboards build [--check]`."""

import sys

import click

from dashboards.build import differences, write


@click.group()
def main() -> None:
    """Grafana dashboards as code. Example: python -m dashboards build --check"""


@main.command()
@click.option("--check", "is_check", is_flag=True, help="Write nothing; exit 1 if out of date.")
def build(is_check: bool) -> None:
    """Write dashboards/generated/*.json."""
    if not is_check:
        write()
        return
    changed = differences()
    if changed:
        click.echo(
            f"not up to date: {', '.join(changed)}; run `python -m dashboards build`", err=True
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
