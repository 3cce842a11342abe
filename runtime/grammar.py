"""JSON Schema or Lark to grammar (compiled once), and the matcher that follows it (one per generation).

Compiled by llguidance with one fixed JSON style, so that as much as possible is forced. Nothing of a
schema is widened or dropped: what cannot be compiled is refused with the pointer of its keyword.
Masks work on bytes, so a token may hold part of a character.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from .errors import GrammarError
from .json_schema import children
from .tokenizer import Tokenizer

# `, ` and `: ` without inner padding. The schema's own "x-guidance" cannot change these.
_STYLE: dict[str, Any] = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "coerce_one_of": False,
    "lenient": False,
}


class Grammar:
    """A compiled JSON Schema, or a grammar as Lark text, tied to one tokenizer and one width of logits."""

    def __init__(self, schema: Mapping[str, Any] | str, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        """`vocab_size` is the width of the logits, V. Raises GrammarError, of a schema with a JSON pointer.

        A text is llguidance's variant of Lark; what `json_rule` gives may stand in it.
        """
        self.vocab_size = vocab_size
        self._known = min(vocab_size, tokenizer.vocab_size)
        self._vocabulary = tokenizer.for_grammar(vocab_size)
        self._spell = tokenizer.spell
        self._compiled = schema if isinstance(schema, str) else _compile(schema)
        if (problem := _problem(self._compiled, self._vocabulary)) is not None:
            if isinstance(schema, str):
                raise GrammarError("grammar", problem)
            pointer, problem = locate(schema, self._vocabulary) or ("", problem)
            raise GrammarError(f"#{pointer}", problem, "keywords that a grammar can hold")

    def matcher(self) -> Matcher:
        """A fresh matcher at the start of the grammar."""
        matcher = LLMatcher(self._vocabulary, self._compiled, log_level=0)
        return Matcher(matcher, self.vocab_size, self._known, self._spell)


class Matcher:
    """Follows one generation through a grammar. Made by `Grammar.matcher`."""

    def __init__(self, matcher: LLMatcher, width: int, known: int, spell: Callable[[int], list[int]]) -> None:
        self._matcher = matcher
        self._spell = spell
        self._width = width
        self._known = known

    @property
    def finished(self) -> bool:
        """Whether the root is closed: nothing more can follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> NDArray[np.bool_]:
        """Mask [V] bool: True where an id may come next. Ids that the tokenizer does not know are False."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        mask = np.zeros(self._width, np.bool_)
        mask[: self._known] = bits[: self._known]
        return mask

    def accept(self, token: int) -> None:
        """Advance by one id, which must be allowed. Raises ValueError otherwise."""
        if not self._matcher.consume_token(token):
            raise ValueError(f"id {token} does not fit the grammar: {self._matcher.get_error()}")

    def admits(self, token: int) -> bool:
        """Whether `token` may come next."""
        return not self.finished and token < self._known and self._matcher.validate_tokens([token]) == 1

    def copy(self) -> Matcher:
        """A matcher of its own in the same state."""
        return Matcher(self._matcher.deep_copy(), self._width, self._known, self._spell)

    def force(self) -> list[int]:
        """The ids that the grammar leaves no choice about, accepted; empty where there is a choice."""
        forced: list[int] = []
        # One call may stop short of a further forced run.
        while not self.finished and (step := self._matcher.compute_ff_tokens()):
            fitting = self._matcher.validate_tokens(step)
            if fitting < len(step):
                # Forced text that spells a control token (in an enum, say): it is text, so letter by letter.
                step = step[:fitting] + self._spell(step[fitting])
            if not self._matcher.consume_tokens(step):
                raise ValueError(f"forced ids do not fit the grammar: {self._matcher.get_error()}")
            forced += step
        return forced


def json_rule(schema: Mapping[str, Any], *, item_separator: str, key_separator: str) -> str:
    """The right side of a Lark rule: JSON of `schema` in one style."""
    style = _STYLE | {"item_separator": item_separator, "key_separator": key_separator}
    return f"%json {json.dumps({**schema, 'x-guidance': style})}"


def locate(schema: object, vocabulary: LLTokenizer) -> tuple[str, str] | None:
    """Pointer and reason of the innermost part of `schema` that does not compile; None if all does.

    A part is compiled with the root's definitions beside it, so its references keep their meaning.
    """
    definitions = (
        {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        if isinstance(schema, Mapping)
        else {}
    )
    return _locate(schema, definitions, vocabulary)


def _locate(schema: object, definitions: dict[str, Any], vocabulary: LLTokenizer) -> tuple[str, str] | None:
    for pointer, child in children(schema):
        found = _locate(child, definitions, vocabulary)
        if found is not None:
            return pointer + found[0], found[1]
    if not isinstance(schema, Mapping):
        return None
    problem = _problem(_compile({**definitions, **schema}), vocabulary)
    if problem is None:
        return None
    for keyword in schema:
        rest = {key: value for key, value in schema.items() if key != keyword}
        if keyword not in definitions and _problem(_compile({**definitions, **rest}), vocabulary) is None:
            return f"/{keyword}", problem
    return "", problem


def _compile(schema: Mapping[str, Any]) -> str:
    return str(LLMatcher.grammar_from_json_schema(dict(schema), overrides=_STYLE))  # type: ignore[arg-type]


def _problem(compiled: str, vocabulary: LLTokenizer) -> str | None:
    """Why `compiled` cannot be used, or None. A warning counts: it says that something was dropped."""
    _, messages = LLMatcher.validate_grammar_with_warnings(compiled, vocabulary)
    return _first_line(messages) if messages else None


def _first_line(messages: Sequence[str]) -> str:
    return " ".join(" ".join(messages).split())
