"""Weights in safetensors files: one, or several that an index names. Read one tensor at a time.

    u64 bytes of the header | JSON header | data          (little-endian)

The header maps names to dtype, shape and the two offsets within the data; `__metadata__` holds text. The format:
github.com/huggingface/safetensors. Sizes and offsets are checked before anything is believed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import CheckpointError
from .gguf_blocks import BlockType

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100 << 20
_CHUNK = 1 << 22  # elements widened at a time
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies."""

    part: int
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class _PartFile:
    """One open file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file: BufferedReader = path.open("rb")
        except OSError as error:
            raise CheckpointError(path, f"cannot be read ({error.strerror})") from None
        self.stat = os.fstat(self.file.fileno())

    def read(self, start: int, out: NDArray[Any]) -> None:
        """Fill `out` with what stands from byte `start` on."""
        view = out.reshape(-1).view(np.uint8).data
        try:
            self.file.seek(start)
            got = self.file.readinto(view)
        except OSError as error:
            raise CheckpointError(self.path, f"cannot be read ({error.strerror or error})") from None
        now = os.fstat(self.file.fileno())
        if got != len(view) or (now.st_size, now.st_mtime_ns) != (self.stat.st_size, self.stat.st_mtime_ns):
            raise CheckpointError(self.path, "changed while it was read", "a finished file", "try again")


class SafetensorsFolder:
    """The tensors of a folder's safetensors files, by their names. Closed by `close` or `with`.

    Raises CheckpointError for a file that is missing, cut short or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parts: list[_PartFile] = []
        self._places: dict[str, _Place] = {}
        try:
            for name, expected in _files(folder):
                self._add(folder / name, expected)
        except BaseException:
            self.close()
            raise

    def _add(self, path: Path, expected: set[str] | None) -> None:
        part = _PartFile(path)
        self._parts.append(part)
        for name, place in _read_header(part, len(self._parts) - 1):
            if name in self._places:
                raise CheckpointError(path, f"tensor {name} stands in two files", "each name once")
            self._places[name] = place
        missing = (expected or set()) - self._places.keys()
        if missing:
            raise CheckpointError(
                path, f"without tensor {min(missing)}", f"what {INDEX} says", "download the folder again"
            )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: place.shape for name, place in self._places.items()}

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(part.stat.st_size for part in self._parts)

    def stored_nbytes(self, name: str) -> int:
        """Size of tensor `name`."""
        return self._places[name].nbytes

    def dtype(self, name: str) -> str:
        """float32, float16 or bfloat16. Raises CheckpointError for any other type."""
        place = self._places[name]
        if place.kind not in _DTYPES:
            raise CheckpointError(
                self._parts[place.part].path, f"tensor {name} is {place.kind}", "F32, F16 or BF16"
            )
        return _DTYPES[place.kind]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The values of `name`, a fresh array. Raises CheckpointError for NaN or infinity."""
        place, dtype = self._places[name], self.dtype(name)
        part = self._parts[place.part]
        values = np.empty(math.prod(place.shape), np.float32)
        stored = values if dtype == "float32" else np.empty(min(values.size, _CHUNK), np.uint16)
        for first in range(0, values.size, stored.size or 1):
            some = stored[: values.size - first]
            part.read(place.start + first * some.itemsize, some)
            if dtype == "float16":
                values[first : first + some.size] = some.view(np.float16)
            elif dtype == "bfloat16":
                values[first : first + some.size].view(np.uint32)[:] = some.astype(np.uint32) << 16
        if not np.isfinite(values).all():
            raise CheckpointError(part.path, f"NaN or infinity in tensor {name}", "finite weights")
        return values.reshape(place.shape)

    def block_type(self, name: str) -> BlockType | None:
        """None: only plain floats are read."""
        return None

    def blocks(self, name: str) -> NDArray[np.uint8]:
        raise ValueError(f"{name} is not quantised")

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same bytes under the same type and shape."""
        first, second = self._places[one], self._places[other]
        if (first.kind, first.shape) != (second.kind, second.shape):
            return False
        for offset in range(0, first.nbytes, _CHUNK):
            chunks = []
            for place in (first, second):
                chunk = np.empty(min(_CHUNK, first.nbytes - offset), np.uint8)
                self._parts[place.part].read(place.start + offset, chunk)
                chunks.append(chunk)
            if not np.array_equal(chunks[0], chunks[1]):
                return False
        return True

    def hashes(self) -> Iterator[str]:
        """SHA-256 of each file."""
        for part in self._parts:
            part.file.seek(0)
            yield hashlib.file_digest(part.file, "sha256").hexdigest()

    def close(self) -> None:
        for part in self._parts:
            part.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _files(folder: Path) -> list[tuple[str, set[str] | None]]:
    """The files that hold the weights, each with the tensors that the index puts there."""
    index = folder / INDEX
    if not index.is_file():
        if (folder / WEIGHTS).is_file():
            return [(WEIGHTS, None)]
        raise CheckpointError(folder, _what_else(folder), f"{WEIGHTS}, or {INDEX} and its files")
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        files: dict[str, set[str]] = {}
        for tensor, name in weight_map.items():
            if Path(name).name != name:  # an index must not make us look outside its folder
                raise ValueError(f"file name {name!r}")
            files.setdefault(name, set()).add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(index, f"not an index of safetensors files ({error})") from None
    for name in files:
        if not (folder / name).is_file():
            raise CheckpointError(
                folder, f"{name} is missing", f"every file that {INDEX} names", "download the folder again"
            )
    return sorted(files.items())


def _what_else(folder: Path) -> str:
    for pattern, what in (
        ("*.gguf", "GGUF files"),
        ("pytorch_model*.bin", "pickled PyTorch weights"),
        ("*.onnx", "ONNX files"),
        ("*.safetensors", "safetensors files of other names"),
    ):
        found = sorted(file.name for file in folder.glob(pattern))
        if found:
            return f"{what} ({found[0]})"
    return "no weights"


def _read_header(part: _PartFile, number: int) -> Iterator[tuple[str, _Place]]:
    path, nbytes = part.path, part.stat.st_size
    if nbytes < 8:
        raise CheckpointError(path, f"truncated: {nbytes} bytes", "a safetensors file")
    length = np.empty(8, np.uint8)
    part.read(0, length)
    (header_nbytes,) = struct.unpack("<Q", length.tobytes())
    if header_nbytes > min(_MAX_HEADER, nbytes - 8):
        start = length.tobytes()
        found = (
            "a Git LFS pointer, not the file itself"
            if start == b"version "
            else f"a header of {header_nbytes} bytes"
        )
        raise CheckpointError(path, found, "a whole safetensors file", "download it again")
    raw = np.empty(header_nbytes, np.uint8)
    part.read(8, raw)
    try:
        header = json.loads(raw.tobytes())
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError, RecursionError):
        raise CheckpointError(path, "its header is not a JSON object", "a safetensors file") from None
    data = 8 + header_nbytes
    for name, entry in entries.items():
        yield name, _place(entry, name, path, number, data, nbytes)


def _place(entry: Any, name: str, path: Path, number: int, data: int, nbytes: int) -> _Place:
    try:
        kind, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        good = isinstance(kind, str) and all(type(n) is int and n >= 0 for n in (*shape, start, end))
    except (KeyError, TypeError, ValueError):
        good = False
    if not good:
        raise CheckpointError(path, f"tensor {name} has a damaged entry", "dtype, shape and data_offsets")
    if kind in _SIZES and end - start != math.prod(shape) * _SIZES[kind]:
        raise CheckpointError(
            path, f"tensor {name} has {end - start} bytes", f"{math.prod(shape) * _SIZES[kind]} for {shape}"
        )
    if start > end or data + end > nbytes:
        raise CheckpointError(
            path,
            f"truncated: {nbytes} bytes",
            f"at least {data + end} for tensor {name}",
            "download it again",
        )
    return _Place(number, kind, tuple(shape), data + start, end - start)
