"""Token tables that a graph of another exporter holds twice: once as it is, once turned for the head.

torch folds the transposition of a tied head into a second copy of the table. Here the head reads the table as it lies: Gemm
with transB over the flattened rows, and a Reshape back, in ai.onnx operators of any opset from 13 on.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def share_tables(model: ir.Model) -> int:
    """Let each float32 MatMul by a turned copy of a table that Gather reads use the table; how many there were."""
    graph, found = model.graph, 0
    tables = {
        node.inputs[0]
        for node in graph
        if node.op_type == "Gather" and node.inputs[0] is not None and _is_matrix(node.inputs[0])
    }
    for node in list(graph):
        copy = node.inputs[1] if node.op_type == "MatMul" and node.domain == "" else None
        if copy is None or not _is_matrix(copy) or copy.is_graph_output():
            continue
        table = next((table for table in tables if _turned(table, copy)), None)
        if table is not None:
            _use_table(graph, node, table)
            if not copy.uses():
                del graph.initializers[str(copy.name)]
            found += 1
    return found


def _is_matrix(value: ir.Value) -> bool:
    tensor = value.const_value
    return (
        value.is_initializer()
        and tensor is not None
        and tensor.dtype == ir.DataType.FLOAT
        and len(tensor.shape) == 2
    )


def _turned(table: ir.Value, copy: ir.Value) -> bool:
    one, other = table.const_value, copy.const_value
    assert one is not None
    assert other is not None
    if one.shape.numpy() != other.shape.numpy()[::-1]:
        return False
    return np.array_equal(one.numpy().T, other.numpy())


def _use_table(graph: ir.Graph, node: ir.Node, table: ir.Value) -> None:
    """`node`, hidden times the turned `table`, becomes the last step of the same by the table itself."""
    hidden, name = node.inputs[0], node.outputs[0].name
    assert table.const_value is not None
    rows = int(table.const_value.shape.numpy()[0])

    def constant(part: str, values: list[int]) -> ir.Value:
        tensor = ir.Tensor(np.array(values, np.int64), name=f"{name}.{part}")
        value = ir.Value(name=tensor.name, const_value=tensor)
        graph.register_initializer(value)
        return value

    steps: list[ir.Node] = []

    def op(kind: str, part: str, *inputs: ir.Value | None, **attributes: int) -> ir.Value:
        step = ir.node(kind, inputs, attributes, name=f"{name}.{part}/{kind}")
        step.outputs[0].name = f"{name}.{part}"
        steps.append(step)
        return step.outputs[0]

    flat = op("Flatten", "rows", hidden, axis=-1)
    scores = op("Gemm", "flat", flat, table, transB=1)
    places = op("Gather", "places", op("Shape", "sizes", hidden), constant("first_two", [0, 1]), axis=0)
    shape = op("Concat", "shape", places, constant("vocab_size", [rows]), axis=0)
    graph.insert_before(node, steps)
    node.op_type = "Reshape"
    node.replace_input_with(0, scores)
    node.replace_input_with(1, shape)
