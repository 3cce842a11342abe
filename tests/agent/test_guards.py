"""Free decoding (`--no-constrain`): whatever the model writes, nothing is run by half, and the turn says how it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrainllm.agent.loop import Agent, Limits
from posttrainllm.agent.tools import FunctionBackend, HandlerRegistry, Tool

SCHEMA = json.loads((Path(__file__).parents[2] / "tools_schemas" / "events.schema.json").read_text())
FIELDS = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "n": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["id"],
}
RECORD = Tool("record", "Keep a record", FIELDS, handler="record")
PING = Tool("ping", "Say pong", {"type": "object", "properties": {}}, handler="ping")
DONE = '{"answer": "done"}'
ONE = '{"tool": "record", "arguments": {"id": "a"}}'


class Run:
    """One user turn of a model that writes `replies`; `ran` is what really ran."""

    def __init__(self, session: Any, **options: Any) -> None:
        self.ran: list[dict[str, Any]] = []
        handlers = HandlerRegistry()
        record = options.pop("record", lambda **arguments: "kept")

        def run(**given: Any) -> Any:
            self.ran.append(given)
            return record(**given)

        def ping() -> str:
            self.ran.append({})
            return "pong"

        handlers.register("record", run)
        handlers.register("ping", ping)
        options.setdefault("constrain", False)
        self.agent = Agent(session, (RECORD, PING), backend=FunctionBackend(handlers), **options)
        self.session = session
        self.events = self.turn("go")

    def turn(self, text: str) -> list[dict[str, Any]]:
        found = [event.to_json() for event in self.agent.run(text) if event.type != "delta"]
        for event in found:
            jsonschema.validate(event, SCHEMA)
        return found

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    @property
    def last(self) -> dict[str, Any]:
        return self.events[-1]


def test_a_truncated_call_gets_one_retry_with_the_reason_and_never_runs(scripted: Callable[..., Any]) -> None:
    cut = '{"tool":"record","arguments":{"id":"a","n":'
    run = Run(scripted([cut, ONE, DONE]))
    told, _ = run.of("tool_call")
    assert "your reply was not understood: the object breaks off before its closing brace" in told["stderr"]
    assert told["exit_code"] == 2
    assert run.ran == [{"id": "a"}], "the whole call ran, once"
    assert run.last["text"] == "done"
    twice = Run(scripted([cut, cut]))
    assert twice.ran == []
    assert (twice.last["type"], twice.last["fallback"]) == ("answer", True)


def test_a_call_cut_off_by_the_limit_is_told_the_limit(scripted: Callable[..., Any]) -> None:
    run = Run(scripted([ONE, ONE]), limits=Limits(max_tokens=12))
    assert "truncated: only 12 sampled ids are allowed (--max-tokens)" in run.of("tool_call")[0]["stderr"]
    assert (run.last["type"], run.last["reason"]) == ("stop", "tokens")
    assert run.ran == []


@pytest.mark.parametrize(
    ("broken", "place"),
    [
        ('{"tool":"record","arguments":{"id":"echo \\\'hi\\\'"}}', "line 1 column"),
        ('{"tool":"record","arguments":{"id":"a"}]}', "delimiter"),
        ('{"tool":"record","arguments":{"id":"a" "n":1}}', "line 1 column"),
        ('{"tool":"record","arguments":{"id":"a","n":NaN}}', "NaN"),
    ],
)
def test_the_parser_says_where(broken: str, place: str, scripted: Callable[..., Any]) -> None:
    """One stray character raises nothing, and the model is told its place."""
    run = Run(scripted([broken, ONE, DONE]))
    assert place in run.of("tool_call")[0]["stderr"]
    assert place in run.session.seen
    assert run.ran == [{"id": "a"}]
    assert run.last["text"] == "done"


def test_the_retry_counts_for_a_turn_and_comes_back_with_the_next(scripted: Callable[..., Any]) -> None:
    broken = '{"tool": "record", "arguments": {"id": }}'
    run = Run(scripted([broken, ONE, broken, broken, DONE]))
    assert run.last["text"] == broken[:-1], "up to where it stopped being JSON"
    assert run.last["fallback"] is True
    assert [event["exit_code"] for event in run.of("tool_call")] == [2, 0]
    again = run.turn("again")
    assert [event["type"] for event in again][-1] == "answer"
    assert again[-1]["text"] == "done"


def test_a_model_that_never_writes_json_is_asked_nothing_twice(scripted: Callable[..., Any]) -> None:
    run = Run(scripted(["I would rather talk."]))
    assert (run.last["text"], run.last["fallback"]) == ("I would rather talk.", True)
    assert len(run.of("assistant")) == 1


@pytest.mark.parametrize(
    "text",
    [
        'Like so:\n```json\n{"name":"record","arguments":{"id":"a"}}\n```',
        'Like so: {"name":"x","arguments":{}}',
        'The set {1,2} and {"foo": 1}.',
    ],
)
def test_json_in_prose_is_prose(text: str, scripted: Callable[..., Any]) -> None:
    run = Run(scripted([text]))
    assert run.ran == []
    assert run.last["text"] == text


def test_json_in_an_answer_is_the_answer(scripted: Callable[..., Any]) -> None:
    text = f"Write {ONE} to record"
    for constrain in (True, False):
        run = Run(scripted([json.dumps({"answer": text})]), constrain=constrain)
        assert run.ran == []
        assert run.last["text"] == text
        assert "fallback" not in run.last


@pytest.mark.parametrize(
    ("reply", "shape"),
    [
        ('{"name": "record", "arguments": {"id": "a"}}', "name"),
        ('{"name": "record", "parameters": {"id": "a"}}', "name"),
        ('{"type": "function", "function": {"name": "record", "arguments": {"id": "a"}}}', "function"),
        ('{"function": {"name": "record", "arguments": "{\\"id\\": \\"a\\"}"}}', "function"),
        ('<tool_call>\n{"name": "record", "arguments": {"id": "a"}}\n</tool_call>', "name"),
    ],
)
def test_other_shapes_of_a_call_run_and_are_named(
    reply: str, shape: str, scripted: Callable[..., Any]
) -> None:
    run = Run(scripted([reply, DONE]))
    assert run.ran == [{"id": "a"}]
    assert run.of("assistant")[0]["dialect"] == shape


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        ('"{\\"id\\":\\"a\\"}"', {"id": "a"}),
        ('{"id": "a", "n": "5"}', {"id": "a", "n": 5}),
        ('{"id": "a", "tags": "[\\"x\\"]"}', {"id": "a", "tags": ["x"]}),
        ('{"id": "a", "n": null}', {"id": "a"}),
        ('{"id": "{\\"id\\":1}"}', {"id": '{"id":1}'}),
    ],
)
def test_arguments_are_read_by_the_schema(arguments: str, got: Any, scripted: Callable[..., Any]) -> None:
    """Encoded twice, numbers and lists as text, null for nothing; a string that holds JSON stays one."""
    run = Run(scripted([f'{{"tool": "record", "arguments": {arguments}}}', DONE]))
    assert run.ran == [got]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ('"not json"', "arguments"),
        ("[1]", "arguments"),
        ('{"id": "a", "n": "3.14"}', "n: expected integer, got"),
        ('{"id": "a", "n": true}', "n: expected integer, got"),
        ('{"id": null}', "id: expected string, got"),
        ("{}", "id: expected string, got nothing"),
    ],
)
def test_arguments_that_do_not_fit_are_a_result_that_names_the_field(
    arguments: str, field: str, scripted: Callable[..., Any]
) -> None:
    run = Run(scripted([f'{{"tool": "record", "arguments": {arguments}}}', DONE]))
    assert run.ran == []
    (told,) = run.of("tool_call")
    assert told["exit_code"] == 2
    assert field in told["stderr"]
    assert run.last["text"] == "done"


def test_a_call_without_arguments_and_one_of_several(scripted: Callable[..., Any]) -> None:
    """Missing arguments are none. Of several objects the first counts, and the others were not even written:
    decoding stops at its brace."""
    run = Run(scripted(['{"tool": "ping"} {"tool": "record", "arguments": {"id": "a"}}', DONE]))
    assert run.ran == [{}]
    assert run.of("assistant")[0]["raw"] == '{"tool": "ping"}'


def test_text_before_a_call_is_kept(scripted: Callable[..., Any]) -> None:
    run = Run(scripted([f"Let me look. {ONE}", DONE]))
    assert run.of("assistant")[0]["raw"] == f"Let me look. {ONE}"
    assert f"Let me look. {ONE}<|im_end|>\n<|im_start|>tool" in run.session.seen


@pytest.mark.parametrize("constrain", [True, False])
def test_the_same_call_again_and_again_is_told_and_ends_the_turn(
    constrain: bool, scripted: Callable[..., Any]
) -> None:
    run = Run(scripted([ONE] * 4 + [DONE, DONE]), constrain=constrain)
    assert len(run.ran) == 3
    assert [event["exit_code"] for event in run.of("tool_call")] == [0, 0, 0, 126]
    assert (
        run.of("tool_result")[-1]["stderr"] == "not run: the same call gave the same result 3 times in a row"
    )
    assert (run.last["type"], run.last["reason"]) == ("stop", "repeat")
    assert run.turn("go on")[-1]["text"] == "done"
    assert "not run: the same call" in run.session.seen, "and the next turn knows"
    closed = "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\ngo on<|im_end|>"
    assert closed in run.session.seen, "the turn that was opened for the model is closed"


def test_calls_that_cannot_run_count_as_equal_calls(scripted: Callable[..., Any]) -> None:
    run = Run(scripted(['{"tool": "nope", "arguments": {}}'] * 4))
    assert (run.last["type"], run.last["reason"]) == ("stop", "repeat")
    assert all("record" in event["stderr"] for event in run.of("tool_call")[:3]), "the known names are listed"


def test_a_call_whose_result_changes_is_no_loop(scripted: Callable[..., Any]) -> None:
    numbers = iter(range(9))
    run = Run(scripted([ONE] * 5 + [DONE]), record=lambda id: str(next(numbers)))
    assert len(run.ran) == 5
    assert run.last["text"] == "done"


def test_two_calls_in_turn_end_with_the_steps(scripted: Callable[..., Any]) -> None:
    replies = [ONE, '{"tool": "ping", "arguments": {}}'] * 5
    run = Run(scripted(replies), limits=Limits(max_steps=6))
    assert (run.last["type"], run.last["reason"]) == ("stop", "steps")
    assert "--max-steps" in run.last["detail"]
    assert len(run.ran) == 6


@pytest.mark.parametrize("failure", [ValueError("no such id"), SystemExit(3), RecursionError("deep")])
def test_a_handler_that_raises_is_a_result(failure: BaseException, scripted: Callable[..., Any]) -> None:
    def record(id: str) -> str:
        raise failure

    run = Run(scripted([ONE, DONE]), record=record)
    assert run.of("tool_call")[0]["exit_code"] != 0
    assert run.last["text"] == "done"


CHARACTERS = '{}[]":,\\ 1atnul`ols\n<|>'
REPLIES = st.lists(
    st.text(alphabet=st.sampled_from(CHARACTERS), max_size=30)
    | st.sampled_from([ONE, DONE, ONE[:-1], ONE[:20], '{"tool": "record", "arguments": "{}"}', "🙂" + ONE]),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(replies=REPLIES)
def test_every_turn_ends_with_an_answer_or_a_reason(replies: list[str], scripted: Callable[..., Any]) -> None:
    """No text makes the loop raise or go on, and only whole calls of the script ever run."""
    safe = [reply.replace("<|", "<") for reply in replies]
    run = Run(scripted([*safe, *[DONE] * 12]), limits=Limits(max_steps=3))
    assert run.last["type"] in ("answer", "stop")
    assert all(given.get("id") == "a" for given in run.ran)
    assert sum(event["type"] in ("answer", "stop") for event in run.events) == 1
