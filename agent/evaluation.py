"""evaluate(): tasks through the real loop and the real executor, one Outcome a task.

Each task gets its own working folder, `Agent` and sampler, so that nothing of one task reaches another; what
they share is the session and the KV cache, of which the loop keeps exactly the ids that are the same (the
system prompt). What is judged is what the events say. `summarise` adds outcomes up.

A reply is judged as a call when it is one, or when it is neither a call nor an answer (cut off, or no JSON).
Not a benchmark: the seconds are of this machine, tools included. Not a sandbox: the tools really run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..runtime.errors import ContextFullError, InputError
from ..runtime.kv_cache import KVCache
from ..runtime.sampler import Sampler
from ..runtime.session import Session
from .chat_format import DEFAULT_HEADER
from .context_plan import Policy
from .eval_tasks import ExpectedCall, Task, write_files
from .events import AnswerEvent, Assistant, Event, Stop, ToolCallEvent
from .executor import CommandBackend
from .loop import Agent, Limits
from .recorder import TrajectoryRecorder
from .tools import Tool, ToolBackend, ToolResult

NO_CALL, SEVERAL, NOT_STATED = "(no call)", "(several calls)", "(not stated)"


@dataclass(frozen=True)
class Settings:
    """How tasks are run. `sampler` makes one for each task, so that their order does not matter."""

    header: str = DEFAULT_HEADER
    sampler: Callable[[], Sampler] = Sampler
    limits: Limits = field(default_factory=Limits)
    constrain: bool = True
    preallocate: bool = True
    dialect: str | None = None  # None: the model's own
    context_policy: Policy = "evict"
    prepare: Callable[[Agent], None] | None = None  # called before each task
    recorder: Callable[[Task], TrajectoryRecorder] | None = None  # makes the one of a task
    backend: Callable[[Path], ToolBackend] = lambda folder: CommandBackend(cwd=folder)


@dataclass(frozen=True)
class MadeCall:
    """A call as the model made it. `valid`: it named an offered tool, its arguments passed, and it ran."""

    tool: str
    arguments: Any
    valid: bool
    exit_code: int


@dataclass(frozen=True)
class Outcome:
    """What came of one task. `right_…` is None where the task states nothing of the kind.

    `ended`: "answer", "fallback" (raw text stood in for one), or the reason of the turn's stop. `lost`
    counts replies that were neither a call nor an answer. `problems` are sentences for people; empty
    exactly when the task is right in all that it states and ended with an answer.
    """

    task: Task
    calls: tuple[MadeCall, ...]
    lost: int
    answer: str | None
    ended: str
    right_tool: bool | None
    right_arguments: bool | None
    right_answer: bool | None
    problems: tuple[str, ...]
    sampled: int
    forced: int
    seconds: float

    @property
    def right(self) -> bool:
        """Whether the task succeeded."""
        return not self.problems


@dataclass(frozen=True)
class Summary:
    """Sums over outcomes. A pair is (right, stated): how many of those that state it got it right."""

    tasks: int
    right: int
    valid_calls: tuple[int, int]
    right_tool: tuple[int, int]
    right_arguments: tuple[int, int]
    right_answer: tuple[int, int]
    sampled: int
    forced: int
    seconds: float


def evaluate(
    session: Session, tools: Sequence[Tool], tasks: Iterable[Task], settings: Settings | None = None
) -> Iterator[Outcome]:
    """Run the tasks one after the other. `check_tasks` has accepted them.

    Raises InputError if a task's files cannot be written or its system prompt does not fit, ToolFileError
    if a schema cannot be compiled.
    """
    settings = settings or Settings()
    cache = session.new_cache(preallocate=settings.preallocate)
    for task in tasks:
        with tempfile.TemporaryDirectory(prefix="posttrainllm-eval-", ignore_cleanup_errors=True) as folder:
            write_files(task, Path(folder))
            yield _run(session, task.offered(tools), task, settings, cache, Path(folder))


def _run(
    session: Session, tools: Sequence[Tool], task: Task, settings: Settings, cache: KVCache, folder: Path
) -> Outcome:
    backend = _Recorder(settings.backend(folder))
    recorder = settings.recorder(task) if settings.recorder else None
    try:
        agent = Agent(
            session,
            tools,
            backend=backend,
            header=settings.header,
            sampler=settings.sampler(),
            limits=settings.limits,
            constrain=settings.constrain,
            cache=cache,
            dialect=settings.dialect,
            context_policy=settings.context_policy,
            recorder=recorder,
        )
    except ContextFullError as error:
        raise InputError(task.where, f"the system prompt does not fit: {error}") from None
    if settings.prepare:
        settings.prepare(agent)
    watch = _Watch(backend)
    started = time.monotonic()
    for event in agent.run(task.prompt):
        watch.see(event)
    outcome = _judge(task, watch, time.monotonic() - started)
    if recorder:
        recorder.reward(float(outcome.right))
    return outcome


class _Recorder:
    """A back end that counts the calls that got through the loop's checks."""

    def __init__(self, backend: ToolBackend) -> None:
        self.ran = 0
        self._backend = backend

    def call(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        self.ran += 1
        return self._backend.call(tool, arguments)


class _Watch:
    """What the events of one turn add up to."""

    def __init__(self, backend: _Recorder) -> None:
        self.calls: list[MadeCall] = []
        self.lost = self.sampled = self.forced = 0
        self.answer: str | None = None
        self.ended = ""
        self.detail = ""
        self._backend = backend
        self._ran = 0
        self._raw = ""

    def see(self, event: Event) -> None:
        """Take one event in, in order."""
        if isinstance(event, Assistant):
            self.sampled += event.sampled_tokens
            self.forced += event.forced_tokens
            self._raw = event.raw
        elif isinstance(event, ToolCallEvent):
            valid = self._backend.ran > self._ran
            self._ran = self._backend.ran
            self.calls.append(MadeCall(event.tool, event.arguments, valid, event.exit_code))
        elif isinstance(event, AnswerEvent):
            self.answer, self.ended = event.text, "fallback" if event.fallback else "answer"
            self._note_lost(bool(event.fallback))
        elif isinstance(event, Stop):
            self.ended, self.detail = event.reason, event.detail or ""
            self._note_lost(event.reason == "tokens")

    def _note_lost(self, lost: bool) -> None:
        self.lost += lost and not self._raw.lstrip().startswith('{"answer"')


def _judge(task: Task, watch: _Watch, seconds: float) -> Outcome:
    problems = [*_call_problems(watch)]
    right_tool, right_arguments, right_answer = None, None, None
    if task.calls is not None:
        right_tool, right_arguments = _right_calls(task, watch.calls)
        if not right_tool:
            wanted = ", ".join(call.tool for call in task.calls) or "no call"
            made = ", ".join(call.tool or "(no JSON)" for call in watch.calls) or "no call"
            problems.append(f"tool: expected {wanted}; got {made}")
        elif right_arguments is False:
            problems += _argument_problems(task.calls, watch.calls)
    if task.answer is not None:
        right_answer = watch.answer is not None and task.answer.search(watch.answer) is not None
        if not right_answer and watch.answer is not None:
            problems.append(f"answer: expected /{task.answer.pattern}/; got {watch.answer!r}")
    if watch.answer is None:
        problems.append(f"ended without an answer ({watch.ended}): {watch.detail}")
    return Outcome(
        task,
        tuple(watch.calls),
        watch.lost,
        watch.answer,
        watch.ended,
        right_tool,
        right_arguments,
        right_answer,
        tuple(problems),
        watch.sampled,
        watch.forced,
        seconds,
    )


def _call_problems(watch: _Watch) -> Iterator[str]:
    for call in watch.calls:
        if not call.valid:
            yield f"valid call: {call.tool or 'a reply that is no JSON'} was refused"
    if watch.lost:
        yield "valid call: a reply was neither a call nor an answer"


def _right_calls(task: Task, made: Sequence[MadeCall]) -> tuple[bool, bool | None]:
    """Whether the tools are right, and the arguments (None: none are stated)."""
    assert task.calls is not None
    compared = made if task.exact else made[: len(task.calls)]
    right_tool = [call.tool for call in compared] == [call.tool for call in task.calls]
    if all(call.arguments is None for call in task.calls):
        return right_tool, None
    return right_tool, right_tool and not any(_argument_problems(task.calls, compared))


def _argument_problems(expected: Sequence[ExpectedCall], made: Sequence[MadeCall]) -> Iterator[str]:
    for wanted, call in zip(expected, made, strict=False):
        if wanted.arguments is not None and not _same(wanted.arguments, call.arguments):
            yield f"arguments of {call.tool}: expected {wanted.arguments}; got {call.arguments}"


def _same(left: Any, right: Any) -> bool:
    """Equal as JSON: true is not 1, 1.0 is 1, the order of an object's fields is of no account."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)


def group(task: Task) -> str:
    """The row of the table that a task belongs to: its tool, or a word in brackets."""
    if task.calls is None:
        return NOT_STATED
    if not task.calls:
        return NO_CALL
    return task.calls[0].tool if len(task.calls) == 1 else SEVERAL


def groups(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """Outcomes by their row: tools by name, then those in brackets."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(group(outcome.task), []).append(outcome)
    return dict(sorted(found.items(), key=lambda item: (item[0].startswith("("), item[0])))


def summarise(outcomes: Sequence[Outcome]) -> Summary:
    """The sums over some outcomes."""

    def pair(verdicts: Iterable[bool | None]) -> tuple[int, int]:
        stated = [verdict for verdict in verdicts if verdict is not None]
        return sum(stated), len(stated)

    attempts = sum(len(outcome.calls) + outcome.lost for outcome in outcomes)
    return Summary(
        tasks=len(outcomes),
        right=sum(outcome.right for outcome in outcomes),
        valid_calls=(sum(call.valid for outcome in outcomes for call in outcome.calls), attempts),
        right_tool=pair(outcome.right_tool for outcome in outcomes),
        right_arguments=pair(outcome.right_arguments for outcome in outcomes),
        right_answer=pair(outcome.right_answer for outcome in outcomes),
        sampled=sum(outcome.sampled for outcome in outcomes),
        forced=sum(outcome.forced for outcome in outcomes),
        seconds=sum(outcome.seconds for outcome in outcomes),
    )
