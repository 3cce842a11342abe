"""The body of a `.tinygpt` file: which layout it has, and where each tensor of the manifest lies in it.

Labels in the header are believed only as far as the length of the body agrees: weights are never read
as another type than they are. Linear weights (every matrix but the two embedding tables) lie input by
output under an output by input shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..runtime.errors import CheckpointError
from .tinygpt_header import Header, short

_EMBEDDINGS = ("token_embedding.weight", "position_embedding.weight")


@dataclass(frozen=True)
class Place:
    """Where one tensor lies: byte offset in the file, element count, and its logical shape."""

    start: int
    count: int
    shape: tuple[int, ...]
    transposed: bool


def body_layout(header: Header, warnings: list[str]) -> tuple[np.dtype[np.floating], dict[str, Place]]:
    """Element type and place of every tensor, by the file's name; checks the body's length."""
    total = sum(entry.count for entry in header.manifest)
    half, stride = _body_kind(header, total)
    dtype: np.dtype[np.floating] = np.dtype("<f2" if half else "<f4")
    extra = header.body_nbytes - total * stride * dtype.itemsize
    if extra:
        warnings.append(f"{extra} bytes after the weights are ignored")
    offsets = _offsets(header, total) if half else None
    places = {}
    position = 0
    for entry in header.manifest:
        element = offsets[entry.name] if offsets else position
        transposed = len(entry.shape) == 2 and entry.name not in _EMBEDDINGS
        start = header.body_start + element * dtype.itemsize
        places[entry.name] = Place(start, entry.count, entry.shape, transposed)
        position += entry.count * stride
    return dtype, places


def _body_kind(header: Header, total: int) -> tuple[bool, int]:
    """Whether the body is fp16, and how many elements are stored for each weight (1 or 3)."""
    nbytes = header.body_nbytes
    sizes = {"fp32 with training state": 12 * total, "fp32 weights": 4 * total, "fp16 weights": 2 * total}
    looks_like = next((f", the size of {kind}" for kind, size in sizes.items() if size == nbytes), "")
    found = f"body of {nbytes} bytes{looks_like}"
    if header.dtype == "fp16":
        if nbytes < 2 * total or nbytes in (4 * total, 12 * total):
            raise CheckpointError(
                header.path, found, f"{2 * total} bytes of fp16 weights", "copy the file again"
            )
        return True, 1
    if header.has_moments:
        if nbytes < 12 * total:
            expected = f"{12 * total} bytes of fp32 weights with training state"
            raise CheckpointError(header.path, found, expected, "copy the file again")
        return False, 3
    if nbytes == 4 * total:
        return False, 1
    if nbytes == 2 * total:
        return True, 1
    raise CheckpointError(header.path, found, f"{4 * total} bytes (fp32) or {2 * total} bytes (fp16)")


def _offsets(header: Header, total: int) -> dict[str, int] | None:
    """Element offset of every tensor of an fp16 body, or None where the manifest has none."""
    given = [entry for entry in header.manifest if entry.offset is not None]
    if not given:
        return None
    if len(given) < len(header.manifest):
        raise CheckpointError(
            header.path, "floatOffset on some tensors only", "it on every tensor or on none"
        )
    offsets: dict[str, int] = {}
    for entry in given:
        if type(entry.offset) is not int or not 0 <= entry.offset <= total - entry.count:
            found = f"floatOffset of tensor {entry.name} is {short(entry.offset)}"
            raise CheckpointError(header.path, found, f"0 to {total - entry.count}")
        offsets[entry.name] = entry.offset
    end, last = 0, ""
    for entry in sorted(given, key=lambda entry: offsets[entry.name]):
        if offsets[entry.name] < end:
            raise CheckpointError(
                header.path, f"tensors {last} and {entry.name} overlap", "disjoint floatOffsets"
            )
        end, last = offsets[entry.name] + entry.count, entry.name
    return offsets
