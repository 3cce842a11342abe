"""Evaluation: what is judged how, that tasks do not see each other, and what the sums are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.agent.eval_tasks import Task, check_tasks, parse_task
from posttrainllm.agent.evaluation import (
    MadeCall,
    Outcome,
    Settings,
    evaluate,
    group,
    groups,
    summarise,
)
from posttrainllm.agent.loop import Limits
from posttrainllm.agent.tools import FunctionBackend, HandlerRegistry, Tool
from posttrainllm.runtime import KVCache, Session, load
from posttrainllm.runtime.errors import InputError
from posttrainllm.runtime.tokenizer import decode


def tool(name: str, *arguments: str, **schema: Any) -> Tool:
    properties = {argument: {"type": "string"} for argument in arguments} | schema
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return Tool(name, None, parameters, handler=name)


COUNT, READ, RANGE = tool("count", "path"), tool("read", "path"), tool("range", n={"type": "number"})
TOOLS = (COUNT, READ, RANGE)


def line(**fields: Any) -> dict[str, Any]:
    """A sound task with some fields changed; a field that is ... is left out."""
    fields = {"id": "t", "prompt": "count a.txt", "tool": "count", "answer": "2"} | fields
    return {key: value for key, value in fields.items() if value is not ...}


def task(**fields: Any) -> Task:
    return parse_task(line(**fields), "tasks.jsonl, line 1")


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"tool": name, "arguments": arguments})


def answer(text: str) -> str:
    return json.dumps({"answer": text})


def functions(folder: Path) -> FunctionBackend:
    """The tools as functions in the task's folder."""
    handlers = HandlerRegistry()
    handlers.register("count", lambda path: str(len((folder / path).read_text().splitlines())))
    handlers.register("read", lambda path: (folder / path).read_text())
    handlers.register("range", lambda n=0: str(n))
    return FunctionBackend(handlers)


@pytest.fixture
def judge(scripted: Callable[..., Any]) -> Callable[..., Outcome]:
    """judge(replies, **fields of the task) -> its outcome, with a model that says the replies."""

    def run(replies: list[str], *, constrain: bool = True, max_tokens: int = 256, **fields: Any) -> Outcome:
        one = task(**({"files": {"a.txt": "x\ny\n"}} | fields))
        settings = Settings(backend=functions, constrain=constrain, limits=Limits(4, max_tokens))
        (outcome,) = evaluate(scripted(replies), TOOLS, [one], settings)
        return outcome

    return run


# Judging


def test_a_task_that_is_right(judge: Callable[..., Outcome]) -> None:
    outcome = judge([call("count", path="a.txt"), answer("It has 2 lines")], arguments={"path": "a.txt"})
    assert outcome.right
    assert outcome.problems == ()
    assert outcome.calls == (MadeCall("count", {"path": "a.txt"}, True, 0),)
    assert (outcome.right_tool, outcome.right_arguments, outcome.right_answer) == (True, True, True)
    assert (outcome.ended, outcome.answer) == ("answer", "It has 2 lines")
    assert 0 < outcome.sampled < outcome.forced + outcome.sampled


A_TXT = {"arguments": {"path": "a.txt"}}
ONE = {"tool": "range", "arguments": {"n": 1.0}}
RIGHT = [call("count", path="a.txt"), answer("2")]


@pytest.mark.parametrize(
    ("replies", "fields", "verdicts", "problem"),
    [
        ([call("read", path="a.txt"), answer("2")], A_TXT, (False, False, True), "tool: "),
        ([call("count", path="b"), answer("2")], A_TXT, (True, False, True), "arguments "),
        ([*RIGHT[:1], answer("3")], {}, (True, None, False), "answer: "),
        ([answer("2")], {}, (False, None, True), "expected count; got no call"),
        (RIGHT, {"tool": None}, (False, None, True), "expected no call; got count"),
        ([answer("2")], {"tool": None}, (True, None, True), None),
        ([answer("2")], {"tool": ...}, (None, None, True), None),
        (RIGHT, {"answer": ...}, (True, None, None), None),
        ([*RIGHT[:1], call("read", path="a.txt"), answer("2")], {}, (True, None, True), None),
        (
            [*RIGHT[:1], call("read", path="a.txt"), answer("2")],
            {"tool": ..., "calls": [{"tool": "count"}]},
            (False, None, True),
            "tool: expected count; got count, read",
        ),
        (
            [*RIGHT[:1], call("read", path="a.txt"), answer("2")],
            {"tool": ..., "calls": [{"tool": "count"}, {"tool": "read", "arguments": {"path": "a.txt"}}]},
            (True, True, True),
            None,
        ),
        (
            [*RIGHT[:1], call("read", path="a.txt"), answer("2")],
            {"tool": ..., "calls": [{"tool": "read"}, {"tool": "count"}]},
            (False, None, True),
            "tool: ",
        ),
        ([call("range", n=1), answer("2")], ONE, (True, True, True), None),
        ([call("range"), answer("2")], ONE, (True, False, True), "arguments "),
    ],
)
def test_verdicts(
    judge: Callable[..., Outcome],
    replies: list[str],
    fields: dict[str, Any],
    verdicts: tuple[bool | None, ...],
    problem: str | None,
) -> None:
    outcome = judge(replies, **fields)
    assert (outcome.right_tool, outcome.right_arguments, outcome.right_answer) == verdicts
    assert outcome.right == (problem is None)
    assert problem is None or problem in outcome.problems[0]


def test_true_is_not_one(scripted: Callable[..., Any]) -> None:
    flag = tool("flag", x={"type": ["boolean", "integer"]})
    one = task(tool="flag", arguments={"x": 1})
    check_tasks([one], [flag])
    session = scripted([call("flag", x=True), answer("2")])
    (outcome,) = evaluate(session, [flag], [one])
    assert (outcome.right_tool, outcome.right_arguments) == (True, False)


def test_a_refused_call_is_not_valid_even_if_all_ends_well(judge: Callable[..., Outcome]) -> None:
    replies = [call("fly", path="a.txt"), call("count"), call("count", path="a.txt"), answer("2")]
    outcome = judge(replies, constrain=False, tool=...)
    assert [made.valid for made in outcome.calls] == [False, False, True]
    assert outcome.right_answer
    assert not outcome.right
    assert summarise([outcome]).valid_calls == (1, 3)


def test_a_tools_own_error_is_a_valid_call(judge: Callable[..., Outcome]) -> None:
    outcome = judge([call("count", path="none.txt"), answer("no such file")], answer="no such")
    assert outcome.right
    assert outcome.calls[0].exit_code == 1


@pytest.mark.parametrize(
    ("reply", "constrain", "lost", "ended"),
    [
        ("no idea", False, 1, "fallback"),
        ('{"answer": "no idea, but a lot to say about it"}', True, 0, "tokens"),
        ('{"tool": "count", "arguments": {"path": "a path without an end"}}', True, 1, "tokens"),
    ],
)
def test_replies_that_are_no_call_and_no_answer_count(
    judge: Callable[..., Outcome], reply: str, constrain: bool, lost: int, ended: str
) -> None:
    outcome = judge([reply], constrain=constrain, max_tokens=12)
    assert (outcome.lost, outcome.ended) == (lost, ended)
    assert not outcome.right
    assert summarise([outcome]).valid_calls == (0, lost)


def test_a_reply_that_had_to_be_said_again_counts(judge: Callable[..., Outcome]) -> None:
    outcome = judge(['{"tool": count}', *RIGHT], constrain=False, tool=...)
    assert outcome.answer == "2"
    assert outcome.problems == ("valid call: a reply that is no JSON was refused",)
    assert summarise([outcome]).valid_calls == (1, 2)


def test_a_turn_without_an_answer_is_never_right(judge: Callable[..., Outcome]) -> None:
    outcome = judge([call("count", path="a.txt"), answer("2" * 40)], max_tokens=20, answer=...)
    assert outcome.right_tool
    assert outcome.problems[0].startswith("ended without an answer (tokens): cut off after 20")


def test_only_the_tasks_tools_are_offered_in_its_order(scripted: Callable[..., Any]) -> None:
    session = scripted([answer("2")])
    list(evaluate(session, TOOLS, [task(tool=None, tools=["read", "count"])], Settings(backend=functions)))
    assert "<tools>\n- read(path: string)\n- count(path: string)\n</tools>" in session.seen


def test_a_system_prompt_that_does_not_fit_names_the_task(scripted: Callable[..., Any]) -> None:
    session = scripted([answer("2")], context_length=200)
    with pytest.raises(InputError, match=r"tasks\.jsonl, line 1: the system prompt does not fit"):
        list(evaluate(session, TOOLS, [task()]))


# Between tasks


def test_each_task_has_its_own_folder_and_conversation(scripted: Callable[..., Any]) -> None:
    session = scripted([call("read", path="a.txt"), answer("ok")])
    folders: list[Path] = []

    def backend(folder: Path) -> FunctionBackend:
        folders.append(folder)
        assert [path.name for path in folder.iterdir()] == ["a.txt"]
        (folder / "left behind").write_text("x")
        return functions(folder)

    tasks = [
        task(id="one", prompt="first", tool="read", answer="ok", files={"a.txt": "alpha"}),
        task(id="two", prompt="second", tool="read", answer="ok", files={"a.txt": "beta"}),
    ]
    for one, outcome in zip(tasks, evaluate(session, TOOLS, tasks, Settings(backend=backend)), strict=True):
        assert outcome.right
        assert f"<|im_start|>user\n{one.prompt}<" in session.seen
        assert one.files["a.txt"] in session.seen
    assert "first" not in session.seen
    assert "alpha" not in session.seen
    assert len(set(folders)) == 2
    assert not any(folder.exists() for folder in folders)


@pytest.fixture(scope="module")
def session(make_bundle: Callable[..., Path]) -> Session:
    """Random weights, context 2,048."""
    return load(make_bundle(d_model=32, heads=4, layers=2, ctx=2048))


def test_the_system_prompt_is_fed_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    keep = KVCache.keep

    def counted(self: KVCache, ids: Any) -> None:
        fed.append(len(ids))
        keep(self, ids)

    monkeypatch.setattr(KVCache, "keep", counted)
    counts = []
    tasks = [task(id=name, prompt=name) for name in ("one", "two")]
    for _ in evaluate(session, TOOLS, tasks, Settings(backend=functions, limits=Limits(0, 1))):
        counts.append(sum(fed))
        fed.clear()
    assert counts[0] > 500
    assert counts[1] < 100


def test_the_order_of_tasks_does_not_matter(session: Session) -> None:
    """Sampling starts anew for each task, and the reused KV state is that of the same ids."""
    from posttrainllm.runtime import Sampler

    def answers(*names: str) -> dict[str, Any]:
        settings = Settings(
            backend=functions, sampler=lambda: Sampler(1.0, seed=3), limits=Limits(0, 24), constrain=False
        )
        tasks = [task(id=name, prompt=name) for name in names]
        return {outcome.task.id: outcome.answer for outcome in evaluate(session, TOOLS, tasks, settings)}

    assert answers("one", "two", "three") == answers("three", "two", "one")


def test_the_working_folder_is_the_commands(scripted: Callable[..., Any]) -> None:
    """With the real executor, by default."""
    pwd = Tool("count", None, COUNT.parameters, exec='cat "$path"', exec_args=("path",))
    replies = [call("count", path="deep/a.txt"), answer("2")]
    session = scripted(replies)
    (outcome,) = evaluate(session, [pwd], [task(files={"deep/a.txt": "the tide is out"})])
    assert outcome.right
    assert "the tide is out" in decode(session.tokenizer, list(session.seen.encode()))


# Adding up


def test_groups_and_sums(judge: Callable[..., Outcome]) -> None:
    outcomes = [
        judge(RIGHT, id="a", arguments={"path": "a.txt"}),
        judge([*RIGHT[:1], answer("3")], id="b"),
        judge([answer("2")], id="c", tool=None),
        judge([answer("2")], id="d", tool=...),
        judge([call("range", n=2), *RIGHT], id="e", tool=..., calls=[{"tool": "range"}, {"tool": "count"}]),
    ]
    assert [group(outcome.task) for outcome in outcomes] == [
        "count", "count", "(no call)", "(not stated)", "(several calls)",
    ]  # fmt: skip
    assert list(groups(outcomes)) == ["count", "(no call)", "(not stated)", "(several calls)"]
    total = summarise(outcomes)
    assert (total.tasks, total.right) == (5, 4)
    assert total.valid_calls == (4, 4)
    assert total.right_tool == (4, 4)
    assert total.right_arguments == (1, 1)
    assert total.right_answer == (4, 5)
    assert total.sampled == sum(outcome.sampled for outcome in outcomes)
