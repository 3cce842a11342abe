"""A task file for `eval`: one JSON object a line -> Tasks, every field checked, every error one line.

Knows what a task may state, not how it is run or judged (`evaluation.py` does). The format for people is in
docs/eval.md. Expected calls are compared with the tool file in `check_tasks`, so that a task which no model
can get right is refused before anything runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ..runtime.errors import InputError
from .arguments import ArgumentProblem, check_arguments
from .strict_json import StrictJsonError, json_name, parse_json
from .tools import Tool

_MAX_BYTES = 64 << 20
_EXPECTED: dict[type, str] = {str: "a string", list: "an array", dict: "an object"}
_KEYS = ("id", "prompt", "tool", "arguments", "calls", "answer", "files", "mtime", "tools")


@dataclass(frozen=True)
class ExpectedCall:
    """A call that a task asks for; `arguments` None: any will do."""

    tool: str
    arguments: dict[str, Any] | None = None


@dataclass(frozen=True)
class Task:
    """One line of a task file.

    `calls`: None, nothing is stated; empty, no call at all; else the calls in order, of which a whole list
    is meant when `exact`, only the first one otherwise. `answer` is searched in the final answer. `files`
    {path: text} stand in the working folder, with the times `mtime` {path: seconds since 1970}. `tools`
    are the offered ones in order, None for all. `where` is the place that errors name.
    """

    id: str
    prompt: str
    where: str
    calls: tuple[ExpectedCall, ...] | None = None
    exact: bool = False
    answer: re.Pattern[str] | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    mtime: Mapping[str, float] = field(default_factory=dict)
    tools: tuple[str, ...] | None = None

    def offered(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """The tools of this task out of those of the tool file. `check_tasks` has found them all."""
        if self.tools is None:
            return tuple(tools)
        by_name = {tool.name: tool for tool in tools}
        return tuple(by_name[name] for name in self.tools)


def load_tasks(path: Path) -> tuple[Task, ...]:
    """The tasks of a file in its order; empty lines are skipped. Raises InputError naming file and line."""
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = parse_json(line)
        except StrictJsonError as error:
            raise InputError(where, str(error), "one JSON object") from None
        task = parse_task(value, where)
        if task.id in seen:
            raise InputError(where, f"id {task.id!r} is taken by {seen[task.id]}", "unique ids")
        seen[task.id] = f"line {number}"
        tasks.append(task)
    if not tasks:
        raise InputError(path, "no tasks", "one JSON object a line", "see docs/eval.md")
    return tuple(tasks)


def _lines(path: Path) -> list[str]:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise InputError(path, "no such file", "a task file", "see docs/eval.md") from None
    except IsADirectoryError:
        raise InputError(path, "a folder", "a task file") from None
    except (OSError, ValueError) as error:
        raise InputError(path, f"cannot be read: {error}") from None
    if len(data) > _MAX_BYTES:
        raise InputError(path, f"more than {_MAX_BYTES >> 20} MiB", "a task file")
    try:
        return data.decode("utf-8-sig").split("\n")  # not splitlines: U+2028 may stand in a JSON string
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InputError(f"{path}, line {line}", f"byte {error.start} is not UTF-8", "UTF-8 text") from None


def parse_task(value: Any, where: str) -> Task:
    """The task of a parsed line. Raises InputError; `where` is what it calls the line."""
    if not isinstance(value, dict):
        raise InputError(where, json_name(value), "an object")
    for key in value:
        if key not in _KEYS:
            raise InputError(where, f"no such field {key!r}", f"some of {', '.join(_KEYS)}")
    for key in ("id", "prompt"):
        if key not in value:
            raise InputError(where, f"{key} is missing", "text")
        if not _typed(value, key, str, where).strip():
            raise InputError(where, f"{key} is empty", "text")
    calls, exact = _calls(value, where)
    answer = _answer(value, where)
    if calls is None and answer is None:
        raise InputError(where, "states nothing to check", "tool, calls or answer")
    files = _files(value, where)
    return Task(
        id=value["id"],
        prompt=value["prompt"],
        where=where,
        calls=calls,
        exact=exact,
        answer=answer,
        files=files,
        mtime=_mtime(value, files, where),
        tools=_tools(value, where),
    )


def check_tasks(tasks: Sequence[Task], tools: Sequence[Tool]) -> None:
    """Refuse tasks that name tools which are not there, or calls that the tool's schema refuses."""
    known = {tool.name: tool for tool in tools}
    for task in tasks:
        for name in task.tools or ():
            if name not in known:
                raise InputError(
                    task.where, f"tools: {name!r} is not in the tool file", f"some of {', '.join(known)}"
                )
        offered = {tool.name: tool for tool in task.offered(tools)}
        for call in task.calls or ():
            if call.tool not in offered:
                names = ", ".join(offered) or "none"
                raise InputError(task.where, f"{call.tool!r} is expected but not offered", f"one of: {names}")
            if call.arguments is None:
                continue
            checked = check_arguments(offered[call.tool], call.arguments)
            if isinstance(checked, ArgumentProblem):
                raise InputError(task.where, f"{call.tool} refuses the expected arguments: {checked.text}")


def write_files(task: Task, folder: Path) -> None:
    """Put the task's files into `folder`, which is empty, and set their times. Raises InputError."""
    for name, text in task.files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        except OSError as error:
            raise InputError(
                task.where, f"files: {name!r} cannot be written ({error.strerror or error})"
            ) from None
    for name, seconds in task.mtime.items():
        _set_time(folder / name, seconds, task.where)


def _set_time(path: Path, seconds: float, where: str) -> None:
    try:
        os.utime(path, (seconds, seconds))
    except (OSError, OverflowError) as error:
        raise InputError(where, f"mtime: {seconds:g} cannot be set here ({error})") from None


def _typed(value: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """The field `key`, which must be of `kind`."""
    if not isinstance(value[key], kind):
        raise InputError(where, f"{key}: {json_name(value[key])}", _EXPECTED[kind])
    return value[key]


def _calls(value: Mapping[str, Any], where: str) -> tuple[tuple[ExpectedCall, ...] | None, bool]:
    """What is stated about calls, and whether it is the whole list."""
    if "calls" in value:
        for key in ("tool", "arguments"):
            if key in value:
                raise InputError(where, f"both calls and {key}", "one of them")
        entries = _typed(value, "calls", list, where)
        return tuple(_call(entry, f"{where}, calls {n}") for n, entry in enumerate(entries, start=1)), True
    if "tool" not in value:
        if "arguments" in value:
            raise InputError(where, "arguments without tool", "the tool that they belong to")
        return None, False
    if value["tool"] is None:
        if "arguments" in value:
            raise InputError(where, "arguments with tool null", "no arguments where no call is expected")
        return (), True
    fields = {key: value[key] for key in ("tool", "arguments") if key in value}
    return (_call(fields, where),), False


def _call(entry: Any, where: str) -> ExpectedCall:
    if not isinstance(entry, dict):
        raise InputError(where, json_name(entry), "an object with tool and arguments")
    for key in entry:
        if key not in ("tool", "arguments"):
            raise InputError(where, f"no such field {key!r}", "tool and arguments")
    if "tool" not in entry:
        raise InputError(where, "tool is missing", "the name of a tool")
    name: str = _typed(entry, "tool", str, where)
    return ExpectedCall(name, _typed(entry, "arguments", dict, where) if "arguments" in entry else None)


def _answer(value: Mapping[str, Any], where: str) -> re.Pattern[str] | None:
    if "answer" not in value:
        return None
    try:
        return re.compile(_typed(value, "answer", str, where))
    except (re.error, OverflowError, RecursionError) as error:
        raise InputError(where, f"answer: {error}", "a regular expression of Python") from None


def _tools(value: Mapping[str, Any], where: str) -> tuple[str, ...] | None:
    if "tools" not in value:
        return None
    names = _typed(value, "tools", list, where)
    for name in names:
        if not isinstance(name, str):
            raise InputError(where, f"tools: {json_name(name)}", "names of tools")
    if len(set(names)) < len(names):
        raise InputError(where, "tools: a name stands twice", "each name once")
    return tuple(names)


def _files(value: Mapping[str, Any], where: str) -> dict[str, str]:
    if "files" not in value:
        return {}
    files: dict[str, str] = _typed(value, "files", dict, where)
    for name, text in files.items():
        problem = _path_problem(name)
        if problem:
            raise InputError(where, f"files: {name!r} {problem}", "a relative path inside the working folder")
        if not isinstance(text, str):
            raise InputError(where, f"files: {name!r} is {json_name(text)}", "its content as a string")
        for folder in PurePosixPath(name).parents:
            if str(folder) in files:
                raise InputError(where, f"files: {str(folder)!r} is a file and a folder", "one of them")
    return dict(files)


def _path_problem(name: str) -> str | None:
    """Why `name` cannot be the path of a task's file; None if it can. Strict on every system alike."""
    if not name or "\0" in name:
        return "is no path"
    windows = PureWindowsPath(name)
    if name.startswith("/") or windows.drive or windows.root:
        return "is absolute"
    if ".." in name.replace("\\", "/").split("/"):
        return "leads out of the working folder"
    if name != str(PurePosixPath(name)) or name == ".":
        return "is not in its shortest form"
    return None


def _mtime(value: Mapping[str, Any], files: Mapping[str, str], where: str) -> dict[str, float]:
    if "mtime" not in value:
        return {}
    times = {}
    for name, text in _typed(value, "mtime", dict, where).items():
        if name not in files:
            raise InputError(where, f"mtime: {name!r} is not in files", "a path of files")
        if not isinstance(text, str):
            raise InputError(where, f"mtime: {name!r} is {json_name(text)}", "an ISO time")
        try:  # without an offset it is local time, which is what tools print
            times[name] = datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError, OSError) as error:
            raise InputError(where, f"mtime: {text!r} ({error})", "an ISO time: 2024-03-01T12:00") from None
    return times
