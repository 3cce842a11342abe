"""The command back end: a tool's `_exec` template, run by bash.

What `/bin/bash -c` does with the template, after each argument was assigned to a shell variable. Argument
text is never pasted into the template, never evaluated, and never on a command line (where others see it
and 128 KiB is the limit): bash's `read` takes each value, then the template, from an inherited pipe, and
closes it. The effect is that of the lines `name='value'` that `command_text` shows, where single quotes
are escaped; running those very lines takes bash quadratic time when there are many quotes.

The tool starts with PATH, HOME and a UTF-8 LANG, empty standard input, its own session and process group,
and a deadline. Output is read with bounded memory and capped for the model.

The other end of that pipe stays with us. In the tool's process group a small watcher holds on to it: when
we die, however abruptly, it sees the end of the pipe and kills the group. It also keeps the group's number
from being given to strangers while we may still signal it.

This is not a sandbox. It does not protect against a tool file that you did not read: a template can do
whatever you can. It does not protect files, the network, or memory from a tool, and a tool that leaves its
process group (setsid, `set -m`) outlives the call; it cannot hold the agent, though. A declared argument is
safe as "$name"; a template that runs `eval "$name"` or `bash -c "$name"` hands its shell to the model.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..runtime.errors import UsageError
from .arguments import ArgumentProblem, problem_result, shell_problem
from .tools import OUTPUT_LIMIT, Tool, ToolResult, cap_output

TIMED_OUT, NOT_STARTED, NO_SHELL = 124, 126, 127  # exit codes, as timeout(1) and bash have them
_TERM_GRACE_S = 0.5  # from SIGTERM to SIGKILL
_DRAIN_S = 0.5  # how long a grandchild may keep a pipe open after the tool's end
_REAP_S = 5.0  # after SIGKILL; longer only if the tool is stuck in the kernel
_LAST_READ_S = 0.2  # for what is still in the pipes after the group was killed
_TICK_S = 0.05
_CHUNK = 1 << 16

# {0} is the pipe. Every value and the template end with NUL; where our death cuts them short, the last
# `read` fails and nothing runs.
# The watcher ignores what ends the tool politely. `unset` leaves the template on line 1, for its errors.
_ASSIGN = "IFS= read -r -d '' {1} <&{0}; "
_RUN = (
    "read -r -d '' <&{0} || exit; trap '' HUP INT TERM; "
    "( {{ read -r <&{0}; kill -KILL 0; }} </dev/null >/dev/null 2>&1 & ); "
    "trap - HUP INT TERM; exec {0}<&-; eval 'unset REPLY;' \"$REPLY\""
)


class CommandBackend:
    """Runs `tool.exec` with its arguments as shell variables; one process group a call, none left behind.

    `timeout_s` bounds a call, `limit` the bytes of each stream that the result carries. `cwd` is the
    tool's working directory, by default ours. Calls from several threads are independent.
    """

    def __init__(
        self,
        timeout_s: float = 30.0,
        *,
        limit: int = OUTPUT_LIMIT,
        cwd: Path | None = None,
        shell: str = "/bin/bash",
    ) -> None:
        if not timeout_s > 0:
            raise UsageError("--tool-timeout", str(timeout_s), "seconds above 0")
        self.timeout_s = timeout_s
        self.limit = limit
        self.cwd = cwd
        self.shell = shell

    def call(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        """What the command printed and how it ended. On KeyboardInterrupt the group is killed first."""
        if tool.exec is None:
            return ToolResult(tool.name, "", f"{tool.name}: has no command to run", NO_SHELL)
        problem = shell_problem(tool, arguments)
        if problem:
            return problem_result(tool, ArgumentProblem(problem))
        if os.name != "posix" or not Path(self.shell).is_file():
            return ToolResult(tool.name, "", f"{self.shell} is missing here; command tools need it", NO_SHELL)
        values = [shell_value(arguments.get(name)) for name in tool.exec_args]
        script = "".join(f"{text}\0" for text in [*values, tool.exec]).encode()
        started = time.monotonic()
        try:
            with _Running(self, tool.exec_args, script) as running:
                timed_out = running.finish(started + self.timeout_s)
        except OSError as error:
            return ToolResult(tool.name, "", f"could not be started: {error}", NOT_STARTED)
        return self._result(tool, running, timed_out, time.monotonic() - started)

    def _result(self, tool: Tool, running: _Running, timed_out: bool, taken: float) -> ToolResult:
        out, err = (cap_output(bytes(stream.head), self.limit, stream.total) for stream in running.streams)
        note = f"timed out after {self.timeout_s:g} s and was killed" if timed_out else ""
        return ToolResult(
            tool.name,
            out.text,
            "\n".join(part for part in (err.text.rstrip("\n"), note) if part) if note else err.text,
            TIMED_OUT if timed_out else running.exit_code(),
            taken,
            timed_out=timed_out,
            truncated=out.dropped + err.dropped,
            replaced=out.replaced or err.replaced,
        )


def command_text(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """The shell text that a call amounts to, for people to read before they allow it."""
    lines = [f"{name}={_quoted(shell_value(arguments.get(name)))}\n" for name in tool.exec_args]
    return "".join(lines) + (tool.exec or "")


def shell_value(value: Any) -> str:
    """An argument as text: strings as they are, absent and null as nothing, the rest as compact JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def tool_environment() -> dict[str, str]:
    """All that a tool inherits: our PATH and HOME where set, and a UTF-8 locale."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "LANG": "en_US.UTF-8" if sys.platform == "darwin" else "C.UTF-8"}


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


class _Stream:
    """The first bytes of an output, and how many there were in all."""

    def __init__(self, limit: int) -> None:
        self.head = bytearray()
        self.total = 0
        self._limit = limit

    def push(self, data: bytes) -> None:
        self.total += len(data)
        self.head += data[: max(0, self._limit - len(self.head))]


class _Running:
    """One bash with its process group, its pipes and the end of the script pipe that keeps it alive.

    A context manager: whatever happens inside, at its end the group is dead and everything is closed.
    """

    def __init__(self, backend: CommandBackend, names: Sequence[str], script: bytes) -> None:
        self.streams = (_Stream(backend.limit), _Stream(backend.limit))
        self._script = memoryview(script)
        self._selector = selectors.DefaultSelector()
        theirs, self._lifeline = os.pipe()
        loader = "".join(_ASSIGN.format(theirs, name) for name in names) + _RUN.format(theirs)
        try:
            os.set_blocking(self._lifeline, False)
            self._process = subprocess.Popen(
                [backend.shell, "-c", loader],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=tool_environment(),
                cwd=backend.cwd,
                bufsize=0,
                pass_fds=(theirs,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._lifeline)
            self._selector.close()
            raise
        finally:
            os.close(theirs)

    def __enter__(self) -> Self:
        self._selector.register(self._lifeline, selectors.EVENT_WRITE)
        for pipe, stream in zip((self._process.stdout, self._process.stderr), self.streams, strict=True):
            assert pipe is not None
            self._selector.register(pipe, selectors.EVENT_READ, stream)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None:  # Ctrl-C: let the tool clean up, but not for long
                self._signal(signal.SIGTERM)
                self._pump_until(time.monotonic() + _TERM_GRACE_S, self._is_over)
        finally:
            self._signal(signal.SIGKILL)
            self._pump_until(time.monotonic() + _REAP_S, self._has_exited)
            self._pump_until(time.monotonic() + _LAST_READ_S, self._is_over)
            self._close()

    def finish(self, deadline: float) -> bool:
        """Wait for the end, at most until `deadline` and a little more; whether it timed out."""
        if self._pump_until(deadline, self._has_exited):
            self._pump_until(time.monotonic() + _DRAIN_S, self._is_over)
            return False
        self._signal(signal.SIGTERM)
        self._pump_until(time.monotonic() + _TERM_GRACE_S, self._is_over)
        return True

    def exit_code(self) -> int:
        """As bash reports it: 128 + n for a death by signal n."""
        code = self._process.returncode
        if code is None:  # not even SIGKILL has ended it: stuck in the kernel
            return 128 + signal.SIGKILL
        return code if code >= 0 else 128 - code

    def _pump_until(self, deadline: float, done: Callable[[], bool]) -> bool:
        """Move data until `done()` or the deadline; whether it was `done`."""
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._pump(min(left, _TICK_S))
        return True

    def _pump(self, timeout_s: float) -> None:
        if not self._selector.get_map():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
            return
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._feed()
            else:
                data = os.read(key.fd, _CHUNK)
                key.data.push(data)
                if not data:
                    self._selector.unregister(key.fileobj)

    def _feed(self) -> None:
        """Give bash more of the script; the pipe stays open when all is written."""
        try:
            self._script = self._script[os.write(self._lifeline, self._script[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._script = self._script[:0]
        if not self._script:
            self._selector.unregister(self._lifeline)

    def _has_exited(self) -> bool:
        return self._process.poll() is not None

    def _is_over(self) -> bool:
        return self._has_exited() and not self._selector.get_map()

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return  # all gone, or what is left is not ours to signal (sudo)

    def _close(self) -> None:
        self._selector.close()
        os.close(self._lifeline)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
