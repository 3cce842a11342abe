"""A checkpoint's decoder as an ONNX graph, `fused` flavour: GroupQueryAttention over a shared KV buffer.

Weights stay in the checkpoint until the file is written: every initialiser is lazy and is read,
padded and transposed when its turn comes. What the source holds in fp16 is written in fp16, half the size
and exact; a Cast, which ONNX Runtime folds when it loads the graph, widens it. Knows nothing of files, parity or tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir import tape

from .architectures import ModelConfig, tensor_shapes
from .checkpoint import Checkpoint

OPSET = 18
IR_VERSION = 9
CONTRIB = "com.microsoft"
INLINE_NBYTES = 256
HALF = ".half"  # ends the name of what is stored in fp16 and cast
Weights = NDArray[np.float32]


def padded_head_dim(config: ModelConfig) -> int:
    """The head size of the graph: the CPU's GroupQueryAttention wants a multiple of 8."""
    return -(-config.head_dim // 8) * 8


class _Builder:
    """The graph while it is being recorded, and the checkpoint that its weights come from."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.shapes = tensor_shapes(checkpoint.config)
        self.tape = tape.Tape()
        self.initializers: dict[str, ir.Value] = {}

    def op(
        self, kind: str, *inputs: ir.Value | None, name: str, domain: str = "", **attributes: float
    ) -> ir.Value:
        """One node with one output called `name`."""
        (value,) = self.ops(kind, *inputs, names=[name], domain=domain, **attributes)
        return value

    def ops(
        self,
        kind: str,
        *inputs: ir.Value | None,
        names: Sequence[str],
        domain: str = "",
        **attributes: float,
    ) -> Sequence[ir.Value]:
        """One node with outputs called `names`; an empty name is an output that is not wanted."""
        values = self.tape.op_multi_out(
            kind, inputs, attributes, num_outputs=len(names), domain=domain, name=f"{names[0]}/{kind}"
        )
        for value, name in zip(values, names, strict=True):
            value.name = name
        return values

    def weight(self, name: str) -> ir.Value:
        """The checkpoint's tensor `name` as it is; stored once however often it is used."""
        return self.lazy(name, self.shapes[name], lambda: self.checkpoint.tensor(name))

    def lazy(self, name: str, shape: tuple[int, ...], make: Callable[[], Weights]) -> ir.Value:
        """An initialiser whose values come from `make` when the file is written, or now if it is tiny."""

        half = self.checkpoint.stored_dtype == "float16"
        stored_name = name + HALF if half else name

        def read() -> ir.TensorProtocol:
            return ir.Tensor(
                np.ascontiguousarray(make(), np.float16 if half else np.float32), name=stored_name
            )

        if name not in self.initializers:
            # The graph itself holds what is tiny; onnx-ir would wrap our refusals while it serialises it.
            tiny = 4 * math.prod(shape) <= INLINE_NBYTES
            dtype = ir.DataType.FLOAT16 if half else ir.DataType.FLOAT
            tensor = read() if tiny else ir.LazyTensor(read, dtype, ir.Shape(shape), name=stored_name)
            value = self.tape.initializer(tensor, stored_name)
            if half:
                value = self.op("Cast", value, name=name, to=ir.DataType.FLOAT.value)
            self.initializers[name] = value
        return self.initializers[name]

    def ints(self, name: str, values: Sequence[int]) -> ir.Value:
        """A small one-dimensional int64 initialiser."""
        if name not in self.initializers:
            tensor = ir.Tensor(np.array(values, np.int64), name=name)
            self.initializers[name] = self.tape.initializer(tensor)
        return self.initializers[name]


def build_decoder(checkpoint: Checkpoint) -> ir.Model:
    """The ONNX model of `checkpoint`, with lazy weights.

    Inputs and outputs are those of a bundle; past and present have the same shape
    [batch, kv_heads, capacity, padded_head_dim], so that one buffer can serve as both.
    """
    config = checkpoint.config
    build = _Builder(checkpoint)
    ids = _input("input_ids", ir.DataType.INT64, ["batch", "new"])
    mask = _input("attention_mask", ir.DataType.INT64, ["batch", "total"])
    position_ids = _input("position_ids", ir.DataType.INT64, ["batch", "new"])
    lengths = _lengths(build, mask)
    past, present = [], []
    hidden = _embed(build, ids, position_ids)
    normed = _norm(build, hidden, "model.layers.0.input_layernorm")
    for i in range(config.layers):
        block = f"model.layers.{i}"
        following = f"model.layers.{i + 1}.input_layernorm" if i + 1 < config.layers else "model.norm"
        buffers = [_kv(f"past_key_values.{i}.{part}", config) for part in ("key", "value")]
        mixed, *grown = _attention(build, normed, i, buffers, lengths)
        bias = build.weight(f"{block}.self_attn.o_proj.bias")
        normed, hidden = _add_norm(build, mixed, hidden, bias, f"{block}.post_attention_layernorm")
        mixed = _mlp(build, normed, f"{block}.mlp")
        bias = build.weight(f"{block}.mlp.down_proj.bias")
        normed, hidden = _add_norm(build, mixed, hidden, bias, following)
        past += buffers
        present += grown
    logits = _head(build, normed, ids)
    graph = ir.Graph(
        [ids, mask, position_ids, *past],
        [logits, *present],
        nodes=build.tape.nodes,
        initializers=build.tape.initializers,
        opset_imports={"": OPSET, CONTRIB: 1},
        name=config.architecture,
    )
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="posttrainllm")


def _input(name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def _kv(name: str, config: ModelConfig) -> ir.Value:
    return _input(name, ir.DataType.FLOAT, ["batch", config.kv_heads, "capacity", padded_head_dim(config)])


def _lengths(build: _Builder, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
    """GroupQueryAttention's two lengths: last valid position [batch], total length (a scalar)."""
    counted = build.op("ReduceSum", mask, build.ints("axis_1", [1]), name="valid", keepdims=0)
    last = build.op("Sub", counted, build.ints("one", [1]), name="last")
    seqlens = build.op("Cast", last, name="seqlens_k", to=ir.DataType.INT32.value)
    shape = build.op("Shape", mask, name="total_1d", start=1)
    total = build.op("Squeeze", shape, build.ints("axis_0", [0]), name="total")
    return seqlens, build.op("Cast", total, name="total_sequence_length", to=ir.DataType.INT32.value)


def _embed(build: _Builder, ids: ir.Value, position_ids: ir.Value) -> ir.Value:
    tokens = build.op("Gather", build.weight("model.embed_tokens.weight"), ids, name="tokens")
    table = build.weight("model.embed_positions.weight")
    return build.op("Add", tokens, build.op("Gather", table, position_ids, name="positions"), name="hidden.0")


def _norm(build: _Builder, hidden: ir.Value, name: str) -> ir.Value:
    return build.op(
        "LayerNormalization",
        hidden,
        build.weight(f"{name}.weight"),
        build.weight(f"{name}.bias"),
        name=f"{name}.out",
        axis=-1,
        epsilon=build.config.norm_eps,
    )


def _add_norm(
    build: _Builder, mixed: ir.Value, hidden: ir.Value, bias: ir.Value, name: str
) -> tuple[ir.Value, ir.Value]:
    """Norm of the new residual stream, and that stream: `mixed + bias + hidden`."""
    normed, _, _, total = build.ops(
        "SkipLayerNormalization",
        mixed,
        hidden,
        build.weight(f"{name}.weight"),
        build.weight(f"{name}.bias"),
        bias,
        names=[f"{name}.out", "", "", f"{name}.in"],
        domain=CONTRIB,
        epsilon=build.config.norm_eps,
    )
    return normed, total


def _attention(
    build: _Builder,
    normed: ir.Value,
    layer: int,
    past: Sequence[ir.Value],
    lengths: tuple[ir.Value, ir.Value],
) -> Sequence[ir.Value]:
    """Attention's output before its bias, then the grown key and value buffers."""
    config, name = build.config, f"model.layers.{layer}.self_attn"
    dim = padded_head_dim(config)
    qkv = _packed_qkv(build, normed, name)
    mixed, key, value = build.ops(
        "GroupQueryAttention",
        qkv,
        None,
        None,
        *past,
        *lengths,
        names=[f"{name}.mixed", f"present.{layer}.key", f"present.{layer}.value"],
        domain=CONTRIB,
        num_heads=config.heads,
        kv_num_heads=config.kv_heads,
        scale=1 / math.sqrt(config.head_dim),
    )
    for buffer in (key, value):
        buffer.type = ir.TensorType(ir.DataType.FLOAT)
        buffer.shape = ir.Shape(["batch", config.kv_heads, "capacity", dim])

    def output_weight() -> Weights:
        rows = build.checkpoint.tensor(f"{name}.o_proj.weight").T
        return _pad_heads(rows, config.heads, config.head_dim, dim)

    shape = (config.heads * dim, config.hidden_size)
    weight = build.lazy(f"{name}.o_proj.weight", shape, output_weight)
    return [build.op("MatMul", mixed, weight, name=f"{name}.o_proj.out"), key, value]


def _packed_qkv(build: _Builder, normed: ir.Value, name: str) -> ir.Value:
    """Query, key and value of all heads side by side, each head zero-padded."""
    config, dim = build.config, padded_head_dim(build.config)
    parts = {"q_proj": config.heads, "k_proj": config.kv_heads, "v_proj": config.kv_heads}
    width = sum(parts.values()) * dim

    def weight() -> Weights:
        packed = np.zeros((config.hidden_size, width), np.float32)
        column = 0
        for part, heads in parts.items():
            rows = _pad_heads(build.checkpoint.tensor(f"{name}.{part}.weight"), heads, config.head_dim, dim)
            packed[:, column : column + heads * dim] = rows.T
            column += heads * dim
        return packed

    def bias() -> Weights:
        tensors = [(build.checkpoint.tensor(f"{name}.{part}.bias"), heads) for part, heads in parts.items()]
        return np.concatenate([_pad_heads(rows, heads, config.head_dim, dim) for rows, heads in tensors])

    qkv = build.op(
        "MatMul",
        normed,
        build.lazy(f"{name}.qkv_proj.weight", (config.hidden_size, width), weight),
        name=f"{name}.qkv",
    )
    return build.op(
        "Add", qkv, build.lazy(f"{name}.qkv_proj.bias", (width,), bias), name=f"{name}.qkv_biased"
    )


def _pad_heads(rows: Weights, heads: int, true_dim: int, dim: int) -> Weights:
    """`rows` [heads * true_dim, ...] with zero rows after each head, [heads * dim, ...]."""
    if true_dim == dim:
        return rows
    padded = np.zeros((heads, dim, *rows.shape[1:]), np.float32)
    padded[:, :true_dim] = rows.reshape(heads, true_dim, *rows.shape[1:])
    return padded.reshape(heads * dim, *rows.shape[1:])


def _mlp(build: _Builder, normed: ir.Value, name: str) -> ir.Value:
    """The MLP's output before its last bias."""
    inner = _linear(build, normed, f"{name}.up_proj")
    inner = build.op("Add", inner, build.weight(f"{name}.up_proj.bias"), name=f"{name}.up_proj.biased")
    active = build.op("Gelu", inner, name=f"{name}.active", domain=CONTRIB)
    return _linear(build, active, f"{name}.down_proj")


def _linear(build: _Builder, x: ir.Value, name: str) -> ir.Value:
    rows, columns = build.shapes[f"{name}.weight"]
    weight = build.lazy(
        f"{name}.weight", (columns, rows), lambda: build.checkpoint.tensor(f"{name}.weight").T
    )
    return build.op("MatMul", x, weight, name=f"{name}.out")


def _head(build: _Builder, normed: ir.Value, ids: ir.Value) -> ir.Value:
    """Logits [batch, new, vocab] over the token table itself, which is stored once.

    Gemm takes the table transposed as it lies; a Transpose node would be folded into a second copy.
    """
    config = build.config
    flat = build.op("Reshape", normed, build.ints("rows_of_hidden", [-1, config.hidden_size]), name="flat")
    scores = build.op("Gemm", flat, build.weight("model.embed_tokens.weight"), name="flat_logits", transB=1)
    sizes = build.op("Shape", ids, name="ids_shape")
    shape = build.op(
        "Concat", sizes, build.ints("vocab_size", [config.vocab_size]), name="logits_shape", axis=0
    )
    logits = build.op("Reshape", scores, shape, name="logits")
    logits.type = ir.TensorType(ir.DataType.FLOAT)
    logits.shape = ir.Shape(["batch", "new", config.vocab_size])
    return logits
