"""How fast a model runs here: load, first token, prefill and decode at several context lengths, memory.

Ids are drawn at random: what they are does not matter to the time, and nothing is skipped because it was seen before.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .kv_cache import KVCache
from .session import Session

CONTEXTS = (128, 512, 1800)
PROMPT = 128  # ids, of which the time to the first token is told
STEPS = 32  # decoded at each context, one by one
ROUNDS = 5


@dataclass(frozen=True)
class Spread:
    """Tokens a second: the median of the rounds, the slowest and the fastest."""

    median: float
    slowest: float
    fastest: float


@dataclass
class Figures:
    """Contexts that do not fit are left out. Bytes, seconds, tokens a second."""

    provider: str
    threads: int
    first_token_s: float  # of a prompt of `prompt` ids
    prompt: int
    kv_bytes: int
    prefill: dict[int, Spread] = field(default_factory=dict)
    decode: dict[int, Spread] = field(default_factory=dict)
    peak_rss: int | None = None


def measure(
    session: Session,
    *,
    contexts: Sequence[int] = CONTEXTS,
    rounds: int = ROUNDS,
    progress: Callable[[str], None] = lambda text: None,
) -> Figures:
    """Run `session` at each of `contexts` that leaves room for the steps."""
    fitting = [length for length in contexts if length + STEPS <= session.context_length]
    known = min(session.vocab_size, session.tokenizer.vocab_size)
    ids = np.random.default_rng(0).integers(0, known, max([PROMPT, *fitting])).tolist()
    cache = session.new_cache()
    prompt = ids[: min(PROMPT, session.context_length - 1)]
    session.prefill(ids[:2], cache)  # what the first run does once is not in the figures
    progress("first token")
    first = statistics.median(_prefill_seconds(session, prompt, cache) for _ in range(rounds))
    figures = Figures(session.provider.name, session.threads, first, len(prompt), cache.nbytes)
    for length in fitting:
        prefills, decodes = [], []
        for number in range(rounds):
            progress(f"context {length}, round {number + 1} of {rounds}")
            prefills.append(length / _prefill_seconds(session, ids[:length], cache))
            decodes.append(STEPS / _decode_seconds(session, ids[:length], cache))
        figures.prefill[length], figures.decode[length] = _spread(prefills), _spread(decodes)
    figures.peak_rss = peak_rss()
    return figures


def peak_rss() -> int | None:
    """The most memory that this process had at once, in bytes; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _prefill_seconds(session: Session, ids: list[int], cache: KVCache) -> float:
    """From nothing to the first token behind `ids`."""
    cache.rewind(0)
    began = time.perf_counter()
    int(session.prefill(ids, cache).argmax())
    return time.perf_counter() - began


def _decode_seconds(session: Session, ids: list[int], cache: KVCache) -> float:
    """Greedy steps one by one, behind `ids`, which the cache holds."""
    context, token = list(ids), ids[-1]
    began = time.perf_counter()
    for _ in range(STEPS):
        context.append(token)
        token = int(session.prefill(context, cache).argmax())
    return time.perf_counter() - began


def _spread(values: list[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))
