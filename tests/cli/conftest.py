"""The command as a user runs it: a real process, its own cache folder, both streams kept apart."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    """Where the command keeps exported models in this test."""
    return tmp_path / "cache"


@pytest.fixture
def run(cache_dir: Path, tmp_path: Path) -> Run:
    """run("agent", "--single", "x", stdin="", env={}) -> the finished process, text as UTF-8."""

    def run_command(
        *arguments: object, stdin: str = "", env: Mapping[str, str] | None = None, cwd: Path = tmp_path
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "posttrainllm", *map(str, arguments)],
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            cwd=cwd,
            env={**os.environ, "POSTTRAINLLM_CACHE_DIR": str(cache_dir), **(env or {})},
            timeout=120,
            check=False,
        )

    return run_command


def one_line(stderr: str) -> str:
    """The only line of an error. Fails if there are several, or a traceback."""
    lines = [line for line in stderr.splitlines() if line]
    assert len(lines) == 1, stderr
    assert "Traceback" not in stderr
    return lines[0]


@pytest.fixture
def error_line() -> Callable[[str], str]:
    """error_line(stderr) -> the single line that an error may be."""
    return one_line
