"""`posttrainllm agent`: a chat, or one question."""

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ..runtime.errors import UsageError
from .flags import LoopOptions
from .options import option, parse
from .printer import Printer
from .terminal import printable
from .tool_flags import sandbox_words

if TYPE_CHECKING:
    from ..agent.events import Transcript
    from ..agent.loop import Agent, Approval
    from ..agent.tools import Tool, ToolBackend

EXAMPLE = """  posttrainllm agent demo --tools tools.json --single 'Use the echo tool'
  posttrainllm agent model.tinygpt --tools tools.json --transcript session.jsonl"""


@dataclass(frozen=True, kw_only=True)
class AgentOptions(LoopOptions):
    """Flags of `agent`."""

    single: Optional[str] = option(None, "ask this, print the answer, exit", metavar="TEXT")
    tool_root: Optional[str] = option(
        None, "the folder in which tools run (default: the current one)", metavar="DIR"
    )
    confirm_tools: bool = option(False, "ask before each tool call, showing the exact command")
    escalate: Optional[str] = option(
        None, "offer a tool that asks a larger model at this OpenAI-compatible URL", metavar="URL"
    )
    escalate_model: Optional[str] = option(None, "the model to ask there", metavar="NAME")
    resume: Optional[str] = option(None, "go on from this saved session (:save in the chat)", metavar="FILE")
    transcript: Optional[str] = option(
        None, "append the events to this file, one JSON object a line", metavar="FILE"
    )
    json_out: bool = option(False, "print events on stdout, one JSON object a line, and nothing else")


def run(argv: list[str]) -> int:
    """Returns 0 answered, 4 ended without an answer, 5 raw-text fallback, 130 interrupted."""
    options = parse(
        AgentOptions,
        argv,
        command="agent",
        summary="Chat with a model that calls your tools.",
        example=EXAMPLE,
    )
    options.check()
    with ExitStack() as stack:
        agent = _agent(options)
        if options.prompt_cache_dir is not None:
            from .prompt_cache import preparing

            preparing(agent.session, Path(options.prompt_cache_dir), "agent")(agent)
        if options.resume is not None:
            from .repl import resume

            resume(agent, Path(options.resume))
        transcript = _transcript(options, stack)
        printer = Printer(
            transcript,
            json_out=options.json_out,
            live=sys.stdout.isatty() and not options.no_constrain,
            prompt="" if options.single is not None else "agent> ",
        )
        if options.single is not None:
            return _turn(agent, options.single, printer)
        from .repl import chat

        agent.prepare()
        return chat(agent, printer, lambda text: _turn(agent, text, printer), typed=not options.json_out)


def _agent(options: AgentOptions) -> "Agent":
    tools = options.load_tools()
    sampler = options.sampler()
    sandbox = options.choose_sandbox(tools)
    tools, backend = _escalating(options, tools, options.backend(sandbox, _tool_root(options)))

    from ..agent.loop import Agent
    from .models import open_model

    session = open_model(options.model, options.provider)
    recording = options.recording(session)
    with options.naming_tool_file():
        agent = Agent(
            session,
            tools,
            backend=backend,
            header=options.header,
            sampler=sampler,
            limits=options.limits,
            constrain=not options.no_constrain,
            approve=_ask,
            approve_all=options.confirm_tools,
            preallocate=not options.no_kv_preallocate,
            dialect=options.dialect,
            context_policy=options.policy,
            recorder=recording("") if recording else None,
        )
    threads = f"{session.threads} thread{'s' if session.threads != 1 else ''}"
    print(
        f"agent: {options.model_name} on {session.provider.name} ({session.provider_reason}), {threads}; "
        f"{len(tools)} tool{'s' if len(tools) != 1 else ''}, {sandbox_words(sandbox)}",
        file=sys.stderr,
    )
    return agent


def _escalating(
    options: AgentOptions, tools: "tuple[Tool, ...]", backend: "ToolBackend"
) -> "tuple[tuple[Tool, ...], ToolBackend]":
    """`tools` and their `backend`, with the escalate tool where it is asked for and the file has none."""
    if options.escalate is None and options.escalate_model is None:
        return tools, backend
    if options.escalate is None or options.escalate_model is None:
        missing = "--escalate" if options.escalate is None else "--escalate-model"
        raise UsageError(missing, "missing", "both --escalate URL and --escalate-model NAME")
    from ..agent.escalation import NAME, TOOL, escalation
    from ..agent.tools import FunctionBackend, HandlerRegistry

    ask = escalation(options.escalate, options.escalate_model, options.tool_timeout)
    if any(tool.name == NAME for tool in tools):
        print(f"agent: {options.tool_file} has a tool {NAME} of its own, which is used", file=sys.stderr)
        return tools, backend
    handlers = HandlerRegistry()
    handlers.register(NAME, ask)
    return (*tools, TOOL), FunctionBackend(handlers, backend)


def _tool_root(options: AgentOptions) -> Optional[Path]:
    if options.tool_root is None:
        return None
    root = Path(options.tool_root)
    if not root.is_dir():
        raise UsageError(f"--tool-root {root}", "no such folder", "a folder")
    return root.absolute()


def _transcript(options: AgentOptions, stack: ExitStack) -> "Optional[Transcript]":
    if options.transcript is None:
        return None
    from ..agent.events import Transcript

    return stack.enter_context(Transcript(Path(options.transcript)))


def _turn(agent: "Agent", text: str, printer: Printer) -> int:
    """Run one user turn, hand its events to the printer; the exit code that it would mean."""
    turn = agent.run(text)
    try:
        for event in turn:
            printer.show(event)
    except (KeyboardInterrupt, SystemExit) as stop:
        turn.close()
        printer.show(agent.interrupted())
        if isinstance(stop, SystemExit):  # a signal asked us to end
            raise
    return printer.exit_code


def _ask(tool: "Tool", arguments: Mapping[str, Any]) -> "Approval":
    """Ask on the terminal; what cannot be asked is not allowed."""
    from ..agent.executor import command_text

    is_command = tool.exec is not None or tool.exec_argv is not None
    command = command_text(tool, arguments) if is_command else json.dumps(dict(arguments), ensure_ascii=False)
    text = f"agent: {tool.name} wants to run\n{command}\nrun it? [y/n/always] "
    while True:
        sys.stderr.write(printable(text, sys.stderr))
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            print("\nagent: nobody answers on standard input, which counts as no", file=sys.stderr)
            return "no"
        answer = line.strip().lower()
        if answer in ("y", "yes"):
            return "yes"
        if answer in ("n", "no"):
            return "no"
        if answer in ("a", "always"):
            return "always"
        text = "y, n or always? "
