"""One request for one tool, and the arguments that it means."""

from __future__ import annotations

from random import Random
from typing import Any

import specialist_arithmetic as arithmetic
import specialist_names as names
import specialist_phrases as phrases
from specialist_names import chance
from specialist_phrases import expand
from specialist_wording import Slots, fill, mood_text, quoted, quoted_pattern, styled, surrounded, with_it

ABOUT_A_FILE = ("count_lines", "count_words", "file_size", "file_date", "read_file")
WHOLE_SHARE = 0.4  # of the requests are written as a whole, not put together from moods


def request(rng: Random, tool: str) -> tuple[str, dict[str, str]]:
    """A request for `tool`, and the arguments that it means."""
    if tool == "calculate":
        return _sum_request(rng)
    given, slots = _given(rng, tool)
    moods = phrases.REQUESTS[tool]
    if given.get("folder") == "." or given.get("kind") == "here":
        moods = phrases.HERE[tool]
    if chance(rng, WHOLE_SHARE):
        return fill(rng, styled(rng, expand(rng.choice(moods["whole"]), rng)), slots), given
    if tool in ABOUT_A_FILE and chance(rng, 0.1):
        return surrounded(rng, fill(rng, with_it(rng, moods), slots)), given
    text = styled(rng, mood_text(rng, moods))
    if tool in ABOUT_A_FILE and chance(rng, 0.03):
        slots["other"] = quoted(rng, names.file_path(rng), 0.2)
        text = rng.choice(phrases.SENTENCES["other_first"])
        text = styled(rng, expand(text, rng) + mood_text(rng, moods))
    return surrounded(rng, fill(rng, text, slots)), given


def _given(rng: Random, tool: str) -> tuple[dict[str, str], Slots]:
    """Arguments for `tool` and how the request spells them."""
    if tool == "current_time":
        return {}, {}
    if tool == "list_files":
        folder = "." if chance(rng, 0.12) else names.folder(rng)
        return {"folder": folder}, {"folder": quoted(rng, folder, 0.2)}
    if tool == "search_text":
        return _search_given(rng)
    path = names.file_path(rng)
    return {"path": path}, {"path": quoted(rng, path, 0.25)}


def _search_given(rng: Random) -> tuple[dict[str, str], Slots]:
    pattern = names.pattern(rng)
    slots = {"pattern": quoted_pattern(rng, pattern)}
    kind = rng.random()
    if kind < 0.1:
        return {"pattern": pattern, "path": ".", "kind": "here"}, slots
    path = names.file_path(rng) if kind < 0.65 else names.folder(rng)
    slots["path"] = quoted(rng, path, 0.2)
    if kind >= 0.65:
        slots["folder"] = slots["path"]
    return {"pattern": pattern, "path": path, "kind": "file" if kind < 0.65 else "folder"}, slots


def _sum_request(rng: Random) -> tuple[str, dict[str, str]]:
    kind = rng.random()
    if chance(rng, 0.12):
        said, meant = arithmetic.spoken(rng, "whole")
        return styled(rng, said), {"expression": meant}
    if chance(rng, WHOLE_SHARE):
        said, meant = arithmetic.spoken(rng) if chance(rng, 0.15) else (arithmetic.expression(rng),) * 2
        text = styled(rng, expand(rng.choice(phrases.REQUESTS["calculate"]["whole"]), rng))
        return fill(rng, text, {"E": said}), {"expression": meant}
    if kind < 0.1:
        said, meant = arithmetic.spoken(rng, "orders")
        text = (
            expand(rng.choice(phrases.BEFORE["do"]), rng)
            + said
            + expand(rng.choice(phrases.ENDINGS["do"]), rng)
        )
        return surrounded(rng, styled(rng, text) if chance(rng, 0.3) else text[0].upper() + text[1:]), {
            "expression": meant
        }
    said, meant = arithmetic.spoken(rng) if kind < 0.35 else (arithmetic.expression(rng),) * 2
    if kind >= 0.35:
        said = quoted(rng, said, 0.08) if " " not in said or chance(rng, 0.08) else said
    text = styled(rng, mood_text(rng, phrases.REQUESTS["calculate"]))
    return surrounded(rng, fill(rng, text, {"E": said})), {"expression": meant}


def any_slots(rng: Random) -> Slots:
    path, other, folder = names.file_path(rng), names.file_path(rng), names.folder(rng)
    return {
        "path": quoted(rng, path, 0.2), "other": quoted(rng, other, 0.2), "folder": quoted(rng, folder, 0.2), "pattern": quoted(rng, names.pattern(rng), 0.6),
        "word": names.word(rng), "number": str(rng.randint(1, 99)), "person": rng.choice(phrases.NO_TOOL["people"]), "city": rng.choice(phrases.NO_TOOL["cities"]),
    }  # fmt: skip


def other_request(rng: Random, entry: phrases.Other) -> tuple[str, dict[str, Any]]:
    """A request for a tool that is not of the demo, and its arguments."""
    plain = {
        "path": names.file_path(rng),
        "other": names.file_path(rng),
        "folder": names.folder(rng),
        "pattern": names.pattern(rng),
        "word": names.word(rng),
        "number": str(rng.randint(1, 999)),
        "person": rng.choice(phrases.NO_TOOL["people"]),
        "city": rng.choice(phrases.NO_TOOL["cities"]),
    }
    slots = {
        key: value if key in ("word", "number", "person", "city") else quoted(rng, value, 0.3)
        for key, value in plain.items()
    }
    ending = rng.choice(("", "", ".", "?", " please", "!"))
    text = styled(
        rng,
        rng.choice(("", "", "", "please ", "can you ", "now ")) + expand(rng.choice(entry[3]), rng) + ending,
    )
    values: dict[str, Any] = {
        name: int(plain[kind]) if kind == "number" else plain[kind] for name, kind in entry[1]
    }
    return surrounded(rng, fill(rng, text, slots)), values
