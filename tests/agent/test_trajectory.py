"""Reading .atraj files: other writers', and what damage, a crash or a hostile hand make of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.agent.trajectory import Segment, read_trajectory
from posttrainllm.runtime.errors import InputError

STEP = {"role": "user", "content": "hi", "input_ids": [1, 2, 3], "output_ids": []}
SAID = {"role": "assistant", "content": "yo", "input_ids": [9], "output_ids": [4, 5]}
FILE: dict[str, Any] = {
    "version": 1,
    "id": "6f8b9d4a-0000-4000-8000-000000000000",
    "checkpoint_path": "m",
    "model_fingerprint": "f",
    "task": "t",
    "summary": {"a": "b"},
    "steps": [STEP, SAID],
}


def write(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps({**FILE, **changes}), encoding="utf-8")
    return path


def test_a_file_of_another_writer(tmp_path: Path) -> None:
    """Only the keys that both know; null, absent and unknown ones; a date that is text."""
    foreign = {
        **STEP,
        "output_ids": None,
        "tool_call": None,
        "reward": None,
        "timestamp": "2026-01-02T03:04:05Z",
        "new key": [1],
    }
    del foreign["content"]
    found = read_trajectory(write(tmp_path / "a.atraj", steps=[foreign], extra={"x": 1}))
    (step,) = found.steps
    assert (step.ids, step.content, step.reward, step.forced, step.timestamp) == (
        [1, 2, 3],
        "",
        None,
        None,
        None,
    )
    assert found.segments == [Segment()]
    assert found.facts == {"extra": {"x": 1}}


def test_what_closes_a_turn_stands_behind_what_was_said(tmp_path: Path) -> None:
    found = read_trajectory(write(tmp_path / "a.atraj"))
    (stretch,) = found.stretches()
    assert stretch.ids == [1, 2, 3, 4, 5, 9]


def test_segments_begin_with_what_they_keep(tmp_path: Path) -> None:
    segments = [
        {"first_step": 0, "kept": []},
        {"first_step": 2, "kept": [[0, 1], [3, 5]]},
        {"first_step": 3, "kept": [[1, 4]]},
    ]
    path = write(
        tmp_path / "a.atraj", steps=[STEP, SAID, {**STEP, "input_ids": [7]}, SAID], segments=segments
    )
    stretches = list(read_trajectory(path).stretches())
    assert [stretch.ids for stretch in stretches] == [[1, 2, 3, 4, 5, 9], [1, 4, 5, 7], [4, 5, 7, 4, 5, 9]]
    assert [stretch.kept for stretch in stretches] == [[], [1, 4, 5], [4, 5, 7]]


def test_the_reward_is_the_sum_of_the_steps(tmp_path: Path) -> None:
    steps = [{**SAID, "reward": 1}, {**SAID, "reward": -0.25}, SAID]
    assert read_trajectory(write(tmp_path / "a.atraj", steps=steps)).reward == 0.75
    assert read_trajectory(write(tmp_path / "a.atraj")).reward is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"version": 2}, "version 2; expected version 1"),
        ({"version": True}, "version True"),
        ({"id": None}, "#/id: missing"),
        ({"steps": {}}, "#/steps: an object; expected an array"),
        ({"steps": [3]}, "#/steps/0: an integer"),
        ({"steps": [{**STEP, "role": "root"}]}, "#/steps/0/role: 'root'"),
        ({"steps": [STEP, {**STEP, "input_ids": [1, "2"]}]}, "#/steps/1/input_ids: '2'; expected ids"),
        ({"steps": [{**STEP, "input_ids": [True]}]}, "input_ids: True"),
        ({"steps": [{**STEP, "input_ids": [-1]}]}, "input_ids: -1"),
        ({"steps": [{**SAID, "output_forced": [1]}]}, "1 entries; expected one for each of 2 ids"),
        ({"steps": [{**SAID, "output_logprobs": [0.5, "x"]}]}, "output_logprobs: a string"),
        ({"steps": [{**SAID, "reward": "high"}]}, "reward: a string; expected a finite number or null"),
        ({"steps": [{**SAID, "reward": 10**400}]}, "reward: an integer"),
        ({"steps": [{**SAID, "tool_call": {"name": 3}}]}, "tool_call/name: an integer"),
        ({"summary": {"a": 1}}, "#/summary: a value that is no string"),
        ({"segments": [{"first_step": 1}]}, "#/segments"),
        ({"segments": [{}, {"first_step": 9}]}, "#/segments"),
        ({"segments": [{}, {"first_step": 1, "kept": [[0, 4]]}]}, "spans of the 3 ids before"),
        ({"segments": [{}, {"first_step": 1, "kept": [[0]]}]}, "a span of another shape"),
    ],
)
def test_a_file_that_means_something_else_is_refused(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    path = write(tmp_path / "a.atraj", **changes)
    with pytest.raises(InputError) as caught:
        read_trajectory(path)
    assert str(path) in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty"),
        (b"\0" * 4096, "not JSON"),
        (json.dumps(FILE).encode()[:-20], "not JSON"),
        (b'{"version": 1, "reward": NaN}', "NaN is not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "an array; expected an object"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, content: bytes | None, expected: str) -> None:
    path = tmp_path / "a.atraj"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_trajectory(path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
