"""What tools print, made up, and what the specialist says about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import specialist_names as names
from specialist_names import chance

SAID_LINES, SAID_CHARACTERS = 3, 110  # how much of a file an answer quotes


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
    if chance(rng, 0.2):
        made = names.family(rng, count)
    else:
        made = [
            names.folder_name(rng) + "/" if chance(rng, 0.25) else names.file_name(rng) for _ in range(count)
        ]
    entries = sorted(set(made))
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
