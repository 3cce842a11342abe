"""Blocks of a GGUF carried over as they are: the same integers, scales and minima in MatMulNBits' form.

4-bit types and smaller ones become 4 bits, the rest 8; nothing is rounded. A minimum becomes the nearest zero point
and an offset for what is left; where float32 does not hold that remainder exactly the zero point is 0 and
the offset the minimum itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import CheckpointError
from .checkpoint import Checkpoint
from .gguf_blocks import BlockType
from .quantised import BlockSource, Form, Rounded
from .quantize import Bytes, Floats, QuantisedWeight, pack

_CHUNK_NBYTES = 1 << 20  # of blocks unpacked at a time

# K-quants multiply two factors for a scale, which takes more bits than a float16 has.
_FORMS: Mapping[str, Form] = {
    "Q4_0": Form(4, 32),
    "Q4_1": Form(4, 32, zero_points=True, offsets=True),
    "Q5_0": Form(8, 32),
    "Q5_1": Form(8, 32, zero_points=True, offsets=True),
    "Q8_0": Form(8, 32),
    "IQ4_NL": Form(8, 32),
    "Q2_K": Form(4, 16, zero_points=True, offsets=True, scales="float32"),
    "Q3_K": Form(4, 16, scales="float32"),
    "Q4_K": Form(4, 32, zero_points=True, offsets=True, scales="float32"),
    "Q5_K": Form(8, 32, zero_points=True, offsets=True, scales="float32"),
    "Q6_K": Form(8, 16, scales="float32"),
}


class Kept:
    """The tensors that a checkpoint itself holds in blocks, unchanged. Raises CheckpointError."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def form(self, name: str) -> Form | None:
        kind = self.checkpoint.block_type(name)
        return None if kind is None else form_of(kind)

    def weight(self, name: str) -> QuantisedWeight:
        kind, shape = self.checkpoint.block_type(name), self.checkpoint.shapes[name]
        assert kind is not None
        weight = carried_over(self.checkpoint.blocks(name), kind)
        assert weight.shape == shape
        parts = (weight.scales, weight.scales if weight.offsets is None else weight.offsets)
        if not all(np.isfinite(part).all() for part in parts):
            found = f"NaN or infinity in tensor {name}"
            raise CheckpointError(self.checkpoint.path, found, "finite weights", "quantise it again")
        return weight


class OnceRounded:
    """What `rounded` would quantise, but for tensors that are in blocks of as few bits already: those are kept."""

    def __init__(self, kept: Kept, rounded: Rounded) -> None:
        self.kept = kept
        self.rounded = rounded

    def _source(self, name: str) -> BlockSource:
        wanted, found = self.rounded.form(name), self.kept.form(name)
        return self.kept if wanted and found and found.bits <= wanted.bits else self.rounded

    def form(self, name: str) -> Form | None:
        return self._source(name).form(name)

    def weight(self, name: str) -> QuantisedWeight:
        return self._source(name).weight(name)


def form_of(kind: BlockType) -> Form:
    """The form that holds blocks of `kind` exactly."""
    return _FORMS[kind.name]


def carried_over(blocks: Bytes, kind: BlockType) -> QuantisedWeight:
    """Rows of blocks [out, row_nbytes] in our form: `integer - zero_point`, scale and offset give the same values.

    Exactly, as real numbers; ggml's float32 product is the same rounded.
    """
    form = form_of(kind)
    assert kind.unpack is not None
    rows = len(blocks)
    columns = blocks.shape[1] // kind.nbytes * kind.count
    integers = np.empty((rows * columns // form.block, form.block), np.uint8)
    scales = np.empty(len(integers), np.float32)
    zeros = np.zeros(len(integers), np.uint8) if form.zero_points else None
    offsets = np.empty(len(integers), np.float32) if form.offsets else None
    flat = blocks.reshape(-1, kind.nbytes)
    step, groups = max(1, _CHUNK_NBYTES // kind.nbytes), kind.count // form.block
    for first in range(0, len(flat), step):
        grid = kind.unpack(flat[first : first + step])
        part = slice(first * groups, first * groups + grid.scale.size)
        scales[part] = grid.scale.reshape(-1)
        if zeros is None or offsets is None or grid.offset is None:
            # Signed integers around 0; ours have it in the middle.
            middle = np.int16(1 << (form.bits - 1))
            integers[part] = (grid.integers.astype(np.int16) + middle).reshape(-1, form.block)
        else:
            integers[part] = grid.integers.reshape(-1, form.block)
            largest = (1 << form.bits) - 1
            zeros[part], offsets[part] = _split(scales[part], grid.offset.reshape(-1), largest)
    shape = (rows, columns // form.block)
    return QuantisedWeight(
        form.bits,
        form.block,
        (rows, columns),
        pack(integers.reshape(*shape, form.block), form.bits),
        scales.reshape(shape),
        None if zeros is None else pack(zeros.reshape(shape), form.bits),
        None if offsets is None else offsets.reshape(shape),
    )


def _split(scale: Floats, minimum: Floats, largest: int) -> tuple[Bytes, Floats]:
    """Zero points and offsets with `offset - scale * zero_point == minimum`, the offsets as small as can be.

    A small offset leaves centred integers, of which rounded activations make less noise.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        zero = np.clip(np.nan_to_num(np.rint(-minimum / scale)), 0, largest).astype(np.uint8)
        wide: NDArray[Any] = minimum + scale.astype(np.float64) * zero
        offset = wide.astype(np.float32)
        exact = offset == wide
    return np.where(exact, zero, np.uint8(0)), np.where(exact, offset, minimum)
