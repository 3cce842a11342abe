"""JSON read without mercy, and what makes a value unfit to be passed on as JSON.

Python's own reader accepts NaN, lets the last of two equal keys win and keeps lone surrogates, which
crash whatever encodes them later. A tool file or a model's arguments with any of these are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NoReturn

from ..runtime.json_schema import escape

MAX_DEPTH = 64  # objects and arrays inside one another

Path = tuple[str | int, ...]


class StrictJsonError(ValueError):
    """Text that is not JSON, or JSON that means different things to different readers."""


def parse_json(text: str, max_depth: int = MAX_DEPTH) -> Any:
    """The value of `text`. StrictJsonError says where and why it is refused."""
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise StrictJsonError(f"not JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise StrictJsonError(f"nested deeper than {max_depth} levels") from None
    except StrictJsonError:
        raise
    except ValueError:  # an integer of thousands of digits
        raise StrictJsonError("a number that is too long") from None
    problem = find_unfit(value, max_depth)
    if problem:
        path, reason = problem
        raise StrictJsonError(f"{reason} at {pointer(path) or 'the top'}")
    return value


def find_unfit(value: Any, max_depth: int = MAX_DEPTH) -> tuple[Path, str] | None:
    """The first place in `value` that JSON in UTF-8 cannot hold, with the reason; None if it is sound."""
    for path, item in _walk(value):
        if len(path) > max_depth:
            return path[:4], f"nested deeper than {max_depth} levels"
        reason = _unfit(item)
        if reason:
            return path, reason
    return None


def pointer(path: Path) -> str:
    """The JSON pointer of `path`: `/tools/0/function`; empty for the whole document."""
    return "".join(f"/{escape(str(part))}" for part in path)


def json_name(value: Any) -> str:
    """What JSON calls the type of `value`, with its article: `a string`, `an array`, `null`."""
    if value is None:
        return "null"
    for kind, name in _NAMES.items():
        if isinstance(value, kind):
            return name
    return f"a Python {type(value).__name__}"


_NAMES = {
    bool: "a boolean",  # before int: True is one
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def _walk(value: Any) -> Iterator[tuple[Path, Any]]:
    """Every value inside `value`, itself and all keys included; never recursive."""
    stack: list[tuple[Path, Any]] = [((), value)]
    while stack:
        path, item = stack.pop()
        yield path, item
        if isinstance(item, dict):
            for key in item:
                yield (*path, str(key)), (key if isinstance(key, str) else frozenset())
            stack += [((*path, str(key)), item[key]) for key in reversed(item)]
        elif isinstance(item, list):
            stack += [((*path, index), item[index]) for index in reversed(range(len(item)))]


def _unfit(item: Any) -> str | None:
    if isinstance(item, str):
        lone = next((c for c in item if "\ud800" <= c <= "\udfff"), None) if not item.isascii() else None
        return f"half of a surrogate pair (U+{ord(lone):04X})" if lone else None
    if isinstance(item, float) and not math.isfinite(item):
        return "a number that is not finite"
    if item is None or isinstance(item, (bool, int, float, list, dict)):
        return None
    return f"{json_name(item)}, which JSON has no word for"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise StrictJsonError(f"the key {twice!r} stands twice in one object")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise StrictJsonError(f"{name}, which is not JSON")
