"""Seeded synthetic conversations of the demo specialist, as ids with a label each.

    Random -> offer (which tools, in which order)           specialist_offer
           -> exchanges (request, calls, results, answer)   exchange
           -> ids and labels of one row                     row

What the model reads is rendered by the agent's own dialect (`PosttrainDialect`) over the agent's own tool
file (`tools_schemas/demo.json`) and encoded by the agent's own tokenizer class, so that training and use
agree by construction. The same `Random` state always gives the same ids.

What it is not: real conversations. Tool output is made up and not consistent from call to call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import specialist_names as names
import specialist_phrases as phrases
import specialist_requests as requests
from specialist_names import chance
from specialist_offer import demo_tools, offer
from specialist_phrases import expand
from specialist_results import Outcome
from specialist_scene import NO_TOOL_ANSWER, Exchange, Scene
from specialist_steps import (
    again,
    both,
    follow_up,
    list_then_first,
    list_then_read,
    pair,
    search_then,
    time_and,
    together,
    two_sums,
    with_reading,
    with_search,
)
from specialist_wording import fill, styled, surrounded

from posttrainllm.agent.chat_format import Piece, PosttrainDialect
from posttrainllm.agent.tools import ToolResult
from posttrainllm.runtime.tokenizer import Tokenizer

PROMPT, CALL, ANSWER, END = 0, 1, 2, 3  # labels: what is read, and what is said
DIALECT = PosttrainDialect()
# How often a tool is asked for by itself, against 1: more where there is more to copy or to tell apart.
SHARES = {"current_time": 0.6, "search_text": 1.8, "read_file": 2, "list_files": 1.6, "calculate": 1.5}


def exchange(scene: Scene) -> Exchange:
    """The next exchange of the conversation."""
    rng = scene.rng
    kinds: tuple[tuple[Callable[[Scene], Exchange | None], float], ...] = (
        (single, 56), (absent, 14), (nothing_fits, 9), (talk, 4.5), (pair, 8), (with_search, 5), (with_reading, 4), (two_sums, 2.5), (both, 7), (together, 3),
        (list_then_read, 5), (list_then_first, 4), (search_then, 6), (time_and, 1.5), (other, 5 if scene.offer.others else 0),
        (follow_up, 8 if scene.last else 0), (again, 4 if scene.last else 0),
    )  # fmt: skip
    while True:
        make = rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]
        made = make(scene)
        if made:
            if make not in (single, follow_up, again, pair):
                scene.last = None
            return made


def single(scene: Scene) -> Exchange:
    weights = [SHARES.get(tool, 1) for tool in scene.offer.demo]
    if not weights:
        return nothing_fits(scene)
    tool = scene.rng.choices(list(scene.offer.demo), weights)[0]
    request, given = requests.request(scene.rng, tool)
    return scene.answered(request, tool, given)


def absent(scene: Scene) -> Exchange | None:
    missing = [tool.name for tool in demo_tools() if tool.name not in scene.offer.demo]
    if missing and chance(scene.rng, 0.85):
        request, _ = requests.request(scene.rng, scene.rng.choice(missing))
        return Exchange(request, (), NO_TOOL_ANSWER)
    gone = [entry for entry in phrases.OTHER_TOOLS if entry not in scene.offer.others]
    request, _ = requests.other_request(scene.rng, scene.rng.choice(gone))
    return Exchange(request, (), NO_TOOL_ANSWER) if missing else None


def nothing_fits(scene: Scene) -> Exchange | None:
    if scene.offer.others:
        return None
    text = expand(scene.rng.choice(phrases.NO_TOOL["requests"]), scene.rng)
    mood = scene.rng.choice(("do", "ask", "bare"))
    text = styled(
        scene.rng,
        (expand(scene.rng.choice(phrases.BEFORE["do"]), scene.rng) if mood == "do" else "")
        + text
        + expand(scene.rng.choice(phrases.ENDINGS[mood]), scene.rng),
    )
    return Exchange(
        surrounded(scene.rng, fill(scene.rng, text, requests.any_slots(scene.rng))), (), NO_TOOL_ANSWER
    )


def talk(scene: Scene) -> Exchange:
    rng = scene.rng
    listed = ", ".join(tool.name for tool in scene.offer.tools)
    replies = {
        "greetings": "Hello! What can I do for you?", "thanks": "You are welcome.", "farewells": "Goodbye!",
        "abilities": f"I can use these tools: {listed}.", "identity": "I am a small agent that uses tools.",
    }  # fmt: skip
    group = rng.choices(list(replies), (3, 2, 1, 2, 1))[0]
    text = expand(rng.choice(phrases.TALK[group]), rng) + rng.choice(("", "", ".", "!", "?"))
    text = text[0].upper() + text[1:] if chance(rng, 0.6) else text
    return Exchange(text, (), replies[group])


def other(scene: Scene) -> Exchange:
    rng = scene.rng
    entry = rng.choice(scene.offer.others)
    request, values = requests.other_request(scene.rng, entry)
    out = rng.choice(("done", "ok", names.phrase(rng, rng.randint(1, 5)), names.number(rng), names.word(rng)))
    outcome = Outcome(out) if chance(rng, 0.9) else Outcome("", names.phrase(rng, 3), 1)
    said = f"Done: {outcome.stdout}." if not outcome.exit_code else f"I could not do that: {outcome.stderr}."
    return Exchange(
        request,
        (
            (
                {"tool": entry[0], "arguments": values},
                ToolResult(entry[0], outcome.stdout, outcome.stderr, outcome.exit_code),
            ),
        ),
        said,
    )


# --- ids ------------------------------------------------------------------------------------------------

Segment = tuple[list[Piece], int]


def said(value: Mapping[str, Any]) -> str:
    """A call or an answer in the dialect's one JSON style."""
    return json.dumps(value, ensure_ascii=False)


def segments(exchange: Exchange) -> list[Segment]:
    """The pieces of one exchange, in order, each list with its label."""
    made: list[Segment] = [(DIALECT.user(exchange.request), PROMPT)]
    for call, result in exchange.steps:
        made += [
            ([Piece("sampled", said(call))], CALL),
            (DIALECT.end_of_turn(), END),
            (DIALECT.tool_result(result), PROMPT),
        ]
    return [
        *made,
        ([Piece("sampled", said({"answer": exchange.answer}))], ANSWER),
        (DIALECT.end_of_turn(), END),
    ]


def encode(parts: Sequence[Segment], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids and labels. Of an end of turn, only the marker itself is labelled: the newline is the template's."""
    ids: list[int] = []
    labels: list[int] = []
    for pieces, label in parts:
        for index, piece in enumerate(pieces):
            new = (
                tokenizer.encode_marker(piece.text)
                if piece.marker
                else tokenizer.encode_content(piece.text).ids
            )
            ids += new
            labels += [PROMPT if label == END and index else label] * len(new)
    return ids, labels


def row(rng: Random, tokenizer: Tokenizer, length: int, most: int = 9) -> tuple[list[int], list[int]]:
    """One conversation of exactly `length` ids, cut off at its end."""
    while True:
        offered = offer(rng, most)
        ids, labels = encode([(DIALECT.system(offered.header, offered.tools), PROMPT)], tokenizer)
        if len(ids) < length - 60:
            break
    scene = Scene(rng, offered)
    while len(ids) < length:
        more, marks = encode(segments(exchange(scene)), tokenizer)
        ids += more
        labels += marks
    return ids[:length], labels[:length]


def texts(rng: Random, count: int) -> list[str]:
    """Texts of `count` exchanges without their markers, to train a tokenizer on."""
    made: list[str] = []
    while len(made) < count:
        offered = offer(rng)
        scene = Scene(rng, offered)
        parts = [
            (DIALECT.system(offered.header, offered.tools), PROMPT),
            *(part for _ in range(4) for part in segments(exchange(scene))),
        ]
        made += [piece.text for pieces, _ in parts for piece in pieces if not piece.marker]
    return made
