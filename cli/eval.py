"""`posttrainllm eval`: tasks through the real loop; a table, a JSON report, JUnit XML, an exit code."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ..runtime.errors import CheckFailedError, InputError, UsageError
from .flags import LoopOptions
from .options import option, parse, positional
from .progress import progress_bar
from .terminal import printable
from .tool_flags import sandbox_words

if TYPE_CHECKING:
    from ..agent.eval_tasks import Task
    from ..agent.evaluation import Outcome, Settings, Summary
    from ..agent.sandbox import Sandbox
    from ..agent.tools import Tool
    from ..runtime.session import Session

EXAMPLE = """  posttrainllm eval tasks.jsonl model.tinygpt --tools tools.json --failures
  posttrainllm eval tasks.jsonl --min-success 0.9 --junit report.xml"""
COLUMNS = ("", "tasks", "right", "valid calls", "tool", "arguments", "answer", "sampled", "forced", "seconds")


@dataclass(frozen=True, kw_only=True)
class TaskFile:
    """The first positional: a base class of its own, since fields come in the order of the bases, last first."""

    tasks: str = positional("tasks", "task file, one JSON object a line (docs/eval.md)")


@dataclass(frozen=True, kw_only=True)
class EvalOptions(LoopOptions, TaskFile):
    """Flags of `eval`."""

    min_success: float = option(
        0.0, "exit with 1 if a smaller share of the tasks is right (default 0)", metavar="F"
    )
    failures: bool = option(False, "print what went wrong in each task that failed")
    json_report: Optional[str] = option(None, "write everything to this file as JSON", metavar="FILE")
    junit: Optional[str] = option(None, "write this file for a CI server, as JUnit XML", metavar="FILE")


def run(argv: list[str]) -> int:
    """Returns 0. Raises CheckFailedError (1) below --min-success, when all is printed and written."""
    options = parse(
        EvalOptions,
        argv,
        command="eval",
        summary="Run tasks through the agent, each in a folder of its own, and count what is right.",
        example=EXAMPLE,
    )
    _check(options)
    outcomes = _outcomes(options)
    print("\n".join(_table(outcomes)))
    if options.failures:
        print(printable("\n".join(_failures(outcomes)), sys.stdout), end="")
    if options.json_report:
        report = json.dumps(_report(options, outcomes), ensure_ascii=False, indent=1) + "\n"
        _write("--json-report", options.json_report, report.encode("utf-8", "backslashreplace"))
    if options.junit:
        from .junit import junit_xml

        _write("--junit", options.junit, junit_xml(outcomes, name=options.tasks))
    right = sum(outcome.right for outcome in outcomes)
    if right / len(outcomes) < options.min_success:
        raise CheckFailedError(
            f"--min-success {options.min_success:g}",
            f"{right} of {len(outcomes)} tasks are right ({right / len(outcomes):.3f})",
            remedy="" if options.failures else "--failures shows what went wrong",
        )
    return 0


def _check(options: EvalOptions) -> None:
    """Refuse what can be refused before minutes are spent."""
    options.check()
    if not 0 <= options.min_success <= 1:
        raise UsageError("--min-success", f"{options.min_success}", "a share from 0 to 1")
    for flag, name in (("--json-report", options.json_report), ("--junit", options.junit)):
        if name is not None and not Path(name).parent.is_dir():
            raise UsageError(f"{flag} {name}", "its folder does not exist", remedy="make the folder first")


def _outcomes(options: EvalOptions) -> "list[Outcome]":
    """Load tasks, tools and model; run."""
    from ..agent.eval_tasks import check_tasks, load_tasks

    tasks = load_tasks(Path(options.tasks))
    tools = options.load_tools()
    check_tasks(tasks, tools)
    for tool in tools:
        if tool.confirm:
            found = f"tool {tool.name} wants to be asked for (_confirm), and eval asks nobody"
            raise UsageError(str(options.tool_file), found, remedy=f"--deny-tool {tool.name}")
    sandbox = options.choose_sandbox(tools)
    settings = _settings(options, sandbox)

    from .models import open_model

    session = open_model(options.model, options.provider)
    if options.prompt_cache_dir is not None:
        from .prompt_cache import preparing

        settings = replace(settings, prepare=preparing(session, Path(options.prompt_cache_dir), "eval"))
    if recording := options.recording(session):
        make = recording
        settings = replace(settings, recorder=lambda task: make(task.id))
    print(
        f"eval: {len(tasks)} tasks on {options.model_name}, {session.provider.name}, "
        f"{len(tools)} tools, {sandbox_words(sandbox)}",
        file=sys.stderr,
    )
    with options.naming_tool_file():
        return _evaluate(session, tools, tasks, settings)


def _settings(options: EvalOptions, sandbox: "Optional[Sandbox]") -> "Settings":
    from ..agent.evaluation import Settings

    options.sampler()  # a bad flag is told now
    options.backend(sandbox)
    return Settings(
        header=options.header,
        sampler=options.sampler,
        limits=options.limits,
        constrain=not options.no_constrain,
        preallocate=not options.no_kv_preallocate,
        dialect=options.dialect,
        context_policy=options.policy,
        backend=lambda folder: options.backend(sandbox, folder, [folder]),  # the task's own may be written
    )


def _evaluate(
    session: "Session", tools: "Sequence[Tool]", tasks: "Sequence[Task]", settings: "Settings"
) -> "list[Outcome]":
    from ..agent.evaluation import evaluate

    outcomes: list[Outcome] = []
    with progress_bar() as progress:
        for outcome in evaluate(session, tools, tasks, settings):
            outcomes.append(outcome)
            if progress:
                right = sum(each.right for each in outcomes)
                progress(f"{right} of {len(outcomes)} right", len(outcomes), len(tasks))
    return outcomes


def _table(outcomes: "Sequence[Outcome]") -> Iterator[str]:
    """The table: a row for all tasks, then one a tool."""
    from ..agent.evaluation import groups, summarise

    rows = [COLUMNS, _row("all", summarise(outcomes))]
    rows += [_row(name, summarise(some)) for name, some in groups(outcomes).items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells])


def _row(name: str, summary: "Summary") -> tuple[str, ...]:
    shares = (
        (summary.right, summary.tasks),
        summary.valid_calls,
        summary.right_tool,
        summary.right_arguments,
        summary.right_answer,
    )
    counts = (f"{summary.sampled:,}", f"{summary.forced:,}", f"{summary.seconds:.1f}")
    return (name, str(summary.tasks), *map(_percent, shares), *counts)


def _percent(pair: tuple[int, int]) -> str:
    right, stated = pair
    if not stated:
        return "-"
    return "100 %" if right == stated else f"{min(100 * right / stated, 99.9):.1f} %"


def _failures(outcomes: "Sequence[Outcome]") -> Iterator[str]:
    for outcome in outcomes:
        if not outcome.right:
            yield f"\n{outcome.task.id}: {outcome.task.prompt!r}"
            yield from (f"  {problem}" for problem in outcome.problems)
    yield ""


def _report(options: EvalOptions, outcomes: "Sequence[Outcome]") -> dict[str, Any]:
    """The JSON report; docs/eval.md describes it."""
    from ..agent.evaluation import groups, summarise

    return {
        "v": 1,
        "options": asdict(options),
        "all": asdict(summarise(outcomes)),
        "groups": {name: asdict(summarise(some)) for name, some in groups(outcomes).items()},
        "tasks": [_task_report(outcome) for outcome in outcomes],
    }


def _task_report(outcome: "Outcome") -> dict[str, Any]:
    from ..agent.evaluation import group

    names = ("lost", "answer", "ended", "right_tool", "right_arguments", "right_answer", "problems")
    return {
        "id": outcome.task.id,
        "group": group(outcome.task),
        "right": outcome.right,
        "calls": [asdict(call) for call in outcome.calls],
        **{name: getattr(outcome, name) for name in names},
        "sampled": outcome.sampled,
        "forced": outcome.forced,
        "seconds": round(outcome.seconds, 6),
    }


def _write(flag: str, name: str, data: bytes) -> None:
    try:
        Path(name).write_bytes(data)
    except OSError as error:
        raise InputError(f"{flag} {name}", f"cannot be written ({error.strerror or error})") from None
