"""What the model said: a tool call, an answer, or neither. Free text is searched for the first object.

Covered: the protocol's own shapes at the top level, and other common call shapes when they name a
declared tool. Not covered, on purpose: JSON inside an answer's string or inside a fenced code block is
text, and so is an object of any other shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn


@dataclass(frozen=True)
class Answer:
    """The final answer."""

    text: str


@dataclass(frozen=True)
class Call:
    """A call; `arguments` is whatever stood there, not validated. `dialect` says which shape matched."""

    tool: str
    arguments: object
    dialect: str = "posttrainllm"


@dataclass(frozen=True)
class Malformed:
    """Something that began as a call or an answer and is not JSON; `problem` is meant for the model."""

    problem: str


Reply = Answer | Call | Malformed


def parse_object(text: str, tools: Collection[str]) -> Reply | None:
    """The reply that one complete JSON object holds; None if it is no reply at all."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return Malformed(f"not valid JSON: {error}")
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("tool"), str):
        return Call(value["tool"], value.get("arguments", {}))
    if "answer" in value:
        answer = value["answer"]
        return Answer(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False))
    return _foreign_call(value, tools)


def _foreign_call(value: Mapping[str, Any], tools: Collection[str]) -> Call | None:
    """`{"name", "arguments"}` and `{"function": {...}}`, only for a tool that exists."""
    inner = value.get("function")
    dialect = "function"
    if not isinstance(inner, Mapping):
        inner, dialect = value, "name"
    name = inner.get("name")
    if not isinstance(name, str) or name not in tools:
        return None
    return Call(name, inner.get("arguments", inner.get("parameters", {})), dialect)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_REPLY_KEY = re.compile(r'\{\s*"(tool|answer|name|function)"')
_FENCE = "```"


@dataclass
class ReplyScanner:
    """Finds the first reply in text that arrives piece by piece; each character is looked at once.

    Prose before it does not hide it: an opening brace that cannot begin an object (`{1,2}`), or whose
    object breaks off structurally, is given up and the text behind it searched.
    """

    tools: Collection[str]
    text: str = ""
    reply: Reply | None = None
    _position: int = 0
    _scan: _ObjectScan | None = field(default=None, repr=False)

    def push(self, delta: str) -> Reply | None:
        """Add text; the reply as soon as its object is complete, and from then on."""
        self.text += delta
        while self.reply is None and self._position < len(self.text):
            if self._scan is None:
                start = self.text.find("{", self._position)
                if start < 0:
                    self._position = len(self.text)
                    break
                self._scan, self._position = _ObjectScan(start), start
            self._advance(self._scan)
        return self.reply

    def finish(self, *, ended: bool = True) -> Reply | None:
        """The reply at the end of the text; Malformed if a call or an answer was begun and not ended.

        Whether the model `ended` its turn makes no difference: an object is whole or it is not.
        """
        while self.reply is None and self._scan is not None:
            start = self._scan.start
            if _REPLY_KEY.match(self.text, start) and not self._fenced(start):
                self.reply = Malformed("the object breaks off before its closing brace")
                break
            self._give_up()
            self.push("")
        return self.reply

    def _advance(self, scan: _ObjectScan) -> None:
        while self._position < len(self.text):
            state = scan.push(self.text[self._position])
            self._position += 1
            if state == "open":
                continue
            found = None
            if not self._fenced(scan.start):
                if state == "closed":
                    found = parse_object(self.text[scan.start : self._position], self.tools)
                if isinstance(found, Malformed) or state == "broken":
                    known = _REPLY_KEY.match(self.text, scan.start)
                    found = self._malformed(scan.start) if known else None
            if found is None and state == "broken":
                self._give_up()
            else:
                self._scan, self.reply = None, found
            return

    def _malformed(self, start: int) -> Malformed:
        try:
            json.JSONDecoder(parse_constant=_refuse_constant).raw_decode(self.text, start)
        except (ValueError, RecursionError) as error:
            return Malformed(f"not valid JSON: {error}")
        return Malformed("not valid JSON")

    def _give_up(self) -> None:
        """The brace under scan begins no object: go on behind it."""
        if self._scan is not None:
            self._position = self._scan.start + 1
            self._scan = None

    def _fenced(self, position: int) -> bool:
        return self.text.count(_FENCE, 0, position) % 2 == 1


class _ObjectScan:
    """The structure of one JSON object, character by character; lenient inside strings and literals."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self._expect = "value"

    def push(self, character: str) -> str:
        """ "open", "closed" (the object is complete) or "broken" (no JSON object begins like this)."""
        if self._in_string:
            self._string(character)
            return "open"
        if character in " \t\r\n":
            return "open"
        if not self._structure(character):
            return "broken"
        return "open" if self._closers else "closed"

    def _string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            self._expect = ":" if self._expect in ("key", "key or }") else ","

    def _structure(self, character: str) -> bool:
        expect = self._expect
        if character in "{[" and expect in ("value", "value or ]"):
            self._closers.append("}" if character == "{" else "]")
            self._expect = "key or }" if character == "{" else "value or ]"
        elif character == '"' and expect in ("key", "key or }", "value", "value or ]"):
            self._in_string = True
        elif character == ":" and expect == ":":
            self._expect = "value"
        elif character == "," and expect in (",", "literal"):
            self._expect = "key" if self._closers[-1] == "}" else "value"
        elif character in "}]":
            if self._closers[-1] != character or expect not in (
                ",",
                "literal",
                f"key or {character}",
                f"value or {character}",
            ):
                return False
            self._closers.pop()
            self._expect = ","
        elif expect in ("value", "value or ]", "literal") and (character.isalnum() or character in "+-."):
            self._expect = "literal"
        else:
            return False
        return True
