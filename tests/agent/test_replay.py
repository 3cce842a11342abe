"""Replays of real conversations of a real (random) model: they agree, and what is tampered with does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrainllm.agent.loop import Agent, Limits
from posttrainllm.agent.model_facts import ModelFacts
from posttrainllm.agent.recorder import TrajectoryRecorder
from posttrainllm.agent.replay import check_model, replay
from posttrainllm.agent.tools import FunctionBackend, HandlerRegistry, Tool
from posttrainllm.agent.trajectory import Trajectory, TrajectoryStep, read_trajectory
from posttrainllm.runtime import Sampler, Session, load
from posttrainllm.runtime.errors import InputError

PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 4}},
    "required": ["text"],
}
ECHO = Tool("echo", "Echo", PARAMETERS, handler="echo")
Record = Callable[..., Trajectory]


@pytest.fixture(scope="module")
def session(make_bundle: Callable[..., Path]) -> Session:
    return load(make_bundle(d_model=32, heads=4, layers=2, ctx=2048))


@pytest.fixture
def record(session: Session, tmp_path: Path) -> Record:
    """record(turns, sampler=, constrain=, drop=) -> the trajectory of a conversation."""

    def run(*turns: str, drop: bool = False, **options: Any) -> Trajectory:
        handlers = HandlerRegistry()
        handlers.register("echo", lambda text: text)
        recorder = TrajectoryRecorder(tmp_path, ModelFacts.of(session, "m"))
        agent = Agent(
            session,
            (ECHO,),
            backend=FunctionBackend(handlers),
            limits=Limits(3, 24),
            recorder=recorder,
            **options,
        )
        opening = len(agent.conversation.spans)
        first: list[int] = []
        for turn in turns:
            if drop and first:
                del agent.conversation.spans[opening : first[-1]]
            list(agent.run(turn))
            first.append(len(agent.conversation.spans))
        return read_trajectory(recorder.path)

    return run


@pytest.mark.parametrize("constrain", [True, False])
def test_a_greedy_conversation_comes_out_again(record: Record, session: Session, constrain: bool) -> None:
    found = record("hello", "and now?", constrain=constrain)
    report = replay(found, session)
    assert report.wrong == []
    assert report.sampled == sum(not forced for step in found.steps for forced in step.forced or [])
    assert report.sampled > 10
    assert (report.forced > 0) is constrain
    assert report.logprobs == report.sampled
    assert report.worst_logprob < 1e-3
    *before, last = found.steps
    assert last.forced is not None
    behind = (
        last.forced[::-1].index(False) + 1
    )  # the last sampled id, and what was forced after it: never fed
    assert report.ids == sum(len(step.ids) for step in before) + len(last.output_ids) - behind


def test_a_sampled_conversation_is_checked_by_its_log_probabilities(record: Record, session: Session) -> None:
    found = record("hello", "and now?", sampler=Sampler(1.0, seed=3))
    report = replay(found, session)
    assert not report.greedy
    assert report.wrong == []
    assert report.logprobs > 10


def test_every_segment_is_replayed(record: Record, session: Session) -> None:
    found = record("hello", "and now?", "third", drop=True)
    assert len(found.segments) > 1
    report = replay(found, session)
    assert report.segments == len(found.segments)
    assert report.wrong == []


def test_what_left_a_full_context_is_a_segment_that_comes_out_again(record: Record, session: Session) -> None:
    turns = [f"question {number}" for number in range(6)]
    found = record(*turns, cache=session.new_cache(max_length=1300))
    assert len(found.segments) > 1
    assert all(len(stretch.ids) <= 1300 for stretch in found.stretches())
    report = replay(found, session)
    assert report.wrong == report.close == []
    assert report.worst_logprob < 1e-5


def change(found: Trajectory, edit: Callable[[TrajectoryStep], TrajectoryStep]) -> Trajectory:
    """The trajectory with its last assistant step edited."""
    number = max(i for i, step in enumerate(found.steps) if step.role == "assistant")
    steps = [edit(step) if i == number else step for i, step in enumerate(found.steps)]
    return replace(found, steps=steps)


def first_sampled(step: TrajectoryStep) -> int:
    assert step.forced is not None
    return step.forced.index(False)


def test_another_id_does_not_come_out(record: Record, session: Session) -> None:
    def edit(step: TrajectoryStep) -> TrajectoryStep:
        ids = list(step.output_ids)
        ids[first_sampled(step)] ^= 1
        return replace(step, output_ids=ids)

    for constrain in (True, False):
        assert replay(change(record("hello", constrain=constrain), edit), session).wrong


def test_an_id_that_was_not_sampled_does_not_count_as_forced(record: Record, session: Session) -> None:
    def edit(step: TrajectoryStep) -> TrajectoryStep:
        forced = list(step.forced or [])
        forced[first_sampled(step)] = True
        return replace(step, forced=forced)

    (wrong,) = replay(change(record("hello"), edit), session).wrong
    assert "recorded as forced" in wrong.reason


def test_another_log_probability_does_not_come_out(record: Record, session: Session) -> None:
    def edit(step: TrajectoryStep) -> TrajectoryStep:
        logprobs = list(step.logprobs or [])
        logprobs[first_sampled(step)] = -123.0
        return replace(step, logprobs=logprobs)

    (wrong,) = replay(change(record("hello"), edit), session).wrong
    assert "log-probability is off" in wrong.reason


def test_another_input_changes_what_comes_out(record: Record, session: Session) -> None:
    found = record("hello there", "more")
    steps = [
        replace(step, input_ids=[*step.input_ids[:-40], *reversed(step.input_ids[-40:])])
        if step.role == "system"
        else step
        for step in found.steps
    ]
    assert replay(replace(found, steps=steps), session).wrong


def test_another_model_is_refused_with_both_fingerprints(
    record: Record, session: Session, tiny_bundle: Path
) -> None:
    found = record("hello")
    check_model(found, session, "f", "m")
    other = load(tiny_bundle)
    with pytest.raises(InputError) as caught:
        check_model(found, other, "f", "m")
    for bundle in (session.bundle, other.bundle):
        assert bundle.manifest.files["model.onnx.data"].sha256 in str(caught.value)


def test_a_file_that_names_the_exported_checkpoint_is_accepted(record: Record, session: Session) -> None:
    """Another runtime hashes the checkpoint, which the bundle remembers."""
    found = replace(record("hello"), model_fingerprint=session.manifest.source.sha256)
    check_model(found, session, "f", "m")


def test_ids_that_the_model_cannot_take_are_refused(record: Record, session: Session) -> None:
    found = record("hello")
    big = replace(found, steps=[replace(found.steps[0], input_ids=[256]), *found.steps[1:]])
    with pytest.raises(InputError, match="the id 256"):
        replay(big, session)
    long = replace(found, steps=[replace(found.steps[0], input_ids=[65] * 2048), *found.steps[1:]])
    with pytest.raises(InputError, match="longer than the context"):
        replay(long, session)


def test_a_grammar_without_its_facts_is_refused(record: Record, session: Session) -> None:
    found = record("hello")
    for name, expected in (("tools", "facts are not there"), ("template_fingerprint", "with the template")):
        facts = {key: value for key, value in found.facts.items() if key != name}
        with pytest.raises(InputError, match=expected):
            replay(replace(found, facts=json.loads(json.dumps(facts))), session)
