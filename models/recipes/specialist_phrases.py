"""What people ask the demo specialist: the templates in `phrases/*.toml`, and the small language of theirs.

`(a|b|c)` is one of the alternatives, `[a]` is there or not, `{slot}` is filled by the generator. Requests
come in moods, because prefixes ("could you …", "tell me …", "what is …") go with one mood each:

    do    an order            count the lines of {F}
    ask   a direct question   how many lines does {F} have
    ind   an indirect one     how many lines {F} has
    noun  a noun phrase       number of lines in {F}
    bare  stands as it is     wc -l {path}
    whole a whole sentence, or two, with nothing before or after

Slots: {F} a file, {D} a folder, {G} a folder that is called one, {W} where to search, {Q} what to search
for (each with or without words such as "the file"), {path}, {folder}, {pattern} bare, {E} an expression.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

Node = Callable[[Random], str]

_TOKEN = re.compile(r"[()\[\]|]|[^()\[\]|]+")


def expand(template: str, rng: Random) -> str:
    """One of the texts that `template` stands for; slots stay as they are."""
    return _compiled(template)(rng)


@cache
def _compiled(template: str) -> Node:
    node, rest = _alternatives(_TOKEN.findall(template))
    if rest:
        raise ValueError(f"unbalanced template: {template}")
    return node


def _alternatives(tokens: Sequence[str]) -> tuple[Node, Sequence[str]]:
    options: list[list[Node]] = [[]]
    while tokens and tokens[0] not in ")]":
        token, tokens = tokens[0], tokens[1:]
        if token == "|":
            options.append([])
        elif token in "([":
            inner, tokens = _alternatives(tokens)
            closing, tokens = tokens[0], tokens[1:]
            options[-1].append(inner if closing == ")" else _optional(inner))
        else:
            options[-1].append(_constant(token))
    choices = [_sequence(parts) for parts in options]
    return (choices[0] if len(choices) == 1 else _choice(choices)), tokens


def _constant(text: str) -> Node:
    return lambda rng: text


def _optional(node: Node) -> Node:
    return lambda rng: node(rng) if rng.random() < 0.5 else ""


def _choice(nodes: Sequence[Node]) -> Node:
    count = len(nodes)
    return lambda rng: nodes[int(rng.random() * count)](rng)


def _sequence(nodes: Sequence[Node]) -> Node:
    if len(nodes) == 1:
        return nodes[0]
    return lambda rng: "".join(node(rng) for node in nodes)


# --- the tables -------------------------------------------------------------------------------------


def table(name: str) -> dict[str, Any]:
    """What `phrases/NAME.toml` holds."""
    return tomllib.loads((Path(__file__).parent / "phrases" / f"{name}.toml").read_text(encoding="utf-8"))


Moods = dict[str, tuple[str, ...]]
# name, ((argument, kind), ...), descriptions, requests; a kind is a slot: path, folder, pattern, person, city, word, number, other.
Other = tuple[str, tuple[tuple[str, str], ...], tuple[str, ...], tuple[str, ...]]


def _tuples(lists: dict[str, list[str]]) -> Moods:
    return {key: tuple(values) for key, values in lists.items()}


TOOLS = (
    "count_lines", "count_words", "file_size", "file_date", "read_file", "list_files", "search_text", "calculate",
    "current_time",
)  # fmt: skip
_TOOLS = {tool: table(tool) for tool in TOOLS}


def _steps(kind: str) -> Moods:
    return {
        tool: tuple(rows["steps"][kind]) for tool, rows in _TOOLS.items() if kind in rows.get("steps", {})
    }


REQUESTS = {tool: _tuples(rows["requests"]) for tool, rows in _TOOLS.items()}
HERE = {tool: _tuples(rows["here"]) for tool, rows in _TOOLS.items() if "here" in rows}  # the current folder
ALIASES = {tool: tuple(rows["names"]) for tool, rows in _TOOLS.items()}
DESCRIPTIONS = {tool: tuple(rows["descriptions"]) for tool, rows in _TOOLS.items()}
PROPERTY, CLAUSE = _steps("property"), _steps("clause")  # of a file, as a noun and as a clause
FOLLOW_UPS = _steps("follow_up")  # about the file of the exchange before
BOTH, TOGETHER = _steps("both"), _steps("together")  # two files {A} and {B}
SEARCH_THEN = _steps("search_then")
STEPS, TALK, NO_TOOL = _tuples(table("steps")), _tuples(table("talk")), _tuples(table("no_tool"))
_AROUND = table("around")
WORDS_AROUND, BEFORE = _tuples(_AROUND["words"]), _tuples(_AROUND["before"])
ENDINGS, SENTENCES = _tuples(_AROUND["endings"]), _tuples(_AROUND["sentences"])
_OTHER = table("other_tools")
ARGUMENT_NAMES = _tuples(_OTHER["argument_names"])
OTHER_TOOLS: tuple[Other, ...] = tuple(
    (
        tool["name"],
        tuple((name, kind) for name, kind in tool["arguments"]),
        tuple(tool["descriptions"]),
        tuple(tool["requests"]),
    )
    for tool in _OTHER["tools"]
)
