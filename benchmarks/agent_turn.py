"""One agent turn, decoded id by id, with forced ids, and with drafts too; cold, and from the prompt cache. In turns.

    python benchmarks/agent_turn.py BUNDLE [--rounds 7] [--threads 2] [--answer 64]

A system prompt with the demo tools, a question, a call under the grammar, a result of some 500 tokens (a listing that the question
speaks of), an answer of at most ANSWER sampled ids. Forced text has fewer ids than a model may choose for it, so that
id by id the same text can be longer. `call` is from the question to the complete call, `turn` to the end of the answer.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from posttrainllm.agent.chat_format import DEFAULT_HEADER, IdSpan
from posttrainllm.agent.context_plan import ContextPlan, ResultTurn, UserTurn
from posttrainllm.agent.dialect import PosttrainConversation
from posttrainllm.agent.tool_file import load_tools
from posttrainllm.agent.tools import ToolResult
from posttrainllm.runtime import KVCache, Session, generate, load
from posttrainllm.runtime.prompt_cache import PromptCache

QUESTION = "Read the file src/runtime/session_reader.py and tell me which functions it has"
RESULT = "\n".join(
    f"def read_{name}(path: Path, *, limit: int = {10 * number}) -> list[{name.title()}]: ..."
    for number, name in enumerate(
        [
            "header",
            "record",
            "footer",
            "session",
            "trailer",
            "segment",
            "bucket",
            "column",
            "marker",
            "anchor",
            "window",
            "packet",
            "ledger",
            "cursor",
        ]
    )
)


@dataclass(frozen=True)
class Way:
    """How a turn is decoded."""

    name: str
    forced: bool
    drafts: bool
    restored: bool


WAYS = (
    Way("id by id", False, False, False),
    Way("forced ids", True, False, False),
    Way("forced, drafts", True, True, False),
    Way("forced, drafts, prompt cache", True, True, True),
)


class OneByOne:
    """A matcher that never forces: ids without a choice are decoded like the others."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def force(self) -> list[int]:
        return []


def play(session: Session, way: Way, store: PromptCache, answer: int) -> tuple[list[int], float, float]:
    """The ids that were said, and the seconds to the complete call and to the end."""
    dialect = PosttrainConversation(session, DEFAULT_HEADER, load_tools(_tools()))
    grammars = [dialect.grammar(answer_only=only) for only in (False, True)]
    plan = ContextPlan(dialect, limit=session.context_length, reserve=answer, policy="stop")
    cache, drafter = session.new_cache(), session.new_drafter() if way.drafts else None
    said: list[int] = []
    began = time.perf_counter()
    if way.restored:
        assert store.restore(plan.opening, cache).length == len(plan.opening)
    else:
        session.prefill(plan.opening, cache)
    plan.admit(UserTurn(0, QUESTION))
    seconds = []
    for only_answer in (False, True):
        matcher: Any = grammars[only_answer].matcher()
        if not way.forced:
            matcher = OneByOne(matcher)
        limit = answer if only_answer else 200
        ids = list(_ids(session, plan.conversation.ids, cache, matcher, drafter, limit))
        seconds.append(time.perf_counter() - began)
        said += ids
        plan.conversation.extend([span := IdSpan("sampled", ids)])
        plan.heard(0, [span], "")
        if not only_answer:
            plan.admit(ResultTurn(0, ToolResult("read_file", RESULT, "", 0)))
    return said, seconds[0], seconds[1]


def _ids(
    session: Session, prompt: list[int], cache: KVCache, matcher: Any, drafter: Any, limit: int
) -> Iterator[int]:
    steps = generate(session, prompt, cache=cache, matcher=matcher, drafter=drafter, max_tokens=limit)
    for step in steps:
        yield step.id


def _tools() -> Path:
    return Path(str(files("posttrainllm.tools_schemas"))) / "demo.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--answer", type=int, default=64)
    options = parser.parse_args()
    session = load(options.bundle, provider="cpu", threads=options.threads)
    dialect = PosttrainConversation(session, DEFAULT_HEADER, load_tools(_tools()))
    opening = [token for span in dialect.opening() for token in span.ids]
    with tempfile.TemporaryDirectory() as folder:
        store, cache = PromptCache(Path(folder), session), session.new_cache()
        session.prefill(opening, cache)
        store.save(opening, cache)
        calls: dict[str, list[float]] = {way.name: [] for way in WAYS}
        turns: dict[str, list[float]] = {way.name: [] for way in WAYS}
        outputs: dict[str, list[int]] = {}
        for number in range(options.rounds + 1):
            for way in WAYS:
                outputs[way.name], call, turn = play(session, way, store, options.answer)
                if number:
                    calls[way.name].append(call)
                    turns[way.name].append(turn)
    plain = WAYS[0].name
    print(f"{len(opening)} ids of system prompt")
    print(f"{'':<30}{'call':>10}{'ratio':>8}{'turn':>10}{'ratio':>8}{'ids':>6}")
    for way in WAYS:
        call, turn = (1e3 * statistics.median(of[way.name]) for of in (calls, turns))
        ratios = [
            statistics.median(a / b for a, b in zip(of[plain], of[way.name], strict=True))
            for of in (calls, turns)
        ]
        print(
            f"{way.name:<30}{call:>7.0f} ms{ratios[0]:>7.2f}x{turn:>7.0f} ms{ratios[1]:>7.2f}x"
            f"{len(outputs[way.name]):>6}"
        )


if __name__ == "__main__":
    main()
