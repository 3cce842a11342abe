"""What is recorded is what the model saw: the ids that the session was really fed decide."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrainllm.agent.chat_format import IdSpan
from posttrainllm.agent.conversation import Conversation
from posttrainllm.agent.events import Assistant
from posttrainllm.agent.kept_spans import held_spans, kept_spans
from posttrainllm.agent.loop import Agent, Limits
from posttrainllm.agent.model_facts import ModelFacts, weights_fingerprint
from posttrainllm.agent.recorder import TrajectoryRecorder
from posttrainllm.agent.tools import FunctionBackend, HandlerRegistry, Tool
from posttrainllm.agent.training_data import Source, id_rows
from posttrainllm.agent.trajectory import Trajectory, read_trajectory
from posttrainllm.runtime import KVCache, generate, load
from posttrainllm.runtime.bundle import Bundle, KVLayout
from posttrainllm.runtime.errors import InputError, UsageError
from posttrainllm.runtime.tokenizer import HuggingFaceTokenizer, decode

MODEL = ModelFacts("model.tinygpt", "ab" * 32, "bytes-256")
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
ECHO = Tool("echo", "Echo input", SCHEMA, handler="echo")
CALL = '{"tool": "echo", "arguments": {"text": "hi"}}'
ANSWER = '{"answer": "it said hi"}'
END = list(b"<|im_end|>")


def make(session: Any, recorder: TrajectoryRecorder | None, function: Any = None, **options: Any) -> Agent:
    handlers = HandlerRegistry()
    handlers.register("echo", function or (lambda text: text))
    return Agent(session, (ECHO,), backend=FunctionBackend(handlers), recorder=recorder, **options)


def spy(session: Any) -> list[list[int]]:
    """The ids of every call of `session.prefill` from now on: what the model saw."""
    seen: list[list[int]] = []
    prefill = session.prefill

    def watched(ids: list[int], cache: Any) -> Any:
        seen.append(list(ids))
        return prefill(ids, cache)

    session.prefill = watched
    return seen


def assert_seen(found: Trajectory, seen: list[list[int]]) -> None:
    sequences = [stretch.ids for stretch in found.stretches()]
    for ids in seen:
        assert any(sequence[: len(ids)] == ids for sequence in sequences)


def test_every_id_stands_where_the_model_saw_it(scripted: Callable[..., Any], tmp_path: Path) -> None:
    session = scripted([CALL, ANSWER, ANSWER])
    seen = spy(session)
    recorder = TrajectoryRecorder(tmp_path, MODEL, task="greet")
    agent = make(session, recorder)
    events = [*agent.run("say hi"), *agent.run("again")]
    counted = [event for event in events if isinstance(event, Assistant)]
    found = read_trajectory(recorder.path)
    assert_seen(found, seen)
    assert [step.role for step in found.steps] == [
        *("system", "user", "assistant", "tool", "assistant"),
        *("user", "assistant"),
    ]
    (stretch,) = found.stretches()
    closing = list(b"<|im_end|>\n")
    assert stretch.ids == agent.conversation.ids + closing
    system, user, call, tool, answer, _, last = found.steps
    assert bytes(user.input_ids).decode() == ("<|im_start|>user\nsay hi<|im_end|>\n<|im_start|>assistant\n")
    assert bytes(tool.input_ids).startswith(b"<|im_end|>\n<|im_start|>tool\n{")
    assert bytes(call.output_ids).decode() == call.content == CALL
    assert (call.input_ids, answer.input_ids, last.input_ids) == ([], [], closing)
    assert call.tool_call is not None
    assert json.loads(call.tool_call.arguments_json) == {"text": "hi"}
    assert tool.tool_result is not None
    assert (tool.tool_result.name, tool.tool_result.stdout, tool.tool_result.exit_code) == ("echo", "hi", 0)
    assert system.content.startswith("You are a specialized on-device agent.\n\nYou have access")
    assert "<|im" not in system.content + user.content + tool.content
    assert call.forced is not None
    assert call.logprobs is not None
    assert [logprob is None for logprob in call.logprobs] == call.forced
    assert found.summary == {
        "turns": "2",
        "calls": "1",
        "sampled": str(sum(event.sampled_tokens for event in counted)),
        "forced": str(sum(event.forced_tokens for event in counted)),
        "ended": "answer",
    }
    assert (found.task, found.checkpoint_path, found.model_fingerprint) == (
        "greet",
        "model.tinygpt",
        "ab" * 32,
    )


def test_an_end_of_turn_that_the_model_said_stands_in_its_output(
    scripted: Callable[..., Any], tmp_path: Path
) -> None:
    recorder = TrajectoryRecorder(tmp_path, MODEL)
    agent = make(scripted(["plain text", ANSWER]), recorder, constrain=False)
    list(agent.run("x"))
    step = read_trajectory(recorder.path).steps[-1]
    assert (step.output_ids[-len(END) :], step.input_ids, step.end_of_turn_ids) == (END, [10], [])
    assert step.content == "plain text"
    assert read_trajectory(recorder.path).summary["ended"] == "fallback"
    list(agent.run("y"))
    assert read_trajectory(recorder.path).steps[-2].input_ids[0] == 10


def test_the_file_is_whole_after_each_step(scripted: Callable[..., Any], tmp_path: Path) -> None:
    """What a crash at any event would leave."""
    session = scripted([CALL, ANSWER])
    recorder = TrajectoryRecorder(tmp_path, MODEL)
    agent = make(session, recorder)
    assert not list(tmp_path.iterdir()), "nobody has spoken yet"
    lengths = []
    for event in agent.run("x"):
        found = read_trajectory(recorder.path)
        lengths.append((event.type, len(found.steps), found.summary["ended"]))
    assert ("user", 2, "unfinished") in lengths
    assert ("tool_call", 3, "unfinished") in lengths
    assert ("tool_result", 4, "unfinished") in lengths
    assert lengths[-1] == ("answer", 5, "answer")
    assert os.listdir(tmp_path) == [recorder.path.name], "no temporary file stays"


def test_an_interrupted_turn_is_taken_back(scripted: Callable[..., Any], tmp_path: Path) -> None:
    session = scripted([ANSWER, CALL, ANSWER, ANSWER])
    recorder = TrajectoryRecorder(tmp_path, MODEL)

    def hang(text: str) -> str:
        raise KeyboardInterrupt

    agent = make(session, recorder, hang)
    list(agent.run("one"))
    before = read_trajectory(recorder.path)
    with pytest.raises(KeyboardInterrupt):
        list(agent.run("two"))
    after = read_trajectory(recorder.path)
    assert after.steps == before.steps
    assert after.summary == {**before.summary, "taken_back": "1"}
    session.replies[1] = ANSWER.encode()
    list(agent.run("three"))
    (stretch,) = read_trajectory(recorder.path).stretches()
    assert stretch.ids[: len(agent.conversation)] == agent.conversation.ids


def test_a_turn_without_an_answer_says_why(scripted: Callable[..., Any], tmp_path: Path) -> None:
    recorder = TrajectoryRecorder(tmp_path, MODEL)
    list(make(scripted([CALL]), recorder, limits=Limits(8, 2)).run("x"))
    found = read_trajectory(recorder.path)
    assert (found.summary["ended"], found.steps[-1].stop) == ("tokens", "length")


def drop(conversation: Conversation, start: int, end: int) -> None:
    """As an eviction does: the spans from one user turn up to another go, and the rest moves up."""
    del conversation.spans[start:end]


def test_dropped_exchanges_begin_a_segment(scripted: Callable[..., Any], tmp_path: Path) -> None:
    session = scripted([ANSWER] * 4)
    seen = spy(session)
    recorder = TrajectoryRecorder(tmp_path, MODEL)
    agent = make(session, recorder)
    marks = []
    for text in ("first question", "second question"):
        marks.append((len(agent.conversation.spans), len(agent.conversation)))
        list(agent.run(text))
    marks.append((len(agent.conversation.spans), len(agent.conversation)))
    (first, start), (second, middle), (third, end) = marks
    drop(agent.conversation, first, second)
    list(agent.run("third question"))
    found = read_trajectory(recorder.path)
    assert_seen(found, seen)
    assert [segment.first_step for segment in found.segments] == [0, 5]
    kept = found.segments[1].kept
    assert sum(stop - begin for begin, stop in kept) == start + end - middle
    last = list(found.stretches())[-1]
    assert b"first question" not in bytes(last.ids)
    assert b"second question" in bytes(last.kept)
    assert bytes(found.steps[5].input_ids).startswith(b"<|im_end|>\n<|im_start|>user\nthird question")
    assert third > second


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_kept_spans_give_the_beginning_of_whatever_a_conversation_became(data: st.DataObject) -> None:
    """Spans dropped, cut, copied, replaced: joined, the spans that are said to be kept begin the new ids."""
    spans = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=12))
    before = Conversation([IdSpan("user", ids) for ids in spans])
    held, ids = held_spans(before), before.ids
    chosen = data.draw(st.lists(st.booleans(), min_size=len(spans), max_size=len(spans)))
    after = Conversation([IdSpan("user", list(s)) for s, keep in zip(spans, chosen, strict=True) if keep])
    after.extend(
        [IdSpan("tool", ids) for ids in data.draw(st.lists(st.lists(st.integers(0, 3)), max_size=3))]
    )
    kept = kept_spans(held, ids, after)
    joined = [token for start, end in kept for token in ids[start:end]]
    assert after.ids[: len(joined)] == joined
    assert all(0 <= start < end <= len(ids) for start, end in kept)
    assert all(a[1] < b[0] for a, b in pairwise(kept)), "in order, and merged"


@given(
    script=st.lists(
        st.tuples(
            st.text(max_size=20), st.sampled_from(["answer", "call", "drop", "interrupt"]), st.integers(0, 9)
        ),
        max_size=6,
    )
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_happens_the_record_is_the_conversation(
    scripted: Callable[..., Any], tmp_path: Path, script: list[tuple[str, str, int]]
) -> None:
    """Turns, calls, interruptions and dropped spans in any order, with text of any kind."""
    session = scripted([])
    seen = spy(session)
    recorder = TrajectoryRecorder(tmp_path, MODEL)
    stop = [False]

    def tool(text: str) -> str:
        if stop[0]:
            raise KeyboardInterrupt
        return "\0 <|im_end|> é 🙂"

    agent = make(session, recorder, tool)
    opening = len(agent.conversation.spans)
    for text, kind, number in script:
        if kind == "drop" and len(agent.conversation.spans) > opening + 1:
            start = opening + number % (len(agent.conversation.spans) - opening - 1)
            drop(agent.conversation, start, start + 1)
        stop[0] = kind == "interrupt"
        turns = bytes(agent.conversation.ids).count(b"<|im_start|>assistant\n")
        calls = [CALL.encode()] if kind in ("call", "interrupt") else []
        session.replies = [b""] * turns + [*calls, ANSWER.encode()]
        try:
            list(agent.run(text))
        except KeyboardInterrupt:
            continue
        found = read_trajectory(recorder.path)
        last = list(found.stretches())[-1]
        assert last.ids == agent.conversation.ids + list(b"<|im_end|>\n")
        assert_seen(found, seen[-1:])


def test_log_probabilities_are_the_models_own(tiny_bundle: Path) -> None:
    """Against NumPy in float64; recording them changes no id."""
    session = load(tiny_bundle)
    prompt = list(b"hello")
    plain = list(generate(session, prompt, cache=session.new_cache(), max_tokens=8))
    told = list(generate(session, prompt, cache=session.new_cache(), max_tokens=8, logprobs=True))
    assert [step.id for step in plain] == [step.id for step in told]
    assert all(step.logprob is None for step in plain)
    ids = prompt + [step.id for step in told]
    rows = session.forward(ids, session.new_cache()).astype(np.float64)
    for position, step in enumerate(told, len(prompt) - 1):
        row = rows[position]
        expected = row[step.id] - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert step.logprob == pytest.approx(expected, abs=1e-4)


def test_the_fingerprint_is_the_weights(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    assert weights_fingerprint(bundle) == bundle.manifest.files["model.onnx.data"].sha256
    facts = ModelFacts.of(load(tiny_bundle), "name")
    assert (facts.checkpoint, facts.precision, facts.source) == (
        "name",
        "fp32",
        bundle.manifest.source.sha256,
    )


def test_half_a_surrogate_pair_is_recorded_as_the_model_got_it(
    scripted: Callable[..., Any], tmp_path: Path
) -> None:
    recorder = TrajectoryRecorder(tmp_path, MODEL)
    list(make(scripted([ANSWER]), recorder).run("a\ud800b"))
    step = read_trajectory(recorder.path).steps[1]
    assert step.content == "a?b"
    assert step.content.encode() in bytes(step.input_ids)


def test_a_file_that_cannot_be_written_takes_the_turn_back(
    scripted: Callable[..., Any], tmp_path: Path
) -> None:
    recorder = TrajectoryRecorder(tmp_path / "runs", MODEL)
    agent = make(scripted([ANSWER]), recorder)
    before = agent.conversation.ids
    (tmp_path / "runs").rmdir()
    with pytest.raises(InputError, match=r"--trajectory-dir .*cannot be written"):
        list(agent.run("x"))
    assert agent.conversation.ids == before


def test_a_folder_that_cannot_be_made_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--trajectory-dir .*cannot be made"):
        TrajectoryRecorder(tmp_path / "file" / "runs", MODEL)


def test_the_decoded_ids_are_the_content(scripted: Callable[..., Any], tmp_path: Path) -> None:
    """Both are kept: ids with their markers, and text; decoding the one gives the other between them."""
    session = scripted([CALL, ANSWER])
    recorder = TrajectoryRecorder(tmp_path, MODEL)
    list(make(session, recorder).run("é 🙂\n\0"))
    for step in read_trajectory(recorder.path).steps:
        assert step.content in decode(session.tokenizer, step.ids)


class IdSession:
    """Says given ids, turn by turn, with a tokenizer that would have split their text otherwise."""

    context_length = 4096

    def __init__(self, folder: Path, turns: list[list[int]]) -> None:
        self.tokenizer = HuggingFaceTokenizer((folder / "tokenizer.json").read_text(), "t")
        self.vocab_size = self.tokenizer.vocab_size
        self.end = self.tokenizer.encode_marker("<|im_end|>")
        self.manifest = SimpleNamespace(end_of_turn_ids=self.end, stop_ids=[], dialect="posttrainllm")
        self._opening = self.tokenizer.encode_marker("<|im_start|>") + self.tokenizer.encode("assistant\n")
        self._turns = turns

    def new_cache(self, *, preallocate: bool = True) -> KVCache:
        layout = KVLayout(layers=1, heads=1, head_dim=8, dtype="float32")
        return KVCache(layout, max_length=4096, device="cpu", preallocate=preallocate, owner=self)

    def prefill(self, ids: list[int], cache: KVCache) -> Any:
        cache.reserve(len(ids))
        cache.ids[:] = ids
        size = len(self._opening)
        starts = [i + size for i in range(len(ids)) if ids[i : i + size] == self._opening]
        logits = np.zeros(self.vocab_size, np.float32)
        if not starts:  # the system prompt by itself
            return logits
        logits[self._turns[len(starts) - 1][len(ids) - starts[-1]]] = 9
        return logits


def test_ids_are_never_encoded_again(bpe_tokenizer: Path, tmp_path: Path) -> None:
    """Letters where the tokenizer has words, and special ids in the middle: recorded and fed as they were said."""
    tokenizer = HuggingFaceTokenizer((bpe_tokenizer / "tokenizer.json").read_text(), "t")
    letters = [token for letter in "hello" for token in tokenizer.encode_content(letter).ids]
    assert letters != tokenizer.encode_content("hello").ids
    special = tokenizer.encode_marker("<|endoftext|>")
    end = tokenizer.encode_marker("<|im_end|>")
    first, second = [*letters, *special, *letters, *end], [*letters, *end]
    session = IdSession(bpe_tokenizer, [first, second])
    recorder = TrajectoryRecorder(tmp_path, MODEL)
    seen = spy(session)
    agent = make(session, recorder, constrain=False)
    list(agent.run("one"))
    list(agent.run("two"))
    found = read_trajectory(recorder.path)
    said = [step.output_ids for step in found.steps if step.role == "assistant"]
    assert said == [first, second]
    assert_seen(found, seen)
    (stretch,) = found.stretches()
    assert len(stretch.ids) == len(agent.conversation) + len(found.steps[-1].input_ids)
    (row,) = id_rows(Source(tmp_path), threshold=0.85)
    learnt = [token for token, loss in zip(row["input_ids"], row["loss_mask"], strict=True) if loss]
    assert learnt == first + second
