"""The JSON Schema of a tool's parameters: checked at load, resolved only inside itself.

Nothing here ever fetches a schema, from the network or from disk: a `$ref` is `#` or `#/json/pointer`.
A reference that leads nowhere, or only to itself, is refused rather than taken to accept anything.
"""

from __future__ import annotations

import json
from typing import Any, cast
from urllib.parse import unquote

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry

from ..runtime.errors import ToolFileError
from ..runtime.json_schema import children, escape
from .strict_json import json_name, pointer

# The keywords whose schemas look at the same value as the schema around them.
_SAME_VALUE = {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"}
_UNSUPPORTED = ("$dynamicRef", "$recursiveRef")


def check_parameters(schema: Any, where: str) -> dict[str, Any]:
    """`schema` with `"type": "object"`, once it is known to be sound; ToolFileError with its pointer."""
    if not isinstance(schema, dict):
        raise ToolFileError(where, json_name(schema), "a JSON Schema object")
    if schema.get("type", "object") != "object":
        found = f"type {json.dumps(schema['type'])}"
        raise ToolFileError(f"{where}/type", found, '"object", because arguments come by name')
    sound: dict[str, Any] = {"type": "object", **schema}
    _check_meta(sound, sound, where)
    _check_references(sound, where)
    _check_required(sound, where)
    return sound


def parameter_validator(schema: dict[str, Any]) -> Validator:
    """A validator for `schema` that reaches nothing outside it. `format` is not asserted."""
    kind = _draft(schema) or Draft202012Validator
    return cast(Validator, kind(schema, registry=Registry()))


def resolve(root: dict[str, Any], ref: Any) -> Any:
    """The subschema that `ref` names inside `root`. LookupError if it is remote or leads nowhere."""
    return _find(root, ref)[1]


def _find(root: dict[str, Any], ref: Any) -> tuple[str, Any]:
    """The JSON pointer that `ref` stands for, and the subschema there; LookupError says why there is none."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise LookupError("references are local and never fetched")
    place = ""
    node: Any = root
    for part in unquote(ref).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        place += f"/{escape(name)}"
        key = int(name) if isinstance(node, list) and name.isdecimal() else name
        try:
            node = node[key]
        except (KeyError, IndexError, TypeError):
            raise LookupError(f"there is no {place}") from None
    if not isinstance(node, (dict, bool)):
        raise LookupError(f"{place} is {json_name(node)}, not a schema")  # noqa: TRY004  one error for callers
    return place, node


def _draft(schema: dict[str, Any]) -> Any:
    """The validator class for the draft that `$schema` names, 2020-12 without one; None if unknown."""
    unknown: Any = None
    return validator_for(schema, default=unknown) if "$schema" in schema else Draft202012Validator


def _check_meta(schema: Any, root: dict[str, Any], where: str) -> None:
    kind = _draft(root)
    if kind is None:
        raise ToolFileError(
            f"{where}/$schema", f"{root['$schema']!r}", "a published JSON Schema draft", "leave it out"
        )
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ToolFileError(
            where + pointer(tuple(error.absolute_path)), error.message, "a valid JSON Schema"
        ) from None
    except RecursionError:
        raise ToolFileError(where, "nested too deep", "a schema of fewer levels") from None


def _check_references(root: dict[str, Any], where: str) -> None:
    """Follow every subschema and every reference; refuse those that lead nowhere or round in a circle."""
    same_value: dict[str, list[str]] = {}
    todo: list[tuple[str, Any]] = [("", root)]
    while todo:
        place, node = todo.pop()
        if place in same_value:
            continue
        onward = same_value[place] = []
        if not isinstance(node, dict):
            continue
        for step, inner in children(node):
            todo.append((place + step, inner))
            if step.split("/")[1] in _SAME_VALUE:
                onward.append(place + step)
        _refuse_unsupported(node, place, where)
        if "$ref" in node:
            target, schema = _target(root, node["$ref"], f"{where}{place}/$ref")
            if target not in same_value:
                _check_meta(schema, root, where + target)
            todo.append((target, schema))
            onward.append(target)
    circle = _circle(same_value)
    if circle is not None:
        raise ToolFileError(where + circle, "a schema that refers to itself without end")


def _refuse_unsupported(node: dict[str, Any], place: str, where: str) -> None:
    for key in _UNSUPPORTED:
        if key in node:
            raise ToolFileError(f"{where}{place}/{key}", "not supported", remedy="use a plain $ref")
    if place and isinstance(node.get("$id"), str):
        raise ToolFileError(f"{where}{place}/$id", "an embedded resource", remedy="leave it out")


def _target(root: dict[str, Any], ref: Any, where: str) -> tuple[str, Any]:
    try:
        return _find(root, ref)
    except LookupError as error:
        found = f"{json.dumps(ref)} cannot be resolved: {error.args[0]}"
        raise ToolFileError(
            where, found, "# or #/json/pointer of a schema in this tool's parameters"
        ) from None


def _circle(edges: dict[str, list[str]]) -> str | None:
    """A place from which one can go on for ever; None if every way ends."""
    left = dict(edges)
    while left:
        ends = [place for place, onward in left.items() if not any(other in left for other in onward)]
        if not ends:
            return min(left, key=len)
        for place in ends:
            del left[place]
    return None


def _check_required(schema: dict[str, Any], where: str) -> None:
    """A required argument that nothing declares could never be given: objects are closed in the grammar."""
    if any(key in schema for key in ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")):
        return
    if schema.get("additionalProperties", False) is not False:
        return
    for index, name in enumerate(schema.get("required", [])):
        if name not in schema.get("properties", {}):
            found = f"{json.dumps(name)} is required and not declared"
            raise ToolFileError(f"{where}/required/{index}", found, "a name that stands in properties")
