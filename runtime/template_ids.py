"""Rendered templates to ids, with control ids from the template alone.

A template mixes its own text with content: what users say, what tools print, descriptions, names. Once mixed,
nothing tells a turn marker of the template from one that content spells. So content is marked before it is
rendered: the characters that a control token begins or ends with are replaced by stand-ins, one for one, which
templates pass through. A control token in the rendered text then counts only if no part of it is a stand-in.

Content without any such spelling is encoded together with the template's text in one piece, exactly as
transformers does; otherwise the stretches between control tokens are encoded with those tokens unknown.

Control tokens are the special ones, and other added tokens that the template writes (`<tool_call>`).
Limit: only HuggingFaceTokenizer; a byte-level model has no control ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .tokenizer import MARKERS, HuggingFaceTokenizer

_SHIFT = 0x100000  # stand-ins are plane 16, which is private use: one for each character of the basic plane
_LITERAL = "\U0010ffff"  # the next character is content's own, though it looks like a stand-in
_STAND_IN = re.compile("\U0010ffff(.)|[\U00100000-\U0010fffe]", re.DOTALL)
_OF_PLANE_16 = re.compile("[\U00100000-\U0010ffff]")
THINKING = ("<think>", "</think>")
# Words of schemas and messages that templates ask for by name. They spell no control token.
_WORDS = """
additionalProperties anyOf arguments array boolean content default description enum format function
id integer items maximum message minimum name null number object parameters pattern properties required
result role string system title tool type user value
"""
_VOCABULARY = frozenset(_WORDS.split())


@dataclass(frozen=True)
class Run:
    """Ids that follow each other: control ids of the template, or text."""

    control: bool
    ids: list[int]


class TemplateIds:
    """Marks content, and encodes what was rendered from it."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, literals: Iterable[str]) -> None:
        """`literals` are the texts that the template writes (`ChatTemplate.literals`)."""
        self._tokenizer = tokenizer
        written = "\0".join(literals)
        self._added = tokenizer.added_tokens
        special = {text for text, (_, entry) in self._added.items() if entry.special or text in MARKERS}
        written_ones = {text for text in self._added if text.strip() and text in written}
        self.special = frozenset(text for text in special if text)
        self._guarded = self.special | written_ones
        self._ids = {text: self._added[text][0] for text in self._guarded}
        self._pattern = _any_of(self._guarded)
        self._any = _any_of(text for text in self._added if text)
        self._edges = {ord(edge): edge for text in self._guarded for edge in (text[0], text[-1])}
        self._edges = {code: chr(_SHIFT + code) for code in self._edges if code < 0xFFFF}
        model_writes = (written_ones - self.special) | set(THINKING)
        self._own = _any_of(model_writes)
        self._prefixes = self._puts_prefix_after_control()

    def whole(self, text: str) -> int | None:
        """The id of `text` if it is an added token that grammars know by its id; else None."""
        found = self._added.get(text)
        return found[0] if found and self._tokenizer.is_whole(found[0]) else None

    def split_whole(self, text: str) -> list[str | int]:
        """`text` as strings, and as ids where it spells a token that grammars know by its id."""
        parts: list[str | int] = []
        end = 0
        for found in self._any.finditer(text):
            token = self.whole(found[0])
            if token is not None:
                parts += [text[end : found.start()], token]
                end = found.end()
        return [part for part in (*parts, text[end:]) if part != ""]

    def id_of(self, text: str) -> int:
        """The id of one of `controls`' texts."""
        return self._ids[text]

    def mark(self, value: Any) -> Any:
        """Content, strings and all strings inside of it, such that it cannot spell a control token."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, Mapping):
            return {
                key if key in _VOCABULARY else self._mark_text(str(key)): self.mark(entry)
                for key, entry in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.mark(entry) for entry in value]
        return value

    def mark_reply(self, text: str) -> str:
        """What the model said: like `mark`, but templates find the tags of thoughts and calls in it."""
        parts, end = [], 0
        for found in self._own.finditer(text):
            parts += [self._mark_edges(text[end : found.start()]), found[0]]
            end = found.end()
        return "".join(parts) + self._mark_edges(text[end:])

    def _mark_text(self, text: str) -> str:
        marked = self._mark_edges(text)
        if marked == text and text and text not in _VOCABULARY and self._could_be_inside(text):
            return chr(_SHIFT + ord(text[0])) + text[1:]
        return marked

    def _mark_edges(self, text: str) -> str:
        return _OF_PLANE_16.sub(_LITERAL + r"\g<0>", text).translate(self._edges)

    def _could_be_inside(self, text: str) -> bool:
        """Whether a template could make a control token of `text` by writing what stands around it."""
        return ord(text[0]) < 0xFFFF and any(text in token[1:-1] for token in self._guarded)

    @staticmethod
    def restore(marked: str) -> str:
        """The text that `marked` stands for."""
        return _STAND_IN.sub(_original, marked)

    def controls(self, marked: str) -> list[re.Match[str]]:
        """The control tokens that the template wrote in `marked` text."""
        return list(self._pattern.finditer(marked))

    def spelled(self, value: Any) -> int:
        """How many control tokens content spells: those that were kept from becoming one."""
        if isinstance(value, str):
            return sum(1 for _ in self._pattern.finditer(value))
        if isinstance(value, Mapping):
            return sum(self.spelled(str(key)) + self.spelled(entry) for key, entry in value.items())
        if isinstance(value, (list, tuple)):
            return sum(map(self.spelled, value))
        return 0

    def encode(self, marked: str, *, first: bool) -> list[Run]:
        """Runs of ids of rendered text; `first` where nothing stands before it."""
        if not marked:
            return []
        controls = self.controls(marked)
        expected = [self._ids[found[0]] for found in controls]
        text = self.restore(marked)
        guarded = set(self._ids.values())
        ids = self._encode_whole(text, alone=first or (bool(controls) and controls[0].start() == 0))
        if [token for token in ids if token in guarded] != expected or len(
            self._pattern.findall(text)
        ) != len(controls):
            return self._encode_parts(marked, controls, first=first)
        runs: list[Run] = []
        for token in ids:
            control = token in guarded
            if not runs or runs[-1].control != control:
                runs.append(Run(control, []))
            runs[-1].ids.append(token)
        return runs

    def _encode_whole(self, text: str, *, alone: bool) -> list[int]:
        """Ids of text that stands `alone`, or behind other text that got its ids already."""
        if alone:
            return self._tokenizer.encode_rendered(text)
        return _behind_text(self._tokenizer.encode_rendered, text)

    def _encode_parts(self, marked: str, controls: list[re.Match[str]], *, first: bool) -> list[Run]:
        """Control tokens by their ids, what stands between them with no control token known."""
        runs: list[Run] = []
        edges = [None, *controls, None]
        for before, after in pairwise(edges):
            start, end = before.end() if before else 0, after.start() if after else len(marked)
            text = self.restore(marked[start:end])
            if before and self._added[before[0]][1].rstrip:
                text = text.lstrip()
            if after and self._added[after[0]][1].lstrip:
                text = text.rstrip()
            if text:
                runs.append(Run(False, self._encode_unseeing(text, first=first and before is None)))
            if after:
                runs.append(Run(True, [self._ids[after[0]]]))
        return runs

    def _encode_unseeing(self, text: str, *, first: bool) -> list[int]:
        def encode(text: str) -> list[int]:
            return self._tokenizer.encode_unseeing(text, self._guarded)

        return encode(text) if first or self._prefixes else _behind_text(encode, text)

    def _puts_prefix_after_control(self) -> bool:
        """Whether the tokenizer treats text behind a control token like text at the very start."""
        control = min(self.special, default="", key=len)
        encode = self._tokenizer.encode_rendered
        return not control or encode(control + "x")[1:] == encode("x")


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `texts`, the longest first."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _behind_text(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Ids of `text` behind other text: a tokenizer that puts a space before the first word must not do so here."""
    for other in ("\n", "x", "0", "."):  # one that does not merge with what follows it
        before, ids = encode(other), encode(other + text)
        if before and ids[: len(before)] == before:
            return ids[len(before) :]
    return encode(text)


def _original(found: re.Match[str]) -> str:
    return found[1] if found[1] is not None else chr(ord(found[0]) - _SHIFT)
