"""The command table: help, versions, errors of one line, streams in UTF-8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]


def test_help_lists_every_command_with_an_example(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in ("agent", "sample", "export-onnx", "inspect", "eval", "trajectory", "traces-to-data"):
        assert command in done.stdout
        help_ = run(command, "--help")
        assert help_.returncode == 0
        assert f"example:\n  posttrainllm {command} " in help_.stdout
    assert run("--version").stdout.startswith("posttrainllm 0.")


def test_no_command_is_a_usage_error(run: Run) -> None:
    assert run().returncode == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["agnet"], "agnet: no such command; expected one of agent, sample"),
        (["agent", "--nope"], "unrecognized arguments: --nope"),
        (["agent", "--max-steps", "many"], "argument --max-steps: invalid int value: 'many'"),
        (["agent", "--max-steps", "-1"], "--max-steps: -1"),
        (["agent", "--max-tokens", "0"], "--max-tokens: 0"),
        (["agent", "--temperature", "-1"], "--temperature: -1"),
        (["agent", "--temperature", "nan"], "--temperature: nan"),
        (["agent", "--tool-timeout", "0"], "--tool-timeout: 0"),
        (["agent", "--top-p", "2"], "--top-p: 2"),
        (["agent", "--prompt-cash-dir", "x"], "unrecognized arguments: --prompt-cash-dir"),
        (["agent", "--transc", "x"], "unrecognized arguments: --transc"),
        (["agent", "model.tinygpt"], "--tools: missing"),
        (["sample", "demo"], "--prompt"),
        (["sample", "demo", "--prompt", "x", "--tokens", "0"], "--tokens: 0"),
        (["export-onnx", "x"], "--out"),
    ],
)
def test_usage_errors_are_one_line_and_code_2(
    run: Run, error_line: Callable[[str], str], arguments: list[str], expected: str
) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert expected in error_line(done.stderr)
    assert done.stdout == ""


def test_debug_shows_the_traceback(run: Run) -> None:
    done = run("agnet", "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("posttrainllm: agnet: no such command")
