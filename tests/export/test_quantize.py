"""Block quantisation: packing, the error of rounding, and ONNX Runtime's operators as deciders of the form."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from posttrainllm.export.quantize import (
    BLOCKS,
    Bits,
    QuantisedWeight,
    Scheme,
    dequantise,
    pack,
    quantise,
    unpack,
)

Floats = NDArray[np.float32]
SCHEMES = [
    Scheme(bits, block, symmetric, search)
    for bits in (4, 8)
    for block in (32, 64, 128)
    for symmetric in (True, False)
    for search in (True, False)
]
schemes = st.sampled_from(SCHEMES)
matrices = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 5), st.integers(1, 150)),
    elements=st.floats(-100, 100, width=32, allow_subnormal=False),
)


def drawn(rows: int, columns: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def run(
    nodes: list[Any], arrays: dict[str, Any], feeds: dict[str, NDArray[Any]]
) -> list[NDArray[np.float32]]:
    kinds = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}
    inputs = [helper.make_tensor_value_info(n, kinds[a.dtype.name], a.shape) for n, a in feeds.items()]
    outputs = [
        helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)
        for node in nodes
        if node.output[0][0] == "y"
    ]
    stored = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: list[NDArray[np.float32]] = session.run(None, feeds)
    return found


def arrays_of(weight: QuantisedWeight) -> dict[str, Any]:
    arrays: dict[str, Any] = {"q": weight.integers, "s": weight.scales}
    return arrays if weight.zero_points is None else arrays | {"z": weight.zero_points}


@given(st.data(), st.sampled_from([4, 8]))
def test_packing_is_undone_by_unpacking(data: st.DataObject, bits: Bits) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=9))
    integers = data.draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 2**bits - 1)))
    packed = pack(integers, bits)
    assert packed.shape == (*shape[:-1], -(-shape[-1] * bits // 8))
    np.testing.assert_array_equal(unpack(packed, bits)[..., : shape[-1]], integers)


def test_the_first_of_two_is_the_low_half() -> None:
    assert pack(np.array([1, 2, 15], np.uint8), 4).tolist() == [0x21, 0x0F]


@given(matrices, schemes)
def test_rounding_to_nearest_errs_by_half_a_step_at_most(values: Floats, scheme: Scheme) -> None:
    if 0 < np.abs(values).max() < 1e-5:
        return
    plain = Scheme(scheme.bits, scheme.block, scheme.symmetric, search=False)
    weight = quantise(values, plain)
    scales = np.repeat(weight.scales, weight.block, axis=1)[:, : values.shape[1]]
    error = np.abs(values - dequantise(weight).astype(np.float64))
    assert (error <= scales * (0.5 + 1e-5)).all()


@given(matrices, schemes)
def test_the_search_is_no_worse_than_rounding(values: Floats, scheme: Scheme) -> None:
    """In squared error, over a block; up to what float16 scales cost."""
    if np.abs(values).max() < 1e-5:
        return

    def squared(search: bool) -> float:
        weight = quantise(values, Scheme(scheme.bits, scheme.block, scheme.symmetric, search))
        return float(((values - dequantise(weight).astype(np.float64)) ** 2).sum())

    size = max(float(np.abs(values).max()) * 2.0**-10, 2.0**-24 * 128)  # the least step of float16, 128 times
    float16s = values.size * size**2
    assert squared(True) <= squared(False) * 1.05 + float16s


def test_the_search_pays_on_what_weights_look_like() -> None:
    values = np.random.default_rng(0).standard_t(6, (256, 256)).astype(np.float32)
    for symmetric, wanted in ((True, 0.97), (False, 0.95)):
        errors = [
            float(((values - dequantise(quantise(values, Scheme(4, 32, symmetric, search)))) ** 2).mean())
            for search in (True, False)
        ]
        assert errors[0] < wanted * errors[1]


@given(matrices, schemes)
def test_values_on_a_grid_come_back(values: Floats, scheme: Scheme) -> None:
    """What was quantised once is quantised again without further loss, by plain rounding."""
    if 0 < np.abs(values).max() < 1e-3:
        return
    plain = Scheme(scheme.bits, scheme.block, symmetric=True, search=False)
    half = 2 ** (scheme.bits - 1) - 1
    weight = quantise(values, plain)
    integers = weight.unpacked().astype(int) - half - 1
    blocks = -(-values.shape[1] // scheme.block)
    assert integers.shape == (len(values), blocks, scheme.block)
    assert np.abs(integers).max() <= half
    assert weight.scales.astype(np.float16).astype(np.float32).tolist() == weight.scales.tolist()


@pytest.mark.parametrize("scheme", SCHEMES[:1] + SCHEMES[-1:])
def test_blocks_of_zeros_stay_zero(scheme: Scheme) -> None:
    values = drawn(4, 2 * scheme.block)
    values[:, : scheme.block] = 0
    assert not dequantise(quantise(values, scheme))[:, : scheme.block].any()


@pytest.mark.parametrize("size", [1e-7, 1e7])
def test_sizes_without_float16_scales_are_refused(size: float) -> None:
    with pytest.raises(ValueError, match="float16"):
        quantise(np.full((2, 32), size, np.float32), Scheme(4))


@pytest.mark.parametrize("columns", [96, 128, 70])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_matmulnbits_computes_with_the_dequantised_values(
    bits: Bits, block: int, symmetric: bool, columns: int
) -> None:
    """With fp32 accumulation, one row and several, a short last block included."""
    weight = quantise(drawn(40, columns), Scheme(bits, block, symmetric))
    arrays = arrays_of(weight)
    for rows in (1, 5):
        x = drawn(rows, columns, seed=1)
        expected = x.astype(np.float64) @ dequantise(weight).T
        for level in (0, 1):
            node = helper.make_node(
                "MatMulNBits",
                ["x", *arrays],
                ["y"],
                domain="com.microsoft",
                K=columns,
                N=40,
                bits=bits,
                block_size=block,
                accuracy_level=level,
            )
            (found,) = run([node], arrays, {"x": x})
            assert np.abs(found - expected).max() < 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (8, True), (8, False)])
def test_gatherblockquantized_gives_the_dequantised_rows(bits: Bits, block: int, symmetric: bool) -> None:
    weight = quantise(drawn(30, 96), Scheme(bits, block, symmetric))
    arrays = arrays_of(weight)
    arrays["q"] = weight.integers.reshape(30, -1)
    ids = np.array([[3, 29, 0]])
    node = helper.make_node(
        "GatherBlockQuantized",
        ["q", "ids", *list(arrays)[1:]],
        ["y"],
        domain="com.microsoft",
        bits=bits,
        block_size=block,
        gather_axis=0,
        quantize_axis=1,
    )
    (found,) = run([node], arrays, {"ids": ids})
    np.testing.assert_array_equal(found[..., :96], dequantise(weight)[ids])


@pytest.mark.parametrize("symmetric", [True, False])
def test_onnxruntimes_own_quantiser_packs_alike(symmetric: bool) -> None:
    """Its integers, scales and zero points, read as ours, give its own dequantised values."""
    pybind = pytest.importorskip("onnxruntime.capi._pybind_state")
    rows, columns, block = 12, 96, 32
    values = drawn(rows, columns)
    packed = np.zeros((rows, columns // block, block // 2), np.uint8)
    scales = np.zeros(rows * (columns // block), np.float32)
    zeros = np.zeros(rows * -(-columns // block // 2), np.uint8)
    pybind.quantize_matmul_4bits(
        packed, np.ascontiguousarray(values.T), scales, zeros, block, rows, columns, symmetric
    )
    weight = QuantisedWeight(
        4,
        block,
        (rows, columns),
        packed,
        scales.reshape(rows, -1),
        None if symmetric else zeros.reshape(rows, -1),
    )
    back = dequantise(weight)
    assert np.abs(back - values).max() <= np.abs(scales).max() * 1.01
    ours = dequantise(quantise(values, Scheme(4, block, symmetric)))
    assert ((ours - values) ** 2).mean() < ((back - values) ** 2).mean()
