"""A checkpoint's decoder as an ONNX graph, `fused` flavour. Knows nothing of files, parity or tokenizers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .architectures import Activation, ModelConfig
from .attention import attention, key_value_buffer
from .checkpoint import Checkpoint
from .graph import CONTRIB, GraphBuilder, Linear, Part, Weights, graph_value
from .quantised import BlockSource

OPSET = 18
IR_VERSION = 9
LOGIT_ROWS = "num_logits_to_keep"  # as transformers.js' exports call it
# Operator, domain and attributes of each activation. QuickGelu is x · sigmoid(alpha · x).
_ACTIVATIONS: dict[Activation, tuple[str, str, dict[str, float]]] = {
    "gelu_erf": ("Gelu", CONTRIB, {}),
    "gelu_tanh": ("FastGelu", CONTRIB, {}),
    "relu": ("Relu", "", {}),
    "silu": ("QuickGelu", CONTRIB, {"alpha": 1.0}),
}


def build_decoder(
    checkpoint: Checkpoint, blocks: BlockSource | None = None, *, chooses_rows: bool = True
) -> ir.Model:
    """The ONNX model of `checkpoint`, with lazy weights; those that `blocks` knows are quantised.

    Inputs and outputs are those of a bundle (`position_ids` only where positions are learned); past and present have the same shape
    [batch, kv_heads, capacity, padded_head_dim], so that one buffer can serve as both. With `chooses_rows` a further input
    `num_logits_to_keep` [1] says how many of the last positions get logits; it has a default, so that who does not know it gets all.
    """
    config = checkpoint.config
    build = GraphBuilder(checkpoint, blocks)
    ids = graph_value("input_ids", ir.DataType.INT64, ["batch", "new"])
    mask = graph_value("attention_mask", ir.DataType.INT64, ["batch", "total"])
    inputs = [ids, mask]
    if config.positions == "learned":
        inputs.append(graph_value("position_ids", ir.DataType.INT64, ["batch", "new"]))
    lengths = _lengths(build, mask)
    hidden = _embed(build, *inputs[:1], *inputs[2:])
    normed = _first_norm(build, hidden)
    present: list[ir.Value] = []
    for layer in range(config.layers):
        past = [key_value_buffer(f"past_key_values.{layer}.{part}", config) for part in ("key", "value")]
        mixed, *grown = attention(build, normed, layer, past, lengths)
        run = _parallel_block if config.parallel_residual else _block
        normed, hidden = run(build, hidden, mixed, layer)
        inputs += past
        present += grown
    defaults = []
    if chooses_rows:
        normed, rows = _last_rows(build, normed)
        inputs.append(rows)
        defaults.append(rows)
    logits = _head(build, normed)
    graph = ir.Graph(
        inputs,
        [logits, *present],
        nodes=build.tape.nodes,
        initializers=[*build.tape.initializers, *defaults],
        opset_imports={"": OPSET, CONTRIB: 1},
        name=config.architecture,
    )
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="posttrainllm")


def _lengths(build: GraphBuilder, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
    """GroupQueryAttention's two lengths: last valid position [batch], total length (a scalar)."""
    counted = build.op("ReduceSum", mask, build.ints("axis_1", [1]), name="valid", keepdims=0)
    last = build.op("Sub", counted, build.ints("one", [1]), name="last")
    seqlens = build.op("Cast", last, name="seqlens_k", to=ir.DataType.INT32.value)
    shape = build.op("Shape", mask, name="total_1d", start=1)
    total = build.op("Squeeze", shape, build.ints("axis_0", [0]), name="total")
    return seqlens, build.op("Cast", total, name="total_sequence_length", to=ir.DataType.INT32.value)


def _embed(build: GraphBuilder, ids: ir.Value, position_ids: ir.Value | None = None) -> ir.Value:
    config = build.config
    hidden = build.rows("model.embed_tokens.weight", ids, "tokens")
    hidden = _scaled(build, hidden, config.embedding_multiplier, "embedding_multiplier", "tokens.scaled")
    if position_ids is None:
        return hidden
    table = build.weight("model.embed_positions.weight")
    positions = build.op("Gather", table, position_ids, name="positions")
    return build.op("Add", hidden, positions, name="hidden.0")


def _scaled(build: GraphBuilder, x: ir.Value, factor: float, constant: str, name: str) -> ir.Value:
    return x if factor == 1 else build.op("Mul", x, build.number(constant, factor), name=name)


def _block(build: GraphBuilder, hidden: ir.Value, mixed: ir.Value, layer: int) -> tuple[ir.Value, ir.Value]:
    """What follows a layer's attention: the next norm's output, and the residual stream."""
    config, block = build.config, f"model.layers.{layer}"
    names = config.norm_names
    bias = _output_bias(build, f"{block}.self_attn.o_proj", given=config.output_bias)
    mixed, bias = _before_adding(build, mixed, bias, block, names.attention_out)
    normed, hidden = _add_norm(
        build, mixed, hidden, bias, f"{block}.{names.mlp_in}" if names.mlp_in else None, f"{block}.mlp.in"
    )
    mixed = _mlp(build, normed, f"{block}.mlp")
    bias = _output_bias(build, f"{block}.mlp.down_proj", given=config.mlp_bias)
    mixed, bias = _before_adding(build, mixed, bias, block, names.mlp_out)
    return _add_norm(build, mixed, hidden, bias, _next_norm(config, layer), f"{block}.out")


def _parallel_block(
    build: GraphBuilder, hidden: ir.Value, mixed: ir.Value, layer: int
) -> tuple[ir.Value, ir.Value]:
    """As `_block`, where the MLP sees the same stream as attention did."""
    config, block = build.config, f"model.layers.{layer}"
    bias = _output_bias(build, f"{block}.self_attn.o_proj", given=config.output_bias)
    normed = _norm(build, hidden, f"{block}.{config.norm_names.mlp_in}")
    attended = _add(build, hidden, mixed, bias, f"{block}.attended")
    mixed = _mlp(build, normed, f"{block}.mlp")
    bias = _output_bias(build, f"{block}.mlp.down_proj", given=config.mlp_bias)
    return _add_norm(build, mixed, attended, bias, _next_norm(config, layer), f"{block}.out")


def _next_norm(config: ModelConfig, layer: int) -> str | None:
    """The norm that the stream meets after `layer`."""
    if layer + 1 == config.layers:
        return "model.norm"
    first = config.norm_names.attention_in
    return f"model.layers.{layer + 1}.{first}" if first else None


def _first_norm(build: GraphBuilder, hidden: ir.Value) -> ir.Value:
    first = build.config.norm_names.attention_in
    return _norm(build, hidden, f"model.layers.0.{first}") if first else hidden


def _output_bias(build: GraphBuilder, module: str, *, given: bool) -> ir.Value | None:
    return build.weight(f"{module}.bias") if given else None


def _before_adding(
    build: GraphBuilder, mixed: ir.Value, bias: ir.Value | None, block: str, norm: str | None
) -> tuple[ir.Value, ir.Value | None]:
    """`mixed` after the norm and the multiplier that stand between it and the stream; the bias that is left to add."""
    config = build.config
    if norm is None and config.residual_multiplier == 1:
        return mixed, bias
    if bias is not None:
        mixed = build.op("Add", mixed, bias, name=f"{mixed.name}.biased")
    if norm is not None:
        mixed = _norm(build, mixed, f"{block}.{norm}")
    name = f"{mixed.name}.scaled"
    return _scaled(build, mixed, config.residual_multiplier, "residual_multiplier", name), None


def _gain(build: GraphBuilder, name: str) -> ir.Value:
    """The gain of norm `name`."""
    offset = build.config.norm_offset
    if not offset:
        return build.weight(f"{name}.weight")

    def make() -> Weights:
        return build.checkpoint.tensor(f"{name}.weight") + np.float32(offset)

    return build.lazy(f"{name}.weight", build.shapes[f"{name}.weight"], make)


def _norm(build: GraphBuilder, x: ir.Value, name: str) -> ir.Value:
    config = build.config
    layer_norm = config.norm == "layer_norm"
    kind = "LayerNormalization" if layer_norm else "SimplifiedLayerNormalization"
    parameters = [_gain(build, name), *([build.weight(f"{name}.bias")] if layer_norm else [])]
    return build.op(kind, x, *parameters, name=f"{name}.out", axis=-1, epsilon=config.norm_eps)


def _add(build: GraphBuilder, x: ir.Value, y: ir.Value, bias: ir.Value | None, name: str) -> ir.Value:
    if bias is not None:
        y = build.op("Add", y, bias, name=f"{name}.biased")
    return build.op("Add", x, y, name=name)


def _add_norm(
    build: GraphBuilder,
    mixed: ir.Value,
    hidden: ir.Value,
    bias: ir.Value | None,
    norm: str | None,
    name: str,
) -> tuple[ir.Value, ir.Value]:
    """Norm of the new residual stream, and that stream, `mixed + bias + hidden`; without a `norm` the stream twice."""
    config = build.config
    if norm is None:
        total = _add(build, hidden, mixed, bias, name)
        return total, total
    layer_norm = config.norm == "layer_norm"
    kind = "SkipLayerNormalization" if layer_norm else "SkipSimplifiedLayerNormalization"
    shift = [build.weight(f"{norm}.bias")] if layer_norm else []
    normed, _, _, total = build.ops(
        kind,
        mixed,
        hidden,
        _gain(build, norm),
        *shift,
        bias,
        names=[f"{norm}.out", "", "", f"{norm}.in"],
        domain=CONTRIB,
        epsilon=config.norm_eps,
    )
    return normed, total


def _mlp(build: GraphBuilder, normed: ir.Value, name: str) -> ir.Value:
    """The MLP's output before its last bias."""
    config = build.config
    kind, domain, attributes = _ACTIVATIONS[config.activation]
    inner = _biased_linear(build, normed, f"{name}.{'gate_proj' if config.gated_mlp else 'up_proj'}")
    active = build.op(kind, inner, name=f"{name}.active", domain=domain, **attributes)
    if config.gated_mlp:
        up = _biased_linear(build, normed, f"{name}.up_proj")
        active = build.op("Mul", active, up, name=f"{name}.gated")
    return build.linear(active, Linear(f"{name}.down_proj", (Part(f"{name}.down_proj"),)))


def _biased_linear(build: GraphBuilder, x: ir.Value, name: str) -> ir.Value:
    out = build.linear(x, Linear(name, (Part(name),)))
    if not build.config.mlp_bias:
        return out
    return build.op("Add", out, build.weight(f"{name}.bias"), name=f"{name}.biased")


def _last_rows(build: GraphBuilder, normed: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The last positions of `normed`, and the input that says how many; 0, its default, means all of them."""
    rows = graph_value(LOGIT_ROWS, ir.DataType.INT64, [1])
    rows.const_value = ir.Tensor(np.zeros(1, np.int64), name=LOGIT_ROWS)
    start = build.op("Neg", rows, name="first_row")
    to_the_end = build.ints("to_the_end", [np.iinfo(np.int64).max])
    return build.op("Slice", normed, start, to_the_end, build.ints("axis_1", [1]), name="last_rows"), rows


def _head(build: GraphBuilder, normed: ir.Value) -> ir.Value:
    """Logits [batch, rows, vocab], over the token table itself where it is tied, which is stored once."""
    config = build.config
    table = "model.embed_tokens.weight" if config.tied_head else "lm_head.weight"
    normed = _scaled(build, normed, config.logit_multiplier, "logit_multiplier", "normed.scaled")
    if config.logit_softcap is None:
        logits = build.scores(normed, table, "logits")
    else:
        cap = build.number("logit_softcap", config.logit_softcap)
        inner = build.op("Div", build.scores(normed, table, "scores"), cap, name="capped.in")
        logits = build.op("Mul", build.op("Tanh", inner, name="capped.out"), cap, name="logits")
    logits.type = ir.TensorType(ir.DataType.FLOAT)
    logits.shape = ir.Shape(["batch", "new", config.vocab_size])
    return logits
