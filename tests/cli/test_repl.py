"""The chat: commands over piped lines, and a person at a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


def chat(cache_dir: Path, *lines: str, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "posttrainllm", "agent", "demo", *arguments],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | {"POSTTRAINLLM_CACHE_DIR": str(cache_dir)},
        check=False,
    )


def test_commands_over_a_pipe(cache_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "a session.kv"
    first = chat(
        cache_dir, "What is 6*7?", ":context", ":tools", ":help", f":save {file}", ":quit", "never said"
    )
    assert first.returncode == 0, first.stderr
    assert "42" in first.stdout
    assert "never said" not in first.stdout + first.stderr
    assert " of 1024 tokens held (" in first.stderr
    assert "- calculate(expression: string)" in first.stderr
    assert ":load FILE" in first.stderr
    second = chat(cache_dir, f":load {file}", "and 7*7?")
    assert second.returncode == 0, second.stderr
    assert f"from {file}; keys and values restored" in second.stderr
    assert "49" in second.stdout


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (":bogus", 2, ":bogus: no such command; expected :tools"),
        (":save", 2, ":save: no file; expected :save FILE"),
        (":load none.kv", 3, "none.kv"),
        (":save /none/x.kv", 2, "/none/x.kv: cannot be written"),
    ],
)
def test_a_mistake_is_one_line_and_the_chat_goes_on(cache_dir: Path, line: str, code: int, said: str) -> None:
    done = chat(cache_dir, line, "What is 2*3?", line)
    assert done.returncode == code
    assert done.stderr.count(said) == 2
    assert "6" in done.stdout


def read_until(terminal: int, expected: bytes) -> bytes:
    """Read what the program prints, and say where the cursor is when it asks, as a terminal does."""
    seen = b""
    while expected not in seen:
        ready, _, _ = select.select([terminal], [], [], 60)
        assert ready, seen
        piece = os.read(terminal, 4096)
        seen += piece
        if b"\x1b[6n" in piece:
            os.write(terminal, b"\x1b[1;1R")
    return seen


@contextlib.contextmanager
def terminal(command: list[str], home: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`command` at a terminal of 24 lines, and our end of it. The process is killed if it is still there."""
    pty = pytest.importorskip("pty", reason="no pseudo-terminals on this system")
    import fcntl
    import termios

    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    environment = os.environ | {"TERM": "xterm", "XDG_STATE_HOME": str(home), "HOME": str(home)}
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment)
    os.close(child)
    try:
        yield process, parent
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def leave(process: subprocess.Popen[bytes], parent: int) -> bytes:
    """Ctrl-D; the rest of what the program prints. It ends with 0."""
    os.write(parent, b"\x04")
    seen = b""
    with contextlib.suppress(OSError):  # Linux's way to say that the other end was closed
        while piece := os.read(parent, 4096):
            seen += piece
    assert process.wait(timeout=30) == 0
    return seen


def test_what_only_begins_with_a_colon_is_said(cache_dir: Path) -> None:
    done = chat(cache_dir, ":) hello")
    assert "no such command" not in done.stderr
    assert "agent> " in done.stdout


def test_resume_goes_on_where_a_chat_was_left(run: Run, cache_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "s.kv"
    chat(cache_dir, "What is 6*7?", f":save {file}")
    done = run("agent", "demo", "--resume", file, "--single", "and 7*7?", "--json-out")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found[0]["turn"] == 1
    assert next(event for event in found if event["type"] == "assistant")["cached_tokens"] > 200
    other = run("agent", "echo", "--resume", file, "--single", "x")
    assert other.returncode == 3
    assert "saved with the weights" in other.stderr.splitlines()[-1]
    assert run("agent", "demo", "--resume", tmp_path / "none", "--single", "x").returncode == 3


CHAT = [sys.executable, "-m", "posttrainllm", "agent", "demo", "--max-tokens", "40"]


def test_a_person_has_a_history_a_status_line_and_many_lines(tmp_path: Path) -> None:
    with terminal(CHAT, tmp_path) as (process, parent):
        read_until(parent, b"of 1024 tokens held")
        os.write(parent, b"What is\x1b\r6*7?\r")  # Alt-Enter, then Enter
        read_until(parent, b"tok/s")
        os.write(parent, b":context\r")
        read_until(parent, b"agent: ")
        read_until(parent, b"you>")
        os.write(parent, b"\x1b[200~What is\n7*7?\x1b[201~")  # pasted lines wait for Enter
        read_until(parent, b"7*7?")
        os.write(parent, b"\r")
        read_until(parent, b"agent> ")
        read_until(parent, b"you>")
        leave(process, parent)
    (history,) = tmp_path.rglob("history")
    assert "+What is\n+6*7?\n" in history.read_text()
    assert "+What is\n+7*7?\n" in history.read_text(), "pasted lines are one entry"
    assert history.stat().st_mode & 0o077 == 0, "nobody else reads it"


def test_a_history_that_cannot_be_kept_costs_no_conversation(tmp_path: Path) -> None:
    folder = tmp_path / "posttrainllm"
    folder.mkdir()
    history = folder / "history"
    history.touch(0o644)
    full_disk = ["bash", "-c", f"ulimit -f 0; exec {shlex.join(CHAT)}"]  # no file can grow
    with terminal(full_disk, tmp_path) as (process, parent):
        read_until(parent, b"of 1024 tokens held")
        os.write(parent, b"What is 6*7?\r")
        seen = read_until(parent, b"tok/s")
        seen += leave(process, parent)
    assert b"Unhandled exception" not in seen
    assert history.read_bytes() == b""
    assert history.stat().st_mode & 0o077 == 0, "made private, though it was not"
