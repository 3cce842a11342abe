"""A float32 graph as one that computes in float16: weights, activations, keys and values. Logits stay float32.

Works on the finished graph, whatever the architecture: every float32 initialiser, input and output becomes
float16, and the casts that widened stored halves go.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from ..runtime.errors import CheckpointError
from .graph import INLINE_NBYTES

_WIDE = (ir.DataType.FLOAT, ir.DataType.BFLOAT16)


def to_half(model: ir.Model, source: Path) -> None:
    """Turn `model`, of checkpoint `source`, into float16, in place. Weights stay lazy.

    Raises CheckpointError, at once or when the weights are written, where float16 is too small for them.
    """
    graph = model.graph
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype in _WIDE:
            value.const_value = _halved(tensor, source)
            value.dtype = ir.DataType.FLOAT16
    for node in list(graph):
        if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT.value:
            stored, widened = node.inputs[0], node.outputs[0]
            assert stored is not None
            widened.replace_all_uses_with(stored)
            graph.remove(node, safe=True)
    for value in (*graph.inputs, *graph.outputs):
        if value.dtype == ir.DataType.FLOAT:
            value.dtype = ir.DataType.FLOAT16
    _widen_logits(graph)


def _halved(tensor: ir.TensorProtocol, source: Path) -> ir.TensorProtocol:
    def read() -> ir.TensorProtocol:
        values = tensor.numpy().astype(np.float32)
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if not np.isfinite(half).all():
            found = f"{tensor.name} holds {float(np.abs(values).max()):.3g}"
            raise CheckpointError(source, found, "at most 65504, float16's largest", "export it as fp32")
        return ir.Tensor(half, name=tensor.name)

    if 2 * tensor.size <= INLINE_NBYTES:  # see GraphBuilder.stored
        return read()
    return ir.LazyTensor(read, ir.DataType.FLOAT16, ir.Shape(tensor.shape.numpy()), name=tensor.name)


def _widen_logits(graph: ir.Graph) -> None:
    (place,) = (i for i, value in enumerate(graph.outputs) if value.name == "logits")
    half = graph.outputs[place]
    half.name = "logits.half"
    node = ir.node("Cast", [half], {"to": ir.DataType.FLOAT.value}, name="logits/Cast")
    wide = node.outputs[0]
    wide.name, wide.shape, wide.type = "logits", half.shape, ir.TensorType(ir.DataType.FLOAT)
    graph.append(node)
    graph.outputs[place] = wide
