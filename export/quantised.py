"""Where quantised weights come from: rounded here, by a recipe; and a checkpoint of what they stand for.

A `BlockSource` says for each tensor whether it is in blocks and in which form, before anything is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import CheckpointError
from .checkpoint import Checkpoint
from .quantize import Bits, Floats, QuantisedWeight, Scheme, dequantise, quantise

T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True)
class Form:
    """What a graph must know of a `QuantisedWeight` before its values: which parts it has, how scales are stored."""

    bits: Bits
    block: int
    zero_points: bool = False
    offsets: bool = False
    scales: Literal["float16", "float32"] = "float16"


class BlockSource(Protocol):
    """Weights in blocks, by our tensor names."""

    def form(self, name: str) -> Form | None:
        """The form of tensor `name`; None where it is not in blocks."""

    def weight(self, name: str) -> QuantisedWeight:
        """Tensor `name`, which has a form. Raises CheckpointError."""


Schemes = Callable[[str], Scheme | None]


class Rounded:
    """The tensors for which `schemes` has an answer, quantised when they are asked for. `read` gives them [out, in]."""

    def __init__(self, checkpoint: Checkpoint, schemes: Schemes, read: Callable[[str], Floats]) -> None:
        self.checkpoint = checkpoint
        self.schemes = schemes
        self.read = read

    def form(self, name: str) -> Form | None:
        scheme = self.schemes(name)
        if scheme is None:
            return None
        return Form(scheme.bits, scheme.block, zero_points=not scheme.symmetric)

    def weight(self, name: str) -> QuantisedWeight:
        scheme = self.schemes(name)
        assert scheme is not None
        try:
            return quantise(self.read(name), scheme)
        except ValueError as error:
            found = f"tensor {name}: {error}"
            raise CheckpointError(self.checkpoint.path, found, remedy="export it as fp32") from None


class Dequantised:
    """`checkpoint` with the values that its tensors in blocks stand for: what a quantised graph is held to.

    Everything else is the checkpoint's own.
    """

    def __init__(self, checkpoint: Checkpoint, blocks: BlockSource) -> None:
        self._checkpoint = checkpoint
        self._blocks = blocks
        self.path = checkpoint.path
        self.config = checkpoint.config
        self.shapes = checkpoint.shapes
        self.weight_nbytes = checkpoint.weight_nbytes

    def tensor(self, name: str) -> Floats:
        """The tensor in its logical shape, straight from the stored order."""
        if self._blocks.form(name) is None:
            return oriented(self._checkpoint, name)
        return dequantise(self._blocks.weight(name))


def oriented(checkpoint: Checkpoint, name: str) -> Floats:
    """A linear weight as [out, in], straight from the stored order; any other tensor as it is."""
    if not name.endswith("_proj.weight"):
        return checkpoint.tensor(name)
    outputs, inputs = checkpoint.shapes[name]
    stored = checkpoint.stored(name)
    if checkpoint.linear_layout == "in_out":
        return stored.reshape(inputs, outputs).T
    return stored.reshape(outputs, inputs)


def take(weight: QuantisedWeight, rows: NDArray[np.intp] | None) -> QuantisedWeight:
    """Rows `rows` of `weight`; zeros where one is -1."""
    if rows is None:
        return weight
    scales = weight.scales[rows]
    scales[rows < 0] = 0
    offsets = None
    if weight.offsets is not None:
        offsets = weight.offsets[rows]
        offsets[rows < 0] = 0
    return dataclasses.replace(
        weight,
        shape=(len(rows), weight.shape[1]),
        integers=weight.integers[rows],
        scales=scales,
        zero_points=None if weight.zero_points is None else weight.zero_points[rows],
        offsets=offsets,
    )


def stack(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """The rows of several weights of one form, one after the other."""
    first = weights[0]
    if len(weights) == 1:
        return first

    return dataclasses.replace(
        first,
        shape=(sum(weight.shape[0] for weight in weights), first.shape[1]),
        integers=np.concatenate([weight.integers for weight in weights]),
        scales=np.concatenate([weight.scales for weight in weights]),
        zero_points=_joined([weight.zero_points for weight in weights]),
        offsets=_joined([weight.offsets for weight in weights]),
    )


def _joined(parts: Sequence[NDArray[T] | None]) -> NDArray[T] | None:
    present = [part for part in parts if part is not None]
    return np.concatenate(present) if present else None
