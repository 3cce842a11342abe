"""From a template to the text of a request: openings, endings, quotes, cases, typos, names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random

import specialist_phrases as phrases
from specialist_names import NOUNS, chance
from specialist_phrases import expand

Slots = dict[str, str]
CALLED_FOLDER = tuple(
    words for words in phrases.WORDS_AROUND["folder"] if words not in ("{folder}", "my {folder}")
)
QUOTES = ('""', "''", "``", "“”", '""', "''")


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
    return typo(rng, text) if chance(rng, 0.06) else text


def fill(rng: Random, text: str, slots: Mapping[str, str]) -> str:
    """Word slots ({F}, {D} …) and then the plain ones."""

    def worded(match: re.Match[str]) -> str:
        slot = match.group(1)
        if slot == "W":
            slot = "D" if "folder" in slots else "F"
        words = phrases.WORDS_AROUND
        table = {"F": words["file"], "D": words["folder"], "G": CALLED_FOLDER, "Q": words["pattern"]}
        if slot in slots:
            return slots[slot]
        return expand(rng.choice(table[slot]), rng)

    text = re.sub(r"\{([FDGWQ])\}", worded, text)
    return re.sub(
        r"\{(\w+)\}",
        lambda match: rng.choice(NOUNS) if match.group(1) == "noun" else slots[match.group(1)],
        text,
    )


def mood_text(rng: Random, moods: phrases.Moods) -> str:
    """A whole sentence, slots still in it."""
    mood = rng.choices(("do", "ask", "ind", "noun", "bare"), (30, 32, 14, 13, 11))[0]
    if mood not in moods:
        mood = "ask"
    body = expand(rng.choice(moods[mood]), rng)
    return (
        expand(rng.choice(phrases.BEFORE.get(mood, ("",))), rng)
        + body
        + expand(rng.choice(phrases.ENDINGS[mood]), rng)
    )


def surrounded(rng: Random, text: str) -> str:
    """Sometimes with a sentence before or after."""
    kind = rng.random()
    if kind < 0.07:
        return expand(rng.choice(phrases.SENTENCES["lead_ins"]), rng) + " " + text
    if kind < 0.13:
        ended = text if text[-1] in ".?!" else text + "."
        return ended + " " + expand(rng.choice(phrases.SENTENCES["trailers"]), rng)
    return text


def with_it(rng: Random, moods: phrases.Moods) -> str:
    """The thing is named first, then spoken of as "it"."""
    body = mood_text(rng, {key: value for key, value in moods.items() if key not in ("bare", "whole")})
    pronoun = rng.choice(("it", "it", "it", "that file", "this file", "the file", "that"))
    body = body.replace("{F}'s", "its").replace("{F}", pronoun).replace("{path}", pronoun)
    return expand(rng.choice(phrases.SENTENCES["mentions"]), rng) + styled(rng, body)
