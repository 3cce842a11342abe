"""What an agent run says: one event a step, as dataclasses, as JSON objects, as a file.

The schema of the JSON form is tools_schemas/events.schema.json. `Delta` is for people watching; it is
not part of the JSON stream.
"""

from __future__ import annotations

import json
import os
from dataclasses import MISSING, dataclass, fields
from io import RawIOBase
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from ..runtime.errors import InputError, UsageError

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base: `turn` counts user turns from 0, `time` is seconds since 1970-01-01 UTC."""

    type: ClassVar[str]
    turn: int
    time: float

    def to_json(self) -> dict[str, Any]:
        """The event as a JSON object; optional fields that are None are left out."""
        body = {"v": VERSION, "type": self.type}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None or entry.default is MISSING:
                body[entry.name] = value
        return body


@dataclass(frozen=True, kw_only=True)
class Delta(Event):
    """Text of the assistant as it is decoded."""

    type = "delta"
    text: str


@dataclass(frozen=True, kw_only=True)
class User(Event):
    """A user turn begins. `escaped`: how many `<|` in the text were broken up (None: none)."""

    type = "user"
    text: str
    escaped: int | None = None


@dataclass(frozen=True, kw_only=True)
class Assistant(Event):
    """One step of the assistant. `stop`: "stop", "length" or "context", as `generate` ended.

    prompt_tokens: ids before the step; cached_tokens: how many of them had not to be computed.
    `dialect` is set when a call came in a shape of another protocol.
    """

    type = "assistant"
    step: int
    raw: str
    prompt_tokens: int
    cached_tokens: int
    forced_tokens: int
    sampled_tokens: int
    stop: str
    dialect: str | None = None


@dataclass(frozen=True, kw_only=True)
class ToolCallEvent(Event):
    """A call was executed (or refused: exit_code says so)."""

    type = "tool_call"
    tool: str
    arguments: Any
    stdout: str
    stderr: str
    exit_code: int
    duration_sec: float
    timed_out: bool | None = None
    truncated: int | None = None
    replaced: bool | None = None
    escaped: int | None = None


@dataclass(frozen=True, kw_only=True)
class ToolResultEvent(Event):
    """What the model was shown. In the transcript only."""

    type = "tool_result"
    tool: str
    stdout: str
    stderr: str
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class ContextEvent(Event):
    """The context was full, and something left it for what is said next.

    dropped_turns: the user turns of which something left; dropped_tokens: by how many ids; shortened: bytes cut out of the
    result. held_tokens of `limit` are held now.
    """

    type = "context"
    dropped_turns: list[int]
    dropped_tokens: int
    held_tokens: int
    limit: int
    shortened: int | None = None


@dataclass(frozen=True, kw_only=True)
class AnswerEvent(Event):
    """The turn's answer; `fallback` when raw text had to stand in for one."""

    type = "answer"
    text: str
    fallback: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Stop(Event):
    """The turn ended without an answer: "context", "steps", "tokens", "repeat" or "interrupted"."""

    type = "stop"
    reason: str
    detail: str | None = None


def to_line(event: Event) -> bytes:
    """The event as one line of UTF-8. A lone surrogate stays the JSON escape that it came as."""
    text = json.dumps(event.to_json(), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", errors="backslashreplace") + b"\n"


class Transcript:
    """Appends events to a file, one line each, on disk before the next step begins.

    A torn last line (a run was killed) is ended first, so that it spoils nothing after it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a line is in the file or it is not, and closing has nothing left to fail on.
            self._file: RawIOBase = path.open("ab", buffering=0)
            if path.is_file() and path.stat().st_size and _last_byte(path) != b"\n":
                self._file.write(b"\n")
        except OSError as error:
            raise UsageError(
                f"--transcript {path}", f"cannot be written ({error.strerror or error})"
            ) from None

    def write(self, event: Event) -> None:
        """Append one event. One write call a line, so that parallel runs do not mix within lines."""
        if isinstance(event, Delta):
            return
        try:
            line = to_line(event)
            while line:  # a short write is one where the disk just filled up
                line = line[self._file.write(line) or 0 :]
        except OSError as error:
            raise InputError(
                f"--transcript {self._path}", f"cannot be written ({error.strerror or error})"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as handle:
        handle.seek(-1, os.SEEK_END)
        return handle.read(1)
