"""The system prompt of a conversation: which tools it offers, in which order, under which names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from random import Random

import specialist_phrases as phrases
from specialist_names import chance

from posttrainllm.agent.chat_format import DEFAULT_HEADER
from posttrainllm.agent.tool_file import load_tools
from posttrainllm.agent.tools import Tool


@lru_cache(maxsize=1)
def demo_tools() -> tuple[Tool, ...]:
    """The tools of the shipped file, in its order."""
    return tuple(load_tools(Path(str(files("posttrainllm.tools_schemas") / "demo.json"))))


@dataclass(frozen=True)
class Offered:
    """A tool as this conversation has it: perhaps under another name, with other argument names."""

    tool: Tool
    arguments: tuple[str, ...]  # in the order of the original's


@dataclass(frozen=True)
class Offer:
    """What the system prompt holds. Keys of `demo` are the original names."""

    header: str
    tools: tuple[Tool, ...]
    demo: Mapping[str, Offered]
    others: tuple[phrases.Other, ...]


def offer(rng: Random, most: int = 9) -> Offer:
    """A subset of the demo tools in some order, sometimes renamed, sometimes with other tools among them."""
    known = list(demo_tools())
    count = 9 if most >= 9 and chance(rng, 0.5) else rng.randint(1, most)
    chosen = known if count == len(known) else rng.sample(known, count)
    if chance(rng, 0.5):
        chosen = rng.sample(chosen, len(chosen))
    renaming, rewording = chance(rng, 0.08), chance(rng, 0.25)
    demo: dict[str, Offered] = {}
    for tool in chosen:
        other = alias(rng, tool) if renaming and chance(rng, 0.6) else Offered(tool, tuple(tool.exec_args))
        if other.tool.name in [entry.tool.name for entry in demo.values()]:
            other = Offered(tool, tuple(tool.exec_args))
        if (rewording or other.tool.name != tool.name) and chance(rng, 0.6):
            text = rng.choice(phrases.DESCRIPTIONS[tool.name]) if chance(rng, 0.9) else None
            other = replace(other, tool=replace(other.tool, description=text))
        demo[tool.name] = other
    taken = {entry.tool.name for entry in demo.values()}
    extra = rng.sample(phrases.OTHER_TOOLS, rng.randint(1, 4)) if chance(rng, 0.2) else []
    extra = [entry for entry in extra if entry[0] not in taken]
    tools = [entry.tool for entry in demo.values()] + [other_tool(rng, entry) for entry in extra]
    if extra:
        rng.shuffle(tools)
    header = DEFAULT_HEADER if chance(rng, 0.85) else rng.choice(phrases.SENTENCES["headers"])
    return Offer(header, tuple(tools), demo, tuple(extra))


def alias(rng: Random, tool: Tool) -> Offered:
    """`tool` under another name."""
    taken: list[str] = []
    for name in tool.exec_args:
        free = [other for other in phrases.ARGUMENT_NAMES[name] if other not in taken]
        taken.append(rng.choice(free))
    return Offered(made_tool(rng.choice(phrases.ALIASES[tool.name]), tool.description, taken), tuple(taken))


def other_tool(rng: Random, entry: phrases.Other) -> Tool:
    name, arguments, descriptions, _ = entry
    integers = tuple(argument for argument, kind in arguments if kind == "number")
    return made_tool(name, rng.choice(descriptions), [argument for argument, _ in arguments], integers)


def made_tool(
    name: str, description: str | None, arguments: Sequence[str], integers: Sequence[str] = ()
) -> Tool:
    parameters = {
        "type": "object",
        "properties": {key: {"type": "integer" if key in integers else "string"} for key in arguments},
        "required": list(arguments),
        "additionalProperties": False,
    }
    return Tool(name, description, parameters)
