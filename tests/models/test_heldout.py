"""The held-out tasks of the demo model are sound: the real tools give the facts that the answers ask for."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.resources import files
from pathlib import Path

import pytest

from posttrainllm.agent.arguments import check_arguments
from posttrainllm.agent.eval_tasks import Task, check_tasks, load_tasks, write_files
from posttrainllm.agent.executor import CommandBackend
from posttrainllm.agent.tool_file import load_tools
from posttrainllm.agent.tools import Tool, ToolResult

HELDOUT = Path(__file__).parents[2] / "models" / "demo" / "heldout.jsonl"
DEMO = Path(str(files("posttrainllm.tools_schemas"))) / "demo.json"


@pytest.fixture(scope="module")
def tasks() -> tuple[Task, ...]:
    return load_tasks(HELDOUT)


@pytest.fixture(scope="module")
def tools() -> tuple[Tool, ...]:
    return load_tools(DEMO)


def results(task: Task, tools: tuple[Tool, ...]) -> list[ToolResult]:
    """What the expected calls give, in a fresh folder with the task's files."""
    by_name = {tool.name: tool for tool in tools}
    with tempfile.TemporaryDirectory() as folder:
        write_files(task, Path(folder))
        backend = CommandBackend(timeout_s=20, cwd=Path(folder))
        found = []
        for call in task.calls or ():
            arguments = check_arguments(by_name[call.tool], call.arguments)
            assert isinstance(arguments, dict)
            found.append(backend.call(by_name[call.tool], arguments))
        return found


def test_there_are_enough_tasks_and_they_differ(tasks: tuple[Task, ...]) -> None:
    """`load_tasks` has refused equal ids."""
    assert len(tasks) >= 320
    assert len({task.prompt for task in tasks}) == len(tasks)


def test_every_expected_call_is_one_that_the_tools_take(
    tasks: tuple[Task, ...], tools: tuple[Tool, ...]
) -> None:
    check_tasks(tasks, tools)
    for task in tasks:
        assert task.answer is not None, task.id
        assert task.calls is not None, task.id
        assert all(call.arguments is not None for call in task.calls), task.id


def test_no_answer_is_in_the_question(tasks: tuple[Task, ...]) -> None:
    """A model that repeats the question must not pass for one that has read the result."""
    for task in tasks:
        assert task.answer is not None
        assert not (task.calls and task.answer.search(task.prompt)), task.id


def test_every_tool_and_every_kind_of_task_is_covered(
    tasks: tuple[Task, ...], tools: tuple[Tool, ...]
) -> None:
    calls = Counter(call.tool for task in tasks for call in task.calls or ())
    assert set(calls) == {tool.name for tool in tools}
    assert min(calls.values()) >= 30, calls
    assert sum(len(task.calls or ()) == 2 for task in tasks) >= 30
    assert sum(not task.calls for task in tasks) >= 40
    assert sum(task.tools is not None for task in tasks) >= 40


@pytest.mark.skipif(os.name != "posix", reason="command tools need /bin/bash")
def test_the_answers_are_in_what_the_tools_print(tasks: tuple[Task, ...], tools: tuple[Tool, ...]) -> None:
    """Every task with calls can be answered; those named `error-` end in an error, the others do not."""
    with_calls = [task for task in tasks if task.calls]
    with ThreadPoolExecutor(4) as pool:
        for task, found in zip(with_calls, pool.map(partial(results, tools=tools), with_calls), strict=True):
            text = "\n".join(result.stdout + result.stderr for result in found)
            assert task.answer is not None
            assert task.answer.search(text), f"{task.id}: {task.answer.pattern!r} is not in {text!r}"
            failed = any(result.exit_code for result in found)
            assert failed == task.id.startswith("error-"), f"{task.id}: {text}"
