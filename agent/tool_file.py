"""tools.json -> Tools: every rule checked at load, every error one line that points into the file.

Accepts `{"tools": [...]}` or a bare array; each entry has a `function` block or the function's fields at
its own level. The fields that begin with `_` may stand in either place. Keys that mean nothing here
(`type`, `strict`, comments) are left alone. docs/tools.md is the reference for users.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

from ..runtime.errors import ToolFileError
from . import tool_settings
from .strict_json import StrictJsonError, find_unfit, json_name, parse_json, pointer
from .tool_schema import check_parameters
from .tools import Tool, is_identifier, is_shell_text, no_parameters, variable_problem

_MAX_BYTES = 4 << 20
_OURS = ("_exec", "_exec_args", "_exec_argv", "_handler")
_SETTINGS = ("_timeout", "_max_output", "_cwd", "_confirm", "_sandbox")


def load_tools(path: Path, handlers: Container[str] = ()) -> tuple[Tool, ...]:
    """The tools of a file, in its order. `handlers` are the names that `_handler` may use."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise ToolFileError(path, "no such file", "a tool file", "see docs/tools.md") from None
    except IsADirectoryError:
        raise ToolFileError(path, "a folder", "a JSON file") from None
    except (OSError, ValueError) as error:
        raise ToolFileError(path, f"cannot be read: {error}") from None
    if len(data) > _MAX_BYTES:
        raise ToolFileError(path, f"more than {_MAX_BYTES >> 20} MiB", "a tool file")
    try:
        document = parse_json(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ToolFileError(path, f"byte {error.start} is not UTF-8", "UTF-8 text") from None
    except StrictJsonError as error:
        raise ToolFileError(path, str(error), "one JSON document") from None
    return parse_tools(document, str(path), handlers)


def parse_tools(data: Any, where: str, handlers: Container[str] = ()) -> tuple[Tool, ...]:
    """The tools of a parsed document; `where` is what errors call it (a file name)."""
    problem = find_unfit(data)
    if problem:
        raise ToolFileError(f"{where}#{pointer(problem[0])}", problem[1], "JSON")
    root = f"{where}#"
    if isinstance(data, dict):
        if "tools" not in data:
            raise ToolFileError(root, 'an object without "tools"', '{"tools": [...]} or an array of tools')
        data, root = data["tools"], f"{root}/tools"
    if not isinstance(data, list):
        raise ToolFileError(root, json_name(data), "an array of tools")
    tools: dict[str, Tool] = {}
    places: dict[str, str] = {}
    for index, entry in enumerate(data):
        tool, place = _tool(entry, f"{root}/{index}", handlers)
        if tool.name in tools:
            raise ToolFileError(
                f"{place}/name", f"{tool.name!r} is taken by {places[tool.name]}", "unique names"
            )
        tools[tool.name], places[tool.name] = tool, place
    return tuple(tools.values())


def _tool(entry: Any, where: str, handlers: Container[str]) -> tuple[Tool, str]:
    """One entry as a Tool, and the place of its fields."""
    if not isinstance(entry, dict):
        raise ToolFileError(where, json_name(entry), "an object that describes a tool")
    block, place = entry, where
    if "function" in entry:
        block, place = entry["function"], f"{where}/function"
        if not isinstance(block, dict):
            raise ToolFileError(place, json_name(block), "an object with the function's name")
    name = _text(block, "name", place)
    if name is None:
        raise ToolFileError(f"{place}/name", "missing", "the tool's name")
    if not is_identifier(name):
        raise ToolFileError(f"{place}/name", repr(name), "letters, digits and _, no digit first")
    ours, at = _our_fields(entry, block, where, place)
    parameters = block.get("parameters")
    schema = no_parameters() if parameters is None else check_parameters(parameters, f"{place}/parameters")
    handler = _handler(name, ours, at, place, handlers)
    template = _exec(ours, at)
    argv = tool_settings.exec_argv(ours, at, schema.get("properties", {}))
    if template is None and argv is None and (handler is None or handler not in handlers):
        if handler is None:
            raise ToolFileError(
                place, f"tool {name} has no _exec, _exec_argv or _handler", remedy="add _exec"
            )
        remedy = f"add _exec, or register {handler!r} in the host program before loading"
        raise ToolFileError(
            f"{at['_handler']}/_handler", f"no handler {handler!r} is registered", remedy=remedy
        )
    names = _exec_args(ours, at, schema, place) if template is not None else ()
    tool = Tool(
        name,
        _text(block, "description", place),
        schema,
        template,
        names,
        handler,
        argv,
        timeout_s=tool_settings.timeout_s(ours, at),
        max_output=tool_settings.max_output(ours, at),
        cwd=tool_settings.cwd(ours, at),
        confirm=tool_settings.switch(ours, at, "_confirm"),
        sandbox=tool_settings.switch(ours, at, "_sandbox"),
    )
    return tool, place


def _our_fields(
    entry: dict[str, Any], block: dict[str, Any], where: str, place: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Our own fields with the place of each: from the block, else from the entry; null is absent."""
    values: dict[str, Any] = {}
    keys = (*_OURS, *_SETTINGS)
    at = dict.fromkeys(keys, place)
    for key in keys:
        inside = block.get(key)
        outside = entry.get(key) if entry is not block else None
        if inside is not None and outside is not None and inside != outside:
            raise ToolFileError(f"{where}/{key}", f"differs from the one in {place}", "one of the two")
        values[key] = inside if inside is not None else outside
        if inside is None and outside is not None:
            at[key] = where
    return values, at


def _handler(
    name: str, ours: dict[str, Any], at: dict[str, str], place: str, handlers: Container[str]
) -> str | None:
    handler = _text(ours, "_handler", at["_handler"])
    if handler is None and ours["_exec"] is None and ours["_exec_argv"] is None and name in handlers:
        return name  # the host provides a function of the tool's own name
    return handler


def _exec(ours: dict[str, Any], at: dict[str, str]) -> str | None:
    template = _text(ours, "_exec", at["_exec"])
    if template is not None and not template.strip():
        raise ToolFileError(f"{at['_exec']}/_exec", "empty", "a bash command")
    if template is not None and not is_shell_text(template):
        raise ToolFileError(f"{at['_exec']}/_exec", "a NUL character", "text that bash can hold")
    return template


def _exec_args(
    ours: dict[str, Any], at: dict[str, str], schema: dict[str, Any], place: str
) -> tuple[str, ...]:
    """The names that become shell variables: as listed, else all properties alphabetically."""
    names, where = ours["_exec_args"], f"{at['_exec_args']}/_exec_args"
    if names is None:
        for name in (declared := sorted(schema.get("properties", {}))):
            problem = variable_problem(name)
            if problem:
                where = f"{place}/parameters/properties{pointer((name,))}"
                raise ToolFileError(where, problem, remedy="rename it, or list the usable ones in _exec_args")
        return tuple(declared)
    if not isinstance(names, list):
        raise ToolFileError(where, json_name(names), "an array of argument names")
    for index, name in enumerate(names):
        problem = variable_problem(name)
        if problem:
            raise ToolFileError(f"{where}/{index}", f"{name!r} is {problem}", "an argument name", "rename it")
    declared = schema.get("properties", {})
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ToolFileError(f"{where}/{index}", f"{name!r} stands there twice", "each name once")
        if name not in declared and not schema.get("additionalProperties"):
            expected = f"one of {', '.join(declared) or 'none'}"
            raise ToolFileError(f"{where}/{index}", f"{name!r} is no declared argument", expected)
    return tuple(names)


def _text(fields: dict[str, Any], key: str, place: str) -> str | None:
    """A text field; null is the same as absent."""
    value = fields.get(key)
    if value is not None and not isinstance(value, str):
        raise ToolFileError(f"{place}/{key}", json_name(value), "a string")
    return value
