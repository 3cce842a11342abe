"""The JSON Schema of a tool's parameters: checked at load, resolved only inside itself.

Nothing here ever fetches a schema, from the network or from disk: a `$ref` is `#` or `#/json/pointer`.
A reference that leads nowhere, or only to itself, is refused rather than taken to accept anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast
from urllib.parse import unquote

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry

from ..runtime.errors import ToolFileError
from .strict_json import Path, json_name, pointer

# Where schemas stand inside a schema, over all drafts; True: it looks at the same value as the one around it.
_ONE = {
    "additionalItems": False, "additionalProperties": False, "contains": False, "contentSchema": False,
    "else": True, "if": True, "items": False, "not": True, "propertyNames": False, "then": True,
    "unevaluatedItems": False, "unevaluatedProperties": False,
}  # fmt: skip
_LIST = {"allOf": True, "anyOf": True, "items": False, "oneOf": True, "prefixItems": False}
_MAP = {
    "$defs": False, "definitions": False, "dependencies": True, "dependentSchemas": True,
    "patternProperties": False, "properties": False,
}  # fmt: skip
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
    return resolve_path(root, reference_path(root, ref))


def reference_path(root: dict[str, Any], ref: Any) -> Path:
    """The path of a local reference; LookupError says why it is none."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise LookupError("references are local and never fetched")
    path: list[str | int] = []
    node: Any = root
    for part in unquote(ref).split("/")[1:]:
        key: str | int = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and str(key).isdecimal():
            key = int(key)
        try:
            node = node[key]
        except (KeyError, IndexError, TypeError):
            raise LookupError(f"there is no {pointer((*path, key))}") from None
        path.append(key)
    if not isinstance(node, (dict, bool)):
        raise LookupError(f"{pointer(tuple(path))} is {json_name(node)}, not a schema")  # noqa: TRY004  one error for the caller
    return tuple(path)


def resolve_path(root: Any, path: Path) -> Any:
    """The value at `path`, which must exist."""
    for key in path:
        root = root[key]
    return root


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
    same_place: dict[Path, list[Path]] = {}
    todo: list[Path] = [()]
    while todo:
        path = todo.pop()
        node = resolve_path(root, path)
        if path in same_place:
            continue
        same_place[path] = []
        if not isinstance(node, dict):
            continue
        for step, same in _children(node):
            todo.append((*path, *step))
            if same:
                same_place[path].append((*path, *step))
        _refuse_unsupported(node, path, where)
        if "$ref" in node:
            target = _target(root, node["$ref"], f"{where}{pointer(path)}/$ref")
            if target not in same_place:
                _check_meta(resolve_path(root, target), root, where + pointer(target))
            todo.append(target)
            same_place[path].append(target)
    circle = _circle(same_place)
    if circle is not None:
        raise ToolFileError(where + pointer(circle), "a schema that refers to itself without end")


def _children(node: dict[str, Any]) -> Iterator[tuple[Path, bool]]:
    """The steps to the schemas inside `node`, each with whether it looks at the same value."""
    for key, value in node.items():
        if isinstance(value, (dict, bool)) and key in _ONE:
            yield (key,), _ONE[key]
        elif isinstance(value, list) and key in _LIST:
            yield from (((key, index), _LIST[key]) for index in range(len(value)))
        elif isinstance(value, dict) and key in _MAP:
            inner = (name for name, item in value.items() if isinstance(item, (dict, bool)))
            yield from (((key, name), _MAP[key]) for name in inner)


def _refuse_unsupported(node: dict[str, Any], path: Path, where: str) -> None:
    for key in _UNSUPPORTED:
        if key in node:
            raise ToolFileError(f"{where}{pointer(path)}/{key}", "not supported", remedy="use a plain $ref")
    if path and isinstance(node.get("$id"), str):
        raise ToolFileError(f"{where}{pointer(path)}/$id", "an embedded resource", remedy="leave it out")


def _target(root: dict[str, Any], ref: Any, where: str) -> Path:
    try:
        return reference_path(root, ref)
    except LookupError as error:
        found = f"{json.dumps(ref)} cannot be resolved: {error.args[0]}"
        raise ToolFileError(
            where, found, "# or #/json/pointer of a schema in this tool's parameters"
        ) from None


def _circle(edges: dict[Path, list[Path]]) -> Path | None:
    """A path from which one can go on for ever; None if every way ends."""
    left = dict(edges)
    while left:
        ends = [path for path, targets in left.items() if not any(target in left for target in targets)]
        if not ends:
            return min(left, key=lambda path: (len(path), pointer(path)))
        for path in ends:
            del left[path]
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
