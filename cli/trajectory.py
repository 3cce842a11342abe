"""`posttrainllm trajectory`: check a recorded conversation against a model, or read it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Optional, TextIO

from ..runtime.errors import CheckFailedError, UsageError
from ..runtime.providers import NAMES
from .options import option, parse, positional
from .terminal import printable

if TYPE_CHECKING:
    from ..agent.replay import Deviation, Replay
    from ..agent.trajectory import Trajectory, TrajectoryStep

EXAMPLE = """  posttrainllm trajectory verify runs/6f8b9d4a.atraj demo
  posttrainllm trajectory show runs/6f8b9d4a.atraj"""
ACTIONS = ("verify", "show")
COLOURS = {"system": "dim", "user": "bold cyan", "assistant": "bold green", "tool": "yellow"}


@dataclass(frozen=True, kw_only=True)
class TrajectoryOptions:
    """Flags of `trajectory`."""

    action: str = positional("action", "verify: feed the ids again; show: print the conversation")
    file: str = positional("file", "a .atraj file")
    model: Optional[str] = positional("model", "verify: the model it was recorded with", optional=True)
    provider: str = option("auto", f"execution provider: {', '.join(NAMES)}", metavar="NAME")


def run(argv: list[str]) -> int:
    """Returns 0. Raises CheckFailedError (1) if the ids do not come out again."""
    options = parse(
        TrajectoryOptions,
        argv,
        command="trajectory",
        summary="Check a recorded conversation against its model, or print it.",
        example=EXAMPLE,
    )
    if options.action not in ACTIONS:
        raise UsageError(f"trajectory {options.action}", "no such action", " or ".join(ACTIONS))
    if options.action == "verify" and options.model is None:
        raise UsageError("trajectory verify", "no model", "FILE MODEL")
    if options.action == "show" and options.model is not None:
        raise UsageError(f"trajectory show: {options.model}", "a second argument", "FILE only")
    from ..agent.trajectory import read_trajectory

    trajectory = read_trajectory(Path(options.file))
    if options.action == "show":
        _show(trajectory)
    else:
        _verify(trajectory, options)
    return 0


def _verify(trajectory: "Trajectory", options: TrajectoryOptions) -> None:
    from ..agent.replay import check_model, replay
    from .models import open_model

    session = open_model(options.model, options.provider)
    check_model(trajectory, session, options.file, options.model)
    report = replay(trajectory, session, options.file)
    print("\n".join(_report(report)))
    if report.wrong:
        raise CheckFailedError(
            options.file,
            f"{len(report.wrong)} of {report.sampled + report.forced} ids did not come out again",
            remedy="the lines above say which",
        )


def _report(report: "Replay") -> "list[str]":
    how = "greedy" if report.greedy else "sampled at a temperature: log-probabilities are compared"
    grammar = "under its grammar" if report.constrained else "without a grammar"
    lines = [
        f"segments: {report.segments}",
        f"ids fed: {report.ids:,}",
        f"sampled ids checked: {report.sampled:,} ({how}, {grammar})",
        f"forced ids checked: {report.forced:,}",
        f"log-probabilities compared: {report.logprobs:,} (largest difference {report.worst_logprob:.2g})",
        f"close calls: {len(report.close)} (the recorded id within {report.bound:g} of the logits' spread)",
        f"wrong: {len(report.wrong)}",
    ]
    lines += [f"  close: {_place(one)}" for one in report.close[:20]]
    lines += [f"  wrong: {_place(one)}" for one in report.wrong[:20]]
    return lines


def _place(found: "Deviation") -> str:
    other = "" if found.found in (None, found.recorded) else f", found {found.found}"
    gap = f" by {found.gap:.2g}" if found.gap else ""
    return f"step {found.step}, id {found.position}: recorded {found.recorded}{other}: {found.reason}{gap}"


def _show(trajectory: "Trajectory") -> None:
    write = _writer(sys.stdout)
    reward = "" if trajectory.reward is None else f", reward {trajectory.reward:g}"
    task = f", task {trajectory.task}" if trajectory.task else ""
    write("", f"{trajectory.id}: {trajectory.checkpoint_path}{task}{reward}\n")
    facts = ", ".join(f"{name} {value}" for name, value in trajectory.summary.items())
    write("", f"{facts}\n")
    firsts = {segment.first_step: segment for segment in trajectory.segments[1:]}
    for number, step in enumerate(trajectory.steps):
        if number in firsts:
            kept = ", ".join(f"{start}:{end}" for start, end in firsts[number].kept) or "nothing"
            write("", f"\n-- a new segment, which keeps the ids {kept} --\n")
        write(COLOURS[step.role], f"\n[{number}] {step.role}{_counts(step)}\n")
        write("", f"{step.content}\n")
        if step.tool_result is not None:
            found = step.tool_result
            write("dim", f"({found.name}: exit {found.exit_code}, {found.duration_sec:.2f} s)\n")


def _counts(step: "TrajectoryStep") -> str:
    parts = [f"{len(step.ids)} ids"]
    if step.forced is not None:
        parts.append(f"{sum(step.forced)} forced")
    if step.logprobs is not None:
        known = [logprob for logprob in step.logprobs if logprob is not None]
        parts.append(f"log-probability {sum(known):.3f}")
    if step.tool_call is not None:
        parts.append(f"calls {step.tool_call.name}")
    if step.stop not in (None, "stop"):
        parts.append(f"cut off: {step.stop}")
    return f" ({', '.join(parts)})"


class _Plain:
    """Writes text as it is."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, style: str, text: str) -> None:
        self._stream.write(printable(text, self._stream))


class _Coloured:
    """Writes styled text to a terminal."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._stream = stream
        self._console = Console(file=stream, highlight=False, markup=False, soft_wrap=True)

    def __call__(self, style: str, text: str) -> None:
        self._console.print(printable(text, self._stream), style=style or None, end="")


def _writer(stream: TextIO) -> "_Plain | _Coloured":
    return _Coloured(stream) if stream.isatty() else _Plain(stream)
