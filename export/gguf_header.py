"""The head of a GGUF file: metadata, and the name, shape, type and place of every tensor.

Versions 2 and 3, little endian. Every length and count is held against what is left of the file before
anything is allocated, so memory stays in proportion to the file whatever it claims. The format is described
in ggml's docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import CheckpointError
from .gguf_blocks import TYPES, BlockType, type_name

MAGIC = b"GGUF"
_MAX_HEAD_NBYTES = 256 << 20  # vocabularies of 260 thousand tokens take about 15 MiB
_MAX_NAME_NBYTES = 64 << 10
_MAX_DIMENSIONS = 4
_MIN_PAIR_NBYTES = 13  # an empty key, a type, one byte
_MIN_TENSOR_NBYTES = 32
_ALIGNMENT = 32

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: dict[int, str] = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}

Value = int | float | bool | str | list[str] | NDArray[np.generic]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: `shape` in the usual order (rows first), `start` in bytes from the start of the file."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    start: int

    @property
    def row_nbytes(self) -> int:
        return self.shape[-1] // self.type.count * self.type.nbytes

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_nbytes


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata and tensors of one file, checked: no duplicates, no overlap, all inside the file."""

    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]


def read_header(file: BufferedReader, path: Path, nbytes: int) -> GGUFHeader:
    """The head of `file`, which has `nbytes` bytes. Raises CheckpointError."""
    cursor = _Cursor(file, path, nbytes)
    if cursor.take(4, "the magic") != MAGIC:
        raise CheckpointError(path, "does not start with GGUF", "a GGUF file")
    version = cursor.integer(4, "the version")
    if version & 0xFFFF == 0:
        raise CheckpointError(path, "a big-endian GGUF file", "a little-endian one", "convert it again")
    if version not in (2, 3):
        raise CheckpointError(path, f"GGUF version {version}", "version 2 or 3", "convert it again")
    tensors = cursor.integer(8, "the tensor count")
    pairs = cursor.integer(8, "the metadata count")
    cursor.afford(pairs, _MIN_PAIR_NBYTES, f"{pairs} metadata entries")
    cursor.afford(tensors, _MIN_TENSOR_NBYTES, f"{tensors} tensors")
    metadata: dict[str, Value] = {}
    for _ in range(pairs):
        key = cursor.name("a metadata key")
        if key in metadata:
            raise CheckpointError(path, f"metadata key {key} occurs twice", "unique keys")
        metadata[key] = cursor.value(key)
    infos = [_tensor(cursor, path) for _ in range(tensors)]
    return GGUFHeader(version, metadata, _placed(infos, _data_start(cursor, metadata), path, nbytes))


class _Cursor:
    """Reads forward through the head and refuses to go past its end."""

    def __init__(self, file: BufferedReader, path: Path, nbytes: int) -> None:
        self._file, self.path = file, path
        self._limit = min(nbytes, _MAX_HEAD_NBYTES)
        self._whole = nbytes <= _MAX_HEAD_NBYTES
        self.position = 0

    def afford(self, count: int, nbytes: int, what: str) -> None:
        """Raises when `count` elements of at least `nbytes` bytes cannot be there."""
        if count * nbytes > self._limit - self.position:
            room = "the file" if self._whole else f"a head of {_MAX_HEAD_NBYTES >> 20} MiB"
            raise CheckpointError(
                self.path, f"claims {what}, more than {room} holds", "a complete GGUF file", "get it again"
            )

    def take(self, nbytes: int, what: str) -> bytes:
        if nbytes > self._limit - self.position:  # before the sentence is made: this runs for every token
            self.afford(nbytes, 1, f"{nbytes} bytes for {what}")
        data = self._file.read(nbytes)
        if len(data) != nbytes:
            raise CheckpointError(self.path, f"ends inside {what}", "a complete GGUF file", "get it again")
        self.position += nbytes
        return data

    def integer(self, nbytes: int, what: str) -> int:
        return int.from_bytes(self.take(nbytes, what), "little")

    def name(self, what: str) -> str:
        nbytes = self.integer(8, what)
        if not 1 <= nbytes <= _MAX_NAME_NBYTES:
            raise CheckpointError(self.path, f"{what} of {nbytes} bytes", f"1 to {_MAX_NAME_NBYTES}")
        try:
            return self.take(nbytes, what).decode()
        except UnicodeDecodeError:
            raise CheckpointError(self.path, f"{what} is not UTF-8", "a readable name") from None

    def text(self, key: str) -> str:
        data = self.take(self.integer(8, key), key)
        # Vocabularies must be exact; what people write about themselves need not be.
        try:
            return data.decode(errors="strict" if key.startswith("tokenizer.") else "replace")
        except UnicodeDecodeError:
            raise CheckpointError(self.path, f"metadata {key} is not UTF-8", "UTF-8 text") from None

    def value(self, key: str) -> Value:
        kind = self.integer(4, key)
        if kind == _STRING:
            return self.text(key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise CheckpointError(self.path, f"metadata {key} has the unknown type {kind}", "a GGUF type")
        scalar = np.frombuffer(self.take(np.dtype(_SCALARS[kind]).itemsize, key), _SCALARS[kind])[0]
        if kind == _BOOL:
            return bool(scalar)
        # 0.1 as float32 is 0.10000000149: what was meant is the shortest decimal that gives the same float32.
        number: int | float = float(str(scalar)) if scalar.dtype == np.float32 else scalar.item()
        return number

    def _array(self, key: str) -> list[str] | NDArray[np.generic]:
        kind = self.integer(4, key)
        count = self.integer(8, key)
        if kind == _STRING:
            self.afford(count, 8, f"{count} strings in {key}")
            return [self.text(key) for _ in range(count)]
        if kind not in _SCALARS:
            raise CheckpointError(self.path, f"metadata {key} is an array of the type {kind}", "a flat array")
        dtype = np.dtype(_SCALARS[kind])
        self.afford(count, dtype.itemsize, f"{count} numbers in {key}")
        values = np.frombuffer(self.take(count * dtype.itemsize, key), dtype)
        return values.astype(bool) if kind == _BOOL else values


def _tensor(cursor: _Cursor, path: Path) -> TensorInfo:
    """One entry; `start` is still relative to the data."""
    name = cursor.name("a tensor name")
    dimensions = cursor.integer(4, name)
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise CheckpointError(path, f"tensor {name} has {dimensions} dimensions", f"1 to {_MAX_DIMENSIONS}")
    sizes = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions, name))
    number = cursor.integer(4, name)
    start = cursor.integer(8, name)
    shape = tuple(reversed(sizes))
    kind = TYPES.get(number)
    if kind is None:
        raise CheckpointError(
            path,
            f"tensor {name} has the type {type_name(number)}",
            f"one of {', '.join(known.name for known in TYPES.values())}",
            "quantise the model to one of these",
        )
    if not all(shape) or shape[-1] % kind.count:
        raise CheckpointError(
            path, f"tensor {name} has the shape {list(shape)}", f"rows of whole {kind.name} blocks"
        )
    return TensorInfo(name, kind, shape, start)


def _data_start(cursor: _Cursor, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise CheckpointError(cursor.path, f"general.alignment is {alignment!r:.40}", "a power of two")
    return -(-cursor.position // alignment) * alignment


def _placed(infos: list[TensorInfo], start: int, path: Path, nbytes: int) -> tuple[TensorInfo, ...]:
    """`infos` with absolute places, after checking that each lies in the file, once, and alone."""
    names: set[str] = set()
    placed = []
    for info in infos:
        if info.name in names:
            raise CheckpointError(path, f"tensor {info.name} occurs twice", "unique tensor names")
        names.add(info.name)
        end = start + info.start + info.nbytes
        if end > nbytes:
            raise CheckpointError(
                path,
                f"tensor {info.name} ends at byte {end}, the file at byte {nbytes}",
                "a complete GGUF file",
                "get it again",
            )
        placed.append(TensorInfo(info.name, info.type, info.shape, start + info.start))
    order = sorted(placed, key=lambda info: info.start)
    for before, after in pairwise(order):
        if before.start + before.nbytes > after.start:
            raise CheckpointError(path, f"tensors {before.name} and {after.name} overlap", "separate tensors")
    return tuple(placed)
