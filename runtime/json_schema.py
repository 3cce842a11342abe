"""Walks over JSON Schemas (draft 2020-12): subschemas with their pointers, closing, moving references.

A grammar library names a keyword that it cannot compile, not where it stands; and data under `enum`,
`const`, `default` or `examples` may look like a schema without being one. So we walk ourselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_ONE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_MARK = "\0closed"  # no keyword can be called this
_MAP = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


def escape(name: str) -> str:
    """`name` as one step of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def children(schema: object) -> Iterator[tuple[str, object]]:
    """The direct subschemas of `schema`, each with its relative pointer such as `/properties/path`.

    Definitions come before what may refer to them.
    """
    if not isinstance(schema, Mapping):
        return
    for keyword in _MAP:
        entries = schema.get(keyword)
        if isinstance(entries, Mapping):
            for name, entry in entries.items():
                yield f"/{keyword}/{escape(name)}", entry
    for keyword in _ONE:
        if isinstance(schema.get(keyword), (Mapping, bool)):
            yield f"/{keyword}", schema[keyword]
    for keyword in _LIST:
        entries = schema.get(keyword)
        if isinstance(entries, list):
            for index, entry in enumerate(entries):
                yield f"/{keyword}/{index}", entry


def rewrite(schema: object, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy of `schema` in which `change` was applied to every subschema object, innermost first."""
    if not isinstance(schema, Mapping):
        return schema
    copy: dict[str, Any] = dict(schema)
    for keyword in _ONE:
        if keyword in copy:
            copy[keyword] = rewrite(copy[keyword], change)
    for keyword in _LIST:
        if isinstance(copy.get(keyword), list):
            copy[keyword] = [rewrite(entry, change) for entry in copy[keyword]]
    for keyword in _MAP:
        if isinstance(copy.get(keyword), Mapping):
            copy[keyword] = {name: rewrite(entry, change) for name, entry in copy[keyword].items()}
    return change(copy)


def closed(schema: object) -> Any:
    """`schema` with every object that does not speak of additional properties closed to them.

    A model that may invent properties does. Objects inside `allOf` stay as they are: they describe parts
    of one object, and closing each would forbid the others' properties.
    """

    def mark(entry: dict[str, Any]) -> dict[str, Any]:
        if isinstance(entry.get("allOf"), list):
            for part in entry["allOf"]:
                if isinstance(part, dict):
                    part.pop(_MARK, None)
            return entry
        is_object = entry.get("type") == "object" or "properties" in entry
        speaks = {"additionalProperties", "unevaluatedProperties", "patternProperties"} & entry.keys()
        return entry | {_MARK: True} if is_object and not speaks else entry

    def settle(entry: dict[str, Any]) -> dict[str, Any]:
        return entry | {"additionalProperties": False} if entry.pop(_MARK, False) else entry

    return rewrite(rewrite(schema, mark), settle)


def moved(schema: object, base: str) -> Any:
    """`schema` with its local references made to hold where it stands at pointer `base` (`#/$defs/x`)."""

    def move(entry: dict[str, Any]) -> dict[str, Any]:
        reference = entry.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            entry["$ref"] = base + reference[1:]
        return entry

    return rewrite(schema, move)
