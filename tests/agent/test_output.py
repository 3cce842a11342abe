"""The cap of a tool's output: head and tail on character boundaries, every byte accounted for."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrainllm.agent.output import OUTPUT_LIMIT, Stream, cap_output

MARK = re.compile("…\\[truncated ([0-9]+) bytes\\]")


def test_the_limit_is_eight_kilobytes() -> None:
    assert OUTPUT_LIMIT == 8192


def test_head_and_tail_are_kept_and_the_middle_is_counted() -> None:
    capped = cap_output(b"a" * 9000 + b"b" * 9000)
    assert capped.text == "a" * 4096 + f"…[truncated {18000 - 8192} bytes]" + "b" * 4096
    assert (capped.dropped, capped.replaced) == (18000 - 8192, False)


def test_p80_a_cut_inside_a_character_keeps_the_boundary() -> None:
    capped = cap_output(b"a" * 4095 + "é".encode() * 4000)
    assert capped.text == "a" * 4095 + f"…[truncated {8000 - 4096} bytes]" + "é" * 2048
    assert not capped.replaced
    capped = cap_output(b"a" * 8191 + "é".encode())
    assert capped.text == "a" * 4096 + "…[truncated 1 bytes]" + "a" * 4094 + "é"


@pytest.mark.parametrize("size", [0, 1, 8191, 8192])
def test_output_up_to_the_limit_is_whole(size: int) -> None:
    capped = cap_output(b"x" * size)
    assert (capped.text, capped.dropped) == ("x" * size, 0)


def test_p81_bytes_that_are_not_utf8_are_replaced_and_flagged_one_by_one() -> None:
    assert cap_output(b"caf\xe9 ol\xc3\xa9\n").text == "caf\ufffd olé\n"
    assert cap_output(b"caf\xe9").replaced
    assert not cap_output("\ufffd é".encode()).replaced


def test_much_output_takes_little_memory() -> None:
    stream = Stream(100)
    for _ in range(1000):
        stream.push(b"x" * 5000)
        assert len(stream._head) + len(stream._tail) <= 400
    assert stream.text().dropped == 5_000_000 - 100


@settings(deadline=None, max_examples=400)
@given(
    pieces=st.lists(st.binary(max_size=20) | st.text(max_size=10).map(str.encode), max_size=8),
    limit=st.integers(0, 60),
)
def test_capped_text_fits_and_accounts_for_every_byte(pieces: list[bytes], limit: int) -> None:
    data = b"".join(pieces)
    stream = Stream(limit)
    for piece in pieces:
        stream.push(piece)
    capped = stream.text()
    assert capped == cap_output(data, limit), "how the output was cut into pieces is of no account"
    parts = MARK.split(capped.text)
    if not capped.dropped:
        assert capped.text == data.decode("utf-8", "replace")
        return
    head, count, tail = parts
    assert int(count) == capped.dropped
    assert len((head + tail).encode()) <= limit
    # Some split of the shown bytes gives this very text: nothing was shown twice, nothing invented.
    shown = len(data) - capped.dropped
    assert any(
        (data[:cut].decode("utf-8", "replace"), data[len(data) - shown + cut :].decode("utf-8", "replace"))
        == (head, tail)
        for cut in range(shown + 1)
    )


@settings(deadline=None)
@given(text=st.text(max_size=80), limit=st.integers(0, 60))
def test_sound_text_stays_sound(text: str, limit: int) -> None:
    capped = cap_output(text.encode(), limit)
    assert not capped.replaced
    if capped.dropped:
        head, _, tail = MARK.split(capped.text)
        assert text.startswith(head)
        assert text.endswith(tail)
        assert len((head + tail).encode()) > limit - 8, "at most the rest of a character is lost at each cut"
