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
from posttrainllm.runtime import Session, load
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


def make(session: Session, header: str = "You are.") -> Agent:
    handlers = HandlerRegistry()
    handlers.register("echo", lambda text: text * 2)
    limits = Limits(max_steps=1, max_tokens=20)
    return Agent(session, (ECHO,), backend=FunctionBackend(handlers), header=header, limits=limits)


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
    assert second.conversation == second.conversation.__class__(
        second.conversation.spans, second.conversation.segment
    )
    assert second.conversation.ids == first.conversation.ids
    for one, two in zip(first.cache.snapshot(count), second.cache.snapshot(count), strict=True):
        np.testing.assert_array_equal(one, two)
    assert play(second, "go on") == play(first, "go on"), "turn numbers and cached tokens too"
    assert second.conversation.ids == first.conversation.ids


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
    agent = make(session)
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
