"""How fast the forms of a quantised product are: ratios of runs side by side, for docs/decisions/0010.

    python benchmarks/quantised_products.py

Per form the best of interleaved runs over eight weights of one shape, on one thread, over that of 4 bits in blocks of 32
with rounded activations. One row is a decode step, 64 a prefill.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

COPIES, ROUNDS = 8, 40


@dataclass(frozen=True)
class Product:
    """A form: `level` 1 computes with float32 activations, 4 with int8; `extra` is what stands for the minimum."""

    bits: int
    block: int
    level: int = 4
    extra: str = "none"

    @property
    def name(self) -> str:
        return f"{self.bits} bits, block {self.block}, level {self.level}, {self.extra}"


FORMS = [
    Product(4, 32),
    *(Product(bits, block, level) for bits in (4, 8) for block in (16, 32, 64, 128) for level in (1, 4)),
    Product(4, 32, extra="integer zero points"),
    Product(4, 32, extra="float zero points"),
    Product(4, 32, extra="product of block sums"),
    Product(8, 32, extra="product of block sums"),
]


def session(form: Product, inputs: int, outputs: int) -> ort.InferenceSession:
    """`COPIES` products of one x, so that the call costs little beside them."""
    rng = np.random.default_rng(0)
    blocks = -(-inputs // form.block)
    arrays: dict[str, NDArray[Any]] = {}
    nodes = []
    if form.extra == "product of block sums":
        arrays |= {"apart": np.array([0, 0, blocks, form.block]), "last": np.array([3])}
        nodes += [
            helper.make_node("Reshape", ["x", "apart"], ["blocks"]),
            helper.make_node("ReduceSum", ["blocks", "last"], ["sums"], keepdims=0),
        ]
    for i in range(COPIES):
        arrays[f"q{i}"] = rng.integers(0, 256, (outputs, blocks, form.block * form.bits // 8), np.uint8)
        arrays[f"s{i}"] = rng.random((outputs, blocks), np.float32)
        names, summed = ["x", f"q{i}", f"s{i}"], form.extra == "product of block sums"
        if form.extra.endswith("zero points"):
            names.append(f"z{i}")
            packed = rng.integers(0, 256, (outputs, -(-blocks * form.bits // 8)), np.uint8)
            wide = rng.random((outputs, blocks), np.float32) * 15
            arrays[f"z{i}"] = wide if form.extra.startswith("float") else packed
        nodes.append(
            helper.make_node(
                "MatMulNBits",
                names,
                [f"p{i}" if summed else f"y{i}"],
                domain="com.microsoft",
                K=inputs,
                N=outputs,
                bits=form.bits,
                block_size=form.block,
                accuracy_level=form.level,
            )
        )
        if summed:
            arrays[f"m{i}"] = rng.random((blocks, outputs), np.float32)
            nodes.append(helper.make_node("MatMul", ["sums", f"m{i}"], [f"r{i}"]))
            nodes.append(helper.make_node("Add", [f"p{i}", f"r{i}"], [f"y{i}"]))
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "n", inputs])],
        [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(COPIES)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def main() -> None:
    for inputs, outputs in ((512, 1536), (1536, 512)):
        sessions = {form: session(form, inputs, outputs) for form in dict.fromkeys(FORMS)}
        for rows in (1, 64):
            x = np.random.default_rng(1).standard_normal((1, rows, inputs), np.float32)
            best = dict.fromkeys(sessions, float("inf"))
            for _ in range(ROUNDS if rows == 1 else ROUNDS // 5):
                for form, run in sessions.items():
                    start = time.perf_counter()
                    run.run(None, {"x": x})
                    best[form] = min(best[form], time.perf_counter() - start)
            print(f"{inputs} x {outputs}, {rows} rows")
            for form, seconds in best.items():
                print(f"  {form.name:<48} {seconds / best[FORMS[0]]:6.2f}")


if __name__ == "__main__":
    main()
