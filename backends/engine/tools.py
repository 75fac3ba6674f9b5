"""Tools in a chat request: what is offered, what must be called, and how calls will be written.

Pure. `auto` leaves the model free and reads its calls in its own family's form. A forced call
(`required`, or a named function) is guided by a grammar made of the tools' own schemas, so that
it always parses and always fits.
"""

import re
from typing import Any, Final

import msgspec
from msgspec import Struct

from backends.engine.chat import Tool
from backends.engine.errors import RequestInvalid
from backends.engine.guided import Constraint
from backends.engine.toolcalls import (
    CallParser,
    Family,
    arguments_parser,
    array_parser,
    parser_of,
)

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class FunctionTool(Struct, frozen=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Struct, frozen=True):
    type: str
    function: FunctionTool | None = None


class NamedFunction(Struct, frozen=True):
    name: str


class NamedTool(Struct, frozen=True):
    function: NamedFunction
    type: str = "function"


class ToolUse(Struct, frozen=True, kw_only=True):
    """How one answer uses tools. Without a constraint the model is free to call or not."""

    tools: tuple[Tool, ...]
    names: frozenset[str]
    family: Family
    forced: str | None = None  # the one function that is called
    is_parallel: bool = True
    constraint: Constraint | None = None

    def parser(self) -> CallParser:
        """For one choice."""
        if self.forced is not None:
            return arguments_parser(self.forced)
        return array_parser() if self.constraint else parser_of(self.family, self.names)


def tool_use(
    bodies: list[ToolBody] | None,
    choice: "str | NamedTool | None",
    *,
    is_parallel: bool,
    family: Family,
) -> ToolUse | None:
    """None: this answer has no tools. RequestInvalid says which field is wrong."""
    functions = [_function(body, i) for i, body in enumerate(bodies or ())]
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise RequestInvalid(
            "tool_choice is none, auto, required or a function", param="tool_choice"
        )
    if not functions:
        if choice in (None, "none", "auto"):
            return None
        raise RequestInvalid("tool_choice needs tools", param="tool_choice")
    if len(functions) > MAX_TOOLS:
        raise RequestInvalid(f"at most {MAX_TOOLS} tools", param="tools")
    names = frozenset(function.name for function in functions)
    if len(names) < len(functions):
        raise RequestInvalid("two tools have the same name", param="tools")
    if choice == "none":
        return None
    use = ToolUse(
        tools=tuple(
            {"type": "function", "function": msgspec.to_builtins(function)}
            for function in functions
        ),
        names=names,
        family=family,
        is_parallel=is_parallel,
    )
    match choice:
        case NamedTool(function=NamedFunction(name=name)):
            if name not in names:
                raise RequestInvalid(
                    f"`{name[:64]}` is none of the tools", param="tool_choice.function.name"
                )
            [wanted] = [function for function in functions if function.name == name]
            return msgspec.structs.replace(
                use, forced=name, constraint=_constraint(_parameters(wanted))
            )
        case "required":
            return msgspec.structs.replace(use, constraint=_any_of(functions, is_parallel))
        case _:
            return use


def _function(body: ToolBody, i: int) -> FunctionTool:
    if body.type != "function" or body.function is None:
        raise RequestInvalid("tools are of type function", param=f"tools[{i}].type")
    if not _NAME.fullmatch(body.function.name):
        raise RequestInvalid(
            "a function's name has 1 to 64 letters, digits, _, . or -",
            param=f"tools[{i}].function.name",
        )
    return body.function


def _parameters(function: FunctionTool) -> dict[str, Any]:
    return function.parameters or {"type": "object", "properties": {}}


def _constraint(schema: dict[str, Any]) -> Constraint:
    return Constraint("json", msgspec.json.encode(schema).decode(), "tools")


def _any_of(functions: list[FunctionTool], is_parallel: bool) -> Constraint:
    """An array of calls. Definitions move to the root, where their references point."""
    calls = []
    root: dict[str, Any] = {}
    for i, function in enumerate(functions):
        parameters = dict(_parameters(function))
        for key in ("$defs", "definitions"):
            for name, definition in (parameters.pop(key, None) or {}).items():
                if root.setdefault(key, {}).setdefault(name, definition) != definition:
                    raise RequestInvalid(
                        f"`{name}` is defined differently in two tools",
                        param=f"tools[{i}].function.parameters.{key}",
                    )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    array = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    if not is_parallel:
        array["maxItems"] = 1
    return _constraint({**array, **root})
