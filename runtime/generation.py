"""generate(): the decoding loop. Prompt ids in, one `Step` per id out.

Knows ids, text and grammars; knows nothing of turns or tools. The caller joins, prints or records.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .drafts import Drafter
from .grammar import Matcher
from .kv_cache import KVCache
from .sampler import Sampler
from .session import Session
from .tokenizer import Detokenizer


@dataclass(frozen=True)
class Step:
    """One id of the output.

    `text` is what the id completed (empty while a character is incomplete, and for the ids of a stop
    sequence). `forced`: the grammar left no choice, nothing was sampled. `finish_reason` is set on the
    last step only: "stop" (grammar closed, or stop sequence), "length" (max_tokens sampled), "context"
    (no room for another id). `logprob`, of sampled ids and only where asked for: the natural logarithm of the
    probability that the model itself gives the id, before any grammar, temperature or filter.
    """

    id: int
    text: str
    forced: bool
    finish_reason: str | None = None
    logprob: float | None = None


def generate(
    session: Session,
    prompt: Sequence[int],
    *,
    cache: KVCache,
    sampler: Sampler | None = None,
    max_tokens: int = 256,
    matcher: Matcher | None = None,
    stop: Sequence[int] = (),
    stop_ids: Collection[int] = (),
    drafter: Drafter | None = None,
    logprobs: bool = False,
) -> Generator[Step, None, None]:
    """Steps that follow `prompt` (all ids of the conversation so far, not only the new ones).

    `cache` may hold any of it: the common prefix is kept, the rest fed. After the last step `cache` holds
    a prefix of prompt + output (a final id that was not fed yet is fed by the next call). At most
    `max_tokens` ids are sampled; forced ids do not count and ride along with the next forward. So do the guesses of
    a `drafter`, which save a forward for each one that comes true and change nothing else. `stop` is an
    id sequence that ends the output (it is part of the output), and so does any one of `stop_ids`. Greedy without
    a `sampler`. `logprobs` fills `Step.logprob`.

    Raises ContextFullError if the prompt alone does not fit.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; at least one id must be sampled")
    sampler = sampler or Sampler()
    known = min(session.tokenizer.vocab_size, session.vocab_size)
    context = list(prompt)
    output = _Output(Detokenizer(session.tokenizer), list(stop), frozenset(stop_ids))
    sampled = 0
    draft = _Draft(drafter, matcher)
    batch = [Step(token, "", forced=True) for token in matcher.force()] if matcher else []
    try:
        while True:
            context += [step.id for step in batch]
            reason = None
            if output.ends_with_stop(batch) or (matcher and matcher.finished):
                reason = "stop"
            elif sampled >= max_tokens:
                reason = "length"
            elif len(context) > len(prompt) and len(context) >= cache.max_length:
                reason = "context"
            yield from output.push(batch, reason)
            if reason:
                return
            if not draft.followed_by([step.id for step in batch]):
                ids = draft.make(context, cache.max_length - len(context))
                draft.rows = (
                    session.prefill_rows([*context, *ids], cache, len(ids) + 1)
                    if ids
                    else session.prefill(context, cache)[None]
                )
            token = sampler.sample(_masked(draft.row, known, matcher))
            sampled += 1
            logprob = log_probability(draft.row[:known], token) if logprobs else None
            batch = [Step(token, "", forced=False, logprob=logprob)]
            if matcher:
                matcher.accept(token)
                batch += [Step(token, "", forced=True) for token in matcher.force()]
    finally:
        if drafter:
            cache.rewind(cache.common_prefix(context))  # guesses that did not come true


class _Draft:
    """Guesses that were fed behind the context, the logits there, and how far the output has followed them."""

    def __init__(self, drafter: Drafter | None, matcher: Matcher | None) -> None:
        self._drafter = drafter
        self._matcher = matcher
        self._ids: list[int] = []
        self._guessed: list[bool] = []  # the others are what the grammar forces after a guess
        self._followed = 0
        self.rows: NDArray[np.float32] | None = None

    @property
    def row(self) -> NDArray[np.float32]:
        """Logits [V] that choose the next id."""
        assert self.rows is not None
        found: NDArray[np.float32] = self.rows[self._followed]
        return found

    def followed_by(self, ids: list[int]) -> bool:
        """Whether the next `ids` of the output are those of the draft, so that `row` needs no run."""
        if self.rows is None or ids != self._ids[self._followed : self._followed + len(ids)]:
            return False
        self._followed += len(ids)
        return True

    def make(self, context: list[int], limit: int) -> list[int]:
        """At most `limit` new ids: what the drafter proposes, as far as the grammar admits it, and what that forces."""
        if self._drafter is None:
            return []
        if self._ids:
            self._drafter.learn(sum(self._guessed), sum(self._guessed[: self._followed]))
        self._ids, self._guessed, self._followed = [], [], 0
        proposed = self._drafter.propose(context) if limit > 0 else []
        if self._matcher is None:
            self._add(proposed, guessed=True)
        elif proposed:
            self._follow(self._matcher.copy(), proposed)
        del self._ids[max(limit, 0) :], self._guessed[max(limit, 0) :]
        return self._ids

    def _follow(self, matcher: Matcher, proposed: list[int]) -> None:
        while proposed and matcher.admits(proposed[0]):
            token, *proposed = proposed
            matcher.accept(token)
            self._add([token], guessed=True)
            forced = matcher.force()
            self._add(forced, guessed=False)
            if proposed[: len(forced)] != forced[: len(proposed)]:
                return
            proposed = proposed[len(forced) :]

    def _add(self, ids: list[int], *, guessed: bool) -> None:
        self._ids += ids
        self._guessed += [guessed] * len(ids)


def log_probability(logits: NDArray[np.float32], token: int) -> float:
    """Natural logarithm of the softmax of `logits` [V] at `token`."""
    spread = logits - logits.max()
    return float(spread[token]) - math.log(float(np.exp(spread).sum(dtype=np.float64)))


def _masked(logits: NDArray[np.float32], known: int, matcher: Matcher | None) -> NDArray[np.float32]:
    """`logits` [V] with -inf where an id is forbidden or unknown to the tokenizer."""
    if matcher:
        masked: NDArray[np.float32] = np.where(matcher.allowed(), logits, np.float32(-np.inf))
        return masked
    if known < logits.size:
        logits = logits.copy()
        logits[known:] = -np.inf
    return logits


class _Output:
    """Puts text to steps, and holds back those that may turn out to be a stop sequence."""

    def __init__(self, detokenizer: Detokenizer, stop: list[int], stop_ids: frozenset[int]) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._stop_ids = stop_ids
        self._silent = 0
        self._tail: list[int] = []
        self._waiting: list[Step] = []

    def ends_with_stop(self, batch: list[Step]) -> bool:
        """Whether the output, with `batch` added to it, ends with the stop sequence or a stop id."""
        self._tail = [*self._tail, *(step.id for step in batch)][-max(len(self._stop), 1) :]
        if self._stop and self._tail == self._stop:
            self._silent = len(self._stop)
        elif self._stop_ids.intersection(self._tail[-1:]):
            self._silent = 1
        return self._silent > 0

    def push(self, batch: list[Step], reason: str | None) -> Iterator[Step]:
        """Steps that may go out now; all of them when there is a finish `reason`."""
        self._waiting += batch
        keep = self._silent if reason else self._possible_stop()
        while len(self._waiting) > keep:
            step = self._waiting.pop(0)
            text = self._detokenizer.push(step.id)
            if reason and not self._waiting:
                yield replace(step, text=text + self._detokenizer.flush(), finish_reason=reason)
            else:
                yield replace(step, text=text)
        if reason and self._waiting:
            yield from self._waiting[:-1]
            yield replace(self._waiting[-1], text=self._detokenizer.flush(), finish_reason=reason)

    def _possible_stop(self) -> int:
        """Length of the longest end of the output that the stop sequence begins with."""
        for length in range(min(len(self._stop) - 1, len(self._tail)), 0, -1):
            if self._tail[-length:] == self._stop[:length]:
                return length
        return 0
