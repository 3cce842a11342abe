"""Tools on Windows, for real. Elsewhere only what can be shown without it: test_shells.py."""

from __future__ import annotations

import sys
import time

import pytest

from posttrainllm.agent.executor import CommandBackend
from posttrainllm.agent.shells import find_shell
from posttrainllm.agent.tools import Tool, ToolResult

if sys.platform != "win32":
    pytest.skip("job objects exist on Windows only", allow_module_level=True)

SLEEPER = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"


def python(program: str, backend: CommandBackend | None = None, **arguments: str) -> ToolResult:
    argv = (sys.executable, "-c", program, *(f"{{{name}}}" for name in arguments))
    return (backend or CommandBackend()).call(Tool("t", exec_argv=argv), arguments)


@pytest.mark.parametrize("text", ["", "a b", 'say "x"', "back\\slash\\", "%PATH% ^& | < >", "π😀"])
def test_an_argument_arrives_as_it_is(text: str) -> None:
    result = python("import sys; sys.stdout.buffer.write(sys.argv[1].encode())", x=text)
    assert (result.stdout, result.exit_code) == (text, 0)


def test_a_grandchild_that_holds_the_pipes_dies_with_the_call() -> None:
    started = time.monotonic()
    assert python(SLEEPER).exit_code == 0
    assert time.monotonic() - started < 30


def test_a_deadline_ends_everything() -> None:
    result = python(f"{SLEEPER}; import time; time.sleep(600)", CommandBackend(timeout_s=2))
    assert result.timed_out


@pytest.mark.skipif(find_shell(None) is None, reason="neither Git's bash nor WSL is here")
def test_bash_gets_its_variables() -> None:
    text = 'it\'s "$(id)" π\n'
    tool = Tool("t", exec='printf %s "$x"', exec_args=("x",))
    assert CommandBackend().call(tool, {"x": text}).stdout == text
