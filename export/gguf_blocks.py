"""GGUF's tensor types: what a block of each holds, as integers with scales, and as float32.

Every quantised type is a grid: within a group of elements the value is `scale * integer + offset`, in float32,
as ggml computes it. So the integers and scales can also be carried over into another block format exactly.
The layouts are those of ggml's ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_CHUNK_NBYTES = 1 << 20  # of blocks unpacked at a time: the intermediate arrays stay in the cache
_SUPER = 256  # elements of a K-quant's block
_1, _3, _4, _6, _15, _63 = (np.uint8(value) for value in (1, 3, 4, 6, 15, 63))


@dataclass(frozen=True)
class Grid:
    """Unpacked blocks: `integers` [blocks, groups, size], `scale` and `offset` [blocks, groups] float32.

    Types with a minimum have unsigned integers and an `offset`; the others signed ones (int8) and None.
    """

    integers: NDArray[np.uint8] | NDArray[np.int8]
    scale: Floats
    offset: Floats | None

    def values(self, out: Floats) -> None:
        """Write the float32 values to `out` [blocks, groups, size]."""
        np.multiply(self.integers, self.scale[..., None], out=out, dtype=np.float32)
        if self.offset is not None:
            out += self.offset[..., None]


@dataclass(frozen=True)
class BlockType:
    """`count` elements of a row in `nbytes` bytes. `unpack` is None for plain floats."""

    number: int
    name: str
    count: int
    nbytes: int
    unpack: Callable[[Bytes], Grid] | None = None


def dequantise(blocks: Bytes, kind: BlockType) -> Floats:
    """Rows of blocks [rows, row_nbytes] as float32 [rows, elements]. A fresh array."""
    rows = len(blocks)
    count = blocks.shape[1] // kind.nbytes * kind.count
    if kind.unpack is None:
        return _plain(blocks, kind).reshape(rows, count)
    out = np.empty((rows, count), np.float32)
    flat, target = blocks.reshape(-1, kind.nbytes), out.reshape(-1, kind.count)
    step = max(1, _CHUNK_NBYTES // kind.nbytes)
    for first in range(0, len(flat), step):
        grid = kind.unpack(flat[first : first + step])
        grid.values(target[first : first + step].reshape(grid.integers.shape))
    return out


def _plain(blocks: Bytes, kind: BlockType) -> Floats:
    if kind.name == "BF16":  # the upper half of a float32
        wide = blocks.view("<u2").astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return blocks.view("<f2" if kind.name == "F16" else "<f4").astype(np.float32)


def _half(blocks: Bytes, first: int) -> Floats:
    """The float16 at byte `first` of every block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, first : first + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """Each `run` bytes [blocks, n] give `run` low halves, then `run` high ones: [blocks, n / run, 2, run]."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return np.concatenate([runs & _15, runs >> _4], axis=2)


def _pairs(packed: Bytes) -> Bytes:
    """Each 32 bytes [blocks, n] give four runs of 32 2-bit integers: [blocks, n / 32, 4, 32]."""
    runs = packed.reshape(len(packed), -1, 1, 32)
    return runs >> np.array([0, 2, 4, 6], np.uint8)[:, None] & _3


def _bits(packed: Bytes) -> Bytes:
    """Bit i of each of 32 bytes [blocks, 32] for i from 0 to 7: [blocks, 8, 32]."""
    return packed[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & _1


def _fifth(packed: Bytes) -> Bytes:
    """32 bits [blocks, 4 bytes], least significant first, as 16 in [blocks, 1, 1, 32]."""
    bits = np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little")
    return (bits << _4)[:, None, None]


def _signed(integers: Bytes, zero: int) -> NDArray[np.int8]:
    return integers.view(np.int8) - np.int8(zero)


def _q4_0(blocks: Bytes) -> Grid:
    integers = _nibbles(blocks[:, 2:], 16).reshape(-1, 1, 32)
    return Grid(_signed(integers, 8), _half(blocks, 0), None)


def _q4_1(blocks: Bytes) -> Grid:
    integers = _nibbles(blocks[:, 4:], 16).reshape(-1, 1, 32)
    return Grid(integers, _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> Grid:
    integers = _nibbles(blocks[:, 6:], 16).reshape(-1, 1, 1, 32) | _fifth(blocks[:, 2:6])
    return Grid(_signed(integers.reshape(-1, 1, 32), 16), _half(blocks, 0), None)


def _q5_1(blocks: Bytes) -> Grid:
    integers = _nibbles(blocks[:, 8:], 16).reshape(-1, 1, 1, 32) | _fifth(blocks[:, 4:8])
    return Grid(integers.reshape(-1, 1, 32), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> Grid:
    return Grid(blocks[:, 2:].view(np.int8)[:, None], _half(blocks, 0), None)


def _q2_k(blocks: Bytes) -> Grid:
    scales, integers = blocks[:, :16], _pairs(blocks[:, 16:80]).reshape(-1, 16, 16)
    scale = _half(blocks, 80) * (scales & _15).astype(np.float32)
    return Grid(integers, scale, -(_half(blocks, 82) * (scales >> _4).astype(np.float32)))


def _q3_k(blocks: Bytes) -> Grid:
    low = _pairs(blocks[:, 32:96]).reshape(-1, 8, 32)
    integers = (low | _bits(blocks[:, :32]) << np.uint8(2)).reshape(-1, 16, 16)
    # 16 scales of 6 bits: 8 bytes hold the low 4 bits of scales i and i + 8, 4 bytes the high 2 bits.
    packed = blocks[:, 96:108]
    low_bits = np.concatenate([packed[:, :8] & _15, packed[:, :8] >> _4], axis=1)
    high_bits = np.concatenate([packed[:, 8:] >> np.uint8(shift) & _3 for shift in (0, 2, 4, 6)], axis=1)
    scales = _signed(low_bits | high_bits << _4, 32).astype(np.float32)
    return Grid(_signed(integers, 4), _half(blocks, 108) * scales, None)


def _scales_and_minima(packed: Bytes) -> tuple[Floats, Floats]:
    """8 scales and 8 minima of 6 bits in 12 bytes: the first 4 of each plainly, then the rest in pieces."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([a & _63, c & _15 | a >> _6 << _4], axis=1)
    minima = np.concatenate([b & _63, c >> _4 | b >> _6 << _4], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _q4_k(blocks: Bytes) -> Grid:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    integers = _nibbles(blocks[:, 16:], 32).reshape(-1, 8, 32)
    return Grid(integers, _half(blocks, 0) * scales, -(_half(blocks, 2) * minima))


def _q5_k(blocks: Bytes) -> Grid:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    integers = _nibbles(blocks[:, 48:], 32).reshape(-1, 8, 32) | _bits(blocks[:, 16:48]) << _4
    return Grid(integers, _half(blocks, 0) * scales, -(_half(blocks, 2) * minima))


def _q6_k(blocks: Bytes) -> Grid:
    low = _nibbles(blocks[:, :128], 64).reshape(-1, 8, 32)
    integers = low | _pairs(blocks[:, 128:192]).reshape(-1, 8, 32) << _4
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return Grid(_signed(integers, 32).reshape(-1, 16, 16), _half(blocks, 208) * scales, None)


_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _iq4_nl(blocks: Bytes) -> Grid:
    return Grid(_IQ4_NL[_nibbles(blocks[:, 2:], 16).reshape(-1, 1, 32)], _half(blocks, 0), None)


TYPES = {
    row.number: row
    for row in (
        BlockType(0, "F32", 1, 4),
        BlockType(1, "F16", 1, 2),
        BlockType(2, "Q4_0", 32, 18, _q4_0),
        BlockType(3, "Q4_1", 32, 20, _q4_1),
        BlockType(6, "Q5_0", 32, 22, _q5_0),
        BlockType(7, "Q5_1", 32, 24, _q5_1),
        BlockType(8, "Q8_0", 32, 34, _q8_0),
        BlockType(10, "Q2_K", _SUPER, 84, _q2_k),
        BlockType(11, "Q3_K", _SUPER, 110, _q3_k),
        BlockType(12, "Q4_K", _SUPER, 144, _q4_k),
        BlockType(13, "Q5_K", _SUPER, 176, _q5_k),
        BlockType(14, "Q6_K", _SUPER, 210, _q6_k),
        BlockType(20, "IQ4_NL", 32, 18, _iq4_nl),
        BlockType(30, "BF16", 1, 2),
    )
}

# Named in refusals only.
_OTHERS = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}


def type_name(number: int) -> str:
    """What ggml calls the tensor type `number`."""
    known = TYPES.get(number)
    return known.name if known else _OTHERS.get(number, f"{number} (unknown)")
