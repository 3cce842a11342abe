"""Training rows from trajectories. What the rules say decides; ids and masks are counted by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.agent.preference_pairs import PairCounts, pair_rows
from posttrainllm.agent.training_data import (
    Source,
    exchanges,
    id_rows,
    is_tool_echo,
    message_rows,
    to_line,
)
from posttrainllm.agent.trajectory import TrajectoryCall, TrajectoryStep
from posttrainllm.runtime.errors import InputError

Write = Callable[..., Path]


def user(text: str, ids: list[int] | None = None) -> dict[str, Any]:
    return {"role": "user", "content": text, "input_ids": ids or [1, 2]}


def said(text: str, ids: list[int] | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "output_ids": ids or [3, 4], **more}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write("name", steps, task=, segments=) -> the file."""

    def make(name: str, *steps: dict[str, Any], task: str = "t", **more: Any) -> Path:
        path = tmp_path / f"{name}.atraj"
        path.parent.mkdir(exist_ok=True)
        body = {"version": 1, "id": name, "task": task, "steps": list(steps), **more}
        path.write_text(json.dumps(body), encoding="utf-8")
        return path

    return make


def rows(folder: Path, **options: Any) -> list[dict[str, Any]]:
    options = {"threshold": 0.85, "drop_echoes": True, **options}
    return list(message_rows(Source(folder), **options))


def test_the_last_thing_said_before_the_next_user_turn_is_the_response(write: Write, tmp_path: Path) -> None:
    call = said('{"tool": "t", "arguments": {}}', tool_call={"name": "t", "arguments_json": "{}"})
    tool = {"role": "tool", "content": "{}", "input_ids": [9]}
    write(
        "a", said("before anybody asked"), user("one"), call, tool, said("first"), user("two"), said("second")
    )
    write("b", user("unanswered"), user("three"), said("third"), user("and this one is not"))
    assert [[message["content"] for message in row["messages"]] for row in rows(tmp_path)] == [
        ["one", "first"],
        ["two", "second"],
        ["three", "third"],
    ]
    assert rows(tmp_path)[0] == {
        "messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "first"}],
        "source_atraj": "a.atraj",
        "task": "t",
    }


@pytest.mark.parametrize(
    ("text", "called", "echo"),
    [
        ('{"tool": "t", "arguments": {}}', True, True),
        ('  {"tool": "t", "arguments": {}}\n', False, True),
        ("<tool_call>\n{}\n</tool_call>", True, True),
        ("[TOOL_CALLS] [{}]", True, True),
        ('Let me look. {"tool": "t", "arguments": {}}', True, False),
        ('Let me look. {"tool": "t", "arguments": {}}', False, False),
        ('{"answer": "x"}', False, False),
        ('{"answer": "x", "tool": "t"}', False, False),
        ('{"tool": 3}', False, False),
        ("plain", False, False),
        ("[" * 100_000, False, False),
    ],
)
def test_tool_echoes(text: str, called: bool, echo: bool) -> None:
    step = TrajectoryStep("assistant", text, tool_call=TrajectoryCall("t", "{}") if called else None)
    assert is_tool_echo(step) is echo


def test_an_exact_duplicate_is_one_of_prompt_and_response(write: Write, tmp_path: Path) -> None:
    write("a", user("How many lines does LICENSE have?"), said("21"))
    write("b", user("How many lines does LICENSE have?"), said("21"))
    write("c", user("How many lines does LICENSE have?"), said("22"))
    source = Source(tmp_path)
    found = list(message_rows(source, threshold=0.85, drop_echoes=True))
    assert [row["source_atraj"] for row in found] == ["a.atraj"]
    assert (source.counts.harvested, source.counts.exact, source.counts.near) == (3, 1, 1)


def test_files_are_read_in_the_order_of_their_names_below_the_folder_too(
    write: Write, tmp_path: Path
) -> None:
    for name, text in (("z", "alpha alpha"), ("b/a", "beta beta beta"), ("a", "gamma gamma gamma")):
        write(name, user(text), said("x"))
    (tmp_path / ".b.atraj").write_text("a temporary file")
    (tmp_path / "notes.txt").write_text("no trajectory")
    assert [row["source_atraj"] for row in rows(tmp_path)] == ["a.atraj", "z.atraj", "b/a.atraj"]


def test_only_a_task(write: Write, tmp_path: Path) -> None:
    write("a", user("alpha alpha"), said("x"), task="one")
    write("b", user("beta beta beta"), said("x"), task="two")
    source = Source(tmp_path, "two")
    assert [row["task"] for row in message_rows(source, threshold=0.85, drop_echoes=True)] == ["two"]
    assert source.counts.other_task == 1


def test_damaged_files_are_reported_and_passed_over(write: Write, tmp_path: Path) -> None:
    write("a", user("alpha alpha"), said("x"))
    (tmp_path / "b.atraj").write_bytes(b"\0" * 512)
    (tmp_path / "c.atraj").write_bytes(b'{"version": 1, "id": "c", "steps": [{"ro')
    errors: list[InputError] = []
    source = Source(tmp_path, report=errors.append)
    assert len(list(message_rows(source, threshold=0.85, drop_echoes=True))) == 1
    assert [Path(error.subject).name for error in errors] == ["b.atraj", "c.atraj"]
    (tmp_path / "a.atraj").unlink()
    with pytest.raises(InputError, match="none of its 2"):
        rows(tmp_path)


@pytest.mark.parametrize("name", ["nothing", ""])
def test_a_folder_without_trajectories(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="no such folder" if name else r"no \.atraj file"):
        rows(tmp_path / name)


def test_ids_with_their_loss_mask(write: Write, tmp_path: Path) -> None:
    """1: what the model said, and the end of turn that it is to learn; a cut-off step has none."""
    write(
        "a",
        {"role": "system", "content": "s", "input_ids": [1, 2]},
        user("u", [3]),
        said("c", [4, 5], end_of_turn_ids=[90], stop="stop"),
        {"role": "tool", "content": "r", "input_ids": [90, 91, 6]},
        said("d", [7, 8], end_of_turn_ids=[90], stop="length"),
        user("v", [90, 91, 9]),
        said("e", [10], input_ids=[90, 91], end_of_turn_ids=[90], stop="stop", reward=1),
    )
    (row,) = id_rows(Source(tmp_path), threshold=0.85)
    assert row["input_ids"] == [1, 2, 3, 4, 5, 90, 91, 6, 7, 8, 90, 91, 9, 10, 90, 91]
    assert row["loss_mask"] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0]
    assert (row["reward"], row["segment"], row["source_atraj"]) == (1.0, 0, "a.atraj")


def test_each_segment_is_a_row_and_trains_its_own_part(write: Write, tmp_path: Path) -> None:
    segments = [{"first_step": 0}, {"first_step": 2, "kept": [[0, 1], [3, 4]]}]
    write("a", user("u", [1, 2]), said("c", [3, 4]), user("v", [5]), said("d", [6]), segments=segments)
    first, second = id_rows(Source(tmp_path), threshold=0.85)
    assert (first["input_ids"], first["loss_mask"]) == ([1, 2, 3, 4], [0, 0, 1, 1])
    assert (second["input_ids"], second["loss_mask"]) == ([1, 4, 5, 6], [0, 0, 0, 1])


def test_duplicate_conversations_as_ids(write: Write, tmp_path: Path) -> None:
    write("a", user("alpha alpha", [1]), said("x", [2]))
    write("b", user("alpha alpha", [1]), said("x", [2]))
    write("c", user("alpha alpha", [1]), said("y", [3]))
    write("d", user("nobody answered", [1]))
    source = Source(tmp_path)
    assert len(list(id_rows(source, threshold=0.85))) == 1
    assert (source.counts.harvested, source.counts.exact, source.counts.near) == (3, 1, 1)


def rollout(write: Write, name: str, text: str, reward: float | None, **more: Any) -> None:
    prompt = more.pop("prompt", "question")
    write(name, user(prompt, [1, 2]), said(text, [3, len(text)], reward=reward), **more)


def pairs(folder: Path, *, ids: bool = False) -> tuple[list[dict[str, Any]], PairCounts]:
    counts = PairCounts()
    return list(pair_rows(Source(folder), counts, ids=ids)), counts


def test_the_best_rollout_is_paired_with_the_worst(write: Write, tmp_path: Path) -> None:
    for name, reward in (("a", 0.0), ("b", 1.0), ("c", 0.5), ("d", 0.25), ("e", 0.3)):
        rollout(write, name, name * 3, reward)
    found, counts = pairs(tmp_path)
    assert [(row["chosen_atraj"], row["rejected_atraj"]) for row in found] == [
        ("b.atraj", "a.atraj"),
        ("c.atraj", "d.atraj"),
    ]
    assert found[0]["prompt"] == [{"role": "user", "content": "question"}]
    assert found[0]["chosen"] == [{"role": "assistant", "content": "bbb"}]
    assert found[0]["rejected"] == [{"role": "assistant", "content": "aaa"}]
    assert (found[0]["chosen_reward"], found[0]["rejected_reward"], found[0]["task"]) == (1.0, 0.0, "t")
    assert (counts.rollouts, counts.unfit, counts.single, counts.emitted) == (5, 0, 1, 2)


def test_only_what_can_be_compared_is_paired(write: Write, tmp_path: Path) -> None:
    rollout(write, "a", "good", 1.0)
    rollout(write, "b", "bad", 0.0, task="another task")
    rollout(write, "c", "bad", 0.0, prompt="another question")
    rollout(write, "d", "as good", 1.0)
    rollout(write, "e", "not scored", None)
    write("f", user("question", [1, 2]), said("x", reward=0), user("more"), said("y", reward=0))
    rollout(write, "g", "good", 0.0)  # the words of "a", scored otherwise
    found, counts = pairs(tmp_path)
    assert found == []
    assert (counts.unfit, counts.emitted) == (2, 0)


def test_pairs_as_ids(write: Write, tmp_path: Path) -> None:
    rollout(write, "a", "good", 1.0)
    rollout(write, "b", "worse", -1.0)
    ((row,), _) = pairs(tmp_path, ids=True)
    assert row["prompt_ids"] == [1, 2]
    assert (row["chosen_ids"], row["chosen_loss_mask"]) == ([3, 4], [1, 1])
    assert (row["rejected_ids"], row["rejected_loss_mask"]) == ([3, 5], [1, 1])


def test_a_line_is_utf8_whatever_it_holds() -> None:
    assert to_line({"a": "é\n\ud800"}) == '{"a": "é\\n\\ud800"}\n'.encode("utf-8", "backslashreplace")
    assert json.loads(to_line({"a": "é\n"})) == {"a": "é\n"}


def test_exchanges_of_nothing() -> None:
    assert list(exchanges([])) == []
