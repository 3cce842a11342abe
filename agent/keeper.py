"""A process of its own that stands between us and one tool, so that the whole tree ends with the call.

Run by path in a bare interpreter, never imported: `python -I -S keeper.py LINK SCRIPT CPU:MEMORY:FILE MODE
NAMES PROGRAM [ARGUMENT …]`. LINK is a socket to the agent, SCRIPT a pipe that the tool inherits (-1: none),
NAMES the variables that it gets, with commas: an interpreter may have added some of its own.

It bounds what the tool may use, starts it in a process group of its own, tells its exit code on LINK, and
waits. `T` on LINK asks the tool to end. The end of LINK, because the call is over or because the agent died
however abruptly, kills everything. On Linux it is the subreaper of the tree: a process that leaves the group
(setsid, a daemon) is handed to it when its parent dies, is found and killed. Nothing that is not
its own descendant is ever waited for or signalled, so an embedding program's children are not touched.

It does not protect against a tool that kills its keeper (nothing of the same user can), nor reach a process
that runs as another user (sudo). Elsewhere than on Linux only the process group is killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

_SWEEP_S = 10.0  # how long to go on killing a tree that goes on forking; the agent does not wait so long
_PR_SET_CHILD_SUBREAPER = 36
_PLAIN = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_IGNORED_BY_PYTHON = tuple(
    getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ", "SIGXFZ") if hasattr(signal, name)
)


def main(args: list[str]) -> int:
    """Keep one tool. Always 0: the tool's exit code goes over the link."""
    link, script, limits, mode, names, *argv = args
    environment = {name: os.environ[name] for name in names.split(",") if name in os.environ}
    keeper = _Keeper(int(link), spare_leader=mode == "spare")
    _limit(limits)
    _adopt_orphans()
    try:
        keeper.start(argv, int(script), environment)
    except OSError as error:
        keeper.tell(f"error {error.errno}")
        return 0
    keeper.keep()
    keeper.kill_all()
    return 0


class _Keeper:
    """The tool's process and the link. `spare_leader`: the leader would end at SIGTERM without passing it on."""

    def __init__(self, link: int, *, spare_leader: bool) -> None:
        self._link = link
        self._spare_leader = spare_leader
        self._tool = 0
        self._ended = False
        os.set_inheritable(link, False)
        self._wake, wake = os.pipe()
        for end in (self._wake, wake):
            os.set_blocking(end, False)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # a thread of the agent may have blocked SIGCHLD
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in _PLAIN:
            signal.signal(number, signal.SIG_IGN)

    def start(self, argv: list[str], script: int, environment: dict[str, str]) -> None:
        """Start the tool, then hold nothing of its own open: its pipes must end with it."""
        default = [*_PLAIN, *_IGNORED_BY_PYTHON]
        self._tool = os.posix_spawnp(
            argv[0], argv, environment, setpgroup=0, setsigmask=[], setsigdef=default
        )
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        if script >= 0:
            os.close(script)

    def tell(self, text: str) -> None:
        """One line to the agent, if it is still there."""
        with contextlib.suppress(OSError):
            os.write(self._link, f"{text}\n".encode())

    def keep(self) -> None:
        """Until the link ends."""
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        self._reap()
        while True:
            ready = [number for number, _ in poll.poll()]
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                self._reap()
            if self._link in ready:
                try:
                    order = os.read(self._link, 64)
                except OSError:
                    return
                if not order:
                    return
                self._terminate()

    def kill_all(self) -> None:
        """SIGKILL for the group, then for every descendant until none is left, for a bounded time."""
        self._signal_group(signal.SIGKILL)
        deadline = time.monotonic() + _SWEEP_S
        while True:
            for pid in descendants(os.getpid()):
                _kill(pid, signal.SIGKILL)
            if not _reap_all() or time.monotonic() > deadline:
                return
            time.sleep(0.002)

    def _terminate(self) -> None:
        if not self._spare_leader:
            self._signal_group(signal.SIGTERM)
            return
        for pid in descendants(os.getpid()):
            if pid != self._tool:
                _kill(pid, signal.SIGTERM)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._tool, number)

    def _reap(self) -> None:
        """Tell of the tool's end. It stays a zombie, so that its group's number is given to nobody else."""
        while not self._ended:
            try:
                pid, code = _next_end(self._tool)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._tool:
                self._ended = True
                self.tell(f"exit {code}")


def _next_end(tool: int) -> tuple[int, int]:
    """A child that has ended, and its exit code (negative: by that signal); (0, 0) if none has."""
    if not hasattr(os, "waitid"):  # macOS, older Pythons
        pid, status = os.waitpid(-1, os.WNOHANG)
        return (pid, os.waitstatus_to_exitcode(status)) if pid else (0, 0)
    found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return 0, 0
    if found.si_pid != tool:
        os.waitpid(found.si_pid, 0)
    by_signal = found.si_code != os.CLD_EXITED
    return found.si_pid, -found.si_status if by_signal else found.si_status


def descendants(root: int) -> list[int]:
    """Process ids of all that `root` and its children started, by /proc; empty where there is none."""
    children: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        children.setdefault(parent, []).append(int(name))
    found = list(children.get(root, []))
    for pid in found:
        found += children.get(pid, [])
    return found


def _reap_all() -> bool:
    """Wait for every child that has ended; whether there are others."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _adopt_orphans() -> None:
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError, ImportError):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _limit(text: str) -> None:
    """Bound this process, whose children inherit it. What a system cannot bound stays unbound."""
    import resource

    cpu, memory, file = (int(part) for part in text.split(":"))
    for kind, value, grace in (
        (resource.RLIMIT_CPU, cpu, 5),  # SIGXCPU first, SIGKILL five seconds later
        (resource.RLIMIT_AS, memory, 0),
        (resource.RLIMIT_FSIZE, file, 0),
    ):
        if value:
            _lower(kind, value, grace)
    _lower(resource.RLIMIT_CORE, 0, 0)


def _lower(kind: int, value: int, grace: int) -> None:
    import resource

    _, hard = resource.getrlimit(kind)
    most = value + grace if hard == resource.RLIM_INFINITY else min(value + grace, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(kind, (min(value, most), most))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
