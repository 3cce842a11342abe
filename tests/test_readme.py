"""What the README promises, run as it stands there."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from posttrainllm.agent.tool_file import parse_tools
from posttrainllm.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BUNDLE = ROOT / "models" / "demo" / "bundle"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_tool_file_loads() -> None:
    (text,) = blocks("json")
    (tool,) = parse_tools(json.loads(text), "README.md")
    assert tool.exec == 'wc -l < "$path"'


def test_the_python_example_runs() -> None:
    (program,) = blocks("python")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(program.replace('"my-bundle"', repr(str(BUNDLE))), {})  # noqa: S102 - the README's own program
    assert out.getvalue()


def test_the_first_command_answers() -> None:
    """Without the install in front of it, which `.ci/run` does; on the file that it speaks of."""
    (line,) = [
        line.strip() for line in README.splitlines() if line.startswith("    python3") and "agent" in line
    ]
    command = shlex.split(line.split("&&")[-1])
    assert command[0] == ".venv/bin/posttrainllm"
    done = subprocess.run(
        [sys.executable, "-m", "posttrainllm", *command[1:]],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "LICENSE has 21 lines.\n"


def test_ci_runs_the_readmes_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    pattern = re.search(r"s/\^    \\\((.*?)\\\)\$/", script)
    assert pattern is not None
    expression = pattern[1].replace("\\.", r"\.")
    found = [line[4:] for line in README.splitlines() if re.fullmatch(f"    {expression}", line)]
    assert len(found) == 1
    assert found[0].endswith(".venv/bin/python -m pytest")


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_is_in_the_readme(command: str) -> None:
    assert f"| `posttrainllm {command} " in README


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
