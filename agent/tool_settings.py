"""The settings of one tool in a tool file: `_exec_argv`, `_timeout`, `_confirm`, `_sandbox`, `_cwd`, `_max_output`.

Checked at load; an error points at the place. None of them can weaken what the user asked for on the
command line: `_sandbox` and `_confirm` only ask for more, `_cwd` stays below the tools' root folder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from ..runtime.errors import ToolFileError
from .strict_json import json_name
from .tools import is_shell_text, placeholder

MAX_TIMEOUT_S = 86_400
MAX_OUTPUT = 1 << 20
_INSIDE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")

Fields = Mapping[str, Any]


def exec_argv(fields: Fields, at: Mapping[str, str], declared: Collection[str]) -> tuple[str, ...] | None:
    """The program and its arguments; None without `_exec_argv`. `declared` are the tool's properties."""
    items, where = fields["_exec_argv"], f"{at['_exec_argv']}/_exec_argv"
    if items is None:
        return None
    if not isinstance(items, list) or not items:
        found = "an empty array" if items == [] else json_name(items)
        raise ToolFileError(where, found, "an array: the program, then its arguments")
    for index, item in enumerate(items):
        place = f"{where}/{index}"
        if not isinstance(item, str):
            raise ToolFileError(place, json_name(item), "a string")
        if not is_shell_text(item):
            raise ToolFileError(place, "a NUL character", "text that a command line can hold")
        name = placeholder(item)
        if index == 0 and (name is not None or not item):
            raise ToolFileError(place, repr(item), "a program", "a model never chooses the program")
        if name is not None and name not in declared:
            raise ToolFileError(
                place, f"no argument {name!r} is declared", "a name that stands in properties"
            )
        inner = _INSIDE.search(item)
        if name is None and inner is not None and inner[1] in declared:
            raise ToolFileError(place, repr(item), f'"{inner[0]}" alone', "a placeholder is a whole argument")
    return tuple(items)


def timeout_s(fields: Fields, at: Mapping[str, str]) -> float | None:
    """Seconds, for this tool instead of `--tool-timeout`."""
    value, where = fields["_timeout"], f"{at['_timeout']}/_timeout"
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ToolFileError(where, json_name(value), "seconds, a number")
    if not (0 < value <= MAX_TIMEOUT_S) or not math.isfinite(value):
        raise ToolFileError(where, "out of range", f"seconds above 0, at most {MAX_TIMEOUT_S}")
    return float(value)


def max_output(fields: Fields, at: Mapping[str, str]) -> int | None:
    """Bytes of each stream that the model gets of this tool."""
    value, where = fields["_max_output"], f"{at['_max_output']}/_max_output"
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ToolFileError(where, json_name(value), "bytes, a whole number")
    if not 1 <= value <= MAX_OUTPUT:
        raise ToolFileError(where, "out of range", f"bytes from 1 to {MAX_OUTPUT}")
    return value


def switch(fields: Fields, at: Mapping[str, str], key: str) -> bool:
    """`_confirm` or `_sandbox`: whether this tool asks for it by itself."""
    value = fields[key]
    if value is not None and not isinstance(value, bool):
        raise ToolFileError(f"{at[key]}/{key}", json_name(value), "true or false")
    return bool(value)


def cwd(fields: Fields, at: Mapping[str, str]) -> str | None:
    """A folder below the tools' root folder, in which this tool runs."""
    value, where = fields["_cwd"], f"{at['_cwd']}/_cwd"
    if value is None:
        return None
    if not isinstance(value, str):
        raise ToolFileError(where, json_name(value), "a string")
    problem = cwd_problem(value)
    if problem:
        raise ToolFileError(where, f"{value!r} {problem}", "a folder below the tools' root folder")
    return value


def cwd_problem(path: str) -> str | None:
    """Why `path` cannot be a folder below another, on whatever system; None if it can (links apart)."""
    if not path or not is_shell_text(path):
        return "is no path"
    windows = PureWindowsPath(path)
    if windows.anchor or PurePosixPath(path).is_absolute():
        return "is absolute"
    return "leads out" if ".." in windows.parts else None
