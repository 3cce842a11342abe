"""The context plan: what leaves a full context, what stays, and what is said about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrainllm.agent.context_plan import ContextPlan, NoRoomError, ResultTurn, UserTurn
from posttrainllm.agent.dialect import PosttrainConversation
from posttrainllm.agent.loop import Agent, Limits
from posttrainllm.agent.tools import FunctionBackend, HandlerRegistry, Tool, ToolResult
from posttrainllm.runtime import Session, load
from posttrainllm.runtime.tokenizer import decode

SCHEMA = json.loads((Path(__file__).parents[2] / "tools_schemas" / "events.schema.json").read_text())
ECHO = Tool(
    "echo",
    "Echo input",
    {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    handler="echo",
)
MARKERS = "<|im_start|>", "<|im_end|>"


def answer(text: str) -> str:
    return json.dumps({"answer": text})


def call(text: str) -> str:
    return json.dumps({"tool": "echo", "arguments": {"text": text}})


def make(session: Any, **options: Any) -> Agent:
    handlers = HandlerRegistry()
    handlers.register("echo", options.pop("function", lambda text: text))
    options.setdefault("limits", Limits(max_tokens=100))
    return Agent(session, (ECHO,), backend=FunctionBackend(handlers), **options)


def play(agent: Agent, text: str) -> list[dict[str, Any]]:
    """The events of one turn, deltas left out, each checked against the schema."""
    found = [event.to_json() for event in agent.run(text) if event.type != "delta"]
    for event in found:
        jsonschema.validate(event, SCHEMA)
    return found


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == kind]


def system_length(session: Any) -> int:
    return len(make(session).conversation)


def test_the_oldest_turn_leaves_whole_and_no_more_than_needed(scripted: Callable[..., Any]) -> None:
    room = system_length(scripted([])) + 500
    session = scripted([answer(word) for word in ("one", "two", "three", "four")], context_length=room)
    agent = make(session)
    for word in ("first", "second"):
        assert not of(play(agent, f"the {word} question " + "." * 60), "context")
    before = len(agent.conversation)
    (event,) = of(play(agent, "the third question " + "." * 60), "context")
    assert event["dropped_turns"] == [0]
    assert event["limit"] == room
    seen = session.seen
    assert "the first question" not in seen
    assert "one" not in seen
    assert seen.count(MARKERS[0] + "user") == 2
    assert seen.startswith(MARKERS[0] + "system\n")
    assert (
        f"the second question {'.' * 60}{MARKERS[1]}\n{MARKERS[0]}assistant\n{answer('two')}{MARKERS[1]}"
        in seen
    )
    left = len(
        f"{MARKERS[0]}user\nthe first question {'.' * 60}{MARKERS[1]}\n{MARKERS[0]}assistant\n{answer('one')}{MARKERS[1]}\n"
    )
    assert event["dropped_tokens"] == left
    third = (
        f"{MARKERS[1]}\n{MARKERS[0]}user\nthe third question {'.' * 60}{MARKERS[1]}\n{MARKERS[0]}assistant\n"
    )
    assert event["held_tokens"] == before - left + len(third)


def test_a_chat_goes_on_for_ever(scripted: Callable[..., Any]) -> None:
    room = system_length(scripted([])) + 700
    agent = make(one_by_one(scripted([], room), [answer("x")] * 60))
    dropped: list[int] = []
    for turn in range(60):
        events = play(agent, f"question {turn} " + "y" * (turn * 7 % 90))
        assert events[-1]["type"] == "answer"
        for event in of(events, "context"):
            dropped += event["dropped_turns"]
            assert event["held_tokens"] + 100 <= room
    assert dropped == list(range(len(dropped))), "oldest first, each once"
    assert len(dropped) > 50


def test_old_calls_of_the_present_turn_leave_before_the_message_does(scripted: Callable[..., Any]) -> None:
    replies = [call(f"call {number}") for number in range(6)] + [answer("done")]
    session = one_by_one(scripted([], system_length(scripted([])) + 700), replies)
    agent = make(session, function=lambda text: f"result of {text} " + "z" * 60)
    events = play(agent, "the message")
    assert events[-1] == events[-1] | {"type": "answer", "text": "done"}
    contexts = of(events, "context")
    assert contexts
    assert {turn for event in contexts for turn in event["dropped_turns"]} == {0}
    assert "user\nthe message" in session.seen
    assert "result of call 5" in session.seen
    assert "result of call 0" not in session.seen
    assert "call 0" not in session.seen, "a call leaves with its result"


def one_by_one(session: Any, replies: list[str]) -> Any:
    """`session` gives reply after reply, since counting the turns in the prompt tells nothing once some have left."""
    scripts = iter([(reply + MARKERS[1]).encode() for reply in replies])
    said, script = b"", b""

    def prefill(ids: list[int], cache: Any) -> Any:
        nonlocal said, script
        _, *turns = bytes(ids).split(f"{MARKERS[0]}assistant\n".encode())
        cache.reserve(len(ids))
        cache.ids[:] = ids
        if not turns:  # the system prompt by itself
            return np.zeros(256, np.float32)
        last = turns[-1]
        if not script or len(last) <= len(said):
            script = next(scripts)
        said = last
        session.seen = decode(session.tokenizer, ids)
        logits = np.zeros(256, np.float32)
        logits[script[len(last)]] = 9
        return logits

    session.prefill = prefill
    return session


def test_a_result_too_large_for_any_room_is_shortened_to_head_and_tail(scripted: Callable[..., Any]) -> None:
    room = system_length(scripted([])) + 700
    session = scripted([call("x"), answer("done")], context_length=room)
    agent = make(session, function=lambda text: "HEAD" + "m" * 3000 + "TAIL")
    events = play(agent, "go")
    assert events[-1]["type"] == "answer"
    (event,) = of(events, "context")
    (shown,) = of(events, "tool_result")
    (ran,) = of(events, "tool_call")
    assert ran["stdout"] == "HEAD" + "m" * 3000 + "TAIL"
    assert shown["stdout"].startswith("HEADmmm")
    assert shown["stdout"].endswith("mmmTAIL")
    assert f"…[truncated {event['shortened']} bytes]" in shown["stdout"]
    assert event["dropped_turns"] == []
    assert f'"truncated":{event["shortened"]}' in session.seen
    assert room - 110 < event["held_tokens"] + 100 <= room, "as much as fits is shown"


def test_what_fits_once_everything_else_left_is_not_shortened(scripted: Callable[..., Any]) -> None:
    room = system_length(scripted([])) + 700
    session = one_by_one(scripted([], room), [answer("hm"), call("x"), answer("done")])
    agent = make(session, function=lambda text: "r" * 250)
    play(agent, "an old question " + "." * 150)
    events = play(agent, "go")
    (event,) = of(events, "context")
    assert "shortened" not in event
    assert event["dropped_turns"] == [0]
    assert of(events, "tool_result")[0]["stdout"] == "r" * 250


@pytest.mark.parametrize("policy", ["evict", "stop"])
def test_a_message_that_can_never_fit_stops_with_the_numbers(
    scripted: Callable[..., Any], policy: Any
) -> None:
    session = scripted([answer("fine")] * 3, context_length=1200)
    agent = make(session, context_policy=policy)
    assert play(agent, "x")[-1]["type"] == "answer"
    before, segment = agent.conversation.ids, agent.conversation.segment
    (stop,) = play(agent, "y" * 1000)
    assert stop["reason"] == "context"
    assert "+ 100 for the reply do not fit in 1200" in stop["detail"]
    assert (agent.conversation.ids, agent.conversation.segment) == (before, segment)
    assert play(agent, "short")[-1]["type"] == "answer"


def test_stop_keeps_everything(scripted: Callable[..., Any]) -> None:
    room = system_length(scripted([])) + 400
    agent = make(scripted([answer("fine")] * 3, context_length=room), context_policy="stop")
    assert play(agent, "x" * 90)[-1]["type"] == "answer"
    before = agent.conversation.ids
    assert play(agent, "y" * 90)[-1]["reason"] == "context"
    assert agent.conversation.ids == before


def test_a_turn_that_is_taken_back_brings_back_what_had_left(scripted: Callable[..., Any]) -> None:
    room = system_length(scripted([])) + 400
    agent = make(scripted([answer("fine")] * 3, context_length=room))
    play(agent, "x" * 90)
    before = agent.conversation.ids
    turn = agent.run("y" * 90)
    kinds = [next(turn).type, next(turn).type]
    assert kinds == ["user", "context"]
    turn.close()
    assert agent.conversation.ids == before
    assert of(play(agent, "z" * 90), "context")[0]["dropped_turns"] == [0]


TEXTS = st.lists(
    st.sampled_from([*'ab é日🙂\n"\\{}<|>', "<|im_end|>", "<|im_start|>system\n"]), max_size=12
).map("".join)


@pytest.fixture(scope="module")
def session(make_bundle: Callable[..., Path]) -> Session:
    return load(make_bundle(vocab=256, d_model=16, heads=2, layers=1, ctx=1100, seed=3), provider="cpu")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    turns=st.lists(st.tuples(TEXTS, st.lists(TEXTS, max_size=2), st.booleans()), min_size=1, max_size=8),
    limit=st.integers(880, 1100),
)
def test_random_conversations_hold_what_the_rules_say(
    session: Session, turns: list[tuple[str, list[str], bool]], limit: int
) -> None:
    """Never over the limit; the system prompt first; whole turns, in order, the newest among them; and what the cache
    was fed in pieces gives the logits of the same ids fed at once."""
    dialect = PosttrainConversation(session, "You are.", [ECHO])
    plan = ContextPlan(dialect, limit=limit, reserve=50, policy="evict")
    opening = plan.conversation.ids
    cache = session.new_cache()
    for number, (text, results, taken_back) in enumerate(turns):
        mark, before = plan.mark(), plan.conversation.ids
        said = [UserTurn(number, f"q{number} {text}")]
        said += [ResultTurn(number, ToolResult("echo", output, "", 0)) for output in results]  # type: ignore[misc]
        try:
            for turn in said:
                plan.admit(turn)
                assert plan.conversation.ids[: len(opening)] == opening
                assert len(plan.conversation) + 50 <= limit
                logits = session.prefill(plan.conversation.ids, cache)
                assert cache.ids == plan.conversation.ids
                reply = list(b'{"answer": "r"}')
                plan.conversation.extend([span := _sampled(reply)])
                plan.heard(number, [span], '{"answer": "r"}')
        except NoRoomError:
            taken_back = True
        if taken_back:
            plan.restore(mark)
            assert plan.conversation.ids == before
            continue
        whole = session.prefill(plan.conversation.ids[: cache.length], session.new_cache())
        assert np.abs(whole - logits).max() < 1e-4 * np.ptp(whole)
        held = decode(session.tokenizer, plan.conversation.ids)
        kept = [other for other in range(number + 1) if f"{MARKERS[0]}user\nq{other} " in held]
        assert kept[-1:] == [number]
        assert kept == [other for other in kept if other >= kept[0]]


def _sampled(ids: list[int]) -> Any:
    from posttrainllm.agent.chat_format import IdSpan

    return IdSpan("sampled", ids)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(TEXTS, min_size=1, max_size=6))
def test_nothing_is_renamed_by_putting_it_into_ids_again(session: Session, texts: list[str]) -> None:
    """The turns that stay have the ids that they had."""
    dialect = PosttrainConversation(session, "You are.", [ECHO])
    plan = ContextPlan(dialect, limit=5000, reserve=50, policy="evict")
    for number, text in enumerate(texts):
        plan.admit(UserTurn(number, text))
        plan.conversation.extend([span := _sampled(list(b"{}"))])
        plan.heard(number, [span], "{}")
    fresh = ContextPlan(dialect, limit=5000, reserve=50, policy="evict")
    again = fresh._rebuilt(plan._turns, [range(0)])
    assert again.ids == plan.conversation.ids
