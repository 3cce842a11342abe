"""The flags about tools, as a user gives them to `agent` and `eval`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.agent.sandbox import choose_sandbox
from posttrainllm.cli.agent import AgentOptions
from posttrainllm.cli.options import parse
from posttrainllm.runtime.errors import UsageError

Run = Callable[..., Any]


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Three tools: a plain one, one that wants to be asked for, one that wants a sandbox."""
    path = tmp_path / "three.json"
    plain = {"name": "plain", "_exec": "true"}
    path.write_text(
        json.dumps(
            [plain, {**plain, "name": "asks", "_confirm": True}, {**plain, "name": "boxed", "_sandbox": True}]
        )
    )
    return path


def options(*argv: object) -> AgentOptions:
    return parse(AgentOptions, list(map(str, argv)), command="agent", summary="", example="")


def test_flags_that_may_be_repeated_keep_their_order() -> None:
    found = options("--tool-env", "B", "--allow-write", "x", "--tool-env=A", "--allow-write", "y z")
    assert (found.tool_env, found.allow_write, found.deny_tool) == (("B", "A"), ("x", "y z"), ())
    with pytest.raises(UsageError, match="expected one argument"):
        options("--tool-env")


def test_tools_are_chosen_by_name_in_the_order_of_the_file(tools: Path) -> None:
    def names(*argv: str) -> list[str]:
        return [tool.name for tool in options("--tools", tools, *argv).load_tools()]

    assert names() == ["plain", "asks", "boxed"]
    assert names("--allow-tool", "boxed", "--allow-tool", "plain") == ["plain", "boxed"]
    assert names("--deny-tool", "asks") == ["plain", "boxed"]
    assert names("--allow-tool", "asks", "--deny-tool", "asks") == []
    for flag in ("--allow-tool", "--deny-tool"):
        with pytest.raises(UsageError, match=f"{flag} other: .* one of plain, asks, boxed"):
            names(flag, "other")


@pytest.mark.parametrize(
    "argv",
    [
        ["--sandbox", "jail"],
        ["--allow-net"],
        ["--allow-write", "."],
        ["--tool-env", "NOT_SET_ANYWHERE"],
        ["--tool-root", "/not/there"],
        ["--shell", "/not/there"],
        ["--tool-memory", "-1"],
        ["--tool-file-size", "-1"],
        ["--sandbox", "seatbelt" if sys.platform == "linux" else "bwrap"],
    ],
)
def test_a_flag_that_cannot_be_followed_is_exit_code_2(run: Run, error_line: Any, argv: list[str]) -> None:
    done = run("agent", "--single", "hi", *argv)
    assert done.returncode == 2
    assert argv[0] in error_line(done.stderr)
    assert done.stdout == ""


def test_a_tool_that_wants_a_sandbox_stops_an_open_start(run: Run, tools: Path, error_line: Any) -> None:
    done = run("agent", "--tools", tools, "--single", "hi")
    assert done.returncode == 2
    assert "tool boxed runs only in a sandbox" in error_line(done.stderr)
    assert "no sandbox" in run("agent", "--tools", tools, "--deny-tool", "boxed", "--single", "hi").stderr


def test_the_start_line_says_which_sandbox(run: Run, tmp_path: Path) -> None:
    try:
        choose_sandbox("auto")
    except UsageError as error:
        pytest.skip(str(error))
    done = run("agent", "--single", "hi", "--sandbox", "auto", "--allow-write", tmp_path)
    kind = "bwrap" if sys.platform == "linux" else "seatbelt"
    assert f"sandbox {kind} (writes: {tmp_path.resolve()}; network: no)" in done.stderr


def test_eval_refuses_a_tool_that_it_cannot_ask_for(
    run: Run, tools: Path, tmp_path: Path, error_line: Any
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "a", "prompt": "x", "answer": "."}\n')
    done = run("eval", tasks, "--tools", tools, "--deny-tool", "boxed")
    assert done.returncode == 2
    assert "tool asks wants to be asked for" in error_line(done.stderr)


def test_the_tool_root_is_where_tools_run(tmp_path: Path) -> None:
    found = options("--tool-root", tmp_path, "--tool-timeout", 5, "--tool-memory", 100, "--tool-file-size", 0)
    from posttrainllm.cli.agent import _tool_root

    backend = found.backend(None, _tool_root(found))
    assert (backend.cwd, backend.timeout_s) == (tmp_path, 5.0)
    assert (backend.limits.memory_mib, backend.limits.file_bytes()) == (100, 0)
