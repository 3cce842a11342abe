"""Task files: every field is checked with file and line, and what cannot come true is refused."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.agent.eval_tasks import Task, check_tasks, load_tasks, parse_task, write_files
from posttrainllm.agent.tools import Tool
from posttrainllm.runtime.errors import InputError

PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = (Tool("count", None, PATH, handler="count"), Tool("read", None, PATH, handler="read"))


def line(**fields: Any) -> dict[str, Any]:
    """A sound task with some fields changed; a field that is ... is left out."""
    fields = {"id": "t", "prompt": "count a.txt", "tool": "count", "answer": "2"} | fields
    return {key: value for key, value in fields.items() if value is not ...}


def task(**fields: Any) -> Task:
    return parse_task(line(**fields), "tasks.jsonl, line 1")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"id": ...}, "id is missing"),
        ({"id": 7}, "id: an integer; expected a string"),
        ({"id": " "}, "id is empty"),
        ({"prompt": ...}, "prompt is missing"),
        ({"prompt": None}, "prompt: null"),
        ({"argument": {}}, "no such field 'argument'"),
        ({"tool": 3}, "tool: an integer"),
        ({"tool": ..., "answer": ...}, "states nothing to check"),
        ({"tool": ..., "arguments": {}}, "arguments without tool"),
        ({"tool": None, "arguments": {}}, "arguments with tool null"),
        ({"arguments": []}, "arguments: an array"),
        ({"calls": []}, "both calls and tool"),
        ({"tool": ..., "calls": {}}, "calls: an object"),
        ({"tool": ..., "calls": [{"tool": "count"}, {}]}, "calls 2: tool is missing"),
        ({"tool": ..., "calls": ["count"]}, "calls 1: a string"),
        ({"tool": ..., "calls": [{"tool": "count", "args": {}}]}, "no such field 'args'"),
        ({"answer": "("}, "answer: missing ), unterminated subpattern"),
        ({"answer": 5}, "answer: an integer"),
        ({"tools": "count"}, "tools: a string"),
        ({"tools": [1]}, "tools: an integer"),
        ({"tools": ["count", "count"]}, "a name stands twice"),
        ({"files": ["a"]}, "files: an array"),
        ({"files": {"a": 1}}, "'a' is an integer"),
        ({"files": {"": ""}}, "is no path"),
        ({"files": {"/etc/x": ""}}, "'/etc/x' is absolute"),
        ({"files": {"C:\\x": ""}}, "is absolute"),
        ({"files": {"\\x": ""}}, "is absolute"),
        ({"files": {"../x": ""}}, "leads out of the working folder"),
        ({"files": {"a/../../x": ""}}, "leads out of the working folder"),
        ({"files": {"a\\..\\x": ""}}, "leads out of the working folder"),
        ({"files": {"./x": ""}}, "not in its shortest form"),
        ({"files": {"a": "", "a/b": ""}}, "'a' is a file and a folder"),
        ({"mtime": {"a": "2024-01-01"}}, "'a' is not in files"),
        ({"files": {"a": ""}, "mtime": {"a": "yesterday"}}, "'yesterday'"),
        ({"files": {"a": ""}, "mtime": {"a": 5}}, "'a' is an integer"),
        ({"files": {"a": ""}, "mtime": "2024-01-01"}, "mtime: a string"),
    ],
)
def test_every_field_is_checked(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(line(id="first")) + "\n\n" + json.dumps(line(**fields)) + "\n")
    with pytest.raises(InputError) as error:
        load_tasks(path)
    assert error.value.exit_code == 3
    assert str(error.value).startswith(f"{path}, line 3")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no tasks"),
        (b"\n \n", "no tasks"),
        (b"[]\n", "line 1: an array"),
        (b"{}\n{", "line 1: id is missing"),
        (b"\n{", "line 2: not JSON"),
        (b'\n{"id": "\xff"}', "line 2: byte 9 is not UTF-8"),
        (b'{"id": "a", "id": "b"}', "stands twice"),
        (b'{"id": "a", "prompt": "b", "answer": "c"}\n' * 2, "line 2: id 'a' is taken by line 1"),
    ],
)
def test_files_that_are_no_task_files(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(data)
    with pytest.raises(InputError) as error:
        load_tasks(path)
    assert words in str(error.value)
    for bad in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match="expected a task file"):
            load_tasks(bad)


def test_line_separators_inside_strings_do_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(line(prompt="a\u2028b"), ensure_ascii=False) + "\r\n", encoding="utf-8-sig")
    assert [one.prompt for one in load_tasks(path)] == ["a\u2028b"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": ["count", "fly"]}, "'fly' is not in the tool file"),
        ({"tools": ["read"]}, "'count' is expected but not offered"),
        ({"tool": "fly"}, "'fly' is expected but not offered"),
        ({"arguments": {"path": 5}}, "count refuses the expected arguments: path: expected string"),
        ({"arguments": {}}, "path: expected string, got nothing"),
        ({"tool": ..., "calls": [{"tool": "count"}, {"tool": "fly"}]}, "'fly'"),
    ],
)
def test_tasks_that_no_model_can_get_right_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=r"tasks\.jsonl, line 1: ") as error:
        check_tasks([task(**fields)], TOOLS)
    assert words in str(error.value)


def test_files_and_times_are_written(tmp_path: Path) -> None:
    texts = {"docs/guide v2/año.md": "a\r\nb\n", "e": ""}
    times = {"e": "2021-03-04T05:06", "docs/guide v2/año.md": "2020-01-01T00:00:00+00:00"}
    write_files(task(files=texts, mtime=times), tmp_path)
    for name, text in texts.items():
        assert (tmp_path / name).read_bytes() == text.encode()
    assert datetime.fromtimestamp((tmp_path / "e").stat().st_mtime).isoformat() == "2021-03-04T05:06:00"
    assert (tmp_path / "docs/guide v2/año.md").stat().st_mtime == 1577836800


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 1: files: 'x+' cannot be written"):
        write_files(task(files={"x" * 300: ""}), tmp_path)
