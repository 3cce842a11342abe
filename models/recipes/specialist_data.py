"""Seeded synthetic conversations of the demo specialist, as ids with a label each.

    Random -> offer (which tools, in which order)           offer
           -> exchanges (request, calls, results, answer)   Scene
           -> ids and labels of one row                     row

What the model reads is rendered by the agent's own dialect (`PosttrainDialect`) over the agent's own tool
file (`tools_schemas/demo.json`) and encoded by the agent's own tokenizer class, so that training and use
agree by construction. The same `Random` state always gives the same ids.

What it is not: real conversations. Tool output is made up and not consistent from call to call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import specialist_names as names
import specialist_phrases as phrases
from specialist_names import chance
from specialist_phrases import expand

from posttrainllm.agent.chat_format import DEFAULT_HEADER, Piece, PosttrainDialect
from posttrainllm.agent.tool_file import load_tools
from posttrainllm.agent.tools import Tool, ToolResult
from posttrainllm.runtime.tokenizer import Tokenizer

PROMPT, CALL, ANSWER, END = 0, 1, 2, 3  # labels: what is read, and what is said
DIALECT = PosttrainDialect()
ABOUT_A_FILE = ("count_lines", "count_words", "file_size", "file_date", "read_file")
NO_TOOL_ANSWER = "I have no tool for that."
SAID_LINES, SAID_CHARACTERS = 3, 110  # how much of a file an answer quotes
QUOTES = ('""', "''", "``", "“”", '""', "''")
Slots = dict[str, str]


@lru_cache(maxsize=1)
def demo_tools() -> tuple[Tool, ...]:
    """The tools of the shipped file, in its order."""
    return tuple(load_tools(Path(str(files("posttrainllm.tools_schemas") / "demo.json"))))


# --- the tools of a conversation --------------------------------------------------------------------


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
    count = 9 if most >= 9 and chance(rng, 0.35) else rng.randint(1, most)
    chosen = known if count == len(known) else rng.sample(known, count)
    if chance(rng, 0.6):
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
    header = DEFAULT_HEADER if chance(rng, 0.85) else rng.choice(phrases.HEADERS)
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


# --- texts of requests ------------------------------------------------------------------------------


def quoted(rng: Random, name: str, often: float) -> str:
    """`name` as one writes it in a request; quoted where it would not be clear where it ends."""
    needed = " " in name or name[-1] in ".,;:!?'" or (not name[0].isalnum() and name[0] not in "./~_#$@")
    if not needed and not chance(rng, often):
        return name
    usable = [marks for marks in QUOTES if marks[0] not in name and marks[1] not in name]
    opening, closing = rng.choice(usable or ["``"])
    return f"{opening}{name}{closing}"


def quoted_pattern(rng: Random, text: str) -> str:
    """As `quoted`, but a few plain words may stand without quotes."""
    plain = all(part.isalnum() for part in text.split(" "))
    if plain and " " in text and chance(rng, 0.25):
        return text
    return quoted(rng, text, 0.55)


def typo(rng: Random, text: str) -> str:
    """`text` with a slip of the keyboard, not in a slot."""
    letters = [match.start() for match in re.finditer(r"[a-z](?![^{]*\})", text)]
    if not letters:
        return text
    at = rng.choice(letters)
    kind = rng.random()
    if kind < 0.4:
        return text[:at] + text[at + 1 :]
    if kind < 0.6:
        return text[:at] + text[at] + text[at:]
    return text[:at] + (
        text[at + 1 : at + 2] + text[at] + text[at + 2 :] if text[at + 1 : at + 2].isalpha() else text[at:]
    )


def styled(rng: Random, text: str) -> str:
    """A template's text with the case and the slips that people have; slots stay."""
    kind = rng.random()
    if kind < 0.62 and text[:1].islower():
        text = text[0].upper() + text[1:]
    elif kind < 0.70:
        text = re.sub(r"[^{}]+(?![^{]*\})", lambda match: match.group().lower(), text)
    elif kind < 0.715:
        text = re.sub(r"[^{}]+(?![^{]*\})", lambda match: match.group().upper(), text)
    return typo(rng, text) if chance(rng, 0.04) else text


def fill(rng: Random, text: str, slots: Mapping[str, str]) -> str:
    """Word slots ({F}, {D} …) and then the plain ones."""

    def words(match: re.Match[str]) -> str:
        slot = match.group(1)
        if slot == "W":
            slot = "D" if "folder" in slots else "F"
        table = {
            "F": phrases.FILE_WORDS,
            "D": phrases.FOLDER_WORDS,
            "G": phrases.CALLED_FOLDER_WORDS,
            "Q": phrases.PATTERN_WORDS,
        }
        if slot in slots:
            return slots[slot]
        return expand(rng.choice(table[slot]), rng)

    text = re.sub(r"\{([FDGWQ])\}", words, text)
    return re.sub(r"\{(\w+)\}", lambda match: slots[match.group(1)], text)


def mood_text(rng: Random, moods: phrases.Moods) -> str:
    """A whole sentence, slots still in it."""
    mood = rng.choices(("do", "ask", "ind", "noun", "bare"), (30, 32, 14, 13, 11))[0]
    before = {
        "do": phrases.BEFORE_DO,
        "ask": phrases.BEFORE_ASK,
        "ind": phrases.BEFORE_IND,
        "noun": phrases.BEFORE_NOUN,
        "bare": ("",),
    }
    if mood not in moods:
        mood = "ask"
    body = expand(rng.choice(moods[mood]), rng)
    return expand(rng.choice(before[mood]), rng) + body + expand(rng.choice(phrases.ENDINGS[mood]), rng)


def surrounded(rng: Random, text: str) -> str:
    """Sometimes with a sentence before or after."""
    kind = rng.random()
    if kind < 0.07:
        return expand(rng.choice(phrases.LEAD_INS), rng) + " " + text
    if kind < 0.13:
        ended = text if text[-1] in ".?!" else text + "."
        return ended + " " + expand(rng.choice(phrases.TRAILERS), rng)
    return text


def with_it(rng: Random, moods: phrases.Moods) -> str:
    """The thing is named first, then spoken of as "it"."""
    body = mood_text(rng, {key: value for key, value in moods.items() if key != "bare"})
    pronoun = rng.choice(("it", "it", "it", "that file", "this file", "the file", "that"))
    body = body.replace("{F}'s", "its").replace("{F}", pronoun).replace("{path}", pronoun)
    return expand(rng.choice(phrases.MENTIONS), rng) + styled(rng, body)


# --- results and answers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A tool's streams, and what to say about them."""

    stdout: str
    stderr: str = ""
    exit_code: int = 0
    timed_out: bool = False


def failed(rng: Random, tool: str, given: Mapping[str, str]) -> Outcome:
    """Something that goes wrong with `tool`."""
    what = given.get("path") or given.get("folder") or ""
    kinds = {
        "list_files": ("no such folder: {}", "no such folder: {}", "not a folder: {}", "cannot read: {}"),
        "search_text": ("no such file: {}", "no such file: {}", "cannot read: {}"),
        "calculate": (
            "division by zero",
            f"cannot calculate: {given.get('expression', '')}",
            "result too large",
        ),
        "read_file": (
            "no such file: {}",
            "no such file: {}",
            "is a folder: {}",
            "binary file: {}",
            "cannot read: {}",
        ),
    }
    default = (
        "no such file: {}",
        "no such file: {}",
        "no such file: {}",
        "is a folder: {}",
        "cannot read: {}",
    )
    kind = rng.random()
    if kind < 0.05:
        return Outcome("", "timed out after 30 s and was killed", 124, timed_out=True)
    if kind < 0.10:
        return Outcome("", names.phrase(rng, rng.randint(2, 5)), rng.choice((1, 2, 3, 126, 127, 255)))
    return Outcome("", rng.choice(kinds.get(tool, default)).format(what), 1)


def succeeded(rng: Random, tool: str, given: Mapping[str, str]) -> Outcome:
    """Some output that `tool` could give."""
    makers: dict[str, Callable[[Random, Mapping[str, str]], str]] = {
        "list_files": _listing, "read_file": _contents, "search_text": _matches, "file_size": _size, "calculate": _value,
    }  # fmt: skip
    if tool in ("count_lines", "count_words"):
        return Outcome(names.number(rng))
    if tool in ("file_date", "current_time"):
        return Outcome(f"{names.day(rng)} {names.clock(rng)}")
    return Outcome(makers[tool](rng, given))


def _listing(rng: Random, given: Mapping[str, str]) -> str:
    count = rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7, 9, 12))
    entries = sorted(
        {names.folder_name(rng) + "/" if chance(rng, 0.25) else names.file_name(rng) for _ in range(count)}
    )
    if count >= 9 and chance(rng, 0.7):
        entries.append(f"({rng.randint(1, 10 ** rng.randint(1, 3))} more)")
    return "\n".join(entries)


def _contents(rng: Random, given: Mapping[str, str]) -> str:
    return names.text(rng, rng.choice((0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 5, 7)))


def _matches(rng: Random, given: Mapping[str, str]) -> str:
    if chance(rng, 0.2):
        return "0 matches"
    count = rng.choice((1, 1, 1, 2, 2, 3, 4, 5, 8, 12, 37, rng.randint(6, 999)))
    where = given["path"]
    lines, at = [], 0
    for _ in range(min(count, rng.choice((2, 3, 5)) if count > 5 else 5)):
        at += rng.randint(1, 10 ** rng.choice((1, 1, 2, 3)))
        name = where if given.get("kind") == "file" else _inside(rng, where)
        text = rng.choice(("{}", "{} {}", "{1} {0}", "{1} {0} {1}")).format(
            given["pattern"], names.phrase(rng, 2)
        )
        lines.append(f"{name}:{at}: {text}")
    return f"{count} {'match' if count == 1 else 'matches'}\n" + "\n".join(lines)


def _inside(rng: Random, folder: str) -> str:
    """Some file in `folder`, as the search prints it."""
    below = "/".join([*([names.folder_name(rng)] if chance(rng, 0.2) else []), names.file_name(rng)])
    bare = folder.removeprefix("./").rstrip("/")
    return below if bare in (".", "") else f"{bare}/{below}"


def _size(rng: Random, given: Mapping[str, str]) -> str:
    count = names.number(rng)
    return f"{count} {'byte' if count == '1' else 'bytes'}"


def _value(rng: Random, given: Mapping[str, str]) -> str:
    kind = rng.random()
    sign = "-" if kind < 0.12 else ""
    if kind < 0.75:
        return sign + names.number(rng)
    return f"{sign}{names.number(rng)}.{rng.randint(1, 10 ** rng.choice((1, 1, 2, 3, 9)))}"


def answer(tool: str, given: Mapping[str, str], outcome: Outcome) -> str:
    """What the specialist says about one result."""
    if outcome.exit_code:
        reason = outcome.stderr or f"exit code {outcome.exit_code}"
        return f"I could not do that: {reason}."
    out = outcome.stdout
    path = given.get("path", "")
    if tool == "list_files":
        return _listed(given["folder"], out)
    if tool == "read_file":
        return f"{path} says: {shortened(out)}" if out else f"{path} is empty."
    if tool == "search_text":
        return _found(given["pattern"], path, out)
    if tool == "calculate":
        return f"{given['expression']} = {out}"
    if tool == "current_time":
        date, time = out.split(" ")
        return f"It is {time} on {date}."
    return f"{path} {fact(tool, out)}."


def fact(tool: str, out: str) -> str:
    """A property of a file as a predicate."""
    if tool in ("count_lines", "count_words"):
        unit = tool.removeprefix("count_")
        return f"has {out} {unit[:-1] if out == '1' else unit}"
    if tool == "file_size":
        return f"is {out}"
    date, time = out.split(" ")
    return f"was last changed on {date} at {time}"


def _listed(folder: str, out: str) -> str:
    where = "The current folder" if folder == "." else folder
    if not out:
        return f"{where} is empty."
    return f"{where} holds: {out.replace(chr(10) + '(', ' (').replace(chr(10), ', ')}."


def _found(pattern: str, path: str, out: str) -> str:
    if out == "0 matches":
        return f'No match for "{pattern}" in {"the current folder" if path == "." else path}.'
    count, first = out.split("\n")[:2]
    name, line, _ = first.split(":", 2) if first.count(":") >= 2 else (path, "1", "")
    return f'{count} for "{pattern}": first in {name}, line {line}.'


def shortened(text: str) -> str:
    """The first lines of `text`, cut between words where they are long; `…` says that there is more."""
    said: list[str] = []
    left = SAID_CHARACTERS
    lines = text.split("\n")
    for line in lines[:SAID_LINES]:
        if len(line) > left:
            cut = line[:left].rsplit(" ", 1)[0]
            return "\n".join([*said, cut]) + "…"
        said.append(line)
        left -= len(line)
        if left < 20:
            break
    return "\n".join(said) + ("…" if len(said) < len(lines) else "")


# --- exchanges ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """One user turn: the request, (call, result) pairs, the answer. The pieces a dialect renders."""

    request: str
    steps: tuple[tuple[dict[str, Any], ToolResult], ...]
    answer: str


@dataclass
class Scene:
    """Makes the exchanges of one conversation."""

    rng: Random
    offer: Offer
    _last: tuple[str, str] | None = field(default=None)  # tool and file of the exchange before

    def exchange(self) -> Exchange:
        """The next exchange."""
        rng = self.rng
        kinds: tuple[tuple[Callable[[], Exchange | None], float], ...] = (
            (self._single, 56), (self._absent, 8), (self._nothing_fits, 8), (self._talk, 4.5), (self._pair, 7), (self._both, 5), (self._together, 2),
            (self._list_then_read, 2), (self._list_then_first, 3), (self._search_then, 4.5), (self._time_and, 1), (self._other, 5 if self.offer.others else 0),
            (self._follow_up, 8 if self._last else 0), (self._again, 4 if self._last else 0),
        )  # fmt: skip
        while True:
            make = rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]
            made = make()
            if made:
                if make not in (self._single, self._follow_up, self._again, self._pair):
                    self._last = None
                return made

    def _has(self, *tools: str) -> bool:
        return all(tool in self.offer.demo for tool in tools)

    def _call(
        self, tool: str, given: Mapping[str, str], outcome: Outcome
    ) -> tuple[dict[str, Any], ToolResult]:
        """The call of a demo tool as this conversation names it, and its result."""
        offered = self.offer.demo[tool]
        values = [given[name] for name in _argument_names(tool)]
        call = {"tool": offered.tool.name, "arguments": dict(zip(offered.arguments, values, strict=True))}
        return call, ToolResult(
            offered.tool.name, outcome.stdout, outcome.stderr, outcome.exit_code, timed_out=outcome.timed_out
        )

    def _run(self, tool: str, given: Mapping[str, str], errors: float = 0.1) -> Outcome:
        return (failed if chance(self.rng, errors) else succeeded)(self.rng, tool, given)

    def _answered(self, request: str, tool: str, given: Mapping[str, str]) -> Exchange:
        outcome = self._run(tool, given, 0.02 if tool == "current_time" else 0.1)
        self._last = (tool, given["path"]) if tool in ABOUT_A_FILE else None
        return Exchange(request, (self._call(tool, given, outcome),), answer(tool, given, outcome))

    def _single(self) -> Exchange:
        weights = [
            0.5 if tool == "current_time" else 1.8 if tool == "search_text" else 1 for tool in self.offer.demo
        ]
        if not weights:
            return self._nothing_fits()
        tool = self.rng.choices(list(self.offer.demo), weights)[0]
        request, given = self.request(tool)
        return self._answered(request, tool, given)

    def request(self, tool: str) -> tuple[str, dict[str, str]]:
        """A request for `tool`, and the arguments that it means."""
        rng = self.rng
        if tool == "calculate":
            return self._sum_request()
        given, slots = self._given(tool)
        moods = phrases.REQUESTS[tool]
        if given.get("folder") == "." or given.get("kind") == "here":
            moods = phrases.HERE[tool]
        if tool in ABOUT_A_FILE and chance(rng, 0.1):
            return surrounded(rng, fill(rng, with_it(rng, moods), slots)), given
        text = styled(rng, mood_text(rng, moods))
        if tool in ABOUT_A_FILE and chance(rng, 0.03):
            slots["other"] = quoted(rng, names.file_path(rng), 0.2)
            text = rng.choice(phrases.OTHER_FIRST)
            text = styled(rng, expand(text, rng) + mood_text(rng, moods))
        return surrounded(rng, fill(rng, text, slots)), given

    def _given(self, tool: str) -> tuple[dict[str, str], Slots]:
        """Arguments for `tool` and how the request spells them."""
        rng = self.rng
        if tool == "current_time":
            return {}, {}
        if tool == "list_files":
            folder = "." if chance(rng, 0.12) else names.folder(rng)
            return {"folder": folder}, {"folder": quoted(rng, folder, 0.2)}
        if tool == "search_text":
            return self._search_given()
        path = names.file_path(rng)
        return {"path": path}, {"path": quoted(rng, path, 0.25)}

    def _search_given(self) -> tuple[dict[str, str], Slots]:
        rng = self.rng
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

    def _sum_request(self) -> tuple[str, dict[str, str]]:
        rng = self.rng
        kind = rng.random()
        if kind < 0.1:
            said, meant = names.order(rng)
            text = (
                expand(rng.choice(phrases.BEFORE_DO), rng)
                + said
                + expand(rng.choice(phrases.ENDINGS["do"]), rng)
            )
            return surrounded(rng, styled(rng, text) if chance(rng, 0.3) else text[0].upper() + text[1:]), {
                "expression": meant
            }
        said, meant = names.spoken(rng) if kind < 0.35 else (names.expression(rng),) * 2
        if kind >= 0.35:
            said = quoted(rng, said, 0.08) if " " not in said or chance(rng, 0.08) else said
        text = styled(rng, mood_text(rng, phrases.REQUESTS["calculate"]))
        return surrounded(rng, fill(rng, text, {"E": said})), {"expression": meant}

    # no tool

    def _absent(self) -> Exchange | None:
        missing = [tool.name for tool in demo_tools() if tool.name not in self.offer.demo]
        if missing and chance(self.rng, 0.85):
            request, _ = self.request(self.rng.choice(missing))
            return Exchange(request, (), NO_TOOL_ANSWER)
        gone = [entry for entry in phrases.OTHER_TOOLS if entry not in self.offer.others]
        request, _ = self._other_request(self.rng.choice(gone))
        return Exchange(request, (), NO_TOOL_ANSWER) if missing else None

    def _nothing_fits(self) -> Exchange | None:
        if self.offer.others:
            return None
        text = expand(self.rng.choice(phrases.NO_TOOL), self.rng)
        mood = self.rng.choice(("do", "ask", "bare"))
        text = styled(
            self.rng,
            (expand(self.rng.choice(phrases.BEFORE_DO), self.rng) if mood == "do" else "")
            + text
            + expand(self.rng.choice(phrases.ENDINGS[mood]), self.rng),
        )
        return Exchange(surrounded(self.rng, fill(self.rng, text, self._any_slots())), (), NO_TOOL_ANSWER)

    def _any_slots(self) -> Slots:
        rng = self.rng
        path, other, folder = names.file_path(rng), names.file_path(rng), names.folder(rng)
        return {
            "path": quoted(rng, path, 0.2), "other": quoted(rng, other, 0.2), "folder": quoted(rng, folder, 0.2), "pattern": quoted(rng, names.pattern(rng), 0.6),
            "word": names.word(rng), "number": str(rng.randint(1, 99)), "person": rng.choice(phrases.PEOPLE), "city": rng.choice(phrases.CITIES),
        }  # fmt: skip

    def _talk(self) -> Exchange:
        rng = self.rng
        group = rng.choices(
            (phrases.GREETINGS, phrases.THANKS, phrases.FAREWELLS, phrases.ABILITIES, phrases.IDENTITY),
            (3, 2, 1, 2, 1),
        )[0]
        text = expand(rng.choice(group), rng) + rng.choice(("", "", ".", "!", "?"))
        text = text[0].upper() + text[1:] if chance(rng, 0.6) else text
        listed = ", ".join(tool.name for tool in self.offer.tools)
        said = {
            phrases.GREETINGS: "Hello! What can I do for you?", phrases.THANKS: "You are welcome.", phrases.FAREWELLS: "Goodbye!",
            phrases.ABILITIES: f"I can use these tools: {listed}.", phrases.IDENTITY: "I am a small agent that uses tools.",
        }[group]  # fmt: skip
        return Exchange(text, (), said)

    # other tools

    def _other_request(self, entry: phrases.Other) -> tuple[str, dict[str, Any]]:
        """A request for a tool that is not of the demo, and its arguments."""
        rng = self.rng
        plain = {
            "path": names.file_path(rng),
            "other": names.file_path(rng),
            "folder": names.folder(rng),
            "pattern": names.pattern(rng),
            "word": names.word(rng),
            "number": str(rng.randint(1, 999)),
            "person": rng.choice(phrases.PEOPLE),
            "city": rng.choice(phrases.CITIES),
        }
        slots = {
            key: value if key in ("word", "number", "person", "city") else quoted(rng, value, 0.3)
            for key, value in plain.items()
        }
        ending = rng.choice(("", "", ".", "?", " please", "!"))
        text = styled(
            rng,
            rng.choice(("", "", "", "please ", "can you ", "now "))
            + expand(rng.choice(entry[3]), rng)
            + ending,
        )
        values: dict[str, Any] = {
            name: int(plain[kind]) if kind == "number" else plain[kind] for name, kind in entry[1]
        }
        return surrounded(rng, fill(rng, text, slots)), values

    def _other(self) -> Exchange:
        rng = self.rng
        entry = rng.choice(self.offer.others)
        request, values = self._other_request(entry)
        out = rng.choice(
            ("done", "ok", names.phrase(rng, rng.randint(1, 5)), names.number(rng), names.word(rng))
        )
        outcome = Outcome(out) if chance(rng, 0.9) else Outcome("", names.phrase(rng, 3), 1)
        said = (
            f"Done: {outcome.stdout}." if not outcome.exit_code else f"I could not do that: {outcome.stderr}."
        )
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

    # more than one step

    def _steps(
        self, request: str, wanted: Sequence[tuple[str, Mapping[str, str]]], said: Callable[[list[str]], str]
    ) -> Exchange:
        """Call after call; the first failure ends it."""
        steps, outs = [], []
        for tool, given in wanted:
            outcome = self._run(tool, given, 0.06)
            steps.append(self._call(tool, given, outcome))
            if outcome.exit_code:
                return Exchange(request, tuple(steps), answer(tool, given, outcome))
            outs.append(outcome.stdout)
        return Exchange(request, tuple(steps), said(outs))

    def _pair(self) -> Exchange | None:
        """Two properties of one file."""
        rng = self.rng
        present = [tool for tool in phrases.PROPERTY if self._has(tool)]
        if len(present) < 2:
            return None
        one, two = rng.sample(present, 2)
        counts = {one, two} == {"count_lines", "count_words"}
        kind = rng.random()
        if counts and kind < 0.5:
            text, table = (
                rng.choice(phrases.LINES_AND_WORDS),
                {tool: (tool.removeprefix("count_"),) for tool in (one, two)},
            )
            text = text + " have" if "|does)" in text else text
            text = text.replace("(are in|does) {F} have", "(are in {F}|does {F} have)")
        elif kind < 0.7:
            text, table = rng.choice(phrases.PAIR), phrases.PROPERTY
        else:
            text, table = rng.choice(phrases.PAIR_CLAUSES), phrases.CLAUSE
        text = text.replace("{one}", rng.choice(table[one])).replace("{two}", rng.choice(table[two]))
        path = names.file_path(rng)
        text = styled(rng, expand(text, rng) + rng.choice(("", ".", "?", ", please.", " please")))
        request = surrounded(rng, fill(rng, text, {"path": quoted(rng, path, 0.25)}))
        self._last = (two, path)

        def said(outs: list[str]) -> str:
            first, second = fact(one, outs[0]), fact(two, outs[1])
            return f"{path} {first} and {second.removeprefix('has ') if counts else second}."

        return self._steps(request, [(one, {"path": path}), (two, {"path": path})], said)

    def _two_files(self, table: Mapping[str, tuple[str, ...]]) -> tuple[str, str, list[str]] | None:
        """(request, tool, both paths) from a table of templates with {A} and {B}."""
        rng = self.rng
        present = [tool for tool in table if self._has(tool)]
        if not present:
            return None
        tool = rng.choice(present)
        paths = [names.file_path(rng), names.file_path(rng)]
        slots = {key: quoted(rng, path, 0.2) for key, path in zip("AB", paths, strict=True)}
        text = styled(
            rng,
            rng.choice(("", "", "please ", "now "))
            + expand(rng.choice(table[tool]), rng)
            + rng.choice(("", ".", "?", " please")),
        )
        return surrounded(rng, fill(rng, text, slots)), tool, paths

    def _both(self) -> Exchange | None:
        """The same property of two files."""
        made = self._two_files(phrases.BOTH)
        if made is None:
            return None
        request, tool, paths = made
        wanted = [(tool, {"path": path}) for path in paths]

        def said(outs: list[str]) -> str:
            if tool == "read_file":
                return " ".join(
                    answer(tool, {"path": path}, Outcome(out)) for path, out in zip(paths, outs, strict=True)
                )
            return f"{paths[0]} {fact(tool, outs[0])} and {paths[1]} {fact(tool, outs[1])}."

        return self._steps(request, wanted, said)

    def _together(self) -> Exchange | None:
        """Two counts and their sum."""
        if not self._has("calculate"):
            return None
        made = self._two_files(phrases.TOGETHER)
        if made is None:
            return None
        request, tool, paths = made
        counts = [names.number(self.rng) for _ in paths]
        total = str(sum(map(int, counts)))
        calls = [
            self._call(tool, {"path": path}, Outcome(count))
            for path, count in zip(paths, counts, strict=True)
        ]
        expression = " + ".join(counts)
        calls.append(self._call("calculate", {"expression": expression}, Outcome(total)))
        return Exchange(request, tuple(calls), f"Together they have {total} {tool.removeprefix('count_')}.")

    def _list_then_read(self) -> Exchange | None:
        if not self._has("list_files", "read_file"):
            return None
        rng = self.rng
        folder, path = names.folder(rng), names.file_path(rng)
        text = styled(
            rng, expand(rng.choice(phrases.LIST_THEN_READ), rng) + rng.choice(("", ".", "?", " please"))
        )
        request = fill(rng, text, {"folder": quoted(rng, folder, 0.2), "path": quoted(rng, path, 0.2)})
        wanted = [("list_files", {"folder": folder}), ("read_file", {"path": path})]
        return self._steps(
            request,
            wanted,
            lambda outs: " ".join(
                answer(tool, given, Outcome(out)) for (tool, given), out in zip(wanted, outs, strict=True)
            ),
        )

    def _list_then_first(self) -> Exchange | None:
        if not self._has("list_files", "read_file"):
            return None
        rng = self.rng
        folder = names.folder(rng)
        text = styled(
            rng, expand(rng.choice(phrases.LIST_THEN_FIRST), rng) + rng.choice(("", ".", "?", " please"))
        )
        request = fill(rng, text, {"folder": quoted(rng, folder, 0.2)})
        entries = [names.file_name(rng) for _ in range(rng.choice((1, 2, 2, 3, 4, 5)))]
        first = self._call("list_files", {"folder": folder}, Outcome("\n".join(entries)))
        given = {"path": f"{folder.rstrip('/')}/{entries[0]}"}
        outcome = self._run("read_file", given, 0.05)
        return Exchange(
            request, (first, self._call("read_file", given, outcome)), answer("read_file", given, outcome)
        )

    def _search_then(self) -> Exchange | None:
        """Find a file by a text in it, then look at that file."""
        rng = self.rng
        present = [tool for tool in phrases.SEARCH_THEN if self._has(tool)]
        if not present or not self._has("search_text"):
            return None
        tool = rng.choice(present)
        folder, pattern = names.folder(rng), names.pattern(rng)
        text = styled(
            rng, expand(rng.choice(phrases.SEARCH_THEN[tool]), rng) + rng.choice(("", ".", "?", " please"))
        )
        request = fill(
            rng, text, {"folder": quoted(rng, folder, 0.2), "pattern": quoted_pattern(rng, pattern)}
        )
        given = {"pattern": pattern, "path": folder, "kind": "folder"}
        found = self._run("search_text", given, 0.06)
        first = self._call("search_text", given, found)
        if found.exit_code or found.stdout == "0 matches":
            return Exchange(request, (first,), answer("search_text", given, found))
        path = found.stdout.split("\n")[1].split(":", 1)[0]
        outcome = self._run(tool, {"path": path}, 0.04)
        return Exchange(
            request, (first, self._call(tool, {"path": path}, outcome)), answer(tool, {"path": path}, outcome)
        )

    def _time_and(self) -> Exchange | None:
        """The time, and something about a file."""
        rng = self.rng
        present = [tool for tool in ABOUT_A_FILE if self._has(tool)]
        if not present or not self._has("current_time"):
            return None
        tool = rng.choice(present)
        moods = phrases.REQUESTS[tool]
        template = rng.choice(phrases.TIME_AND)
        text = (
            expand(template, rng)
            .replace("{ask}", expand(rng.choice(moods["ask"]), rng))
            .replace("{do}", expand(rng.choice(moods["do"]), rng))
        )
        path = names.file_path(rng)
        request = fill(rng, styled(rng, text + rng.choice(("", ".", "?"))), {"path": quoted(rng, path, 0.2)})
        wanted = [("current_time", {}), (tool, {"path": path})]
        if template.startswith("{"):
            wanted.reverse()
        return self._steps(
            request,
            wanted,
            lambda outs: " ".join(
                answer(name, given, Outcome(out)) for (name, given), out in zip(wanted, outs, strict=True)
            ),
        )

    # what leans on the exchange before

    def _follow_up(self) -> Exchange | None:
        """Another question about the same file."""
        rng = self.rng
        if self._last is None:
            return None
        path = self._last[1]
        tool = rng.choice([name for name in phrases.FOLLOW_UPS if name != self._last[0]])
        if chance(rng, 0.5):
            text = expand(rng.choice(phrases.FOLLOW_UPS[tool]), rng) + rng.choice(("", "?", "?", "."))
        else:
            text = mood_text(
                rng, {key: value for key, value in phrases.REQUESTS[tool].items() if key != "bare"}
            )
            text = text.replace("{F}'s", "its").replace(
                "{F}", rng.choice(("it", "it", "that file", "the same file", "this file"))
            )
        request = styled(rng, text)
        if not self._has(tool):
            return Exchange(request, (), NO_TOOL_ANSWER)
        return self._answered(request, tool, {"path": path})

    def _again(self) -> Exchange | None:
        """The same question about another file."""
        rng = self.rng
        if self._last is None or not self._has(self._last[0]):
            return None
        path = names.file_path(rng)
        text = styled(rng, expand(rng.choice(phrases.SAME_AGAIN), rng) + rng.choice(("", "?", "?", ".")))
        return self._answered(
            fill(rng, text, {"path": quoted(rng, path, 0.2)}), self._last[0], {"path": path}
        )


def _argument_names(tool: str) -> tuple[str, ...]:
    return next(entry.exec_args for entry in demo_tools() if entry.name == tool)


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
        more, marks = encode(segments(scene.exchange()), tokenizer)
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
            *(part for _ in range(4) for part in segments(scene.exchange())),
        ]
        made += [piece.text for pieces, _ in parts for piece in pieces if not piece.marker]
    return made
