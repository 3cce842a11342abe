"""Near-duplicate texts by MinHash (Broder 1997), with the numbers that trajectories' other writer uses.

Shingles are 5 Unicode scalars (a shorter text is one shingle), hashed by FNV-1a, 64 bits, over their UTF-8. 64 linear
permutations a·x + b wrap at 64 bits and are then taken modulo 2^61 - 1; a and b are successive numbers of a linear
congruential generator.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

PERMUTATIONS = 64
SHINGLE = 5
_SEED, _MULTIPLIER, _INCREMENT = 0xC0FFEE1234ABCDEF, 6364136223846793005, 1442695040888963407
_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3
_WRAP = 2**64 - 1
_PRIME = np.uint64(2**61 - 1)
_BATCH = 4096  # shingles permuted at once: 2 MiB

Signature = NDArray[np.uint64]


def fnv1a(data: bytes) -> int:
    """FNV-1a, 64 bits (Fowler, Noll, Vo)."""
    value = _FNV_OFFSET
    for byte in data:
        value = (value ^ byte) * _FNV_PRIME & _WRAP
    return value


def _numbers() -> Signature:
    numbers, state = [], _SEED
    for _ in range(2 * PERMUTATIONS):
        state = (state * _MULTIPLIER + _INCREMENT) & _WRAP
        numbers.append(state)
    return np.array(numbers, np.uint64).reshape(PERMUTATIONS, 2)


class NearDuplicates:
    """Texts seen so far, asked one by one whether one of them is nearly the same.

    `threshold`: the share of the 64 minima that must agree, in (0, 1]. Texts that differ in at most d minima
    agree in one of d + 1 bands of them, so looking up bands finds all of them, and asks few. About 2 kB a text.
    """

    def __init__(self, threshold: float) -> None:
        if not 0 < threshold <= 1:
            raise ValueError(f"a threshold of {threshold}; expected more than 0, at most 1")
        needed = next(n for n in range(PERMUTATIONS + 1) if n / PERMUTATIONS >= threshold)
        self._needed = needed
        self._edges = np.linspace(0, PERMUTATIONS, PERMUTATIONS - needed + 2).astype(int)
        self._bands: list[defaultdict[bytes, list[int]]] = [
            defaultdict(list) for _ in range(len(self._edges) - 1)
        ]
        self._kept = np.empty((16, PERMUTATIONS), np.uint64)
        self._count = 0
        self._numbers = _numbers()

    def signature(self, text: str) -> Signature:
        """The 64 minima of a text, [64] uint64."""
        whole = text.encode("utf-8", "replace").decode()
        parts = {whole[i : i + SHINGLE] for i in range(max(len(whole) - SHINGLE + 1, 1))}
        hashes = np.fromiter((fnv1a(part.encode()) for part in parts), np.uint64, len(parts))
        factor, addend = self._numbers[:, :1], self._numbers[:, 1:]
        minima = [
            ((factor * hashes[start : start + _BATCH] + addend) % _PRIME).min(axis=1)
            for start in range(0, hashes.size, _BATCH)
        ]
        least: Signature = np.minimum.reduce(minima)
        return least

    def seen(self, text: str) -> bool:
        """Whether a text nearly like this one was kept; if not, it is now."""
        signature = self.signature(text)
        keys = [signature[a:b].tobytes() for a, b in zip(self._edges, self._edges[1:], strict=False)]
        candidates = sorted(
            {n for band, key in zip(self._bands, keys, strict=True) for n in band.get(key, ())}
        )
        agreeing = (self._kept[candidates] == signature).sum(axis=1)
        if candidates and int(agreeing.max()) >= self._needed:
            return True
        if self._count == len(self._kept):
            self._kept = np.concatenate([self._kept, np.empty_like(self._kept)])
        self._kept[self._count] = signature
        for band, key in zip(self._bands, keys, strict=True):
            band[key].append(self._count)
        self._count += 1
        return False


def similarity(first: Signature, second: Signature) -> float:
    """The share of minima that agree: an estimate of the Jaccard index of the shingles."""
    return math.fsum(first == second) / PERMUTATIONS
