"""Attention of the graph: packed projections, norms of queries and keys, GroupQueryAttention over a shared KV buffer.

The operator wants head sizes in steps of 8, and with rotary positions of 16, of which a multiple of 16 turns.
So rows of the projections are put where it wants them: both halves of the turning components, each padded with zeros,
then the rest. Queries and keys are reordered alike, so their products stay the same; values are padded only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from .architectures import ModelConfig, Rotary
from .graph import CONTRIB, GraphBuilder, Linear, Part, Rows, Weights, graph_value, take_rows
from .rotary import cosines_and_sines


def padded_head_dim(config: ModelConfig) -> int:
    """The head size of the graph."""
    if config.rotary is None:
        return _up(config.head_dim, 8)
    return _up(_turning(config) + config.head_dim - config.rotary.dim, 16)


def _turning(config: ModelConfig) -> int:
    """How many components of a padded head turn."""
    return _up(config.rotary.dim, 16) if config.rotary else 0


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def query_rows(config: ModelConfig) -> Rows | None:
    """Which component of a head of queries or keys each one of the graph's is, -1 for zeros; None if all the same."""
    rows = np.full(padded_head_dim(config), -1, np.intp)
    half, padded_half = (config.rotary.dim // 2 if config.rotary else 0), _turning(config) // 2
    rest = config.head_dim - 2 * half
    rows[:half] = np.arange(half)
    rows[padded_half : padded_half + half] = half + np.arange(half)
    rows[2 * padded_half : 2 * padded_half + rest] = 2 * half + np.arange(rest)
    return _unless_identity(rows)


def value_rows(config: ModelConfig) -> Rows | None:
    """As `query_rows`, of values."""
    rows = np.full(padded_head_dim(config), -1, np.intp)
    rows[: config.head_dim] = np.arange(config.head_dim)
    return _unless_identity(rows)


def _unless_identity(rows: Rows) -> Rows | None:
    return None if np.array_equal(rows, np.arange(len(rows))) else rows


def every_head(rows: Rows | None, heads: int, head_dim: int) -> Rows | None:
    """`rows` of one head of `head_dim` components for `heads` heads, one after the other."""
    if rows is None:
        return None
    starts = np.arange(heads)[:, None] * head_dim
    return np.where(rows < 0, -1, starts + rows).reshape(-1)


def attention(
    build: GraphBuilder,
    normed: ir.Value,
    layer: int,
    past: Sequence[ir.Value],
    lengths: tuple[ir.Value, ir.Value],
) -> Sequence[ir.Value]:
    """Attention's output before its bias, then the grown key and value buffers."""
    config, name = build.config, f"model.layers.{layer}.self_attn"
    dim, rotary = padded_head_dim(config), config.layer_rotary(layer)
    attributes: dict[str, float] = {
        "num_heads": config.heads,
        "kv_num_heads": config.kv_heads,
        "scale": config.attention_scale,
    }
    tables: Sequence[ir.Value] = ()
    if rotary is not None:
        attributes["do_rotary"] = 1
        tables = _tables(build, rotary)
    window = config.window(layer)
    if window is not None:
        attributes["local_window_size"] = window
    if config.attention_softcap is not None:
        attributes["softcap"] = config.attention_softcap
    mixed, key, value = build.ops(
        "GroupQueryAttention",
        *_query_key_value(build, normed, name),
        *past,
        *lengths,
        *tables,
        names=[f"{name}.mixed", f"present.{layer}.key", f"present.{layer}.value"],
        domain=CONTRIB,
        **attributes,
    )
    for buffer in (key, value):
        buffer.type = ir.TensorType(ir.DataType.FLOAT)
        buffer.shape = ir.Shape(["batch", config.kv_heads, "capacity", dim])
    columns = every_head(value_rows(config), config.heads, config.head_dim)
    output = Linear(f"{name}.o_proj", (Part(f"{name}.o_proj"),), columns)
    return [build.linear(mixed, output), key, value]


def _query_key_value(build: GraphBuilder, normed: ir.Value, name: str) -> Sequence[ir.Value | None]:
    """GroupQueryAttention's first three inputs: all packed in the first, or apart where queries and keys are normalised."""
    config, dim = build.config, padded_head_dim(build.config)
    turned, plain = query_rows(config), value_rows(config)
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads, "v_proj": config.kv_heads}
    parts = tuple(
        Part(f"{name}.{part}", every_head(plain if part == "v_proj" else turned, count, config.head_dim))
        for part, count in heads.items()
    )
    layer = Linear(f"{name}.qkv_proj", parts)
    qkv = build.linear(normed, layer)
    if config.qkv_bias:
        qkv = build.op("Add", qkv, build.linear_bias(layer), name=f"{name}.qkv_biased")
    if config.qk_norm is None:
        return [qkv, None, None]
    sizes = build.ints("qkv_sizes", [count * dim for count in heads.values()])
    query, key, value = build.ops(
        "Split", qkv, sizes, names=[f"{name}.query", f"{name}.key", f"{name}.value"], axis=-1
    )
    query = _query_norm(build, query, f"{name}.q_norm", config.heads)
    key = _query_norm(build, key, f"{name}.k_norm", config.kv_heads)
    return [query, key, value]


def _query_norm(build: GraphBuilder, x: ir.Value, name: str, heads: int) -> ir.Value:
    """RMSNorm of each head of `x` [batch, new, heads · size], or of all of it.

    The mean of squares is taken over zeros too, so gain and epsilon are rescaled by the share of true components.
    """
    config, dim = build.config, padded_head_dim(build.config)
    share = config.head_dim / dim
    rows = query_rows(config)
    whole = config.qk_norm == "projection"
    if whole:
        rows = every_head(rows, heads, config.head_dim)

    def gain() -> Weights:
        weight = build.checkpoint.tensor(f"{name}.weight") + np.float32(config.norm_offset)
        return take_rows(weight, rows) * np.float32(math.sqrt(share))

    width = heads * dim
    plain = rows is None and not config.norm_offset
    dtype = build.checkpoint.dtype(f"{name}.weight") if plain else "float32"
    weight = build.lazy(f"{name}.weight", (width if whole else dim,), gain, dtype)
    epsilon = config.norm_eps * share
    if whole:
        return build.op(
            "SimplifiedLayerNormalization", x, weight, name=f"{name}.out", axis=-1, epsilon=epsilon
        )
    apart = build.op("Reshape", x, build.ints(f"heads_{heads}", [0, 0, heads, dim]), name=f"{name}.heads")
    normed = build.op(
        "SimplifiedLayerNormalization", apart, weight, name=f"{name}.normed", axis=-1, epsilon=epsilon
    )
    return build.op("Reshape", normed, build.ints(f"width_{width}", [0, 0, width]), name=f"{name}.out")


def _tables(build: GraphBuilder, rotary: Rotary) -> Sequence[ir.Value]:
    """Cosines and sines [context, turning / 2], shared by all layers that turn alike."""
    context, pairs = build.config.context_length, _turning(build.config) // 2
    which = "local_rotary" if rotary is build.config.local_rotary else "rotary"

    def make(part: int) -> Weights:
        return cosines_and_sines(rotary, context, pairs)[part]

    shape = (context, pairs)
    return [
        build.lazy(f"model.{which}.cos", shape, lambda: make(0)),
        build.lazy(f"model.{which}.sin", shape, lambda: make(1)),
    ]


def key_value_buffer(name: str, config: ModelConfig) -> ir.Value:
    """A past buffer, [batch, kv_heads, capacity, padded_head_dim]; the present has the same shape."""
    shape: list[int | str] = ["batch", config.kv_heads, "capacity", padded_head_dim(config)]
    return graph_value(name, ir.DataType.FLOAT, shape)
