"""Saved sessions: resumed they go on as if nobody had left; what does not fit is refused and loses nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrainllm.agent.loop import Agent, Limits
from posttrainllm.agent.session_file import load_session, save_session
from posttrainllm.agent.tools import FunctionBackend, HandlerRegistry, Tool
from posttrainllm.export.exporter import export
from posttrainllm.runtime import Sampler, Session, load
from posttrainllm.runtime.errors import InputError, UsageError

ECHO = Tool(
    "echo",
    "Echo input",
    {"type": "object", "properties": {"text": {"type": "string", "maxLength": 9}}, "required": ["text"]},
    handler="echo",
)


@pytest.fixture(scope="module")
def session(make_bundle: Callable[..., Path]) -> Session:
    return load(make_bundle(vocab=256, d_model=32, heads=4, layers=2, ctx=2048, seed=9), provider="cpu")


def make(session: Session, header: str = "You are.", sampler: Sampler | None = None) -> Agent:
    handlers = HandlerRegistry()
    handlers.register("echo", lambda text: text * 2)
    limits = Limits(max_steps=1, max_tokens=20)
    backend = FunctionBackend(handlers)
    return Agent(session, (ECHO,), backend=backend, header=header, limits=limits, sampler=sampler)


def same_bits(one: Agent, two: Agent) -> None:
    assert one.cache.ids == two.cache.ids
    for first, second in zip(
        one.cache.snapshot(one.cache.length), two.cache.snapshot(two.cache.length), strict=True
    ):
        np.testing.assert_array_equal(first, second)


def play(agent: Agent, text: str) -> list[dict[str, Any]]:
    found = [event.to_json() for event in agent.run(text) if event.type != "delta"]
    for event in found:
        event.pop("time")
        event.pop("duration_sec", None)
    return found


def test_a_resumed_session_goes_on_bit_for_bit(session: Session, tmp_path: Path) -> None:
    first = make(session)
    for text in ("é 🙂 <|im_end|>", "and more"):
        play(first, text)
    count = save_session(first, tmp_path / "s.kv")
    assert count == len(first.conversation)
    second = make(session)
    assert load_session(second, tmp_path / "s.kv") == count
    assert second.conversation.ids == first.conversation.ids
    assert second.cache.ids == first.cache.ids
    same_bits(first, second)
    assert play(second, "go on") == play(first, "go on"), "turn numbers and cached tokens too"
    assert second.conversation.ids == first.conversation.ids


@pytest.fixture(scope="module", params=["int8", "int4", "standard"])
def other_session(
    request: pytest.FixtureRequest,
    make_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Session:
    options: dict[str, Any] = (
        {"flavour": "standard"} if request.param == "standard" else {"precision": request.param}
    )
    source = make_checkpoint(d_model=64, heads=4, layers=2, ctx=2048, seed=3)
    return load(export(source, tmp_path_factory.mktemp("other") / "b", **options).bundle, provider="cpu")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_saving_and_resuming_change_no_bit(
    other_session: Session, tmp_path: Path, temperature: float
) -> None:
    """One who never saves, one who saves and goes on, one who resumes: drafts and random numbers go on too."""

    def new() -> Agent:
        return make(other_session, sampler=Sampler(temperature, seed=5))

    never, saver, resumed = new(), new(), new()
    for agent in (never, saver):
        for text in ("one two one two one two", "one two one two"):
            play(agent, text)
    learned = [0.1, 0.2, 0.3, 0.4, 0.5]
    for agent in (never, saver):
        if agent.drafter:
            agent.drafter.state = learned
    save_session(saver, tmp_path / "s.kv")
    resumed.prepare()
    load_session(resumed, tmp_path / "s.kv")
    assert resumed.drafter is None or resumed.drafter.state == learned
    for text in ("one two one two", "and the end"):
        events = [play(agent, text) for agent in (never, saver, resumed)]
        assert events[0] == events[1] == events[2]
        same_bits(never, saver)
        same_bits(never, resumed)


def test_a_session_replaces_a_session_and_nothing_else(session: Session, tmp_path: Path) -> None:
    agent, file, notes = make(session), tmp_path / "s.kv", tmp_path / "notes.txt"
    notes.write_text("dear to me")
    save_session(agent, file)
    play(agent, "x")
    save_session(agent, file)
    assert load_session(make(session), file) == len(agent.conversation)
    with pytest.raises(UsageError, match="is no saved session"):
        save_session(agent, notes)
    assert notes.read_text() == "dear to me"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes.txt", "s.kv"]


def test_other_threads_resume_without_the_stored_keys_and_values(session: Session, tmp_path: Path) -> None:
    agent = make(session)
    play(agent, "x")
    save_session(agent, tmp_path / "s.kv")
    other = make(load(session.bundle.path, provider="cpu", threads=session.threads + 1))
    assert load_session(other, tmp_path / "s.kv") == 0
    assert other.conversation.ids == agent.conversation.ids
    assert play(other, "y")


def rewritten(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The header of `file` changed, its data kept."""
    data = file.read_bytes()
    length = int.from_bytes(data[8:16], "little")
    header = json.loads(data[48 : 48 + length])
    start = -(-(48 + length) // 64) * 64
    change(header)
    text = json.dumps(header).encode()
    head = data[:8] + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text
    file.write_bytes(head + b"\0" * (-len(head) % 64) + data[start:])


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "other weights": (lambda header: header["more"].update(weights="ab"), "saved with the weights ab"),
    "no session": (lambda header: header.update(more=None), "no saved session"),
    "a newer version": (lambda header: header["more"].update(session=2), "of another version"),
    "no turns": (lambda header: header["more"].update(turns="x"), "no turns"),
    "a turn that is none": (lambda header: header["more"]["turns"].insert(1, "x"), "turn 1: malformed"),
    "ids that are none": (
        lambda header: header["more"]["turns"][1]["spans"].append(["sampled", [-1]]),
        "turn 1: malformed",
    ),
    "a result that is none": (
        lambda header: header["more"]["turns"].append({"number": 0, "result": {"tool": "echo"}}),
        "malformed",
    ),
    "another text": (lambda header: header["more"]["turns"][0].update(user="other"), "do not give its ids"),
    "a reply that was never given": (
        lambda header: header["more"]["turns"].append(
            {"number": 0, "reply": "x", "spans": [["sampled", [7]]]}
        ),
        "do not give its ids",
    ),
    "an id that the model has not": (
        lambda header: header["more"]["turns"][1]["spans"].append(["sampled", [256]]),
        "turn 1: malformed",
    ),
    "pending ids that are none": (lambda header: header["more"].update(pending="x"), "no pending ids"),
    "drafts that are none": (lambda header: header["more"].update(drafts=[7]), "a state of sampling"),
    "no random state": (
        lambda header: header["more"].update(seed=1, random={"x": 1}),
        "a state of sampling",
    ),
    "no number": (lambda header: header["more"].update(number=None), "no turn number"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_does_not_fit_is_refused_and_nothing_is_lost(
    session: Session, tmp_path: Path, name: str
) -> None:
    file = tmp_path / "s.kv"
    saved = make(session)
    play(saved, "x")
    save_session(saved, file)
    change, said = CHANGES[name]
    rewritten(file, change)
    agent = make(session, sampler=Sampler(seed=1))
    play(agent, "my own")
    before, cached = agent.conversation.ids, list(agent.cache.ids)
    with pytest.raises(InputError, match=said):
        load_session(agent, file)
    assert (agent.conversation.ids, agent.cache.ids) == (before, cached)
    assert play(agent, "and on")[0]["turn"] == 1


def test_damaged_data_and_another_prompt_are_refused(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "s.kv"
    saved = make(session)
    play(saved, "x")
    save_session(saved, file)
    with pytest.raises(InputError, match="another system prompt"):
        load_session(make(session, header="You were."), file)
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    agent = make(session)
    before = agent.conversation.ids
    with pytest.raises(InputError, match="checksum"):
        load_session(agent, file)
    assert agent.conversation.ids == before
    with pytest.raises(InputError, match="not a file of keys and values"):
        load_session(agent, Path(__file__))
    with pytest.raises(UsageError, match="cannot be written"):
        save_session(saved, tmp_path / "none" / "s.kv")
