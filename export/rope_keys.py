"""Rotary positions as a config.json describes them, in both spellings.

Up to version 4 of transformers: `rope_theta` and `rope_scaling`; from 5 on `rope_parameters`, which holds all of
it, by layer type where these differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from ..runtime.errors import CheckpointError
from .architectures import RopeScaling, Rotary
from .config_keys import ConfigKeys

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
PHI3_NAMES = {"su": "longrope", "yarn": "longrope"}  # what the first Phi-3 files called it


def rotary(
    keys: ConfigKeys,
    head_dim: int,
    *,
    theta: float = 10000.0,
    theta_key: str = "rope_theta",
    partial: float = 1.0,
    partial_key: str = "partial_rotary_factor",
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> Rotary:
    """The rotary positions of all layers. `theta` and `partial` are what an absent key means. Raises CheckpointError."""
    section = keys.section("rope_parameters") or keys.section("rope_scaling")
    keys.raw("original_max_position_embeddings")
    theta = keys.positive(theta_key, theta)
    partial = keys.positive(partial_key, partial)
    if section is None:
        return _plain(keys, theta, partial, head_dim)
    return layer_rotary(keys, section, head_dim, theta=theta, partial=partial, aliases=aliases)


def layer_rotary(
    keys: ConfigKeys,
    section: ConfigKeys,
    head_dim: int,
    *,
    theta: float,
    partial: float = 1.0,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> Rotary:
    """What one `section` of `rope_parameters` or `rope_scaling` says; the rest comes from `keys`."""
    theta = section.positive("rope_theta", theta)
    partial = section.positive("partial_rotary_factor", partial)
    kind = section.text("rope_type", section.text("type", "default"))
    kind = aliases.get(kind, kind)
    if kind not in _KINDS:
        raise section.refuse("rope_type" if "rope_type" in section else "type", " or ".join(_KINDS))
    plain = _plain(keys, theta, partial, head_dim)
    scaling = None if kind == "default" else _scaling(keys, section, kind, plain.dim)
    unknown = section.unread()
    if unknown:
        raise CheckpointError(section.where, f"unknown keys: {', '.join(unknown)}", "a known rope scaling")
    return Rotary(plain.theta, plain.dim, scaling)


def _plain(keys: ConfigKeys, theta: float, partial: float, head_dim: int) -> Rotary:
    dim = int(head_dim * partial)
    if theta <= 1 or dim > head_dim or dim < 2 or dim % 2:
        raise CheckpointError(
            keys.where,
            f"{dim} of {head_dim} components turn by theta {theta:g}",
            "an even number, theta above 1",
        )
    return Rotary(theta, dim)


def _scaling(keys: ConfigKeys, section: ConfigKeys, kind: str, dim: int) -> RopeScaling:
    longest = keys.size("max_position_embeddings")
    original = section.size("original_max_position_embeddings", longest)
    if kind == "linear":
        return RopeScaling("linear", section.positive("factor"))
    if kind == "dynamic":
        section.raw("original_max_position_embeddings")
        return RopeScaling("dynamic", section.positive("factor"), longest)
    if kind == "llama3":
        low, high = section.positive("low_freq_factor"), section.positive("high_freq_factor")
        if low >= high:
            raise section.refuse("low_freq_factor", "less than high_freq_factor")
        factor = section.positive("factor")
        return RopeScaling("llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return _yarn(section, longest, original)
    original = keys.size("original_max_position_embeddings", original)  # of the two, this one counts
    factor = section.positive("factor", longest / original)
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return RopeScaling(
        "longrope",
        factor,
        original,
        attention_factor=section.positive("attention_factor", usual),
        short_factors=section.positives("short_factor", dim // 2),
        long_factors=section.positives("long_factor", dim // 2),
    )


def _yarn(section: ConfigKeys, longest: int, original: int) -> RopeScaling:
    factor = section.positive("factor", longest / original)

    def logarithmic(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    # mscale and mscale_all_dim count only together.
    mscales = section.number("mscale", 0.0), section.number("mscale_all_dim", 0.0)
    usual = logarithmic(mscales[0]) / logarithmic(mscales[1]) if all(mscales) else logarithmic(1.0)
    return RopeScaling(
        "yarn",
        factor,
        original,
        attention_factor=section.positive("attention_factor", usual),
        beta_fast=section.positive("beta_fast", 32.0),
        beta_slow=section.positive("beta_slow", 1.0),
        truncate=section.boolean("truncate", True),
    )
