"""The decoder in NumPy, without a cache: slow, obvious, the truth that exported graphs are held to.

Shares nothing with the graph builder, and orients linear weights by itself, from the order in which they
are stored: so a reader that gets the orientation wrong is found out too, square matrices included. One
layer's weights are in memory at a time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .architectures import ModelConfig
from .checkpoint import Checkpoint

Array = NDArray[np.floating[Any]]


def logits(
    checkpoint: Checkpoint,
    ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    dtype: DTypeLike = np.float32,
) -> Array:
    """Logits [batch, n, vocab] of `dtype` for `ids` and `positions` [batch, n], computed in `dtype`.

    A row is a whole sequence: each id attends to itself and to those before it in the row.
    """

    def tensor(name: str) -> Array:
        linear = name.endswith("_proj.weight")
        values = _input_by_output(checkpoint, name) if linear else checkpoint.tensor(name)
        return values.astype(dtype, copy=False)

    config = checkpoint.config
    x = tensor("model.embed_tokens.weight")[ids] + tensor("model.embed_positions.weight")[positions]
    for i in range(config.layers):
        block = {
            name.removeprefix(prefix): tensor(name)
            for prefix in (f"model.layers.{i}.",)
            for name in checkpoint.shapes
            if name.startswith(prefix)
        }
        x = x + _attention(_norm(x, block, "input_layernorm", config), block, config)
        x = x + _mlp(_norm(x, block, "post_attention_layernorm", config), block)
    final = {name: tensor(f"model.{name}") for name in ("norm.weight", "norm.bias")}
    result: Array = _norm(x, final, "norm", config) @ tensor("model.embed_tokens.weight").T
    return result


def _input_by_output(checkpoint: Checkpoint, name: str) -> NDArray[np.float32]:
    """A linear weight as [in, out], straight from the stored order."""
    outputs, inputs = checkpoint.shapes[name]
    stored = checkpoint.stored(name)
    if checkpoint.linear_layout == "in_out":
        return stored.reshape(inputs, outputs)
    return stored.reshape(outputs, inputs).T


def _linear(x: Array, weights: dict[str, Array], name: str) -> Array:
    return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _norm(x: Array, weights: dict[str, Array], name: str, config: ModelConfig) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    scaled: Array = centred / np.sqrt(variance + x.dtype.type(config.norm_eps))
    shifted: Array = scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]
    return shifted


def _attention(x: Array, weights: dict[str, Array], config: ModelConfig) -> Array:
    batch, n, _ = x.shape

    def heads(name: str, count: int) -> Array:  # [batch, count, n, head_dim]
        return _linear(x, weights, f"self_attn.{name}").reshape(batch, n, count, -1).swapaxes(1, 2)

    q, k, v = (
        heads("q_proj", config.heads),
        heads("k_proj", config.kv_heads),
        heads("v_proj", config.kv_heads),
    )
    group = config.heads // config.kv_heads
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    scores = q @ k.swapaxes(2, 3) / x.dtype.type(math.sqrt(config.head_dim))
    scores = np.where(np.tril(np.ones((n, n), bool)), scores, x.dtype.type(-np.inf))
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = (weight / weight.sum(axis=-1, keepdims=True)) @ v
    return _linear(mixed.swapaxes(1, 2).reshape(batch, n, -1), weights, "self_attn.o_proj")


def _mlp(x: Array, weights: dict[str, Array]) -> Array:
    return _linear(_gelu(_linear(x, weights, "mlp.up_proj")), weights, "mlp.down_proj")


def _gelu(x: Array) -> Array:
    erf: Array = np.frompyfunc(math.erf, 1, 1)(x / math.sqrt(2)).astype(x.dtype)
    active: Array = x * (1 + erf) / 2
    return active
