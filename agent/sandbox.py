"""A sandbox around a tool, where the system has one: bubblewrap on Linux, seatbelt on macOS.

    reads      everything but the user's secrets (`secrets.py`) and the sockets of the session
    writes     only below the folders that were allowed; /tmp is private and empty
    network    none, unless allowed
    processes  bubblewrap: only its own, and all of them die with the call

A sandbox that was asked for and does not work here is refused with the reason, never replaced by an open
run. Windows has none yet. Seatbelt cannot give a private /tmp: there, writing to /tmp is refused.

It does not protect what may be read: with `--allow-net`, or by its answer, a tool can tell what it read.
It does not bound CPU or memory (`limits.py`), and does not stop an attack on the kernel. Nobody has run the
seatbelt part yet.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..runtime.errors import UsageError
from .secrets import MAC_SERVICES, secret_paths

NAMES = ("off", "auto", "bwrap", "seatbelt")
_PRIVATE = ("/tmp", "/var/tmp", "/run", "/dev/shm")
_RESOLVERS = ("/run/systemd/resolve/stub-resolv.conf", "/run/systemd/resolve/resolv.conf")
_PROGRAMS = {"bwrap": "bwrap", "seatbelt": "sandbox-exec"}
_SYSTEMS = {"bwrap": "linux", "seatbelt": "darwin"}
_FOLDERS = ("/usr/bin", "/bin", "/usr/local/bin", "/run/current-system/sw/bin")
_PROBE_S = 20
_REMEDIES = {
    "bwrap": "install the package bubblewrap, or run where user namespaces are allowed; posttrainllm doctor tells more",
    "seatbelt": "use macOS's own sandbox-exec",
}


@dataclass(frozen=True)
class Sandbox:
    """A way to run a program inside a sandbox. `program` is the absolute path of bwrap or sandbox-exec."""

    kind: str
    program: str
    writable: tuple[Path, ...] = ()
    network: bool = False

    @property
    def relays_sigterm(self) -> bool:
        """Whether the first process passes SIGTERM on: sandbox-exec becomes the tool, bwrap does not."""
        return self.kind != "bwrap"

    def wrap(self, command: Sequence[str], cwd: Path, writable: Sequence[Path] = ()) -> list[str]:
        """`command` inside the sandbox, in `cwd`, with more writable folders than the sandbox's own."""
        roots = [Path(os.path.realpath(path)) for path in (*self.writable, *writable)]
        if self.kind == "seatbelt":
            return [self.program, *seatbelt_arguments(roots, self.network, secret_paths()), *command]
        arguments = bwrap_arguments(roots, self.network, secret_paths(), Path(os.path.realpath(cwd)))
        return [self.program, *arguments, "--", *command]

    def describe(self) -> str:
        """A few words for the start line."""
        writes = ", ".join(map(str, self.writable)) or "nowhere"
        return f"sandbox {self.kind} (writes: {writes}; network: {'yes' if self.network else 'no'})"


def choose_sandbox(name: str, *, writable: Sequence[Path] = (), network: bool = False) -> Sandbox | None:
    """The sandbox of `--sandbox name`, proven to start; None for `off`. Raises UsageError if there is none."""
    if name not in NAMES:
        raise UsageError(f"--sandbox {name}", "no such sandbox", f"one of {', '.join(NAMES)}")
    if name == "off":
        if writable or network:
            flag = "--allow-write" if writable else "--allow-net"
            raise UsageError(flag, "nothing is forbidden without a sandbox", remedy="add --sandbox auto")
        return None
    kind = _kind(name)
    if sys.platform != _SYSTEMS[kind]:
        raise UsageError(f"--sandbox {name}", f"{kind} does not exist on {sys.platform}", "--sandbox auto")
    for folder in writable:
        _check_writable(folder)
    program = find_program(_PROGRAMS[kind])
    if program is None:
        found = f"{_PROGRAMS[kind]} is not installed"
        raise UsageError(f"--sandbox {name}", found, "a sandbox that works", _REMEDIES[kind])
    sandbox = Sandbox(kind, program, tuple(Path(os.path.realpath(path)) for path in writable), network)
    problem = probe(sandbox)
    if problem:
        found = f"{_PROGRAMS[kind]} does not work here: {problem}"
        raise UsageError(f"--sandbox {name}", found, "a sandbox that works", _REMEDIES[kind])
    return sandbox


def probe(sandbox: Sandbox) -> str | None:
    """Why the sandbox cannot start a program here; None if it can."""
    command = sandbox.wrap(["/bin/sh", "-c", "exit 7"], Path("/"))
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_S,
            check=False,
            env={"PATH": os.defpath},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 7:
        return None
    return done.stderr.decode("utf-8", "replace").strip() or f"exit code {done.returncode}"


def bwrap_arguments(writable: Sequence[Path], network: bool, secrets: Sequence[Path], cwd: Path) -> list[str]:
    """The arguments of bwrap up to `--`. Later ones hide earlier ones, so the secrets come last."""
    arguments = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if not network:
        arguments.append("--unshare-net")
    arguments += ["--die-with-parent", "--cap-drop", "ALL", "--ro-bind", "/", "/"]
    private = [name for name in _PRIVATE if os.path.isdir(name) and not os.path.islink(name)]
    for name in private:
        if name != "/dev/shm":
            arguments += ["--tmpfs", name]
    arguments += ["--dev", "/dev", "--proc", "/proc"]
    for name in _RESOLVERS if network else ():
        arguments += ["--ro-bind-try", name, name]
    if any(cwd.is_relative_to(name) for name in private) and str(cwd) not in private:
        arguments += ["--ro-bind", str(cwd), str(cwd)]
    for path in writable:
        arguments += ["--bind", str(path), str(path)]
    for secret in secrets:
        if any(secret.is_relative_to(name) for name in private) and not any(
            secret.is_relative_to(path) for path in (*writable, cwd)
        ):
            continue
        arguments += (
            ["--tmpfs", str(secret)] if os.path.isdir(secret) else ["--ro-bind", os.devnull, str(secret)]
        )
    return [*arguments, "--chdir", str(cwd)]


def seatbelt_arguments(writable: Sequence[Path], network: bool, secrets: Sequence[Path]) -> list[str]:
    """The arguments of sandbox-exec up to the command. Paths are parameters, never part of the profile."""
    lines = [
        "(version 1)",
        "(allow default)",
        "(deny file-write*)",
        '(allow file-write* (literal "/dev/null") (literal "/dev/zero") (literal "/dev/dtracehelper"))',
    ]
    parameters: list[str] = []
    for index, path in enumerate(writable):
        lines.append(f'(allow file-write* (subpath (param "WRITE{index}")))')
        parameters += ["-D", f"WRITE{index}={path}"]
    if not network:
        lines.append("(deny network*)")
    lines.append("(deny appleevent-send)")
    lines += [f'(deny mach-lookup (global-name "{name}"))' for name in MAC_SERVICES]
    for index, path in enumerate(secrets):  # the last rule that matches counts
        lines.append(f'(deny file-read* file-write* (subpath (param "SECRET{index}")))')
        parameters += ["-D", f"SECRET{index}={path}"]
    return ["-p", "\n".join(lines), *parameters]


def find_program(name: str) -> str | None:
    """The system's own `name`, never one from PATH, where a hostile folder could stand first."""
    for folder in _FOLDERS:
        path = f"{folder}/{name}"
        if os.access(path, os.X_OK):
            return path
    return None


def _kind(name: str) -> str:
    if name != "auto":
        return name
    for kind, system in _SYSTEMS.items():
        if sys.platform == system:
            return kind
    raise UsageError(
        "--sandbox auto", f"there is none for {sys.platform}", "Linux or macOS", "use a container or a VM"
    )


def _check_writable(folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError(f"--allow-write {folder}", "no such folder", "a folder")
    real = Path(os.path.realpath(folder))
    for secret in secret_paths():
        if real.is_relative_to(secret):
            raise UsageError(f"--allow-write {folder}", f"{secret} holds secrets", "another folder")
