"""Drafts: ids that probably come next, to be checked by the same run of the model that makes the next id.

A draft changes how much is fed at once and nothing else. Every id of the output is still chosen from the model's
own logits at its place, by the same sampler with as many draws: what a draft got right is an id
for which no run of its own is needed. Prompt lookup is from "Prompt Lookup Decoding" (A. Saxena, 2023), the check of
several ids in one run from "Fast Inference from Transformers via Speculative Decoding" (Leviathan et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

SHORTEST_MATCH = 2
LONGEST_MATCH = 6
LONGEST_DRAFT = 8
_CANDIDATES = 32  # places that are compared, the latest first
# What a further id in a run costs, as a share of a run of one id (docs/decisions/0012).
_COST = {"fp32": 0.09, "fp16": 0.09, "int8": 0.11, "int4": 0.21}
_OTHER_COST = 0.15
# How often an id drafted after a match of that many ids is right, before anything is known.
_PRIORS = {2: 0.4, 3: 0.5, 4: 0.6, 5: 0.7, 6: 0.8}
_RATE = 0.15  # of learning
_RETURN = 0.02  # back to the prior, each time that no draft was worth it


class Drafter(Protocol):
    """Guesses what follows."""

    def propose(self, ids: Sequence[int]) -> list[int]:
        """What may follow `ids`; empty where guessing does not pay."""

    def learn(self, proposed: int, right: int) -> None:
        """Of the last proposal the first `proposed` ids were fed, and the first `right` of them came true."""


class PromptLookup:
    """Drafts what followed the last ids where they occurred before: results are quoted, names come again.

    `precision` is that of the bundle and decides what a guess costs. One conversation, one thread.
    """

    def __init__(self, precision: str) -> None:
        self._cost = _COST.get(precision, _OTHER_COST)
        self._hits = dict(_PRIORS)
        self._ids: list[int] = []
        self._places: dict[tuple[int, int], list[int]] = {}  # a pair of ids to where it ends
        self._match = SHORTEST_MATCH

    @property
    def state(self) -> list[float]:
        """What was learned, which decides the length of later drafts. Can be set; raises ValueError."""
        return [self._hits[length] for length in sorted(self._hits)]

    @state.setter
    def state(self, hits: Sequence[float]) -> None:
        if len(hits) != len(_PRIORS) or not all(0 <= hit <= 1 for hit in hits):
            raise ValueError(f"not {len(_PRIORS)} shares from 0 to 1")
        self._hits = dict(zip(sorted(_PRIORS), map(float, hits), strict=True))

    def propose(self, ids: Sequence[int]) -> list[int]:
        """As `Drafter.propose`: at most LONGEST_DRAFT ids."""
        self._index(ids)
        end, self._match = self._longest_match()
        if not self._match:
            return []
        count = best_length(self._hits[self._match], self._cost)
        if not count:
            prior = _PRIORS[self._match]
            self._hits[self._match] += _RETURN * (prior - self._hits[self._match])
        return self._ids[end + 1 : end + 1 + count]

    def learn(self, proposed: int, right: int) -> None:
        """As `Drafter.learn`; what was not reached says nothing."""
        for place in range(min(proposed, right + 1)):
            self._hits[self._match] += _RATE * ((place < right) - self._hits[self._match])

    def _index(self, ids: Sequence[int]) -> None:
        """Bring the index of pairs up to `ids`; the very last pair is left out, since nothing follows it."""
        known = len(self._ids)
        if known > len(ids) or self._ids != list(ids[:known]):
            self._ids, self._places, known = [], {}, 0
        self._ids += ids[known:]
        for place in range(max(known - 1, 1), len(self._ids) - 1):
            self._places.setdefault((self._ids[place - 1], self._ids[place]), []).append(place)

    def _longest_match(self) -> tuple[int, int]:
        """Where the longest match ends and its length; length 0 if there is none."""
        ids, best, length = self._ids, 0, 0
        if len(ids) < SHORTEST_MATCH:
            return 0, 0
        for end in reversed(self._places.get((ids[-2], ids[-1]), [])[-_CANDIDATES:]):
            found = SHORTEST_MATCH
            while found < min(LONGEST_MATCH, end + 1) and ids[end - found] == ids[-1 - found]:
                found += 1
            if found > length:
                best, length = end, found
            if length == LONGEST_MATCH:
                break
        return best, length


def best_length(hit: float, cost: float) -> int:
    """How many ids to draft if each is right with probability `hit` and costs `cost` of a run; 0 if none pays.

    With n guesses a run gives 1 + hit + hit² + … + hitⁿ ids for 1 + n · cost.
    """
    best, best_gain, expected = 0, 1.0, 1.0
    for count in range(1, LONGEST_DRAFT + 1):
        expected += hit**count
        gain = expected / (1 + count * cost)
        if gain > best_gain:
            best, best_gain = count, gain
    return best
