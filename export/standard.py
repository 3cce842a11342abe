"""The `standard` flavour: a fused decoder graph rewritten in ai.onnx operators of opset 18.

For engines that know no contrib operator, and for CoreML. One builder writes the fused graph; here every
com.microsoft operator in it is replaced by its definition (docs/ContribOperators.md of ONNX Runtime, whose
kernels decide in the tests). Attention becomes MatMul, Softmax, MatMul over keys and values that grow by
concatenation. What is masked out counts exactly zero times: so a first position that the mask hides can
stand in for a past of length zero, which CoreML does not take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir import tape
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ..runtime.errors import UsageError

OPSET = 18
MASKED = -65504.0  # the lowest fp16: its exponential is zero there and in fp32, and it is no infinity
_CONTRIB = ("com.microsoft", "com.microsoft.nchwc")
_LAST = np.iinfo(np.int64).max


def to_standard(model: ir.Model) -> None:
    """Rewrite `model` in place. Raises UsageError for an operator that has no definition here.

    Inputs and outputs keep their names; the dimension of past keys and values is called `past` and that of the
    present `total`, since they are no longer the same buffer.
    """
    for value in model.graph.inputs:
        if value.dtype not in (ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.INT32):
            raise UsageError("--graph standard", f"input {value.name} of {value.dtype}", "a graph in fp32")
    lowering = _Lowering(model.graph)
    for node in list(model.graph):
        lower = _LOWERED.get(node.op_type)
        if lower is not None:
            lowering.replace(node, lower)
        elif node.domain in _CONTRIB:
            raise UsageError(
                "--graph standard", f"no definition of {node.op_type} in ai.onnx operators", "--graph fused"
            )
    RemoveUnusedNodesPass()(model)
    for imported in list(model.graph.opset_imports):
        if imported in _CONTRIB:
            del model.graph.opset_imports[imported]
    model.graph.opset_imports[""] = OPSET
    for values, dimension in ((model.graph.inputs, "past"), (model.graph.outputs, "total")):
        for value in values:
            if value.shape is not None and len(value.shape) == 4:
                value.shape = ir.Shape([*value.shape[:2], dimension, value.shape[3]])


class _Lowering:
    """The graph while its operators are replaced, one at a time; `op` records new nodes before the current one."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._tape = tape.Tape()
        self._seen: dict[str, ir.Value] = {}
        self._label = ""
        self.inputs = {value.name: value for value in graph.inputs}

    def replace(self, node: ir.Node, lower: _Lower) -> None:
        """Put what `lower` makes of `node` in its place."""
        self._tape = tape.Tape()
        self._label = node.name or str(node.outputs[0].name)
        made = lower(self, node)
        wanted = [(old, new) for old, new in zip(node.outputs, made, strict=False) if old.name]
        ir.convenience.replace_nodes_and_values(
            self._graph,
            node,
            [node],
            self._tape.nodes,
            [old for old, _ in wanted],
            [new for _, new in wanted],
        )

    def op(self, kind: str, *inputs: ir.Value | None, **attributes: float | Sequence[int]) -> ir.Value:
        """One new node of ai.onnx; its output has a name of its own."""
        return self.ops(kind, *inputs, count=1, **attributes)[0]

    def ops(
        self, kind: str, *inputs: ir.Value | None, count: int, **attributes: float | Sequence[int]
    ) -> Sequence[ir.Value]:
        name = f"{self._label}/{len(self._tape.nodes)}_{kind}"
        values = self._tape.op_multi_out(kind, inputs, attributes, num_outputs=count, name=name)
        for i, value in enumerate(values):
            value.name = f"{name}.{i}"
        return values

    def once(self, name: str, make: Callable[[], ir.Value]) -> ir.Value:
        """A value that every layer shares, made when the first one asks for it."""
        if name not in self._seen:
            label, self._label = self._label, name
            self._seen[name] = make()
            self._label = label
        return self._seen[name]

    def ints(self, *values: int) -> ir.Value:
        return self._constant(f"ints{list(values)}", np.array(values, np.int64))

    def number(self, value: float) -> ir.Value:
        return self._constant(f"number[{value!r}]", np.array(value, np.float32))

    def _constant(self, name: str, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> ir.Value:
        if name not in self._seen:
            value = ir.Value(name=name, const_value=ir.Tensor(array, name=name))
            self._graph.register_initializer(value)
            self._seen[name] = value
        return self._seen[name]

    def reshape(self, x: ir.Value, *shape: int) -> ir.Value:
        return self.op("Reshape", x, self.ints(*shape))

    def slice(self, x: ir.Value, start: ir.Value, end: int, axis: int) -> ir.Value:
        return self.op("Slice", x, start, self.ints(end), self.ints(axis))


_Lower = Callable[[_Lowering, ir.Node], Sequence[ir.Value]]


def _get(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else float(attribute.value)


def _given(node: ir.Node, place: int) -> ir.Value | None:
    """An optional input: None if it is left out."""
    value = node.inputs[place] if place < len(node.inputs) else None
    return value if value is not None and value.name else None


def _required(node: ir.Node, place: int) -> ir.Value:
    value = _given(node, place)
    if value is None:
        raise _unsupported(node, f"input {place} left out")
    return value


def _unsupported(node: ir.Node, found: str) -> UsageError:
    return UsageError("--graph standard", f"{node.op_type} with {found}", "--graph fused")


# Norms and activations.


def _skip_layer_norm(g: _Lowering, node: ir.Node) -> Sequence[ir.Value]:
    total = _residual(g, node, bias=4)
    gain, shift = _required(node, 2), _given(node, 3)
    epsilon = _get(node, "epsilon", 1e-12)
    normed = g.op("LayerNormalization", total, gain, shift, axis=-1, epsilon=epsilon)
    return [normed, total, total, total]


def _skip_rms_norm(g: _Lowering, node: ir.Node) -> Sequence[ir.Value]:
    total = _residual(g, node, bias=3)
    normed = _rms(g, total, _required(node, 2), _get(node, "epsilon", 1e-12))
    return [normed, total, total, total]


def _rms_norm(g: _Lowering, node: ir.Node) -> Sequence[ir.Value]:
    if _get(node, "axis", -1) != -1:
        raise _unsupported(node, "another axis than the last")
    return [_rms(g, _required(node, 0), _required(node, 1), _get(node, "epsilon", 1e-5))]


def _residual(g: _Lowering, node: ir.Node, bias: int) -> ir.Value:
    total = g.op("Add", _required(node, 0), _required(node, 1))
    added = _given(node, bias)
    return total if added is None else g.op("Add", total, added)


def _rms(g: _Lowering, x: ir.Value, gain: ir.Value, epsilon: float) -> ir.Value:
    mean = g.op("ReduceMean", g.op("Mul", x, x), g.ints(-1), keepdims=1)
    root = g.op("Sqrt", g.op("Add", mean, g.number(epsilon)))
    return g.op("Mul", g.op("Div", x, root), gain)


def _gelu(g: _Lowering, node: ir.Node) -> Sequence[ir.Value]:
    attribute = node.attributes.get("approximate")
    if attribute is not None and attribute.as_string() == "tanh":
        return _fast_gelu(g, node)
    x = _biased(g, node)
    erf = g.op("Erf", g.op("Mul", x, g.number(math.sqrt(0.5))))
    return [g.op("Mul", g.op("Mul", x, g.number(0.5)), g.op("Add", erf, g.number(1.0)))]


def _fast_gelu(g: _Lowering, node: ir.Node) -> Sequence[ir.Value]:
    x = _biased(g, node)
    cube = g.op("Mul", g.op("Mul", x, x), x)
    inner = g.op("Add", x, g.op("Mul", cube, g.number(0.044715)))
    tanh = g.op("Tanh", g.op("Mul", inner, g.number(math.sqrt(2 / math.pi))))
    return [g.op("Mul", g.op("Mul", x, g.number(0.5)), g.op("Add", tanh, g.number(1.0)))]


def _quick_gelu(g: _Lowering, node: ir.Node) -> Sequence[ir.Value]:
    x = _required(node, 0)
    return [g.op("Mul", x, g.op("Sigmoid", g.op("Mul", x, g.number(_get(node, "alpha", 1.702)))))]


def _biased(g: _Lowering, node: ir.Node) -> ir.Value:
    bias = _given(node, 1)
    return _required(node, 0) if bias is None else g.op("Add", _required(node, 0), bias)


# Attention.


def _attention(g: _Lowering, node: ir.Node) -> Sequence[ir.Value]:
    """GroupQueryAttention: outputs, then keys and values with the new ones behind the past ones."""
    for place in range(10, len(node.inputs)):
        if _given(node, place) is not None:
            raise _unsupported(node, f"its input {place}")
    for name in ("smooth_softmax", "sliding_window_cache", "kv_cache_bit_width"):
        if _get(node, name, 0):
            raise _unsupported(node, name)
    heads, kv_heads = int(_get(node, "num_heads", 0)), int(_get(node, "kv_num_heads", 0))
    past = [_required(node, 3), _required(node, 4)]
    size = past[0].shape[3] if past[0].shape is not None else None
    if not isinstance(size, int):
        raise _unsupported(node, "a head size that the graph does not state")
    query, key, value = _split_heads(g, node, heads, kv_heads, size)
    if _get(node, "do_rotary", 0):
        angles = _angles(g, node, 7), _angles(g, node, 8), _half(node, 7)
        interleaved = bool(_get(node, "rotary_interleaved", 0))
        query, key = (_rotate(g, x, *angles, size, interleaved=interleaved) for x in (query, key))
    grown = [g.op("Concat", old, new, axis=2) for old, new in zip(past, (key, value), strict=True)]
    mixed = _mix(g, node, query, grown[0], grown[1], heads // kv_heads, size)
    return [mixed, *grown]


def _split_heads(
    g: _Lowering, node: ir.Node, heads: int, kv_heads: int, size: int
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Query, key and value as [batch, heads, new, size]; they may come packed in the first input."""
    query, key, value = _required(node, 0), _given(node, 1), _given(node, 2)
    if key is None or value is None:
        sizes = g.ints(heads * size, kv_heads * size, kv_heads * size)
        query, key, value = g.ops("Split", query, sizes, count=3, axis=-1)

    def apart(x: ir.Value, count: int) -> ir.Value:
        return g.op("Transpose", g.reshape(x, 0, 0, count, size), perm=[0, 2, 1, 3])

    return apart(query, heads), apart(key, kv_heads), apart(value, kv_heads)


def _mix(
    g: _Lowering, node: ir.Node, query: ir.Value, key: ir.Value, value: ir.Value, group: int, size: int
) -> ir.Value:
    """softmax(query · keyᵀ · scale + bias) · value, as [batch, new, heads · size]."""
    heads = int(_get(node, "num_heads", 0))
    scale = _get(node, "scale", 0.0) or 1 / math.sqrt(size)
    bias = _bias(g, int(_get(node, "local_window_size", -1)), five=group > 1)
    turned = g.op("Transpose", key, perm=[0, 1, 3, 2])
    if group > 1:  # [batch, kv heads, group, new, size] against [batch, kv heads, 1, size, total]
        query = g.reshape(query, 0, heads // group, group, -1, size)
        turned, value = (g.op("Unsqueeze", x, g.ints(2)) for x in (turned, value))
    scores = g.op("MatMul", g.op("Mul", query, g.number(scale)), turned)
    softcap = _get(node, "softcap", 0.0)
    if softcap:
        capped = g.op("Tanh", g.op("Div", scores, g.number(softcap)))
        scores = g.op("Mul", capped, g.number(softcap))
    mixed = g.op("MatMul", g.op("Softmax", g.op("Add", scores, bias), axis=-1), value)
    mixed = g.op("Transpose", mixed, perm=[0, 3, 1, 2, 4] if group > 1 else [0, 2, 1, 3])
    return g.reshape(mixed, 0, 0, heads * size)


def _bias(g: _Lowering, window: int, *, five: bool) -> ir.Value:
    """0 where a query may look and MASKED where not: [batch, 1, new, total], or with one more 1 for groups."""

    def make() -> ir.Value:
        mask = g.inputs["attention_mask"]
        keys = g.op("Unsqueeze", _ranks(g), g.ints(1))
        queries = g.op("Unsqueeze", _query_ranks(g), g.ints(2))
        allowed = g.op("LessOrEqual", keys, queries)
        seen = g.op("Cast", g.op("Unsqueeze", mask, g.ints(1)), to=ir.DataType.BOOL.value)
        allowed = g.op("And", allowed, seen)
        if window > 0:
            reached = g.op("Greater", keys, g.op("Sub", queries, g.ints(window)))
            allowed = g.op("And", allowed, reached)
        bias = g.op("Where", allowed, g.number(0.0), g.number(MASKED))
        return g.op("Unsqueeze", bias, g.ints(1, 2) if five else g.ints(1))

    return g.once(f"attention_bias.{window}{'.grouped' if five else ''}", make)


def _ranks(g: _Lowering) -> ir.Value:
    """Which id each position holds, [batch, total]: hidden positions do not count."""

    def make() -> ir.Value:
        counted = g.op("CumSum", g.inputs["attention_mask"], g.op("Squeeze", g.ints(1), g.ints(0)))
        return g.op("Sub", counted, g.ints(1))

    return g.once("ranks", make)


def _query_ranks(g: _Lowering) -> ir.Value:
    """The ranks of the new ids, [batch, new]."""

    def make() -> ir.Value:
        new = g.op("Shape", g.inputs["input_ids"], start=1, end=2)
        return g.slice(_ranks(g), g.op("Neg", new), _LAST, 1)

    return g.once("query_ranks", make)


def _angles(g: _Lowering, node: ir.Node, place: int) -> ir.Value:
    """Cosines or sines of the new ids' positions, [batch, 1, new, rotary size / 2]."""
    table = _required(node, place)
    given = _given(node, 9)

    def make() -> ir.Value:
        positions = given if given is not None else _query_ranks(g)
        return g.op("Unsqueeze", g.op("Gather", table, positions, axis=0), g.ints(1))

    return g.once(f"{table.name}.{'ranks' if given is None else given.name}", make)


def _half(node: ir.Node, place: int) -> int:
    """How many pairs of components are rotated: the width of the table of cosines or sines."""
    shape = _required(node, place).shape
    width = shape[1] if shape is not None and len(shape) == 2 else None
    if not isinstance(width, int):
        raise _unsupported(node, "rotary tables of a shape that the graph does not state")
    return width


def _rotary(g: _Lowering, node: ir.Node) -> Sequence[ir.Value]:
    """RotaryEmbedding by itself, over [batch, new, hidden] or [batch, heads, new, size]."""
    x, positions = _required(node, 0), _required(node, 1)
    cos, sin = (
        g.op("Unsqueeze", g.op("Gather", _required(node, place), positions, axis=0), g.ints(1))
        for place in (2, 3)
    )
    half, heads = _half(node, 2), int(_get(node, "num_heads", 0))
    if positions.shape is None or len(positions.shape) != 2 or x.shape is None:
        raise _unsupported(node, "an input of a shape that the graph does not state")
    interleaved = bool(_get(node, "interleaved", 0))
    if len(x.shape) == 4:
        if not isinstance(x.shape[3], int):
            raise _unsupported(node, "a head size that the graph does not state")
        return [_rotate(g, x, cos, sin, half, x.shape[3], interleaved=interleaved)]
    hidden = x.shape[2]
    size = hidden // heads if heads and isinstance(hidden, int) else 2 * half
    apart = g.op("Transpose", g.reshape(x, 0, 0, -1, size), perm=[0, 2, 1, 3])
    turned = _rotate(g, apart, cos, sin, half, size, interleaved=interleaved)
    together = g.op("Transpose", turned, perm=[0, 2, 1, 3])
    return [g.op("Reshape", together, g.op("Shape", x))]


def _rotate(
    g: _Lowering, x: ir.Value, cos: ir.Value, sin: ir.Value, half: int, size: int, *, interleaved: bool
) -> ir.Value:
    """Rotate `half` pairs of the first components of [batch, heads, new, size]; the rest stays as it is."""
    rest: Sequence[ir.Value] = ()
    if 2 * half < size:
        x, *rest = g.ops("Split", x, g.ints(2 * half, size - 2 * half), count=2, axis=-1)
    if interleaved:  # pairs lie side by side: [..., half, 2]
        pairs = g.reshape(x, 0, 0, -1, half, 2)
        first, second = (g.op("Squeeze", part, g.ints(-1)) for part in _halves(g, pairs, 1))
    else:
        first, second = _halves(g, x, half)
    turned: Sequence[ir.Value] = (
        g.op("Sub", g.op("Mul", first, cos), g.op("Mul", second, sin)),
        g.op("Add", g.op("Mul", second, cos), g.op("Mul", first, sin)),
    )
    if interleaved:
        stacked = g.op("Concat", *(g.op("Unsqueeze", part, g.ints(-1)) for part in turned), axis=-1)
        turned = (g.reshape(stacked, 0, 0, -1, 2 * half),)
    return g.op("Concat", *turned, *rest, axis=-1)


def _halves(g: _Lowering, x: ir.Value, half: int) -> Sequence[ir.Value]:
    return g.ops("Split", x, g.ints(half, half), count=2, axis=-1)


_LOWERED: dict[str, _Lower] = {
    "SkipLayerNormalization": _skip_layer_norm,
    "SkipSimplifiedLayerNormalization": _skip_rms_norm,
    "SimplifiedLayerNormalization": _rms_norm,
    "RMSNormalization": _rms_norm,
    "Gelu": _gelu,
    "BiasGelu": _gelu,
    "FastGelu": _fast_gelu,
    "QuickGelu": _quick_gelu,
    "GroupQueryAttention": _attention,
    "RotaryEmbedding": _rotary,
}
