"""Tools and their results: the words shared by the loop, the chat format and the back ends.

A tool is data (`Tool`); something that runs one is a `ToolBackend`. Two back ends exist: the command
one (`executor.py`, bash templates) and `FunctionBackend` here, which calls Python functions that a host
program registered. The latter is also the example to copy for a third.

Knows nothing of models or prompts. Does not check arguments (`arguments.py` does) and does not limit
the time of a Python function: a handler that never returns holds the agent.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..runtime.errors import ToolFileError, UsageError
from .output import OUTPUT_LIMIT, cap_output

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")

# What bash itself sets, reads or makes special, and what the loader of a program reads. An argument of
# such a name would change how the template runs, or lose its value.
_SHELL_PREFIXES = ("BASH", "COMP_", "DYLD_", "HIST", "LC_", "LD_", "READLINE_", "TEXTDOMAIN")
_SHELL_NAMES = """
_ CDPATH CHILD_MAX COLUMNS COMPREPLY COPROC DIRSTACK EMACS ENV EPOCHREALTIME EPOCHSECONDS EUID EXECIGNORE
FCEDIT FIGNORE FUNCNAME FUNCNEST GCONV_PATH GLOBIGNORE GLOBSORT GROUPS HOME HOSTFILE HOSTNAME HOSTTYPE IFS
IGNOREEOF INPUTRC INSIDE_EMACS LANG LANGUAGE LINENO LINES LOCPATH MACHTYPE MAIL MAILCHECK MAILPATH MAPFILE
NLSPATH OLDPWD OPTARG OPTERR OPTIND OSTYPE PATH PIPESTATUS POSIXLY_CORRECT PPID PROMPT_COMMAND
PROMPT_DIRTRIM PS0 PS1 PS2 PS3 PS4 PWD RANDOM REPLY SECONDS SHELL SHELLOPTS SHLVL SRANDOM TERM TIMEFORMAT
TMOUT TMPDIR TZ UID auto_resume histchars
"""
_SHELL_VARIABLES = frozenset(_SHELL_NAMES.split())


def no_parameters() -> dict[str, Any]:
    """The schema of a tool that declares no parameters."""
    return {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tool:
    """One tool as declared. `parameters` is a JSON Schema object and must not be changed.

    `exec_args` are the names that become shell variables of the `exec` template; they are checked here
    too, so that no `Tool`, however it was made, can inject shell text by a name. `exec_argv` is the form
    that needs no shell: a program and its arguments, where `"{name}"` stands for an argument's text.
    `timeout_s`, `max_output` (bytes a stream) and `cwd` (below the tools' root) replace the back end's own;
    `confirm` wants the user asked before each call, `sandbox` wants not to run outside one.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] = field(default_factory=no_parameters)
    exec: str | None = None
    exec_args: tuple[str, ...] = ()
    handler: str | None = None
    exec_argv: tuple[str, ...] | None = None
    timeout_s: float | None = None
    max_output: int | None = None
    cwd: str | None = None
    confirm: bool = False
    sandbox: bool = False

    def __post_init__(self) -> None:
        if not is_identifier(self.name):
            raise ToolFileError(f"tool {self.name!r}", "its name is not an identifier")
        for name in self.exec_args:
            problem = variable_problem(name)
            if problem:
                raise ToolFileError(f"tool {self.name}, argument {name!r}", problem, remedy="rename it")
        if self.exec is not None and not is_shell_text(self.exec):
            raise ToolFileError(f"tool {self.name}, _exec", "a NUL or half of a surrogate pair", "shell text")
        if self.exec_argv is not None and (not self.exec_argv or placeholder(self.exec_argv[0])):
            raise ToolFileError(f"tool {self.name}, _exec_argv", "no program", "a program and its arguments")

    @property
    def passed(self) -> tuple[str, ...]:
        """The arguments that a command of this tool gets as text."""
        places = [placeholder(item) for item in self.exec_argv or ()]
        variables = self.exec_args if self.exec is not None else ()
        return (*variables, *(name for name in places if name is not None))


@dataclass(frozen=True)
class ToolCall:
    """What a model asked for, before any check."""

    tool: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ToolResult:
    """What came of a call. `exit_code` is 0 for success; failure is text that a model can act on.

    2: wrong arguments or no such tool (nothing ran) · 124: timed out · 126, 127: could not be started ·
    128 + n: killed by signal n · anything else is the tool's own.
    """

    tool: str
    stdout: str
    stderr: str
    exit_code: int
    duration_sec: float = 0.0
    timed_out: bool = False
    truncated: int = 0  # bytes dropped, both streams together
    replaced: bool = False  # some output was not UTF-8; U+FFFD stands in its place

    def told(self) -> dict[str, Any]:
        """What a model is told of it, in this order; `timed_out` and `truncated` only where they hold."""
        fields: dict[str, Any] = {"stdout": self.stdout, "stderr": self.stderr, "exit_code": self.exit_code}
        if self.timed_out:
            fields["timed_out"] = True
        if self.truncated:
            fields["truncated"] = self.truncated
        return fields


class ToolBackend(Protocol):
    """Runs a tool with checked arguments. Never raises for what a tool does: that is a result."""

    def call(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult: ...


class HandlerRegistry:
    """Python functions by the name that a tool's `_handler` gives; `fn(**arguments)` returns text."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., str]] = {}

    def register(self, name: str, fn: Callable[..., str]) -> None:
        """Make `fn` the handler called `name`. A second function of the same name is refused."""
        if name in self._functions:
            raise UsageError(f"handler {name!r}", "is registered already", remedy="choose another name")
        self._functions[name] = fn

    def __contains__(self, name: object) -> bool:
        return name in self._functions

    def __getitem__(self, name: str) -> Callable[..., str]:
        return self._functions[name]

    def names(self) -> tuple[str, ...]:
        """All registered names, sorted."""
        return tuple(sorted(self._functions))


class FunctionBackend:
    """Calls registered functions; a tool without one goes to `otherwise` (usually a `CommandBackend`)."""

    def __init__(
        self, handlers: HandlerRegistry, otherwise: ToolBackend | None = None, limit: int = OUTPUT_LIMIT
    ) -> None:
        self.handlers = handlers
        self.otherwise = otherwise
        self.limit = limit

    def call(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        """The function's text as stdout; an exception becomes exit code 1 with its message as stderr."""
        if tool.handler is None or tool.handler not in self.handlers:
            if self.otherwise is not None:
                return self.otherwise.call(tool, arguments)
            return ToolResult(tool.name, "", f"{tool.name}: nothing here can run this tool", 127)
        if tool.sandbox:
            return ToolResult(
                tool.name, "", f"not run: {tool.name} wants a sandbox; a function has none", 126
            )
        limit = tool.max_output or self.limit
        started = time.monotonic()
        out, err, code = "", "", 0
        try:
            out = self.handlers[tool.handler](**arguments)
            if not isinstance(out, str):
                out, err, code = "", f"handler {tool.handler} returned {type(out).__name__}, not text", 1
        except (Exception, SystemExit) as error:  # noqa: BLE001  a tool's failure is a result
            err, code = f"{type(error).__name__}: {error}", 1
        taken = time.monotonic() - started
        stdout = cap_output(out.encode("utf-8", "surrogatepass"), limit)
        stderr = cap_output(err.encode("utf-8", "surrogatepass"), limit)
        return ToolResult(
            tool.name,
            stdout.text,
            stderr.text,
            code,
            taken,
            truncated=stdout.dropped + stderr.dropped,
            replaced=stdout.replaced or stderr.replaced,
        )


def is_identifier(name: object) -> bool:
    """Whether `name` is text of the form `[A-Za-z_][A-Za-z0-9_]*`."""
    return isinstance(name, str) and _IDENTIFIER.fullmatch(name) is not None


def placeholder(item: str) -> str | None:
    """The argument that an element of `exec_argv` stands for; None for text that is taken as it is."""
    found = _PLACEHOLDER.fullmatch(item)
    return found[1] if found else None


def is_shell_text(text: str) -> bool:
    """Whether bash can hold `text`: UTF-8 without NUL."""
    return not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in text)


def variable_problem(name: object) -> str | None:
    """Why `name` cannot be a shell variable for an argument; None if it can."""
    if not isinstance(name, str) or not is_identifier(name):
        return "not a shell variable name"
    if name in _SHELL_VARIABLES or name.startswith(_SHELL_PREFIXES):
        return "a variable that the shell or the program loader uses"
    return None
