"""generate(): the decoding loop. Prompt ids in, one `Step` per id out.

Knows ids, text and grammars; knows nothing of turns or tools. The caller joins, prints or records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

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
    (no room for another id).
    """

    id: int
    text: str
    forced: bool
    finish_reason: str | None = None


def generate(
    session: Session,
    prompt: Sequence[int],
    *,
    cache: KVCache,
    sampler: Sampler | None = None,
    max_tokens: int = 256,
    matcher: Matcher | None = None,
    stop: Sequence[int] = (),
) -> Iterator[Step]:
    """Steps that follow `prompt` (all ids of the conversation so far, not only the new ones).

    `cache` may hold any of it: the common prefix is kept, the rest fed. After the last step `cache` holds
    a prefix of prompt + output (a final id that was not fed yet is fed by the next call). At most
    `max_tokens` ids are sampled; forced ids do not count and ride along with the next forward. `stop` is an
    id sequence that ends the output (it is part of the output). Greedy without a `sampler`.

    Raises ContextFullError if the prompt alone does not fit.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; at least one id must be sampled")
    sampler = sampler or Sampler()
    known = min(session.tokenizer.vocab_size, session.vocab_size)
    context = list(prompt)
    held = _Held(Detokenizer(session.tokenizer), list(stop))
    sampled = 0
    reason: str | None = None
    forced = matcher.force() if matcher else []
    while True:
        context += forced
        for token in forced:
            yield from held.push(token, forced=True)
        if matcher and matcher.finished:
            reason = "stop"
        elif sampled >= max_tokens:
            reason = "length"
        elif len(context) > len(prompt) and len(context) >= cache.max_length:
            reason = "context"
        if reason:
            break
        logits = session.prefill(context, cache)
        token = sampler.sample(_masked(logits, known, matcher))
        sampled += 1
        context.append(token)
        if matcher:
            matcher.accept(token)
        yield from held.push(token, forced=False)
        if held.stopped:
            reason = "stop"
            break
        forced = matcher.force() if matcher else []
    yield from held.finish(reason)


def _masked(logits: NDArray[np.float32], known: int, matcher: Matcher | None) -> NDArray[np.float32]:
    """`logits` [V] with -inf where an id is forbidden or unknown to the tokenizer."""
    if matcher:
        masked: NDArray[np.float32] = np.where(matcher.allowed(), logits, np.float32(-np.inf))
        return masked
    if known < logits.size:
        logits = logits.copy()
        logits[known:] = -np.inf
    return logits


class _Held:
    """Steps that may not go out yet: the last one (it may turn out to be final) and a possible stop."""

    def __init__(self, detokenizer: Detokenizer, stop: list[int]) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._tail: list[int] = []
        self._waiting: list[Step] = []
        self.stopped = False

    def push(self, token: int, *, forced: bool) -> Iterator[Step]:
        self._waiting.append(Step(token, "", forced))
        self._tail = [*self._tail, token][-max(len(self._stop), 1) :]
        self.stopped = bool(self._stop) and self._tail == self._stop
        if not self.stopped:
            yield from self._release(max(1, self._possible_stop()))

    def finish(self, reason: str | None) -> Iterator[Step]:
        """The rest, the last step with `reason`; ids of a stop sequence carry no text."""
        yield from self._release(len(self._stop) if self.stopped else 1)
        if not self._waiting:
            return
        *before, last = self._waiting
        if not self.stopped:
            last = replace(last, text=self._detokenizer.push(last.id))
        yield from before
        yield replace(last, text=last.text + self._detokenizer.flush(), finish_reason=reason)

    def _release(self, keep: int) -> Iterator[Step]:
        while len(self._waiting) > keep:
            step = self._waiting.pop(0)
            yield replace(step, text=self._detokenizer.push(step.id))

    def _possible_stop(self) -> int:
        """Length of the longest tail that the stop sequence starts with."""
        for length in range(min(len(self._stop) - 1, len(self._tail)), 0, -1):
            if self._tail[-length:] == self._stop[:length]:
                return length
        return 0
