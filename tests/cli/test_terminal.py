"""What a person at a terminal sees and types, and text that must not reach the terminal as it is."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrainllm.cli.terminal import AnswerStream, printable

ECHO = Path(__file__).parents[2] / "tools_schemas" / "echo.json"


@given(
    text=st.text(st.characters(exclude_categories=["Cs"])),
    ascii_=st.booleans(),
    size=st.integers(1, 7),
)
def test_an_answer_streams_as_it_is_decoded(text: str, ascii_: bool, size: int) -> None:
    """However the pieces are cut, also inside an escape: nothing twice, nothing lost."""
    raw = json.dumps({"answer": text}, ensure_ascii=ascii_)
    stream = AnswerStream()
    assert "".join(stream.push(raw[start : start + size]) for start in range(0, len(raw), size)) == text


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ('{"answer": "\\ud83d x"}', "\ufffd x"),  # half a pair
        ('{"answer": "\\ud83d\\n"}', "\ufffd\n"),
        ('{"answer": "\\ude00"}', "\ufffd"),
        ('{"tool": "x", "arguments": {"answer": "no"}}', ""),
        ("plain", ""),
    ],
)
def test_what_is_no_whole_character_or_no_answer(raw: str, text: str) -> None:
    stream = AnswerStream()
    assert "".join(stream.push(character) for character in raw) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_are_shown_on_a_terminal_not_obeyed() -> None:
    hostile = "a\x1b]0;title\x07\x1b[2J\r\x9b31m é\n\t"
    assert printable(hostile, Terminal()) == "a\\x1b]0;title\\x07\\x1b[2J\\x0d\\x9b31m é\n\t"
    assert printable(hostile, io.StringIO()) == hostile, "a file or a pipe gets the text itself"


def test_a_person_at_a_terminal_can_quit(make_bundle: Callable[..., Path]) -> None:
    """The prompt needs a real terminal: one is made, typed into, and ended with Ctrl-D."""
    pty = pytest.importorskip("pty", reason="no pseudo-terminals on this system")
    bundle = make_bundle(d_model=32, heads=4, layers=2, ctx=2048)
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "posttrainllm",
            "agent",
            str(bundle),
            "--tools",
            str(ECHO),
            "--max-tokens",
            "5",
        ],
        stdin=child,
        stdout=child,
        stderr=child,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(child)
    seen = b""
    sent = 0
    script = [(b"you>", b"hello\r"), (b"stopped (tokens)", b""), (b"you>", b"\x04")]
    try:
        while sent < len(script):
            seen += os.read(parent, 4096)
            if script[sent][0] in seen:
                seen = seen.split(script[sent][0], 1)[1]
                os.write(parent, script[sent][1])
                sent += 1
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        os.close(parent)
