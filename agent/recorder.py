"""TrajectoryRecorder: writes a conversation to a `.atraj` file while it goes on.

The recorder is told what each step was, and takes the ids from the conversation itself, by comparing them with
what it has: whoever rearranges a conversation (an eviction, a template that looks back) need not report it.
The file is replaced as a whole after each step, so a crash loses the step under way and nothing else.
Finished steps are kept as bytes: a step costs its own text, and writing the file once.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.errors import InputError, UsageError
from ..runtime.files import replacing
from .kept_spans import HeldSpan, common_prefix, held_spans, kept_spans
from .model_facts import ModelFacts
from .reply import Answer, Call, Reply
from .tools import Tool, ToolResult
from .trajectory import (
    SUFFIX,
    VERSION,
    Role,
    Segment,
    TrajectoryCall,
    TrajectoryResult,
    TrajectoryStep,
)

if TYPE_CHECKING:
    from ..runtime.generation import Step
    from ..runtime.sampler import Sampler
    from .conversation import Conversation
    from .dialect import Dialect
    from .loop import Limits


@dataclass(frozen=True)
class RunSettings:
    """How a conversation is generated: enough to follow it again."""

    header: str
    tools: Sequence[Tool]
    sampler: Sampler
    limits: Limits
    constrain: bool

    def to_json(self) -> dict[str, Any]:
        """The keys of a trajectory that say it."""
        sampler = self.sampler
        return {
            "sampling": {
                **{
                    name: getattr(sampler, name)
                    for name in ("temperature", "top_k", "top_p", "min_p", "seed")
                },
                "max_steps": self.limits.max_steps,
                "max_tokens": self.limits.max_tokens,
                "constrained": self.constrain,
            },
            "header": self.header,
            "tools": [
                {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
                for tool in self.tools
            ],
        }


@dataclass(frozen=True)
class Mark:
    """A state of a recorder, for `take_back`."""

    steps: int
    segments: int
    summary: dict[str, Any]
    ids: list[int]
    held: list[HeldSpan]
    closing: list[int]


class TrajectoryRecorder:
    """Records one conversation as `folder/<uuid>.atraj`, from its first user turn on.

    Raises UsageError if the folder cannot be made, InputError if the file cannot be written (disk full).
    """

    def __init__(self, folder: Path, model: ModelFacts, *, task: str = "") -> None:
        self.id = str(uuid.uuid4())
        self.path = folder / f"{self.id}{SUFFIX}"
        self._model = model
        self._task = task
        self._facts: dict[str, Any] = {}
        self._steps: list[TrajectoryStep] = []
        self._lines: list[bytes] = []
        self._segments = [Segment()]
        self._ids: list[int] = []  # of the present segment: what the model saw
        self._held: list[HeldSpan] = []
        self._closing: list[int] = []
        self._summary: dict[str, Any] = dict.fromkeys(("turns", "calls", "sampled", "forced"), 0)
        self._taken_back = 0
        make_folder(folder)

    def begin(self, conversation: Conversation, dialect: Dialect, settings: RunSettings) -> None:
        """The conversation as it is before anybody spoke."""
        self._dialect = dialect
        self._facts = {
            "dialect": dialect.name,
            "template_fingerprint": dialect.fingerprint(),
            "tokenizer_fingerprint": self._model.tokenizer,
            "model": self._model.to_json(),
            **settings.to_json(),
        }
        self._add("system", conversation, dialect.system_text())

    def fed(
        self, role: Role, conversation: Conversation, content: str, result: ToolResult | None = None
    ) -> None:
        """A turn of `role` was put into the conversation."""
        self._summary["turns"] += role == "user"
        self._summary["ended"] = "unfinished"
        shown = None if result is None else _recorded(result)
        self._add(role, conversation, content, tool_result=shown)
        self._save()

    def said(
        self,
        conversation: Conversation,
        steps: Sequence[Step],
        content: str,
        reply: Reply | None,
        *,
        answer_only: bool,
    ) -> None:
        """The assistant's step was put into the conversation: its ids, its text, and what it means."""
        call = None
        if isinstance(reply, Call):
            given = reply.arguments
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, default=str)
            call = TrajectoryCall(_clean(reply.tool), _clean(text))
        forced = sum(step.forced for step in steps)
        counts = {"calls": call is not None, "forced": forced, "sampled": len(steps) - forced}
        for name, count in counts.items():
            self._summary[name] += count
        if call is None:
            self._summary["ended"] = "answer" if isinstance(reply, Answer) else "fallback"
        self._closing = self._dialect.closing(conversation)
        marker = list(self._dialect.stop)
        finish = steps[-1].finish_reason if steps else None
        self._add(
            "assistant",
            conversation,
            content,
            tool_call=call,
            forced=[step.forced for step in steps],
            logprobs=[None if step.logprob is None else round(step.logprob, 6) + 0.0 for step in steps],
            end_of_turn_ids=marker if marker and self._closing[: len(marker)] == marker else [],
            stop=finish or "stop",
            answer_only=answer_only,
        )
        self._save()

    def ended(self, reason: str) -> None:
        """The turn ended without an answer."""
        self._summary["ended"] = reason
        if self.path.exists():
            self._save()

    def reward(self, value: float) -> None:
        """Score the conversation: the reward of the assistant's last step."""
        for number in range(len(self._steps) - 1, -1, -1):
            if self._steps[number].role == "assistant":
                self._steps[number] = replace(self._steps[number], reward=value)
                self._lines[number] = _line(self._steps[number].to_json())
                break
        self._save()

    def mark(self) -> Mark:
        """Where the record stands."""
        return Mark(
            len(self._steps),
            len(self._segments),
            dict(self._summary),
            list(self._ids),
            self._held,
            self._closing,
        )

    def take_back(self, mark: Mark) -> None:
        """Forget all since `mark`, as the conversation did."""
        del self._steps[mark.steps :], self._lines[mark.steps :], self._segments[mark.segments :]
        self._summary, self._ids, self._held, self._closing = mark.summary, mark.ids, mark.held, mark.closing
        self._taken_back += 1
        self._summary["taken_back"] = self._taken_back
        if self.path.exists():
            self._save()

    def _add(self, role: Role, conversation: Conversation, content: str, **more: Any) -> None:
        fresh = self._advance(conversation)
        count = len(more["forced"]) if role == "assistant" else 0
        step = TrajectoryStep(
            role,
            _clean(content),
            input_ids=fresh[: len(fresh) - count],
            output_ids=fresh[len(fresh) - count :],
            timestamp=round(time.time(), 3),
            **more,
        )
        self._steps.append(step)
        self._lines.append(_line(step.to_json()))

    def _advance(self, conversation: Conversation) -> list[int]:
        """The ids that are new in `conversation`; begins a segment if it does not simply go on."""
        ids = conversation.ids
        if ids[: len(self._ids)] == self._ids:
            fresh = ids[len(self._ids) :]
        elif [step.role for step in self._steps] == ["system"]:
            # A template's opening is a guess until somebody spoke; nothing was generated after it.
            same = common_prefix(self._ids, ids)
            self._steps[0] = replace(self._steps[0], input_ids=ids[:same])
            self._lines[0] = _line(self._steps[0].to_json())
            fresh = ids[same:]
        else:
            kept = kept_spans(self._held, self._ids, conversation)
            self._segments.append(Segment(len(self._steps), kept))
            fresh = ids[sum(end - start for start, end in kept) :]
        self._ids, self._held = ids, held_spans(conversation)
        return fresh

    def _save(self) -> None:
        """Replace the file. Raises InputError."""
        head = {
            "version": VERSION,
            "id": self.id,
            "checkpoint_path": self._model.checkpoint,
            "model_fingerprint": self._model.weights,
            "task": self._task,
            "summary": {name: str(value) for name, value in self._summary.items()},
        }
        tail = {
            "segments": [segment.to_json() for segment in self._segments],
            **self._facts,
        }
        *lines, last = self._lines
        if self._steps[-1].role == "assistant":
            last = _line(replace(self._steps[-1], input_ids=self._closing).to_json())
        try:
            with replacing(self.path) as file:
                file.write(_line(head)[:-1] + b',"steps":[\n')
                for line in lines:
                    file.write(line + b",\n")
                file.write(last + b"\n]," + _line(tail)[1:] + b"\n")
        except OSError as error:
            raise InputError(
                f"--trajectory-dir {self.path.parent}", f"cannot be written ({error.strerror or error})"
            ) from None


def _recorded(result: ToolResult) -> TrajectoryResult:
    return TrajectoryResult(
        result.tool,
        _clean(result.stdout),
        _clean(result.stderr),
        result.exit_code,
        round(result.duration_sec, 6),
    )


def make_folder(folder: Path) -> None:
    """Make the folder of trajectories, or find it. Raises UsageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--trajectory-dir {folder}", f"cannot be made ({error.strerror or error})", "a folder"
        ) from None


def _line(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", errors="backslashreplace")  # a path may be no UTF-8


def _clean(text: str) -> str:
    """`text` as the model got it: half a surrogate pair, which UTF-8 cannot hold, becomes a question mark."""
    return text.encode("utf-8", "replace").decode()
