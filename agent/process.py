"""Runs one program of a tool on POSIX: started, fed, read and ended within its time, with all it started.

Usually a keeper (`keeper.py`) stands between us and the tool and kills the whole tree, also when we die.
Where there is no Python interpreter to run it (a frozen application), the tool's process group is killed
by us and nothing bounds what a process may use; bash's own watcher still ends the group when we die.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from .limits import ResourceLimits
from .output import OUTPUT_LIMIT, CappedText, Stream

_TERM_GRACE_S = 0.5  # from SIGTERM to SIGKILL
_DRAIN_S = 0.5  # how long a grandchild may keep a pipe open after the tool's end
_REAP_S = 1.2  # after SIGKILL; a keeper that has not killed all by then goes on without us
_LAST_READ_S = 0.2  # for what is still in the pipes after everything was killed
_TICK_S = 0.05
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Launch:
    """What to run. `command(fd)` is the program with its arguments, `fd` the number under which it finds
    `script` to read (-1 where that is None). `leader_relays` is False for a program that wraps the tool and
    dies of SIGTERM without passing it on (bubblewrap).
    """

    command: Callable[[int], Sequence[str]]
    script: bytes | None
    environment: Mapping[str, str]
    cwd: Path | None = None
    output_limit: int = OUTPUT_LIMIT
    limits: ResourceLimits = field(default_factory=ResourceLimits)
    leader_relays: bool = True


@dataclass(frozen=True)
class Ended:
    """How a run ended. `exit_code` as bash reports it: 128 + n for a death by signal n."""

    out: CappedText
    err: CappedText
    exit_code: int
    timed_out: bool


def run_process(launch: Launch, timeout_s: float) -> Ended:
    """Run to the end, at most `timeout_s` and a little more; nothing of it is left behind.

    Raises OSError if the program cannot be started. On KeyboardInterrupt everything is killed first.
    """
    deadline = time.monotonic() + timeout_s
    with _Running(launch, timeout_s) as running:
        timed_out = running.finish(deadline)
    out, err = (stream.text() for stream in running.streams)
    return Ended(out, err, running.exit_code(), timed_out)


def keeper_command() -> list[str] | None:
    """How to run the keeper; None where this program has no interpreter or file to run it with."""
    script = Path(__file__).with_name("keeper.py")
    if not sys.executable or getattr(sys, "frozen", False) or not script.is_file():
        return None
    return [sys.executable, "-I", "-S", str(script)]


class _Kept:
    """A tool with a keeper; the link's end is what kills it."""

    def __init__(
        self, keeper: Sequence[str], launch: Launch, command: Sequence[str], script: int, timeout_s: float
    ) -> None:
        limits = launch.limits
        bounds = f"{limits.cpu_seconds(timeout_s)}:{limits.memory_bytes()}:{limits.file_bytes()}"
        mode = "group" if launch.leader_relays else "spare"
        self.link, theirs = socket.socketpair()
        self._told = b""
        self.error: OSError | None = None
        try:
            names = ",".join(launch.environment)
            arguments = [str(theirs.fileno()), str(script), bounds, mode, names, *command]
            self.process = _spawn([*keeper, *arguments], launch, (script, theirs.fileno()))
        except BaseException:
            self.link.close()
            raise
        finally:
            theirs.close()
        self.link.setblocking(False)

    def listen(self) -> bool:
        """Take in what the keeper tells; whether more may come."""
        try:
            data = self.link.recv(256)
        except BlockingIOError:
            return True
        except ConnectionError:
            data = b""
        self._told += data
        word, _, value = self._told.partition(b"\n")[0].partition(b" ")
        if word == b"error" and b"\n" in self._told:
            self.error = OSError(int(value), os.strerror(int(value)))
        return bool(data) and b"\n" not in self._told

    def has_ended(self) -> bool:
        """Whether the tool itself has ended (or its keeper was killed); others of its tree may live."""
        return b"\n" in self._told or self.is_gone()

    def is_gone(self) -> bool:
        """Whether the keeper has killed the tree and ended."""
        return self.process.poll() is not None

    def terminate(self) -> None:
        """Ask the tool to end."""
        with contextlib.suppress(OSError):
            self.link.send(b"T")

    def kill(self) -> None:
        """End the link, which makes the keeper kill everything."""
        with contextlib.suppress(OSError):
            self.link.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.link.close()

    def code(self) -> int | None:
        """The tool's exit code, negative for a signal; None if it is not known."""
        return int(self._told.split()[1]) if b"\n" in self._told else None


class _Grouped:
    """A tool without a keeper: its process group is all that can be ended."""

    link: socket.socket | None = None
    error: OSError | None = None

    def __init__(self, launch: Launch, command: Sequence[str], script: int) -> None:
        self.process = _spawn(command, launch, (script,))

    def listen(self) -> bool:
        return False

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def is_gone(self) -> bool:
        return self.has_ended()

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        return

    def code(self) -> int | None:
        return self.process.returncode

    def _signal(self, number: int) -> None:
        # The watcher, which is in the group, keeps its number from strangers until the script pipe closes.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def _spawn(command: Sequence[str], launch: Launch, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=launch.environment,
        cwd=launch.cwd,
        bufsize=0,
        pass_fds=[number for number in inherited if number >= 0],
        start_new_session=True,
    )


class _Running:
    """One tool, its output pipes and the end of the script pipe that keeps bash's watcher quiet.

    A context manager: whatever happens inside, at its end the tree is dead and everything is closed.
    """

    def __init__(self, launch: Launch, timeout_s: float) -> None:
        self.streams = (Stream(launch.output_limit), Stream(launch.output_limit))
        self._script = memoryview(launch.script or b"")
        self._selector = selectors.DefaultSelector()
        theirs, self._lifeline = os.pipe() if launch.script is not None else (-1, -1)
        command = launch.command(theirs)
        keeper = keeper_command()
        self._child: _Kept | _Grouped
        try:
            if keeper:
                self._child = _Kept(keeper, launch, command, theirs, timeout_s)
            else:
                self._child = _Grouped(launch, command, theirs)
        except BaseException:
            self._close_lifeline()
            self._selector.close()
            raise
        finally:
            if theirs >= 0:
                os.close(theirs)

    def __enter__(self) -> Self:
        if self._lifeline >= 0:
            os.set_blocking(self._lifeline, False)
            self._selector.register(self._lifeline, selectors.EVENT_WRITE, self._feed)
        if self._child.link is not None:
            self._selector.register(self._child.link, selectors.EVENT_READ, self._listen)
        for pipe, stream in zip(self._pipes(), self.streams, strict=True):
            self._selector.register(pipe, selectors.EVENT_READ, stream)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None and self._child.error is None:  # Ctrl-C: let it clean up, not for long
                self._child.terminate()
                self._pump_until(time.monotonic() + _TERM_GRACE_S, self._is_over)
        finally:
            try:
                self._child.kill()
                self._pump_until(time.monotonic() + _REAP_S, self._child.is_gone)
                self._pump_until(time.monotonic() + _LAST_READ_S, self._is_over)
            finally:
                self._close()

    def finish(self, deadline: float) -> bool:
        """Wait for the end, at most until `deadline` and a little more; whether it timed out.

        Raises OSError if the program could not be started.
        """
        if self._pump_until(deadline, self._child.has_ended):
            if self._child.error:
                raise self._child.error
            self._pump_until(time.monotonic() + _DRAIN_S, self._is_over)
            return False
        self._child.terminate()
        self._pump_until(time.monotonic() + _TERM_GRACE_S, self._is_over)
        return True

    def exit_code(self) -> int:
        """As bash reports it: 128 + n for a death by signal n."""
        code = self._child.code()
        if code is None:  # its keeper was killed, or not even SIGKILL has ended it
            return 128 + signal.SIGKILL
        return code if code >= 0 else 128 - code

    def _pipes(self) -> list[int]:
        process = self._child.process
        assert process.stdout is not None
        assert process.stderr is not None
        return [process.stdout.fileno(), process.stderr.fileno()]

    def _pump_until(self, deadline: float, done: Callable[[], bool]) -> bool:
        """Move data until `done()` or the deadline; whether it was `done`."""
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._pump(min(left, _TICK_S))
        return True

    def _pump(self, timeout_s: float) -> None:
        """Move what can be moved, or wait a little."""
        if not self._selector.get_map():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.process.wait(timeout_s)
            return
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, Stream):
                data = os.read(key.fd, _CHUNK)
                key.data.push(data)
                if not data:
                    self._selector.unregister(key.fileobj)
            else:
                key.data()

    def _listen(self) -> None:
        """Hear the keeper, until it has told how the tool ended."""
        if self._child.link is not None and not self._child.listen():
            self._selector.unregister(self._child.link)

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

    def _is_over(self) -> bool:
        """The tool has ended, and nothing can come from its pipes any more."""
        return self._child.has_ended() and not any(
            isinstance(key.data, Stream) for key in self._selector.get_map().values()
        )

    def _close(self) -> None:
        self._selector.close()
        self._close_lifeline()
        for pipe in (self._child.process.stdout, self._child.process.stderr):
            if pipe is not None:
                pipe.close()
        self._child.close()

    def _close_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
