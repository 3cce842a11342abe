"""GGUF blocks carried over without rounding: decided by the gguf package's own values."""

from __future__ import annotations

import numpy as np
import pytest

from posttrainllm.export.gguf_blocks import TYPES, BlockType
from posttrainllm.export.kept import carried_over, form_of
from posttrainllm.export.quantize import dequantise

gguf = pytest.importorskip("gguf")

QUANTISED = [kind for kind in TYPES.values() if kind.unpack is not None]


def quantised_rows(kind: BlockType, rows: int = 6, columns: int = 1024) -> np.ndarray:
    """Blocks of normal weights where the package can write the type, else random bits under finite scales."""
    rng = np.random.default_rng(kind.number)
    values = (rng.standard_normal((rows, columns)) * 0.05).astype(np.float32)
    try:
        return np.asarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType(kind.number)))
    except NotImplementedError:
        blocks = rng.integers(0, 256, (rows, columns // kind.count * kind.nbytes), dtype=np.uint8)
        halves = {
            "Q2_K": (80, 82),
            "Q3_K": (108,),
            "Q4_K": (0, 2),
            "Q5_K": (0, 2),
            "Q6_K": (208,),
            "IQ4_NL": (0,),
        }
        for first in halves[kind.name]:
            scale = rng.uniform(1e-4, 1e-2, (rows, columns // kind.count)).astype(np.float16)
            for byte in range(2):
                blocks[:, first + byte :: kind.nbytes] = scale.view(np.uint8)[:, byte::2]
        return blocks


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_the_values_are_the_files_exactly(kind: BlockType) -> None:
    """As real numbers integer, scale and offset are the file's; in float32 they are ggml's to its last bit or two."""
    blocks = quantised_rows(kind)
    weight = carried_over(blocks, kind)
    form = form_of(kind)
    assert (weight.zero_points is not None, weight.offsets is not None) == (form.zero_points, form.offsets)
    assert kind.unpack is not None
    grid = kind.unpack(blocks.reshape(-1, kind.nbytes))
    exact = grid.integers * grid.scale[..., None].astype(np.float64)
    if grid.offset is not None:
        exact += grid.offset[..., None]
    centred = weight.unpacked().astype(np.int64) - weight.unpacked_zero_points()[..., None]
    ours = centred * weight.scales[..., None].astype(np.float64)
    if weight.offsets is not None:
        ours += weight.offsets[..., None]
    np.testing.assert_array_equal(ours.reshape(-1), exact.reshape(-1))
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind.number))
    np.testing.assert_allclose(dequantise(weight), expected, rtol=0, atol=3e-7 * np.abs(expected).max())
    if not form.offsets:
        np.testing.assert_array_equal(dequantise(weight), expected)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_scales_fit_the_type_they_are_stored_in(kind: BlockType) -> None:
    weight = carried_over(quantised_rows(kind), kind)
    stored = weight.scales.astype(form_of(kind).scales)
    np.testing.assert_array_equal(stored.astype(np.float32), weight.scales)


def test_extreme_minima_are_kept_too() -> None:
    """Scale and minimum so far apart that float32 has no room for their sum: the minimum stays by itself."""
    kind = next(kind for kind in QUANTISED if kind.name == "Q4_1")
    block = np.zeros((1, 20), np.uint8)
    block[0, :4] = np.array([3.0001e-4, -60000], np.float16).view(np.uint8)
    block[0, 4:] = np.arange(0x10, 0x20)
    weight = carried_over(block, kind)
    assert weight.offsets is not None
    assert weight.offsets[0, 0] == -60000
    assert weight.unpacked_zero_points()[0, 0] == 0
    zeros = carried_over(np.zeros((1, 20), np.uint8), kind)
    assert not dequantise(zeros).any()
