"""Which stretches of a sequence of ids still stand in a rearranged conversation, found by its spans.

Any list of stretches that gives the new beginning is right; this one prefers long runs, so that it shows what
was really kept, where markers that occur in every turn would match anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .conversation import Conversation


@dataclass(frozen=True)
class HeldSpan:
    """A span of a conversation as it was: where it began, and its ids."""

    start: int
    ids: tuple[int, ...]


def held_spans(conversation: Conversation) -> list[HeldSpan]:
    """The spans of `conversation` as they are now (what is being said grows in place)."""
    held, start = [], 0
    for span in conversation.spans:
        held.append(HeldSpan(start, tuple(span.ids)))
        start += len(span.ids)
    return held


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading ids are the same."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def kept_spans(
    held: Sequence[HeldSpan], ids: Sequence[int], conversation: Conversation
) -> list[tuple[int, int]]:
    """[start, end) spans of `ids` (the sequence of `held`) that, joined, begin the ids of `conversation`."""
    new = held_spans(conversation)
    same = common_prefix(ids, conversation.ids)
    kept = [(0, same)] if same else []
    # The span in which the beginnings part counts from there on.
    number = next((i for i, span in enumerate(new) if span.start + len(span.ids) > same), len(new))
    position = next((i for i, span in enumerate(held) if span.start + len(span.ids) > same), len(held))
    done = same
    while number < len(new):
        found, length = _longest(held, position, new, number)
        if not length:
            break
        for old, fresh in zip(held[found : found + length], new[number : number + length], strict=True):
            skipped = done - fresh.start
            start, end = old.start + skipped, old.start + len(old.ids)
            if kept and kept[-1][1] == start:
                kept[-1] = (kept[-1][0], end)
            elif start < end:
                kept.append((start, end))
            done += end - start
        number, position = number + length, found + length
    return kept


def _longest(
    held: Sequence[HeldSpan], position: int, new: Sequence[HeldSpan], number: int
) -> tuple[int, int]:
    """Where in `held`, from `position` on, the longest run of `new` from `number` on stands, and its length."""
    best, length = 0, 0
    for begin in range(position, len(held)):
        run = 0
        while (
            begin + run < len(held)
            and number + run < len(new)
            and held[begin + run].ids == new[number + run].ids
        ):
            run += 1
        if run > length:
            best, length = begin, run
    return best, length
