"""Arguments as a model wrote them -> arguments as the tool's schema wants them, or what is wrong with them.

Validated against the whole schema before anything runs. What is valid as given is passed on untouched.
Otherwise only what the schema asks for is changed, and only without loss: "5" where an integer is wanted
becomes 5, JSON text where an array or an object is wanted is decoded, null for an optional argument is the
same as leaving it out. "3.14" is no integer and "thing" no boolean: those are problems, told to the model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from jsonschema import ValidationError
from jsonschema.protocols import Validator
from referencing.exceptions import Unresolvable

from .strict_json import StrictJsonError, find_unfit, json_name, parse_json
from .tool_schema import parameter_validator, resolve
from .tools import Tool, ToolResult

_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,999})")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?")
_MAX_FITS = 2000  # attempts to fit a value, over all branches of a schema
_SHOWN = 3  # problems told at once
_WANTED = "expected text and numbers that JSON can hold"
_REFUSED = 2  # the exit code of a call that did not run


@dataclass(frozen=True)
class ArgumentProblem:
    """Why a call did not run: text for the model that names field, expected and got."""

    text: str


def check_arguments(tool: Tool, arguments: object) -> dict[str, Any] | ArgumentProblem:
    """The arguments to run `tool` with, or a problem. `arguments` is not changed; None means none."""
    given = _whole(arguments)
    if not isinstance(given, dict):
        return ArgumentProblem(f"arguments: expected an object, got {_shown(given)}")
    unfit = find_unfit(given)
    if unfit:
        return ArgumentProblem(f"{_field(unfit[0])}: {_WANTED}, got {unfit[1]}")
    try:
        fitted = _Fit(tool.parameters).fit(given, tool.parameters)
        errors = list(parameter_validator(tool.parameters).iter_errors(fitted))
    except (ArithmeticError, LookupError, RecursionError, Unresolvable) as error:
        return ArgumentProblem(f"arguments: cannot be checked against the schema ({type(error).__name__})")
    if errors:
        return ArgumentProblem(_describe(errors, tool))
    problem = shell_problem(tool, fitted)
    return ArgumentProblem(problem) if problem else fitted


def shell_problem(tool: Tool, arguments: Mapping[str, Any]) -> str | None:
    """Why no shell variable or command line can hold an argument of a command tool; None if all can be."""
    for name in tool.passed:
        value = arguments.get(name)
        unfit = find_unfit(value)
        if unfit:
            return f"{_field((name, *unfit[0]))}: {_WANTED}, got {unfit[1]}"
        if isinstance(value, str) and "\0" in value:
            return f"{name}: expected text without NUL characters, got one at character {value.index(chr(0))}"
    return None


def problem_result(tool: Tool, problem: ArgumentProblem) -> ToolResult:
    """The result of a call with wrong arguments: nothing ran."""
    return ToolResult(tool.name, "", f"not run, wrong arguments: {problem.text}", _REFUSED)


def unknown_tool_result(name: str, known: Iterable[str]) -> ToolResult:
    """The result of a call to a tool that does not exist; lists those that do."""
    names = ", ".join(known) or "none"
    return ToolResult(_clean(name)[:80], "", f"no tool {_json(name)}; the tools are: {names}", _REFUSED)


def _whole(arguments: object) -> object:
    """The arguments as an object, where they came as nothing or as JSON text of one."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        try:
            value = parse_json(arguments)
        except StrictJsonError:
            return arguments
        return value if isinstance(value, dict) else arguments
    return arguments


class _Fit:
    """Finds the value nearest to a given one that a schema admits."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._validator: Validator = parameter_validator(root)
        self._left = _MAX_FITS

    def fit(self, value: Any, schema: Any) -> Any:
        """`value` if `schema` admits it, else a lossless reading of it that `schema` admits.

        If there is none: `value` with its members fitted as far as they can be, so that the error that
        follows is about the member that is wrong.
        """
        if not isinstance(schema, dict) or self._admits(schema, value) or self._left <= 0:
            return value
        self._left -= 1
        nearest = self._combine(value, schema)
        if self._admits(schema, nearest):
            return nearest
        if isinstance(value, str):
            kinds = _kinds(schema)
            for reading in _decoded(value, kinds):
                fitted = self._combine(reading, schema)
                if self._admits(schema, fitted):
                    return fitted
                if "string" not in kinds:
                    nearest = fitted
        return nearest

    def _admits(self, schema: Any, value: Any) -> bool:
        return bool(self._validator.evolve(schema=schema).is_valid(value))

    def _combine(self, value: Any, schema: dict[str, Any]) -> Any:
        """`value` fitted to each part of `schema`: its members, then the schemas it is composed of."""
        value = self._members(value, schema)
        if "$ref" in schema:
            value = self.fit(value, resolve(self._root, schema["$ref"]))
        for part in schema.get("allOf", []):
            value = self.fit(value, part)
        for key in ("anyOf", "oneOf"):
            for branch in schema.get(key, []):
                fitted = self.fit(value, branch)
                if self._admits({key: schema[key]}, fitted):
                    value = fitted
                    break
        return value

    def _members(self, value: Any, schema: dict[str, Any]) -> Any:
        if isinstance(value, list):
            first, rest = schema.get("prefixItems", []), schema.get("items", True)
            schemas = [*first, *[rest] * max(0, len(value) - len(first))]
            return [self.fit(item, inner) for item, inner in zip(value, schemas, strict=False)]
        if not isinstance(value, dict):
            return value
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        required = schema.get("required", [])
        result = {}
        for name, item in value.items():
            inner = properties.get(name, others)
            optional = name in properties and name not in required
            if item is not None or not optional or self._admits(inner, None):
                result[name] = self.fit(item, inner)
        return result


def _kinds(schema: dict[str, Any]) -> list[str]:
    """The JSON Schema type names that `schema` itself asks for; by its `enum` or `const` without `type`."""
    kinds = schema.get("type")
    if kinds is None:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        return [json_name(value).split()[-1] for value in values]
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _decoded(text: str, kinds: Collection[str]) -> Iterable[Any]:
    """What `text` says as a value of one of `kinds`, if nothing is lost by reading it so."""
    if text in ("true", "false") and "boolean" in kinds:
        yield text == "true"
    if _INTEGER.fullmatch(text) and ("integer" in kinds or "number" in kinds):
        yield int(text)
    elif _NUMBER.fullmatch(text) and "number" in kinds:
        number = float(text)
        if math.isfinite(number) and Decimal(repr(number)) == Decimal(text):
            yield number
    opening = text.lstrip()[:1]
    if (opening == "[" and "array" in kinds) or (opening == "{" and "object" in kinds):
        try:
            yield parse_json(text)
        except StrictJsonError:
            return


def _describe(errors: Iterable[ValidationError], tool: Tool) -> str:
    """The first few problems, each with its field, what was expected and what was given."""
    faults: list[str] = []
    for error in sorted(errors, key=lambda error: [str(part) for part in error.absolute_path]):
        for fault in _faults(error, tool.parameters):
            if fault not in faults:
                faults.append(fault)
    more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return "; ".join(faults[:_SHOWN]) + more


def _faults(error: ValidationError, root: dict[str, Any]) -> Iterable[str]:
    path = tuple(error.absolute_path)
    keyword = error.validator
    given: Any = error.instance
    value: Any = error.validator_value
    schema = error.schema if isinstance(error.schema, dict) else {}
    properties = schema.get("properties", {})
    if keyword == "required":
        for name in value:
            if name not in given:
                yield f"{_field((*path, name))}: expected {_expected(properties.get(name, True), root)}, got nothing"
    elif keyword == "additionalProperties" and value is False:
        names = ", ".join(properties) or "none"
        for name in given:
            if name not in properties:
                yield f"{_field((*path, name))}: no such argument, expected one of: {names}"
    elif branch := _near_miss(error):
        for inner in branch:
            yield from _faults(inner, root)
    elif keyword in ("type", "enum", "const", "anyOf", "oneOf"):
        yield f"{_field(path)}: expected {_expected({keyword: value}, root)}, got {_shown(given)}"
    else:
        yield f"{_field(path)}: expected {keyword} {_json(value)}, got {_shown(given)}"


def _near_miss(error: ValidationError) -> list[ValidationError]:
    """What is wrong by the first branch of a union that wants a value of this type; empty if none does."""
    branches: dict[Any, list[ValidationError]] = {}
    for inner in error.context or []:
        branches.setdefault(inner.schema_path[0], []).append(inner)
    for errors in branches.values():
        if not any(inner.validator == "type" and not inner.path for inner in errors):
            return errors
    return []


def _expected(schema: Any, root: dict[str, Any], depth: int = 0) -> str:
    """A few words for what `schema` admits."""
    if not isinstance(schema, dict):
        return "a value"
    if "$ref" in schema and depth < _SHOWN:
        return _expected(resolve(root, schema["$ref"]), root, depth + 1)
    if "enum" in schema:
        return "one of " + ", ".join(_json(value) for value in schema["enum"])
    if "const" in schema:
        return _json(schema["const"])
    for key in ("anyOf", "oneOf"):
        if key in schema and depth < _SHOWN:
            words = dict.fromkeys(_expected(branch, root, depth + 1) for branch in schema[key])
            return " or ".join(words) + (" (exactly one of them)" if key == "oneOf" else "")
    kinds = _kinds(schema)
    return " or ".join(kinds) if kinds else "a value"


def _field(path: Sequence[str | int]) -> str:
    """A path as one writes it: `options.names[2]`; `arguments` for the whole."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return _clean(text) or "arguments"


def _shown(value: Any) -> str:
    """The type and the beginning of a value, for an error text."""
    return "null" if value is None else f"{json_name(value).split()[-1]} {_json(value)}"


def _json(value: Any, limit: int = 80) -> str:
    text = _clean(json.dumps(value, ensure_ascii=False, default=repr))
    return text if len(text) <= limit else f"{text[:limit]}…"


def _clean(text: str) -> str:
    """`text` without half surrogate pairs, which no UTF-8 can hold."""
    return text.encode("utf-8", "backslashreplace").decode()
