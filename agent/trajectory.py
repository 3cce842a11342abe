"""The `.atraj` format, version 1: one conversation as JSON, token by token. Reading, checking, sequences.

Ids stand as they were fed and as they came out; nothing here ever encodes text. What a step adds to the sequence
that the model saw is `TrajectoryStep.ids`. A segment begins where the sequence does not simply go on: old exchanges
were dropped, or a chat template writes the past differently now. It lists what it keeps of the segment before.

Files of other writers have the required keys only; what is missing then reads as None or empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from ..runtime.errors import InputError
from .strict_json import json_name

VERSION = 1
SUFFIX = ".atraj"
ROLES = ("system", "user", "assistant", "tool")
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class TrajectoryCall:
    """A call as the model made it; `arguments_json` is JSON text."""

    name: str
    arguments_json: str


@dataclass(frozen=True)
class TrajectoryResult:
    """What came of a call."""

    name: str
    stdout: str
    stderr: str
    exit_code: int
    duration_sec: float


@dataclass(frozen=True)
class TrajectoryStep:
    """One turn, or one step of the assistant.

    `input_ids`: as fed, wrapper included. `output_ids`: as sampled or forced. Of an assistant's step, `input_ids` are
    what closes its turn, and stand there only in the last step: with a further one they open its `input_ids`.
    `forced` and `logprobs` (None where forced) go with `output_ids`. `end_of_turn_ids`: the end of turn that the model
    had not said itself. `stop`: why the step ended. `answer_only`: its grammar admitted no call.
    """

    role: Role
    content: str
    input_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    tool_call: TrajectoryCall | None = None
    tool_result: TrajectoryResult | None = None
    reward: float | None = None
    timestamp: float | None = None
    forced: list[bool] | None = None
    logprobs: list[float | None] | None = None
    end_of_turn_ids: list[int] = field(default_factory=list)
    stop: str | None = None
    answer_only: bool = False

    @property
    def ids(self) -> list[int]:
        """What the step adds to the sequence."""
        first, then = self.input_ids, self.output_ids
        return [*then, *first] if self.role == "assistant" else [*first, *then]

    def to_json(self) -> dict[str, Any]:
        """The step as a JSON object; extra keys only where they say something."""
        call, result = self.tool_call, self.tool_result
        body: dict[str, Any] = {
            "role": self.role,
            "content": self.content,
            "input_ids": self.input_ids,
            "output_ids": self.output_ids,
            "tool_call": None if call is None else vars(call),
            "tool_result": None if result is None else vars(result),
            "reward": self.reward,
            "timestamp": self.timestamp,
        }
        if self.forced is not None:
            body["output_forced"] = [int(forced) for forced in self.forced]
        if self.logprobs is not None:
            body["output_logprobs"] = self.logprobs
        if self.end_of_turn_ids:
            body["end_of_turn_ids"] = self.end_of_turn_ids
        if self.stop is not None:
            body["stop"] = self.stop
        if self.answer_only:
            body["answer_only"] = True
        return body


@dataclass(frozen=True)
class Segment:
    """Steps from `first_step` on. `kept`: [start, end) spans of the preceding segment's sequence, which begin this one."""

    first_step: int = 0
    kept: list[tuple[int, int]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"first_step": self.first_step, "kept": [list(span) for span in self.kept]}


@dataclass(frozen=True)
class Stretch:
    """The sequence of one segment: `kept` ids, then those of its own steps."""

    kept: list[int]
    steps: Sequence[TrajectoryStep]

    @property
    def ids(self) -> list[int]:
        return self.kept + [token for step in self.steps for token in step.ids]


@dataclass(frozen=True)
class Trajectory:
    """A whole file. `facts` are its other keys: how the ids came about."""

    id: str
    checkpoint_path: str
    model_fingerprint: str
    task: str
    summary: dict[str, str]
    steps: list[TrajectoryStep]
    segments: list[Segment] = field(default_factory=lambda: [Segment()])
    facts: Mapping[str, Any] = field(default_factory=dict)

    def stretches(self) -> Iterator[Stretch]:
        """The sequences that the model saw, one a segment."""
        before: list[int] = []
        ends = [segment.first_step for segment in self.segments[1:]] + [len(self.steps)]
        for segment, end in zip(self.segments, ends, strict=True):
            kept = [token for start, stop in segment.kept for token in before[start:stop]]
            stretch = Stretch(kept, self.steps[segment.first_step : end])
            before = stretch.ids
            yield stretch

    @property
    def reward(self) -> float | None:
        """The sum of the steps' rewards; None if no step has one."""
        stated = [step.reward for step in self.steps if step.reward is not None]
        return sum(stated) if stated else None


def read_trajectory(path: Path) -> Trajectory:
    """The trajectory in a file. Raises InputError that says what is wrong with it."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(path, f"cannot be read ({error.strerror or error})") from None
    try:
        data = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        found = "empty" if not raw else f"not JSON ({error})"
        raise InputError(path, found, f"a trajectory ({SUFFIX})") from None
    if not isinstance(data, dict):
        raise InputError(path, json_name(data), "an object")
    if data.get("version") != VERSION or isinstance(data["version"], bool):
        raise InputError(path, f"version {data.get('version')!r}", f"version {VERSION}")
    try:
        return _trajectory(data)
    except _Wrong as wrong:
        raise InputError(f"{path}#{wrong.where}", wrong.found, wrong.expected) from None


class _Wrong(Exception):
    def __init__(self, where: str, found: str, expected: str) -> None:
        super().__init__(where)
        self.where, self.found, self.expected = where, found, expected


_OWN = ("version", "id", "checkpoint_path", "model_fingerprint", "task", "summary", "steps", "segments")


def _trajectory(data: dict[str, Any]) -> Trajectory:
    steps = [_step(entry, f"/steps/{i}") for i, entry in enumerate(_list(data.get("steps"), "/steps"))]
    summary = _get(data, "summary", dict, "", {})
    if not all(isinstance(value, str) for value in summary.values()):
        raise _Wrong("/summary", "a value that is no string", "strings")
    found = Trajectory(
        _get(data, "id", str, ""),
        _get(data, "checkpoint_path", str, "", ""),
        _get(data, "model_fingerprint", str, "", ""),
        _get(data, "task", str, "", ""),
        summary,
        steps,
        _segments(data, len(steps)),
        {key: value for key, value in data.items() if key not in _OWN},
    )
    length = 0
    for number, (segment, stretch) in enumerate(zip(found.segments, found.stretches(), strict=True)):
        if any(not 0 <= start < end <= length for start, end in segment.kept):
            raise _Wrong(f"/segments/{number}/kept", f"{segment.kept}", f"spans of the {length} ids before")
        length = len(stretch.ids)
    return found


def _segments(data: dict[str, Any], steps: int) -> list[Segment]:
    segments = []
    for number, entry in enumerate(_list(data.get("segments", [{}]), "/segments")):
        where = f"/segments/{number}"
        if not isinstance(entry, dict):
            raise _Wrong(where, json_name(entry), "an object")
        kept = [_ids(span, f"{where}/kept") for span in _list(entry.get("kept", []), f"{where}/kept")]
        if any(len(span) != 2 for span in kept):
            raise _Wrong(f"{where}/kept", "a span of another shape", "[start, end]")
        segments.append(Segment(_get(entry, "first_step", int, where, 0), [(a, b) for a, b in kept]))
    firsts = [segment.first_step for segment in segments]
    if not firsts or firsts[0] != 0 or firsts != sorted(firsts) or firsts[-1] > steps:
        raise _Wrong("/segments", f"first steps {firsts}", f"0, then growing up to {steps}")
    return segments


def _step(entry: Any, where: str) -> TrajectoryStep:
    if not isinstance(entry, dict):
        raise _Wrong(where, json_name(entry), "an object")
    role = _get(entry, "role", str, where)
    if role not in ROLES:
        raise _Wrong(f"{where}/role", repr(role), ", ".join(ROLES))
    output = _ids(entry.get("output_ids"), f"{where}/output_ids")
    forced = _ids(entry.get("output_forced"), f"{where}/output_forced")
    logprobs = _list(entry.get("output_logprobs"), f"{where}/output_logprobs")
    for name, values in (("output_forced", forced), ("output_logprobs", logprobs)):
        if entry.get(name) is not None and len(values) != len(output):
            raise _Wrong(f"{where}/{name}", f"{len(values)} entries", f"one for each of {len(output)} ids")
    call, result = (_get(entry, name, dict, where, None) for name in ("tool_call", "tool_result"))
    return TrajectoryStep(
        role,
        _get(entry, "content", str, where, ""),
        _ids(entry.get("input_ids"), f"{where}/input_ids"),
        output,
        None if call is None else _call(call, f"{where}/tool_call"),
        None if result is None else _result(result, f"{where}/tool_result"),
        _number(entry, "reward", where),
        _number(entry, "timestamp", where, lenient=True),
        [bool(value) for value in forced] if entry.get("output_forced") is not None else None,
        [_logprob(value, where) for value in logprobs] if entry.get("output_logprobs") is not None else None,
        _ids(entry.get("end_of_turn_ids"), f"{where}/end_of_turn_ids"),
        _get(entry, "stop", str, where, None),
        _get(entry, "answer_only", bool, where, False),
    )


def _call(entry: dict[str, Any], where: str) -> TrajectoryCall:
    return TrajectoryCall(_get(entry, "name", str, where), _get(entry, "arguments_json", str, where, "{}"))


def _result(entry: dict[str, Any], where: str) -> TrajectoryResult:
    return TrajectoryResult(
        _get(entry, "name", str, where, ""),
        _get(entry, "stdout", str, where, ""),
        _get(entry, "stderr", str, where, ""),
        _get(entry, "exit_code", int, where, 0),
        _number(entry, "duration_sec", where) or 0.0,
    )


_MISSING = object()


def _get(entry: dict[str, Any], name: str, kind: type, where: str, default: Any = _MISSING) -> Any:
    """A field of the type `kind`; null counts as absent."""
    value = entry.get(name)
    if value is None and default is not _MISSING:
        return default
    if type(value) is not kind:
        raise _Wrong(f"{where}/{name}", "missing" if value is None else json_name(value), kind.__name__)
    return value


def _number(entry: dict[str, Any], name: str, where: str, *, lenient: bool = False) -> float | None:
    """A finite number, or None. `lenient`: other writers have a text in its place, which we have no use for."""
    value = entry.get(name)
    if value is None or (lenient and isinstance(value, str)):
        return None
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer of hundreds of digits
        pass
    raise _Wrong(f"{where}/{name}", json_name(value), "a finite number or null")


def _logprob(value: Any, where: str) -> float | None:
    return _number({"output_logprobs": value}, "output_logprobs", where)


def _list(value: Any, where: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _Wrong(where, json_name(value), "an array")
    return value


def _ids(value: Any, where: str) -> list[int]:
    ids = _list(value, where)
    for token in ids:
        if type(token) is not int or token < 0:
            raise _Wrong(where, f"{token!r}", "ids: integers, 0 or more")
    return ids


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
