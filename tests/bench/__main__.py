"""`make bench`: every benchmark, or `make bench ONLY=gateway` for one. Never part of the tests."""

import importlib
import sys

from tests.bench.report import Table, machine

ALL = ("gateway", "admission", "engine")  # and, on demand: soak


def main(names: list[str]) -> None:
    """Run and print."""
    sys.stdout.write(f"{machine()}\n")
    for name in names or ALL:
        found: Table | list[Table] = importlib.import_module(f"tests.bench.{name}").run()
        for table in found if isinstance(found, list) else [found]:
            table.show()


if __name__ == "__main__":
    main(sys.argv[1:])
