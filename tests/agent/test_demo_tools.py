"""The demo tools on real files: odd names, wrong kinds of files, bounded output, arithmetic without evaluation."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.agent.arguments import check_arguments
from posttrainllm.agent.executor import CommandBackend
from posttrainllm.agent.tool_file import load_tools
from posttrainllm.agent.tools import ToolResult

pytestmark = pytest.mark.skipif(os.name != "posix", reason="command tools need /bin/bash")

TOOLS = {tool.name: tool for tool in load_tools(Path(str(files("posttrainllm.tools_schemas") / "demo.json")))}
ON_A_FILE = ("read_file", "count_lines", "count_words", "file_size")
ODD = [
    "a b.txt",
    "-rf",
    "--help",
    "new\nline.txt",
    "quo'te\".txt",
    "$(id).txt",
    "*",
    "año.txt",
    "a\\b",
    "x:y",
]

Call = Callable[..., ToolResult]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """call(tool, **arguments), in a folder of its own; arguments are checked as for a model."""

    def run(name: str, /, **arguments: Any) -> ToolResult:
        checked = check_arguments(TOOLS[name], arguments)
        assert isinstance(checked, dict), checked
        return CommandBackend(timeout_s=20, cwd=tmp_path).call(TOOLS[name], checked)

    return run


def out(result: ToolResult) -> str:
    """What a call that went well printed."""
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def failure(result: ToolResult) -> str:
    """What a call that failed said."""
    assert (result.exit_code, result.stdout) == (1, "")
    return result.stderr


def test_all_arguments_are_required_and_none_is_added() -> None:
    assert len(TOOLS) == 9
    for tool in TOOLS.values():
        assert tuple(tool.parameters["required"]) == tool.exec_args == tuple(tool.parameters["properties"])
        assert tool.parameters["additionalProperties"] is False


@pytest.mark.parametrize("name", ODD)
def test_any_file_name(name: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / name).write_text("one two\nthrée\n")
    for path in (name, str(tmp_path / name)):
        assert out(call("read_file", path=path)) == "one two\nthrée"
        assert out(call("count_lines", path=path)) == "2"
        assert out(call("count_words", path=path)) == "3"
        assert out(call("file_size", path=path)) == "15 bytes"
    if "\n" not in name:
        assert out(call("search_text", pattern="thr", path=name)) == f"1 match\n{name}:2: thrée"
        assert out(call("search_text", pattern="thr", path=".")) == f"1 match\n{name}:2: thrée"
        assert out(call("list_files", folder=".")) == name


@pytest.mark.parametrize("name", ["-d", "a b", "été", "sub/"])
def test_any_folder_name(name: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / name / "in").mkdir(parents=True)
    (tmp_path / name / "x.txt").write_text("needle\n")
    assert out(call("list_files", folder=name)) == "in/\nx.txt"
    found = out(call("search_text", pattern="needle", path=name))
    assert found == f"1 match\n{name.rstrip('/')}/x.txt:1: needle"


def test_the_home_folder(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").write_text("here")
    assert out(call("read_file", path="~/x")) == "here"
    assert out(call("list_files", folder="~")) == "x"


def test_a_missing_file_is_said(call: Call) -> None:
    for tool in (*ON_A_FILE, "file_date"):
        assert failure(call(tool, path="no pe.txt")) == "no such file: no pe.txt"
    assert failure(call("search_text", pattern="x", path="nope")) == "no such file: nope"
    assert failure(call("list_files", folder="nope")) == "no such folder: nope"


def test_the_wrong_kind_of_file_is_said_and_nothing_waits(call: Call, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    for tool in ON_A_FILE:
        assert failure(call(tool, path="folder")) == "is a folder: folder"
        assert failure(call(tool, path="pipe")) == "cannot read: pipe"
    assert failure(call("list_files", folder="file")) == "not a folder: file"
    assert failure(call("search_text", pattern="x", path="pipe")) == "cannot read: pipe"
    assert out(call("search_text", pattern="x", path=".")) == "1 match\nfile:1: x"  # passes the pipe over


def test_binary_and_empty_files(call: Call, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"a\0\xffb")
    (tmp_path / "empty").write_text("")
    (tmp_path / "unended").write_text("a\nb")
    assert failure(call("read_file", path="binary")) == "binary file: binary"
    assert out(call("search_text", pattern="a", path="binary")) == "0 matches"
    assert out(call("file_size", path="binary")) == "4 bytes"
    assert out(call("read_file", path="empty")) == ""
    assert out(call("count_lines", path="empty")) == "0"
    assert out(call("count_lines", path="unended")) == "2"


def test_one_of_a_thing(call: Call, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    assert out(call("file_size", path="x")) == "1 byte"
    assert out(call("search_text", pattern="x", path="x")) == "1 match\nx:1: x"


def test_output_is_bounded(call: Call, tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"a rather long name, number {number:02}, é").write_text("needle é\n" * 300)
    (tmp_path / "wide").write_text("é" * 5000)
    listed = out(call("list_files", folder="."))
    assert len(listed.splitlines()) == 13
    assert listed.endswith("\n(49 more)")
    read = call("read_file", path="wide")
    assert read.stdout in ("é" * 299 + "…", "é" * 300 + "…")
    assert not read.replaced
    found = out(call("search_text", pattern="needle", path="."))
    assert found.startswith("18000 matches\na rather long name, number 00, é:1: needle é\n")
    for text in (listed, found, read.stdout):
        assert len(text.encode()) < 640


def test_a_search_takes_the_pattern_literally(call: Call, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a.b\n-x $(id) `id`\n\t(  tabs\nAXB\n")
    assert out(call("search_text", pattern=".", path="a")) == "1 match\na:1: a.b"
    assert out(call("search_text", pattern="-x $(id) `id`", path="a")) == "1 match\na:2: -x $(id) `id`"
    assert out(call("search_text", pattern="(", path="a")).startswith("2 matches\na:2:")
    assert out(call("search_text", pattern="axb", path="a")) == "0 matches"  # case counts
    assert failure(call("search_text", pattern="", path="a")) == "nothing to search for in: a"


def test_matches_come_by_file_name_and_line(call: Call, tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / name).write_text("no\nx\nx\n")
    assert (
        out(call("search_text", pattern="x", path=".")) == "6 matches\na:2: x\na:3: x\nb:2: x\nb:3: x\nc:2: x"
    )


def test_the_date_of_a_file(call: Call, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    os.utime(tmp_path / "x", (86400 * 365, 86400 * 365))
    date, time = out(call("file_date", path="x")).split(" ")
    assert date.startswith(("1970-12-31", "1971-01-0"))
    assert len(time) == len("00:00")
    assert len(out(call("file_date", path="."))) == len("1971-01-01 00:00")
    assert len(out(call("current_time"))) == len("1971-01-01 00:00")


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("1+2", "3"),
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4.5", "22.5"),
        ("10 - 4 - 3", "3"),
        ("100 / 8 / 2", "6.25"),
        ("-3 - -4", "1"),
        ("2 × 3 ÷ 4 − 1", "0.5"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.3333333333"),
        ("3 - 3", "0"),
        ("-0", "0"),
        ("123456789 * 1000", "123456789000"),
        ("((((.5))))", "0.5"),
    ],
)
def test_arithmetic(expression: str, result: str, call: Call) -> None:
    assert out(call("calculate", expression=expression)) == result


@pytest.mark.parametrize("expression", ["", "2*", "abc", "12 345", "1e5", "2 ** 3", "(1", "1)", "x=1", "1;2"])
def test_what_is_no_arithmetic_is_said(expression: str, call: Call) -> None:
    assert failure(call("calculate", expression=expression)) == f"cannot calculate: {expression}"


def test_arithmetic_that_has_no_result(call: Call) -> None:
    assert failure(call("calculate", expression="1/(2-2)")) == "division by zero"
    assert failure(call("calculate", expression="7*(1/0)")) == "division by zero"
    assert failure(call("calculate", expression="99999999*99999999")) == "result too large"
    assert failure(call("calculate", expression="1+" * 150 + "1")) == "expression too long"


@pytest.mark.parametrize("text", ["$(touch hit)", "`touch hit`", "'; touch hit; '", 'system("touch hit")'])
def test_arguments_are_never_run(text: str, call: Call, tmp_path: Path) -> None:
    call("calculate", expression=text)
    call("search_text", pattern=text, path=text)
    call("list_files", folder=text)
    for tool in (*ON_A_FILE, "file_date"):
        call(tool, path=text)
    assert not (tmp_path / "hit").exists()
