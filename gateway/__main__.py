"""`meterline`: argument parsing only. Each command is a module of `gateway/commands`, imported
when it is used, so that `meterline --help` is instant."""

import importlib
from typing import Any, Final

import click
from typing_extensions import override

COMMANDS: Final = {
    "serve": "serve",
    "check": "check",
    "migrate": "migrate",
    "tenant": "tenant",
    "key": "key",
    "limit": "limit",
    "budget": "budget",
    "price": "price",
    "bill": "bill",
    "period": "period",
    "report": "report",
    "reconcile": "reconcile",
    "slo": "slo",
    "explain": "explain",
    "engine": "engine",
}


class _Lazy(click.Group):
    """Looks a command's module up when the command is named."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"gateway.commands.{COMMANDS[cmd_name]}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="meterline", prog_name="meterline")
@click.pass_context
def main(context: click.Context) -> None:
    """An inference gateway, its engine, and a ledger that adds up to the bill.

    \b
    Example:
      meterline serve
      meterline report chargeback --by tenant,model
    """
    from gateway.commands.files import open_store

    context.obj = open_store


def run(arguments: list[str] | None = None, **extra: Any) -> None:
    """For tests and embedding: as `main`, with arguments given."""
    main.main(arguments, prog_name="meterline", **extra)


if __name__ == "__main__":
    main(prog_name="meterline")
