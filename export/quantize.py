"""Block quantisation: a weight [out, in] as small integers with a scale per block, in MatMulNBits' form.

A block is `block` neighbours along `in`; a value is `scale * (integer - zero_point) + offset`. The form is
that of com.microsoft's MatMulNBits (integers and zero points packed low half first), plus the offset, which
the operator lacks and the graph adds as a product of block sums. Scales are chosen among the float16
values, so that they can be stored in 16 bits. NumPy only; knows neither graphs nor files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Bits = Literal[4, 8]
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

BLOCKS = (16, 32, 64, 128, 256)  # what MatMulNBits knows
_SMALLEST = np.float32(2**-18)  # a weight below that everywhere has no float16 scale worth the name
_CHUNK_ELEMENTS = 1 << 18  # worked on at a time: the intermediate arrays stay in the cache
# Searched scales, as multiples of the one that just holds the block.
_STEPS = tuple(np.float32(step) for step in (0.78, 0.84, 0.88, 0.92, 0.96, 1.0, 1.05))


@dataclass(frozen=True)
class Scheme:
    """How to quantise: `bits` 4 or 8, elements of a `block`, and what is chosen for each block.

    Symmetric blocks have the zero point 2**(bits - 1). Without `search` a block is rounded to the nearest point of the grid
    that just holds it; with it the grid is the one with the least squared error among several.
    """

    bits: Bits
    block: int = 32
    symmetric: bool = False
    search: bool = True


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight of `shape` (out, in) in blocks; the last block of a row may be longer than what is left of it.

    `integers` uint8 [out, blocks, block * bits / 8], two to a byte when `bits` is 4; `scales` float32
    [out, blocks]; `zero_points` uint8 [out, bytes of blocks * bits] packed likewise, None for 2**(bits - 1) everywhere;
    `offsets` float32 [out, blocks], None for 0 everywhere.
    """

    bits: Bits
    block: int
    shape: tuple[int, int]
    integers: Bytes
    scales: Floats
    zero_points: Bytes | None = None
    offsets: Floats | None = None

    @property
    def nbytes(self) -> int:
        """Size of all parts."""
        parts = (self.integers, self.scales, self.zero_points, self.offsets)
        return sum(part.nbytes for part in parts if part is not None)

    def unpacked(self) -> Bytes:
        """The integers, [out, blocks, block], one to a byte."""
        return unpack(self.integers, self.bits)

    def unpacked_zero_points(self) -> Bytes:
        """One zero point a block, [out, blocks]."""
        blocks = self.scales.shape[1]
        if self.zero_points is None:
            return np.full(self.scales.shape, 1 << (self.bits - 1), np.uint8)
        return unpack(self.zero_points, self.bits)[:, :blocks]


def block_count(columns: int, block: int) -> int:
    """Blocks in a row of `columns` elements."""
    return -(-columns // block)


def pack(integers: Bytes, bits: Bits) -> Bytes:
    """`integers` [..., n] below 2**bits as bytes [..., ceil(n * bits / 8)]: of two the first is the low half."""
    if bits == 8:
        return np.ascontiguousarray(integers)
    if integers.shape[-1] % 2:
        integers = np.concatenate([integers, np.zeros((*integers.shape[:-1], 1), np.uint8)], axis=-1)
    return integers[..., ::2] | integers[..., 1::2] << np.uint8(4)


def unpack(packed: Bytes, bits: Bits) -> Bytes:
    """The inverse of `pack`: [..., n] bytes give [..., n * 8 / bits] integers."""
    if bits == 8:
        return packed
    halves = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=halves[..., 0])
    np.right_shift(packed, 4, out=halves[..., 1])
    return halves.reshape(*packed.shape[:-1], -1)


def quantise(values: Floats, scheme: Scheme) -> QuantisedWeight:
    """`values` [out, in], finite, in the form of `scheme`. Extra memory: the result and a few MB.

    Raises ValueError where the scales would leave float16's range.
    """
    rows, columns = values.shape
    largest = max(float(values.max(initial=0)), -float(values.min(initial=0)))
    if not largest / (1 << (scheme.bits - 1)) < 32768 or 0 < largest < _SMALLEST:
        raise ValueError(f"weights of up to {largest:.2g} in size have no float16 scales")
    blocks = block_count(columns, scheme.block)
    integers = np.empty((rows, blocks, scheme.block * scheme.bits // 8), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    zeros = None if scheme.symmetric else np.empty((rows, blocks), np.uint8)
    fit = _symmetric if scheme.symmetric else _asymmetric
    step = max(1, _CHUNK_ELEMENTS // (blocks * scheme.block))
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        x = _in_blocks(values[part], scheme.block)
        scale, zero, found = fit(x, scheme)
        integers[part] = pack(found, scheme.bits).reshape(integers[part].shape)
        scales[part] = scale.reshape(-1, blocks)
        if zeros is not None:
            zeros[part] = zero.reshape(-1, blocks)
    packed = None if zeros is None else pack(zeros, scheme.bits)
    return QuantisedWeight(scheme.bits, scheme.block, (rows, columns), integers, scales, packed)


def dequantise(weight: QuantisedWeight) -> Floats:
    """The values [out, in] that `weight` stands for, float32. A fresh array."""
    rows, columns = weight.shape
    out = np.empty((rows, weight.scales.shape[1], weight.block), np.float32)
    centred = weight.unpacked().astype(np.int16) - weight.unpacked_zero_points()[..., None]
    np.multiply(centred, weight.scales[..., None], out=out, dtype=np.float32)
    if weight.offsets is not None:
        out += weight.offsets[..., None]
    return np.ascontiguousarray(out.reshape(rows, -1)[:, :columns])


def _in_blocks(values: Floats, block: int) -> Floats:
    """`values` [rows, in] as [rows * blocks, block]; a short last block is filled with zeros: they lie on every grid."""
    short = -values.shape[1] % block
    if short:
        values = np.pad(values, ((0, 0), (0, short)))
    return values.reshape(-1, block)


Fitted = tuple[Floats, Bytes, Bytes]  # scale [n], zero point [n], integers [n, block]


def _symmetric(x: Floats, scheme: Scheme) -> Fitted:
    """One scale for each row of `x` [n, block]; the zero point is 2**(bits - 1)."""
    half = 1 << (scheme.bits - 1)
    size = np.abs(x)
    plain = size.max(axis=1) / np.float32(half - 1)
    zero = np.full(len(x), half, np.uint8)
    if not scheme.search:
        plain = _half_up(plain)
        return plain, zero, _rounded(x, plain, zero, scheme.bits)
    # The grid has one more point below zero than above; a negative scale turns that around.
    at = size.argmax(axis=1)
    signed = -x[np.arange(len(x)), at] / np.float32(half)
    return _best(x, [(plain, zero), *((signed * step, zero) for step in _STEPS)], scheme.bits)


def _asymmetric(x: Floats, scheme: Scheme) -> Fitted:
    """Scale and zero point for each row of `x` [n, block]. Zero points lie on the grid, so 0 is always in its range."""
    top = np.float32((1 << scheme.bits) - 1)
    low, high = np.minimum(x.min(axis=1), 0), np.maximum(x.max(axis=1), 0)
    plain = _half_up((high - low) / top)
    zero = np.rint(-low * _inverse(plain)).astype(np.uint8)
    if not scheme.search:
        return plain, zero, _rounded(x, plain, zero, scheme.bits)
    candidates = [(plain, zero)]
    for step in _STEPS:
        scale = plain * step
        # What does not fit hangs over equally on both sides.
        middle = (top - (low + high) * _inverse(scale)) / 2
        candidates.append((scale, np.clip(np.rint(middle), 0, top).astype(np.uint8)))
    return _best(x, candidates, scheme.bits)


def _best(x: Floats, candidates: Sequence[tuple[Floats, Bytes]], bits: Bits) -> Fitted:
    """Of the grids `candidates` (scale, zero point; each [n]) the best for each row, its scale refined.

    For given integers the best scale is a ratio of two sums, and what it leaves of the squared error falls as `gain` grows.
    """
    best_gain = np.full(len(x), -1, np.float32)
    scale, zero = candidates[0][0].copy(), candidates[0][1].copy()
    for tried, zero_point in candidates:
        centred = _centred(x, tried, zero_point, bits)
        along = np.einsum("nb,nb->n", x, centred)
        norm = np.einsum("nb,nb->n", centred, centred)
        refined = along * _inverse(norm)
        gain = along * refined
        better = gain > best_gain
        best_gain[better] = gain[better]
        scale[better] = refined[better]
        zero[better] = zero_point[better]
    scale = scale.astype(np.float16).astype(np.float32)
    return scale, zero, _rounded(x, scale, zero, bits)


def _half_up(scale: Floats) -> Floats:
    """The float16 values next to `scale`, not below it: the grid must still hold its block."""
    half = scale.astype(np.float16)
    return np.where(half < scale, np.nextafter(half, np.float16(np.inf)), half).astype(np.float32)


def _centred(x: Floats, scale: Floats, zero: Bytes, bits: Bits) -> Floats:
    """`x` on the grid, as whole numbers (float32) with 0 at the zero point."""
    grid = x * _inverse(scale)[:, None]
    np.rint(grid, out=grid)
    lowest = -zero.astype(np.float32)[:, None]
    return np.clip(grid, lowest, lowest + np.float32((1 << bits) - 1), out=grid)


def _rounded(x: Floats, scale: Floats, zero: Bytes, bits: Bits) -> Bytes:
    """The integers [n, block] nearest to `x` on the grid."""
    grid = _centred(x, scale, zero, bits)
    grid += zero[:, None]
    return grid.astype(np.uint8)


def _inverse(scale: Floats) -> Floats:
    """1 / `scale`, and 0 where that is 0 or overflows: such a block is all zero, or as good as that."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = 1 / scale
    return np.where(np.isfinite(inverse), inverse, np.float32(0))
