"""The command back end: a tool's `_exec` template, run by bash, or its `_exec_argv`, run without a shell.

What `/bin/bash -c` does with the template, after each argument was assigned to a shell variable. Argument
text is never pasted into the template, never evaluated, and never on a command line (where others see it
and 128 KiB is the limit): bash's `read` takes each value, then the template, from an inherited pipe, and
closes it. The effect is that of the lines `name='value'` that `command_text` shows, where single quotes
are escaped; running those very lines takes bash quadratic time when there are many quotes.

The tool starts with PATH, HOME, a UTF-8 LANG and what the user named, empty standard input, its own session
and process group, bounds on what a process may use (`limits.py`), and a deadline. Output is read with
bounded memory and capped for the model. Everything that it started ends with it (`keeper.py`).

The other end of that pipe stays with us. In the tool's process group a small watcher holds on to it: when
we die, however abruptly, it sees the end of the pipe and kills the group, should the keeper be gone too.

Without a `Sandbox` this is not one. It does not protect against a tool file that you did not read: a
template can do whatever you can, files and network included, and it can read the environment of your other
processes. A declared argument is safe as "$name"; a template that runs `eval "$name"` or `bash -c "$name"`
hands its shell to the model. In `_exec_argv` arguments are on a command line, which others can see.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..runtime.errors import UsageError
from .arguments import ArgumentProblem, problem_result, shell_problem
from .limits import ResourceLimits
from .output import OUTPUT_LIMIT
from .process import Ended, Launch, run_process
from .sandbox import Sandbox
from .shells import find_shell, is_shell_there, resolve_program, shell_command
from .tools import Tool, ToolResult, is_identifier, placeholder

TIMED_OUT, NOT_STARTED, NO_SHELL = 124, 126, 127  # exit codes, as timeout(1) and bash have them

# {0} is the pipe. Every value and the template end with NUL; where our death cuts them short, the last
# `read` fails and nothing runs.
# The watcher ignores what ends the tool politely. `unset` leaves the template on line 1, for its errors.
_ASSIGN = "IFS= read -r -d '' {1} <&{0}; "
_RUN = (
    "read -r -d '' <&{0} || exit; trap '' HUP INT TERM; "
    "( {{ read -r <&{0}; kill -KILL 0; }} </dev/null >/dev/null 2>&1 & ); "
    "trap - HUP INT TERM; exec {0}<&-; eval 'unset REPLY;' \"$REPLY\""
)
# Windows has no descriptors to inherit: the pipe is standard input, and a job object is the watcher.
_RUN_ON_STDIN = "read -r -d '' || exit; exec </dev/null; eval 'unset REPLY;' \"$REPLY\""
_WINDOWS_NAMES = ("SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "TEMP", "TMP", "USERPROFILE", "PATHEXT")


class CommandBackend:
    """Runs `tool.exec` or `tool.exec_argv`; one process tree a call, none left behind.

    `timeout_s` bounds a call, `limit` the bytes of each stream that the result carries, `limits` what one
    process may use; a tool's own settings replace the first two. `cwd` is the root folder of all tools, by
    default ours. `environment` names variables of ours that tools get besides PATH and HOME. `shell` is the
    path of a bash, by default the usual one; without any, only tools with `exec_argv` run. With `sandbox`
    every call runs inside it, with `writable` folders besides the sandbox's own.
    Calls from several threads are independent.
    """

    def __init__(
        self,
        timeout_s: float = 30.0,
        *,
        limit: int = OUTPUT_LIMIT,
        cwd: Path | None = None,
        shell: str | None = None,
        environment: Sequence[str] = (),
        limits: ResourceLimits | None = None,
        sandbox: Sandbox | None = None,
        writable: Sequence[Path] = (),
    ) -> None:
        if not timeout_s > 0:
            raise UsageError("--tool-timeout", str(timeout_s), "seconds above 0")
        self.timeout_s = timeout_s
        self.limit = limit
        self.cwd = cwd
        self.shell = shell or find_shell(None)
        self.limits = limits or ResourceLimits()
        self.sandbox = sandbox
        self.writable = tuple(writable)
        self._environment = tuple(environment)
        tool_environment(self._environment)  # a name that is not set is told now

    def call(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        """What the command printed and how it ended. On KeyboardInterrupt everything is killed first."""
        problem = shell_problem(tool, arguments)
        if problem:
            return problem_result(tool, ArgumentProblem(problem))
        started = time.monotonic()
        try:
            launch = self._launch(tool, arguments)
            timeout_s = tool.timeout_s or self.timeout_s
            ended = _run(launch, timeout_s)
        except _Refused as refusal:
            return ToolResult(tool.name, "", refusal.text, refusal.exit_code)
        except OSError as error:
            return ToolResult(tool.name, "", f"could not be started: {error}", NOT_STARTED)
        return self._result(tool, ended, timeout_s, time.monotonic() - started)

    def _launch(self, tool: Tool, arguments: Mapping[str, Any]) -> Launch:
        """What to start for a call. Raises _Refused or OSError if that is nothing."""
        if tool.exec is None and tool.exec_argv is None:
            raise _Refused(f"{tool.name}: has no command to run", NO_SHELL)
        if tool.sandbox and self.sandbox is None:
            raise _Refused(f"not run: {tool.name} runs only in a sandbox (--sandbox)", NOT_STARTED)
        environment = tool_environment(self._environment)
        folder = self._folder(tool)
        script = None
        if tool.exec is not None and is_shell_there(self.shell):
            script = _script(tool, arguments)
            command = _bash_command(self.shell or "", tool)
        elif tool.exec_argv is not None:
            command = _plain_command(tool, arguments, environment)
        else:
            missing = f"{self.shell} is missing here" if self.shell else "there is no bash here"
            raise _Refused(f"{missing}; this tool needs it (--shell)", NO_SHELL)
        wrapped, sandbox = command, self.sandbox
        if sandbox is not None:
            where = folder or Path.cwd()

            def wrapped(fd: int) -> Sequence[str]:
                return sandbox.wrap(command(fd), where, self.writable)

        return Launch(
            wrapped,
            script,
            environment,
            folder,
            tool.max_output or self.limit,
            self.limits,
            leader_relays=sandbox is None or sandbox.relays_sigterm,
        )

    def _folder(self, tool: Tool) -> Path | None:
        """Where the tool runs: its own folder below the root, links followed."""
        if tool.cwd is None:
            return self.cwd
        root = os.path.realpath(self.cwd or Path.cwd())
        folder = Path(os.path.realpath(Path(root) / tool.cwd))
        if not folder.is_relative_to(root):
            raise _Refused(f"not run: its folder {tool.cwd!r} leads out of {root}", NOT_STARTED)
        return folder

    def _result(self, tool: Tool, ended: Ended, timeout_s: float, taken: float) -> ToolResult:
        note = f"timed out after {timeout_s:g} s and was killed" if ended.timed_out else ""
        note = note or self.limits.explain(ended.exit_code, ended.err.text, timeout_s)
        err = ended.err.text
        return ToolResult(
            tool.name,
            ended.out.text,
            "\n".join(part for part in (err.rstrip("\n"), note) if part) if note else err,
            TIMED_OUT if ended.timed_out else ended.exit_code,
            taken,
            timed_out=ended.timed_out,
            truncated=ended.out.dropped + ended.err.dropped,
            replaced=ended.out.replaced or ended.err.replaced,
        )


class _Refused(Exception):
    """A call that cannot be made; the text is for the model."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.text = text
        self.exit_code = exit_code


def command_text(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """The shell text that a call amounts to, for people to read before they allow it."""
    if tool.exec is None and tool.exec_argv is not None:
        return shlex.join(_argv(tool.exec_argv, arguments))
    lines = [f"{name}={_quoted(shell_value(arguments.get(name)))}\n" for name in tool.exec_args]
    return "".join(lines) + (tool.exec or "")


def shell_value(value: Any) -> str:
    """An argument as text: strings as they are, absent and null as nothing, the rest as compact JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def tool_environment(names: Sequence[str] = ()) -> dict[str, str]:
    """All that a tool inherits: our PATH and HOME where set, a UTF-8 locale, and `names` of ours.

    Raises UsageError for a name that is no variable of ours.
    """
    for name in names:
        if not is_identifier(name) or name not in os.environ:
            raise UsageError(f"--tool-env {name}", "not set here", "the name of a variable of yours")
    inherited = ("PATH", "HOME", *(_WINDOWS_NAMES if sys.platform == "win32" else ()))
    kept = {name: os.environ[name] for name in inherited if name in os.environ}
    locale = {"LANG": "en_US.UTF-8" if sys.platform == "darwin" else "C.UTF-8"}
    return {**kept, **locale, **{name: os.environ[name] for name in names}}


def _run(launch: Launch, timeout_s: float) -> Ended:
    if sys.platform == "win32":
        from .windows import run_job

        return run_job(launch, timeout_s)
    return run_process(launch, timeout_s)


def _script(tool: Tool, arguments: Mapping[str, Any]) -> bytes:
    values = [shell_value(arguments.get(name)) for name in tool.exec_args]
    return "".join(f"{text}\0" for text in [*values, tool.exec or ""]).encode()


def _bash_command(shell: str, tool: Tool) -> Callable[[int], Sequence[str]]:
    run = _RUN_ON_STDIN if sys.platform == "win32" else _RUN

    def command(fd: int) -> Sequence[str]:
        assign = "".join(_ASSIGN.format(fd, name) for name in tool.exec_args)
        return shell_command(shell, assign + run.format(fd))

    return command


def _plain_command(
    tool: Tool, arguments: Mapping[str, Any], environment: Mapping[str, str]
) -> Callable[[int], Sequence[str]]:
    program, *rest = _argv(tool.exec_argv or (), arguments)
    command = [resolve_program(program, environment), *rest]
    return lambda fd: command


def _argv(items: Sequence[str], arguments: Mapping[str, Any]) -> list[str]:
    """`items` with arguments in their places; an absent one leaves no element."""
    command = []
    for item in items:
        name = placeholder(item)
        if name is None:
            command.append(item)
        elif arguments.get(name) is not None:
            command.append(shell_value(arguments[name]))
    return command


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
