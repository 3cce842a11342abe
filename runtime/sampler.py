"""Logits to one id: greedy, or temperature, top-k, top-p and min-p, seeded. Pure NumPy.

The filters apply in that order to the distribution after temperature, as in Hugging Face transformers.
top-p: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration"; min-p: Nguyen et al. 2024,
"Turning Up the Heat".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import UsageError


class Sampler:
    """Holds the settings and the random state; one sampler per run makes the run repeatable.

    temperature 0 is greedy (the lowest id wins a tie) and ignores the rest. top_k 0, top_p 1 and min_p 0 are
    off. `seed` None draws one from the system; `self.seed` says which. Raises UsageError naming the flag.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
    ) -> None:
        _check("--temperature", temperature, temperature >= 0 and math.isfinite(temperature), "0 or more")
        _check("--top-k", top_k, top_k >= 0, "0 (off) or more")
        _check("--top-p", top_p, 0 < top_p <= 1, "more than 0, at most 1")
        _check("--min-p", min_p, 0 <= min_p < 1, "0 (off) or more, less than 1")
        _check("--seed", seed, seed is None or seed >= 0, "0 or more")
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.min_p = min_p
        self.seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        self._random = np.random.default_rng(self.seed)

    @property
    def state(self) -> Mapping[str, Any]:
        """The random state, as JSON can hold it. Can be set; raises ValueError, TypeError or KeyError."""
        return self._random.bit_generator.state

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self._random.bit_generator.state = state

    def sample(self, logits: NDArray[np.float32]) -> int:
        """One id for `logits` [V] float32; -inf marks a forbidden id. Does not change `logits`."""
        if self.temperature == 0:
            return int(np.argmax(logits))
        return int(self._random.choice(logits.size, p=self.probabilities(logits)))

    def probabilities(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """The distribution [V] float64 that `sample` draws from when the temperature is above 0."""
        scaled = logits.astype(np.float64)
        scaled -= scaled.max()
        # The difference comes first: dividing raw logits by a tiny temperature overflows.
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
            scaled /= self.temperature
        if self.top_k and self.top_k < scaled.size:
            kept = np.partition(scaled, -self.top_k)[-self.top_k]
            scaled[scaled < kept] = -np.inf
        probabilities: NDArray[np.float64] = np.exp(scaled)
        probabilities /= probabilities.sum()
        if self.top_p < 1:
            order = np.argsort(-probabilities, kind="stable")
            before = np.cumsum(probabilities[order]) - probabilities[order]
            probabilities[order[before >= self.top_p]] = 0
        if self.min_p:
            probabilities[probabilities < self.min_p * probabilities.max()] = 0
        probabilities /= probabilities.sum()
        return probabilities


def _check(flag: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise UsageError(flag, f"{value}", expected)
