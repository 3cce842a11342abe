"""Checks of what is promised about tools, each proven by running one: `posttrainllm doctor` prints them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..runtime.doctor import Check
from ..runtime.errors import UsageError
from .executor import CommandBackend
from .limits import ResourceLimits
from .process import keeper_command
from .sandbox import Sandbox, choose_sandbox
from .secrets import secret_paths
from .shells import find_shell
from .tools import Tool, ToolResult

_ODD = 'it\'s "$(id)" é\n'
_GONE_S = 5.0
# A tool that ignores SIGTERM, with a child in the group and one that left it.
_STUBBORN = "trap '' TERM; sleep 600 & echo $!; {leave} sleep 600 & echo $!; echo $$; sleep 600"
_AGENT = """
import sys
from posttrainllm.agent.executor import CommandBackend
from posttrainllm.agent.tools import Tool
CommandBackend(60).call(Tool("t", exec=sys.argv[1]), {})
"""


def tool_checks() -> Iterator[Check]:
    """Shell, environment, the end of processes, bounds, sandbox."""
    shell = find_shell(None)
    if shell is None:
        yield Check("shell", "absent", "no bash here; only tools with _exec_argv run (or name one: --shell)")
        return
    with tempfile.TemporaryDirectory(prefix="posttrainllm-doctor-") as name:
        folder = Path(os.path.realpath(name))
        yield _shell(shell)
        yield _environment()
        if os.name == "posix":
            yield _timeout()
            yield _death(folder)
            yield _bounds(folder)
        yield from _sandbox(folder)


def _run(template: str, backend: CommandBackend, **arguments: str) -> ToolResult:
    return backend.call(Tool("t", exec=template, exec_args=tuple(arguments)), arguments)


def _shell(shell: str) -> Check:
    result = _run('printf %s "$x"', CommandBackend(), x=_ODD)
    if result.stdout != _ODD:
        return Check("shell", "failed", f"{shell}: an argument arrived as {result.stdout!r} {result.stderr}")
    return Check("shell", "ok", f"{shell}; an odd argument arrived byte for byte")


def _environment() -> Check:
    name = "POSTTRAINLLM_DOCTOR_SECRET"
    os.environ[name] = "s3cr3t"
    try:
        seen = _run("env", CommandBackend()).stdout
    finally:
        del os.environ[name]
    if "s3cr3t" in seen:
        return Check("environment", "failed", "a tool saw a variable that it was not given")
    return Check("environment", "ok", "a tool does not see your variables")


def _timeout() -> Check:
    leave = "setsid" if sys.platform == "linux" and keeper_command() else ""
    started = time.monotonic()
    result = _run(_STUBBORN.format(leave=leave), CommandBackend(timeout_s=0.5))
    taken = time.monotonic() - started
    left = _survivors(int(word) for word in result.stdout.split())
    if not result.timed_out or left:
        return Check("end of a tool", "failed", f"timed out: {result.timed_out}; still running: {left}")
    reach = "also what left its group" if leave else "its process group"
    return Check("end of a tool", "ok", f"killed {taken - 0.5:.1f} s after its deadline, {reach}")


def _death(folder: Path) -> Check:
    """Kill -9 a program that runs a tool, and look for the tool."""
    leave = "setsid" if sys.platform == "linux" and keeper_command() else ""
    pids = folder / "pids"
    template = f"({_STUBBORN.format(leave=leave)}) >'{pids}'"
    with subprocess.Popen([sys.executable, "-c", _AGENT, template], stderr=subprocess.DEVNULL) as agent:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and len(_words(pids)) < 3:
            time.sleep(0.05)
        agent.kill()
    found = _words(pids)
    left = _survivors(map(int, found))
    if len(found) < 3:
        return Check("end of the agent", "failed", "the tool did not start")
    if left:
        return Check("end of the agent", "failed", f"outlived an agent that was killed: {left}")
    return Check("end of the agent", "ok", "kill -9 of the agent ends its tool")


def _bounds(folder: Path) -> Check:
    if keeper_command() is None:
        return Check("bounds", "absent", "no Python interpreter here to set bounds for a tool's processes")
    big = folder / "big"
    _run(f"head -c 3000000 /dev/zero >'{big}'", CommandBackend(limits=ResourceLimits(file_mib=1)))
    size = big.stat().st_size if big.exists() else 0
    if size > 1 << 20:
        return Check("bounds", "failed", f"a file grew to {size} bytes; the bound was {1 << 20}")
    return Check("bounds", "ok", "a file did not grow beyond its bound")


def _sandbox(folder: Path) -> Iterator[Check]:
    try:
        sandbox = choose_sandbox("auto")
    except UsageError as error:
        yield Check("sandbox", "absent", str(error))
        return
    assert sandbox is not None
    backend = CommandBackend(timeout_s=10, sandbox=sandbox, cwd=folder)
    if _run("echo works", backend).stdout != "works\n":
        yield Check("sandbox", "failed", f"{sandbox.kind} does not run a tool")
        return
    yield Check("sandbox", "ok", f"{sandbox.kind} at {sandbox.program}")
    yield _blocks_write(backend, sandbox, folder)
    yield _blocks_connection(backend)
    yield _hides_keys(backend)


def _blocks_write(backend: CommandBackend, sandbox: Sandbox, folder: Path) -> Check:
    _run("echo x >refused; mkdir -p allowed; echo x >allowed/file", backend)
    (folder / "allowed").mkdir(exist_ok=True)
    open_folder = Sandbox(sandbox.kind, sandbox.program, (folder / "allowed",))
    _run("echo x >allowed/file", CommandBackend(timeout_s=10, sandbox=open_folder, cwd=folder))
    if (folder / "refused").exists():
        return Check("sandbox: writes", "failed", "a write outside the allowed folders went through")
    if not (folder / "allowed" / "file").exists():
        return Check("sandbox: writes", "failed", "a write inside an allowed folder was refused")
    return Check("sandbox: writes", "ok", "refused outside, done inside an allowed folder")


def _blocks_connection(backend: CommandBackend) -> Check:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]} && echo connected"
        if "connected" not in _run(connect, CommandBackend(timeout_s=10)).stdout:
            return Check("sandbox: network", "absent", "this bash cannot connect at all")
        if "connected" in _run(connect, backend).stdout:
            return Check("sandbox: network", "failed", "a connection went through")
    return Check("sandbox: network", "ok", "a connection was refused")


def _hides_keys(backend: CommandBackend) -> Check:
    for path in secret_paths():
        if _run('[ -d "$x" ] && ls -A "$x" || cat "$x"', backend, x=str(path)).stdout:
            return Check("sandbox: keys", "failed", f"{path} could be read")
    return Check("sandbox: keys", "ok", f"{len(secret_paths())} known places of keys here, none readable")


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def _survivors(pids: Iterable[int]) -> list[int]:
    """Which of the processes still run after a generous time; a zombie does not."""
    deadline = time.monotonic() + _GONE_S
    left = list(pids)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if _runs(pid)]
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
