"""The graph while it is recorded: nodes, lazy initialisers, and the one place where linear weights enter it.

Weights stay in the checkpoint until the file is written: every initialiser is lazy and is read, put into rows
and transposed when its turn comes. What the source holds in 16 bits and no arithmetic touches is
written in 16 bits, half the size and exact; a Cast, which ONNX Runtime folds when it loads the graph, widens it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir import tape

from .architectures import tensor_shapes
from .block_nodes import quantised_linear, quantised_rows, quantised_scores
from .checkpoint import Checkpoint
from .quantised import BlockSource
from .quantize import QuantisedWeight

CONTRIB = "com.microsoft"
INLINE_NBYTES = 256
HALF = ".half"  # ends the name of what is stored in 16 bits and cast
Weights = NDArray[np.float32]
Rows = NDArray[np.intp]

_DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}


@dataclass(frozen=True)
class Part:
    """A module of the checkpoint within a linear layer of the graph. `rows` says for each output which row of
    the module it is, -1 for a row of zeros; None for all of them in order."""

    module: str
    rows: Rows | None = None


@dataclass(frozen=True)
class Linear:
    """A linear layer of the graph: `parts` side by side. `columns` orders its inputs as `Part.rows` does rows."""

    name: str
    parts: tuple[Part, ...]
    columns: Rows | None = None


class GraphBuilder:
    """The graph while it is being recorded, and the checkpoint that its weights come from.

    Weights that `blocks` knows are taken from there, in blocks.
    """

    def __init__(self, checkpoint: Checkpoint, blocks: BlockSource | None = None) -> None:
        self.checkpoint = checkpoint
        self.blocks = blocks
        self.config = checkpoint.config
        self.shapes = tensor_shapes(checkpoint.config)
        self.tape = tape.Tape()
        self.initializers: dict[str, ir.Value] = {}
        self.last_blocks: tuple[str, QuantisedWeight] | None = None

    def op(
        self,
        kind: str,
        *inputs: ir.Value | None,
        name: str,
        domain: str = "",
        **attributes: float | Sequence[int],
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
        **attributes: float | Sequence[int],
    ) -> Sequence[ir.Value]:
        """One node with outputs called `names`; an empty name is an output that is not wanted."""
        values = self.tape.op_multi_out(
            kind, inputs, attributes, num_outputs=len(names), domain=domain, name=f"{names[0]}/{kind}"
        )
        for value, name in zip(values, names, strict=True):
            value.name = name
        return values

    def linear(self, x: ir.Value, layer: Linear) -> ir.Value:
        """`x` times the weight of `layer`, without its bias."""
        if self.blocks and any(self.blocks.form(f"{part.module}.weight") for part in layer.parts):
            return quantised_linear(self, self.blocks, x, layer)
        return self.plain_linear(x, layer)

    def plain_linear(self, x: ir.Value, layer: Linear) -> ir.Value:
        """As `linear`, with the weight in floats."""
        dtype = self._common_dtype([f"{part.module}.weight" for part in layer.parts])
        weight = self.lazy(
            f"{layer.name}.weight", self.linear_shape(layer)[::-1], lambda: self.linear_weight(layer).T, dtype
        )
        return self.op("MatMul", x, weight, name=f"{layer.name}.out")

    def linear_shape(self, layer: Linear) -> tuple[int, int]:
        """Outputs and inputs of `layer`."""
        outputs = 0
        for part in layer.parts:
            outputs += len(part.rows) if part.rows is not None else self.shapes[f"{part.module}.weight"][0]
        if layer.columns is not None:
            return outputs, len(layer.columns)
        return outputs, self.shapes[f"{layer.parts[0].module}.weight"][1]

    def linear_weight(self, layer: Linear) -> Weights:
        """The weight of `layer`, [out, in]."""
        weights = [
            take_rows(self.checkpoint.tensor(f"{part.module}.weight"), part.rows) for part in layer.parts
        ]
        weight = weights[0] if len(weights) == 1 else np.concatenate(weights)
        return weight if layer.columns is None else take_rows(weight.T, layer.columns).T

    def linear_bias(self, layer: Linear) -> ir.Value:
        """The bias of `layer`, [out]."""
        names = [f"{part.module}.bias" for part in layer.parts]

        def make() -> Weights:
            parts = zip(names, layer.parts, strict=True)
            return np.concatenate(
                [take_rows(self.checkpoint.tensor(name), part.rows) for name, part in parts]
            )

        shape = self.linear_shape(layer)[:1]
        return self.lazy(f"{layer.name}.bias", shape, make, self._common_dtype(names))

    def rows(self, table: str, ids: ir.Value, name: str) -> ir.Value:
        """Rows `ids` of tensor `table`."""
        if self.blocks and self.blocks.form(table):
            return quantised_rows(self, self.blocks, table, ids, name)
        return self.op("Gather", self.weight(table), ids, name=name)

    def scores(self, x: ir.Value, table: str, name: str) -> ir.Value:
        """`x` [batch, places, hidden] times the rows of tensor `table`: [batch, places, rows of the table].

        Gemm takes the table transposed as it lies; a Transpose node would be folded into a second copy.
        """
        if self.blocks and self.blocks.form(table):
            return quantised_scores(self, self.blocks, x, table, name)
        count, width = self.shapes[table]
        flat = self.op("Reshape", x, self.ints("rows_of_hidden", [-1, width]), name=f"{name}.in")
        found = self.op("Gemm", flat, self.weight(table), name=f"{name}.flat", transB=1)
        sizes = self.op("Shape", x, name=f"{name}.places", end=2)
        shape = self.op("Concat", sizes, self.ints("vocab_size", [count]), name=f"{name}.shape", axis=0)
        return self.op("Reshape", found, shape, name=name)

    def weight(self, name: str) -> ir.Value:
        """The checkpoint's tensor `name` as it is; stored once however often it is used."""
        dtype = self.checkpoint.dtype(name)
        return self.lazy(name, self.shapes[name], lambda: self.checkpoint.tensor(name), dtype)

    def lazy(
        self, name: str, shape: tuple[int, ...], make: Callable[[], Weights], dtype: str = "float32"
    ) -> ir.Value:
        """An initialiser whose values come from `make` when the file is written, or now if it is tiny.

        It is stored in `dtype` and widened to float32 in the graph.
        """
        if name in self.initializers:
            return self.initializers[name]
        kind = _DTYPES[dtype]
        half = kind != ir.DataType.FLOAT
        value = self.stored(name + HALF if half else name, shape, kind, make)
        if half:
            value = self.op("Cast", value, name=name, to=ir.DataType.FLOAT.value)
        self.initializers[name] = value
        return value

    def stored(
        self, name: str, shape: tuple[int, ...], kind: ir.DataType, make: Callable[[], NDArray[np.generic]]
    ) -> ir.Value:
        """An initialiser of type `kind` as `make` gives it, converted to `kind`."""

        def read() -> ir.TensorProtocol:
            return ir.Tensor(np.ascontiguousarray(make(), kind.numpy()), name=name)

        # The graph itself holds what is tiny; onnx-ir would wrap our refusals while it serialises it.
        tiny = kind.itemsize * math.prod(shape) <= INLINE_NBYTES
        tensor = read() if tiny else ir.LazyTensor(read, kind, ir.Shape(shape), name=name)
        return self.tape.initializer(tensor, name)

    def ints(self, name: str, values: Sequence[int]) -> ir.Value:
        """A small one-dimensional int64 initialiser."""
        return self._constant(name, np.array(values, np.int64))

    def number(self, name: str, value: float) -> ir.Value:
        """A float32 scalar."""
        return self._constant(name, np.array(value, np.float32))

    def _constant(self, name: str, values: NDArray[np.generic]) -> ir.Value:
        if name not in self.initializers:
            self.initializers[name] = self.tape.initializer(ir.Tensor(values, name=name))
        return self.initializers[name]

    def _common_dtype(self, names: Sequence[str]) -> str:
        kinds = {self.checkpoint.dtype(name) for name in names}
        return kinds.pop() if len(kinds) == 1 else "float32"


def take_rows(values: Weights, rows: Rows | None) -> Weights:
    """`values[rows]`, with zeros where a row is -1."""
    if rows is None:
        return values
    taken: Weights = values[rows]
    taken[rows < 0] = 0
    return taken


def graph_value(name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    """An input, or the type and shape that an output gets."""
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
