"""What was fed is the conversation: random conversations over real sessions, for every kind of model.

The models have random weights and say what they are told to: their logits are computed, so keys and values
are real, and then the next id of the script is preferred.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from posttrainllm.agent.loop import Agent, Limits
from posttrainllm.agent.template_dialect import TemplateConversation
from posttrainllm.agent.tools import FunctionBackend, HandlerRegistry, Tool
from posttrainllm.runtime import KVCache, Session, load
from posttrainllm.runtime.tokenizer import HuggingFaceTokenizer

TEMPLATES = Path(__file__).parent / "templates"
STRING = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
ECHO = Tool("echo", "Echo", STRING, handler="echo")
CALL = '{"tool": "echo", "arguments": {"text": "a"}}'
TAGGED = '<tool_call>\n{"name": "echo", "arguments": {"text": "a"}}\n</tool_call>'
PIECES = [*'a é日🙂\n"\\{}<|>', "<|im_end|>", "<|im_start|>system\n", "<tool_call>", "word " * 12, "\ud800"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
# What happens after a user's message: a call whose tool prints a text, one that is interrupted, a reply that cannot be read.
ACTIONS = st.lists(st.tuples(st.sampled_from(["call", "call", "interrupt", "broken"]), TEXTS), max_size=3)

LONG: list[tuple[str, list[tuple[str, str]]]] = [
    ("word " * 24, [("call", "word " * 20)]),
    ("<|im_end|>" * 9, [("call", "<|im_start|>system\n" * 3), ("interrupt", "")]),
    ("word " * 24, [("broken", ""), ("call", "🙂" * 30)]),
    ("é" * 60, [("call", "word " * 24), ("call", "word " * 24)]),
    ("word " * 24, []),
    ("word " * 24, [("call", "x" * 2000)]),
]


class Told:
    """A session whose model says `scripts`, one a step; looks at everything that is fed."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.scripts: list[list[int]] = []
        self.agent: Agent | None = None
        self._step: object = None
        self._script: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def prefill(self, ids: Sequence[int], cache: KVCache) -> NDArray[np.float32]:
        logits = self.session.prefill(ids, cache).copy()
        agent = self.agent
        assert agent is not None
        held = agent.conversation.ids
        assert list(cache.ids) == list(ids), "the cache holds what it was given"
        assert list(ids[: len(held)]) == held, "and that begins with the conversation"
        if len(held) == len(agent.opening):  # the system prompt by itself
            return logits
        if (agent.turn, len(held)) != self._step:
            self._step, self._script = (agent.turn, len(held)), self.scripts.pop(0)
        logits[self._script[len(ids) - len(held)]] += 1e6
        return logits


@pytest.fixture(scope="module", params=["bytes", "bytes, constrained", "bpe", "chat"])
def session(
    request: pytest.FixtureRequest,
    make_bundle: Callable[..., Path],
    bpe_tokenizer: Path,
    family_tokenizer: Callable[[str], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Session]:
    sizes = {"d_model": 16, "heads": 2, "layers": 1}
    if request.param.startswith("bytes"):
        return request.param, load(make_bundle(vocab=256, ctx=1150, **sizes), provider="cpu")
    if request.param == "bpe":
        bundle = make_bundle(vocab=320, ctx=640, tokenizer=bpe_tokenizer, **sizes)
        return "bpe", load(bundle, provider="cpu")
    folder = tmp_path_factory.mktemp("chat")
    (folder / "tokenizer.json").write_text(family_tokenizer("chatml"))
    bundle = make_bundle(vocab=360, ctx=820, tokenizer=folder, **sizes)
    shutil.copy(TEMPLATES / "hermes.jinja", bundle / "chat_template.jinja")
    return "chat", load(bundle, provider="cpu")


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@example(turns=LONG)
@given(turns=st.lists(st.tuples(TEXTS, ACTIONS), min_size=1, max_size=6))
def test_what_was_fed_is_the_conversation(
    session: tuple[str, Session], turns: list[tuple[str, list[tuple[str, str]]]]
) -> None:
    """Any texts, evictions, interrupted tools: the cache holds the conversation's ids, and the same ids fed at once
    to a fresh cache give the same logits; content holds no control id."""
    kind, real = session
    told = Told(real)
    outputs: list[tuple[str, str]] = []

    def echo(text: str) -> str:
        action, output = outputs.pop(0)
        if action == "interrupt":
            raise KeyboardInterrupt
        return output

    handlers = HandlerRegistry()
    handlers.register("echo", echo)
    agent = Agent(
        told,  # type: ignore[arg-type]
        (ECHO,),
        backend=FunctionBackend(handlers),
        header="Be brief.",
        limits=Limits(4, 60),
        constrain=kind.endswith("constrained"),
        dialect="chat_template" if kind == "chat" else "posttrainllm",
        drafts=False,
    )
    told.agent = agent
    evicted = 0
    for text, actions in turns:
        if kind.endswith("constrained"):
            actions = [action for action in actions if action[0] != "broken"]
        told.scripts = [_script(agent, kind, action) for action, _ in [*actions, ("answer", "")]]
        outputs[:] = [action for action in actions if action[0] != "broken"]
        before, last = agent.conversation.ids, None
        try:
            events = list(agent.run(text))
            last = events[-1]
            assert last.type in ("answer", "stop")
            evicted += sum(event.type == "context" for event in events)
        except KeyboardInterrupt:
            assert agent.conversation.ids == before
        ids = agent.conversation.ids
        assert len(ids) <= agent.cache.max_length
        held = ids[: agent.cache.common_prefix(ids)]
        if last and last.type == "answer":
            assert len(ids) - len(held) <= 2, "all but what closed the last reply was fed"
        kept, whole = real.prefill(ids, agent.cache), real.prefill(ids, real.new_cache())
        assert np.abs(kept - whole).max() < 1e-4 * np.ptp(whole)
        _check_controls(agent, ids)
    assert evicted or turns != LONG, "the sizes are such that these do not fit"


def _script(agent: Agent, kind: str, action: str) -> list[int]:
    said = TAGGED if kind == "chat" else CALL
    if action == "broken":
        said = said.replace('"a"', '"\\x"')
    elif action == "answer":
        said = "Done." if kind == "chat" else '{"answer": "Done."}'
    tokenizer = agent.session.tokenizer
    ids = (
        tokenizer.encode_rendered(said)
        if isinstance(tokenizer, HuggingFaceTokenizer)
        else list(said.encode())
    )
    return [*ids, *tokenizer.encode_marker("<|im_end|>")]


def _check_controls(agent: Agent, ids: list[int]) -> None:
    """Turn markers open and close in turn, and none stands in what came from content."""
    tokenizer = agent.session.tokenizer
    content = [span.ids for span in agent.conversation.spans if span.origin in ("system", "user", "tool")]
    if isinstance(tokenizer, HuggingFaceTokenizer):
        start, end = (tokenizer.encode_marker(marker)[0] for marker in ("<|im_start|>", "<|im_end|>"))
        found = [token for token in ids if token in (start, end)]
        assert found[::2] == [start] * len(found[::2])
        assert found[1::2] == [end] * len(found[1::2])
        special = {token for token, entry in tokenizer.added_tokens.values() if entry.special}
        assert all(special.isdisjoint(some) for some in content)
        return
    markers = re.findall(rb"<\|im_(start|end)\|>", bytes(ids))
    assert markers[::2] == [b"start"] * len(markers[::2])
    assert markers[1::2] == [b"end"] * len(markers[1::2])
    assert all(b"<|" not in bytes(some) for some in content)


def test_the_hypothesis_models_are_of_the_kinds_that_they_say(session: tuple[str, Session]) -> None:
    kind, real = session
    dialect = Agent(
        real,
        (ECHO,),
        backend=FunctionBackend(HandlerRegistry()),
        constrain=False,
        dialect="chat_template" if kind == "chat" else None,
    ).dialect
    assert isinstance(dialect, TemplateConversation) is (kind == "chat")
    assert isinstance(real.tokenizer, HuggingFaceTokenizer) is (kind in ("bpe", "chat"))
