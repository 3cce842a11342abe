"""`posttrainllm eval` as a user runs it: real processes; where words matter, a model that says given ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

Run = Callable[..., Any]
ROOT = Path(__file__).parents[2]
PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = [
    {"name": "count", "parameters": PATH, "_exec": 'n=$(wc -l < "$path") && printf %s $n'},
    {"name": "read", "parameters": PATH, "_exec": 'cat -- "$path"'},
]
ODD = 'a ]]> <b> & "c" \x1b[31m \x00 \ud800 \uffff é 🙂'

# A process in which MODEL is a scripted session: {prompt: [replies]} from the file argv[1].
SCRIPTED = """
import json, runpy, sys
from types import SimpleNamespace
from posttrainllm.cli import main, models

book = json.load(open(sys.argv[1]))

class Session(runpy.run_path(sys.argv[2])["ScriptedSession"]):
    provider = SimpleNamespace(name="script")

    def prefill(self, ids, cache):
        _, *turns = bytes(ids).decode("utf-8", "replace").split("<|im_start|>user\\n")
        if turns:
            self.replies = [reply.encode() for reply in book[turns[0].split("<|im_end|>")[0]]]
        return super().prefill(ids, cache)

models.open_model = lambda model, provider: Session([])
sys.exit(main.main(["eval", *sys.argv[3:]]))
"""

needs_bash = pytest.mark.skipif(os.name != "posix", reason="command tools need /bin/bash")


def call(name: str, path: str) -> str:
    return json.dumps({"tool": name, "arguments": {"path": path}})


def answer(text: str) -> str:
    return json.dumps({"answer": text})


FILES = {"files": {"a b.txt": "one\ntwo\n"}, "tool": "count", "arguments": {"path": "a b.txt"}, "answer": "2"}
TASKS = [
    {"id": "right", "prompt": "p1", **FILES},
    {"id": "argument", "prompt": "p2", **FILES},
    {"id": "none", "prompt": "p3", "tool": None},
    {"id": "odd \x1b\uffff", "prompt": "p4 \x01", "answer": "nothing of the kind"},
]
BOOK = {
    "p1": [call("count", "a b.txt"), answer("2")],
    "p2": [call("count", "a.txt"), answer("2")],
    "p3": [answer("hello")],
    "p4 \x01": [answer(ODD)],
}


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(TOOLS))
    return path


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    return path


def scripted_command(folder: Path, tasks: Path, tools: Path, *flags: object) -> list[str]:
    (folder / "book.json").write_text(json.dumps(BOOK))
    arguments = [
        folder / "book.json",
        ROOT / "tests/agent/conftest.py",
        tasks,
        "model",
        "--tools",
        tools,
        *flags,
    ]
    return [sys.executable, "-c", SCRIPTED, *map(str, arguments)]


@pytest.fixture
def scripted(tmp_path: Path, tasks: Path, tools: Path) -> Run:
    """scripted(*flags) -> the finished process, over TASKS with a model that says BOOK."""

    def run_command(*flags: object) -> subprocess.CompletedProcess[str]:
        command = scripted_command(tmp_path, tasks, tools, *flags)
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", cwd=tmp_path, timeout=120, check=False
        )

    return run_command


@needs_bash
def test_the_table_has_a_row_for_all_and_one_a_tool(scripted: Run) -> None:
    done = scripted()
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert " ".join(rows[0]) == "tasks right valid calls tool arguments answer sampled forced seconds"
    assert " ".join(rows[1]).startswith("all 4 50.0 % 100 % 100 % 50.0 % 66.7 % ")
    assert " ".join(rows[2]).startswith("count 2 50.0 % 100 % 100 % 50.0 % 100 % ")
    assert " ".join(rows[3]).startswith("(no call) 1 100 % - 100 % - - ")
    assert " ".join(rows[4]).startswith("(not stated) 1 0.0 % - - - 0.0 % ")
    assert len(rows) == 5
    assert done.stderr == "eval: 4 tasks on model, script, 2 tools, no sandbox\n"


@needs_bash
def test_reports_hold_everything_and_any_text(scripted: Run, tmp_path: Path) -> None:
    done = scripted("--json-report", "r.json", "--junit", "r.xml", "--failures", "--min-success", "0.5")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert report["all"]["right_arguments"] == [1, 2]
    assert report["groups"]["count"]["tasks"] == 2
    assert report["options"]["min_success"] == 0.5
    assert [task["right"] for task in report["tasks"]] == [True, False, True, False]
    assert report["tasks"][0]["calls"] == [
        {"tool": "count", "arguments": {"path": "a b.txt"}, "valid": True, "exit_code": 0}
    ]
    assert report["all"]["sampled"] == sum(task["sampled"] for task in report["tasks"])

    suite = ElementTree.parse(tmp_path / "r.xml").getroot()[0]
    assert suite.attrib["tests"] == "4"
    assert suite.attrib["failures"] == "2"
    cases = {case.attrib["name"]: case for case in suite}
    assert [name for name, case in cases.items() if case.find("failure") is None] == ["right", "none"]
    assert cases["argument"].attrib["classname"] == "count"
    failure = cases["odd \\u001b\\uffff"].find("failure")
    assert failure is not None
    assert failure.text is not None
    assert failure.text.startswith("prompt: p4 \\u0001\n")
    assert ']]> <b> & "c"' in failure.text

    assert "argument: 'p2'\n  arguments of count: expected {'path': 'a b.txt'}" in done.stdout
    assert "\nodd \x1b\uffff: 'p4 \\x01'\n  answer: expected /nothing of the kind/" in done.stdout
    assert "\nright:" not in done.stdout


@needs_bash
def test_too_few_right_tasks_are_exit_code_1_after_the_reports(scripted: Run, tmp_path: Path) -> None:
    done = scripted("--min-success", "0.51", "--junit", "r.xml")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "posttrainllm: --min-success 0.51: 2 of 4 tasks are right (0.500); --failures shows what went wrong"
    )
    assert done.stdout.startswith(" ")
    assert (tmp_path / "r.xml").is_file()


@needs_bash
def test_a_terminal_sees_progress_and_no_control_characters(tmp_path: Path, tasks: Path, tools: Path) -> None:
    import pty  # not on Windows

    ours, theirs = pty.openpty()
    command = scripted_command(tmp_path, tasks, tools, "--failures")
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path)
    os.close(theirs)
    seen = b""
    while chunk := _read(ours):
        seen += chunk
    os.close(ours)
    assert process.wait(60) == 0, seen
    assert b"right" in seen.split(b"tasks  ")[0]
    assert b"\nodd \\x1b" in seen


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux says so when the other side is closed
        return b""


def test_a_real_model_and_every_flag(
    run: Run, make_bundle: Callable[..., Path], tmp_path: Path, tools: Path, tasks: Path
) -> None:
    """Random weights: what they say is of no interest, that it is repeatable is."""
    bundle = make_bundle(d_model=32, heads=4, layers=2, ctx=2048)
    flags = [
        "--tools",
        tools,
        "--max-tokens",
        12,
        "--max-steps",
        1,
        "--tool-timeout",
        5,
        "--system",
        "Be kind.",
    ]
    flags += ["--temperature", 1, "--seed", 4, "--provider", "cpu", "--no-kv-preallocate"]

    def report(*more: object) -> Any:
        done = run("eval", tasks, bundle, *flags, *more, "--json-report", "r.json")
        assert done.returncode == 0, done.stderr
        tasks_of = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["tasks"]
        return [{key: task[key] for key in task if key != "seconds"} for task in tasks_of]

    once = report()
    assert once == report()
    assert report("--seed", 5) != once
    free = report("--no-constrain")
    assert free != once
    assert all(task["forced"] == 0 for task in free)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--min-success", "1.1"], 2, "--min-success: 1.1; expected a share from 0 to 1"),
        (["--min-success", "nan"], 2, "--min-success"),
        (["--max-tokens", "0"], 2, "--max-tokens"),
        (["--max-steps", "-1"], 2, "--max-steps"),
        (["--tool-timeout", "0"], 2, "--tool-timeout"),
        (["--temperature", "-1"], 2, "temperature"),
        (["--junit", "none/r.xml"], 2, "--junit none/r.xml: its folder does not exist"),
        (["--json-report", "none/r.json"], 2, "--json-report"),
        (["--tools", "none.json"], 3, "none.json: no such file"),
    ],
)
def test_what_can_be_refused_early_is(
    run: Run, tools: Path, tasks: Path, error_line: Run, flags: list[str], code: int, words: str
) -> None:
    """No model is there, and none is missed."""
    done = run("eval", tasks, "none.tinygpt", "--tools", tools, *flags)
    assert done.returncode == code
    assert words in error_line(done.stderr)


def test_faults_of_the_task_file_are_one_line(run: Run, tools: Path, tasks: Path, error_line: Run) -> None:
    tasks.write_text(json.dumps(TASKS[0]) + '\n{"id": "x", "prompt": "p", "tool": "fly"}\n')
    done = run("eval", tasks, "none.tinygpt", "--tools", tools)
    assert done.returncode == 3
    assert f"{tasks}, line 2: 'fly' is expected but not offered" in error_line(done.stderr)
    done = run("eval", tasks, "other.tinygpt")
    assert done.returncode == 2
    assert "--tools: missing" in error_line(done.stderr)


@needs_bash
def test_a_report_that_cannot_be_written_is_one_line(scripted: Run, tmp_path: Path, error_line: Run) -> None:
    (tmp_path / "r").mkdir()
    done = scripted("--json-report", "r")
    assert done.returncode == 3
    assert "--json-report r: cannot be written" in done.stderr.splitlines()[-1]
