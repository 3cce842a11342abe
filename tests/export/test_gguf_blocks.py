"""Unpacked blocks against the gguf package, bit for bit, and against ggml's own formula for two of them."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from posttrainllm.export.gguf_blocks import TYPES, BlockType, Grid, dequantise, type_name

gguf = pytest.importorskip("gguf")

QUANTISED = [kind for kind in TYPES.values() if kind.unpack is not None]


def random_rows(kind: BlockType, rows: int, blocks: int) -> np.ndarray:
    return np.random.default_rng(kind.number).integers(0, 256, (rows, blocks * kind.nbytes), dtype=np.uint8)


@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda kind: kind.name)
def test_the_table_is_ggmls(kind: BlockType) -> None:
    theirs = gguf.GGMLQuantizationType(kind.number)
    assert theirs.name == kind.name
    assert gguf.GGML_QUANT_SIZES[theirs] == (kind.count, kind.nbytes)


@pytest.mark.parametrize("kind", TYPES.values(), ids=lambda kind: kind.name)
def test_every_bit_pattern_gives_the_packages_value(kind: BlockType) -> None:
    rows = random_rows(kind, 3, 700 if kind.count > 32 else 5000)  # more than one chunk of either size
    plain = {"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8)
    with np.errstate(all="ignore"):  # random halves are infinite now and then
        expected = gguf.quants.dequantize(rows.view(plain), gguf.GGMLQuantizationType(kind.number))
        got = dequantise(rows, kind)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected.astype(np.float32))


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_a_grid_is_integers_with_scales(kind: BlockType) -> None:
    assert kind.unpack is not None
    blocks = random_rows(kind, 40, 1)
    with np.errstate(all="ignore"):  # random halves are infinite now and then
        grid = kind.unpack(blocks)
        assert grid.integers[0].size == kind.count
        assert grid.scale.shape == grid.integers.shape[:2]
        assert (grid.offset is None) == (grid.integers.dtype == np.int8)
        values = grid.scale[..., None] * grid.integers + (
            0 if grid.offset is None else grid.offset[..., None]
        )
        np.testing.assert_array_equal(values.reshape(40, -1), dequantise(blocks, kind))


def test_q4_1_by_hand() -> None:
    block = struct.pack("<2e16B", 0.5, -3.0, *range(0x10, 0x20))
    values = dequantise(np.frombuffer(block, np.uint8)[None], TYPES[3])
    assert values[0].tolist() == [0.5 * (i % 16) - 3 for i in range(16)] + [0.5 - 3] * 16


def test_q6_k_by_hand() -> None:
    """The integer 0 is stored as 32: element 0 is 2, element 33 is -32 + 5 + 16."""
    low, high = bytearray(128), bytearray([0b10101010] * 64)
    low[0], low[33], high[0], high[1] = 2, 5, 0b10101010, 0b10100110
    block = bytes(low + high) + struct.pack("<16b", *range(1, 17)) + struct.pack("<e", 0.25)
    values = dequantise(np.frombuffer(block, np.uint8)[None], TYPES[14])[0]
    assert values[0] == 0.25 * 1 * 2
    assert values[33] == 0.25 * 3 * (5 + 16 - 32)
    assert np.count_nonzero(values) == 2


def test_types_have_names() -> None:
    assert type_name(12) == "Q4_K"
    assert type_name(16) == "IQ2_XXS"
    assert "4711" in type_name(4711)
    for theirs in gguf.GGMLQuantizationType:
        assert not type_name(theirs.value)[0].isdigit() or theirs.value > 40


def test_a_grid_writes_into_the_callers_memory() -> None:
    out = np.full((1, 1, 2), np.nan, np.float32)
    Grid(np.array([[[3, 4]]], np.int8), np.array([[2.0]], np.float32), None).values(out)
    assert out.tolist() == [[[6.0, 8.0]]]
