"""Where bash and programs are found: the rules of Windows on a made-up disk, ours on the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrainllm.agent.shells import (
    find_shell,
    posix_shells,
    resolve_program,
    shell_command,
    windows_program,
    windows_shell,
)
from posttrainllm.runtime.errors import UsageError


def disk(*files: str) -> Callable[[str], bool]:
    return lambda path: path in files


GIT = r"C:\Program Files\Git"


@pytest.mark.parametrize(
    ("env", "files", "found"),
    [
        ({"ProgramFiles": r"C:\Program Files"}, [rf"{GIT}\bin\bash.exe"], rf"{GIT}\bin\bash.exe"),
        ({"PATH": r"D:\Git\cmd"}, [r"D:\Git\cmd\git.exe", r"D:\Git\bin\bash.exe"], r"D:\Git\bin\bash.exe"),
        (
            {"Path": r"x;D:\Git\mingw64\bin"},
            [r"D:\Git\mingw64\bin\git.exe", r"D:\Git\bin\bash.exe"],
            r"D:\Git\bin\bash.exe",
        ),
        (
            {"LOCALAPPDATA": r"C:\Users\me\AppData\Local"},
            [r"C:\Users\me\AppData\Local\Programs\Git\bin\bash.exe"],
            r"C:\Users\me\AppData\Local\Programs\Git\bin\bash.exe",
        ),
        ({"SystemRoot": r"C:\Win"}, [r"C:\Win\System32\wsl.exe"], r"C:\Win\System32\wsl.exe"),
        # The system's bash.exe is WSL's old launcher, and one in a relative folder could be anybody's.
        ({"PATH": r"C:\Windows\System32"}, [r"C:\Windows\System32\bash.exe"], None),
        ({"PATH": r".;tools"}, [r"tools\git.exe", r"bin\bash.exe"], None),
        ({}, [], None),
    ],
)
def test_bash_on_windows(env: dict[str, str], files: list[str], found: str | None) -> None:
    assert windows_shell(env, disk(*files)) == found


def test_wsl_is_asked_for_its_bash() -> None:
    assert shell_command(r"C:\Windows\System32\wsl.exe", "x") == [
        r"C:\Windows\System32\wsl.exe",
        "-e",
        "/bin/bash",
        "-c",
        "x",
    ]
    assert shell_command("/bin/bash", "x") == ["/bin/bash", "-c", "x"]


PATH = {"Path": r'C:\bin;"D:\with space";.;relative'}


@pytest.mark.parametrize(
    ("name", "files", "found"),
    [
        ("git", [r"C:\bin\git.exe"], r"C:\bin\git.exe"),
        ("git.exe", [r"D:\with space\git.exe"], r"D:\with space\git.exe"),
        ("python3.11", [r"C:\bin\python3.11.exe"], r"C:\bin\python3.11.exe"),
        (r"E:\tools\x", [r"E:\tools\x.exe"], r"E:\tools\x.exe"),
    ],
)
def test_programs_on_windows(name: str, files: list[str], found: str) -> None:
    assert windows_program(name, PATH, disk(*files)) == found


def test_on_windows_neither_the_working_folder_nor_a_batch_file_is_run() -> None:
    with pytest.raises(FileNotFoundError, match="no program 'git'"):
        windows_program("git", PATH, disk("git.exe", r".\git.exe", r"relative\git.exe", r"C:\bin\git.cmd"))
    with pytest.raises(PermissionError, match="batch file"):
        windows_program("npm.cmd", PATH, disk(r"C:\bin\npm.cmd"))


@pytest.mark.parametrize("text", ["", "a b", 'say "x"', "back\\slash\\", 'a\\"b', "%PATH%", "^&|<>", "é\n"])
def test_an_argument_on_windows_is_quoted_as_programs_there_read_it(text: str) -> None:
    """By the rules of the C runtime: backslashes count only before a quote."""
    line = subprocess.list2cmdline(["x.exe", text])
    assert _as_the_c_runtime_reads(line) == ["x.exe", text]


def _as_the_c_runtime_reads(line: str) -> list[str]:
    words, word, quoted, slashes, begun = [], "", False, 0, False
    for c in line + " ":
        if c == "\\":
            slashes, begun = slashes + 1, True
            continue
        if c == '"':
            word += "\\" * (slashes // 2)
            if slashes % 2:
                word += '"'
            else:
                quoted = not quoted
            begun = True
        else:
            word += "\\" * slashes
            if c in " \t" and not quoted:
                if begun:
                    words.append(word)
                word, begun = "", False
            else:
                word, begun = word + c, True
        slashes = 0
    return words


@pytest.mark.skipif(os.name != "posix", reason="looks at the real disk")
def test_the_shell_of_this_system(tmp_path: Path) -> None:
    assert find_shell(None) is not None
    assert list(posix_shells({"PATH": "/a:.:b:/c"})) == ["/bin/bash", "/a/bash", "/c/bash"]
    with pytest.raises(UsageError, match="--shell"):
        find_shell(str(tmp_path / "none"))
    assert resolve_program("sh", {"PATH": ".:/bin:/usr/bin"}).endswith("/sh")
    with pytest.raises(FileNotFoundError):
        resolve_program("sh", {"PATH": "."})


def test_the_windows_module_is_importable_everywhere() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import posttrainllm.agent.windows, posttrainllm.agent.executor"], check=False
    )
    assert done.returncode == 0
