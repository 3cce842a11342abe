"""Rotary positions: frequencies from their description, and the tables that a graph holds.

Computed in float32, in the order of operations of transformers: models were trained with these roundings,
which reach thousandths of a radian at position 100,000.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .architectures import RopeScaling, Rotary

Floats = NDArray[np.float32]


def inverse_frequencies(rotary: Rotary, context_length: int) -> Floats:
    """Radians per position of each turning pair, [dim / 2].

    Kinds whose frequencies depend on the length of the text (dynamic, longrope) get those of a text of
    `context_length`: only so does every split of a text give the same logits.
    """
    scaling = rotary.scaling
    theta = rotary.theta
    if scaling and scaling.kind == "dynamic" and context_length > scaling.original_context:
        growth = scaling.factor * context_length / scaling.original_context - (scaling.factor - 1)
        theta *= growth ** (rotary.dim / (rotary.dim - 2))
    exponents = np.arange(0, rotary.dim, 2, dtype=np.float32) / np.float32(rotary.dim)
    wavelengths: Floats = np.power(np.float32(theta), exponents, dtype=np.float32)
    plain: Floats = np.float32(1) / wavelengths
    if scaling is None or scaling.kind == "dynamic":
        return plain
    if scaling.kind == "linear":
        return plain / np.float32(scaling.factor)
    if scaling.kind == "longrope":
        long = context_length > scaling.original_context
        factors = scaling.long_factors if long else scaling.short_factors
        divided: Floats = np.float32(1) / (np.array(factors, np.float32) * wavelengths)
        return divided
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    return _yarn(wavelengths, rotary, scaling)


def _llama3(plain: Floats, scaling: RopeScaling) -> Floats:
    """Turns over the original context above `high_freq_factor` stay, below `low_freq_factor` are divided."""
    turns = np.float32(scaling.original_context) * plain / np.float32(2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - np.float32(scaling.low_freq_factor)) / np.float32(span), 0, 1)
    mixed: Floats = (1 - kept) * plain / np.float32(scaling.factor) + kept * plain
    return mixed


def _yarn(wavelengths: Floats, rotary: Rotary, scaling: RopeScaling) -> Floats:
    """A linear ramp over the pairs, between those that turn `beta_fast` and `beta_slow` times in the original context."""

    def pair(turns: float) -> float:
        return (
            rotary.dim
            * math.log(scaling.original_context / (turns * 2 * math.pi))
            / (2 * math.log(rotary.theta))
        )

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    width = high - low or 0.001
    ramp = np.clip((np.arange(rotary.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    mixed: Floats = ramp / (np.float32(scaling.factor) * wavelengths) + (1 - ramp) / wavelengths
    return mixed


def attention_factor(rotary: Rotary) -> float:
    """What cosines and sines are multiplied by."""
    return rotary.scaling.attention_factor if rotary.scaling else 1.0


def cosines_and_sines(rotary: Rotary, context_length: int, pairs: int) -> tuple[Floats, Floats]:
    """Tables [context_length, pairs] float32. Pairs beyond the rotary's own do not turn."""
    frequencies = np.zeros(pairs, np.float32)
    frequencies[: rotary.dim // 2] = inverse_frequencies(rotary, context_length)
    angles = np.arange(context_length, dtype=np.float32)[:, None] * frequencies
    factor = np.float32(attention_factor(rotary))
    cos, sin = np.cos(angles), np.sin(angles)
    cos[:, : rotary.dim // 2] *= factor
    sin[:, : rotary.dim // 2] *= factor
    return cos, sin
