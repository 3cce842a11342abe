"""`posttrainllm agent`: a REPL, one question, or JSON lines; three printers over one event stream."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ..runtime.errors import UsageError
from .options import option, parse, positional
from .sampling import SamplingOptions, at_least
from .terminal import AnswerStream, printable

if TYPE_CHECKING:
    from ..agent.events import Event, Transcript
    from ..agent.loop import Agent, Approval
    from ..agent.tools import Tool

EXAMPLE = """  posttrainllm agent demo --tools tools.json --single 'Use the echo tool'
  posttrainllm agent model.tinygpt --tools tools.json --transcript session.jsonl"""


@dataclass(frozen=True, kw_only=True)
class AgentOptions(SamplingOptions):
    """Flags of `agent`."""

    model: Optional[str] = positional(
        "model", "a bundle folder, a .tinygpt file, or demo (default: demo)", optional=True
    )
    tools: Optional[str] = option(None, "tool file (default, with demo only: its own)", metavar="FILE")
    system: Optional[str] = option(None, "replaces the first line of the system prompt", metavar="TEXT")
    single: Optional[str] = option(None, "ask this, print the answer, exit", metavar="TEXT")
    max_steps: int = option(8, "tool calls per user turn (default 8)", metavar="N")
    max_tokens: int = option(256, "sampled ids per assistant step (default 256)", metavar="N")
    tool_timeout: float = option(30.0, "seconds per tool call (default 30)", metavar="F")
    confirm_tools: bool = option(False, "ask before each tool call, showing the exact command")
    no_constrain: bool = option(False, "decode without the grammar of calls and answers")
    transcript: Optional[str] = option(
        None, "append the events to this file, one JSON object a line", metavar="FILE"
    )
    json_out: bool = option(False, "print events on stdout, one JSON object a line, and nothing else")
    no_kv_preallocate: bool = option(
        False, "grow the KV buffers on demand instead of allocating the context at once"
    )


def run(argv: list[str]) -> int:
    """Returns the exit code of spec: 0 answered, 4 ended without an answer, 5 fallback, 130 interrupted."""
    options = parse(
        AgentOptions,
        argv,
        command="agent",
        summary="Chat with a model that calls your tools.",
        example=EXAMPLE,
    )
    at_least("--max-steps", options.max_steps, 0)
    at_least("--max-tokens", options.max_tokens, 1)
    if not options.tool_timeout > 0:
        raise UsageError("--tool-timeout", f"{options.tool_timeout}", "more than 0 seconds")
    with ExitStack() as stack:
        agent = _agent(options)
        transcript = _transcript(options, stack)
        printer = _Printer(options, transcript)
        if options.single is not None:
            return _turn(agent, options.single, printer)
        return _repl(agent, printer, options)


def _agent(options: AgentOptions) -> "Agent":
    from ..agent.tool_file import load_tools
    from .models import bundled_tools

    if options.tools is None and options.model not in (None, "demo"):
        raise UsageError(
            "--tools", "missing", "a tool file", "only the bundled demo model has tools of its own"
        )
    path = Path(options.tools) if options.tools else bundled_tools("echo")
    tools = load_tools(path)
    sampler = options.sampler()

    from ..agent.chat_format import DEFAULT_HEADER
    from ..agent.executor import CommandBackend
    from ..agent.loop import Agent, Limits
    from ..runtime.errors import ToolFileError
    from .models import open_model

    session = open_model(options.model, options.provider)
    try:
        agent = Agent(
            session,
            tools,
            backend=CommandBackend(timeout_s=options.tool_timeout),
            header=DEFAULT_HEADER if options.system is None else options.system,
            sampler=sampler,
            limits=Limits(options.max_steps, options.max_tokens),
            constrain=not options.no_constrain,
            approve=_ask if options.confirm_tools else None,
            preallocate=not options.no_kv_preallocate,
        )
    except ToolFileError as error:
        raise ToolFileError(f"{path}, {error.subject}", error.found, error.expected, error.remedy) from None
    threads = f"{session.threads} thread{'s' if session.threads != 1 else ''}"
    print(
        f"agent: {options.model or 'demo'} on {session.provider.name} ({session.provider_reason}), {threads}; "
        f"{len(tools)} tools, no sandbox",
        file=sys.stderr,
    )
    return agent


def _transcript(options: AgentOptions, stack: ExitStack) -> "Optional[Transcript]":
    if options.transcript is None:
        return None
    from ..agent.events import Transcript

    return stack.enter_context(Transcript(Path(options.transcript)))


def _turn(agent: "Agent", text: str, printer: "_Printer") -> int:
    """Run one user turn, hand its events to the printer; the exit code that it would mean."""
    turn = agent.run(text)
    try:
        for event in turn:
            printer.show(event)
    except KeyboardInterrupt:
        turn.close()
        printer.show(agent.interrupted())
    return printer.exit_code


def _repl(agent: "Agent", printer: "_Printer", options: AgentOptions) -> int:
    agent.prepare()
    interrupted = False
    for line in _lines(quiet=options.json_out):
        if line is None:  # Ctrl-C at the prompt
            if interrupted:
                return 130
            interrupted = True
            print("agent: Ctrl-C again, Ctrl-D or :quit ends", file=sys.stderr)
            continue
        if line.strip() in (":quit", ":q"):
            return 0
        if line.strip():
            interrupted = _turn(agent, line, printer) == 130
    return 0


def _lines(*, quiet: bool) -> Iterator[Optional[str]]:
    """What the user types, line by line; None for Ctrl-C. Plain lines where no person is typing."""
    if quiet or not (sys.stdin.isatty() and sys.stdout.isatty()):
        for line in sys.stdin:
            yield line.rstrip("\r\n")
        return
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import InMemoryHistory

    session: PromptSession[str] = PromptSession(history=InMemoryHistory())
    while True:
        try:
            yield session.prompt("you> ")
        except KeyboardInterrupt:
            yield None
        except EOFError:
            return


def _ask(tool: "Tool", arguments: Mapping[str, Any]) -> "Approval":
    """Ask on the terminal; what cannot be asked is not allowed."""
    from ..agent.executor import command_text

    command = command_text(tool, arguments) if tool.exec else json.dumps(dict(arguments), ensure_ascii=False)
    text = f"agent: {tool.name} wants to run\n{command}\nrun it? [y/n/always] "
    while True:
        sys.stderr.write(printable(text, sys.stderr))
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise UsageError("--confirm-tools", "nobody answers on standard input", "y, n or always")
        answer = line.strip().lower()
        if answer in ("y", "yes"):
            return "yes"
        if answer in ("n", "no"):
            return "no"
        if answer in ("a", "always"):
            return "always"
        text = "y, n or always? "


class _Printer:
    """Shows events in the way that the flags ask for, and keeps the exit code of the last turn."""

    def __init__(self, options: AgentOptions, transcript: "Optional[Transcript]") -> None:
        self._options = options
        self._transcript = transcript
        self._stream = AnswerStream()
        self._streamed = False
        self._live = sys.stdout.isatty() and not options.json_out and not options.no_constrain
        self.exit_code = 0

    def show(self, event: "Event") -> None:
        """Record one event, then print it."""
        if self._transcript:
            self._transcript.write(event)
        self._note_exit_code(event)
        if self._options.json_out:
            from ..agent.events import Delta, ToolResultEvent, to_line

            if not isinstance(event, (Delta, ToolResultEvent)):
                sys.stdout.flush()
                sys.stdout.buffer.write(to_line(event))
                sys.stdout.buffer.flush()
            return
        fields = event.to_json()
        show = getattr(self, f"_show_{event.type}", None)
        if show:
            show(fields)

    def _note_exit_code(self, event: "Event") -> None:
        if event.type == "answer":
            self.exit_code = 5 if event.to_json().get("fallback") else 0
        elif event.type == "stop":
            self.exit_code = 130 if event.to_json()["reason"] == "interrupted" else 4

    def _show_delta(self, fields: dict[str, Any]) -> None:
        if not self._live:
            return
        text = self._stream.push(fields["text"])
        if text and not self._streamed:
            self._streamed = True
            sys.stdout.write(self._prompt())
        sys.stdout.write(printable(text, sys.stdout))
        sys.stdout.flush()

    def _show_assistant(self, fields: dict[str, Any]) -> None:
        self._stream = AnswerStream()

    def _show_tool_call(self, fields: dict[str, Any]) -> None:
        arguments = json.dumps(fields["arguments"], ensure_ascii=False)
        ended = "timed out" if fields.get("timed_out") else f"exit {fields['exit_code']}"
        line = f"agent: {fields['tool']} {arguments} ({ended}, {fields['duration_sec']:.2f} s)"
        print(printable(line, sys.stderr), file=sys.stderr)

    def _show_answer(self, fields: dict[str, Any]) -> None:
        if self._streamed:
            print()
        else:
            print(self._prompt() + printable(fields["text"], sys.stdout))
        self._streamed = False
        if fields.get("fallback"):
            print("agent: no JSON reply; the text stands as it came", file=sys.stderr)

    def _show_stop(self, fields: dict[str, Any]) -> None:
        if self._streamed:
            print()
        self._streamed = False
        print(f"agent: stopped ({fields['reason']}): {fields.get('detail', '')}", file=sys.stderr)

    def _prompt(self) -> str:
        return "" if self._options.single is not None else "agent> "
