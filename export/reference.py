"""The decoder in NumPy, without a cache: slow, obvious, the truth that exported graphs are held to.

Shares with the graph builder only the description and the rotary frequencies, and orients linear weights by itself, from the order in which they
are stored: so a reader that gets the orientation wrong is found out too, square matrices included. One
layer's weights are in memory at a time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .architectures import ModelConfig, Rotary
from .checkpoint import Checkpoint
from .rotary import attention_factor, inverse_frequencies

Array = NDArray[np.floating[Any]]
Tensors = dict[str, Array]


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
    x: Array = tensor("model.embed_tokens.weight")[ids] * config.embedding_multiplier
    if config.positions == "learned":
        x = x + tensor("model.embed_positions.weight")[positions]
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        names = [name for name in checkpoint.shapes if name.startswith(prefix)]
        x = _block(x, {name.removeprefix(prefix): tensor(name) for name in names}, config, layer, positions)
    norm = {name: tensor(name) for name in checkpoint.shapes if name.startswith("model.norm.")}
    head = tensor("model.embed_tokens.weight" if config.tied_head else "lm_head.weight")
    scores: Array = _norm(x, norm, "model.norm", config) @ head.T * x.dtype.type(config.logit_multiplier)
    return _capped(scores, config.logit_softcap)


def _block(
    x: Array, weights: Tensors, config: ModelConfig, layer: int, positions: NDArray[np.int64]
) -> Array:
    names, multiplier = config.norm_names, x.dtype.type(config.residual_multiplier)

    def norm(values: Array, name: str | None) -> Array:
        return values if name is None else _norm(values, weights, name, config)

    attended = _attention(norm(x, names.attention_in), weights, config, layer, positions)
    after = x + norm(attended, names.attention_out) * multiplier
    mixed = _mlp(norm(x if config.parallel_residual else after, names.mlp_in), weights, config)
    total: Array = after + norm(mixed, names.mlp_out) * multiplier
    return total


def _input_by_output(checkpoint: Checkpoint, name: str) -> NDArray[np.float32]:
    """A linear weight as [in, out], straight from the stored order."""
    outputs, inputs = checkpoint.shapes[name]
    stored = checkpoint.stored(name)
    if checkpoint.linear_layout == "in_out":
        return stored.reshape(inputs, outputs)
    return stored.reshape(outputs, inputs).T


def _linear(x: Array, weights: Tensors, name: str) -> Array:
    out: Array = x @ weights[f"{name}.weight"]
    bias = weights.get(f"{name}.bias")
    return out if bias is None else out + bias


def _norm(x: Array, weights: Tensors, name: str, config: ModelConfig) -> Array:
    if config.norm == "rms_norm":
        return _rms_norm(x, weights[f"{name}.weight"], config)
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    scaled: Array = centred / np.sqrt(variance + x.dtype.type(config.norm_eps))
    shifted: Array = scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]
    return shifted


def _rms_norm(x: Array, weight: Array, config: ModelConfig) -> Array:
    square = (x * x).mean(axis=-1, keepdims=True)
    normed: Array = x / np.sqrt(square + x.dtype.type(config.norm_eps))
    return normed * (weight + x.dtype.type(config.norm_offset))


def _attention(
    x: Array, weights: Tensors, config: ModelConfig, layer: int, positions: NDArray[np.int64]
) -> Array:
    batch, n, _ = x.shape

    def heads(letter: str, count: int) -> Array:  # [batch, count, n, head_dim]
        projected = _linear(x, weights, f"self_attn.{letter}_proj")
        normed = letter in "qk" and config.qk_norm is not None
        if normed and config.qk_norm == "projection":
            projected = _rms_norm(projected, weights[f"self_attn.{letter}_norm.weight"], config)
        apart = projected.reshape(batch, n, count, config.head_dim).swapaxes(1, 2)
        if normed and config.qk_norm == "head":
            apart = _rms_norm(apart, weights[f"self_attn.{letter}_norm.weight"], config)
        return apart

    q, k, v = heads("q", config.heads), heads("k", config.kv_heads), heads("v", config.kv_heads)
    rotary = config.layer_rotary(layer)
    if rotary is not None:
        q, k = (_turned(part, rotary, config, positions) for part in (q, k))
    group = config.heads // config.kv_heads
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    scores = _capped(q @ k.swapaxes(2, 3) * x.dtype.type(config.attention_scale), config.attention_softcap)
    distance = np.arange(n)[:, None] - np.arange(n)
    window = config.window(layer)
    seen = (distance >= 0) & (distance < (window or n))
    scores = np.where(seen, scores, x.dtype.type(-np.inf))
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = (weight / weight.sum(axis=-1, keepdims=True)) @ v
    return _linear(mixed.swapaxes(1, 2).reshape(batch, n, -1), weights, "self_attn.o_proj")


def _turned(x: Array, rotary: Rotary, config: ModelConfig, positions: NDArray[np.int64]) -> Array:
    """`x` [batch, heads, n, head_dim] with its first components turned: pairs as complex numbers times e^(i · angle)."""
    half = rotary.dim // 2
    frequencies = inverse_frequencies(rotary, config.context_length)
    angles = positions[:, None, :, None].astype(np.float32) * frequencies
    pairs = x[..., :half] + 1j * x[..., half : rotary.dim]
    turned = pairs * np.exp(1j * angles.astype(np.float64)) * attention_factor(rotary)
    parts = [turned.real.astype(x.dtype), turned.imag.astype(x.dtype), x[..., rotary.dim :]]
    return np.concatenate(parts, axis=-1)


def _capped(x: Array, cap: float | None) -> Array:
    if cap is None:
        return x
    capped: Array = x.dtype.type(cap) * np.tanh(x / x.dtype.type(cap))
    return capped


def _mlp(x: Array, weights: Tensors, config: ModelConfig) -> Array:
    if not config.gated_mlp:
        active = _ACTIVATIONS[config.activation](_linear(x, weights, "mlp.up_proj"))
    else:
        gate = _ACTIVATIONS[config.activation](_linear(x, weights, "mlp.gate_proj"))
        active = gate * _linear(x, weights, "mlp.up_proj")
    return _linear(active, weights, "mlp.down_proj")


def _gelu(x: Array) -> Array:
    erf: Array = np.frompyfunc(math.erf, 1, 1)(x / math.sqrt(2)).astype(x.dtype)
    active: Array = x * (1 + erf) / 2
    return active


def _gelu_tanh(x: Array) -> Array:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    active: Array = x * (1 + np.tanh(inner)) / 2
    return active.astype(x.dtype, copy=False)


def _silu(x: Array) -> Array:
    active: Array = x * (1 + np.tanh(x / 2)) / 2
    return active


def _relu(x: Array) -> Array:
    active: Array = np.maximum(x, 0)
    return active


_ACTIVATIONS = {"gelu_erf": _gelu, "gelu_tanh": _gelu_tanh, "relu": _relu, "silu": _silu}
