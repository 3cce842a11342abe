"""The chat of `agent`: lines that a person types, or that are piped in, and commands that begin with a colon."""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ..runtime.errors import PosttrainError, UsageError
from .terminal import printable

if TYPE_CHECKING:
    from ..agent.loop import Agent
    from .printer import Printer

HELP = """:tools           the tools that are offered
:context         how full the context is
:save FILE       store the conversation with its keys and values
:load FILE       go on from a stored one (same model, tools and system prompt)
:help            this list
:quit, :q        end (so does Ctrl-D)
Alt-Enter begins a new line; Ctrl-C stops a turn, and at the prompt ends after a second one."""


_COMMAND = re.compile(r"\s*:[a-z?]")  # ":)" is something to say


def chat(agent: "Agent", printer: "Printer", turn: Callable[[str], int], *, typed: bool) -> int:
    """Turn after turn. Returns 0 to a person who ends it, and the last turn's code to a script."""
    typed = typed and sys.stdin.isatty() and sys.stdout.isatty()
    code = 0
    for line in _typed_lines(agent, printer) if typed else _piped_lines():
        if line is None:  # Ctrl-C at the prompt
            if code == 130:
                return 130
            code = 130
            _tell("agent: Ctrl-C again, Ctrl-D or :quit ends")
        elif line.strip() in (":quit", ":q"):
            break
        elif _COMMAND.match(line):
            code = _command(agent, line.strip())
        elif line.strip():
            code = turn(line)
    return 0 if typed else code


def _command(agent: "Agent", line: str) -> int:
    """Obey a line that begins with a colon; an error is told, and the chat goes on."""
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    try:
        match name:
            case ":tools":
                _tell("\n".join(_tool_lines(agent)) or "agent: no tools")
            case ":context":
                _tell(f"agent: {_fill(agent)}")
            case ":save":
                from ..agent.session_file import save_session

                count = save_session(agent, _file(name, argument))
                _tell(f"agent: saved {count} tokens to {argument}")
            case ":load":
                resume(agent, _file(name, argument))
            case ":help" | ":h" | ":?":
                _tell(HELP)
            case _:
                raise UsageError(name, "no such command", ":tools, :context, :save, :load, :help or :quit")
    except PosttrainError as error:
        _tell(f"agent: {error}")
        return error.exit_code
    return 0


def resume(agent: "Agent", file: Path) -> None:
    """Go on from the saved session `file`, and say so. Raises InputError."""
    from ..agent.session_file import load_session

    how = "restored" if load_session(agent, file) else "of other settings, and will be computed again"
    _tell(f"agent: resumed {len(agent.conversation)} tokens from {file}; keys and values {how}")


def _file(name: str, argument: str) -> Path:
    if not argument:
        raise UsageError(name, "no file", f"{name} FILE")
    return Path(argument).expanduser()


def _tool_lines(agent: "Agent") -> Iterator[str]:
    from ..agent.chat_format import tool_line

    for tool in agent.tools.values():
        yield tool_line(tool)


def _fill(agent: "Agent") -> str:
    held, limit = len(agent.conversation), agent.cache.max_length
    size = agent.cache.nbytes / 2**20
    return f"{held} of {limit} tokens held ({100 * held // limit} %), {size:.1f} MiB of keys and values"


def _piped_lines() -> Iterator[str]:
    for line in sys.stdin:
        yield line.rstrip("\r\n")


def _typed_lines(agent: "Agent", printer: "Printer") -> Iterator[Optional[str]]:
    """What a person types, entry by entry; None for Ctrl-C."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    def status() -> str:
        rate = f", {printer.tokens_per_second:.0f} tok/s" if printer.tokens_per_second else ""
        return f" {_fill(agent)}{rate}   :help"

    session: PromptSession[str] = PromptSession(
        history=_history(), key_bindings=keys, bottom_toolbar=status, prompt_continuation=".... "
    )
    while True:
        try:
            yield session.prompt("you> ")
        except KeyboardInterrupt:
            yield None
        except EOFError:
            return


def _history() -> Any:
    """Earlier entries: on disk, readable by the user alone; in memory where that cannot be."""
    from platformdirs import user_state_path
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # a full disk costs the entry, not the conversation
                super().store_string(string)

    try:
        folder = user_state_path("posttrainllm", appauthor=False, ensure_exists=True)
        file = folder / "history"
        if file.exists() and not file.is_file():
            return InMemoryHistory()  # a pipe or a device may never end
        os.close(os.open(file, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
        file.chmod(0o600)  # it may be older than this rule
        return Kept(str(file))
    except OSError:
        return InMemoryHistory()


def _tell(text: str) -> None:
    print(printable(text, sys.stderr), file=sys.stderr)
