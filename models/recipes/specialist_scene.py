"""An exchange, and the conversation that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from specialist_names import chance
from specialist_offer import Offer, demo_tools
from specialist_requests import ABOUT_A_FILE
from specialist_results import Outcome, answer, failed, succeeded

from posttrainllm.agent.tools import ToolResult

NO_TOOL_ANSWER = "I have no tool for that."


@dataclass(frozen=True)
class Exchange:
    """One user turn: the request, (call, result) pairs, the answer. The pieces a dialect renders."""

    request: str
    steps: tuple[tuple[dict[str, Any], ToolResult], ...]
    answer: str


@dataclass
class Scene:
    """A conversation while it is made: what it offers, and what was spoken of last."""

    rng: Random
    offer: Offer
    last: tuple[str, str] | None = None  # tool and file of the exchange before

    def has(self, *tools: str) -> bool:
        return all(tool in self.offer.demo for tool in tools)

    def call(
        self, tool: str, given: Mapping[str, str], outcome: Outcome
    ) -> tuple[dict[str, Any], ToolResult]:
        """The call of a demo tool as this conversation names it, and its result."""
        offered = self.offer.demo[tool]
        values = [given[name] for name in argument_names(tool)]
        call = {"tool": offered.tool.name, "arguments": dict(zip(offered.arguments, values, strict=True))}
        return call, ToolResult(
            offered.tool.name, outcome.stdout, outcome.stderr, outcome.exit_code, timed_out=outcome.timed_out
        )

    def run(self, tool: str, given: Mapping[str, str], errors: float = 0.1) -> Outcome:
        return (failed if chance(self.rng, errors) else succeeded)(self.rng, tool, given)

    def answered(self, request: str, tool: str, given: Mapping[str, str]) -> Exchange:
        outcome = self.run(tool, given, 0.02 if tool == "current_time" else 0.1)
        self.last = (tool, given["path"]) if tool in ABOUT_A_FILE else None
        return Exchange(request, (self.call(tool, given, outcome),), answer(tool, given, outcome))


def argument_names(tool: str) -> tuple[str, ...]:
    return next(entry.exec_args for entry in demo_tools() if entry.name == tool)
