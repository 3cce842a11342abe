"""Nodes over weights in blocks: MatMulNBits, GatherBlockQuantized, and a product of block sums for the offsets.

x · (scale · (integer - zero) + offset), summed over a block, is what MatMulNBits gives plus the sum of the block's x
times the offset: a second, small MatMul. With the operator's own float zero points a step takes 50 times as long
(docs/decisions/0010).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from .quantised import BlockSource, Form, stack, take
from .quantize import QuantisedWeight, block_count

if TYPE_CHECKING:
    from .graph import GraphBuilder, Linear, Part

CONTRIB = "com.microsoft"
ACCURACY_LEVEL = 4  # activations in int8: 1.5 times faster for 4 bits, 17 times for 8 (docs/decisions/0010)


def quantised_linear(build: GraphBuilder, blocks: BlockSource, x: ir.Value, layer: Linear) -> ir.Value:
    """`x` times the weight of `layer`, of whose parts at least one is in blocks."""
    from .graph import Linear as Layer

    if layer.columns is not None:
        x = _true_columns(build, x, layer)
    groups = [
        (form, tuple(parts))
        for form, parts in itertools.groupby(layer.parts, lambda part: blocks.form(f"{part.module}.weight"))
    ]
    products = []
    for number, (form, parts) in enumerate(groups):
        name = layer.name if len(groups) == 1 else f"{layer.name}.{number}"
        if form is None:
            products.append(build.plain_linear(x, Layer(name, parts)))
            continue

        def read(parts: Sequence[Part] = parts) -> QuantisedWeight:
            return stack([take(blocks.weight(f"{part.module}.weight"), part.rows) for part in parts])

        weight = _Initializers(build, f"{name}.weight", form, build.linear_shape(Layer(name, parts)), read)
        products.append(weight.product(x, f"{name}.out"))
    if len(products) == 1:
        return products[0]
    return build.op("Concat", *products, name=f"{layer.name}.out", axis=-1)


def quantised_rows(
    build: GraphBuilder, blocks: BlockSource, table: str, ids: ir.Value, name: str
) -> ir.Value:
    """Rows `ids` of tensor `table`, dequantised."""
    return _table(build, blocks, table).rows(ids, name)


def quantised_scores(
    build: GraphBuilder, blocks: BlockSource, x: ir.Value, table: str, name: str
) -> ir.Value:
    """`x` times the rows of tensor `table`."""
    return _table(build, blocks, table).product(x, name)


def _table(build: GraphBuilder, blocks: BlockSource, table: str) -> _Initializers:
    form, shape = blocks.form(table), build.shapes[table]
    assert form is not None
    return _Initializers(build, table, form, (shape[0], shape[1]), lambda: blocks.weight(table), flat=True)


def _true_columns(build: GraphBuilder, x: ir.Value, layer: Linear) -> ir.Value:
    """`x` in the weight's own order of inputs: blocks run along them, so the weight's cannot be moved."""
    assert layer.columns is not None
    places = np.flatnonzero(layer.columns >= 0)
    order = np.empty(len(places), np.int64)
    order[layer.columns[places]] = places
    index = build.ints(f"{layer.name}.columns", order.tolist())
    return build.op("Gather", x, index, name=f"{layer.name}.in", axis=-1)


class _Initializers:
    """The parts of one quantised weight as initialisers. All are read from one call of `read` at a time.

    `flat` integers are [out, bytes], as GatherBlockQuantized wants them, and get their third dimension from a
    node that ONNX Runtime folds; so a table that is used twice is stored once.
    """

    def __init__(
        self,
        build: GraphBuilder,
        name: str,
        form: Form,
        shape: tuple[int, int],
        read: Callable[[], QuantisedWeight],
        *,
        flat: bool = False,
    ) -> None:
        self.build, self.name, self.form, self.shape, self.flat = build, name, form, shape, flat
        self.blocks = block_count(shape[1], form.block)
        self._read = read

    def product(self, x: ir.Value, name: str) -> ir.Value:
        """`x` times the weight."""
        outputs, inputs = self.shape
        value = self.build.op(
            "MatMulNBits",
            x,
            self._integers(flat=False),
            *self._scales_and_zeros(),
            name=f"{name}.blocks" if self.form.offsets else name,
            domain=CONTRIB,
            K=inputs,
            N=outputs,
            bits=self.form.bits,
            block_size=self.form.block,
            accuracy_level=ACCURACY_LEVEL,
        )
        if not self.form.offsets:
            return value
        sums = _block_sums(self.build, x, self.form.block)
        rest = self.build.op("MatMul", sums, self._offsets(), name=f"{name}.offsets")
        return self.build.op("Add", value, rest, name=name)

    def rows(self, ids: ir.Value, name: str) -> ir.Value:
        """Rows `ids` of the weight, [.., in]."""
        build, inputs = self.build, self.shape[1]
        padded = self.blocks * self.form.block
        # Up to 1.25 at least ONNX Runtime misreads 4-bit zero points here, so they go into what is added.
        added = self.form.offsets or (self.form.zero_points and self.form.bits == 4)
        value = build.op(
            "GatherBlockQuantized",
            self._integers(flat=True),
            ids,
            *(self._scales_and_zeros()[:1] if added else self._scales_and_zeros()),
            name=f"{name}.blocks" if added or padded != inputs else name,
            domain=CONTRIB,
            bits=self.form.bits,
            block_size=self.form.block,
            gather_axis=0,
            quantize_axis=1,
        )
        if added:
            apart = build.ints(f"blocks_{self.blocks}", [0, 0, self.blocks, self.form.block])
            value = build.op("Reshape", value, apart, name=f"{name}.apart")
            shape = (self.shape[0], self.blocks)
            table = self._stored("rows.offsets", shape, ir.DataType.FLOAT, _around_the_middle)
            rest = build.op("Gather", table, ids, name=f"{name}.offsets")
            rest = build.op("Unsqueeze", rest, build.ints("axis_3", [3]), name=f"{name}.offsets.wide")
            whole = build.ints(f"width_{padded}", [0, 0, padded])
            value = build.op("Add", value, rest, name=f"{name}.sum")
            value = build.op("Reshape", value, whole, name=name if padded == inputs else f"{name}.padded")
        if padded == inputs:
            return value
        bounds = [
            build.ints("axis_0", [0]),
            build.ints(f"width_of_{inputs}", [inputs]),
            build.ints("axis_2", [2]),
        ]
        return build.op("Slice", value, *bounds, name=name)

    def _integers(self, *, flat: bool) -> ir.Value:
        nbytes = self.form.block * self.form.bits // 8
        shapes = {True: (self.shape[0], self.blocks * nbytes), False: (self.shape[0], self.blocks, nbytes)}
        value = self._stored("integers", shapes[self.flat], ir.DataType.UINT8, lambda w: w.integers)
        if flat == self.flat:
            return value
        shape = self.build.ints(f"{self.name}.shape", shapes[flat])
        return self.build.op("Reshape", value, shape, name=f"{self.name}.integers.apart")

    def _scales_and_zeros(self) -> list[ir.Value]:
        shape = (self.shape[0], self.blocks)
        half = self.form.scales == "float16"
        kind = ir.DataType.FLOAT16 if half else ir.DataType.FLOAT
        scales = self._stored("scales", shape, kind, lambda weight: weight.scales)
        if half:
            name = f"{self.name}.scales.wide"
            if name not in self.build.initializers:
                wide = self.build.op("Cast", scales, name=name, to=ir.DataType.FLOAT.value)
                self.build.initializers[name] = wide
            scales = self.build.initializers[name]
        if not self.form.zero_points:
            return [scales]
        packed = (self.shape[0], -(-self.blocks * self.form.bits // 8))
        return [scales, self._stored("zero_points", packed, ir.DataType.UINT8, lambda w: w.zero_points)]

    def _offsets(self) -> ir.Value:
        """[blocks, out]."""
        shape = (self.blocks, self.shape[0])
        return self._stored("offsets", shape, ir.DataType.FLOAT, lambda weight: _offsets_of(weight).T)

    def _stored(
        self,
        part: str,
        shape: tuple[int, ...],
        kind: ir.DataType,
        choose: Callable[[QuantisedWeight], NDArray[Any] | None],
    ) -> ir.Value:
        name, known = f"{self.name}.{part}", self.build.initializers

        def make() -> NDArray[Any]:
            values = choose(self._weight())
            assert values is not None
            return values.reshape(shape)

        if name not in known:
            known[name] = self.build.stored(name, shape, kind, make)
        return known[name]

    def _weight(self) -> QuantisedWeight:
        """The weight, read once for all its parts: they are written one after the other."""
        if self.build.last_blocks is None or self.build.last_blocks[0] != self.name:
            self.build.last_blocks = None  # let go of it before the next is read
            self.build.last_blocks = (self.name, self._read())
        return self.build.last_blocks[1]


def _offsets_of(weight: QuantisedWeight) -> NDArray[Any]:
    assert weight.offsets is not None
    return weight.offsets


def _around_the_middle(weight: QuantisedWeight) -> NDArray[Any]:
    """The offsets that go with the zero point 2**(bits - 1), whatever the weight's are."""
    middle = 1 << (weight.bits - 1)
    shift = weight.scales * (middle - weight.unpacked_zero_points().astype(np.float32))
    return shift if weight.offsets is None else shift + weight.offsets


def _block_sums(build: GraphBuilder, x: ir.Value, block: int) -> ir.Value:
    """Sums of `x` [batch, new, in] over each block, [batch, new, blocks]."""
    name = f"{x.name}.sums_{block}"
    if name not in build.initializers:
        apart = build.op("Reshape", x, build.ints(f"blocks_of_{block}", [0, 0, -1, block]), name=f"{name}.in")
        build.initializers[name] = build.op(
            "ReduceSum", apart, build.ints("axis_3", [3]), name=name, keepdims=0
        )
    return build.initializers[name]
