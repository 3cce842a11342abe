"""Finding bash, and programs for tools that need none; pure but for looking whether files exist.

On Windows bash comes with Git, or with WSL. A `bash.exe` in the system's folder is not looked for on PATH:
it is WSL's, and without a distribution it opens a web page. Nobody has run the Windows part yet.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PureWindowsPath

from ..runtime.errors import UsageError

POSIX_SHELL = "/bin/bash"
# Arguments of a batch file are read by cmd.exe by rules of its own: what looks like data can be a command.
_BATCH = (".bat", ".cmd")
_EXECUTABLE = (".exe", ".com")

IsFile = Callable[[str], bool]


def find_shell(named: str | None) -> str | None:
    """The bash to use: `--shell` if given, else the usual places; None if there is none.

    Raises UsageError if the named one does not exist.
    """
    if named is not None:
        if not os.path.isfile(named):
            raise UsageError(f"--shell {named}", "no such file", "the path of a bash")
        return named
    if sys.platform == "win32":
        return windows_shell(os.environ, os.path.isfile)
    return next((path for path in posix_shells(os.environ) if os.access(path, os.X_OK)), None)


def posix_shells(env: Mapping[str, str]) -> Iterator[str]:
    """Where bash may be; /bin/bash first, then what PATH names (NixOS, BSD)."""
    yield POSIX_SHELL
    for folder in env.get("PATH", "").split(":"):
        if folder.startswith("/"):
            yield f"{folder}/bash"


def windows_shell(env: Mapping[str, str], is_file: IsFile) -> str | None:
    """Git's bash, else WSL's launcher."""
    candidates: list[PureWindowsPath] = []
    for folder in _absolute_folders(env):
        if is_file(str(folder / "git.exe")):  # …\Git\cmd or …\Git\bin or …\Git\mingw64\bin
            candidates += [up / "bin" / "bash.exe" for up in list(folder.parents)[:2]]
    for name, inner in (
        ("ProgramFiles", "Git"),
        ("ProgramFiles(x86)", "Git"),
        ("LOCALAPPDATA", "Programs/Git"),
    ):
        if env.get(name):
            candidates.append(PureWindowsPath(env[name]) / inner / "bin" / "bash.exe")
    candidates.append(PureWindowsPath(env.get("SystemRoot", r"C:\Windows")) / "System32" / "wsl.exe")
    return next((str(path) for path in candidates if is_file(str(path))), None)


def shell_command(shell: str, text: str) -> list[str]:
    """The command line that makes `shell` run `text`."""
    if PureWindowsPath(shell).name.lower() == "wsl.exe":
        return [shell, "-e", POSIX_SHELL, "-c", text]
    return [shell, "-c", text]


def resolve_program(name: str, env: Mapping[str, str]) -> str:
    """The file that `name` means, by absolute folders of PATH only, so never one of the working folder.

    Raises FileNotFoundError; PermissionError for a Windows batch file.
    """
    if sys.platform == "win32":
        return windows_program(name, env, os.path.isfile)
    if "/" in name:
        return name
    for folder in env.get("PATH", os.defpath).split(":"):
        path = f"{folder}/{name}"
        if folder.startswith("/") and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(2, f"no program {name!r} on PATH")


def windows_program(name: str, env: Mapping[str, str], is_file: IsFile) -> str:
    """`resolve_program` by the rules of Windows, but for programs only."""
    path = PureWindowsPath(name)
    folders = [PureWindowsPath()] if path.parent != PureWindowsPath() else list(_absolute_folders(env))
    for folder in folders:
        for suffix in ("", *_EXECUTABLE) if path.suffix else _EXECUTABLE:
            found = str(folder / f"{name}{suffix}")
            if is_file(found):
                if PureWindowsPath(found).suffix.lower() in _BATCH:
                    raise PermissionError(13, f"{name} is a batch file: cmd.exe would read its arguments")
                return found
    raise FileNotFoundError(2, f"no program {name!r} on PATH")


def _absolute_folders(env: Mapping[str, str]) -> Iterator[PureWindowsPath]:
    path = next((value for key, value in env.items() if key.upper() == "PATH"), "")
    for text in path.split(";"):
        folder = PureWindowsPath(text.strip('"'))
        if folder.is_absolute():
            yield folder


def is_shell_there(shell: str | None) -> bool:
    """Whether the file of a shell exists (a host may name any)."""
    return shell is not None and Path(shell).is_file()
