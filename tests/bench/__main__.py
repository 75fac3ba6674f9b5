"""`make bench`: every benchmark, or `make bench ARGS=gateway` for one. Never part of the tests."""

import importlib
import sys

from tests.bench.report import machine

ALL = ("gateway", "admission", "engine")


def main(names: list[str]) -> None:
    """Run and print."""
    sys.stdout.write(f"{machine()}\n")
    for name in names or ALL:
        importlib.import_module(f"tests.bench.{name}").run().show()


if __name__ == "__main__":
    main(sys.argv[1:])
