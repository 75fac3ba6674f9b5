"""`docs/reference/config.md` and the JSON schema, written from the types of `config.py`.

`python -m gateway.config_reference --write | --check`
"""

import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from gateway.config import COLD, Config

MARKDOWN = Path("docs/reference/config.md")
SCHEMA = Path("docs/reference/config.schema.json")

_HEAD = """\
# Configuration

Written from the types in `gateway/config.py`; do not edit. `meterline check meterline.toml` prints
every problem of a file at once and the effective configuration. A changed file, or `SIGHUP`, swaps
the whole configuration or keeps the old one and logs why; tables marked *restart* are only read at
start. Secrets are references: `env:NAME` or `file:PATH`. A schema for editors is
[config.schema.json](config.schema.json).
"""


def markdown() -> str:
    """The reference page."""
    parts = [_HEAD]
    for field in msgspec.structs.fields(Config):
        kind, _, _ = _unwrap(field.type)
        many = get_origin(field.type) is tuple
        title = f"[[{field.name}]]" if many else f"[{field.name}]"
        note = " *restart*" if field.name in COLD else ""
        parts.append(f"## `{title}`{note}\n\n{_first(kind)}\n\n{_table(kind)}")
        for name, nested in _nested(kind):
            parts.append(f"### `{field.name}.{name}`\n\n{_first(nested)}\n\n{_table(nested)}")
    return "\n".join(parts)


def schema() -> str:
    """JSON schema, for editors."""
    data = msgspec.json.schema(Config)
    return msgspec.json.format(msgspec.json.encode(data, order="deterministic")).decode() + "\n"


def _table(kind: Any) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in msgspec.structs.fields(kind):
        inner, shown, text = _unwrap(field.type)
        if isinstance(inner, type) and issubclass(inner, Struct):
            text = text or _first(inner)
        rows.append(f"| `{field.name}` | {shown} | {_default(field)} | {text} |")
    return "\n".join(rows) + "\n"


def _nested(kind: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for field in msgspec.structs.fields(kind):
        inner, _, _ = _unwrap(field.type)
        if isinstance(inner, type) and issubclass(inner, Struct):
            yield f"{path}{field.name}", inner
            yield from _nested(inner, f"{path}{field.name}.")


def _unwrap(kind: Any) -> tuple[Any, str, str]:
    """(the Struct or scalar inside, how it is shown, its description)."""
    text = ""
    if get_origin(kind) is Annotated:
        kind, *metas = get_args(kind)
        text = next((m.description for m in metas if isinstance(m, Meta) and m.description), "")
    shown = _shown(kind)
    while get_args(kind) and get_origin(kind) is not Annotated:
        present = [arg for arg in get_args(kind) if arg not in (type(None), Ellipsis)]
        structs = [arg for arg in present if isinstance(arg, type) and issubclass(arg, Struct)]
        if not structs:
            break
        kind = structs[0]
    return kind, shown, text


def _shown(kind: Any) -> str:
    names = {str: "text", int: "integer", float: "number", bool: "true or false", Decimal: "number"}
    if get_origin(kind) is Annotated:
        return _shown(get_args(kind)[0])
    if kind in names:
        return names[kind]
    if isinstance(kind, type) and issubclass(kind, Struct):
        return "table"
    if get_origin(kind) is tuple:
        of = get_args(kind)[0]
        is_table = isinstance(of, type) and issubclass(of, Struct)
        return "list of tables" if is_table else f"list of {_shown(of)}"
    args = [arg for arg in get_args(kind) if arg is not type(None)]
    if args and all(isinstance(arg, str) for arg in args):
        return " \\| ".join(f"`{arg}`" for arg in args)
    return " \\| ".join(_shown(arg) for arg in args)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "*required*"
    if field.default is None or field.default == ():
        return "–"
    if field.default is msgspec.NODEFAULT or isinstance(field.default, Struct):
        return "see below"
    return f"`{msgspec.json.encode(field.default).decode()}`"


def _first(kind: Any) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def main(arguments: list[str]) -> int:
    """Write the files, or say which one is not current."""
    files = {MARKDOWN: markdown(), SCHEMA: schema()}
    if arguments == ["--write"]:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return 0
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        sys.stderr.write(f"{path} is not current: run `make docs`\n")
    return 1 if stale else 0


__all__ = ["main", "markdown", "schema"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
