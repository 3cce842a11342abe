"""The types, the rules for names and the registry of Python functions."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from posttrainllm.agent.tools import (
    FunctionBackend,
    HandlerRegistry,
    Tool,
    ToolResult,
    variable_problem,
)
from posttrainllm.runtime.errors import ToolFileError, UsageError


def call(fn: Any, arguments: Mapping[str, Any], **options: Any) -> ToolResult:
    handlers = HandlerRegistry()
    handlers.register("fn", fn)
    return FunctionBackend(handlers, **options).call(Tool("t", handler="fn"), arguments)


def test_a_tool_without_parameters_takes_none() -> None:
    assert Tool("t").parameters == {"type": "object", "properties": {}}
    assert Tool("t").parameters is not Tool("u").parameters


@pytest.mark.parametrize("name", ["", "1a", "a-b", "a b", "a;rm", "é", "a\n"])
def test_no_tool_exists_whose_name_is_not_an_identifier(name: str) -> None:
    with pytest.raises(ToolFileError, match="identifier"):
        Tool(name)


@pytest.mark.parametrize("name", ["x;rm -rf", "PATH", "a\n", "$(id)"])
def test_no_tool_exists_whose_argument_names_could_inject_shell_text(name: str) -> None:
    with pytest.raises(ToolFileError):
        Tool("t", exec="true", exec_args=(name,))


@pytest.mark.parametrize("template", ["echo a\0b", "echo \ud800"])
def test_no_tool_exists_whose_template_bash_cannot_hold(template: str) -> None:
    with pytest.raises(ToolFileError):
        Tool("t", exec=template)


NAMED = """
PATH HOME IFS BASH_ENV ENV LD_PRELOAD LD_LIBRARY_PATH DYLD_INSERT_LIBRARIES UID EUID PPID BASH BASHOPTS
SHELLOPTS PS4 PROMPT_COMMAND CDPATH GLOBIGNORE FUNCNAME LINENO RANDOM SECONDS OPTARG REPLY PWD OLDPWD LANG
LC_ALL LC_CTYPE _
"""


@pytest.mark.parametrize("name", NAMED.split())
def test_shell_and_loader_variables_are_refused_as_arguments(name: str) -> None:
    assert variable_problem(name)


@pytest.mark.skipif(os.name != "posix", reason="needs /bin/bash")
def test_every_variable_that_bash_sets_by_itself_is_refused() -> None:
    done = subprocess.run(
        ["/bin/bash", "-c", "(exit 3) | true; getopts a x; compgen -v"],
        capture_output=True,
        check=True,
        text=True,
        env={},
    )
    assert "PIPESTATUS" in done.stdout
    assert [name for name in done.stdout.split() if not variable_problem(name) and name != "x"] == []


@pytest.mark.parametrize("name", ["path", "text", "_x", "user", "lines", "home", "Path", "a1"])
def test_ordinary_names_are_usable(name: str) -> None:
    assert variable_problem(name) is None


def test_a_handler_gets_its_arguments_by_name_and_its_text_is_stdout() -> None:
    result = call(lambda a, b=0: f"{a}+{b}", {"a": 1, "b": [2]})
    assert (result.stdout, result.stderr, result.exit_code) == ("1+[2]", "", 0)


def _fails(**_: Any) -> str:
    raise ValueError("no such city")


def _leaves(**_: Any) -> str:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("fn", "text"),
    [(_fails, "ValueError: no such city"), (_leaves, "SystemExit: 3"), (lambda: 5, "int, not text")],
)
def test_a_handler_that_fails_is_a_result_and_not_an_exception(fn: Any, text: str) -> None:
    result = call(fn, {})
    assert (result.exit_code, result.stdout) == (1, "")
    assert text in result.stderr


def test_a_handler_wins_over_exec_and_others_go_on_to_the_next_back_end() -> None:
    class Other:
        def call(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
            return ToolResult(tool.name, "other", "", 0)

    handlers = HandlerRegistry()
    handlers.register("h", lambda: "handler")
    backend = FunctionBackend(handlers, Other())
    assert backend.call(Tool("t", exec="echo x", handler="h"), {}).stdout == "handler"
    assert backend.call(Tool("t", exec="echo x", handler="absent"), {}).stdout == "other"
    assert backend.call(Tool("t", exec="echo x"), {}).stdout == "other"
    assert FunctionBackend(handlers).call(Tool("t"), {}).exit_code == 127


def test_a_name_is_registered_once() -> None:
    handlers = HandlerRegistry()
    handlers.register("b", str)
    handlers.register("a", str)
    assert handlers.names() == ("a", "b")
    with pytest.raises(UsageError, match="registered already"):
        handlers.register("a", str)


def test_handler_output_is_capped_and_half_characters_do_not_escape() -> None:
    result = call(lambda: "\ud800" + "x" * 9000, {})
    result.stdout.encode()
    assert result.replaced
    assert result.truncated > 0


def test_a_function_heeds_the_settings_of_its_tool() -> None:
    handlers = HandlerRegistry()
    handlers.register("fn", lambda: "abcdefgh")
    backend = FunctionBackend(handlers)
    assert backend.call(Tool("t", handler="fn", max_output=4), {}).stdout == "ab…[truncated 4 bytes]gh"
    refused = backend.call(Tool("t", handler="fn", sandbox=True), {})
    assert (refused.exit_code, refused.stdout) == (126, "")
