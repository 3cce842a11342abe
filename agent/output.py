"""A tool's output: read with bounded memory, shown with its middle left out.

What is kept of a stream is its head and its tail, because the first lines say what ran and the last ones
how it ended. Between them stands `…[truncated N bytes]`, where N counts the bytes that are not shown.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass

OUTPUT_LIMIT = 8192  # bytes of UTF-8 that the model gets of one stream


@dataclass(frozen=True)
class CappedText:
    """Output as text; `dropped` counts the bytes that are not in it, `replaced` says bad UTF-8 was met."""

    text: str
    dropped: int
    replaced: bool


class Stream:
    """The first and the last bytes of an output, and how many there were in all.

    Holds less than four times `limit` bytes, however much is pushed.
    """

    def __init__(self, limit: int = OUTPUT_LIMIT) -> None:
        self.total = 0
        self._limit = limit
        self._head = bytearray()
        self._tail = bytearray()

    def push(self, data: bytes) -> None:
        """Take more output in."""
        self.total += len(data)
        room = self._limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data[-self._limit :] if self._limit else b""
        if len(self._tail) > 2 * self._limit:
            del self._tail[: -self._limit]

    def text(self) -> CappedText:
        """At most `limit` bytes of UTF-8, and the mark of what was left out between them.

        Cuts are on character boundaries. What is not UTF-8 becomes U+FFFD, three bytes, which count
        against the limit.
        """
        head, tail = bytes(self._head), bytes(self._tail)
        whole = head + tail
        if len(whole) == self.total:
            text = whole.decode("utf-8", "replace")
            if len(text.encode()) <= self._limit:
                return CappedText(text, 0, _is_damaged(whole))
            tail = whole  # what does not fit as a head may still be part of the tail
        first, kept = _longest_start(head, self._limit - self._limit // 2)
        tail = tail[max(0, len(tail) - (self.total - kept)) :]
        last, shown = _longest_end(tail, self._limit - len(first.encode()))
        dropped = self.total - kept - shown
        damaged = _is_damaged(head[:kept]) or _is_damaged(tail[len(tail) - shown :])
        return CappedText(f"{first}…[truncated {dropped} bytes]{last}", dropped, damaged)


def cap_output(data: bytes, limit: int = OUTPUT_LIMIT) -> CappedText:
    """An output that is in memory already, as a `Stream` of that limit shows it."""
    stream = Stream(limit)
    stream.push(data)
    return stream.text()


def _longest_start(data: bytes, limit: int) -> tuple[str, int]:
    """The longest start of `data` whose text has at most `limit` bytes, and how many bytes it stands for."""
    low, high = 0, min(len(data), limit)
    while low < high:
        middle = (low + high + 1) // 2
        if len(_whole_characters(data[:middle])[0].encode()) <= limit:
            low = middle
        else:
            high = middle - 1
    return _whole_characters(data[:low])


def _longest_end(data: bytes, limit: int) -> tuple[str, int]:
    """The longest end of `data` whose text has at most `limit` bytes, and how many bytes it stands for."""
    low, high = 0, min(len(data), limit)
    while low < high:
        middle = (low + high + 1) // 2
        if len(_from_boundary(data, middle).decode("utf-8", "replace").encode()) <= limit:
            low = middle
        else:
            high = middle - 1
    end = _from_boundary(data, low)
    return end.decode("utf-8", "replace"), len(end)


def _from_boundary(data: bytes, size: int) -> bytes:
    """The last `size` bytes of `data`, less those that finish a character begun before them."""
    start = len(data) - size
    for _ in range(3):
        if start < len(data) and data[start] & 0xC0 == 0x80:
            start += 1
    return data[start:]


def _whole_characters(data: bytes) -> tuple[str, int]:
    """The text of `data` without a character cut off at its end, and how many bytes that text stands for."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    return text, len(data) - len(decoder.getstate()[0])


def _is_damaged(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return True
    return False
