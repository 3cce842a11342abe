"""The bundled tool files work, also on odd names, and the published schemas say what the code does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from posttrainllm.agent import events
from posttrainllm.agent.arguments import check_arguments
from posttrainllm.agent.executor import CommandBackend
from posttrainllm.agent.tool_file import load_tools, parse_tools
from posttrainllm.agent.tools import Tool, ToolResult, variable_problem
from posttrainllm.runtime.errors import ToolFileError

FOLDER = Path(str(files("posttrainllm.tools_schemas")))
BUNDLED = ["debugger.json", "demo.json", "echo.json", "files.json"]
ODD = ["a b.txt", "-rf", "--help", "new\nline.txt", "quo'te\".txt", "$(id).txt", "*", "é.txt", "a\\b"]


def schema(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return document


def admits(name: str, value: Any) -> bool:
    return bool(Draft202012Validator(schema(name)).is_valid(value))


needs_bash = pytest.mark.skipif(os.name != "posix", reason="command tools need /bin/bash")
Call = Callable[..., ToolResult]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """call(tool, **arguments) of files.json, in a folder of its own; arguments are checked as for a model."""
    if os.name != "posix":
        pytest.skip("command tools need /bin/bash")
    tools = {tool.name: tool for tool in load_tools(FOLDER / "files.json")}

    def run(name: str, /, **arguments: Any) -> ToolResult:
        checked = check_arguments(tools[name], arguments)
        assert isinstance(checked, dict), checked
        return CommandBackend(timeout_s=20, cwd=tmp_path).call(tools[name], checked)

    return run


def test_the_bundled_files_are_all_listed_here() -> None:
    found = sorted(path.name for path in FOLDER.glob("*.json") if not path.name.endswith(".schema.json"))
    assert found == BUNDLED


@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_file_loads_and_fits_the_published_schema(name: str) -> None:
    assert load_tools(FOLDER / name)
    assert admits("tools.schema.json", schema(name))


@pytest.mark.parametrize("name", ["tools.schema.json", "events.schema.json"])
def test_the_published_schemas_are_schemas(name: str) -> None:
    Draft202012Validator.check_schema(schema(name))


ENTRY = {"name": "t", "_exec": "true"}


@pytest.mark.parametrize(
    "entry",
    [
        ENTRY,
        {"type": "function", "function": ENTRY},
        {
            "function": {"name": "t", "parameters": {"properties": {"a": {}}, "type": "object"}},
            "_exec": "true",
            "_exec_args": ["a"],
        },
        {**ENTRY, "description": None, "parameters": None, "_exec_args": None},
        {**ENTRY, "parameters": {"properties": {"a": {"type": "string"}}}, "strict": True},
        {"name": "t", "_exec_argv": ["cat", "{x", "é"]},
        {**ENTRY, "_timeout": 0.5, "_max_output": 1, "_cwd": "a/..b", "_confirm": True, "_sandbox": False},
        {"function": ENTRY, "_timeout": 86400, "_max_output": 1 << 20, "_cwd": ".", "_sandbox": True},
        {**ENTRY, "_exec_argv": None, "_timeout": None, "_max_output": None, "_cwd": None, "_confirm": None},
    ],
)
def test_what_the_loader_takes_fits_the_published_schema(entry: Any) -> None:
    for document in ([entry], {"tools": [entry]}):
        assert parse_tools(document, "f")
        assert admits("tools.schema.json", document)


@pytest.mark.parametrize(
    "entry",
    [
        3,
        {},
        {"function": {}},
        {**ENTRY, "name": "a-b"},
        {**ENTRY, "name": 1},
        {**ENTRY, "description": 1},
        {**ENTRY, "_exec": ""},
        {**ENTRY, "_exec_args": "a"},
        {**ENTRY, "_exec_args": ["a-b"]},
        {**ENTRY, "_exec_args": ["PATH"]},
        {"function": {"name": "t"}, "_exec": "true", "_exec_args": ["LC_ALL"]},
        {"name": "t", "_exec_argv": []},
        {"name": "t", "_exec_argv": "cat"},
        {"name": "t", "_exec_argv": ["cat", 1]},
        {"name": "t", "_exec_argv": [""]},
        {"name": "t", "_exec_argv": ["{x}"], "parameters": {"properties": {"x": {}}}},
        {**ENTRY, "_timeout": 0},
        {**ENTRY, "_timeout": "5"},
        {"function": ENTRY, "_timeout": 86401},
        {**ENTRY, "_max_output": 0},
        {**ENTRY, "_max_output": 1.5},
        {**ENTRY, "_cwd": "/etc"},
        {**ENTRY, "_cwd": "a/../../b"},
        {**ENTRY, "_cwd": "C:x"},
        {**ENTRY, "_cwd": "\\\\host\\share"},
        {**ENTRY, "_cwd": ""},
        {**ENTRY, "_confirm": 1},
        {**ENTRY, "_sandbox": "off"},
        {**ENTRY, "parameters": []},
        {**ENTRY, "parameters": {"type": "array"}},
        {**ENTRY, "parameters": {"properties": []}},
    ],
)
def test_what_the_published_schema_refuses_the_loader_refuses(entry: Any) -> None:
    for document in ([entry], {"tools": [entry]}):
        assert not admits("tools.schema.json", document)
        with pytest.raises(ToolFileError):
            parse_tools(document, "f")


def test_the_published_list_of_refused_names_is_the_one_in_the_code() -> None:
    refused = schema("tools.schema.json")["$defs"]["exec_args"]["items"]["not"]["pattern"]
    prefixes, names = (part.strip("()").split("|") for part in refused.strip("^$")[1:-1].split(".*|"))
    assert all(variable_problem(name) for name in [*names, *(f"{prefix}X" for prefix in prefixes)])
    for name in ("path", "text", "lines", "PATHS", "user"):
        assert not variable_problem(name)
        assert admits("tools.schema.json", [{**ENTRY, "_exec_args": [name]}])


STAMP: dict[str, Any] = {"turn": 0, "time": 1.5}
TOKENS: dict[str, Any] = {"prompt_tokens": 9, "cached_tokens": 3, "forced_tokens": 2, "sampled_tokens": 1}
RESULT: dict[str, Any] = {"tool": "t", "stdout": "", "stderr": "", "exit_code": 0}


def made_events() -> list[events.Event]:
    """One of each, as the loop makes them."""
    return [
        events.User(**STAMP, text="hi"),
        events.User(**STAMP, text="hi", escaped=1),
        events.Assistant(**STAMP, step=0, raw="{", stop="stop", **TOKENS),
        events.ToolCallEvent(**STAMP, **RESULT, arguments={"a": 1}, duration_sec=0.5),
        events.ToolCallEvent(
            **STAMP,
            **RESULT,
            arguments="x",
            duration_sec=0,
            timed_out=True,
            truncated=2,
            replaced=True,
            escaped=1,
        ),
        events.ToolResultEvent(**STAMP, **RESULT),
        events.AnswerEvent(**STAMP, text="42"),
        events.AnswerEvent(**STAMP, text="42", fallback=True),
        events.Stop(**STAMP, reason="steps", detail="8 calls"),
    ]


def test_every_event_of_the_agent_fits_the_published_schema() -> None:
    for event in made_events():
        line = json.loads(events.to_line(event))
        assert admits("events.schema.json", line), line


def test_every_key_of_an_event_is_described() -> None:
    published = schema("events.schema.json")
    for event in made_events():
        known = set(published["properties"]) | set(published["$defs"][event.type]["properties"])
        assert set(event.to_json()) <= known


def test_an_event_without_one_of_its_fields_is_refused() -> None:
    published = schema("events.schema.json")
    for event in made_events():
        body = event.to_json()
        for key in [*published["required"], *published["$defs"][event.type]["required"]]:
            assert not admits("events.schema.json", {k: v for k, v in body.items() if k != key}), key


@pytest.mark.parametrize(
    "change",
    [{"v": 2}, {"turn": -1}, {"type": "other"}, {"fallback": False}, {"time": "now"}, {"text": None}],
)
def test_an_event_with_a_wrong_field_is_refused(change: dict[str, Any]) -> None:
    assert not admits("events.schema.json", {"v": 1, **STAMP, "type": "answer", "text": "", **change})


@pytest.mark.parametrize("reason", ["context", "steps", "tokens", "repeat", "interrupted", "error"])
def test_the_reasons_of_a_stop(reason: str) -> None:
    body = {"v": 1, **STAMP, "type": "stop", "reason": reason}
    assert admits("events.schema.json", body)
    assert not admits("events.schema.json", {**body, "reason": "because"})


@needs_bash
def test_the_echo_tool_gives_back_its_text() -> None:
    (echo,) = load_tools(FOLDER / "echo.json")
    assert CommandBackend().call(echo, {"text": "-n it's\n"}).stdout == "-n it's\n"


@needs_bash
def test_the_debugger_tools_read_search_and_run_a_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    tools = {tool.name: tool for tool in load_tools(FOLDER / "debugger.json")}
    assert list(tools) == ["read_file", "run_test", "grep_repo"]
    (tmp_path / "test_a.py").write_text("def test_b():\n    assert 1 == 2  # needle\n")
    backend = CommandBackend(cwd=tmp_path)
    assert "needle" in backend.call(tools["read_file"], {"path": "test_a.py"}).stdout
    assert "test_a.py:2:" in backend.call(tools["grep_repo"], {"pattern": "needle"}).stdout
    assert backend.call(tools["grep_repo"], {"pattern": "-x"}).stdout == ""
    failed = backend.call(tools["run_test"], {"node": "test_a.py::test_b"})
    assert failed.exit_code == 1
    assert "assert 1 == 2" in failed.stdout


@pytest.mark.parametrize("name", ODD)
def test_the_file_tools_take_any_file_name(name: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / name).write_text("one\ntwo é\nthree")
    assert call("read_file", path=name).stdout == "one\ntwo é\nthree\n"
    assert call("read_file", path=name, start=2, lines=1).stdout == "two é\n"
    assert call("read_file", path=str(tmp_path / name), lines="1").stdout == "one\n"
    assert call("tail_file", path=name, lines=1).stdout == "three\n"
    assert call("count_lines", path=name).stdout == "3 lines\n"
    assert "16 bytes" in call("file_info", path=name).stdout
    assert "two é" in call("grep", pattern="t.o", path=name).stdout
    for listing in (call("list_dir"), call("find_files", name="*")):
        shown = listing.stdout.splitlines()
        assert len(shown) == 1
        assert shown == [name] or "\n" in name


@pytest.mark.parametrize("name", ["-d", "a b", "é", "."])
def test_the_file_tools_take_any_folder_name(name: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / name / "sub").mkdir(parents=True)
    (tmp_path / name / "x.txt").write_text("needle\n")
    assert {"sub/", "x.txt"} <= set(call("list_dir", path=name).stdout.splitlines())
    assert call("find_files", name="x.*", path=name).stdout.endswith("x.txt\n")
    assert "x.txt:1:needle" in call("grep", pattern="needle", path=name).stdout
    assert call("file_info", path=name).exit_code == 0


def test_the_file_tools_answer_in_about_600_bytes(call: Call, tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"é-{number}").write_text("needle é\n" * 300)
    (tmp_path / "wide").write_text("é" * 5000)
    for result in (
        call("list_dir"),
        call("find_files", name="*"),
        call("grep", pattern="needle"),
        call("read_file", path="é-1", lines=1000),
        call("tail_file", path="é-1", lines=1000),
        call("read_file", path="wide"),
    ):
        assert result.exit_code == 0
        assert 500 < len(result.stdout.encode()) < 610
        assert result.stdout.endswith("…\n")
        assert not result.replaced


@pytest.mark.parametrize("name", ["absent", "folder", "pipe"])
def test_what_is_no_file_is_said_and_nothing_waits(name: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for tool in ("read_file", "tail_file", "count_lines"):
        result = call(tool, path=name)
        assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"not a file: ./{name}\n")
    assert call("grep", pattern="x").exit_code == 1  # the pipe is passed over


def test_nothing_found_and_a_wrong_pattern_are_told_apart(call: Call, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text\n")
    assert call("grep", pattern="nowhere").stderr == "no match\n"
    assert call("grep", pattern="(").exit_code == 2
    assert call("find_files", name="nowhere").stdout == ""
    for tool in ("list_dir", "file_info"):
        assert call(tool, path="absent").exit_code == 1
    assert call("grep", pattern="x", path="absent").exit_code == 1


def test_an_empty_file_and_an_empty_folder(call: Call, tmp_path: Path) -> None:
    assert call("list_dir").stdout == ""
    (tmp_path / "empty").write_text("")
    assert call("read_file", path="empty").stdout == ""
    assert call("count_lines", path="empty").stdout == "0 lines\n"


def test_the_bundled_tools_use_only_arguments_that_they_declare() -> None:
    for name in BUNDLED:
        for tool in load_tools(FOLDER / name):
            assert isinstance(tool, Tool)
            assert set(tool.exec_args) == set(tool.parameters["properties"])
            assert tool.description


@needs_bash
def test_the_examples_of_the_reference_work(tmp_path: Path) -> None:
    """docs/tools.md, as one would copy it: the file, then the program."""
    text = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
    document, program = (text.split(f"```{kind}\n")[1].split("```")[0] for kind in ("json", "python"))
    (tmp_path / "tools.json").write_text(document, encoding="utf-8")
    (read_file,) = load_tools(tmp_path / "tools.json")
    (tmp_path / "-n").write_text("line\n" * 30)
    result = CommandBackend(cwd=tmp_path).call(read_file, {"path": "-n"})
    assert (result.stdout, result.stderr) == ("line\n" * 20, "")
    names: dict[str, Any] = {}
    program = program.replace('"tools.json"', repr(str(tmp_path / "tools.json")))
    exec(program, names)  # noqa: S102  our own documentation
    weather = Tool("weather", handler="weather")
    assert names["backend"].call(weather, {"city": "Bern"}).stdout == "sunny in Bern"
    assert names["backend"].call(read_file, {"path": "/dev/null"}).exit_code == 0
